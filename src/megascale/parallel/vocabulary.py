"""Embedding, logits and loss with the vocabulary cut over the tensor axis; logits are never gathered in training."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megascale.ops.cross_entropy import VocabShard, linear_cross_entropy
from megascale.ops.embedding import embedding
from megascale.ops.token_loss import TokenLoss
from megascale.parallel.collectives import Axis, all_gather, all_reduce_small, gather_sequence, scatter_sequence
from megascale.parallel.linear import DEFAULT_PRECISION, LinearPrecision


def vocabulary_embedding(tokens_SB: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Look up tokens [s, b] in own rows [v/t, h] and sum over ranks into sequence shards [s/t, b, h]."""
    if axis.size == 1:
        return embedding(tokens_SB, weight)
    rows = weight.shape[0]
    local = tokens_SB - axis.rank * rows
    return scatter_sequence(embedding(local, weight, (local >= 0) & (local < rows)), axis)


def vocabulary_logits(
    x_SBH: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    vocab: int,
    axis: Axis,
    linears: LinearPrecision = DEFAULT_PRECISION,
) -> torch.Tensor:
    """Whole logits [s, b, vocab] on every rank, without gradients: for generation and evaluation."""
    x = gather_sequence(x_SBH, axis)
    own = linears.logits.forward(linears.logits.prepare_input(x, weight), weight, bias)
    if axis.size == 1:
        return own[..., :vocab]
    parts = all_gather(own.movedim(-1, 0).contiguous(), axis).wait()
    return parts.movedim(0, -1)[..., :vocab]


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
) -> torch.Tensor:
    """Loss of every token, [s, b] in float32 or wider; rows of `weight` beyond `vocab` do not exist.

    token_grad: what backward will send for each token, if known: gradients are then made in the forward pass.
    loss: instead of cross-entropy.
    """
    options = {"bias": bias, "vocab": vocab, "token_grad": token_grad, "gemms": linears.logits, "loss": loss}
    if axis.size == 1:
        return linear_cross_entropy(x_SBH, weight, targets_SB, **options)  # type: ignore[arg-type]
    shard = VocabShard(
        axis.rank * weight.shape[0],
        lambda x: all_reduce_small(x, axis, dist.ReduceOp.MAX),
        lambda x: all_reduce_small(x, axis),
    )
    whole = gather_sequence(x_SBH, axis)
    return linear_cross_entropy(whole, weight, targets_SB, **options, shard=shard)  # type: ignore[arg-type]
