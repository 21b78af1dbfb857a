"""Attention within documents: the mask of a micro-batch, and the kernels that can keep to it.

A sample holds several documents one after another. A token sees the tokens before it in its own document, in the
window if there is one. Kernels read the mask in one of two forms: the first token of each token's document, or
cumulative lengths of all documents. Both have static shapes, so CUDA graphs capture them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale import torch_private
from megascale.errors import ConfigError, describe_install
from megascale.ops import dispatch
from megascale.ops.attention_backends import (
    attend_eagerly,
    causal_mask,
    compiled_flex,
    flash4_interface,
    flex_with_sinks,
    heads_first,
    join_samples,
    merge_heads,
    separate_samples,
    softcap_scores,
)
from megascale.ops.rope import allocate_qkv_gradients

_FLEX_BLOCK = 128


@dataclass(frozen=True, slots=True, eq=False)
class DocumentMask:
    """The documents of a micro-batch.

    Attributes:
        starts_BS: first token of each token's document, int32 [batch, sequence].
        cumulative: cumulative lengths of the documents of all samples, sample after sample, int32
            [batch x max_documents + 1]; empty documents repeat an entry.
        block_masks: FlexAttention's masks by window, made by the first layer that needs one.
    """

    starts_BS: Tensor
    cumulative: Tensor
    block_masks: dict[int | None, Any] = field(default_factory=dict)

    @property
    def max_documents(self) -> int:
        """Largest number of documents in a sample."""
        return (len(self.cumulative) - 1) // len(self.starts_BS)

    @staticmethod
    def from_boundaries(boundaries_DB: Tensor, length: int) -> DocumentMask:
        """Return the mask of samples of `length` tokens.

        Args:
            boundaries_DB: cumulative lengths of each sample's documents, int32 [max_documents + 1, batch], from 0 to
                `length`, which is repeated to the end.
        """
        batch = boundaries_DB.shape[1]
        boundaries_BD = boundaries_DB.t().contiguous()
        tokens_BS = torch.arange(length, dtype=torch.int32, device=boundaries_DB.device).expand(batch, -1).contiguous()
        documents_BS = torch.searchsorted(boundaries_BD, tokens_BS, right=True) - 1
        starts_BS = boundaries_BD.gather(1, documents_BS)
        offsets_B1 = torch.arange(batch, dtype=torch.int32, device=boundaries_DB.device)[:, None] * length
        cumulative = torch.cat([boundaries_BD[0, :1], (boundaries_BD[:, 1:] + offsets_B1).flatten()])
        return DocumentMask(starts_BS.to(torch.int32), cumulative.to(torch.int32))

    def select_tokens(self, start: int, stop: int) -> DocumentMask:
        """Return the mask of tokens [start, stop), for kernels that read the first tokens of documents only."""
        return DocumentMask((self.starts_BS[:, start:stop] - start).clamp(min=0), self.cumulative)

    def first_keys(self, window: int | None) -> Tensor:
        """Return the first key that each query sees, int32 [batch, sequence]."""
        if window is None:
            return self.starts_BS
        length = self.starts_BS.shape[1]
        bounds = torch.arange(1 - window, length + 1 - window, dtype=torch.int32, device=self.starts_BS.device)
        return torch.maximum(self.starts_BS, bounds)

    def visible_keys(self, window: int | None, queries: int) -> Tensor:
        """Return the mask of the last `queries` tokens, bool [batch, 1, queries, keys]."""
        length = self.starts_BS.shape[1]
        device = self.starts_BS.device
        keys = torch.arange(length, dtype=torch.int32, device=device)
        within_BST = keys >= self.first_keys(window)[:, length - queries :, None]
        return (within_BST & causal_mask(queries, length, None, device)).unsqueeze(1)


DocumentBackend = Callable[[Tensor, Tensor, Tensor, "int | None", DocumentMask], Tensor]


def sdpa(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None, documents: DocumentMask) -> Tensor:
    """Run torch's own choice of kernel with the complete mask, on any device and in any type."""
    q, k, v = heads_first(q_SBND, k_SBGD, v_SBGD)
    mask = documents.visible_keys(window, q.shape[2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return merge_heads(out.permute(2, 0, 1, 3))


def make_block_mask(documents: DocumentMask, window: int | None) -> Any:
    """Return FlexAttention's mask, whose blocks are computed from the first keys and not from the complete mask."""
    from torch.nn.attention.flex_attention import BlockMask

    first_keys_BS = documents.first_keys(window)
    length = first_keys_BS.shape[1]
    blocks = -(-length // _FLEX_BLOCK)
    numbers = torch.arange(blocks, dtype=torch.int32, device=first_keys_BS.device)
    # First keys ascend, so a block's first query sees the earliest key of the block.
    lowest_BQ = first_keys_BS[:, ::_FLEX_BLOCK] // _FLEX_BLOCK
    counts_BQ = (numbers - lowest_BQ + 1).to(torch.int32)
    indices_BQK = (lowest_BQ[:, :, None] + numbers).clamp(max=blocks - 1).to(torch.int32)

    def is_visible(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= first_keys_BS[b, q])

    return BlockMask.from_kv_blocks(
        counts_BQ.unsqueeze(1),
        indices_BQK.unsqueeze(1),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=is_visible,
        seq_lengths=(length, length),
    )


def eager(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None, documents: DocumentMask, softcap: float
) -> Tensor:
    """Compute the bounded scores of all pairs in memory, on any device and in any type."""
    return attend_eagerly(q_SBND, k_SBGD, v_SBGD, documents.visible_keys(window, len(q_SBND)).unsqueeze(1), softcap)


def flex(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    window: int | None,
    documents: DocumentMask,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Run torch's FlexAttention, compiled; sinks as in `flex_with_sinks`."""
    if not q_SBND.is_cuda:
        raise ConfigError("kernels.attention='flex' trains on CUDA devices; set --kernels.attention=auto")
    q, k, v = heads_first(q_SBND, k_SBGD, v_SBGD)
    if window not in documents.block_masks:
        documents.block_masks[window] = make_block_mask(documents, window)
    mask = documents.block_masks[window]
    bound = None if softcap is None else softcap_scores(softcap)
    if sinks_N is not None:
        return flex_with_sinks(q, k, v, sinks_N, bound, mask)
    out = compiled_flex()(q, k, v, score_mod=bound, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return merge_heads(out.permute(2, 0, 1, 3))


@torch_private.call_directly
class _FlashVarlen(torch.autograd.Function):
    """torch's built-in FlashAttention-2 over documents of different lengths, with an optional window."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, cumulative: Tensor) -> Tensor:
        S, B, N, D = q.shape
        q_TND, k_TGD, v_TGD = (join_samples(t) for t in (q, k, v))
        # FlashAttention's window does not count the query itself.
        ctx.bounds = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        out, lse, rng, unused, _ = torch_private.flash_attention_forward(
            q_TND, k_TGD, v_TGD, cumulative, cumulative, S, S, 0.0, True, False, **ctx.bounds
        )
        ctx.save_for_backward(q_TND, k_TGD, v_TGD, out, lse, cumulative, rng, unused)
        ctx.batch = B
        return separate_samples(out, B).reshape(S, B, N * D)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cumulative, rng, unused = ctx.saved_tensors
        d_out = join_samples(upstream[0].unflatten(-1, q.shape[1:])).contiguous()
        length = q.shape[0] // ctx.batch
        d_qkv = torch_private.flash_attention_backward(
            d_out,
            q,
            k,
            v,
            out,
            lse,
            cumulative,
            cumulative,
            length,
            length,
            0.0,
            True,
            rng,
            unused,
            **ctx.bounds,
        )
        return *(separate_samples(grad, ctx.batch) for grad in d_qkv), None, None


def flash_varlen(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None, documents: DocumentMask) -> Tensor:
    """Run FlashAttention-2 of torch over cumulative lengths."""
    if not q_SBND.is_cuda:
        raise ConfigError("kernels.attention='flash_varlen' runs on CUDA devices; set --kernels.attention=auto")
    return _FlashVarlen.apply(q_SBND, k_SBGD, v_SBGD, window, documents.cumulative)


@torch_private.call_directly
class _Flash4Varlen(torch.autograd.Function):
    """FlashAttention-4 over documents of different lengths.

    With one sample it reads views of the fused QKV output and writes the gradients into one [q | k | v] tensor.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, cumulative: Tensor) -> Tensor:
        S, B, N, D = q.shape
        q_TND, k_TGD, v_TGD = (join_samples(t) for t in (q, k, v))
        out = torch.empty((B * S, N, D), dtype=q.dtype, device=q.device)
        lse = torch.empty((N, B * S), dtype=torch.float32, device=q.device)
        ctx.options = {
            "cu_seqlens_q": cumulative,
            "cu_seqlens_k": cumulative,
            "max_seqlen_q": S,
            "max_seqlen_k": S,
            "causal": True,
            # FlashAttention's window does not count the query itself.
            "window_size_left": None if window is None else window - 1,
        }
        ctx.deterministic = dispatch.deterministic()
        ctx.batch = B
        flash4_interface()._flash_attn_fwd(q_TND, k_TGD, v_TGD, **ctx.options, out=out, lse=lse)
        ctx.save_for_backward(q_TND, k_TGD, v_TGD, out, lse)
        return separate_samples(out, B).reshape(S, B, N * D)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out = join_samples(upstream[0].unflatten(-1, q.shape[1:])).contiguous()
        grads = allocate_qkv_gradients(q.unsqueeze(1), k.unsqueeze(1))  # [B x S, 1, heads, D]
        dq, dk, dv = (grad.squeeze(1) for grad in grads)
        flash4_interface()._flash_attn_bwd(
            q, k, v, out, d_out, lse, dq=dq, dk=dk, dv=dv, **ctx.options, deterministic=ctx.deterministic
        )
        if ctx.batch > 1:
            grads = tuple(separate_samples(grad.squeeze(1), ctx.batch) for grad in grads)
        return *grads, None, None


def _run_flash4(q: Tensor, k: Tensor, v: Tensor, window: int | None, cumulative: Tensor) -> Tensor:
    return _Flash4Varlen.apply(q, k, v, window, cumulative)


def _run_cudnn(q: Tensor, k: Tensor, v: Tensor, window: int | None, cumulative: Tensor) -> Tensor:
    from megascale.ops.attention_cudnn_documents import attend

    return attend(q, k, v, window, cumulative)


def _packaged(
    name: str,
    extra: str,
    run: Callable[[Tensor, Tensor, Tensor, int | None, Tensor], Tensor],
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    window: int | None,
    documents: DocumentMask,
) -> Tensor:
    """Run a kernel of an optional package over cumulative lengths; ConfigError if it is unavailable."""
    if not q_SBND.is_cuda:
        raise ConfigError(f"kernels.attention={name!r} runs on CUDA devices; set --kernels.attention=auto")
    try:
        return run(q_SBND, k_SBGD, v_SBGD, window, documents.cumulative)
    except ImportError as error:
        raise ConfigError(f"kernels.attention={name!r} is unavailable: {error}; {describe_install(extra)}") from error


DOCUMENT_BACKENDS: dict[str, DocumentBackend] = {
    "flash_varlen": flash_varlen,
    "flash4": functools.partial(_packaged, "flash4", "flash4", _run_flash4),
    "cudnn_frontend": functools.partial(_packaged, "cudnn_frontend", "cudnn", _run_cudnn),
    "flex": flex,
    "sdpa": sdpa,
}
# Kernels that bound the scores; the last argument is the bound.
SOFTCAP_DOCUMENT_BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, int | None, DocumentMask, float], Tensor]] = {
    "flex": flex,
    "eager": eager,
}
# The backends worth measuring on CUDA, best guess first.
DOCUMENT_CANDIDATES = ("flash_varlen", "flash4", "cudnn_frontend", "flex")


def check_document_backend(name: str) -> None:
    """Raise ConfigError naming a kernel that cannot keep attention within documents, as full attention would differ."""
    if name not in DOCUMENT_BACKENDS:
        raise ConfigError(
            f"kernels.attention={name!r} cannot keep attention within documents, which the samples have "
            f"(data.document_mask=true); choose among auto, {', '.join(DOCUMENT_BACKENDS)}"
        )


@functools.cache
def synthetic_boundaries(length: int, batch: int, max_documents: int) -> Tensor:
    """Return boundaries for measurements, int32 [max_documents + 1, batch]: up to sixteen documents per sample."""
    count = min(max_documents, 16, length)
    generator = torch.Generator().manual_seed(length)
    boundaries = torch.full((max_documents + 1, batch), length, dtype=torch.int32)
    boundaries[0] = 0
    for sample in range(batch):
        inner = torch.randperm(max(length - 1, 1), generator=generator)[: count - 1].sort().values + 1
        boundaries[1 : len(inner) + 1, sample] = inner.to(torch.int32)
    return boundaries
