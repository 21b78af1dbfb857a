"""Embedding look-up whose gradient is added directly to the used rows of the float32 gradient.

A dense gradient of a large vocabulary would be written, read and added each micro-batch, although few of its rows are
used. Here tokens are sorted, and the gradients of equal tokens (a run) are summed in the order of their positions. One
program sums up to RUN positions. Several programs share a longer run, and a second kernel adds their sums. The order
of additions is fixed, so that the bits are the same every run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops.dispatch import cdiv, jit, tl, use_fused
from megascale.ops.gradient_sink import main_grad_of, sink_of

RUN = 16  # positions that one program sums
BLOCK_COLUMNS = 512


@jit
def _runs_kernel(
    dy_ptr,
    main_ptr,
    part_ptr,
    token_ptr,
    position_ptr,
    first_ptr,
    last_ptr,
    vocabulary,
    columns,
    RUN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    index = tl.program_id(0)
    token = tl.load(token_ptr + index)
    first = tl.load(first_ptr + index)
    last = tl.load(last_ptr + index)
    # Only programs at the beginning of a piece of a run have work.
    if ((index - first) % RUN == 0) & (token >= 0) & (token < vocabulary):
        column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        indices = index + tl.arange(0, RUN)
        position = tl.load(position_ptr + indices, mask=indices < last, other=0)
        inside = (indices[:, None] < last) & (column[None, :] < columns)
        rows = tl.load(dy_ptr + position[:, None] * columns + column[None, :], mask=inside, other=0.0)
        total = tl.sum(rows.to(tl.float32), 0)
        if last - first <= RUN:
            target = main_ptr + token * columns + column
            tl.store(target, total + tl.load(target, mask=column < columns, other=0.0), mask=column < columns)
        else:
            # If two pieces of long runs begin within RUN positions, one begins its run and the other does not.
            slot = 2 * (index // RUN) + (index == first).to(tl.int32)
            tl.store(part_ptr + slot.to(tl.int64) * columns + column, total, mask=column < columns)


@jit
def _long_runs_kernel(
    main_ptr,
    part_ptr,
    token_ptr,
    first_ptr,
    last_ptr,
    vocabulary,
    columns,
    RUN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    index = tl.program_id(0)
    token = tl.load(token_ptr + index)
    first = tl.load(first_ptr + index)
    last = tl.load(last_ptr + index)
    if (index == first) & (last - first > RUN) & (token >= 0) & (token < vocabulary):
        column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        target = main_ptr + token * columns + column
        total = tl.load(target, mask=column < columns, other=0.0)
        for piece in range(first, last, RUN):
            slot = 2 * (piece // RUN) + (piece == first).to(tl.int32)
            total += tl.load(part_ptr + slot.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
        tl.store(target, total, mask=column < columns)


def add_rows(main_VH: Tensor, tokens_T: Tensor, dy_TH: Tensor) -> None:
    """Compute main[token] += dy[position] for each token that is a row of main [V, H] float32; skip other tokens."""
    vocabulary, columns = main_VH.shape
    positions = tokens_T.numel()
    tokens, position = torch.sort(tokens_T, stable=True)
    first = torch.searchsorted(tokens, tokens)
    last = torch.searchsorted(tokens, tokens, right=True)
    partial = torch.empty((2 * cdiv(positions, RUN), columns), dtype=torch.float32, device=dy_TH.device)
    grid = (positions, cdiv(columns, BLOCK_COLUMNS))
    constants = {"RUN": RUN, "BLOCK_C": BLOCK_COLUMNS}
    _runs_kernel[grid](dy_TH, main_VH, partial, tokens, position, first, last, vocabulary, columns, **constants)
    _long_runs_kernel[grid](main_VH, partial, tokens, first, last, vocabulary, columns, **constants)


def embedding_reference(tokens: Tensor, weight: Tensor, is_local: Tensor | None = None) -> Tensor:
    """Return rows of weight for tokens, zeros where `is_local` is false."""
    if is_local is None:
        return torch.nn.functional.embedding(tokens, weight)
    rows = torch.nn.functional.embedding(torch.where(is_local, tokens, 0), weight)
    return rows * is_local[..., None].to(rows.dtype)


@torch_private.call_directly
class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, is_local: Tensor | None) -> Tensor:
        ctx.save_for_backward(tokens if is_local is None else torch.where(is_local, tokens, -1))
        ctx.weight = weight  # the parameter object itself has the sink
        return embedding_reference(tokens, weight, is_local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        dy = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        sink = sink_of(ctx.weight)
        assert sink is not None
        add_rows(sink.main_grad, tokens.reshape(-1), dy)
        sink.ready()
        return None, None, None


def embedding(tokens: Tensor, weight: Tensor, is_local: Tensor | None = None) -> Tensor:
    """Return rows of weight [V, H] for tokens [...]: [..., H]. The gradient is added to the weight's sink, if any.

    Args:
        is_local: [...], false where a token is a row of another rank, which gives zeros.
    """
    main_grad = main_grad_of(weight)
    is_supported = main_grad is not None and main_grad.dtype == torch.float32 and main_grad.is_contiguous()
    if tokens.numel() and is_supported and torch.is_grad_enabled() and use_fused("embedding", weight):
        return _Embedding.apply(tokens, weight, is_local)  # type: ignore[no-any-return]
    return embedding_reference(tokens, weight, is_local)
