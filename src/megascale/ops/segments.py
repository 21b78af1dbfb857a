"""The table that says which tensor each range of a flat shard belongs to, and sums over it.

Optimizers work on flat shards (ops/adamw.py, ops/lamb.py); decay masks and LAMB's norms need the tensors back.
Kernels see the shard as tiles of TILE elements, each in one segment: a tile that its segment fills is read in full
vectors, the ragged ones at a segment's ends with a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megascale.ops.dispatch import jit, tl, use_fused

TILE = 4096
FIELDS = 5  # of a tile: index, first and last element in it, decay flag, tensor


@dataclass(frozen=True)
class Segment:
    """Elements start .. stop of a flat shard, part of tensor `tensor`; weight decay applies if `decay`."""

    start: int
    stop: int
    decay: bool
    tensor: int


class Segments:
    """Segments of one flat shard, ascending and disjoint; elements in no segment are padding and never touched.

    tensors: how many logical tensor ids there are in all (an id may have no element here). Raises ValueError on
    overlapping or descending ranges.
    """

    def __init__(self, rows: Iterable[Segment | tuple[int, int, bool, int]], tensors: int, device: torch.device | str):
        self.rows = [row if isinstance(row, Segment) else Segment(*row) for row in rows]
        self.tensors = tensors
        self.device = torch.device(device)
        last = 0
        for row in self.rows:
            if row.start < last or row.stop <= row.start or not 0 <= row.tensor < tensors:
                raise ValueError(f"segment {row} overlaps the one before it, is empty or names no tensor of {tensors}")
            last = row.stop
        self.stop = last

    @cached_property
    def tiles(self) -> Tensor:
        """int32 [tiles, FIELDS] on the device, in flat order."""
        blocks = [torch.empty((0, FIELDS), dtype=torch.int32)]
        for row in self.rows:
            index = torch.arange(row.start // TILE, (row.stop - 1) // TILE + 1)
            low = (row.start - index * TILE).clamp(min=0)
            high = (row.stop - index * TILE).clamp(max=TILE)
            flags = torch.tensor([int(row.decay), row.tensor]).expand(len(index), 2)
            blocks.append(torch.cat((torch.stack((index, low, high), 1), flags), 1).int())
        return torch.cat(blocks).to(self.device)

    @cached_property
    def by_tensor(self) -> tuple[Tensor, Tensor]:
        """Tiles in the order of their tensors, and where each tensor's begin in it, int32 [tiles], [tensors + 1]."""
        tensor = self.tiles[:, 4].cpu().long()
        begin = torch.zeros(self.tensors + 1, dtype=torch.int32)
        begin[1:] = torch.bincount(tensor, minlength=self.tensors).cumsum(0)
        return tensor.argsort(stable=True).int().to(self.device), begin.to(self.device)


@jit
def read_tile(tile_ptr):
    """Flat position of this program's tile, its bounds, decay flag and tensor."""
    tile = tile_ptr + tl.program_id(0) * 5
    base = tl.load(tile).to(tl.int64) * 4096
    return base, tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)


@jit
def load_tile(ptr, offset, low, high, FULL: tl.constexpr):
    """float32 elements `offset` from ptr, 0 outside low .. high."""
    if FULL:
        return tl.load(ptr + offset).to(tl.float32)
    return tl.load(ptr + offset, mask=(offset >= low) & (offset < high), other=0.0).to(tl.float32)


@jit
def store_tile(ptr, offset, value, low, high, FULL: tl.constexpr):
    """The counterpart of `load_tile`; converts to ptr's type."""
    if FULL:
        tl.store(ptr + offset, value)
    else:
        tl.store(ptr + offset, value, mask=(offset >= low) & (offset < high))


@jit
def _square_kernel(flat_ptr, tile_ptr, part_ptr, TILE: tl.constexpr):
    base, low, high, _, _ = read_tile(tile_ptr)
    offset = tl.arange(0, TILE)
    if (low == 0) & (high == TILE):
        x = load_tile(flat_ptr + base, offset, low, high, True)
    else:
        x = load_tile(flat_ptr + base, offset, low, high, False)
    tl.store(part_ptr + tl.program_id(0), tl.sum(x * x, 0))


@jit
def _gather_kernel(part_ptr, order_ptr, begin_ptr, out_ptr, tiles, tensors, BLOCK: tl.constexpr):
    """Sum of one tensor's partial sums in float64, in a fixed order; the second grid axis is the row."""
    tensor, field = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(begin_ptr + tensor), tl.load(begin_ptr + tensor + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tile = tl.load(order_ptr + at, mask=at < end, other=0)
        total += tl.load(part_ptr + field * tiles + tile, mask=at < end, other=0.0).to(tl.float64)
    tl.store(out_ptr + field * tensors + tensor, tl.sum(total, 0))


def sums_by_tensor(partial_FP: Tensor, segments: Segments) -> Tensor:
    """float64 sums [fields, tensors] of float32 partial sums [fields, tiles]."""
    fields, tiles = partial_FP.shape
    order, begin = segments.by_tensor
    out = torch.empty((fields, segments.tensors), dtype=torch.float64, device=partial_FP.device)
    _gather_kernel[(segments.tensors, fields)](partial_FP, order, begin, out, tiles, segments.tensors, BLOCK=1024)
    return out


def square_sums_reference(flat: Tensor, segments: Segments) -> Tensor:
    """Plain PyTorch of `square_sums`."""
    sums = torch.zeros(segments.tensors, dtype=torch.float64, device=flat.device)
    for row in segments.rows:
        sums[row.tensor] += flat[row.start : row.stop].double().square().sum()
    return sums


def square_sums(flat: Tensor, segments: Segments) -> Tensor:
    """Sum of squares of each tensor's elements in `flat` [n], float64 [tensors]; ids without an element give 0.

    One pass, float32 inside a tile and float64 between tiles, in a fixed order. For gradient norms and trust ratios.
    """
    if not (segments.rows and use_fused("square sums", flat)):
        return square_sums_reference(flat, segments)
    tiles = segments.tiles
    partial = torch.empty((1, tiles.shape[0]), dtype=torch.float32, device=flat.device)
    _square_kernel[(tiles.shape[0],)](flat, tiles, partial, TILE=TILE, num_warps=8)
    return sums_by_tensor(partial, segments)[0]
