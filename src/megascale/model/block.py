"""One layer of the transformer, written for a tensor-parallel axis, which may be of size one.

Activations are x_SBH = [sequence / tensor ranks, batch, hidden] between layers and [sequence, batch, own heads or
columns] inside. Serial block: x + Attn(LN x), then x + MLP(LN x). Parallel block (MegaScale section 3.1):
x + Attn(LN x) + MLP(LN x), with one gather and one scatter a layer. How it takes fewer passes is model/fusion.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megascale.config.parts import BLOCKS, PartFacts
from megascale.config.registry import Registry
from megascale.core.inventory import BLOCK_PARTS, BlockInventory, splits_projection
from megascale.core.layers import Half
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


class _Parts(nn.Module):
    """Parts of a layer: modules by name."""

    def __init__(self, at: LayerSetup, recompute: str) -> None:
        super().__init__()
        self.at, self.recompute = at, recompute

    @property
    def part(self) -> dict[str, Any]:
        """Its parts by name: `part["mlp"]` is `self.mlp`, which nn.Module looks for in several places each time."""
        return self._modules

    def project(self, part: Any) -> ColumnLinear | None:
        """The projection to a part's columns; None if it wants the norm as it is."""
        return ColumnLinear(part.columns, self.at.linears, self.at.dtype) if part.columns else None


class Block(_Parts):
    """What all blocks have: attention, MLP, a norm.

    Args:
        at: which layer of which model.
        recompute: as parallel.recompute (whole layers are the chunk's to recompute).
    """

    def __init__(self, at: LayerSetup, recompute: str = "none") -> None:
        super().__init__(at, recompute)
        # Parts may be anybody's, so that what is asked of them is not in a type.
        self.attention: Any = attentions.KINDS[at.model.attention](at)
        self.mlp: Any = mlps.MLP_MODULES[at.model.mlp](at)
        self.norm1 = Norm(at.model, at.tensors.norm1, at.dtype)


def _attend(half: _Parts, x: Flow, rotary: Rotary, context: ForwardContext, defer_add: bool) -> Flow:
    """x + Attn(LN x) of a serial block."""
    at, part = half.at, half.part
    attention = part["attention"]
    x_SBH, qkv = norm_and_project(part["norm1"], part.get("attention_in"), x, half.recompute)
    y = sum_branches(at.linears, attention(qkv, rotary, context))
    return add_residual(at, y, x_SBH, 0, context, defer_add, attention.residual_bias)


def _feed(half: _Parts, x: Flow, context: ForwardContext, defer_add: bool) -> Flow:
    """x + MLP(LN x) of a serial block."""
    at, part, recompute = half.at, half.part, half.recompute
    mlp, mlp_in = part["mlp"], part.get("mlp_in")
    fused = mlp.fuses_bias_gradient(x if isinstance(x, torch.Tensor) else x.y_SBH)
    x_SBH, inner = norm_and_project(part["norm2"], mlp_in, x, recompute, fused)
    y = sum_branches(at.linears, mlp(inner, mlp_in, recompute))
    return add_residual(at, y, x_SBH, 1, context, defer_add, mlp.residual_bias)


class SerialBlock(Block):
    """x + Attn(LN x), then x + MLP(LN x)."""

    def __init__(self, at: LayerSetup, recompute: str = "none") -> None:
        super().__init__(at, recompute)
        self.norm2 = Norm(at.model, at.tensors.norm2, at.dtype)
        self.attention_in = self.project(self.attention)
        self.mlp_in = self.project(self.mlp)

    def forward(self, x: Flow, rotary: Rotary, context: ForwardContext, defer_add: bool = False) -> Flow:
        """[s/t, b, h] -> [s/t, b, h]. With `defer_add` the last residual sum may be left to the next norm."""
        return _feed(self, _attend(self, x, rotary, context, True), context, defer_add)


class SerialAttention(_Parts):
    """The first half of a serial block, whose MLP another chunk has: x + Attn(LN x)."""

    def __init__(self, at: LayerSetup, recompute: str = "none") -> None:
        super().__init__(at, recompute)
        self.attention: Any = attentions.KINDS[at.model.attention](at)
        self.norm1 = Norm(at.model, at.tensors.norm1, at.dtype)
        self.attention_in = self.project(self.attention)

    def forward(self, x: Flow, rotary: Rotary, context: ForwardContext, defer_add: bool = False) -> Flow:
        """As SerialBlock.forward."""
        return _attend(self, x, rotary, context, defer_add)


class SerialMlp(_Parts):
    """The second half of a serial block, whose attention another chunk has: x + MLP(LN x)."""

    def __init__(self, at: LayerSetup, recompute: str = "none") -> None:
        super().__init__(at, recompute)
        self.mlp: Any = mlps.MLP_MODULES[at.model.mlp](at)
        self.norm2 = Norm(at.model, at.tensors.norm2, at.dtype)
        self.mlp_in = self.project(self.mlp)

    def forward(self, x: Flow, rotary: Rotary, context: ForwardContext, defer_add: bool = False) -> Flow:
        """As SerialBlock.forward."""
        return _feed(self, x, context, defer_add)


class ParallelBlock(Block):
    """x + Attn(LN x) + MLP(LN x), each half with a projection of its own and (parallel_norms=2) a norm of its own."""

    def __init__(self, at: LayerSetup, recompute: str = "none") -> None:
        super().__init__(at, recompute)
        self.norm2 = Norm(at.model, at.tensors.norm2, at.dtype) if at.tensors.norm2 else self.norm1
        self.attention_in = self.project(self.attention)
        self.mlp_in = self.project(self.mlp)

    def forward(self, x: Flow, rotary: Rotary, context: ForwardContext, defer_add: bool = False) -> Flow:
        """As SerialBlock.forward."""
        at, part, recompute = self.at, self.part, self.recompute
        attention, mlp, mlp_in = part["attention"], part["mlp"], part.get("mlp_in")
        x_SBH, qkv = norm_and_project(part["norm1"], part.get("attention_in"), x, recompute)
        fused = mlp.fuses_bias_gradient(x_SBH)
        _, inner = norm_and_project(part["norm2"], mlp_in, x_SBH, recompute, fused)
        attended = attention(qkv, rotary, context)
        y = sum_branches(at.linears, attended, mlp(inner, mlp_in, recompute))
        return add_residual(at, y, x_SBH, 0, context, defer_add, attention.residual_bias, mlp.residual_bias)


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
    weight: Any = mlp._modules["out"]._parameters["weight"]  # type: ignore[union-attr]
    return attention.attend(q, k, v, context), Branch(inner, weight, activation)


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
        at, part, recompute = self.at, self.part, self.recompute
        attention, mlp, into = part["attention"], part["mlp"], part["into"]
        fused_bias = attention.bias is None and fuses_split(mlp, x)
        x_SBH, fused = norm_and_project(part["norm1"], into, x, recompute, fused_bias)
        branches = split_projection(fused, into, attention, mlp, rotary, context, recompute)
        y = sum_branches(at.linears, *branches)
        return add_residual(at, y, x_SBH, 0, context, defer_add, attention.residual_bias, mlp.residual_bias)


def parallel_block(at: LayerSetup, recompute: str = "none") -> Block:
    """The parallel block, with one projection for both halves where they have one norm and can read it."""
    return FusedParallelBlock(at, recompute) if splits_projection(at.model) else ParallelBlock(at, recompute)


Make = Callable[[LayerSetup, str], nn.Module]

BLOCK_MODULES: Registry[Make] = Registry(BLOCKS.key, {"serial": SerialBlock, "parallel": parallel_block})
# Of blocks that a boundary between chunks may divide (BlockInventory.divides): the attention's half, and the MLP's.
HALVES: dict[str, tuple[Make, Make]] = {"serial": (SerialAttention, SerialMlp)}


def register(
    name: str, made: Make, inventory: BlockInventory, about: str = "", halves: tuple[Make, Make] | None = None
) -> None:
    """Let `model.block` be `name`: made(setup, recompute) gives the block of a layer.

    halves: the same for its attention alone and its MLP alone; without them a chunk has it whole.
    """
    BLOCKS.register(name, PartFacts(about))
    BLOCK_PARTS.register(name, replace(inventory, divides=halves is not None))
    BLOCK_MODULES.register(name, made)
    if halves is not None:
        HALVES[name] = halves


def make_block(at: LayerSetup, recompute: str = "none", half: Half = "both") -> nn.Module:
    """The block that model.block names, or the half of it that a chunk has."""
    if half == "both":
        return BLOCK_MODULES[at.model.block](at, recompute)
    return HALVES[at.model.block][half == "mlp"](at, recompute)
