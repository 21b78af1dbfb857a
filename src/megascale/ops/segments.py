"""Segments map ranges of a flat shard to tensors, for weight decay and for sums per tensor.

Optimizers work on flat shards (ops/adam.py), but weight decay and LAMB's norms depend on the tensor. Kernels read the
shard in tiles of TILE elements. Two segments that share a tile each have a program for it, which masks the elements
outside its segment. A tile within one segment is read without a mask, in full vectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megascale.ops.dispatch import jit, tl

TILE = 4096
# Entries of a row of `Segments.tiles`: index of the tile, start and stop of the segment within it, decay flag, tensor.
TILE_FIELDS = 5


@dataclass(frozen=True)
class Segment:
    """Elements `start:stop` of a flat shard, which belong to tensor `tensor_index`. `decay`: weight decay applies."""

    start: int
    stop: int
    decay: bool
    tensor_index: int


class Segments:
    """Segments of one flat shard, ascending and disjoint. Elements outside all segments are padding.

    Args:
        ranges: the segments, or tuples of their fields.
        tensor_count: number of logical tensors. The shard may hold no element of some of them.
        device: device of the tables that kernels read.

    Raises ValueError for ranges that are empty, overlap or descend, and for a tensor index out of range.
    """

    def __init__(
        self, ranges: Iterable[Segment | tuple[int, int, bool, int]], tensor_count: int, device: torch.device | str
    ):
        self.ranges: list[Segment] = []
        for fields in ranges:
            segment = fields if isinstance(fields, Segment) else Segment(*fields)
            self.ranges.append(segment)
        self.tensor_count = tensor_count
        self.device = torch.device(device)
        self.stop = 0
        for segment in self.ranges:
            is_ascending = self.stop <= segment.start < segment.stop
            if not is_ascending or not 0 <= segment.tensor_index < tensor_count:
                raise ValueError(
                    f"segment {segment} overlaps the previous one, is empty, or its tensor is not below {tensor_count}"
                )
            self.stop = segment.stop

    @cached_property
    def tiles(self) -> Tensor:
        """One row per program of a kernel, in the order of elements, int32 [tiles, TILE_FIELDS] on the device."""
        blocks = [torch.empty((0, TILE_FIELDS), dtype=torch.int32)]
        for segment in self.ranges:
            index = torch.arange(segment.start // TILE, (segment.stop - 1) // TILE + 1)
            low = (segment.start - index * TILE).clamp(min=0)
            high = (segment.stop - index * TILE).clamp(max=TILE)
            flags = torch.tensor([int(segment.decay), segment.tensor_index]).expand(len(index), 2)
            blocks.append(torch.cat((torch.stack((index, low, high), 1), flags), 1).int())
        return torch.cat(blocks).to(self.device)

    @cached_property
    def by_tensor(self) -> tuple[Tensor, Tensor]:
        """Rows of `tiles` sorted by tensor, as two tensors.

        The first has the indices of the rows, int32 [tiles]. The second has the start of each tensor's range within the
        first, and the end of the last range, int32 [tensors + 1].
        """
        tensor_indices = self.tiles[:, 4].cpu().long()
        starts = torch.zeros(self.tensor_count + 1, dtype=torch.int32)
        starts[1:] = torch.bincount(tensor_indices, minlength=self.tensor_count).cumsum(0)
        return tensor_indices.argsort(stable=True).int().to(self.device), starts.to(self.device)


@jit
def read_tile(tile_ptr):
    """Return the first element of this program's tile, start and stop of its segment in it, decay flag and tensor."""
    tile = tile_ptr + tl.program_id(0) * 5  # TILE_FIELDS
    base = tl.load(tile).to(tl.int64) * 4096  # TILE
    return base, tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)


@jit
def load_tile(ptr, offset, low, high, FULL: tl.constexpr):
    """Load elements `offset` of a tile as float32, 0 outside [low, high). FULL: the segment fills the tile."""
    if FULL:
        return tl.load(ptr + offset).to(tl.float32)
    return tl.load(ptr + offset, mask=(offset >= low) & (offset < high), other=0.0).to(tl.float32)


@jit
def load_any_tile(ptr, low, high, TILE: tl.constexpr):
    """Load all elements of a tile as float32, 0 outside [low, high)."""
    offset = tl.arange(0, TILE)
    if (low == 0) & (high == TILE):
        x = load_tile(ptr, offset, low, high, True)
    else:
        x = load_tile(ptr, offset, low, high, False)
    return x


@jit
def store_tile(ptr, offset, value, low, high, FULL: tl.constexpr):
    """Store elements `offset` of a tile within [low, high), converted to ptr's type."""
    if FULL:
        tl.store(ptr + offset, value)
    else:
        tl.store(ptr + offset, value, mask=(offset >= low) & (offset < high))


@jit
def _sum_by_tensor_kernel(partial_ptr, order_ptr, start_ptr, out_ptr, tiles, tensors, BLOCK: tl.constexpr):
    """Sum one quantity's partial sums of one tensor in float64, in a fixed order. The grid is (tensors, quantities)."""
    tensor = tl.program_id(0)
    quantity = tl.program_id(1)
    first = tl.load(start_ptr + tensor)
    end = tl.load(start_ptr + tensor + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(first, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tile = tl.load(order_ptr + index, mask=index < end, other=0)
        total += tl.load(partial_ptr + quantity * tiles + tile, mask=index < end, other=0.0).to(tl.float64)
    tl.store(out_ptr + quantity * tensors + tensor, tl.sum(total, 0))


def sums_by_tensor(partial_QP: Tensor, segments: Segments) -> Tensor:
    """Return float64 sums per tensor [quantities, tensors] of float32 partial sums per tile [quantities, tiles]."""
    quantities, tiles = partial_QP.shape
    order, starts = segments.by_tensor
    out = torch.empty((quantities, segments.tensor_count), dtype=torch.float64, device=partial_QP.device)
    grid = (segments.tensor_count, quantities)
    _sum_by_tensor_kernel[grid](partial_QP, order, starts, out, tiles, segments.tensor_count, BLOCK=1024)
    return out


def square_sums_reference(flat: Tensor, segments: Segments) -> Tensor:
    """Return the sum of squares of each tensor's elements in `flat` [n], float64 [tensors]; 0 without elements."""
    sums = torch.zeros(segments.tensor_count, dtype=torch.float64, device=flat.device)
    for segment in segments.ranges:
        sums[segment.tensor_index] += flat[segment.start : segment.stop].double().square().sum()
    return sums
