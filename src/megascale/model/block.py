"""One layer of the transformer, written for a tensor-parallel axis, which may have size one.

Activations are x_SBH = [sequence / tensor ranks, batch, hidden] between layers and [sequence, batch, local heads or
columns] inside. Serial block: x + Attn(LN x), then x + MLP(LN x). Parallel block (MegaScale section 3.1):
x + Attn(LN x) + MLP(LN x), with one gather and one scatter per layer. model/fusion.py has the fusions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megascale.config.parts import BLOCKS, PartFacts
from megascale.config.registry import Registry
from megascale.core.inventory import BLOCK_PARTS, BlockInventory, LogicalTensor, has_fused_projection
from megascale.model import attention as attentions
from megascale.model import mlp as mlps
from megascale.model.context import ForwardContext, LayerSetup, Rotary
from megascale.model.experts import keep_routing
from megascale.model.fusion import Branch, ResidualStream, add_branches, norm_and_project
from megascale.model.norm import Norm
from megascale.ops.activation import can_fuse
from megascale.ops.fused_projection import split_fused_projection
from megascale.parallel.module import DirectModule
from megascale.parallel.parameters import local_parameter
from megascale.parallel.tensor import ColumnLinear


class Block(DirectModule):
    """Base of all blocks: the parts of a layer. The parts of a half that is in another chunk are None.

    Parts may come from plugins, so they have no common type.
    """

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__()
        self.setup = setup
        self.attention: Any = None
        self.mlp: Any = None
        if setup.half != "mlp":
            self.attention = attentions.ATTENTION_MODULES[setup.layer.mixer.name](setup)
        if setup.half != "attention":
            self.mlp = mlps.MLP_MODULES[setup.layer.feed_forward.name](setup)

    def make_norm(self, tensors: Sequence[LogicalTensor]) -> Norm:
        """Return a norm of the layer."""
        setup = self.setup
        norms = setup.layer.norms
        return Norm(norms.name, norms.eps, tensors, setup.dtype, setup.recomputes("norms"))

    def make_projection(self, part: Any) -> ColumnLinear | None:
        """Return the input projection of a part, or None if the part reads the norm."""
        if part.columns:
            return ColumnLinear(part.columns, self.setup.linears, self.setup.dtype)
        return None


class SerialBlock(Block):
    """Serial block, or half of it: x + Attn(LN x), then x + MLP(LN x).

    With norms on what the parts add: x + LN Attn(x), then x + LN MLP(x); or both norms.
    """

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__(setup)
        tensors = setup.tensors
        if self.attention is not None:
            self.norm1 = self._make_optional_norm(tensors.norm1)
            self.post_norm1 = self._make_optional_norm(tensors.post_norm1)
        if self.mlp is not None:
            self.norm2 = self._make_optional_norm(tensors.norm2)
            self.post_norm2 = self._make_optional_norm(tensors.post_norm2)
        if self.attention is not None:
            self.attention_in = self.make_projection(self.attention)
        if self.mlp is not None:
            self.mlp_in = self.make_projection(self.mlp)

    def _make_optional_norm(self, tensors: Sequence[LogicalTensor]) -> Norm | None:
        """Return a norm of the layer, or None without tensors."""
        if tensors:
            return self.make_norm(tensors)
        return None

    def forward(
        self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool = False
    ) -> ResidualStream:
        """Run the block, [s/t, b, h] -> [s/t, b, h]. With `defer_add` the next norm may compute the last sum."""
        if self.attention is not None:
            x = self._run_half("attention", self._attend, x, rotary, context, defer_add or self.mlp is not None)
        if self.mlp is not None:
            x = self._run_half("mlp", self._feed, x, rotary, context, defer_add)
        return x

    def _run_half(
        self,
        part: str,
        run: Callable[..., ResidualStream],
        x: ResidualStream,
        rotary: Rotary,
        context: ForwardContext,
        defer_add: bool,
    ) -> ResidualStream:
        """Run a half of the block; backward runs it again, from its input, if parallel.recompute names it."""
        if self.setup.recompute != part or not torch.is_grad_enabled():
            return run(x, rotary, context, defer_add)
        x_SBH = x if isinstance(x, torch.Tensor) else x.add()
        call = keep_routing(self, run) if part == "mlp" else run
        y: torch.Tensor = checkpoint(call, x_SBH, rotary, context, False, use_reentrant=False, preserve_rng_state=False)
        return y

    def _attend(self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool) -> ResidualStream:
        """Run the attention with its norms."""
        x_SBH, qkv = norm_and_project(self.norm1, self.attention_in, x)
        attended = self.attention(qkv, rotary, context)
        return add_branches(self.setup, x_SBH, [attended], context, post_norm=self.post_norm1, defer_add=defer_add)

    def _feed(self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool) -> ResidualStream:
        """Run the MLP with its norms."""
        x_SBH, inner = norm_and_project(self.norm2, self.mlp_in, x, reader=self.mlp)
        fed = self.mlp(inner, self.mlp_in)
        return add_branches(self.setup, x_SBH, [fed], context, post_norm=self.post_norm2, site=1, defer_add=defer_add)


class ParallelBlock(Block):
    """Parallel block x + Attn(LN x) + MLP(LN x) with a projection, and possibly a norm, for each part."""

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__(setup)
        self.norm1 = self.make_norm(setup.tensors.norm1)
        self.norm2 = self.norm1
        if setup.tensors.norm2:
            self.norm2 = self.make_norm(setup.tensors.norm2)
        self.attention_in = self.make_projection(self.attention)
        self.mlp_in = self.make_projection(self.mlp)

    def forward(
        self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool = False
    ) -> ResidualStream:
        """Run the block like `SerialBlock.forward`."""
        x_SBH, qkv = norm_and_project(self.norm1, self.attention_in, x)
        _, inner = norm_and_project(self.norm2, self.mlp_in, x_SBH, reader=self.mlp)
        branches = [self.attention(qkv, rotary, context), self.mlp(inner, self.mlp_in)]
        return add_branches(self.setup, x_SBH, branches, context, defer_add=defer_add)


class FusedParallelBlock(Block):
    """Parallel block x + Attn(LN x) + MLP(LN x) with one projection for both parts."""

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__(setup)
        self.norm1 = self.make_norm(setup.tensors.norm1)
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
        x_SBH, columns = norm_and_project(self.norm1, self.into, x, reader=self)
        branches = self.split(columns, rotary, context)
        return add_branches(self.setup, x_SBH, branches, context, defer_add=defer_add)

    def fuses_bias_gradient(self, x: torch.Tensor) -> bool:
        """Return whether splitting the projection also computes the gradient of its bias."""
        return self.attention.bias is None and can_fuse(self.mlp.activation, "split fused projection", x)

    def split(self, columns: torch.Tensor, rotary: Rotary, context: ForwardContext) -> list[Branch]:
        """Return the branches of both parts from their projection [s, b, columns/t]."""
        attention = self.attention
        mlp = self.mlp
        if attention.bias is not None:
            # Only the attention's half has a bias, so the halves are separated first.
            qkv = columns[..., : attention.width] + attention.bias
            return [attention(qkv, rotary, context), mlp(columns[..., attention.width :], None)]
        cos, sin = attention.select_split_tables(rotary)
        q, k, v, inner, activation = split_fused_projection(
            columns,
            attention.heads,
            attention.kv_heads,
            attention.head_size,
            mlp.activation,
            mlp.bias,
            cos,
            sin,
            attention.interleaved,
            self.into.bias if self.fuses_bias_gradient(columns) else None,
            mlp.is_recomputed and torch.is_grad_enabled(),
        )
        return [attention.attend(q, k, v, rotary, context), Branch(inner, mlp.out.weight, mlp.out.bias, activation)]


def make_parallel_block(setup: LayerSetup) -> Block:
    """Make a parallel block, with one projection for both parts if they share a norm and can read it."""
    if has_fused_projection(setup.layer):
        return FusedParallelBlock(setup)
    return ParallelBlock(setup)


BLOCK_MODULES: Registry[Callable[[LayerSetup], nn.Module]] = Registry(
    BLOCKS.key, {"serial": SerialBlock, "parallel": make_parallel_block}
)


def register(
    name: str, make: Callable[[LayerSetup], nn.Module], inventory: BlockInventory, description: str = ""
) -> None:
    """Register a value of model.block; make(setup) returns the block of a layer.

    With `inventory.can_split` a chunk boundary may divide the block, and `setup.half` says which half is made.
    """
    BLOCKS.register(name, PartFacts(description))
    BLOCK_PARTS.register(name, inventory)
    BLOCK_MODULES.register(name, make)


def make_block(setup: LayerSetup) -> nn.Module:
    """Return the block of a layer, or half of it."""
    return BLOCK_MODULES[setup.layer.norms.block](setup)
