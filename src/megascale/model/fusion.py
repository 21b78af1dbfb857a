"""Residual stream of a layer, and the fusions and recomputations on the way through it.

A block reads the stream with `norm_and_project` and adds to it with `add_branches`. These save passes over memory: the
next norm computes residual sums, backward recomputes norms and activations, and the branches of a parallel block share
one sum of GEMMs. None of this changes the result.
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
from megascale.ops.dropout import dropout_add, dropout_key
from megascale.parallel.linear import LinearPrecision
from megascale.parallel.tensor import ColumnLinear, linear_scatter


@dataclass(slots=True)
class DeferredResidualAdd:
    """Residual sum that its reader computes: residual + y + bias."""

    y_SBH: Tensor
    residual_SBH: Tensor
    bias: Tensor | None

    def add(self) -> Tensor:
        """Return the sum."""
        if self.bias is None:
            return self.residual_SBH + self.y_SBH
        return dropout_add(self.y_SBH, self.bias, self.residual_SBH, 0.0, dropout_key(0, 0, 0), 0, 0)


ResidualStream = Tensor | DeferredResidualAdd  # the residual stream between blocks


@dataclass(slots=True)
class Branch:
    """A part's addition to the residual stream: x @ weight.T + bias, not yet summed over tensor-parallel ranks.

    Attributes:
        bias: added to the sum over ranks.
        recompute_fn: if set, the GEMM multiplies this activation of x, which backward recomputes.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    recompute_fn: RecomputedActivation | None = None


class ProjectionReader(Protocol):
    """Reader of a projection that may compute the gradient of the projection's bias."""

    def fuses_bias_gradient(self, x: Tensor) -> bool:
        """Return whether it does for inputs like x."""


def add_and_norm(norm: Norm, x: ResidualStream) -> tuple[Tensor, Tensor]:
    """Return the residual stream and its norm. A deferred sum and its norm are computed in one pass."""
    if isinstance(x, Tensor):
        return x, norm(x)
    if norm.adds:
        return norm.add_and_norm(x.y_SBH, x.residual_SBH, x.bias)
    total = x.add()
    return total, norm(total)


def norm_and_project(
    norm: Norm | None, projection: ColumnLinear | None, x: ResidualStream, reader: ProjectionReader | None = None
) -> tuple[Tensor, Tensor]:
    """Return the residual stream, and the projection of its norm (without a projection, the norm; without a norm, of
    the stream).

    Args:
        reader: part that reads the projection and may compute the gradient of its bias.
    """
    if norm is None:
        x_SBH = x if isinstance(x, Tensor) else x.add()
        if projection is None:
            return x_SBH, x_SBH
        return x_SBH, projection(x_SBH, None, reader is not None and reader.fuses_bias_gradient(x_SBH))
    if projection is None:
        return add_and_norm(norm, x)
    fused = reader is not None and reader.fuses_bias_gradient(x if isinstance(x, Tensor) else x.y_SBH)
    if norm.is_recomputed and torch.is_grad_enabled():
        x_SBH = x if isinstance(x, Tensor) else x.add()
        return x_SBH, projection(x_SBH, norm, fused)
    x_SBH, normed = add_and_norm(norm, x)
    return x_SBH, projection(normed, None, fused)


def sum_branches(linears: LinearPrecision, branches: Sequence[Branch | Tensor]) -> Tensor:
    """Return the sum of branches [s/t, b, h] without their biases, with one scatter for all GEMMs.

    A branch may also be a tensor [s/t, b, h], which is added.
    """
    inputs: list[Tensor] = []
    recompute_fns: list[RecomputedActivation | None] = []
    finished: list[Tensor] = []
    for branch in branches:
        if isinstance(branch, Branch):
            inputs += (branch.x, branch.weight)
            recompute_fns.append(branch.recompute_fn)
        else:
            finished.append(branch)
    if inputs:
        total = linear_scatter(linears, *inputs, recompute_fns=recompute_fns)
    else:
        total = finished.pop(0)
    for part in finished:
        total = total + part
    if linears.adapters is not None:
        total = _add_adapters(total, branches)
    return total


def _add_adapters(total_SBH: Tensor, branches: Sequence[Branch | Tensor]) -> Tensor:
    """Return the sum of branches with the outputs of the adapters of their matrices."""
    for branch in branches:
        if isinstance(branch, Branch):
            adapter = getattr(branch.weight, "adapter", None)
            if adapter is not None:
                x = branch.x if branch.recompute_fn is None else branch.recompute_fn(branch.x)
                total_SBH = adapter.add(total_SBH, x)
    return total_SBH


def add_branches(
    setup: LayerSetup,
    residual_SBH: Tensor,
    branches: Sequence[Branch | Tensor],
    context: ForwardContext,
    *,
    post_norm: Norm | None = None,
    site: int = 0,
    defer_add: bool = False,
) -> ResidualStream:
    """Return residual + dropout(sum of the branches with their biases), in one pass if fused.

    The layer's residual multiplier scales the sum.

    Args:
        post_norm: norm of the sum of the branches, if the layer has one.
        site: number of the sum in its layer, which selects the dropout mask.
        defer_add: whether the next norm may compute the sum.
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
    key = dropout_key(context.dropout_key, setup.index, site)
    first_row = context.sequence_start + setup.axis.rank * y_SBH.shape[0]
    return dropout_add(y_SBH, bias, residual_SBH, setup.dropout, key, first_row, context.sample_start)
