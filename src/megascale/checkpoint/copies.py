"""Copies from stored chunks to the memory of shards, by several threads.

A load copies tens of GB. Four threads together copied 7 GB/s from memory that is not page-locked to a device. Eight
threads that copy through their own page-locked memory reach 17 GB/s (dev/reports/recovery.md). A single thread fills
new memory at 2 GB/s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from megascale.checkpoint.format.chunks import TensorShard, box_slices, intersect_boxes, split_box
from megascale.core.capacity import usable_cores
from megascale.core.tensors import Box

log = logging.getLogger(__name__)

_MAX_THREADS_FEW_CORES = 4  # with few cores: one thread per core, up to this number
_MAX_THREADS = 8  # with many cores: one thread per two cores, up to this number
_COPY_BYTES = 16 << 20  # largest part of a chunk that one thread copies at a time
_NUMPY_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


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


class ShardCopier:
    """Context manager that copies chunks into the memory of shards in threads, with at most two rounds under way.

    On devices each thread copies on its own stream, which does not wait for other streams. The source must therefore be
    complete. The thread that made the shards must enter the context, which waits for their initialisation. At the exit
    all copies are complete, and the error of a failed copy is raised.
    """

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._devices = {shard.tensor.device for shard in shards if shard.tensor.is_cuda}
        cores = usable_cores()
        self._pool = ThreadPoolExecutor(max(min(_MAX_THREADS_FEW_CORES, cores), min(_MAX_THREADS, cores // 2)))
        self._thread_state = threading.local()
        self._previous_round: list[Future[None]] = []
        self._current_round: list[Future[None]] = []

    def __enter__(self) -> ShardCopier:
        for device in self._devices:  # the shards' memory may still be initialised on this thread's stream
            torch.cuda.current_stream(device).synchronize()
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        self._pool.shutdown()
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
        # A copy within one device takes so little time that it is not divided.
        copied_boxes = [common]
        if not tensor.is_cuda:
            copied_boxes = list(split_box(common, tensor.element_size(), _COPY_BYTES))
        for copied_box in copied_boxes:
            copy = self._submit(target[box_slices(shard.box, copied_box)], tensor[box_slices(box, copied_box)])
            self._current_round.append(copy)

    def wait_for_previous_round(self) -> None:
        """End the current round, and wait for the copies of the round before it."""
        for copy in self._previous_round:
            copy.result()
        self._previous_round = self._current_round
        self._current_round = []

    def join_tensors(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Concatenate the bytes (uint8) of tensors in host memory into new memory of a device.

        Any thread may call this method. The result is complete on return.
        """
        result = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8, device=device)
        copies = []
        for target_bytes, tensor in zip(result.split([tensor.nbytes for tensor in tensors]), tensors, strict=True):
            if target_bytes.storage_offset() % tensor.element_size():  # tensors of a smaller dtype precede it
                tensor = tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            target = target_bytes.view(tensor.dtype).view(tensor.shape)
            box = Box((0,) * tensor.dim(), tuple(tensor.shape))
            for copied_box in split_box(box, tensor.element_size(), _COPY_BYTES):
                slices = box_slices(box, copied_box)
                copies.append(self._submit(target[slices], tensor[slices]))
        for copy in copies:
            copy.result()
        return result

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
