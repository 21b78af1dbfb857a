"""The checker: proves what runs, finds what hangs, and its one-run argument holds against all interleavings."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megascale.core import schedule as schedules
from megascale.core.checker import Machine, ScheduleError, channel_communicator, check_order, check_schedule
from megascale.core.schedule import (
    ActionKind,
    build_1f1b,
    build_interleaved_1f1b,
    build_pipeline_schedule,
    without_overlap,
)
from tests.core.oracles import explore, in_flight_bound, rank_pair


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
    st.none() | st.integers(1, 45),
)
def test_no_deadlock_for_random_message_timing(p, v, m, reduce_each, overlap, seed, micro_batch_group_size):
    schedule = build_pipeline_schedule(p, v, m, reduce_each, micro_batch_group_size)
    schedule = schedule if overlap else without_overlap(schedule)
    report = check_schedule(schedule, seed=seed)
    assert report.messages == (2 * (p * v - 1) * m if p > 1 else 0)
    assert report.in_flight == tuple(in_flight_bound(p, v, m, s, micro_batch_group_size) for s in range(p))
    assert report == check_schedule(schedule)


@pytest.mark.parametrize(
    ("p", "v", "m"),
    [(2, 1, 1), (2, 1, 4), (2, 2, 1), (2, 2, 2), (2, 2, 3), (2, 3, 3), (3, 1, 4), (3, 2, 1), (3, 2, 2), (4, 1, 2)],
)
def test_no_interleaving_of_a_small_schedule_hangs(p, v, m):
    states, outcomes = explore(build_pipeline_schedule(p, v, m))
    assert outcomes == {True}
    assert states > m * p * v
    fewer, outcomes = explore(without_overlap(build_pipeline_schedule(p, v, m)))
    assert outcomes == {True}
    assert fewer <= states  # waiting for more leaves less freedom


def received_late(schedule):
    """`schedule` with every receive right before the compute that needs it."""
    lists = []
    for actions in schedule:
        waiting, late = {}, []
        for action in actions:
            if action.kind.is_receive:
                direction = ActionKind.FORWARD if action.kind == ActionKind.RECV_FORWARD else ActionKind.BACKWARD
                waiting[direction, action.chunk, action.microbatch] = action
            else:
                late += [waiting.pop(action)] if action in waiting else []
                late.append(action)
        lists.append(late)
    return schedule.replace_actions(lists)


def test_what_crosses_the_ring_s_end_is_received_when_it_comes():
    """Three micro-batches a round on two stages: stage 0 turns to the third result one forward after it came. With its
    receive posted then, a sender without buffers to spare, or one that waits for its messages, would never go on."""
    check_schedule(build_interleaved_1f1b(2, 2, 5))
    check_schedule(without_overlap(build_interleaved_1f1b(2, 2, 5)))
    with pytest.raises(ScheduleError, match="deadlocks"):
        check_schedule(received_late(without_overlap(build_interleaved_1f1b(2, 2, 5))))
    check_schedule(build_interleaved_1f1b(8, 2, 23))
    with pytest.raises(ScheduleError, match="deadlocks"):
        check_schedule(received_late(build_interleaved_1f1b(8, 2, 23)))


def verdict(run) -> str:
    try:
        return "finishes" if run() else "hangs"
    except ScheduleError:
        return "mismatch"


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([(2, 1, 2), (2, 1, 3), (2, 2, 2), (2, 2, 3), (3, 1, 2), (3, 2, 1)]),
    st.integers(1, 3),
    st.sampled_from([channel_communicator, rank_pair]),
    st.integers(0, 6),
    st.randoms(use_true_random=False),
)
def test_one_run_decides_as_all_interleavings_do(sizes, slots, communicator, swaps, rng):
    """Schedules damaged at random: the verdict of a single run is the verdict of every run."""
    lists = [list(actions) for actions in build_pipeline_schedule(*sizes)]
    for _ in range(swaps):
        actions = rng.choice(lists)
        i = rng.randrange(len(actions) - 1)
        actions[i], actions[i + 1] = actions[i + 1], actions[i]
    damaged = build_pipeline_schedule(*sizes).replace_actions(lists)

    def one_run(seed: int | None) -> bool:
        machine = Machine(damaged, communicator, slots)
        state = machine.start()
        machine.run(*state, random.Random(seed) if seed is not None else None)
        return machine.is_finished(*state)

    def all_runs() -> bool:
        _, outcomes = explore(damaged, communicator, slots)
        assert len(outcomes) == 1
        return outcomes.pop()

    everywhere = verdict(all_runs)
    assert verdict(lambda: one_run(None)) == everywhere
    assert verdict(lambda: one_run(swaps)) == everywhere


def test_damage_makes_all_three_verdicts():
    """The test above is worth something only if its samples hang and mismatch at times."""
    schedule = build_1f1b(2, 1)
    lists = [list(actions) for actions in schedule]
    i = next(n for n, a in enumerate(lists[1]) if a.kind == ActionKind.RECV_FORWARD)
    lists[1].append(lists[1].pop(i))
    assert explore(schedule.replace_actions(lists))[1] == {False}
    swapped = [list(actions) for actions in build_1f1b(2, 2)]
    sends = [n for n, a in enumerate(swapped[0]) if a.kind == ActionKind.SEND_FORWARD]
    swapped[0][sends[0]], swapped[0][sends[1]] = swapped[0][sends[1]], swapped[0][sends[0]]
    with pytest.raises(ScheduleError, match="meets"):
        explore(build_1f1b(2, 2).replace_actions(swapped))


def test_one_communicator_for_both_ways_deadlocks():
    """Why each direction has a communicator: opposite sends at the heads of one FIFO never pass each other."""
    with pytest.raises(ScheduleError, match="deadlocks: stage 0 at backward"):
        check_schedule(build_1f1b(2, 4), communicator=rank_pair)
    assert explore(build_1f1b(2, 3), communicator=rank_pair)[1] == {False}


def test_a_short_last_round_deadlocks(monkeypatch):
    """Why a remainder is spread over the rounds."""
    monkeypatch.setattr(schedules, "list_group_sizes", lambda p, m, _: [p] * (m // p) + [m % p] * (m % p > 0))
    with pytest.raises(ScheduleError, match="deadlocks"):
        check_schedule(build_interleaved_1f1b(4, 3, 5))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(1, 2, 3), (2, 1, 3), (2, 2, 3), (3, 1, 4), (3, 2, 5)]), st.data())
def test_a_missing_or_doubled_action_is_found(sizes, data):
    schedule = build_pipeline_schedule(*sizes)
    lists = [list(actions) for actions in schedule]
    stage = data.draw(st.integers(0, sizes[0] - 1))
    n = data.draw(st.integers(0, len(lists[stage]) - 1))
    action = lists[stage][n]
    if data.draw(st.booleans()):
        del lists[stage][n]
    else:
        lists[stage].insert(n, action)
    with pytest.raises(ScheduleError, match=f"stage {stage} "):
        check_order(schedule.replace_actions(lists))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([(1, 2, 3), (2, 1, 3), (2, 2, 3), (3, 2, 4)]), st.data())
def test_an_action_before_what_it_needs_is_found(sizes, data):
    schedule = build_pipeline_schedule(*sizes)
    lists = [list(actions) for actions in schedule]
    stage = data.draw(st.integers(0, sizes[0] - 1))
    actions = lists[stage]
    n = data.draw(st.integers(0, len(actions) - 1))
    kind = actions[n].kind
    # Anything but a first receive or gather needs something that stood before it.
    assume(not kind.is_receive and kind != ActionKind.GATHER_PARAMS)
    actions.insert(0, actions.pop(n))
    unchanged = all(tuple(a) == b for a, b in zip(lists, schedule, strict=True))
    assume(not unchanged)
    with pytest.raises(ScheduleError, match=f"stage {stage} "):
        check_order(schedule.replace_actions(lists))


@pytest.mark.parametrize("reduce_each", [False, True])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_reduction_that_arms_another_backward_is_found(reduce_each, by):
    """Armed too early, a bucket would be reduced without the last micro-batch's share; too late, not at all."""
    schedule = build_pipeline_schedule(2, 2, 3, reduce_each)
    lists = [list(actions) for actions in schedule]
    n = next(n for n, a in enumerate(lists[0]) if a.kind == ActionKind.REDUCE_GRADS and a.microbatch in (-1, 1))
    reduction = lists[0].pop(n)
    locations = [k for k, a in enumerate(lists[0]) if a[:2] == (ActionKind.BACKWARD, reduction.chunk)]
    due = min(k for k in locations if k >= n)
    lists[0].insert(max(k for k in locations if k < due) if by < 0 else due + 1, reduction)
    with pytest.raises(ScheduleError, match=r"stage 0 .* not right before the chunk's"):
        check_order(schedule.replace_actions(lists))


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("kind", [ActionKind.FORWARD, ActionKind.BACKWARD])
def test_neighbouring_chunks_of_one_stage_in_the_wrong_order_are_named(kind, is_split):
    """The message names both chunks, and the pass instead of an action that a split backward does not have."""
    (actions,) = ([*stage_actions] for stage_actions in build_pipeline_schedule(1, 2, 3))
    first, second = (n for n, action in enumerate(actions) if action.kind == kind and action.microbatch == 1)
    actions[first], actions[second] = actions[second], actions[first]
    if is_split:
        halves = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
        split_actions = []
        for action in actions:
            kinds = halves if action.kind == ActionKind.BACKWARD else (action.kind,)
            split_actions += [action._replace(kind=half) for half in kinds]
        actions = split_actions
    early, late = (1, 0) if kind == ActionKind.FORWARD else (0, 1)
    message = f"the {kind.label} of chunk {early} before that of chunk {late}, for micro-batch 1"
    with pytest.raises(ScheduleError, match=message):
        check_order(build_pipeline_schedule(1, 2, 3).replace_actions([actions]))


def test_an_action_outside_the_sizes_is_found():
    schedule = build_1f1b(2, 2)
    lists = [list(actions) for actions in schedule]
    lists[1][0] = lists[1][0]._replace(microbatch=2)
    with pytest.raises(ScheduleError, match="outside"):
        check_order(schedule.replace_actions(lists))


@pytest.mark.parametrize(("p", "v", "m"), [(64, 1, 256), (64, 2, 256), (8, 6, 32), (35, 3, 140), (64, 2, 250)])
def test_large_schedules(p, v, m):
    report = check_schedule(build_pipeline_schedule(p, v, m), seed=7)
    assert report.messages == 2 * (p * v - 1) * m
