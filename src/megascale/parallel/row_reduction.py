"""Reduction of the gradient of a token embedding by its rows (parallel.embedding_reduction=rows).

Only the rows of tokens that a rank has read have a gradient. With few tokens per rank and step, most of the matrix is
zero. An ordinary reduction would send these zeros, and nothing would hide it, because the embedding's gradient is the
last of a backward. Here every rank gathers all ranks' tokens and the rows of their gradients, and adds the rows that
belong to its shard. The host does not need to know the number of different tokens: each rank sends as many rows as it
has read tokens, and marks the repetitions of a token so that its row is added once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.dispatch import use_fused
from megascale.ops.embedding import add_rows
from megascale.parallel.collectives import Axis, Pending, all_gather


class RowReduction:
    """Reduces an embedding's gradient by the rows of tokens that were read since `forget_tokens`.

    Args:
        columns: width of the embedding; each rank's shard is whole rows.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._tokens: list[Tensor] = []

    def add_tokens(self, tokens_SB: Tensor) -> None:
        """Record a copy of a micro-batch's tokens, equally many on all ranks."""
        self._tokens.append(tokens_SB.flatten().clone())

    def forget_tokens(self) -> None:
        """Forget the tokens of the previous step."""
        self._tokens.clear()

    def __call__(self, grads: Tensor, axis: Axis) -> Pending:
        """Sum over ranks into this rank's slice of `grads`; the other slices are undefined afterwards."""
        matrix_VH = grads.view(-1, self._columns)
        tokens_N = torch.cat(self._tokens).sort().values
        rows_NH = matrix_VH[tokens_N]
        is_repeated_N = torch.zeros_like(tokens_N, dtype=torch.bool)
        is_repeated_N[1:] = tokens_N[1:] == tokens_N[:-1]
        gathering_tokens = all_gather(tokens_N.masked_fill(is_repeated_N, -1), axis)
        gathering_rows = all_gather(rows_NH, axis)
        shard = grads.view(axis.size, -1)[axis.rank]

        def add() -> None:
            tokens_RN = gathering_tokens.wait().view(axis.size, -1)
            tokens_RN[axis.rank].fill_(-1)  # this rank's rows are in the shard already
            shard_VH = shard.view(-1, self._columns)
            _add_present_rows(shard_VH, tokens_RN.flatten() - axis.rank * len(shard_VH), gathering_rows.wait())

        return Pending(shard, finish=add)


def _add_present_rows(main_VH: Tensor, tokens_T: Tensor, rows_TH: Tensor) -> None:
    """Compute main[token] += row for each token that is a row of main; skip other tokens. The order is fixed."""
    if main_VH.dtype == torch.float32 and use_fused("embedding", main_VH):
        add_rows(main_VH, tokens_T, rows_TH)
        return
    is_present = (tokens_T >= 0) & (tokens_T < len(main_VH))
    main_VH.index_add_(0, tokens_T[is_present], rows_TH[is_present])
