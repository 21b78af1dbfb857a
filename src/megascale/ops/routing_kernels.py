"""Kernels of expert routing: selection of experts, sorting of tokens by expert, sums of rows, gradient of activations.

A choice is a pair of a token and one of its top_k experts. A slot is the index of the expert among the token's experts.
Each result is written by one program in a fixed order, so equal inputs give equal bits. The host reads nothing.
`ops/routing.py` and `ops/grouped_linear.py` choose between these kernels and plain PyTorch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megascale.ops.activation import gelu_with_derivative
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl

TILE_ELEMENTS = 4096  # elements per program of the kernels that select experts and split float32
PROGRAM_CHOICES = 256  # choices per program of the kernels that count and sort


@jit
def _select_kernel(
    score_ptr,
    bias_ptr,
    index_ptr,
    tokens,
    experts,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    inside = (token[:, None] < tokens) & (expert[None, :] < experts)
    score_row = score_ptr + token[:, None].to(tl.int64) * experts
    score = tl.load(score_row + expert[None, :], mask=inside, other=0.0)
    if HAS_BIAS:
        score += tl.load(bias_ptr + expert, mask=expert < experts, other=0.0)[None, :]
    # Treat NaN as the best score, as a sort does. NaN equals nothing, so its index would be out of range below.
    score = tl.where(score != score, float("inf"), score)
    score = tl.where(expert[None, :] < experts, score, float("-inf"))
    for slot in tl.static_range(TOP_K):
        best_score = tl.max(score, 1)
        candidate = tl.where(score == best_score[:, None], expert[None, :], BLOCK_E)
        index = tl.min(candidate, 1)
        tl.store(index_ptr + token.to(tl.int64) * TOP_K + slot, index.to(tl.int64), mask=token < tokens)
        # Exclude the selected expert from the next slots.
        score = tl.where(expert[None, :] == index[:, None], float("-inf"), score)


def select_top_experts(scores_TE: Tensor, bias: Tensor | None, top_k: int) -> Tensor:
    """Return the `top_k` best experts of each token, int64 [tokens, top_k]. Ties go to the lowest index.

    Args:
        scores_TE: scores [tokens, experts], contiguous, finite or NaN.
        bias: added to the scores [experts]; None: no bias.
    """
    tokens, experts = scores_TE.shape
    indices = torch.empty((tokens, top_k), dtype=torch.int64, device=scores_TE.device)
    block_e = max(16, next_power_of_2(experts))
    block_t = max(1, TILE_ELEMENTS // block_e)
    _select_kernel[(cdiv(tokens, block_t),)](
        scores_TE,
        bias,
        indices,
        tokens,
        experts,
        TOP_K=top_k,
        HAS_BIAS=bias is not None,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
    )
    return indices


@jit
def _count_kernel(index_ptr, count_ptr, choices, first, experts, blocks, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """Count how often each of the experts from `first` is among BLOCK choices; see `_count_blocks`."""
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, BLOCK_E)
    local = tl.load(index_ptr + choice, mask=choice < choices, other=first - 1).to(tl.int32) - first
    is_expert = (local[:, None] == expert[None, :]).to(tl.int32)
    tl.store(count_ptr + expert * blocks + tl.program_id(0), tl.sum(is_expert, 0), mask=expert < experts)


@jit
def _place_kernel(
    index_ptr,
    start_ptr,
    row_ptr,
    token_ptr,
    slot_ptr,
    choices,
    first,
    experts,
    blocks,
    top_k,
    rows,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Store the row of each of BLOCK choices, and token and slot of each row; see `sort_choices`.

    A local index is the index of an expert minus `first`. The rank of a choice is the number of the block's earlier
    choices of the same expert.

    start_ptr: first row of each expert's choices in each block [experts, blocks].
    """
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, BLOCK_E)
    local = tl.load(index_ptr + choice, mask=choice < choices, other=first - 1).to(tl.int32) - first
    is_expert = (local[:, None] == expert[None, :]) & (expert[None, :] < experts)
    rank = tl.cumsum(is_expert.to(tl.int32), 0) - 1
    start = tl.load(start_ptr + expert * blocks + tl.program_id(0), mask=expert < experts, other=0)
    row = tl.sum(tl.where(is_expert, start[None, :] + rank, 0), 1)
    is_row = (local >= 0) & (local < experts) & (row < rows)
    tl.store(row_ptr + choice, tl.where(is_row, row, rows), mask=choice < choices)
    tl.store(token_ptr + row, choice // top_k, mask=is_row)
    tl.store(slot_ptr + row, choice % top_k, mask=is_row)


def _count_blocks(indices_TK: Tensor, first: int, count: int) -> Tensor:
    """Return how often each block of PROGRAM_CHOICES choices has each expert, int32 [count, blocks].

    The dimension of blocks is last, because a scan along the first dimension would take ten times as long.
    """
    choices = indices_TK.numel()
    # Without tokens there is one block without choices.
    blocks = max(1, cdiv(choices, PROGRAM_CHOICES))
    counts = torch.empty((count, blocks), dtype=torch.int32, device=indices_TK.device)
    _count_kernel[(blocks,)](
        indices_TK, counts, choices, first, count, blocks, BLOCK=PROGRAM_CHOICES, BLOCK_E=max(2, next_power_of_2(count))
    )
    return counts


def count_choices(indices_TK: Tensor, experts: int) -> Tensor:
    """Return how often each expert was chosen, int64 [experts]. `indices_TK` [tokens, top_k] must be contiguous."""
    return _count_blocks(indices_TK, 0, experts).sum(1)


class SortedChoices(NamedTuple):
    """Choices of a range of experts, sorted by expert and then by token. Each sorted choice is a row.

    Attributes:
        offsets: first row of each expert and end of the last expert, at most the capacity, int32 [count + 1].
        row_tokens, row_slots: token and slot of each row, int32 [rows]; undefined beyond the last offset.
        rows_TK: row of each token's slot, or the capacity for choices without a row, int32 [tokens, top_k].
        needed_rows: number of choices of these experts, which may exceed the capacity, int32 [].
    """

    offsets: Tensor
    row_tokens: Tensor
    row_slots: Tensor
    rows_TK: Tensor
    needed_rows: Tensor


def sort_choices(indices_TK: Tensor, first: int, count: int, rows: int) -> SortedChoices:
    """Sort the choices of experts `first:first + count` by expert and then by token (a stable counting sort).

    Args:
        indices_TK: experts of each token [tokens, top_k], contiguous.
        rows: capacity. Sorted choices beyond it get no row.
    """
    device = indices_TK.device
    counts = _count_blocks(indices_TK, first, count)
    ends = counts.cumsum(1, dtype=torch.int32)
    offsets = torch.zeros(count + 1, dtype=torch.int32, device=device)
    torch.cumsum(ends[:, -1], 0, dtype=torch.int32, out=offsets[1:])
    starts = ends - counts
    starts += offsets[:-1].unsqueeze(1)
    token = torch.empty(rows, dtype=torch.int32, device=device)
    slot = torch.empty(rows, dtype=torch.int32, device=device)
    row = torch.empty(indices_TK.shape, dtype=torch.int32, device=device)
    blocks = counts.shape[1]
    _place_kernel[(blocks,)](
        indices_TK,
        starts,
        row,
        token,
        slot,
        indices_TK.numel(),
        first,
        count,
        blocks,
        indices_TK.shape[1],
        rows,
        BLOCK=PROGRAM_CHOICES,
        BLOCK_E=max(2, next_power_of_2(count)),
    )
    return SortedChoices(offsets.clamp(max=rows), token, slot, row, offsets[-1])


@jit
def _split_kernel(x_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
    out = out_ptr + row[:, None].to(tl.int64) * (3 * columns) + column[None, :]
    for summand in tl.static_range(3):
        rounded = x.to(tl.bfloat16)
        tl.store(out + summand * columns, rounded, mask=inside)
        x -= rounded.to(tl.float32)


def split_float32(x: Tensor) -> Tensor:
    """Return each float32 number as three bfloat16 summands [rows, 3 * columns], whose sum has all 24 bits of it.

    Args:
        x: [rows, columns], float32, contiguous.
    """
    rows, columns = x.shape
    summands = torch.empty(rows, 3 * columns, dtype=torch.bfloat16, device=x.device)
    width = max(2, next_power_of_2(columns))
    block = max(1, TILE_ELEMENTS // width)
    _split_kernel[(cdiv(rows, block),)](x, summands, rows, columns, ROWS=block, COLUMNS=width)
    return summands


@jit
def _combine_kernel(
    x_ptr,
    row_ptr,
    weight_ptr,
    out_ptr,
    tokens,
    columns,
    rows,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute a tile of `sum_rows`."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_token = token < tokens
    is_column = column < columns
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for slot in tl.static_range(TOP_K):
        choice = token.to(tl.int64) * TOP_K + slot
        row = tl.load(row_ptr + choice, mask=is_token, other=rows)
        inside = (row < rows)[:, None] & is_column[None, :]
        summand = tl.load(x_ptr + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
        summand = summand.to(tl.float32)
        if HAS_WEIGHTS:
            summand *= tl.load(weight_ptr + choice, mask=is_token, other=0.0)[:, None]
        total += summand
    out = out_ptr + token[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(out, total, mask=is_token[:, None] & is_column[None, :])


def sum_rows(rows_RC: Tensor, row_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Return the sum of each token's rows in the order of its slots, [tokens, columns] in the type of the rows.

    Args:
        rows_RC: [rows, columns], contiguous.
        row_TK: row of each token's slot, or at least `rows` for slots without a row, int32 [tokens, top_k].
        weights_TK: factors of the rows, float32 [tokens, top_k]; None: all 1.
    """
    rows, columns = rows_RC.shape
    tokens, top_k = row_TK.shape
    out = rows_RC.new_empty(tokens, columns)
    block_c = min(1024, next_power_of_2(columns))
    block_t = max(1, 1024 // block_c)
    _combine_kernel[(cdiv(tokens, block_t), cdiv(columns, block_c))](
        rows_RC,
        row_TK,
        weights_TK,
        out,
        tokens,
        columns,
        rows,
        TOP_K=top_k,
        HAS_WEIGHTS=weights_TK is not None,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
    )
    return out


@jit
def _activation_gradient_kernel(
    inner_ptr,
    dy_ptr,
    weight_ptr,
    token_ptr,
    slot_ptr,
    end_ptr,
    d_inner_ptr,
    weighted_ptr,
    d_weight_ptr,
    width,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute `compute_activation_gradient` for BLOCK_R rows, BLOCK_C columns at a time.

    weighted_ptr: the activation times the row's weight.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_row = row < tl.load(end_ptr)
    token = tl.load(token_ptr + row, mask=is_row, other=0).to(tl.int64)
    slot = tl.load(slot_ptr + row, mask=is_row, other=0)
    choice = token * TOP_K + slot
    weight = tl.load(weight_ptr + choice, mask=is_row, other=0.0)[:, None]
    row_64 = row[:, None].to(tl.int64)
    d_weight = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, width, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        inside = is_row[:, None] & (column[None, :] < width)
        offset = row_64 * width + column[None, :]
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            # A row of `inner` is [gate | up].
            gate_offset = row_64 * 2 * width + column[None, :]
            x = tl.load(inner_ptr + gate_offset, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(inner_ptr + gate_offset + width, mask=inside, other=0.0).to(tl.float32)
            if TANH:
                activated_gate, derivative = gelu_with_derivative(x, TANH, NARROW)
            else:
                sigmoid = tl.sigmoid(x)
                activated_gate = x * sigmoid
                derivative = sigmoid * (1.0 + x * (1.0 - sigmoid))
            activated = activated_gate * up
            tl.store(d_inner_ptr + gate_offset, dy * weight * up * derivative, mask=inside)
            tl.store(d_inner_ptr + gate_offset + width, dy * weight * activated_gate, mask=inside)
        else:
            x = tl.load(inner_ptr + offset, mask=inside, other=0.0).to(tl.float32)
            activated, derivative = gelu_with_derivative(x, TANH, NARROW)
            tl.store(d_inner_ptr + offset, dy * weight * derivative, mask=inside)
        d_weight += activated * dy
        tl.store(weighted_ptr + offset, activated * weight, mask=inside)
    tl.store(d_weight_ptr + choice, tl.sum(d_weight, 1), mask=is_row)


# Activations that the kernel supports: (is gated, uses the tanh approximation).
FUSED_ACTIVATIONS = {
    "gelu": (False, False),
    "gelu_tanh": (False, True),
    "swiglu": (True, False),
    "geglu_tanh": (True, True),
}


def compute_activation_gradient(
    kind: str, inner: Tensor, dy: Tensor, weights_TK: Tensor, token: Tensor, slot: Tensor, end: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients between the two GEMMs of experts in one pass.

    Args:
        kind: an activation of FUSED_ACTIVATIONS.
        inner: output of the first GEMM [rows, columns], contiguous.
        dy: gradient of the second GEMM's input, not multiplied by the rows' weights [rows, width], contiguous.
        weights_TK: weights of each token's experts, float32 [tokens, top_k].
        token, slot: token and slot of each row, int32 [rows].
        end: number of rows in use, int32 [1].

    Returns:
        The gradient of `inner`, the activation times the rows' weights [rows, width], and the gradient of the weights,
        float32 [tokens, top_k] (0 for slots without a row). Rows beyond `end` are undefined.
    """
    rows, width = dy.shape
    gated, tanh = FUSED_ACTIVATIONS[kind]
    d_inner = torch.empty_like(inner)
    weighted = torch.empty_like(dy)
    d_weights = torch.zeros_like(weights_TK)
    if not rows:
        return d_inner, weighted, d_weights
    block_c = min(512, next_power_of_2(width))
    block_r = max(1, 2048 // block_c)
    _activation_gradient_kernel[(cdiv(rows, block_r),)](
        inner,
        dy,
        weights_TK,
        token,
        slot,
        end,
        d_inner,
        weighted,
        d_weights,
        width,
        TOP_K=weights_TK.shape[1],
        GATED=gated,
        TANH=tanh,
        NARROW=inner.element_size() < 4,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
    )
    return d_inner, weighted, d_weights
