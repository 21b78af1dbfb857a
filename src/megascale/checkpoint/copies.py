"""Copies from stored chunks to the memory of shards, by several threads.

A load copies tens of GB. Four threads together copied 7 GB/s from memory that is not page-locked to a device. Eight
threads that copy through their own page-locked memory reach 17 GB/s (dev/reports/recovery.md). A single thread fills
new memory at 2 GB/s.

A snapshot that is mapped into a new process costs the mapping of its pages, 15 GB/s for eight threads (dev/log.md,
page-locking). `ShardCopier.copy_from_file` maps none: each thread reads a piece of the file into its page-locked
memory. It reads a small part, starts the device's copy of it, and computes its checksum while it is in the cache.
If this process has the file's bytes in page-locked memory, the device copies them from there, and nothing is read.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from megascale.checkpoint.format.archive import combine_crc32, crc32
from megascale.checkpoint.format.chunks import TensorShard, box_slices, intersect_boxes, split_box
from megascale.core.capacity import usable_cores
from megascale.core.stopwatch import Stopwatch
from megascale.core.tensors import Box

log = logging.getLogger(__name__)

_MAX_THREADS_FEW_CORES = 4  # with few cores: one thread per core, up to this number
_MAX_THREADS = 32  # with many cores: half of them, or this rank's share of them if that is less
_LOCAL_RANKS_VARIABLE = "LOCAL_WORLD_SIZE"  # of torchrun and of agents: number of ranks that share the cores
_COPY_BYTES = 16 << 20  # largest part of a chunk that one thread copies at a time
# Bytes that a thread reads from a file before their checksum is computed. They stay in a core's cache: on two cores of
# an EPYC one thread read and checked 5.0 GB/s in parts of 4 MB and 3.5 GB/s in parts of 16 MB.
_READ_BYTES = 4 << 20
_NUMPY_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size
_CopyPair = tuple[torch.Tensor, torch.Tensor]  # target and source of equal shapes


class FileRange(NamedTuple):
    """Bytes of an open file.

    Attributes:
        descriptor: file descriptor, which stays open until the bytes have been read.
        start: offset of the first byte.
        size: number of bytes.
        memory: the same bytes ([size] uint8) in memory of this process from which its device can copy, or None.
    """

    descriptor: int
    start: int
    size: int
    memory: np.ndarray | None = None

    def cut(self, start: int, stop: int) -> FileRange:
        """Return the range of the bytes from `start` up to `stop` of this range."""
        memory = self.memory
        if memory is not None:
            memory = memory[start:stop]
        return FileRange(self.descriptor, self.start + start, stop - start, memory)

    def read_into(self, memory: np.ndarray) -> None:
        """Read the bytes into `memory` ([size] uint8). Raises OSError if the file has fewer bytes."""
        count = 0
        while count < self.size:
            read_bytes = os.preadv(self.descriptor, [memory[count:].data], self.start + count)
            if not read_bytes:
                raise OSError(f"the file ends {self.size - count} bytes early")
            count += read_bytes


class CopiedPiece(NamedTuple):
    """Piece of a chunk that was copied from a file.

    Attributes:
        crc: CRC-32 of the bytes.
        size: number of bytes.
        problem: why the file was not read, or an empty text.
    """

    crc: int
    size: int
    problem: str = ""


class _Task(NamedTuple):
    """Call of a function in a thread of a pool, with the future of its result."""

    future: Future[Any]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class PriorityPool:
    """Threads that run urgent tasks before other tasks, and each of the two kinds in the order of submission.

    Args:
        threads: number of threads.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._urgent_tasks: deque[_Task] = deque()
        self._other_tasks: deque[_Task] = deque()
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., Any], *arguments: Any, is_urgent: bool = True) -> Future[Any]:
        """Start a call of `function` in one of the threads, and return its future.

        Raises RuntimeError after `shutdown`.
        """
        task = _Task(Future(), function, arguments)
        tasks = self._urgent_tasks if is_urgent else self._other_tasks
        with self._lock:
            # A thread takes the task once the lock is free. A pool that refuses the call keeps no task without a call.
            self._pool.submit(self._run_next)
            tasks.append(task)
        return task.future

    def shutdown(self, cancel: bool) -> None:
        """Wait for the tasks under way, and for all others too unless `cancel` is set."""
        if cancel:
            with self._lock:
                cancelled = [*self._urgent_tasks, *self._other_tasks]
                self._urgent_tasks.clear()
                self._other_tasks.clear()
            for task in cancelled:
                task.future.cancel()
        self._pool.shutdown()

    def _run_next(self) -> None:
        """Run the next task. Each task has one call of this method."""
        with self._lock:
            tasks = self._urgent_tasks or self._other_tasks
            if not tasks:  # they were cancelled
                return
            task = tasks.popleft()
        try:
            result = task.function(*task.arguments)
        except BaseException as error:
            task.future.set_exception(error)
        else:
            task.future.set_result(result)


class PinnedBuffer:
    """Page-locked memory of a thread for copies to a device.

    Args:
        size: size in bytes.
        page_locked: whether to page-lock the memory. False for machines without a device.

    Raises:
        RuntimeError: the memory cannot be page-locked.
    """

    def __init__(self, size: int, page_locked: bool = True) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=page_locked)

    def view_bytes(self, size: int) -> torch.Tensor:
        """Return the first `size` bytes of the buffer."""
        return self._memory[:size]

    def copy_in(self, source: torch.Tensor) -> torch.Tensor | None:
        """Copy a tensor of any strides into the buffer.

        Returns:
            The contiguous copy, which is valid until the next call, or None if the buffer is too small.
        """
        if not 0 < source.nbytes <= self._memory.numel() or source.element_size() not in _NUMPY_TYPES:
            return None
        copy = self._memory[: source.nbytes].view(source.dtype).view(source.shape)
        numpy_type = _NUMPY_TYPES[source.element_size()]
        # numpy copies without the interpreter lock. torch would start another thread pool in each of these threads.
        np.copyto(copy.view(numpy_type).numpy(), source.view(numpy_type).numpy())
        return copy


def count_threads(cores: int) -> int:
    """Return the number of copying threads of this rank on a host with `cores` usable cores."""
    local_ranks = os.environ.get(_LOCAL_RANKS_VARIABLE, "")
    share = cores // 2
    if local_ranks.isdecimal() and int(local_ranks) > 1:
        share = min(share, cores // int(local_ranks))
    return max(min(_MAX_THREADS_FEW_CORES, cores), min(_MAX_THREADS, share))


class ShardCopier:
    """Context manager that copies chunks into the memory of shards in threads, with at most two rounds under way.

    On devices each thread copies on its own stream, which does not wait for other streams. The source must therefore be
    complete. The thread that made the shards must enter the context, which waits for their initialisation. At the exit
    all copies are complete, and the error of a failed copy is raised.

    Attributes:
        threads: number of threads.
        thread_seconds: seconds of all threads by part of the copies from files: allocation (of page-locked memory),
            read, launch (of a copy to the device), checksum, and wait (for the device).
    """

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._devices = {shard.tensor.device for shard in shards if shard.tensor.is_cuda}
        self.threads = count_threads(usable_cores())
        self.thread_seconds: dict[str, float] = {}
        self._measure_lock = threading.Lock()
        self._pool = PriorityPool(self.threads)
        self._thread_state = threading.local()
        self._previous_round: list[Future[Any]] = []
        self._current_round: list[Future[Any]] = []
        # Targets and sources of the current round's copies within a device, which one thread makes together: a thread
        # and a wait for each of a thousand small copies took longer than the copies.
        self._device_pairs: list[_CopyPair] = []

    def __enter__(self) -> ShardCopier:
        for device in self._devices:  # the shards' memory may still be initialised on this thread's stream
            torch.cuda.current_stream(device).synchronize()
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        # After an error, which may be an order to leave, the copies that have not begun are superfluous.
        if exception_type is None:
            self._submit_device_pairs()
        self._pool.shutdown(cancel=exception_type is not None)
        if exception_type is None:
            for copy in self._previous_round + self._current_round:
                copy.result()  # raises the error of a failed copy
            self._previous_round = []
            self._current_round = []

    def copy_to_shard(self, box: Box, tensor: torch.Tensor, shard: TensorShard) -> None:
        """Start to copy the elements that a box and a shard have in common.

        Args:
            box: box of the elements in the logical tensor.
            tensor: the elements, which must not change until the next round has ended.
        """
        common = intersect_boxes(box, shard.box)
        if common is None:
            return
        with torch.no_grad():
            target = shard.tensor.detach()
        if self._is_on_device(tensor):
            self._device_pairs.append((target[box_slices(shard.box, common)], tensor[box_slices(box, common)]))
            return
        for copied_box in split_box(common, tensor.element_size(), _COPY_BYTES):
            copy = self._submit(target[box_slices(shard.box, copied_box)], tensor[box_slices(box, copied_box)])
            self._current_round.append(copy)

    def copy_from_file(
        self, source: FileRange, target: torch.Tensor, *, is_urgent: bool = True
    ) -> list[Future[CopiedPiece]]:
        """Start to copy bytes of a file into the memory of a contiguous tensor, and return the copies in file order.

        The copies belong to no round, since no memory must be kept for them. Two rounds of 64 MB have work for eight
        threads only. The caller reads the result of each copy, which raises its error.

        Args:
            target: tensor with `source.size` bytes.
            is_urgent: whether to copy the bytes before those of copies that are not urgent.
        """
        with torch.no_grad():
            target_bytes = target.detach().view(-1).view(torch.uint8)
        copies = []
        for start in range(0, source.size, _COPY_BYTES):
            stop = min(start + _COPY_BYTES, source.size)
            piece = source.cut(start, stop)
            copies.append(self._pool.submit(self._copy_piece, piece, target_bytes[start:stop], is_urgent=is_urgent))
        return copies

    def wait_for_previous_round(self) -> None:
        """End the current round, and wait for the copies of the round before it."""
        self._submit_device_pairs()
        for copy in self._previous_round:
            copy.result()
        self._previous_round = self._current_round
        self._current_round = []

    def join(
        self, sources: Sequence[torch.Tensor | FileRange], device: torch.device
    ) -> tuple[torch.Tensor, list[list[CopiedPiece]]]:
        """Concatenate bytes of tensors and of files into new memory of a device.

        Any thread may call this method. The memory is complete on return.

        Returns:
            The bytes, and for each source that is a range of a file its pieces.
        """
        sizes = [source.size if isinstance(source, FileRange) else source.nbytes for source in sources]
        result = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        copies: list[Future[None]] = []
        file_copies: list[list[Future[CopiedPiece]]] = []
        device_pairs: list[_CopyPair] = []
        for target_bytes, source in zip(result.split(sizes), sources, strict=True):
            if isinstance(source, FileRange):
                file_copies.append(self.copy_from_file(source, target_bytes))
                continue
            tensor = source
            if target_bytes.storage_offset() % tensor.element_size():  # tensors of a smaller dtype precede it
                tensor = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
                if tensor.is_cuda:
                    torch.cuda.current_stream(tensor.device).synchronize()  # the copy below is on another stream
            target = target_bytes.view(tensor.dtype).view(tensor.shape)
            if self._is_on_device(tensor):
                device_pairs.append((target, tensor))
                continue
            box = Box((0,) * tensor.dim(), tuple(tensor.shape))
            for copied_box in split_box(box, tensor.element_size(), _COPY_BYTES):
                slices = box_slices(box, copied_box)
                copies.append(self._submit(target[slices], tensor[slices]))
        self._copy_pairs(device_pairs)
        for copy in copies:
            copy.result()
        return result, [[copy.result() for copy in pieces] for pieces in file_copies]

    @staticmethod
    def _is_on_device(tensor: torch.Tensor) -> bool:
        """Return whether copies of a tensor are so fast that one thread makes those of a round."""
        return tensor.is_cuda

    def _submit_device_pairs(self) -> None:
        """Start the current round's copies within a device."""
        if self._device_pairs:
            self._current_round.append(self._pool.submit(self._copy_pairs, self._device_pairs))
            self._device_pairs = []

    def _copy_pairs(self, pairs: Sequence[_CopyPair]) -> None:
        """Copy sources into their targets, and wait once for all copies."""
        stream: torch.cuda.Stream | None = None
        with torch.no_grad():
            for target, source in pairs:
                if not target.is_cuda:
                    target.copy_(source)
                    continue
                stream = self._device_stream(target.device)
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        if stream is not None:
            stream.synchronize()

    def _submit(self, target: torch.Tensor, source: torch.Tensor) -> Future[None]:
        return self._pool.submit(self._copy, target, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            if not target.is_cuda:
                target.copy_(source)
                return
            stream = self._device_stream(target.device)
            with torch.cuda.stream(stream):
                pinned = None
                buffer = None if source.is_cuda else self._page_locked_buffer()
                if buffer is not None:
                    pinned = buffer.copy_in(source)
                target.copy_(source if pinned is None else pinned, non_blocking=pinned is not None)
                stream.synchronize()

    def _copy_piece(self, source: FileRange, target: torch.Tensor) -> CopiedPiece:
        stopwatch = Stopwatch()
        try:
            if source.memory is not None:
                crc = self._copy_memory(source.memory, target, stopwatch)
            elif target.is_cuda:
                crc = self._copy_to_device(source, target, stopwatch)
            else:
                crc = self._read_parts(source, target, None, stopwatch)
        except OSError as error:
            return CopiedPiece(0, source.size, str(error))
        self._add_seconds(stopwatch.timings)
        return CopiedPiece(crc, source.size)

    def _copy_memory(self, memory: np.ndarray, target: torch.Tensor, stopwatch: Stopwatch) -> int:
        """Copy bytes of this process's memory, and return their CRC-32, which a device's copy does not delay."""
        stream: torch.cuda.Stream | None = None
        if target.is_cuda:
            stream = self._device_stream(target.device)
            with torch.no_grad(), torch.cuda.stream(stream):
                target.copy_(torch.from_numpy(memory), non_blocking=True)
        else:
            np.copyto(target.numpy(), memory)
        stopwatch.end_phase("launch")
        crc = crc32(memory)
        stopwatch.end_phase("checksum")
        if stream is not None:
            stream.synchronize()
            stopwatch.end_phase("wait")
        return crc

    def _copy_to_device(self, source: FileRange, target: torch.Tensor, stopwatch: Stopwatch) -> int:
        """Copy a piece through this thread's page-locked memory, and return the CRC-32. Raises OSError as `source`."""
        buffer = self._page_locked_buffer()
        if buffer is None:
            staged = torch.empty(source.size, dtype=torch.uint8)
        else:
            staged = buffer.view_bytes(source.size)
        stream = self._device_stream(target.device)
        stopwatch.end_phase("allocation")
        with torch.no_grad(), torch.cuda.stream(stream):
            crc = self._read_parts(source, staged, target, stopwatch)
        stream.synchronize()
        stopwatch.end_phase("wait")
        return crc

    @staticmethod
    def _read_parts(source: FileRange, staged: torch.Tensor, target: torch.Tensor | None, stopwatch: Stopwatch) -> int:
        """Read a piece into host memory in small parts, and return its CRC-32. Raises OSError as `source`.

        Args:
            staged: host memory.
            target: memory of a device, to which this thread's current stream copies each part; None: the bytes
                stay in host memory.
        """
        memory = staged.numpy()
        crc = 0
        for start in range(0, source.size, _READ_BYTES):
            stop = min(start + _READ_BYTES, source.size)
            source.cut(start, stop).read_into(memory[start:stop])
            stopwatch.end_phase("read")
            if target is not None:
                target[start:stop].copy_(staged[start:stop], non_blocking=True)  # waits if not page-locked
                stopwatch.end_phase("launch")
            crc = combine_crc32(crc, crc32(memory[start:stop]), stop - start)
            stopwatch.end_phase("checksum")
        return crc

    def _add_seconds(self, timings: Mapping[str, float]) -> None:
        """Add the seconds of a thread's copy to `thread_seconds`."""
        with self._measure_lock:
            for part, seconds in timings.items():
                self.thread_seconds[part] = self.thread_seconds.get(part, 0.0) + seconds

    def describe_threads(self) -> str:
        """Return the seconds of the average thread by part of the copies from files, or an empty text without any."""
        if not self.thread_seconds:
            return ""
        parts = ", ".join(f"{part} {seconds / self.threads:.2f}" for part, seconds in self.thread_seconds.items())
        return f"of each of {self.threads} copying threads: {parts}"

    def _device_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return this thread's stream for a device."""
        streams: dict[torch.device, torch.cuda.Stream] = self._thread_state.__dict__.setdefault("streams", {})
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)
        return streams[device]

    def _page_locked_buffer(self) -> PinnedBuffer | None:
        """Return this thread's page-locked memory, or None if it is unavailable.

        It is made for the first copy from host memory, since page-locking blocks the device's other threads.
        """
        if not hasattr(self._thread_state, "buffer"):
            self._thread_state.buffer = None
            try:
                self._thread_state.buffer = PinnedBuffer(_COPY_BYTES)
            except RuntimeError as error:
                log.warning("%s bytes of memory could not be page-locked (%s), so copies are slow", _COPY_BYTES, error)
        buffer: PinnedBuffer | None = self._thread_state.buffer
        return buffer
