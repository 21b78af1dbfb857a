"""LAMB (You et al. 2020) on shards, with one all-reduce per update for the norms of all tensors.

In this file a tensor is what has norms of its own: a logical tensor, or each matrix of a logical tensor that stacks
several, such as experts. `Shards.tensor_names` lists these tensors.

A rank updates flat shards. An `Extent` is a range of a shard whose elements belong to one logical tensor. A `Piece` is
the box of the logical tensor that these elements are from. A `StatePart` is a range of a shard that one kernel updates.
`StatePart.segments` divides the part's extents at the borders of tensors, with offsets from the part's start.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from megascale.config import OptimizerConfig
from megascale.core.tensors import matrix_ranges
from megascale.ops.lamb import lamb_apply, lamb_direction
from megascale.optim.base import Shards, ShardState, StatePart, UpdateRule, UpdateStep
from megascale.parallel.buffers import FlatShard
from megascale.parallel.collectives import all_reduce


class ShardedLamb(UpdateRule):
    """LAMB with the state exp_avg and exp_avg_sq for every tensor.

    LAMB adapts the rate of decayed tensors only, by the norms of a tensor's weights and of its direction.
    """

    def __init__(self, config: OptimizerConfig, shards: Shards) -> None:
        super().__init__(config, shards)
        tensor_count = len(shards.tensor_names)
        # Masks by tensor, 1 or 0: tensors that LAMB adapts, and tensors whose squares this rank adds to the norms.
        self._adapted_mask = torch.zeros(tensor_count, dtype=torch.float64, device=shards.device)
        self._counted_mask = torch.zeros(tensor_count, dtype=torch.float64, device=shards.device)
        # Sums of squares of weights (row 0) and directions (row 1) of the last update.
        self._square_sums = torch.zeros(2, tensor_count, dtype=torch.float64, device=shards.device)
        tensor_indices = {name: index for index, name in enumerate(shards.tensor_names)}
        for state in shards.states:
            for extent in state.shard.extents:
                # Convert the end of the extent from an index within the shard to an index within the piece.
                piece_stop = extent.piece_start + extent.stop - extent.start
                for matrix_range in matrix_ranges(extent.piece, extent.piece_start, piece_stop):
                    index = tensor_indices[matrix_range.name]
                    self._adapted_mask[index] = float(extent.piece.decay)
                    # Of the ranks that replicate a parameter, only one adds its squares.
                    self._counted_mask[index] = float(extent.spec.is_counted(shards.position))

    def update(self, step: UpdateStep, on_updated: Callable[[FlatShard], None]) -> None:
        """Compute directions and sums of squares of all shards, reduce the sums, and update the weights."""
        local_sums = torch.zeros(2, len(self.shards.tensor_names), dtype=torch.float64, device=step.skip.device)
        for state in self.shards.states:
            for part in state.parts:
                local_sums += self._compute_direction(state, part, step)
        # Sum over all ranks that hold shards of this pipeline stage's tensors.
        self._square_sums = all_reduce(local_sums * self._counted_mask, self.shards.stage).wait()
        # `lamb_apply` uses trust ratio 1 where a sum is zero, so zero sums switch the adaptation off.
        adapted_sums = self._square_sums * self._adapted_mask
        for state in self.shards.update_order:
            for part in state.parts:
                self._apply_direction(state, part, step, adapted_sums)
            on_updated(state.shard)

    def recompute(self, state: ShardState, part: StatePart, step: UpdateStep) -> dict[str, torch.Tensor]:
        """Repeat the last update on a copy of its elements, with the norms of that update (see `UpdateRule`).

        train/update_check.py compares the copy with the elements that a rank has updated. The dictionary is empty,
        because the rule has no `list_results`.
        """
        self._compute_direction(state, part, step)
        # `_adapted_mask` covers only tensors of this rank's shards. The copied elements may be another rank's.
        adapted_mask = torch.zeros_like(self._adapted_mask)
        for segment in part.segments.ranges:
            adapted_mask[segment.tensor_index] = float(segment.decay)
        self._apply_direction(state, part, step, self._square_sums * adapted_mask)
        return {}

    def _compute_direction(self, state: ShardState, part: StatePart, step: UpdateStep) -> torch.Tensor:
        """Update the moments of a part. Return the sums of squares [2, tensors] of its weights and directions."""
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

    def _apply_direction(self, state: ShardState, part: StatePart, step: UpdateStep, square_sums: torch.Tensor) -> None:
        """Subtract learning rate x trust ratio x direction from a part's weights."""
        config = self.config
        lamb_apply(
            part.view(state.master),
            part.view(state.shard.grads),
            None if state.param_out is None else part.view(state.param_out),
            square_sums,
            lr=step.learning_rate,
            trust_min=config.trust_min,
            trust_max=math.inf if config.trust_max is None else config.trust_max,
            segments=part.segments,
            skip=step.skip,
        )
