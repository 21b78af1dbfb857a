"""Column sums in float32, for gradients of biases and norm weights, in a fixed order, so that repeated runs are equal.

Each program of a backward kernel writes one row of partial sums [programs, C]. `sum_partials` adds the rows, and
`accumulate_gradients` adds them to the gradients of parameters. `sum_columns` sums a plain matrix in both steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from megascale.ops.dispatch import cdiv, jit, tl, use_fused
from megascale.ops.gradient_sink import GradientSink, get_sink

# Maximum number of programs of a backward kernel, each with a partial sum: two per SM of an H100 or H200.
MAX_PARTIAL_SUMS = 264


@jit
def _sum_partials_kernel(
    partial_ptr,
    out_ptr,
    second_ptr,
    third_ptr,
    programs,
    columns,
    second_start,
    third_start,
    ACCUMULATE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sum BLOCK_C columns of partial sums [programs, columns] over programs, into one to three outputs.

    The outputs are adjacent ranges of columns. The second begins at `second_start`, and the third at `third_start`.
    """
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    target = tl.where(column < second_start, out_ptr + column, second_ptr + (column - second_start))
    target = tl.where(column < third_start, target, third_ptr + (column - third_start))
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, programs, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)
        inside = (row[:, None] < programs) & (column[None, :] < columns)
        total += tl.load(partial_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    result = tl.sum(total, 0)
    if ACCUMULATE:
        result += tl.load(target, mask=column < columns, other=0.0)
    tl.store(target, result, mask=column < columns)


@jit
def _load_rows(x_ptr, first_row, end_row, column, columns, stride, BLOCK_R: tl.constexpr):
    row = first_row + tl.arange(0, BLOCK_R)
    inside = (row[:, None] < end_row) & (column[None, :] < columns)
    return tl.load(x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)


@jit
def _column_sum_kernel(
    x_ptr, partial_ptr, rows, columns, stride, program_rows, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first_row = tl.program_id(1) * program_rows
    end_row = tl.minimum(first_row + program_rows, rows)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    prefetched = _load_rows(x_ptr, first_row, end_row, column, columns, stride, BLOCK_R)
    for start in range(first_row, end_row, BLOCK_R):
        x = prefetched
        prefetched = _load_rows(x_ptr, start + BLOCK_R, end_row, column, columns, stride, BLOCK_R)
        total += x.to(tl.float32)
    tl.store(partial_ptr + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)


def flatten_rows(x: Tensor) -> Tensor:
    """Return x [..., columns] as [rows, columns] with contiguous rows, without a copy if strides allow it."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@cache
def divide_rows(rows: int, block: int, max_programs: int = MAX_PARTIAL_SUMS) -> tuple[int, int]:
    """Divide rows among programs. Return (rows per program, number of programs).

    The result depends on sizes only, so that sums have the same order on every GPU.

    Args:
        block: rows of a tile; rows per program are a multiple of it.
        max_programs: maximum number of programs.
    """
    program_rows = block * cdiv(cdiv(rows, block), max_programs)
    return program_rows, cdiv(rows, program_rows)


def sum_partials(partial_PC: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of float32 partial sums [programs, C] over programs, [C] as `dtype`."""
    out = torch.empty(partial_PC.shape[1], dtype=dtype, device=partial_PC.device)
    _launch_sum(partial_PC, [out], accumulate=False)
    return out


def add_partials(partial_PC: Tensor, out: Tensor) -> None:
    """Add the sum of float32 partial sums [programs, C] over programs to `out` [C]."""
    if partial_PC.shape[1] != out.numel():
        raise ValueError(f"partial sums of {partial_PC.shape[1]} columns cannot be added to {out.numel()} elements")
    _launch_sum(partial_PC, [out], accumulate=True)


def _launch_sum(partial_PC: Tensor, outs: Sequence[Tensor], accumulate: bool) -> None:
    """Sum partial sums [programs, C] into one to three outputs, which are adjacent ranges of the columns."""
    P, C = partial_PC.shape
    # With fewer than three outputs the kernel gets the last output again, for columns that do not exist.
    second = outs[min(1, len(outs) - 1)]
    second_start = outs[0].numel()
    third_start = C
    if len(outs) == 3:
        third_start = second_start + second.numel()
    # Each program does little, so its time depends on how many loads follow each other. Blocks with many rows need few.
    _sum_partials_kernel[(cdiv(C, 32),)](
        partial_PC,
        outs[0],
        second,
        outs[-1],
        P,
        C,
        second_start,
        third_start,
        ACCUMULATE=accumulate,
        BLOCK_P=128,
        BLOCK_C=32,
        num_warps=8,
    )


def accumulate_gradients(partial_PC: Tensor, *parameters: Tensor) -> list[Tensor | None]:
    """Sum the gradients of up to three parameters, whose partial sums are adjacent ranges of columns, in float32.

    Returns:
        Each gradient in the parameter's type, or None if it was added to the parameter's sink.
    """
    outs: list[Tensor] = []
    for parameter in parameters:
        sink = get_sink(parameter)
        if sink is not None and sink.main_grad.dtype == torch.float32 and sink.main_grad.is_contiguous():
            outs.append(sink.main_grad)
        else:
            outs.append(torch.zeros(parameter.numel(), dtype=torch.float32, device=partial_PC.device))
    _launch_sum(partial_PC, outs, accumulate=True)
    gradients: list[Tensor | None] = []
    for parameter, out in zip(parameters, outs, strict=True):
        sink = get_sink(parameter)
        if sink is None:
            gradients.append(out.to(parameter.dtype))
            continue
        if out is not sink.main_grad:
            sink.main_grad.add_(out)
        sink.ready()
        gradients.append(None)
    return gradients


def compute_bias_gradient(bias: Tensor | None, dy: Tensor) -> Tensor | None:
    """Return the gradient of bias [O] from dy [..., O], or None without a bias or if the bias's sink received it."""
    if bias is None:
        return None
    sink: GradientSink | None = getattr(bias, "gradient_sink", None)
    if sink is None:
        return sum_columns(dy.flatten(0, -2))
    sum_columns(dy.flatten(0, -2), sink.main_grad)
    sink.ready()
    return None


def sum_columns(x_TC: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum x [T, C] over T in float32 at least. Add the sum to `out` [C] if given, else return it in x's type."""
    T, C = x_TC.shape
    if not use_fused("column sum", x_TC, out) or T == 0 or x_TC.stride(1) != 1:
        if out is not None:
            return out.add_(x_TC.sum(0, dtype=out.dtype))
        return x_TC.sum(0, dtype=torch.promote_types(x_TC.dtype, torch.float32)).to(x_TC.dtype)
    block_r, block_c = 32, 128
    column_blocks = cdiv(C, block_c)
    program_rows, row_programs = divide_rows(T, block_r, max(1, 4 * MAX_PARTIAL_SUMS // column_blocks))
    partial = torch.empty((row_programs, C), dtype=torch.float32, device=x_TC.device)
    _column_sum_kernel[(column_blocks, row_programs)](
        x_TC, partial, T, C, x_TC.stride(0), program_rows, BLOCK_R=block_r, BLOCK_C=block_c
    )
    if out is None:
        return sum_partials(partial, x_TC.dtype)
    add_partials(partial, out)
    return out
