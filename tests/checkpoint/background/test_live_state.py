"""State that processes have kept fills the shards of the next attempt; a copy in memory completes it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.checkpoint import Checkpointer, LoadReport, find_stored_state, live_state
from megascale.checkpoint.background.snapshot import Snapshots
from megascale.checkpoint.live_state import LiveState
from megascale.errors import DataError, TrainingError
from tests.checkpoint.background.conftest import background, large_state, service_pid
from tests.checkpoint.conftest import assert_same, blank, cut, logical_state, run_group

SAVED_STEP = 5
LOST_RANK = 1
LIMIT = 30.0  # seconds, far above what a loaded machine needs


def save_and_leave(rank: int, size: int, run: Path, tensors: dict[str, torch.Tensor] | None = None) -> LiveState:
    """Copy a state to memory on all ranks, leave the attempt, and return what this process keeps of it."""
    shards = cut(tensors or logical_state(SAVED_STEP), "flat", rank, size)
    checkpointer = Checkpointer(background(memory_interval=1), run, shards)
    assert checkpointer.save(SAVED_STEP, {"step": SAVED_STEP, "samples": 40}, persist=False, wait=True)
    checkpointer.before_update()
    live = checkpointer.keep_state(attempt=1)
    checkpointer.leave()
    return live


def load(
    run: Path, live: LiveState, size: int, rank: int
) -> tuple[Checkpointer, dict[str, Any] | None, dict[str, torch.Tensor], LoadReport]:
    """Load into blank shards."""
    tensors = blank(logical_state())
    checkpointer = Checkpointer(background(memory_interval=1), run, cut(tensors, "flat", rank, size))
    report = LoadReport()
    state = checkpointer.load(live=live, report=report)
    return checkpointer, state, tensors, report


def check_own_shards(tensors: dict[str, torch.Tensor], seed: int, rank: int, size: int) -> None:
    loaded = cut(tensors, "flat", rank, size)
    for own, expected in zip(loaded, cut(logical_state(seed), "flat", rank, size), strict=True):
        assert torch.equal(own.tensor, expected.tensor), own


def _join(rank: int, size: int, run: Path, kept_as: str) -> Any:
    """The last rank joins the others, which have kept step 9 between them and saved nothing."""
    live = LiveState()
    kept = logical_state(9)
    if rank < size - 1:
        shards = cut(kept, kept_as, rank, size - 1)
        live = LiveState(attempt=3, step=9, shards=shards, state={"step": 9} if rank == 0 else None)
    checkpointer, state, tensors, report = load(run, live, size, rank)
    check_own_shards(tensors, 9, rank, size)
    assert_same(kept, logical_state(9))
    assert report.read_bytes == 0
    return state, checkpointer.loaded_from, checkpointer.is_standing


@pytest.mark.parametrize("kept_as", ["flat", "rows", "replicas"])
def test_a_process_that_joins_receives_its_shards_from_the_others(run: Path, kept_as: str) -> None:
    results = run_group(4, _join, run, kept_as)
    assert results == [({"step": 9}, "running ranks", False)] * 4


def test_a_process_that_waits_rehearses_a_load() -> None:
    assert live_state.rehearse_live_load()


def _load_in_short_turns(rank: int, size: int, run: Path, fails: bool) -> Any:
    """Return the seconds of a thread's turn with the interpreter's lock in a load, and whether they are restored."""
    live = LiveState(attempt=3, step=9, shards=cut(logical_state(9), "flat", rank, size), state={"step": 9})
    checkpointer = Checkpointer(background(memory_interval=1), run, cut(blank(logical_state()), "rows", rank, size))
    earlier_interval = sys.getswitchinterval()
    intervals: list[float] = []

    def accept(_state: Any, _name: str) -> bool:
        intervals.append(sys.getswitchinterval())
        if fails:
            raise DataError("the run must not continue from this state")
        return False

    with pytest.raises(DataError) if fails else contextlib.nullcontext():
        checkpointer.load(live=live, accept=accept)
    return intervals, sys.getswitchinterval() == earlier_interval


@pytest.mark.parametrize("fails", [False, True])
def test_threads_exchange_the_interpreter_often_during_a_load(run: Path, fails: bool) -> None:
    for intervals, is_restored in run_group(2, _load_in_short_turns, run, fails):
        assert intervals == [pytest.approx(0.0002)]
        assert is_restored


def _join_with_a_side_group(rank: int, size: int, run: Path, fails: bool) -> Any:
    """Join as in `_join`. The exchange of shards waits until the staging memory is ready, or has failed."""
    live = LiveState()
    kept = logical_state(9)
    if rank < size - 1:
        shards = cut(kept, "flat", rank, size - 1)
        live = LiveState(attempt=3, step=9, shards=shards, state={"step": 9} if rank == 0 else None)
    side_group = dist.new_group(list(range(size)))
    tensors = blank(logical_state())
    checkpointer = Checkpointer(
        background(memory_interval=1), run, cut(tensors, "flat", rank, size), side_group=side_group
    )
    fill = live_state._fill_from_processes

    def fill_after_staging(*arguments: Any) -> None:
        assert checkpointer._staging_thread is not None
        checkpointer._staging_thread.join(LIMIT)
        assert not checkpointer._staging_thread.is_alive()
        fill(*arguments)

    def fail(snapshots: Snapshots) -> None:
        raise TrainingError(f"rank {rank} has no memory")

    live_state._fill_from_processes = fill_after_staging
    if fails:
        Snapshots.open = fail  # type: ignore[method-assign]
    stored = find_stored_state(checkpointer.config, run, checkpointer.peers)
    checkpointer.load(live=live, stored=stored)
    check_own_shards(tensors, 9, rank, size)
    parts = checkpointer.staging_parts
    try:
        checkpointer.prepare()
    except TrainingError as error:
        checkpointer.leave()
        return str(error)
    assert checkpointer.staging_parts == parts
    assert checkpointer.save(10, {"step": 10}, persist=False, wait=True)
    checkpointer.before_update()
    checkpointer.leave()
    return parts.split(" ")[0]


@pytest.mark.parametrize("fails", [False, True])
def test_staging_memory_is_prepared_during_the_exchange_of_shards(run: Path, fails: bool) -> None:
    results = run_group(3, _join_with_a_side_group, run, fails)
    if fails:
        assert results == [f"rank {rank} has no memory" for rank in range(3)]
    else:
        assert results == ["plan"] * 3


def _go_on_without(rank: int, size: int, run: Path) -> Any:
    """Ranks other than LOST_RANK take over its shards. Only these come from the copy in memory."""
    # Ranges of a file that are closer than 64 KB are read together, so this state is larger.
    live = replace(save_and_leave(rank, size, run, large_state(1)), step=SAVED_STEP, is_in_place=False)
    survivors = [other for other in range(size) if other != LOST_RANK]
    group = dist.new_group(survivors)
    if rank == LOST_RANK:
        return None
    new_rank = survivors.index(rank)
    tensors = blank(large_state(1))
    shards = cut(tensors, "flat", new_rank, len(survivors))
    report = LoadReport()
    checkpointer = Checkpointer(background(memory_interval=1), run, shards, group=group)
    state = checkpointer.load(live=live, report=report)
    for own, expected in zip(shards, cut(large_state(1), "flat", new_rank, len(survivors)), strict=True):
        assert torch.equal(own.tensor, expected.tensor), own
    return state, checkpointer.loaded_from, report.read_bytes


def test_only_the_lost_shards_are_read_from_memory(run: Path) -> None:
    results = run_group(4, _go_on_without, run)
    kept = [result for result in results if result is not None]
    assert [(state, source) for state, source, _ in kept] == [
        ({"step": SAVED_STEP, "samples": 40}, "running ranks and memory")
    ] * 3
    lost_bytes = sum(shard.tensor.nbytes for shard in cut(large_state(1), "flat", LOST_RANK, 4))
    assert 0 < sum(read_bytes for *_, read_bytes in kept) <= lost_bytes


def _replace(rank: int, size: int, run: Path) -> Any:
    """The shards of the survivors stay as they are; a new process takes the place of LOST_RANK."""
    live = replace(save_and_leave(rank, size, run), step=SAVED_STEP)
    tensors = {name: tensor.clone() for name, tensor in logical_state(SAVED_STEP).items()}
    shards = cut(tensors, "flat", rank, size)
    if rank == LOST_RANK:
        live = LiveState()
        for shard in shards:
            shard.tensor.zero_()
    live = replace(live, shards=shards if live.step >= 0 else ())
    report = LoadReport()
    checkpointer = Checkpointer(background(memory_interval=1), run, shards)
    state = checkpointer.load(live=live, report=report)
    check_own_shards(tensors, SAVED_STEP, rank, size)
    return state is not None, checkpointer.loaded_from, checkpointer.is_standing, report.sent_bytes


def test_survivors_with_the_same_shards_load_nothing(run: Path) -> None:
    results = run_group(3, _replace, run)
    assert [result[:2] for result in results] == [(True, "running ranks and memory")] * 3
    assert [is_standing for _, _, is_standing, _ in results] == [rank != LOST_RANK for rank in range(3)]


def _load_with(rank: int, size: int, run: Path, changes: dict[int, dict[str, Any]]) -> Any:
    """Load with what all ranks but LOST_RANK have kept, changed per rank; return step, source and a kept value."""
    live = replace(save_and_leave(rank, size, run), step=SAVED_STEP, is_in_place=False)
    live = replace(live, **changes.get(rank, {}))
    if rank == LOST_RANK:
        live = LiveState()
    checkpointer, state, tensors, _ = load(run, live, size, rank)
    check_own_shards(tensors, SAVED_STEP, rank, size)
    assert state is not None
    return state["step"], checkpointer.loaded_from


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({}, "running ranks and memory"),
        # A rank is one step ahead, so that its part comes from memory too.
        ({0: {"step": SAVED_STEP + 1}}, "running ranks and memory"),
        # Nobody has the step of the copy.
        ({0: {"step": SAVED_STEP + 1}, 2: {"step": SAVED_STEP + 1}}, "memory"),
        ({0: {"step": SAVED_STEP - 1}, 2: {"step": SAVED_STEP - 1}}, "memory"),
        # An update was interrupted.
        ({0: {"step": -1}, 2: {"step": -1}}, "memory"),
        # Another attempt saved the copy, which may differ in its last bits.
        ({rank: {"generation": "00000001-other"} for rank in (0, 2)}, "memory"),
        # The copy is of a later attempt.
        ({rank: {"last_sequence": 0} for rank in (0, 2)}, "memory"),
    ],
)
def test_kept_state_is_used_only_if_the_copy_completes_it(run: Path, changes: dict[int, Any], source: str) -> None:
    assert run_group(3, _load_with, run, changes) == [(SAVED_STEP, source)] * 3


def _leave_while_storage_is_newer(rank: int, size: int, run: Path) -> Any:
    live = LiveState(attempt=1, step=2, shards=cut(logical_state(2), "flat", rank, size), state={"step": 2})
    first = Checkpointer(background(), run, cut(logical_state(8), "flat", rank, size))
    first.save(8, {"step": 8}, wait=True)
    first.finish(run_ended=False)
    checkpointer, state, tensors, _ = load(run, live, size, rank)
    check_own_shards(tensors, 8, rank, size)
    return state, checkpointer.loaded_from


def test_a_newer_checkpoint_is_preferred_to_kept_state(run: Path) -> None:
    assert run_group(2, _leave_while_storage_is_newer, run) == [({"step": 8}, "memory")] * 2


def _go_on_with_an_incomplete_copy(rank: int, size: int, run: Path, lost_rank: int) -> Any:
    """Of the step that the survivors have, memory has the snapshot of the lost rank only."""
    host = run / f"host-{rank}"
    config = background(memory_interval=1, location=str(run / "checkpoints"))
    checkpointer = Checkpointer(config, host, cut(logical_state(SAVED_STEP), "flat", rank, size))
    state = {"step": SAVED_STEP}
    assert checkpointer.save(SAVED_STEP, state, persist=False, wait=True)
    checkpointer.before_update()
    live = checkpointer.keep_state(attempt=1)
    checkpointer.leave()
    dist.barrier()
    if rank != lost_rank:
        os.kill(service_pid(host), signal.SIGKILL)
    live = replace(live, step=SAVED_STEP, is_in_place=False, state=state if rank == 0 else None)
    if rank == lost_rank:
        live = LiveState()
    tensors = blank(logical_state())
    second = Checkpointer(config, host, cut(tensors, "flat", rank, size))
    loaded = second.load(live=live)
    if loaded is not None:
        check_own_shards(tensors, SAVED_STEP, rank, size)
    return loaded, second.loaded_from


@pytest.mark.parametrize("lost_rank", [0, 1])
def test_a_copy_needs_only_the_lost_ranks_snapshot(run: Path, lost_rank: int) -> None:
    for rank in range(3):
        (run / f"host-{rank}").mkdir()
    results = run_group(3, _go_on_with_an_incomplete_copy, run, lost_rank)
    assert results == [({"step": SAVED_STEP}, "running ranks and memory")] * 3
