"""Images in host memory and their copies: whenever all are killed, some save is whole everywhere."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megascale.checkpoint.background import service, snapshot_memory
from megascale.checkpoint.background.replica import Replicas
from megascale.checkpoint.background.service import CheckpointService
from megascale.checkpoint.background.service_protocol import Allocate, AwaitPages, Replicate
from megascale.checkpoint.background.snapshot_memory import Progress, Slot, make_slots
from megascale.checkpoint.background.staging import choose_slot
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.storage.base import PAGE
from megascale.core.capacity import Capacity
from tests.checkpoint.background.conftest import await_other

NOTHING = CheckpointIndex({}, [], {"tensor": np.zeros(0, np.int32)})


def _replicate(rank: int, slot: int, slots: int, size: int, base_generation: str, generation: str) -> Replicate:
    return Replicate(
        rank=rank,
        slot=slot,
        step=0,
        generation=generation,
        identity="",
        state="",
        ranks=1,
        size=size,
        base_generation=base_generation,
        slots=slots,
        streams=1,
        segment_bytes=1,
        transfer="",
    )


def test_memory_that_lacks_leaves_nothing_behind(monkeypatch):
    """A service stays when a start fails: the next one, with fewer slots, needs that memory."""
    real, calls = os.ftruncate, []

    def truncate(handle: int, size: int) -> None:
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "no room")
        real(handle, size)

    monkeypatch.setattr(os, "ftruncate", truncate)
    with pytest.raises(OSError, match="no room"):
        make_slots(4, 4096, NOTHING)
    assert len(calls) == 3
    for handle in calls:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)


def test_memory_is_promised_once(monkeypatch):
    """Pages come into place later, and not by the signal that a host without the room would send then."""
    monkeypatch.setattr(
        snapshot_memory, "Capacity", SimpleNamespace(measure=lambda: Capacity(memory=10 << 12, memory_from="X"))
    )
    monkeypatch.setattr(
        snapshot_memory, "fill_pages", lambda *args, stop, **more: stop.wait()
    )  # nothing comes into place
    slots = make_slots(2, 4 << 12, NOTHING)
    with pytest.raises(OSError, match=r"8,192 of 12,288 bytes are free \(X\)"):
        make_slots(3, 1 << 12, NOTHING)
    more = make_slots(2, 1 << 12, NOTHING)
    slots[0].memory.close()
    for slot in [slots[1]] + more + make_slots(1, 4 << 12, NOTHING):
        slot.memory.close()


class Hosts:
    """Processes whose services complete images, copy them to peers and free slots each at its own pace; the choices of
    slots and of memory for copies are the real ones."""

    def __init__(self, ranks: int, slots: int, base: str = "") -> None:
        self.base = base
        self.number = int(base[:8] or 0)
        self.nothing = CheckpointIndex({}, [], {"tensor": np.zeros(0, np.int32)})
        self.local = [[""] * slots for _ in range(ranks)]  # what each service has whole
        self.filled = [[""] * slots for _ in range(ranks)]
        self.copies = Replicas()
        # As each trainer knows it.
        self.free, self.complete = np.ones((ranks, slots), bool), np.zeros((ranks, slots), bool)
        self.under_way: list[tuple[int, int, str, Any]] = []  # (rank, slot, what comes next, with what)

    def room(self, rank: int, slot: int, generation: str) -> Slot:
        slots = self.free.shape[1]
        return self.copies._reserve_slot(_replicate(rank, slot, slots, 1, self.base, generation), self.nothing)

    def copy(self, rank: int, slot: int, generation: str) -> None:
        """A copy that was there before."""
        room = self.room(rank, slot, generation)
        room.generation = generation
        room.busy.release()

    def images(self) -> tuple[list[set[str]], list[set[str]]]:
        """Return each rank's complete own images and complete copies."""
        local = [{g for g in of_rank if g} for of_rank in self.local]
        images = self.copies.list_complete()
        return local, [{s.generation for r, s in images if r == rank} for rank in range(len(local))]

    def play(self, moves: list[int], check: Callable[[], None]) -> None:
        """Go on with one of the events under way, or begin a save on all, as each move says."""
        try:
            for move in moves:
                if self.under_way and move % 3:
                    self._go_on(*self.under_way.pop(move % len(self.under_way)))
                else:
                    self._save(check)
                check()
        finally:
            for slots in self.copies._slots.values():
                for slot in slots:
                    slot.memory.close()

    def _go_on(self, rank: int, slot: int, event: str, room: Any) -> None:
        generation = self.filled[rank][slot]
        if event == "begin":  # a copy is sent while its image is completed
            try:
                room = self.room(rank, slot, generation)
            except BlockingIOError:  # told as a problem of the copy
                room = None
            self.under_way.append((rank, slot, "frame", room))
        elif event == "frame":
            self.local[rank][slot] = generation
            if room is None:  # the image is whole here
                self.complete[rank, slot] = self.free[rank, slot] = True
            else:
                self.under_way.append((rank, slot, "pushed", room))
        elif event == "pushed":
            room.generation = generation
            room.busy.release()
            self.complete[rank, slot] = True
            self.under_way.append((rank, slot, "free", None))
        else:
            self.free[rank, slot] = True

    def _save(self, check: Callable[[], None]) -> None:
        begun = np.array([[g == self.base != "" for g in of_rank] for of_rank in self.filled]) & self.complete
        free, complete, origin = (list(flags) for flags in (self.free.all(0), self.complete.all(0), begun.any(0)))
        chosen = {choose_slot(free, complete, filled, origin, bool(self.base)) for filled in self.filled}
        assert len(chosen) == 1, "each takes another"
        slot = chosen.pop()
        if slot is None:
            return
        self.number += 1
        for rank, filled in enumerate(self.filled):
            self.local[rank][slot], filled[slot] = "", f"{self.number:08d}-b"
            self.free[rank, slot] = self.complete[rank, slot] = False
            self.under_way.append((rank, slot, "begin", None))
            check()


@pytest.mark.parametrize(
    ("free", "keeps_newest", "expected"),
    [
        ([False, True], False, 1),
        ([False, True], True, None),
        ([True, True], True, 0),
        ([True, False], True, 0),
        ([False, True, True], True, 1),
    ],
)
def test_the_newest_copy_stays_while_an_older_one_is_written(
    free: list[bool], keeps_newest: bool, expected: int | None
) -> None:
    """Else a loss during the next copy goes back to the one that is written, which is several steps old."""
    count = len(free)
    generations = [f"{number:08d}-a" for number in range(count)]
    chosen = choose_slot(free, [True] * count, generations, [False] * count, False, keeps_newest)
    assert chosen == expected


MOVES = st.lists(st.integers(0, 1 << 30), min_size=5, max_size=90)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 3), st.integers(2, 3), MOVES)
def test_some_image_is_whole_everywhere_whenever_all_are_killed(ranks: int, slots: int, moves: list[int]) -> None:
    """Own images and copies are checked separately: either may be lost."""
    hosts, had = Hosts(ranks, slots), [False, False]

    def check() -> None:
        for i, ranks_images in enumerate(hosts.images()):
            common = set.intersection(*ranks_images)
            had[i] = had[i] or bool(common)
            assert common or not had[i]

    hosts.play(moves, check)
    if not hosts.under_way:
        free, complete = [True] * slots, list(hosts.complete.all(0))
        assert choose_slot(free, complete, hosts.filled[0], [False] * slots, False) is not None


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1), st.lists(st.booleans(), min_size=2, max_size=3), st.integers(0, 7), MOVES)
def test_what_a_run_began_from_is_kept_until_it_has_made_more(
    slot: int, lost: list[bool], newer: int, moves: list[int]
) -> None:
    """Some hosts were lost and have nothing; their images are copies, beside which a newer one may lie that not all
    had."""
    assume(any(not newer >> rank & 1 for rank in range(len(lost))))  # else the run had begun from that
    hosts = Hosts(len(lost), 2, base="00000006-a")
    for rank, is_lost in enumerate(lost):
        images = {slot: "00000006-a"} | ({1 - slot: "00000007-a"} if newer >> rank & 1 else {})
        for position, generation in images.items():
            if is_lost:
                hosts.copy(rank, position, generation)
            else:
                hosts.local[rank][position] = hosts.filled[rank][position] = generation
                hosts.complete[rank, position] = True

    def check() -> None:
        local, copies = hosts.images()
        assert set.intersection(*(a | b for a, b in zip(local, copies, strict=True))) - {"00000007-a"}

    hosts.play(moves, check)


@pytest.mark.parametrize("waits_for_first", [False, True])
def test_processes_with_the_base_in_different_slots_overwrite_the_same_slot(waits_for_first: bool) -> None:
    """Otherwise the run would never make a snapshot or a save again."""
    generations = [["00000006-a", ""], ["", "00000006-a"]]
    is_free, is_base = [True, True], [True, True]
    chosen = {choose_slot(is_free, [False, False], names, is_base, waits_for_first) for names in generations}
    assert chosen == {0}
    assert choose_slot([False, True], [False, False], generations[0], is_base, False) == 1
    # Once that snapshot is complete, the other slot follows.
    assert choose_slot(is_free, [True, False], ["00000007-b", ""], [False, True], waits_for_first) == 1


def test_a_copy_that_still_comes_costs_no_whole_one() -> None:
    copies, index = Replicas(), CheckpointIndex({}, [], {"tensor": np.zeros(0, np.int32)})

    def room(slots: int, slot: int, generation: str, base: str = "") -> Slot:
        return copies._reserve_slot(_replicate(slots, slot, slots, 8, base, generation), index)

    for slots in (1, 2):
        first = room(slots, 0, "00000001-a")
        first.generation = "00000001-a"
        first.busy.release()
        coming = room(slots, slots - 1, "00000002-a")
        assert coming is not first
        with pytest.raises(BlockingIOError):
            room(slots, slots - 1, "00000003-a")
        coming.busy.release()  # it did not come
        # A new run begins from the first, whichever slot it fills; then that one's turn comes.
        reserved = room(slots, 0, "00000002-b", base="00000001-a")
        assert reserved is coming
        assert first.generation
        reserved.generation = "00000002-b"
        reserved.busy.release()
        assert room(slots, slots - 1, "00000003-b", base="00000001-a") is first


def test_the_copy_that_a_run_began_from_is_told_by_its_whole_generation() -> None:
    """An attempt that was killed early has begun a save of the same number. The next copy replaces that one."""
    copies = Replicas()
    message = _replicate(0, 0, 2, 8, "00000006-b", "00000007-c")
    for number, generation in enumerate(("00000006-a", "00000006-b")):
        slot = copies._reserve_slot(_replicate(0, number, 2, 8, "", generation), NOTHING)
        slot.generation = generation
        slot.busy.release()
    slot = copies._reserve_slot(message, NOTHING)
    slot.busy.release()
    assert [slot.generation for _, slot in copies.list_complete()] == ["00000006-b"]
    for slots in copies._slots.values():
        for slot in slots:
            slot.memory.close()


def test_memory_that_an_ended_process_had_prepared_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for its first attempt and made no snapshot. A process that still waits keeps its memory."""
    monkeypatch.setattr(CheckpointIndex, "from_bytes", lambda data: NOTHING)
    host = CheckpointService(linger=1.0)
    waiting, ended, owned = mock.Mock(body=b""), mock.Mock(body=b""), mock.Mock(body=b"")
    for rank, trainer in enumerate((waiting, ended, owned)):
        host.on_allocate(trainer, Allocate(rank=rank, size=PAGE, slots=1))
    host.slots[2][0].generation = "00000009-a"
    slots = [host.slots[rank][0] for rank in range(3)]
    ended.is_connected.return_value = owned.is_connected.return_value = False
    host._drop_older(5)
    assert sorted(host.slots) == [0, 2]
    assert [slot.memory.descriptor >= 0 for slot in slots] == [True, False, True]
    for slot in slots:
        slot.memory.close()


def test_a_trainer_starts_while_a_dead_one_s_snapshot_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the same memory at once, and may fill it after the write."""
    monkeypatch.setattr(service, "_PAGES_TIMEOUT", 0.01)
    host, trainer = CheckpointService(linger=1.0), mock.Mock()
    trainer.body = b""
    monkeypatch.setattr(CheckpointIndex, "from_bytes", lambda data: NOTHING)
    host.on_allocate(trainer, Allocate(rank=0, size=PAGE, slots=2))
    first = host.slots[0]
    first[0].generation = "00000001-a"
    is_ready = []
    with first[0].busy:
        host.on_allocate(trainer, Allocate(rank=0, size=PAGE, slots=2))
        assert host.slots[0] is first
        assert trainer.send.call_args.args[0].generations == ("00000001-a", "")
        for slot in (0, 1):
            await_other(lambda slot=slot: first[slot].memory.page_filler.wait(1.0))
            host.on_await_pages(trainer, AwaitPages(0, slot))
            is_ready.append(trainer.send.call_args.args[0].ready)
    host.on_await_pages(trainer, AwaitPages(0, 0))
    assert [*is_ready, trainer.send.call_args.args[0].ready] == [False, True, True]
    for slot in first:
        slot.memory.close()


def test_a_reader_of_a_snapshot_waits_for_its_bytes() -> None:
    progress = Progress()
    received: list[int] = []
    reader = threading.Thread(target=lambda: received.append(progress.wait(10)))
    reader.start()
    while reader.is_alive() and not progress._changed._waiters:  # type: ignore[attr-defined]
        pass
    progress.advance(4)
    progress.advance(12)
    reader.join(30)
    assert received == [12]
    progress.fail()
    assert progress.wait(12) == 12
    with pytest.raises(OSError, match="before its state was copied"):
        progress.wait(13)


@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=60), piece=st.integers(1, 20))
def test_threads_that_share_a_chunk_compute_its_checksum(data: bytes, piece: int) -> None:
    with mock.patch.object(snapshot_memory, "_CHECKSUM_PIECE", piece), ThreadPoolExecutor(3) as executor:
        assert snapshot_memory.compute_checksum(memoryview(data), executor) == crc32(data)
