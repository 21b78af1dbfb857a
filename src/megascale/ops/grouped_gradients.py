"""Gradients of the matrices of grouped GEMMs: each expert's sum over the rows of its group (grouped_gemm.py).

One program per tile of a matrix reads all rows of the group. On Hopper and newer GPUs this program reads and adds whole
blocks by tensor descriptors (TMA). Blocks need adjacent rows, so `gather_rows` first copies rows that have an index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.dispatch import HAS_TRITON, cdiv, jit, tl, use_fused
from megascale.ops.grouped_tiles import GRADIENT_TILING, POINTER_GRADIENT_TILING, Tiling, fit_tiling, select_tile
from megascale.ops.row_copies import DESCRIPTOR_ALIGN, gather_rows, has_aligned_rows, should_copy_rows

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor


@jit
def _load_sources(index_ptr, token, end_token, GATHERED: tl.constexpr):
    """Return the row of each token: the token itself, or with GATHERED the entry of the index."""
    if GATHERED:
        # Triton compiles both results, which must have one type.
        return tl.load(index_ptr + token, mask=token < end_token, other=0).to(token.dtype)
    return token


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
    source = _load_sources(index_ptr, token, end_token, GATHERED)
    dy_source = _load_sources(dy_index_ptr, token, end_token, DY_GATHERED)
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
        source = _load_sources(index_ptr, token + TILE_INNER, end_token, GATHERED)
        dy_source = _load_sources(dy_index_ptr, token + TILE_INNER, end_token, DY_GATHERED)
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
