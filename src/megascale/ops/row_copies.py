"""Copies of rows that tensor descriptors read, for grouped GEMMs whose rows have an index."""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops import dispatch
from megascale.ops.dispatch import cdiv, jit, tl, use_fused

DESCRIPTOR_ALIGN = 16  # bytes by which addresses and strides of blocks are aligned
# Rows and columns per program of the kernel that copies rows.
COPIED_ROWS, COPIED_COLUMNS = 8, 512


def has_aligned_rows(x: Tensor) -> bool:
    """Return whether tensor descriptors can read blocks of a matrix."""
    row_bytes = x.stride(0) * x.element_size()
    return x.stride(-1) == 1 and not x.data_ptr() % DESCRIPTOR_ALIGN and not row_bytes % DESCRIPTOR_ALIGN


def should_copy_rows(x: Tensor, columns: int) -> bool:
    """Return whether to copy rows of x for the gradient of a matrix, so that tensor descriptors can read them.

    Otherwise rows are read through their index, which is slower.

    Args:
        columns: number of columns of the other factor, which has x's type.
    """
    if x.element_size() != 2 or x.shape[1] % 8 or columns % 8 or not use_fused("grouped GEMM", x):
        return False
    return dispatch.IS_INTERPRETED or torch.cuda.get_device_capability(x.device) >= (9, 0)


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
