"""Sum of gradients over ranks in a fixed order, so that the bits are equal on every rank and in every run."""

from __future__ import annotations

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
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum BLOCK elements over RANKS ranks, into out_ptr. `stride` is the length of a row of received summands."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    dtype: tl.constexpr = local_ptr.dtype.element_ty
    local = tl.load(local_ptr + element, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), dtype)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += local
        else:
            row = rank if rank < RANK else rank - 1
            total += tl.load(received_ptr + row * stride + element, mask=inside, other=0.0).to(dtype)
    if ACCUMULATE:
        total += tl.load(out_ptr + element, mask=inside, other=0.0)
    tl.store(out_ptr + element, total, mask=inside)


def sum_over_peers(local: Tensor, received: Tensor, rank: int, out: Tensor, accumulate: bool = False) -> None:
    """Write the sum of all ranks' summands, added in the order of ranks, to `out`, or add it with `accumulate`.

    Args:
        local: this rank's summand [count], contiguous.
        received: summands of the other ranks in the order of ranks [ranks - 1, at least count], with contiguous rows.
            They may have a narrower type, and are added in the type of `local`.
        rank: this rank.
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
            ACCUMULATE=accumulate,
            BLOCK=BLOCK,
        )
        return
    rows = list(received[:, : len(local)])
    rows.insert(rank, local)
    total = rows[0].to(local.dtype, copy=True)
    for row in rows[1:]:
        total += row
    if accumulate:
        out += total
    else:
        out.copy_(total)
