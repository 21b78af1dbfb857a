"""The limits of the rules: a value at a limit is calm, the next one beyond it is not, and evidence names the values."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import replace as replace_fields

import pytest
from msgspec.structs import replace

from megascale.core.exit_record import ExitKind, ExitRecord
from megascale.core.failure import MIN_FREE_BYTES
from megascale.core.grid import Grid
from megascale.core.status import UNOBSERVED
from megascale.resilience.protocol.heartbeat import GpuReport, NetworkTraffic, Worker
from megascale.resilience.rules import exits, metrics_rules, node_signals, silence, table
from megascale.resilience.rules.view import Incident, Metric, NodeView, SlowFinding, Verdict, View
from tests.resilience.rules.views import WINDOW, heartbeat, view, worker

# silence ------------------------------------------------------------------------------------------------------------


def make_silent_view(*silences: float, **changes: float) -> View:
    """Return a view of nodes that were last seen so many seconds ago, without any steps."""
    state = view({node: [heartbeat(node, 1, [worker(node)])] for node in range(len(silences))}, **changes)
    for member, seconds in zip(state.members, silences, strict=True):
        member.last_seen = state.time - seconds
    return state


def silent_nodes(state: View) -> list[str]:
    return [node for verdict in silence.judge_heartbeats(state) for node in verdict.nodes]


def test_the_window_is_the_longest_allowed_silence() -> None:
    assert silent_nodes(make_silent_view(0, WINDOW)) == []
    assert silent_nodes(make_silent_view(0, WINDOW + 0.1)) == ["node-1"]
    assert silent_nodes(make_silent_view(WINDOW)) == []
    assert silent_nodes(make_silent_view(WINDOW + 0.1)) == ["node-0"]  # one node alone gets no second window
    assert silent_nodes(make_silent_view(WINDOW + 0.1, 2 * WINDOW)) == []
    assert silent_nodes(make_silent_view(WINDOW + 0.1, 2 * WINDOW + 0.1)) == ["node-1"]
    assert silent_nodes(make_silent_view(2 * WINDOW + 0.1, WINDOW + 0.1, 0)) == ["node-0", "node-1"]


def test_a_silent_node_is_described() -> None:
    state = make_silent_view(0, 7.5)
    (verdict,) = silence.judge_heartbeats(state)
    assert verdict.evidence == ("no heartbeat from node-1 for 7.5 s; resilience.window is 5 s",)
    state.members[1].connected = False
    state.members[0].heartbeat = None
    (verdict,) = silence.judge_heartbeats(state)
    assert verdict.evidence[1:] == ("its connection has closed too", "no other node has sent a heartbeat either")
    (alone,) = silence.judge_heartbeats(make_silent_view(7.5))
    assert len(alone.evidence) == 1


def training_nodes(*steps_by_node: list[int], phase: str = "running") -> View:
    """Return a view of nodes in these steps, one heartbeat per second, and of one silent node after them."""
    nodes = len(steps_by_node)
    sent = {
        node: [heartbeat(node, i, [worker(node, step=step)]) for i, step in enumerate(steps)]
        for node, steps in enumerate(steps_by_node)
    }
    state = view(sent | {nodes: []}, phase=phase)
    state.members[-1].last_seen = state.time - WINDOW - 1
    return state


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([10, 13, 13, 13, 13, 13], "agent_silent"),  # three steps within the window
        ([10, 12, 12, 12, 12, 12], "missed_heartbeat"),  # two steps may be done without the node
        ([10, 13, 13, 13, 13, 13, 13], "missed_heartbeat"),  # longer ago than the window
    ],
)
def test_three_steps_within_the_window_show_that_all_ranks_train(steps: list[int], kind: str) -> None:
    (verdict,) = silence.judge_heartbeats(training_nodes(steps))
    assert verdict.kind == kind
    assert silence.judge_heartbeats(training_nodes(steps, phase="starting"))[0].kind == "missed_heartbeat"


def test_only_some_nodes_are_asked_for_steps() -> None:
    calm, trains = [10] * 6, [10, 11, 12, 13, 14, 15]
    assert silence.judge_heartbeats(training_nodes(*[calm] * 3, trains))[0].kind == "agent_silent"
    assert silence.judge_heartbeats(training_nodes(*[calm] * 4, trains))[0].kind == "missed_heartbeat"


def test_the_slowest_rank_of_a_node_counts() -> None:
    def workers(step: int) -> list[Worker]:
        return [worker(0, step=step), worker(1, step=10)]

    state = view({0: [heartbeat(0, i, workers(10 + i)) for i in range(6)], 2: []})
    state.members[-1].last_seen = state.time - WINDOW - 1
    assert silence.judge_heartbeats(state)[0].kind == "missed_heartbeat"


def starting(seconds: float, *phases: str, world: int = 0) -> list[Verdict]:
    beats = {node: [heartbeat(node, 1, [worker(node, phase=phase)])] for node, phase in enumerate(phases)}
    grid = Grid(data=world or len(phases), ranks_per_host=1)
    return silence.judge_slow_start(view(beats, grid, phase="starting", started=1000.0 - seconds))


def test_a_start_may_take_its_full_time() -> None:
    assert starting(60.0, "load", "load") == []
    (verdict,) = starting(60.1, "load", "load")
    assert verdict.ranks == (0, 1)
    assert verdict.evidence == ("no step within resilience.first_step=60 s of the start",)  # none is behind the others
    (verdict,) = starting(60.1, "train", "start", "load", "start")
    assert (verdict.ranks, verdict.evidence[1]) == ((1, 3), "ranks [1, 3] are still in phase 'start'")
    (verdict,) = starting(60.1, "", "load")
    assert verdict.evidence[1] == "ranks [0] are still in phase 'before start'"
    (verdict,) = starting(60.1, "load", "start", world=16)
    assert verdict.ranks == tuple(range(2, 16))
    assert verdict.evidence[1] == f"nothing was received from ranks {list(range(2, 14))}"


def test_logs_that_grow_are_those_younger_than_the_time_for_a_start() -> None:
    def judge(*ages: float) -> str:
        beats = {n: [heartbeat(n, 1, [worker(n, phase=UNOBSERVED, status_age=age)])] for n, age in enumerate(ages)}
        (verdict,) = silence.judge_slow_start(view(beats, phase="starting", started=900.0))
        return verdict.action

    assert [judge(60.0, 70.0), judge(60.1, 70.0)] == ["alert", "recover"]


@pytest.mark.parametrize(
    ("phase", "usual", "limit"),
    [
        ("train", 1.0, silence.HANG_FLOOR),
        ("train", 2.0, 10.0),
        ("train", 3.0, 15.0),
        ("save", 3.0, silence.LONG_PHASE_FLOOR),
        ("evaluate", 13.0, 65.0),
        ("load", 13.0, 65.0),
        ("train", None, 60.0),
        ("start", 1.0, 60.0),
        ("failed", 1.0, 60.0),
        (UNOBSERVED, 1.0, 60.0),
    ],
)
def test_a_phase_may_take_five_times_its_usual_length(phase: str, usual: float | None, limit: float) -> None:
    state = view({}, usual_durations={} if usual is None else {phase: usual}, first_step=60.0)
    assert silence.compute_allowed_age(state, worker(0, phase=phase)) == limit


@pytest.mark.parametrize(("usual", "limit"), [(1.0, 60.0), (13.0, 65.0), (200.0, 600.0), (None, 600.0)])
def test_a_first_step_may_take_five_times_an_earlier_one(usual: float | None, limit: float) -> None:
    usual_durations = {} if usual is None else {silence.FIRST_STEP: usual}
    state = view({}, usual_durations=usual_durations, first_step=600.0, phase="starting")
    assert silence.compute_allowed_age(state, worker(0)) == limit


def standing(*ages: float, **changes: object) -> list[Verdict]:
    beats = {n: [heartbeat(n, 1, [worker(n, status_age=age, **changes)])] for n, age in enumerate(ages)}
    return silence.judge_hang(view(beats, usual_durations={"train": 1.0}))


def test_all_ranks_must_have_stood_for_longer_than_allowed() -> None:
    limit = silence.HANG_FLOOR
    assert standing(limit, limit + 1) == standing(limit + 1, limit) == []
    (verdict,) = standing(limit + 1, limit + 3, action="reduce", microbatch=0)
    assert verdict.evidence == (
        "no rank has moved for 11.0 s (the first stopped 13.0 s ago); phase 'train' may last 10.0 s without change, "
        "5 x the longest usual",
        "ranks are in step 10",
        "rank 0 on node-0: train step 10, reduce of micro-batch 0 for 11.0 s",
        "rank 1 on node-1: train step 10, reduce of micro-batch 0 for 13.0 s",
    )
    (verdict,) = standing(*(limit + 1 + n for n in range(10)), action="reduce")
    assert [line.split(":")[0] for line in verdict.evidence[2:]] == [f"rank {n} on node-{n}" for n in range(2, 10)]
    assert verdict.evidence[2] == "rank 2 on node-2: train step 10, reduce for 13.0 s"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_hang_is_known_before_its_limit_if_no_rank_moves_meanwhile(stopped: bool) -> None:
    """A stopped process has no additional time for a save."""
    age = silence.HANG_FLOOR - 1.0
    phase = "save" if stopped else "train"
    beats = {n: [heartbeat(n, 1, [worker(n, phase=phase, status_age=age, stopped=stopped)])] for n in range(2)}
    state = view(beats, usual_durations={"train": 1.0, "save": 1.0})
    assert silence.find_hang(state, lead=1.0) == silence.find_hang(state) == []
    assert len(silence.find_hang(state, lead=1.1)) == 1


def test_a_rank_that_has_ended_is_no_part_of_a_hang() -> None:
    beats = {n: [heartbeat(n, 1, [worker(n, status_age=99.0)])] for n in range(2)}
    beats[1] = [heartbeat(1, 1, [worker(1, status_age=99.0, state="exited")])]
    assert silence.judge_hang(view(beats, usual_durations={"train": 1.0})) == []


def test_the_age_of_a_status_grows_after_its_heartbeat() -> None:
    member = NodeView("node-0", (0,), last_seen=990.0)
    for interval, age in ((1.0, 13.0), (9.0, 5.0), (11.0, 4.0)):
        assert silence.compute_status_age(view({}, interval=interval), member, worker(0, status_age=4.0)) == age


# devices and network --------------------------------------------------------------------------------------------------


def device_texts(before: dict[str, object], after: dict[str, object]) -> list[str]:
    reports = [GpuReport(0, "H100", **changes) for changes in (before, after)]  # type: ignore[arg-type]
    second_gpu = GpuReport(1, "H100", ecc_errors=9, xid=13)  # of another device, which counts nothing here
    beats = [heartbeat(0, i, [worker(0)], gpus=(second_gpu, report)) for i, report in enumerate(reports)]
    verdicts = node_signals.judge_devices(view({0: beats}))
    return [f"{verdict.kind}, {verdict.action}: {verdict.evidence[0]}" for verdict in verdicts]


NAME = "GPU 0 (H100) of node-0"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ({}, {"temperature": 90.0}, ""),
        ({}, {"temperature": 90.5}, f"device_warning, alert: {NAME} has 90 degrees; above 90 it slows down"),
        ({}, {"silent_seconds": 20.0}, ""),
        (
            {},
            {"silent_seconds": 21.0},
            f"device_warning, alert: {NAME}: its driver has not answered for 21 s; look at dmesg and nvidia-smi there",
        ),
        ({"ecc_errors": 2}, {"ecc_errors": 2}, ""),
        (
            {"ecc_errors": 2},
            {"ecc_errors": 5},
            f"device_fault, diagnose: {NAME} counted 3 more uncorrected memory errors",
        ),
        ({"xid": 13}, {"xid": 13}, ""),
        ({"xid": 13}, {"xid": 31}, f"device_warning, alert: {NAME} reported Xid 31"),
        ({"xid": 13}, {"xid": 0}, ""),
        (
            {},
            {"throttled": True, "temperature": 80.0, "power_watts": 650.0},
            f"device_warning, alert: {NAME} is slowed down by its driver at 80 degrees, 650 W",
        ),
        # Values of a silent driver are old: the first report with an answer is the one to compare with.
        ({"ecc_errors": 1, "silent_seconds": 5.0}, {"ecc_errors": 3}, ""),
    ],
)
def test_what_a_device_reports(before: dict[str, object], after: dict[str, object], text: str) -> None:
    assert device_texts(before, after) == ([text] if text else [])


def traffic_kinds(rates: list[float], steps: list[int] | None = None, **changes: object) -> list[str]:
    """Return the kinds of verdicts on one interface; `changes` of the last sample."""
    steps = steps or [5] * len(rates)
    samples = [NetworkTraffic("eth0", rate, 0.0, rate, rate, 0.0, 0.0) for rate in rates]
    samples[-1] = replace(samples[-1], **changes)
    sent = [heartbeat(0, i, [worker(0, step=steps[i])], traffic=(sample,)) for i, sample in enumerate(samples)]
    return [verdict.kind for verdict in node_signals.judge_traffic(view({0: sent}))]


def test_traffic_is_judged_from_thirty_heartbeats_on() -> None:
    assert traffic_kinds([1e8] * 19 + [0.0] * 10) == []
    assert traffic_kinds([1e8] * 20 + [0.0] * 10) == ["traffic_stopped"]
    assert traffic_kinds([1e8] * 21 + [0.0] * 9) == []


def test_an_interface_that_carries_little_is_not_judged() -> None:
    assert traffic_kinds([0.99e6] * 20 + [0.0] * 10) == []
    assert traffic_kinds([1e6] * 20 + [0.0] * 10) == ["traffic_stopped"]


def test_a_drop_is_to_less_than_half_of_what_is_usual() -> None:
    assert traffic_kinds([1e8] * 20 + [0.5e8] * 10) == []
    assert traffic_kinds([1e8] * 20 + [0.49e8] * 10) == ["traffic_dropped"]
    # Of rates that oscillate, the low ones are usual: a quarter is below them.
    assert traffic_kinds([1e8] * 14 + [0.2e8] * 6 + [0.15e8] * 10) == []
    assert traffic_kinds([1e8] * 15 + [0.2e8] * 5 + [0.15e8] * 10) == ["traffic_dropped"]
    assert traffic_kinds([1e8] * 5 + [2e7] * 15 + [1e7] * 10) == []  # half of the usual 20 MB/s


def test_a_stop_is_below_one_percent() -> None:
    assert traffic_kinds([1e8] * 20 + [1e6] * 10) == ["traffic_dropped"]
    assert traffic_kinds([1e8] * 20 + [0.99e6] * 10) == ["traffic_stopped"]
    # The last sample had a burst, so the interface carries something.
    for name in ("rx_max", "tx_max"):
        assert traffic_kinds([1e8] * 20 + [0.0] * 10, **{name: 2e6}) == ["traffic_dropped"]
    # Both directions count.
    assert traffic_kinds([1e8] * 29 + [0.0], tx_bytes_per_s=1e8) == []


def test_a_stop_lasts_three_times_the_longest_quiet_stretch() -> None:
    for quiet, kinds in ((4, ["traffic_stopped"]), (5, ["traffic_dropped"])):
        assert traffic_kinds([1e8] * 20 + [0.0] * quiet + [1e8] * 10 + [0.0] * 12) == kinds
    assert traffic_kinds([1e8] * 20 + [0.0] * 5 + [1e8] * 10 + [0.0] * 15) == ["traffic_stopped"]


def test_a_step_in_the_second_half_of_a_quiet_stretch_shows_that_training_goes_on() -> None:
    rates = [1e8] * 20 + [0.0] * 10
    # The last five heartbeats are compared: a step that was reported before them is the one under way.
    assert traffic_kinds(rates, [5] * 25 + [6] * 5) == ["traffic_stopped"]
    assert traffic_kinds(rates, [5] * 26 + [6] * 4) == ["traffic_dropped"]


def test_only_errors_that_are_new_are_reported() -> None:
    rates = [1e8] * 30
    assert traffic_kinds(rates, errors=1) == ["link_errors"]
    assert traffic_kinds(rates) == []
    samples = [NetworkTraffic("eth0", 1e8, errors=int(i in (19, 29))) for i in range(30)]
    sent = [heartbeat(0, i, [worker(0)], traffic=(sample,)) for i, sample in enumerate(samples)]
    assert node_signals.judge_traffic(view({0: sent})) == []


@pytest.mark.parametrize(("at", "kinds"), [(17, ["traffic_stopped"]), (18, [])])
def test_ranks_must_have_trained_for_twelve_heartbeats(at: int, kinds: list[str]) -> None:
    samples = [NetworkTraffic("eth0", 1e8 if i < 20 else 0.0) for i in range(30)]
    phases = ["save" if i == at else "train" for i in range(30)]
    sent = [
        heartbeat(0, i, [worker(0, phase=phase)], traffic=(sample,))
        for i, (phase, sample) in enumerate(zip(phases, samples, strict=True))
    ]
    assert [verdict.kind for verdict in node_signals.judge_traffic(view({0: sent}))] == kinds


# metrics --------------------------------------------------------------------------------------------------------------


def judge_metrics(
    rule: Callable[[View], list[Verdict]],
    losses: list[float],
    norms: list[float] | None = None,
    seconds: list[float] | None = None,
) -> list[Verdict]:
    rows = zip(losses, norms or [1.0] * len(losses), seconds or [0.1] * len(losses), strict=True)
    return rule(view({}, metrics=[Metric(i + 1, *row) for i, row in enumerate(rows)]))


def count_loss_verdicts(losses: list[float], norms: list[float] | None = None) -> int:
    return len(judge_metrics(metrics_rules.judge_losses, losses, norms))


def test_a_spike_needs_thirty_steps_before_it() -> None:
    assert count_loss_verdicts([2.0] * 29 + [9.0]) == 0
    assert count_loss_verdicts([2.0] * 30 + [9.0]) == 1
    assert count_loss_verdicts([]) == 0


def test_a_spike_exceeds_half_of_the_median_and_twelve_deviations() -> None:
    assert count_loss_verdicts([2.0] * 40 + [3.0]) == 0
    assert count_loss_verdicts([2.0] * 40 + [3.01]) == 1
    assert count_loss_verdicts([-2.0] * 40 + [-1.0]) == 0
    assert count_loss_verdicts([-2.0] * 40 + [-0.99]) == 1
    noisy = [1.75, 2.0, 2.25, 2.0, 2.5, 1.5] * 10  # median 2, median deviation 0.25
    assert count_loss_verdicts(noisy + [5.0]) == 0
    assert count_loss_verdicts(noisy + [5.01]) == 1


def test_a_norm_exceeds_ten_medians_and_twice_the_highest() -> None:
    losses = [2.0] * 41
    assert count_loss_verdicts(losses, [1.0] * 40 + [10.0]) == 0
    assert count_loss_verdicts(losses, [1.0] * 40 + [10.01]) == 1
    assert count_loss_verdicts(losses, [1.0] * 39 + [6.0, 12.0]) == 0
    assert count_loss_verdicts(losses, [1.0] * 39 + [6.0, 12.01]) == 1
    assert count_loss_verdicts(losses, [0.0] * 40 + [5.0]) == 0
    assert count_loss_verdicts(losses, [0.5] * 40 + [5.1]) == 1


@pytest.mark.parametrize(
    ("norms", "action", "text"),
    [
        ([1.0, math.nan] + [1.0] * 98, "alert", "the gradient of step 2 had norm nan; the step was skipped"),
        ([1.0, math.nan] + [1.0] * 99, "alert", "the gradient of step 2 had norm nan; the step was skipped"),
        ([1.0, math.nan] + [1.0] * 100, None, ""),
        ([1.0, math.inf, 1.0, math.inf, 1.0], "alert", "the gradient of step 4 had norm inf; the step was skipped"),
        ([1.0] * 9 + [math.nan] * 2, "alert", "the gradient of step 11 has norm nan; 2 steps in a row were skipped"),
        ([1.0] * 9 + [math.nan] * 3, "diagnose", "the gradient of step 12 has norm nan; 3 steps in a row were skipped"),
        ([math.nan] * 3, "diagnose", "the gradient of step 3 has norm nan; 3 steps in a row were skipped"),
        ([math.nan] * 2, "alert", "the gradient of step 2 has norm nan; 2 steps in a row were skipped"),
    ],
)
def test_skipped_steps_are_counted(norms: list[float], action: str | None, text: str) -> None:
    verdicts = judge_metrics(metrics_rules.judge_losses, [2.0] * len(norms), norms)
    assert [(verdict.action, *verdict.evidence) for verdict in verdicts] == ([(action, text)] if action else [])


def test_steps_are_slower_from_one_and_three_tenths_on() -> None:
    def texts(before: list[float], recent: list[float]) -> list[str]:
        seconds = before + recent
        verdicts = judge_metrics(metrics_rules.judge_throughput, [2.0] * len(seconds), None, seconds)
        return [verdict.evidence[0] for verdict in verdicts]

    calm = [1.0] * 40
    expected = "the last 20 steps took 1.3 s each (median), 1.30 x the 1 s before"
    assert texts(calm, [1.3] * 20) == [expected]
    assert texts(calm, [1.29] * 20) == texts(calm[:39], [1.3] * 20) == []
    # Five of the last steps may be as fast as before.
    assert texts(calm, [1.0] * 5 + [1.3] * 15) == [expected]
    assert texts(calm, [1.0] * 6 + [1.3] * 14) == []
    # The first steps are slow anyway, and one in ten steps before may be as slow.
    assert texts([2.0] * 5 + calm, [1.3] * 20) == [expected]
    assert texts([1.0] * 35 + [2.0] * 5, [1.3] * 20) == []
    assert texts([1.0] * 36 + [2.0] * 4, [1.3] * 20) == [expected]
    assert texts([0.0] * 40, [1.3] * 20) == []


def slow_ranks(*nodes: list[float], running: str = "running", seconds: float = 1.0) -> list[Verdict]:
    """Return the verdicts on nodes of one rank each that computed for these times, one heartbeat per `seconds`."""
    beats = {
        n: [heartbeat(n, i, [worker(n, step=i)], step_seconds={n: s}) for i, s in enumerate(series)]
        for n, series in enumerate(nodes)
    }
    state = view(beats, Grid(data=len(nodes), ranks_per_host=1), phase=running)
    for member in state.members:
        member.history = deque((1000.0 + (time - 1000.0) * seconds, beat) for time, beat in member.history)
    return metrics_rules.judge_slow_nodes(state)


def test_a_node_is_slow_from_one_and_a_quarter_on() -> None:
    usual, calm = [1.0] * 30, [1.24] * 30
    assert slow_ranks(usual, usual, usual, calm) == []
    (verdict,) = slow_ranks(usual, usual, usual, [1.25] * 30)
    assert (verdict.nodes, verdict.ranks) == (("node-3",), (3,))
    assert verdict.evidence == (
        "rank 3 on node-3 computes 1.25 s per step, 1.25 x the 1 s of 3 ranks with the same work, over 20 heartbeats",
    )
    assert "of 1 rank with" in slow_ranks(usual, [1.25] * 30)[0].evidence[0]
    assert slow_ranks(usual, usual, usual, [1.25] * 30, running="starting") == []


def test_the_quicker_heartbeats_of_a_slow_node_are_slow_too() -> None:
    usual = [1.0] * 30
    assert slow_ranks(usual, usual, usual, [1.14] * 16 + [1.5] * 14) == []
    assert slow_ranks(usual, usual, usual, [1.15] * 16 + [1.5] * 14) != []
    assert slow_ranks(usual, usual, usual, [1.0] * 15 + [1.5] * 15) != []  # five of the last twenty may be fast
    assert slow_ranks(usual, usual, usual, [1.0] * 16 + [1.5] * 14) == []


def test_a_difference_of_less_than_ten_milliseconds_is_none() -> None:
    usual = [0.02] * 30
    assert slow_ranks(usual, usual, usual, [0.0299] * 30) == []
    assert slow_ranks(usual, usual, usual, [0.0301] * 30) != []


def test_a_slow_node_has_twenty_heartbeats_after_the_first_three() -> None:
    for count, is_slow in ((22, False), (23, True)):
        usual = [1.0] * count
        assert bool(slow_ranks(usual, usual, usual, [1.5] * count)) == is_slow


def test_the_heartbeats_of_a_slow_node_span_some_time() -> None:
    """Heartbeats that are close together are more: those of the last 15 seconds."""
    for count, is_slow in ((27, False), (28, True)):  # 13 and 13.5 seconds
        usual = [1.0] * (3 + count)
        assert bool(slow_ranks(usual, usual, usual, [1.5] * (3 + count), seconds=0.5)) == is_slow
    usual = [1.0] * 23
    assert slow_ranks(usual, usual, usual, [1.5] * 23, seconds=0.7) == []  # 13.3 seconds
    assert slow_ranks(usual, usual, usual, [1.5] * 23, seconds=0.72) != []  # 13.7 seconds


def test_two_peers_are_compared_by_the_slower_and_three_by_their_median() -> None:
    slow, usual, between = [1.5] * 30, [1.0] * 30, [1.3] * 30
    assert slow_ranks(usual, between, slow) == []
    assert [v.nodes for v in slow_ranks(usual, usual, between, slow)] == [("node-3",)]


def test_copies_of_the_last_ten_heartbeats_are_compared() -> None:
    def kinds(age: int, *sums: tuple[str, str], world: int = 2) -> list[tuple[int, ...]]:
        beats = {
            n: [heartbeat(n, 0, [worker(n)], checksums=dict([pair]))]
            + [heartbeat(n, i, [worker(n)]) for i in range(age)]
            for n, pair in enumerate(sums)
        }
        return [v.ranks for v in metrics_rules.judge_checksums(view(beats, Grid(data=world, ranks_per_host=1)))]

    pair = ("8:0", "aa"), ("8:1", "ab")
    assert kinds(9, *pair) == [(0, 1)]
    assert kinds(10, *pair) == []
    assert kinds(0, ("8:0", "aa"), ("9:1", "ab")) == []  # of different steps
    assert kinds(0, ("8:0", "aa"), ("8:2", "ab")) == []  # no such rank
    assert kinds(0, ("8:0", "aa"), ("x:1", "ab")) == kinds(0, ("8:0", "aa"), ("8:y", "ab")) == []
    triple = ("8:0", "aa"), ("8:1", "ab"), ("8:2", "aa")
    assert kinds(0, *triple, world=3) == [(1,)]
    assert kinds(0, *triple, ("8:3", "ac"), world=4) == [(1, 3)]


def test_two_nodes_that_deviate_are_tested() -> None:
    sums = ["aa", "ab", "aa", "ac", "aa"]
    beats = {n: [heartbeat(n, 1, [worker(n)], checksums={f"8:{n}": value})] for n, value in enumerate(sums)}
    (verdict,) = metrics_rules.judge_checksums(view(beats, Grid(data=5, ranks_per_host=1)))
    assert (verdict.nodes, verdict.ranks, verdict.action) == (("node-1", "node-3"), (1, 3), "diagnose")
    values = "rank 0 on node-0 aa, rank 1 on node-1 ab, rank 2 on node-2 aa, rank 3 on node-3 ac, rank 4 on node-4 aa"
    text = f"after step 8 the weights of stage 0 differ between data-parallel copies: {values}"
    assert verdict.evidence == (text,)


def test_findings_count_from_their_confidence_and_size_on() -> None:
    def judge(*findings: SlowFinding, least: float = 0.1) -> list[Verdict]:
        beats = {n: [heartbeat(n, 1, [worker(n)])] for n in range(2)}
        changes = {"slow_findings": findings, "slow_action": "evict", "slow_least": least}
        return metrics_rules.judge_slow_machines(view(beats, **changes))

    limit = SlowFinding(1, 0.1, "GPU", 0.9999, ("a", "b", "c", "d"))
    (verdict,) = judge(limit)
    assert (verdict.action, verdict.evidence[1:]) == ("evict", ("a", "b", "c"))
    assert judge(replace_fields(limit, confidence=0.99989)) == []
    assert judge(replace_fields(limit, slower=0.099))[0].action == "alert"
    evidence = judge(*(replace_fields(limit, slower=0.1 + n / 100, evidence=(str(n),)) for n in range(6)))[0].evidence
    assert [line.split(" is ")[1][:5] for line in evidence[:4]] == ["10.0%", "11.0%", "12.0%", "13.0%"]
    assert evidence[4:] == ("5",)  # the evidence of the worst one


# repeated offences and ends of processes ------------------------------------------------------------------------------


def repeated(ages: list[float], ages_elsewhere: list[float], action: str = "recover", **changes: object) -> Verdict:
    """Return a verdict against node-0 after offences so many seconds ago, of it and of node-1."""
    incidents = [Incident(1e6 - age, "node-0", "hang") for age in ages]
    incidents += [Incident(1e6 - age, "node-1", "hang") for age in ages_elsewhere]
    state = view({}, now=1e6)
    state.incidents = incidents
    verdict = Verdict("process_killed", ("node-0",), (0,), action)  # type: ignore[arg-type]
    return table.evict_repeat_offenders(state, [replace_fields(verdict, **changes)])[0]


def test_the_third_offence_of_a_day_evicts() -> None:
    day = table.OFFENCE_MEMORY_SECONDS
    assert repeated([60.0], []).action == "recover"
    evicted = repeated([60.0, 600.0], [])
    assert evicted.action == "evict"
    assert evicted.evidence == ("offence 3 of node-0 in 10 minutes, at most 0 of any other",)
    assert repeated([60.0, day], []).action == "recover"
    assert repeated([60.0, day - 1], []).action == "evict"
    # It must have twice as many as any other node.
    assert repeated([60.0, 600.0], [5.0]).action == "evict"
    assert repeated([60.0, 600.0, 700.0], [5.0, 6.0]).action == "recover"
    assert repeated([60.0, 600.0, 700.0, 800.0], [5.0, 6.0]).action == "evict"
    assert repeated([60.0, 600.0], [day, day + 1]).action == "evict"


@pytest.mark.parametrize(
    ("action", "expected"),
    [("none", "none"), ("alert", "alert"), ("recover", "evict"), ("diagnose", "evict"), ("stop", "stop")],
)
def test_only_what_a_start_would_meet_becomes_an_eviction(action: str, expected: str) -> None:
    assert repeated([60.0, 600.0], [], action).action == expected
    assert repeated([60.0, 600.0], [], action, nodes=("node-0", "node-1")).action == action
    assert repeated([60.0, 600.0], [], action, kind="disk_full").action == action


def test_memory_is_full_above_nine_tenths() -> None:
    def cause(rss: int, hardware: dict[str, str]) -> exits.Cause:
        dead = worker(0, state="signalled", code=signal.SIGKILL)
        beats = [
            heartbeat(0, 1, [worker(0, rss=rss - 100), worker(1, rss=100)], hardware=hardware),
            heartbeat(0, 2, [dead], hardware=hardware),
        ]
        return exits.find_cause(view({0: beats}).members[0], dead)

    assert cause(900, {"memory_bytes": "1000"}) is exits.KILLED
    assert cause(901, {"memory_bytes": "1000"}) is exits.OUT_OF_MEMORY
    for unknown in ({}, {"memory_bytes": "?"}, {"memory_bytes": "0"}):
        assert cause(901, unknown) is exits.KILLED


def test_a_disk_is_full_below_what_is_needed() -> None:
    member = NodeView(
        "node-0", (0,), heartbeat=heartbeat(0, 1, [], disks={"/a": MIN_FREE_BYTES, "/b": MIN_FREE_BYTES - 1})
    )
    assert exits.list_full_disks(member) == [f"the disk of /b has {MIN_FREE_BYTES - 1:,.0f} bytes left"]
    assert exits.list_full_disks(NodeView("node-0")) == []
    assert exits.judge_failed_start("n", (0, 1), "why", 0).kind == "process_exit"


def test_evidence_is_limited_to_eight_ranks_and_four_messages() -> None:
    beats = {
        n: [heartbeat(n, 1, [worker(n, state="exited", code=1, error=f"KeyError: '{n}'", step=n)])] for n in range(10)
    }
    (verdict,) = exits.judge_ended_processes(view(beats))
    assert verdict.ranks == tuple(range(10))
    assert [line.split(" (")[0] for line in verdict.evidence[:8]] == [f"rank {n}" for n in range(8)]
    assert verdict.evidence[8:12] == tuple(f"its last message: KeyError: '{n}'" for n in range(4))
    assert len(verdict.evidence) == 12


def test_ranks_that_lost_their_peers_are_listed_up_to_eight() -> None:
    lost = {"state": "exited", "code": 1, "exit": ExitRecord(ExitKind.LOST_PEER), "message": "m" * 201}
    beats = {n: [heartbeat(n, 1, [worker(n, **lost)])] for n in range(10)}
    (verdict,) = exits.judge_ended_processes(view(beats))
    assert (verdict.ranks, verdict.nodes) == (tuple(range(10)), ())
    assert verdict.evidence == tuple(f"rank {n} on node-{n} ended: {'m' * 200}" for n in range(8))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"state": "signalled", "code": signal.SIGBUS}, "ended with signal SIGBUS in step 10: "),
        ({"state": "signalled", "code": 99}, "ended with signal 99 in step 10: "),
        ({"state": "exited", "code": 9, "step": 0}, "ended with exit code 9 in step 0: "),
        ({"state": "exited", "code": 9, "phase": UNOBSERVED}, "ended with exit code 9: "),
    ],
)
def test_an_end_is_described(changes: dict[str, object], text: str) -> None:
    (verdict,) = exits.judge_ended_processes(view({0: [heartbeat(0, 1, [worker(0, **changes)])]}))
    assert verdict.evidence[0].startswith(f"rank 0 (process 100 on node-0) {text}")


def test_processes_of_an_earlier_attempt_do_not_count() -> None:
    dead = replace(heartbeat(0, 1, [worker(0, state="signalled", code=signal.SIGSEGV)]), attempt=0)
    assert exits.judge_ended_processes(view({0: [dead], 1: [heartbeat(1, 1, [worker(1)])]})) == []


def test_addresses_ranks_and_sizes_are_no_part_of_a_message() -> None:
    def message(text: str) -> tuple[str, ...]:
        how = {"state": "exited", "code": 1, "message": text}
        return exits.judge_ended_processes(view({0: [heartbeat(0, 1, [worker(0, **how)])]}))[0].messages

    first = message("rank 3 at 0x7ffe asked for 12 bytes, then 2.5 GiB, 3KB")
    assert first == message("rank 17 at 0xabc asked for 1 bytes, then 3 MiB, 4.25 KB")
    assert first != message("rank 3 at 0x7ffe asked for 12 rows, then 2.5 GiB, 3KB")


@pytest.mark.parametrize(
    ("line", "is_calm"),
    [
        ("time attempt 1 rank 1 INFO text", True),
        ("time attempt 1 rank 1 DEBUG", True),
        ("time attempt 1 rank 1", False),
        ("time attempt 1 rank 1 ERROR INFO", False),
        ("time trial 1 rank 1 INFO text", False),
        ("time attempt 1 node 1 INFO text", False),
    ],
)
def test_calm_lines_are_those_of_the_own_log(line: str, is_calm: bool) -> None:
    assert exits.is_info_line(line) == is_calm


def test_an_end_is_dated_by_the_heartbeat_that_told_of_it() -> None:
    """The age counts from the heartbeat's arrival; a message that is not in the history counts from the last one."""
    dead = worker(0, state="exited", code=1, ended_age=2.0)
    state = view({0: [heartbeat(0, 1, [worker(0)]), heartbeat(0, 2, [dead])]})
    member = state.members[0]
    assert exits._compute_end_time(member, dead) == state.time - 2.0
    member.last_seen = state.time + 3.0
    assert exits._compute_end_time(member, dead) == state.time - 2.0
    member.history.clear()
    assert exits._compute_end_time(member, dead) == state.time + 1.0
