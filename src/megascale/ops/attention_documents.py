"""Attention within documents: the mask of a micro-batch, and the kernels (backends) that support it.

A sample holds several documents one after another. A token sees the earlier tokens of its own document, within the
window if there is one. Kernels read the mask in one of two forms: the first token of each token's document, or the
cumulative lengths of all documents. Both forms have static shapes, so that CUDA graphs can capture them.
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
    flex_with_sinks,
    get_compiled_flex,
    join_samples,
    load_flash4,
    make_causal_mask,
    make_softcap,
    merge_heads,
    separate_samples,
    view_heads_first,
)
from megascale.ops.rope import allocate_qkv_gradients

_FLEX_BLOCK = 128  # queries and keys per block of FlexAttention's mask


@dataclass(frozen=True, slots=True, eq=False)
class DocumentMask:
    """The documents of a micro-batch.

    Attributes:
        starts_BS: index of the first token of each token's document, int32 [batch, sequence].
        cumulative_lengths: cumulative lengths of the documents of all samples, sample after sample, int32
            [batch x max_documents + 1]. An empty document repeats an entry.
        block_masks: FlexAttention's masks by window. The first layer that needs a mask makes it.
    """

    starts_BS: Tensor
    cumulative_lengths: Tensor
    block_masks: dict[int | None, Any] = field(default_factory=dict)

    @property
    def max_documents(self) -> int:
        """Largest number of documents in a sample."""
        return (len(self.cumulative_lengths) - 1) // len(self.starts_BS)

    @staticmethod
    def from_boundaries(boundaries_DB: Tensor, length: int) -> DocumentMask:
        """Return the mask of samples of `length` tokens.

        Args:
            boundaries_DB: cumulative lengths of each sample's documents, int32 [max_documents + 1, batch]. A column
                starts with 0, and repeats `length` after the last document.
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
        """Return the mask of tokens `start:stop`, for kernels that read `starts_BS`. `cumulative_lengths` is kept."""
        return DocumentMask((self.starts_BS[:, start:stop] - start).clamp(min=0), self.cumulative_lengths)

    def find_first_keys(self, window: int | None) -> Tensor:
        """Return the first key that each query sees, int32 [batch, sequence]."""
        if window is None:
            return self.starts_BS
        length = self.starts_BS.shape[1]
        bounds = torch.arange(1 - window, length + 1 - window, dtype=torch.int32, device=self.starts_BS.device)
        return torch.maximum(self.starts_BS, bounds)

    def make_mask(self, window: int | None, queries: int) -> Tensor:
        """Return the complete mask of the last `queries` tokens, bool [batch, 1, queries, keys]."""
        length = self.starts_BS.shape[1]
        device = self.starts_BS.device
        keys = torch.arange(length, dtype=torch.int32, device=device)
        is_in_document_BST = keys >= self.find_first_keys(window)[:, length - queries :, None]
        return (is_in_document_BST & make_causal_mask(queries, length, None, device)).unsqueeze(1)


DocumentBackend = Callable[[Tensor, Tensor, Tensor, "int | None", DocumentMask], Tensor]


def sdpa(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None, documents: DocumentMask) -> Tensor:
    """Run torch's own choice of kernel with the complete mask, on any device and in any type."""
    q, k, v = view_heads_first(q_SBND, k_SBGD, v_SBGD)
    mask = documents.make_mask(window, q.shape[2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return merge_heads(out.permute(2, 0, 1, 3))


def make_block_mask(documents: DocumentMask, window: int | None) -> Any:
    """Return FlexAttention's block mask. It is computed from each query's first key, without the complete mask.

    In the names' shapes, Q is the number of blocks of queries, and K the number of blocks of keys.
    """
    from torch.nn.attention.flex_attention import BlockMask

    first_keys_BS = documents.find_first_keys(window)
    length = first_keys_BS.shape[1]
    block_count = -(-length // _FLEX_BLOCK)
    block_indices = torch.arange(block_count, dtype=torch.int32, device=first_keys_BS.device)
    # First keys ascend with the queries, so the first query of a block sees the earliest key of the block.
    first_key_blocks_BQ = first_keys_BS[:, ::_FLEX_BLOCK] // _FLEX_BLOCK
    counts_BQ = (block_indices - first_key_blocks_BQ + 1).to(torch.int32)
    # FlexAttention reads the first counts_BQ entries of a row. The clamp keeps the unused entries valid.
    indices_BQK = (first_key_blocks_BQ[:, :, None] + block_indices).clamp(max=block_count - 1).to(torch.int32)

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
    """Compute scores with a softcap of all queries and keys in memory, on any device and in any type."""
    return attend_eagerly(q_SBND, k_SBGD, v_SBGD, documents.make_mask(window, len(q_SBND)).unsqueeze(1), softcap)


def flex(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    window: int | None,
    documents: DocumentMask,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Run torch's FlexAttention, compiled. For sinks see `flex_with_sinks`."""
    if not q_SBND.is_cuda:
        raise ConfigError("kernels.attention='flex' trains on CUDA devices; set --kernels.attention=auto")
    q, k, v = view_heads_first(q_SBND, k_SBGD, v_SBGD)
    if window not in documents.block_masks:
        documents.block_masks[window] = make_block_mask(documents, window)
    mask = documents.block_masks[window]
    bound = None if softcap is None else make_softcap(softcap)
    if sinks_N is not None:
        return flex_with_sinks(q, k, v, sinks_N, bound, mask)
    out = get_compiled_flex()(q, k, v, score_mod=bound, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return merge_heads(out.permute(2, 0, 1, 3))


@torch_private.call_directly
class _FlashVarlen(torch.autograd.Function):
    """torch's built-in FlashAttention-2 over documents of different lengths, with an optional window."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int | None, cumulative: Tensor) -> Tensor:
        S, B, N, D = q.shape
        q_TND, k_TGD, v_TGD = (join_samples(t) for t in (q, k, v))
        # FlashAttention's window does not count the query itself.
        ctx.window_options = {}
        if window is not None:
            ctx.window_options = {"window_size_left": window - 1, "window_size_right": 0}
        out, lse, rng, unused, _ = torch_private.flash_attention_forward(
            q_TND, k_TGD, v_TGD, cumulative, cumulative, S, S, 0.0, True, False, **ctx.window_options
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
            **ctx.window_options,
        )
        return *(separate_samples(grad, ctx.batch) for grad in d_qkv), None, None


def flash_varlen(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, window: int | None, documents: DocumentMask) -> Tensor:
    """Run FlashAttention-2 of torch, which reads cumulative lengths."""
    if not q_SBND.is_cuda:
        raise ConfigError("kernels.attention='flash_varlen' runs on CUDA devices; set --kernels.attention=auto")
    return _FlashVarlen.apply(q_SBND, k_SBGD, v_SBGD, window, documents.cumulative_lengths)


@torch_private.call_directly
class _Flash4Varlen(torch.autograd.Function):
    """FlashAttention-4 over documents of different lengths.

    With one sample, forward reads views of the QKV projection without a copy, and backward writes all gradients into
    one [q | k | v] tensor.
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
        ctx.deterministic = dispatch.is_deterministic()
        ctx.batch = B
        load_flash4()._flash_attn_fwd(q_TND, k_TGD, v_TGD, **ctx.options, out=out, lse=lse)
        ctx.save_for_backward(q_TND, k_TGD, v_TGD, out, lse)
        return separate_samples(out, B).reshape(S, B, N * D)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out = join_samples(upstream[0].unflatten(-1, q.shape[1:])).contiguous()
        grads = allocate_qkv_gradients(q.unsqueeze(1), k.unsqueeze(1))  # [B x S, 1, heads, D]
        dq, dk, dv = (grad.squeeze(1) for grad in grads)
        load_flash4()._flash_attn_bwd(
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


def _run_packaged(
    name: str,
    extra: str,
    run: Callable[[Tensor, Tensor, Tensor, int | None, Tensor], Tensor],
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    window: int | None,
    documents: DocumentMask,
) -> Tensor:
    """Run a kernel of an optional package with cumulative lengths. Raises ConfigError if it is unavailable."""
    if not q_SBND.is_cuda:
        raise ConfigError(f"kernels.attention={name!r} runs on CUDA devices; set --kernels.attention=auto")
    try:
        return run(q_SBND, k_SBGD, v_SBGD, window, documents.cumulative_lengths)
    except ImportError as error:
        raise ConfigError(f"kernels.attention={name!r} is unavailable: {error}; {describe_install(extra)}") from error


DOCUMENT_BACKENDS: dict[str, DocumentBackend] = {
    "flash_varlen": flash_varlen,
    "flash4": functools.partial(_run_packaged, "flash4", "flash4", _run_flash4),
    "cudnn_frontend": functools.partial(_run_packaged, "cudnn_frontend", "cudnn", _run_cudnn),
    "flex": flex,
    "sdpa": sdpa,
}
# Backends with a softcap, which is the last argument.
SOFTCAP_DOCUMENT_BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, int | None, DocumentMask, float], Tensor]] = {
    "flex": flex,
    "eager": eager,
}
# Backends that are measured on CUDA, the likely fastest first.
DOCUMENT_CANDIDATES = ("flash_varlen", "flash4", "cudnn_frontend", "flex")


def check_document_backend(name: str) -> None:
    """Raise ConfigError if a kernel cannot keep attention within documents."""
    if name not in DOCUMENT_BACKENDS:
        raise ConfigError(
            f"kernels.attention={name!r} cannot keep attention within documents, which the samples have "
            f"(data.document_mask=true); choose among auto, {', '.join(DOCUMENT_BACKENDS)}"
        )


@functools.cache
def make_synthetic_boundaries(length: int, batch: int, max_documents: int) -> Tensor:
    """Return random document boundaries for measurements, int32 [max_documents + 1, batch].

    A sample has up to sixteen documents.
    """
    document_count = min(max_documents, 16, length)
    generator = torch.Generator().manual_seed(length)
    boundaries = torch.full((max_documents + 1, batch), length, dtype=torch.int32)
    boundaries[0] = 0
    for sample in range(batch):
        candidates = torch.randperm(max(length - 1, 1), generator=generator)
        inner_boundaries = candidates[: document_count - 1].sort().values + 1
        boundaries[1 : len(inner_boundaries) + 1, sample] = inner_boundaries.to(torch.int32)
    return boundaries
