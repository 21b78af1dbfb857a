"""Flat buffers of one model chunk: where its parameters and gradients live, and how data parallelism moves them.

Parameters of a chunk lie in one contiguous buffer in their own type, gradients in one of float32 (float64 for
float64 models), in the order of `layout.py`. Weight gradients accumulate straight into the buffer. Buckets are the
unit of communication: a bucket is reduced as soon as the last micro-batch's backward has filled it, and gathered
before the chunk's next forward (MegaScale section 3.2; the wire pattern of ZeRO-1 that its timeline shows).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megascale.core.tensors import Piece, flat_boxes
from megascale.parallel.collectives import ALONE, Axis, Pending, all_gather_into, all_reduce, reduce_scatter_in_place
from megascale.parallel.layout import FlatLayout, Member, lay_out
from megascale.parallel.parameters import Spec, materialise, spec_of


@dataclass(frozen=True)
class Extent:
    """A run of a shard that belongs to one piece: what decay, norms and checkpoints need to know.

    Attributes:
        start, stop: elements of the shard.
        spec: the parameter's spec.
        piece: the piece of a logical tensor.
        first: which element of the piece's box the run begins at.
    """

    start: int
    stop: int
    spec: Spec
    piece: Piece
    first: int


@dataclass
class Shard:
    """The part of one bucket whose optimizer state this rank owns, as views of the chunk's buffers."""

    params: torch.Tensor
    grads: torch.Tensor
    extents: list[Extent]


class FlatChunk:
    """The buffers of one chunk.

    Args:
        module: a chunk on the meta device; it gets storage here.
        device: where the buffers live.
        data: the data-parallel axis, for gathers; `reduce` for the gradients (another communicator).
        zero: 0 keeps all optimizer state on every rank, 1 shards it.
        bucket_elements: size of a bucket; None for one bucket a chunk.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        data: Axis = ALONE,
        reduce: Axis = ALONE,
        zero: int = 1,
        bucket_elements: int | None = None,
    ) -> None:
        self.module, self.data, self.reduce, self.zero = module, data, reduce, zero
        meta = list(module.parameters())
        specs = [spec_of(p) for p in meta]
        # A parameter of padding rows only has no piece; it counts as an ordinary matrix.
        members = [
            Member(p.numel(), any(x.decay for x in s.pieces) or p.dim() > 1, s.shared)
            for p, s in zip(meta, specs, strict=True)
        ]
        self.layout: FlatLayout = lay_out(members, data.size, bucket_elements)
        dtype = meta[0].dtype
        self.params = torch.zeros(self.layout.size, dtype=dtype, device=device)
        self.grads = torch.zeros(self.layout.size, dtype=grad_dtype(dtype), device=device)
        storage = {}
        for p, start in zip(meta, self.layout.starts, strict=True):
            storage[p] = self.params[start : start + p.numel()].view(p.shape)
        materialise(module, storage)
        self.parameters = list(module.parameters())
        self.names = {piece.name for spec in specs for piece in spec.pieces}
        self._bucket_of = {i: b for b, span in enumerate(self.layout.buckets) for i in span.members}
        for i, (p, start) in enumerate(zip(self.parameters, self.layout.starts, strict=True)):
            p.main_grad = self.grads[start : start + p.numel()].view(p.shape)  # type: ignore[attr-defined]
            p.grad_ready = self._ready_call(i)  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(self._accumulate)
        self.shards = [self._shard(b) for b in range(len(self.layout.buckets))]
        self._calls = [0] * len(self.parameters)  # gradient contributions a micro-batch, learnt in the first one
        self._seen = [0] * len(self.parameters)
        self._left: list[int] = []
        self._reducing: list[Pending] = []
        self._gathering: list[Pending] = []
        self._last = False

    # gradients -------------------------------------------------------------------------------------------------

    def zero_grads(self) -> None:
        """Forget the gradients of the step before."""
        self.grads.zero_()

    def begin_backward(self, last: bool) -> None:
        """Say that a micro-batch's backward is next; `last` lets buckets be reduced as they fill."""
        self._seen = [0] * len(self.parameters)
        self._last = last and any(self._calls)
        self._left = [len(span.members) for span in self.layout.buckets]

    def end_backward(self, last: bool) -> None:
        """After a micro-batch's backward: learn the calls, and reduce what the hooks have not."""
        if not any(self._calls):
            self._calls = list(self._seen)
        if last:
            for bucket, left in enumerate(self._left):
                if left or not self._last:
                    self._reduce(bucket)
            self._last = False

    def finish_reduction(self) -> None:
        """Wait until this rank's shards hold the sum over data-parallel ranks."""
        for pending in self._reducing:
            pending.wait()
        self._reducing.clear()

    @staticmethod
    def _accumulate(p: torch.Tensor) -> None:
        if p.grad is None:
            return  # an operator has put it into main_grad and said so
        p.main_grad.add_(p.grad)  # type: ignore[attr-defined]
        p.grad = None
        p.grad_ready()  # type: ignore[attr-defined]

    def _ready_call(self, index: int):
        def ready() -> None:
            self._seen[index] += 1
            if self._last and self._seen[index] == self._calls[index]:
                bucket = self._bucket_of[index]
                self._left[bucket] -= 1
                if not self._left[bucket]:
                    self._reduce(bucket)

        return ready

    def _reduce(self, bucket: int) -> None:
        span = self.layout.buckets[bucket]
        whole = self.grads[span.start : span.stop]
        if self.zero == 0:
            self._reducing.append(all_reduce(whole, self.reduce))
        else:
            self._reducing.append(reduce_scatter_in_place(whole, self.reduce))

    # parameters ------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Send for the parts of the parameters that other ranks updated."""
        if self.zero == 0 or self.data.size == 1:
            return
        for bucket, span in enumerate(self.layout.buckets):
            start, stop = self.layout.shard(bucket, self.data.rank, self.data.size)
            self._gathering.append(
                all_gather_into(self.params[span.start : span.stop], self.params[start:stop], self.data)
            )

    def finish_gather(self) -> None:
        """Wait until the chunk's parameters are whole."""
        for pending in self._gathering:
            pending.wait()
        self._gathering.clear()

    # shards ----------------------------------------------------------------------------------------------------

    def _shard(self, bucket: int) -> Shard:
        span = self.layout.buckets[bucket]
        start, stop = span.start, span.stop
        if self.zero > 0:
            start, stop = self.layout.shard(bucket, self.data.rank, self.data.size)
        extents = sorted(self._extents(span.members, start, stop), key=lambda s: s.start)
        return Shard(self.params[start:stop], self.grads[start:stop], extents)

    def _extents(self, members: tuple[int, ...], start: int, stop: int) -> Iterator[Extent]:
        for i in members:
            spec, at = spec_of(self.parameters[i]), self.layout.starts[i]
            for piece in spec.pieces:
                a, b = max(at, start), min(at + piece.box.count, stop)
                if a < b:
                    yield Extent(a - start, b - start, spec, piece, a - at)
                at += piece.box.count


def grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type gradients accumulate in: float32, or float64 for float64 models."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def extent_boxes(extent: Extent, flat: torch.Tensor) -> Iterator[tuple[Piece, tuple[int, ...], torch.Tensor]]:
    """Cut an extent of a shard-shaped tensor into boxes of its logical tensor: (piece, offsets, view of box shape)."""
    length = extent.stop - extent.start
    for box, a, b in flat_boxes(extent.piece.box, extent.first, extent.first + length):
        view = flat[extent.start + a - extent.first : extent.start + b - extent.first]
        yield extent.piece, box.offsets, view.view(box.sizes)
