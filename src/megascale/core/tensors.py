"""Geometry of logical tensors, which are the tensors of the model independent of the layout. No torch.

A local parameter (in the memory of a rank) is a stack of pieces along its first dimension. Each piece is a box of one
logical tensor. For example, `[query | key | value | mlp-in]` of a parallel block is one local parameter with four
pieces. Initial values, checkpoints, weight decay and LAMB's trust ratio refer to logical tensors only, so they do not
depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


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
        box: the box of the logical tensor that the piece holds.
        decay: whether weight decay applies (and LAMB adapts): to matrices, not to biases and norms.
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


@dataclass(frozen=True)
class MatrixRange:
    """A range of a piece's elements in one matrix. A tensor of more than two dimensions is a stack of matrices.

    Attributes:
        name: name of the tensor, followed by the matrix's index in brackets if the tensor is a stack.
        shape: shape of the whole matrix.
        box: the box of the matrix that the piece holds.
        start, stop: range of elements in the piece.
        first: index of the range's first element in `box`.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int
    first: int


def list_matrix_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """Return the names of a logical tensor's matrices. A stack [..., rows, columns] has one per leading index."""
    if len(shape) <= 2:
        return [name]
    return [f"{name}[{index}]" for index in range(prod(shape[:-2]))]


def matrix_ranges(piece: Piece, start: int, stop: int) -> Iterator[MatrixRange]:
    """Yield the ranges into which matrix borders cut elements `start:stop` of a piece's row-major flattening."""
    box = piece.box
    if len(piece.shape) <= 2:
        yield MatrixRange(piece.name, piece.shape, box, start, stop, first=start)
        return
    matrix = Box(box.offsets[-2:], box.sizes[-2:])
    while start < stop:
        index_in_box = start // matrix.count
        index_in_tensor = 0
        for dimension, coordinate in enumerate(_unravel(index_in_box, box.sizes[:-2])):
            index_in_tensor = index_in_tensor * piece.shape[dimension] + box.offsets[dimension] + coordinate
        matrix_start = index_in_box * matrix.count
        end = min(stop, matrix_start + matrix.count)
        name = f"{piece.name}[{index_in_tensor}]"
        yield MatrixRange(name, piece.shape[-2:], matrix, start, end, first=start - matrix_start)
        start = end


def _unravel(index: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the coordinates of a flat index."""
    coordinates = []
    for size in reversed(sizes):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return coordinates[::-1]


def flat_boxes(box: Box, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    """Yield the boxes into which elements `start:stop` of a box's row-major flattening can be cut.

    A range of a flat buffer rarely begins and ends at a row. It consists of the end of a row, whole rows, and the
    beginning of a row. The incomplete rows are cut in the same way along the next dimension.

    Yields:
        (box in the logical tensor, first element, element after the last) in order. The ranges cover `start:stop`
        exactly, with at most 2 x dimensions - 1 boxes.
    """
    if start >= stop:
        return
    if not box.sizes:
        yield box, start, stop
        return
    if len(box.sizes) == 1:
        yield Box((box.offsets[0] + start,), (stop - start,)), start, stop
        return
    row_size = prod(box.sizes[1:])
    first_row = start // row_size
    last_row = (stop - 1) // row_size
    if start % row_size == 0 and stop % row_size == 0:
        yield _select_rows(box, first_row, last_row + 1), start, stop
        return
    if first_row == last_row:
        yield from _cut_row(box, first_row, row_size, start=start, stop=stop)
        return
    first_full = -(-start // row_size)
    stop_full = stop // row_size
    if start % row_size:
        yield from _cut_row(box, first_row, row_size, start=start, stop=first_full * row_size)
    if first_full < stop_full:
        yield _select_rows(box, first_full, stop_full), first_full * row_size, stop_full * row_size
    if stop % row_size:
        yield from _cut_row(box, stop_full, row_size, start=stop_full * row_size, stop=stop)


def _select_rows(box: Box, first: int, stop: int) -> Box:
    """Return rows `first:stop` of a box."""
    return Box((box.offsets[0] + first, *box.offsets[1:]), (stop - first, *box.sizes[1:]))


def _cut_row(box: Box, index: int, row_size: int, start: int, stop: int) -> Iterator[tuple[Box, int, int]]:
    """Yield the boxes of elements `start:stop`, all of which lie in row `index`; a row has `row_size` elements."""
    row = Box(box.offsets[1:], box.sizes[1:])
    row_start = index * row_size
    for box_in_row, first, end in flat_boxes(row, start - row_start, stop - row_start):
        full_box = Box((box.offsets[0] + index, *box_in_row.offsets), (1, *box_in_row.sizes))
        yield full_box, first + row_start, end + row_start
