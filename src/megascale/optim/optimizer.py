"""AdamW and LAMB on the flat shards that this rank owns, whatever the layout.

A step never makes the host wait: the gradient norm, the clipping factor and the flag that skips a step whose
gradients are not finite all stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megascale import torch_private
from megascale.config import OptimizerConfig
from megascale.ops.adamw import adamw_apply
from megascale.ops.lamb import lamb_apply, lamb_direction
from megascale.ops.segments import Segments
from megascale.parallel.buffers import Extent, FlatChunk, FlatShard, extent_boxes
from megascale.parallel.collectives import ALONE, Axis, all_reduce


@dataclass
class ShardState:
    """Optimizer state of one shard: flat tensors as long as the shard, float32 (float64 for float64 models)."""

    shard: FlatShard
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    segments: Segments
    counted: list[tuple[int, int]]

    @property
    def param_out(self) -> torch.Tensor | None:
        """Where the weights in use lie, if they are not the master weights themselves."""
        return None if self.master is self.shard.params else self.shard.params


class ShardedOptimizer:
    """State of all shards of this rank, clipping, and the update.

    Args:
        config: update rule and its constants.
        chunks: the buffers of this rank's chunks.
        tensor: the tensor axis; parameters that are the same on all its ranks are counted on the first.
        norm: the ranks over which squared gradient norms (and piggybacked scalars) are summed: the world.
        norm_weight: what this rank's squares count; 1 / data-parallel ranks where those hold the same gradients.
        stage: ranks that share this stage's tensors, for LAMB's norms.
        duplicates: logical names that another stage counts (the second copy of a tied embedding).
    """

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: Sequence[FlatChunk],
        *,
        tensor: Axis = ALONE,
        norm: Axis = ALONE,
        norm_weight: float = 1.0,
        stage: Axis = ALONE,
        duplicates: frozenset[str] = frozenset(),
    ) -> None:
        self.config, self.norm_axis, self.norm_weight, self.stage = config, norm, norm_weight, stage
        self.names = _names(chunks)
        ids = {name: number for number, name in enumerate(self.names)}
        self.states: list[ShardState] = []
        for chunk in chunks:
            for shard in chunk.shards:
                accumulation_dtype = shard.grads.dtype
                master = (
                    shard.params if shard.params.dtype == accumulation_dtype else shard.params.to(accumulation_dtype)
                )
                rows = [(e.start, e.stop, e.piece.decay, ids[e.piece.name]) for e in shard.extents]
                mine = [
                    e
                    for e in shard.extents
                    if (tensor.rank == 0 or not e.spec.replicated) and e.piece.name not in duplicates
                ]
                self.states.append(
                    ShardState(
                        shard,
                        master,
                        torch.zeros_like(master),
                        torch.zeros_like(master),
                        Segments(rows, len(self.names), master.device),
                        _ranges(shard.extents, mine),
                    )
                )
        # The first chunk is what the next step needs first, and of it the parts in the order of their use.
        first = [self.states[bucket] for bucket in chunks[0].by_use]
        self._order = [*first, *self.states[len(first) :]]
        device = self.states[0].master.device
        # Tensors that LAMB adapts and that this rank counts: the others add nothing to the packed sums.
        self._adapted = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self._counted = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        for chunk in chunks:
            for shard in chunk.shards:
                for e in shard.extents:
                    self._adapted[ids[e.piece.name]] = float(e.piece.decay)
                    self._counted[ids[e.piece.name]] = float(tensor.rank == 0 or not e.spec.replicated)

    @torch.no_grad()
    def step(
        self,
        learning_rate: float,
        step: int,
        piggybacked_scalars: torch.Tensor | None = None,
        updated: Callable[[FlatShard], None] = lambda shard: None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Clip and update in place; a step whose norm is not finite changes nothing. `updated` gets each shard.

        Returns, on the device, the norm of the whole model's gradient before clipping, and the sum over ranks of
        `piggybacked_scalars` (a float64 vector that travels in the same message).
        """
        config = self.config
        norm, piggybacked_scalars = self._summed(piggybacked_scalars)
        scale = None
        if config.clip:
            scale = (config.clip / (norm + 1e-6)).clamp(max=1.0)
        skip = ~torch.isfinite(norm)
        if config.name == "adamw":
            for s in self._order:
                adamw_apply(
                    s.master,
                    s.exp_avg,
                    s.exp_avg_sq,
                    s.shard.grads,
                    s.param_out,
                    lr=learning_rate,
                    beta1=config.beta1,
                    beta2=config.beta2,
                    eps=config.eps,
                    weight_decay=config.weight_decay,
                    step=step,
                    segments=s.segments,
                    grad_scale=scale,
                    skip=skip,
                )
                updated(s.shard)
        else:
            self._lamb(learning_rate, step, scale, skip, updated)
        return norm, piggybacked_scalars

    def _lamb(
        self,
        learning_rate: float,
        step: int,
        scale: torch.Tensor | None,
        skip: torch.Tensor,
        updated: Callable[[FlatShard], None],
    ) -> None:
        config = self.config
        sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=skip.device)
        for s in self.states:
            # The gradient has served once its direction is known, so the direction takes its place.
            sums += lamb_direction(
                s.master,
                s.exp_avg,
                s.exp_avg_sq,
                s.shard.grads,
                s.shard.grads,
                beta1=config.beta1,
                beta2=config.beta2,
                eps=config.eps,
                weight_decay=config.weight_decay,
                step=step,
                segments=s.segments,
                bias_correction=config.lamb_bias_correction,
                grad_scale=scale,
                skip=skip,
            )
        sums = all_reduce(sums * self._counted, self.stage).wait() * self._adapted
        for s in self._order:
            lamb_apply(
                s.master,
                s.shard.grads,
                s.param_out,
                sums,
                lr=learning_rate,
                trust_min=config.trust_min,
                trust_max=math.inf if config.trust_max is None else config.trust_max,
                segments=s.segments,
                skip=skip,
            )
            updated(s.shard)

    def _summed(self, piggybacked_scalars: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """2-norm of the whole model's gradient (0-d, float64), every parameter counted once, and the summed scalars."""
        squares = torch.zeros(1, dtype=torch.float64, device=self.states[0].master.device)
        counted = [s.shard.grads[a:b] for s in self.states for a, b in s.counted]
        if counted:
            # All in a few launches: a launch a shard leaves the device idle between them.
            squares += torch.stack(torch_private.foreach_norm(counted)).double().square().sum()
        squares *= self.norm_weight
        packed = squares if piggybacked_scalars is None else torch.cat([squares, piggybacked_scalars])
        packed = all_reduce(packed, self.norm_axis).wait()
        return packed[0].sqrt(), None if piggybacked_scalars is None else packed[1:]

    def copy_to_params(self) -> None:
        """Write the weights in use from the master weights (after loading)."""
        for s in self.states:
            if s.param_out is not None:
                s.param_out.copy_(s.master)

    def logical(self) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        """What a checkpoint holds: (name, whole shape, offsets, view of this rank's box) of weights and moments."""
        for s in self.states:
            for extent in s.shard.extents:
                for prefix, flat in (
                    ("model", s.master),
                    ("optimizer.exp_avg", s.exp_avg),
                    ("optimizer.exp_avg_sq", s.exp_avg_sq),
                ):
                    for piece, offsets, view in extent_boxes(extent, flat):
                        yield f"{prefix}.{piece.name}", piece.shape, offsets, view


def _names(chunks: Sequence[FlatChunk]) -> list[str]:
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
