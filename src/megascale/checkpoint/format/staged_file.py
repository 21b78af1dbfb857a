"""A data file laid out in memory: staged there element by element, then written, copied and read as it is. No torch.

The trainer fills in the elements of each chunk; the service computes their checksums and puts the archive frames
around them. After that the memory holds byte for byte what the file will.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megascale.checkpoint.format import archive
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.mapping import Filling
from megascale.core.capacity import Capacity


class StagingMemory:
    """Shared memory without a name: gone when the last process that has it is, whatever killed it.

    It may be used at once; its pages come into place in the background (`filling`).
    """

    def __init__(self, size: int, turn: int = 0) -> None:
        self.size = size
        self.handle = os.memfd_create("megascale-checkpoint", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.handle, size)
            self.map = mmap.mmap(self.handle, size, mmap.MAP_SHARED)
        except OSError:
            os.close(self.handle)
            raise
        self.filling = Filling(self.map, turn)
        _MEMORIES.add(self)

    @property
    def view(self) -> memoryview:
        """All of it."""
        return memoryview(self.map)

    def close(self) -> None:
        """Let go of it here."""
        self.filling.stop()
        # A view may still be in use somewhere in this process; then the memory goes with it.
        with contextlib.suppress(BufferError):
            self.map.close()
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


_MEMORIES: weakref.WeakSet[StagingMemory] = weakref.WeakSet()
_reserving = threading.Lock()


class Label(Protocol):
    """What a snapshot is, as messages say it; see `Slot`."""

    @property
    def step(self) -> int: ...
    @property
    def generation(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def identity(self) -> str: ...
    @property
    def ranks(self) -> int: ...


@dataclass
class Slot:
    """Memory for one snapshot of one process. `generation` is empty while what it holds is not complete."""

    memory: StagingMemory
    index: CheckpointIndex
    step: int = -1
    generation: str = ""
    state: str = ""
    identity: str = ""
    crcs: list[int] = field(default_factory=list)
    ranks: int = 0
    busy: threading.Lock = field(default_factory=threading.Lock)

    def become(self, label: Label, crcs: list[int]) -> None:
        """It is complete now, and this."""
        self.crcs, self.step, self.ranks = crcs, label.step, label.ranks
        self.state, self.identity = label.state, label.identity
        self.generation = label.generation


def make_slots(count: int, size: int, index: CheckpointIndex) -> list[Slot]:
    """Memory for so many snapshots of `size` bytes. Raises OSError, and keeps none, where it lacks: now, and not by a
    signal when its pages are touched."""
    with _reserving, contextlib.ExitStack() as made:
        room = Capacity.measure()
        promised = sum(memory.filling.remaining_bytes for memory in _MEMORIES)
        if room.memory is not None and count * size > room.memory - promised:
            left = f"{max(0, room.memory - promised):,} of {count * size:,} bytes are free ({room.memory_from})"
            raise OSError(errno.ENOMEM, left)
        slots = []
        for number in range(count):
            slots.append(Slot(StagingMemory(size, turn=number), index))  # of all processes the first, then the second
            made.callback(slots[-1].memory.close)
        made.pop_all()
    return slots


class Progress:
    """How many bytes of a snapshot, from its start, are as the file will have them."""

    def __init__(self) -> None:
        self._ready = 0
        self._failed = False
        self._changed = threading.Condition()

    def advance(self, ready: int) -> None:
        """So many are."""
        with self._changed:
            self._ready = ready
            self._changed.notify_all()

    def fail(self) -> None:
        """There will be no more; harmless once all are there."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait(self, least: int) -> int:
        """Bytes that are ready, at least that many; OSError if it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._ready >= least)
            if self._ready < least:
                raise OSError("the process ended before its state was copied")
            return self._ready


def frame_chunks(
    memory: memoryview, index: CheckpointIndex, staged: Iterable[int], progress: Progress
) -> tuple[np.ndarray, int]:
    """Complete a snapshot while its elements come; CRC-32 of each chunk and of the whole.

    Args:
        memory: as many bytes as the file.
        index: the chunks of this file alone, in file order.
        staged: yields how many chunks have their elements in place, at last all.
        progress: is told of each chunk that is complete.
    """
    c = index.columns
    crcs = np.zeros(len(index), np.uint32)
    whole = done = 0
    for rows in staged:
        for row in range(done, rows):
            start, data, length = int(c["start"][row]), int(c["data"][row]), int(c["length"][row])
            count = index.nbytes(row)
            crcs[row] = crc = crc32(memory[data : data + count])
            head, tail = archive.wrap(index.info(row).dtype, index.box(row).sizes, crc, length)
            memory[start:data] = head
            memory[data + count : start + length] = tail
            for piece_crc, size in ((crc32(head), len(head)), (crc, count), (crc32(tail), len(tail))):
                whole = archive.combine(whole, piece_crc, size)
            progress.advance(start + length)
        done = rows
    progress.advance(len(memory))
    return crcs, whole
