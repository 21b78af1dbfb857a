"""Attention of a block, from query, key and value columns to this rank's share of the output.

A part declares the columns of its input projection (`columns`), gets their result [s, b, columns/t] and returns a
`Branch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from megascale.config.parts import ATTENTIONS, AttentionFacts
from megascale.config.registry import Registry
from megascale.core.head_exchange import find_first_key, list_gather_kernels, share_heads
from megascale.core.inventory import ATTENTION_PARTS, LogicalTensor, PartInventory
from megascale.model.context import ForwardContext, LayerSetup, Rotary
from megascale.model.fusion import Branch
from megascale.model.norm import Norm, norm_projections
from megascale.ops.attention import attention
from megascale.ops.attention_documents import DocumentMask
from megascale.ops.norm_rotary import split_norm_rotary
from megascale.ops.rope import apply_rotary, split_qkv
from megascale.parallel.collectives import SINGLE_RANK
from megascale.parallel.context import (
    exchange_for_heads,
    exchange_for_tokens,
    gather_heads,
    gather_keys,
    select_heads,
)
from megascale.parallel.module import DirectModule
from megascale.parallel.parameters import local_parameter
from megascale.parallel.tensor import RowLinear


class CausalAttention(DirectModule):
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
        self.softcap = spec.softcap
        # The kernels divide the scores by the root of a head's width.
        self.query_factor = 1.0 if spec.multiplier is None else spec.multiplier * spec.head_size**0.5
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        self.heads = spec.heads // setup.axis.size
        self.kv_heads = spec.kv_heads // setup.axis.size
        self.width = (self.heads + 2 * self.kv_heads) * spec.head_size  # columns of this rank
        self.columns = [tensor for part in ("query", "key", "value") for tensor in _select(setup, part)]
        self.sinks: nn.Parameter | None = None
        if spec.has_sinks:
            self.sinks = local_parameter(_select(setup, "sink"), setup.axis.rank, setup.axis.size, setup.dtype)
        self.bias: nn.Parameter | None = None
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        self.norms_projections = spec.qk_norm == "projection"
        if spec.qk_norm is not None:
            self.query_norm = self._make_norm(setup, "query_norm")
            self.key_norm = self._make_norm(setup, "key_norm")
        # A part that overrides `attend` receives queries and keys as the projection gives them.
        self._fuses_norms = (
            spec.qk_norm == "head"
            and setup.layer.norms.name == "rmsnorm"
            and type(self).attend is CausalAttention.attend
        )
        self._axis = setup.axis
        self._context_axis = setup.axes.get("context", SINGLE_RANK)
        self._share = share_heads(self.heads, self.kv_heads, self._context_axis.size)
        self.out = RowLinear(_select(setup, "output"), setup.linears, setup.dtype)
        self._chooser = setup.axis.runtime.attention

    @staticmethod
    def _make_norm(setup: LayerSetup, part: str) -> Norm:
        norms = setup.layer.norms
        return Norm(norms.name, norms.eps, _select(setup, part), setup.dtype, axis=setup.axis)

    def forward(self, qkv: torch.Tensor, rotary: Rotary, context: ForwardContext) -> Branch:
        """Attend from the projection [s, b, (n + 2g) d] of this rank's heads; return their share of the output."""
        if self._fuses_norms and rotary is not None:
            assert self.query_norm is not None
            assert self.key_norm is not None
            weights = self.query_norm.weight, self.key_norm.weight
            q, k, v = split_norm_rotary(
                qkv, self.heads, self.kv_heads, *weights, self.query_norm.eps, *rotary, self.interleaved
            )
            return self._mix(q, k, v, context)
        cos, sin = self.select_split_tables(rotary)
        q, k, v = split_qkv(qkv, self.heads, self.kv_heads, cos, sin, self.interleaved)
        return self.attend(q, k, v, rotary, context)

    def select_split_tables(self, rotary: Rotary) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the tables for an operator that rotates queries and keys as it splits a projection.

        Norms of queries and keys come before their rotation, which `attend` then does.
        """
        if rotary is None or self.query_norm is not None:
            return None, None
        return rotary

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary, context: ForwardContext
    ) -> Branch:
        """Attend with q [s, b, n, d] and k, v [s, b, g, d] of a split projection; return this rank's share."""
        if self.query_norm is not None and self.key_norm is not None:
            if self.norms_projections:
                q, k = norm_projections(q, k, self.query_norm, self.key_norm, self._axis)
            else:
                q = self.query_norm(q)
                k = self.key_norm(k)
            if rotary is not None:
                q = apply_rotary(q, *rotary, self.interleaved)
                k = apply_rotary(k, *rotary, self.interleaved)
        return self._mix(q, k, v, context)

    def _mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext) -> Branch:
        """Attend with normed and rotated queries and keys."""
        if self.query_factor != 1:
            q = q * self.query_factor
        if self._context_axis.size > 1:
            mixed = self._attend_over_ranks(q, k, v, context)
        else:
            k, v = self._extend_cache(k, v, context)
            mixed = self._attend_locally(q, k, v, context.documents)
        return Branch(mixed, self.out.weight, self.out.bias)

    def _extend_cache(
        self, k: torch.Tensor, v: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values with those of earlier tokens, if there is a cache."""
        if context.cache is None:
            return k, v
        return context.cache.extend(self.index, k, v, self.window)

    def _attend_locally(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: DocumentMask | None,
        backend: str = "auto",
        is_slice: bool = False,
    ) -> torch.Tensor:
        """Run the kernel on this rank's queries, keys and values."""
        return attention(
            q,
            k,
            v,
            window=self.window,
            softcap=self.softcap,
            backend=backend,
            chooser=self._chooser,
            documents=documents,
            sinks_N=self.sinks,
            is_slice=is_slice,
        )

    def _attend_over_ranks(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Attend with this rank's slice of each sequence over the slices of all context ranks.

        A cache holds whole sequences: of this rank's heads, or of all heads if keys are gathered.
        """
        axis, share = self._context_axis, self._share
        if not share.gathers_keys:
            if context.is_replicated:
                q, k, v = select_heads(q, k, v, axis, share.copies)
            else:
                q, k, v = exchange_for_heads(q, k, v, axis, share.copies)
            k, v = self._extend_cache(k, v, context)
            mixed = self._attend_locally(q, k, v, context.documents)
            return gather_heads(mixed, axis) if context.is_replicated else exchange_for_tokens(mixed, axis)
        later_tokens = 0
        if not context.is_replicated:
            later_tokens = (axis.size - 1 - axis.rank) * k.shape[0]
            k, v = gather_keys(k, v, axis)
        k, v = self._extend_cache(k, v, context)
        stop = k.shape[0] - later_tokens
        start = find_first_key(stop - q.shape[0], self.window)
        k, v = k[start:stop], v[start:stop]
        if context.documents is None:
            return self._attend_locally(q, k, v, None, is_slice=context.cache is None)
        documents = context.documents.select_tokens(start, stop)
        kernel = list_gather_kernels(self.softcap, has_documents=True)[0]
        return self._attend_locally(q, k, v, documents, kernel)


class GatedAttention(CausalAttention):
    """Causal attention whose output is multiplied by a sigmoid of another projection of its input (Qwen3-Next)."""

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__(setup)
        self.columns += _select(setup, "gate")
        self._qkv_width = self.width
        self.width += self.heads * self.head_size

    def forward(self, qkvg: torch.Tensor, rotary: Rotary, context: ForwardContext) -> Branch:
        """Attend from the projection [s, b, (2n + 2g) d] of this rank's heads; return their share of the output."""
        gate = qkvg[..., self._qkv_width :]
        # The kernel that splits queries, keys and values takes contiguous memory.
        branch = super().forward(qkvg[..., : self._qkv_width].contiguous(), rotary, context)
        return replace(branch, x=branch.x * torch.sigmoid(gate))


def make_attention(setup: LayerSetup) -> CausalAttention:
    """Return the attention of a layer."""
    if setup.layer.mixer.has_gate:
        return GatedAttention(setup)
    return CausalAttention(setup)


def _select(setup: LayerSetup, part: str) -> list[LogicalTensor]:
    """Return the attention's tensors of a part."""
    return [tensor for tensor in setup.tensors.attention if f".attention.{part}." in tensor.name]


ATTENTION_MODULES: Registry[Callable[[LayerSetup], nn.Module]] = Registry(ATTENTIONS.key, {"causal": make_attention})


def register(
    name: str,
    make: Callable[[LayerSetup], nn.Module],
    inventory: PartInventory,
    description: str = "",
    masks_documents: bool = False,
    bounds_scores: bool = False,
    divides_tokens: bool = False,
) -> None:
    """Register a value of model.attention; make(setup) has the interface of CausalAttention.

    Args:
        masks_documents: whether it keeps to `ForwardContext.documents`; samples with documents are refused otherwise.
        bounds_scores: whether it applies `AttentionSpec.softcap`; model.attention_softcap is refused otherwise.
        divides_tokens: whether it attends over the tokens of all context ranks, as `CausalAttention._mix` does;
            parallel.context above 1 is refused otherwise.
    """
    ATTENTIONS.register(name, AttentionFacts(description, masks_documents, bounds_scores, divides_tokens))
    ATTENTION_PARTS.register(name, inventory)
    ATTENTION_MODULES.register(name, make)
