"""Host memory of snapshots: shared memory laid out as a data file, so that it is written, copied and read as it is.

The trainer fills in the elements of each chunk; the service computes their checksums and adds the archive frames. The
memory then holds byte for byte the contents of the file. Its pages are put in place by several threads without the
interpreter lock: the kernel clears new pages on first touch, at 2 GB/s by one thread and 5 by four, and snapshots take
tens of GB. Python's own mmap would use one thread and let no other one run meanwhile. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import numpy as np

from megascale.checkpoint.background.service_protocol import SnapshotMessage
from megascale.checkpoint.format import archive
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.core.capacity import Capacity, usable_cores

_POPULATE_READ = 22  # MADV_POPULATE_READ and MADV_POPULATE_WRITE, since Linux 5.14
_POPULATE_WRITE = 23
_PIECE_BYTES = 64 << 20  # per call: the process can change its mappings in between; less is not worth a thread
_CLEARING_THREADS = 16  # upper limits: with more threads the memory's bandwidth is the bottleneck
_MAPPING_THREADS = 8


# Pages ------------------------------------------------------------------------------------------------------------


def map_shared(handle: int, size: int, writable: bool = True) -> mmap.mmap:
    """Map `size` bytes of an open file with all its pages in place, so that no later access maps a page.

    Raises OSError if memory is insufficient.
    """
    mapping = mmap.mmap(handle, size, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    fill_pages(mapping, writable=writable)
    return mapping


def fill_pages(
    mapping: mmap.mmap,
    *,
    new: bool = False,
    writable: bool = True,
    stop: threading.Event | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Put every page of a shared mapping in place without changing its contents.

    Args:
        new: most pages have never been touched, and must be cleared.
        stop: ends the work early once it is set.
        on_progress: called with the bytes of every finished piece, from several threads.

    Raises OSError if memory is insufficient.
    """
    # Pages are filled by plain threads: those of a pool are joined at the end of the process.
    filler = _PagePieces(mapping, writable, stop or threading.Event(), on_progress)
    count = min(_CLEARING_THREADS if new else _MAPPING_THREADS, usable_cores() // 2)
    threads = [
        threading.Thread(target=filler.fill_pieces, daemon=True)
        for _ in range(min(count, -(-len(mapping) // _PIECE_BYTES)) - 1)
    ]
    for thread in threads:
        thread.start()
    filler.fill_pieces()
    for thread in threads:
        thread.join()
    if filler.error:
        raise OSError(filler.error, os.strerror(filler.error))


class _PagePieces:
    """The pieces of a mapping, which several threads fill.

    Attributes:
        error: error number of a call that failed, 0 if none did.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        writable: bool,
        stop: threading.Event,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.error = 0
        self._memory = np.frombuffer(mapping, np.uint8)  # the mapping cannot be closed while this exists
        if writable:
            self._advice = _POPULATE_WRITE
        else:
            self._advice = _POPULATE_READ
        self._madvise = _find_madvise()
        self._stop = stop
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._starts = iter(range(0, len(mapping), _PIECE_BYTES))

    def fill_pieces(self) -> None:
        """Fill pieces until all are done, `stop` is set or a call fails."""
        while not self._stop.is_set() and not self.error:
            with self._lock:
                start = next(self._starts, None)
            if start is None:
                return
            length = min(_PIECE_BYTES, len(self._memory) - start)
            self._fill_piece(start, length)
            if self._on_progress is not None:
                self._on_progress(length)

    def _fill_piece(self, start: int, length: int) -> None:
        if self._madvise is not None:
            if self._madvise(self._memory.ctypes.data + start, length, self._advice) == 0:
                return
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                self.error = code
                return
        # On a kernel before 5.14 a page is put in place by reading it.
        self._memory[start : start + length : mmap.PAGESIZE].max()


@cache
def _find_madvise() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


class PageFiller:
    """Puts the pages of a new shared mapping in place in the background.

    A process fills one mapping after the other, that with the lowest `turn` first, since training needs the cores too.

    Attributes:
        remaining_bytes: bytes whose pages are not in place yet.
        problem: why the work ended early, None if it did not.
    """

    _waiting: ClassVar[list[tuple[int, int]]] = []  # turns of all unfinished mappings; the smallest is next
    _next: ClassVar[threading.Condition] = threading.Condition()
    _number: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, mapping: mmap.mmap, turn: int = 0) -> None:
        self.remaining_bytes = len(mapping)
        self.problem: OSError | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = threading.Event()
        self._turn = (turn, next(self._number))
        with self._next:
            self._waiting.append(self._turn)
        self._thread = threading.Thread(target=self._run, args=(mapping,), name="megascale-pages", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` and return whether every page is in place. Raises OSError if memory is insufficient."""
        is_done = self._done.wait(seconds)
        if self.problem is not None:
            raise self.problem
        return is_done

    def stop(self) -> None:
        """End the work now; the mapping may be closed afterwards."""
        self._stop.set()
        with self._next:
            self._next.notify_all()
        self._thread.join()

    def _run(self, mapping: mmap.mmap) -> None:
        with self._next:
            self._next.wait_for(lambda: self._stop.is_set() or min(self._waiting) == self._turn)
        try:
            fill_pages(mapping, new=True, stop=self._stop, on_progress=self._record_progress)
        except OSError as error:
            self.problem = error
        except Exception as error:
            self.problem = OSError(f"memory cannot be put in place: {error!r}")
        finally:  # the next mapping and the users of this one wait for it, whatever happened
            with self._next:
                self._waiting.remove(self._turn)
                self._next.notify_all()
            with self._lock:
                self.remaining_bytes = 0
            self._done.set()

    def _record_progress(self, length: int) -> None:
        with self._lock:
            self.remaining_bytes = max(0, self.remaining_bytes - length)


# Slots ------------------------------------------------------------------------------------------------------------


class StagingMemory:
    """Anonymous shared memory, which the kernel frees with the last process that has it, however that ends.

    It may be used at once; `page_filler` puts its pages in place in the background.
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
        self.page_filler = PageFiller(self.map, turn)
        _memories.add(self)

    @property
    def view(self) -> memoryview:
        """Return the memory."""
        return memoryview(self.map)

    def close(self) -> None:
        """Release the memory in this process."""
        self.page_filler.stop()
        # If a view is still in use in this process, the memory is released with it.
        with contextlib.suppress(BufferError):
            self.map.close()
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


_memories: weakref.WeakSet[StagingMemory] = weakref.WeakSet()
_reserving = threading.Lock()


@dataclass
class Slot:
    """Memory for one snapshot of one process. `generation` is empty while the snapshot is incomplete."""

    memory: StagingMemory
    index: CheckpointIndex
    step: int = -1
    generation: str = ""
    state: str = ""
    identity: str = ""
    crcs: list[int] = field(default_factory=list)
    ranks: int = 0
    busy: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, snapshot: SnapshotMessage, crcs: list[int]) -> None:
        """Mark the slot as holding the complete snapshot that the message describes."""
        self.crcs = crcs
        self.step = snapshot.step
        self.ranks = snapshot.ranks
        self.state = snapshot.state
        self.identity = snapshot.identity
        self.generation = snapshot.generation


def pop_older_slots(slots: dict[int, list[Slot]], sequence: int) -> list[Slot]:
    """Remove and return the slots of the processes of which only saves up to a number are left.

    Slots that are in use, or without any snapshot, stay: their process may be about to fill them.
    """
    popped: list[Slot] = []
    for rank, own_slots in list(slots.items()):
        sequences = [int(slot.generation[:8]) for slot in own_slots if slot.generation]
        if sequences and max(sequences) <= sequence and not any(slot.busy.locked() for slot in own_slots):
            popped += slots.pop(rank)
    return popped


def make_slots(count: int, size: int, index: CheckpointIndex) -> list[Slot]:
    """Return memory for `count` snapshots of `size` bytes.

    Raises OSError and allocates nothing if memory is insufficient. Without the check the process would be killed by a
    signal when it touches the pages.
    """
    with _reserving, contextlib.ExitStack() as cleanup:
        capacity = Capacity.measure()
        reserved = sum(memory.page_filler.remaining_bytes for memory in _memories)
        if capacity.memory is not None and count * size > capacity.memory - reserved:
            free = max(0, capacity.memory - reserved)
            raise OSError(errno.ENOMEM, f"{free:,} of {count * size:,} bytes are free ({capacity.memory_from})")
        slots = []
        for number in range(count):
            # The first slots of all processes are filled before their second ones.
            memory = StagingMemory(size, turn=number)
            cleanup.callback(memory.close)
            slots.append(Slot(memory, index))
        cleanup.pop_all()
    return slots


# Completing a snapshot --------------------------------------------------------------------------------------------


class Progress:
    """The number of bytes of a snapshot, from its start, that are as the file will have them."""

    def __init__(self) -> None:
        self._ready = 0
        self._failed = False
        self._changed = threading.Condition()

    def advance(self, ready: int) -> None:
        """Set the number of ready bytes."""
        with self._changed:
            self._ready = ready
            self._changed.notify_all()

    def fail(self) -> None:
        """Report that no more bytes will become ready; this has no effect once all are."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait(self, minimum: int) -> int:
        """Wait for at least `minimum` ready bytes and return their number. Raises OSError if they never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._ready >= minimum)
            if self._ready < minimum:
                raise OSError("the process ended before its state was copied")
            return self._ready


def frame_chunks(
    memory: memoryview, index: CheckpointIndex, staged: Iterable[int], progress: Progress
) -> tuple[np.ndarray, int]:
    """Add the archive frames of a snapshot while its elements arrive; return the CRC-32 of each chunk and of the file.

    Args:
        memory: as many bytes as the file.
        index: the chunks of this file alone, in file order.
        staged: yields the number of chunks whose elements are in place, finally all.
        progress: advanced with each chunk that is complete.
    """
    columns = index.columns
    crcs = np.zeros(len(index), np.uint32)
    file_crc = 0
    done = 0
    for rows in staged:
        for row in range(done, rows):
            start = int(columns["start"][row])
            data = int(columns["data"][row])
            length = int(columns["length"][row])
            stop = data + index.nbytes(row)
            crc = crc32(memory[data:stop])
            crcs[row] = crc
            head, tail = archive.build_archive_frame(index.info(row).dtype, index.box(row).sizes, crc, length)
            memory[start:data] = head
            memory[stop : start + length] = tail
            for part_crc, size in ((crc32(head), len(head)), (crc, stop - data), (crc32(tail), len(tail))):
                file_crc = archive.combine_crc32(file_crc, part_crc, size)
            progress.advance(start + length)
        done = rows
    progress.advance(len(memory))
    return crcs, file_crc
