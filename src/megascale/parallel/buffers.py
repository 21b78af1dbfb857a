"""Flat buffers of one model chunk: parameters, gradients and shards. `data_parallel.py` communicates them.

The parameters of a chunk lie in one contiguous buffer in their own type. Gradients lie in one of float32 (float64 for
float64 models), in the order of `buffer_layout.py`. Weight gradients accumulate directly in the buffer. The ranges of
weights whose gradient a GEMM produces are not zeroed: the first GEMM of a step overwrites them
(`GradientSink.overwrite`). Buckets are the unit of communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from megascale import torch_private
from megascale.core.tensors import Piece, flat_boxes
from megascale.ops.gradient_sink import GradientSink, attach, sink_of
from megascale.parallel.buffer_layout import BufferMember, FlatLayout, lay_out
from megascale.parallel.collectives import SINGLE_RANK, Axis
from megascale.parallel.parameters import ParameterSpec, materialise, spec_of

TIED = "embedding.token.weight"


@dataclass(frozen=True)
class Extent:
    """A range of a shard that belongs to one piece: the unit of decay, norms and checkpoints.

    Attributes:
        start, stop: elements of the shard.
        spec: the parameter's spec.
        piece: the piece of a logical tensor.
        piece_start: index of the range's first element within the piece's box.
    """

    start: int
    stop: int
    spec: ParameterSpec
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
        data: gathers parameters over the ranks that share the optimizer's state (config/axes.py, `shards`).
        reduce: reduces gradients over the same ranks, on another communicator, so that neither waits for the other.
        own: axes of the grid that parts of the model communicate along, by name.
        tied: first and last stage, which both hold the token embedding; of size 1 where one process holds it once.
        stage: the ranks whose shards together hold the stage.
    """

    data: Axis = SINGLE_RANK
    reduce: Axis = SINGLE_RANK
    own: Mapping[str, Axis] = field(default_factory=dict)
    tied: Axis = SINGLE_RANK
    stage: Axis = SINGLE_RANK

    @property
    def tensor(self) -> Axis:
        """The tensor-parallel ranks."""
        return self.along("tensor")

    def along(self, name: str) -> Axis:
        """Return the axis of a name; without a group it has a single rank."""
        return self.own.get(name, SINGLE_RANK)


class ParamAndGradBuffer:
    """The parameter and gradient buffers of one chunk.

    Args:
        module: a chunk on the meta device; the constructor gives storage to its trained parameters.
        device: device of the buffers.
        axes: the axes that share its buckets.
        zero: 0 keeps all optimizer state on every rank, 1 shards it, 2 shards the accumulated gradients too.
        bucket_elements: approximate size of a bucket; None for one bucket per chunk.
        float8_gather: place the matrices of linear layers in buckets of their own, which may be gathered in float8.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        axes: Axes | None = None,
        zero: int = 1,
        bucket_elements: int | None = None,
        float8_gather: bool = False,
    ) -> None:
        self.module = module
        self.axes = axes = axes or Axes()
        self.zero = min(zero, 1) if axes.data.size == 1 else zero
        meta_params = [param for param in module.parameters() if param.requires_grad]
        specs = [spec_of(param) for param in meta_params]
        self.names = {piece.name for spec in specs for piece in spec.pieces}
        matrices = {id(param) for param in module.linear_weights().values()} if float8_gather else set()  # type: ignore[operator]
        self.layout: FlatLayout = lay_out(
            [self._make_member(param, id(param) in matrices) for param in meta_params], axes.data.size, bucket_elements
        )
        dtype = meta_params[0].dtype
        self.params = torch.zeros(self.layout.size, dtype=dtype, device=device)
        views = [
            self.params[start : start + param.numel()].view(param.shape)
            for param, start in zip(meta_params, self.layout.starts, strict=True)
        ]
        materialise(module, dict(zip(meta_params, views, strict=True)))
        self.parameters = [param for param in module.parameters() if param.requires_grad]
        self.grad_dtype = grad_dtype(dtype)
        empty = torch.empty(0, dtype=self.grad_dtype, device=device)  # until `set_grads`
        self.sinks = [attach(param, GradientSink(empty)) for param in self.parameters]
        for param in self.parameters:
            param.register_post_accumulate_grad_hook(self._accumulate)
        if self.zero == 2:
            self.grads = empty
            self.shard_grads = torch.zeros(self.layout.size // axes.data.size, dtype=self.grad_dtype, device=device)
        else:
            self.set_grads(torch.zeros(self.layout.size, dtype=self.grad_dtype, device=device))
        spans = self.layout.buckets
        self.bucket_of = {i: bucket for bucket, span in enumerate(spans) for i in span.members}
        # Buckets in the order in which a forward first needs them.
        self.forward_order = sorted(range(len(spans)), key=lambda bucket: min(spans[bucket].members))
        self.shards = [self._make_shard(bucket) for bucket in range(len(spans))]
        self._overwritten: list[int] = []  # parameters whose gradient the first GEMM of a step overwrites
        self._zeroed: list[torch.Tensor] | None = None  # ranges of the gradients that each step zeroes

    def _make_member(self, param: nn.Parameter, float8_gather: bool) -> BufferMember:
        spec = spec_of(param)
        tied = self.axes.tied.size > 1 and any(piece.name == TIED for piece in spec.pieces)
        decay = any(piece.decay for piece in spec.pieces)
        return BufferMember(param.numel(), decay, spec.summed_axes, tied, float8_gather)

    def set_grads(self, buffer: torch.Tensor) -> None:
        """Accumulate gradients in `buffer` from now on. It is as long as the parameters."""
        self.grads = buffer
        for param, sink, start in zip(self.parameters, self.sinks, self.layout.starts, strict=True):
            sink.main_grad = buffer[start : start + param.numel()].view(param.shape)

    @staticmethod
    def _accumulate(param: torch.Tensor) -> None:
        """Add the gradient that autograd produced. An operator with a sink has added its own and leaves None."""
        if param.grad is None:
            return
        sink = sink_of(param)
        assert sink is not None
        sink.main_grad.add_(param.grad)
        param.grad = None
        sink.ready()

    def set_gradient_hook(self, on_gradient: Callable[[int], None]) -> None:
        """Call on_gradient(parameter index) whenever a contribution is added to that parameter's gradient."""
        for index, sink in enumerate(self.sinks):
            sink.ready = partial(on_gradient, index)

    def find_unit_buckets(self) -> list[list[int]]:
        """Return the buckets that each unit of the module's forward needs; empty if the module declares no units."""
        if not hasattr(self.module, "forward_units"):
            return []
        index_of = {id(param): i for i, param in enumerate(self.parameters)}
        units: list[list[nn.Parameter]] = self.module.forward_units()  # type: ignore[operator]
        return [sorted({self.bucket_of[index_of[id(param)]] for param in unit}) for unit in units]

    # gradients of a step ---------------------------------------------------------------------------------------

    def zero_grads(self, contributions: Sequence[int]) -> None:
        """Zero the gradients of the last step.

        Args:
            contributions: additions to each parameter's gradient per micro-batch, all 0 while unknown.
        """
        if self.zero == 2:
            self.shard_grads.zero_()
            return
        if self._zeroed is None and any(contributions):
            self._find_overwritten(contributions)
        torch_private.foreach_zero_([self.grads] if self._zeroed is None else self._zeroed)
        for i in self._overwritten:
            self.sinks[i].overwrite = True

    def _find_overwritten(self, contributions: Sequence[int]) -> None:
        """Find weights whose single gradient per micro-batch comes from a GEMM: they need no zeros."""
        self._overwritten = [i for i, sink in enumerate(self.sinks) if contributions[i] == 1 and sink.by_gemm]
        starts = self.layout.starts
        spans = sorted((starts[i], starts[i] + self.parameters[i].numel()) for i in self._overwritten)
        spans.append((self.layout.size, self.layout.size))
        self._zeroed = []
        offset = 0
        for start, stop in spans:
            if start > offset:
                self._zeroed.append(self.grads[offset:start])
            offset = stop

    @property
    def overwritten_params(self) -> frozenset[int]:
        """Parameters whose gradient the first GEMM of a step overwrites."""
        return frozenset(self._overwritten)

    def zero_unwritten_grads(self) -> None:
        """Zero the gradients that no GEMM of this step has overwritten."""
        for i in self._overwritten:
            if self.sinks[i].overwrite:
                self.sinks[i].main_grad.zero_()
                self.sinks[i].overwrite = False

    # shards ----------------------------------------------------------------------------------------------------

    def _make_shard(self, bucket: int) -> FlatShard:
        span = self.layout.buckets[bucket]
        data = self.axes.data
        start, stop = span.start, span.stop
        if self.zero > 0:
            start, stop = self.layout.shard(bucket, data.rank, data.size)
        extents = sorted(self._find_extents(span.members, start, stop), key=lambda extent: extent.start)
        grads = self.grads[start:stop]
        if self.zero == 2:
            first = span.start // data.size
            grads = self.shard_grads[first : first + stop - start]
        return FlatShard(self.params[start:stop], grads, extents)

    def _find_extents(self, members: tuple[int, ...], start: int, stop: int) -> Iterator[Extent]:
        for i in members:
            spec = spec_of(self.parameters[i])
            offset = self.layout.starts[i]
            for piece in spec.pieces:
                first = max(offset, start)
                end = min(offset + piece.box.count, stop)
                if first < end:
                    yield Extent(first - start, end - start, spec, piece, piece_start=first - offset)
                offset += piece.box.count


def grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that gradients accumulate in: float32, or float64 for float64 models."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


def extent_boxes(extent: Extent, flat: torch.Tensor) -> Iterator[tuple[Piece, tuple[int, ...], torch.Tensor]]:
    """Cut an extent of a shard-shaped tensor into boxes of its logical tensor: (piece, offsets, view of box shape)."""
    length = extent.stop - extent.start
    shift = extent.start - extent.piece_start
    for box, first, last in flat_boxes(extent.piece.box, extent.piece_start, extent.piece_start + length):
        yield extent.piece, box.offsets, flat[first + shift : last + shift].view(box.sizes)
