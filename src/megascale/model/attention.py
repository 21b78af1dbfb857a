"""The attention of a block: from query, key and value columns to this rank's share of what it adds.

x_SBH stays the block's: a part names the columns that it reads (`columns`), gets their projection [s, b, columns/t] and
gives a `Branch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    """Causal, grouped queries, in a window where the model has one.

    Attributes:
        columns: the matrices that project to it, and their biases.
        bias: theirs, where they are half of a fused projection whose other half has none; else the projection's.
    """

    def __init__(self, at: LayerSetup) -> None:
        super().__init__()
        model, d = at.model, at.model.head_size
        self.layer, self.head_size, self.interleaved = at.layer, d, model.rotary_interleaved
        self.window, self._chooser = model.layer_window(at.layer), at.axis.runtime.attention
        self.heads, self.kv_heads = model.heads // at.axis.size, model.kv // at.axis.size
        self.width = (self.heads + 2 * self.kv_heads) * d  # of this rank's columns
        self.columns = [t for t in at.tensors.attention if t.partition_dim == 0]
        self.bias: nn.Parameter | None = None
        self.out = RowLinear([t for t in at.tensors.attention if t.partition_dim != 0], at.linears, at.dtype)

    @property
    def residual_bias(self) -> nn.Parameter | None:
        """What is added with this part's share to the residual stream."""
        return self._modules["out"]._parameters.get("bias")  # type: ignore[union-attr]

    def forward(self, qkv: torch.Tensor, rotary: Rotary, context: ForwardContext) -> Branch:
        """[s, b, (n + 2g) d], this rank's heads -> their share of the output."""
        cos, sin = rotary or (None, None)
        q, k, v = split_qkv(qkv, self.heads, self.kv_heads, cos, sin, self.interleaved)
        return self.attend(q, k, v, context)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext) -> Branch:
        """q [s, b, n, d], k and v [s, b, g, d], rotated -> this rank's heads' share of the output."""
        if context.cache is not None:
            if self.layer in context.cache.layers:
                old_k, old_v = context.cache.layers[self.layer]
                k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
            context.cache.layers[self.layer] = (k, v)
        weight: Any = self._modules["out"]._parameters["weight"]  # type: ignore[union-attr]
        return Branch(attention(q, k, v, window=self.window, chooser=self._chooser), weight)


KINDS: Registry[Callable[[LayerSetup], nn.Module]] = Registry(ATTENTIONS.key, {"causal": CausalAttention})


def register(name: str, made: Callable[[LayerSetup], nn.Module], inventory: PartInventory, about: str = "") -> None:
    """Let `model.attention` be `name`: made(setup) has what CausalAttention has."""
    ATTENTIONS.register(name, PartFacts(about))
    ATTENTION_PARTS.register(name, inventory)
    KINDS.register(name, made)
