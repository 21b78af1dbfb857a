"""Expert parallelism by gathers: the ranks of an axis have different experts, and process the tokens of all ranks.

All ranks gather the sequence shards with the choices and weights of experts. Each rank computes the sum over its own
experts for every token, and a reduce-scatter adds these sums. Backward gathers the shards again, and reduce-scatters
the gradients. The loss is divided by the tokens of the global batch, so gradients are summed over ranks and never
averaged.

In forward, tokens are gathered in the form that the GEMMs read. In float8 that is half of bfloat16's bytes. Backward
gathers tokens and gradients as they are, because the gradients of matrices read them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops.expert_gemms import DEFAULT_EXPERT_GEMMS, ExpertGemms
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
from megascale.parallel.tensor import start_operand_gather


def _start_gather(x: Tensor, axis: Axis) -> Pending:
    """Gather x on dimension 0, by the axis's exchange if x fits. CUDA graphs can capture an exchange."""
    if can_exchange(axis, x.nbytes):
        return exchange_gather(x, axis)
    return all_gather(x, axis)


def _start_scatter(x: Tensor, axis: Axis) -> Pending:
    """Reduce-scatter x on dimension 0, by the axis's exchange if a part of x fits."""
    if not can_exchange(axis, x.nbytes // axis.size):
        return reduce_scatter(x, axis)
    shape = (x.shape[0] // axis.size, *x.shape[1:])
    parts = x.view(axis.size, *shape)
    return exchange_scatter(lambda out, rank: out.copy_(parts), shape, x, axis)


@torch_private.call_directly
class _Experts(torch.autograd.Function):
    """The function of `apply_experts`. `tracked_...`: the matrices for autograd, None with a sink."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SBH: Tensor,
        weights_SBK: Tensor,
        tracked_in: Tensor | None,
        tracked_out: Tensor | None,
        args: tuple[Any, ...],
    ) -> Tensor:
        indices_SBK, in_matrices, out_matrices, activation, axis, limit, gemms = args
        gathering_weights = _start_gather(weights_SBK, axis)
        gathering_indices = _start_gather(indices_SBK, axis)
        wait_for_x = start_operand_gather(gemms.prepare(x_SBH), axis, _start_gather)
        local_experts = in_matrices.shape[0]
        first_expert = axis.rank * local_experts
        weights_TK = gathering_weights.wait().flatten(0, 1)
        indices_TK = gathering_indices.wait().flatten(0, 1)
        plan = plan_rows(indices_TK, first_expert, local_experts, weights_TK, axis.size * local_experts, limit)
        x = wait_for_x()
        y_TH, inner = run_experts(x.flatten_rows(), weights_TK, plan, in_matrices, out_matrices, activation, gemms)
        ctx.args = in_matrices, out_matrices, activation, axis, gemms
        ctx.save_for_backward(x_SBH, weights_TK, inner, plan.offsets, plan.row_tokens, plan.row_slots, plan.rows_TK)
        return _start_scatter(y_TH.view(x.data.shape), axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        in_matrices, out_matrices, activation, axis, gemms = ctx.args
        x_SBH, weights_TK, inner, *plan = ctx.saved_tensors
        gathering_dy = _start_gather(grads[0], axis)
        gathering_x = _start_gather(x_SBH, axis)
        dy = gathering_dy.wait()
        routing_plan = RoutingPlan(*plan)
        dy_TH = dy.flatten(0, 1)
        rows = run_experts_backward(
            dy_TH, weights_TK, inner, routing_plan, in_matrices, out_matrices, activation, gemms
        )
        # The GEMMs of the matrices' gradients hide these transfers.
        scattering_weights = _start_scatter(rows.weights_TK.view(*dy.shape[:2], -1), axis)
        scattering_dx = _start_scatter(rows.x_TH.view(dy.shape), axis)
        x = gathering_x.wait()
        d_in, d_out = add_matrix_gradients(rows, x.flatten(0, 1), routing_plan, in_matrices, out_matrices)
        d_weights_SBK = scattering_weights.wait()
        return scattering_dx.wait(), d_weights_SBK, d_in, d_out, None


def apply_experts(
    x_SBH: Tensor,
    weights_SBK: Tensor,
    indices_SBK: Tensor,
    in_matrices: Tensor,
    out_matrices: Tensor,
    activation: str,
    axis: Axis,
    limit: RowLimit | None = None,
    gemms: ExpertGemms = DEFAULT_EXPERT_GEMMS,
) -> Tensor:
    """Return the weighted sum of the results of each token's experts, [s/t, b, h]. One axis divides the experts.

    Args:
        x_SBH: this rank's tokens [s/t, b, h].
        weights_SBK, indices_SBK: weights and experts of these tokens [s/t, b, top_k].
        in_matrices, out_matrices: matrices of this rank's experts, as for `run_experts`.
        axis: ranks that divide the experts, in order, and the tokens.
        limit: number of rows in a CUDA graph; None for exactly the rows of this rank's experts.
        gemms: GEMMs of the experts' rows.
    """
    args = indices_SBK, in_matrices, out_matrices, activation, axis, limit, gemms
    y: Tensor = _Experts.apply(
        x_SBH, weights_SBK, get_tracked(x_SBH, in_matrices), get_tracked(x_SBH, out_matrices), args
    )
    return y
