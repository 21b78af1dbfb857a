"""Boxes of logical tensors: cutting large ones into chunks, and checking that boxes cover each tensor once. No torch.

A chunk is the unit that is stored, read and checked: a box of a logical tensor of at most CHUNK_BYTES. Larger boxes are
cut, so that a checksum covers few enough bytes to be read at once and work divides evenly over readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from megascale.checkpoint.format.index import TensorInfo, used_dimensions
from megascale.core.tensors import Box

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 64 << 20
_MAX_COMPARED_BOXES = 4096  # naming the two boxes that overlap compares pairs, which is too slow for more
_PRIME = (1 << 31) - 1
_HASH_SEED = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])


@dataclass(frozen=True)
class TensorShard:
    """A box of a logical tensor together with its data in memory.

    Attributes:
        name: logical name, such as `model.layers.0.attention.query.weight`.
        shape: shape of the whole logical tensor.
        offsets: first index of the box on each dimension.
        tensor: the box's data, shaped like the box; a view on live memory when loading.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def box(self) -> Box:
        """Return the part of the logical tensor that the shard holds."""
        return Box(tuple(self.offsets), tuple(self.tensor.shape))


def split_box(box: Box, item: int, limit: int = CHUNK_BYTES) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` bytes, rows first; `item` is the bytes of one element.

    The cut depends on the box alone, so replicas of a box are cut alike.
    """
    if box.count * item <= limit or not box.sizes:
        yield box
        return
    row_bytes = prod(box.sizes[1:]) * item
    rows = limit // row_bytes
    if rows:
        pieces = -(-box.sizes[0] // rows)
        for i in range(pieces):
            start = box.sizes[0] * i // pieces
            stop = box.sizes[0] * (i + 1) // pieces
            yield Box((box.offsets[0] + start,) + box.offsets[1:], (stop - start,) + box.sizes[1:])
        return
    for row in range(box.sizes[0]):
        for part in split_box(Box(box.offsets[1:], box.sizes[1:]), item, limit):
            yield Box((box.offsets[0] + row,) + part.offsets, (1,) + part.sizes)


def intersect_boxes(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes of one tensor, or None."""
    offsets = []
    sizes = []
    for a_start, a_size, b_start, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        start = max(a_start, b_start)
        stop = min(a_start + a_size, b_start + b_size)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes))


def box_slices(outer: Box, inner: Box) -> tuple[slice, ...]:
    """Return the slices of `inner` in an array shaped like `outer`."""
    return tuple(slice(i - o, i - o + n) for o, i, n in zip(outer.offsets, inner.offsets, inner.sizes, strict=True))


def check_coverage(tensors: Mapping[str, TensorInfo], owner: np.ndarray, box: np.ndarray) -> None:
    """Raise ValueError unless the (distinct) boxes of each tensor fill it without overlapping.

    Every coordinate on an axis gets a random number; a box weighs the product over axes of (number at its end - number
    at its start). Boxes that partition a tensor weigh as much as the whole, whatever the numbers, since the products
    telescope. Other boxes do so with a probability below 1 in 10^18: a non-zero polynomial of degree `dims` vanishes at
    two random points of a field. No pairs of boxes are compared.

    Args:
        owner: [boxes] number of each box's tensor.
        box: [boxes, 2, dims] offsets and sizes.
    """
    dims = box.shape[2]
    shape = np.zeros((len(tensors), dims), np.int64)
    for i, info in enumerate(tensors.values()):
        shape[i, : len(info.shape)] = info.shape
    names = list(tensors)
    outside = ((box[:, 0] < 0) | (box[:, 0] + box[:, 1] > shape[owner])).any(axis=1)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise ValueError(
            f"{names[owner[row]]}: a box at {box[row, 0].tolist()} of {box[row, 1].tolist()} reaches outside the shape "
            f"{shape[owner[row]].tolist()}"
        )
    used = used_dimensions(tensors, dims)
    volume = np.zeros(len(tensors), np.int64)
    np.add.at(volume, owner, np.where(used[owner], box[:, 1], 1).prod(axis=1))
    tensor_volume = np.where(used, shape, 1).prod(axis=1)
    for i in np.flatnonzero(volume != tensor_volume).tolist():
        raise ValueError(
            f"{names[i]}: the boxes handed in hold {volume[i]} of {tensor_volume[i]} elements; each must be there once"
        )
    numbers = np.arange(len(tensors))
    for seed in (1, 2):
        weight = np.ones(len(owner), np.uint64)
        target = np.ones(len(tensors), np.uint64)
        for d in range(dims):
            low = _hash_coordinates(box[:, 0, d], owner, d, seed)
            high = _hash_coordinates(box[:, 0, d] + box[:, 1, d], owner, d, seed)
            begin = _hash_coordinates(np.zeros(len(tensors)), numbers, d, seed)
            end = _hash_coordinates(shape[:, d], numbers, d, seed)
            weight = np.where(used[owner, d], weight * ((high + _PRIME - low) % _PRIME) % _PRIME, weight)
            target = np.where(used[:, d], target * ((end + _PRIME - begin) % _PRIME) % _PRIME, target)
        total = np.zeros(len(tensors), np.uint64)
        np.add.at(total, owner, weight)
        for i in np.flatnonzero(total % _PRIME != target).tolist():
            _raise_overlap(names[i], tensors[names[i]], box[owner == i])


def _hash_coordinates(coordinate: np.ndarray, owner: np.ndarray, dim: int, seed: int) -> np.ndarray:
    """Return pseudo-random numbers below _PRIME, determined by tensor, axis and coordinate (splitmix64)."""
    with np.errstate(over="ignore"):
        x = coordinate.astype(np.uint64) + owner.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64((_HASH_SEED + (dim * 2 + seed) * 0xD1B54A32D192ED03) & (1 << 64) - 1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return (x ^ (x >> np.uint64(31))) % np.uint64(_PRIME)


def _raise_overlap(name: str, info: TensorInfo, box: np.ndarray) -> None:
    """Raise ValueError that names two overlapping boxes of a tensor, if there are few enough to find them."""
    if len(box) > _MAX_COMPARED_BOXES:
        raise ValueError(f"{name}: some of its {len(box)} boxes overlap, and part of the tensor is not covered")
    dims = len(info.shape)
    parts = [Box(tuple(low[:dims]), tuple(size[:dims])) for low, size in box.tolist()]
    active: list[Box] = []
    for part in sorted((p for p in parts if p.count and dims), key=lambda p: p.offsets):
        active = [earlier for earlier in active if earlier.offsets[0] + earlier.sizes[0] > part.offsets[0]]
        clash = next((earlier for earlier in active if intersect_boxes(earlier, part)), None)
        if clash:
            raise ValueError(f"{name}: boxes at {clash.offsets} of {clash.sizes} and at {part.offsets} overlap")
        active.append(part)
    raise ValueError(f"{name}: the boxes handed in do not cover it exactly once")
