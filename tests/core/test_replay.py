"""Replay against a plain reference, the closed-form bubble, and properties that any timing must have."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.core.replay import STREAMS, ActionGraph, replay_schedule
from megascale.core.schedule import (
    SEND_SLOTS,
    Action,
    ActionKind,
    Schedule,
    build_1f1b,
    build_interleaved_1f1b,
    build_pipeline_schedule,
    compute_ideal_bubble,
    without_overlap,
)

SMALL = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 9))
SEEDS = st.integers(0, 2**32 - 1)


def exposed_times(graph: ActionGraph, durations: np.ndarray) -> dict[str, np.ndarray]:
    """Exposed (non-overlapped) time of each stream but compute: how much sooner the step ends without its work."""
    makespan = replay_schedule(graph, durations).makespan
    exposed = {}
    for index, stream in enumerate(STREAMS[1:], start=1):
        without = durations.copy()
        without[graph.stream == index] = 0.0
        exposed[stream] = makespan - replay_schedule(graph, without).makespan
    return exposed


def reference(schedule: Schedule, durations: np.ndarray) -> dict[tuple[int, Action], float]:
    """End of every action by the rules in replay's docstring, relaxed until nothing changes."""
    lists = list(schedule)
    cost, n = {}, 0
    for s, actions in enumerate(lists):
        for action in actions:
            cost[s, action] = durations[n]
            n += 1
    end = dict.fromkeys(cost, 0.0)
    changed = True
    while changed:
        changed = False
        for s, actions in enumerate(lists):
            last_compute = 0.0
            stream = {}
            gathered = set()
            sent = {}
            for location, action in enumerate(actions):
                kind, chunk, i = action
                if kind == ActionKind.REDUCE_GRADS:
                    armed = next(a for a in actions[location:] if a[:2] == (ActionKind.BACKWARD, chunk))
                    done = max(end[s, armed], stream.get(kind, 0.0)) + cost[s, action]
                    stream[kind] = done
                    if abs(done - end[s, action]) > 1e-12:
                        end[s, action], changed = done, True
                    continue
                awaits = [last_compute, stream.get(kind, 0.0) if not kind.is_compute else 0.0]
                if kind.is_compute:
                    forward = kind == ActionKind.FORWARD
                    receive = Action(ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD, chunk, i)
                    send = Action(ActionKind.SEND_FORWARD if forward else ActionKind.SEND_BACKWARD, chunk, i)
                    awaits.append(end.get((s, receive), 0.0))
                    if forward and chunk not in gathered:
                        gathered.add(chunk)
                        awaits.append(end[s, Action(ActionKind.GATHER_PARAMS, chunk, -1)])
                    if (s, send) in end:
                        before = sent.setdefault(send.kind, [])
                        if len(before) >= SEND_SLOTS:
                            awaits.append(end[s, before[-SEND_SLOTS]])
                    if schedule.exposed:
                        awaits += [end[s, item] for queue in sent.values() for item in queue]
                    if (s, send) in end:
                        before.append(send)
                if kind.is_receive:
                    present, second = schedule.peer(s, action)
                    done = end[present, second]
                elif kind.is_send:
                    present, second = schedule.peer(s, action)
                    their_list = lists[present]
                    at = their_list.index(second)
                    computes = [a for a in their_list[:at] if a.kind.is_compute]
                    awaits.append(end[present, computes[-1]] if computes else 0.0)
                    done = max(awaits) + cost[s, action]
                else:
                    done = max(awaits) + cost[s, action]
                if kind.is_compute:
                    last_compute = done
                else:
                    stream[kind] = done
                if abs(done - end[s, action]) > 1e-12:
                    end[s, action], changed = done, True
    return end


def random_durations(graph: ActionGraph, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).exponential(1.0, graph.action_count)


@settings(max_examples=60, deadline=None)
@given(SMALL, SEEDS, st.booleans(), st.booleans())
def test_replay_equals_the_reference(sizes, seed, reduce_each, overlap):
    schedule = build_pipeline_schedule(*sizes, reduce_each_microbatch=reduce_each)
    schedule = schedule if overlap else without_overlap(schedule)
    graph = ActionGraph.compile(schedule)
    durations = random_durations(graph, seed)
    timeline = replay_schedule(graph, durations)
    expected = reference(schedule, durations)
    flat = [expected[s, a] for s, actions in enumerate(schedule) for a in actions]
    np.testing.assert_allclose(timeline.end, flat, rtol=1e-12)
    assert (timeline.start <= timeline.transfer_start + 1e-12).all()
    assert (timeline.transfer_start <= timeline.end).all()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 16), st.integers(1, 6), st.integers(1, 70))
def test_bubble_is_p_minus_1_over_v_m_for_equal_stages(p, v, m):
    """Exact when p divides m, as the papers say; spread rounds keep it exact for every m >= p."""
    graph = ActionGraph.compile(build_pipeline_schedule(p, v, m))
    bubble = float(replay_schedule(graph, graph.durations(1.0, 2.0)).bubble)
    if m >= p or v == 1:
        assert bubble == pytest.approx(compute_ideal_bubble(p, v, m), abs=1e-9)
    else:
        assert bubble >= compute_ideal_bubble(p, v, m) - 1e-9


@pytest.mark.parametrize(("p", "v", "m"), [(64, 1, 512), (64, 4, 512), (8, 6, 32), (35, 3, 280)])
def test_large_schedules_reach_the_ideal_bubble(p, v, m):
    graph = ActionGraph.compile(build_pipeline_schedule(p, v, m))
    assert float(replay_schedule(graph, graph.durations(1.0, 2.0)).bubble) == pytest.approx(
        compute_ideal_bubble(p, v, m)
    )


@settings(max_examples=60, deadline=None)
@given(SMALL, SEEDS)
def test_exposed_transfers_never_make_a_step_sooner(sizes, seed):
    schedule = build_pipeline_schedule(*sizes)
    graph = ActionGraph.compile(schedule)
    durations = random_durations(graph, seed)
    exposed = replay_schedule(without_overlap(schedule), durations)
    assert (exposed.end >= replay_schedule(graph, durations).end - 1e-9).all()


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (2, 2, 16), (4, 2, 8), (8, 6, 32)])
def test_without_overlap_interleaving_pays_for_each_transfer(p, v, m):
    """A transfer each way a chunk and micro-batch: at least one of the two is paid where all had been hidden."""
    schedule = build_pipeline_schedule(p, v, m)

    def seconds(schedule: Schedule, transfer: float) -> float:
        graph = ActionGraph.compile(schedule)
        return float(replay_schedule(graph, graph.durations(1.0, 2.0, transfer, transfer)).makespan)

    exposed = without_overlap(schedule)
    assert seconds(exposed, 0.3) >= seconds(schedule, 0.3) + 0.3 * v * m - 1e-9
    assert seconds(exposed, 0.0) == pytest.approx(seconds(schedule, 0.0))


@settings(max_examples=60, deadline=None)
@given(SMALL, SEEDS)
def test_less_work_is_never_slower(sizes, seed):
    graph = ActionGraph.compile(build_pipeline_schedule(*sizes))
    durations = random_durations(graph, seed)
    faster = durations * np.random.default_rng(seed + 1).uniform(0, 1, graph.action_count)
    base, sooner = replay_schedule(graph, durations), replay_schedule(graph, faster)
    assert (sooner.end <= base.end + 1e-9).all()
    assert all(gain >= -1e-9 for gain in exposed_times(graph, durations).values())


@settings(max_examples=40, deadline=None)
@given(SMALL, SEEDS)
def test_replicas_replay_as_if_alone(sizes, seed):
    graph = ActionGraph.compile(build_pipeline_schedule(*sizes))
    durations = np.random.default_rng(seed).exponential(1.0, (graph.action_count, 3))
    together = replay_schedule(graph, durations)
    for r in range(3):
        alone = replay_schedule(graph, durations[:, r])
        np.testing.assert_array_equal(together.end[:, r], alone.end)
    assert together.makespan.shape == (3,)


@settings(max_examples=40, deadline=None)
@given(SMALL, SEEDS)
def test_streams_run_one_thing_at_a_time(sizes, seed):
    schedule = build_pipeline_schedule(*sizes)
    graph = ActionGraph.compile(schedule)
    timeline = replay_schedule(graph, random_durations(graph, seed))
    for s in range(schedule.stages):
        for kinds in ((0, 1), (2,), (4,), (6,), (7,)):
            local = np.flatnonzero((graph.stage == s) & np.isin(graph.kind, kinds))
            order = local[np.argsort(timeline.transfer_start[local], kind="stable")]
            assert (order == local).all()
            assert (timeline.transfer_start[local[1:]] >= timeline.end[local[:-1]] - 1e-12).all()


def test_interleaved_hides_transfers_that_plain_1f1b_exposes():
    """MegaScale section 3.2: with receives posted early, steady transfers lie under compute."""
    plain, chunks = ActionGraph.compile(build_1f1b(4, 64)), ActionGraph.compile(build_interleaved_1f1b(4, 2, 64))
    for transfer in (0.1, 0.4):
        exposed = exposed_times(chunks, chunks.durations(1.0, 2.0, transfer, transfer))["send"]
        # Filling and draining the pipeline alone: at most one transfer each way and chunk boundary.
        assert exposed <= 2 * transfer * (4 * 2 - 1) + 1e-9
        assert exposed_times(plain, plain.durations(2.0, 4.0, transfer, transfer))["send"] > 64 * transfer


def test_gathers_and_reductions_are_exposed_at_the_ends_only():
    graph = ActionGraph.compile(build_interleaved_1f1b(4, 3, 12))
    durations = graph.durations(1.0, 2.0, gather=1.5, reduce=2.5)
    exposed = exposed_times(graph, durations)
    assert exposed["gather"] == pytest.approx(1.5)
    assert exposed["reduce"] == pytest.approx(2.5)


def test_stream_time_and_overlap():
    graph = ActionGraph.compile(build_1f1b(2, 4))
    durations = graph.durations(1.0, 2.0, 0.5, 0.25, gather=3.0, reduce=1.0)
    timeline = replay_schedule(graph, durations)
    assert timeline.stream_time("compute").tolist() == [12.0, 12.0]
    assert timeline.stream_time("send").tolist() == [4 * 0.5, 4 * 0.25]
    assert timeline.stream_time("gather").tolist() == [3.0, 3.0]
    # The only gather delays the first forward, so it lies under no compute; no reduction does either.
    assert timeline.overlap("gather", "compute").sum() == 0
    assert timeline.overlap("reduce", "compute").sum() == 0
    under = timeline.overlap("send", "compute")
    assert under.sum() == pytest.approx(timeline.overlap("compute", "send").sum())
    assert under[graph.kind == ActionKind.FORWARD].sum() == 0
    # Brute force on a fine grid of times.
    times = np.linspace(0, float(timeline.makespan), 20001)[:-1] + 1e-4
    for stage in range(2):
        covered = {}
        for stream in ("send", "compute"):
            local = (graph.stage == stage) & (graph.stream == STREAMS.index(stream)) & ~np.isin(graph.kind, (3, 5))
            inside = (timeline.transfer_start[local, None] <= times) & (times < timeline.end[local, None])
            covered[stream] = inside.any(axis=0)
        pair = (covered["send"] & covered["compute"]).mean() * float(timeline.makespan)
        assert under[graph.stage == stage].sum() == pytest.approx(pair, abs=0.02)


def test_durations_may_be_a_function():
    schedule = build_interleaved_1f1b(3, 2, 6)
    graph = ActionGraph.compile(schedule)
    cost = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0, ActionKind.SEND_FORWARD: 0.25}
    by_function = replay_schedule(schedule, lambda stage, action: cost.get(action.kind, 0.0) * (1 + stage))
    scale = 1.0 + np.arange(3)[:, None] * np.ones((1, 2))
    by_array = replay_schedule(graph, graph.durations(1.0 * scale, 2.0 * scale, 0.25 * scale))
    np.testing.assert_allclose(by_function.end, by_array.end)


def test_damaged_schedules_and_durations_are_refused():
    schedule = build_1f1b(2, 2)
    lists = [list(actions) for actions in schedule]
    without = [lists[0], [a for a in lists[1] if a.kind != ActionKind.RECV_FORWARD]]
    with pytest.raises(ValueError, match="without its receive"):
        ActionGraph.compile(schedule.replace_actions(without))
    backward = next(i for i, a in enumerate(lists[0]) if a.kind == ActionKind.BACKWARD)
    lists[0].insert(0, lists[0].pop(backward))
    with pytest.raises(ValueError, match="deadlocks"):
        ActionGraph.compile(schedule.replace_actions(lists))
    with pytest.raises(ValueError, match="durations of 3"):
        replay_schedule(schedule, np.zeros(3))


def test_a_12288_gpu_step_replays_quickly():
    """192 replicas of 8 stages, each with its own durations. Target 0.5 s; the limit here allows a busy machine."""
    graph = ActionGraph.compile(build_interleaved_1f1b(8, 6, 32))
    durations = np.random.default_rng(0).uniform(0.9, 1.1, (graph.action_count, 192))
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        ActionGraph.compile(build_interleaved_1f1b(8, 6, 32))
        replay_schedule(graph, durations)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.5


def test_one_long_round_hides_slow_collectives_at_equal_bubble():
    """Of two stages of four chunks with eight micro-batches, where collectives last as long as two micro-batches."""
    short, long = (ActionGraph.compile(build_pipeline_schedule(2, 4, 8, False, size)) for size in (None, 8))
    alone, slow = [], []
    for graph in (short, long):
        alone.append(float(replay_schedule(graph, graph.durations(1.0, 2.0)).makespan))
        slow.append(float(replay_schedule(graph, graph.durations(1.0, 2.0, gather=6.0, reduce=6.0)).makespan))
    assert alone[0] == alone[1]
    assert slow[1] - alone[1] < 0.5 * (slow[0] - alone[0])
