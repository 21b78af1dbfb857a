"""The optimizer on the flat shards that this rank owns, whatever the layout: state, clipping, and the rule's update.

A step never makes the host wait: the gradient norm, the clipping factor and the flag that skips a step whose
gradients are not finite all stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from megascale import torch_private
from megascale.config import OptimizerConfig
from megascale.config.optimizers import OPTIMIZERS
from megascale.optim.base import Shards, ShardState, UpdateStep, cut_parts
from megascale.optim.rules import RULES
from megascale.parallel.buffers import Extent, FlatShard, ParamAndGradBuffer, extent_boxes
from megascale.parallel.collectives import SINGLE_RANK, Axis, all_reduce


class ShardedOptimizer:
    """State of all shards of this rank, clipping, and the update.

    Args:
        config: update rule and its constants.
        chunks: the buffers of this rank's chunks.
        tensor: the tensor axis; parameters that are the same on all its ranks are counted on the first.
        norm: the ranks over which squared gradient norms (and piggybacked scalars) are summed: the world.
        norm_weight: what this rank's squares count; 1 / data-parallel ranks where those hold the same gradients.
        stage: ranks whose shards together hold this stage's tensors, for rules that need them whole or their norms.
        duplicates: logical names that another stage counts (the second copy of a tied embedding).
    """

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: Sequence[ParamAndGradBuffer],
        *,
        tensor: Axis = SINGLE_RANK,
        norm: Axis = SINGLE_RANK,
        norm_weight: float = 1.0,
        stage: Axis = SINGLE_RANK,
        duplicates: frozenset[str] = frozenset(),
    ) -> None:
        self.config, self.norm_axis, self.norm_weight = config, norm, norm_weight
        facts, names = OPTIMIZERS[config.name], _names(chunks)
        ids = {name: number for number, name in enumerate(names)}
        self.states: list[ShardState] = []
        tied: set[int] = set()
        for chunk in chunks:
            if chunk.layout.tied_bucket is not None:
                tied.add(len(self.states) + chunk.layout.tied_bucket)
            for shard in chunk.shards:
                accumulation_dtype = shard.grads.dtype
                master = (
                    shard.params if shard.params.dtype == accumulation_dtype else shard.params.to(accumulation_dtype)
                )
                mine = [
                    e
                    for e in shard.extents
                    if (tensor.rank == 0 or not e.spec.replicated) and e.piece.name not in duplicates
                ]
                parts = cut_parts(shard, master, facts, ids)
                self.states.append(ShardState(shard, master, parts, _ranges(shard.extents, mine)))
        self._tied = tied  # numbers of states
        # The first chunk is what the next step needs first, and of it the parts in the order of their use.
        first = [self.states[bucket] for bucket in chunks[0].forward_order]
        order = [*first, *self.states[len(first) :]]
        self.rule = RULES[config.name](config, Shards(self.states, order, names, tensor, stage))

    @torch.no_grad()
    def step(
        self,
        learning_rate: float,
        step: int,
        piggybacked_scalars: torch.Tensor | None = None,
        updated: Callable[[FlatShard], None] = lambda shard: None,
        finish_tied: Callable[[], None] = lambda: None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Clip and update in place; a step whose norm is not finite changes nothing. `updated` gets each shard.
        finish_tied: waits for the gradients of a tied embedding, which are on their way while others are looked at.

        Returns, on the device, the norm of the whole model's gradient before clipping, and the sum over ranks of
        `piggybacked_scalars` (a float64 vector that travels in the same message).
        """
        config = self.config
        norm, piggybacked_scalars = self._summed(piggybacked_scalars, finish_tied)
        scale = None
        if config.clip:
            scale = (config.clip / (norm + 1e-6)).clamp(max=1.0)
        skip = ~torch.isfinite(norm)
        self.rule.update(UpdateStep(learning_rate, step, scale, skip), updated)
        return norm, piggybacked_scalars

    def _summed(
        self, piggybacked_scalars: torch.Tensor | None, finish_tied: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """2-norm of the whole model's gradient (0-d, float64), every parameter counted once, and the summed scalars."""
        squares = torch.zeros(1, dtype=torch.float64, device=self.states[0].master.device)
        known = self._norms([number for number in range(len(self.states)) if number not in self._tied])
        finish_tied()
        known |= self._norms(sorted(self._tied))
        if norms := [norm for number in range(len(self.states)) for norm in known[number]]:
            squares += torch.stack(norms).double().square().sum()
        squares *= self.norm_weight
        packed = squares if piggybacked_scalars is None else torch.cat([squares, piggybacked_scalars])
        packed = all_reduce(packed, self.norm_axis).wait()
        return packed[0].sqrt(), None if piggybacked_scalars is None else packed[1:]

    def _norms(self, numbers: Sequence[int]) -> dict[int, list[torch.Tensor]]:
        """By state, 2-norms of the gradients that this rank counts."""
        counted = [(number, a, b) for number in numbers for a, b in self.states[number].counted]
        found: dict[int, list[torch.Tensor]] = {number: [] for number in numbers}
        if counted:
            # All in a few launches: a launch a shard leaves the device idle between them.
            norms = torch_private.foreach_norm([self.states[number].shard.grads[a:b] for number, a, b in counted])
            for (number, _, _), norm in zip(counted, norms, strict=True):
                found[number].append(norm)
        return found

    def copy_to_params(self) -> None:
        """Write the weights in use from the master weights (after loading)."""
        for s in self.states:
            if s.param_out is not None:
                s.param_out.copy_(s.master)

    def logical(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        """What a checkpoint holds: (name, whole shape, offsets, view of this rank's box) of weights and state."""
        for s in self.states:
            for part in s.parts:
                for extent in part.extents:
                    for piece, offsets, view in extent_boxes(extent, s.master):
                        yield f"model.{piece.name}", piece.shape, offsets, view
                    inside = replace(extent, start=extent.start - part.start, stop=extent.stop - part.start)
                    for kept, flat in part.state.items():
                        for piece, offsets, view in extent_boxes(inside, flat):
                            yield f"optimizer.{kept}.{piece.name}", piece.shape, offsets, view


def _names(chunks: Sequence[ParamAndGradBuffer]) -> list[str]:
    """Logical tensors of this stage in an order that all its tensor- and data-parallel ranks share."""
    return sorted({name for chunk in chunks for name in chunk.names})


def _ranges(everything: list[Extent], mine: list[Extent]) -> list[tuple[int, int]]:
    """Few contiguous ranges that cover `mine` and nothing else of `everything`; padding between may be inside."""
    chosen = {id(e) for e in mine}
    ranges: list[tuple[int, int]] = []
    open_range = False
    for e in everything:
        if id(e) not in chosen:
            open_range = False
        elif open_range:
            ranges[-1] = (ranges[-1][0], e.stop)
        else:
            ranges.append((e.start, e.stop))
            open_range = True
    return ranges
