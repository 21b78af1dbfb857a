"""Boxes of chunks: common parts, cuts of large boxes, and covers, against sets of elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.checkpoint.format.chunks import box_slices, intersect_boxes, split_box
from megascale.core.tensors import Box

RANGES = st.tuples(st.integers(0, 4), st.integers(0, 4))


def list_elements(box: Box) -> set[tuple[int, ...]]:
    ranges = (range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
    return set(itertools.product(*ranges))


@given(st.lists(st.tuples(RANGES, RANGES), min_size=1, max_size=3))
def test_the_common_part_of_two_boxes(dimensions):
    """Boxes that only touch, and empty ones, have none."""
    first, second = (
        Box(tuple(pair[side][0] for pair in dimensions), tuple(pair[side][1] for pair in dimensions)) for side in (0, 1)
    )
    common = intersect_boxes(first, second)
    elements = list_elements(first) & list_elements(second)
    if not elements:
        assert common is None
        return
    assert common is not None
    assert list_elements(common) == elements
    values = np.arange(np.prod(first.sizes)).reshape(first.sizes)
    positions = [tuple(i - o for i, o in zip(index, first.offsets, strict=True)) for index in sorted(elements)]
    assert values[box_slices(first, common)].ravel().tolist() == [values[position] for position in positions]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 4), st.integers(4, 60))
def test_a_large_box_is_cut_into_few_that_fit(sizes, item, limit):
    box = Box(tuple(range(len(sizes))), tuple(sizes))
    parts = list(split_box(box, item, limit))
    assert [element for part in parts for element in sorted(list_elements(part))] == sorted(list_elements(box))
    assert all(part.count * item <= limit for part in parts)
    row = int(np.prod(sizes[1:])) * item
    if box.count * item <= limit:
        assert parts == [box]
    elif row <= limit:
        # Whole rows, in as few parts as possible, which differ by at most one row.
        rows = [part.sizes[0] for part in parts]
        assert len(parts) == -(-sizes[0] // (limit // row))
        assert max(rows) - min(rows) <= 1


@pytest.mark.parametrize("limit", [4, 1])
def test_a_scalar_is_not_cut(limit):
    assert list(split_box(Box((), ()), 4, limit)) == [Box((), ())]
