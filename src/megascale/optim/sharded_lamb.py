"""LAMB (You et al. 2020) on shards, with one packed all-reduce for the norms of whole logical tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from megascale.config import OptimizerConfig
from megascale.core.tensors import matrix_ranges
from megascale.ops.adam import lamb_apply, lamb_direction
from megascale.optim.base import Shards, ShardState, StatePart, UpdateRule, UpdateStep
from megascale.parallel.buffers import FlatShard
from megascale.parallel.collectives import all_reduce


class ShardedLamb(UpdateRule):
    """LAMB with the state exp_avg and exp_avg_sq for every tensor.

    Norms are those of the weights and of the direction of each decayed tensor, and of each matrix of stacked experts.
    """

    def __init__(self, config: OptimizerConfig, shards: Shards) -> None:
        super().__init__(config, shards)
        # 1 for tensors that LAMB adapts, and for tensors whose norms this rank sums; 0 for all others.
        self._adapted = torch.zeros(len(shards.names), dtype=torch.float64, device=shards.device)
        self._sums = torch.zeros(2, len(shards.names), dtype=torch.float64, device=shards.device)
        self._counted = torch.zeros(len(shards.names), dtype=torch.float64, device=shards.device)
        index = {name: i for i, name in enumerate(shards.names)}
        for state in shards.states:
            for extent in state.shard.extents:
                stop = extent.piece_start + extent.stop - extent.start
                for run in matrix_ranges(extent.piece, extent.piece_start, stop):
                    self._adapted[index[run.name]] = float(extent.piece.decay)
                    self._counted[index[run.name]] = float(extent.spec.is_counted(shards.position))

    def update(self, step: UpdateStep, on_updated: Callable[[FlatShard], None]) -> None:
        """Compute directions and their sums over all shards, reduce the sums, and update the weights."""
        sums = torch.zeros(2, len(self.shards.names), dtype=torch.float64, device=step.skip.device)
        for state in self.shards.states:
            for part in state.parts:
                sums += self._compute_direction(state, part, step)
        self._sums = all_reduce(sums * self._counted, self.shards.stage).wait()
        adapted_sums = self._sums * self._adapted
        for state in self.shards.update_order:
            for part in state.parts:
                self._apply(state, part, step, adapted_sums)
            on_updated(state.shard)

    def recompute(self, state: ShardState, part: StatePart, step: UpdateStep) -> dict[str, torch.Tensor]:
        """Repeat the update of a copy with the norms of the last update, see `UpdateRule.recompute`."""
        self._compute_direction(state, part, step)
        adapted = torch.zeros_like(self._adapted)
        for row in part.segments.rows:
            adapted[row.tensor] = float(row.decay)
        self._apply(state, part, step, self._sums * adapted)
        return {}

    def _compute_direction(self, state: ShardState, part: StatePart, step: UpdateStep) -> torch.Tensor:
        """Update the moments of a part. Return the sums of squares of its weights and directions."""
        config = self.config
        grads = part.view(state.shard.grads)
        # The direction overwrites the gradient, which is not needed afterwards.
        return lamb_direction(
            part.view(state.master),
            part.state["exp_avg"],
            part.state["exp_avg_sq"],
            grads,
            grads,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            step=step.number,
            segments=part.segments,
            bias_correction=config.lamb_bias_correction,
            grad_scale=step.grad_scale,
            skip=step.skip,
        )

    def _apply(self, state: ShardState, part: StatePart, step: UpdateStep, sums: torch.Tensor) -> None:
        """Apply the direction times the trust ratio to a part's weights."""
        config = self.config
        lamb_apply(
            part.view(state.master),
            part.view(state.shard.grads),
            None if state.param_out is None else part.view(state.param_out),
            sums,
            lr=step.learning_rate,
            trust_min=config.trust_min,
            trust_max=math.inf if config.trust_max is None else config.trust_max,
            segments=part.segments,
            skip=step.skip,
        )
