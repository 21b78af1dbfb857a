"""Schedules by properties: every micro-batch through every chunk, order, receives one slot early, memory in flight."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.core.replay import ActionGraph, replay_schedule
from megascale.core.schedule import (
    Action,
    ActionKind,
    Schedule,
    build_1f1b,
    build_interleaved_1f1b,
    build_pipeline_schedule,
    list_group_sizes,
)
from megascale.errors import FitError
from tests.core.oracles import in_flight_bound

SIZES = st.tuples(st.integers(1, 10), st.integers(1, 5), st.integers(1, 40))


def computes(schedule: Schedule, stage: int) -> list[Action]:
    return [a for a in schedule[stage] if a.kind.is_compute]


@settings(deadline=None)
@given(SIZES)
def test_every_microbatch_passes_every_chunk_once_each_way(sizes):
    p, v, m = sizes
    schedule = build_pipeline_schedule(p, v, m)
    for stage in range(p):
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            ran = sorted((a.chunk, a.microbatch) for a in schedule[stage] if a.kind == kind)
            assert ran == [(c, i) for c in range(v) for i in range(m)]


@settings(deadline=None)
@given(SIZES)
def test_in_flight_is_the_stated_formula(sizes):
    p, v, m = sizes
    schedule = build_pipeline_schedule(p, v, m)
    assert [schedule.count_in_flight(s) for s in range(p)] == [in_flight_bound(p, v, m, s) for s in range(p)]
    if v > 1 and m % p == 0 and m > p:
        # Korthikanti et al. 2022: p (1 + (p-1)/(p v)) micro-batches of L/p layers on the first stage.
        assert schedule.count_in_flight(0) / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


@settings(deadline=None)
@given(SIZES)
def test_receives_are_posted_one_compute_slot_early(sizes):
    p, _, m = sizes
    schedule = build_pipeline_schedule(*sizes)
    if max(list_group_sizes(p, m)) > p:
        return  # of messages that wait for their receiver's turn: the next test
    for stage in range(schedule.stages):
        actions = schedule[stage]
        slots = {a: n for n, a in enumerate(computes(schedule, stage))}
        passed = 0
        for action in actions:
            passed += action.kind.is_compute
            if not action.kind.is_receive:
                continue
            kind = ActionKind.FORWARD if action.kind == ActionKind.RECV_FORWARD else ActionKind.BACKWARD
            consumer = slots[Action(kind, action.chunk, action.microbatch)]
            assert passed == max(consumer - 1, 0)


@settings(deadline=None)
@given(SIZES, st.none() | st.integers(1, 45))
def test_no_send_waits_long_for_its_receiver(sizes, micro_batch_group_size):
    """With equal computes at most p of them, however long a round is: all that time it holds a part of the device."""
    graph = ActionGraph.compile(build_pipeline_schedule(*sizes, False, micro_batch_group_size))
    timeline = replay_schedule(graph, graph.durations(1.0, 1.0))
    sends = np.isin(graph.kind, (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD))
    assert (timeline.transfer_start - timeline.start)[sends].max(initial=0.0) <= sizes[0]


@settings(deadline=None)
@given(SIZES)
def test_sends_follow_their_compute_at_once(sizes):
    schedule = build_pipeline_schedule(*sizes)
    source = {ActionKind.SEND_FORWARD: ActionKind.FORWARD, ActionKind.SEND_BACKWARD: ActionKind.BACKWARD}
    for actions in schedule:
        for before, action in itertools.pairwise(actions):
            if action.kind in source:
                assert before == Action(source[action.kind], action.chunk, action.microbatch)


@settings(deadline=None)
@given(SIZES)
def test_gathers_run_one_chunk_ahead_and_reductions_are_armed_right_before_the_last_backward(sizes):
    p, v, m = sizes
    schedule = build_pipeline_schedule(p, v, m)
    for stage, actions in enumerate(schedule):
        location = {a: n for n, a in enumerate(actions)}
        assert schedule.first_gather(stage) == 0
        for c in range(v):
            gather = location[Action(ActionKind.GATHER_PARAMS, c, -1)]
            assert gather < min(location[Action(ActionKind.FORWARD, max(c - 1, 0), i)] for i in range(m))
            last = max(location[Action(ActionKind.BACKWARD, c, i)] for i in range(m))
            assert location[Action(ActionKind.REDUCE_GRADS, c, -1)] == last - 1


@settings(deadline=None)
@given(SIZES)
def test_reduce_each_adds_one_reduction_a_backward(sizes):
    p, v, m = sizes
    for actions in build_pipeline_schedule(p, v, m, reduce_each_microbatch=True):
        location = {a: n for n, a in enumerate(actions)}
        assert sum(a.kind == ActionKind.REDUCE_GRADS for a in actions) == v * m
        for c in range(v):
            for i in range(m):
                assert (
                    location[Action(ActionKind.REDUCE_GRADS, c, i)] == location[Action(ActionKind.BACKWARD, c, i)] - 1
                )


@settings(deadline=None)
@given(SIZES)
def test_peers_and_channels_mirror_each_other(sizes):
    schedule = build_pipeline_schedule(*sizes)
    present = [set(actions) for actions in schedule]
    used = set()
    for stage in range(schedule.stages):
        for action in schedule[stage]:
            if not (action.kind.is_send or action.kind.is_receive):
                continue
            existing, second = schedule.peer(stage, action)
            assert second in present[existing]
            assert schedule.peer(existing, second) == (stage, action)
            assert schedule.channel(existing, second) == schedule.channel(stage, action)
            used.add(schedule.channel(stage, action))
    assert used == set(schedule.channels())
    assert len(schedule.channels()) == len(used)


def test_messages_connect_neighbouring_chunks_of_the_model():
    schedule = build_interleaved_1f1b(3, 2, 6)
    assert schedule.peer(2, Action(ActionKind.SEND_FORWARD, 0, 4)) == (0, Action(ActionKind.RECV_FORWARD, 1, 4))
    assert schedule.peer(0, Action(ActionKind.SEND_BACKWARD, 1, 4)) == (2, Action(ActionKind.RECV_BACKWARD, 0, 4))
    assert schedule.peer(1, Action(ActionKind.SEND_FORWARD, 1, 0)) == (2, Action(ActionKind.RECV_FORWARD, 1, 0))


def test_two_stages_with_chunks_have_four_channels():
    assert len(build_interleaved_1f1b(2, 2, 4).channels()) == 4
    assert len(build_1f1b(2, 4).channels()) == 2
    assert build_1f1b(1, 4).channels() == []


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 600))
def test_rounds_add_up_and_none_is_short(p, m):
    sizes = list_group_sizes(p, m)
    assert sum(sizes) == m
    assert min(sizes) >= min(p, m)
    assert max(sizes) - min(sizes) <= 1
    if m % p == 0:
        assert set(sizes) == {p}


def test_one_stage_without_transfers():
    kinds = {a.kind for a in build_pipeline_schedule(1, 1, 3)[0]}
    assert kinds == {ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.GATHER_PARAMS, ActionKind.REDUCE_GRADS}


def test_1f1b_order_of_the_classic_example():
    order = [(a.kind, a.microbatch) for a in computes(build_1f1b(3, 4), 0)]
    f, b = ActionKind.FORWARD, ActionKind.BACKWARD
    assert order == [(f, 0), (f, 1), (f, 2), (b, 0), (f, 3), (b, 1), (b, 2), (b, 3)]


@settings(max_examples=20, deadline=None)
@given(SIZES)
def test_actions_and_table_say_the_same(sizes):
    schedule = build_pipeline_schedule(*sizes)
    assert schedule.replace_actions(list(schedule)) == schedule
    assert len(schedule) == sizes[0]
    first = schedule[0]
    changed = schedule.replace_actions([first[::-1]] + list(schedule)[1:])
    assert (changed == schedule) == (first == first[::-1])


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (2, 2, 0)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(FitError, match="not positive"):
        build_interleaved_1f1b(*sizes)


def test_the_paper_s_175b_schedule():
    schedule = build_interleaved_1f1b(8, 6, 32)
    assert [len(t) for t in schedule.tables] == [2 * 192 + 4 * 192 - 2 * 32 * (s in (0, 7)) + 12 for s in range(8)]
    assert schedule.count_in_flight(0) == 55
    assert np.all([schedule.count_in_flight(s) == 55 - 2 * s for s in range(8)])


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 30), st.integers(1, 30))
def test_long_rounds_take_as_many_microbatches_of_a_chunk_in_turn(p, v, m, micro_batch_group_size):
    sizes = list_group_sizes(p, m, micro_batch_group_size)
    assert sum(sizes) == m
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(m, max(p, micro_batch_group_size))
    forwards = [
        a for a in build_pipeline_schedule(p, v, m, False, micro_batch_group_size)[0] if a.kind == ActionKind.FORWARD
    ]
    assert [a.microbatch for a in forwards[: sizes[0]]] == list(range(sizes[0]))
    assert all(a.chunk == i // sizes[0] for i, a in enumerate(forwards[: v * sizes[0]]))


def test_rounds_of_the_pipelines_length_are_the_default():
    assert build_pipeline_schedule(4, 3, 12, False, 4) == build_pipeline_schedule(4, 3, 12)
    assert build_pipeline_schedule(4, 3, 12, False, 12) != build_pipeline_schedule(4, 3, 12)


def test_the_last_stage_of_1f1b_runs_each_backward_at_once():
    assert build_pipeline_schedule(1, 1, 3).runs_backward_at_once(0, 0)
    assert [build_pipeline_schedule(2, 1, 4).runs_backward_at_once(stage, 0) for stage in range(2)] == [False, True]
    interleaved = build_pipeline_schedule(2, 2, 4)
    assert [interleaved.runs_backward_at_once(1, chunk) for chunk in range(2)] == [False, True]
