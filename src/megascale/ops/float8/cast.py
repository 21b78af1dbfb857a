"""Casts to float8 in one pass over the tensor: values, transposed copy, largest magnitude and counts together.

`amax_of` is the pass that scales of the current tensor need where what made the tensor did not give it; it also
collects over tensors. `cast_by_amax` makes the scale from an amax on the device, `cast_by_scale` has it from earlier
steps ("delayed") and collects the amax on the way. `cast_rows` gives each row its own scale; with `columns` each
column too, for a transposed copy (weights, once a step).
"""

from __future__ import annotations

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
from megascale.ops.reduce import flat_rows

# Rows and columns of a tile and its warps, the fastest on an H200 at 4,096 x 20,480 (a copy: 4.10 TB/s). With the
# transposed copy 3.66 TB/s; with the amax too 3.33 with two warps a tile, 2.95 with the four of the other. Counts
# beside them need more registers than that tile leaves.
TILE = 128, 64, 4
TILE_AMAX_TOO = 64, 128, 2
TILE_COUNTING = 64, 64, 2
TILE_WITHOUT_COLUMNS = 4, 1024, 8
# The pass for the amax alone: rows, columns, warps, and about how many programs (each ends in one atomic).
TILE_AMAX = 4, 512, 8, 4224
# Columns of a row that a program of the row-wise cast holds at once, and warps.
CHUNK, CHUNK_WARPS = 4096, 8

_BY_SCALE, _BY_AMAX, _BY_COLUMN = 0, 1, 2


@jit
def _magnitude_bits(x):
    """|x| as int32, which orders as the numbers do with NaN above infinity; 32-bit integer maxima keep NaN."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@jit
def _scale_of(amax, old, largest: tl.constexpr, margin: tl.constexpr, smallest: tl.constexpr, POWER_OF_2: tl.constexpr):
    """`scale_from_amax` within a kernel."""
    scale = tl.maximum(amax * (margin / largest), smallest)
    if POWER_OF_2:
        # Unsigned: a NaN's bits and these are more than int32 holds.
        scale = ((scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    usable = (amax > 0.0) & (amax < float("inf")) & (scale < float("inf"))  # a NaN compares as false
    return tl.where(usable, scale, old)


@jit
def _to_float8(x, inverse, largest: tl.constexpr):
    """x * inverse clamped to the format, in float32 yet; NaN where x is not finite."""
    scaled = x * inverse
    clamped = tl.minimum(tl.maximum(scaled, -largest), largest)
    return tl.where(tl.abs(x) < float("inf"), clamped, float("nan"))


@jit
def _clipped_and_flushed(x, inverse, clipped_above: tl.constexpr, flushed: tl.constexpr):
    """Two masks as int32. What lies outside the tensor must be zero."""
    size = tl.abs(x * inverse)
    clipped = ((size > clipped_above) & (tl.abs(x) < float("inf"))).to(tl.int32)
    return clipped, ((size <= flushed) & (x != 0.0)).to(tl.int32)


@jit
def _add_counts(counts_ptr, clipped, zeroed):
    """Two numbers to the counts, in most tiles none."""
    tl.atomic_add(counts_ptr, clipped.to(tl.int64), mask=clipped > 0, sem="relaxed")
    tl.atomic_add(counts_ptr + 1, zeroed.to(tl.int64), mask=zeroed > 0, sem="relaxed")


@jit
def _amax_kernel(
    x_ptr,
    amax_ptr,
    rows,
    width,
    stride,
    rows_a_part,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Largest magnitudes into amax, of everything or (COLUMNS) of each column."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * rows_a_part
    last = tl.minimum(first + rows_a_part, rows)
    most = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row[:, None] < last) & (column[None, :] < width)
        x = tl.load(x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)
        most = tl.maximum(most, _magnitude_bits(x.to(tl.float32)))
    if COLUMNS:
        tl.atomic_max(amax_ptr + column, tl.max(most, 0), mask=column < width, sem="relaxed")
    else:
        tl.atomic_max(amax_ptr, tl.max(most), sem="relaxed")


@jit
def _cast_kernel(
    x_ptr,
    rows_ptr,
    columns_ptr,
    from_ptr,
    old_ptr,
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
    HOW: tl.constexpr,
    HAS_OLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AMAX: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile. HOW 0: from_ptr has the scale; 1: it has the amax; 2: it has the amax of each column."""
    row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if HOW == 0:
        inverse = tl.math.div_rn(1.0, tl.load(from_ptr))
    elif HOW == 1:
        old = 1.0
        if HAS_OLD:
            old = tl.load(old_ptr)
        scale = _scale_of(tl.load(from_ptr), old, LARGEST, MARGIN, SMALLEST, POWER_OF_2)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_ptr, scale)
        inverse = tl.math.div_rn(1.0, scale)
    else:
        scale = _scale_of(
            tl.load(from_ptr + column, mask=column < width, other=0.0), 1.0, LARGEST, MARGIN, SMALLEST, POWER_OF_2
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
        to = columns_ptr + column[:, None].to(tl.int64) * rows + row[None, :]
        tl.store(to, q_columns, mask=(column[:, None] < width) & (row[None, :] < rows))
    if AMAX:
        most = tl.max(_magnitude_bits(x))
        # What was there may be old, but it only grows: few tiles have anything to add.
        tl.atomic_max(amax_ptr, most, mask=most > tl.load(amax_ptr), sem="relaxed")
    if COUNT:
        clipped, zeroed = _clipped_and_flushed(x, inverse, CLIPPED, FLUSHED)
        found = tl.sum(clipped * 65536 + zeroed)  # one reduction for both: a tile has fewer elements than that
        _add_counts(counts_ptr, found >> 16, found & 65535)


@jit
def _cast_rows_kernel(
    x_ptr,
    rows_ptr,
    scale_ptr,
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
    BLOCK: tl.constexpr,
):
    """One row, read twice: the second time from the cache."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        most = tl.maximum(most, _magnitude_bits(x))
    amax = tl.max(most, 0).to(tl.float32, bitcast=True)
    scale = _scale_of(amax, 1.0, LARGEST, MARGIN, SMALLEST, POWER_OF_2)
    tl.store(scale_ptr + row, scale)
    inverse = tl.math.div_rn(1.0, scale)
    counted = tl.zeros((BLOCK,), tl.int32)  # what is clipped in the upper half: a lane sees few numbers
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        q = _to_float8(x, inverse, LARGEST)
        tl.store(rows_ptr + row * width + column, q.to(rows_ptr.dtype.element_ty), mask=column < width)
        if COUNT:
            clipped, zeroed = _clipped_and_flushed(x, inverse, CLIPPED, FLUSHED)
            counted += clipped * 65536 + zeroed
    if COUNT:
        _add_counts(counts_ptr, tl.sum(counted >> 16, 0), tl.sum(counted & 65535, 0))


def _run_amax(x_MN: Tensor, amax: Tensor, columns: bool, tile: tuple[int, int, int, int] = TILE_AMAX) -> None:
    M, N = x_MN.shape
    rows, most, warps, programs = tile
    block = min(most, max(16, next_power_of_2(N)))
    across = cdiv(N, block)
    a_part = rows * cdiv(cdiv(M, rows), max(1, programs // across))
    # The integer view: float32 maxima would lose NaN.
    _amax_kernel[(across, cdiv(M, a_part))](
        *(x_MN, amax.view(torch.int32), M, N, x_MN.stride(0), a_part),
        COLUMNS=columns,
        BLOCK_R=rows,
        BLOCK_C=block,
        num_warps=warps,
    )


def _run_cast(
    x_MN: Tensor,
    kind: Format,
    how: int,
    given: Tensor,
    old: Tensor | None,
    scale: Tensor | None,
    amax: Tensor | None,
    counts: Tensor | None,
    rows: bool,
    columns: bool,
    margin: int = 0,
    power_of_2: bool = False,
    tile: tuple[int, int, int] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    M, N = x_MN.shape
    if rows and columns and x_MN.dtype == torch.float32:
        # Triton 3.6 makes the transposed copy of a float32 source wrong where one kernel writes both (on sm_90: it
        # exchanges float8 between threads there, of bfloat16 the source; 37% of the bytes came out wrong).
        q, _ = _run_cast(x_MN, kind, how, given, old, scale, amax, counts, True, False, margin, power_of_2, tile)
        _, q_t = _run_cast(x_MN, kind, how, given, old, scale, None, None, False, True, margin, power_of_2, tile)
        return q, q_t
    q = torch.empty((M, N), dtype=kind.dtype, device=x_MN.device) if rows else None
    q_t = torch.empty((N, M), dtype=kind.dtype, device=x_MN.device) if columns else None
    both = TILE if amax is None else TILE_AMAX_TOO
    both = both if counts is None else TILE_COUNTING
    block_r, block_c, warps = tile or (both if columns else TILE_WITHOUT_COLUMNS)
    _cast_kernel[(cdiv(N, block_c), cdiv(M, block_r))](
        *(x_MN, q, q_t, given, old, scale, None if amax is None else amax.view(torch.int32), counts),
        *(M, N, x_MN.stride(0)),
        **_meta(kind, margin, power_of_2, counts),
        HOW=how,
        HAS_OLD=old is not None,
        ROWS=rows,
        COLUMNS=columns,
        AMAX=amax is not None,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=warps,
    )
    return q, q_t


def _meta(kind: Format, margin: int, power_of_2: bool, counts: Tensor | None) -> dict[str, float | bool]:
    return {
        "LARGEST": kind.largest,
        "CLIPPED": kind.clipped,
        "FLUSHED": kind.flushed,
        "MARGIN": 2.0**margin,
        "SMALLEST": SMALLEST_SCALE,
        "POWER_OF_2": power_of_2,
        "COUNT": counts is not None,
    }


def _both(q: Tensor, scale: Tensor, rows: bool, columns: bool) -> Float8:
    """From a reference's q [M, N] with one scale."""
    return _one_scale(q if rows else None, q.t().contiguous() if columns else None, scale)


def _one_scale(q: Tensor | None, q_t: Tensor | None, scale: Tensor) -> Float8:
    return Float8(q, None if q is None else scale, q_t, None if q_t is None else scale)


def amax_of(x: Tensor, out: Tensor | None = None) -> Tensor:
    """The largest magnitude of x [..., N], float32 []; NaN if x has one. Into `out` ([], already >= 0) if given: the
    larger of the two."""
    if x.numel() and use_fused("float8 amax", x):
        found = torch.zeros((), dtype=torch.float32, device=x.device) if out is None else out
        _run_amax(flat_rows(x), found, False)
        return found
    found = amax_reference(x)
    return found if out is None else out.copy_(torch.maximum(out, found))


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
    """x [..., N], as a matrix, in float8 by a scale (float32 []) from before.

    amax: float32 []; becomes the larger of itself and x's. counts: int64 [2]; see `quantise_reference`.
    """
    x_MN = flat_rows(x)
    if x.numel() and use_fused("float8 cast", x):
        return _one_scale(*_run_cast(x_MN, kind, _BY_SCALE, scale, None, None, amax, counts, rows, columns), scale)
    if amax is not None:
        amax_of(x_MN, amax)
    return _both(quantise_reference(x_MN, scale, kind, counts), scale, rows, columns)


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
    """x [..., N], as a matrix, in float8 by the scale that its amax (float32 [], made here unless given) asks for.

    old: the scale (float32 []) where amax is zero, infinite or NaN; 1 without it. Others: `scale_from_amax`.
    """
    x_MN = flat_rows(x)
    amax = amax_of(x_MN) if amax is None else amax
    if x.numel() and use_fused("float8 cast", x):
        scale = torch.empty((), dtype=torch.float32, device=x.device)
        q, q_t = _run_cast(
            x_MN, kind, _BY_AMAX, amax, previous_scale, scale, None, counts, rows, columns, margin, power_of_2
        )
        return _one_scale(q, q_t, scale)
    scale = scale_from_amax(amax, kind, 1.0 if previous_scale is None else previous_scale, margin, power_of_2)
    return _both(quantise_reference(x_MN, scale, kind, counts), scale, rows, columns)


def cast_rows(
    x: Tensor,
    kind: Format,
    *,
    rows: bool = True,
    columns: bool = False,
    counts: Tensor | None = None,
    power_of_2: bool = True,
) -> Float8:
    """x [..., N], as a matrix, in float8 with a scale for each row, 1 for a row of zeros or one that is not finite.

    columns: the transpose too, with a scale for each of its rows, from the same numbers: neither is the other's
    transpose. counts: of the first of the two that is made.
    """
    x_MN = flat_rows(x)
    M, N = x_MN.shape
    q = q_t = scale = scale_t = None
    if x.numel() and use_fused("float8 row-wise cast", x):
        if rows:
            q = torch.empty((M, N), dtype=kind.dtype, device=x.device)
            scale = torch.empty((M, 1), dtype=torch.float32, device=x.device)
            block = min(CHUNK, max(16, next_power_of_2(N)))
            meta = _meta(kind, 0, power_of_2, counts)
            numbers = (N, x_MN.stride(0))
            _cast_rows_kernel[(M,)](x_MN, q, scale, counts, *numbers, **meta, BLOCK=block, num_warps=CHUNK_WARPS)
        if columns:
            amax = torch.zeros((N, 1), dtype=torch.float32, device=x.device)
            scale_t = torch.empty((N, 1), dtype=torch.float32, device=x.device)
            _run_amax(x_MN, amax, True)
            left = None if rows else counts
            _, q_t = _run_cast(x_MN, kind, _BY_COLUMN, amax, None, scale_t, None, left, False, True, 0, power_of_2)
        return Float8(q, scale, q_t, scale_t)
    if rows:
        scale = scale_from_amax(amax_reference(x_MN, 1), kind, power_of_2=power_of_2)
        q = quantise_reference(x_MN, scale, kind, counts)
    if columns:
        scale_t = scale_from_amax(amax_reference(x_MN, 0), kind, power_of_2=power_of_2).t().contiguous()
        q_t = quantise_reference(x_MN.t(), scale_t, kind, None if rows else counts).contiguous()
    return Float8(q, scale, q_t, scale_t)
