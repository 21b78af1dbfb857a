"""The experts of a rank, forward and backward: two grouped linear layers with an activation between them.

`ops/expert_gemms.py` has the GEMMs of rows, and `ops/grouped_gradients.py` those of the matrices' gradients. They are
kernels on a GPU, and a loop over experts as the reference. Forward saves the output of the first layer, and backward
computes the activation again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megascale.ops.activation import RecomputedActivation
from megascale.ops.dispatch import use_fused
from megascale.ops.expert_gemms import DEFAULT_EXPERT_GEMMS, ExpertGemms
from megascale.ops.gradient_sink import get_sink
from megascale.ops.grouped_gradients import accumulate_group_gradients
from megascale.ops.linear import Operand
from megascale.ops.routing import RoutingPlan, combine_rows
from megascale.ops.routing_kernels import FUSED_ACTIVATIONS, compute_activation_gradient
from megascale.ops.row_copies import gather_rows, should_copy_rows


def run_experts(
    x: Operand,
    weights_TK: Tensor,
    plan: RoutingPlan,
    in_matrices: Tensor,
    out_matrices: Tensor,
    activation: str,
    gemms: ExpertGemms = DEFAULT_EXPERT_GEMMS,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of each token's local experts [tokens, h], and the input projection [rows, columns].

    Args:
        x: tokens [tokens, h], prepared by `gemms`.
        in_matrices: input matrices [experts, matrices, width, h]; with a gate the matrices are [gate, up].
        out_matrices: output matrices [experts, h, width].
    """
    inner = gemms.forward(x, in_matrices, plan.offsets, plan.row_tokens)
    rows = gemms.forward(gemms.activate(activation, inner), out_matrices, plan.offsets)
    return combine_rows(rows, plan, weights_TK), inner


class RowGradients(NamedTuple):
    """Gradients of tokens and weights, and the factors of which the gradients of the experts' matrices are products.

    Attributes:
        x_TH: gradient of the tokens [tokens, h].
        weights_TK: gradient of the weights [tokens, top_k].
        dy: gradient of the result, one row per plan row, or one row per token if there is a `dy_index`.
        dy_index: row of `dy` for each plan row [rows]; None: the same row.
        activated: activation times the row's weight [rows, width].
        inner: gradient of the first layer's output [rows, columns].
    """

    x_TH: Tensor
    weights_TK: Tensor
    dy: Tensor
    dy_index: Tensor | None
    activated: Tensor
    inner: Tensor


def run_experts_backward(
    dy_TH: Tensor,
    weights_TK: Tensor,
    inner: Tensor,
    plan: RoutingPlan,
    in_matrices: Tensor,
    out_matrices: Tensor,
    activation: str,
    gemms: ExpertGemms = DEFAULT_EXPERT_GEMMS,
) -> RowGradients:
    """Return the gradients of tokens and weights, and the factors for `add_matrix_gradients`.

    The two functions are separate, so that the matrices' gradients are computed while other ranks receive x_TH.
    """
    dy = dy_TH
    dy_index: Tensor | None = plan.row_tokens
    if should_copy_rows(dy_TH, inner.shape[1]):
        # The copied rows are read twice: for the gradient of the activation, and for that of the matrix.
        dy = gather_rows(dy_TH, plan.row_tokens, plan.offsets)
        dy_index = None
    unweighted = gemms.dgrad(gemms.prepare(dy), out_matrices, plan.offsets, dy_index)
    d_inner, weighted, d_weights_TK = _activation_backward(inner, unweighted, weights_TK, plan, activation)
    rows = gemms.dgrad(gemms.prepare(d_inner), in_matrices, plan.offsets)
    return RowGradients(combine_rows(rows, plan), d_weights_TK, dy, dy_index, weighted, d_inner)


def add_matrix_gradients(
    rows: RowGradients, x_TH: Tensor, plan: RoutingPlan, in_matrices: Tensor, out_matrices: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and output matrices. A gradient is None if it was added to the parameter's sink."""
    d_out = add_gradient(out_matrices, rows.dy, rows.activated, plan, dy_index=rows.dy_index)
    d_in = add_gradient(in_matrices, rows.inner, x_TH, plan, index=plan.row_tokens)
    return d_in, d_out


def _activation_backward(
    inner: Tensor, unweighted: Tensor, weights_TK: Tensor, plan: RoutingPlan, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `inner`, the activation times the rows' weights, and the gradient of the weights.

    Args:
        unweighted: gradient of the activation before it is multiplied by the rows' weights [rows, width].
    """
    if activation in FUSED_ACTIVATIONS and use_fused("gradient of experts' activation", inner, weights_TK):
        end = plan.offsets[-1:]
        return compute_activation_gradient(
            activation, inner, unweighted, weights_TK, plan.row_tokens, plan.row_slots, end
        )
    # With a row limit, indices beyond the last offset are undefined. The clamp makes reads valid, and their results are
    # not used.
    token = plan.row_tokens.clamp(0, weights_TK.shape[0] - 1)
    slot = plan.row_slots.clamp(0, weights_TK.shape[1] - 1)
    row_weights = weights_TK[token, slot].unsqueeze(1)
    dy = (unweighted * row_weights).to(inner.dtype)
    activated, d_inner = RecomputedActivation(activation, None).with_gradient(inner, dy)
    # The gradient of a weight is <y, dy> = <activation, gradient of the activation>, so forward need not save y.
    products = (activated.to(weights_TK.dtype) * unweighted.to(weights_TK.dtype)).sum(1)
    padded = torch.cat((products, products.new_zeros(1)))
    d_weights_TK = padded[plan.rows_TK.clamp(max=len(products))]
    return d_inner, (activated * row_weights).to(inner.dtype), d_weights_TK


def add_gradient(
    parameter: Tensor,
    dy: Tensor,
    x: Tensor,
    plan: RoutingPlan,
    index: Tensor | None = None,
    dy_index: Tensor | None = None,
) -> Tensor | None:
    """Add the gradient of matrices [experts, ..., inner] or biases [experts, ...] to their sink.

    Args:
        dy: gradients of the rows' outputs [rows, columns].
        x: inputs of the rows [rows, inner]; for biases the factors by which they are multiplied [rows, 1].
        index, dy_index: row of `x`, and of `dy`, for each plan row; None: the same row.

    Returns:
        None, or the gradient if the parameter has no sink.
    """
    sink = get_sink(parameter)
    if sink is None and not parameter.requires_grad:
        return None
    stack_shape = (parameter.shape[0], -1, x.shape[-1])
    if sink is None:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        gradient = torch.empty(parameter.shape, dtype=wide, device=parameter.device)
        accumulate_group_gradients(gradient.view(stack_shape), dy, x, plan.offsets, index, dy_index, overwrite=True)
        return gradient.to(parameter.dtype)
    main_grad = sink.main_grad.view(stack_shape)
    accumulate_group_gradients(main_grad, dy, x, plan.offsets, index, dy_index, overwrite=sink.should_overwrite)
    sink.should_overwrite = False
    sink.is_gemm_gradient = True
    sink.ready()
    return None
