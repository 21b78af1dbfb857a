"""What every optimizer is made of: the shards that this rank owns with their state, and the rule that updates them.

An optimizer is one file beside this one: a subclass of `Rule`, named in `rules.py`. What it keeps of each logical
tensor stands in config/optimizers.py; from that a shard is cut into parts, ranges whose tensors keep the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megascale.config import OptimizerConfig
from megascale.config.optimizers import OptimizerFacts
from megascale.ops.segments import Segments
from megascale.parallel.buffers import Extent, FlatShard
from megascale.parallel.collectives import ALONE, Axis


@dataclass
class StatePart:
    """A range of a shard whose tensors keep the same state.

    Attributes:
        start, stop: elements of the shard.
        extents: what lies there, in the shard's numbering.
        segments: the same from `start` on, for kernels.
        state: flat tensors as long as the part, by name: float32 (float64 for float64 models).
    """

    start: int
    stop: int
    extents: list[Extent]
    segments: Segments
    state: dict[str, torch.Tensor]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This part of a tensor as long as the shard."""
        return flat[self.start : self.stop]


@dataclass
class ShardState:
    """Master weights and optimizer state of one shard.

    Attributes:
        master: as long as the shard, float32 (float64 for float64 models); the weights in use where they are that.
        parts: together the shard, in order.
        counted: ranges whose gradients this rank counts in the norm.
    """

    shard: FlatShard
    master: torch.Tensor
    parts: list[StatePart]
    counted: list[tuple[int, int]]

    @property
    def param_out(self) -> torch.Tensor | None:
        """Where the weights in use lie, if they are not the master weights themselves."""
        return None if self.master is self.shard.params else self.shard.params

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """All state beside the master weights."""
        for part in self.parts:
            yield from part.state.values()


@dataclass(frozen=True)
class Shards:
    """All that a rule updates on this rank.

    Attributes:
        states: chunk by chunk, bucket by bucket.
        order: the same in the order in which updates are wanted; the same on all data-parallel ranks.
        names: logical tensors of this stage, in an order that all its tensor- and data-parallel ranks share; segments
            number them so.
        tensor: the tensor axis; parameters that are the same on all its ranks are counted on the first.
        stage: ranks whose shards together hold this stage's tensors once (but for such parameters).
    """

    states: Sequence[ShardState]
    update_order: Sequence[ShardState]
    names: Sequence[str]
    tensor: Axis = ALONE
    stage: Axis = ALONE

    @property
    def device(self) -> torch.device:
        """Where the shards live."""
        return self.states[0].master.device


@dataclass(frozen=True)
class Step:
    """One update.

    Attributes:
        learning_rate: of this step.
        number: from 1.
        scale: what gradients are multiplied by (clipping), a 0-d tensor; None: by nothing.
        skip: a 0-d boolean; where it is true nothing may change.
    """

    learning_rate: float
    number: int
    scale: torch.Tensor | None
    skip: torch.Tensor


class UpdateRule(ABC):
    """How an optimizer updates shards. Made once; collective where it says so."""

    def __init__(self, config: OptimizerConfig, shards: Shards) -> None:
        self.config, self.shards = config, shards

    @abstractmethod
    def update(self, step: Step, updated: Callable[[FlatShard], None]) -> None:
        """Update master weights, weights in use and state in place; never makes the host wait.

        Calls updated(shard) for each of `shards.order` in that order, as soon as its weights in use are written:
        gathering them begins there.
        """


def cut_parts(shard: FlatShard, master: torch.Tensor, facts: OptimizerFacts, ids: dict[str, int]) -> list[StatePart]:
    """The parts of a shard, with their state at zero; `ids`: numbers of all logical tensors."""
    groups: list[tuple[tuple[str, ...], list[Extent]]] = []
    for extent in shard.extents:
        kept = facts.state_names(extent.piece.name, extent.piece.shape)
        if groups and groups[-1][0] == kept:
            groups[-1][1].append(extent)
        else:
            groups.append((kept, [extent]))
    starts = [0, *(extents[0].start for _, extents in groups[1:]), master.numel()]
    parts = []
    for (kept, extents), start, stop in zip(groups, starts, starts[1:], strict=False):
        rows = [(e.start - start, e.stop - start, e.piece.decay, ids[e.piece.name]) for e in extents]
        state = {name: torch.zeros_like(master[start:stop]) for name in kept}
        parts.append(StatePart(start, stop, extents, Segments(rows, len(ids), master.device), state))
    return parts
