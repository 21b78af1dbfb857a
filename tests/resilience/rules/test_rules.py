"""The rules: each fault gets its verdict with evidence, and calm traces get none, with any clocks."""

from __future__ import annotations

import math
import signal
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megascale.core.grid import Grid
from megascale.core.status import UNOBSERVED
from megascale.resilience import rules
from megascale.resilience.protocol.heartbeat import GpuReport, Heartbeat, LogMatch, NetworkTraffic
from megascale.resilience.rules import metrics_rules, silence
from megascale.resilience.rules.view import HISTORY_LENGTH, SEVERITY, Metric, NodeView, Verdict, View
from tests.resilience.rules.views import WINDOW, ended, heartbeat, one, view, worker


def test_an_unknown_action_is_refused():
    with pytest.raises(ValueError, match="action='restart'; use one of none, alert, recover"):
        Verdict("mine", action="restart")


def test_a_node_that_offends_again_and_again_is_evicted_unless_all_do():
    crash = worker(1, state="signalled", code=signal.SIGSEGV)
    before = [(900.0, "node-1", "process_killed"), (950.0, "node-1", "missed_heartbeat")]
    verdict = one(ended(crash, incidents=before), "segmentation_fault")
    assert verdict.action == "evict"
    assert "offence 3" in verdict.evidence[-1]
    everywhere = before + [(t, "node-0", kind) for t, _, kind in before]
    assert one(ended(crash, incidents=everywhere), "segmentation_fault").action == "recover"
    long_ago = [(t - 100_000, node, kind) for t, node, kind in before]
    assert one(ended(crash, incidents=long_ago), "segmentation_fault").action == "recover"


def test_a_silent_node_is_missed_and_a_driver_that_slept_blames_nobody():
    beats = {n: [heartbeat(n, 1, [worker(n)])] for n in range(3)}
    state = view(beats)
    state.members[2].last_seen = state.time - WINDOW - 1
    verdict = one(rules.judge(state), "missed_heartbeat")
    assert verdict.nodes == ("node-2",)
    for member in state.members:
        member.last_seen = state.time - WINDOW - 1
    assert not rules.judge(state)
    for member in state.members:
        member.last_seen = state.time - 2 * WINDOW - 1
    assert {v.kind for v in rules.judge(state)} == {"missed_heartbeat"}


def silent(steps: list[int], seconds: float, phase: str = "train") -> list[Verdict]:
    """A node that was last heard so long ago, while another one was in these steps, once a second until now."""
    phases = ["train"] * (len(steps) - 1) + [phase]
    workers = [worker(0, step=step, phase=phase) for step, phase in zip(steps, phases, strict=True)]
    state = view({0: [heartbeat(0, i, [item]) for i, item in enumerate(workers)], 1: []})
    state.members[1].last_seen = state.time - seconds
    return rules.judge(state)


def test_a_silent_node_whose_ranks_train_is_not_lost():
    verdict = one(silent(list(range(10, 30)), WINDOW + 3), "agent_silent")
    assert (verdict.nodes, verdict.action) == (("node-1",), "alert")
    assert "cannot without rank 1" in verdict.evidence[0]
    for phase in ("save", "evaluate"):
        assert one(silent(list(range(10, 30)), WINDOW + 3, phase), "agent_silent").action == "alert"
    # Two steps on, which the others may be without it; and steps that are too long to tell.
    assert one(silent([10] * 12 + [11, 12], WINDOW + 1), "missed_heartbeat").action == "recover"
    assert one(silent([10] * 20, WINDOW + 1), "missed_heartbeat").action == "recover"


@given(
    st.floats(0.05, 20.0),
    st.floats(0.0, 1.0),
    st.integers(0, 2),
    st.floats(0.0, 1.0),
    st.integers(1, 3),
)
def test_a_node_that_ends_is_missed_within_the_window_however_fast_the_job_was(pace, phase, ahead, before, peers):
    """It ends at 40 s; the others come `ahead` steps further, and no step ends any more."""
    end, current = 40.0, 40.0 + WINDOW + 0.01

    def step(at: float) -> int:
        return 100 + int(at / pace) if at < end else 100 + int(end / pace) + ahead

    members = [NodeView("node-0", (0,), end - before, heartbeat(0, 1, [worker(0)]))]
    for node in range(1, 1 + peers):
        times = [phase + i for i in range(int(current - phase) + 1)]
        sent = [heartbeat(node, i, [worker(node, step=step(at))]) for i, at in enumerate(times)]
        members.append(
            NodeView(f"node-{node}", (node,), times[-1], sent[-1], deque(zip(times, sent, strict=True), HISTORY_LENGTH))
        )
    state = view({}, Grid(data=1 + peers, ranks_per_host=1), now=current)
    state.members = members
    assert one(rules.judge(state), "missed_heartbeat").nodes == ("node-0",)


def test_a_slow_start_names_who_did_not_come():
    state = view({0: [heartbeat(0, 1, [worker(0)])], 1: [heartbeat(1, 1, [worker(1, phase="load")])]}, phase="starting")
    state.started = state.time - 59
    assert not rules.judge(state)
    state.started = state.time - 61
    verdict = one(rules.judge(state), "start_too_slow")
    assert verdict.ranks == (1,)
    assert "resilience.first_step" in verdict.evidence[0]


def standing(seconds: float, phase: str = "train", job: str = "running", **changes) -> list[Verdict]:
    beats = {n: [heartbeat(n, 1, [worker(n, phase=phase, status_age=seconds + n)])] for n in range(2)}
    return rules.judge(view(beats, phase=job, **changes))


def test_nothing_moving_is_a_hang_only_past_what_the_phase_may_take():
    limit = silence.HANG_FLOOR
    assert not standing(limit - 0.1)
    verdict = one(standing(limit + 0.1), "hang")
    assert verdict.action == "recover"
    assert "no rank has moved" in verdict.evidence[0]
    # Learned: a step that took 8 s before may take 40 now.
    assert not standing(limit + 5, usual_durations={"train": 8.0})
    assert one(standing(41, usual_durations={"train": 8.0}), "hang")
    # Evaluation and checkpoint are long, and the first ones are not known at all.
    assert not standing(50, "save")
    assert not standing(59, "evaluate", usual_durations={"train": 0.2})
    assert not standing(59, "start")
    beats = {0: [heartbeat(0, 1, [worker(0, status_age=20.0)])], 1: [heartbeat(1, 1, [worker(1, status_age=0.5)])]}
    assert not rules.judge(view(beats))
    assert not rules.judge(view({0: [heartbeat(0, 1, [worker(0, status_age=30.0)])]}, phase="starting", started=990.0))


def test_a_stopped_process_is_given_no_time_for_its_phase():
    """Its first checkpoint may take resilience.first_step, unless its process does nothing at all."""

    def saving(seconds: float, second: str = "train", **changes) -> list[Verdict]:
        workers = worker(0, phase=second, status_age=seconds), worker(1, phase="save", status_age=seconds, **changes)
        return rules.judge(
            view({n: [heartbeat(n, 1, [w])] for n, w in enumerate(workers)}, usual_durations={"train": 0.2})
        )

    assert not saving(59.0)
    assert not saving(silence.HANG_FLOOR - 0.1, stopped=True)
    verdict = one(saving(silence.HANG_FLOOR + 0.1, stopped=True), "hang")
    assert "a process is stopped" in verdict.evidence[0]
    # Nor for what its peers are at: they may stand in their save for it.
    assert one(saving(silence.HANG_FLOOR + 0.1, "save", stopped=True), "hang")


def test_a_first_step_that_hangs_is_known_once_others_were_seen():
    """Every later start that hangs at one step is detected earlier than after resilience.first_step."""
    start = {"job": "starting", "started": 940.0, "first_step": 600.0}
    limit, learned = silence.LONG_PHASE_FLOOR, {silence.FIRST_STEP: 2.0}
    assert not standing(limit - 0.1, usual_durations=learned, **start)
    verdict = one(standing(limit + 0.1, usual_durations=learned, **start), "hang")
    assert "ranks are in step" in verdict.evidence[1]
    # It may be slow, and before the first of all nothing is known; nor is loading a step.
    assert not standing(limit + 5, usual_durations={silence.FIRST_STEP: 20.0}, **start)
    assert one(standing(101, usual_durations={silence.FIRST_STEP: 20.0}, **start), "hang")
    assert not standing(limit + 5, usual_durations={"train": 2.0}, **start)
    assert not standing(limit + 5, "load", usual_durations=learned, **start)


def test_ranks_that_print_no_step_are_judged_by_those_that_do():
    silent = {"phase": UNOBSERVED, "step": 0, "status_age": 0.1}

    def judge(age: float, **changes) -> list[Verdict]:
        beats = {
            0: [heartbeat(0, 1, [worker(0, status_age=age)])],
            1: [heartbeat(1, 1, [worker(1, **silent)])],
        }
        return rules.judge(view(beats, **changes))

    assert not judge(silence.HANG_FLOOR - 1)
    assert "step 10" in one(judge(silence.HANG_FLOOR + 1), "hang").evidence[1]


def test_a_start_without_a_recognised_step_is_an_alert_while_logs_grow():
    def judge(age: float, kind: str) -> Verdict:
        quiet = {"phase": UNOBSERVED, "step": 0, "status_age": age}
        beats = {n: [heartbeat(n, 1, [worker(n, **quiet)])] for n in range(2)}
        return one(rules.judge(view(beats, phase="starting", started=1000.0 - 70)), kind)

    growing = judge(1.0, "start_too_slow")
    assert growing.action == "alert"
    assert "foreign.patterns" in growing.evidence[0]
    assert judge(69.0, "hang").action == "recover"


def test_log_lines_and_devices():
    line = LogMatch(0, "CUDA error", "CUDA error: launch failure")
    broken = LogMatch(1, "Xid", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    result = rules.judge(
        view({n: [heartbeat(n, 1, [worker(n)], logs=(match,))] for n, match in enumerate((line, broken))})
    )
    assert [v.action for v in result if v.kind == "log_keyword"] == ["alert", "diagnose"]

    def gpus(**changes) -> list[Verdict]:
        beats = [
            heartbeat(0, 1, [worker(0)], gpus=(GpuReport(0, "H200", 60.0),)),
            heartbeat(0, 2, [worker(0)], gpus=(GpuReport(0, "H200", **({"temperature": 60.0} | changes)),)),
        ]
        return rules.judge(view({0: beats}))

    assert not gpus()
    assert one(gpus(xid=79), "device_fault").action == "evict"
    assert one(gpus(ecc_errors=2), "device_fault").action == "diagnose"
    assert one(gpus(temperature=95.0), "device_warning").action == "alert"
    assert one(gpus(xid=13), "device_warning").action == "alert"
    assert one(gpus(recovery="reset"), "device_fault").action == "evict"
    assert one(gpus(recovery="drain and reset"), "device_warning").action == "alert"
    # One that came while the attempt before ended is there from the first heartbeat on.
    first = heartbeat(0, 1, [worker(0)], gpus=(GpuReport(0, "H200", 60.0, xid=79),))
    assert one(rules.judge(view({0: [first]})), "device_fault").nodes == ("node-0",)


def with_traffic(rates: list[float], phase: str = "train", running: int = 0, interface: str = "eth0") -> list[Verdict]:
    """still: of the last heartbeats, how many are of one step."""
    last = len(rates) - 1 - running
    sent = [
        heartbeat(
            0,
            i,
            [worker(0, phase=phase, step=min(i, last))],
            traffic=(NetworkTraffic(interface, r, r, r, r, r, r, samples=100),),
        )
        for i, r in enumerate(rates)
    ]
    return rules.judge(view({0: sent}))


def test_traffic_that_stops_recovers_and_traffic_that_drops_alerts():
    busy = [5e8, 4e8, 6e8] * 10
    assert not with_traffic(busy + [5e8] * 10)
    for running in (10, 7):  # the last step may be told of after it fell quiet
        assert one(with_traffic(busy + [0.0] * 10, running=running), "traffic_stopped").action == "recover"
    # Quiet while steps are done: what it carried was not training.
    assert one(with_traffic(busy + [0.0] * 10), "traffic_dropped").action == "alert"
    assert one(with_traffic(busy + [1e8] * 10), "traffic_dropped").action == "alert"
    assert not with_traffic(busy + [0.0] * 10, phase="save", running=10)
    assert not with_traffic(busy + [0.0] * 5, running=5)
    assert not with_traffic([0.0] * 40)
    # Nodes on one machine: loopback falls quiet when others that use it end.
    assert not with_traffic(busy + [0.0] * 10, running=10, interface="lo")
    # Quiet stretches of six heartbeats belong to this run: ten are not yet a stop.
    waves = ([5e8] * 8 + [0.0] * 6) * 4
    assert not [v for v in with_traffic(waves + [0.0] * 10) if v.kind == "traffic_stopped"]
    assert not [v for v in with_traffic(waves + [0.0] * 10, running=10) if v.kind == "traffic_stopped"]


def measured(losses: list[float], norms: list[float] | None = None, seconds: list[float] | None = None):
    norms, seconds = norms or [1.0] * len(losses), seconds or [0.1] * len(losses)
    rows = [Metric(i + 1, *row) for i, row in enumerate(zip(losses, norms, seconds, strict=True))]
    return rules.judge(view({0: [heartbeat(0, 1, [worker(0)])]}, metrics=rows))


def test_losses_norms_and_seconds():
    calm = [4.0 - 0.01 * i for i in range(80)]
    assert not measured(calm)
    assert one(measured(calm + [9.0]), "loss_spike").action == "alert"
    assert one(measured(calm, [1.0] * 79 + [50.0]), "loss_spike").action == "alert"
    assert one(measured(calm, [1.0] * 79 + [math.nan]), "nonfinite_gradient").action == "alert"
    assert one(measured(calm, [1.0] * 77 + [math.nan] * 3), "nonfinite_gradient").action == "diagnose"
    # Gone again when we look: steps are shorter than the time between two looks.
    assert one(measured(calm, [1.0] * 40 + [math.nan] + [1.0] * 39), "nonfinite_gradient").action == "alert"
    assert one(measured(calm, None, [0.1] * 60 + [0.2] * 20), "throughput_drop").action == "alert"
    assert not measured(calm, None, [0.1] * 70 + [0.2] * 10)


def test_a_spike_is_compared_with_the_median_of_100_steps_before():
    [verdict] = measured([100.0] * 60 + [4.0] * 100 + [9.0])
    assert verdict.evidence == ("the loss of step 161 is 9; the median of 100 steps before is 4",)


def computing(*nodes: list[float], data: int | None = None, running: int = 0) -> list[Verdict]:
    """still: of the last heartbeats, how many show ranks that stand."""
    ages = [0.1] * (len(nodes[0]) - running) + [0.5 + i for i in range(running)]
    beats = {
        n: [heartbeat(n, i, [worker(n, step=i, status_age=ages[i])], step_seconds={n: s}) for i, s in enumerate(series)]
        for n, series in enumerate(nodes)
    }
    data = data or len(nodes)
    return rules.judge(view(beats, Grid(data=data, pipeline=len(nodes) // data, ranks_per_host=1)))


def test_a_persistently_slow_node_is_evicted():
    usual = [0.1, 0.11, 0.1, 0.09, 0.1] * 6
    slow = [s * 1.4 for s in usual]
    verdict = one(computing(usual, usual, slow, usual), "slow_node")
    assert (verdict.nodes, verdict.ranks, verdict.action) == (("node-2",), (2,), "evict")
    assert "1.4" in verdict.evidence[0]
    assert one(computing(usual, slow), "slow_node").nodes == ("node-1",)
    assert not computing(usual, usual, [s * 1.05 for s in usual], usual)
    # A stage with the logits takes longer: only ranks of one stage are compared.
    assert not computing(usual, usual, slow, slow, data=2)
    # If peers vary as much themselves, no rank stands out.
    assert not computing([0.1, 0.2] * 15, [0.1, 0.18] * 15, [0.15] * 30, [0.1, 0.19] * 15)
    # A run that stands (rank 0 is stopped) repeats its last step's times: no evidence against the slower of them.
    assert [v.kind for v in computing(usual, usual[:-18] + [0.15] * 18, running=18)] == ["hang"]
    assert [v.kind for v in computing(usual, usual[:-18] + [0.15] * 18)] == ["slow_node"]
    # A passing slowness does not count.
    assert not computing(usual, usual, usual[:-5] + [0.3] * 5, usual)


@pytest.mark.parametrize("slow_ranks", [(), (17,), (3, 64)])
def test_thousands_of_ranks_are_judged_as_few_are(slow_ranks, monkeypatch):
    """The usual durations are computed once for all ranks, and the verdicts are equal."""
    usual = [0.1, 0.11, 0.1, 0.09, 0.1] * 6
    series = [
        [s * 1.4 for s in usual] if rank in slow_ranks else usual for rank in range(metrics_rules.POOLED_RANKS + 6)
    ]
    large = computing(*series)
    monkeypatch.setattr(metrics_rules, "POOLED_RANKS", 10**9)
    small = computing(*series)
    assert [(v.kind, v.nodes, v.ranks) for v in large] == [(v.kind, v.nodes, v.ranks) for v in small]
    assert {rank for v in large for rank in v.ranks} == set(slow_ranks)


def test_a_still_view_keeps_its_history_while_heartbeats_come():
    moving = view({0: [heartbeat(0, i, [worker(0)]) for i in range(1, HISTORY_LENGTH + 1)]})
    running = moving.snapshot()
    moving.members[0].history.append((1001.0, heartbeat(0, HISTORY_LENGTH + 1, [worker(0)])))
    assert [h.sequence for _, h in running.members[0].history] == list(range(1, HISTORY_LENGTH + 1))
    assert running.members[0].history.maxlen == HISTORY_LENGTH


def summed(*by_rank: str, step: int = 8) -> list[Verdict]:
    grid = Grid(data=len(by_rank), ranks_per_host=1)
    beats = {r: [heartbeat(r, 1, [worker(r)], checksums={f"{step}:{r}": s})] for r, s in enumerate(by_rank)}
    return rules.judge(view(beats, grid))


def test_copies_that_differ_are_found_and_the_minority_is_named():
    assert not summed("aa", "aa", "aa")
    verdict = one(summed("aa", "ab", "aa"), "checksum_mismatch")
    assert (verdict.nodes, verdict.ranks, verdict.action) == (("node-1",), (1,), "evict")
    pair = one(summed("aa", "ab"), "checksum_mismatch")
    assert (pair.nodes, pair.action) == (("node-0", "node-1"), "diagnose")


# calm traces -------------------------------------------------------------------------------------------------------

noise = st.floats(0.92, 1.08)


@st.composite
def calm_runs(draw) -> View:
    """A run that is well: steps pass, with evaluations and checkpoints, noise in every figure, clocks minutes apart."""
    nodes, stages = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (6, 2)]))
    beats = draw(st.integers(1, 60))
    skew = {n: draw(st.integers(0, 600)) * 10**9 for n in range(nodes)}
    rate = draw(st.sampled_from([0.0, 1e5, 5e8]))
    every = draw(st.integers(5, 20))
    jitter = draw(st.lists(noise, min_size=16, max_size=16))
    work = {n: 0.05 * (1 + n * stages // nodes) for n in range(nodes)}
    start = draw(st.integers(0, 10**6))
    sent: dict[int, list[Heartbeat]] = {n: [] for n in range(nodes)}
    for i in range(beats):
        phase = "save" if i % every == every - 1 else "evaluate" if i % every == every // 2 else "train"
        for n in range(nodes):
            factor = jitter[(3 * i + 5 * n) % 16]
            amount = rate * factor if phase == "train" else 0.0
            status_age = factor * {"train": 0.2, "save": 3.0, "evaluate": 4.0}[phase]
            w = worker(n, step=start + i, phase=phase, status_age=status_age)
            link = NetworkTraffic("eth0", amount, amount, amount, amount, amount, amount, samples=9)
            sums = {f"{start + i}:{n}": f"sum of stage {n * stages // nodes} step {i}"}
            sent[n].append(
                heartbeat(
                    n, i, [w], sent_ns=10**18 + skew[n] + i, traffic=(link,), checksums=sums,
                    step_seconds={n: work[n] * factor},
                )
            )  # fmt: skip
    metrics = [
        Metric(start + i, 2 + 2 * 0.99**i * jitter[i % 16] ** 0.5, jitter[i % 16], 0.1 * jitter[(5 * i) % 16])
        for i in range(draw(st.integers(0, 150)))
    ]
    late = draw(st.floats(0, WINDOW - 0.5))
    state = view(sent, Grid(data=nodes // stages, pipeline=stages, ranks_per_host=1), metrics=metrics)
    state.members[-1].last_seen -= late
    return state


@settings(max_examples=120, deadline=None)
@given(calm_runs())
def test_a_calm_run_raises_no_alarm(state):
    assert rules.judge(state) == []


@settings(max_examples=60, deadline=None)
@given(calm_runs(), st.integers(-(10**12), 10**12))
def test_clocks_change_nothing(state, skew):
    """The verdicts do not depend on the senders' clocks or on the start of the driver's clock."""
    bad = state.members[-1]
    bad.last_seen = state.time - WINDOW - 1.5
    before = rules.judge(state)
    shift = skew / 1e3
    state.time += shift
    state.started += shift
    for member in state.members:
        member.last_seen += shift
        member.history = deque(
            ((t + shift, replace(h, sent_ns=h.sent_ns + abs(skew))) for t, h in member.history),
            HISTORY_LENGTH,
        )
        if member.heartbeat:
            member.heartbeat = member.history[-1][1]
    assert [(v.kind, v.nodes, v.action) for v in rules.judge(state)] == [(v.kind, v.nodes, v.action) for v in before]


def test_a_killed_rank_is_worse_than_an_alert():
    result = ended(worker(1, state="signalled", code=signal.SIGSEGV))
    assert max(SEVERITY[v.action] for v in result) >= SEVERITY["recover"]
