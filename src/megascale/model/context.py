"""Types that blocks and their parts exchange: construction, context of a forward pass, residual stream, branches.

A block saves passes over memory: the next norm computes residual sums, backward recomputes norms and activations, and
branches share one sum of GEMMs. None of this changes the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megascale.config import ModelConfig
from megascale.core.inventory import LayerInventory, layer_inventory
from megascale.ops.activation import RecomputedActivation
from megascale.ops.dropout import dropout_add, dropout_key
from megascale.ops.token_loss import TokenLoss
from megascale.parallel.collectives import Axis
from megascale.parallel.linear import LinearPrecision
from megascale.parallel.tensor import linear_scatter


@dataclass(frozen=True)
class LayerSetup:
    """Arguments for the construction of a block and its parts.

    Attributes:
        model: shape of the whole model.
        layer: index of the layer, from 0.
        linears: precision of GEMMs, which also has the tensor-parallel axis.
        dtype: type of weights and activations.
        axes: axes of the grid that parts may communicate along, by name; absent names have a single rank.
    """

    model: ModelConfig
    layer: int
    linears: LinearPrecision
    dtype: torch.dtype
    axes: Mapping[str, Axis] = field(default_factory=dict)

    @property
    def axis(self) -> Axis:
        """The tensor-parallel axis."""
        return self.linears.axis

    @property
    def tensors(self) -> LayerInventory:
        """The layer's logical tensors."""
        return layer_inventory(self.model, self.layer)


@dataclass
class KVCache:
    """Keys and values of earlier tokens, one pair per layer, [length, batch, kv heads, head size]."""

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    length: int = 0


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Context of a forward pass, in addition to its input.

    Attributes:
        dropout_key: depends on the optimizer step; None: no dropout.
        sample_start: index in the global batch of this micro-batch's first sample.
        token_grad: gradient of each token's loss, if it is known before backward: the last chunk then computes its
            gradients together with the logits.
        cache: keys and values of earlier tokens, for generation.
        token_loss: loss to use instead of cross-entropy.
    """

    dropout_key: int | None = None
    sample_start: int = 0
    token_grad: torch.Tensor | None = None
    cache: KVCache | None = None
    token_loss: TokenLoss | None = None


EVALUATION = ForwardContext()

# Cosines and sines of the positions, each [length, rotated width / 2], or [length, batch, rotated width / 2] if samples
# have positions of their own; None without rotary positions.
Rotary = tuple[torch.Tensor, torch.Tensor] | None


@dataclass(slots=True)
class DeferredResidualAdd:
    """Residual sum that its reader computes: residual + y + bias."""

    y_SBH: torch.Tensor
    residual_SBH: torch.Tensor
    bias: torch.Tensor | None

    def add(self) -> torch.Tensor:
        """Return the sum."""
        if self.bias is None:
            return self.residual_SBH + self.y_SBH
        return dropout_add(self.y_SBH, self.bias, self.residual_SBH, 0.0, dropout_key(0, 0, 0), 0, 0)


ResidualStream = torch.Tensor | DeferredResidualAdd  # the residual stream between blocks


def add_residual(
    setup: LayerSetup,
    y_SBH: torch.Tensor,
    residual_SBH: torch.Tensor,
    site: int,
    context: ForwardContext,
    defer_add: bool,
    *biases: torch.Tensor | None,
) -> ResidualStream:
    """Return residual + dropout(y + biases), in one pass if fused. With `defer_add` the next norm may compute it."""
    bias: torch.Tensor | None = None
    for part_bias in biases:
        if part_bias is not None:
            if bias is None:
                bias = part_bias
            else:
                bias = bias + part_bias
    if context.dropout_key is not None:
        p = setup.model.dropout
    else:
        p = 0.0
    if not p:
        deferred = DeferredResidualAdd(y_SBH, residual_SBH, bias)
        return deferred if defer_add else deferred.add()
    key = dropout_key(context.dropout_key or 0, setup.layer, site)
    return dropout_add(y_SBH, bias, residual_SBH, p, key, setup.axis.rank * y_SBH.shape[0], context.sample_start)


def is_recomputed(recompute: str, activation: str) -> bool:
    """Return whether backward recomputes "norms" or the "activation" under a value of parallel.recompute."""
    return recompute != "none" and recompute in (activation, "selective") and torch.is_grad_enabled()


@dataclass(slots=True)
class Branch:
    """A part's addition to the residual stream: x @ weight.T, not yet summed over tensor-parallel ranks.

    Attributes:
        recompute_fn: if set, the GEMM multiplies this activation of x, which backward recomputes.
    """

    x: torch.Tensor
    weight: torch.Tensor
    recompute_fn: RecomputedActivation | None = None


def sum_branches(linears: LinearPrecision, *branches: Branch | torch.Tensor) -> torch.Tensor:
    """Return the sum of branches [s/t, b, h], with one scatter for all GEMMs.

    A branch may also be a tensor [s/t, b, h], which is added.
    """
    inputs: list[torch.Tensor] = []
    recompute_fns: list[RecomputedActivation | None] = []
    finished: list[torch.Tensor] = []
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
    return total
