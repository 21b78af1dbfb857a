"""Experts with biases: `ops/grouped_linear.py`, with each expert's bias added to the expert's rows.

The gradient of a bias is a sum over rows. It is computed like the gradient of a matrix with one column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.ops.activation import RecomputedActivation
from megascale.ops.expert_gemms import DEFAULT_EXPERT_GEMMS, ExpertGemms
from megascale.ops.grouped_linear import (
    RowGradients,
    add_gradient,
    add_matrix_gradients,
    run_experts,
    run_experts_backward,
)
from megascale.ops.linear import Operand
from megascale.ops.routing import RoutingPlan, combine_rows


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """Parameters of the experts of a rank.

    Attributes:
        in_matrices: input matrices [experts, matrices, width, h]; with a gate the matrices are [gate, up].
        out_matrices: output matrices [experts, h, width].
        in_bias: biases of the input projection [experts, matrices, width]; None without biases.
        out_bias: biases of the output projection [experts, h]; None without biases.
        activation: value of model.activation.
        gemms: GEMMs of the experts' rows.
    """

    in_matrices: Tensor
    out_matrices: Tensor
    in_bias: Tensor | None
    out_bias: Tensor | None
    activation: str
    gemms: ExpertGemms = DEFAULT_EXPERT_GEMMS

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """Matrices and biases, in the order in which `add_stack_gradients` returns their gradients."""
        return self.in_matrices, self.out_matrices, self.in_bias, self.out_bias


def run_expert_stacks(x: Operand, weights_TK: Tensor, plan: RoutingPlan, stacks: ExpertStacks) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of each token's local experts [tokens, h], and the input projection [rows, columns].

    Args:
        x: tokens [tokens, h], prepared by `stacks.gemms`.
    """
    in_matrices, out_matrices, gemms = stacks.in_matrices, stacks.out_matrices, stacks.gemms
    if stacks.in_bias is None or stacks.out_bias is None:
        return run_experts(x, weights_TK, plan, in_matrices, out_matrices, stacks.activation, gemms)
    experts = _find_experts(plan)
    inner = gemms.forward(x, in_matrices, plan.offsets, plan.row_tokens)
    inner = inner + stacks.in_bias.detach().flatten(1)[experts]
    rows = gemms.forward(gemms.activate(stacks.activation, inner), out_matrices, plan.offsets)
    rows = rows + stacks.out_bias.detach()[experts]
    return combine_rows(rows, plan, weights_TK), inner


def run_expert_stacks_backward(
    dy_TH: Tensor, weights_TK: Tensor, inner: Tensor, plan: RoutingPlan, stacks: ExpertStacks
) -> RowGradients:
    """Return the gradients of x and weights, given the result's gradient, and the factors for `add_stack_gradients`."""
    in_matrices, out_matrices, gemms = stacks.in_matrices, stacks.out_matrices, stacks.gemms
    if stacks.in_bias is None or stacks.out_bias is None:
        return run_experts_backward(dy_TH, weights_TK, inner, plan, in_matrices, out_matrices, stacks.activation, gemms)
    wide = weights_TK.dtype
    row_weights = weights_TK[plan.row_tokens, plan.row_slots].unsqueeze(1)
    dy_rows = dy_TH[plan.row_tokens]
    unweighted = gemms.dgrad(gemms.prepare(dy_TH), out_matrices, plan.offsets, plan.row_tokens)
    d_activated = (unweighted * row_weights).to(inner.dtype)
    activated, d_inner = RecomputedActivation(stacks.activation, None).with_gradient(inner, d_activated)
    # The gradient of a row's weight is <y, dy>. Since y = matrix @ activated + bias, forward need not save y.
    biases = stacks.out_bias.detach()[_find_experts(plan)]
    products = (activated.to(wide) * unweighted.to(wide)).sum(1) + (biases.to(wide) * dy_rows.to(wide)).sum(1)
    padded = torch.cat((products, products.new_zeros(1)))
    d_weights_TK = padded[plan.rows_TK.clamp(max=len(products))]
    rows = gemms.dgrad(gemms.prepare(d_inner), in_matrices, plan.offsets)
    weighted = (activated * row_weights).to(inner.dtype)
    return RowGradients(combine_rows(rows, plan), d_weights_TK, dy_rows, None, weighted, d_inner)


def add_stack_gradients(
    rows: RowGradients, x_TH: Tensor, weights_TK: Tensor, plan: RoutingPlan, stacks: ExpertStacks
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `stacks.parameters`. A gradient is None if it was added to the parameter's sink."""
    in_matrices, out_matrices = stacks.in_matrices, stacks.out_matrices
    if stacks.in_bias is None or stacks.out_bias is None:
        return (*add_matrix_gradients(rows, x_TH, plan, in_matrices, out_matrices), None, None)
    row_weights = weights_TK[plan.row_tokens, plan.row_slots].unsqueeze(1)
    d_out_bias = add_gradient(stacks.out_bias, rows.dy, row_weights.to(rows.inner.dtype), plan)
    d_out = add_gradient(out_matrices, rows.dy, rows.activated, plan)
    d_in = add_gradient(in_matrices, rows.inner, x_TH[plan.row_tokens], plan)
    d_in_bias = add_gradient(stacks.in_bias, rows.inner, rows.inner.new_ones(len(rows.inner), 1), plan)
    return d_in, d_out, d_in_bias, d_out_bias


def _find_experts(plan: RoutingPlan) -> Tensor:
    """Return the expert of each row [rows], as an index among this rank's experts."""
    rows = torch.arange(len(plan.row_tokens), dtype=plan.offsets.dtype, device=plan.offsets.device)
    return torch.searchsorted(plan.offsets[1:], rows, right=True)
