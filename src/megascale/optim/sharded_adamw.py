"""AdamW (Loshchilov and Hutter 2019) on shards: each element by itself, no norms."""

from __future__ import annotations

from collections.abc import Callable

from megascale.config import OptimizerConfig
from megascale.ops.adamw import adamw_apply
from megascale.optim.base import ShardState, StatePart, Step, UpdateRule
from megascale.parallel.buffers import FlatShard


class ShardedAdamW(UpdateRule):
    """State: exp_avg and exp_avg_sq of every tensor."""

    def update(self, step: Step, updated: Callable[[FlatShard], None]) -> None:
        """One pass over each shard."""
        for s in self.shards.update_order:
            for part in s.parts:
                adamw_part(self.config, s, part, step)
            updated(s.shard)


def adamw_part(config: OptimizerConfig, s: ShardState, part: StatePart, step: Step) -> None:
    """AdamW on a part that keeps its moments."""
    adamw_apply(
        part.view(s.master),
        part.state["exp_avg"],
        part.state["exp_avg_sq"],
        part.view(s.shard.grads),
        None if s.param_out is None else part.view(s.param_out),
        lr=step.learning_rate,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        step=step.number,
        segments=part.segments,
        grad_scale=step.scale,
        skip=step.skip,
    )
