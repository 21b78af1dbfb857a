"""Dense MLP of a block, between its input projection and its output GEMM, and the registry of MLPs (`model.mlp`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megascale.config.parts import MLPS, PartFacts
from megascale.config.registry import Registry
from megascale.core.inventory_records import PartInventory
from megascale.core.part_inventories import MLP_PARTS
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
        columns: matrices and biases of the input projection, which the block computes.
        bias: bias of the input projection if the MLP adds it (see FusedParallelBlock); None: the projection adds it.
        activation: value of model.activation.
        is_recomputed: whether backward recomputes the activation instead of saving it.
    """

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__()
        self.activation = setup.layer.feed_forward.activation
        self.is_recomputed = setup.recomputes("activation")
        self._operator = activations.ACTIVATION_OPERATORS[self.activation].operator
        # Tensor parallelism divides input matrices along dimension 0 (rows), and the output matrix along dimension 1.
        self.columns = [tensor for tensor in setup.tensors.mlp if tensor.partition_dim == 0]
        output = [tensor for tensor in setup.tensors.mlp if tensor.partition_dim != 0]
        self.bias: nn.Parameter | None = None
        self.out = RowLinear(output, setup.linears, setup.dtype)

    def fuses_bias_gradient(self, x: torch.Tensor) -> bool:
        """Return whether the activation's backward also computes the gradient of the projection's bias.

        Only the fused kernel does this, because plain PyTorch would need one more pass.
        """
        return can_fuse(self.activation, self._operator, x)

    def forward(self, inner: torch.Tensor, projection: ColumnLinear | None) -> Branch:
        """Return the branch of this rank: the activation of `inner`, before the output GEMM.

        Args:
            inner: output of the input projection [s, b, f/t], or [s, b, 2 f/t] with a gate.
            projection: linear layer that computed `inner` with its bias; None: attention and MLP share a projection.
        """
        # The activation needs the projection's bias only to compute the bias's gradient. `inner` contains the bias.
        bias = self.bias
        is_bias_added = False
        if projection is not None and projection.bias is not None and self.fuses_bias_gradient(inner):
            bias = projection.bias
            is_bias_added = True
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
    """Register a value of model.mlp.

    Args:
        make: returns the MLP of a layer, a module with the interface of DenseMlp. If its `columns` are empty, its
            forward receives the norm in place of the projection.
        inventory: logical tensors of the MLP.
        description: one line for the reference.
    """
    MLPS.register(name, PartFacts(description))
    MLP_PARTS.register(name, inventory)
    MLP_MODULES.register(name, make)
