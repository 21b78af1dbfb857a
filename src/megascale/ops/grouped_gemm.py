"""GEMMs of rows that are grouped by expert: each group of rows has a matrix of its own, and groups differ in size.

The rows of a group are adjacent. `offsets`, on the device, holds the first row of each group. The host reads no sizes,
so CUDA graphs can replay the launches. Rows may be read through an index, without a permuted copy. Sums are float32, in
an order that depends on sizes only.

Forward and the gradient of the input have one program per tile of the result. `_plan_tiles_kernel` assigns the tiles of
all groups to programs. At most one tile per group is incomplete. The gradient of a matrix has one program per tile of
the matrix, which reads all rows of the group. On Hopper and newer GPUs this program reads and adds whole blocks by
tensor descriptors (TMA). Blocks need adjacent rows, so `gather_rows` first copies rows that have an index. With
kernels.expert_rows_gemm=auto the other two GEMMs read blocks too, where sizes permit.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.ops import dispatch
from megascale.ops.dispatch import HAS_TRITON, cdiv, jit, next_power_of_2, tl, use_fused

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor


class Tiling(NamedTuple):
    """Sizes of a kernel's tiles.

    Attributes:
        rows, columns: size of a tile of the result.
        inner: entries of the summed dimension per iteration.
        grouped_rows: number of row tiles in a band. Programs compute a band column by column, so that both inputs are
            read from the cache.
        warps, stages: warps per program, and stages of the software pipeline.
    """

    rows: int = 128
    columns: int = 128
    inner: int = 64
    grouped_rows: int = 8
    warps: int = 8
    stages: int = 4

    def count_shared_bytes(self, element_bytes: int, result_bytes: int = 0) -> int:
        """Return an upper bound of the shared memory of a program: the tiles of all stages, or a tile of the result.

        Args:
            element_bytes: bytes per entry of the factors.
            result_bytes: bytes per entry of a result that is stored in blocks; 0: it is stored from registers.
        """
        factors = self.stages * (self.rows + self.columns) * self.inner * element_bytes
        return max(factors, self.rows * self.columns * result_bytes)

    def get_launch_options(self) -> dict[str, int]:
        """Return the constants and options of a kernel's launch with these sizes."""
        return {
            "TILE_ROWS": self.rows,
            "TILE_COLUMNS": self.columns,
            "TILE_INNER": self.inner,
            "GROUPED_ROWS": self.grouped_rows,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# The fastest tilings on an H100, for the shapes of Qwen3-30B-A3B and Mixtral 8x7B (dev/log.md, 2026-11-27).
ROWS_TILING = Tiling(columns=256)
GATHERED_TILING = Tiling(columns=256, stages=3)
BLOCK_ROWS_TILING = Tiling(columns=256)  # with tensor descriptors
GRADIENT_TILING = Tiling(columns=256)  # with tensor descriptors
POINTER_GRADIENT_TILING = Tiling(inner=32, warps=4, stages=5)
# Rows and columns per program of the kernel that copies rows.
COPIED_ROWS, COPIED_COLUMNS = 8, 512
# With at least this number of columns in the result, reading by blocks saves more time than the copy of rows takes.
COLUMNS_WORTH_COPY = 8192
DESCRIPTOR_ALIGN = 16  # bytes by which addresses and strides of blocks are aligned
RESERVED_SHARED_BYTES = 2048  # shared memory per program that the compiler uses besides tiles
_FEWEST_STAGES = 3  # Tiles become smaller before the software pipeline becomes shorter than this.
_SMALLEST_COLUMNS, _SMALLEST_INNER = 64, 16


def shrink_tiling(tiling: Tiling, limit: int, element_bytes: int, result_bytes: int = 0) -> Tiling:
    """Return a tiling that needs at most `limit` bytes of shared memory per program.

    It has fewer stages, then fewer columns, then fewer entries per iteration. The number of rows stays, because
    `plan_tiles` depends on it. Other arguments are those of `count_shared_bytes`.
    """
    fewest_stages = min(_FEWEST_STAGES, tiling.stages)
    smallest = tiling
    for inner in _halve(tiling.inner, _SMALLEST_INNER):
        for columns in _halve(tiling.columns, _SMALLEST_COLUMNS):
            for stages in range(tiling.stages, fewest_stages - 1, -1):
                smallest = tiling._replace(inner=inner, columns=columns, stages=stages)
                if smallest.count_shared_bytes(element_bytes, result_bytes) + RESERVED_SHARED_BYTES <= limit:
                    return smallest
    return smallest


def _halve(size: int, smallest: int) -> list[int]:
    """Return a size and its halves, quarters and so on, down to `smallest`."""
    sizes = [size]
    while sizes[-1] // 2 >= smallest:
        sizes.append(sizes[-1] // 2)
    return sizes


@cache
def fit_tiling(tiling: Tiling, device: torch.device, element_bytes: int, result_bytes: int = 0) -> Tiling:
    """Return `shrink_tiling` for the shared memory of a device, or the tiling itself for Triton's interpreter."""
    if device.type != "cuda":
        return tiling
    properties = torch.cuda.get_device_properties(device)
    limit: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # missing in the stub only
    return shrink_tiling(tiling, limit, element_bytes, result_bytes)


@jit
def _plan_tiles_kernel(
    offset_ptr, expert_ptr, row_ptr, experts, tiles, TILE_ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the expert and the first row of BLOCK tiles; see `plan_tiles`."""
    expert = tl.arange(0, EXPERTS)
    first_row = tl.load(offset_ptr + expert, mask=expert < experts, other=0)
    end_row = tl.load(offset_ptr + expert + 1, mask=expert < experts, other=0)
    tile_count = (end_row - first_row + TILE_ROWS - 1) // TILE_ROWS
    end_tile = tl.cumsum(tile_count, 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The number of experts whose tiles all precede a tile is the index of the tile's expert.
    is_before = (end_tile[None, :] <= tile[:, None]) & (expert[None, :] < experts)
    tile_expert = tl.sum(is_before.to(tl.int32), 1)
    is_tile_expert = expert[None, :] == tile_expert[:, None]
    # Tile t of an expert starts at first_row + (t - first tile of the expert) x TILE_ROWS.
    row_offset = first_row - (end_tile - tile_count) * TILE_ROWS
    row = tl.sum(tl.where(is_tile_expert, row_offset[None, :], 0), 1) + tile * TILE_ROWS
    tl.store(expert_ptr + tile, tl.where(tile_expert < experts, tile_expert, -1), mask=tile < tiles)
    tl.store(row_ptr + tile, row, mask=tile < tiles)


@jit
def select_tile(program, row_tiles, column_tiles, GROUPED_ROWS: tl.constexpr):
    """Return the row tile and the column tile of a program. Programs go through bands of row tiles column by column."""
    band = program // (GROUPED_ROWS * column_tiles)
    index_in_band = program % (GROUPED_ROWS * column_tiles)
    band_rows = tl.minimum(row_tiles - band * GROUPED_ROWS, GROUPED_ROWS)
    return band * GROUPED_ROWS + index_in_band % band_rows, index_in_band // band_rows


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


@jit
def _group_gradient_kernel(
    dy_ptr,
    dy_index_ptr,
    x_ptr,
    index_ptr,
    out_ptr,
    offset_ptr,
    rows,
    columns,
    dy_stride,
    x_stride,
    DY_GATHERED: tl.constexpr,
    GATHERED: tl.constexpr,
    EVEN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    GROUPED_ROWS: tl.constexpr,
):
    """Compute one tile of `accumulate_group_gradients`.

    Rows and columns are those of the expert's matrix. A token is a row of dy and x, over which products are summed.
    DY_GATHERED, GATHERED: rows of dy and x are read through an index. EVEN: rows and columns need no masks.
    """
    expert = tl.program_id(1)
    row_tile, column_tile = select_tile(
        tl.program_id(0), tl.cdiv(rows, TILE_ROWS), tl.cdiv(columns, TILE_COLUMNS), GROUPED_ROWS
    )
    row = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    first_token = tl.load(offset_ptr + expert)
    end_token = tl.load(offset_ptr + expert + 1)
    # Offsets within a matrix are 32-bit integers, which saves registers.
    out = out_ptr + expert.to(tl.int64) * rows * columns + (row[:, None] * columns + column[None, :])
    is_out = (row[:, None] < rows) & (column[None, :] < columns)
    # Sums start with the accumulated gradient. Adding it at the end would need as many registers as the sums.
    if ACCUMULATE:
        total = tl.load(out, mask=is_out, other=0.0)
    else:
        total = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    # Indices are read one iteration ahead. Otherwise only half as many copies would be in flight.
    token = first_token + tl.arange(0, TILE_INNER)
    source = token
    dy_source = token
    if GATHERED:
        source = tl.load(index_ptr + token, mask=token < end_token, other=0)
    if DY_GATHERED:
        dy_source = tl.load(dy_index_ptr + token, mask=token < end_token, other=0)
    for start in range(first_token, end_token, TILE_INNER):
        token = start + tl.arange(0, TILE_INNER)
        is_token = token < end_token
        is_dy = is_token[:, None]
        is_x = is_token[:, None]
        if not EVEN:
            is_dy = is_dy & (row[None, :] < rows)
            is_x = is_x & (column[None, :] < columns)
        dy_token = dy_source if DY_GATHERED else token
        x_token = source if GATHERED else token
        dy = tl.load(dy_ptr + dy_token[:, None].to(tl.int64) * dy_stride + row[None, :], mask=is_dy, other=0.0)
        x = tl.load(x_ptr + x_token[:, None].to(tl.int64) * x_stride + column[None, :], mask=is_x, other=0.0)
        next_token = token + TILE_INNER
        if GATHERED:
            source = tl.load(index_ptr + next_token, mask=next_token < end_token, other=0)
        if DY_GATHERED:
            dy_source = tl.load(dy_index_ptr + next_token, mask=next_token < end_token, other=0)
        total = tl.dot(tl.trans(dy), x, total, input_precision="ieee")
    tl.store(out, total, mask=is_out)


@jit
def _block_gradient_kernel(
    dy_blocks,
    x_blocks,
    out_blocks,
    dy_ptr,
    x_ptr,
    offset_ptr,
    rows,
    columns,
    dy_stride,
    x_stride,
    ACCUMULATE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    GROUPED_ROWS: tl.constexpr,
):
    expert = tl.program_id(1)
    row_tile, column_tile = select_tile(
        tl.program_id(0), tl.cdiv(rows, TILE_ROWS), tl.cdiv(columns, TILE_COLUMNS), GROUPED_ROWS
    )
    first_row = row_tile * TILE_ROWS
    first_column = column_tile * TILE_COLUMNS
    first_token = tl.load(offset_ptr + expert)
    end_token = tl.load(offset_ptr + expert + 1)
    end_of_full_tiles = first_token + (end_token - first_token) // TILE_INNER * TILE_INNER
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for start in range(first_token, end_of_full_tiles, TILE_INNER):
        dy = dy_blocks.load([start, first_row])
        x = x_blocks.load([start, first_column])
        total = tl.dot(tl.trans(dy), x, total)
    if end_of_full_tiles < end_token:
        # A block would also read rows of the next group.
        token = end_of_full_tiles + tl.arange(0, TILE_INNER)
        row = first_row + tl.arange(0, TILE_ROWS)
        column = first_column + tl.arange(0, TILE_COLUMNS)
        is_dy = (token[:, None] < end_token) & (row[None, :] < rows)
        is_x = (token[:, None] < end_token) & (column[None, :] < columns)
        dy = tl.load(dy_ptr + token[:, None].to(tl.int64) * dy_stride + row[None, :], mask=is_dy, other=0.0)
        x = tl.load(x_ptr + token[:, None].to(tl.int64) * x_stride + column[None, :], mask=is_x, other=0.0)
        total = tl.dot(tl.trans(dy), x, total)
    # The memory system adds, so that the program does not wait for the accumulated gradient. Each entry is added once,
    # so the result does not depend on an order.
    tile = tl.reshape(total, (1, TILE_ROWS, TILE_COLUMNS))
    if ACCUMULATE:
        out_blocks.atomic_add([expert, first_row, first_column], tile)
    else:
        out_blocks.store([expert, first_row, first_column], tile)


@jit
def _copy_rows_kernel(x_ptr, index_ptr, out_ptr, end_ptr, columns, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy a tile of the rows at index_ptr; see `gather_rows`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = row < tl.load(end_ptr)
    source = tl.load(index_ptr + row, mask=is_row, other=0)
    inside = is_row[:, None] & (column[None, :] < columns)
    x = tl.load(x_ptr + source[:, None].to(tl.int64) * x_stride + column[None, :], mask=inside)
    tl.store(out_ptr + row[:, None].to(tl.int64) * columns + column[None, :], x, mask=inside)


def plan_tiles(offsets: Tensor, rows: int, tile_rows: int = ROWS_TILING.rows) -> tuple[Tensor, Tensor]:
    """Assign the row tiles of all groups to programs, on the device.

    Args:
        offsets: first row of each group and end of the last group, int32 [experts + 1].
        rows: maximum of offsets[-1].

    Returns:
        The expert of each tile (-1 for tiles without rows) and the first row of each tile, both int32 [tiles]. The
        number of tiles depends on sizes only. It includes one incomplete tile per expert.
    """
    experts = len(offsets) - 1
    tiles = cdiv(rows, tile_rows) + experts
    expert_of_tile = torch.empty(tiles, dtype=torch.int32, device=offsets.device)
    row_of_tile = torch.empty(tiles, dtype=torch.int32, device=offsets.device)
    block = 64
    _plan_tiles_kernel[(cdiv(tiles, block),)](
        offsets,
        expert_of_tile,
        row_of_tile,
        experts,
        tiles,
        TILE_ROWS=tile_rows,
        EXPERTS=max(2, next_power_of_2(experts)),
        BLOCK=block,
    )
    return expert_of_tile, row_of_tile


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
    column_dimension, inner_dimension = (2, 1) if transposed else (1, 2)
    columns = weights.shape[column_dimension]
    inner = weights.shape[inner_dimension]
    if by_blocks is None:
        by_blocks = dispatch.CURRENT.get().reads_expert_blocks
    if by_blocks:
        block_tiling = tiling or fit_tiling(BLOCK_ROWS_TILING, x.device, x.element_size(), x.element_size())
        obstacle = _find_block_obstacle(x, weights, index, transposed, block_tiling)
        dispatch.record_choice(f"experts' rows, {inner} to {columns}", obstacle or "by tensor descriptors")
        if not obstacle:
            if index is not None:
                x = gather_rows(x, index, offsets)
            return _multiply_blocks(x, weights, offsets, transposed, tiles, block_tiling)
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


def has_aligned_rows(x: Tensor) -> bool:
    """Return whether tensor descriptors can read blocks of a matrix."""
    row_bytes = x.stride(0) * x.element_size()
    return x.stride(-1) == 1 and not x.data_ptr() % DESCRIPTOR_ALIGN and not row_bytes % DESCRIPTOR_ALIGN


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


def accumulate_group_gradients_reference(
    main_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    index: Tensor | None = None,
    dy_index: Tensor | None = None,
    overwrite: bool = False,
) -> None:
    """Compute `accumulate_group_gradients` by a loop over experts. The host waits for the sizes of the groups."""
    bounds = offsets.tolist()
    if index is None:
        index = torch.arange(len(x), device=x.device)
    if dy_index is None:
        dy_index = torch.arange(len(dy), device=x.device)
    if overwrite:
        main_grad.zero_()
    for expert, gradient in enumerate(main_grad):
        start, stop = bounds[expert], bounds[expert + 1]
        rows = x[index[start:stop]].to(gradient.dtype)
        gradient.addmm_(dy[dy_index[start:stop]].to(gradient.dtype).t(), rows)


def should_copy_rows(x: Tensor, columns: int) -> bool:
    """Return whether to copy rows of x for the gradient of a matrix, so that tensor descriptors can read them.

    Otherwise rows are read through their index, which is slower.

    Args:
        columns: number of columns of the other factor, which has x's type.
    """
    if x.element_size() != 2 or x.shape[1] % 8 or columns % 8 or not use_fused("grouped GEMM", x):
        return False
    return dispatch.IS_INTERPRETED or torch.cuda.get_device_capability(x.device) >= (9, 0)


def gather_rows(x: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    """Return the rows of x at `index`, [rows, columns]. Rows beyond the last offset are undefined, like their indices.

    Args:
        x: [tokens, columns].
        index: row of x for each row of the result [rows].
        offsets: int32 [experts + 1].
    """
    if not use_fused("grouped GEMM", x):
        return x[index]
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = x.new_empty(len(index), x.shape[1])
    _copy_rows_kernel[(cdiv(len(index), COPIED_ROWS), cdiv(x.shape[1], COPIED_COLUMNS))](
        x, index, out, offsets[-1:], x.shape[1], x.stride(0), ROWS=COPIED_ROWS, COLUMNS=COPIED_COLUMNS
    )
    return out


def accumulate_group_gradients(
    main_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    index: Tensor | None = None,
    dy_index: Tensor | None = None,
    overwrite: bool = False,
    tiling: Tiling | None = None,
) -> None:
    """Add the gradient of each group's matrix to `main_grad`, or overwrite it. Without rows the gradient is zero.

    Args:
        main_grad: [experts, columns, inner], contiguous, float32 or wider.
        dy: gradient of the result [rows, columns].
        x, offsets, index: arguments of `multiply_groups`.
        dy_index: row of dy for each row of the result [rows]; None: the same row.
        overwrite: whether `main_grad` is overwritten.
        tiling: sizes of tiles; None: the fastest known.
    """
    is_fused = main_grad.dtype == torch.float32 and use_fused("grouped GEMM", x)
    if not is_fused:
        accumulate_group_gradients_reference(main_grad, dy, x, offsets, index, dy_index, overwrite)
        return
    experts, rows, columns = main_grad.shape
    if dy.stride(-1) != 1:
        dy = dy.contiguous()
    if x.stride(-1) != 1:
        x = x.contiguous()
    # Copies of rows are aligned.
    are_rows_aligned = (dy_index is not None or has_aligned_rows(dy)) and (index is not None or has_aligned_rows(x))
    is_aligned = are_rows_aligned and not main_grad.data_ptr() % DESCRIPTOR_ALIGN
    if is_aligned and should_copy_rows(x, rows):
        if dy_index is not None:
            dy = gather_rows(dy, dy_index, offsets)
        if index is not None:
            x = gather_rows(x, index, offsets)
        default_tiling = fit_tiling(GRADIENT_TILING, x.device, x.element_size(), main_grad.element_size())
        _accumulate_blocks(main_grad, dy, x, offsets, overwrite, tiling or default_tiling)
        return
    tiling = tiling or fit_tiling(POINTER_GRADIENT_TILING, x.device, x.element_size())
    _group_gradient_kernel[(cdiv(rows, tiling.rows) * cdiv(columns, tiling.columns), experts)](
        dy,
        dy if dy_index is None else dy_index,
        x,
        x if index is None else index,
        main_grad,
        offsets,
        rows,
        columns,
        dy.stride(0),
        x.stride(0),
        DY_GATHERED=dy_index is not None,
        GATHERED=index is not None,
        EVEN=rows % tiling.rows == 0 and columns % tiling.columns == 0,
        ACCUMULATE=not overwrite,
        **tiling.get_launch_options(),
    )


def _accumulate_blocks(
    main_grad: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, overwrite: bool, tiling: Tiling
) -> None:
    """Compute `accumulate_group_gradients` without indices, with tensor descriptors."""
    experts, rows, columns = main_grad.shape
    if not len(x):
        if overwrite:
            main_grad.zero_()
        return
    _block_gradient_kernel[(cdiv(rows, tiling.rows) * cdiv(columns, tiling.columns), experts)](
        TensorDescriptor(dy, list(dy.shape), list(dy.stride()), [tiling.inner, tiling.rows]),
        TensorDescriptor(x, list(x.shape), list(x.stride()), [tiling.inner, tiling.columns]),
        TensorDescriptor(main_grad, list(main_grad.shape), list(main_grad.stride()), [1, tiling.rows, tiling.columns]),
        dy,
        x,
        offsets,
        rows,
        columns,
        dy.stride(0),
        x.stride(0),
        ACCUMULATE=not overwrite,
        **tiling.get_launch_options(),
    )
