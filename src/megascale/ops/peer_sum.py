"""Sum of gradients over ranks in a fixed order, so that the bits are equal on every rank and in every run."""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.dispatch import cdiv, jit, tl, use_fused

BLOCK = 2048  # elements per program


@jit
def _sum_over_peers_kernel(
    local_ptr,
    received_ptr,
    out_ptr,
    count,
    stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    WIDEN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum BLOCK elements over RANKS ranks, into out_ptr. `stride` is the length of a row of received summands.

    WIDEN: add in float32, because the summands have 16 bits.
    """
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    if WIDEN:
        dtype: tl.constexpr = tl.float32
    else:
        dtype: tl.constexpr = local_ptr.dtype.element_ty  # type: ignore[no-redef]
    local = tl.load(local_ptr + element, mask=inside, other=0.0).to(dtype)
    total = tl.zeros((BLOCK,), dtype)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += local
        else:
            row = rank if rank < RANK else rank - 1
            total += tl.load(received_ptr + row * stride + element, mask=inside, other=0.0).to(dtype)
    if ACCUMULATE:
        total += tl.load(out_ptr + element, mask=inside, other=0.0).to(dtype)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_over_peers(local: Tensor, received: Tensor, rank: int, out: Tensor, accumulate: bool = False) -> None:
    """Write the sum of all ranks' summands, added in the order of ranks, to `out`, or add it with `accumulate`.

    Args:
        local: this rank's summand [count], contiguous.
        received: summands of the other ranks in the order of ranks [ranks - 1, at least count], with contiguous rows.
            They may have a narrower type. Sums have the type of `local`, and are computed at least in float32.
        out: [count], contiguous, of the type of `local`; may be `local`.
    """
    ranks = len(received) + 1
    if use_fused("sum over peers", local):
        _sum_over_peers_kernel[(cdiv(len(local), BLOCK),)](
            local,
            received,
            out,
            len(local),
            received.stride(0),
            RANK=rank,
            RANKS=ranks,
            WIDEN=local.dtype.itemsize < 4,
            ACCUMULATE=accumulate,
            BLOCK=BLOCK,
        )
        return
    rows = list(received[:, : len(local)])
    rows.insert(rank, local)
    total = rows[0].to(torch.promote_types(local.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        total += row
    if accumulate:
        out += total
    else:
        out.copy_(total)
