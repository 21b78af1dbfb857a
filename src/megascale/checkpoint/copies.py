"""Copies between stored chunks and the memory that is loaded into, by several threads.

A load moves tens of GB. From memory that is not page-locked, four threads together copied 7 GB/s to a device; through
their own page-locked memory, eight copy 17 GB/s (dev/reports/recovery.md). One thread touches new memory at 2 GB/s.
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

_MAX_THREADS_FEW_CORES = 4  # one per core
_MAX_THREADS = 8  # one per two cores
_PIECE_BYTES = 16 << 20  # of a chunk, copied at once by a thread
_NUMPY_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


class PinnedBuffer:
    """A thread's page-locked memory for copies to a device.

    Args:
        size: bytes.
        page_locked: False: ordinary memory, where there is no device.

    Raises RuntimeError if the memory cannot be page-locked.
    """

    def __init__(self, size: int, page_locked: bool = True) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=page_locked)

    def copy_in(self, source: torch.Tensor) -> torch.Tensor | None:
        """Copy a tensor of any strides into the buffer and return the contiguous copy, None if it does not fit.

        The copy is valid until the next call.
        """
        if not 0 < source.nbytes <= self._memory.numel() or source.element_size() not in _NUMPY_TYPES:
            return None
        copy = self._memory[: source.nbytes].view(source.dtype).view(source.shape)
        numpy_type = _NUMPY_TYPES[source.element_size()]
        # numpy copies without the interpreter lock; torch would start a thread pool in each of these threads.
        np.copyto(copy.view(numpy_type).numpy(), source.view(numpy_type).numpy())
        return copy


class ShardCopier:
    """Copies chunks into the memory of shards, with at most two rounds under way.

    On devices each thread has its own stream, which waits for no other stream: the source must be complete, and so must
    the shards' memory. Enter the context in the thread that made the shards. On exit all copies are complete, and an
    error of one is raised.
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

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown()
        if kind is None:
            self.wait_for_previous_round()
            self.wait_for_previous_round()

    def copy_to_shard(self, box: Box, tensor: torch.Tensor, shard: TensorShard) -> None:
        """Begin to copy the common part of a chunk and a shard.

        Args:
            box: the chunk's box.
            tensor: the chunk's elements, which must not change until the following round has ended.
        """
        common = intersect_boxes(box, shard.box)
        if common is None:
            return
        with torch.no_grad():
            target = shard.tensor.detach()
        # A copy within one device is too short to be cut.
        parts = [common]
        if not tensor.is_cuda:
            parts = list(split_box(common, tensor.element_size(), _PIECE_BYTES))
        for part in parts:
            copy = self._submit(target[box_slices(shard.box, part)], tensor[box_slices(box, part)])
            self._current_round.append(copy)

    def wait_for_previous_round(self) -> None:
        """End the current round and wait for the copies of the one before it."""
        for copy in self._previous_round:
            copy.result()
        self._previous_round = self._current_round
        self._current_round = []

    def join_pieces(self, pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the concatenated bytes (uint8) of tensors in host memory in new memory of a device, complete.

        It may be called from any thread.
        """
        result = torch.empty(sum(piece.nbytes for piece in pieces), dtype=torch.uint8, device=device)
        copies = []
        for target_bytes, piece in zip(result.split([piece.nbytes for piece in pieces]), pieces, strict=True):
            if target_bytes.storage_offset() % piece.element_size():  # preceded by an odd size of another type
                piece = piece.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            target = target_bytes.view(piece.dtype).view(piece.shape)
            box = Box((0,) * piece.dim(), tuple(piece.shape))
            for part in split_box(box, piece.element_size(), _PIECE_BYTES):
                part_slices = box_slices(box, part)
                copies.append(self._submit(target[part_slices], piece[part_slices]))
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
            stream, buffer = self._device_state(target.device)
            with torch.cuda.stream(stream):
                pinned = None if source.is_cuda or buffer is None else buffer.copy_in(source)
                target.copy_(source if pinned is None else pinned, non_blocking=pinned is not None)
                stream.synchronize()

    def _device_state(self, device: torch.device) -> tuple[torch.cuda.Stream, PinnedBuffer | None]:
        """Return this thread's stream and buffer for a device; no buffer if memory cannot be page-locked."""
        states: dict[torch.device, tuple[torch.cuda.Stream, PinnedBuffer | None]]
        states = self._thread_state.__dict__.setdefault("devices", {})
        if device not in states:
            try:
                buffer = PinnedBuffer(_PIECE_BYTES)
            except RuntimeError as error:
                log.warning("%s bytes of memory could not be page-locked (%s): slow copies", _PIECE_BYTES, error)
                buffer = None
            states[device] = torch.cuda.Stream(device), buffer
        return states[device]
