"""The plan of groups: one order for all, every rank's own list equal to what the whole plan says of it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.core.chunk_map import make_chunk_map, round_robin, v_shape
from megascale.core.grid import Grid
from megascale.rendezvous.group_plan import (
    find_replica_axis,
    list_group_axes,
    plan_edge_rounds,
    plan_groups,
    plan_rank_groups,
)

sizes = st.integers(1, 5)


@given(sizes, sizes, sizes, st.integers(1, 3), st.sampled_from([round_robin, v_shape]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_each_rank_sees_its_part_of_the_one_order(tensor, data, pipeline, virtual, placement, tied):
    grid = Grid(tensor=tensor, data=data, pipeline=pipeline)
    chunk_map = make_chunk_map(pipeline, virtual, placement)
    plan = plan_groups(grid, chunk_map, tied)
    names = [spec.name for spec in plan]
    assert len(set(names)) == len(names)
    for rank in range(grid.world_size):
        assert plan_rank_groups(grid, rank, chunk_map, tied) == [spec for spec in plan if rank in spec.ranks]


@given(sizes, sizes, sizes, st.integers(1, 3), st.booleans())
@settings(max_examples=100, deadline=None)
def test_members_agree_on_what_the_grid_says(tensor, data, pipeline, virtual, tied):
    grid = Grid(tensor=tensor, data=data, pipeline=pipeline)
    plan = plan_groups(grid, make_chunk_map(pipeline, virtual), tied)
    for kind, axes in list_group_axes().items():
        size = 1
        for axis in axes:
            size *= grid.size(axis)
        built = [list(spec.ranks) for spec in plan if spec.kind == kind]
        if kind == "replica" and find_replica_axis(grid) is not None:
            assert not built  # the group of the axis has the same ranks
            continue
        assert built == ([] if size == 1 else grid.groups(axes))
    columns = tensor * data
    for direction, step in (("forward", 1), ("backward", -1)):
        pairs = [
            (grid.coordinate(spec.ranks[0]).pipeline, grid.coordinate(spec.ranks[1]).pipeline)
            for spec in plan
            if spec.kind == direction
        ]
        count = 0 if pipeline == 1 else pipeline if virtual > 1 else pipeline - 1
        assert len(pairs) == count * columns
        assert all((b - a) % pipeline == step % pipeline for a, b in pairs)


@given(st.integers(1, 64), st.booleans())
@settings(deadline=None)
def test_edges_come_in_few_rounds_without_a_stage_twice(stages, ring):
    rounds = plan_edge_rounds(make_chunk_map(stages, 1 + ring).edges())
    assert len(rounds) <= 3
    for pairs in rounds:
        touched = [stage for pair in pairs for stage in pair]
        assert len(set(touched)) == len(touched)
    every = sorted(pair for pairs in rounds for pair in pairs)
    chain = [(i, i + 1) for i in range(stages - 1)]
    assert every == sorted(chain + ([(stages - 1, 0)] if ring and stages > 1 else []))


def test_two_stages_in_a_ring_have_four_separate_channels():
    channels = [
        s.name for s in plan_groups(Grid(pipeline=2), make_chunk_map(2, 2)) if s.kind in ("forward", "backward")
    ]
    assert sorted(channels) == ["backward/0-1", "backward/1-0", "forward/0-1", "forward/1-0"]


def test_a_v_has_channels_between_neighbours_both_ways_and_one_stage_has_both_ends_of_the_model():
    plan = plan_groups(Grid(pipeline=3), make_chunk_map(3, 2, v_shape), tied=True)
    forward = {spec.ranks for spec in plan if spec.kind == "forward"}
    assert forward == {(0, 1), (1, 2), (2, 1), (1, 0)}
    assert forward == {spec.ranks for spec in plan if spec.kind == "backward"}
    assert not [spec for spec in plan if spec.kind == "embedding"]


def test_the_papers_job_is_planned_quickly_and_completely():
    plan = plan_groups(Grid(tensor=8, data=192, pipeline=8), make_chunk_map(8, 6), tied=True)
    kinds: dict[str, int] = {}
    for spec in plan:
        kinds[spec.kind] = kinds.get(spec.kind, 0) + 1
    assert kinds == {
        "tensor": 1536,
        "data_gather": 64,
        "data_reduce": 64,
        "stage": 8,
        "embedding": 1536,
        "forward": 8 * 1536,
        "backward": 8 * 1536,
    }
