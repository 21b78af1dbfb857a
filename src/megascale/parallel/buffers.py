"""Flat buffers of one model chunk: where its parameters and gradients live, and how data parallelism moves them.

Parameters of a chunk lie in one contiguous buffer in their own type, gradients in one of float32 (float64 for
float64 models), in the order of `buffer_layout.py`. Weight gradients accumulate straight into the buffer, whose parts
for GEMMs' weights are never made zero: a step's first GEMM writes them (`overwrite_main_grad`). Buckets are the unit
of communication: a bucket is reduced as soon as the last micro-batch's backward has filled it (ZeRO-2: every
micro-batch's), and gathered before the chunk's next forward (MegaScale section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megascale import torch_private
from megascale.core.tensors import Piece, flat_boxes
from megascale.ops import side_stream
from megascale.parallel.buffer_layout import BufferMember, FlatLayout, lay_out
from megascale.parallel.collectives import (
    ALONE,
    Axis,
    Pending,
    all_gather_into,
    all_reduce,
    reduce_scatter_in_place,
    reduce_scatter_rounded,
)
from megascale.parallel.parameters import Spec, materialise, spec_of

TIED = "embedding.token.weight"


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
class FlatShard:
    """The part of one bucket whose optimizer state this rank owns, as views of the chunk's buffers."""

    params: torch.Tensor
    grads: torch.Tensor
    extents: list[Extent]


@dataclass(frozen=True)
class Axes:
    """The axes that a chunk's buffers communicate over.

    Attributes:
        data: gathers parameters over the data-parallel ranks; reduce: reduces gradients over the same ranks, on
            another communicator, so that neither waits behind the other.
        tensor: the tensor-parallel ranks.
        tied: first and last stage, which both hold the token embedding; of size 1 where one process holds it once.
    """

    data: Axis = ALONE
    reduce: Axis = ALONE
    tensor: Axis = ALONE
    tied: Axis = ALONE


class GradientPool:
    """Two whole-chunk gradient buffers that the chunks of a rank use in turn (ZeRO-2).

    One chunk's backward fills a buffer while the other's is reduced.
    """

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._users: list[tuple[FlatChunk, dict[int, Pending]] | None] = [None, None]
        self._index = 0

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for a chunk of `size` elements; called for each chunk before the first use."""
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = [torch.zeros(size, dtype=dtype, device=device) for _ in range(2)]

    def take(self, user: FlatChunk) -> tuple[torch.Tensor, dict[int, Pending]]:
        """A zeroed buffer and a dictionary for its reductions; what it held before is drained first."""
        self._index = 1 - self._index
        self._drain(self._index)
        reducing: dict[int, Pending] = {}
        self._users[self._index] = (user, reducing)
        return self._buffers[self._index][: user.layout.size].zero_(), reducing

    def drain(self) -> None:
        """Drain both."""
        for index in (0, 1):
            self._drain(index)

    def _drain(self, index: int) -> None:
        before, self._users[index] = self._users[index], None
        if before is not None:
            before[0].drain(before[1])


class FlatChunk:
    """The buffers of one chunk.

    Args:
        module: a chunk on the meta device; it gets storage here.
        device: where the buffers live.
        axes: whom to communicate with.
        zero: 0 keeps all optimizer state on every rank, 1 shards it, 2 shards the accumulated gradients too.
        bucket_elements: size of a bucket; None for one bucket a chunk.
        pool: gradient buffers shared with the other chunks of this rank, for zero=2.
        overlap: reduce buckets as they fill and gather ahead; without it both wait for each other.
        reduce_dtype: communication dtype of gradients; None for their own.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        axes: Axes | None = None,
        zero: int = 1,
        bucket_elements: int | None = None,
        pool: GradientPool | None = None,
        overlap: bool = True,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.module, self.overlap, self.reduce_dtype = module, overlap, reduce_dtype
        self.axes = axes = axes or Axes()
        self.zero = min(zero, 1) if axes.data.size == 1 else zero
        meta = list(module.parameters())
        specs = [spec_of(p) for p in meta]
        self.names = {piece.name for spec in specs for piece in spec.pieces}
        members = [self._member(p, spec) for p, spec in zip(meta, specs, strict=True)]
        self.layout: FlatLayout = lay_out(members, axes.data.size, bucket_elements)
        dtype = meta[0].dtype
        accumulation_dtype = grad_dtype(dtype)
        self.params = torch.zeros(self.layout.size, dtype=dtype, device=device)
        starts = self.layout.starts
        materialise(
            module,
            {p: self.params[a : a + p.numel()].view(p.shape) for p, a in zip(meta, starts, strict=True)},
        )
        self.parameters = list(module.parameters())
        self._bucket_of = {i: b for b, span in enumerate(self.layout.buckets) for i in span.members}
        for i, p in enumerate(self.parameters):
            p.grad_ready = self._ready_call(i)  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(self._accumulate)
        self.pool = pool or GradientPool()
        if self.zero == 2:
            self.pool.allocate(self.layout.size, accumulation_dtype, device)
            self.grads = torch.empty(0, dtype=accumulation_dtype, device=device)
            self.sums = torch.zeros(self.layout.size // axes.data.size, dtype=accumulation_dtype, device=device)
        else:
            self.grads = torch.zeros(self.layout.size, dtype=accumulation_dtype, device=device)
            self._aim(self.grads)
        self.shards = [self._shard(b) for b in range(len(self.layout.buckets))]
        self._calls = [0] * len(self.parameters)  # gradient contributions a micro-batch, learnt in the first one
        self._seen = [0] * len(self.parameters)
        self._left: list[int] = []
        self._overwritten: list[int] = []  # parameters whose gradients a step's first GEMM writes
        self._zeroed: list[torch.Tensor] | None = None  # the parts of the gradients that each step makes zero
        self._reducing: dict[int, Pending] = {}
        self._gathering: dict[int, Pending] = {}
        # Buckets in the order in which a forward first needs them, and those that each unit of it needs.
        spans = self.layout.buckets
        self.by_use = sorted(range(len(spans)), key=lambda b: min(spans[b].members))
        self._needs = self._units() if self.overlap else []
        self._reduces = False  # whether buckets are reduced as they fill in this backward

    def _units(self) -> list[list[int]]:
        """Buckets of each unit of the module's forward; empty for a module that names no units."""
        if not hasattr(self.module, "units"):
            return []
        number = {id(p): i for i, p in enumerate(self.parameters)}
        self.module.pre_forward_gather = self._pre_forward_gather  # type: ignore[assignment]
        return [sorted({self._bucket_of[number[id(p)]] for p in unit}) for unit in self.module.units()]  # type: ignore[operator]

    def _member(self, p: nn.Parameter, spec: Spec) -> BufferMember:
        own_bucket = self.axes.tied.size > 1 and any(piece.name == TIED for piece in spec.pieces)
        return BufferMember(p.numel(), any(piece.decay for piece in spec.pieces), spec.replicated, own_bucket)

    def _aim(self, buffer: torch.Tensor) -> None:
        """Let gradients accumulate in `buffer`."""
        for p, start in zip(self.parameters, self.layout.starts, strict=True):
            p.main_grad = buffer[start : start + p.numel()].view(p.shape)  # type: ignore[attr-defined]

    # gradients -------------------------------------------------------------------------------------------------

    def zero_grads(self) -> None:
        """Forget the gradients of the step before."""
        side_stream.current.synchronize()
        if self.zero == 2:
            self.sums.zero_()
            return
        if self._zeroed is None and any(self._calls):
            self._learn_overwritten()
        torch_private.foreach_zero_([self.grads] if self._zeroed is None else self._zeroed)
        for i in self._overwritten:
            self.parameters[i].overwrite_main_grad = True  # type: ignore[attr-defined]

    def _learn_overwritten(self) -> None:
        """Weights with one gradient a micro-batch, made by a GEMM (ops/linear.py), need no zeros to add it to."""
        self._overwritten = [
            i for i, p in enumerate(self.parameters) if self._calls[i] == 1 and hasattr(p, "overwrite_main_grad")
        ]
        self._zeroed, at = [], 0
        spans = [(self.layout.starts[i], self.layout.starts[i] + self.parameters[i].numel()) for i in self._overwritten]
        for start, stop in [*sorted(spans), (self.layout.size, self.layout.size)]:
            if start > at:
                self._zeroed.append(self.grads[at:start])
            at = stop

    def begin_backward(self, last: bool) -> None:
        """Say that a micro-batch's backward is next; `last` if it is the step's last of this chunk."""
        self._seen = [0] * len(self.parameters)
        if self.zero == 2:
            self.grads, self._reducing = self.pool.take(self)
            self._aim(self.grads)
        self._reduces = self.overlap and (last or self.zero == 2) and any(self._calls)
        # A parameter that gets no gradient (another chunk's copy in use) makes no call.
        self._left = [sum(1 for i in span.members if self._calls[i]) for span in self.layout.buckets]

    def end_backward(self, last: bool) -> None:
        """After a micro-batch's backward: learn the calls, and reduce the buckets that are not in flight yet."""
        if not any(self._calls):
            self._calls = list(self._seen)
        self._reduces = False
        if not last and self.zero < 2:
            return
        side_stream.current.synchronize()
        for i in self._overwritten:
            if self.parameters[i].overwrite_main_grad:  # type: ignore[attr-defined]  # no GEMM came to it in this step
                self.parameters[i].main_grad.zero_()  # type: ignore[attr-defined]
                self.parameters[i].overwrite_main_grad = False  # type: ignore[attr-defined]
        start, stop = self.layout.replicated
        # Each tensor-parallel rank saw its part of the sequence only.
        all_reduce(self.grads[start:stop], self.axes.tensor).wait()
        for bucket in range(len(self.layout.buckets)):
            if bucket not in self._reducing:
                self._reduce(bucket)
                if not self.overlap:
                    self._reducing[bucket].wait()

    def finish_reduction(self) -> None:
        """Wait until this rank's shards hold the sum over data-parallel ranks (and over a tied embedding's copies)."""
        if self.zero == 2:
            self.pool.drain()
        else:
            self.drain(self._reducing)
        if self.layout.own_bucket is not None:
            all_reduce(self.shards[self.layout.own_bucket].grads, self.axes.tied).wait()

    def drain(self, reducing: dict[int, Pending]) -> None:
        """Wait for reductions in flight; ZeRO-2 adds them to the sums."""
        for bucket, pending in reducing.items():
            mine = pending.wait()
            if self.zero == 2:
                self.shards[bucket].grads.add_(mine)
        reducing.clear()

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
            if self._reduces and self._seen[index] == self._calls[index]:
                bucket = self._bucket_of[index]
                self._left[bucket] -= 1
                if not self._left[bucket] and not self._waits_for_tensor_axis(bucket):
                    self._reduce(bucket)

        return ready

    def _waits_for_tensor_axis(self, bucket: int) -> bool:
        start, stop = self.layout.replicated
        return self.axes.tensor.size > 1 and start <= self.layout.buckets[bucket].start < stop

    def _reduce(self, bucket: int) -> None:
        side_stream.current.synchronize()
        span = self.layout.buckets[bucket]
        whole = self.grads[span.start : span.stop]
        if self.zero and self.reduce_dtype is not None and self.reduce_dtype != whole.dtype:
            self._reducing[bucket] = reduce_scatter_rounded(whole, self.axes.reduce, self.reduce_dtype)
        else:
            send = all_reduce if self.zero == 0 else reduce_scatter_in_place
            self._reducing[bucket] = send(whole, self.axes.reduce)

    # parameters ------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Start all-gathers of the parameters that other ranks updated, first what forward needs first."""
        for bucket in self.by_use:
            self.gather(bucket)
        if not self.overlap:
            self.finish_gather()

    def gather(self, bucket: int) -> None:
        """Start a bucket's all-gather, as soon as this rank's own part is updated; nothing if it is in flight."""
        data = self.axes.data
        if self.zero == 0 or data.size == 1 or bucket in self._gathering:
            return
        # Under its own version counter: gloo writes while a forward saves parameters that are there already, and
        # backward would take those for changed.
        params = self.params.data
        span = self.layout.buckets[bucket]
        start, stop = self.layout.shard(bucket, data.rank, data.size)
        self._gathering[bucket] = all_gather_into(params[span.start : span.stop], params[start:stop], data)

    def expect_gather(self) -> None:
        """A forward is next: wait now, unless the module says of each unit when it needs it."""
        if not self._needs:
            self.finish_gather()

    def _pre_forward_gather(self, unit: int) -> None:
        if self._gathering:
            for bucket in self._needs[unit]:
                if pending := self._gathering.pop(bucket, None):
                    pending.wait()

    @property
    def gathering(self) -> bool:
        """Whether a gather is under way."""
        return bool(self._gathering)

    def finish_gather(self) -> None:
        """Wait until the chunk's parameters are complete."""
        for pending in self._gathering.values():
            pending.wait()
        self._gathering.clear()

    # shards ----------------------------------------------------------------------------------------------------

    def _shard(self, bucket: int) -> FlatShard:
        span, data = self.layout.buckets[bucket], self.axes.data
        start, stop = span.start, span.stop
        if self.zero > 0:
            start, stop = self.layout.shard(bucket, data.rank, data.size)
        extents = sorted(self._extents(span.members, start, stop), key=lambda e: e.start)
        if self.zero == 2:
            first = span.start // data.size
            grads = self.sums[first : first + stop - start]
        else:
            grads = self.grads[start:stop]
        return FlatShard(self.params[start:stop], grads, extents)

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
