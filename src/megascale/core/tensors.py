"""Logical tensors: what the model consists of, whatever the layout. Pure geometry, no torch.

A parameter in memory (local) is a stack of pieces along its first dimension; each piece is a box of one logical
tensor. `[query | key | value | mlp-in]` of a parallel block is one local parameter with four pieces. Initial
values, checkpoints, weight decay and LAMB's trust ratio speak of logical tensors only, so a layout can change
without any of them noticing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """A rectangular part of a logical tensor: where it starts and how far it reaches on each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor that lies, row-major and contiguous, inside a local parameter.

    Attributes:
        name: logical name, such as `layers.3.attention.query.weight`.
        shape: shape of the whole logical tensor.
        box: the part held here.
        decay: whether weight decay applies (and LAMB adapts): matrices yes, biases and norms no.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    decay: bool = True

    @classmethod
    def full(cls, name: str, shape: tuple[int, ...], decay: bool | None = None) -> Piece:
        """All of a logical tensor."""
        return cls(name, shape, Box((0,) * len(shape), shape), len(shape) > 1 if decay is None else decay)

    @classmethod
    def slice_of(cls, name: str, shape: tuple[int, ...], dim: int, index: int, parts: int) -> Piece:
        """The `index`-th of `parts` equal slices along `dim`."""
        size = shape[dim] // parts
        offsets = tuple(index * size if d == dim else 0 for d in range(len(shape)))
        sizes = tuple(size if d == dim else n for d, n in enumerate(shape))
        return cls(name, shape, Box(offsets, sizes), len(shape) > 1)


def flat_boxes(box: Box, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    """Cut elements `start:stop` of a box's row-major flattening into boxes.

    A range of a flat buffer rarely begins and ends at a row: it is a head, whole rows, and a tail, on each
    dimension in turn. Yields (box in the logical tensor, first element, past-last element) in order, covering
    `start:stop` exactly; at most 2 x dimensions - 1 boxes.
    """
    if start >= stop:
        return
    if len(box.sizes) <= 1:
        offset = box.offsets[0] if box.offsets else 0
        yield (Box((offset + start,), (stop - start,)) if box.sizes else box), start, stop
        return
    row = prod(box.sizes[1:])
    first, last = start // row, (stop - 1) // row
    if start % row == 0 and stop % row == 0:
        yield _rows(box, first, last + 1), start, stop
        return
    whole_from, whole_to = -(-start // row), stop // row
    if first == last:
        yield from _in_row(box, first, row, start, stop)
        return
    if start % row:
        yield from _in_row(box, first, row, start, whole_from * row)
    if whole_from < whole_to:
        yield _rows(box, whole_from, whole_to), whole_from * row, whole_to * row
    if stop % row:
        yield from _in_row(box, whole_to, row, whole_to * row, stop)


def _rows(box: Box, first: int, stop: int) -> Box:
    return Box((box.offsets[0] + first, *box.offsets[1:]), (stop - first, *box.sizes[1:]))


def _in_row(box: Box, index: int, row: int, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    inner = Box(box.offsets[1:], box.sizes[1:])
    for part, a, b in flat_boxes(inner, start - index * row, stop - index * row):
        whole = Box((box.offsets[0] + index, *part.offsets), (1, *part.sizes))
        yield whole, a + index * row, b + index * row
