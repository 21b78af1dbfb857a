"""Casts of stacks of matrices to float8, and of the activation between the two GEMMs of experts.

A stack [E, M, N] holds one matrix per expert. Each row of each matrix has a scale of its own, as has each column of
each matrix in the transposed copy. Scales are powers of two. A scale therefore depends on one expert only, and not on
the number of experts of a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.activation import RecomputedActivation
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.float8.cast import cast_rows, compute_scale, magnitude_bits, scale_and_clamp
from megascale.ops.float8.formats import (
    E4M3,
    SMALLEST_SCALE,
    Float8,
    amax_reference,
    quantise_reference,
    scale_from_amax,
)

# Rows, columns and warps of a tile of the transposed cast, as in ops/float8/cast.py.
TILE = 128, 64, 4
# Rows, columns and warps of a tile of the maxima of columns, and rows per program.
AMAX_TILE = 4, 512, 8
AMAX_PROGRAM_ROWS = 256
# Columns that a program of the activation holds at once, and warps.
ACTIVATION_BLOCK, ACTIVATION_WARPS = 2048, 8


@jit
def _stack_column_amaxes_kernel(
    x_ptr, amax_ptr, row_count, width, program_rows, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Raise the amax of each column of a matrix of the stack. The third index of a program is that of the matrix."""
    matrix = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first_row = tl.program_id(1) * program_rows
    end_row = tl.minimum(first_row + program_rows, row_count)
    source = x_ptr + matrix * row_count * width
    amax_bits = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for start in range(first_row, end_row, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row[:, None] < end_row) & (column[None, :] < width)
        x = tl.load(source + row[:, None].to(tl.int64) * width + column[None, :], mask=inside, other=0.0)
        amax_bits = tl.maximum(amax_bits, magnitude_bits(x.to(tl.float32)))
    tl.atomic_max(amax_ptr + matrix * width + column, tl.max(amax_bits, 0), mask=column < width, sem="relaxed")


@jit
def _stack_columns_kernel(
    x_ptr,
    columns_ptr,
    amax_ptr,
    scale_ptr,
    row_count,
    width,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast the transpose of a tile of a matrix of the stack, with the scales of its columns."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row[:, None] < row_count) & (column[None, :] < width)
    source = x_ptr + matrix * row_count * width
    x = tl.load(source + row[:, None].to(tl.int64) * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    amax = tl.load(amax_ptr + matrix * width + column, mask=column < width, other=0.0)
    scale = compute_scale(amax, 1.0, LARGEST, SMALLEST, True)
    if tl.program_id(1) == 0:
        tl.store(scale_ptr + matrix * width + column, scale, mask=column < width)
    q = scale_and_clamp(x, tl.math.div_rn(1.0, scale)[None, :], LARGEST)
    target = columns_ptr + matrix * row_count * width + column[:, None].to(tl.int64) * row_count + row[None, :]
    inside_target = (column[:, None] < width) & (row[None, :] < row_count)
    tl.store(target, tl.trans(q.to(columns_ptr.dtype.element_ty)), mask=inside_target)


def cast_stack(stack: Tensor) -> Float8:
    """Cast a stack [E, M, N] of matrices, and the transposes of its matrices, to E4M3.

    Returns:
        rows [E, M, N] with rows_scale [E, M, 1], and columns [E, N, M] with columns_scale [E, N, 1].
    """
    matrices, M, N = stack.shape
    stack = stack.contiguous()
    rows, rows_scale = cast_rows(stack.flatten(0, 1), E4M3).require_rows()
    columns, columns_scale = _cast_stack_columns(stack)
    return Float8(rows.view(matrices, M, N), rows_scale.view(matrices, M, 1), columns, columns_scale)


def _cast_stack_columns(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Return the transposes [E, N, M] of the matrices of a contiguous stack, and the scales of their rows [E, N, 1]."""
    matrices, M, N = stack.shape
    if not (stack.numel() and use_fused("float8 cast of stacks", stack)):
        scale = scale_from_amax(amax_reference(stack, 1), E4M3, power_of_2=True).transpose(1, 2).contiguous()
        return quantise_reference(stack.transpose(1, 2), scale, E4M3).contiguous(), scale
    amax = torch.zeros((matrices, N), dtype=torch.float32, device=stack.device)
    amax_rows, amax_columns, warps = AMAX_TILE
    amax_columns = min(amax_columns, max(16, next_power_of_2(N)))
    _stack_column_amaxes_kernel[(cdiv(N, amax_columns), cdiv(M, AMAX_PROGRAM_ROWS), matrices)](
        stack,
        amax.view(torch.int32),  # float32 maxima would lose NaN
        M,
        N,
        AMAX_PROGRAM_ROWS,
        BLOCK_R=amax_rows,
        BLOCK_C=amax_columns,
        num_warps=warps,
    )
    columns = torch.empty((matrices, N, M), dtype=E4M3.dtype, device=stack.device)
    scale = torch.empty((matrices, N, 1), dtype=torch.float32, device=stack.device)
    block_rows, block_columns, warps = TILE
    _stack_columns_kernel[(cdiv(N, block_columns), cdiv(M, block_rows), matrices)](
        stack,
        columns,
        amax,
        scale,
        M,
        N,
        LARGEST=E4M3.largest,
        SMALLEST=SMALLEST_SCALE,
        BLOCK_R=block_rows,
        BLOCK_C=block_columns,
        num_warps=warps,
    )
    return columns, scale


@jit
def _load_swiglu(gate_ptr, column, width):
    """Return silu(gate) * up of entries of a row [gate | up] in float32, rounded to the type of the row."""
    gate = tl.load(gate_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width + column, mask=column < width, other=0.0).to(tl.float32)
    return (gate * tl.sigmoid(gate) * up).to(gate_ptr.dtype.element_ty).to(tl.float32)


@jit
def _cast_swiglu_kernel(
    inner_ptr, rows_ptr, scale_ptr, width, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
):
    """Cast the activation of one row. The row is read twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    gate_ptr = inner_ptr + row * 2 * width
    amax_bits = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        amax_bits = tl.maximum(amax_bits, magnitude_bits(_load_swiglu(gate_ptr, column, width)))
    amax = tl.max(amax_bits, 0).to(tl.float32, bitcast=True)
    scale = compute_scale(amax, 1.0, LARGEST, SMALLEST, True)
    tl.store(scale_ptr + row, scale)
    inverse_scale = tl.math.div_rn(1.0, scale)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        q = scale_and_clamp(_load_swiglu(gate_ptr, column, width), inverse_scale, LARGEST)
        tl.store(rows_ptr + row * width + column, q.to(rows_ptr.dtype.element_ty), mask=column < width)


def cast_activation(kind: str, inner: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activation of the rows of `inner` in E4M3 [rows, width], and the scales of its rows [rows, 1].

    The activation is rounded to the type of `inner` first. SwiGLU is one kernel, which does not write the activation.

    Args:
        kind: value of model.activation.
        inner: output of the first GEMM [rows, columns].
    """
    if kind == "swiglu" and inner.numel() and use_fused("float8 cast of experts' activation", inner):
        inner = inner.contiguous()
        rows, width = inner.shape[0], inner.shape[1] // 2
        activated = torch.empty((rows, width), dtype=E4M3.dtype, device=inner.device)
        scale = torch.empty((rows, 1), dtype=torch.float32, device=inner.device)
        _cast_swiglu_kernel[(rows,)](
            inner,
            activated,
            scale,
            width,
            LARGEST=E4M3.largest,
            SMALLEST=SMALLEST_SCALE,
            BLOCK=min(ACTIVATION_BLOCK, max(16, next_power_of_2(width))),
            num_warps=ACTIVATION_WARPS,
        )
        return activated, scale
    return cast_rows(RecomputedActivation(kind, None)(inner), E4M3).require_rows()
