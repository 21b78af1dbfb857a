"""LayerNorm and RMSNorm over the last dimension, alone or with the residual addition before them.

The kernels hold a row in registers: x is read once forward, x and dy once backward. Weight gradients go through
partial sums in a fixed order, so repeats give the same bits.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.reduce import PARTS, bias_gradient, deliver, flat_rows, split_rows

NormKind = Literal["layernorm", "rmsnorm"]

WIDEST = 32768  # a row must fit a program's registers
WIDEST_WITH_SUM = 4096  # and so must one sum more


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
    rows,
    width,
    stride,
    add_stride,
    eps,
    CENTRE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ADD_BIAS: tl.constexpr,
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
    add_part_ptr,
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    d_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    d_add_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    first = part * rows_a_part
    last = tl.minimum(first + rows_a_part, rows)
    # The next rows are on their way while these are reduced: a wide program has its multiprocessor to itself.
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
        if ADD_BIAS:
            d_add_bias += tl.where(inside, dx, 0.0)
        d_weight += dy * normed
        if HAS_BIAS:
            d_bias += dy
    fields = 2 if HAS_BIAS else 1
    to = part_ptr + part * fields * width + column
    tl.store(to, tl.sum(d_weight, 0), mask=column < width)
    if HAS_BIAS:
        tl.store(to + width, tl.sum(d_bias, 0), mask=column < width)
    if ADD_BIAS:
        tl.store(add_part_ptr + part * width + column, tl.sum(d_add_bias, 0), mask=column < width)


def _tile(width: int) -> tuple[int, int, int]:
    """Block of columns, rows at a time and warps for rows of `width`."""
    block = next_power_of_2(width)
    return block, max(1, 1024 // block), min(16, max(1, block // 512))


def _forward(
    x_TH: Tensor,
    add_TH: Tensor | None,
    add_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centre: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch; returns what was normed (x itself, or the sum), the result and the statistics [2, T]."""
    T, H = x_TH.shape
    y = torch.empty((T, H), dtype=x_TH.dtype, device=x_TH.device)
    total = x_TH if add_TH is None else torch.empty_like(y)
    statistics = torch.empty((2, T), dtype=torch.float32, device=x_TH.device)
    block, rows, warps = _tile(H)
    _forward_kernel[(cdiv(T, rows),)](
        *(x_TH, add_TH, add_bias, total, weight, bias, y, statistics[0], statistics[1]),
        *(T, H, x_TH.stride(0), 0 if add_TH is None else add_TH.stride(0), eps),
        CENTRE=centre,
        HAS_BIAS=bias is not None,
        ADD=add_TH is not None,
        ADD_BIAS=add_bias is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
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
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Launch; returns the gradients of what was normed (plus d_total), and of weight, bias and the bias that was added
    before, as `deliver` does."""
    T, H = x_TH.shape
    dx = torch.empty((T, H), dtype=x_TH.dtype, device=x_TH.device)
    block, rows, warps = _tile(H)
    rows = max(rows, 4096 // block)  # narrow rows: more loads in flight
    a_part, parts = split_rows(T, rows, PARTS)
    partial = torch.empty((parts, (1 if bias is None else 2) * H), dtype=torch.float32, device=x_TH.device)
    # The sum over dx of wide rows does not fit the registers; they take a pass more.
    within = add_bias is not None and block <= WIDEST_WITH_SUM
    added = torch.empty((parts, H), dtype=torch.float32, device=x_TH.device) if within else None
    _backward_kernel[(parts,)](
        *(dy_TH, d_total_TH, x_TH, weight, statistics[0], statistics[1], dx, partial, added, T, H),
        *(dy_TH.stride(0), 0 if d_total_TH is None else d_total_TH.stride(0), x_TH.stride(0), a_part),
        CENTRE=centre,
        HAS_BIAS=bias is not None,
        ADD=d_total_TH is not None,
        ADD_BIAS=within,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    if added is not None and add_bias is not None:
        d_add_bias = deliver(added, add_bias)[0]
    else:
        d_add_bias = bias_gradient(add_bias, dx)
    return dx, *deliver(partial, weight, bias), d_add_bias


class _Norm(torch.autograd.Function):
    """Both norms; `centre` is what sets LayerNorm apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centre: bool) -> Tensor:
        x_TH, y, statistics = _forward(flat_rows(x), None, None, weight, bias, eps, centre)
        ctx.save_for_backward(x_TH, weight, statistics)
        ctx.centre, ctx.shape = centre, x.shape
        ctx.weight, ctx.bias = weight, bias  # the parameters themselves carry main_grad
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, _, statistics = ctx.saved_tensors
        dy = flat_rows(grads[0])
        dx, d_weight, d_bias, _ = _backward(dy, None, x_TH, ctx.weight, ctx.bias, statistics, ctx.centre)
        return dx.view(ctx.shape), d_weight, d_bias, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        x_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centre: bool,
    ) -> tuple[Tensor, Tensor]:
        total, y, statistics = _forward(flat_rows(x), flat_rows(residual), x_bias, weight, bias, eps, centre)
        ctx.save_for_backward(total, weight, statistics)
        ctx.centre, ctx.shape = centre, x.shape
        ctx.weight, ctx.bias, ctx.x_bias = weight, bias, x_bias  # the parameters themselves carry main_grad
        return total.view(x.shape), y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, _, statistics = ctx.saved_tensors
        d_total, dy = (flat_rows(grad) for grad in grads)
        dx, d_weight, d_bias, d_x_bias = _backward(
            dy, d_total, total, ctx.weight, ctx.bias, statistics, ctx.centre, ctx.x_bias
        )
        return dx.view(ctx.shape), dx.view(ctx.shape), d_x_bias, d_weight, d_bias, None, None


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
        return _AddNorm.apply(x, residual, x_bias, weight, bias, eps, kind == "layernorm")
    return add_norm_reference(x, residual, weight, bias, eps, kind, x_bias)
