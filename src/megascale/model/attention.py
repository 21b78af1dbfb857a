"""Attention of a block, from query, key and value columns to this rank's share of the output.

A part declares the columns of its input projection (`columns`), gets their result [s, b, columns/t] and returns a
`Branch`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megascale.config.parts import ATTENTIONS, PartFacts
from megascale.config.registry import Registry
from megascale.core.inventory import ATTENTION_PARTS, PartInventory
from megascale.model.context import ForwardContext, LayerSetup, Rotary
from megascale.model.fusion import Branch
from megascale.ops.attention import attention
from megascale.ops.rope import split_qkv
from megascale.parallel.tensor import RowLinear


class CausalAttention(nn.Module):
    """Causal attention with grouped queries, in the layer's window if it has one.

    Attributes:
        columns: matrices and biases of its input projection.
        bias: bias of `columns` if they are half of a fused projection whose other half has none; else the projection
            has the bias.
    """

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__()
        spec = setup.layer.mixer
        self.index = setup.index
        self.head_size = spec.head_size
        self.window = spec.window
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        self.heads = spec.heads // setup.axis.size
        self.kv_heads = spec.kv_heads // setup.axis.size
        self.width = (self.heads + 2 * self.kv_heads) * spec.head_size  # columns of this rank
        self.columns = [t for t in setup.tensors.attention if t.partition_dim == 0]
        self.bias: nn.Parameter | None = None
        self.out = RowLinear([t for t in setup.tensors.attention if t.partition_dim != 0], setup.linears, setup.dtype)
        self._chooser = setup.axis.runtime.attention

    def forward(self, qkv: torch.Tensor, rotary: Rotary, context: ForwardContext) -> Branch:
        """Attend from the projection [s, b, (n + 2g) d] of this rank's heads; return their share of the output."""
        cos, sin = rotary or (None, None)
        q, k, v = split_qkv(qkv, self.heads, self.kv_heads, cos, sin, self.interleaved)
        return self.attend(q, k, v, context)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext) -> Branch:
        """Attend with rotated q [s, b, n, d] and k, v [s, b, g, d]; return the share of this rank's heads."""
        if context.cache is not None:
            k, v = context.cache.extend(self.index, k, v, self.window)
        mixed = attention(q, k, v, window=self.window, chooser=self._chooser)
        return Branch(mixed, self.out.weight, self.out.bias)


ATTENTION_MODULES: Registry[Callable[[LayerSetup], nn.Module]] = Registry(ATTENTIONS.key, {"causal": CausalAttention})


def register(
    name: str, make: Callable[[LayerSetup], nn.Module], inventory: PartInventory, description: str = ""
) -> None:
    """Register a value of model.attention; make(setup) has the interface of CausalAttention."""
    ATTENTIONS.register(name, PartFacts(description))
    ATTENTION_PARTS.register(name, inventory)
    ATTENTION_MODULES.register(name, make)
