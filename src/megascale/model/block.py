"""Blocks: one layer of the transformer, written for a tensor-parallel axis, which may have size one.

Attention and MLP are the two parts of a block. Activations are x_SBH = [sequence / tensor ranks, batch, hidden] between
parts, and [sequence, batch, local heads or columns] inside a part. A serial block computes x + Attn(LN x), then
x + MLP(LN x). A parallel block (MegaScale section 3.1) computes x + Attn(LN x) + MLP(LN x), with one gather and one
scatter per layer. model/fusion.py fuses norms and sums. A `Branch` is the input and the weight of a part's last GEMM. A
`ResidualStream` is x_SBH, or a sum for it that the next norm computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megascale.config.parts import BLOCKS, PartFacts
from megascale.config.registry import Registry
from megascale.core.inventory_records import BlockInventory, LogicalTensor
from megascale.core.part_inventories import BLOCK_PARTS, has_fused_projection
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
    """Base of all blocks: attention and MLP of a layer. A part that belongs to another chunk is None.

    Plugins may register parts of their own, so the attributes of parts have no common type.
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
        """Return a norm of the kind that the layer has, with the given weight and bias."""
        setup = self.setup
        norms = setup.layer.norms
        return Norm(norms.name, norms.eps, tensors, setup.dtype, setup.recomputes("norms"))

    def make_projection(self, part: Any) -> ColumnLinear | None:
        """Return the input projection of a part, or None if the part reads the norm."""
        if part.columns:
            return ColumnLinear(part.columns, self.setup.linears, self.setup.dtype)
        return None


class SerialBlock(Block):
    """Serial block or half of it: x + Attn(LN x), then x + MLP(LN x).

    With post-norms the block computes x + LN Attn(x), then x + LN MLP(x). It may have both kinds of norms.
    """

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__(setup)
        tensors = setup.tensors
        # The order of construction is that of `Module.parameters`, which determines positions in the flat buffers
        # (parallel/buffer_layout.py).
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
            defers_attention = defer_add or self.mlp is not None
            x = self._run_part("attention", self._run_attention, x, rotary, context, defers_attention)
        if self.mlp is not None:
            x = self._run_part("mlp", self._run_mlp, x, rotary, context, defer_add)
        return x

    def _run_part(
        self,
        name: str,
        run: Callable[..., ResidualStream],
        x: ResidualStream,
        rotary: Rotary,
        context: ForwardContext,
        defer_add: bool,
    ) -> ResidualStream:
        """Run a part with its norms. If parallel.recompute names the part, backward recomputes it from its input."""
        if self.setup.recompute != name or not torch.is_grad_enabled():
            return run(x, rotary, context, defer_add)
        x_SBH = x if isinstance(x, torch.Tensor) else x.add()
        if name == "mlp":
            # Recomputation must send tokens to the same experts as the first run.
            run = keep_routing(self, run)
        # The output of a checkpoint must be a tensor, so its sum is not deferred.
        arguments = (x_SBH, rotary, context, False)
        y: torch.Tensor = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False)
        return y

    def _run_attention(
        self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool
    ) -> ResidualStream:
        x_SBH, qkv = norm_and_project(self.norm1, self.attention_in, x)
        branch = self.attention(qkv, rotary, context)
        return add_branches(self.setup, x_SBH, [branch], context, post_norm=self.post_norm1, defer_add=defer_add)

    def _run_mlp(self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool) -> ResidualStream:
        x_SBH, inner = norm_and_project(self.norm2, self.mlp_in, x, reader=self.mlp)
        branch = self.mlp(inner, self.mlp_in)
        return add_branches(
            self.setup, x_SBH, [branch], context, post_norm=self.post_norm2, sum_index=1, defer_add=defer_add
        )


class ParallelBlock(Block):
    """Parallel block x + Attn(LN x) + MLP(LN x) in which each part has a projection, and may have a norm."""

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
        parts = [self.attention, self.mlp]
        # A fused projection has one bias for all its columns. If only one part has a bias (GPT-J), the part adds it.
        is_bias_fused = all(_list_biases(part.columns) for part in parts)
        columns = []
        for part in parts:
            biases = _list_biases(part.columns)
            if is_bias_fused or not biases:
                columns += part.columns
            else:
                columns += [tensor for tensor in part.columns if tensor.is_gemm_weight]
                part.bias = local_parameter(biases, setup.axis.rank, setup.axis.size, setup.dtype)
        self.projection = ColumnLinear(columns, setup.linears, setup.dtype)

    def forward(
        self, x: ResidualStream, rotary: Rotary, context: ForwardContext, defer_add: bool = False
    ) -> ResidualStream:
        """Run the block like `SerialBlock.forward`."""
        x_SBH, projected = norm_and_project(self.norm1, self.projection, x, reader=self)
        branches = self.split(projected, rotary, context)
        return add_branches(self.setup, x_SBH, branches, context, defer_add=defer_add)

    def fuses_bias_gradient(self, x: torch.Tensor) -> bool:
        """Return whether the operator that splits the projection `x` also computes the gradient of its bias."""
        return self.attention.bias is None and can_fuse(self.mlp.activation, "split fused projection", x)

    def split(self, projected: torch.Tensor, rotary: Rotary, context: ForwardContext) -> list[Branch]:
        """Return the branches of both parts, given their common projection [s, b, columns/t]."""
        attention = self.attention
        mlp = self.mlp
        if attention.bias is not None:
            # Only the attention has a bias, so its columns are separated before the bias is added.
            qkv = projected[..., : attention.width] + attention.bias
            return [attention(qkv, rotary, context), mlp(projected[..., attention.width :], None)]
        cos, sin = attention.select_split_tables(rotary)
        q, k, v, inner, activation = split_fused_projection(
            projected,
            attention.head_count,
            attention.kv_head_count,
            attention.head_size,
            activation=mlp.activation,
            mlp_bias=mlp.bias,
            cos=cos,
            sin=sin,
            interleaved=attention.interleaved,
            fused_bias=self.projection.bias if self.fuses_bias_gradient(projected) else None,
            recompute=mlp.is_recomputed and torch.is_grad_enabled(),
        )
        return [attention.attend(q, k, v, rotary, context), Branch(inner, mlp.out.weight, mlp.out.bias, activation)]


def _list_biases(columns: Sequence[LogicalTensor]) -> list[LogicalTensor]:
    """Return the biases among the tensors of an input projection."""
    return [tensor for tensor in columns if not tensor.is_gemm_weight]


def make_parallel_block(setup: LayerSetup) -> Block:
    """Return a parallel block. Its parts share a projection if the layer allows it."""
    if has_fused_projection(setup.layer):
        return FusedParallelBlock(setup)
    return ParallelBlock(setup)


BLOCK_MODULES: Registry[Callable[[LayerSetup], nn.Module]] = Registry(
    BLOCKS.key, {"serial": SerialBlock, "parallel": make_parallel_block}
)


def register(
    name: str, make: Callable[[LayerSetup], nn.Module], inventory: BlockInventory, description: str = ""
) -> None:
    """Register a value of model.block.

    Args:
        make: returns the block of a layer. If `inventory.can_split`, a chunk may hold half a block, which
            `setup.half` names.
        inventory: logical tensors of the block.
        description: one line for the reference.
    """
    BLOCKS.register(name, PartFacts(description))
    BLOCK_PARTS.register(name, inventory)
    BLOCK_MODULES.register(name, make)


def make_block(setup: LayerSetup) -> nn.Module:
    """Return the block of a layer, or the half of it that `setup.half` names."""
    return BLOCK_MODULES[setup.layer.norms.block](setup)
