"""LayerNorm and RMSNorm over the last dimension, forward and backward: plain PyTorch reference and one-pass kernels.

The kernels hold a row in registers: x is read once forward, x and dy once backward. Weight gradients go through
partial sums in a fixed order, so repeats give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale.ops.dispatch import jit, tl, triton, use_fused
from megascale.ops.reduce import PARTS, flat_rows, split_rows, sum_parts

WIDEST = 32768  # a row must fit a program's registers


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension, statistics in at least float32."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, statistics in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


@jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    width,
    stride,
    eps,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
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
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    part_ptr,
    rows,
    width,
    dy_stride,
    x_stride,
    rows_a_part,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    first = part * rows_a_part
    last = tl.minimum(first + rows_a_part, rows)
    # The next rows are on their way while these are reduced: a wide program has its multiprocessor to itself.
    row = first + tl.arange(0, ROWS)
    coming = _load_rows(dy_ptr, x_ptr, mean_ptr, rstd_ptr, row, last, column, width, dy_stride, x_stride, CENTRE)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < last) & (column[None, :] < width)
        dy, x, mean, rstd = coming
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
        tl.store(dx_ptr + at, (scaled - shift) * rstd[:, None], mask=inside)
        d_weight += dy * normed
        if HAS_BIAS:
            d_bias += dy
    fields = 2 if HAS_BIAS else 1
    to = part_ptr + part * fields * width + column
    tl.store(to, tl.sum(d_weight, 0), mask=column < width)
    if HAS_BIAS:
        tl.store(to + width, tl.sum(d_bias, 0), mask=column < width)


def _tile(width: int) -> tuple[int, int, int]:
    """Block of columns, rows at a time and warps for rows of `width`."""
    block = triton.next_power_of_2(width)
    return block, max(1, 1024 // block), min(16, max(1, block // 512))


class _Norm(torch.autograd.Function):
    """Both norms; CENTRE is what sets LayerNorm apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centre: bool) -> Tensor:
        flat = flat_rows(x)
        T, H = flat.shape
        y = torch.empty((T, H), dtype=x.dtype, device=x.device)
        statistics = torch.empty((2, T), dtype=torch.float32, device=x.device)
        block, rows, warps = _tile(H)
        _forward_kernel[(triton.cdiv(T, rows),)](
            *(flat, weight, bias, y, statistics[0], statistics[1], T, H, flat.stride(0), eps),
            CENTRE=centre,
            HAS_BIAS=bias is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
        ctx.save_for_backward(flat, weight, statistics)
        ctx.centre, ctx.has_bias, ctx.shape = centre, bias is not None, x.shape
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, statistics = ctx.saved_tensors
        dy = flat_rows(grads[0])
        T, H = flat.shape
        dx = torch.empty((T, H), dtype=flat.dtype, device=flat.device)
        block, rows, warps = _tile(H)
        a_part, parts = split_rows(T, rows, PARTS)
        fields = 2 if ctx.has_bias else 1
        partial = torch.empty((parts, fields * H), dtype=torch.float32, device=flat.device)
        _backward_kernel[(parts,)](
            *(dy, flat, weight, statistics[0], statistics[1], dx, partial),
            *(T, H, dy.stride(0), flat.stride(0), a_part),
            CENTRE=ctx.centre,
            HAS_BIAS=ctx.has_bias,
            ROWS=rows,
            BLOCK=block,
            num_warps=warps,
        )
        total = sum_parts(partial, weight.dtype)
        return dx.view(ctx.shape), total[:H], total[H:] if ctx.has_bias else None, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of x [..., H] with weight and bias [H]; returns x's shape and type."""
    if x.numel() and x.shape[-1] <= WIDEST and use_fused("layer norm", x, weight, bias):
        return _Norm.apply(x, weight, bias, eps, True)
    return layer_norm_reference(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., H] with weight [H]; returns x's shape and type."""
    if x.numel() and x.shape[-1] <= WIDEST and use_fused("rms norm", x, weight):
        return _Norm.apply(x, weight, None, eps, False)
    return rms_norm_reference(x, weight, eps)
