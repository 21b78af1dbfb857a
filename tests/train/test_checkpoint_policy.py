"""The saves of a run: which are due at its end, their events, and the error for a lost last state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint import SaveOutcome
from megascale.checkpoint.saver import save
from megascale.config import CheckpointConfig
from megascale.core.events import Event
from megascale.core.exit_record import ExitKind, ExitRecord, find_exit_record
from megascale.errors import TrainingError
from megascale.train.checkpoint_policy import CheckpointPolicy
from megascale.train.loop import Trainer
from megascale.train.parking import LeaveAttempt, Parking
from megascale.train.state_retention import StateRetention
from tests.checkpoint.conftest import full_shards, logical_state


class Saves:
    """A checkpointer whose outcomes are given."""

    def __init__(self, folder: Path, loaded_from: str = "nothing") -> None:
        self.folder = folder
        self.loaded_from = loaded_from
        self.outcomes: list[SaveOutcome] = []
        self.saved: list[tuple[int, bool, bool]] = []
        self.has_begun = True
        self.error: TrainingError | None = None
        self.run_ended: bool | None = None

    def save(self, step: int, state: dict[str, Any], *, persist: bool, wait: bool) -> bool:
        self.saved.append((step, persist, wait))
        if self.error is not None:
            raise self.error
        return self.has_begun

    def poll(self) -> list[SaveOutcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def finish(self, run_ended: bool) -> list[SaveOutcome]:
        self.run_ended = run_ended
        return self.poll()


class Lines:
    """A reporter that keeps events and lines."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lines: list[str] = []

    def write_event(self, event: Event, **details: Any) -> None:
        self.events.append((event.value, details))

    def log_line(self, text: str) -> None:
        self.lines.append(text)


def make(folder: Path, loaded_from: str = "nothing", **settings: Any) -> tuple[CheckpointPolicy, Saves, Lines]:
    saves, reporter = Saves(folder, loaded_from), Lines()
    config = CheckpointConfig().model_copy(update=settings)
    return CheckpointPolicy(config, saves, reporter), saves, reporter  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "expected"),
    [("nothing", True), ("storage", False), ("memory", True), ("a peer's memory", True)],
)
def test_a_state_that_storage_lacks_must_be_saved_even_if_no_step_follows(
    tmp_path: Path, source: str, expected: bool
) -> None:
    policy, _, _ = make(tmp_path, source)
    policy.begin(4)
    assert policy.is_due_at_end(4) == expected
    assert policy.is_due_at_end(5)
    assert not make(tmp_path, source, at_end=False)[0].is_due_at_end(5)


def test_a_start_at_step_0_saves_that_state_if_it_ends_there(tmp_path: Path) -> None:
    policy, _, _ = make(tmp_path)
    assert policy.is_due_at_end(0)


def test_what_was_saved_is_not_due_again(tmp_path: Path) -> None:
    policy, saves, reporter = make(tmp_path)
    policy.begin(0)
    assert policy.is_due_at_end(0)
    policy.save(3, {}, persist=True, wait=False)
    assert [policy.is_due_at_end(step) for step in (3, 4)] == [False, True]
    policy.save(5, {}, persist=False, wait=False)  # in memory only
    assert policy.is_due_at_end(5)
    saves.has_begun = False
    policy.save(6, {}, persist=True, wait=True)
    assert policy.is_due_at_end(6)
    policy.save(7, {}, persist=False, wait=False)
    policy.save(8, {}, persist=True, wait=False)
    assert [step for step, _, _ in saves.saved] == [3, 5, 6, 7, 8]
    assert reporter.events == [
        (
            "checkpoint_skipped",
            {"step": 6, "message": "a process cannot use its staging memory; the log of its rank has the cause"},
        ),
        ("checkpoint_skipped", {"step": 8, "message": "the save before it is still being written"}),
    ]


def test_a_rank_that_leaves_after_a_step_copies_it_if_the_save_was_skipped(tmp_path: Path) -> None:
    policy, saves, _ = make(tmp_path)
    trainer = Trainer.__new__(Trainer)
    trainer.checkpoint_policy = policy
    trainer.parking = Parking.__new__(Parking)
    trainer.engine = trainer.checkpointer = None  # type: ignore[assignment]
    trainer.retention = StateRetention.__new__(StateRetention)
    trainer.retention.can_keep = lambda *_: False  # type: ignore[method-assign]

    def save_state(persist: bool) -> None:
        saves.has_begun = len(saves.saved) == 3
        policy.save(trainer.step, {}, persist=persist, wait=False)

    trainer._save = save_state  # type: ignore[method-assign, assignment]
    for step, has_begun in enumerate((True, False), 1):
        saves.has_begun = has_begun
        trainer.step = step
        policy.save(step, {}, persist=False, wait=False)
        with pytest.raises(LeaveAttempt):
            trainer._leave_after_step()
    assert [step for step, _, _ in saves.saved] == [1, 2, 2, 2]  # the second save of step 2 was skipped too


def test_a_save_that_fails_at_once_is_reported_and_raised(tmp_path: Path) -> None:
    policy, saves, reporter = make(tmp_path)
    saves.error = TrainingError("no room")
    with pytest.raises(TrainingError, match="no room"):
        policy.save(3, {}, persist=True, wait=False)
    assert reporter.events == [("checkpoint_failed", {"step": 3, "message": "no room"})]
    assert policy.is_due_at_end(3)


def test_each_outcome_has_its_events(tmp_path: Path) -> None:
    policy, saves, reporter = make(tmp_path, memory_interval=1)
    saves.outcomes = [
        SaveOutcome(1, reason="lost", replica=None),
        SaveOutcome(2, replica="peer is gone", seconds=1.5),
        SaveOutcome(3, bytes=8, stall=0.25, seconds=0.5),
        SaveOutcome(4, True, bytes=9, stall=0.5, seconds=2.0),
    ]
    policy.poll()
    assert reporter.events == [
        ("checkpoint_failed", {"step": 1, "message": "lost"}),
        ("replica_failed", {"step": 2, "message": "peer is gone"}),
        ("first_snapshot", {"step": 3, "seconds": 0.5, "bytes": 8}),
        ("checkpoint_saved", {"step": 4, "path": "step-4", "stall": 0.5, "seconds": 2.0, "bytes": 9}),
    ]
    assert reporter.lines == ["the checkpoint of step 1 failed: lost; no checkpoint had been saved yet"]
    saves.outcomes = [SaveOutcome(5)]
    policy.poll()
    assert len(reporter.events) == 4  # only the first snapshot is an event
    without, saves, reporter = make(tmp_path, memory_interval=0)
    saves.outcomes = [SaveOutcome(3)]
    without.poll()
    assert reporter.events == []


@pytest.mark.parametrize("at_end", [False, True])
def test_a_run_must_not_end_as_if_its_last_state_were_saved(tmp_path: Path, at_end: bool) -> None:
    save(tmp_path, 2, full_shards(logical_state()), {}, keep=1)
    policy, saves, _ = make(tmp_path, at_end=at_end)
    assert policy.latest() == 2
    policy.save(4, {}, persist=True, wait=True)
    saves.outcomes = [SaveOutcome(3, reason="lost"), SaveOutcome(4, True)]
    policy.finish(4)
    assert saves.run_ended == at_end
    saves.outcomes = [SaveOutcome(4, reason="no answer", record=ExitRecord(ExitKind.LOST_PEER, subject="x"))]
    expected = "the checkpoint of the last step, 4, failed: no answer; the checkpoint of step 2 is kept. Remove"
    with pytest.raises(TrainingError, match=expected) as error:
        policy.finish(4)
    assert find_exit_record(error.value).kind is not ExitKind.DISK_FULL
    saves.outcomes = [SaveOutcome(4, reason="full", record=ExitRecord(ExitKind.DISK_FULL, subject="/a"))]
    with pytest.raises(TrainingError) as error:
        policy.finish(4)
    assert find_exit_record(error.value) == ExitRecord(ExitKind.DISK_FULL, subject="/a")


def test_a_last_save_whose_failure_was_reported_before_the_end_is_no_success(tmp_path: Path) -> None:
    policy, saves, reporter = make(tmp_path)
    saves.outcomes = [SaveOutcome(4, reason="no answer")]
    policy.save(4, {}, persist=True, wait=True)  # reports the failure
    with pytest.raises(TrainingError, match="the checkpoint of the last step, 4, failed: no answer"):
        policy.finish(4)
    assert len(reporter.lines) == 1
    # A later save of the same step succeeded. Only the first process knows of the commit.
    for committed in (True, False):
        saves.outcomes = [SaveOutcome(4, reason="no answer")]
        policy.poll()
        saves.outcomes = [SaveOutcome(4, committed)]
        policy.finish(4)


def test_a_last_save_that_did_not_begin_is_no_success(tmp_path: Path) -> None:
    policy, saves, _ = make(tmp_path)
    policy.begin(0)
    saves.has_begun = False
    policy.save(4, {}, persist=True, wait=True)
    with pytest.raises(TrainingError, match="step, 4, failed: its save did not begin; no checkpoint had been saved"):
        policy.finish(4)
    make(tmp_path, at_end=False)[0].finish(4)
