"""Cutting flat ranges into boxes: exact cover, in order, at most 2 x dimensions - 1 of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.tensors import Box, Piece, flat_boxes, list_matrix_names, matrix_ranges


@st.composite
def ranges(draw):
    sizes = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    offsets = tuple(draw(st.integers(0, 5)) for _ in sizes)
    box = Box(offsets, sizes)
    start = draw(st.integers(0, box.count))
    return box, start, draw(st.integers(start, box.count))


@given(ranges())
def test_flat_boxes_cover_the_range_exactly_and_in_order(case):
    box, start, stop = case
    shape = tuple(o + n + 1 for o, n in zip(box.offsets, box.sizes, strict=True))
    full = np.arange(int(np.prod(shape))).reshape(shape)
    part = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    expected = full[part].reshape(-1)[start:stop]
    got, at = [], start
    pieces = list(flat_boxes(box, start, stop))
    for inner, a, b in pieces:
        assert a == at
        assert inner.count == b - a
        assert all(o <= i for o, i in zip(box.offsets, inner.offsets, strict=True))
        got.append(full[tuple(slice(o, o + n) for o, n in zip(inner.offsets, inner.sizes, strict=True))].reshape(-1))
        at = b
    assert at == stop
    np.testing.assert_array_equal(np.concatenate(got + [np.array([], dtype=int)]), expected)
    assert len(pieces) <= max(1, 2 * len(box.sizes) - 1)


@given(ranges(), st.integers(0, 3))
def test_an_empty_range_has_no_boxes(case, excess):
    box, start, _ = case
    assert list(flat_boxes(box, start + excess, start)) == []


def test_decay_follows_the_dimensions():
    assert Piece.full("w", (2, 3)).decay
    assert not Piece.full("b", (3,)).decay
    assert Piece.full("b", (3,), decay=True).decay
    assert Piece.full("w", (2, 3)).box == Box((0, 0), (2, 3))


@given(st.data())
def test_ranges_of_matrices_cover_a_piece_once_and_name_its_matrices(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    sizes = tuple(data.draw(st.integers(1, n)) for n in shape)
    offsets = tuple(data.draw(st.integers(0, n - size)) for n, size in zip(shape, sizes, strict=True))
    piece = Piece("w", shape, Box(offsets, sizes))
    start = data.draw(st.integers(0, piece.box.count - 1))
    stop = data.draw(st.integers(start + 1, piece.box.count))
    whole = np.arange(np.prod(shape)).reshape(shape)
    held = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].reshape(-1)
    names = list_matrix_names("w", shape)
    matrices = whole.reshape(len(names), *shape[-2:])
    position = start
    for part in matrix_ranges(piece, start, stop):
        assert part.start == position
        position = part.stop
        matrix = matrices[names.index(part.name)]
        assert part.shape == matrix.shape
        ranges = zip(part.box.offsets, part.box.sizes, strict=True)
        box = matrix[tuple(slice(o, o + n) for o, n in ranges)].reshape(-1)
        length = part.stop - part.start
        assert (box[part.first : part.first + length] == held[part.start : part.stop]).all()
    assert position == stop
