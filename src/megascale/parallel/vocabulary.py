"""Token embedding, logits and loss, sharded along the vocabulary over the tensor-parallel ranks.

Training never gathers logits: each rank computes those of its rows of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megascale.ops.cross_entropy import VocabShard, linear_cross_entropy
from megascale.ops.embedding import embedding
from megascale.ops.token_loss import TokenLoss
from megascale.parallel.collectives import Axis, all_gather, all_reduce_small, gather_sequence, scatter_sequence
from megascale.parallel.linear import DEFAULT_PRECISION
from megascale.parallel.linear_precision import LinearPrecision


def vocabulary_embedding(tokens_SB: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Look up tokens [s, b] in this rank's rows [v/t, h] and sum over ranks into sequence shards [s/t, b, h]."""
    if axis.size == 1:
        return embedding(tokens_SB, weight)
    rows = weight.shape[0]
    local_rows_SB = tokens_SB - axis.rank * rows
    is_local_SB = (local_rows_SB >= 0) & (local_rows_SB < rows)
    return scatter_sequence(embedding(local_rows_SB, weight, is_local_SB), axis)


def vocabulary_logits(
    x_SBH: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    vocab: int,
    axis: Axis,
    linears: LinearPrecision = DEFAULT_PRECISION,
) -> torch.Tensor:
    """Return the logits of the complete vocabulary [s, b, vocab] on every rank, without gradients."""
    x = gather_sequence(x_SBH, axis)
    logits = linears.logits.forward(linears.logits.prepare_input(x, weight), weight, bias)
    if axis.size > 1:
        logits = all_gather(logits.movedim(-1, 0).contiguous(), axis).wait().movedim(0, -1)
    return logits[..., :vocab]


def vocabulary_loss(
    x_SBH: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets_SB: torch.Tensor,
    vocab: int,
    axis: Axis,
    token_grad: torch.Tensor | None = None,
    linears: LinearPrecision = DEFAULT_PRECISION,
    loss: TokenLoss | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return the loss of every token, [s, b] in float32 or wider.

    Args:
        vocab: size of the vocabulary; rows of `weight` beyond it are padding.
        token_grad: upstream gradient of each token's loss, if known: gradients are then computed in forward.
        loss: loss to use instead of cross-entropy.
        softcap: bound c of the logits: c tanh(x / c) replaces logits x.
    """
    shard = None
    if axis.size > 1:
        shard = VocabShard(
            axis.rank * weight.shape[0],
            lambda x: all_reduce_small(x, axis, dist.ReduceOp.MAX),
            lambda x: all_reduce_small(x, axis),
        )
    return linear_cross_entropy(
        gather_sequence(x_SBH, axis),
        weight,
        targets_SB,
        bias=bias,
        vocab=vocab,
        token_grad=token_grad,
        shard=shard,
        gemms=linears.logits,
        loss=loss,
        softcap=softcap,
    )
