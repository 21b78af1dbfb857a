"""GEMMs of rows that are grouped by expert: each group of rows has a matrix of its own, and groups differ in size.

The rows of a group are adjacent. `offsets`, on the device, holds the first row of each group. The host reads no sizes,
so CUDA graphs can replay the launches. Rows may be read through an index, without a permuted copy. Sums are float32, in
an order that depends on sizes only.

Forward and the gradient of the input have one program per tile of the result. `plan_tiles` assigns the tiles of all
groups to programs. At most one tile per group is incomplete. With kernels.expert_rows_gemm=auto these GEMMs read whole
blocks by tensor descriptors (TMA), where sizes permit. grouped_gradients.py computes the gradients of the matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops import dispatch
from megascale.ops.dispatch import HAS_TRITON, cdiv, jit, tl, use_fused
from megascale.ops.grouped_tiles import (
    BLOCK_ROWS_TILING,
    GATHERED_TILING,
    ROWS_TILING,
    Tiling,
    fit_tiling,
    plan_tiles,
    select_tile,
)
from megascale.ops.row_copies import DESCRIPTOR_ALIGN, gather_rows, has_aligned_rows

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

# With at least this number of columns in the result, reading by blocks saves more time than the copy of rows takes.
COLUMNS_WORTH_COPY = 8192


@jit
def _group_rows_kernel(
    x_ptr,
    index_ptr,
    weight_ptr,
    out_ptr,
    offset_ptr,
    expert_ptr,
    row_ptr,
    tiles,
    columns,
    inner,
    x_stride,
    expert_stride,
    column_stride,
    inner_stride,
    out_stride,
    GATHERED: tl.constexpr,
    EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    GROUPED_ROWS: tl.constexpr,
):
    """Compute one tile of `multiply_groups`.

    GATHERED: rows are read at index_ptr. EVEN: columns and inner are multiples of the tile's, so they need no masks.
    """
    tile, column_tile = select_tile(tl.program_id(0), tiles, tl.cdiv(columns, TILE_COLUMNS), GROUPED_ROWS)
    expert = tl.load(expert_ptr + tile)
    if expert >= 0:
        row = tl.load(row_ptr + tile) + tl.arange(0, TILE_ROWS)
        is_row = row < tl.load(offset_ptr + expert + 1)
        source = row
        if GATHERED:
            source = tl.load(index_ptr + row, mask=is_row, other=0)
        column = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        k = tl.arange(0, TILE_INNER)
        x_tile = x_ptr + source[:, None].to(tl.int64) * x_stride + k[None, :]
        weight_tile = weight_ptr + expert.to(tl.int64) * expert_stride
        weight_tile += column[None, :].to(tl.int64) * column_stride + k[:, None] * inner_stride
        total = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
        for start in range(0, inner, TILE_INNER):
            if EVEN:
                x = tl.load(x_tile, mask=is_row[:, None], other=0.0)
                weight = tl.load(weight_tile)
            else:
                is_inner = k < inner - start
                x = tl.load(x_tile, mask=is_row[:, None] & is_inner[None, :], other=0.0)
                weight = tl.load(weight_tile, mask=is_inner[:, None] & (column[None, :] < columns), other=0.0)
            total = tl.dot(x, weight, total, input_precision="ieee")
            x_tile += TILE_INNER
            weight_tile += TILE_INNER * inner_stride
        out = out_ptr + row[:, None].to(tl.int64) * out_stride + column[None, :]
        is_out = is_row[:, None] & (column[None, :] < columns)
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_out)


@jit
def _block_rows_kernel(
    x_blocks,
    weight_blocks,
    out_blocks,
    out_ptr,
    offset_ptr,
    expert_ptr,
    row_ptr,
    tiles,
    columns,
    inner,
    TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    GROUPED_ROWS: tl.constexpr,
):
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
            if TRANSPOSED:
                weight = weight_blocks.load([expert * inner + start, first_column])
            else:
                weight = tl.trans(weight_blocks.load([expert * columns + first_column, start]))
            total = tl.dot(x, weight, total)
        result = total.to(out_ptr.dtype.element_ty)
        if first_row + TILE_ROWS <= end_row:
            out_blocks.store([first_row, first_column], result)
        else:
            row = first_row + tl.arange(0, TILE_ROWS)
            column = first_column + tl.arange(0, TILE_COLUMNS)
            is_out = (row < end_row)[:, None] & (column < columns)[None, :]
            tl.store(out_ptr + row[:, None].to(tl.int64) * columns + column[None, :], result, mask=is_out)


def multiply_groups_reference(
    x: Tensor, weights: Tensor, offsets: Tensor, index: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """Compute `multiply_groups` by a loop over experts. The host waits for the sizes of the groups."""
    bounds = offsets.tolist()
    if index is None:
        index = torch.arange(len(x), device=x.device)
    out = x.new_zeros(len(index), weights.shape[2 if transposed else 1])
    for expert, weight in enumerate(weights):
        start, stop = bounds[expert], bounds[expert + 1]
        rows = x[index[start:stop]]
        torch.mm(rows, weight if transposed else weight.t(), out=out[start:stop])
    return out


def multiply_groups(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    index: Tensor | None = None,
    transposed: bool = False,
    tiles: tuple[Tensor, Tensor] | None = None,
    tiling: Tiling | None = None,
    by_blocks: bool | None = None,
) -> Tensor:
    """Multiply the rows of each group by the group's matrix, without gradients.

    Args:
        x: [tokens, inner].
        weights: [experts, columns, inner]; with `transposed` [experts, inner, columns].
        offsets: first row of each group in the result, and the end of the last group, int32 [experts + 1].
        index: row of x for each row of the result [rows]; None: the same row.
        transposed: whether rows are multiplied by the matrices instead of their transposes (gradient of the input).
        tiles: result of `plan_tiles` for these offsets; None: compute it.
        tiling: sizes of tiles; None: the fastest known.
        by_blocks: whether to read blocks by tensor descriptors if possible; None: by kernels.expert_rows_gemm.

    Returns:
        [rows, columns] in x's type. Rows beyond the last group are undefined.
    """
    if not use_fused("grouped GEMM", x):
        return multiply_groups_reference(x, weights, offsets, index, transposed)
    if by_blocks is None:
        by_blocks = dispatch.CURRENT.get().reads_expert_blocks
    if by_blocks:
        block_tiling = tiling or fit_tiling(BLOCK_ROWS_TILING, x.device, x.element_size(), x.element_size())
        obstacle = _find_block_obstacle(x, weights, index, transposed, block_tiling)
        columns, inner = weights.shape[1:]
        if transposed:
            columns, inner = inner, columns
        dispatch.record_choice(f"experts' rows, {inner} to {columns}", obstacle or "by tensor descriptors")
        if not obstacle:
            if index is not None:
                x = gather_rows(x, index, offsets)
            return _multiply_blocks(x, weights, offsets, transposed, tiles, block_tiling)
    return _multiply_by_pointers(x, weights, offsets, index, transposed=transposed, tiles=tiles, tiling=tiling)


def _multiply_by_pointers(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    index: Tensor | None,
    *,
    transposed: bool,
    tiles: tuple[Tensor, Tensor] | None,
    tiling: Tiling | None,
) -> Tensor:
    """Compute `multiply_groups` without tensor descriptors."""
    column_dimension, inner_dimension = (2, 1) if transposed else (1, 2)
    columns = weights.shape[column_dimension]
    inner = weights.shape[inner_dimension]
    if index is None:
        rows = len(x)
        default_tiling = ROWS_TILING
    else:
        rows = len(index)
        default_tiling = GATHERED_TILING
    tiling = tiling or fit_tiling(default_tiling, x.device, x.element_size())
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = x.new_empty(rows, columns)
    expert_of_tile, row_of_tile = tiles or plan_tiles(offsets, rows, tiling.rows)
    tile_count = len(expert_of_tile)
    _group_rows_kernel[(tile_count * cdiv(columns, tiling.columns),)](
        x,
        x if index is None else index,
        weights,
        out,
        offsets,
        expert_of_tile,
        row_of_tile,
        tile_count,
        columns,
        inner,
        x.stride(0),
        weights.stride(0),
        weights.stride(column_dimension),
        weights.stride(inner_dimension),
        out.stride(0),
        GATHERED=index is not None,
        EVEN=columns % tiling.columns == 0 and inner % tiling.inner == 0,
        **tiling.get_launch_options(),
    )
    return out


def _find_block_obstacle(x: Tensor, weights: Tensor, index: Tensor | None, transposed: bool, tiling: Tiling) -> str:
    """Return why `multiply_groups` cannot read these factors in blocks by tensor descriptors, or "" if it can."""
    if transposed:
        _, inner, columns = weights.shape
    else:
        _, columns, inner = weights.shape
    if x.element_size() != 2 or not weights.is_contiguous() or columns % 8 or inner % 8:
        return "by pointers (descriptors need 16-bit types, and sizes of matrices that divide by 8)"
    if transposed and inner % tiling.inner:
        return f"by pointers (descriptors need inner sizes that divide by {tiling.inner})"
    if index is not None and columns < COLUMNS_WORTH_COPY:
        return f"by pointers (a copy of rows does not pay for fewer than {COLUMNS_WORTH_COPY} columns)"
    if weights.data_ptr() % DESCRIPTOR_ALIGN:
        return f"by pointers (descriptors need matrices at multiples of {DESCRIPTOR_ALIGN} bytes)"
    if not has_aligned_rows(x):
        return f"by pointers (descriptors need rows at multiples of {DESCRIPTOR_ALIGN} bytes)"
    if not dispatch.IS_INTERPRETED and torch.cuda.get_device_capability(x.device) < (9, 0):
        return "by pointers (only GPUs from Hopper on read by descriptors)"
    return ""


def _multiply_blocks(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    transposed: bool,
    tiles: tuple[Tensor, Tensor] | None,
    tiling: Tiling,
) -> Tensor:
    """Compute `multiply_groups` without an index, with tensor descriptors."""
    if transposed:
        _, inner, columns = weights.shape
        weight_block = [tiling.inner, tiling.columns]
    else:
        _, columns, inner = weights.shape
        weight_block = [tiling.columns, tiling.inner]
    out = x.new_empty(len(x), columns)
    if not len(x):
        return out
    expert_of_tile, row_of_tile = tiles or plan_tiles(offsets, len(x), tiling.rows)
    tile_count = len(expert_of_tile)
    matrix = weights.flatten(0, 1)
    _block_rows_kernel[(tile_count * cdiv(columns, tiling.columns),)](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [tiling.rows, tiling.inner]),
        TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), weight_block),
        TensorDescriptor(out, list(out.shape), list(out.stride()), [tiling.rows, tiling.columns]),
        out,
        offsets,
        expert_of_tile,
        row_of_tile,
        tile_count,
        columns,
        inner,
        TRANSPOSED=transposed,
        **tiling.get_launch_options(),
    )
    return out
