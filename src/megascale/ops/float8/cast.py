"""Casts to float8. One pass over a tensor computes the values, the transposed copy and the counts.

- `cast_by_amax` computes the scale from the tensor's amax (largest magnitude). If the kernel that wrote the tensor did
  not collect the amax, `compute_amax` does so in a pass of its own.
- `cast_rows` gives each row a scale of its own, and each row of the transposed copy.
- `transpose_scaled_rows` makes a transposed copy with one scale of the result of `cast_rows`, without the source.

A data-parallel rank casts its flat shard of several matrices after the update (parallel/float8_gather.py).
`compute_shard_amaxes` computes the amax of the rank's range of each matrix. After an all-reduce of the amaxes
`compute_shard_scales` computes the scales, and `cast_shard` casts. Each function is one launch for any number of
matrices. The bytes equal those of `cast_by_amax` on whole matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.float8.formats import (
    E4M3,
    SMALLEST_SCALE,
    Float8,
    Format,
    amax_reference,
    quantise_reference,
    scale_from_amax,
)
from megascale.ops.reduce import flatten_rows
from megascale.ops.segments import TILE as SHARD_TILE
from megascale.ops.segments import Segments, load_any_tile, load_tile, read_tile, store_tile

# Rows, columns and warps of a tile of the cast. Each is the fastest of those tried on an H200 at 4,096 x 20,480, where
# a copy runs at 4.10 TB/s. The cast with a transposed copy runs at 3.66 TB/s.
TILE = 128, 64, 4
TILE_WITH_COUNTS = 64, 64, 2  # Counting needs more registers than TILE leaves.
TILE_WITHOUT_COLUMNS = 4, 1024, 8
# The pass for the amax alone: rows, columns and warps of a tile, and the approximate number of programs. Each program
# ends with one atomic maximum.
TILE_AMAX_ONLY = 4, 512, 8, 4224
# The row-wise cast: columns that a program holds at once, and warps.
ROW_BLOCK, ROW_WARPS = 4096, 8
SCALE_STRIDE = 4  # float32 numbers from one scale to the next, because cuBLASLt reads scales at multiples of 16 bytes
# The transpose: words of four bytes in each dimension of a tile, and warps.
TRANSPOSE_WORDS, TRANSPOSE_WARPS = 32, 4


@jit
def magnitude_bits(x):
    """Return the bits of |x| as int32. They order like the floats, with NaN above infinity, so a maximum keeps NaN."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@jit
def compute_scale(amax, empty, largest: tl.constexpr, smallest: tl.constexpr, POWER_OF_2: tl.constexpr):
    """Compute `scale_from_amax` within a kernel."""
    scale = tl.maximum(amax * (1.0 / largest), smallest)
    if POWER_OF_2:
        # Unsigned, because a NaN's bits plus this constant exceed int32.
        scale = ((scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    # Comparisons with NaN are false.
    is_usable = (amax > 0.0) & (amax < float("inf")) & (scale < float("inf"))
    return tl.where(is_usable, scale, empty)


@jit
def scale_and_clamp(x, inverse_scale, largest: tl.constexpr):
    """Return x * inverse_scale in float32, clamped to the format's range; NaN where x is not finite."""
    scaled = x * inverse_scale
    clamped = tl.minimum(tl.maximum(scaled, -largest), largest)
    return tl.where(tl.abs(x) < float("inf"), clamped, float("nan"))


@jit
def _find_clipped_and_flushed(x, inverse_scale, clipped_above: tl.constexpr, flushed_up_to: tl.constexpr):
    """Return the masks of clipped and flushed numbers as int32. x must be zero outside the tensor."""
    magnitude = tl.abs(x * inverse_scale)
    clipped = ((magnitude > clipped_above) & (tl.abs(x) < float("inf"))).to(tl.int32)
    flushed = ((magnitude <= flushed_up_to) & (x != 0.0)).to(tl.int32)
    return clipped, flushed


@jit
def _add_counts(counts_ptr, clipped, flushed):
    """Add to the two counts. Most tiles skip the atomics, because their numbers are 0."""
    tl.atomic_add(counts_ptr, clipped.to(tl.int64), mask=clipped > 0, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, flushed.to(tl.int64), mask=flushed > 0, sem="relaxed")


@jit
def _amax_kernel(
    x_ptr,
    amax_ptr,
    row_count,
    width,
    stride,
    program_rows,
    PER_COLUMN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Raise amax to the largest magnitude of the tensor, or (PER_COLUMN) of each column."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first_row = tl.program_id(1) * program_rows
    end_row = tl.minimum(first_row + program_rows, row_count)
    amax_bits = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for start in range(first_row, end_row, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row[:, None] < end_row) & (column[None, :] < width)
        x = tl.load(x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)
        amax_bits = tl.maximum(amax_bits, magnitude_bits(x.to(tl.float32)))
    if PER_COLUMN:
        tl.atomic_max(amax_ptr + column, tl.max(amax_bits, 0), mask=column < width, sem="relaxed")
    else:
        tl.atomic_max(amax_ptr, tl.max(amax_bits), sem="relaxed")


@jit
def _cast_kernel(
    x_ptr,
    rows_ptr,
    columns_ptr,
    amax_ptr,
    scale_ptr,
    counts_ptr,
    row_count,
    width,
    stride,
    LARGEST: tl.constexpr,
    CLIPPED: tl.constexpr,
    FLUSHED: tl.constexpr,
    SMALLEST: tl.constexpr,
    PER_COLUMN: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast one tile into rows_ptr, and its transpose into columns_ptr.

    PER_COLUMN: amax_ptr holds the amax of each column, and each column has a scale, a power of two. COUNT: add the
    numbers of clipped and flushed elements to counts_ptr.
    """
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row[:, None] < row_count) & (column[None, :] < width)
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if PER_COLUMN:
        amax = tl.load(amax_ptr + column, mask=column < width, other=0.0)
        scale = compute_scale(amax, 1.0, LARGEST, SMALLEST, True)
        if tl.program_id(1) == 0:
            tl.store(scale_ptr + column, scale, mask=column < width)
        inverse_scale = tl.math.div_rn(1.0, scale)[None, :]
    else:
        scale = compute_scale(tl.load(amax_ptr), 1.0, LARGEST, SMALLEST, False)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_ptr, scale)
        inverse_scale = tl.math.div_rn(1.0, scale)
    q = scale_and_clamp(x, inverse_scale, LARGEST)
    if HAS_ROWS:
        q_rows = q.to(rows_ptr.dtype.element_ty)
        tl.store(rows_ptr + row[:, None].to(tl.int64) * width + column[None, :], q_rows, mask=inside)
    if HAS_COLUMNS:
        q_columns = tl.trans(q.to(columns_ptr.dtype.element_ty))
        target = columns_ptr + column[:, None].to(tl.int64) * row_count + row[None, :]
        tl.store(target, q_columns, mask=(column[:, None] < width) & (row[None, :] < row_count))
    if COUNT:
        clipped, flushed = _find_clipped_and_flushed(x, inverse_scale, CLIPPED, FLUSHED)
        # Both counts fit one integer, because a tile has at most 65,535 elements. So one reduction suffices.
        packed_counts = tl.sum(clipped * 65536 + flushed)
        _add_counts(counts_ptr, packed_counts >> 16, packed_counts & 65535)


@jit
def _row_amax(row_ptr, width, BLOCK: tl.constexpr):
    """Return the largest magnitude of a row."""
    amax_bits = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        amax_bits = tl.maximum(amax_bits, magnitude_bits(x))
    return tl.max(amax_bits, 0).to(tl.float32, bitcast=True)


@jit
def _row_amaxes_kernel(x_ptr, amax_ptr, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(amax_ptr + row, _row_amax(x_ptr + row * stride, width, BLOCK))


@jit
def _cast_rows_kernel(
    x_ptr,
    rows_ptr,
    scale_ptr,
    amax_ptr,
    counts_ptr,
    width,
    stride,
    LARGEST: tl.constexpr,
    CLIPPED: tl.constexpr,
    FLUSHED: tl.constexpr,
    SMALLEST: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    EMPTY_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast one row. If the amax is computed here, the row is read twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    if HAS_AMAX:
        amax = tl.load(amax_ptr + row)
    else:
        amax = _row_amax(x_ptr + row * stride, width, BLOCK)
    scale = compute_scale(amax, EMPTY_SCALE, LARGEST, SMALLEST, True)
    tl.store(scale_ptr + row, scale)
    inverse_scale = tl.math.div_rn(1.0, scale)
    # The number of clipped elements is in the upper 16 bits, and that of flushed elements in the lower.
    packed_counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        q = scale_and_clamp(x, inverse_scale, LARGEST)
        tl.store(rows_ptr + row * width + column, q.to(rows_ptr.dtype.element_ty), mask=column < width)
        if COUNT:
            clipped, flushed = _find_clipped_and_flushed(x, inverse_scale, CLIPPED, FLUSHED)
            packed_counts += clipped * 65536 + flushed
    if COUNT:
        _add_counts(counts_ptr, tl.sum(packed_counts >> 16, 0), tl.sum(packed_counts & 65535, 0))


@jit
def _shard_amaxes_kernel(flat_ptr, tile_ptr, amax_ptr, TILE: tl.constexpr):
    """Raise the amax of a tile's matrix to the largest magnitude of the tile."""
    base, low, high, _, matrix = read_tile(tile_ptr)
    amax_bits = tl.max(magnitude_bits(load_any_tile(flat_ptr + base, low, high, TILE)), 0)
    # Skip the atomic if the stored amax is larger. A stale value is safe to compare with, because the amax only grows.
    tl.atomic_max(amax_ptr + matrix, amax_bits, mask=amax_bits > tl.load(amax_ptr + matrix), sem="relaxed")


@jit
def _shard_scales_kernel(
    amax_ptr, scale_ptr, count, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
):
    # Scales are 4 numbers apart (SCALE_STRIDE).
    matrix = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + matrix, mask=matrix < count, other=0.0)
    tl.store(scale_ptr + matrix * 4, compute_scale(amax, 1.0, LARGEST, SMALLEST, False), mask=matrix < count)


@jit
def _cast_shard_kernel(flat_ptr, tile_ptr, scale_ptr, out_ptr, LARGEST: tl.constexpr, TILE: tl.constexpr):
    base, low, high, _, matrix = read_tile(tile_ptr)
    offset = tl.arange(0, TILE)
    inverse_scale = tl.math.div_rn(1.0, tl.load(scale_ptr + matrix * 4))
    if (low == 0) & (high == TILE):
        q = scale_and_clamp(load_tile(flat_ptr + base, offset, low, high, True), inverse_scale, LARGEST)
        store_tile(out_ptr + base, offset, q.to(out_ptr.dtype.element_ty), low, high, True)
    else:
        q = scale_and_clamp(load_tile(flat_ptr + base, offset, low, high, False), inverse_scale, LARGEST)
        store_tile(out_ptr + base, offset, q.to(out_ptr.dtype.element_ty), low, high, False)


@jit
def _transpose_kernel(x_ptr, y_ptr, rows, width, BLOCK: tl.constexpr):
    """Transpose bytes [4 rows, 4 width] as words of four bytes. Each thread transposes blocks of 4 x 4 bytes.

    Triton 3.6 exchanges words between threads correctly, but float8 wrongly in some cases (`_launch_cast`).
    """
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    source = x_ptr + row[:, None].to(tl.int64) * 4 * width + column[None, :]
    # One word of each of four adjacent rows: a block of 4 x 4 bytes.
    word0 = tl.load(source, mask=inside, other=0)
    word1 = tl.load(source + width, mask=inside, other=0)
    word2 = tl.load(source + 2 * width, mask=inside, other=0)
    word3 = tl.load(source + 3 * width, mask=inside, other=0)
    target = y_ptr + column[:, None].to(tl.int64) * 4 * rows + row[None, :]
    inside_target = (column[:, None] < width) & (row[None, :] < rows)
    for byte in tl.static_range(4):
        # A row of the block's transpose has the same byte of each word.
        lower_half = ((word0 >> (8 * byte)) & 255) | (((word1 >> (8 * byte)) & 255) << 8)
        transposed = lower_half | (((word2 >> (8 * byte)) & 255) << 16) | (((word3 >> (8 * byte)) & 255) << 24)
        tl.store(target + byte * rows, tl.trans(transposed), mask=inside_target)


@jit
def _rescale_byte(word, byte: tl.constexpr, ratio):
    """Return an E4M3 byte of each word, multiplied by `ratio`, as the lowest byte of an int32."""
    number = ((word >> (8 * byte)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return (number * ratio).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@jit
def _transpose_scaled_kernel(x_ptr, scale_ptr, largest_ptr, y_ptr, rows, width, BLOCK: tl.constexpr):
    """Transpose E4M3 bytes as `_transpose_kernel` does, each row multiplied by its scale over the largest scale."""
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    source = x_ptr + row[:, None].to(tl.int64) * 4 * width + column[None, :]
    word0 = tl.load(source, mask=inside, other=0)
    word1 = tl.load(source + width, mask=inside, other=0)
    word2 = tl.load(source + 2 * width, mask=inside, other=0)
    word3 = tl.load(source + 3 * width, mask=inside, other=0)
    # Scales are powers of two, so the quotients are exact.
    inverse_largest = 1.0 / tl.load(largest_ptr)
    scales = scale_ptr + 4 * row
    ratio0 = (tl.load(scales, mask=row < rows, other=0.0) * inverse_largest)[:, None]
    ratio1 = (tl.load(scales + 1, mask=row < rows, other=0.0) * inverse_largest)[:, None]
    ratio2 = (tl.load(scales + 2, mask=row < rows, other=0.0) * inverse_largest)[:, None]
    ratio3 = (tl.load(scales + 3, mask=row < rows, other=0.0) * inverse_largest)[:, None]
    target = y_ptr + column[:, None].to(tl.int64) * 4 * rows + row[None, :]
    inside_target = (column[:, None] < width) & (row[None, :] < rows)
    for byte in tl.static_range(4):
        lower_half = _rescale_byte(word0, byte, ratio0) | (_rescale_byte(word1, byte, ratio1) << 8)
        upper_half = _rescale_byte(word2, byte, ratio2) | (_rescale_byte(word3, byte, ratio3) << 8)
        tl.store(target + byte * rows, tl.trans(lower_half | (upper_half << 16)), mask=inside_target)


def _launch_amax(x_MN: Tensor, amax: Tensor, *, per_column: bool) -> None:
    M, N = x_MN.shape
    tile_rows, max_columns, warps, programs = TILE_AMAX_ONLY
    block = min(max_columns, max(16, next_power_of_2(N)))
    column_blocks = cdiv(N, block)
    program_rows = tile_rows * cdiv(cdiv(M, tile_rows), max(1, programs // column_blocks))
    _amax_kernel[(column_blocks, cdiv(M, program_rows))](
        x_MN,
        amax.view(torch.int32),  # float32 maxima would lose NaN
        M,
        N,
        x_MN.stride(0),
        program_rows,
        PER_COLUMN=per_column,
        BLOCK_R=tile_rows,
        BLOCK_C=block,
        num_warps=warps,
    )


def _launch_cast(
    x_MN: Tensor,
    fmt: Format,
    amax: Tensor,
    scale: Tensor,
    *,
    per_column: bool,
    rows: bool,
    columns: bool,
    counts: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Launch the cast, and write `scale`. Return float8 [M, N] and its transpose [N, M]; None if not requested.

    Args:
        amax: amax of x, or (`per_column`) of each column.
        rows, columns: whether to return the matrix, and its transpose.
    """
    M, N = x_MN.shape
    if rows and columns and x_MN.dtype == torch.float32:
        # If one kernel writes both copies of a float32 source, Triton 3.6 writes a wrong transpose: on sm_90 37% of the
        # bytes were wrong. It then exchanges float8 numbers between threads, and for bfloat16 sources the source.
        by_rows, _ = _launch_cast(
            x_MN, fmt, amax, scale, per_column=per_column, rows=True, columns=False, counts=counts
        )
        _, by_columns = _launch_cast(x_MN, fmt, amax, scale, per_column=per_column, rows=False, columns=True)
        return by_rows, by_columns
    q: Tensor | None = None
    q_t: Tensor | None = None
    if rows:
        q = torch.empty((M, N), dtype=fmt.dtype, device=x_MN.device)
    if columns:
        q_t = torch.empty((N, M), dtype=fmt.dtype, device=x_MN.device)
    if not columns:
        tile = TILE_WITHOUT_COLUMNS
    elif counts is not None:
        tile = TILE_WITH_COUNTS
    else:
        tile = TILE
    block_r, block_c, warps = tile
    _cast_kernel[(cdiv(N, block_c), cdiv(M, block_r))](
        x_MN,
        q,
        q_t,
        amax,
        scale,
        counts,
        M,
        N,
        x_MN.stride(0),
        **_format_constants(fmt, counts),
        PER_COLUMN=per_column,
        HAS_ROWS=rows,
        HAS_COLUMNS=columns,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=warps,
    )
    return q, q_t


def _format_constants(fmt: Format, counts: Tensor | None) -> dict[str, float | bool]:
    return {
        "LARGEST": fmt.largest,
        "CLIPPED": fmt.clipped,
        "FLUSHED": fmt.flushed,
        "SMALLEST": SMALLEST_SCALE,
        "COUNT": counts is not None,
    }


def compute_amax(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the largest magnitude of x [..., N], float32 []; NaN if x has one.

    out: float32 [], at least 0; raised to the amax of x and returned.
    """
    if x.numel() and use_fused("float8 amax", x):
        if out is None:
            out = torch.zeros((), dtype=torch.float32, device=x.device)
        _launch_amax(flatten_rows(x), out, per_column=False)
        return out
    amax = amax_reference(x)
    if out is None:
        return amax
    return out.copy_(torch.maximum(out, amax))


def cast_by_amax(
    x: Tensor, fmt: Format, amax: Tensor | None = None, *, columns: bool = True, counts: Tensor | None = None
) -> Float8:
    """Cast x [..., N], as a matrix, to float8 by the scale of its amax (float32 [], computed here if None).

    Args:
        columns: whether to cast the transpose too.
        counts: int64 [2]; see `quantise_reference`.
    """
    x_MN = flatten_rows(x)
    if amax is None:
        amax = compute_amax(x_MN)
    if x.numel() and use_fused("float8 cast", x):
        scale = torch.empty((), dtype=torch.float32, device=x.device)
        q, q_t = _launch_cast(x_MN, fmt, amax, scale, per_column=False, rows=True, columns=columns, counts=counts)
    else:
        scale = scale_from_amax(amax, fmt)
        q = quantise_reference(x_MN, scale, fmt, counts)
        q_t = q.t().contiguous() if columns else None
    return Float8(q, scale, q_t, scale if columns else None)


def compute_row_amaxes(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row of x [..., N], as a matrix, float32 [rows, 1]; NaN if it has one."""
    x_MN = flatten_rows(x)
    M, N = x_MN.shape
    if not (x.numel() and use_fused("float8 amax of rows", x)):
        return amax_reference(x_MN, 1)
    amax = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    block = min(ROW_BLOCK, max(16, next_power_of_2(N)))
    _row_amaxes_kernel[(M,)](x_MN, amax, N, x_MN.stride(0), BLOCK=block, num_warps=ROW_WARPS)
    return amax


def compute_column_amaxes(x: Tensor) -> Tensor:
    """Return the largest magnitude of each column of x [..., N], as a matrix, float32 [N, 1]; NaN if it has one."""
    x_MN = flatten_rows(x)
    if not (x.numel() and use_fused("float8 amax of columns", x)):
        return amax_reference(x_MN, 0).t().contiguous()
    amax = torch.zeros((x_MN.shape[1], 1), dtype=torch.float32, device=x.device)
    _launch_amax(x_MN, amax, per_column=True)
    return amax


def cast_rows(
    x: Tensor,
    fmt: Format,
    *,
    columns: bool = False,
    row_amax: Tensor | None = None,
    column_amax: Tensor | None = None,
    counts: Tensor | None = None,
    empty_scale: float = 1.0,
) -> Float8:
    """Cast x [..., N], as a matrix, to float8 with a scale for each row, a power of two.

    Args:
        columns: whether to cast the transpose, with a scale for each of its rows. The two results round differently.
        row_amax, column_amax: amaxes [M, 1] and [N, 1], float32, which ranks with parts of the same rows or columns
            have reduced; None: compute them from x.
        counts: int64 [2], see `quantise_reference`.
        empty_scale: scale of a row of x that has only zeros, an infinite number or NaN. In the transpose it is 1.
    """
    x_MN = flatten_rows(x)
    M, N = x_MN.shape
    q_t = scale_t = None
    if not columns:
        column_amax = None
    elif column_amax is None:
        column_amax = compute_column_amaxes(x_MN)
    if x.numel() and use_fused("float8 row-wise cast", x):
        q = torch.empty((M, N), dtype=fmt.dtype, device=x.device)
        scale = torch.empty((M, 1), dtype=torch.float32, device=x.device)
        _cast_rows_kernel[(M,)](
            x_MN,
            q,
            scale,
            row_amax,
            counts,
            N,
            x_MN.stride(0),
            **_format_constants(fmt, counts),
            HAS_AMAX=row_amax is not None,
            EMPTY_SCALE=empty_scale,
            BLOCK=min(ROW_BLOCK, max(16, next_power_of_2(N))),
            num_warps=ROW_WARPS,
        )
        if column_amax is not None:
            scale_t = torch.empty((N, 1), dtype=torch.float32, device=x.device)
            _, q_t = _launch_cast(x_MN, fmt, column_amax, scale_t, per_column=True, rows=False, columns=True)
        return Float8(q, scale, q_t, scale_t)
    if row_amax is None:
        row_amax = compute_row_amaxes(x_MN)
    scale = scale_from_amax(row_amax, fmt, empty_scale, power_of_2=True)
    q = quantise_reference(x_MN, scale, fmt, counts)
    if column_amax is not None:
        scale_t = scale_from_amax(column_amax, fmt, power_of_2=True)
        q_t = quantise_reference(x_MN.t(), scale_t, fmt).contiguous()
    return Float8(q, scale, q_t, scale_t)


# The next functions cast flat shards.


def compute_shard_amaxes(flat: Tensor, segments: Segments, out: Tensor) -> None:
    """Write the amax of each matrix's range of a shard into out [matrices] (float32, contiguous).

    The amax is NaN if the range has a NaN, and 0 if the shard has no range of the matrix. `Segment.tensor_index` is the
    index of the matrix.
    """
    out.zero_()
    if segments.ranges and use_fused("float8 amax of shards", flat):
        tiles = segments.tiles
        # The integer view, because float32 maxima would lose NaN.
        _shard_amaxes_kernel[(tiles.shape[0],)](flat, tiles, out.view(torch.int32), TILE=SHARD_TILE, num_warps=8)
        return
    for segment in segments.ranges:
        amax = amax_reference(flat[segment.start : segment.stop])
        out[segment.tensor_index] = torch.maximum(out[segment.tensor_index], amax)


def compute_shard_scales(amax: Tensor, fmt: Format, out: Tensor) -> None:
    """Write `scale_from_amax` of each amax into out [matrices], made by `formats.allocate_scales`."""
    if use_fused("float8 scales of shards", amax):
        if out.stride(0) != SCALE_STRIDE:
            raise ValueError(f"scales of shards have stride {SCALE_STRIDE}, not {out.stride(0)}; use allocate_scales")
        count = amax.numel()
        block = min(1024, next_power_of_2(count))
        _shard_scales_kernel[(cdiv(count, block),)](
            amax, out, count, LARGEST=fmt.largest, SMALLEST=SMALLEST_SCALE, BLOCK=block, num_warps=4
        )
        return
    out.copy_(scale_from_amax(amax, fmt))


def cast_shard(flat: Tensor, segments: Segments, scales: Tensor, fmt: Format, out: Tensor) -> None:
    """Cast each matrix's range of a shard by the matrix's scale into `out` (uint8), and leave other bytes unchanged."""
    if not segments.ranges:
        return
    if use_fused("float8 cast of shards", flat):
        tiles = segments.tiles
        _cast_shard_kernel[(tiles.shape[0],)](
            flat, tiles, scales, out.view(fmt.dtype), LARGEST=fmt.largest, TILE=SHARD_TILE, num_warps=8
        )
        return
    for segment in segments.ranges:
        elements = slice(segment.start, segment.stop)
        out[elements] = quantise_reference(flat[elements], scales[segment.tensor_index], fmt).view(torch.uint8)


def transpose_rows(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the contiguous transpose [N, M] of a contiguous float8 matrix [M, N], in `out` if given."""
    M, N = rows.shape
    if out is None:
        out = torch.empty((N, M), dtype=rows.dtype, device=rows.device)
    if rows.numel() and M % 4 == N % 4 == 0 and use_fused("float8 transpose", rows.view(torch.float32)):
        grid = cdiv(N // 4, TRANSPOSE_WORDS), cdiv(M // 4, TRANSPOSE_WORDS)
        x, y = rows.view(torch.int32), out.view(torch.int32)
        _transpose_kernel[grid](x, y, M // 4, N // 4, BLOCK=TRANSPOSE_WORDS, num_warps=TRANSPOSE_WARPS)
        return out
    out.view(torch.uint8).copy_(rows.view(torch.uint8).t())
    return out


def transpose_scaled_rows(rows: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the transpose [N, M] of an E4M3 matrix [M, N] with a scale for each row, and its one scale [].

    The scale is the largest of the rows' scales. A number is rounded only if the scale makes it subnormal.

    Args:
        scales: powers of two, float32 [M, 1].
    """
    if rows.dtype != E4M3.dtype:
        raise ValueError(f"rows to transpose have the type {E4M3.dtype}, not {rows.dtype}")
    M, N = rows.shape
    largest = scales.amax()
    if rows.numel() and M % 4 == N % 4 == 0 and use_fused("float8 transpose", scales):
        out = torch.empty((N, M), dtype=rows.dtype, device=rows.device)
        grid = cdiv(N // 4, TRANSPOSE_WORDS), cdiv(M // 4, TRANSPOSE_WORDS)
        x, y = rows.view(torch.int32), out.view(torch.int32)
        _transpose_scaled_kernel[grid](
            x, scales, largest, y, M // 4, N // 4, BLOCK=TRANSPOSE_WORDS, num_warps=TRANSPOSE_WARPS
        )
        return out, largest
    return (rows.float() * (scales / largest)).to(rows.dtype).t().contiguous(), largest
