"""Checker and replay on schedules of any placement and with split backwards."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.core.checker import Machine, ScheduleError, channel_communicator, check_order, check_schedule
from megascale.core.chunk_map import ChunkMap, make_chunk_map, round_robin, v_shape
from megascale.core.replay import ActionGraph, replay_schedule
from megascale.core.schedule import ActionKind, Schedule, without_overlap
from megascale.core.spans import SPAN_OF_ACTION, SpanKind
from tests.core.oracles import explore
from tests.core.random_schedules import random_schedule
from tests.core.test_checker import verdict
from tests.extend.schedules import v_schedule, zb_h1, zb_v

RANDOM = st.randoms(use_true_random=False)


@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([round_robin, v_shape]))
def test_positions_and_stages_are_inverse(stages, virtual, placement):
    chunk_map = make_chunk_map(stages, virtual, placement)
    assert sorted(chunk_map.positions.ravel().tolist()) == list(range(stages * virtual))
    for stage in range(stages):
        positions = chunk_map.stage_chunks(stage)
        assert positions == sorted(positions)
        assert [chunk_map.stage_of[position] for position in positions] == [stage] * virtual
        assert chunk_map.indices[positions].tolist() == list(range(virtual))
    assert chunk_map.neighbour(chunk_map.first_stage, 0, -1) is None
    assert chunk_map.neighbour(chunk_map.last_stage, virtual - 1, 1) is None


def test_stages_with_different_numbers_of_chunks_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 1, 1\] chunks"):
        ChunkMap(3, (0, 1, 2, 0))


def test_codes_of_actions_and_spans_are_stable():
    """Recorded spans keep their meaning, and no action is recorded as another."""
    assert [kind.value for kind in ActionKind] == list(range(10))
    assert SpanKind.FINISH_REDUCTIONS == 8
    assert SpanKind.PROCESSOR_WAIT == 20
    assert set(SPAN_OF_ACTION) == set(ActionKind)
    assert len(set(SPAN_OF_ACTION.values())) == len(ActionKind)
    assert all(kind.label == span.label for kind, span in SPAN_OF_ACTION.items())


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5), st.booleans(), RANDOM)
def test_a_random_order_that_data_allows_passes_and_one_moved_action_does_not(p, v, m, reduce_each, rng):
    schedule = random_schedule(rng, p, v, m, reduce_each)
    check_order(schedule)
    lists = [list(actions) for actions in schedule]
    stage = rng.randrange(p)
    late = rng.choice([n for n, a in enumerate(lists[stage]) if a.kind == ActionKind.FORWARD])
    lists[stage].append(lists[stage].pop(late))
    with pytest.raises(ScheduleError, match=f"stage {stage} "):
        check_order(schedule.replace_actions(lists))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(2, 1, 2), (2, 2, 1), (2, 2, 2), (3, 1, 2), (3, 2, 1)]), st.booleans(), RANDOM)
def test_one_run_decides_as_all_interleavings_do(sizes, overlap, rng):
    schedule = random_schedule(rng, *sizes)
    schedule = schedule if overlap else without_overlap(schedule)

    def one_run(seed: int | None) -> bool:
        machine = Machine(schedule, channel_communicator)
        state = machine.start()
        machine.run(*state, random.Random(seed) if seed is not None else None)
        return machine.is_finished(*state)

    everywhere = verdict(lambda: min(explore(schedule)[1]))
    assert {verdict(lambda: one_run(seed)) for seed in (None, 1, 2)} == {everywhere}  # noqa: B023


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.booleans(), RANDOM)
def test_what_the_checker_proves_is_replayed_in_the_order_of_the_data(p, v, m, overlap, rng):
    schedule = random_schedule(rng, p, v, m)
    schedule = schedule if overlap else without_overlap(schedule)
    try:
        report = check_schedule(schedule)
    except ScheduleError:
        return
    graph = ActionGraph.compile(schedule)
    assert report.messages == graph.is_send.sum()
    timeline = replay_schedule(graph, np.random.default_rng(m).uniform(0.1, 1.0, graph.action_count))
    end = {
        (ActionKind(int(graph.kind[n])), int(graph.position[n]), int(graph.microbatch[n])): (
            float(timeline.start[n]),
            float(timeline.end[n]),
        )
        for n in np.flatnonzero(graph.is_compute)
    }
    for (kind, position, i), (start, _) in end.items():
        if kind == ActionKind.FORWARD and position > 0:
            assert start >= end[kind, position - 1, i][1] - 1e-9
        elif kind == ActionKind.BACKWARD_WEIGHT:
            assert start >= end[ActionKind.BACKWARD_INPUT, position, i][1] - 1e-9
        elif kind != ActionKind.FORWARD and position < schedule.chunks - 1:
            assert start >= end[kind, position + 1, i][1] - 1e-9
    if overlap:
        return
    for n in np.flatnonzero(graph.is_compute).tolist():  # every earlier send of the stage has arrived
        earlier = (graph.stage == graph.stage[n]) & graph.is_send & (np.arange(graph.action_count) < n)
        assert not earlier.any() or timeline.start[n] >= timeline.end[earlier].max() - 1e-9


def order_faults() -> dict[str, tuple[Schedule, str]]:
    """Return damaged split schedules with the message about each."""

    def damage(change) -> Schedule:
        schedule = zb_h1(2, 1, 3, False, None)
        lists = [list(actions) for actions in schedule]
        change(lists[0])
        return schedule.replace_actions(lists)

    def find(actions, kind, i):
        return next(n for n, a in enumerate(actions) if a.kind == kind and a.microbatch == i)

    def swap_halves(actions):
        first, second = find(actions, ActionKind.BACKWARD_INPUT, 0), find(actions, ActionKind.BACKWARD_WEIGHT, 0)
        actions[first], actions[second] = actions[second], actions[first]

    def drop_weights(actions):
        del actions[find(actions, ActionKind.BACKWARD_WEIGHT, 1)]

    def add_whole(actions):
        n = find(actions, ActionKind.BACKWARD_INPUT, 1)
        actions.insert(n + 1, actions[n]._replace(kind=ActionKind.BACKWARD))

    def arm_early(actions):
        n = next(n for n, a in enumerate(actions) if a.kind == ActionKind.REDUCE_GRADS)
        actions.insert(0, actions.pop(n))

    def arm_input(actions):
        n = next(n for n, a in enumerate(actions) if a.kind == ActionKind.REDUCE_GRADS)
        actions.append(actions.pop(n))

    return {
        "halves swapped": (damage(swap_halves), r"backward_weight\(chunk 0, micro-batch 0\) before its backward_input"),
        "no weights": (damage(drop_weights), r"lacks backward_weight\(chunk 0, micro-batch 1\)"),
        "whole and halves": (damage(add_whole), "has a needless backward_(input|weight)"),
        "armed too early": (damage(arm_early), "not right before the chunk's last backward"),
        "armed too late": (damage(arm_input), "not right before the chunk's last backward"),
    }


@pytest.mark.parametrize("name", order_faults())
def test_a_damaged_split_schedule_is_found(name):
    schedule, message = order_faults()[name]
    with pytest.raises(ScheduleError, match=message):
        check_order(schedule)


@pytest.mark.parametrize("build", [zb_h1, v_schedule, zb_v])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 5), (3, 7), (4, 12), (8, 24)])
def test_registered_examples_run(build, p, m):
    schedule = build(p, 1 if build is zb_h1 else 2, m, False, None)
    report = check_schedule(schedule, seed=m)
    assert report.messages == 2 * m * sum(
        a != b for a, b in zip(schedule.chunk_map.stage_of, schedule.chunk_map.stage_of[1:], strict=False)
    )
    covers_stage = build is v_schedule
    assert schedule.splits_backward is not covers_stage
    limit = p if build is zb_h1 else 2 * p
    assert max(report.in_flight) <= limit * (1 if build is zb_h1 else 2)


def test_zero_bubbles_are_smaller():
    """With equal halves ZB-V idles less than ZB-H1, and ZB-H1 less than 1F1B: (p-1) of 3 m instead of 3 (p-1)."""
    bubbles = {}
    for build, v in ((zb_h1, 1), (zb_v, 2)):
        graph = ActionGraph.compile(build(4, v, 12, False, None))
        bubbles[build] = float(replay_schedule(graph, graph.durations(1.0, 2.0)).bubble)
    assert bubbles[zb_h1] == pytest.approx(3 / 36)
    assert bubbles[zb_v] == pytest.approx(3 / 72)
