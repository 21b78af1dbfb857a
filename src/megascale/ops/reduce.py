"""Column sums in float32 in a fixed order, for gradients of biases and norm weights: the same bits every run.

Backward kernels write partial sums [parts, C]. `sum_parts` adds them, and `accumulate_gradients` adds them directly to
the gradients of parameters. `column_sum` does both steps for a plain matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from megascale.ops.dispatch import cdiv, jit, tl, use_fused
from megascale.ops.gradient_sink import GradientSink, sink_of

PARTS = 264  # partial sums of a backward kernel at most: two per SM of an H100 or H200


@jit
def _sum_parts_kernel(
    part_ptr,
    out_ptr,
    second_ptr,
    third_ptr,
    parts,
    columns,
    split,
    second_split,
    ACCUMULATE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    # Columns from `split` on belong to a second output, those from `second_split` on to a third.
    target = tl.where(column < split, out_ptr + column, second_ptr + (column - split))
    target = tl.where(column < second_split, target, third_ptr + (column - second_split))
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, parts, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)
        inside = (row[:, None] < parts) & (column[None, :] < columns)
        total += tl.load(part_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    result = tl.sum(total, 0)
    if ACCUMULATE:
        result += tl.load(target, mask=column < columns, other=0.0)
    tl.store(target, result, mask=column < columns)


@jit
def _load_rows(x_ptr, first, last, column, columns, stride, BLOCK_R: tl.constexpr):
    row = first + tl.arange(0, BLOCK_R)
    inside = (row[:, None] < last) & (column[None, :] < columns)
    return tl.load(x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)


@jit
def _column_sum_kernel(x_ptr, part_ptr, rows, columns, stride, part_rows, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * part_rows
    last = tl.minimum(first + part_rows, rows)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    prefetched = _load_rows(x_ptr, first, last, column, columns, stride, BLOCK_R)
    for start in range(first, last, BLOCK_R):
        x = prefetched
        prefetched = _load_rows(x_ptr, start + BLOCK_R, last, column, columns, stride, BLOCK_R)
        total += x.to(tl.float32)
    tl.store(part_ptr + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)


def flat_rows(x: Tensor) -> Tensor:
    """Return x as [rows, columns] with adjacent columns; copies only if strides cannot express it."""
    rows = x.flatten(0, -2)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


@cache
def split_rows(rows: int, block: int, parts: int = PARTS) -> tuple[int, int]:
    """Return the rows per part (a multiple of `block`) and the number of parts, a function of sizes alone."""
    part_rows = block * cdiv(cdiv(rows, block), parts)
    return part_rows, cdiv(rows, part_rows)


def sum_parts(parts_PC: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum float32 partial sums over the first dimension, as `dtype`."""
    out = torch.empty(parts_PC.shape[1], dtype=dtype, device=parts_PC.device)
    _launch_sum(parts_PC, [out], accumulate=False)
    return out


def add_parts(parts_PC: Tensor, out: Tensor) -> None:
    """Add the sum of float32 partial sums over the first dimension to `out` [C]."""
    assert parts_PC.shape[1] == out.numel(), (parts_PC.shape, out.shape)
    _launch_sum(parts_PC, [out], accumulate=True)


def _launch_sum(parts_PC: Tensor, outs: Sequence[Tensor], accumulate: bool) -> None:
    """Sum into up to three outputs, which are adjacent ranges of the columns."""
    P, C = parts_PC.shape
    second = outs[min(1, len(outs) - 1)]
    split = outs[0].numel()
    # Each program does little, so the time depends on how many loads follow each other.
    _sum_parts_kernel[(cdiv(C, 32),)](
        parts_PC,
        outs[0],
        second,
        outs[-1],
        P,
        C,
        split,
        C if len(outs) < 3 else split + second.numel(),
        ACCUMULATE=accumulate,
        BLOCK_P=128,
        BLOCK_C=32,
        num_warps=8,
    )


def accumulate_gradients(parts_PC: Tensor, *parameters: Tensor) -> list[Tensor | None]:
    """Sum the gradients of up to three parameters from their partial sums, adjacent in the columns, in float32.

    Returns:
        The gradients in the parameters' types, or None for those whose sink takes them.
    """
    outs: list[Tensor] = []
    for parameter in parameters:
        sink = sink_of(parameter)
        if sink is not None and sink.main_grad.dtype == torch.float32 and sink.main_grad.is_contiguous():
            outs.append(sink.main_grad)
        else:
            outs.append(torch.zeros(parameter.numel(), dtype=torch.float32, device=parts_PC.device))
    _launch_sum(parts_PC, outs, accumulate=True)
    gradients: list[Tensor | None] = []
    for parameter, out in zip(parameters, outs, strict=True):
        sink = sink_of(parameter)
        if sink is None:
            gradients.append(out.to(parameter.dtype))
            continue
        if out is not sink.main_grad:
            sink.main_grad.add_(out)
        sink.ready()
        gradients.append(None)
    return gradients


def bias_gradient(bias: Tensor | None, dy: Tensor) -> Tensor | None:
    """Return the gradient of bias [O] from dy [..., O], or None without a bias or if its sink takes it."""
    if bias is None:
        return None
    sink: GradientSink | None = getattr(bias, "gradient_sink", None)
    if sink is None:
        return column_sum(dy.flatten(0, -2))
    column_sum(dy.flatten(0, -2), sink.main_grad)
    sink.ready()
    return None


def column_sum(x_TC: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum x [T, C] over T in float32 at least; added into `out` [C] if given, else returned in x's type."""
    T, C = x_TC.shape
    if not use_fused("column sum", x_TC, out) or T == 0 or x_TC.stride(1) != 1:
        if out is not None:
            return out.add_(x_TC.sum(0, dtype=out.dtype))
        return x_TC.sum(0, dtype=torch.promote_types(x_TC.dtype, torch.float32)).to(x_TC.dtype)
    block_r, block_c = 32, 128
    column_blocks = cdiv(C, block_c)
    part_rows, parts = split_rows(T, block_r, max(1, 4 * PARTS // column_blocks))
    partial = torch.empty((parts, C), dtype=torch.float32, device=x_TC.device)
    _column_sum_kernel[(column_blocks, parts)](
        x_TC, partial, T, C, x_TC.stride(0), part_rows, BLOCK_R=block_r, BLOCK_C=block_c
    )
    if out is None:
        return sum_parts(partial, x_TC.dtype)
    add_parts(partial, out)
    return out
