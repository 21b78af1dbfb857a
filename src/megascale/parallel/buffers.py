"""Flat buffers of one model chunk: where its parameters, gradients and shards lie. What moves them: `data_parallel.py`.

Parameters of a chunk lie in one contiguous buffer in their own type, gradients in one of float32 (float64 for
float64 models), in the order of `buffer_layout.py`. Weight gradients accumulate straight into the buffer, whose parts
for GEMMs' weights are never made zero: a step's first GEMM writes them (`GradientSink.overwrite`). Buckets are the unit
of communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from megascale import torch_private
from megascale.core.tensors import Piece, flat_boxes
from megascale.ops.gradient_sink import GradientSink, attach, sink_of
from megascale.parallel.buffer_layout import BufferMember, FlatLayout, lay_out
from megascale.parallel.collectives import ALONE, Axis
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
    piece_start: int


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
        stage: tensor- and data-parallel ranks of the stage together, which share the matrices.
    """

    data: Axis = ALONE
    reduce: Axis = ALONE
    tensor: Axis = ALONE
    tied: Axis = ALONE
    stage: Axis = ALONE


class FlatChunk:
    """The buffers of one chunk.

    Args:
        module: a chunk on the meta device; it gets storage here.
        device: where the buffers live.
        axes: whom its buckets are shared with.
        zero: 0 keeps all optimizer state on every rank, 1 shards it, 2 shards the accumulated gradients too.
        bucket_elements: size of a bucket; None for one bucket a chunk.
        apart: whether the matrices of linear layers lie in buckets of their own: they may be gathered as float8.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        axes: Axes | None = None,
        zero: int = 1,
        bucket_elements: int | None = None,
        apart: bool = False,
    ) -> None:
        self.module = module
        self.axes = axes = axes or Axes()
        self.zero = min(zero, 1) if axes.data.size == 1 else zero
        meta = list(module.parameters())
        specs = [spec_of(p) for p in meta]
        self.names = {piece.name for spec in specs for piece in spec.pieces}
        matrices = {id(p) for p in module.matrices().values()} if apart else set()  # type: ignore[operator]
        members = [self._member(p, spec, id(p) in matrices) for p, spec in zip(meta, specs, strict=True)]
        self.layout: FlatLayout = lay_out(members, axes.data.size, bucket_elements)
        dtype = meta[0].dtype
        self.params = torch.zeros(self.layout.size, dtype=dtype, device=device)
        starts = self.layout.starts
        materialise(
            module,
            {p: self.params[a : a + p.numel()].view(p.shape) for p, a in zip(meta, starts, strict=True)},
        )
        self.parameters = list(module.parameters())
        self.grad_dtype = grad_dtype(dtype)
        nowhere = torch.empty(0, dtype=self.grad_dtype, device=device)  # until `aim`
        self.sinks = [attach(p, GradientSink(nowhere)) for p in self.parameters]
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self._accumulate)
        if self.zero == 2:
            self.grads = torch.empty(0, dtype=self.grad_dtype, device=device)
            self.shard_grads = torch.zeros(self.layout.size // axes.data.size, dtype=self.grad_dtype, device=device)
        else:
            self.grads = torch.zeros(self.layout.size, dtype=self.grad_dtype, device=device)
            self.aim(self.grads)
        spans = self.layout.buckets
        self.bucket_of = {i: b for b, span in enumerate(spans) for i in span.members}
        # Buckets in the order in which a forward first needs them.
        self.by_use = sorted(range(len(spans)), key=lambda b: min(spans[b].members))
        self.shards = [self._shard(b) for b in range(len(spans))]
        self._overwritten: list[int] = []  # parameters whose gradients a step's first GEMM writes
        self._zeroed: list[torch.Tensor] | None = None  # the parts of the gradients that each step makes zero

    def _member(self, p: nn.Parameter, spec: Spec, apart: bool) -> BufferMember:
        own_bucket = self.axes.tied.size > 1 and any(piece.name == TIED for piece in spec.pieces)
        return BufferMember(p.numel(), any(piece.decay for piece in spec.pieces), spec.replicated, own_bucket, apart)

    def aim(self, buffer: torch.Tensor) -> None:
        """Let gradients accumulate in `buffer`, as long as the parameters."""
        self.grads = buffer
        for p, sink, start in zip(self.parameters, self.sinks, self.layout.starts, strict=True):
            sink.main_grad = buffer[start : start + p.numel()].view(p.shape)

    @staticmethod
    def _accumulate(p: torch.Tensor) -> None:
        if p.grad is None:
            return  # an operator has put it into the sink and said so
        sink = sink_of(p)
        assert sink is not None
        sink.main_grad.add_(p.grad)
        p.grad = None
        sink.ready()

    def tell(self, on_gradient: Callable[[int], None]) -> None:
        """Call on_gradient(a parameter's number) when its sink has one more contribution to its gradient."""
        for number, sink in enumerate(self.sinks):
            sink.ready = partial(on_gradient, number)

    def units(self) -> list[list[int]]:
        """Buckets that each unit of the module's forward needs; empty for a module that names no units."""
        if not hasattr(self.module, "units"):
            return []
        number = {id(p): i for i, p in enumerate(self.parameters)}
        return [sorted({self.bucket_of[number[id(p)]] for p in unit}) for unit in self.module.units()]  # type: ignore[operator]

    # gradients of a step ---------------------------------------------------------------------------------------

    def zero_grads(self, calls: Sequence[int]) -> None:
        """Forget the gradients of the step before; `calls`: contributions to each parameter's in a micro-batch."""
        if self.zero == 2:
            self.shard_grads.zero_()
            return
        if self._zeroed is None and any(calls):
            self._learn_overwritten(calls)
        torch_private.foreach_zero_([self.grads] if self._zeroed is None else self._zeroed)
        for i in self._overwritten:
            self.sinks[i].overwrite = True

    def _learn_overwritten(self, calls: Sequence[int]) -> None:
        """Weights with one gradient a micro-batch, made by a GEMM (parallel/linear.py), need no zeros to add it to."""
        self._overwritten = [i for i, sink in enumerate(self.sinks) if calls[i] == 1 and sink.by_gemm]
        self._zeroed, at = [], 0
        spans = [(self.layout.starts[i], self.layout.starts[i] + self.parameters[i].numel()) for i in self._overwritten]
        for start, stop in [*sorted(spans), (self.layout.size, self.layout.size)]:
            if start > at:
                self._zeroed.append(self.grads[at:start])
            at = stop

    @property
    def overwritten(self) -> frozenset[int]:
        """Parameters whose gradients a step's first GEMM writes."""
        return frozenset(self._overwritten)

    def zero_unwritten(self) -> None:
        """Make zero what no GEMM of this step has come to."""
        for i in self._overwritten:
            if self.sinks[i].overwrite:
                self.sinks[i].main_grad.zero_()
                self.sinks[i].overwrite = False

    # shards ----------------------------------------------------------------------------------------------------

    def _shard(self, bucket: int) -> FlatShard:
        span, data = self.layout.buckets[bucket], self.axes.data
        start, stop = span.start, span.stop
        if self.zero > 0:
            start, stop = self.layout.shard(bucket, data.rank, data.size)
        extents = sorted(self._extents(span.members, start, stop), key=lambda e: e.start)
        if self.zero == 2:
            first = span.start // data.size
            grads = self.shard_grads[first : first + stop - start]
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
    for box, a, b in flat_boxes(extent.piece.box, extent.piece_start, extent.piece_start + length):
        view = flat[extent.start + a - extent.piece_start : extent.start + b - extent.piece_start]
        yield extent.piece, box.offsets, view.view(box.sizes)
