"""Staging memory: when it is in place, when a save may use it, which snapshot is given up for another."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megascale.checkpoint import Checkpointer, end_unused_service
from megascale.checkpoint.background import early_slots, service, service_protocol, snapshot, staging
from megascale.checkpoint.background.early_slots import EarlySlots, prepare_slots
from megascale.checkpoint.background.service import CheckpointService, connect_checkpoint_service
from megascale.checkpoint.background.service_protocol import (
    FROM_SERVICE,
    TO_SERVICE,
    Allocate,
    AwaitPages,
    InvalidateSlot,
    ListSnapshots,
    OpenSnapshot,
    PagesReady,
    StageSnapshot,
)
from megascale.checkpoint.background.staging import StagingSlot, make_rank_index
from megascale.checkpoint.copies import ShardCopier
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.write_plan import make_offer, make_plan
from megascale.checkpoint.saver import get_dtype_name
from megascale.checkpoint.storage.base import PAGE
from megascale.errors import DataError, FitError
from megascale.services.conversation import Conversation, read_peer_credentials
from tests.checkpoint.background.conftest import await_other, background, large_state, service_pid
from tests.checkpoint.background.test_pages import resident
from tests.checkpoint.conftest import assert_same, blank, cut, full_shards, logical_state, run_group

NOTHING = CheckpointIndex.make_empty()


def test_a_save_is_skipped_while_memory_is_in_use(run: Path) -> None:
    checkpointer = Checkpointer(background(), run, full_shards(large_state(1)))
    begun = [checkpointer.save(step, {}) for step in range(1, 6)]
    outcomes = checkpointer.finish()
    assert begun[0]
    assert len(outcomes) == sum(begun)
    assert all(o.committed for o in outcomes)
    assert not all(begun), "five saves of 33 MB began within their own copying"


def test_with_memory_wait_no_copy_is_skipped_and_the_one_before_is_whole(run: Path) -> None:
    checkpointer = Checkpointer(background(memory_interval=1, memory_wait=True), run, full_shards(large_state(1)))
    for step in range(1, 6):
        assert checkpointer.save(step, {"step": step}, persist=False)
        assert checkpointer.snapshots is not None
        steps = [slot.generation for slot in checkpointer.snapshots._slots if slot.is_complete]
        # A process that is lost now has the step before. The first two go into empty slots, and wait for nothing.
        assert step <= 2 or steps
        checkpointer.before_update()
    outcomes = checkpointer.finish(run_ended=False)
    assert sorted((outcome.step, outcome.reason) for outcome in outcomes) == [(step, "") for step in range(1, 6)]
    assert Checkpointer(background(), run, full_shards(large_state(2))).load() == {"step": 5}


def test_a_write_to_storage_that_does_not_end_delays_one_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_SLOT_TIMEOUT", 0.1)
    checkpointer = Checkpointer(background(memory_interval=1, memory_wait=True), run, full_shards(logical_state(1)))
    for step in (1, 2):
        assert checkpointer.save(step, {"step": step}, persist=False)
    assert checkpointer.snapshots is not None
    slots = sorted(checkpointer.snapshots._slots, key=lambda slot: slot.generation)
    for slot in slots:
        slot.free.wait()
    slots[0].free.clear()  # as while it is written
    assert not checkpointer.save(3, {"step": 3}, persist=False)
    assert slots[1].is_complete
    assert checkpointer.save(4, {"step": 4}, persist=False)
    slots[1].free.wait()
    slots[0].free.set()
    assert checkpointer.save(5, {"step": 5}, persist=False)
    assert not checkpointer.snapshots._has_slot_timed_out
    checkpointer.finish(run_ended=False)


def test_staging_memory_that_a_process_has_kept_serves_its_next_checkpointer(run: Path) -> None:
    config = background(memory_interval=1, memory_wait=True)
    first = Checkpointer(config, run, full_shards(logical_state(1)))
    for step in (1, 2):
        assert first.save(step, {"step": step}, persist=False)
    slots = list(first.leave())
    mappings = [slot.map for slot in slots]
    assert len(slots) == 2
    assert not any(slot.pairs for slot in slots)  # nothing holds the live memory

    second = Checkpointer(config, run, full_shards(logical_state(7)), reused_slots=slots)
    assert second.load() == {"step": 2}
    second.prepare()
    assert second.snapshots is not None
    assert [slot.map for slot in second.snapshots._slots] == mappings
    assert second.save(3, {"step": 3}, persist=False)
    second.finish(run_ended=False)
    assert Checkpointer(config, run, full_shards(logical_state(8))).load() == {"step": 3}


def test_a_process_loads_its_snapshot_from_its_own_slot_and_finds_damage_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = background(memory_interval=1, memory_wait=True)
    first = Checkpointer(config, run, full_shards(logical_state(1)))
    assert first.save(1, {"step": 1}, persist=False)
    slots = list(first.leave())
    copied_bytes: list[int] = []
    copy_memory = ShardCopier._copy_memory

    def count_and_copy(copier: ShardCopier, memory: np.ndarray, *rest: Any) -> int:
        copied_bytes.append(memory.nbytes)
        return copy_memory(copier, memory, *rest)

    monkeypatch.setattr(ShardCopier, "_copy_memory", count_and_copy)
    tensors = blank(logical_state())
    assert Checkpointer(config, run, full_shards(tensors), reused_slots=slots).load() == {"step": 1}
    assert_same(tensors, logical_state(1))
    assert sum(copied_bytes) == sum(tensor.nbytes for tensor in tensors.values())
    name = "model.embedding.weight"
    content = tensors[name].numpy().tobytes()
    for slot in slots:
        position = slot.map.find(content)
        if position >= 0:
            slot.map[position] ^= 1
    damaged = Checkpointer(config, run, full_shards(tensors), reused_slots=slots)
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(DataError, match=f"other bytes for {name}"):
        damaged.load()
    assert not tensors[name].any()


def _resize(rank: int, size: int, run: Path, reserve: float) -> Any:
    """Save with all ranks, with all but the second one, and with all again; each rank keeps its memory.

    A rank above the second one has another number without it. Return per attempt whether the rank's memory stayed, and
    the step that blank shards load from memory afterwards.
    """
    slots: list[StagingSlot] = []
    config = background(memory_interval=1, memory_wait=True)
    survivors = [other for other in range(size) if other != 1]
    results: list[Any] = []
    for attempt, members in enumerate([list(range(size)), survivors, list(range(size))]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        number = members.index(rank)
        tensors = large_state(attempt)
        shards = cut(tensors, "flat", number, len(members))
        mappings = [slot.map for slot in slots]
        checkpointer = Checkpointer(config, run, shards, group=group, reused_slots=slots, reserve=reserve)
        checkpointer.load()
        checkpointer.prepare()
        assert checkpointer.snapshots is not None
        results.append([slot.map for slot in checkpointer.snapshots._slots] == mappings)
        # The earlier attempt's snapshots stay until they are overwritten.
        blank_shards = cut(blank(tensors), "flat", number, len(members))
        results.append(Checkpointer(config, run, blank_shards, group=group).load())
        for name, tensor in large_state(attempt).items():
            tensors[name].copy_(tensor)
        for step in (2 * attempt + 1, 2 * attempt + 2):
            assert checkpointer.save(step, {"step": step}, persist=False)
            checkpointer.before_update()
        slots = list(checkpointer.leave())
        dist.barrier(group)
        loaded = blank(tensors)
        second = Checkpointer(config, run, cut(loaded, "flat", number, len(members)), group=group)
        results.append(second.load())
        for own, expected in zip(second.shards, shards, strict=True):
            assert torch.equal(own.tensor, expected.tensor), own
        dist.barrier(group)
    return results


@pytest.mark.parametrize(("reserve", "stays"), [(1.5, True), (1.0, False)])
def test_memory_that_is_reserved_serves_more_and_fewer_ranks(run: Path, reserve: float, stays: bool) -> None:
    results = run_group(3, _resize, run, reserve)
    steps = [{"step": step} for step in (2, 4, 6)]
    for rank in (0, 2):
        assert results[rank][:2] == [False, None]
        # Larger shards need new memory if nothing is reserved. Smaller ones never do.
        assert results[rank][3:] == [stays, steps[0] if stays else None, steps[1], True, steps[1], steps[2]]
    # The second rank's memory stayed although another rank had its number meanwhile.
    assert results[1][2:] == [steps[0], True, steps[1], steps[2]]


def _save_without_last_rank(rank: int, size: int, run: Path) -> int:
    """Save with all ranks, then once without the last one, then with all. Return the slot of the last save."""
    config = background(memory_interval=1, memory_wait=True)
    slots: list[StagingSlot] = []
    step = slot_index = 0
    for members, count in ((range(size), 2), (range(size - 1), 1), (range(size), 1)):
        group = dist.new_group(list(members))
        if rank not in members:
            continue
        shards = cut(logical_state(step), "replicas", rank, len(members))
        checkpointer = Checkpointer(config, run, shards, group=group, reused_slots=slots)
        checkpointer.load()
        checkpointer.prepare()
        for _ in range(count):
            step += 1
            assert checkpointer.save(step, {"step": step}, persist=False)
            checkpointer.before_update()
            assert checkpointer.snapshots is not None
            (slot_index,) = [
                index
                for index, copy in checkpointer.snapshots._last_copies.items()
                if copy.message.generation == checkpointer.snapshots.generation
            ]
        slots = list(checkpointer.leave())
        dist.barrier(group)
    return slot_index


def test_ranks_with_snapshots_of_other_saves_choose_the_same_slot(run: Path) -> None:
    """The last rank's oldest snapshot is in the first slot, that of the others in the second."""
    first, second, third = run_group(3, _save_without_last_rank, run)
    assert first == second == third


def test_a_host_without_memory_for_the_reserve_starts_with_the_necessary_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, size = CheckpointService(0.0), 4 * PAGE
    trainer: Any = SimpleNamespace(body=NOTHING.to_bytes(), send=lambda *args, **kwargs: None)
    capacity = SimpleNamespace(memory=8 * size, memory_from="a test")
    monkeypatch.setattr("megascale.checkpoint.background.snapshot_memory.Capacity.measure", lambda: capacity)
    expected_sizes = {0: 2 * size, 5 * size: size}  # by bytes that must stay free
    for rank, (spare, expected) in enumerate(expected_sizes.items()):
        host.on_allocate(trainer, Allocate(rank, size, 2, reserved=2 * size, spare=spare))
        assert [slot.memory.size for slot in host.slots[rank]] == [expected] * 2
        for slot in host.slots[rank]:
            assert slot.memory.page_filler.wait(30)
    for slots in host.slots.values():
        for slot in slots:
            slot.memory.close()


def test_memory_follows_its_process_and_stays_listed_under_its_old_rank() -> None:
    host = CheckpointService(0.0)
    replies: list[Any] = []
    trainer: Any = SimpleNamespace(
        body=NOTHING.to_bytes(), send=lambda message, *args, **kwargs: replies.append(message)
    )
    for rank in (2, 3):
        host.on_allocate(trainer, Allocate(rank, PAGE, 2))
        for number, slot in enumerate(host.slots[rank]):
            slot.mark_complete(describe_snapshot(rank, number, f"0000000{number + 1}-a"), [])
    first, second = list(host.slots[2]), list(host.slots[3])
    host.on_allocate(trainer, Allocate(2, PAGE, 2, memories=tuple(slot.memory.identity for slot in second)))
    assert host.slots[2] == second
    assert 3 not in host.slots
    host.on_list_snapshots(trainer, ListSnapshots())
    listed = sorted((snapshot.rank, snapshot.generation) for snapshot in replies[-1].snapshots)
    assert listed == [(rank, f"0000000{number}-a") for rank in (2, 3) for number in (1, 2)]
    host.on_open_snapshot(trainer, OpenSnapshot(3, "00000002-a"))
    assert replies[-1].size == PAGE
    # A process of the former rank 2 may still claim its memory, whatever its number is now.
    host.on_allocate(trainer, Allocate(0, PAGE, 2, memories=tuple(slot.memory.identity for slot in first)))
    assert host.slots[0] == first
    host._drop_older(1)
    assert sorted(host.slots) == [0, 2]
    host._drop_older(2)
    assert host.slots == {}


def test_a_waiting_process_leaves_the_snapshots_of_an_ended_one() -> None:
    host = CheckpointService(0.0)
    trainer: Any = SimpleNamespace(body=make_index().to_bytes(), send=lambda *args, **kwargs: None)
    host.on_allocate(trainer, Allocate(1, PAGE, 2))
    slots = list(host.slots[1])
    slots[0].mark_complete(describe_snapshot(1, 0, "00000001-a"), [])
    trainer.body = NOTHING.to_bytes()
    host.on_allocate(trainer, Allocate(1, PAGE, 2))
    assert host.slots == {1: slots}  # large enough
    host.on_allocate(trainer, Allocate(1, 2 * PAGE, 2))
    assert host.slots[-1] == slots
    assert [slot.memory.size for slot in host.slots[1]] == [2 * PAGE] * 2
    assert [rank for rank, slot in host._list_slots() if slot.generation] == [1]
    assert len(host.file_indexes[1]) == 1  # a message of the ended process may still need it
    for kept in host.slots.values():
        for slot in kept:
            slot.memory.close()


def make_index() -> CheckpointIndex:
    """Return the index of a file with one chunk."""
    shards = full_shards({"w": torch.zeros(4)})
    (layout,) = make_plan([make_offer((s.name, s.shape, get_dtype_name(s.tensor), s.box) for s in shards)]).file_layouts
    return make_rank_index(shards, layout, 0)


def describe_snapshot(rank: int, slot: int, generation: str) -> StageSnapshot:
    return StageSnapshot(
        rank=rank,
        slot=slot,
        step=1,
        generation=generation,
        identity="id",
        state="{}",
        ranks=4,
        size=PAGE,
        base_generation="",
        follow=False,
        persist=False,
        storage="",
        required_bytes=0,
        keep=1,
        local_ranks=(rank,),
        leader=False,
        plan="",
        peer=None,
        token="",
        drops_up_to=0,
    )


def test_state_that_stands_at_the_newest_step_in_memory_is_left_alone(run: Path) -> None:
    config = background(memory_interval=1)
    first = Checkpointer(config, run, full_shards(logical_state(1)))
    assert first.save(4, {"step": 4}, persist=False, wait=True)
    kept = first.keep_state(attempt=1)
    first.finish(run_ended=False)
    for step, stays in ((4, True), (3, False), (-1, False), (None, False)):
        state = logical_state(2)
        second = Checkpointer(config, run, full_shards(state))
        live = None if step is None else replace(kept, step=step, shards=second.shards)
        assert second.load(live=live) == {"step": 4}
        assert second.is_standing is stays
        expected = logical_state(2 if stays else 1)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_memory_wait_without_copies_in_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set checkpoint\.memory_interval"):
        background(memory_wait=True)


def test_memory_that_a_service_does_not_free_is_given_up_after_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_PREPARE_TIMEOUT", 0.05)
    host, trainer = CheckpointService(linger=1.0), mock.Mock()
    trainer.body = b""
    monkeypatch.setattr(CheckpointIndex, "from_bytes", lambda data: NOTHING)
    host.on_allocate(trainer, Allocate(rank=0, size=PAGE, slots=1))
    (memory_slot,) = host.slots[0]
    slot = StagingSlot(memory_slot.memory.descriptor, NOTHING, [], torch.device("cpu"))
    ours, theirs = socket.socketpair()
    connection = Conversation(ours, TO_SERVICE, FROM_SERVICE)
    served = threading.Thread(target=serve_until_closed, args=(host, Conversation(theirs, FROM_SERVICE, TO_SERVICE)))
    served.start()
    with memory_slot.busy, pytest.raises(TimeoutError, match=r"has not freed this memory for 0\.05 s: it still writes"):
        slot.prepare(connection, AwaitPages(0, 0), threading.Event())
    slot.prepare(connection, AwaitPages(0, 0), threading.Event())  # free again
    connection.close()
    served.join()
    slot.close()
    memory_slot.memory.close()


def serve_until_closed(host: CheckpointService, trainer: Conversation) -> None:
    with trainer, contextlib.suppress(EOFError):
        host.handle_trainer(trainer)


def test_a_service_that_does_not_answer_while_memory_comes_into_place_is_replaced(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit, the first save to storage would wait for its answer for ever."""
    monkeypatch.setattr(snapshot, "_REPLY_TIMEOUT", 1.0)
    monkeypatch.setattr(snapshot, "_WAIT_AT_START_BYTES", 0)
    real = StagingSlot.prepare
    has_failed = threading.Event()

    def prepare(slot: StagingSlot, sock: Conversation, question: AwaitPages, stop: threading.Event) -> None:
        if has_failed.is_set():
            real(slot, sock, question, stop)
            return
        pid, _ = read_peer_credentials(sock.sock)
        os.kill(pid, signal.SIGSTOP)
        # The signal stops a thread only once another thread of the process has received it.
        await_other(lambda: all(is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()))
        try:
            with pytest.raises(TimeoutError):
                real(slot, sock, question, stop)
        finally:
            os.kill(pid, signal.SIGCONT)
            has_failed.set()
        raise TimeoutError("timed out")

    monkeypatch.setattr(StagingSlot, "prepare", prepare)
    checkpointer = Checkpointer(background(), run, full_shards(logical_state(1)))
    while not checkpointer.save(1, {"step": 1}):
        checkpointer.before_update()
    assert has_failed.is_set()
    assert [(outcome.step, outcome.committed) for outcome in checkpointer.finish()][-1] == (1, True)


def is_stopped(task: Path) -> bool:
    """Return whether a thread is stopped by a signal."""
    return (task / "stat").read_text().rpartition(") ")[2].startswith("T")


@pytest.mark.parametrize("memory_wait", [False, True])
def test_memory_comes_into_place_under_the_first_steps(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, memory_wait: bool
) -> None:
    """Snapshots in memory are skipped till then, and saves to disk wait. The end of the run does not wait."""
    is_ready, real = threading.Event(), StagingSlot.prepare

    def prepare(slot: StagingSlot, sock: Conversation, question: AwaitPages, stop: threading.Event) -> None:
        while not is_ready.wait(0.01) and not stop.is_set():
            pass
        real(slot, sock, question, stop)

    monkeypatch.setattr(StagingSlot, "prepare", prepare)
    monkeypatch.setattr("megascale.checkpoint.background.snapshot._WAIT_AT_START_BYTES", 0)
    config = background(memory_interval=1, memory_wait=memory_wait)
    checkpointer = Checkpointer(config, run, full_shards(logical_state(1)))
    with caplog.at_level(logging.INFO):
        assert not checkpointer.save(1, {"step": 1}, persist=False)
        assert "memory for snapshots is prepared" not in caplog.text
        timer = threading.Timer(0.1, is_ready.set)
        timer.start()
        assert checkpointer.save(2, {"step": 2})
    assert caplog.text.count("memory for snapshots is prepared on all ranks") == 1
    assert is_ready.is_set()
    checkpointer.before_update()
    assert checkpointer.save(3, {"step": 3}, persist=False, wait=True)
    assert [o.reason for o in checkpointer.finish(run_ended=False)] == [""] * 2
    is_ready.clear()
    second = Checkpointer(config, run, full_shards(logical_state(2)))
    assert second.load() == {"step": 3}
    second.prepare()
    assert not second.finish()  # at once, with nothing in place


def test_memory_that_does_not_come_into_place_is_asked_for_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not written to, which a signal might answer; whether it is small, and had before the first step, or not."""

    def prepare(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    for at_once in (1 << 30, 0):
        monkeypatch.setattr("megascale.checkpoint.background.snapshot._WAIT_AT_START_BYTES", at_once)
        checkpointer = Checkpointer(background(), run, full_shards(logical_state(1)))
        with monkeypatch.context() as patched:
            patched.setattr(StagingSlot, "prepare", prepare)
            checkpointer.prepare()
            assert checkpointer.snapshots is not None
            assert not checkpointer.snapshots.wait_for_memory()
            assert checkpointer.snapshots._choose_slot(wait=True) is None
        assert checkpointer.save(1, {"step": 1})
        assert [(o.committed, o.reason) for o in checkpointer.finish(run_ended=False)] == [(True, "")]


def test_memory_that_did_not_come_into_place_is_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for anew it is refused where it lacks, which a save then tells, instead of failing in silence each time."""
    monkeypatch.setattr(service, "CheckpointIndex", SimpleNamespace(from_bytes=lambda _: NOTHING))
    ours = service.CheckpointService(1.0)
    sock: Any = SimpleNamespace(body=b"", send=lambda *_, **__: None)
    try:
        ours.on_allocate(sock, Allocate(0, 4096, 2))
        first = ours.slots[0]
        ours.on_allocate(sock, Allocate(0, 4096, 2))
        assert ours.slots[0] is first
        first[1].memory.page_filler.problem = OSError(errno.ENOMEM, "Cannot allocate memory")
        ours.on_allocate(sock, Allocate(0, 4096, 2))
        assert ours.slots[0] is not first
        assert all(slot.memory.page_filler.wait(30) for slot in ours.slots[0])
    finally:
        for slot in ours.slots.get(0, []):
            slot.memory.close()


def test_an_image_that_is_not_whole_everywhere_is_overwritten_first(run: Path) -> None:
    checkpointer = Checkpointer(background(memory_interval=1), run, full_shards(logical_state(1)))
    for step in (1, 2):
        assert checkpointer.save(step, {"step": step}, persist=False, wait=True)
    checkpointer.finish(run_ended=False)
    # Killed while step 3 came into the first slot: a new trainer must not touch the second, which has step 2.
    sock = service.connect_checkpoint_service(service_protocol.private_folder(run))
    sock.request(InvalidateSlot(0, 0))
    second = Checkpointer(background(memory_interval=1), run, full_shards(logical_state(2)))
    assert second.load() == {"step": 2}
    second.prepare()
    assert second.snapshots is not None
    assert second.snapshots._choose_slot(wait=False) == 0
    # A save of the same number that another attempt began is not the state from which the run started.
    second.snapshots._base_generation = "00000002-base"
    for slot, generation in zip(second.snapshots._slots, ("00000002-base", "00000002-other"), strict=True):
        slot.generation = generation
        slot.is_complete = False
    assert second.snapshots._choose_slot(wait=False) == 1
    second.finish(run_ended=False)


class Left(Exception):
    """Order to leave the attempt."""


def test_a_process_that_must_leave_does_not_wait_for_its_memory(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service may still send the memory's last snapshot to a host that is lost."""
    must_leave = threading.Event()

    def check() -> None:
        if must_leave.is_set():
            raise Left

    def prepare(slot: StagingSlot, sock: Conversation, question: AwaitPages, stop: threading.Event) -> None:
        must_leave.set()
        stop.wait()

    monkeypatch.setattr(StagingSlot, "prepare", prepare)
    monkeypatch.setattr("megascale.checkpoint.background.snapshot._WAIT_AT_START_BYTES", 0)
    config = background(memory_interval=1)
    checkpointer = Checkpointer(config, run, full_shards(logical_state(1)), check=check)
    with pytest.raises(Left):
        checkpointer.save(1, {"step": 1})
    left_slots = checkpointer.leave()
    assert len(left_slots) == 2
    assert count_slot_threads() == 0
    must_leave.clear()
    second = Checkpointer(config, run, full_shards(logical_state(1)), reused_slots=left_slots)
    monkeypatch.undo()
    assert second.save(1, {"step": 1}, persist=False, wait=True)
    assert second.snapshots is not None
    assert [slot.map for slot in second.snapshots._slots] == [slot.map for slot in left_slots]
    second.finish(run_ended=False)


def count_slot_threads() -> int:
    """Return the number of threads of this process that serve a slot."""
    return sum("_serve_slot" in thread.name for thread in threading.enumerate())


def test_a_waiting_process_prepares_memory_that_its_first_checkpointer_takes(run: Path) -> None:
    config = background(memory_interval=1)
    size = 1 << 20
    slots = prepare_slots(config, run, rank=5, size=1, reserved=size, device=torch.device("cpu"))
    mappings = [slot.map for slot in slots]
    assert [len(mapping) for mapping in mappings] == [size] * 2
    assert [resident(mapping) for mapping in mappings] == [size] * 2
    checkpointer = Checkpointer(config, run, full_shards(logical_state(1)), reused_slots=slots)
    assert checkpointer.save(1, {"step": 1}, persist=False, wait=True)
    assert checkpointer.snapshots is not None
    assert [slot.map for slot in checkpointer.snapshots._slots] == mappings
    checkpointer.finish(run_ended=False)
    assert Checkpointer(config, run, full_shards(logical_state(2))).load() == {"step": 1}


def test_memory_that_was_ordered_early_is_cleared_meanwhile_and_serves_the_checkpointer(run: Path) -> None:
    config = background(memory_interval=1)
    size = 1 << 20
    early = EarlySlots(config, run, rank=0, size=1, reserved=size, spare=0, device=torch.device("cpu"))
    slots = early.take()
    assert [len(slot.map) for slot in slots] == [size] * 2
    assert not early.take()
    early.close()
    checkpointer = Checkpointer(config, run, full_shards(logical_state(1)), reused_slots=slots)
    assert checkpointer.save(1, {"step": 1}, persist=False, wait=True)
    assert checkpointer.snapshots is not None
    assert checkpointer.snapshots.kept_slot_count == 2
    assert [slot.map for slot in checkpointer.snapshots._slots] == [slot.map for slot in slots]
    assert [resident(slot.map) for slot in slots] == [size] * 2
    checkpointer.finish(run_ended=False)
    # A process that replaces this one receives its memory, although it is smaller than a new one's would be.
    replacement = EarlySlots(config, run, rank=0, size=1, reserved=2 * size, spare=0, device=torch.device("cpu"))
    second = Checkpointer(config, run, full_shards(logical_state(2)), reused_slots=replacement.take())
    assert second.load() == {"step": 1}
    second.prepare()
    assert second.snapshots is not None
    assert [len(slot.map) for slot in second.snapshots._slots] == [size] * 2
    second.finish(run_ended=False)


def test_no_memory_is_ordered_early_if_an_ended_process_has_less(run: Path) -> None:
    """The host may lack memory for both. The checkpointer replaces it once the state was loaded from it."""
    config = background(memory_interval=1)
    checkpointer = Checkpointer(config, run, full_shards(logical_state(1)))
    assert checkpointer.save(1, {"step": 1}, persist=False, wait=True)
    checkpointer.finish(run_ended=False)
    early = EarlySlots(config, run, rank=0, size=8 << 20, reserved=8 << 20, spare=0, device=torch.device("cpu"))
    slots = early.take()
    assert slots == []
    second = Checkpointer(config, run, full_shards(logical_state(2)), reused_slots=slots)
    assert second.load() == {"step": 1}
    assert second.save(2, {"step": 2}, persist=False, wait=True)
    second.finish(run_ended=False)


@contextlib.contextmanager
def stop_services(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Stop each service to which a thread connects until the context ends. Yield an event that a stop sets."""
    connect = service.connect_checkpoint_service
    stopped: list[int] = []
    has_stopped = threading.Event()

    def connect_and_stop(*arguments: Any) -> Conversation:
        connection = connect(*arguments)
        pid, _ = read_peer_credentials(connection.sock)
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)
        await_other(lambda: all(is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()))
        has_stopped.set()
        return connection

    monkeypatch.setattr(service, "connect_checkpoint_service", connect_and_stop)
    try:
        yield has_stopped
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def test_an_early_order_that_the_service_does_not_answer_is_left_to_the_checkpointer(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a limit, the start would wait for the answer for ever."""
    monkeypatch.setattr(early_slots, "_REPLY_SECONDS", 0.5)
    with stop_services(monkeypatch):
        early = EarlySlots(background(), run, rank=0, size=PAGE, reserved=PAGE, spare=0, device=torch.device("cpu"))
        assert early.take() == []
    assert "staging memory was not prepared: timed out" in caplog.text


def test_a_rank_that_must_leave_does_not_wait_for_its_early_order(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent may order the rank to leave while the service does not answer. Such an end is no warning."""
    caplog.set_level(logging.INFO, "megascale.checkpoint")
    earlier_descriptors = list_memory_descriptors()

    def check() -> None:
        raise InterruptedError("leave")

    with stop_services(monkeypatch) as has_stopped:
        early = EarlySlots(background(), run, rank=0, size=PAGE, reserved=PAGE, spare=0, device=torch.device("cpu"))
        with pytest.raises(InterruptedError, match="leave"):
            early.take(check)
        assert has_stopped.wait(60)
        early.close()
        early._thread.join(early_slots._REPLY_SECONDS / 2)
        assert not early._thread.is_alive()
        assert early.take(check) == []
    (record,) = [record for record in caplog.records if "not prepared" in record.getMessage()]
    assert record.levelno == logging.INFO
    assert "no longer needs the staging memory" in record.getMessage()
    assert list_memory_descriptors() <= earlier_descriptors


def test_early_memory_that_no_checkpointer_takes_is_released(run: Path) -> None:
    early = EarlySlots(background(), run, rank=0, size=1 << 20, reserved=1 << 20, spare=0, device=torch.device("cpu"))
    early._thread.join()
    (slot,) = early._slots
    early.close()
    with pytest.raises(ValueError, match="closed"):
        len(slot.map)


def test_a_trainer_that_ends_before_its_reply_is_a_line_without_traceback(caplog: pytest.LogCaptureFixture) -> None:
    trainer_socket, service_socket = socket.socketpair()
    with Conversation(trainer_socket, TO_SERVICE, FROM_SERVICE) as trainer:
        trainer.send(ListSnapshots())
    with (
        Conversation(service_socket, FROM_SERVICE, TO_SERVICE) as conversation,
        caplog.at_level(logging.INFO, "megascale.checkpoint"),
    ):
        CheckpointService(linger=1.0).handle_trainer(conversation)
    (record,) = caplog.records
    assert record.getMessage().startswith("listsnapshots has no reply, because the trainer has ended")
    assert record.exc_info is None


def test_a_refused_start_ends_the_service_only_without_a_snapshot(run: Path) -> None:
    config = background(memory_interval=1, linger=1000)
    folder = service_protocol.private_folder(run)
    checkpointer = Checkpointer(config, run, full_shards(logical_state(1)))
    assert checkpointer.save(1, {"step": 1}, persist=False, wait=True)
    checkpointer.finish(run_ended=False)
    end_unused_service(config, run)
    second = Checkpointer(config, run, full_shards(logical_state(2)))
    assert second.load() == {"step": 1}
    second.prepare()
    second.finish()  # the end of the run
    await_other(lambda: not folder.exists())
    end_unused_service(config, run)
    assert not folder.exists()  # no service starts for this, and no folder stays
    third = Checkpointer(config, run, full_shards(logical_state(3)))
    third.prepare()
    third.finish(run_ended=False)
    assert folder.exists()
    end_unused_service(config, run)
    await_other(lambda: not folder.exists())


def test_a_connection_that_starts_nothing_keeps_no_service_of_an_ended_run(run: Path) -> None:
    """An agent connects to hold the service, and a rank of the ended run to wait for a commit."""
    folder = service_protocol.private_folder(run)
    checkpointer = Checkpointer(background(linger=1000), run, full_shards(logical_state(1)))
    checkpointer.prepare()
    hold = connect_checkpoint_service(folder)
    checkpointer.finish()  # the end of the run
    late = connect_checkpoint_service(folder)
    late.close()
    hold.close()
    await_other(lambda: not folder.exists())


def test_a_start_after_the_end_of_the_run_keeps_the_service(run: Path) -> None:
    """The service still has a connection of the ended run, so it has not ended yet."""
    folder = service_protocol.private_folder(run)
    checkpointer = Checkpointer(background(linger=1000), run, full_shards(logical_state(1)))
    checkpointer.prepare()
    pid = service_pid(run)
    hold = connect_checkpoint_service(folder)
    checkpointer.finish()
    following = Checkpointer(background(linger=1000), run, full_shards(logical_state(1)))
    following.prepare()
    hold.close()
    following.finish(run_ended=False)
    assert service_pid(run) == pid


def list_memory_descriptors() -> set[str]:
    """Return the descriptors of this process that are staging memory."""
    descriptors = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:megascale-checkpoint" in os.readlink(path):
                descriptors.add(path.name)
    return descriptors


@pytest.mark.parametrize("mapped_slots", [0, 1])
def test_memory_that_cannot_be_mapped_leaves_no_descriptor(
    run: Path, monkeypatch: pytest.MonkeyPatch, mapped_slots: int
) -> None:
    earlier_descriptors = list_memory_descriptors()
    real_map = mmap.mmap
    mappings: list[mmap.mmap] = []

    def fail_later(*args: Any) -> mmap.mmap:
        if len(mappings) == mapped_slots:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        mappings.append(real_map(*args))
        return mappings[-1]

    monkeypatch.setattr(staging, "mmap", SimpleNamespace(mmap=fail_later, MAP_SHARED=mmap.MAP_SHARED))
    config = background(memory_interval=1)
    assert prepare_slots(config, run, rank=5, size=1, reserved=0, device=torch.device("cpu")) == []
    assert list_memory_descriptors() <= earlier_descriptors
    mappings.clear()
    checkpointer = Checkpointer(config, run, full_shards(logical_state(1)))
    with pytest.raises(FitError, match=r"staging memory for checkpoints is unavailable .*Cannot allocate memory"):
        checkpointer.prepare()
    # A mapping has a descriptor of its own. The next checkpointer of this process takes the mapping.
    slots = checkpointer.leave()
    assert len(list_memory_descriptors() - earlier_descriptors) == len(slots) == mapped_slots
    for slot in slots:
        slot.close()
    assert list_memory_descriptors() <= earlier_descriptors


def test_a_slot_is_unregistered_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread closes slots of earlier attempts. It starts on the first GPU, and a call there would make a context."""
    calls: list[str] = []

    @contextlib.contextmanager
    def enter_device(device: torch.device) -> Iterator[None]:
        calls.append(f"enter {device}")
        yield
        calls.append("leave")

    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda address: calls.append("unregister")
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", enter_device)
    memory = os.memfd_create("test")
    os.ftruncate(memory, PAGE)
    slot = StagingSlot(memory, CheckpointIndex.make_empty(), [], torch.device("cuda", 3))
    os.close(memory)
    assert slot.page_lock()
    slot.close()
    slot.close()
    assert calls == ["enter cuda:3", "unregister", "leave"]


def test_memory_that_cannot_be_prepared_is_left_to_the_first_checkpointer(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large = 1 << 50
    assert prepare_slots(background(), run, rank=0, size=too_large, reserved=0, device=torch.device("cpu")) == []
    assert "staging memory was not prepared" in caplog.text
    # The service may send the last snapshot of an ended process for a long time.
    monkeypatch.setattr(early_slots, "_PREPARE_SECONDS", 0.05)
    memory = os.memfd_create("test")
    os.ftruncate(memory, PAGE)
    connection: Any = SimpleNamespace(files=[memory], request=lambda *_: PagesReady(False))
    slots: list[StagingSlot] = []
    early_slots._order_slots(slots, connection, Allocate(0, PAGE, 1), torch.device("cpu"))
    early_slots._complete_slots(slots, connection, 0)
    assert [resident(slot.map) for slot in slots] == [0]
    for slot in slots:
        slot.close()
