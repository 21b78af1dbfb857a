"""Whether boxes of logical tensors fill each exactly once, without comparing pairs. Integer columns, no torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megascale.checkpoint.format.chunks import intersect_boxes
from megascale.checkpoint.format.index import TensorInfo
from megascale.core.tensors import Box

_COMPARED = 4096  # boxes among which the two that overlap are looked for, to name them: that compares pairs


def used_dimensions(tensors: Mapping[str, TensorInfo], dims: int) -> np.ndarray:
    """[tensors, dims] which dimensions a tensor has."""
    return np.arange(dims) < np.array([len(info.shape) for info in tensors.values()], np.int64).reshape(-1, 1)


_PRIME = (1 << 31) - 1


def check_cover(tensors: Mapping[str, TensorInfo], owner: np.ndarray, box: np.ndarray) -> None:
    """ValueError unless the (distinct) boxes of each tensor fill it without overlapping.

    Every coordinate on an axis is given a random number; a box weighs the product over axes of (number at its end -
    number at its start). Boxes that partition a tensor weigh as much as the whole, whatever the numbers, since the
    products telescope; others do so with a chance below 1 in 10^18 (a non-zero polynomial of degree `dims` at random
    points of a field, twice). This needs no comparison of pairs.
    """
    dims = box.shape[2]
    shape = np.zeros((len(tensors), dims), np.int64)
    for i, info in enumerate(tensors.values()):
        shape[i, : len(info.shape)] = info.shape
    outside = ((box[:, 0] < 0) | (box[:, 0] + box[:, 1] > shape[owner])).any(axis=1)
    used = used_dimensions(tensors, dims)
    names = list(tensors)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise ValueError(f"{_name(names, owner, box, row)} reaches outside the shape {shape[owner[row]].tolist()}")
    volume = np.zeros(len(tensors), np.int64)
    np.add.at(volume, owner, np.where(used[owner], box[:, 1], 1).prod(axis=1))
    whole = np.where(used, shape, 1).prod(axis=1)
    for i in np.flatnonzero(volume != whole).tolist():
        raise ValueError(
            f"{names[i]}: the boxes handed in hold {volume[i]} of {whole[i]} elements; each must be there once"
        )
    for seed in (1, 2):
        weight, target = np.ones(len(owner), np.uint64), np.ones(len(tensors), np.uint64)
        for d in range(dims):
            low = _scatter(box[:, 0, d], owner, d, seed)
            high = _scatter(box[:, 0, d] + box[:, 1, d], owner, d, seed)
            numbers = np.arange(len(tensors))
            end, begin = _scatter(shape[:, d], numbers, d, seed), _scatter(np.zeros(len(tensors)), numbers, d, seed)
            weight = np.where(used[owner, d], weight * ((high + _PRIME - low) % _PRIME) % _PRIME, weight)
            target = np.where(used[:, d], target * ((end + _PRIME - begin) % _PRIME) % _PRIME, target)
        total = np.zeros(len(tensors), np.uint64)
        np.add.at(total, owner, weight)
        for i in np.flatnonzero(total % _PRIME != target).tolist():
            _name_clash(names[i], tensors[names[i]], box[owner == i])


_SECRET = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])


def _scatter(coordinate: np.ndarray, owner: np.ndarray, dim: int, seed: int) -> np.ndarray:
    """A number below _PRIME that looks random, fixed by tensor, axis and coordinate (splitmix64)."""
    with np.errstate(over="ignore"):
        x = coordinate.astype(np.uint64) + owner.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64((_SECRET + (dim * 2 + seed) * 0xD1B54A32D192ED03) & (1 << 64) - 1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return (x ^ (x >> np.uint64(31))) % np.uint64(_PRIME)


def _name(names: list[str], owner: np.ndarray, box: np.ndarray, row: int) -> str:
    return f"{names[owner[row]]}: a box at {box[row, 0].tolist()} of {box[row, 1].tolist()}"


def _name_clash(name: str, info: TensorInfo, box: np.ndarray) -> None:
    if len(box) > _COMPARED:
        raise ValueError(f"{name}: some of its {len(box)} boxes overlap, and some of it is in none")
    dims = len(info.shape)
    parts = [Box(tuple(low[:dims]), tuple(size[:dims])) for low, size in box.tolist()]
    active: list[Box] = []
    for part in sorted((p for p in parts if p.count and dims), key=lambda p: p.offsets):
        active = [other for other in active if other.offsets[0] + other.sizes[0] > part.offsets[0]]
        clash = next((other for other in active if intersect_boxes(other, part)), None)
        if clash:
            raise ValueError(f"{name}: boxes at {clash.offsets} of {clash.sizes} and at {part.offsets} overlap")
        active.append(part)
    raise ValueError(f"{name}: the boxes handed in do not cover it exactly once")
