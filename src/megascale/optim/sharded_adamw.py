"""AdamW (Loshchilov and Hutter 2019) on shards. The update is elementwise and needs no communication."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megascale.config import OptimizerConfig
from megascale.ops.adam import adamw_apply
from megascale.optim.base import ShardState, StatePart, UpdateRule, UpdateStep
from megascale.parallel.buffers import FlatShard


class ShardedAdamW(UpdateRule):
    """AdamW with the state exp_avg and exp_avg_sq for every tensor."""

    def update(self, step: UpdateStep, on_updated: Callable[[FlatShard], None]) -> None:
        """Update all shards, each part with one kernel."""
        for state in self.shards.update_order:
            for part in state.parts:
                apply_adamw(self.config, state, part, step)
            on_updated(state.shard)

    def recompute(self, state: ShardState, part: StatePart, step: UpdateStep) -> dict[str, torch.Tensor]:
        """Repeat the update on copied elements, see `UpdateRule.recompute`. AdamW has no results to return."""
        apply_adamw(self.config, state, part, step)
        return {}


def apply_adamw(config: OptimizerConfig, state: ShardState, part: StatePart, step: UpdateStep) -> None:
    """Apply AdamW to the weights and moments of one part of a shard."""
    adamw_apply(
        part.view(state.master),
        part.state["exp_avg"],
        part.state["exp_avg_sq"],
        part.view(state.shard.grads),
        None if state.param_out is None else part.view(state.param_out),
        lr=step.learning_rate,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        step=step.number,
        segments=part.segments,
        grad_scale=step.grad_scale,
        skip=step.skip,
    )
