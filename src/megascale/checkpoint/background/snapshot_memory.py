"""Shared host memory of snapshots, which has the layout of a data file. Needs no torch.

The trainer copies the elements of each chunk into the memory. The service computes the chunks' checksums and adds the
archive frames. The memory then has exactly the bytes of the file, so it is written and sent without conversion.

The kernel clears a new page when it is first accessed. Small pages come at 2 GB/s with one thread and 5 GB/s with four,
huge ones (huge_pages.py) about ten times as fast, and snapshots have tens of GB. Several threads without the
interpreter lock therefore populate the pages (map and clear them) in advance. Python's own mmap would use one thread,
and block all other threads meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import numpy as np

from megascale.checkpoint.background.huge_pages import identify_memory, open_memory
from megascale.checkpoint.background.service_protocol import SnapshotMessage
from megascale.checkpoint.format import archive
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.core.capacity import Capacity, usable_cores

_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14
# Bytes per call. The process can change its mappings only between two calls; smaller calls do not pay for a thread.
_CALL_BYTES = 64 << 20
# Largest numbers of threads, beyond which the memory's bandwidth is the limit.
_CLEARING_THREADS = 16  # for new pages
_MAPPING_THREADS = 8  # for pages that the kernel has already cleared
CHECKSUM_THREADS = 4  # for each rank of the host; one thread reads some 8 GB/s
_CHECKSUM_PIECE = 16 << 20  # bytes of a chunk that one thread reads


# Pages ------------------------------------------------------------------------------------------------------------


def map_shared(descriptor: int, size: int, writable: bool = True) -> mmap.mmap:
    """Return a mapping of `size` bytes of an open file, with all pages populated.

    Raises:
        OSError: memory is insufficient.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED, protection)
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
    """Populate all pages of a shared mapping without changing its contents.

    Args:
        new: whether most pages have never been accessed, so that the kernel must clear them.
        writable: whether the mapping is writable.
        stop: event that ends the work early.
        on_progress: function that several threads call with the number of bytes of each finished range.

    Raises:
        OSError: memory is insufficient.
    """
    filler = _RangeFiller(mapping, writable, stop or threading.Event(), on_progress)
    thread_limit = min(_CLEARING_THREADS if new else _MAPPING_THREADS, usable_cores() // 2)
    range_count = math.ceil(len(mapping) / _CALL_BYTES)
    # This thread fills ranges too. A thread pool is not used, because the interpreter would wait for it at its end.
    threads = [
        threading.Thread(target=filler.fill_ranges, daemon=True) for _ in range(min(thread_limit, range_count) - 1)
    ]
    for thread in threads:
        thread.start()
    filler.fill_ranges()
    for thread in threads:
        thread.join()
    if filler.error:
        raise OSError(filler.error, os.strerror(filler.error))


class _RangeFiller:
    """Work of several threads that populate the pages of one mapping, range by range.

    Attributes:
        error: error number of a failed call, or 0.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        writable: bool,
        stop: threading.Event,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.error = 0
        self._memory = np.frombuffer(mapping, np.uint8)  # keeps the mapping from being closed meanwhile
        if writable:
            self._advice = _POPULATE_WRITE
        else:
            self._advice = _POPULATE_READ
        self._madvise = _find_madvise()
        self._stop = stop
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._starts = iter(range(0, len(mapping), _CALL_BYTES))

    def fill_ranges(self) -> None:
        """Populate ranges until all are done, `stop` is set or a call fails."""
        while not self._stop.is_set() and not self.error:
            with self._lock:
                start = next(self._starts, None)
            if start is None:
                return
            length = min(_CALL_BYTES, len(self._memory) - start)
            self._fill_range(start, length)
            if self._on_progress is not None:
                self._on_progress(length)

    def _fill_range(self, start: int, length: int) -> None:
        if self._madvise is not None:
            if self._madvise(self._memory.ctypes.data + start, length, self._advice) == 0:
                return
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                self.error = code
                return
        # Kernels before 5.14 lack this advice. There, reading a byte of each page populates the page.
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
    """Thread that populates the pages of a new shared mapping in the background.

    Training needs the processor cores too, so a process fills only one mapping at a time.

    Args:
        turn: the mapping with the lowest turn is filled first.

    Attributes:
        remaining_bytes: number of bytes whose pages are not populated yet.
        problem: error that ended the work early, or None.
    """

    # (turn, number) of all unfinished mappings in this process. The smallest pair is filled next.
    _waiting: ClassVar[list[tuple[int, int]]] = []
    _next: ClassVar[threading.Condition] = threading.Condition()
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, mapping: mmap.mmap, turn: int = 0) -> None:
        self.remaining_bytes = len(mapping)
        self.problem: OSError | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = threading.Event()
        self._turn = (turn, next(self._numbers))
        with self._next:
            self._waiting.append(self._turn)
        self._thread = threading.Thread(target=self._run, args=(mapping,), name="megascale-pages", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`, and return whether all pages are populated. Raises OSError if memory is short."""
        is_done = self._done.wait(seconds)
        if self.problem is not None:
            raise self.problem
        return is_done

    def stop(self) -> None:
        """End the work now. The mapping may be closed afterwards."""
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
        finally:  # after any error too, because the next mapping and the users of this one wait for this thread
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
    """Anonymous shared memory, which the kernel frees when the last process that has it ends.

    The memory may be used at once. `page_filler` populates its pages in the background.

    Args:
        turn: see PageFiller.
    """

    def __init__(self, size: int, turn: int = 0) -> None:
        self.size = size
        self.descriptor = open_memory(size)
        try:
            self.map = mmap.mmap(self.descriptor, size, mmap.MAP_SHARED)
        except OSError:
            os.close(self.descriptor)
            raise
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.page_filler = PageFiller(self.map, turn)
        _memories.add(self)

    @property
    def identity(self) -> str:
        """Return the text by which a trainer that has mapped the memory identifies it; empty if it is closed."""
        return identify_memory(self.descriptor) if self.descriptor >= 0 else ""

    @property
    def view(self) -> memoryview:
        """Return a view of the whole memory."""
        return memoryview(self.map)

    def close(self) -> None:
        """Release the memory in this process."""
        self.page_filler.stop()
        # If a view is still in use, `close` fails, and the memory is released with the view.
        with contextlib.suppress(BufferError):
            self.map.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_memories: weakref.WeakSet[StagingMemory] = weakref.WeakSet()
_allocation_lock = threading.Lock()


@dataclass
class Slot:
    """Memory for one snapshot of one rank, with the description of the snapshot.

    Attributes:
        index: index of the rank's file.
        generation: generation of the snapshot, empty while the snapshot is incomplete.
        state: saved state besides tensors, as JSON.
        identity: identity of the checkpoints folder.
        crcs: CRC-32 of each chunk in file order.
        rank: rank of the snapshot. The memory may belong to another rank by now.
        size: number of bytes of the snapshot, which may be less than the memory has.
        ranks: number of ranks of the run.
        busy: held while a thread completes, writes or sends the snapshot.
    """

    memory: StagingMemory
    index: CheckpointIndex
    step: int = -1
    generation: str = ""
    state: str = ""
    identity: str = ""
    crcs: list[int] = field(default_factory=list)
    rank: int = -1
    size: int = 0
    ranks: int = 0
    busy: threading.Lock = field(default_factory=threading.Lock)

    def mark_complete(self, snapshot: SnapshotMessage, crcs: list[int]) -> None:
        """Store the description of the slot's snapshot, which is complete from now on."""
        self.crcs = crcs
        self.rank = snapshot.rank
        self.size = snapshot.size
        self.step = snapshot.step
        self.ranks = snapshot.ranks
        self.state = snapshot.state
        self.identity = snapshot.identity
        self.generation = snapshot.generation

    @property
    def is_intact(self) -> bool:
        """Return whether the memory is open and no page of it failed to be populated."""
        return self.memory.descriptor >= 0 and self.memory.page_filler.problem is None

    def wait_until_free(self, seconds: float = -1) -> bool:
        """Wait until no thread is busy with the snapshot, up to a time if it is positive; return whether that is so."""
        if not self.busy.acquire(timeout=seconds):
            return False
        self.busy.release()
        return True


def pop_older_slots(slots: dict[int, list[Slot]], sequence: int, is_used: Callable[[int], bool]) -> list[Slot]:
    """Remove and return the slots of ranks that have only saves up to the number `sequence`.

    Slots that are busy stay. Slots without snapshots stay if `is_used` holds for their rank, which will fill them.

    Args:
        slots: slots by rank. Those that no rank uses any more have negative keys.
        is_used: returns whether a process has the slots of a rank. A process that prepared slots for its first attempt
            may have ended without an attempt.
    """
    popped_slots: list[Slot] = []
    for rank, rank_slots in list(slots.items()):
        sequences = [int(slot.generation[:8]) for slot in rank_slots if slot.generation]
        is_busy = any(slot.busy.locked() for slot in rank_slots)
        if sequences:
            is_superfluous = max(sequences) <= sequence
        else:
            is_superfluous = rank < 0 or not is_used(rank)
        if is_superfluous and not is_busy:
            popped_slots += slots.pop(rank)
    return popped_slots


def make_slots(count: int, size: int, index: CheckpointIndex, spare: int = 0) -> list[Slot]:
    """Return memory for `count` snapshots of `size` bytes.

    Args:
        spare: number of bytes of the host's memory that must stay free.

    Raises:
        OSError: memory is insufficient, and nothing was allocated. Without this check a signal would kill the process
            when it accesses the pages.
    """
    with _allocation_lock, contextlib.ExitStack() as cleanup:
        capacity = Capacity.measure()
        reserved_bytes = sum(memory.page_filler.remaining_bytes for memory in _memories)
        if capacity.memory is not None and count * size > capacity.memory - reserved_bytes - spare:
            free_bytes = max(0, capacity.memory - reserved_bytes - spare)
            raise OSError(errno.ENOMEM, f"{free_bytes:,} of {count * size:,} bytes are free ({capacity.memory_from})")
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
    """Number of bytes at the start of a snapshot that are complete, for threads that wait for more."""

    def __init__(self) -> None:
        self._ready_bytes = 0
        self._has_failed = False
        self._changed = threading.Condition()

    def advance(self, ready_bytes: int) -> None:
        """Set the number of complete bytes."""
        with self._changed:
            self._ready_bytes = ready_bytes
            self._changed.notify_all()

    def fail(self) -> None:
        """Report that no more bytes will be completed. The call has no effect on waits for bytes that are complete."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def wait(self, minimum: int) -> int:
        """Wait for at least `minimum` complete bytes, and return their number. Raises OSError after `fail`."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_failed or self._ready_bytes >= minimum)
            if self._ready_bytes < minimum:
                raise OSError("the process ended before its state was copied")
            return self._ready_bytes


def frame_chunks(
    memory: memoryview, index: CheckpointIndex, staged_counts: Iterable[int], progress: Progress
) -> tuple[np.ndarray, int]:
    """Add the archive frames (head and tail) of a snapshot's chunks while the trainer copies the elements.

    Args:
        memory: memory of the snapshot, with the size of the file.
        index: index of this file, in file order.
        staged_counts: yields the number of chunks whose elements are copied, as it increases up to all chunks.
        progress: advanced after each chunk.

    Returns:
        The CRC-32 of each chunk, and the CRC-32 of the file.
    """
    columns = index.columns
    crcs = np.zeros(len(index), np.uint32)
    file_crc = 0
    framed_count = 0
    threads = min(usable_cores(), CHECKSUM_THREADS)
    with ThreadPoolExecutor(threads, "megascale-checksums") as executor:  # without work it starts no thread
        for staged_count in staged_counts:
            for row in range(framed_count, staged_count):
                start = int(columns["start"][row])
                data = int(columns["data"][row])
                length = int(columns["length"][row])
                stop = data + index.nbytes(row)
                crc = compute_checksum(memory[data:stop], executor)
                crcs[row] = crc
                head, tail = archive.build_archive_frame(index.info(row).dtype, index.box(row).sizes, crc, length)
                memory[start:data] = head
                memory[stop : start + length] = tail
                for segment_crc, size in ((crc32(head), len(head)), (crc, stop - data), (crc32(tail), len(tail))):
                    file_crc = archive.combine_crc32(file_crc, segment_crc, size)
                progress.advance(start + length)
            framed_count = staged_count
    progress.advance(len(memory))
    return crcs, file_crc


def compute_checksum(data: memoryview, executor: ThreadPoolExecutor) -> int:
    """Return the CRC-32 of a chunk. Threads, which the interpreter lock does not stop, share a large one."""
    if len(data) <= _CHECKSUM_PIECE:
        return crc32(data)
    pieces = [data[start : start + _CHECKSUM_PIECE] for start in range(0, len(data), _CHECKSUM_PIECE)]
    crc = 0
    for piece, piece_crc in zip(pieces, executor.map(crc32, pieces), strict=True):
        crc = archive.combine_crc32(crc, piece_crc, len(piece))
    return crc
