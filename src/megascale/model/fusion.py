"""What a block does in fewer passes than it reads: residual sums left to the next norm, norms and activations that
backward recomputes, and branches in one sum of GEMMs. None of it changes what a block computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale.model.context import ForwardContext, LayerSetup
from megascale.ops.activation import RecomputedActivation
from megascale.ops.dropout import dropout_add, dropout_key
from megascale.parallel.linear import LinearPrecision
from megascale.parallel.tensor import linear_scatter


@dataclass(slots=True)
class DeferredResidualAdd:
    """A residual sum that its reader takes: residual + y + bias."""

    y_SBH: torch.Tensor
    residual_SBH: torch.Tensor
    bias: torch.Tensor | None

    def add(self) -> torch.Tensor:
        """The sum."""
        if self.bias is None:
            return self.residual_SBH + self.y_SBH
        return dropout_add(self.y_SBH, self.bias, self.residual_SBH, 0.0, dropout_key(0, 0, 0), 0, 0)


ResidualStream = torch.Tensor | DeferredResidualAdd  # the residual stream between blocks


def add_residual(
    at: LayerSetup,
    y_SBH: torch.Tensor,
    residual_SBH: torch.Tensor,
    site: int,
    context: ForwardContext,
    defer_add: bool,
    *biases: torch.Tensor | None,
) -> ResidualStream:
    """residual + dropout(y + biases): in one pass where fused, or left to its reader with `defer_add`."""
    bias: torch.Tensor | None = None
    for one in biases:
        if one is not None:
            bias = one if bias is None else bias + one
    p = at.model.dropout if context.dropout_key is not None else 0.0
    if not p:
        deferred = DeferredResidualAdd(y_SBH, residual_SBH, bias)
        return deferred if defer_add else deferred.add()
    key = dropout_key(context.dropout_key or 0, at.layer, site)
    return dropout_add(y_SBH, bias, residual_SBH, p, key, at.axis.rank * y_SBH.shape[0], context.sample_start)


def is_recomputed(recompute: str, what: str) -> bool:
    """Whether backward recomputes "norms" or the "activation" instead of keeping them, as parallel.recompute says."""
    return recompute != "none" and recompute in (what, "selective") and torch.is_grad_enabled()


@dataclass(slots=True)
class Branch:
    """What a part adds to the residual stream: x @ weight.T, whose sum over tensor-parallel ranks is still to be taken.

    Attributes:
        recompute_fn: the GEMM is of this activation of x, which backward recomputes.
    """

    x: torch.Tensor
    weight: torch.Tensor
    recompute_fn: RecomputedActivation | None = None


def sum_branches(linears: LinearPrecision, *branches: Branch | torch.Tensor) -> torch.Tensor:
    """[s/t, b, h]: all GEMMs in one sum with one scatter; a part may also give its share [s/t, b, h] done."""
    inputs: list[torch.Tensor] = []
    recompute_fns: list[RecomputedActivation | None] = []
    done: list[torch.Tensor] = []
    for branch in branches:
        if isinstance(branch, Branch):
            inputs += (branch.x, branch.weight)
            recompute_fns.append(branch.recompute_fn)
        else:
            done.append(branch)
    total = linear_scatter(linears, *inputs, recompute_fns=recompute_fns) if inputs else done.pop(0)
    for part in done:
        total = total + part
    return total
