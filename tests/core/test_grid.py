"""The grid: rank and coordinate are each other's inverse, groups partition the world, neighbours share a host."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.axes import AXES
from megascale.core.grid import Coordinate, Grid
from megascale.errors import FitError

SIZES = dict.fromkeys(AXES, st.integers(1, 3))  # 4 per axis make 16,384 ranks, which take minutes
GRIDS = st.builds(Grid, ranks_per_host=st.integers(1, 9), **SIZES)
SOME_AXES = st.lists(st.sampled_from(list(AXES)), unique=True).map(tuple)


@settings(deadline=None)
@given(GRIDS)
def test_rank_and_coordinate_are_inverse(grid):
    observed = {grid.coordinate(rank) for rank in range(grid.world_size)}
    assert len(observed) == grid.world_size
    assert [grid.rank(grid.coordinate(rank)) for rank in range(grid.world_size)] == list(range(grid.world_size))


@settings(deadline=None)
@given(GRIDS, SOME_AXES)
def test_groups_partition_the_world(grid, axes):
    groups = grid.groups(axes)
    size = 1
    for axis in axes:
        size *= grid.size(axis)
    assert all(len(group) == size and group == sorted(group) for group in groups)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        for rank in group:
            assert grid.group(axes, rank) == group
            at, first = grid.coordinate(rank), grid.coordinate(group[0])
            assert all(at[axis] == first[axis] for axis in AXES if axis not in axes)
            assert group[grid.index(axes, rank)] == rank


@settings(deadline=None)
@given(GRIDS)
def test_axes_from_fastest_to_slowest(grid):
    ranks = range(grid.world_size)
    assert [grid.coordinate(r).tensor for r in ranks] == [r % grid.tensor for r in ranks]
    assert [grid.coordinate(r).pipeline for r in ranks] == [r // (grid.world_size // grid.pipeline) for r in ranks]
    for group in grid.groups("tensor"):
        assert group == list(range(group[0], group[0] + grid.tensor))


@settings(deadline=None)
@given(GRIDS)
def test_tensor_groups_stay_on_one_host_when_they_divide_it(grid):
    assert grid.host_count == grid.host(grid.world_size - 1) + 1
    if grid.ranks_per_host % grid.tensor == 0:
        assert all(len({grid.host(rank) for rank in group}) == 1 for group in grid.groups("tensor"))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_data_is_what_is_left(tensor, pipeline, data):
    grid, world = Grid(tensor=tensor, data=data, pipeline=pipeline), tensor * pipeline * data
    assert hash(grid) == hash(pickle.loads(pickle.dumps(grid)))
    assert Grid.from_world_size(world, tensor=tensor, pipeline=pipeline) == grid
    assert Grid.from_world_size(world, tensor=tensor, pipeline=pipeline, data=data) == grid


def test_errors_name_what_would_fit():
    with pytest.raises(FitError, match="such as 12288 ranks"):
        Grid.from_world_size(12290, tensor=8, pipeline=8)
    with pytest.raises(FitError, match="use 24 ranks"):
        Grid.from_world_size(16, tensor=2, pipeline=4, data=3)
    with pytest.raises(FitError, match="tensor=0"):
        Grid(tensor=0)
    with pytest.raises(IndexError, match="rank 8"):
        Grid(tensor=2, data=2, pipeline=2).coordinate(8)
    with pytest.raises(IndexError, match="data=2"):
        Grid(tensor=2, data=2, pipeline=2).rank(Coordinate(data=2))
    with pytest.raises(KeyError, match="no axis"):
        Grid().size("layer")
    with pytest.raises(KeyError, match="no axis"):
        Grid(layer=2)
    with pytest.raises(FitError, match=r"parallel.context=3 = 3 ranks per model copy; use a multiple such as 3 ranks"):
        Grid.from_world_size(4, context=3)


def test_the_paper_s_layout():
    grid = Grid.from_world_size(12288, tensor=8, pipeline=8)
    assert (grid.data, grid.host_count) == (192, 1536)
    assert grid.group("pipeline", 0) == [1536 * s for s in range(8)]
    assert len(grid.groups(("tensor", "data"))) == 8
