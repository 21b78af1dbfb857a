"""Kernels of LayerNorm and RMSNorm that hold rows in one block of columns, and their parts.

split_norm_kernels.py has the kernels for rows in two blocks of columns, and norm_launch.py launches both kinds.
"""

from __future__ import annotations

from megascale.ops.amax import compute_magnitude_bits, update_amax
from megascale.ops.dispatch import jit, tl


@jit
def _load_column(ptr, column, width):
    """Load a vector over the columns in float32."""
    return tl.load(ptr + column, mask=column < width, other=0.0).to(tl.float32)


@jit
def load_block(ptr, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(ptr, mask=mask, other=0.0)
    return tl.load(ptr)


@jit
def store_block(ptr, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(ptr, value, mask=mask)
    else:
        tl.store(ptr, value)


@jit
def load_sum(
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
    x = load_block(x_ptr, mask, MASKED).to(tl.float32)
    if HAS_RESIDUAL:
        x += load_block(residual_ptr, mask, MASKED)
        if HAS_X_BIAS:
            x += bias
        stored = x.to(total_ptr.dtype.element_ty)
        store_block(total_ptr, stored, mask, MASKED)
        x = stored.to(tl.float32)
    return x


@jit
def norm_forward_kernel(
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
    """Normalise ROWS rows in one block of columns, after the residual addition if HAS_RESIDUAL; see `launch_forward`.

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
    x_ptr += row_64 * stride + column[None, :]
    x = load_sum(x_ptr, residual_ptr, x_bias, total_ptr + offset, inside, HAS_RESIDUAL, HAS_X_BIAS, True)
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
def store_sums(
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
    store_block(target, tl.sum(d_weight, 0) if ROWS else d_weight, mask, MASKED)
    if HAS_BIAS:
        store_block(target + width, tl.sum(d_bias, 0) if ROWS else d_bias, mask, MASKED)
    if HAS_X_BIAS:
        d_x_bias = tl.sum(d_x_bias, 0) if ROWS else d_x_bias
        store_block(target + (gradient_count - 1) * width, d_x_bias, mask, MASKED)


@jit
def _compute_gradient(dy, x, weight, mean, rstd, inside, width, CENTRE: tl.constexpr):
    """Return the gradient of the norm's input, without that of its other readers, and the norm without weight."""
    normed = tl.where(inside, (x.to(tl.float32) - mean[:, None]) * rstd[:, None], 0.0)
    scaled = dy * weight[None, :]
    shift = normed * (tl.sum(scaled * normed, 1) / width)[:, None]
    if CENTRE:
        shift += (tl.sum(scaled, 1) / width)[:, None]
    return (scaled - shift) * rstd[:, None], normed


@jit
def norm_backward_kernel(
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
    """Compute dx of `program_rows` rows, and their partial sums of the gradients of parameters; see `launch_backward`.

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
        dx, normed = _compute_gradient(dy, x, weight, mean, rstd, inside, width, CENTRE)
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
    store_sums(partial_ptr, column, column < width, width, d_weight, d_bias, d_x_bias, HAS_BIAS, HAS_X_BIAS, True, True)
    if AMAX:
        update_amax(amax_ptr, amax_bits)
