"""Embedding look-up whose gradient goes straight into the rows of the float32 gradient that were used.

A dense gradient of a large vocabulary is written, read and added each micro-batch although few of its rows are used.
Here tokens are sorted, and the gradients of equal tokens are summed in the order of their places: up to RUN of them by
one program; of a more frequent token by several, whose sums a second kernel adds. Nothing depends on who comes first,
so the bits are the same every run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops.dispatch import cdiv, jit, tl, use_fused
from megascale.ops.gradient_sink import main_of, sink_of

RUN = 16  # places that one program sums
BLOCK_COLUMNS = 512


@jit
def _runs_kernel(
    dy_ptr,
    main_ptr,
    part_ptr,
    token_ptr,
    place_ptr,
    first_ptr,
    last_ptr,
    vocabulary,
    columns,
    RUN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    at = tl.program_id(0)
    token = tl.load(token_ptr + at)
    first = tl.load(first_ptr + at)
    last = tl.load(last_ptr + at)
    # Programs that begin a piece of a run work, the others have nothing to do.
    if ((at - first) % RUN == 0) & (token >= 0) & (token < vocabulary):
        column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        number = at + tl.arange(0, RUN)
        place = tl.load(place_ptr + number, mask=number < last, other=0)
        inside = (number[:, None] < last) & (column[None, :] < columns)
        rows = tl.load(dy_ptr + place[:, None] * columns + column[None, :], mask=inside, other=0.0)
        total = tl.sum(rows.to(tl.float32), 0)
        if last - first <= RUN:
            to = main_ptr + token * columns + column
            tl.store(to, total + tl.load(to, mask=column < columns, other=0.0), mask=column < columns)
        else:
            # Of two pieces of long runs that begin within RUN places, one begins its run and the other does not.
            slot = 2 * (at // RUN) + (at == first).to(tl.int32)
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
    at = tl.program_id(0)
    token = tl.load(token_ptr + at)
    first = tl.load(first_ptr + at)
    last = tl.load(last_ptr + at)
    if (at == first) & (last - first > RUN) & (token >= 0) & (token < vocabulary):
        column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        to = main_ptr + token * columns + column
        total = tl.load(to, mask=column < columns, other=0.0)
        for piece in range(first, last, RUN):
            slot = 2 * (piece // RUN) + (piece == first).to(tl.int32)
            total += tl.load(part_ptr + slot.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
        tl.store(to, total, mask=column < columns)


def add_rows(main_VH: Tensor, tokens_T: Tensor, dy_TH: Tensor) -> None:
    """main[token] += dy[place] for every place whose token is a row of main [V, H] float32; others are left out."""
    (vocabulary, columns), places = main_VH.shape, tokens_T.numel()
    tokens, place = torch.sort(tokens_T, stable=True)
    first = torch.searchsorted(tokens, tokens)
    last = torch.searchsorted(tokens, tokens, right=True)
    partial = torch.empty((2 * cdiv(places, RUN), columns), dtype=torch.float32, device=dy_TH.device)
    grid = (places, cdiv(columns, BLOCK_COLUMNS))
    rest = (tokens, first, last, vocabulary, columns)
    _runs_kernel[grid](*(dy_TH, main_VH, partial, tokens, place, *rest[1:]), RUN=RUN, BLOCK_C=BLOCK_COLUMNS)
    _long_runs_kernel[grid](main_VH, partial, *rest, RUN=RUN, BLOCK_C=BLOCK_COLUMNS)


def embedding_reference(tokens: Tensor, weight: Tensor, mine: Tensor | None = None) -> Tensor:
    """Rows of weight for tokens; zeros where `mine` says that the token is not among them."""
    if mine is None:
        return torch.nn.functional.embedding(tokens, weight)
    found = torch.nn.functional.embedding(torch.where(mine, tokens, 0), weight)
    return found * mine[..., None].to(found.dtype)


@torch_private.called_directly
class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, mine: Tensor | None) -> Tensor:
        ctx.save_for_backward(tokens if mine is None else torch.where(mine, tokens, -1))
        ctx.weight = weight  # the parameter itself has the sink
        return embedding_reference(tokens, weight, mine)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        dy = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        sink = sink_of(ctx.weight)
        assert sink is not None
        add_rows(sink.main_grad, tokens.reshape(-1), dy)
        sink.ready()
        return None, None, None


def embedding(tokens: Tensor, weight: Tensor, mine: Tensor | None = None) -> Tensor:
    """Rows of weight [V, H] for tokens [...]: [..., H], zeros where `mine` [...] is false (a row of another rank).

    The gradient is added to the weight's sink where it has one.
    """
    main = main_of(weight)
    straight = main is not None and main.dtype == torch.float32 and main.is_contiguous()
    if tokens.numel() and straight and torch.is_grad_enabled() and use_fused("embedding", weight):
        return _Embedding.apply(tokens, weight, mine)  # type: ignore[no-any-return]
    return embedding_reference(tokens, weight, mine)
