"""Records of a step: ledger, metrics, evaluation and the count of the step belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megascale.api import load_config, train
from megascale.core.exit_record import ExitKind, attach_record
from megascale.core.status import read_status
from megascale.errors import TrainingError
from megascale.observe.metrics import JsonLines
from megascale.train import evaluation_policy, loop
from megascale.train.engine import Engine
from megascale.train.run_folder import RunFolder
from megascale.train.step_records import PendingStep, StepRecords
from tests.conftest import lines


def list_steps(file: Path, key: str) -> list[int]:
    return [record["step"] for record in lines(file) if key in record]


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[loop.Trainer]:
    """The trainers that are made."""
    made: list[loop.Trainer] = []
    original = loop.Trainer.__init__

    def remember(trainer: loop.Trainer, *arguments: Any, **options: Any) -> None:
        original(trainer, *arguments, **options)
        made.append(trainer)

    monkeypatch.setattr(loop.Trainer, "__init__", remember)
    return made


def lose_peer() -> None:
    raise attach_record(TrainingError("rank 1 has left"), ExitKind.LOST_PEER)


def test_a_step_that_ends_before_its_metrics_is_neither_in_the_ledger_nor_counted(
    tiny, tmp_path, trainers, monkeypatch
):
    """Ranks that keep their state go on after a counted step, whose metrics no later attempt writes."""
    complete = StepRecords.complete

    def fail(records: StepRecords, pending: PendingStep, *arguments: Any, **options: Any) -> None:
        if pending.step == 3:
            lose_peer()
        complete(records, pending, *arguments, **options)

    monkeypatch.setattr(StepRecords, "complete", fail)
    with pytest.raises(TrainingError, match="rank 1 has left"):
        train(load_config(tiny, ["--train.steps=4"]))
    run = tmp_path / "runs" / "tiny"
    assert list_steps(run / "metrics.jsonl", "loss") == [1, 2]
    assert list_steps(run / "samples" / "ledger.jsonl", "ids") == [1, 2]
    assert trainers[0]._describe_state()["step"] == 2


def test_an_evaluation_that_a_lost_peer_ends_is_repeated(tiny, tmp_path, trainers, monkeypatch):
    """The state after the step is complete, so the next attempt does not train the step again."""
    settings = ["--train.steps=5", "--train.eval_interval=2", "--checkpoint.interval=0"]
    with monkeypatch.context() as patch:
        patch.setattr(evaluation_policy, "evaluate_file", lambda *_, **__: lose_peer())
        with pytest.raises(TrainingError, match="rank 1 has left"):
            train(load_config(tiny, settings))
    state = trainers[0]._describe_state()
    assert (state["step"], state["awaits_evaluation"]) == (2, True)
    # A start from such a state: step 2 is saved without its evaluation.
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_evaluate", lambda *_, **__: None)
        train(load_config(tiny, [*settings, "--train.stop_after=2", "--train.name=again"]))
    start_times: list[float | None] = []
    is_ready: list[bool] = []
    phases: list[str] = []
    evaluate = evaluation_policy.evaluate_file

    def evaluate_and_note(*arguments: Any, **options: Any) -> Any:
        start_times.append(trainers[-1].first_steps.start_time)
        is_ready.append(trainers[-1].status.start.state_ns > 0)
        status = read_status(tmp_path / "runs" / "again" / "status" / "rank-0.status")
        assert status is not None
        phases.append(status.phase)
        return evaluate(*arguments, **options)

    monkeypatch.setattr(evaluation_policy, "evaluate_file", evaluate_and_note)
    train(load_config(tiny, [*settings, "--train.name=again"]))
    assert start_times[0] is None  # the log's time of the first step does not contain the repeated evaluation
    # The record of a recovery counts the repeated evaluation in the phase before the first step.
    assert (is_ready[0], set(is_ready[1:])) == (False, {True})
    # The driver concludes from "evaluate" that the start has completed a step.
    assert (phases[0], set(phases[1:])) == ("load", {"evaluate"})
    metrics = tmp_path / "runs" / "again" / "metrics.jsonl"
    assert list_steps(metrics, "loss") == [1, 2, 3, 4, 5]
    assert list_steps(metrics, "valid_loss") == [2, 4, 5]
    assert "awaits_evaluation" not in trainers[-1]._describe_state()


def test_metrics_are_written_to_the_present_file(tmp_path):
    """Rank 0 of another start may shorten the file meanwhile, by a new file of the same name."""
    folder = RunFolder(tmp_path)
    folder.create()
    sink = JsonLines(folder.metrics)
    for step in (1, 2):
        sink.write({"step": step, "loss": 1.0})
    folder.drop_steps_after(1)
    sink.write({"step": 2, "loss": 2.0})
    sink.close()
    assert lines(folder.metrics) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


def test_a_file_without_later_steps_is_not_replaced(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create()
    JsonLines(folder.metrics).write({"step": 1, "loss": 1.0})
    inode = folder.metrics.stat().st_ino
    folder.drop_steps_after(1)
    assert folder.metrics.stat().st_ino == inode
    with open(folder.metrics, "a") as file:
        file.write('{"step": 2, "lo')
    folder.drop_steps_after(1)
    assert lines(folder.metrics) == [{"step": 1, "loss": 1.0}]


def test_the_memory_of_a_step_includes_the_exchanges_between_gpus(tiny, tmp_path, monkeypatch):
    """Their memory is not torch's, so its statistics lack it."""
    monkeypatch.setattr(Engine, "count_exchange_bytes", lambda engine: 1 << 40)
    train(load_config(tiny, ["--train.steps=1"]))
    (record,) = [record for record in lines(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss" in record]
    assert 1024 < record["memory_gib"] < 2048
