"""Two grouped linear layers with an activation between them: the experts of a rank, forward and backward.

`ops/grouped_gemm.py` has the GEMMs: kernels on a GPU, and as the reference a loop of `mm` over experts. Backward keeps
the input projection's result and computes the activation again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megascale.ops.activation import RecomputedActivation
from megascale.ops.dispatch import use_fused
from megascale.ops.gradient_sink import get_sink
from megascale.ops.grouped_gemm import accumulate_group_gradients, copies_rows, gather_rows, multiply_groups
from megascale.ops.routing import RoutingPlan, combine_rows
from megascale.ops.routing_kernels import GRADIENT_KINDS, activation_gradient


def run_experts(
    x_TH: Tensor, weights_TK: Tensor, plan: RoutingPlan, into: Tensor, out: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of each token's local experts [tokens, h], and the input projection [rows, columns].

    Args:
        into: matrices [experts, matrices, width, h], with a gate [gate, up].
        out: matrices [experts, h, width].
    """
    inner = multiply_groups(x_TH, into.detach().flatten(1, 2), plan.offsets, plan.token)
    activated = RecomputedActivation(activation, None)(inner)
    rows = multiply_groups(activated, out.detach(), plan.offsets)
    return combine_rows(rows, plan, weights_TK), inner


class RowGradients(NamedTuple):
    """Gradients of the inputs of a rank's experts, and the factors of their matrices' gradients.

    Attributes:
        x_TH: gradient of the tokens [tokens, h].
        weights_TK: gradient of the weights [tokens, top_k].
        dy: gradient of the result, by row, or by token with `dy_index`.
        dy_index: token of each row [rows]; None: `dy` has a row for each.
        activated: activation times the weight of the row [rows, width].
        inner: gradient of the input projection [rows, columns].
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
    into: Tensor,
    out: Tensor,
    activation: str,
) -> RowGradients:
    """Return the gradients of the inputs. `add_matrix_gradients` follows, beside the transfer of these."""
    dy = dy_TH
    dy_index: Tensor | None = plan.token
    if copies_rows(dy_TH, inner.shape[1]):
        # The gradients of the activation and of the matrix read these rows.
        dy = gather_rows(dy_TH, plan.token, plan.offsets)
        dy_index = None
    unweighted = multiply_groups(dy, out.detach(), plan.offsets, dy_index, transposed=True)
    d_inner, weighted, d_weights_TK = _activation_backward(inner, unweighted, weights_TK, plan, activation)
    rows = multiply_groups(d_inner, into.detach().flatten(1, 2), plan.offsets, transposed=True)
    return RowGradients(combine_rows(rows, plan), d_weights_TK, dy, dy_index, weighted, d_inner)


def add_matrix_gradients(
    rows: RowGradients, x_TH: Tensor, plan: RoutingPlan, into: Tensor, out: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of both matrices, None where their sinks take them."""
    d_out = _add_gradient(out, rows.dy, rows.activated, plan, dy_index=rows.dy_index)
    d_into = _add_gradient(into, rows.inner, x_TH, plan, index=plan.token)
    return d_into, d_out


def _activation_backward(
    inner: Tensor, unweighted: Tensor, weights_TK: Tensor, plan: RoutingPlan, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `inner`, the activation times the rows' weights, and the gradient of the weights.

    Args:
        unweighted: gradient of the activation, without the weights of the rows [rows, width].
    """
    if activation in GRADIENT_KINDS and use_fused("gradient of experts' activation", inner, weights_TK):
        end = plan.offsets[-1:]
        return activation_gradient(activation, inner, unweighted, weights_TK, plan.token, plan.slot, end)
    # With a row limit, indices beyond the last offset are undefined: reading at them fails. Nothing uses their results.
    token = plan.token.clamp(0, weights_TK.shape[0] - 1)
    slot = plan.slot.clamp(0, weights_TK.shape[1] - 1)
    row_weights = weights_TK[token, slot].unsqueeze(1)
    dy = (unweighted * row_weights).to(inner.dtype)
    activated, d_inner = RecomputedActivation(activation, None).with_gradient(inner, dy)
    # The gradient of a weight is <y, dy> = <activation, gradient of the activation>, so y is not kept.
    products = (activated.to(weights_TK.dtype) * unweighted.to(weights_TK.dtype)).sum(1)
    padded = torch.cat((products, products.new_zeros(1)))
    d_weights_TK = padded[plan.row.clamp(max=len(products))]
    return d_inner, (activated * row_weights).to(inner.dtype), d_weights_TK


def _add_gradient(
    weight: Tensor,
    dy: Tensor,
    x: Tensor,
    plan: RoutingPlan,
    index: Tensor | None = None,
    dy_index: Tensor | None = None,
) -> Tensor | None:
    """Add the gradient of matrices [experts, ..., inner] to their sink, or return it without one."""
    sink = get_sink(weight)
    if sink is None and not weight.requires_grad:
        return None
    if sink is None:
        wide = torch.promote_types(weight.dtype, torch.float32)
        gradient = torch.empty(weight.shape, dtype=wide, device=weight.device)
        accumulate_group_gradients(_stack(gradient), dy, x, plan.offsets, index, dy_index, overwrite=True)
        return gradient.to(weight.dtype)
    main_grad = _stack(sink.main_grad)
    accumulate_group_gradients(main_grad, dy, x, plan.offsets, index, dy_index, overwrite=sink.overwrite)
    sink.overwrite = False
    sink.by_gemm = True
    sink.ready()
    return None


def _stack(matrices: Tensor) -> Tensor:
    """Return a view [experts, rows, inner] of matrices [experts, ..., inner]."""
    return matrices.view(matrices.shape[0], -1, matrices.shape[-1])
