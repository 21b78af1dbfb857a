"""Reading and updating of the residual stream, with fused norms and sums.

A block reads the stream with `norm_and_project` and adds to the stream with `add_branches`. Both functions save passes
over memory in three ways. The kernel of a norm also computes the residual sum before the norm. Backward recomputes
norms and activations. The branches of a parallel block share one sum of GEMMs. The result is the same as without these
fusions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megascale.model.context import ForwardContext, LayerSetup
from megascale.model.norm import Norm
from megascale.ops.activation import RecomputedActivation
from megascale.ops.dropout import dropout_add, make_dropout_key
from megascale.parallel.linear import LinearPrecision
from megascale.parallel.tensor import ColumnLinear, linear_scatter


@dataclass(slots=True)
class DeferredResidualAdd:
    """Residual sum that is not computed yet: residual + y + bias. The next norm computes the sum in its kernel."""

    y_SBH: Tensor
    residual_SBH: Tensor
    bias: Tensor | None

    def add(self) -> Tensor:
        if self.bias is None:
            return self.residual_SBH + self.y_SBH
        return dropout_add(self.y_SBH, self.bias, self.residual_SBH, 0.0, make_dropout_key(0, 0, 0), 0, 0)


# The residual stream [s/t, b, h] between blocks, computed or deferred.
ResidualStream = Tensor | DeferredResidualAdd


@dataclass(slots=True)
class Branch:
    """Output of attention or MLP before its last GEMM: x @ weight.T, summed over tensor-parallel ranks, plus bias.

    Attributes:
        x: input of the GEMM [s, b, inner / t].
        weight: this rank's weight [h, inner / t].
        bias: bias [h], added after the sum over ranks.
        recompute_fn: if set, the GEMM multiplies recompute_fn(x) instead of x, and backward recomputes that activation.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    recompute_fn: RecomputedActivation | None = None


class ProjectionReader(Protocol):
    """Part that reads a projection. Its operator may compute the gradient of the projection's bias."""

    def fuses_bias_gradient(self, x: Tensor) -> bool:
        """Return whether the operator computes the bias gradient for inputs with the device and type of x."""


def add_and_norm(norm: Norm, x: ResidualStream) -> tuple[Tensor, Tensor]:
    """Return the residual stream [s/t, b, h] and its norm. A deferred sum and its norm are computed in one pass."""
    if isinstance(x, Tensor):
        return x, norm(x)
    if norm.has_fused_add:
        return norm.add_and_norm(x.y_SBH, x.residual_SBH, x.bias)
    x_SBH = x.add()
    return x_SBH, norm(x_SBH)


def norm_and_project(
    norm: Norm | None, projection: ColumnLinear | None, x: ResidualStream, reader: ProjectionReader | None = None
) -> tuple[Tensor, Tensor]:
    """Return the residual stream [s/t, b, h], and the projection [s, b, columns/t] of its norm.

    Args:
        norm: None: project the stream itself.
        projection: None: return the norm in place of the projection.
        reader: part that reads the projection and may compute the gradient of its bias.
    """
    if norm is None:
        x_SBH = x if isinstance(x, Tensor) else x.add()
        if projection is None:
            return x_SBH, x_SBH
        return x_SBH, projection(x_SBH, None, reader is not None and reader.fuses_bias_gradient(x_SBH))
    if projection is None:
        return add_and_norm(norm, x)
    is_bias_gradient_fused = False
    if reader is not None and projection.bias is not None:
        # The reader only looks at the tensor's device and type.
        tensor = x if isinstance(x, Tensor) else x.y_SBH
        is_bias_gradient_fused = reader.fuses_bias_gradient(tensor)
    if norm.is_recomputed and torch.is_grad_enabled():
        # The projection computes the norm, in forward and again in backward.
        x_SBH = x if isinstance(x, Tensor) else x.add()
        return x_SBH, projection(x_SBH, norm.forward, is_bias_gradient_fused)
    x_SBH, normed = add_and_norm(norm, x)
    return x_SBH, projection(normed, None, is_bias_gradient_fused)


def sum_branches(linears: LinearPrecision, branches: Sequence[Branch | Tensor]) -> Tensor:
    """Return the sum of branches [s/t, b, h] without their biases, with one scatter for all GEMMs.

    A branch that is a tensor [s/t, b, h] is the complete output of its part (experts).
    """
    gemm_operands: list[Tensor] = []
    recompute_fns: list[RecomputedActivation | None] = []
    complete_outputs: list[Tensor] = []
    for branch in branches:
        if isinstance(branch, Branch):
            gemm_operands += (branch.x, branch.weight)
            recompute_fns.append(branch.recompute_fn)
        else:
            complete_outputs.append(branch)
    if gemm_operands:
        sum_SBH = linear_scatter(linears, *gemm_operands, recompute_fns=recompute_fns)
    else:
        sum_SBH = complete_outputs.pop(0)
    for output in complete_outputs:
        sum_SBH = sum_SBH + output
    if linears.adapters is not None:
        sum_SBH = _add_adapters(sum_SBH, branches)
    return sum_SBH


def _add_adapters(sum_SBH: Tensor, branches: Sequence[Branch | Tensor]) -> Tensor:
    """Return the sum of branches plus the outputs of the low-rank adapters of their weights."""
    for branch in branches:
        if isinstance(branch, Branch):
            adapter = getattr(branch.weight, "adapter", None)
            if adapter is not None:
                x = branch.x if branch.recompute_fn is None else branch.recompute_fn(branch.x)
                sum_SBH = adapter.add(sum_SBH, x)
    return sum_SBH


def add_branches(
    setup: LayerSetup,
    residual_SBH: Tensor,
    branches: Sequence[Branch | Tensor],
    context: ForwardContext,
    *,
    post_norm: Norm | None = None,
    sum_index: int = 0,
    defer_add: bool = False,
) -> ResidualStream:
    """Return residual + dropout(residual multiplier x sum of the branches with their biases).

    Args:
        post_norm: norm of the sum of the branches, if the layer has one.
        sum_index: index of the residual sum within its layer, which selects the dropout mask.
        defer_add: whether to leave the sum to the next norm. With dropout the sum is computed here.
    """
    y_SBH = sum_branches(setup.linears, branches)
    bias: Tensor | None = None
    for branch in branches:
        if isinstance(branch, Branch) and branch.bias is not None:
            if bias is None:
                bias = branch.bias
            else:
                bias = bias + branch.bias
    if post_norm is not None:
        y_SBH = post_norm(y_SBH if bias is None else y_SBH + bias)
        bias = None
    if setup.layer.residual_multiplier != 1:
        y_SBH = (y_SBH if bias is None else y_SBH + bias) * setup.layer.residual_multiplier
        bias = None
    if context.dropout_key is None or not setup.dropout:
        deferred = DeferredResidualAdd(y_SBH, residual_SBH, bias)
        return deferred if defer_add else deferred.add()
    key = make_dropout_key(context.dropout_key, setup.index, sum_index)
    first_row = context.sequence_start + setup.axis.rank * y_SBH.shape[0]
    return dropout_add(y_SBH, bias, residual_SBH, setup.dropout, key, first_row, context.sample_start)
