"""LAMB (You et al. 2020) on shards: norms of whole logical tensors come from one packed all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from megascale.config import OptimizerConfig
from megascale.ops.lamb import lamb_apply, lamb_direction
from megascale.optim.base import Shards, Step, UpdateRule
from megascale.parallel.buffers import FlatShard
from megascale.parallel.collectives import all_reduce


class ShardedLamb(UpdateRule):
    """State: exp_avg and exp_avg_sq of every tensor. Norms: of each decayed tensor's weights and direction."""

    def __init__(self, config: OptimizerConfig, shards: Shards) -> None:
        super().__init__(config, shards)
        # Tensors that LAMB adapts and that this rank counts: the others add nothing to the packed sums.
        self._adapted = torch.zeros(len(shards.names), dtype=torch.float64, device=shards.device)
        self._counted = torch.zeros(len(shards.names), dtype=torch.float64, device=shards.device)
        ids = {name: number for number, name in enumerate(shards.names)}
        for s in shards.states:
            for e in s.shard.extents:
                self._adapted[ids[e.piece.name]] = float(e.piece.decay)
                self._counted[ids[e.piece.name]] = float(shards.tensor.rank == 0 or not e.spec.replicated)

    def update(self, step: Step, updated: Callable[[FlatShard], None]) -> None:
        """Directions and sums over all shards, one all-reduce, then the weights."""
        config = self.config
        sums = torch.zeros(2, len(self.shards.names), dtype=torch.float64, device=step.skip.device)
        for s in self.shards.states:
            for part in s.parts:
                grads = part.view(s.shard.grads)
                # The gradient has served once its direction is known, so the direction takes its place.
                sums += lamb_direction(
                    part.view(s.master),
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
                    grad_scale=step.scale,
                    skip=step.skip,
                )
        sums = all_reduce(sums * self._counted, self.shards.stage).wait() * self._adapted
        for s in self.shards.update_order:
            for part in s.parts:
                lamb_apply(
                    part.view(s.master),
                    part.view(s.shard.grads),
                    None if s.param_out is None else part.view(s.param_out),
                    sums,
                    lr=step.learning_rate,
                    trust_min=config.trust_min,
                    trust_max=math.inf if config.trust_max is None else config.trust_max,
                    segments=part.segments,
                    skip=step.skip,
                )
            updated(s.shard)
