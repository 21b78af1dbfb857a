"""Copies between stored chunks and memory that is loaded into, by a few threads.

Loading moves tens of GB. From memory that is not page-locked four threads together copied 7 GB/s to a device; through
page-locked memory of their own, eight copy 17 (docs/reports/recovery.md). A thread clears new memory at 2 GB/s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from megascale.checkpoint.format.chunks import TensorShard, intersect_boxes, slices, split_box
from megascale.core.capacity import usable_cores
from megascale.core.tensors import Box

log = logging.getLogger(__name__)

_FEW, _MOST = 4, 8  # threads at most: of few cores each, of many half
_PIECE = 16 << 20  # bytes of a chunk that a thread copies at a time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size, those that numpy knows


class Staging:
    """Page-locked memory of a thread, through which what a device is to have goes.

    Args:
        size: bytes.
        page_locked: False: ordinary memory, where there is no device.

    Raises RuntimeError if there is no such memory.
    """

    def __init__(self, size: int, page_locked: bool = True) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=page_locked)

    def hold(self, source: torch.Tensor) -> torch.Tensor | None:
        """A copy of a tensor of any strides, contiguous, there until the next; None if it is larger than this."""
        if not 0 < source.nbytes <= self._memory.numel() or source.element_size() not in _BITS:
            return None
        held = self._memory[: source.nbytes].view(source.dtype).view(source.shape)
        bits = _BITS[source.element_size()]
        # numpy's copies need no lock of the interpreter's, and torch's start threads of their own in every thread.
        np.copyto(held.view(bits).numpy(), source.view(bits).numpy())
        return held


class Copies:
    """Copies into the memory of shards, two rounds under way at most. On devices each thread has a stream of its own,
    which waits for no other: what is copied from must be there, and so must the memory of the shards.

    To be entered by the thread that made the shards; when it is left all is copied, and what went wrong is raised.
    """

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._devices = {shard.tensor.device for shard in shards if shard.tensor.is_cuda}
        cores = usable_cores()
        self._pool = ThreadPoolExecutor(max(min(_FEW, cores), min(_MOST, cores // 2)))
        self._own = threading.local()
        self._before: list[Future[None]] = []
        self._round: list[Future[None]] = []

    def __enter__(self) -> Copies:
        for device in self._devices:  # what makes their memory may be under way on this thread's stream
            torch.cuda.current_stream(device).synchronize()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown()
        if kind is None:
            self.end_round()
            self.end_round()

    def copy_to_shard(self, box: Box, tensor: torch.Tensor, shard: TensorShard) -> None:
        """Copy what a part of a chunk and a shard share. `tensor` keeps its values until the round after has ended."""
        common = intersect_boxes(box, shard.box)
        if common is None:
            return
        with torch.no_grad():
            target = shard.tensor.detach()
        if not common.sizes:
            self._round.append(self._begin(target, tensor))
            return
        # Between places of one device a copy is too short to be cut.
        cut = [common] if tensor.is_cuda else split_box(common, tensor.element_size(), _PIECE)
        for part in cut:
            to, of = target[slices(shard.box, part)], tensor[slices(box, part)]
            self._round.append(self._begin(to, of))

    def end_round(self) -> None:
        """Wait for the round before."""
        for one in self._before:
            one.result()
        self._before, self._round = self._round, []

    def join_pieces(self, pieces: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """The bytes of pieces in host memory, one after the other in new memory of a device (uint8); complete when it
        returns. For any thread."""
        result = torch.empty(sum(piece.nbytes for piece in pieces), dtype=torch.uint8, device=device)
        started = []
        for place, piece in zip(result.split([piece.nbytes for piece in pieces]), pieces, strict=True):
            if place.storage_offset() % piece.element_size():  # odd-sized neighbours of another type
                piece = piece.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
            target, whole = place.view(piece.dtype).view(piece.shape), Box((0,) * piece.dim(), tuple(piece.shape))
            for part in split_box(whole, piece.element_size(), _PIECE):
                at = slices(whole, part)
                started.append(self._begin(target[at], piece[at]))
        for one in started:
            one.result()
        return result

    def _begin(self, target: torch.Tensor, source: torch.Tensor) -> Future[None]:
        return self._pool.submit(self._copy, target, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            if not target.is_cuda:
                target.copy_(source)
                return
            stream, staging = self._of_thread(target.device)
            with torch.cuda.stream(stream):
                held = None if source.is_cuda or staging is None else staging.hold(source)
                target.copy_(source if held is None else held, non_blocking=held is not None)
                stream.synchronize()

    def _of_thread(self, device: torch.device) -> tuple[torch.cuda.Stream, Staging | None]:
        """This thread's stream and staging memory for a device; None: none is to be had, so copies are slow."""
        own: dict[torch.device, tuple[torch.cuda.Stream, Staging | None]]
        own = self._own.__dict__.setdefault("of_devices", {})
        if device not in own:
            try:
                staging = Staging(_PIECE)
            except RuntimeError as error:
                log.warning("%s bytes of memory could not be page-locked (%s): slow copies", _PIECE, error)
                staging = None
            own[device] = torch.cuda.Stream(device), staging
        return own[device]
