"""LayerNorm and RMSNorm over the last dimension, alone or with the residual addition before them.

The kernels hold a row in registers, in one block of columns or two: x is read once forward, x and dy once backward.
Weight gradients go through partial sums in a fixed order, so repeats give the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale import torch_private
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.gradient_sink import tracked
from megascale.ops.known_amax import as_integers, collect, magnitudes, slot_for, tell
from megascale.ops.reduce import PARTS, accumulate_gradients, bias_gradient, flat_rows, split_rows

NormKind = Literal["layernorm", "rmsnorm"]

WIDEST = 32768  # a row must fit a program's registers
WIDEST_WITH_SUM = 4096  # and so must one sum more: the widest (first) block with it


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, statistics in at least float32."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, statistics in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def add_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: NormKind, x_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch of `add_norm`."""
    total = residual + (x if x_bias is None else x + x_bias)
    if kind == "rmsnorm":
        return total, rms_norm_reference(total, weight, eps)
    return total, layer_norm_reference(total, weight, bias, eps)


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
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(add_ptr + row[:, None].to(tl.int64) * add_stride + column[None, :], mask=inside, other=0.0)
        if ADD_BIAS:
            x += tl.load(add_bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        # What is normed is the sum as it is stored, so that the backward pass sees the same numbers.
        stored = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row[:, None].to(tl.int64) * width + column[None, :], stored, mask=inside)
        x = tl.where(inside, stored.to(tl.float32), 0.0)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if CENTRE:
        mean = tl.sum(x, 1) / width
        tl.store(mean_ptr + row, mean, mask=row < rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = x * rstd[:, None] * weight[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + row[:, None].to(tl.int64) * width + column[None, :], y, mask=inside)
    if AMAX:
        collect(amax_ptr, magnitudes(y, inside, y_ptr.dtype.element_ty))


@jit
def _load_rows(dy_ptr, x_ptr, mean_ptr, rstd_ptr, row, last, column, width, dy_stride, x_stride, CENTRE: tl.constexpr):
    """dy and x [rows, columns] in their own type, mean (0 if not CENTRE) and 1 / deviation of some rows."""
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
    rows_a_part,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    d_add_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    most = tl.zeros((ROWS,), tl.int32)  # a number a row: registers are full
    first = part * rows_a_part
    last = tl.minimum(first + rows_a_part, rows)
    # The next rows are on their way while these are reduced: a wide program has its SM to itself.
    row = first + tl.arange(0, ROWS)
    coming = _load_rows(dy_ptr, x_ptr, mean_ptr, rstd_ptr, row, last, column, width, dy_stride, x_stride, CENTRE)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < last) & (column[None, :] < width)
        dy, x, mean, rstd = coming
        if ADD:  # asked for before it is needed, as the next rows are
            other = d_total_ptr + row[:, None].to(tl.int64) * d_total_stride + column[None, :]
            d_total = tl.load(other, mask=inside, other=0.0)
        coming = _load_rows(
            dy_ptr, x_ptr, mean_ptr, rstd_ptr, row + ROWS, last, column, width, dy_stride, x_stride, CENTRE
        )
        dy = dy.to(tl.float32)
        normed = tl.where(inside, (x.to(tl.float32) - mean[:, None]) * rstd[:, None], 0.0)
        scaled = dy * weight[None, :]
        shift = normed * (tl.sum(scaled * normed, 1) / width)[:, None]
        if CENTRE:
            shift += (tl.sum(scaled, 1) / width)[:, None]
        at = row[:, None].to(tl.int64) * width + column[None, :]
        dx = (scaled - shift) * rstd[:, None]
        if ADD:
            dx += d_total.to(tl.float32)
        tl.store(dx_ptr + at, dx, mask=inside)
        if AMAX:
            most = tl.maximum(most, tl.max(magnitudes(dx, inside, dx_ptr.dtype.element_ty), 1))
        if ADD_BIAS:
            d_add_bias += tl.where(inside, dx, 0.0)
        d_weight += dy * normed
        if HAS_BIAS:
            d_bias += dy
    fields = (2 if HAS_BIAS else 1) + (1 if ADD_BIAS else 0)
    to = part_ptr + part * fields * width + column
    tl.store(to, tl.sum(d_weight, 0), mask=column < width)
    if HAS_BIAS:
        tl.store(to + width, tl.sum(d_bias, 0), mask=column < width)
    if ADD_BIAS:
        tl.store(to + (fields - 1) * width, tl.sum(d_add_bias, 0), mask=column < width)
    if AMAX:
        collect(amax_ptr, most)


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
    REST: tl.constexpr,
):
    """`_forward_kernel` for one row in two blocks of columns; a row's statistics are scalars, which both can read."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    column_r = BLOCK + tl.arange(0, REST)
    inside = column_r < width
    x = tl.load(x_ptr + row * stride + column).to(tl.float32)
    x_r = tl.load(x_ptr + row * stride + column_r, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(add_ptr + row * add_stride + column)
        x_r += tl.load(add_ptr + row * add_stride + column_r, mask=inside, other=0.0)
        if ADD_BIAS:
            x += tl.load(add_bias_ptr + column).to(tl.float32)
            x_r += tl.load(add_bias_ptr + column_r, mask=inside, other=0.0).to(tl.float32)
        stored, stored_r = x.to(total_ptr.dtype.element_ty), x_r.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * width + column, stored)
        tl.store(total_ptr + row * width + column_r, stored_r, mask=inside)
        x, x_r = stored.to(tl.float32), stored_r.to(tl.float32)
    if CENTRE:
        mean = (tl.sum(x, 0) + tl.sum(x_r, 0)) / width
        tl.store(mean_ptr + row, mean)
        x -= mean
        x_r = tl.where(inside, x_r - mean, 0.0)
    rstd = 1.0 / tl.sqrt((tl.sum(x * x, 0) + tl.sum(x_r * x_r, 0)) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd * tl.load(weight_ptr + column).to(tl.float32)
    y_r = x_r * rstd * tl.load(weight_ptr + column_r, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column).to(tl.float32)
        y_r += tl.load(bias_ptr + column_r, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + column, y)
    tl.store(y_ptr + row * width + column_r, y_r, mask=inside)
    if AMAX:
        most = tl.max(magnitudes(y, column >= 0, y_ptr.dtype.element_ty))
        collect(amax_ptr, tl.maximum(magnitudes(y_r, inside, y_ptr.dtype.element_ty), most))


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
    rows_a_part,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ADD_BIAS: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """`_backward_kernel` for rows in two blocks of columns, one row at a time."""
    part = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    column_r = BLOCK + tl.arange(0, REST)
    inside = column_r < width
    weight = tl.load(weight_ptr + column).to(tl.float32)
    weight_r = tl.load(weight_ptr + column_r, mask=inside, other=0.0).to(tl.float32)
    d_weight, d_bias, d_add_bias = (
        tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32),
    )
    d_weight_r, d_bias_r, d_add_bias_r = (
        tl.zeros((REST,), tl.float32),
        tl.zeros((REST,), tl.float32),
        tl.zeros((REST,), tl.float32),
    )
    most, most_r = tl.zeros((BLOCK,), tl.int32), tl.zeros((REST,), tl.int32)
    first = part.to(tl.int64) * rows_a_part
    last = tl.minimum(first + rows_a_part, rows)
    dy = tl.load(dy_ptr + first * dy_stride + column)
    dy_r = tl.load(dy_ptr + first * dy_stride + column_r, mask=inside, other=0.0)
    x = tl.load(x_ptr + first * x_stride + column)
    x_r = tl.load(x_ptr + first * x_stride + column_r, mask=inside, other=0.0)
    for row in range(first, last):
        # All that is read is asked for first, the next row too: no load moves ahead of a sum, which waits for warps.
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if CENTRE:
            mean = tl.load(mean_ptr + row)
        if ADD:
            d_total = tl.load(d_total_ptr + row * d_total_stride + column)
            d_total_r = tl.load(d_total_ptr + row * d_total_stride + column_r, mask=inside, other=0.0)
        coming = tl.minimum(row + 1, last - 1)
        dy_next = tl.load(dy_ptr + coming * dy_stride + column)
        dy_next_r = tl.load(dy_ptr + coming * dy_stride + column_r, mask=inside, other=0.0)
        x_next = tl.load(x_ptr + coming * x_stride + column)
        x_next_r = tl.load(x_ptr + coming * x_stride + column_r, mask=inside, other=0.0)
        up, up_r = dy.to(tl.float32), dy_r.to(tl.float32)
        normed = (x.to(tl.float32) - mean) * rstd
        normed_r = tl.where(inside, (x_r.to(tl.float32) - mean) * rstd, 0.0)
        scaled, scaled_r = up * weight, up_r * weight_r
        if CENTRE:  # both sums in one go
            along, offset = tl.split(tl.sum(tl.join(scaled * normed, scaled), 0))
            along_r, offset_r = tl.split(tl.sum(tl.join(scaled_r * normed_r, scaled_r), 0))
            offset = (offset + offset_r) / width
        else:
            along, along_r, offset = tl.sum(scaled * normed, 0), tl.sum(scaled_r * normed_r, 0), 0.0
        along = (along + along_r) / width
        dx = (scaled - normed * along - offset) * rstd
        dx_r = (scaled_r - normed_r * along - offset) * rstd
        if ADD:
            dx += d_total.to(tl.float32)
            dx_r += d_total_r.to(tl.float32)
        tl.store(dx_ptr + row * width + column, dx)
        tl.store(dx_ptr + row * width + column_r, dx_r, mask=inside)
        if AMAX:
            most = tl.maximum(most, magnitudes(dx, column >= 0, dx_ptr.dtype.element_ty))
            most_r = tl.maximum(most_r, magnitudes(dx_r, inside, dx_ptr.dtype.element_ty))
        if ADD_BIAS:
            d_add_bias += dx
            d_add_bias_r += dx_r
        d_weight += up * normed
        d_weight_r += up_r * normed_r
        if HAS_BIAS:
            d_bias += up
            d_bias_r += up_r
        dy, dy_r, x, x_r = dy_next, dy_next_r, x_next, x_next_r
    fields = (2 if HAS_BIAS else 1) + (1 if ADD_BIAS else 0)
    to = part_ptr + part * fields * width
    tl.store(to + column, d_weight)
    tl.store(to + column_r, d_weight_r, mask=inside)
    if HAS_BIAS:
        tl.store(to + width + column, d_bias)
        tl.store(to + width + column_r, d_bias_r, mask=inside)
    if ADD_BIAS:
        tl.store(to + (fields - 1) * width + column, d_add_bias)
        tl.store(to + (fields - 1) * width + column_r, d_add_bias_r, mask=inside)
    if AMAX:
        collect(amax_ptr, tl.maximum(most_r, tl.max(most)))


@cache
def _tile(width: int) -> tuple[int, int, int, int]:
    """Two blocks of columns (the second of 0 where one holds them all), rows at a time and warps for rows of `width`.

    A block is a power of two; 5,120 columns in one of 8,192 would leave three of eight threads idle.
    """
    block, rest = next_power_of_2(width), 0
    if block > 4096 and 4 * width <= 3 * block:
        block //= 2
        rest = next_power_of_2(width - block)
    return block, rest, max(1, 1024 // block), min(16, max(1, block // 512))


@cache
def _backward_tile(T: int, H: int, has_bias: bool, add_bias: bool) -> tuple[int, int, int, int, bool, int, int]:
    """As `_tile` for the backward pass, whether that makes the bias's sum before the norm, rows a part, and parts."""
    block, rest, rows, warps = _tile(H)
    rows = max(rows, 4096 // block)
    # The sum over dx of wide rows does not fit the registers; they take a pass more.
    within = add_bias and block <= WIDEST_WITH_SUM
    held = rows * (block + rest)
    sums = 1 + has_bias + within
    # An SM has room for one program with so many sums, whose parts would only be more to add.
    alone = warps >= 8 and (held * sums > 8192 or held >= 8192)
    parts = PARTS // 2 if alone else PARTS
    if block < 2048:  # many small programs: more loads in flight, and fewer warps wait for each other's sums
        rows, warps, parts = 2048 // block, 4, 4 * PARTS
    return block, rest, rows, warps, within, *split_rows(T, rows, parts)


def _forward(
    x_TH: Tensor,
    add_TH: Tensor | None,
    add_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centre: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch; returns what was normed (x itself, or the sum), the result and the statistics [2, T]. amax: float32 [],
    which becomes the larger of itself and the result's."""
    T, H = x_TH.shape
    y = torch.empty((T, H), dtype=x_TH.dtype, device=x_TH.device)
    total = x_TH if add_TH is None else torch.empty_like(y)
    statistics = torch.empty((2, T), dtype=torch.float32, device=x_TH.device)
    block, rest, rows, warps = _tile(H)
    tensors = (x_TH, add_TH, add_bias, total, weight, bias, y, statistics[0], statistics[1], as_integers(amax))
    numbers = (H, x_TH.stride(0), 0 if add_TH is None else add_TH.stride(0), eps)
    meta = {"CENTRE": centre, "HAS_BIAS": bias is not None, "ADD": add_TH is not None, "ADD_BIAS": add_bias is not None}
    meta["AMAX"] = amax is not None
    if rest:
        _forward_split_kernel[(T,)](*tensors, *numbers, **meta, BLOCK=block, REST=rest, num_warps=warps)
    else:
        _forward_kernel[(cdiv(T, rows),)](*tensors, T, *numbers, **meta, ROWS=rows, BLOCK=block, num_warps=warps)
    return total, y, statistics


def _backward(
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
    """Launch; returns the gradients of what was normed (plus d_total), and of weight, bias and the bias that was added
    before, as `accumulate_gradients` does. amax: float32 [], which becomes the larger of itself and the first's."""
    T, H = x_TH.shape
    dx = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    block, rest, rows, warps, within, a_part, parts = _backward_tile(T, H, bias is not None, add_bias is not None)
    parameters = [p for p in (weight, bias, add_bias if within else None) if p is not None]
    partial = torch.empty((parts, len(parameters) * H), dtype=torch.float32, device=x_TH.device)
    given = (
        *(dy_TH, d_total_TH, x_TH, weight, statistics[0], statistics[1], dx, partial, as_integers(amax), T, H),
        *(dy_TH.stride(0), 0 if d_total_TH is None else d_total_TH.stride(0), x_TH.stride(0), a_part),
    )
    meta = {"CENTRE": centre, "HAS_BIAS": bias is not None, "ADD": d_total_TH is not None, "ADD_BIAS": within}
    meta["AMAX"] = amax is not None
    if rest:
        _backward_split_kernel[(parts,)](*given, **meta, BLOCK=block, REST=rest, num_warps=warps)
    else:
        _backward_kernel[(parts,)](*given, **meta, ROWS=rows, BLOCK=block, num_warps=warps)
    d_add_bias = None if within else bias_gradient(add_bias, dx)
    found = accumulate_gradients(partial, *parameters)
    if within:
        *found, d_add_bias = found
    return dx, found[0], None if bias is None else found[1], d_add_bias


@torch_private.call_directly
class _Norm(torch.autograd.Function):
    """Both norms; `centre` is what sets LayerNorm apart."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tracked_weight: Tensor | None, tracked_bias: Tensor | None, told: tuple[Any, ...]
    ) -> Tensor:
        weight, bias, eps, centre = told
        amax = slot_for(x)
        x_TH, y, statistics = _forward(flat_rows(x), None, None, weight, bias, eps, centre, amax)
        ctx.save_for_backward(x_TH, statistics)
        ctx.told, ctx.shape = told, x.shape
        return tell(y.view(x.shape), amax)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, statistics = ctx.saved_tensors
        weight, bias, _, centre = ctx.told
        dx, d_weight, d_bias, _ = _backward(flat_rows(dy), None, x_TH, weight, bias, statistics, centre)
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
        told: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor]:
        weight, bias, x_bias, eps, centre = told
        amax = slot_for(x)
        total, y, statistics = _forward(flat_rows(x), flat_rows(residual), x_bias, weight, bias, eps, centre, amax)
        ctx.save_for_backward(total, statistics)
        ctx.told, ctx.shape = told, x.shape
        return total.view(x.shape), tell(y.view(x.shape), amax)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, statistics = ctx.saved_tensors
        weight, bias, x_bias, _, centre = ctx.told
        amax = slot_for(dy)
        dx, d_weight, d_bias, d_x_bias = _backward(
            flat_rows(dy), flat_rows(d_total), total, weight, bias, statistics, centre, x_bias, amax
        )
        dx = tell(dx.view(ctx.shape), amax)
        return dx, dx, d_weight, d_bias, d_x_bias, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of x [..., H] with weight and bias [H]; returns x's shape and type."""
    if x.numel() and x.shape[-1] <= WIDEST and use_fused("layer norm", x, weight, bias):
        return _Norm.apply(x, tracked(x, weight), tracked(x, bias), (weight, bias, eps, True))
    return layer_norm_reference(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., H] with weight [H]; returns x's shape and type."""
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
    """(total, normed): total = residual + x + x_bias, and the norm of it, in one pass each way.

    x, residual: [..., H]; x_bias (of the projection that made x), weight, bias: [H]. kind: model.norm; an rmsnorm
    has no bias. The backward pass adds total's own gradient on the way, which saves the residual stream's addition.
    """
    fits = x.numel() and x.shape[-1] <= WIDEST and residual.dtype == x.dtype
    if fits and use_fused("add norm", x, residual, weight, bias, x_bias):
        parameters = weight, bias, x_bias
        known = [tracked(x, parameter) for parameter in parameters]
        return _AddNorm.apply(x, residual, *known, (*parameters, eps, kind == "layernorm"))
    return add_norm_reference(x, residual, weight, bias, eps, kind, x_bias)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `add_norm`."""
    return add_norm(x, residual, weight, bias, eps, "layernorm", x_bias)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `add_norm`."""
    return add_norm(x, residual, weight, bias, eps, "rmsnorm", x_bias)
