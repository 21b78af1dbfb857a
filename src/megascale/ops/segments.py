"""Segments map ranges of a flat shard to tensors, for weight decay and for sums per tensor.

Optimizers work on flat shards (ops/adam.py); decay masks and LAMB's norms need the tensors. Kernels see the shard as
tiles of TILE elements, each in one segment. A tile that its segment fills is read in full vectors; the ragged tiles at
a segment's ends are read with a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megascale.ops.dispatch import jit, tl, use_fused

TILE = 4096
FIELDS = 5  # numbers per tile: index, first and last element in the tile, decay flag, tensor


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a flat shard, part of tensor `tensor`; weight decay applies if `decay`."""

    start: int
    stop: int
    decay: bool
    tensor_index: int


class Segments:
    """Segments of one flat shard, ascending and disjoint; elements in no segment are padding and never touched.

    Args:
        tensors: number of logical tensor ids (an id may have no element here).

    Raises ValueError on overlapping or descending ranges.
    """

    def __init__(self, rows: Iterable[Segment | tuple[int, int, bool, int]], tensors: int, device: torch.device | str):
        self.ranges = [row if isinstance(row, Segment) else Segment(*row) for row in rows]
        self.tensor_count = tensors
        self.device = torch.device(device)
        self.stop = 0
        for row in self.ranges:
            if row.start < self.stop or row.stop <= row.start or not 0 <= row.tensor_index < tensors:
                raise ValueError(
                    f"segment {row} overlaps the previous one, is empty, or its tensor is not below {tensors}"
                )
            self.stop = row.stop

    @cached_property
    def tiles(self) -> Tensor:
        """Tiles in flat order, int32 [tiles, FIELDS] on the device."""
        blocks = [torch.empty((0, FIELDS), dtype=torch.int32)]
        for row in self.ranges:
            index = torch.arange(row.start // TILE, (row.stop - 1) // TILE + 1)
            low = (row.start - index * TILE).clamp(min=0)
            high = (row.stop - index * TILE).clamp(max=TILE)
            flags = torch.tensor([int(row.decay), row.tensor_index]).expand(len(index), 2)
            blocks.append(torch.cat((torch.stack((index, low, high), 1), flags), 1).int())
        return torch.cat(blocks).to(self.device)

    @cached_property
    def by_tensor(self) -> tuple[Tensor, Tensor]:
        """Tiles in the order of their tensors, int32 [tiles], and the first tile of each, int32 [tensors + 1]."""
        tensor = self.tiles[:, 4].cpu().long()
        begin = torch.zeros(self.tensor_count + 1, dtype=torch.int32)
        begin[1:] = torch.bincount(tensor, minlength=self.tensor_count).cumsum(0)
        return tensor.argsort(stable=True).int().to(self.device), begin.to(self.device)


@jit
def read_tile(tile_ptr):
    """Return the flat position of this program's tile, its bounds, decay flag and tensor."""
    tile = tile_ptr + tl.program_id(0) * 5
    base = tl.load(tile).to(tl.int64) * 4096
    return base, tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)


@jit
def load_tile(ptr, offset, low, high, FULL: tl.constexpr):
    """Load elements `offset` from ptr as float32, 0 outside [low, high)."""
    if FULL:
        return tl.load(ptr + offset).to(tl.float32)
    return tl.load(ptr + offset, mask=(offset >= low) & (offset < high), other=0.0).to(tl.float32)


@jit
def load_any_tile(ptr, low, high, TILE: tl.constexpr):
    """Load a whole tile as float32, full or ragged."""
    offset = tl.arange(0, TILE)
    if (low == 0) & (high == TILE):
        x = load_tile(ptr, offset, low, high, True)
    else:
        x = load_tile(ptr, offset, low, high, False)
    return x


@jit
def store_tile(ptr, offset, value, low, high, FULL: tl.constexpr):
    """Store what `load_tile` loads, converted to ptr's type."""
    if FULL:
        tl.store(ptr + offset, value)
    else:
        tl.store(ptr + offset, value, mask=(offset >= low) & (offset < high))


@jit
def _square_kernel(flat_ptr, tile_ptr, part_ptr, TILE: tl.constexpr):
    base, low, high, _, _ = read_tile(tile_ptr)
    x = load_any_tile(flat_ptr + base, low, high, TILE)
    tl.store(part_ptr + tl.program_id(0), tl.sum(x * x, 0))


@jit
def _gather_kernel(part_ptr, order_ptr, begin_ptr, out_ptr, tiles, tensors, BLOCK: tl.constexpr):
    """Sum one tensor's partial sums in float64, in a fixed order; the second grid axis is the row."""
    tensor, field = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(begin_ptr + tensor), tl.load(begin_ptr + tensor + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tile = tl.load(order_ptr + index, mask=index < end, other=0)
        total += tl.load(part_ptr + field * tiles + tile, mask=index < end, other=0.0).to(tl.float64)
    tl.store(out_ptr + field * tensors + tensor, tl.sum(total, 0))


def sums_by_tensor(partial_FP: Tensor, segments: Segments) -> Tensor:
    """Return float64 sums [fields, tensors] of float32 partial sums [fields, tiles]."""
    fields, tiles = partial_FP.shape
    order, begin = segments.by_tensor
    out = torch.empty((fields, segments.tensor_count), dtype=torch.float64, device=partial_FP.device)
    _gather_kernel[(segments.tensor_count, fields)](
        partial_FP, order, begin, out, tiles, segments.tensor_count, BLOCK=1024
    )
    return out


def square_sums_reference(flat: Tensor, segments: Segments) -> Tensor:
    """Compute `square_sums` in plain PyTorch."""
    sums = torch.zeros(segments.tensor_count, dtype=torch.float64, device=flat.device)
    for row in segments.ranges:
        sums[row.tensor_index] += flat[row.start : row.stop].double().square().sum()
    return sums


def square_sums(flat: Tensor, segments: Segments) -> Tensor:
    """Return the sum of squares of each tensor's elements in `flat` [n], float64 [tensors]; 0 without an element.

    One pass, float32 inside a tile and float64 between tiles, in a fixed order. For gradient norms and trust ratios.
    """
    if not (segments.ranges and use_fused("square sums", flat)):
        return square_sums_reference(flat, segments)
    tiles = segments.tiles
    partial = torch.empty((1, tiles.shape[0]), dtype=torch.float32, device=flat.device)
    _square_kernel[(tiles.shape[0],)](flat, tiles, partial, TILE=TILE, num_warps=8)
    return sums_by_tensor(partial, segments)[0]
