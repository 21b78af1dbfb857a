"""Sizes of the tiles of grouped GEMMs, and the tile of each program."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl


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


@jit
def select_tile(program, row_tiles, column_tiles, GROUPED_ROWS: tl.constexpr):
    """Return the row tile and the column tile of a program. Programs go through bands of row tiles column by column."""
    band = program // (GROUPED_ROWS * column_tiles)
    index_in_band = program % (GROUPED_ROWS * column_tiles)
    band_rows = tl.minimum(row_tiles - band * GROUPED_ROWS, GROUPED_ROWS)
    return band * GROUPED_ROWS + index_in_band % band_rows, index_in_band // band_rows
