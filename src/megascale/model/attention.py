"""Attention of a block, between its input projection and its output GEMM, and the registry of attentions.

The block computes the input projection, whose tensors are `columns`. Attention receives the projection
[s, b, columns/t] and returns a `Branch`, which has the input and the weight of the output GEMM.

In shapes, s is the sequence, b the micro-batch, t the number of tensor-parallel ranks, n the number of query heads and
g the number of key/value heads on this rank, d the size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from megascale.config.parts import ATTENTIONS, AttentionFacts
from megascale.config.registry import Registry
from megascale.core.head_exchange import count_head_parts, find_first_key, list_gather_kernels, share_heads
from megascale.core.inventory_records import LogicalTensor, PartInventory
from megascale.core.part_inventories import ATTENTION_PARTS
from megascale.model.context import ForwardContext, LayerSetup, Rotary
from megascale.model.fusion import Branch
from megascale.model.norm import Norm, normalise_queries_and_keys
from megascale.ops.attention import attention
from megascale.ops.attention_documents import DocumentMask
from megascale.ops.norm_rotary import split_norm_rotary
from megascale.ops.rope import apply_rotary, split_qkv
from megascale.parallel.collectives import SINGLE_RANK
from megascale.parallel.context import (
    attend_in_parts,
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
        columns: matrices and biases of the input projection, which the block computes.
        width: number of columns of the projection on this rank.
        head_count, kv_head_count: numbers of heads on this rank.
        query_factor: factor of queries. The kernels divide scores by sqrt(head size). If model.attention_multiplier
            is set, the factor replaces this division by the multiplier.
        bias: bias of the input projection if this part must add it, because a fused projection of several parts does
            not (see FusedParallelBlock); None: the projection adds it.
        sinks: one logit per head [n] that takes part in the softmax without a value; None: no sinks.
    """

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__()
        spec = setup.layer.mixer
        self.layer_index = setup.index
        self.head_size = spec.head_size
        self.window = spec.window
        self.softcap = spec.softcap
        self.query_factor = 1.0 if spec.multiplier is None else spec.multiplier * spec.head_size**0.5
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        self.head_count = spec.heads // setup.axis.size
        self.kv_head_count = spec.kv_heads // setup.axis.size
        self.width = (self.head_count + 2 * self.kv_head_count) * spec.head_size
        self.columns: list[LogicalTensor] = []
        for name in ("query", "key", "value"):
            self.columns += _select_tensors(setup, name)
        self.sinks: nn.Parameter | None = None
        if spec.has_sinks:
            sinks = _select_tensors(setup, "sink")
            self.sinks = local_parameter(sinks, setup.axis.rank, setup.axis.size, setup.dtype)
        self.bias: nn.Parameter | None = None
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        self._norms_projections = spec.qk_norm == "projection"
        if spec.qk_norm is not None:
            self.query_norm = self._make_norm(setup, "query_norm")
            self.key_norm = self._make_norm(setup, "key_norm")
        # Whether one operator splits the projection, and norms and rotates queries and keys. A subclass that overrides
        # `attend` must receive queries and keys before their norms.
        self._fuses_norms = (
            spec.qk_norm == "head"
            and setup.layer.norms.name == "rmsnorm"
            and type(self).attend is CausalAttention.attend
        )
        self._axis = setup.axis
        self._context_axis = setup.axes.get("context", SINGLE_RANK)
        self._head_share = share_heads(self.head_count, self.kv_head_count, self._context_axis.size)
        self._head_parts = 1
        if self.sinks is None:
            self._head_parts = count_head_parts(self._head_share, self._context_axis.overlap == "parts")
        self.out = RowLinear(_select_tensors(setup, "output"), setup.linears, setup.dtype)
        self._chooser = setup.axis.runtime.attention

    @staticmethod
    def _make_norm(setup: LayerSetup, name: str) -> Norm:
        """Return the norm of queries or of keys."""
        norms = setup.layer.norms
        return Norm(norms.name, norms.eps, _select_tensors(setup, name), setup.dtype, axis=setup.axis)

    def forward(self, qkv: torch.Tensor, rotary: Rotary, context: ForwardContext) -> Branch:
        """Run attention on the projection qkv [s, b, (n + 2g) d], with n query heads and g key/value heads here."""
        if self._fuses_norms and rotary is not None:
            assert self.query_norm is not None
            assert self.key_norm is not None
            cos, sin = rotary
            q, k, v = split_norm_rotary(
                qkv,
                self.head_count,
                self.kv_head_count,
                self.query_norm.weight,
                self.key_norm.weight,
                self.query_norm.eps,
                cos,
                sin,
                self.interleaved,
            )
            return self._attend_normed(q, k, v, context)
        split_cos, split_sin = self.select_split_tables(rotary)
        q, k, v = split_qkv(qkv, self.head_count, self.kv_head_count, split_cos, split_sin, self.interleaved)
        return self.attend(q, k, v, rotary, context)

    def select_split_tables(self, rotary: Rotary) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return cosines and sines for the operator that splits a projection and rotates queries and keys.

        With norms of queries and keys return (None, None). The norms precede the rotation, so `attend` does both.
        """
        if rotary is None or self.query_norm is not None:
            return None, None
        return rotary

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotary: Rotary, context: ForwardContext
    ) -> Branch:
        """Run attention on a split projection: q [s, b, n, d], and k and v [s, b, g, d].

        Without norms of queries and keys, q and k are rotated already.
        """
        if self.query_norm is not None and self.key_norm is not None:
            if self._norms_projections:
                q, k = normalise_queries_and_keys(q, k, self.query_norm, self.key_norm, self._axis)
            else:
                q = self.query_norm(q)
                k = self.key_norm(k)
            if rotary is not None:
                q = apply_rotary(q, *rotary, self.interleaved)
                k = apply_rotary(k, *rotary, self.interleaved)
        return self._attend_normed(q, k, v, context)

    def _attend_normed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext) -> Branch:
        """Run attention on normed and rotated queries and keys."""
        if self.query_factor != 1:
            q = q * self.query_factor
        if self._context_axis.size > 1:
            output = self._attend_over_ranks(q, k, v, context)
        else:
            k, v = self._extend_cache(k, v, context)
            output = self._attend_locally(q, k, v, context.documents)
        return Branch(output, self.out.weight, self.out.bias)

    def _extend_cache(
        self, k: torch.Tensor, v: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of all tokens so far. Without a cache, return k and v."""
        if context.cache is None:
            return k, v
        return context.cache.extend(self.layer_index, k, v, self.window)

    def _attend_locally(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        documents: DocumentMask | None,
        backend: str = "auto",
        is_slice: bool = False,
    ) -> torch.Tensor:
        """Run the kernel on this rank's queries, keys and values.

        Args:
            is_slice: whether the queries are only the last tokens of the keys' range (see ops/attention.py).
        """
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
        """Run attention of this context rank's queries over the keys of all context ranks.

        If heads can be divided among the ranks, an all-to-all gives each rank the whole sequence of some heads.
        Otherwise keys and values of all heads are gathered. The cache holds whole sequences in both cases.
        """
        axis = self._context_axis
        if self._head_share.gathers_keys:
            return self._attend_to_gathered_keys(q, k, v, context)
        kv_copies = self._head_share.copies
        if self._head_parts > 1 and context.cache is None and not context.is_replicated:
            attend = partial(self._attend_locally, documents=context.documents)
            return attend_in_parts(q, k, v, axis, kv_copies, attend, parts=self._head_parts)
        if context.is_replicated:
            q, k, v = select_heads(q, k, v, axis, kv_copies)
        else:
            q, k, v = exchange_for_heads(q, k, v, axis, kv_copies)
        k, v = self._extend_cache(k, v, context)
        output = self._attend_locally(q, k, v, context.documents)
        if context.is_replicated:
            return gather_heads(output, axis)
        return exchange_for_tokens(output, axis)

    def _attend_to_gathered_keys(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Run attention of this context rank's queries over the gathered keys up to the last query."""
        axis = self._context_axis
        later_token_count = 0
        if not context.is_replicated:
            later_token_count = (axis.size - 1 - axis.rank) * k.shape[0]
            k, v = gather_keys(k, v, axis)
        k, v = self._extend_cache(k, v, context)
        stop = k.shape[0] - later_token_count
        start = find_first_key(stop - q.shape[0], self.window)  # the first key in the window of the first query
        k = k[start:stop]
        v = v[start:stop]
        if context.documents is None:
            # Without a cache this is training or evaluation, for which kernels with such a mask were measured.
            return self._attend_locally(q, k, v, None, is_slice=context.cache is None)
        documents = context.documents.select_tokens(start, stop)
        backend = list_gather_kernels(self.softcap, has_documents=True)[0]
        return self._attend_locally(q, k, v, documents, backend)


class GatedAttention(CausalAttention):
    """Causal attention whose output is multiplied by a sigmoid of another projection of its input (Qwen3-Next)."""

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__(setup)
        self.columns += _select_tensors(setup, "gate")
        self._qkv_width = self.width
        self.width += self.head_count * self.head_size

    def forward(self, qkvg: torch.Tensor, rotary: Rotary, context: ForwardContext) -> Branch:
        """Run attention on the projection qkvg [s, b, (2n + 2g) d]: queries, keys, values and gate."""
        gate = qkvg[..., self._qkv_width :]
        # The kernel that splits queries, keys and values takes contiguous memory.
        branch = super().forward(qkvg[..., : self._qkv_width].contiguous(), rotary, context)
        return replace(branch, x=branch.x * torch.sigmoid(gate))


def make_attention(setup: LayerSetup) -> CausalAttention:
    if setup.layer.mixer.has_gate:
        return GatedAttention(setup)
    return CausalAttention(setup)


def _select_tensors(setup: LayerSetup, name: str) -> list[LogicalTensor]:
    """Return weight and bias of one linear layer or norm of the attention, such as "query" or "key_norm"."""
    return [tensor for tensor in setup.tensors.attention if f".attention.{name}." in tensor.name]


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
    """Register a value of model.attention.

    Args:
        make: returns the attention of a layer, a module with the interface of CausalAttention.
        inventory: logical tensors of the attention.
        description: one line for the reference.
        masks_documents: whether tokens attend within `ForwardContext.documents`. If not, samples with several
            documents are refused.
        bounds_scores: whether the attention applies `AttentionSpec.softcap`. If not, model.attention_softcap is
            refused.
        divides_tokens: whether queries attend to the tokens of all context ranks, as in
            `CausalAttention._attend_over_ranks`. If not, parallel.context above 1 is refused.
    """
    ATTENTIONS.register(name, AttentionFacts(description, masks_documents, bounds_scores, divides_tokens))
    ATTENTION_PARTS.register(name, inventory)
    ATTENTION_MODULES.register(name, make)
