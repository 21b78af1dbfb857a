"""The MLP of a block: from its inner columns through the activation to this rank's share of what it adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megascale.config.parts import MLPS, PartFacts
from megascale.config.registry import Registry
from megascale.core.inventory import MLP_PARTS, PartInventory
from megascale.model.context import LayerSetup
from megascale.model.fusion import Branch, recomputes
from megascale.ops import activation as activations
from megascale.ops.activation import RecomputedActivation, activate, fuses
from megascale.parallel.tensor import ColumnLinear, RowLinear


class DenseMlp(nn.Module):
    """One matrix in (with a gate two) and one out.

    Attributes:
        columns: the matrices that project to it, and their biases; a part that names none gets the norm itself.
        bias: theirs, where they are half of a fused projection whose other half has none; else the projection's.
        activation: what model.activation names.
    """

    def __init__(self, at: LayerSetup) -> None:
        super().__init__()
        self.activation = at.model.activation
        self._operator = activations.KINDS[self.activation].operator
        self.columns = [t for t in at.tensors.mlp if t.partition_dim == 0]
        self.bias: nn.Parameter | None = None
        self.out = RowLinear([t for t in at.tensors.mlp if t.partition_dim != 0], at.linears, at.dtype)

    @property
    def residual_bias(self) -> nn.Parameter | None:
        """What is added with this part's share to the residual stream."""
        return self._modules["out"]._parameters.get("bias")  # type: ignore[union-attr]

    def fuses_bias_gradient(self, x: torch.Tensor) -> bool:
        """Whether the activation makes the gradient of its GEMM's bias: where it is fused. A plain one would take a
        pass more for it."""
        return fuses(self.activation, self._operator, x)

    def forward(self, inner: torch.Tensor, projection: ColumnLinear | None, recompute: str) -> Branch:
        """[s, b, f/t] (gated: twice as wide) -> this rank's share of the output.

        projection: what made `inner`, with its bias added; None for half of a fused projection.
        """
        added = projection is not None and self.fuses_bias_gradient(inner)
        bias = projection._parameters.get("bias") if projection is not None and added else self.bias
        weight: Any = self._modules["out"]._parameters["weight"]  # type: ignore[union-attr]
        if recomputes(recompute, "activation"):
            return Branch(inner, weight, RecomputedActivation(self.activation, bias, added))
        return Branch(activate(self.activation, inner, bias, added), weight)


MLP_MODULES: Registry[Callable[[LayerSetup], nn.Module]] = Registry(MLPS.key, {"dense": DenseMlp})


def register(name: str, made: Callable[[LayerSetup], nn.Module], inventory: PartInventory, about: str = "") -> None:
    """Let `model.mlp` be `name`: made(setup) has what DenseMlp has."""
    MLPS.register(name, PartFacts(about))
    MLP_PARTS.register(name, inventory)
    MLP_MODULES.register(name, made)
