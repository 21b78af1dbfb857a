"""Which boxes of which logical tensors a save consists of: splitting, coverage, who writes what. No torch.

A chunk is what is stored, read and checked as one: a box of a logical tensor of at most CHUNK_BYTES. Larger boxes
are cut, so a checksum covers little enough to be read whole, and work divides evenly over readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from megascale.checkpoint.archive import element_size
from megascale.core.tensors import Box

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Shard:
    """A box of a logical tensor together with its data in memory.

    Attributes:
        name: logical name, such as `model.layers.0.attention.query.weight`.
        shape: shape of the whole logical tensor.
        offsets: where the box starts on each dimension.
        tensor: the box's data, shaped like the box; a view on live memory when loading.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def box(self) -> Box:
        """The part of the logical tensor held here."""
        return Box(tuple(self.offsets), tuple(self.tensor.shape))


@dataclass(frozen=True)
class Chunk:
    """What one process offers to store: a box of at most CHUNK_BYTES, without its data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.box.count * element_size(self.dtype)


def split(box: Box, item: int, limit: int = CHUNK_BYTES) -> Iterator[Box]:
    """Cut a box into boxes of at most `limit` bytes, rows first; `item` is the bytes of one element.

    The cut depends on the box alone, so replicas of a box are cut alike.
    """
    if box.count * item <= limit or not box.sizes:
        yield box
        return
    inner = prod(box.sizes[1:]) * item
    rows = limit // inner
    if rows:
        pieces = -(-box.sizes[0] // rows)
        for i in range(pieces):
            first, stop = box.sizes[0] * i // pieces, box.sizes[0] * (i + 1) // pieces
            yield Box((box.offsets[0] + first, *box.offsets[1:]), (stop - first, *box.sizes[1:]))
        return
    for row in range(box.sizes[0]):
        for part in split(Box(box.offsets[1:], box.sizes[1:]), item, limit):
            yield Box((box.offsets[0] + row, *part.offsets), (1, *part.sizes))


def overlap(a: Box, b: Box) -> Box | None:
    """The part that two boxes of one tensor share, or None."""
    offsets, sizes = [], []
    for a_start, a_size, b_start, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        start, stop = max(a_start, b_start), min(a_start + a_size, b_start + b_size)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes))


def slices(outer: Box, inner: Box) -> tuple[slice, ...]:
    """Where `inner` lies within an array shaped like `outer`."""
    return tuple(slice(i - o, i - o + n) for o, i, n in zip(outer.offsets, inner.offsets, inner.sizes, strict=True))


def assign(offers: Sequence[Sequence[Chunk]]) -> list[list[int]]:
    """Who writes what: for each process, the indices among its own offers that it is to write.

    A box offered by several processes is written once, by the holder with the fewest bytes so far.
    Raises ValueError if the offers do not cover each tensor exactly once.
    """
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    first: dict[str, Chunk] = {}
    for rank, chunks in enumerate(offers):
        for index, chunk in enumerate(chunks):
            known = first.setdefault(chunk.name, chunk)
            if (known.shape, known.dtype) != (chunk.shape, chunk.dtype):
                raise ValueError(
                    f"{chunk.name} is {known.dtype}{list(known.shape)} on one process and "
                    f"{chunk.dtype}{list(chunk.shape)} on another"
                )
            holders.setdefault((chunk.name, chunk.box), []).append((rank, index))
    _check_cover(first, holders)
    load = [0] * len(offers)
    result: list[list[int]] = [[] for _ in offers]
    alone = [(key, at) for key, at in holders.items() if len(at) == 1]
    shared = [(key, at) for key, at in holders.items() if len(at) > 1]
    # Boxes with one holder are settled first, then the largest shared ones, so that the greedy choice balances.
    shared.sort(key=lambda item: -item[0][1].count * element_size(first[item[0][0]].dtype))
    for (name, box), at in alone + shared:
        rank, index = min(at, key=lambda place: load[place[0]])
        load[rank] += box.count * element_size(first[name].dtype)
        result[rank].append(index)
    return [sorted(indices) for indices in result]


def _check_cover(first: dict[str, Chunk], boxes: dict[tuple[str, Box], list[tuple[int, int]]]) -> None:
    """ValueError unless the boxes of each tensor fill it without overlapping."""
    by_name: dict[str, list[Box]] = {}
    for name, box in boxes:
        by_name.setdefault(name, []).append(box)
    for name, parts in by_name.items():
        shape = first[name].shape
        for box in parts:
            inside = all(o >= 0 and o + n <= s for o, n, s in zip(box.offsets, box.sizes, shape, strict=True))
            if not inside:
                raise ValueError(f"{name}: a box at {box.offsets} of {box.sizes} reaches outside the shape {shape}")
        held, whole = sum(box.count for box in parts), prod(shape)
        if held != whole:
            raise ValueError(f"{name}: the boxes handed in hold {held} of {whole} elements; each must be there once")
        if shape:
            _check_disjoint(name, parts)


def _check_disjoint(name: str, parts: list[Box]) -> None:
    parts = sorted((box for box in parts if box.count), key=lambda box: box.offsets)
    active: list[Box] = []
    for box in parts:
        active = [other for other in active if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        clash = next((other for other in active if overlap(other, box)), None)
        if clash:
            raise ValueError(f"{name}: boxes at {clash.offsets} of {clash.sizes} and at {box.offsets} overlap")
        active.append(box)
