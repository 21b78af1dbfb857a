"""Context parallelism: ranks along the context axis hold consecutive slices of each sequence.

Only attention combines tokens, so only attention communicates. An all-to-all exchanges slices of the sequence with all
heads for complete sequences with some of the heads (Jacobs et al. 2023, arXiv 2309.14509), and a second one returns the
results. If the ranks cannot divide the heads, keys and values are gathered instead (core/head_exchange.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.core.batch import Batch
from megascale.ops.rope import split_qkv
from megascale.parallel.collectives import Axis, gather_sequence, transpose_sequence

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
    packed_RSBC = _PackHeads.apply(q_SBND, k_SBGD, v_SBGD, axis.size, copies)
    received_SBC = transpose_sequence(packed_RSBC.flatten(0, 1), axis)
    heads = q_SBND.shape[2] // axis.size
    return split_qkv(received_SBC, heads, k_SBGD.shape[2] * copies // axis.size)


@torch_private.call_directly
class _PackHeads(torch.autograd.Function):
    """Arranges heads by receiving rank, [ranks, S, B, heads of a rank x D], so that each rank gets one message."""

    @staticmethod
    def forward(ctx: Any, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, ranks: int, copies: int) -> Tensor:
        S, B, N, D = q_SBND.shape
        ctx.args = N, k_SBGD.shape[2], ranks, copies
        sizes = _head_counts(*ctx.args)
        packed_RSBND = q_SBND.new_empty((ranks, S, B, sum(sizes), D))
        if copies > 1:
            k_SBGD = k_SBGD.repeat_interleave(copies, 2)
            v_SBGD = v_SBGD.repeat_interleave(copies, 2)
        for part, x in zip(packed_RSBND.split(sizes, 3), (q_SBND, k_SBGD, v_SBGD), strict=True):
            copy_wide(part.permute(1, 2, 0, 3, 4), x.unflatten(2, (ranks, -1)))
        return packed_RSBND.flatten(3)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        N, G, ranks, copies = ctx.args
        sizes = _head_counts(*ctx.args)
        packed_RSBND = grads[0].unflatten(3, (sum(sizes), -1))
        _, S, B, _, D = packed_RSBND.shape
        # The results are adjacent parts of one tensor, so that the projection's backward reads them without a copy.
        results = grads[0].new_empty((S, B, N + 2 * G, D)).split((N, G, G), 2)
        for result, part in zip(results, packed_RSBND.split(sizes, 3), strict=True):
            part_SBRND = part.permute(1, 2, 0, 3, 4)
            if copies > 1 and result is not results[0]:
                torch.sum(part_SBRND.flatten(2, 3).unflatten(2, (G, copies)), 3, out=result)
            else:
                copy_wide(result.unflatten(2, (ranks, -1)), part_SBRND)
        return *results, None, None


def _head_counts(heads: int, kv_heads: int, ranks: int, copies: int) -> tuple[int, int, int]:
    """Return the number of query, key and value heads that a rank receives."""
    return heads // ranks, kv_heads * copies // ranks, kv_heads * copies // ranks


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
    return _JoinHeads.apply(parts_SBC, axis.size)  # type: ignore[no-any-return]


@torch_private.call_directly
class _JoinHeads(torch.autograd.Function):
    """Arranges the ranks' parts [ranks x S, B, C] along the heads, [S, B, ranks x C]."""

    @staticmethod
    def forward(ctx: Any, parts_SBC: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        parts_RSBC = parts_SBC.unflatten(0, (ranks, -1))
        _, S, B, C = parts_RSBC.shape
        joined_SBRC = parts_SBC.new_empty((S, B, ranks, C))
        copy_wide(joined_SBRC, parts_RSBC.permute(1, 2, 0, 3))
        return joined_SBRC.flatten(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grads_SBRC = grads[0].unflatten(2, (ctx.ranks, -1))
        S, B, R, C = grads_SBRC.shape
        parts_RSBC = grads[0].new_empty((R, S, B, C))
        copy_wide(parts_RSBC, grads_SBRC.permute(2, 0, 1, 3))
        return parts_RSBC.flatten(0, 1), None


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
