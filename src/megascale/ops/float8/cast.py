"""Casts to float8 in one pass over the tensor: values, transposed copy, amax and counts together.

`compute_amax` is the extra pass for scales of the present tensor whose producer did not collect its amax. It also
accumulates over tensors. `cast_by_amax` computes the scale from an amax on the device. `cast_by_scale` takes a scale
from earlier steps ("delayed") and can update the amax meanwhile. `cast_rows` gives each row its own scale, and with
`columns` each column too, for the transposed copy of weights, once per step. It computes their amaxes itself, except
where ranks that hold parts of rows (or columns) have agreed on them.

A data-parallel rank casts its flat shard of several matrices after the update (parallel/float8_gather.py).
`compute_shard_amaxes` computes the amax of its part of each matrix, on which ranks agree, `compute_shard_scales` the
scales, and `cast_shard` the bytes: one launch each for any number of matrices. The bytes equal those of `cast_by_amax`
of whole matrices with the same amax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.float8.formats import (
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

# Rows and columns of a tile and its warps, the fastest on an H200 at 4,096 x 20,480 (a copy: 4.10 TB/s). With the
# transposed copy 3.66 TB/s; with the amax too 3.33 with two warps per tile, 2.95 with four. Counting needs more
# registers than that tile leaves.
TILE = 128, 64, 4
TILE_AMAX_TOO = 64, 128, 2
TILE_COUNTING = 64, 64, 2
TILE_WITHOUT_COLUMNS = 4, 1024, 8
# The pass for the amax alone: rows, columns, warps, and the approximate number of programs (each ends in one atomic).
TILE_AMAX = 4, 512, 8, 4224
# Columns of a row that a program of the row-wise cast holds at once, and warps.
CHUNK, CHUNK_WARPS = 4096, 8
SLOT = 4  # float32 numbers from one scale to the next: cuBLASLt reads them at multiples of 16 bytes
# Words of four bytes in each dimension of a transpose's tile, and warps.
TRANSPOSE_WORDS, TRANSPOSE_WARPS = 32, 4

_BY_SCALE, _BY_AMAX, _BY_COLUMN_AMAX = 0, 1, 2


@jit
def _magnitude_bits(x):
    """Return |x| as int32, which orders as the floats do with NaN above infinity; integer maxima keep NaN."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@jit
def _compute_scale(
    amax, previous, largest: tl.constexpr, margin: tl.constexpr, smallest: tl.constexpr, POWER_OF_2: tl.constexpr
):
    """Compute `scale_from_amax` within a kernel."""
    scale = tl.maximum(amax * (margin / largest), smallest)
    if POWER_OF_2:
        # Unsigned, because a NaN's bits plus this constant exceed int32.
        scale = ((scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    usable = (amax > 0.0) & (amax < float("inf")) & (scale < float("inf"))  # a NaN compares as false
    return tl.where(usable, scale, previous)


@jit
def _to_float8(x, inverse, largest: tl.constexpr):
    """Return x * inverse in float32, clamped to the format; NaN where x is not finite."""
    scaled = x * inverse
    clamped = tl.minimum(tl.maximum(scaled, -largest), largest)
    return tl.where(tl.abs(x) < float("inf"), clamped, float("nan"))


@jit
def _clipped_and_flushed(x, inverse, clipped_above: tl.constexpr, flushed_below: tl.constexpr):
    """Return the masks of clipped and flushed numbers as int32. x must be zero outside the tensor."""
    size = tl.abs(x * inverse)
    clipped = ((size > clipped_above) & (tl.abs(x) < float("inf"))).to(tl.int32)
    return clipped, ((size <= flushed_below) & (x != 0.0)).to(tl.int32)


@jit
def _add_counts(counts_ptr, clipped, flushed):
    """Add two numbers to the counts; most tiles skip the atomics."""
    tl.atomic_add(counts_ptr, clipped.to(tl.int64), mask=clipped > 0, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, flushed.to(tl.int64), mask=flushed > 0, sem="relaxed")


@jit
def _amax_kernel(
    x_ptr,
    amax_ptr,
    rows,
    width,
    stride,
    part_rows,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Raise amax to the largest magnitude of the tensor, or (COLUMNS) of each column."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * part_rows
    last = tl.minimum(first + part_rows, rows)
    largest = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row[:, None] < last) & (column[None, :] < width)
        x = tl.load(x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, _magnitude_bits(x.to(tl.float32)))
    if COLUMNS:
        tl.atomic_max(amax_ptr + column, tl.max(largest, 0), mask=column < width, sem="relaxed")
    else:
        tl.atomic_max(amax_ptr, tl.max(largest), sem="relaxed")


@jit
def _cast_kernel(
    x_ptr,
    rows_ptr,
    columns_ptr,
    source_ptr,
    previous_ptr,
    scale_ptr,
    amax_ptr,
    counts_ptr,
    rows,
    width,
    stride,
    LARGEST: tl.constexpr,
    CLIPPED: tl.constexpr,
    FLUSHED: tl.constexpr,
    MARGIN: tl.constexpr,
    SMALLEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    SOURCE: tl.constexpr,
    HAS_PREVIOUS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AMAX: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Cast one tile. source_ptr holds the scale (SOURCE 0), the amax (1) or the amax of each column (2)."""
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if SOURCE == 0:
        inverse = tl.math.div_rn(1.0, tl.load(source_ptr))
    elif SOURCE == 1:
        previous = 1.0
        if HAS_PREVIOUS:
            previous = tl.load(previous_ptr)
        scale = _compute_scale(tl.load(source_ptr), previous, LARGEST, MARGIN, SMALLEST, POWER_OF_2)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_ptr, scale)
        inverse = tl.math.div_rn(1.0, scale)
    else:
        scale = _compute_scale(
            tl.load(source_ptr + column, mask=column < width, other=0.0), 1.0, LARGEST, MARGIN, SMALLEST, POWER_OF_2
        )
        if tl.program_id(1) == 0:
            tl.store(scale_ptr + column, scale, mask=column < width)
        inverse = tl.math.div_rn(1.0, scale)[None, :]
    q = _to_float8(x, inverse, LARGEST)
    if ROWS:
        q_rows = q.to(rows_ptr.dtype.element_ty)
        tl.store(rows_ptr + row[:, None].to(tl.int64) * width + column[None, :], q_rows, mask=inside)
    if COLUMNS:
        q_columns = tl.trans(q.to(columns_ptr.dtype.element_ty))
        target = columns_ptr + column[:, None].to(tl.int64) * rows + row[None, :]
        tl.store(target, q_columns, mask=(column[:, None] < width) & (row[None, :] < rows))
    if AMAX:
        largest = tl.max(_magnitude_bits(x))
        # The loaded value may be stale, but it only grows, and most tiles skip the atomic.
        tl.atomic_max(amax_ptr, largest, mask=largest > tl.load(amax_ptr), sem="relaxed")
    if COUNT:
        clipped, flushed = _clipped_and_flushed(x, inverse, CLIPPED, FLUSHED)
        packed_counts = tl.sum(clipped * 65536 + flushed)  # one reduction, as a tile has at most 65,535 elements
        _add_counts(counts_ptr, packed_counts >> 16, packed_counts & 65535)


@jit
def _row_amax(row_ptr, width, BLOCK: tl.constexpr):
    """Return the largest magnitude of a row."""
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _magnitude_bits(x))
    return tl.max(largest, 0).to(tl.float32, bitcast=True)


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
    MARGIN: tl.constexpr,
    SMALLEST: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast one row. Without its amax the row is read twice, the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    if HAS_AMAX:
        amax = tl.load(amax_ptr + row)
    else:
        amax = _row_amax(x_ptr + row * stride, width, BLOCK)
    scale = _compute_scale(amax, 1.0, LARGEST, MARGIN, SMALLEST, POWER_OF_2)
    tl.store(scale_ptr + row, scale)
    inverse = tl.math.div_rn(1.0, scale)
    packed_counts = tl.zeros((BLOCK,), tl.int32)  # clipped in the upper half-word: a lane sees few numbers
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        q = _to_float8(x, inverse, LARGEST)
        tl.store(rows_ptr + row * width + column, q.to(rows_ptr.dtype.element_ty), mask=column < width)
        if COUNT:
            clipped, flushed = _clipped_and_flushed(x, inverse, CLIPPED, FLUSHED)
            packed_counts += clipped * 65536 + flushed
    if COUNT:
        _add_counts(counts_ptr, tl.sum(packed_counts >> 16, 0), tl.sum(packed_counts & 65535, 0))


@jit
def _shard_amaxes_kernel(flat_ptr, tile_ptr, amax_ptr, TILE: tl.constexpr):
    """Raise the amax of a tile's matrix to the largest magnitude of the tile."""
    base, low, high, _, matrix = read_tile(tile_ptr)
    largest = tl.max(_magnitude_bits(load_any_tile(flat_ptr + base, low, high, TILE)), 0)
    # The loaded value may be stale, but it only grows, and most tiles skip the atomic.
    tl.atomic_max(amax_ptr + matrix, largest, mask=largest > tl.load(amax_ptr + matrix), sem="relaxed")


@jit
def _shard_scales_kernel(
    amax_ptr, scale_ptr, count, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr
):
    matrix = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + matrix, mask=matrix < count, other=0.0)
    tl.store(scale_ptr + matrix * 4, _compute_scale(amax, 1.0, LARGEST, 1.0, SMALLEST, False), mask=matrix < count)


@jit
def _cast_shard_kernel(flat_ptr, tile_ptr, scale_ptr, out_ptr, LARGEST: tl.constexpr, TILE: tl.constexpr):
    base, low, high, _, matrix = read_tile(tile_ptr)
    offset = tl.arange(0, TILE)
    inverse = tl.math.div_rn(1.0, tl.load(scale_ptr + matrix * 4))
    if (low == 0) & (high == TILE):
        q = _to_float8(load_tile(flat_ptr + base, offset, low, high, True), inverse, LARGEST)
        store_tile(out_ptr + base, offset, q.to(out_ptr.dtype.element_ty), low, high, True)
    else:
        q = _to_float8(load_tile(flat_ptr + base, offset, low, high, False), inverse, LARGEST)
        store_tile(out_ptr + base, offset, q.to(out_ptr.dtype.element_ty), low, high, False)


@jit
def _transpose_kernel(x_ptr, y_ptr, rows, width, BLOCK: tl.constexpr):
    """Transpose bytes [4 rows, 4 width] as words, in blocks of 4 x 4 bytes in registers.

    Threads exchange words, which Triton 3.6 does correctly, unlike float8 in some cases (`_launch_cast`).
    """
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    source = x_ptr + row[:, None].to(tl.int64) * 4 * width + column[None, :]
    w0 = tl.load(source, mask=inside, other=0)
    w1 = tl.load(source + width, mask=inside, other=0)
    w2 = tl.load(source + 2 * width, mask=inside, other=0)
    w3 = tl.load(source + 3 * width, mask=inside, other=0)
    target = y_ptr + column[:, None].to(tl.int64) * 4 * rows + row[None, :]
    inside_target = (column[:, None] < width) & (row[None, :] < rows)
    for byte in tl.static_range(4):
        low = ((w0 >> (8 * byte)) & 255) | (((w1 >> (8 * byte)) & 255) << 8)
        word = low | (((w2 >> (8 * byte)) & 255) << 16) | (((w3 >> (8 * byte)) & 255) << 24)
        tl.store(target + byte * rows, tl.trans(word), mask=inside_target)


def _launch_amax(x_MN: Tensor, amax: Tensor, columns: bool) -> None:
    M, N = x_MN.shape
    rows, max_columns, warps, programs = TILE_AMAX
    block = min(max_columns, max(16, next_power_of_2(N)))
    column_blocks = cdiv(N, block)
    part_rows = rows * cdiv(cdiv(M, rows), max(1, programs // column_blocks))
    _amax_kernel[(column_blocks, cdiv(M, part_rows))](
        x_MN,
        amax.view(torch.int32),  # float32 maxima would lose NaN
        M,
        N,
        x_MN.stride(0),
        part_rows,
        COLUMNS=columns,
        BLOCK_R=rows,
        BLOCK_C=block,
        num_warps=warps,
    )


def _launch_cast(
    x_MN: Tensor,
    kind: Format,
    source_kind: int,
    source: Tensor,
    *,
    rows: bool,
    columns: bool,
    previous_scale: Tensor | None = None,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    margin: int = 0,
    power_of_2: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Launch the cast; returns float8 [M, N] and its transpose [N, M], each if requested.

    Args:
        source_kind, source: the scale, the amax or the amax of each column.
        previous_scale: the scale for an unusable amax.
        scale: the scale is written here if it is computed.
        amax: raised to the amax of x.
    """
    M, N = x_MN.shape
    if rows and columns and x_MN.dtype == torch.float32:
        # Triton 3.6 makes the transposed copy of a float32 source wrong if one kernel writes both (on sm_90 it
        # exchanges float8 between threads there, and the source for bfloat16; 37% of the bytes were wrong).
        options: dict[str, Any] = {
            "previous_scale": previous_scale,
            "scale": scale,
            "margin": margin,
            "power_of_2": power_of_2,
        }
        q, _ = _launch_cast(
            x_MN, kind, source_kind, source, rows=True, columns=False, amax=amax, counts=counts, **options
        )
        _, q_t = _launch_cast(x_MN, kind, source_kind, source, rows=False, columns=True, **options)
        return q, q_t
    q = torch.empty((M, N), dtype=kind.dtype, device=x_MN.device) if rows else None
    q_t = torch.empty((N, M), dtype=kind.dtype, device=x_MN.device) if columns else None
    if not columns:
        tile = TILE_WITHOUT_COLUMNS
    elif counts is not None:
        tile = TILE_COUNTING
    else:
        tile = TILE if amax is None else TILE_AMAX_TOO
    block_r, block_c, warps = tile
    _cast_kernel[(cdiv(N, block_c), cdiv(M, block_r))](
        x_MN,
        q,
        q_t,
        source,
        previous_scale,
        scale,
        None if amax is None else amax.view(torch.int32),
        counts,
        M,
        N,
        x_MN.stride(0),
        **_format_constants(kind, margin, power_of_2, counts),
        SOURCE=source_kind,
        HAS_PREVIOUS=previous_scale is not None,
        ROWS=rows,
        COLUMNS=columns,
        AMAX=amax is not None,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=warps,
    )
    return q, q_t


def _format_constants(kind: Format, margin: int, power_of_2: bool, counts: Tensor | None) -> dict[str, float | bool]:
    return {
        "LARGEST": kind.largest,
        "CLIPPED": kind.clipped,
        "FLUSHED": kind.flushed,
        "MARGIN": 2.0**margin,
        "SMALLEST": SMALLEST_SCALE,
        "POWER_OF_2": power_of_2,
        "COUNT": counts is not None,
    }


def _reference(x_MN: Tensor, kind: Format, scale: Tensor, rows: bool, columns: bool, counts: Tensor | None) -> Float8:
    """Cast by one scale in plain PyTorch."""
    q = quantise_reference(x_MN, scale, kind, counts)
    return _with_scale(q if rows else None, q.t().contiguous() if columns else None, scale)


def _with_scale(q: Tensor | None, q_t: Tensor | None, scale: Tensor) -> Float8:
    return Float8(q, None if q is None else scale, q_t, None if q_t is None else scale)


def compute_amax(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the largest magnitude of x [..., N], float32 []; NaN if x has one.

    out: float32 [], at least 0; raised to the amax of x and returned.
    """
    if x.numel() and use_fused("float8 amax", x):
        if out is None:
            out = torch.zeros((), dtype=torch.float32, device=x.device)
        _launch_amax(flatten_rows(x), out, columns=False)
        return out
    amax = amax_reference(x)
    return amax if out is None else out.copy_(torch.maximum(out, amax))


def cast_by_scale(
    x: Tensor,
    kind: Format,
    scale: Tensor,
    *,
    rows: bool = True,
    columns: bool = True,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
) -> Float8:
    """Cast x [..., N], as a matrix, to float8 by a given scale (float32 []).

    Args:
        rows, columns: which copies to make, x itself and its transpose.
        amax: float32 [], raised to the amax of x.
        counts: int64 [2]; see `quantise_reference`.
    """
    x_MN = flatten_rows(x)
    if x.numel() and use_fused("float8 cast", x):
        q, q_t = _launch_cast(x_MN, kind, _BY_SCALE, scale, rows=rows, columns=columns, amax=amax, counts=counts)
        return _with_scale(q, q_t, scale)
    if amax is not None:
        compute_amax(x_MN, amax)
    return _reference(x_MN, kind, scale, rows, columns, counts)


def cast_by_amax(
    x: Tensor,
    kind: Format,
    amax: Tensor | None = None,
    *,
    previous_scale: Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    counts: Tensor | None = None,
    margin: int = 0,
    power_of_2: bool = False,
) -> Float8:
    """Cast x [..., N], as a matrix, to float8 by the scale of its amax (float32 [], computed here if None).

    Args:
        previous_scale: the scale (float32 []) if amax is zero, infinite or NaN; None for 1.
        rows, columns, counts: see `cast_by_scale`.
        margin, power_of_2: see `scale_from_amax`.
    """
    x_MN = flatten_rows(x)
    if amax is None:
        amax = compute_amax(x_MN)
    if x.numel() and use_fused("float8 cast", x):
        scale = torch.empty((), dtype=torch.float32, device=x.device)
        q, q_t = _launch_cast(
            x_MN,
            kind,
            _BY_AMAX,
            amax,
            rows=rows,
            columns=columns,
            previous_scale=previous_scale,
            scale=scale,
            counts=counts,
            margin=margin,
            power_of_2=power_of_2,
        )
        return _with_scale(q, q_t, scale)
    scale = scale_from_amax(amax, kind, 1.0 if previous_scale is None else previous_scale, margin, power_of_2)
    return _reference(x_MN, kind, scale, rows, columns, counts)


def compute_row_amaxes(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row of x [..., N], as a matrix, float32 [rows, 1]; NaN if it has one."""
    x_MN = flatten_rows(x)
    M, N = x_MN.shape
    if not (x.numel() and use_fused("float8 amax of rows", x)):
        return amax_reference(x_MN, 1)
    amax = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    block = min(CHUNK, max(16, next_power_of_2(N)))
    _row_amaxes_kernel[(M,)](x_MN, amax, N, x_MN.stride(0), BLOCK=block, num_warps=CHUNK_WARPS)
    return amax


def compute_column_amaxes(x: Tensor) -> Tensor:
    """Return the largest magnitude of each column of x [..., N], as a matrix, float32 [N, 1]; NaN if it has one."""
    x_MN = flatten_rows(x)
    if not (x.numel() and use_fused("float8 amax of columns", x)):
        return amax_reference(x_MN, 0).t().contiguous()
    amax = torch.zeros((x_MN.shape[1], 1), dtype=torch.float32, device=x.device)
    _launch_amax(x_MN, amax, columns=True)
    return amax


def cast_rows(
    x: Tensor,
    kind: Format,
    *,
    rows: bool = True,
    columns: bool = False,
    row_amax: Tensor | None = None,
    column_amax: Tensor | None = None,
    counts: Tensor | None = None,
    power_of_2: bool = True,
) -> Float8:
    """Cast x [..., N], as a matrix, to float8 with a scale for each row, 1 for a row of zeros or a non-finite row.

    Args:
        columns: cast the transpose too, with a scale for each of its rows. Neither copy is the other's transpose.
        row_amax, column_amax: the amaxes, float32 [M, 1] and [N, 1], if other ranks hold parts of the rows or columns.
        counts: int64 [2], of the first of the two copies that is made.
    """
    x_MN = flatten_rows(x)
    M, N = x_MN.shape
    q = q_t = scale = scale_t = None
    column_counts = None if rows else counts
    if x.numel() and use_fused("float8 row-wise cast", x):
        if rows:
            q = torch.empty((M, N), dtype=kind.dtype, device=x.device)
            scale = torch.empty((M, 1), dtype=torch.float32, device=x.device)
            _cast_rows_kernel[(M,)](
                x_MN,
                q,
                scale,
                row_amax,
                counts,
                N,
                x_MN.stride(0),
                **_format_constants(kind, 0, power_of_2, counts),
                HAS_AMAX=row_amax is not None,
                BLOCK=min(CHUNK, max(16, next_power_of_2(N))),
                num_warps=CHUNK_WARPS,
            )
        if columns:
            scale_t = torch.empty((N, 1), dtype=torch.float32, device=x.device)
            _, q_t = _launch_cast(
                x_MN,
                kind,
                _BY_COLUMN_AMAX,
                compute_column_amaxes(x_MN) if column_amax is None else column_amax,
                rows=False,
                columns=True,
                scale=scale_t,
                counts=column_counts,
                power_of_2=power_of_2,
            )
        return Float8(q, scale, q_t, scale_t)
    if rows:
        row_amax = compute_row_amaxes(x_MN) if row_amax is None else row_amax
        scale = scale_from_amax(row_amax, kind, power_of_2=power_of_2)
        q = quantise_reference(x_MN, scale, kind, counts)
    if columns:
        column_amax = compute_column_amaxes(x_MN) if column_amax is None else column_amax
        scale_t = scale_from_amax(column_amax, kind, power_of_2=power_of_2)
        q_t = quantise_reference(x_MN.t(), scale_t, kind, column_counts).contiguous()
    return Float8(q, scale, q_t, scale_t)


# casts of flat shards ------------------------------------------------------------------------------------------------


def compute_shard_amaxes(flat: Tensor, segments: Segments, out: Tensor) -> None:
    """Write the amax of each matrix's part of a shard into out [matrices] (float32, contiguous).

    NaN if the part has one, 0 without a part. The segments' tensor ids are indices of matrices.
    """
    out.zero_()
    if segments.ranges and use_fused("float8 amax of shards", flat):
        tiles = segments.tiles
        # The integer view, because float32 maxima would lose NaN.
        _shard_amaxes_kernel[(tiles.shape[0],)](flat, tiles, out.view(torch.int32), TILE=SHARD_TILE, num_warps=8)
        return
    for row in segments.ranges:
        out[row.tensor_index] = torch.maximum(out[row.tensor_index], amax_reference(flat[row.start : row.stop]))


def compute_shard_scales(amax: Tensor, kind: Format, out: Tensor) -> None:
    """Write `scale_from_amax` of each amax into out [matrices], made by `formats.scale_slots`."""
    if use_fused("float8 scales of shards", amax):
        assert out.stride(0) == SLOT, out.stride()
        count = amax.numel()
        block = min(1024, next_power_of_2(count))
        _shard_scales_kernel[(cdiv(count, block),)](
            amax, out, count, LARGEST=kind.largest, SMALLEST=SMALLEST_SCALE, BLOCK=block, num_warps=4
        )
        return
    out.copy_(scale_from_amax(amax, kind))


def cast_shard(flat: Tensor, segments: Segments, scales: Tensor, kind: Format, out: Tensor) -> None:
    """Cast each matrix's part of a shard by its scale into the bytes `out`; bytes outside matrices are unchanged."""
    if not segments.ranges:
        return
    if use_fused("float8 cast of shards", flat):
        tiles = segments.tiles
        _cast_shard_kernel[(tiles.shape[0],)](
            flat, tiles, scales, out.view(kind.dtype), LARGEST=kind.largest, TILE=SHARD_TILE, num_warps=8
        )
        return
    for row in segments.ranges:
        elements = slice(row.start, row.stop)
        out[elements] = quantise_reference(flat[elements], scales[row.tensor_index], kind).view(torch.uint8)


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
