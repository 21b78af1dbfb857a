"""Context parallelism: ranks along the context axis hold consecutive slices of each sequence.

Only attention combines tokens, so only attention communicates. An all-to-all exchanges slices of the sequence with all
heads for complete sequences with some of the heads (Jacobs et al. 2023, arXiv 2309.14509), and a second one returns the
results. If the ranks cannot divide the heads, keys and values are gathered instead (core/head_exchange.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.core.batch import Batch
from megascale.ops.rope import split_qkv
from megascale.parallel.collectives import Axis, gather_sequence, start_transpose, transpose_sequence

_WIDE = torch.complex128  # 16 bytes


def slice_batch(batch: Batch[Tensor], axis: Axis) -> Batch[Tensor]:
    """Return this rank's slice of the tokens of a micro-batch, whose targets are shifted already.

    Document boundaries are not sliced, because attention masks complete sequences.
    """
    return replace(
        batch,
        tokens=_slice_rows(batch.tokens, axis),
        targets=_slice_rows(batch.targets, axis),
        loss_weights=_slice_rows(batch.loss_weights, axis),
        positions=_slice_rows(batch.positions, axis),
    )


def _slice_rows(x_SB: Tensor | None, axis: Axis) -> Tensor | None:
    """Return this rank's rows of a tensor [sequence, batch]."""
    if x_SB is None:
        return None
    rows = x_SB.shape[0] // axis.size
    return x_SB[axis.rank * rows : (axis.rank + 1) * rows]


def exchange_for_heads(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, axis: Axis, copies: int) -> tuple[Tensor, ...]:
    """Exchange slices of the sequence for heads, in one all-to-all.

    Args:
        q_SBND, k_SBGD, v_SBGD: all heads of this rank's tokens.
        copies: number of ranks that receive each key/value head.

    Returns:
        Queries, keys and values of complete sequences, [size * S, B, heads of this rank, D].
    """
    (packed_RSBC,) = _PackHeads.apply(q_SBND, k_SBGD, v_SBGD, axis.size, copies, 1)
    received_SBC = transpose_sequence(packed_RSBC.flatten(0, 1), axis)
    heads = q_SBND.shape[2] // axis.size
    return split_qkv(received_SBC, heads, k_SBGD.shape[2] * copies // axis.size)


def attend_in_parts(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    axis: Axis,
    copies: int,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    parts: int = 2,
) -> Tensor:
    """Exchange slices for heads, attend, and exchange the results, for a part of the heads at a time.

    In forward and backward, the exchange of one part overlaps with the attention of another part. Autograd runs the
    functions of a backward in reverse order of their creation, so that it starts each exchange as early as possible.

    Args:
        q_SBND, k_SBGD, v_SBGD, copies: see `exchange_for_heads`. `parts` divides this rank's key/value heads.
        attend: returns the attention output [size * S, B, C] of queries, keys and values of complete sequences.

    Returns:
        The attention output of all heads of this rank's tokens, [S, B, N x D].
    """
    heads = q_SBND.shape[2] // axis.size // parts
    kv_heads = k_SBGD.shape[2] * copies // axis.size // parts
    packed = _PackHeads.apply(q_SBND, k_SBGD, v_SBGD, axis.size, copies, parts)
    incoming = [start_transpose(packed_RSBC.flatten(0, 1), axis) for packed_RSBC in packed]
    outgoing = [start_transpose(attend(*split_qkv(part.wait(), heads, kv_heads)), axis) for part in incoming]
    return _JoinHeads.apply(axis.size, *[part.wait() for part in outgoing])  # type: ignore[no-any-return]


@torch_private.call_directly
class _PackHeads(torch.autograd.Function):
    """Arranges heads by part and receiving rank, parts of [ranks, S, B, heads of a rank's part x D].

    So each rank gets one message per part.
    """

    @staticmethod
    def forward(
        ctx: Any, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, ranks: int, copies: int, parts: int
    ) -> tuple[Tensor, ...]:
        S, B, N, D = q_SBND.shape
        ctx.args = N, k_SBGD.shape[2], ranks, copies, parts
        sizes = _head_counts(*ctx.args)
        packed_PRSBND = q_SBND.new_empty((parts, ranks, S, B, sum(sizes), D))
        if copies > 1:
            k_SBGD = k_SBGD.repeat_interleave(copies, 2)
            v_SBGD = v_SBGD.repeat_interleave(copies, 2)
        for target, x in zip(packed_PRSBND.split(sizes, 4), (q_SBND, k_SBGD, v_SBGD), strict=True):
            copy_wide(target.permute(2, 3, 1, 0, 4, 5), x.unflatten(2, (ranks, parts, -1)))
        return tuple(packed_PRSBND.flatten(4).unbind(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        N, G, ranks, copies, parts = ctx.args
        sizes = _head_counts(*ctx.args)
        _, S, B, _ = grads[0].shape
        # The results are adjacent parts of one tensor, so that the projection's backward reads them without a copy.
        D = grads[0].shape[3] // sum(sizes)
        results = grads[0].new_empty((S, B, N + 2 * G, D)).split((N, G, G), 2)
        for part, grad in enumerate(grads):
            packed_RSBND = grad.unflatten(3, (sum(sizes), D))
            for result, source in zip(results, packed_RSBND.split(sizes, 3), strict=True):
                source_SBRND = source.permute(1, 2, 0, 3, 4)
                if copies > 1 and result is not results[0]:
                    heads_SBGCD = source_SBRND.flatten(2, 3).unflatten(2, (G, copies))
                    torch.sum(heads_SBGCD, 3, out=result)
                else:
                    copy_wide(result.unflatten(2, (ranks, parts, -1))[:, :, :, part], source_SBRND)
        return *results, None, None, None


def _head_counts(heads: int, kv_heads: int, ranks: int, copies: int, parts: int) -> tuple[int, int, int]:
    """Return the number of query, key and value heads that a rank receives in one part."""
    kv_count = kv_heads * copies // ranks // parts
    return heads // ranks // parts, kv_count, kv_count


def select_heads(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, axis: Axis, copies: int) -> tuple[Tensor, ...]:
    """Return the heads of this rank, like `exchange_for_heads`, for tokens that all ranks have."""
    if copies > 1:
        k_SBGD = k_SBGD.repeat_interleave(copies, 2)
        v_SBGD = v_SBGD.repeat_interleave(copies, 2)
    return tuple([x.chunk(axis.size, 2)[axis.rank] for x in (q_SBND, k_SBGD, v_SBGD)])


def gather_heads(mixed_SBC: Tensor, axis: Axis) -> Tensor:
    """Gather the attention output of all heads, [S, B, size * C], for tokens that all ranks have."""
    return _join_heads(gather_sequence(mixed_SBC, axis), axis)


def exchange_for_tokens(mixed_SBC: Tensor, axis: Axis) -> Tensor:
    """Exchange the attention output of some heads of complete sequences [S, B, C] for all heads of this rank's tokens.

    Return [S / size, B, size * C].
    """
    return _join_heads(transpose_sequence(mixed_SBC, axis), axis)


def _join_heads(parts_SBC: Tensor, axis: Axis) -> Tensor:
    """Join the ranks' parts, which are stacked along dimension 0, along the heads."""
    return _JoinHeads.apply(axis.size, parts_SBC)  # type: ignore[no-any-return]


@torch_private.call_directly
class _JoinHeads(torch.autograd.Function):
    """Arranges parts of the heads, each [ranks x S, B, C], along the heads: [S, B, ranks x parts x C]."""

    @staticmethod
    def forward(ctx: Any, ranks: int, *received: Tensor) -> Tensor:
        ctx.ranks = ranks
        rows, B, C = received[0].shape
        joined_SBRPC = received[0].new_empty((rows // ranks, B, ranks, len(received), C))
        for part, x in enumerate(received):
            copy_wide(joined_SBRPC[:, :, :, part], x.unflatten(0, (ranks, -1)).permute(1, 2, 0, 3))
        ctx.shape = joined_SBRPC.shape
        return joined_SBRPC.flatten(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        S, B, R, P, C = ctx.shape
        grads_SBRPC = grads[0].view(ctx.shape)
        parts_PRSBC = grads[0].new_empty((P, R, S, B, C))
        copy_wide(parts_PRSBC, grads_SBRPC.permute(3, 2, 0, 1, 4))
        return None, *parts_PRSBC.flatten(1, 2).unbind(0)


def copy_wide(target: Tensor, source: Tensor) -> None:
    """Copy like `target.copy_(source)`, in elements of 16 bytes if the tensors' last dimensions allow it.

    A GPU computes an index per element of a strided copy, which takes longer than moving 2 bytes.
    """
    if target.dtype == source.dtype and _has_wide_rows(target) and _has_wide_rows(source):
        target, source = target.view(_WIDE), source.view(_WIDE)
    target.copy_(source)


def _has_wide_rows(x: Tensor) -> bool:
    """Return whether the last dimension consists of contiguous, aligned elements of 16 bytes."""
    *strides, last_stride = x.stride()
    ratio = _WIDE.itemsize // x.element_size()
    return last_stride == 1 and not any(count % ratio for count in (x.shape[-1], x.storage_offset(), *strides))


def gather_keys(k_SBGD: Tensor, v_SBGD: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Gather the keys and values of complete sequences."""
    gathered = gather_sequence(torch.cat([k_SBGD, v_SBGD], 2), axis)
    k, v = gathered.split(k_SBGD.shape[2], 2)
    return k, v
