"""Sum of a part of a gradient over ranks, in their order: the same bits on every rank and in every run."""

from __future__ import annotations

from torch import Tensor

from megascale.ops.dispatch import cdiv, jit, tl, use_fused

BLOCK = 2048  # elements per program


@jit
def _sum_over_peers_kernel(
    own_ptr, received_ptr, count, stride, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    own = tl.load(own_ptr + element, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), own_ptr.dtype.element_ty)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += own
        else:
            row = rank if rank < RANK else rank - 1
            total += tl.load(received_ptr + row * stride + element, mask=inside, other=0.0)
    tl.store(own_ptr + element, total, mask=inside)


def sum_over_peers(own: Tensor, received: Tensor, rank: int) -> None:
    """Replace `own` by the sum over ranks, whose parts are added in the order of ranks.

    Args:
        own: this rank's part [count], contiguous.
        received: the parts of the other ranks, in their order [ranks - 1, at least count], rows contiguous.
        rank: of this part.
    """
    ranks = len(received) + 1
    if use_fused("sum over peers", own):
        _sum_over_peers_kernel[(cdiv(len(own), BLOCK),)](
            own, received, len(own), received.stride(0), RANK=rank, RANKS=ranks, BLOCK=BLOCK
        )
        return
    rows = list(received[:, : len(own)])
    rows.insert(rank, own)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    own.copy_(total)
