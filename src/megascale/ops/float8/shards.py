"""Float8 of the part of several matrices that lies in one flat shard, and the transpose of float8 rows that arrived.

A data-parallel rank casts what it has updated (parallel/float8_gather.py): `amaxes` gives the largest magnitude of its
part of each matrix, which ranks agree on, `scales_of` the scales, `cast_shard` the bytes. Each is one launch, however
many matrices the shard touches. The bytes are those that `cast.py` makes of whole matrices by the same amax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.float8.cast import _magnitude_bits, _scale_of, _to_float8
from megascale.ops.float8.formats import SMALLEST_SCALE, Format, amax_reference, quantise_reference, scale_from_amax
from megascale.ops.segments import TILE, Segments, load_tile, read_tile, store_tile

SLOT = 4  # float32 numbers from one scale to the next: cuBLASLt reads them at multiples of 16 bytes
# Words of four bytes, each way, of a transpose's tile, and warps.
WORDS, WORDS_WARPS = 32, 4


@jit
def _amaxes_kernel(flat_ptr, tile_ptr, amax_ptr, TILE: tl.constexpr):
    """One tile's largest magnitude into its matrix's."""
    base, low, high, _, matrix = read_tile(tile_ptr)
    offset = tl.arange(0, TILE)
    if (low == 0) & (high == TILE):
        x = load_tile(flat_ptr + base, offset, low, high, True)
    else:
        x = load_tile(flat_ptr + base, offset, low, high, False)
    most = tl.max(_magnitude_bits(x), 0)
    # What was there may be old, but it only grows: few tiles have anything to add.
    tl.atomic_max(amax_ptr + matrix, most, mask=most > tl.load(amax_ptr + matrix), sem="relaxed")


@jit
def _scales_kernel(amax_ptr, scale_ptr, count, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr):
    matrix = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + matrix, mask=matrix < count, other=0.0)
    tl.store(scale_ptr + matrix * 4, _scale_of(amax, 1.0, LARGEST, 1.0, SMALLEST, False), mask=matrix < count)


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
    """Bytes [4 rows, 4 width] as words: blocks of 4 x 4 bytes in registers, words between threads, which Triton 3.6
    exchanges rightly, as it does not all float8 (cast.py)."""
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    at = x_ptr + row[:, None].to(tl.int64) * 4 * width + column[None, :]
    w0 = tl.load(at, mask=inside, other=0)
    w1 = tl.load(at + width, mask=inside, other=0)
    w2 = tl.load(at + 2 * width, mask=inside, other=0)
    w3 = tl.load(at + 3 * width, mask=inside, other=0)
    to = y_ptr + column[:, None].to(tl.int64) * 4 * rows + row[None, :]
    there = (column[:, None] < width) & (row[None, :] < rows)
    for byte in tl.static_range(4):
        low = ((w0 >> (8 * byte)) & 255) | (((w1 >> (8 * byte)) & 255) << 8)
        word = low | (((w2 >> (8 * byte)) & 255) << 16) | (((w3 >> (8 * byte)) & 255) << 24)
        tl.store(to + byte * rows, tl.trans(word), mask=there)


def compute_shard_amaxes(flat: Tensor, segments: Segments, out: Tensor) -> None:
    """out [matrices] (float32, contiguous) <- the largest magnitude of each matrix's part of a shard, NaN if that has
    one, 0 where it has no part. The segments' tensors are numbers of matrices."""
    out.zero_()
    if segments.rows and use_fused("float8 amax of shards", flat):
        # The integer view: float32 maxima would lose NaN.
        tiles = segments.tiles
        _amaxes_kernel[(tiles.shape[0],)](flat, tiles, out.view(torch.int32), TILE=TILE, num_warps=8)
        return
    for row in segments.rows:
        out[row.tensor] = torch.maximum(out[row.tensor], amax_reference(flat[row.start : row.stop]))


def compute_shard_scales(amax: Tensor, kind: Format, out: Tensor) -> None:
    """out [matrices] (of `formats.scale_slots`) <- `scale_from_amax` of each."""
    if use_fused("float8 scales of shards", amax):
        assert out.stride(0) == SLOT, out.stride()
        block = min(1024, next_power_of_2(amax.numel()))
        meta = {"LARGEST": kind.largest, "SMALLEST": SMALLEST_SCALE, "BLOCK": block}
        _scales_kernel[(cdiv(amax.numel(), block),)](amax, out, amax.numel(), **meta, num_warps=4)
        return
    out.copy_(scale_from_amax(amax, kind))


def cast_shard(flat: Tensor, segments: Segments, scales: Tensor, kind: Format, out: Tensor) -> None:
    """out (bytes, as long as the shard) <- each matrix's part by its scale; bytes of no matrix stay as they are."""
    if not segments.rows:
        return
    if use_fused("float8 cast of shards", flat):
        tiles = segments.tiles
        _cast_shard_kernel[(tiles.shape[0],)](
            flat, tiles, scales, out.view(kind.dtype), LARGEST=kind.largest, TILE=TILE, num_warps=8
        )
        return
    for row in segments.rows:
        part = slice(row.start, row.stop)
        out[part] = quantise_reference(flat[part], scales[row.tensor], kind).view(torch.uint8)


def transpose_rows(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """A float8 matrix [M, N], contiguous -> its transpose [N, M], contiguous; in `out` if that is given."""
    M, N = rows.shape
    if out is None:
        out = torch.empty((N, M), dtype=rows.dtype, device=rows.device)
    if rows.numel() and M % 4 == N % 4 == 0 and use_fused("float8 transpose", rows.view(torch.float32)):
        grid = cdiv(N // 4, WORDS), cdiv(M // 4, WORDS)
        x, y = rows.view(torch.int32), out.view(torch.int32)
        _transpose_kernel[grid](x, y, M // 4, N // 4, BLOCK=WORDS, num_warps=WORDS_WARPS)
        return out
    out.view(torch.uint8).copy_(rows.view(torch.uint8).t())
    return out
