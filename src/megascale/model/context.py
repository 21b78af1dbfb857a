"""What parts of the model are told: when they are made, which layer they are of; in each forward pass, whose it is."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megascale.config import ModelConfig
from megascale.core.inventory import LayerInventory, layer_inventory
from megascale.ops.token_loss import TokenLoss
from megascale.parallel.collectives import Axis
from megascale.parallel.linear import LinearPrecision


@dataclass(frozen=True)
class LayerSetup:
    """What a block and its parts are made from.

    Attributes:
        model: shape of the whole model.
        layer: number of the layer, from 0.
        linears: how GEMMs are done; knows the tensor-parallel axis.
        dtype: of weights and activations.
    """

    model: ModelConfig
    layer: int
    linears: LinearPrecision
    dtype: torch.dtype

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
    """Keys and values of the tokens seen so far, one pair a layer, [length, batch, kv heads, head size]."""

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    length: int = 0


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a forward pass needs to know besides its input.

    Attributes:
        dropout_key: changes with the optimizer step; None turns dropout off.
        sample_start: index in the global batch of this micro-batch's first sample.
        token_grad: the gradient of each token's loss, where it is known before backward: the last chunk then makes
            its gradients while its logits are there.
        cache: keys and values of earlier tokens, for generation.
        token_loss: instead of cross-entropy.
    """

    dropout_key: int | None = None
    sample_start: int = 0
    token_grad: torch.Tensor | None = None
    cache: KVCache | None = None
    token_loss: TokenLoss | None = None


EVALUATION = ForwardContext()

# Cosines and sines of the positions, [length, rotated width / 2] each; None without rotary positions.
Rotary = tuple[torch.Tensor, torch.Tensor] | None
