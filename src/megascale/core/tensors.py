"""Geometry of logical tensors, the tensors of the model independent of the layout. No torch.

A parameter in memory (local) is a stack of pieces along its first dimension; each piece is a box of one logical
tensor. `[query | key | value | mlp-in]` of a parallel block is one local parameter with four pieces. Initial
values, checkpoints, weight decay and LAMB's trust ratio refer to logical tensors only, so they do not depend on the
layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """A rectangular part of a logical tensor, by its offset and size on each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether weight decay applies to a logical tensor: to matrices, not to norms and (stacked) biases."""
    return len(shape) > 1 and not name.endswith(".bias")


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
        """Return the piece that holds all of a logical tensor."""
        if decay is None:
            decay = is_decayed(name, shape)
        return cls(name, shape, Box((0,) * len(shape), shape), decay)

    @classmethod
    def slice_of(cls, name: str, shape: tuple[int, ...], dim: int, index: int, parts: int) -> Piece:
        """Return the `index`-th of `parts` equal slices along `dim`."""
        size = shape[dim] // parts
        offsets = tuple(index * size if d == dim else 0 for d in range(len(shape)))
        sizes = tuple(size if d == dim else n for d, n in enumerate(shape))
        return cls(name, shape, Box(offsets, sizes), is_decayed(name, shape))


@dataclass(frozen=True)
class MatrixRange:
    """A range of a piece's elements that lies in one matrix of a stack, or in a whole tensor of less dimensions.

    Attributes:
        name: name of the matrix: that of the tensor, with the matrix's index in brackets if there are several.
        shape: shape of the whole matrix.
        box: the piece's part of the matrix.
        start, stop: elements of the piece.
        first: index of the first element within `box`.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int
    first: int


def list_matrix_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """Return the names of a logical tensor's matrices: of a stack [..., rows, columns] one per index before them."""
    if len(shape) <= 2:
        return [name]
    return [f"{name}[{index}]" for index in range(prod(shape[:-2]))]


def matrix_ranges(piece: Piece, start: int, stop: int) -> Iterator[MatrixRange]:
    """Cut elements `start:stop` of a piece's row-major flattening at the borders of its matrices."""
    box = piece.box
    if len(piece.shape) <= 2:
        yield MatrixRange(piece.name, piece.shape, box, start, stop, first=start)
        return
    matrix = Box(box.offsets[-2:], box.sizes[-2:])
    while start < stop:
        local = start // matrix.count
        index = 0
        for dimension, coordinate in enumerate(_unravel(local, box.sizes[:-2])):
            index = index * piece.shape[dimension] + box.offsets[dimension] + coordinate
        end = min(stop, (local + 1) * matrix.count)
        name = f"{piece.name}[{index}]"
        yield MatrixRange(name, piece.shape[-2:], matrix, start, end, first=start - local * matrix.count)
        start = end


def _unravel(index: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the coordinates of a flat index."""
    coordinates = []
    for size in reversed(sizes):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return coordinates[::-1]


def flat_boxes(box: Box, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    """Cut elements `start:stop` of a box's row-major flattening into boxes.

    A range of a flat buffer rarely begins and ends at a row: it is a head, whole rows, and a tail, on each
    dimension in turn.

    Yields:
        (box in the logical tensor, first element, past-last element) in order. The ranges cover `start:stop` exactly,
        with at most 2 x dimensions - 1 boxes.
    """
    if start >= stop:
        return
    if len(box.sizes) <= 1:
        if box.sizes:
            part = Box((box.offsets[0] + start,), (stop - start,))
        else:
            part = box
        yield part, start, stop
        return
    row = prod(box.sizes[1:])
    first, last = start // row, (stop - 1) // row
    if start % row == 0 and stop % row == 0:
        yield _rows(box, first, last + 1), start, stop
        return
    first_full, stop_full = -(-start // row), stop // row
    if first == last:
        yield from _in_row(box, first, row, start, stop)
        return
    if start % row:
        yield from _in_row(box, first, row, start, first_full * row)
    if first_full < stop_full:
        yield _rows(box, first_full, stop_full), first_full * row, stop_full * row
    if stop % row:
        yield from _in_row(box, stop_full, row, stop_full * row, stop)


def _rows(box: Box, first: int, stop: int) -> Box:
    """Return rows `first:stop` of a box."""
    return Box((box.offsets[0] + first, *box.offsets[1:]), (stop - first, *box.sizes[1:]))


def _in_row(box: Box, index: int, row: int, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    """Yield the boxes of elements `start:stop`, all of which lie in the row `index`; a row has `row` elements."""
    inner = Box(box.offsets[1:], box.sizes[1:])
    row_start = index * row
    for part, first, end in flat_boxes(inner, start - row_start, stop - row_start):
        part_of_row = Box((box.offsets[0] + index, *part.offsets), (1, *part.sizes))
        yield part_of_row, first + row_start, end + row_start
