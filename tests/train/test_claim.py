"""A start before the run folder is its own: how long it waits for locks, and what it leaves if it is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megascale.config import Config, from_tree
from megascale.core import run_lock
from megascale.core.events import Event
from megascale.core.status import StatusFile, read_status
from megascale.train.claim import record_refusal, take_run_locks, write_failed_status
from megascale.train.run_folder import RunFolder
from tests.conftest import lines


def configure(runs: Path, **sections: object) -> Config:
    return from_tree({"train": {"runs": str(runs), "name": "a"}, **sections})


@pytest.mark.parametrize(
    ("node", "timeout", "grace_period"),
    [(None, 20.0, run_lock.GRACE_PERIOD), ("n1", 20.0, 10.0), ("n1", 600.0, 60.0)],
)
def test_a_start_waits_for_the_ranks_of_an_older_attempt(tmp_path, monkeypatch, node, timeout, grace_period):
    """A driver's start waits half the time that rendezvous has, at most a minute."""
    waits: list[float] = []
    take = run_lock.acquire_trainer_lock

    def note(folder: Path, subject: str, grace_period: float) -> run_lock.RunLock:
        waits.append(grace_period)
        return take(folder, subject, grace_period)

    monkeypatch.setattr(run_lock, "acquire_trainer_lock", note)
    monkeypatch.delenv("MEGASCALE_NODE", raising=False)
    if node is not None:
        monkeypatch.setenv("MEGASCALE_NODE", node)
    shared = tmp_path / "shared"
    config = configure(tmp_path, rendezvous={"timeout": timeout}, checkpoint={"location": str(shared)})
    locks = take_run_locks(config)
    assert waits == [grace_period] * 2
    for folder in (tmp_path / "a", shared):
        assert (folder / run_lock.TRAINER_LOCK).exists()
    for lock in locks:
        lock.release()


def test_a_claim_that_fails_holds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "GRACE_PERIOD", 0.0)
    shared = tmp_path / "shared"
    config = configure(tmp_path, checkpoint={"location": str(shared)})
    # The folder of checkpoints is tried last: by then the run's own lock is held.
    with run_lock.acquire_trainer_lock(shared, "another"), pytest.raises(run_lock.RunBusyError, match="another"):
        take_run_locks(config)
    for lock in take_run_locks(config):
        lock.release()


@pytest.mark.parametrize("rank", ["0", "1", "not a number"])
def test_a_refusal_is_told_in_a_folder_that_is_free(tmp_path, monkeypatch, rank):
    """Rank 0 writes the event; each rank its own status."""
    monkeypatch.setenv("RANK", rank)
    config = configure(tmp_path)
    record_refusal(config, "refused")
    assert not (tmp_path / "a").exists()
    folder = RunFolder(config.run_folder)
    folder.create()
    record_refusal(config, "refused")
    if rank == "0":
        [event] = lines(folder.events)
        assert (event["event"], event["step"], event["message"]) == (Event.RUN_FAILED.value, 0, "refused")
    else:
        assert not folder.events.exists()
    status = read_status(folder.status / f"rank-{rank}.status")
    if rank.isdecimal():
        assert status is not None
        assert (status.phase, status.step, status.message) == ("failed", 0, "refused")
    else:
        assert status is None
    run_lock.acquire_trainer_lock(folder.path, "the next", 0.0).release()  # nothing is held


def test_a_refusal_is_not_told_where_another_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    config = configure(tmp_path)
    folder = RunFolder(config.run_folder)
    folder.create()
    with run_lock.acquire_trainer_lock(folder.path, "another"):
        record_refusal(config, "refused")
    assert not folder.events.exists()
    assert not list(folder.status.iterdir())


@pytest.mark.parametrize(
    ("pid", "phase", "retained"), [(1, "train", True), (2**22 + 1, "train", False), (1, "done", False)]
)
def test_the_status_of_a_rank_that_lives_is_left_alone(tmp_path, monkeypatch, pid, phase, retained):
    folder = RunFolder(tmp_path)
    write_failed_status(folder, 0, False, "refused")
    assert not folder.status.exists()
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: pid)
        status = StatusFile(folder.status, 0)
        status.update(phase, 3)
        status.close()
    write_failed_status(folder, 0, False, "refused")
    last = read_status(folder.status / "rank-0.status")
    assert last is not None
    assert last.phase == (phase if retained else "failed")


def test_events_are_for_their_owner_alone(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_event(Event.RUN_FAILED, step=0)
    assert folder.events.stat().st_mode & 0o777 == 0o600
