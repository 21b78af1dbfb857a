"""LayerNorm and RMSNorm over the last dimension, alone or fused with the residual addition before them.

The kernels hold a row in registers, in one or two blocks of columns. Forward reads x once, and backward reads x and dy
once. Weight gradients are partial sums in a fixed order, so that repeated runs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale import torch_private
from megascale.ops.amax import allocate_amax, attach_amax, compute_magnitude_bits, update_amax, view_as_int32
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.gradient_sink import get_tracked
from megascale.ops.reduce import (
    MAX_PARTIAL_SUMS,
    accumulate_gradients,
    compute_bias_gradient,
    divide_rows,
    flatten_rows,
)

NormKind = Literal["layernorm", "rmsnorm"]

MAX_WIDTH = 32768  # A row must fit a program's registers.
MAX_BLOCK_WITH_BIAS_SUM = 4096  # With wider blocks the registers cannot also hold the gradient of x_bias.


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) * weight + bias, with statistics in at least float32."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight, with statistics in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def add_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: NormKind, x_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `add_norm` in plain PyTorch."""
    total = residual + (x if x_bias is None else x + x_bias)
    if kind == "rmsnorm":
        return total, rms_norm_reference(total, weight, eps)
    return total, layer_norm_reference(total, weight, bias, eps)


@jit
def _load_column(ptr, column, width):
    """Load a vector over the columns in float32."""
    return tl.load(ptr + column, mask=column < width, other=0.0).to(tl.float32)


@jit
def _load_block(ptr, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(ptr, mask=mask, other=0.0)
    return tl.load(ptr)


@jit
def _store_block(ptr, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(ptr, value, mask=mask)
    else:
        tl.store(ptr, value)


@jit
def _load_sum(
    x_ptr,
    residual_ptr,
    bias,
    total_ptr,
    mask,
    HAS_RESIDUAL: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load x in float32. With HAS_RESIDUAL, store total = x + residual + bias and return total.

    The returned total is rounded to the stored type, so that forward and backward use the same number.
    """
    x = _load_block(x_ptr, mask, MASKED).to(tl.float32)
    if HAS_RESIDUAL:
        x += _load_block(residual_ptr, mask, MASKED)
        if HAS_X_BIAS:
            x += bias
        stored = x.to(total_ptr.dtype.element_ty)
        _store_block(total_ptr, stored, mask, MASKED)
        x = stored.to(tl.float32)
    return x


@jit
def _forward_kernel(
    x_ptr,
    residual_ptr,
    x_bias_ptr,
    total_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    amax_ptr,
    rows,
    width,
    stride,
    residual_stride,
    eps,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise ROWS rows in one block of columns, after the residual addition if HAS_RESIDUAL; see `_launch_forward`.

    CENTRE: LayerNorm, which subtracts the mean.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    row_64 = row[:, None].to(tl.int64)
    offset = row_64 * width + column[None, :]
    x_bias = 0.0
    if HAS_X_BIAS:
        x_bias = _load_column(x_bias_ptr, column, width)[None, :]
    if HAS_RESIDUAL:
        residual_ptr += row_64 * residual_stride + column[None, :]
    x = _load_sum(
        x_ptr + row_64 * stride + column[None, :],
        residual_ptr,
        x_bias,
        total_ptr + offset,
        inside,
        HAS_RESIDUAL,
        HAS_X_BIAS,
        True,
    )
    if HAS_RESIDUAL:
        x = tl.where(inside, x, 0.0)
    weight = _load_column(weight_ptr, column, width)
    if CENTRE:
        mean = tl.sum(x, 1) / width
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = x * rstd[:, None] * weight[None, :]
    if HAS_BIAS:
        y += _load_column(bias_ptr, column, width)[None, :]
    tl.store(y_ptr + offset, y, mask=inside)
    if AMAX:
        update_amax(amax_ptr, compute_magnitude_bits(y, inside, y_ptr.dtype.element_ty))


@jit
def _load_rows(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, row, end_row, column, width, dy_stride, x_stride, CENTRE: tl.constexpr
):
    """Load dy and x [rows, columns] in their stored types, and the rows' mean (0 if not CENTRE) and 1 / deviation."""
    inside = (row[:, None] < end_row) & (column[None, :] < width)
    row_64 = row[:, None].to(tl.int64)
    dy = tl.load(dy_ptr + row_64 * dy_stride + column[None, :], mask=inside, other=0.0)
    x = tl.load(x_ptr + row_64 * x_stride + column[None, :], mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < end_row, other=0.0)
    mean = tl.zeros_like(rstd)
    if CENTRE:
        mean = tl.load(mean_ptr + row, mask=row < end_row, other=0.0)
    return dy, x, mean, rstd


@jit
def _store_sums(
    partial_ptr,
    column,
    mask,
    width,
    d_weight,
    d_bias,
    d_x_bias,
    HAS_BIAS: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store a program's partial sums of the gradients of weight, bias and x_bias, next to each other.

    ROWS: the gradients are [rows of a tile, columns]. Summing each over rows just before its store saves registers.
    """
    gradient_count = (2 if HAS_BIAS else 1) + (1 if HAS_X_BIAS else 0)
    target = partial_ptr + tl.program_id(0) * gradient_count * width + column
    _store_block(target, tl.sum(d_weight, 0) if ROWS else d_weight, mask, MASKED)
    if HAS_BIAS:
        _store_block(target + width, tl.sum(d_bias, 0) if ROWS else d_bias, mask, MASKED)
    if HAS_X_BIAS:
        d_x_bias = tl.sum(d_x_bias, 0) if ROWS else d_x_bias
        _store_block(target + (gradient_count - 1) * width, d_x_bias, mask, MASKED)


@jit
def _backward_kernel(
    dy_ptr,
    d_total_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    amax_ptr,
    rows,
    width,
    dy_stride,
    d_total_stride,
    x_stride,
    program_rows,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute dx of `program_rows` rows, and their partial sums of the gradients of parameters; see `_launch_backward`.

    HAS_RESIDUAL: d_total_ptr has the gradient of the norm's input from its other readers.
    """
    column = tl.arange(0, BLOCK)
    weight = _load_column(weight_ptr, column, width)
    d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    d_x_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    amax_bits = tl.zeros((ROWS,), tl.int32)  # One number per row saves registers.
    first_row = tl.program_id(0) * program_rows
    end_row = tl.minimum(first_row + program_rows, rows)
    # Load the next rows while these rows are reduced, because a program with wide rows is alone on its SM.
    row = first_row + tl.arange(0, ROWS)
    prefetched = _load_rows(dy_ptr, x_ptr, mean_ptr, rstd_ptr, row, end_row, column, width, dy_stride, x_stride, CENTRE)
    for start in range(first_row, end_row, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < end_row) & (column[None, :] < width)
        dy, x, mean, rstd = prefetched
        if HAS_RESIDUAL:
            # Load d_total before it is needed, like the next rows.
            d_total_block = d_total_ptr + row[:, None].to(tl.int64) * d_total_stride + column[None, :]
            d_total = tl.load(d_total_block, mask=inside, other=0.0)
        prefetched = _load_rows(
            dy_ptr, x_ptr, mean_ptr, rstd_ptr, row + ROWS, end_row, column, width, dy_stride, x_stride, CENTRE
        )
        dy = dy.to(tl.float32)
        normed = tl.where(inside, (x.to(tl.float32) - mean[:, None]) * rstd[:, None], 0.0)
        scaled = dy * weight[None, :]
        shift = normed * (tl.sum(scaled * normed, 1) / width)[:, None]
        if CENTRE:
            shift += (tl.sum(scaled, 1) / width)[:, None]
        dx = (scaled - shift) * rstd[:, None]
        if HAS_RESIDUAL:
            dx += d_total.to(tl.float32)
        tl.store(dx_ptr + row[:, None].to(tl.int64) * width + column[None, :], dx, mask=inside)
        if AMAX:
            amax_bits = tl.maximum(amax_bits, tl.max(compute_magnitude_bits(dx, inside, dx_ptr.dtype.element_ty), 1))
        if HAS_X_BIAS:
            d_x_bias += tl.where(inside, dx, 0.0)
        d_weight += dy * normed
        if HAS_BIAS:
            d_bias += dy
    _store_sums(
        partial_ptr, column, column < width, width, d_weight, d_bias, d_x_bias, HAS_BIAS, HAS_X_BIAS, True, True
    )
    if AMAX:
        update_amax(amax_ptr, amax_bits)


# The next kernels process one row at a time, in two blocks of columns: a full block, and a tail with a mask.


@jit
def _load_split_sum(
    x_ptr,
    residual_ptr,
    x_bias_ptr,
    total_ptr,
    row,
    column,
    mask,
    width,
    stride,
    residual_stride,
    HAS_RESIDUAL: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Compute `_load_sum` for one block of columns of a row. MASKED: `mask` applies, because the block is the tail."""
    x_bias = 0.0
    if HAS_X_BIAS:
        x_bias = _load_block(x_bias_ptr + column, mask, MASKED).to(tl.float32)
    if HAS_RESIDUAL:
        residual_ptr += row * residual_stride + column
    return _load_sum(
        x_ptr + row * stride + column,
        residual_ptr,
        x_bias,
        total_ptr + row * width + column,
        mask,
        HAS_RESIDUAL,
        HAS_X_BIAS,
        MASKED,
    )


@jit
def _store_split_norm(
    x, rstd, weight_ptr, bias_ptr, y_ptr, row, column, mask, width, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr
):
    """Store and return the norm of one block of columns."""
    y = x * rstd * _load_block(weight_ptr + column, mask, MASKED).to(tl.float32)
    if HAS_BIAS:
        y += _load_block(bias_ptr + column, mask, MASKED).to(tl.float32)
    _store_block(y_ptr + row * width + column, y, mask, MASKED)
    return y


@jit
def _forward_split_kernel(
    x_ptr,
    residual_ptr,
    x_bias_ptr,
    total_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    amax_ptr,
    width,
    stride,
    residual_stride,
    eps,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Normalise one row in two blocks of columns. `inside` masks the tail."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    column_tail = BLOCK + tl.arange(0, TAIL)
    inside = column_tail < width
    x = _load_split_sum(
        x_ptr,
        residual_ptr,
        x_bias_ptr,
        total_ptr,
        row,
        column,
        inside,
        width,
        stride,
        residual_stride,
        HAS_RESIDUAL,
        HAS_X_BIAS,
        False,
    )
    x_tail = _load_split_sum(
        x_ptr,
        residual_ptr,
        x_bias_ptr,
        total_ptr,
        row,
        column_tail,
        inside,
        width,
        stride,
        residual_stride,
        HAS_RESIDUAL,
        HAS_X_BIAS,
        True,
    )
    if CENTRE:
        mean = (tl.sum(x, 0) + tl.sum(x_tail, 0)) / width
        tl.store(mean_ptr + row, mean)
        x -= mean
        x_tail = tl.where(inside, x_tail - mean, 0.0)
    rstd = 1.0 / tl.sqrt((tl.sum(x * x, 0) + tl.sum(x_tail * x_tail, 0)) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    y = _store_split_norm(x, rstd, weight_ptr, bias_ptr, y_ptr, row, column, inside, width, HAS_BIAS, False)
    y_tail = _store_split_norm(
        x_tail, rstd, weight_ptr, bias_ptr, y_ptr, row, column_tail, inside, width, HAS_BIAS, True
    )
    if AMAX:
        amax_bits = tl.max(compute_magnitude_bits(y, column >= 0, y_ptr.dtype.element_ty))
        update_amax(amax_ptr, tl.maximum(compute_magnitude_bits(y_tail, inside, y_ptr.dtype.element_ty), amax_bits))


@jit
def _sum_row(scaled, normed, CENTRE: tl.constexpr):
    """Return the sums over a block of columns of scaled x normed and of scaled (0 if not CENTRE), in one reduction."""
    if CENTRE:
        return tl.split(tl.sum(tl.join(scaled * normed, scaled), 0))
    return tl.sum(scaled * normed, 0), 0.0


@jit
def _backward_split_kernel(
    dy_ptr,
    d_total_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    amax_ptr,
    rows,
    width,
    dy_stride,
    d_total_stride,
    x_stride,
    program_rows,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Compute `_backward_kernel` for rows in two blocks of columns. `inside` masks the tail."""
    column = tl.arange(0, BLOCK)
    column_tail = BLOCK + tl.arange(0, TAIL)
    inside = column_tail < width
    weight = tl.load(weight_ptr + column).to(tl.float32)
    weight_tail = tl.load(weight_ptr + column_tail, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    d_x_bias = tl.zeros((BLOCK,), tl.float32)
    d_weight_tail = tl.zeros((TAIL,), tl.float32)
    d_bias_tail = tl.zeros((TAIL,), tl.float32)
    d_x_bias_tail = tl.zeros((TAIL,), tl.float32)
    amax_bits = tl.zeros((BLOCK,), tl.int32)
    amax_bits_tail = tl.zeros((TAIL,), tl.int32)
    first_row = tl.program_id(0).to(tl.int64) * program_rows
    end_row = tl.minimum(first_row + program_rows, rows)
    dy = tl.load(dy_ptr + first_row * dy_stride + column)
    dy_tail = tl.load(dy_ptr + first_row * dy_stride + column_tail, mask=inside, other=0.0)
    x = tl.load(x_ptr + first_row * x_stride + column)
    x_tail = tl.load(x_ptr + first_row * x_stride + column_tail, mask=inside, other=0.0)
    for row in range(first_row, end_row):
        # All loads precede the sums, also those of the next row, because the barrier of a sum would delay them.
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if CENTRE:
            mean = tl.load(mean_ptr + row)
        if HAS_RESIDUAL:
            d_total = tl.load(d_total_ptr + row * d_total_stride + column)
            d_total_tail = tl.load(d_total_ptr + row * d_total_stride + column_tail, mask=inside, other=0.0)
        next_row = tl.minimum(row + 1, end_row - 1)
        dy_next = tl.load(dy_ptr + next_row * dy_stride + column)
        dy_next_tail = tl.load(dy_ptr + next_row * dy_stride + column_tail, mask=inside, other=0.0)
        x_next = tl.load(x_ptr + next_row * x_stride + column)
        x_next_tail = tl.load(x_ptr + next_row * x_stride + column_tail, mask=inside, other=0.0)
        dy_wide, dy_wide_tail = dy.to(tl.float32), dy_tail.to(tl.float32)
        normed = (x.to(tl.float32) - mean) * rstd
        normed_tail = tl.where(inside, (x_tail.to(tl.float32) - mean) * rstd, 0.0)
        scaled, scaled_tail = dy_wide * weight, dy_wide_tail * weight_tail
        dot, scaled_sum = _sum_row(scaled, normed, CENTRE)
        dot_tail, scaled_sum_tail = _sum_row(scaled_tail, normed_tail, CENTRE)
        if CENTRE:
            scaled_sum = (scaled_sum + scaled_sum_tail) / width
        dot = (dot + dot_tail) / width
        dx = (scaled - normed * dot - scaled_sum) * rstd
        dx_tail = (scaled_tail - normed_tail * dot - scaled_sum) * rstd
        if HAS_RESIDUAL:
            dx += d_total.to(tl.float32)
            dx_tail += d_total_tail.to(tl.float32)
        tl.store(dx_ptr + row * width + column, dx)
        tl.store(dx_ptr + row * width + column_tail, dx_tail, mask=inside)
        if AMAX:
            amax_bits = tl.maximum(amax_bits, compute_magnitude_bits(dx, column >= 0, dx_ptr.dtype.element_ty))
            amax_bits_tail = tl.maximum(
                amax_bits_tail, compute_magnitude_bits(dx_tail, inside, dx_ptr.dtype.element_ty)
            )
        if HAS_X_BIAS:
            d_x_bias += dx
            d_x_bias_tail += dx_tail
        d_weight += dy_wide * normed
        d_weight_tail += dy_wide_tail * normed_tail
        if HAS_BIAS:
            d_bias += dy_wide
            d_bias_tail += dy_wide_tail
        dy, dy_tail = dy_next, dy_next_tail
        x, x_tail = x_next, x_next_tail
    _store_sums(partial_ptr, column, inside, width, d_weight, d_bias, d_x_bias, HAS_BIAS, HAS_X_BIAS, False, False)
    _store_sums(
        partial_ptr,
        column_tail,
        inside,
        width,
        d_weight_tail,
        d_bias_tail,
        d_x_bias_tail,
        HAS_BIAS,
        HAS_X_BIAS,
        True,
        False,
    )
    if AMAX:
        update_amax(amax_ptr, tl.maximum(amax_bits_tail, tl.max(amax_bits)))


@dataclass(frozen=True)
class _Tile:
    """Shape of the work of one program.

    Attributes:
        block, tail: columns of the two blocks of a row; tail is 0 if one block holds the row.
        rows: number of rows that a program holds in registers.
        warps: warps per program.
        sums_x_bias: whether the backward kernel also sums the gradient of x_bias.
        program_rows, programs: rows per program, and number of programs, in backward.
    """

    block: int
    tail: int
    rows: int
    warps: int
    sums_x_bias: bool = False
    program_rows: int = 0
    programs: int = 0


@cache
def _choose_forward_tile(width: int) -> _Tile:
    """Return the tile of forward for rows of `width` columns.

    A block has a power of two of columns. One block of 8,192 for 5,120 columns would leave 3 of 8 threads idle, so
    such rows have two blocks.
    """
    block = next_power_of_2(width)
    tail = 0
    if block > 4096 and 4 * width <= 3 * block:
        block //= 2
        tail = next_power_of_2(width - block)
    return _Tile(block, tail, rows=max(1, 1024 // block), warps=min(16, max(1, block // 512)))


@cache
def _choose_backward_tile(T: int, H: int, has_bias: bool, has_x_bias: bool) -> _Tile:
    """Return the tile of backward for T rows of H columns."""
    tile = _choose_forward_tile(H)
    block = tile.block
    warps = tile.warps
    rows = max(tile.rows, 4096 // block)
    # For wider rows the gradient of x_bias does not fit in registers, and another pass sums dx.
    sums_x_bias = has_x_bias and block <= MAX_BLOCK_WITH_BIAS_SUM
    elements = rows * (block + tile.tail)
    gradient_count = 1 + int(has_bias) + int(sums_x_bias)
    # An SM has registers for only one program with so many sums. More programs would only add partial sums.
    is_alone = warps >= 8 and (elements * gradient_count > 8192 or elements >= 8192)
    max_programs = MAX_PARTIAL_SUMS
    if is_alone:
        max_programs = MAX_PARTIAL_SUMS // 2
    # Small programs with few warps have more loads in flight, and their sums wait for fewer warps.
    if block < 2048:
        rows = 2048 // block
        warps = 4
        max_programs = 4 * MAX_PARTIAL_SUMS
    program_rows, programs = divide_rows(T, rows, max_programs)
    return _Tile(block, tile.tail, rows, warps, sums_x_bias, program_rows, programs)


def _launch_forward(
    x_TH: Tensor,
    residual_TH: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centre: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch forward.

    Args:
        residual_TH: added to x before the norm; None: the norm alone.
        x_bias: added to x before the norm, only with a residual.
        centre: whether the norm is LayerNorm instead of RMSNorm.
        amax: float32 [], which is raised to the amax of the norm.

    Returns:
        The input of the norm (x, or the sum), the norm, and the rows' mean and 1 / deviation [2, T].
    """
    T, H = x_TH.shape
    y = torch.empty((T, H), dtype=x_TH.dtype, device=x_TH.device)
    total = x_TH
    residual_stride = 0
    if residual_TH is not None:
        total = torch.empty_like(y)
        residual_stride = residual_TH.stride(0)
    statistics = torch.empty((2, T), dtype=torch.float32, device=x_TH.device)
    tile = _choose_forward_tile(H)
    tensors = (x_TH, residual_TH, x_bias, total, weight, bias, y, statistics[0], statistics[1], view_as_int32(amax))
    numbers = (H, x_TH.stride(0), residual_stride, eps)
    constants = {
        "CENTRE": centre,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual_TH is not None,
        "HAS_X_BIAS": x_bias is not None,
        "AMAX": amax is not None,
        "BLOCK": tile.block,
        "num_warps": tile.warps,
    }
    if tile.tail:
        _forward_split_kernel[(T,)](*tensors, *numbers, **constants, TAIL=tile.tail)
    else:
        _forward_kernel[(cdiv(T, tile.rows),)](*tensors, T, *numbers, **constants, ROWS=tile.rows)
    return total, y, statistics


def _launch_backward(
    dy_TH: Tensor,
    d_total_TH: Tensor | None,
    x_TH: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    centre: bool,
    x_bias: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Launch backward.

    Args:
        d_total_TH: gradient of the norm's input from its other readers, which is added to the result; None: no others.
        x_TH: input of the norm.
        statistics: mean and 1 / deviation of each row [2, T].
        amax: float32 [], which is raised to the amax of the first result.

    Returns:
        The gradients of the norm's input, weight, bias and x_bias; the last three as in `accumulate_gradients`.
    """
    T, H = x_TH.shape
    dx = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    d_total_stride = 0 if d_total_TH is None else d_total_TH.stride(0)
    tile = _choose_backward_tile(T, H, bias is not None, x_bias is not None)
    parameters = [weight]
    if bias is not None:
        parameters.append(bias)
    if x_bias is not None and tile.sums_x_bias:
        parameters.append(x_bias)
    partial = torch.empty((tile.programs, len(parameters) * H), dtype=torch.float32, device=x_TH.device)
    constants = {
        "CENTRE": centre,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": d_total_TH is not None,
        "HAS_X_BIAS": tile.sums_x_bias,
        "AMAX": amax is not None,
        "BLOCK": tile.block,
        "num_warps": tile.warps,
    }
    if tile.tail:
        kernel = _backward_split_kernel
        constants["TAIL"] = tile.tail
    else:
        kernel = _backward_kernel
        constants["ROWS"] = tile.rows
    kernel[(tile.programs,)](
        dy_TH,
        d_total_TH,
        x_TH,
        weight,
        statistics[0],
        statistics[1],
        dx,
        partial,
        view_as_int32(amax),
        T,
        H,
        dy_TH.stride(0),
        d_total_stride,
        x_TH.stride(0),
        tile.program_rows,
        **constants,
    )
    d_x_bias = None
    if not tile.sums_x_bias:
        d_x_bias = compute_bias_gradient(x_bias, dx)
    gradients = accumulate_gradients(partial, *parameters)
    if tile.sums_x_bias:
        d_x_bias = gradients.pop()
    d_bias = None if bias is None else gradients[1]
    return dx, gradients[0], d_bias, d_x_bias


@torch_private.call_directly
class _Norm(torch.autograd.Function):
    """LayerNorm (`centre`) or RMSNorm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tracked_weight: Tensor | None, tracked_bias: Tensor | None, args: tuple[Any, ...]
    ) -> Tensor:
        weight, bias, eps, centre = args
        amax = allocate_amax(x)
        x_TH, y, statistics = _launch_forward(flatten_rows(x), None, None, weight, bias, eps, centre, amax)
        ctx.save_for_backward(x_TH, statistics)
        ctx.args, ctx.shape = args, x.shape
        return attach_amax(y.view(x.shape), amax)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, statistics = ctx.saved_tensors
        weight, bias, _, centre = ctx.args
        dx, d_weight, d_bias, _ = _launch_backward(flatten_rows(dy), None, x_TH, weight, bias, statistics, centre)
        return dx.view(ctx.shape), d_weight, d_bias, None


@torch_private.call_directly
class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        tracked_weight: Tensor | None,
        tracked_bias: Tensor | None,
        tracked_x_bias: Tensor | None,
        args: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor]:
        weight, bias, x_bias, eps, centre = args
        amax = allocate_amax(x)
        total, y, statistics = _launch_forward(
            flatten_rows(x), flatten_rows(residual), x_bias, weight, bias, eps, centre, amax
        )
        ctx.save_for_backward(total, statistics)
        ctx.args, ctx.shape = args, x.shape
        return total.view(x.shape), attach_amax(y.view(x.shape), amax)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, statistics = ctx.saved_tensors
        weight, bias, x_bias, _, centre = ctx.args
        amax = allocate_amax(dy)
        dx, d_weight, d_bias, d_x_bias = _launch_backward(
            flatten_rows(dy), flatten_rows(d_total), total, weight, bias, statistics, centre, x_bias, amax
        )
        dx = attach_amax(dx.view(ctx.shape), amax)
        return dx, dx, d_weight, d_bias, d_x_bias, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return LayerNorm of x [..., H] with weight and bias [H], in x's shape and type."""
    if x.numel() and x.shape[-1] <= MAX_WIDTH and use_fused("layer norm", x, weight, bias):
        return _Norm.apply(x, get_tracked(x, weight), get_tracked(x, bias), (weight, bias, eps, True))
    return layer_norm_reference(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x [..., H] with weight [H], in x's shape and type."""
    if x.numel() and x.shape[-1] <= MAX_WIDTH and use_fused("rms norm", x, weight):
        return _Norm.apply(x, get_tracked(x, weight), None, (weight, None, eps, False))
    return rms_norm_reference(x, weight, eps)


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: NormKind,
    x_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return total = residual + x + x_bias and the norm of total, computed in one pass.

    Backward is one pass too, which also adds the gradient of `total` that the residual stream has.

    Args:
        x, residual: [..., H].
        weight, bias: [H]; RMSNorm has no bias.
        kind: value of model.norm.
        x_bias: [H], bias of the projection that computed x.
    """
    is_supported = x.numel() and x.shape[-1] <= MAX_WIDTH and residual.dtype == x.dtype
    if is_supported and use_fused("add norm", x, residual, weight, bias, x_bias):
        return _AddNorm.apply(
            x,
            residual,
            get_tracked(x, weight),
            get_tracked(x, bias),
            get_tracked(x, x_bias),
            (weight, bias, x_bias, eps, kind == "layernorm"),
        )
    return add_norm_reference(x, residual, weight, bias, eps, kind, x_bias)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return add_norm(x, residual, weight, bias, eps, "layernorm", x_bias)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return add_norm(x, residual, weight, bias, eps, "rmsnorm", x_bias)
