"""MLP of a block, from its inner columns through the activation to this rank's share of the output."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megascale.config.parts import MLPS, PartFacts
from megascale.config.registry import Registry
from megascale.core.inventory import MLP_PARTS, PartInventory
from megascale.model.context import LayerSetup
from megascale.model.experts import ExpertsMlp
from megascale.model.fusion import Branch
from megascale.ops import activation as activations
from megascale.ops.activation import RecomputedActivation, activate, can_fuse
from megascale.parallel.module import DirectModule
from megascale.parallel.tensor import ColumnLinear, RowLinear


class DenseMlp(DirectModule):
    """MLP with one input matrix (two with a gate) and one output matrix.

    Attributes:
        columns: matrices and biases of its input projection; without any it gets the norm.
        bias: bias of `columns` if they are half of a fused projection whose other half has none; else the projection
            has the bias.
        activation: value of model.activation.
    """

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__()
        self.activation = setup.layer.feed_forward.activation
        self.is_recomputed = setup.recomputes("activation")
        self._operator = activations.KINDS[self.activation].operator
        self.columns = [t for t in setup.tensors.mlp if t.partition_dim == 0]
        self.bias: nn.Parameter | None = None
        self.out = RowLinear([t for t in setup.tensors.mlp if t.partition_dim != 0], setup.linears, setup.dtype)

    def fuses_bias_gradient(self, x: torch.Tensor) -> bool:
        """Return whether the activation computes the gradient of its GEMM's bias, which it does if it is fused.

        A plain activation would need one more pass.
        """
        return can_fuse(self.activation, self._operator, x)

    def forward(self, inner: torch.Tensor, projection: ColumnLinear | None) -> Branch:
        """Return this rank's share of the output for `inner`, [s, b, f/t] (gated: twice as wide).

        Args:
            projection: linear layer that made `inner`, including its bias; None for half of a fused projection.
        """
        is_bias_added = projection is not None and self.fuses_bias_gradient(inner)
        bias = projection.bias if projection is not None and is_bias_added else self.bias
        if self.is_recomputed and torch.is_grad_enabled():
            recompute_fn = RecomputedActivation(self.activation, bias, is_bias_added)
            return Branch(inner, self.out.weight, self.out.bias, recompute_fn)
        return Branch(activate(self.activation, inner, bias, is_bias_added), self.out.weight, self.out.bias)


MLP_MODULES: Registry[Callable[[LayerSetup], nn.Module]] = Registry(
    MLPS.key, {"dense": DenseMlp, "experts": ExpertsMlp}
)


def register(
    name: str, make: Callable[[LayerSetup], nn.Module], inventory: PartInventory, description: str = ""
) -> None:
    """Register a value of model.mlp; make(setup) has the interface of DenseMlp."""
    MLPS.register(name, PartFacts(description))
    MLP_PARTS.register(name, inventory)
    MLP_MODULES.register(name, make)
