"""LayerNorm and RMSNorm over the last dimension, alone or fused with the residual addition before them.

The kernels hold a row in registers, in one block of columns or two: forward reads x once, backward x and dy once.
Weight gradients are partial sums in a fixed order, so that repeated runs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale import torch_private
from megascale.ops.amax import as_int32, attach_amax, magnitudes, new_amax_slot, update_amax
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.gradient_sink import tracked
from megascale.ops.reduce import PARTS, accumulate_gradients, bias_gradient, flat_rows, split_rows

NormKind = Literal["layernorm", "rmsnorm"]

WIDEST = 32768  # a row must fit a program's registers
WIDEST_WITH_SUM = 4096  # the widest (first) block whose registers also hold the sum for the added bias


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
def _load_column(ptr, column, width, SPLIT: tl.constexpr):
    """Load a vector over the columns in float32; the first of two blocks is always full."""
    if SPLIT:
        return tl.load(ptr + column).to(tl.float32)
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
    add_ptr,
    bias,
    total_ptr,
    mask,
    ADD: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load x in float32. With ADD, store x + add + bias and return it as stored, so that backward sees the same."""
    x = _load_block(x_ptr, mask, MASKED).to(tl.float32)
    if ADD:
        x += _load_block(add_ptr, mask, MASKED)
        if ADD_BIAS:
            x += bias
        stored = x.to(total_ptr.dtype.element_ty)
        _store_block(total_ptr, stored, mask, MASKED)
        x = stored.to(tl.float32)
    return x


@jit
def _forward_kernel(
    x_ptr,
    add_ptr,
    add_bias_ptr,
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
    add_stride,
    eps,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    row_64 = row[:, None].to(tl.int64)
    offset = row_64 * width + column[None, :]
    add_bias = 0.0
    if ADD_BIAS:
        add_bias = _load_column(add_bias_ptr, column, width, False)[None, :]
    x = _load_sum(
        x_ptr + row_64 * stride + column[None, :],
        add_ptr + row_64 * add_stride + column[None, :] if ADD else add_ptr,
        add_bias,
        total_ptr + offset,
        inside,
        ADD,
        ADD_BIAS,
        True,
    )
    if ADD:
        x = tl.where(inside, x, 0.0)
    weight = _load_column(weight_ptr, column, width, False)
    if CENTRE:
        mean = tl.sum(x, 1) / width
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = x * rstd[:, None] * weight[None, :]
    if HAS_BIAS:
        y += _load_column(bias_ptr, column, width, False)[None, :]
    tl.store(y_ptr + offset, y, mask=inside)
    if AMAX:
        update_amax(amax_ptr, magnitudes(y, inside, y_ptr.dtype.element_ty))


@jit
def _load_rows(dy_ptr, x_ptr, mean_ptr, rstd_ptr, row, last, column, width, dy_stride, x_stride, CENTRE: tl.constexpr):
    """Load dy and x [rows, columns] in their own type, mean (0 if not CENTRE) and 1 / deviation of some rows."""
    inside = (row[:, None] < last) & (column[None, :] < width)
    row_64 = row[:, None].to(tl.int64)
    dy = tl.load(dy_ptr + row_64 * dy_stride + column[None, :], mask=inside, other=0.0)
    x = tl.load(x_ptr + row_64 * x_stride + column[None, :], mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + row, mask=row < last, other=0.0)
    mean = tl.zeros_like(rstd)
    if CENTRE:
        mean = tl.load(mean_ptr + row, mask=row < last, other=0.0)
    return dy, x, mean, rstd


@jit
def _store_sums(
    part_ptr,
    column,
    mask,
    width,
    d_weight,
    d_bias,
    d_add_bias,
    HAS_BIAS: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store a program's partial sums of the gradients of weight, bias and added bias, next to each other.

    ROWS: the sums are still separate for each row of a tile. Summing each just before its store saves registers.
    """
    fields = (2 if HAS_BIAS else 1) + (1 if ADD_BIAS else 0)
    target = part_ptr + tl.program_id(0) * fields * width + column
    _store_block(target, tl.sum(d_weight, 0) if ROWS else d_weight, mask, MASKED)
    if HAS_BIAS:
        _store_block(target + width, tl.sum(d_bias, 0) if ROWS else d_bias, mask, MASKED)
    if ADD_BIAS:
        d_add_bias = tl.sum(d_add_bias, 0) if ROWS else d_add_bias
        _store_block(target + (fields - 1) * width, d_add_bias, mask, MASKED)


@jit
def _backward_kernel(
    dy_ptr,
    d_total_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    part_ptr,
    amax_ptr,
    rows,
    width,
    dy_stride,
    d_total_stride,
    x_stride,
    part_rows,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    weight = _load_column(weight_ptr, column, width, False)
    d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    d_add_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    largest = tl.zeros((ROWS,), tl.int32)  # one number per row, because registers are full
    first = tl.program_id(0) * part_rows
    last = tl.minimum(first + part_rows, rows)
    # The next rows are loaded while these are reduced, because a wide program has its SM to itself.
    row = first + tl.arange(0, ROWS)
    prefetched = _load_rows(dy_ptr, x_ptr, mean_ptr, rstd_ptr, row, last, column, width, dy_stride, x_stride, CENTRE)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < last) & (column[None, :] < width)
        dy, x, mean, rstd = prefetched
        if ADD:  # loaded before it is needed, as the next rows are
            d_total_block = d_total_ptr + row[:, None].to(tl.int64) * d_total_stride + column[None, :]
            d_total = tl.load(d_total_block, mask=inside, other=0.0)
        prefetched = _load_rows(
            dy_ptr, x_ptr, mean_ptr, rstd_ptr, row + ROWS, last, column, width, dy_stride, x_stride, CENTRE
        )
        dy = dy.to(tl.float32)
        normed = tl.where(inside, (x.to(tl.float32) - mean[:, None]) * rstd[:, None], 0.0)
        scaled = dy * weight[None, :]
        shift = normed * (tl.sum(scaled * normed, 1) / width)[:, None]
        if CENTRE:
            shift += (tl.sum(scaled, 1) / width)[:, None]
        dx = (scaled - shift) * rstd[:, None]
        if ADD:
            dx += d_total.to(tl.float32)
        tl.store(dx_ptr + row[:, None].to(tl.int64) * width + column[None, :], dx, mask=inside)
        if AMAX:
            largest = tl.maximum(largest, tl.max(magnitudes(dx, inside, dx_ptr.dtype.element_ty), 1))
        if ADD_BIAS:
            d_add_bias += tl.where(inside, dx, 0.0)
        d_weight += dy * normed
        if HAS_BIAS:
            d_bias += dy
    _store_sums(part_ptr, column, column < width, width, d_weight, d_bias, d_add_bias, HAS_BIAS, ADD_BIAS, True, True)
    if AMAX:
        update_amax(amax_ptr, largest)


# Rows in two blocks of columns, of which the first is full: one row at a time.


@jit
def _load_split_sum(
    x_ptr,
    add_ptr,
    add_bias_ptr,
    total_ptr,
    row,
    column,
    mask,
    width,
    stride,
    add_stride,
    ADD: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):
    add_bias = 0.0
    if ADD_BIAS:
        add_bias = _load_block(add_bias_ptr + column, mask, MASKED).to(tl.float32)
    if ADD:
        add_ptr += row * add_stride + column
    return _load_sum(
        x_ptr + row * stride + column,
        add_ptr,
        add_bias,
        total_ptr + row * width + column,
        mask,
        ADD,
        ADD_BIAS,
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
    add_ptr,
    add_bias_ptr,
    total_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    amax_ptr,
    width,
    stride,
    add_stride,
    eps,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Normalise one row in two blocks of columns; names of the second end with _r."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    column_r = BLOCK + tl.arange(0, TAIL)
    inside = column_r < width
    x = _load_split_sum(
        x_ptr, add_ptr, add_bias_ptr, total_ptr, row, column, inside, width, stride, add_stride, ADD, ADD_BIAS, False
    )
    x_r = _load_split_sum(
        x_ptr, add_ptr, add_bias_ptr, total_ptr, row, column_r, inside, width, stride, add_stride, ADD, ADD_BIAS, True
    )
    if CENTRE:
        mean = (tl.sum(x, 0) + tl.sum(x_r, 0)) / width
        tl.store(mean_ptr + row, mean)
        x -= mean
        x_r = tl.where(inside, x_r - mean, 0.0)
    rstd = 1.0 / tl.sqrt((tl.sum(x * x, 0) + tl.sum(x_r * x_r, 0)) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    y = _store_split_norm(x, rstd, weight_ptr, bias_ptr, y_ptr, row, column, inside, width, HAS_BIAS, False)
    y_r = _store_split_norm(x_r, rstd, weight_ptr, bias_ptr, y_ptr, row, column_r, inside, width, HAS_BIAS, True)
    if AMAX:
        largest = tl.max(magnitudes(y, column >= 0, y_ptr.dtype.element_ty))
        update_amax(amax_ptr, tl.maximum(magnitudes(y_r, inside, y_ptr.dtype.element_ty), largest))


@jit
def _sum_row(scaled, normed, CENTRE: tl.constexpr):
    """Return the sums of scaled x normed and, if CENTRE, of scaled over a block of columns, in one reduction."""
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
    part_ptr,
    amax_ptr,
    rows,
    width,
    dy_stride,
    d_total_stride,
    x_stride,
    part_rows,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Compute `_backward_kernel` for rows in two blocks of columns; names of the second end with _r."""
    column = tl.arange(0, BLOCK)
    column_r = BLOCK + tl.arange(0, TAIL)
    inside = column_r < width
    weight = tl.load(weight_ptr + column).to(tl.float32)
    weight_r = tl.load(weight_ptr + column_r, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_bias = tl.zeros((BLOCK,), tl.float32)
    d_add_bias = tl.zeros((BLOCK,), tl.float32)
    d_weight_r = tl.zeros((TAIL,), tl.float32)
    d_bias_r = tl.zeros((TAIL,), tl.float32)
    d_add_bias_r = tl.zeros((TAIL,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.int32)
    largest_r = tl.zeros((TAIL,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * part_rows
    last = tl.minimum(first + part_rows, rows)
    dy = tl.load(dy_ptr + first * dy_stride + column)
    dy_r = tl.load(dy_ptr + first * dy_stride + column_r, mask=inside, other=0.0)
    x = tl.load(x_ptr + first * x_stride + column)
    x_r = tl.load(x_ptr + first * x_stride + column_r, mask=inside, other=0.0)
    for row in range(first, last):
        # All loads are issued first, those of the next row too: a load cannot move ahead of a sum, which is a barrier.
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if CENTRE:
            mean = tl.load(mean_ptr + row)
        if ADD:
            d_total = tl.load(d_total_ptr + row * d_total_stride + column)
            d_total_r = tl.load(d_total_ptr + row * d_total_stride + column_r, mask=inside, other=0.0)
        next_row = tl.minimum(row + 1, last - 1)
        dy_next = tl.load(dy_ptr + next_row * dy_stride + column)
        dy_next_r = tl.load(dy_ptr + next_row * dy_stride + column_r, mask=inside, other=0.0)
        x_next = tl.load(x_ptr + next_row * x_stride + column)
        x_next_r = tl.load(x_ptr + next_row * x_stride + column_r, mask=inside, other=0.0)
        up, up_r = dy.to(tl.float32), dy_r.to(tl.float32)
        normed = (x.to(tl.float32) - mean) * rstd
        normed_r = tl.where(inside, (x_r.to(tl.float32) - mean) * rstd, 0.0)
        scaled, scaled_r = up * weight, up_r * weight_r
        along, offset = _sum_row(scaled, normed, CENTRE)
        along_r, offset_r = _sum_row(scaled_r, normed_r, CENTRE)
        if CENTRE:
            offset = (offset + offset_r) / width
        along = (along + along_r) / width
        dx = (scaled - normed * along - offset) * rstd
        dx_r = (scaled_r - normed_r * along - offset) * rstd
        if ADD:
            dx += d_total.to(tl.float32)
            dx_r += d_total_r.to(tl.float32)
        tl.store(dx_ptr + row * width + column, dx)
        tl.store(dx_ptr + row * width + column_r, dx_r, mask=inside)
        if AMAX:
            largest = tl.maximum(largest, magnitudes(dx, column >= 0, dx_ptr.dtype.element_ty))
            largest_r = tl.maximum(largest_r, magnitudes(dx_r, inside, dx_ptr.dtype.element_ty))
        if ADD_BIAS:
            d_add_bias += dx
            d_add_bias_r += dx_r
        d_weight += up * normed
        d_weight_r += up_r * normed_r
        if HAS_BIAS:
            d_bias += up
            d_bias_r += up_r
        dy, dy_r = dy_next, dy_next_r
        x, x_r = x_next, x_next_r
    _store_sums(part_ptr, column, inside, width, d_weight, d_bias, d_add_bias, HAS_BIAS, ADD_BIAS, False, False)
    _store_sums(part_ptr, column_r, inside, width, d_weight_r, d_bias_r, d_add_bias_r, HAS_BIAS, ADD_BIAS, True, False)
    if AMAX:
        update_amax(amax_ptr, tl.maximum(largest_r, tl.max(largest)))


@dataclass(frozen=True)
class _Tile:
    """Shape of the work of one program.

    Attributes:
        block, tail: columns of the two blocks of a row; tail is 0 where one block holds the row.
        rows: rows at a time.
        warps: warps of a program.
        sums_added_bias: whether backward sums the gradient of the added bias.
        part_rows, parts: rows per program, and programs, in backward.
    """

    block: int
    tail: int
    rows: int
    warps: int
    sums_added_bias: bool = False
    part_rows: int = 0
    parts: int = 0


@cache
def _tile(width: int) -> _Tile:
    """Return the tile for rows of `width` in forward.

    A block is a power of two. 5,120 columns in one of 8,192 would leave three of eight threads idle.
    """
    block, tail = next_power_of_2(width), 0
    if block > 4096 and 4 * width <= 3 * block:
        block //= 2
        tail = next_power_of_2(width - block)
    return _Tile(block, tail, rows=max(1, 1024 // block), warps=min(16, max(1, block // 512)))


@cache
def _backward_tile(T: int, H: int, has_bias: bool, has_added_bias: bool) -> _Tile:
    """Return the tile for T rows of width H in backward."""
    tile = _tile(H)
    block, warps = tile.block, tile.warps
    rows = max(tile.rows, 4096 // block)
    # The sum over dx of wide rows does not fit the registers and takes another pass.
    sums_added_bias = has_added_bias and block <= WIDEST_WITH_SUM
    elements = rows * (block + tile.tail)
    sums = 1 + has_bias + sums_added_bias
    # An SM has room for one program with so many sums; more programs would only add parts.
    is_alone = warps >= 8 and (elements * sums > 8192 or elements >= 8192)
    parts = PARTS // 2 if is_alone else PARTS
    if block < 2048:  # many small programs: more loads in flight, and fewer warps wait for each other's sums
        rows, warps = 2048 // block, 4
        parts = 4 * PARTS
    part_rows, parts = split_rows(T, rows, parts)
    return _Tile(block, tile.tail, rows, warps, sums_added_bias, part_rows, parts)


def _launch_forward(
    x_TH: Tensor,
    add_TH: Tensor | None,
    add_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centre: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch forward.

    Args:
        amax: float32 [], raised to the amax of the result.

    Returns:
        The input of the norm (x itself, or the sum), the result, and the statistics [2, T].
    """
    T, H = x_TH.shape
    y = torch.empty((T, H), dtype=x_TH.dtype, device=x_TH.device)
    total = x_TH if add_TH is None else torch.empty_like(y)
    statistics = torch.empty((2, T), dtype=torch.float32, device=x_TH.device)
    tile = _tile(H)
    tensors = (x_TH, add_TH, add_bias, total, weight, bias, y, statistics[0], statistics[1], as_int32(amax))
    numbers = (H, x_TH.stride(0), 0 if add_TH is None else add_TH.stride(0), eps)
    constants = {
        "CENTRE": centre,
        "HAS_BIAS": bias is not None,
        "ADD": add_TH is not None,
        "ADD_BIAS": add_bias is not None,
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
    add_bias: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Launch backward.

    Args:
        d_total_TH: upstream gradient of the norm's input, which is added to the result.
        amax: float32 [], raised to the amax of the first gradient.

    Returns:
        The gradients of the norm's input, and of weight, bias and added bias as `accumulate_gradients` returns them.
    """
    T, H = x_TH.shape
    dx = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    tile = _backward_tile(T, H, bias is not None, add_bias is not None)
    parameters = [p for p in (weight, bias, add_bias if tile.sums_added_bias else None) if p is not None]
    partial = torch.empty((tile.parts, len(parameters) * H), dtype=torch.float32, device=x_TH.device)
    constants = {
        "CENTRE": centre,
        "HAS_BIAS": bias is not None,
        "ADD": d_total_TH is not None,
        "ADD_BIAS": tile.sums_added_bias,
        "AMAX": amax is not None,
        "BLOCK": tile.block,
        "num_warps": tile.warps,
    }
    constants |= {"TAIL": tile.tail} if tile.tail else {"ROWS": tile.rows}
    kernel = _backward_split_kernel if tile.tail else _backward_kernel
    kernel[(tile.parts,)](
        dy_TH,
        d_total_TH,
        x_TH,
        weight,
        statistics[0],
        statistics[1],
        dx,
        partial,
        as_int32(amax),
        T,
        H,
        dy_TH.stride(0),
        0 if d_total_TH is None else d_total_TH.stride(0),
        x_TH.stride(0),
        tile.part_rows,
        **constants,
    )
    d_add_bias = None if tile.sums_added_bias else bias_gradient(add_bias, dx)
    gradients = accumulate_gradients(partial, *parameters)
    if tile.sums_added_bias:
        d_add_bias = gradients.pop()
    return dx, gradients[0], None if bias is None else gradients[1], d_add_bias


@torch_private.call_directly
class _Norm(torch.autograd.Function):
    """LayerNorm (`centre`) or RMSNorm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tracked_weight: Tensor | None, tracked_bias: Tensor | None, args: tuple[Any, ...]
    ) -> Tensor:
        weight, bias, eps, centre = args
        amax = new_amax_slot(x)
        x_TH, y, statistics = _launch_forward(flat_rows(x), None, None, weight, bias, eps, centre, amax)
        ctx.save_for_backward(x_TH, statistics)
        ctx.args, ctx.shape = args, x.shape
        return attach_amax(y.view(x.shape), amax)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, statistics = ctx.saved_tensors
        weight, bias, _, centre = ctx.args
        dx, d_weight, d_bias, _ = _launch_backward(flat_rows(dy), None, x_TH, weight, bias, statistics, centre)
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
        amax = new_amax_slot(x)
        total, y, statistics = _launch_forward(
            flat_rows(x), flat_rows(residual), x_bias, weight, bias, eps, centre, amax
        )
        ctx.save_for_backward(total, statistics)
        ctx.args, ctx.shape = args, x.shape
        return total.view(x.shape), attach_amax(y.view(x.shape), amax)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, statistics = ctx.saved_tensors
        weight, bias, x_bias, _, centre = ctx.args
        amax = new_amax_slot(dy)
        dx, d_weight, d_bias, d_x_bias = _launch_backward(
            flat_rows(dy), flat_rows(d_total), total, weight, bias, statistics, centre, x_bias, amax
        )
        dx = attach_amax(dx.view(ctx.shape), amax)
        return dx, dx, d_weight, d_bias, d_x_bias, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return LayerNorm of x [..., H] with weight and bias [H], in x's shape and type."""
    if x.numel() and x.shape[-1] <= WIDEST and use_fused("layer norm", x, weight, bias):
        return _Norm.apply(x, tracked(x, weight), tracked(x, bias), (weight, bias, eps, True))
    return layer_norm_reference(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x [..., H] with weight [H], in x's shape and type."""
    if x.numel() and x.shape[-1] <= WIDEST and use_fused("rms norm", x, weight):
        return _Norm.apply(x, tracked(x, weight), None, (weight, None, eps, False))
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
    """Return (total, normed): total = residual + x + x_bias, and the norm of it, in one pass each way.

    Backward adds total's own gradient in the same pass, which saves the addition in the residual stream.

    Args:
        x, residual: [..., H].
        x_bias: [H], bias of the projection that made x.
        weight, bias: [H]; an rmsnorm has no bias.
        kind: model.norm.
    """
    is_supported = x.numel() and x.shape[-1] <= WIDEST and residual.dtype == x.dtype
    if is_supported and use_fused("add norm", x, residual, weight, bias, x_bias):
        return _AddNorm.apply(
            x,
            residual,
            tracked(x, weight),
            tracked(x, bias),
            tracked(x, x_bias),
            (weight, bias, x_bias, eps, kind == "layernorm"),
        )
    return add_norm_reference(x, residual, weight, bias, eps, kind, x_bias)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `add_norm` with LayerNorm."""
    return add_norm(x, residual, weight, bias, eps, "layernorm", x_bias)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `add_norm` with RMSNorm."""
    return add_norm(x, residual, weight, bias, eps, "rmsnorm", x_bias)
