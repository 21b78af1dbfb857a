"""Boxes of logical tensors: cutting boxes into chunks, and checking that boxes cover each tensor once. Needs no torch.

A chunk is a box of a logical tensor of at most CHUNK_BYTES. Chunks are stored, read and checked as units. Larger boxes
are cut into chunks, so that a chunk can be read as a whole for its checksum, and chunks divide evenly over readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from megascale.checkpoint.format.index import TensorInfo, get_used_dimensions
from megascale.core.tensors import Box

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 64 << 20
_MAX_COMPARED_BOXES = 4096  # with more boxes, comparing pairs to name an overlap would be too slow
_PRIME = (1 << 31) - 1  # products of two numbers below it fit into 64 bits
_HASH_SEED = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])


@dataclass(frozen=True)
class TensorShard:
    """Box of a logical tensor together with its data in memory.

    Attributes:
        name: logical name, such as `model.layers.0.attention.query.weight`.
        shape: shape of the whole logical tensor.
        offsets: first index of the box on each dimension.
        tensor: data of the box, in the shape of the box. For a load it is a view of live memory.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def box(self) -> Box:
        """Return the shard's box within the logical tensor."""
        return Box(tuple(self.offsets), tuple(self.tensor.shape))


def split_box(box: Box, element_bytes: int, limit: int = CHUNK_BYTES) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` bytes, along the first dimension if possible.

    The result depends only on the box, so replicas of a box are cut equally.

    Args:
        element_bytes: size of an element in bytes.
    """
    if box.count * element_bytes <= limit or not box.sizes:
        yield box
        return
    row_bytes = prod(box.sizes[1:]) * element_bytes
    rows = limit // row_bytes
    if rows:
        part_count = -(-box.sizes[0] // rows)
        for i in range(part_count):
            start = box.sizes[0] * i // part_count
            stop = box.sizes[0] * (i + 1) // part_count
            yield Box((box.offsets[0] + start,) + box.offsets[1:], (stop - start,) + box.sizes[1:])
        return
    for row in range(box.sizes[0]):
        for row_box in split_box(Box(box.offsets[1:], box.sizes[1:]), element_bytes, limit):
            yield Box((box.offsets[0] + row,) + row_box.offsets, (1,) + row_box.sizes)


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
    """Return the slices of the box `inner` in an array that has the shape of the box `outer`."""
    slices = []
    for outer_start, inner_start, size in zip(outer.offsets, inner.offsets, inner.sizes, strict=True):
        start = inner_start - outer_start
        slices.append(slice(start, start + size))
    return tuple(slices)


def check_coverage(tensors: Mapping[str, TensorInfo], tensor: np.ndarray, box: np.ndarray) -> None:
    """Raise ValueError if the (distinct) boxes of a tensor overlap or do not fill the tensor.

    The check compares no pairs of boxes. Each coordinate of an axis gets a random number. The weight of a box is the
    product over the axes of (number at its end - number at its start), modulo a prime. If boxes partition a tensor, the
    sum of their weights equals the weight of the tensor. Otherwise the two are equal only if a non-zero polynomial of
    degree `dims` is zero at a random point. With two points the probability is below 1 in 10^18.

    Args:
        tensor: [boxes] position of each box's tensor in `tensors`.
        box: [boxes, 2, dims] offsets and sizes.
    """
    dims = box.shape[2]
    shape = np.zeros((len(tensors), dims), np.int64)
    for i, info in enumerate(tensors.values()):
        shape[i, : len(info.shape)] = info.shape
    names = list(tensors)
    outside = ((box[:, 0] < 0) | (box[:, 0] + box[:, 1] > shape[tensor])).any(axis=1)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise ValueError(
            f"{names[tensor[row]]}: a box at {box[row, 0].tolist()} of {box[row, 1].tolist()} reaches outside the "
            f"shape {shape[tensor[row]].tolist()}"
        )
    is_used = get_used_dimensions(tensors, dims)
    volume = np.zeros(len(tensors), np.int64)
    np.add.at(volume, tensor, np.where(is_used[tensor], box[:, 1], 1).prod(axis=1))
    tensor_volume = np.where(is_used, shape, 1).prod(axis=1)
    for i in np.flatnonzero(volume != tensor_volume).tolist():
        raise ValueError(
            f"{names[i]}: the boxes handed in hold {volume[i]} of {tensor_volume[i]} elements; each must be there once"
        )
    positions = np.arange(len(tensors))
    for seed in (1, 2):
        box_weight = np.ones(len(tensor), np.uint64)
        tensor_weight = np.ones(len(tensors), np.uint64)
        for d in range(dims):
            low = _hash_coordinates(box[:, 0, d], tensor, d, seed)
            high = _hash_coordinates(box[:, 0, d] + box[:, 1, d], tensor, d, seed)
            begin = _hash_coordinates(np.zeros(len(tensors)), positions, d, seed)
            end = _hash_coordinates(shape[:, d], positions, d, seed)
            box_weight = np.where(
                is_used[tensor, d], box_weight * ((high + _PRIME - low) % _PRIME) % _PRIME, box_weight
            )
            tensor_weight = np.where(
                is_used[:, d], tensor_weight * ((end + _PRIME - begin) % _PRIME) % _PRIME, tensor_weight
            )
        weight_sum = np.zeros(len(tensors), np.uint64)
        np.add.at(weight_sum, tensor, box_weight)
        for i in np.flatnonzero(weight_sum % _PRIME != tensor_weight).tolist():
            _raise_overlap(names[i], tensors[names[i]], box[tensor == i])


def _hash_coordinates(coordinate: np.ndarray, tensor: np.ndarray, dim: int, seed: int) -> np.ndarray:
    """Return pseudo-random numbers below _PRIME that depend on tensor, axis and coordinate (splitmix64)."""
    with np.errstate(over="ignore"):
        x = coordinate.astype(np.uint64) + tensor.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64((_HASH_SEED + (dim * 2 + seed) * 0xD1B54A32D192ED03) & (1 << 64) - 1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return (x ^ (x >> np.uint64(31))) % np.uint64(_PRIME)


def _raise_overlap(name: str, info: TensorInfo, box: np.ndarray) -> None:
    """Raise ValueError. The message names two overlapping boxes of the tensor if there are few enough boxes."""
    if len(box) > _MAX_COMPARED_BOXES:
        raise ValueError(f"{name}: some of its {len(box)} boxes overlap, and part of the tensor is not covered")
    dims = len(info.shape)
    boxes = [Box(tuple(low[:dims]), tuple(size[:dims])) for low, size in box.tolist()]
    boxes = [candidate for candidate in boxes if candidate.count and dims]
    # Boxes in the order of their first row. `open_boxes` are the earlier ones that reach the current first row.
    open_boxes: list[Box] = []
    for current in sorted(boxes, key=lambda candidate: candidate.offsets):
        open_boxes = [earlier for earlier in open_boxes if earlier.offsets[0] + earlier.sizes[0] > current.offsets[0]]
        for earlier in open_boxes:
            if intersect_boxes(earlier, current):
                raise ValueError(
                    f"{name}: boxes at {earlier.offsets} of {earlier.sizes} and at {current.offsets} overlap"
                )
        open_boxes.append(current)
    raise ValueError(f"{name}: the boxes handed in do not cover it exactly once")
