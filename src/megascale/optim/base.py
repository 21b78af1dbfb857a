"""Base of all optimizers: the shards of this rank with their state, and the rule that updates them.

An optimizer is one file in this package: a subclass of `UpdateRule` that `rules.py` registers. config/parts.py declares
the optimizer's state for each logical tensor. A shard is divided into parts (`StatePart`), which are ranges whose
tensors have the same state. A part consists of extents (`Extent`). An extent is a range of elements of one logical
tensor. Segments (ops/segments.py) are the extents of a part in the form that kernels read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from megascale.config import OptimizerConfig
from megascale.config.parts import OptimizerFacts
from megascale.core.tensors import matrix_ranges
from megascale.ops.segments import Segment, Segments
from megascale.parallel.buffers import Extent, FlatShard
from megascale.parallel.collectives import SINGLE_RANK, Axis


@dataclass
class StatePart:
    """Range of a shard whose tensors have the same state.

    Attributes:
        start, stop: range of the shard's elements.
        extents: ranges of single tensors within the part, with offsets from the shard's start.
        segments: the same ranges for kernels, with offsets from the part's start. If the update depends on matrix
            norms, the range of a stack has one segment per matrix.
        state: state tensors by name, flat and as long as the part; float32 (float64 for float64 models).
    """

    start: int
    stop: int
    extents: list[Extent]
    segments: Segments
    state: dict[str, torch.Tensor]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the part's elements of a flat tensor as long as the shard."""
        return flat[self.start : self.stop]


@dataclass
class ShardState:
    """Master weights and optimizer state of one shard.

    Attributes:
        shard: weights in use and gradients.
        master: master weights, as long as the shard; float32 (float64 for float64 models). If the weights in use have
            this type, `master` is `shard.params`.
        parts: consecutive parts that cover the shard.
        norm_ranges: ranges (start, stop) whose gradients this rank adds to the norm.
    """

    shard: FlatShard
    master: torch.Tensor
    parts: list[StatePart]
    norm_ranges: list[tuple[int, int]]

    @property
    def param_out(self) -> torch.Tensor | None:
        """Buffer of the weights in use; None if the master weights are the weights in use."""
        if self.master is self.shard.params:
            return None
        return self.shard.params

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield all state tensors, without the master weights."""
        for part in self.parts:
            yield from part.state.values()


@dataclass(frozen=True)
class Shards:
    """All shards that a rule updates on this rank.

    Attributes:
        states: states of all shards, by chunk and bucket.
        update_order: the same states in the order of updates, which all data-parallel ranks share.
        tensor_names: logical tensors of this pipeline stage, in an order that all ranks of the stage share. If the
            update depends on matrix norms, each matrix of a stack has a name of its own. Segments refer to a tensor by
            its index in this list.
        position: this rank's coordinate by axis. Of several ranks with the same parameter, the one at position 0 adds
            it to norms.
        stage: ranks whose shards together hold this stage's tensors once (except replicated parameters).
    """

    states: Sequence[ShardState]
    update_order: Sequence[ShardState]
    tensor_names: Sequence[str]
    position: Mapping[str, int] = field(default_factory=dict)
    stage: Axis = SINGLE_RANK

    @property
    def device(self) -> torch.device:
        """Device of weights in use and gradients; with optimizer.offload the state is in host memory instead."""
        return self.states[0].shard.params.device


@dataclass(frozen=True)
class UpdateStep:
    """Arguments of one update.

    Attributes:
        number: number of the step, from 1.
        grad_scale: 0-d tensor that gradients are multiplied by (clipping); None: no scaling.
        skip: 0-d boolean tensor; if it is true, the update changes no weights and no state.
    """

    learning_rate: float
    number: int
    grad_scale: torch.Tensor | None
    skip: torch.Tensor


class UpdateRule(ABC):
    """Update of shards by one optimizer.

    Attributes:
        has_collective_init: whether all ranks of the stage must construct the rule together. A restarted rank cannot
            join running ranks with such a rule, because it would construct the rule alone.
        observer: called during an update as observer(name, part, tensor), for each input of `list_inputs` and each
            result of `list_results`; None: not called.
    """

    has_collective_init: ClassVar[bool] = False

    def __init__(self, config: OptimizerConfig, shards: Shards) -> None:
        self.config = config
        self.shards = shards
        self.observer: Callable[[str, StatePart, torch.Tensor], None] | None = None

    @property
    def can_recompute(self) -> bool:
        """Whether the rule implements `recompute`."""
        return type(self).recompute is not UpdateRule.recompute

    def recompute(self, state: ShardState, part: StatePart, step: UpdateStep) -> dict[str, torch.Tensor]:
        """Repeat the last update on a copy of elements, which another rank may own (train/update_check.py).

        All results must have the same bits as those of `update`. Master weights, weights in use, gradients and state
        of the copy are updated in place.

        Args:
            state, part: the copied elements before the update. Each element must have the same position within a
                kernel's tile as in `update`, so that results round alike. `part.state` also holds the tensors that
                `list_inputs` names.
            step: arguments of the update.

        Returns:
            The results of `list_results`, by name.
        """
        raise NotImplementedError

    def list_inputs(self, state_names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of tensors that the update receives from other ranks, such as Muon's orthogonal direction.

        Each such tensor has the type of the weights in use.

        Args:
            state_names: state tensors of the part that is updated.
        """
        return ()

    def list_results(self, state_names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of tensors that the update computes and then discards, such as Muon's direction.

        Each such tensor has the type of the weights in use.

        Args:
            state_names: state tensors of the part that is updated.
        """
        return ()

    @abstractmethod
    def update(self, step: UpdateStep, on_updated: Callable[[FlatShard], None]) -> None:
        """Update master weights, weights in use and state in place, without synchronising with the device.

        Args:
            on_updated: called with each shard, in the order of `shards.update_order`, when its weights in use are
                written. The caller can then start their all-gather.
        """


def make_state_parts(
    shard: FlatShard,
    master: torch.Tensor,
    facts: OptimizerFacts,
    tensor_indices: Mapping[str, int],
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> list[StatePart]:
    """Divide a shard into parts with zero state.

    Args:
        facts: the optimizer's state names for each logical tensor.
        tensor_indices: index of every logical tensor by name.
        allocate: returns a state tensor of zeros with a given length; None: allocate it where the master weights are.
    """
    groups = _group_extents(shard.extents, facts)
    # The parts cover the padding between extents too, so a part ends where the next part starts.
    bounds = [0]
    for group in groups[1:]:
        bounds.append(group.extents[0].start)
    bounds.append(master.numel())
    parts = []
    for index, (state_names, extents) in enumerate(groups):
        start = bounds[index]
        stop = bounds[index + 1]
        segment_list: list[Segment] = []
        for extent in extents:
            segment_list += _list_segments(extent, start, facts, tensor_indices)
        if allocate is None:
            state = {name: torch.zeros_like(master[start:stop]) for name in state_names}
        else:
            state = {name: allocate(stop - start) for name in state_names}
        segments = Segments(segment_list, len(tensor_indices), shard.params.device)
        parts.append(StatePart(start, stop, extents, segments, state))
    return parts


class _ExtentGroup(NamedTuple):
    """Consecutive extents whose tensors have the same state."""

    state_names: tuple[str, ...]
    extents: list[Extent]


def _group_extents(extents: Sequence[Extent], facts: OptimizerFacts) -> list[_ExtentGroup]:
    """Group consecutive extents by the names of their state tensors."""
    groups: list[_ExtentGroup] = []
    for extent in extents:
        state_names = facts.state_names(extent.piece.name, extent.piece.shape)
        if groups and groups[-1].state_names == state_names:
            groups[-1].extents.append(extent)
        else:
            groups.append(_ExtentGroup(state_names, [extent]))
    return groups


def _list_segments(
    extent: Extent, part_start: int, facts: OptimizerFacts, tensor_indices: Mapping[str, int]
) -> list[Segment]:
    """Return the segments of an extent: one, or one per matrix of a stack if the update depends on matrix norms."""
    piece = extent.piece
    if not facts.has_matrix_norms:
        index = tensor_indices[piece.name]
        return [Segment(extent.start - part_start, extent.stop - part_start, piece.decay, index)]
    # Offset of the piece's first element from the part's start.
    piece_offset = extent.start - extent.piece_start - part_start
    piece_stop = extent.piece_start + extent.stop - extent.start
    segments = []
    for matrix in matrix_ranges(piece, extent.piece_start, piece_stop):
        index = tensor_indices[matrix.name]
        segments.append(Segment(matrix.start + piece_offset, matrix.stop + piece_offset, piece.decay, index))
    return segments
