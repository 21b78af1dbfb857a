"""Base of all optimizers: the shards of this rank with their state, and the rule that updates them.

An optimizer is one file in this package: a subclass of `UpdateRule`, named in `rules.py`. config/parts.py declares its
state for each logical tensor. A shard is divided into parts, ranges whose tensors have the same state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from megascale.config import OptimizerConfig
from megascale.config.parts import OptimizerFacts
from megascale.core.tensors import matrix_ranges
from megascale.ops.segments import Segments
from megascale.parallel.buffers import Extent, FlatShard
from megascale.parallel.collectives import SINGLE_RANK, Axis


@dataclass
class StatePart:
    """Range of a shard whose tensors have the same state.

    Attributes:
        start, stop: range of the shard's elements.
        extents: extents within the range, with offsets in the shard.
        segments: the same extents with offsets from `start`, for kernels.
        state: flat tensors as long as the part, by name; float32 (float64 for float64 models).
    """

    start: int
    stop: int
    extents: list[Extent]
    segments: Segments
    state: dict[str, torch.Tensor]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this part's view of a flat tensor as long as the shard."""
        return flat[self.start : self.stop]


@dataclass
class ShardState:
    """Master weights and optimizer state of one shard.

    Attributes:
        master: master weights, as long as the shard; float32 (float64 for float64 models). They are the weights in use
            if those have the same type.
        parts: consecutive parts that cover the shard.
        counted_ranges: ranges whose gradients this rank adds to the norm.
    """

    shard: FlatShard
    master: torch.Tensor
    parts: list[StatePart]
    counted_ranges: list[tuple[int, int]]

    @property
    def param_out(self) -> torch.Tensor | None:
        """Buffer of the weights in use, None if they are the master weights."""
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
        names: logical tensors of this stage, in an order that all its tensor- and data-parallel ranks share. Segments
            refer to them by index.
        position: this rank's coordinate; a replicated parameter counts on the first of its replicas only.
        stage: ranks whose shards together hold this stage's tensors once (except replicated parameters).
    """

    states: Sequence[ShardState]
    update_order: Sequence[ShardState]
    names: Sequence[str]
    position: Mapping[str, int] = field(default_factory=dict)
    stage: Axis = SINGLE_RANK

    @property
    def device(self) -> torch.device:
        """Device of the shards; with optimizer.offload their state lies on the host."""
        return self.states[0].shard.params.device


@dataclass(frozen=True)
class UpdateStep:
    """Arguments of one update.

    Attributes:
        learning_rate: learning rate of this step.
        number: number of the step, from 1.
        grad_scale: 0-d tensor by which gradients are multiplied (clipping); None: no scaling.
        skip: 0-d boolean tensor; if it is true, nothing may change.
    """

    learning_rate: float
    number: int
    grad_scale: torch.Tensor | None
    skip: torch.Tensor


class UpdateRule(ABC):
    """Update of shards by one optimizer.

    Attributes:
        exchanges_at_start: construction is collective. An engine with such a rule cannot rejoin, because ranks that
            start anew would construct the rule alone.
        observer: called during an update with the name, the part and the tensor of each input and result that
            `list_inputs` and `list_results` name; None: not called.
    """

    exchanges_at_start: ClassVar[bool] = False

    def __init__(self, config: OptimizerConfig, shards: Shards) -> None:
        self.config = config
        self.shards = shards
        self.observer: Callable[[str, StatePart, torch.Tensor], None] | None = None

    @property
    def can_recompute(self) -> bool:
        """Whether the rule implements `recompute`."""
        return type(self).recompute is not UpdateRule.recompute

    def recompute(self, state: ShardState, part: StatePart, step: UpdateStep) -> dict[str, torch.Tensor]:
        """Repeat the last update for a copy of elements, which another rank may own (train/update_check.py).

        All results must have the bits of `update`. Master weights, weights in use, gradients and state are updated in
        place.

        Args:
            state, part: the copy. Its segments are parts of those that `update` reads, at the same positions within a
                tile; `part.state` also has the inputs of `list_inputs`.
            step: arguments of the update.

        Returns:
            The results of `list_results`.
        """
        raise NotImplementedError

    def list_inputs(self, state_names: tuple[str, ...]) -> tuple[str, ...]:
        """Return inputs of elements with this state that other ranks compute, in the type of the weights in use."""
        return ()

    def list_results(self, state_names: tuple[str, ...]) -> tuple[str, ...]:
        """Return results of elements with this state that the update discards, in the type of the weights in use."""
        return ()

    @abstractmethod
    def update(self, step: UpdateStep, on_updated: Callable[[FlatShard], None]) -> None:
        """Update master weights, weights in use and state in place, without synchronising with the device.

        Args:
            on_updated: called with each shard of `shards.update_order`, in that order, once its weights in use are
                written. Their gather can begin then.
        """


def make_state_parts(
    shard: FlatShard,
    master: torch.Tensor,
    facts: OptimizerFacts,
    ids: dict[str, int],
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> list[StatePart]:
    """Divide a shard into parts with zero state.

    Args:
        ids: numbers all logical tensors.
        allocate: returns zeros of a length for the state; default: memory like the master weights'.
    """
    groups: list[tuple[tuple[str, ...], list[Extent]]] = []
    for extent in shard.extents:
        state_names = facts.state_names(extent.piece.name, extent.piece.shape)
        if groups and groups[-1][0] == state_names:
            groups[-1][1].append(extent)
        else:
            groups.append((state_names, [extent]))
    starts = [0, *(extents[0].start for _, extents in groups[1:]), master.numel()]
    parts = []
    for (state_names, extents), start, stop in zip(groups, starts, starts[1:], strict=False):
        rows = []
        for extent in extents:
            rows += _list_segments(extent, start, facts, ids)
        if allocate is None:
            state = {name: torch.zeros_like(master[start:stop]) for name in state_names}
        else:
            state = {name: allocate(stop - start) for name in state_names}
        parts.append(StatePart(start, stop, extents, Segments(rows, len(ids), shard.params.device), state))
    return parts


def _list_segments(
    extent: Extent, part_start: int, facts: OptimizerFacts, ids: dict[str, int]
) -> list[tuple[int, int, bool, int]]:
    """Return an extent's segments: one, or one per matrix of a stack if the update depends on their norms."""
    piece = extent.piece
    if not facts.has_matrix_norms:
        return [(extent.start - part_start, extent.stop - part_start, piece.decay, ids[piece.name])]
    shift = extent.start - extent.piece_start - part_start
    segments = []
    for run in matrix_ranges(piece, extent.piece_start, extent.piece_start + extent.stop - extent.start):
        segments.append((run.start + shift, run.stop + shift, piece.decay, ids[run.name]))
    return segments
