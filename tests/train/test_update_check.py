"""Ranges of an update cover every element of the shards once, at the positions within a tile that kernels see."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.ops.segments import TILE, Segments
from megascale.optim.base import ShardState, StatePart
from megascale.parallel.buffers import FlatShard
from megascale.train.update_check import cut_ranges, list_segments


@st.composite
def parts(draw: st.DrawFn) -> tuple[ShardState, StatePart]:
    """Return a part with segments and gaps between them."""
    rows = []
    stop = 0
    for _ in range(draw(st.integers(1, 4))):
        start = stop + draw(st.sampled_from((0, 3, TILE)))
        stop = start + draw(st.sampled_from((1, 100, TILE, 2 * TILE + 5)))
        rows.append((start, stop, draw(st.booleans()), draw(st.integers(0, 9))))
    values = torch.arange(stop)
    part = StatePart(0, stop, [], Segments(rows, 10, "cpu"), {})
    return ShardState(FlatShard(values, values, []), values, [part], []), part


@given(st.lists(parts(), min_size=1, max_size=3), st.integers(1, 4))
def test_ranges_cover_all_elements_once(shards, tiles):
    elements = tiles * TILE
    copied = []
    for slices in cut_ranges(shards, elements):
        copy = torch.full((elements,), -1)
        positions = torch.arange(elements) % TILE
        for item in slices:
            item.copy(copy, item.state.master)
        for start, stop, decay, tensor in list_segments(slices):
            assert torch.equal(copy[start:stop] % TILE, positions[start:stop])
            part = next(item.part for item in slices if item.offset <= start < item.offset + item.stop - item.start)
            for value in copy[start:stop].tolist():
                copied.append((id(part), value, decay, tensor))
    expected = []
    for _, part in shards:
        for row in part.segments.ranges:
            expected += [(id(part), value, int(row.decay), row.tensor_index) for value in range(row.start, row.stop)]
    assert copied == expected
