"""One layer of the transformer, written for a tensor-parallel axis, which may be of size one.

Activations are x_SBH = [sequence / tensor ranks, batch, hidden] between layers and [sequence, batch, own heads or
columns] inside. Serial block: x + Attn(LN x), then x + MLP(LN x). Parallel block (MegaScale section 3.1):
x + Attn(LN x) + MLP(LN x), with one gather and one scatter a layer. How it takes fewer passes is model/fusion.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megascale.config.parts import BLOCKS, PartFacts
from megascale.config.registry import Registry
from megascale.core.inventory import BLOCK_PARTS, BlockInventory, splits_projection
from megascale.model import attention as attentions
from megascale.model import mlp as mlps
from megascale.model.attention import CausalAttention
from megascale.model.context import ForwardContext, LayerSetup, Rotary
from megascale.model.fusion import Branch, Flow, add_residual, recomputes, sum_branches
from megascale.model.mlp import DenseMlp
from megascale.model.norm import Norm, norm_and_project
from megascale.ops.activation import fuses
from megascale.ops.fused_projection import split_fused_projection
from megascale.parallel.parameters import local_parameter
from megascale.parallel.tensor import ColumnLinear


class Block(nn.Module):
    """What all blocks have: attention, MLP, a norm.

    Args:
        at: which layer of which model.
        recompute: as parallel.recompute (whole layers are the chunk's to recompute).
    """

    def __init__(self, at: LayerSetup, recompute: str = "none") -> None:
        super().__init__()
        self.at, self.recompute = at, recompute
        # Parts may be anybody's, so that what is asked of them is not in a type.
        self.attention: Any = attentions.KINDS[at.model.attention](at)
        self.mlp: Any = mlps.KINDS[at.model.mlp](at)
        self.norm1 = Norm(at.model, at.tensors.norm1, at.dtype)

    def project(self, part: Any) -> ColumnLinear | None:
        """The projection to a part's columns; None if it wants the norm as it is."""
        return ColumnLinear(part.columns, self.at.linears, self.at.dtype) if part.columns else None


class SerialBlock(Block):
    """x + Attn(LN x), then x + MLP(LN x)."""

    def __init__(self, at: LayerSetup, recompute: str = "none") -> None:
        super().__init__(at, recompute)
        self.norm2 = Norm(at.model, at.tensors.norm2, at.dtype)
        self.attention_in = self.project(self.attention)
        self.mlp_in = self.project(self.mlp)

    def forward(self, x: Flow, rotary: Rotary, context: ForwardContext, defer_add: bool = False) -> Flow:
        """[s/t, b, h] -> [s/t, b, h]. With `defer_add` the last residual sum may be left to the next norm."""
        at = self.at
        x_SBH, qkv = norm_and_project(self.norm1, self.attention_in, x, self.recompute)
        y = sum_branches(at.linears, self.attention(qkv, rotary, context))
        between = add_residual(at, y, x_SBH, 0, context, True, self.attention.residual_bias)
        fused = self.mlp.fuses_bias_gradient(y)
        x_SBH, inner = norm_and_project(self.norm2, self.mlp_in, between, self.recompute, fused)
        y = sum_branches(at.linears, self.mlp(inner, self.mlp_in, self.recompute))
        return add_residual(at, y, x_SBH, 1, context, defer_add, self.mlp.residual_bias)


class ParallelBlock(Block):
    """x + Attn(LN x) + MLP(LN x), each half with a projection of its own and (parallel_norms=2) a norm of its own."""

    def __init__(self, at: LayerSetup, recompute: str = "none") -> None:
        super().__init__(at, recompute)
        self.norm2 = Norm(at.model, at.tensors.norm2, at.dtype) if at.tensors.norm2 else self.norm1
        self.attention_in = self.project(self.attention)
        self.mlp_in = self.project(self.mlp)

    def forward(self, x: Flow, rotary: Rotary, context: ForwardContext, defer_add: bool = False) -> Flow:
        """As SerialBlock.forward."""
        at = self.at
        x_SBH, qkv = norm_and_project(self.norm1, self.attention_in, x, self.recompute)
        fused = self.mlp.fuses_bias_gradient(x_SBH)
        _, inner = norm_and_project(self.norm2, self.mlp_in, x_SBH, self.recompute, fused)
        attended = self.attention(qkv, rotary, context)
        y = sum_branches(at.linears, attended, self.mlp(inner, self.mlp_in, self.recompute))
        return add_residual(at, y, x_SBH, 0, context, defer_add, self.attention.residual_bias, self.mlp.residual_bias)


OPERATOR = "split fused projection"


def fuses_split(mlp: DenseMlp, x: Flow) -> bool:
    """Whether the split of a fused projection makes the gradient of its bias."""
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
    """The branches of a parallel block from its fused QKV+MLP projection."""
    if attention.bias is not None:
        # A bias on the attention's half only: the halves part before either is looked at.
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
        recomputes(recompute, "activation"),
    )
    return attention.attend(q, k, v, context), Branch(inner, mlp.out.weight, activation)


class FusedParallelBlock(Block):
    """x + Attn(LN x) + MLP(LN x) with one projection for both halves."""

    def __init__(self, at: LayerSetup, recompute: str = "none") -> None:
        super().__init__(at, recompute)
        # A fused projection has one bias; a model with a bias on one half only (GPT-J) adds it to that half.
        halves = [(part, [t for t in part.columns if not t.gemm]) for part in (self.attention, self.mlp)]
        both = all(biases for _, biases in halves)
        columns = [t for part, _ in halves for t in part.columns if both or t.gemm]
        self.into = ColumnLinear(columns, at.linears, at.dtype)
        for part, biases in halves:
            if biases and not both:
                part.bias = local_parameter(biases, at.axis.rank, at.axis.size, at.dtype)

    def forward(self, x: Flow, rotary: Rotary, context: ForwardContext, defer_add: bool = False) -> Flow:
        """As SerialBlock.forward."""
        at = self.at
        fused_bias = self.attention.bias is None and fuses_split(self.mlp, x)
        x_SBH, fused = norm_and_project(self.norm1, self.into, x, self.recompute, fused_bias)
        branches = split_projection(fused, self.into, self.attention, self.mlp, rotary, context, self.recompute)
        y = sum_branches(at.linears, *branches)
        return add_residual(at, y, x_SBH, 0, context, defer_add, self.attention.residual_bias, self.mlp.residual_bias)


def parallel_block(at: LayerSetup, recompute: str = "none") -> Block:
    """The parallel block, with one projection for both halves where they have one norm and can read it."""
    return FusedParallelBlock(at, recompute) if splits_projection(at.model) else ParallelBlock(at, recompute)


KINDS: Registry[Callable[[LayerSetup, str], Block]] = Registry(
    BLOCKS.key, {"serial": SerialBlock, "parallel": parallel_block}
)


def register(name: str, made: Callable[[LayerSetup, str], Block], inventory: BlockInventory, about: str = "") -> None:
    """Let `model.block` be `name`: made(setup, recompute) gives the block of a layer."""
    BLOCKS.register(name, PartFacts(about))
    BLOCK_PARTS.register(name, inventory)
    KINDS.register(name, made)


def make_block(at: LayerSetup, recompute: str = "none") -> Block:
    """The block that model.block names."""
    return KINDS[at.model.block](at, recompute)
