"""Expert parallelism by gathers: the ranks of an axis hold different experts, and process the tokens of all of them.

The sequence shards, their experts and weights are gathered. Each rank computes the part of every token's sum that its
experts contribute, and a reduce-scatter adds the parts up. Backward mirrors this and gathers the shards again. The
loss is divided by the tokens of the global batch, so that gradients are summed and never divided by a number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops.gradient_sink import get_tracked
from megascale.ops.grouped_linear import add_matrix_gradients, run_experts, run_experts_backward
from megascale.ops.routing import RoutingPlan, RowLimit, plan_rows
from megascale.parallel.collectives import (
    Axis,
    Pending,
    all_gather,
    can_exchange,
    exchange_gather,
    exchange_scatter,
    reduce_scatter,
)


def _start_gather(x: Tensor, axis: Axis) -> Pending:
    """Gather x on dimension 0 by the axis's exchange if it has room, which CUDA graphs can capture."""
    if can_exchange(axis, x.nbytes):
        return exchange_gather(x, axis)
    return all_gather(x, axis)


def _start_scatter(x: Tensor, axis: Axis) -> Pending:
    """Reduce-scatter x on dimension 0 by the axis's exchange if it has room."""
    if not can_exchange(axis, x.nbytes // axis.size):
        return reduce_scatter(x, axis)
    shape = (x.shape[0] // axis.size, *x.shape[1:])
    parts = x.view(axis.size, *shape)
    return exchange_scatter(lambda out, rank: out.copy_(parts), shape, x, axis)


@torch_private.call_directly
class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SBH: Tensor,
        weights_SBK: Tensor,
        tracked_into: Tensor | None,
        tracked_out: Tensor | None,
        args: tuple[Any, ...],
    ) -> Tensor:
        indices_SBK, into, out, activation, axis, limit = args
        gathering_weights = _start_gather(weights_SBK, axis)
        gathering_indices = _start_gather(indices_SBK, axis)
        gathering_x = _start_gather(x_SBH, axis)
        count = into.shape[0]
        weights_TK = gathering_weights.wait().flatten(0, 1)
        indices_TK = gathering_indices.wait().flatten(0, 1)
        plan = plan_rows(indices_TK, axis.rank * count, count, weights_TK, axis.size * count, limit)
        x = gathering_x.wait()
        y_TH, inner = run_experts(x.flatten(0, 1), weights_TK, plan, into, out, activation)
        ctx.args = into, out, activation, axis
        ctx.save_for_backward(x_SBH, weights_TK, inner, plan.offsets, plan.row_tokens, plan.row_slots, plan.rows_TK)
        return _start_scatter(y_TH.view(x.shape), axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        into, out, activation, axis = ctx.args
        x_SBH, weights_TK, inner, *plan = ctx.saved_tensors
        gathering_dy = _start_gather(grads[0], axis)
        gathering_x = _start_gather(x_SBH, axis)
        dy = gathering_dy.wait()
        routing_plan = RoutingPlan(*plan)
        rows = run_experts_backward(dy.flatten(0, 1), weights_TK, inner, routing_plan, into, out, activation)
        # The gradients of the matrices hide this transfer.
        scattering_weights = _start_scatter(rows.weights_TK.view(*dy.shape[:2], -1), axis)
        scattering_dx = _start_scatter(rows.x_TH.view(dy.shape), axis)
        x = gathering_x.wait()
        d_into, d_out = add_matrix_gradients(rows, x.flatten(0, 1), routing_plan, into, out)
        d_weights_SBK = scattering_weights.wait()
        return scattering_dx.wait(), d_weights_SBK, d_into, d_out, None


def apply_experts(
    x_SBH: Tensor,
    weights_SBK: Tensor,
    indices_SBK: Tensor,
    into: Tensor,
    out: Tensor,
    activation: str,
    axis: Axis,
    limit: RowLimit | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts, [s/t, b, h].

    Args:
        x_SBH: this rank's tokens [s/t, b, h].
        weights_SBK, indices_SBK: weights and experts of these tokens [s/t, b, top_k].
        into, out: matrices of this rank's experts, as for `run_experts`.
        axis: the ranks that hold the experts, in order, and the tokens.
        limit: room for rows in captured work; None: exactly the rows of this rank's experts.
    """
    args = indices_SBK, into, out, activation, axis, limit
    y: Tensor = _Experts.apply(x_SBH, weights_SBK, get_tracked(x_SBH, into), get_tracked(x_SBH, out), args)
    return y
