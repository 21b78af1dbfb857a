"""Column sums in float32 and a fixed order: gradients of biases and norm weights, the same bits every run.

Backward kernels write partial sums [parts, C]; `sum_parts` adds them, `accumulate_gradients` adds them straight to the
gradients of parameters. `column_sum` does both for a plain matrix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from megascale.ops.dispatch import cdiv, jit, tl, use_fused
from megascale.ops.gradient_sink import GradientSink, sink_of

PARTS = 264  # most partial sums a backward kernel writes: two an SM of an H100 or H200


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
    to = tl.where(column < split, out_ptr + column, second_ptr + (column - split))
    to = tl.where(column < second_split, to, third_ptr + (column - second_split))
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, parts, BLOCK_P):
        row = start + tl.arange(0, BLOCK_P)
        inside = (row[:, None] < parts) & (column[None, :] < columns)
        total += tl.load(part_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    result = tl.sum(total, 0)
    if ACCUMULATE:
        result += tl.load(to, mask=column < columns, other=0.0)
    tl.store(to, result, mask=column < columns)


@jit
def _load_rows(x_ptr, first, last, column, columns, stride, BLOCK_R: tl.constexpr):
    row = first + tl.arange(0, BLOCK_R)
    inside = (row[:, None] < last) & (column[None, :] < columns)
    return tl.load(x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)


@jit
def _column_sum_kernel(
    x_ptr, part_ptr, rows, columns, stride, rows_a_part, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * rows_a_part
    last = tl.minimum(first + rows_a_part, rows)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    coming = _load_rows(x_ptr, first, last, column, columns, stride, BLOCK_R)
    for start in range(first, last, BLOCK_R):
        x = coming  # while the next rows are on their way
        coming = _load_rows(x_ptr, start + BLOCK_R, last, column, columns, stride, BLOCK_R)
        total += x.to(tl.float32)
    tl.store(part_ptr + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)


def flat_rows(x: Tensor) -> Tensor:
    """x as [rows, columns] with adjacent columns; copies only what no strides can express."""
    flat = x.flatten(0, -2)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


@cache
def split_rows(rows: int, block: int, parts: int = PARTS) -> tuple[int, int]:
    """Rows a part (a multiple of `block`) and the number of parts, a function of sizes alone."""
    a_part = block * cdiv(cdiv(rows, block), parts)
    return a_part, cdiv(rows, a_part)


def sum_parts(parts_PC: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of float32 partial sums over the first dimension, as `dtype`."""
    out = torch.empty(parts_PC.shape[1], dtype=dtype, device=parts_PC.device)
    _sum(parts_PC, [out], False)
    return out


def add_parts(parts_PC: Tensor, out: Tensor) -> None:
    """Add the sum of float32 partial sums over the first dimension to `out` [C]."""
    assert parts_PC.shape[1] == out.numel(), (parts_PC.shape, out.shape)
    _sum(parts_PC, [out], True)


def _sum(parts_PC: Tensor, outs: Sequence[Tensor], accumulate: bool) -> None:
    """Into up to three outputs, side by side in the columns."""
    P, C = parts_PC.shape
    first, second, third = outs[0], outs[min(1, len(outs) - 1)], outs[-1]
    split = first.numel()
    # Few programs have little to do each, so what counts is how many loads follow each other.
    _sum_parts_kernel[(cdiv(C, 32),)](
        *(parts_PC, first, second, third, P, C, split, C if len(outs) < 3 else split + second.numel()),
        ACCUMULATE=accumulate,
        BLOCK_P=128,
        BLOCK_C=32,
        num_warps=8,
    )


def accumulate_gradients(parts_PC: Tensor, *parameters: Tensor) -> list[Tensor | None]:
    """The gradients of up to three parameters from their partial sums, which lie side by side in float32.

    Added to their sinks where they have one, and None returned for them; else returned in their type.
    """
    outs: list[Tensor] = []
    sinks: list[GradientSink | None] = []  # those that take sums as they are
    for parameter in parameters:
        sink = sink_of(parameter)
        if sink is None or not _takes_sums(sink.main_grad):
            sink = None
            outs.append(torch.zeros(parameter.numel(), dtype=torch.float32, device=parts_PC.device))
        else:
            outs.append(sink.main_grad)
        sinks.append(sink)
    _sum(parts_PC, outs, True)
    found: list[Tensor | None] = []
    for parameter, sink, out in zip(parameters, sinks, outs, strict=True):
        if sink is None:
            found.append(_gradient(parameter, out))
        else:
            sink.ready()
            found.append(None)
    return found


def _takes_sums(main: Tensor) -> bool:
    return main.dtype == torch.float32 and main.is_contiguous()


def _gradient(parameter: Tensor, found: Tensor) -> Tensor | None:
    """What autograd is told of a parameter's gradient: nothing where its sink takes it."""
    if (sink := sink_of(parameter)) is None:
        return found.to(parameter.dtype)
    sink.main_grad.add_(found)
    sink.ready()
    return None


def bias_gradient(bias: Tensor | None, dy: Tensor) -> Tensor | None:
    """dy [..., O] -> the gradient of bias [O], or None where there is no bias or its sink took it."""
    if bias is None:
        return None
    sink = sink_of(bias)
    found = column_sum(dy.flatten(0, -2), None if sink is None else sink.main_grad)
    if sink is None:
        return found
    sink.ready()
    return None


def column_sum(x_TC: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum of x [T, C] over T in float32 at least; added into `out` [C] if given, else returned in x's type."""
    T, C = x_TC.shape
    if not use_fused("column sum", x_TC, out) or T == 0 or x_TC.stride(1) != 1:
        wide = torch.promote_types(x_TC.dtype, torch.float32)
        return x_TC.sum(0, dtype=wide).to(x_TC.dtype) if out is None else out.add_(x_TC.sum(0, dtype=out.dtype))
    block_r, block_c = 32, 128
    a_part, parts = split_rows(T, block_r, max(1, 4 * PARTS // cdiv(C, block_c)))
    partial = torch.empty((parts, C), dtype=torch.float32, device=x_TC.device)
    grid = (cdiv(C, block_c), parts)
    _column_sum_kernel[grid](x_TC, partial, T, C, x_TC.stride(0), a_part, BLOCK_R=block_r, BLOCK_C=block_c)
    if out is None:
        return sum_parts(partial, x_TC.dtype)
    add_parts(partial, out)
    return out
