"""Captures that a step needs, from the schedule's actions alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megascale.core.capture_plan import CapturePlan, PlannedCapture, find_boundaries, find_free_index, plan_captures
from megascale.core.schedule import Action, ActionKind, Schedule, build_1f1b, build_interleaved_1f1b

FORWARD = ActionKind.FORWARD
BACKWARD = ActionKind.BACKWARD
REDUCE = ActionKind.REDUCE_GRADS


def plan_data_parallel(actions: Sequence[Action]) -> CapturePlan:
    """Plan with the first and the last micro-batch of each chunk eager, as data parallelism has them."""
    boundaries = find_boundaries(actions)

    def can_replay(chunk: int, i: int) -> bool:
        return i != boundaries[chunk].first_forward and i not in boundaries[chunk].reduced_backwards

    return plan_captures(actions, boundaries, can_replay)


def count_replays(schedule: Schedule, stage: int) -> int:
    """Return the largest number of a chunk's micro-batches in flight, without the eager ones."""
    boundaries = find_boundaries(schedule[stage])
    most = 0
    in_flight: dict[int, int] = dict.fromkeys(boundaries, 0)
    for kind, chunk, i in schedule[stage]:
        is_eager = i == boundaries[chunk].first_forward or i in boundaries[chunk].reduced_backwards
        if kind in (FORWARD, BACKWARD) and not is_eager:
            in_flight[chunk] += 1 if kind == FORWARD else -1
            most = max(most, in_flight[chunk])
    return most


def test_stages_of_a_pipeline_capture_before_the_step():
    schedule = build_1f1b(2, 4)
    first = plan_data_parallel(schedule[0])
    assert first.precedes_step
    assert first.captures == (PlannedCapture(0, 1, flight_index=0), PlannedCapture(0, 2, flight_index=1))
    last = plan_data_parallel(schedule[1])  # each backward follows its forward at once
    assert last.precedes_step  # a capture during the step would wait for transfers with the first stage
    assert last.captures == (PlannedCapture(0, 1, flight_index=0),)


def test_one_stage_has_no_eager_micro_batch_in_flight():
    plan = plan_data_parallel(build_1f1b(1, 4)[0])
    assert not plan.precedes_step
    assert len(plan.captures) == 1


def test_without_eager_micro_batches_the_first_backward_has_a_capture_of_its_own():
    actions = build_1f1b(2, 4)[0]
    plan = plan_captures(actions, find_boundaries(actions), lambda chunk, i: True)
    assert plan.precedes_step
    assert [(item.microbatch, item.flight_index) for item in plan.captures] == [(0, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("microbatches", [4, 6, 9])
def test_every_replay_of_an_interleaved_schedule_has_a_capture(microbatches, stage):
    schedule = build_interleaved_1f1b(4, 2, microbatches)
    plan = plan_data_parallel(schedule[stage])
    assert plan.precedes_step == bool(plan.captures)
    indices = [item.flight_index for item in plan.captures]
    assert max(indices) + 1 == count_replays(schedule, stage)
    assert len(set(plan.captures)) == len(plan.captures)


def test_two_micro_batches_are_both_eager():
    assert plan_data_parallel(build_1f1b(2, 2)[0]) == CapturePlan((), precedes_step=False)


def test_boundaries():
    listed = [(FORWARD, 0, 0), (FORWARD, 0, 1), (BACKWARD, 0, 1), (REDUCE, 0, 0), (BACKWARD, 0, 0)]
    boundaries = find_boundaries([Action(*item) for item in listed])[0]
    assert (boundaries.first_forward, boundaries.first_backward) == (0, 1)
    assert boundaries.reduced_backwards == {0}


def test_free_indices():
    assert [find_free_index(used) for used in ([], [0, 2], [1], [2, 0, 1])] == [0, 1, 0, 3]
