"""One layer of the transformer, written for a tensor-parallel axis, which may have size one.

Activations are x_SBH = [sequence / tensor ranks, batch, hidden] between layers and [sequence, batch, local heads or
columns] inside. Serial block: x + Attn(LN x), then x + MLP(LN x). Parallel block (MegaScale section 3.1):
x + Attn(LN x) + MLP(LN x), with one gather and one scatter per layer. model/context.py describes the fusions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megascale.config.parts import BLOCKS, PartFacts
from megascale.config.registry import Registry
from megascale.core.inventory import BLOCK_PARTS, BlockInventory, has_fused_projection
from megascale.core.layers import Half
from megascale.model import attention as attentions
from megascale.model import mlp as mlps
from megascale.model.attention import CausalAttention
from megascale.model.context import (
    Branch,
    ForwardContext,
    LayerSetup,
    ResidualStream,
    Rotary,
    add_residual,
    is_recomputed,
    sum_branches,
)
from megascale.model.mlp import DenseMlp
from megascale.model.norm import Norm, norm_and_project
from megascale.ops.activation import fuses
from megascale.ops.fused_projection import split_fused_projection
from megascale.parallel.parameters import local_parameter
from megascale.parallel.tensor import ColumnLinear


class _Parts(nn.Module):
    """Base of a block or half a block."""

    def __init__(self, setup: LayerSetup, recompute: str) -> None:
        super().__init__()
        self.setup = setup
        self.recompute = recompute

    @property
    def part(self) -> dict[str, Any]:
        """Modules by name. `part["mlp"]` is `self.mlp`, which nn.Module would look up in several dictionaries."""
        return self._modules

    def make_projection(self, part: Any) -> ColumnLinear | None:
        """Return the input projection of a part, or None if the part reads the norm."""
        if part.columns:
            return ColumnLinear(part.columns, self.setup.linears, self.setup.dtype)
        return None


class Block(_Parts):
    """Base of all blocks, with attention, MLP and a norm.

    Args:
        setup: layer and model.
        recompute: value of parallel.recompute; the chunk recomputes whole layers.
    """

    def __init__(self, setup: LayerSetup, recompute: str = "none") -> None:
        super().__init__(setup, recompute)
        # Parts may come from plugins, so they have no common type.
        self.attention: Any = attentions.ATTENTION_MODULES[setup.model.attention](setup)
        self.mlp: Any = mlps.MLP_MODULES[setup.model.mlp](setup)
        self.norm1 = Norm(setup.model, setup.tensors.norm1, setup.dtype)


def _attend(
    half: _Parts, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool
) -> ResidualStream:
    """Return x + Attn(LN x) of a serial block."""
    setup = half.setup
    part = half.part
    attention = part["attention"]
    x_SBH, qkv = norm_and_project(part["norm1"], part.get("attention_in"), x, half.recompute)
    y = sum_branches(setup.linears, attention(qkv, rotary, context))
    return add_residual(setup, y, x_SBH, 0, context, defer_add, attention.residual_bias)


def _feed(half: _Parts, x: ResidualStream, context: ForwardContext, defer_add: bool) -> ResidualStream:
    """Return x + MLP(LN x) of a serial block."""
    setup = half.setup
    part = half.part
    mlp = part["mlp"]
    mlp_in = part.get("mlp_in")
    fused = mlp.fuses_bias_gradient(x if isinstance(x, torch.Tensor) else x.y_SBH)
    x_SBH, inner = norm_and_project(part["norm2"], mlp_in, x, half.recompute, fused)
    y = sum_branches(setup.linears, mlp(inner, mlp_in, half.recompute))
    return add_residual(setup, y, x_SBH, 1, context, defer_add, mlp.residual_bias)


class SerialBlock(Block):
    """Serial block: x + Attn(LN x), then x + MLP(LN x)."""

    def __init__(self, setup: LayerSetup, recompute: str = "none") -> None:
        super().__init__(setup, recompute)
        self.norm2 = Norm(setup.model, setup.tensors.norm2, setup.dtype)
        self.attention_in = self.make_projection(self.attention)
        self.mlp_in = self.make_projection(self.mlp)

    def forward(
        self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool = False
    ) -> ResidualStream:
        """Run the block, [s/t, b, h] -> [s/t, b, h]. With `defer_add` the next norm may compute the last sum."""
        return _feed(self, _attend(self, x, rotary, context, True), context, defer_add)


class SerialAttention(_Parts):
    """First half of a serial block whose MLP is in another chunk: x + Attn(LN x)."""

    def __init__(self, setup: LayerSetup, recompute: str = "none") -> None:
        super().__init__(setup, recompute)
        self.attention: Any = attentions.ATTENTION_MODULES[setup.model.attention](setup)
        self.norm1 = Norm(setup.model, setup.tensors.norm1, setup.dtype)
        self.attention_in = self.make_projection(self.attention)

    def forward(
        self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool = False
    ) -> ResidualStream:
        """Run the block like `SerialBlock.forward`."""
        return _attend(self, x, rotary, context, defer_add)


class SerialMlp(_Parts):
    """Second half of a serial block whose attention is in another chunk: x + MLP(LN x)."""

    def __init__(self, setup: LayerSetup, recompute: str = "none") -> None:
        super().__init__(setup, recompute)
        self.mlp: Any = mlps.MLP_MODULES[setup.model.mlp](setup)
        self.norm2 = Norm(setup.model, setup.tensors.norm2, setup.dtype)
        self.mlp_in = self.make_projection(self.mlp)

    def forward(
        self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool = False
    ) -> ResidualStream:
        """Run the block like `SerialBlock.forward`."""
        return _feed(self, x, context, defer_add)


class ParallelBlock(Block):
    """Parallel block x + Attn(LN x) + MLP(LN x) with a projection, and possibly a norm, for each part."""

    def __init__(self, setup: LayerSetup, recompute: str = "none") -> None:
        super().__init__(setup, recompute)
        if setup.tensors.norm2:
            self.norm2 = Norm(setup.model, setup.tensors.norm2, setup.dtype)
        else:
            self.norm2 = self.norm1
        self.attention_in = self.make_projection(self.attention)
        self.mlp_in = self.make_projection(self.mlp)

    def forward(
        self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool = False
    ) -> ResidualStream:
        """Run the block like `SerialBlock.forward`."""
        setup = self.setup
        part = self.part
        recompute = self.recompute
        attention = part["attention"]
        mlp = part["mlp"]
        mlp_in = part.get("mlp_in")
        x_SBH, qkv = norm_and_project(part["norm1"], part.get("attention_in"), x, recompute)
        fused = mlp.fuses_bias_gradient(x_SBH)
        _, inner = norm_and_project(part["norm2"], mlp_in, x_SBH, recompute, fused)
        attended = attention(qkv, rotary, context)
        y = sum_branches(setup.linears, attended, mlp(inner, mlp_in, recompute))
        return add_residual(setup, y, x_SBH, 0, context, defer_add, attention.residual_bias, mlp.residual_bias)


OPERATOR = "split fused projection"


def fuses_split(mlp: DenseMlp, x: ResidualStream) -> bool:
    """Return whether splitting a fused projection also computes the gradient of its bias."""
    return fuses(mlp.activation, OPERATOR, x if isinstance(x, torch.Tensor) else x.y_SBH)


def split_projection(
    fused_SBC: torch.Tensor,
    into: ColumnLinear,
    attention: CausalAttention,
    mlp: DenseMlp,
    rotary: Rotary,
    context: ForwardContext,
    recompute: str,
) -> tuple[Branch, Branch]:
    """Return the branches of a parallel block from its fused QKV+MLP projection."""
    if attention.bias is not None:
        # Only the attention's half has a bias, so the halves are separated first.
        width = attention.width
        qkv = fused_SBC[..., :width] + attention.bias
        return attention(qkv, rotary, context), mlp(fused_SBC[..., width:], None, recompute)
    cos, sin = rotary or (None, None)
    q, k, v, inner, activation = split_fused_projection(
        fused_SBC,
        attention.heads,
        attention.kv_heads,
        attention.head_size,
        mlp.activation,
        mlp.bias,
        cos,
        sin,
        attention.interleaved,
        into.bias if fuses_split(mlp, fused_SBC) else None,
        is_recomputed(recompute, "activation"),
    )
    weight: Any = mlp._modules["out"]._parameters["weight"]  # type: ignore[union-attr]
    return attention.attend(q, k, v, context), Branch(inner, weight, activation)


class FusedParallelBlock(Block):
    """Parallel block x + Attn(LN x) + MLP(LN x) with one projection for both parts."""

    def __init__(self, setup: LayerSetup, recompute: str = "none") -> None:
        super().__init__(setup, recompute)
        # A fused projection has one bias; if only one part has a bias (GPT-J), that part adds it.
        parts = [self.attention, self.mlp]
        part_biases = [[tensor for tensor in part.columns if not tensor.is_gemm_weight] for part in parts]
        is_bias_fused = all(part_biases)
        columns = [tensor for part in parts for tensor in part.columns if is_bias_fused or tensor.is_gemm_weight]
        self.into = ColumnLinear(columns, setup.linears, setup.dtype)
        for part, biases in zip(parts, part_biases, strict=True):
            if biases and not is_bias_fused:
                part.bias = local_parameter(biases, setup.axis.rank, setup.axis.size, setup.dtype)

    def forward(
        self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool = False
    ) -> ResidualStream:
        """Run the block like `SerialBlock.forward`."""
        setup = self.setup
        part = self.part
        recompute = self.recompute
        attention = part["attention"]
        mlp = part["mlp"]
        into = part["into"]
        fused_bias = attention.bias is None and fuses_split(mlp, x)
        x_SBH, fused = norm_and_project(part["norm1"], into, x, recompute, fused_bias)
        branches = split_projection(fused, into, attention, mlp, rotary, context, recompute)
        y = sum_branches(setup.linears, *branches)
        return add_residual(setup, y, x_SBH, 0, context, defer_add, attention.residual_bias, mlp.residual_bias)


def parallel_block(setup: LayerSetup, recompute: str = "none") -> Block:
    """Make a parallel block, with one projection for both parts if they share a norm and can read it."""
    if has_fused_projection(setup.model):
        return FusedParallelBlock(setup, recompute)
    return ParallelBlock(setup, recompute)


Make = Callable[[LayerSetup, str], nn.Module]

BLOCK_MODULES: Registry[Make] = Registry(BLOCKS.key, {"serial": SerialBlock, "parallel": parallel_block})
# Attention half and MLP half of the blocks that a chunk boundary may divide (BlockInventory.can_split).
HALF_BLOCK_MODULES: dict[str, tuple[Make, Make]] = {"serial": (SerialAttention, SerialMlp)}


def register(
    name: str, make: Make, inventory: BlockInventory, description: str = "", halves: tuple[Make, Make] | None = None
) -> None:
    """Register a value of model.block; make(setup, recompute) returns the block of a layer.

    Args:
        halves: the same for its attention and for its MLP; without them no chunk boundary divides the block.
    """
    BLOCKS.register(name, PartFacts(description))
    BLOCK_PARTS.register(name, replace(inventory, can_split=halves is not None))
    BLOCK_MODULES.register(name, make)
    if halves is not None:
        HALF_BLOCK_MODULES[name] = halves


def make_block(setup: LayerSetup, recompute: str = "none", half: Half = "both") -> nn.Module:
    """Return the block of model.block, or half of it."""
    if half == "both":
        return BLOCK_MODULES[setup.model.block](setup, recompute)
    make_attention, make_mlp = HALF_BLOCK_MODULES[setup.model.block]
    if half == "attention":
        return make_attention(setup, recompute)
    return make_mlp(setup, recompute)
