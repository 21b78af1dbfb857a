"""A checkpointer in the foreground: when a state is due, what it reports, and what a load finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megascale.checkpoint.checkpointer import Checkpointer, StoredState
from megascale.checkpoint.chunk_source import LoadReport
from megascale.checkpoint.format.step_folders import is_marked_damaged, list_commits, read_identity, steps
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import CheckpointConfig
from megascale.errors import DataError
from tests.checkpoint.conftest import assert_same, blank, full_shards, logical_state


def make(run: Path, seed: int = 0, **settings: object) -> Checkpointer:
    return Checkpointer(CheckpointConfig(**settings), run, full_shards(logical_state(seed)))


@pytest.mark.parametrize(
    ("interval", "memory_interval", "expected"),
    [
        (4, 2, [None, "memory", None, "storage", None, "memory", None, "storage"]),
        (3, 0, [None, None, "storage", None, None, "storage", None, None]),
        (0, 3, [None, None, "memory", None, None, "memory", None, None]),
        (0, 0, [None] * 8),
        (1, 1, ["storage"] * 8),
    ],
)
def test_a_state_is_due_at_its_intervals(
    tmp_path: Path, interval: int, memory_interval: int, expected: list[str | None]
) -> None:
    settings = {"interval": interval, "memory_interval": memory_interval}
    checkpointer = make(tmp_path)
    checkpointer.config = checkpointer.config.model_copy(update=settings)
    assert [checkpointer.choose_save_target(step) for step in range(1, 9)] == expected
    assert checkpointer.choose_save_target(5, last=True) == "storage"
    checkpointer._saves_first_step = True
    assert checkpointer.choose_save_target(1) == "storage"
    without_end = settings | {"at_end": False}
    checkpointer.config = checkpointer.config.model_copy(update=without_end)
    assert (checkpointer.choose_save_target(1) == "storage") == (interval > 0)


def test_a_state_of_running_ranks_is_saved_once_in_the_foreground(tmp_path: Path) -> None:
    """Before the first commit of a run, ranks that stay have the newest state. The next save is due at its interval."""
    live = replace(make(tmp_path).keep_state(attempt=1), step=50, state={"step": 50})
    checkpointer = make(tmp_path, interval=100)
    assert checkpointer.load(live=live) == {"step": 50}
    assert checkpointer.loaded_from == "running ranks"
    assert checkpointer.choose_save_target(51) == "storage"
    assert checkpointer.save(51, {"step": 51})
    assert [checkpointer.choose_save_target(step) for step in (52, 100)] == [None, "storage"]


def test_a_save_in_the_foreground_is_reported_once(tmp_path: Path) -> None:
    checkpointer = make(tmp_path, keep=2)
    assert checkpointer.poll() == []
    for step in (3, 4):
        assert checkpointer.save(step, {"step": step})
    first, second = checkpointer.poll()
    assert (first.step, second.step, first.committed, first.reason, first.replica) == (3, 4, True, "", None)
    assert 0 < first.stall == first.seconds < 60
    [commit, _] = list_commits(open_storage(checkpointer.folder))[0]
    data_bytes = sum(t.numel() * t.element_size() for t in logical_state().values())
    assert data_bytes <= second.bytes <= commit.size
    assert checkpointer.poll() == []
    checkpointer.save(5, {})
    assert [outcome.step for outcome in checkpointer.finish()] == [5]
    assert checkpointer.poll() == []
    assert steps(checkpointer.folder) == [4, 5]


def test_a_load_names_its_source_and_returns_the_state(tmp_path: Path) -> None:
    assert make(tmp_path).load() is None
    writer = make(tmp_path, seed=1)
    for step in (3, 4):
        writer.save(step, {"step": step})
    values = blank(logical_state())
    reader = Checkpointer(CheckpointConfig(), tmp_path, full_shards(values))
    report = LoadReport()
    assert reader.loaded_from == "nothing"
    assert reader.load(report=report) == {"step": 4}
    assert reader.loaded_from == "storage"
    assert_same(values, logical_state(1))
    assert report.skipped_commits == []
    assert reader.load(step=3) == {"step": 3}
    with pytest.raises(DataError, match=r"step-7|step 7"):
        reader.load(step=7)


def test_only_the_given_shards_are_filled(tmp_path: Path) -> None:
    """All shards must hold the whole saved model; some of them need not."""
    make(tmp_path, seed=1).save(3, {})
    values = blank(logical_state())
    part = full_shards(values)[:1]
    assert make(tmp_path).load(shards=part) == {}
    changed = {name for name, value in values.items() if value.any()}
    assert changed == {"model.embedding.weight"}
    with pytest.raises(DataError):
        Checkpointer(CheckpointConfig(), tmp_path, part).load()


def test_a_location_replaces_the_folder_of_the_run(tmp_path: Path) -> None:
    location = str(tmp_path / "elsewhere")
    make(tmp_path / "run", location=location).save(3, {})
    assert steps(location) == [3]
    assert not (tmp_path / "run").exists()


def test_commits_that_were_passed_over_are_marked_once_the_run_goes_on(tmp_path: Path) -> None:
    writer = make(tmp_path)
    for step in (3, 4):
        writer.save(step, {"step": step})
    folder = tmp_path / "checkpoints" / "step-4"
    data_file = next(path for path in folder.iterdir() if path.suffix == ".distcp")
    data_file.write_bytes(b"x" * data_file.stat().st_size)
    reader = make(tmp_path)
    assert reader.load() == {"step": 3}
    storage = open_storage(reader.folder)
    [damaged, sound] = list_commits(storage)[0]
    assert not is_marked_damaged(storage, damaged)
    identity = read_identity(storage, create=True)
    reader.confirm_load()
    assert is_marked_damaged(storage, damaged)
    assert not is_marked_damaged(storage, sound)
    assert read_identity(storage) == identity


def test_a_run_that_found_nothing_renews_the_identity(tmp_path: Path) -> None:
    checkpointer = make(tmp_path)
    storage = open_storage(checkpointer.folder)
    checkpointer.confirm_load()
    assert read_identity(storage) == ""  # there was none to renew
    identity = read_identity(storage, create=True)
    checkpointer.confirm_load()
    assert read_identity(storage) not in ("", identity)


@pytest.mark.parametrize(
    ("newest_commit", "stored_step", "settings", "expected"),
    [
        (7, 20, {"interval": 100}, "storage"),
        (8, 40, {"interval": 100}, None),
        (7, 20, {"interval": 100, "memory_wait": True, "memory_interval": 1}, "memory"),
        (7, 20, {"interval": 20, "memory_wait": True, "memory_interval": 1}, "storage"),  # step 40 was due
        (7, 40, {"interval": 20, "memory_wait": True, "memory_interval": 1}, "memory"),
        (7, 60, {"interval": 20, "memory_wait": True, "memory_interval": 1}, "storage"),  # step 60 was taken back
        (0, 0, {"interval": 100, "memory_wait": True, "memory_interval": 1}, "memory"),
        (0, 0, {"interval": 10, "memory_wait": True, "memory_interval": 1}, "storage"),
    ],
)
def test_a_state_that_storage_has_too_is_not_saved_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    newest_commit: int,
    stored_step: int,
    settings: dict[str, Any],
    expected: str | None,
) -> None:
    """The first step after a start from memory is saved to storage only if the state is nowhere else.

    With memory_wait, steps would wait until it is written, so only a missing due save is made up for.
    """
    save = SimpleNamespace(sequence=8, generation="00000008-aa", step=40, replicas=False, is_complete=True)
    monkeypatch.setattr("megascale.checkpoint.checkpointer.list_memory_saves", lambda *arguments: [save])
    monkeypatch.setattr(
        "megascale.checkpoint.checkpointer.load_memory_save", lambda *arguments, **options: {"step": 40}
    )
    monkeypatch.setattr(
        "megascale.checkpoint.checkpointer.service.connect_checkpoint_service",
        lambda *arguments: SimpleNamespace(close=list),
    )
    checkpointer = make(tmp_path)
    checkpointer.config = checkpointer.config.model_copy(update={"memory_interval": 0, "background": True} | settings)
    report = LoadReport()
    state = checkpointer._load_from_memory(
        StoredState(newest_commit, "identity", stored_step),
        step=None,
        shards=[],
        report=report,
        accept=None,
        covers_model=True,
        live=None,
    )
    assert state == {"step": 40}
    assert checkpointer.choose_save_target(41) == expected
