"""Embedding look-up whose backward adds gradients to the used rows of the float32 gradient only.

A dense gradient of a large vocabulary would be written, read and added in each micro-batch, although few of its rows
are used. Here tokens are sorted. Equal tokens, which are then adjacent, are a group. A program sums the gradients of up
to PROGRAM_POSITIONS positions of one group. If a group has more positions, a second kernel adds the sums of its
programs. The order of additions is fixed, so that repeated runs give the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megascale import torch_private
from megascale.ops.dispatch import cdiv, jit, tl, use_fused
from megascale.ops.gradient_sink import GradientSink, get_sink

PROGRAM_POSITIONS = 16
BLOCK_COLUMNS = 512


@jit
def _groups_kernel(
    dy_ptr,
    main_ptr,
    partial_ptr,
    token_ptr,
    position_ptr,
    start_ptr,
    stop_ptr,
    vocabulary,
    columns,
    POSITIONS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sum the gradients of each group. Add the sum to the gradient, or store partial sums of a long group.

    start_ptr, stop_ptr: range of the group among the sorted tokens, for each sorted token.
    """
    index = tl.program_id(0)
    token = tl.load(token_ptr + index)
    start = tl.load(start_ptr + index)
    stop = tl.load(stop_ptr + index)
    # There is one program per sorted position. Only every POSITIONS-th position of a group has work.
    if ((index - start) % POSITIONS == 0) & (token >= 0) & (token < vocabulary):
        column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        indices = index + tl.arange(0, POSITIONS)
        position = tl.load(position_ptr + indices, mask=indices < stop, other=0)
        inside = (indices[:, None] < stop) & (column[None, :] < columns)
        rows = tl.load(dy_ptr + position[:, None] * columns + column[None, :], mask=inside, other=0.0)
        total = tl.sum(rows.to(tl.float32), 0)
        if stop - start <= POSITIONS:
            target = main_ptr + token * columns + column
            tl.store(target, total + tl.load(target, mask=column < columns, other=0.0), mask=column < columns)
        else:
            # At most two sums of long groups begin within POSITIONS positions: one in the middle of a group, and one at
            # the start of the next group. Each has a row of its own.
            row = 2 * (index // POSITIONS) + (index == start).to(tl.int32)
            tl.store(partial_ptr + row.to(tl.int64) * columns + column, total, mask=column < columns)


@jit
def _long_groups_kernel(
    main_ptr,
    partial_ptr,
    token_ptr,
    start_ptr,
    stop_ptr,
    vocabulary,
    columns,
    POSITIONS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Add the partial sums of each group with more than POSITIONS positions to its row of the gradient."""
    index = tl.program_id(0)
    token = tl.load(token_ptr + index)
    start = tl.load(start_ptr + index)
    stop = tl.load(stop_ptr + index)
    if (index == start) & (stop - start > POSITIONS) & (token >= 0) & (token < vocabulary):
        column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        target = main_ptr + token * columns + column
        total = tl.load(target, mask=column < columns, other=0.0)
        for sum_start in range(start, stop, POSITIONS):
            row = 2 * (sum_start // POSITIONS) + (sum_start == start).to(tl.int32)
            total += tl.load(partial_ptr + row.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
        tl.store(target, total, mask=column < columns)


class SortedTokens(NamedTuple):
    """The tokens of a micro-batch in ascending order.

    Attributes:
        tokens: the tokens, of which equal ones form a group.
        positions: position of each token in the micro-batch.
        start, stop: range of each token's group.
    """

    tokens: Tensor
    positions: Tensor
    start: Tensor
    stop: Tensor


def sort_tokens(tokens_T: Tensor) -> SortedTokens:
    """Sort tokens, and find their groups."""
    tokens, positions = torch.sort(tokens_T, stable=True)
    start = torch.searchsorted(tokens, tokens)
    stop = torch.searchsorted(tokens, tokens, right=True)
    return SortedTokens(tokens, positions, start, stop)


def add_sorted_rows(main_VH: Tensor, sorted_tokens: SortedTokens, dy_TH: Tensor, first_row: int = 0) -> None:
    """Compute main[token - first_row] += dy[position] for the token at each position. Skip tokens outside of main.

    Args:
        main_VH: float32 gradient of the embedding's rows from `first_row` on.
    """
    vocabulary, columns = main_VH.shape
    tokens, positions, start, stop = sorted_tokens
    if first_row:
        tokens = tokens - first_row
    position_count = tokens.numel()
    partial_rows = 2 * cdiv(position_count, PROGRAM_POSITIONS)
    partial = torch.empty((partial_rows, columns), dtype=torch.float32, device=dy_TH.device)
    grid = (position_count, cdiv(columns, BLOCK_COLUMNS))
    constants = {"POSITIONS": PROGRAM_POSITIONS, "BLOCK_C": BLOCK_COLUMNS}
    _groups_kernel[grid](dy_TH, main_VH, partial, tokens, positions, start, stop, vocabulary, columns, **constants)
    _long_groups_kernel[grid](main_VH, partial, tokens, start, stop, vocabulary, columns, **constants)


def add_token_rows(main_VH: Tensor, tokens_T: Tensor, dy_TH: Tensor, first_row: int) -> None:
    """Compute `add_sorted_rows` for tokens in any order, by the fused kernel where it can run."""
    if main_VH.dtype == torch.float32 and use_fused("embedding", dy_TH):
        add_sorted_rows(main_VH, sort_tokens(tokens_T), dy_TH, first_row=first_row)
        return
    rows_T = tokens_T - first_row
    is_inside = (rows_T >= 0) & (rows_T < main_VH.shape[0])
    main_VH.index_add_(0, rows_T[is_inside], dy_TH[is_inside].to(main_VH.dtype))


def embedding_reference(tokens: Tensor, weight: Tensor, is_local: Tensor | None = None) -> Tensor:
    """Return the rows of weight for tokens, with zeros where `is_local` is false."""
    if is_local is None:
        return torch.nn.functional.embedding(tokens, weight)
    rows = torch.nn.functional.embedding(torch.where(is_local, tokens, 0), weight)
    return rows * is_local[..., None].to(rows.dtype)


@torch_private.call_directly
class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, is_local: Tensor | None) -> Tensor:
        # `add_sorted_rows` skips negative tokens.
        local_tokens = tokens
        if is_local is not None:
            local_tokens = torch.where(is_local, tokens, -1)
        ctx.save_for_backward(local_tokens)
        # Not saved for backward, because the parameter object has the sink.
        ctx.weight = weight
        return embedding_reference(tokens, weight, is_local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        dy = grads[0].reshape(-1, grads[0].shape[-1]).contiguous()
        sink = get_sink(ctx.weight)
        assert sink is not None
        if sink.keep_rows is not None:
            sink.keep_rows(tokens.reshape(-1), dy)
        else:
            sorted_tokens = sort_tokens(tokens.reshape(-1))
            for rows, rows_grad in sink.write_rows():
                add_sorted_rows(rows_grad, sorted_tokens, dy, first_row=rows.start or 0)
        sink.ready()
        return None, None, None


def embedding(tokens: Tensor, weight: Tensor, is_local: Tensor | None = None) -> Tensor:
    """Return the rows [..., H] of weight [V, H] for tokens [...]. Backward adds the gradient to the weight's sink.

    Without a sink autograd returns a dense gradient.

    Args:
        is_local: [...], false where the token's row belongs to another rank. The result is zero there.
    """
    sink: GradientSink | None = getattr(weight, "gradient_sink", None)
    if sink is not None and sink.keep_rows is not None and torch.is_grad_enabled():
        return _Embedding.apply(tokens, weight, is_local)  # type: ignore[no-any-return]
    if sink is None:
        is_supported = False
    elif sink.is_divided:
        is_supported = torch.promote_types(weight.dtype, torch.float32) == torch.float32
    else:
        main_grad = sink.main_grad
        is_supported = main_grad.dtype == torch.float32 and main_grad.is_contiguous()
    if tokens.numel() and is_supported and torch.is_grad_enabled() and use_fused("embedding", weight):
        return _Embedding.apply(tokens, weight, is_local)  # type: ignore[no-any-return]
    return embedding_reference(tokens, weight, is_local)
