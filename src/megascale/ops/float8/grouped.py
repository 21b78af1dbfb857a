"""Grouped GEMMs of float8 rows: each group of rows has a matrix of its own (ops/grouped_gemm.py).

Rows and matrices are E4M3, with a scale for each row and for each column of the result. Hopper's tensor cores read
float8 operands along the summed dimension only. The gradient of the input therefore multiplies by the transposed copy
of `stacks.cast_stack`, with the same kernel as forward.

The tensor cores add in about 14 bits. `precise` adds the products of each block in float32, in a tile of half the
columns, because it needs twice the registers. Without it the error of Gaussian operands is estimated as 0.13% of the
norm for 4,096 products and 0.46% for 28,672. The cast to E4M3 has 3.7% (`python -m benchmarks float8-sums`). So both
GEMMs run without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops import dispatch
from megascale.ops.dispatch import HAS_TRITON, cdiv, jit, tl, use_fused
from megascale.ops.float8.formats import E4M3, dequantise
from megascale.ops.grouped_tiles import Tiling, fit_tiling, plan_tiles, select_tile
from megascale.ops.row_copies import DESCRIPTOR_ALIGN, has_aligned_rows

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

# Blocks of 128 bytes of the summed dimension, as in the GEMMs of bfloat16.
FLOAT8_TILING = Tiling(columns=256, inner=128)
PRECISE_TILING = Tiling(columns=128, inner=128)


@jit
def _float8_rows_kernel(
    x_blocks,
    weight_blocks,
    out_blocks,
    out_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    offset_ptr,
    expert_ptr,
    row_ptr,
    tiles,
    columns,
    inner,
    PRECISE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    GROUPED_ROWS: tl.constexpr,
):
    """Compute one tile of `multiply_float8_groups`."""
    tile, column_tile = select_tile(tl.program_id(0), tiles, tl.cdiv(columns, TILE_COLUMNS), GROUPED_ROWS)
    expert = tl.load(expert_ptr + tile)
    if expert >= 0:
        first_row = tl.load(row_ptr + tile)
        end_row = tl.load(offset_ptr + expert + 1)
        first_column = column_tile * TILE_COLUMNS
        total = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
        # Blocks may reach into the next group's rows and the next expert's columns, which are not stored.
        for start in range(0, inner, TILE_INNER):
            x = x_blocks.load([first_row, start])
            weight = tl.trans(weight_blocks.load([expert * columns + first_column, start]))
            if PRECISE:
                total = tl.dot(x, weight, total, max_num_imprecise_acc=TILE_INNER)
            else:
                total = tl.dot(x, weight, total)
        row = first_row + tl.arange(0, TILE_ROWS)
        column = first_column + tl.arange(0, TILE_COLUMNS)
        x_scale = tl.load(x_scale_ptr + row, mask=row < end_row, other=0.0)
        weight_scale = tl.load(weight_scale_ptr + expert * columns + column, mask=column < columns, other=0.0)
        result = (total * x_scale[:, None] * weight_scale[None, :]).to(out_ptr.dtype.element_ty)
        if first_row + TILE_ROWS <= end_row:
            out_blocks.store([first_row, first_column], result)
        else:
            is_out = (row < end_row)[:, None] & (column < columns)[None, :]
            tl.store(out_ptr + row[:, None].to(tl.int64) * columns + column[None, :], result, mask=is_out)


def multiply_float8_groups_reference(
    x: Tensor, x_scale: Tensor, weights: Tensor, weights_scale: Tensor, offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute `multiply_float8_groups` of dequantised numbers by a loop over experts. The host waits for the sizes."""
    bounds = offsets.tolist()
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(len(x), weights.shape[1], dtype=dtype, device=x.device)
    for expert, (weight, scale) in enumerate(zip(weights, weights_scale, strict=True)):
        start, stop = bounds[expert], bounds[expert + 1]
        rows = dequantise(x[start:stop], x_scale[start:stop], wide)
        out[start:stop] = (rows @ dequantise(weight, scale, wide).t()).to(dtype)
    return out


def multiply_float8_groups(
    x: Tensor,
    x_scale: Tensor,
    weights: Tensor,
    weights_scale: Tensor,
    offsets: Tensor,
    *,
    dtype: torch.dtype,
    tiles: tuple[Tensor, Tensor] | None = None,
    tiling: Tiling | None = None,
    precise: bool = False,
) -> Tensor:
    """Multiply the rows of each group by the transpose of the group's matrix, without gradients.

    Args:
        x: E4M3 [rows, inner].
        x_scale: scales of rows, float32 [rows, 1].
        weights: E4M3 [experts, columns, inner].
        weights_scale: scales of the matrices' rows, float32 [experts, columns, 1].
        offsets: first row of each group, and the end of the last group, int32 [experts + 1].
        dtype: type of the result.
        tiles: result of `plan_tiles` for these offsets; None: compute it.
        tiling: sizes of tiles; None: the expected fastest.
        precise: whether to add the products of each block in float32.

    Returns:
        [rows, columns]. Rows beyond the last group are undefined.
    """
    _, columns, inner = weights.shape
    obstacle = _find_obstacle(x, x_scale, weights, dtype)
    choice = obstacle or "by tensor descriptors"
    dispatch.record_choice(f"experts' rows in float8, {inner} to {columns}", choice)
    if obstacle:
        return multiply_float8_groups_reference(x, x_scale, weights, weights_scale, offsets, dtype)
    out = torch.empty(len(x), columns, dtype=dtype, device=x.device)
    if not len(x):
        return out
    default_tiling = PRECISE_TILING if precise else FLOAT8_TILING
    tiling = tiling or fit_tiling(default_tiling, x.device, 1, out.element_size())
    expert_of_tile, row_of_tile = tiles or plan_tiles(offsets, len(x), tiling.rows)
    tile_count = len(expert_of_tile)
    matrix = weights.flatten(0, 1)
    _float8_rows_kernel[(tile_count * cdiv(columns, tiling.columns),)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [tiling.rows, tiling.inner]),
        TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [tiling.columns, tiling.inner]),
        TensorDescriptor(out, list(out.shape), list(out.stride()), [tiling.rows, tiling.columns]),
        out,
        x_scale,
        weights_scale,
        offsets,
        expert_of_tile,
        row_of_tile,
        tile_count,
        columns,
        inner,
        PRECISE=precise,
        **tiling.get_launch_options(),
    )
    return out


def _find_obstacle(x: Tensor, x_scale: Tensor, weights: Tensor, dtype: torch.dtype) -> str:
    """Return why the reference multiplies these factors, or "" if the kernel does."""
    if not x.dtype == weights.dtype == E4M3.dtype:
        raise ValueError(f"factors of a grouped GEMM have the type {E4M3.dtype}, not {x.dtype} and {weights.dtype}")
    if dtype != torch.bfloat16:
        return f"reference (results are {str(dtype).removeprefix('torch.')}, and the kernel writes bfloat16)"
    # The kernel's choice depends on the scales, since float8 is not among the types that `use_fused` knows.
    if not use_fused("grouped GEMM in float8", x_scale):
        return dispatch.list_choices()["grouped GEMM in float8"]
    _, columns, inner = weights.shape
    if columns % 8 or inner % DESCRIPTOR_ALIGN:
        return "reference (descriptors need 8 columns and 16 rows of a matrix, or multiples)"
    if not weights.is_contiguous() or weights.data_ptr() % DESCRIPTOR_ALIGN or not has_aligned_rows(x):
        return f"reference (descriptors need factors at multiples of {DESCRIPTOR_ALIGN} bytes)"
    if not dispatch.IS_INTERPRETED and torch.cuda.get_device_capability(x.device) < (9, 0):
        return "reference (only GPUs from Hopper on read by descriptors)"
    return ""
