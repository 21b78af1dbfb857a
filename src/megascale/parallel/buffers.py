"""Flat buffers of one model chunk: parameters, gradients and shards. `data_parallel.py` communicates them.

The parameters of a chunk are views of one contiguous buffer of their type, in the order of `buffer_layout.py`. Their
gradients are views of a second buffer of float32 (float64 for float64 models), in the same order, and weight gradients
accumulate there directly. If a GEMM computes a weight's gradient, the gradient is not zeroed: the first GEMM of a step
overwrites it (`GradientSink.should_overwrite`). Buckets are the unit of communication.

This rank's shard of a bucket consists of extents. An extent is a range of the shard that holds elements of one logical
tensor. The box of the tensor that lies in a local parameter is called a piece (core/tensors.py).

From ZeRO-2 on, the matrices of each unit of the forward have buckets of their own. Their gradients are in a slot
(gradient_slots.py) from their computation to their reduction, and then only in this rank's shard. All other parameters
(norms, biases, tied embeddings) are called resident: their gradients accumulate in a buffer as in ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from megascale import torch_private
from megascale.core.tensors import Piece, flat_boxes
from megascale.core.unit_slots import find_gaps
from megascale.ops.gradient_sink import GradientSink, attach
from megascale.parallel.buffer_layout import BufferMember, FlatLayout, lay_out
from megascale.parallel.collectives import SINGLE_RANK, Axis
from megascale.parallel.parameters import ParameterSpec, get_spec, initialise_parameter, materialise
from megascale.parallel.slot_sink import SlotSink, TableSink

TIED = "embedding.token.weight"  # logical name of the token embedding, which may also be the output matrix
# Matrices whose operators write their gradients by rows (ops/embedding.py, ops/cross_entropy.py).
TABLES = (TIED, "head.weight")


@dataclass(frozen=True)
class Extent:
    """A range of a shard that belongs to one piece of a logical tensor: the unit of decay, norms and checkpoints.

    Attributes:
        start, stop: range of elements within the shard.
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
        model: axes of the grid that the model's layers communicate along, by name.
        tied: first and last stage, if both hold the token embedding; otherwise of size 1.
        stage: the ranks whose shards together make up the stage.
    """

    data: Axis = SINGLE_RANK
    reduce: Axis = SINGLE_RANK
    model: Mapping[str, Axis] = field(default_factory=dict)
    tied: Axis = SINGLE_RANK
    stage: Axis = SINGLE_RANK

    @property
    def tensor(self) -> Axis:
        """The tensor-parallel ranks."""
        return self.along("tensor")

    def along(self, name: str) -> Axis:
        """Return the axis `name` of the grid, or an axis with a single rank if there is no such group."""
        return self.model.get(name, SINGLE_RANK)


class ParamAndGradBuffer:
    """The parameter and gradient buffers of one chunk.

    Args:
        module: a chunk on the meta device. The constructor allocates its trained parameters.
        axes: the axes that the buffers communicate over.
        zero: ZeRO stage. 0 keeps all optimizer state on every rank, 1 shards the optimizer state, 2 also shards
            accumulated gradients, 3 also shards the matrices of units, which `ParameterSlots` allocates.
        bucket_elements: approximate size of a bucket; None for one bucket per chunk. With ZeRO-3 it divides
            resident parameters only.
        float8_gather: place the matrices of linear layers in buckets of their own, which may be gathered in float8.
        table_part: with ZeRO-2, approximate elements of a part of a divided table (buffer_layout.py); None: tables are
            not divided.

    Attributes:
        names: names of the logical tensors in the chunk.
        sinks: sink of each parameter's gradient, which operators write (ops/gradient_sink.py).
        resident_start: first element of the layout that belongs to a resident parameter.
        params: parameters; with ZeRO-3 resident parameters only.
        shard_params: with ZeRO-3, this rank's shards of the matrices of units; empty after `place_shards`.
        grads: gradients of resident parameters.
        shard_grads: from ZeRO-2 on, this rank's shards of the gradients of units.
        bucket_by_param: index of the bucket by index of the parameter; of a divided table, the last bucket.
        row_params: parameters whose gradients are reduced by rows (embedding_rows.py), which need no dense gradient.
        forward_order: buckets in the order in which a forward first needs them.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        axes: Axes | None = None,
        zero: int = 1,
        bucket_elements: int | None = None,
        float8_gather: bool = False,
        table_part: int | None = None,
    ) -> None:
        self.module = module
        axes = axes or Axes()
        self.axes = axes
        # A single data-parallel rank has nothing to divide by ZeRO-2 and 3.
        self.zero = min(zero, 1) if axes.data.size == 1 else zero
        meta_params = [param for param in module.parameters() if param.requires_grad]
        specs = [get_spec(param) for param in meta_params]
        self.names = {piece.name for spec in specs for piece in spec.pieces}
        matrices: set[int] = set()  # ids of the weights of linear layers
        if float8_gather:
            matrices = {id(param) for param in module.collect_linear_weights().values()}  # type: ignore[operator]
        unit_by_param = _find_units(module, meta_params) if self.zero >= 2 else {}
        members = []
        for param in meta_params:
            members.append(self._make_member(param, id(param) in matrices, unit_by_param.get(id(param))))
        divides_units = self.zero == 2
        self.layout: FlatLayout = lay_out(
            members,
            axes.data.size,
            bucket_elements,
            divides_units=divides_units,
            table_part=table_part if divides_units else None,
        )
        divided = {span.members[0] for span in self.layout.buckets if span.rows is not None}
        self.resident_start = self.layout.unit_size
        dtype = meta_params[0].dtype
        params_start = self.resident_start if self.zero == 3 else 0
        self.params = torch.zeros(self.layout.size - params_start, dtype=dtype, device=device)
        self.shard_params = torch.zeros(params_start // axes.data.size, dtype=dtype, device=device)
        views = {}
        for param, start in zip(meta_params, self.layout.starts, strict=True):
            if start < params_start:  # a matrix of a unit, to which `ParameterSlots` gives memory later
                views[param] = torch.zeros(1, dtype=dtype, device=device).expand(param.shape)
            else:
                start -= params_start
                views[param] = self.params[start : start + param.numel()].view(param.shape)
        materialise(module, views)
        self.parameters = [param for param in module.parameters() if param.requires_grad]
        self.grad_dtype = choose_grad_dtype(dtype)
        empty = torch.empty(0, dtype=self.grad_dtype, device=device)  # until `set_grads`
        self.sinks = []
        for i, (param, member) in enumerate(zip(self.parameters, members, strict=True)):
            sink = GradientSink(empty)
            if i in divided:
                sink = TableSink(empty)
            elif member.unit is not None:
                sink = SlotSink(empty)
            self.sinks.append(attach(param, sink))
            param.register_post_accumulate_grad_hook(self._accumulate)
        self.resident_params = [i for i, member in enumerate(members) if member.unit is None]
        self.shard_grads = torch.zeros(self.resident_start // axes.data.size, dtype=self.grad_dtype, device=device)
        self.set_grads(torch.zeros(self.layout.size - self.resident_start, dtype=self.grad_dtype, device=device))
        buckets = self.layout.buckets
        self.resident_buckets = [bucket for bucket, unit in enumerate(self.layout.units) if unit is None]
        self.bucket_by_param: dict[int, int] = {}
        for bucket, span in enumerate(buckets):
            self.bucket_by_param |= dict.fromkeys(span.members, bucket)
        # Indices of parameters are in the order of the forward.
        self.forward_order = sorted(range(len(buckets)), key=lambda bucket: min(buckets[bucket].members))
        self.shards = [self._make_shard(bucket) for bucket in range(len(buckets))]
        self.row_params: set[int] = set()
        self._overwritten_indices: list[int] = []  # parameters whose gradient the first GEMM of a step overwrites
        self._zeroed_ranges: list[torch.Tensor] | None = None  # ranges of the gradients that each step zeroes

    def _make_member(self, param: nn.Parameter, float8_gather: bool, unit: int | None) -> BufferMember:
        """Return what the layout needs to know about a parameter.

        Args:
            unit: unit of the forward that reads the parameter, None if several do. Only matrices whose gradients need
                no other sum are in their unit.
        """
        spec = get_spec(param)
        is_tied = self.axes.tied.size > 1 and any(piece.name == TIED for piece in spec.pieces)
        is_decayed = any(piece.decay for piece in spec.pieces)
        # Parameters that are replicated along the tensor axis have a region of their own even if that axis has a single
        # rank, so that sums over the buffer have the same order on every layout.
        summed_axes = tuple(name for name in spec.summed_axes if name == "tensor" or self.axes.along(name).size > 1)
        if is_tied or summed_axes or not is_decayed:
            unit = None
        row_elements = None
        if unit is not None and any(piece.name in TABLES for piece in spec.pieces):
            row_elements = param.shape[-1]
        return BufferMember(param.numel(), is_decayed, summed_axes, is_tied, float8_gather, unit, row_elements)

    def set_grads(self, buffer: torch.Tensor) -> None:
        """Accumulate the gradients of resident parameters in `buffer` from now on."""
        self.grads = buffer
        for i in self.resident_params:
            param = self.parameters[i]
            start = self.layout.starts[i] - self.resident_start
            self.sinks[i].main_grad = buffer[start : start + param.numel()].view(param.shape)

    def slice_grads(self, start: int, stop: int) -> torch.Tensor:
        """Return the gradients of elements [start, stop) of the layout, which are resident."""
        return self.grads[start - self.resident_start : stop - self.resident_start]

    @staticmethod
    def _accumulate(param: Any) -> None:
        """Add the gradient that autograd has computed to the sink.

        Operators that know the sink have added their gradient themselves, and `param.grad` is then None.
        """
        if param.grad is None:
            return
        sink: GradientSink = param.gradient_sink
        if sink.is_divided:
            for rows, grads in sink.write_rows():
                grads.add_(param.grad[rows])
        else:
            sink.main_grad.add_(param.grad)
        param.grad = None
        sink.ready()

    def place_shard_params(self, memory: torch.Tensor) -> None:
        """Move this rank's shards of the matrices of units to `memory` (ZeRO-3). Call it before the shards are used."""
        memory.copy_(self.shard_params)
        self.shard_params = memory
        for bucket, shard in enumerate(self.shards):
            if self.layout.units[bucket] is not None:
                first = self.layout.buckets[bucket].start // self.axes.data.size
                shard.params = memory[first : first + shard.params.numel()]

    def place_shards(self, memory: Mapping[int, torch.Tensor]) -> None:
        """Move this rank's shard of each bucket of a unit to memory of its own (ZeRO-3), by index of the bucket.

        Call it before the shards are used. `shard_params` is empty afterwards.
        """
        for bucket, shard_memory in memory.items():
            shard_memory.copy_(self.shards[bucket].params)
            self.shards[bucket].params = shard_memory
        self.shard_params = self.shard_params.new_empty(0)

    def set_gradient_hook(self, on_gradient: Callable[[int], None]) -> None:
        """Call on_gradient(parameter index) whenever a contribution is added to that parameter's gradient."""
        for index, sink in enumerate(self.sinks):
            sink.ready = partial(on_gradient, index)

    def find_unit_buckets(self) -> list[list[int]]:
        """Return the buckets that each unit of the module's forward needs; empty if the module declares no units."""
        if not hasattr(self.module, "list_forward_units"):
            return []
        index_by_id = {id(param): i for i, param in enumerate(self.parameters)}
        units: list[list[nn.Parameter]] = self.module.list_forward_units()  # type: ignore[operator]
        buckets_by_param: list[list[int]] = [[] for _ in self.parameters]  # a divided table has several buckets
        for bucket, span in enumerate(self.layout.buckets):
            for i in span.members:
                buckets_by_param[i].append(bucket)
        unit_buckets = []
        for unit in units:
            indices = [index_by_id[id(param)] for param in unit]
            unit_buckets.append(sorted({bucket for i in indices for bucket in buckets_by_param[i]}))
        return unit_buckets

    def initialise_resident(self, seed: int) -> None:
        for i in self.resident_params:
            initialise_parameter(self.parameters[i], seed)

    def count_units(self) -> int:
        """Return the number of units of the module's forward. A module that declares no units is one unit."""
        if not hasattr(self.module, "list_forward_units"):
            return 1
        return len(self.module.list_forward_units())  # type: ignore[operator]

    # gradients of a step ---------------------------------------------------------------------------------------

    def zero_grads(self, contribution_counts: Sequence[int]) -> None:
        """Zero the gradients before a step, except those that a GEMM will overwrite.

        Args:
            contribution_counts: number of additions to each parameter's gradient per micro-batch, all 0 while unknown.
        """
        if self._zeroed_ranges is None and any(contribution_counts):
            self._find_overwritten(contribution_counts)
        zeroed_ranges = [self.grads] if self._zeroed_ranges is None else self._zeroed_ranges
        if zeroed_ranges:  # from ZeRO-2 on, a chunk with only an untied embedding has no resident parameter
            torch_private.foreach_zero_(zeroed_ranges)
        for i in self._overwritten_indices:
            self.sinks[i].should_overwrite = True

    def _find_overwritten(self, contribution_counts: Sequence[int]) -> None:
        """Find the weights to whose gradient only one GEMM per micro-batch adds. They need no zeros."""
        self._overwritten_indices = [
            i for i in self.resident_params if contribution_counts[i] == 1 and self.sinks[i].is_gemm_gradient
        ]
        starts = self.layout.starts
        unzeroed_indices = [*self._overwritten_indices, *self.row_params]
        unzeroed_ranges = [(starts[i], starts[i] + self.parameters[i].numel()) for i in unzeroed_indices]
        gaps = find_gaps(self.resident_start, self.layout.size, unzeroed_ranges)
        self._zeroed_ranges = [self.slice_grads(start, stop) for start, stop in gaps]

    @property
    def overwritten_params(self) -> frozenset[int]:
        """Indices of the parameters whose gradient the first GEMM of a step overwrites."""
        return frozenset(self._overwritten_indices)

    def zero_unwritten_grads(self) -> None:
        """Zero the gradients that a GEMM should have overwritten and that got none in this step."""
        for i in self._overwritten_indices:
            if self.sinks[i].should_overwrite:
                self.sinks[i].main_grad.zero_()
                self.sinks[i].should_overwrite = False

    # shards ----------------------------------------------------------------------------------------------------

    def _make_shard(self, bucket: int) -> FlatShard:
        """Return this rank's shard of a bucket; with ZeRO-0 the whole bucket."""
        span = self.layout.buckets[bucket]
        data = self.axes.data
        start, stop = span.start, span.stop
        if self.zero > 0:
            start, stop = self.layout.find_shard(bucket, data.rank, data.size)
        extents = sorted(self._find_extents(span.members, start, stop), key=lambda extent: extent.start)
        first = span.start // data.size  # first element of a unit's shard in `shard_grads` and `shard_params`
        if self.layout.units[bucket] is None:
            grads = self.slice_grads(start, stop)
        else:
            grads = self.shard_grads[first : first + stop - start]
        if self.zero < 3:
            params = self.params[start:stop]
        elif self.layout.units[bucket] is None:
            params = self.params[start - self.resident_start : stop - self.resident_start]
        else:
            params = self.shard_params[first : first + stop - start]
        return FlatShard(params, grads, extents)

    def _find_extents(self, members: tuple[int, ...], start: int, stop: int) -> Iterator[Extent]:
        """Yield the extents of the members within elements [start, stop) of the layout."""
        for i in members:
            spec = get_spec(self.parameters[i])
            offset = self.layout.starts[i]
            for piece in spec.pieces:
                first = max(offset, start)
                end = min(offset + piece.box.count, stop)
                if first < end:
                    yield Extent(first - start, end - start, spec, piece, piece_start=first - offset)
                offset += piece.box.count


def _find_units(module: nn.Module, params: Sequence[nn.Parameter]) -> dict[int, int]:
    """Return the index of the unit of the module's forward that uses a parameter, by the parameter's id.

    Parameters that several units use are left out. A module that declares no units is one unit.
    """
    if not hasattr(module, "list_forward_units"):
        return {id(param): 0 for param in params}
    *units, remaining = module.list_forward_units()  # type: ignore[operator]
    users: dict[int, set[int]] = {}  # indices of the units that use a parameter, by its id
    for unit_index, unit in enumerate(units):
        for param in unit:
            users.setdefault(id(param), set()).add(unit_index)
    for param in remaining:
        users.setdefault(id(param), {len(units)})
    shared = {id(param) for param in module.list_shared_parameters()}  # type: ignore[operator]
    unit_by_param = {}
    for key, unit_indices in users.items():
        if len(unit_indices) == 1 and key not in shared:
            unit_by_param[key] = min(unit_indices)
    return unit_by_param


def choose_grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that gradients accumulate in: float32, or float64 for float64 models."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


def split_extent(extent: Extent, flat: torch.Tensor) -> Iterator[tuple[Piece, tuple[int, ...], torch.Tensor]]:
    """Yield the boxes of a logical tensor that an extent covers.

    Yields:
        (piece of the logical tensor, offsets of the box, view of `flat` in the shape of the box).

    Args:
        flat: a tensor as long as the extent's shard, such as the shard's gradients.
    """
    length = extent.stop - extent.start
    shift = extent.start - extent.piece_start
    for box, first, last in flat_boxes(extent.piece.box, extent.piece_start, extent.piece_start + length):
        yield extent.piece, box.offsets, flat[first + shift : last + shift].view(box.sizes)
