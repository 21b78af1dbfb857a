"""Kernels of LayerNorm and RMSNorm for rows in two blocks of columns: a full block, and a tail with a mask.

A program processes one row at a time. norm_launch.py chooses the blocks.
"""

from __future__ import annotations

from megascale.ops.amax import compute_magnitude_bits, update_amax
from megascale.ops.dispatch import jit, tl
from megascale.ops.norm_kernels import load_block, load_sum, store_block, store_sums


@jit
def _load_split_sum(
    x_ptr,
    residual_ptr,
    x_bias_ptr,
    total_ptr,
    column,
    mask,
    HAS_RESIDUAL: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Compute `load_sum` for one block of columns of a row, at which the pointers begin.

    MASKED: `mask` applies, because the block is the tail.
    """
    x_bias = 0.0
    if HAS_X_BIAS:
        x_bias = load_block(x_bias_ptr + column, mask, MASKED).to(tl.float32)
    if HAS_RESIDUAL:
        residual_ptr += column
    return load_sum(x_ptr + column, residual_ptr, x_bias, total_ptr + column, mask, HAS_RESIDUAL, HAS_X_BIAS, MASKED)


@jit
def _store_split_norm(
    x, rstd, weight_ptr, bias_ptr, y_ptr, row, column, mask, width, HAS_BIAS: tl.constexpr, MASKED: tl.constexpr
):
    """Store and return the norm of one block of columns."""
    y = x * rstd * load_block(weight_ptr + column, mask, MASKED).to(tl.float32)
    if HAS_BIAS:
        y += load_block(bias_ptr + column, mask, MASKED).to(tl.float32)
    store_block(y_ptr + row * width + column, y, mask, MASKED)
    return y


@jit
def split_norm_forward_kernel(
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
    if HAS_RESIDUAL:
        residual_ptr += row * residual_stride
    x_ptr += row * stride
    total_ptr += row * width
    x = _load_split_sum(x_ptr, residual_ptr, x_bias_ptr, total_ptr, column, inside, HAS_RESIDUAL, HAS_X_BIAS, False)
    x_tail = _load_split_sum(
        x_ptr, residual_ptr, x_bias_ptr, total_ptr, column_tail, inside, HAS_RESIDUAL, HAS_X_BIAS, True
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
def _load_split(ptr, column, column_tail, inside):
    """Load a row in its stored type: the full block and the tail."""
    return tl.load(ptr + column), tl.load(ptr + column_tail, mask=inside, other=0.0)


@jit
def _compute_split_gradient(
    dy, dy_tail, x, x_tail, weight, weight_tail, mean, rstd, inside, width, CENTRE: tl.constexpr
):
    """Return the gradient of the norm's input, without that of its other readers, and the norm without weight.

    The result is (gradient, its tail, norm, its tail). dy and dy_tail are float32.
    """
    normed = (x.to(tl.float32) - mean) * rstd
    normed_tail = tl.where(inside, (x_tail.to(tl.float32) - mean) * rstd, 0.0)
    scaled = dy * weight
    scaled_tail = dy_tail * weight_tail
    dot, scaled_sum = _sum_row(scaled, normed, CENTRE)
    dot_tail, scaled_sum_tail = _sum_row(scaled_tail, normed_tail, CENTRE)
    if CENTRE:
        scaled_sum = (scaled_sum + scaled_sum_tail) / width
    dot = (dot + dot_tail) / width
    dx = (scaled - normed * dot - scaled_sum) * rstd
    dx_tail = (scaled_tail - normed_tail * dot - scaled_sum) * rstd
    return dx, dx_tail, normed, normed_tail


@jit
def _store_split_sums(
    partial_ptr,
    column,
    column_tail,
    inside,
    width,
    d_weight,
    d_weight_tail,
    d_bias,
    d_bias_tail,
    d_x_bias,
    d_x_bias_tail,
    HAS_BIAS: tl.constexpr,
    HAS_X_BIAS: tl.constexpr,
):
    """Compute `store_sums` for both blocks of columns."""
    store_sums(partial_ptr, column, inside, width, d_weight, d_bias, d_x_bias, HAS_BIAS, HAS_X_BIAS, False, False)
    store_sums(
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


@jit
def split_norm_backward_kernel(
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
    """Compute `norm_backward_kernel` for rows in two blocks of columns. `inside` masks the tail."""
    column = tl.arange(0, BLOCK)
    column_tail = BLOCK + tl.arange(0, TAIL)
    inside = column_tail < width
    weight, weight_tail = _load_split(weight_ptr, column, column_tail, inside)
    weight = weight.to(tl.float32)
    weight_tail = weight_tail.to(tl.float32)
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
    dy, dy_tail = _load_split(dy_ptr + first_row * dy_stride, column, column_tail, inside)
    x, x_tail = _load_split(x_ptr + first_row * x_stride, column, column_tail, inside)
    for row in range(first_row, end_row):
        # All loads precede the sums, also those of the next row, because the barrier of a sum would delay them.
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if CENTRE:
            mean = tl.load(mean_ptr + row)
        if HAS_RESIDUAL:
            d_total, d_total_tail = _load_split(d_total_ptr + row * d_total_stride, column, column_tail, inside)
        next_row = tl.minimum(row + 1, end_row - 1)
        dy_next, dy_next_tail = _load_split(dy_ptr + next_row * dy_stride, column, column_tail, inside)
        x_next, x_next_tail = _load_split(x_ptr + next_row * x_stride, column, column_tail, inside)
        dy_wide = dy.to(tl.float32)
        dy_wide_tail = dy_tail.to(tl.float32)
        dx, dx_tail, normed, normed_tail = _compute_split_gradient(
            dy_wide, dy_wide_tail, x, x_tail, weight, weight_tail, mean, rstd, inside, width, CENTRE
        )
        if HAS_RESIDUAL:
            dx += d_total.to(tl.float32)
            dx_tail += d_total_tail.to(tl.float32)
        tl.store(dx_ptr + row * width + column, dx)
        tl.store(dx_ptr + row * width + column_tail, dx_tail, mask=inside)
        if AMAX:
            row_bits = compute_magnitude_bits(dx, column >= 0, dx_ptr.dtype.element_ty)
            row_bits_tail = compute_magnitude_bits(dx_tail, inside, dx_ptr.dtype.element_ty)
            amax_bits = tl.maximum(amax_bits, row_bits)
            amax_bits_tail = tl.maximum(amax_bits_tail, row_bits_tail)
        if HAS_X_BIAS:
            d_x_bias += dx
            d_x_bias_tail += dx_tail
        d_weight += dy_wide * normed
        d_weight_tail += dy_wide_tail * normed_tail
        if HAS_BIAS:
            d_bias += dy_wide
            d_bias_tail += dy_wide_tail
        dy = dy_next
        dy_tail = dy_next_tail
        x = x_next
        x_tail = x_next_tail
    _store_split_sums(
        partial_ptr, column, column_tail, inside, width, d_weight, d_weight_tail, d_bias, d_bias_tail, d_x_bias,
        d_x_bias_tail, HAS_BIAS, HAS_X_BIAS,
    )  # fmt: skip
    if AMAX:
        update_amax(amax_ptr, tl.maximum(amax_bits_tail, tl.max(amax_bits)))
