"""Launches of the kernels of LayerNorm and RMSNorm, and the shape of each program's work."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megascale.ops.amax import view_as_int32
from megascale.ops.dispatch import cdiv, next_power_of_2
from megascale.ops.norm_kernels import norm_backward_kernel, norm_forward_kernel
from megascale.ops.reduce import MAX_PARTIAL_SUMS, accumulate_gradients, compute_bias_gradient, divide_rows
from megascale.ops.split_norm_kernels import split_norm_backward_kernel, split_norm_forward_kernel

MAX_BLOCK_WITH_BIAS_SUM = 4096  # With wider blocks the registers cannot also hold the gradient of x_bias.


@dataclass(frozen=True)
class Tile:
    """Shape of the work of one program.

    Attributes:
        block, tail: columns of the two blocks of a row; tail is 0 if one block holds the row.
        rows: number of rows that a program holds in registers.
        warps: warps per program.
        sums_x_bias: whether the backward kernel also sums the gradient of x_bias.
        program_rows, programs: rows per program, and number of programs, in backward.
    """

    block: int
    tail: int
    rows: int
    warps: int
    sums_x_bias: bool = False
    program_rows: int = 0
    programs: int = 0


@cache
def choose_forward_tile(width: int) -> Tile:
    """Return the tile of forward for rows of `width` columns.

    A block has a power of two of columns. One block of 8,192 for 5,120 columns would leave 3 of 8 threads idle, so
    such rows have two blocks.
    """
    block = next_power_of_2(width)
    tail = 0
    if block > 4096 and 4 * width <= 3 * block:
        block //= 2
        tail = next_power_of_2(width - block)
    return Tile(block, tail, rows=max(1, 1024 // block), warps=min(16, max(1, block // 512)))


@cache
def choose_backward_tile(T: int, H: int, has_bias: bool, has_x_bias: bool) -> Tile:
    """Return the tile of backward for T rows of H columns."""
    tile = choose_forward_tile(H)
    block = tile.block
    warps = tile.warps
    rows = max(tile.rows, 4096 // block)
    # For wider rows the gradient of x_bias does not fit in registers, and another pass sums dx.
    sums_x_bias = has_x_bias and block <= MAX_BLOCK_WITH_BIAS_SUM
    elements = rows * (block + tile.tail)
    gradient_count = 1 + int(has_bias) + int(sums_x_bias)
    # An SM has registers for only one program with so many sums. More programs would only add partial sums.
    is_alone = warps >= 8 and (elements * gradient_count > 8192 or elements >= 8192)
    max_programs = MAX_PARTIAL_SUMS
    if is_alone:
        max_programs = MAX_PARTIAL_SUMS // 2
    # Small programs with few warps have more loads in flight, and their sums wait for fewer warps.
    if block < 2048:
        rows = 2048 // block
        warps = 4
        max_programs = 4 * MAX_PARTIAL_SUMS
    program_rows, programs = divide_rows(T, rows, max_programs)
    return Tile(block, tile.tail, rows, warps, sums_x_bias, program_rows, programs)


def _list_constants(
    tile: Tile, *, centre: bool, bias: Tensor | None, residual: Tensor | None, has_x_bias: bool, amax: Tensor | None
) -> dict[str, int]:
    """Return the constants and options of a kernel's launch.

    Args:
        residual: addend of the norm's input, or in backward the gradient of that input from its other readers.
    """
    constants = {
        "CENTRE": centre,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "HAS_X_BIAS": has_x_bias,
        "AMAX": amax is not None,
        "BLOCK": tile.block,
        "num_warps": tile.warps,
    }
    if tile.tail:
        constants["TAIL"] = tile.tail
    else:
        constants["ROWS"] = tile.rows
    return constants


def launch_forward(
    x_TH: Tensor,
    residual_TH: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centre: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch forward.

    Args:
        residual_TH: added to x before the norm; None: the norm alone.
        x_bias: added to x before the norm, only with a residual.
        centre: whether the norm is LayerNorm instead of RMSNorm.
        amax: float32 [], which is raised to the amax of the norm.

    Returns:
        The input of the norm (x, or the sum), the norm, and the rows' mean and 1 / deviation [2, T].
    """
    T, H = x_TH.shape
    y = torch.empty((T, H), dtype=x_TH.dtype, device=x_TH.device)
    total = x_TH
    residual_stride = 0
    if residual_TH is not None:
        total = torch.empty_like(y)
        residual_stride = residual_TH.stride(0)
    statistics = torch.empty((2, T), dtype=torch.float32, device=x_TH.device)
    tile = choose_forward_tile(H)
    tensors = (x_TH, residual_TH, x_bias, total, weight, bias, y, statistics[0], statistics[1], view_as_int32(amax))
    numbers = (H, x_TH.stride(0), residual_stride, eps)
    constants = _list_constants(
        tile, centre=centre, bias=bias, residual=residual_TH, has_x_bias=x_bias is not None, amax=amax
    )
    if tile.tail:
        split_norm_forward_kernel[(T,)](*tensors, *numbers, **constants)
    else:
        norm_forward_kernel[(cdiv(T, tile.rows),)](*tensors, T, *numbers, **constants)
    return total, y, statistics


def launch_backward(
    dy_TH: Tensor,
    d_total_TH: Tensor | None,
    x_TH: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: Tensor,
    centre: bool,
    x_bias: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Launch backward.

    Args:
        d_total_TH: gradient of the norm's input from its other readers, which is added to the result; None: no others.
        x_TH: input of the norm.
        statistics: mean and 1 / deviation of each row [2, T].
        amax: float32 [], which is raised to the amax of the first result.

    Returns:
        The gradients of the norm's input, weight, bias and x_bias; the last three as in `accumulate_gradients`.
    """
    T, H = x_TH.shape
    dx = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    d_total_stride = 0 if d_total_TH is None else d_total_TH.stride(0)
    tile = choose_backward_tile(T, H, bias is not None, x_bias is not None)
    candidates = (weight, bias, x_bias if tile.sums_x_bias else None)
    parameters = [parameter for parameter in candidates if parameter is not None]
    partial = torch.empty((tile.programs, len(parameters) * H), dtype=torch.float32, device=x_TH.device)
    constants = _list_constants(
        tile, centre=centre, bias=bias, residual=d_total_TH, has_x_bias=tile.sums_x_bias, amax=amax
    )
    kernel = split_norm_backward_kernel if tile.tail else norm_backward_kernel
    kernel[(tile.programs,)](
        dy_TH,
        d_total_TH,
        x_TH,
        weight,
        statistics[0],
        statistics[1],
        dx,
        partial,
        view_as_int32(amax),
        T,
        H,
        dy_TH.stride(0),
        d_total_stride,
        x_TH.stride(0),
        tile.program_rows,
        **constants,
    )
    d_x_bias = None
    if not tile.sums_x_bias:
        d_x_bias = compute_bias_gradient(x_bias, dx)
    gradients = accumulate_gradients(partial, *parameters)
    if tile.sums_x_bias:
        d_x_bias = gradients.pop()
    d_bias = None if bias is None else gradients[1]
    return dx, gradients[0], d_bias, d_x_bias
