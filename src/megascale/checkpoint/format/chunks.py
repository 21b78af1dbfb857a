"""Boxes of logical tensors, and how large ones are cut. No torch.

A chunk is what is stored, read and checked as one: a box of a logical tensor of at most CHUNK_BYTES. Larger boxes
are cut, so a checksum covers little enough to be read whole, and work divides evenly over readers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from megascale.core.tensors import Box

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorShard:
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


def split_box(box: Box, item: int, limit: int = CHUNK_BYTES) -> Iterator[Box]:
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
        for part in split_box(Box(box.offsets[1:], box.sizes[1:]), item, limit):
            yield Box((box.offsets[0] + row, *part.offsets), (1, *part.sizes))


def intersect_boxes(a: Box, b: Box) -> Box | None:
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
