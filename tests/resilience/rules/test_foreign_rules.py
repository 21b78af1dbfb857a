"""Rules for another trainer's ranks: smaller slow-downs, shorter limits of a hang, pauses that are not hangs."""

from __future__ import annotations

import pytest

from megascale.core.calls import CallRecord, GroupCounts, PendingWait
from megascale.observe.hang.scene import RankEvidence, Scene
from megascale.resilience.driver.diagnosis.diagnosis import refine_hang
from megascale.resilience.rules.exits import get_last_message
from megascale.resilience.rules.metrics_rules import judge_losses, judge_slow_nodes, judge_throughput
from megascale.resilience.rules.silence import FOREIGN_GRACE_PERIOD, judge_hang
from megascale.resilience.rules.view import Metric, Verdict, View
from tests.resilience.rules.views import heartbeat, view, worker

HANG = Verdict("hang", (), (), "recover", ("no rank has moved for 11 s",))


def computing(*seconds: float, **changes) -> View:
    beats = {
        n: [heartbeat(n, i, [worker(n, step=i, status_age=0.1)], step_seconds={n: value}) for i in range(30)]
        for n, value in enumerate(seconds)
    }
    return view(beats, **changes)


@pytest.mark.parametrize(("policy", "action"), [("alert", "alert"), ("evict", "evict")])
def test_a_rank_that_is_slower_by_a_fifth_is_named_without_spans(policy, action):
    (verdict,) = judge_slow_nodes(computing(0.3, 0.36, 0.3, is_foreign=True, slow_action=policy))
    assert (verdict.nodes, verdict.ranks, verdict.action) == (("node-1",), (1,), action)
    assert "1.20 x" in verdict.evidence[0]
    assert judge_slow_nodes(computing(0.3, 0.36, 0.3)) == []  # spans show it in this package's trainer
    assert judge_slow_nodes(computing(0.3, 0.33, 0.3, is_foreign=True)) == []


@pytest.mark.parametrize("seconds", [(0.3, 0.36), (0.3, 0.3, 0.31, 0.3, 0.45)])
def test_a_slow_rank_of_a_single_node_is_an_alert(seconds):
    def judge(is_foreign: bool) -> list[Verdict]:
        times = dict(enumerate(seconds))
        workers = [worker(rank, step=1, status_age=0.1) for rank in times]
        beats = {0: [heartbeat(0, i, workers, step_seconds=times) for i in range(30)]}
        return judge_slow_nodes(view(beats, is_foreign=is_foreign, slow_action="evict"))

    (verdict,) = judge(is_foreign=True)
    assert (verdict.nodes, verdict.ranks, verdict.action) == (("node-0",), (len(seconds) - 1,), "alert")
    assert judge(is_foreign=False) == []  # spans show it in this package's trainer


@pytest.mark.parametrize(("usual", "limit"), [(0.2, 10.0), (4.9, 12.25), (10.0, 25.0)])
def test_a_hang_is_seen_in_time(usual, limit):
    """Within 15 s if steps take under 5 s, and within three times the usual step otherwise."""

    def judge(age: float) -> list[Verdict]:
        beats = {n: [heartbeat(n, 1, [worker(n, status_age=age)])] for n in range(2)}
        durations = {"train": usual}
        return judge_hang(view(beats, usual_durations=durations, is_foreign=True, grace_period=FOREIGN_GRACE_PERIOD))

    assert judge(limit - 0.1) == []
    assert [verdict.kind for verdict in judge(limit + 0.1)] == ["hang"]


def test_steps_without_a_printed_loss_are_no_spike_and_show_a_lower_throughput():
    printed = [Metric(step, 2.0 if step % 10 == 0 else 0.0, 0.0, 0.1) for step in range(1, 381)]
    assert judge_losses(computing(0.1, metrics=printed)) == []
    slower = printed + [Metric(step, 0.0, 0.0, 0.2) for step in range(381, 401)]
    assert [verdict.kind for verdict in judge_throughput(computing(0.1, metrics=slower))] == ["throughput_drop"]


def examined(rank: int, started: int, waits: bool = False) -> RankEvidence:
    """A rank that has started so many calls, and waits in the last one or in none."""
    groups = {"world": GroupCounts(2, started, started - waits)}
    waiting = PendingWait("world", started, 1) if waits else None
    record = CallRecord(rank, 0, 2, waiting=waiting, groups=groups)
    return RankEvidence(rank, "running", record=record, answered=True)


def test_a_pause_of_ranks_that_move_or_wait_for_none_is_an_alert():
    beats = {n: [heartbeat(n, 1, [worker(n, status_age=11.0)])] for n in range(2)}
    state = view(beats, is_foreign=True, grace_period=FOREIGN_GRACE_PERIOD)
    scene = Scene({0: examined(0, 8, waits=True), 1: examined(1, 7)}, 2)
    assert refine_hang(HANG, state, scene, None).ranks == (1,)
    moving = Scene(scene.ranks, 2, moving=frozenset({1}))
    saving = refine_hang(HANG, state, moving, None)
    assert (saving.action, "rank 1 made progress" in saving.evidence[0]) == ("alert", True)
    evaluating = Scene({0: examined(0, 7), 1: examined(1, 7)}, 2)
    assert refine_hang(HANG, state, evaluating, None).action == "alert"
    late = {n: [heartbeat(n, 1, [worker(n, status_age=61.0)])] for n in range(2)}
    assert refine_hang(HANG, view(late, is_foreign=True), evaluating, None).action == "recover"
    assert refine_hang(HANG, view(beats), moving, None).action == "recover"  # this package's trainer has a status


def test_an_exception_counts_although_a_progress_bar_is_shown_after_it():
    """Torch puts the rank before the lines of a traceback."""
    lines = [
        "[rank0]: Traceback (most recent call last):",
        "[rank0]: KeyError: 'text'",
        "Epoch 0:  45%|#| 18/40 [00:09<00:11]",
    ]
    failed = worker(0, state="exited", code=1, stderr_tail="\n".join(lines))
    assert get_last_message(failed) == "[rank0]: KeyError: 'text'"
