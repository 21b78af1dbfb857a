"""The rules: each fault gets its verdict with evidence, and calm traces get none, whatever the clocks say."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import signal
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megascale.core.grid import Grid
from megascale.resilience import rules
from megascale.resilience.agent import node_health
from megascale.resilience.protocol.heartbeat import GpuReport, Heartbeat, LogMatch, NetworkTraffic, Worker
from megascale.resilience.rules import exits, metrics_rules, silence
from megascale.resilience.rules.verdicts import SEVERITY, Verdict
from megascale.resilience.rules.view import HISTORY, Metric, RankView, View

WINDOW = 5.0


def worker(rank: int, **changes) -> Worker:
    return Worker(**({"rank": rank, "pid": 100 + rank, "state": "running", "phase": "train", "step": 10} | changes))


def heartbeat(node: int, sequence: int, workers, **changes) -> Heartbeat:
    return Heartbeat("job", 1, f"node-{node}", sequence, changes.pop("sent_ns", 0), workers=tuple(workers), **changes)


def view(beats: dict[int, list[Heartbeat]], grid: Grid | None = None, **changes) -> View:
    """A running job whose node n sent `beats[n]`, one a second, the last just now."""
    members = []
    now = changes.pop("now", 1000.0)
    for node, sent in beats.items():
        times = [now - len(sent) + 1 + i for i in range(len(sent))]
        history = deque(zip(times, sent, strict=True), maxlen=HISTORY)
        ranks = tuple(w.rank for w in sent[-1].workers) if sent else (node,)
        last = sent[-1] if sent else None
        members.append(RankView(f"node-{node}", ranks, times[-1] if sent else now, last, history))
    standard = {"learned": {"train": 0.2, "save": 1.0, "evaluate": 1.0}, "phase": "running", "started": 0.0}
    grid = grid or Grid(data=max(1, sum(len(m.ranks) for m in members)), ranks_per_host=1)
    fixed = {"window": WINDOW, "interval": 1.0, "first_step": 60.0}
    return View("job", 1, now=now, members=members, grid=grid, **(standard | fixed | changes))


def one(found: list[Verdict], kind: str) -> Verdict:
    matching = [v for v in found if v.kind == kind]
    assert len(matching) == 1, [(v.kind, v.evidence) for v in found]
    assert matching[0].evidence
    return matching[0]


def ended(*workers: Worker, **changes) -> list[Verdict]:
    """Verdicts on two nodes of one rank each, `workers` in place of the calm ones."""
    state = {w.rank: w for w in (worker(0), worker(1))} | {w.rank: w for w in workers}
    return rules.judge(view({r: [heartbeat(r, 1, [w])] for r, w in state.items()}, **changes))


def trace(error: str) -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n{error}\n'


EXITS = [
    ({"state": "signalled", "code": signal.SIGSEGV}, "segmentation_fault", "recover"),
    ({"state": "signalled", "code": signal.SIGKILL}, "process_killed", "recover"),
    (
        {"state": "exited", "code": 1, "stderr_tail": trace("RuntimeError: CUDA error: an illegal memory access")},
        "cuda_error",
        "recover",
    ),
    (
        {"state": "exited", "code": 1, "stderr_tail": trace("torch.OutOfMemoryError: CUDA out of memory.")},
        "out_of_memory",
        "recover",
    ),
    (
        {"state": "exited", "code": 1, "message": "the disk of 'runs' is full: a checkpoint needs 9 bytes"},
        "disk_full",
        "recover",
    ),
    (
        {"state": "exited", "code": 1, "message": "the loss of step 7 is nan and training stopped"},
        "nonfinite_loss",
        "diagnose",
    ),
    ({"state": "exited", "code": 1, "stderr_tail": trace("KeyError: 'text'")}, "user_error", "recover"),
    ({"state": "exited", "code": 3, "message": "4 ranks cannot be laid out"}, "user_error", "stop"),
    (
        {"state": "exited", "code": 1, "stderr_tail": "RuntimeError: NCCL error: unhandled system error"},
        "network_error",
        "recover",
    ),
    ({"state": "exited", "code": 9, "stderr_tail": ""}, "process_exit", "recover"),
]


@pytest.mark.parametrize(("how", "kind", "action"), EXITS)
def test_an_exit_has_a_cause_a_culprit_and_its_words(how, kind, action):
    verdict = one(ended(worker(1, **how)), kind)
    assert (verdict.nodes, verdict.ranks, verdict.action) == (("node-1",), (1,), action)
    assert verdict.person == (action == "stop")
    assert "rank 1 (process 101 on node-1)" in verdict.evidence[0]


def test_a_rank_that_lost_a_peer_is_not_to_blame():
    victim = worker(0, state="exited", code=1, message="rank 0 lost contact with another rank in step 11")
    found = ended(victim, worker(1, state="signalled", code=signal.SIGSEGV))
    assert [(v.kind, v.ranks) for v in found] == [("segmentation_fault", (1,))]
    alone = one(ended(victim), "process_exit")
    assert alone.nodes == ()
    assert alone.action == "recover"


def test_ranks_that_ended_as_they_were_asked_to_are_not_to_blame_however_often():
    """As of a pod that is deleted twice: the driver hears of the ranks elsewhere first."""
    asked = worker(0, state="exited", code=130, error="Exit: 130")
    first = one(ended(asked), "process_exit")
    assert (first.nodes, first.ranks, first.action, first.person) == ((), (0,), "recover", False)
    assert "asked to" in first.evidence[0]
    again = one(
        ended(asked, worker(1, state="exited", code=130, error="Exit: 130"), past=[(1.0, first)]), "process_exit"
    )
    assert (again.nodes, again.action) == ((), "recover")
    found = ended(asked, worker(1, state="signalled", code=signal.SIGSEGV))
    assert [(v.kind, v.ranks) for v in found] == [("segmentation_fault", (1,))]


def test_a_rank_whose_agent_was_told_to_end_says_whose_machine_it_was():
    asked = worker(0, state="exited", code=130, error="Exit: 130")
    verdict = one(ended(asked, worker(1, state="exited", code=130, error="Exit: 130", by_agent=True)), "process_exit")
    assert (verdict.nodes, verdict.ranks, verdict.action) == (("node-1",), (1,), "recover")


def test_an_own_rule_may_say_the_old_word_and_no_unknown_one():
    assert Verdict("mine", action="respawn") == Verdict("mine", action="recover")
    with pytest.raises(ValueError, match="action='restart' of verdict mine is none of none, alert, recover"):
        Verdict("mine", action="restart")


def test_the_same_exception_on_several_ranks_is_the_users():
    error = {"state": "exited", "code": 1, "stderr_tail": trace("KeyError: 'text'")}
    verdict = one(ended(worker(0, **error), worker(1, **error)), "user_error")
    assert verdict.person
    assert verdict.action == "stop"
    assert any("KeyError: 'text'" in line for line in verdict.evidence)


def test_an_exception_that_comes_again_is_the_users_and_one_that_differs_is_not():
    def fails(text: str, past: list[Verdict]) -> Verdict:
        how = {"state": "exited", "code": 1, "stderr_tail": trace(text)}
        return one(ended(worker(1, **how), past=[(1.0, v) for v in past]), "user_error")

    first = fails("ValueError: bad row", [])
    assert (first.action, first.person) == ("recover", False)
    again = fails("ValueError: bad row", [first])
    assert (again.action, again.person) == ("stop", True)
    other = fails("OSError: [Errno 5] Input/output error", [first])
    assert (other.action, other.person) == ("recover", False)


def test_a_killed_process_on_a_full_node_ran_out_of_memory():
    hardware = node_health.hardware()  # as agents send it
    rss = int(0.95 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    dead = worker(1, state="signalled", code=signal.SIGKILL)
    beats = [heartbeat(1, 1, [worker(1, rss=rss)], hardware=hardware), heartbeat(1, 2, [dead], hardware=hardware)]
    assert one(rules.judge(view({0: [heartbeat(0, 1, [worker(0)])], 1: beats})), "out_of_memory").ranks == (1,)


def test_a_signal_is_not_explained_by_a_line_before_it():
    old = "RuntimeError: NCCL error: Connection reset, trying again\nNo space left on device\nstep 8\nstep 9\n" * 5
    for number, kind in ((signal.SIGKILL, "process_killed"), (signal.SIGSEGV, "segmentation_fault")):
        dead = worker(1, state="signalled", code=number, stderr_tail=old)
        assert one(ended(dead), kind).ranks == (1,)
    quiet = old + "step\n" * 20
    assert one(ended(worker(1, state="signalled", code=signal.SIGABRT, stderr_tail=quiet)), "segmentation_fault")
    says = quiet + "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: unspecified\n"
    assert one(
        ended(worker(1, state="signalled", code=signal.SIGABRT, stderr_tail=says + "frame\n" * 30)), "cuda_error"
    )
    # An exception that was caught is not what ended it either.
    tail = trace("OSError: Connection reset by peer") + "step 8\n" + trace("KeyError: 'text'")
    assert one(ended(worker(1, state="exited", code=1, stderr_tail=tail)), "user_error")


def test_a_calm_line_of_the_log_is_nobodys_last_words():
    calm = "2026-11-24T04:27:29.274Z attempt 1 rank 1 INFO megascale.train: process 12379 on vm, one of 2, begins"
    told = worker(1, state="signalled", code=signal.SIGKILL, stderr_tail=calm)
    assert exits.last_words(told) == ""
    warned = calm.replace("INFO", "WARNING")
    assert exits.last_words(worker(1, state="exited", code=1, stderr_tail=f"{warned}\n{calm}")) == warned


def test_who_failed_first_and_by_itself_names_the_cause():
    first = worker(0, state="exited", code=1, error="ModuleNotFoundError: No module named 'x'", ended_age=0.4)
    killed = worker(1, state="signalled", code=signal.SIGKILL, ended_age=0.2)
    assert [v.kind for v in ended(first, killed)] == ["user_error"]
    aborted = replace(killed, code=signal.SIGABRT)
    assert [v.kind for v in ended(first, aborted)] == ["user_error"]
    assert [v.kind for v in ended(first, replace(killed, by_agent=True, ended_age=0.9))] == ["user_error"]
    # Earlier than any other, a signal is the cause.
    found = ended(replace(first, error="RuntimeError: Connection closed by peer"), replace(killed, ended_age=0.9))
    assert [v.kind for v in found] == ["process_killed"]


def test_a_port_taken_is_tried_again_elsewhere_within_bounds():
    failed = worker(1, state="exited", code=2, errno=errno.EADDRINUSE, error="ConfigError: rank 0 cannot serve")
    past: list[tuple[float, Verdict]] = []
    for _ in range(exits.PORTS - 1):
        verdict = one(ended(failed, past=past), "port_taken")
        assert (verdict.action, verdict.person) == ("recover", False)
        past.append((1.0, verdict))
    last = one(ended(failed, past=past), "port_taken")
    assert (last.action, last.person) == ("stop", True)
    assert "ports in a row" in last.evidence[-1]
    between = [*past, (2.0, Verdict("segmentation_fault"))]
    assert one(ended(failed, past=between), "port_taken").action == "recover"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_known_by_its_number_or_its_room_and_by_no_line_of_a_log(number):
    failed = worker(1, state="exited", code=1, errno=number, error="OSError: something")
    assert one(ended(failed), "disk_full").action == "recover"
    assert exits.failed_start("n0", (0,), "why", number).kind == "disk_full"
    line = worker(1, state="exited", code=9, stderr_tail="copying: No space left on device, left out\n")
    assert one(ended(line), "process_exit")
    for how in ({"state": "exited", "code": 9}, {"state": "signalled", "code": signal.SIGBUS}):
        for left, kind in ((0.0, "disk_full"), (1e9, None)):
            beat = heartbeat(1, 1, [worker(1, **how)], disks={"/runs/a": left})
            found = rules.judge(view({0: [heartbeat(0, 1, [worker(0)])], 1: [beat]}))
            if kind is None:
                assert "disk_full" not in {v.kind for v in found}
            else:
                assert "the disk of /runs/a has 0 bytes left" in one(found, kind).evidence


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
    state.members[2].last_seen = state.now - WINDOW - 1
    verdict = one(rules.judge(state), "missed_heartbeat")
    assert verdict.nodes == ("node-2",)
    for member in state.members:
        member.last_seen = state.now - WINDOW - 1
    assert not rules.judge(state)
    for member in state.members:
        member.last_seen = state.now - 2 * WINDOW - 1
    assert {v.kind for v in rules.judge(state)} == {"missed_heartbeat"}


def silent(steps: list[int], seconds: float, phase: str = "train") -> list[Verdict]:
    """A node that was last heard so long ago, while another one was in these steps, once a second until now."""
    phases = ["train"] * (len(steps) - 1) + [phase]
    workers = [worker(0, step=step, phase=phase) for step, phase in zip(steps, phases, strict=True)]
    state = view({0: [heartbeat(0, i, [one]) for i, one in enumerate(workers)], 1: []})
    state.members[1].last_seen = state.now - seconds
    return rules.judge(state)


def test_a_node_that_lacks_memory_where_the_job_has_trained_is_met_by_another():
    """What one rank lacks it tells all, who end with its words."""
    words = "rank 1 on b7: staging memory for checkpoints could not be had ([Errno 12] 3 of 5 bytes are free)"
    of_it = worker(1, state="exited", code=3, errno=errno.ENOMEM, message=words)
    told = worker(0, state="exited", code=3, message=words)
    trained = {"learned": {silence.FIRST_STEP: 10.0}, "phase": "starting"}
    for others in ((), (told,)):
        verdict = one(ended(of_it, *others, **trained), "out_of_memory")
        assert (verdict.nodes, verdict.action, verdict.person) == (("node-1",), "recover", False)
        assert any("something else holds its memory" in line for line in verdict.evidence)
    again = [(900.0, verdict)]
    assert one(ended(of_it, told, past=again, **trained), "out_of_memory").action == "evict"
    # Elsewhere it is the first time; alone there is no other node to say whose it is.
    there = [(900.0, dataclasses.replace(verdict, nodes=("node-7",)))]
    assert one(ended(of_it, past=there, **trained), "out_of_memory").action == "recover"
    own = replace(of_it, rank=0, message=words.replace("rank 1", "rank 0"))
    past = [(900.0, dataclasses.replace(verdict, nodes=("node-0",)))]
    alone = view({0: [heartbeat(0, 1, [own])]}, past=past)
    alone.learned |= trained["learned"]
    assert one(rules.judge(alone), "out_of_memory").action == "stop"
    both = one(ended(of_it, replace(of_it, rank=0), **trained), "out_of_memory")
    assert (both.nodes, both.action) == (("node-0", "node-1"), "recover")
    # Who speaks first is not to blame, nor is anybody before the first step of all: then a person is told.
    assert one(ended(told, **trained), "process_exit").nodes == ()
    first = ended(of_it, told)
    assert {(v.action, v.person) for v in first} == {("stop", True)}
    assert any("settings or data are wrong" in line for v in first for line in v.evidence)


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
def test_a_node_that_ends_is_missed_within_the_window_however_fast_the_job_was(pace, phase, ahead, before, others):
    """It ends at 40 s; the others come `ahead` steps further, and no step ends any more."""
    end, now = 40.0, 40.0 + WINDOW + 0.01

    def step(at: float) -> int:
        return 100 + int(at / pace) if at < end else 100 + int(end / pace) + ahead

    members = [RankView("node-0", (0,), end - before, heartbeat(0, 1, [worker(0)]))]
    for node in range(1, 1 + others):
        times = [phase + i for i in range(int(now - phase) + 1)]
        sent = [heartbeat(node, i, [worker(node, step=step(at))]) for i, at in enumerate(times)]
        members.append(
            RankView(f"node-{node}", (node,), times[-1], sent[-1], deque(zip(times, sent, strict=True), HISTORY))
        )
    state = view({}, Grid(data=1 + others, ranks_per_host=1), now=now)
    state.members = members
    assert one(rules.judge(state), "missed_heartbeat").nodes == ("node-0",)


def test_a_slow_start_names_who_did_not_come():
    state = view({0: [heartbeat(0, 1, [worker(0)])], 1: [heartbeat(1, 1, [worker(1, phase="load")])]}, phase="starting")
    state.started = state.now - 59
    assert not rules.judge(state)
    state.started = state.now - 61
    verdict = one(rules.judge(state), "start_too_slow")
    assert verdict.ranks == (1,)
    assert "resilience.first_step" in verdict.evidence[0]


def standing(seconds: float, phase: str = "train", job: str = "running", **changes) -> list[Verdict]:
    beats = {n: [heartbeat(n, 1, [worker(n, phase=phase, status_age=seconds + n)])] for n in range(2)}
    return rules.judge(view(beats, phase=job, **changes))


def test_nothing_moving_is_a_hang_only_past_what_the_phase_may_take():
    limit = silence.FLOOR
    assert not standing(limit - 0.1)
    verdict = one(standing(limit + 0.1), "hang")
    assert verdict.action == "recover"
    assert "no rank has moved" in verdict.evidence[0]
    # Learned: a step that took 8 s before may take 40 now.
    assert not standing(limit + 5, learned={"train": 8.0})
    assert one(standing(41, learned={"train": 8.0}), "hang")
    # Evaluation and checkpoint are long, and the first ones are not known at all.
    assert not standing(50, "save")
    assert not standing(59, "evaluate", learned={"train": 0.2})
    assert not standing(59, "start")
    beats = {0: [heartbeat(0, 1, [worker(0, status_age=20.0)])], 1: [heartbeat(1, 1, [worker(1, status_age=0.5)])]}
    assert not rules.judge(view(beats))
    assert not rules.judge(view({0: [heartbeat(0, 1, [worker(0, status_age=30.0)])]}, phase="starting", started=990.0))


def test_a_stopped_process_is_given_no_time_for_its_phase():
    """Its first checkpoint may take resilience.first_step, unless its process does nothing at all."""

    def saving(seconds: float, other: str = "train", **changes) -> list[Verdict]:
        workers = worker(0, phase=other, status_age=seconds), worker(1, phase="save", status_age=seconds, **changes)
        return rules.judge(view({n: [heartbeat(n, 1, [w])] for n, w in enumerate(workers)}, learned={"train": 0.2}))

    assert not saving(59.0)
    assert not saving(silence.FLOOR - 0.1, stopped=True)
    verdict = one(saving(silence.FLOOR + 0.1, stopped=True), "hang")
    assert "a process is stopped" in verdict.evidence[0]
    # Nor for what its peers are at: they may stand in their save for it.
    assert one(saving(silence.FLOOR + 0.1, "save", stopped=True), "hang")


def test_a_first_step_that_hangs_is_known_once_others_were_seen():
    """Of every start of a job that hangs at one step, not after resilience.first_step each time."""
    start = {"job": "starting", "started": 940.0, "first_step": 600.0}
    limit, learned = silence.LONG_FLOOR, {silence.FIRST_STEP: 2.0}
    assert not standing(limit - 0.1, learned=learned, **start)
    verdict = one(standing(limit + 0.1, learned=learned, **start), "hang")
    assert "ranks stand in step" in verdict.evidence[1]
    # It may be slow, and before the first of all nothing is known; nor is loading a step.
    assert not standing(limit + 5, learned={silence.FIRST_STEP: 20.0}, **start)
    assert one(standing(101, learned={silence.FIRST_STEP: 20.0}, **start), "hang")
    assert not standing(limit + 5, learned={"train": 2.0}, **start)
    assert not standing(limit + 5, "load", learned=learned, **start)


def test_log_lines_and_devices():
    line = LogMatch(0, "CUDA error", "CUDA error: launch failure")
    broken = LogMatch(1, "Xid", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.")
    found = rules.judge(
        view({n: [heartbeat(n, 1, [worker(n)], logs=(match,))] for n, match in enumerate((line, broken))})
    )
    assert [v.action for v in found if v.kind == "log_keyword"] == ["alert", "diagnose"]

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


def with_traffic(rates: list[float], phase: str = "train", still: int = 0, interface: str = "eth0") -> list[Verdict]:
    """still: of the last heartbeats, how many are of one step."""
    last = len(rates) - 1 - still
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
    for still in (10, 7):  # the last step may be told of after it fell quiet
        assert one(with_traffic(busy + [0.0] * 10, still=still), "traffic_stopped").action == "recover"
    # Quiet while steps are done: what it carried was not training.
    assert one(with_traffic(busy + [0.0] * 10), "traffic_dropped").action == "alert"
    assert one(with_traffic(busy + [1e8] * 10), "traffic_dropped").action == "alert"
    assert not with_traffic(busy + [0.0] * 10, phase="save", still=10)
    assert not with_traffic(busy + [0.0] * 5, still=5)
    assert not with_traffic([0.0] * 40)
    # Nodes on one machine: loopback falls quiet when others that use it end.
    assert not with_traffic(busy + [0.0] * 10, still=10, interface="lo")
    # Quiet stretches of six heartbeats belong to this run: ten are no stop yet.
    waves = ([5e8] * 8 + [0.0] * 6) * 4
    assert not [v for v in with_traffic(waves + [0.0] * 10) if v.kind == "traffic_stopped"]
    assert not [v for v in with_traffic(waves + [0.0] * 10, still=10) if v.kind == "traffic_stopped"]


def measured(losses: list[float], norms: list[float] | None = None, seconds: list[float] | None = None):
    norms, seconds = norms or [1.0] * len(losses), seconds or [0.1] * len(losses)
    rows = [Metric(i + 1, *row) for i, row in enumerate(zip(losses, norms, seconds, strict=True))]
    return rules.judge(view({0: [heartbeat(0, 1, [worker(0)])]}, metrics=rows))


def test_losses_norms_and_seconds():
    calm = [4.0 - 0.01 * i for i in range(80)]
    assert not measured(calm)
    assert one(measured([*calm, 9.0]), "loss_spike").action == "alert"
    assert one(measured(calm, [1.0] * 79 + [50.0]), "loss_spike").action == "alert"
    assert one(measured(calm, [1.0] * 79 + [math.nan]), "nonfinite_gradient").action == "alert"
    assert one(measured(calm, [1.0] * 77 + [math.nan] * 3), "nonfinite_gradient").action == "diagnose"
    # Gone again when we look: steps are shorter than the time between two looks.
    assert one(measured(calm, [1.0] * 40 + [math.nan] + [1.0] * 39), "nonfinite_gradient").action == "alert"
    assert one(measured(calm, None, [0.1] * 60 + [0.2] * 20), "throughput_drop").action == "alert"
    assert not measured(calm, None, [0.1] * 70 + [0.2] * 10)


def computing(*nodes: list[float], data: int | None = None, still: int = 0) -> list[Verdict]:
    """still: of the last heartbeats, how many show ranks that stand."""
    ages = [0.1] * (len(nodes[0]) - still) + [0.5 + i for i in range(still)]
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
    # Where peers vary as much themselves, nobody stands out.
    assert not computing([0.1, 0.2] * 15, [0.1, 0.18] * 15, [0.15] * 30, [0.1, 0.19] * 15)
    # A run that stands (rank 0 is stopped) repeats its last step's times: no evidence against the slower of them.
    assert [v.kind for v in computing(usual, usual[:-18] + [0.15] * 18, still=18)] == ["hang"]
    assert [v.kind for v in computing(usual, usual[:-18] + [0.15] * 18)] == ["slow_node"]
    # A passing slowness is none.
    assert not computing(usual, usual, usual[:-5] + [0.3] * 5, usual)


@pytest.mark.parametrize("slow_ranks", [(), (17,), (3, 64)])
def test_thousands_of_ranks_are_judged_as_few_are(slow_ranks, monkeypatch):
    """What is usual is then worked out once for all; the verdicts are the same."""
    usual = [0.1, 0.11, 0.1, 0.09, 0.1] * 6
    series = [[s * 1.4 for s in usual] if rank in slow_ranks else usual for rank in range(metrics_rules.MANY + 6)]
    many = computing(*series)
    monkeypatch.setattr(metrics_rules, "MANY", 10**9)
    few = computing(*series)
    assert [(v.kind, v.nodes, v.ranks) for v in many] == [(v.kind, v.nodes, v.ranks) for v in few]
    assert {rank for v in many for rank in v.ranks} == set(slow_ranks)


def test_a_still_view_keeps_its_history_while_heartbeats_come():
    moving = view({0: [heartbeat(0, i, [worker(0)]) for i in range(1, HISTORY + 1)]})
    still = moving.still()
    moving.members[0].history.append((1001.0, heartbeat(0, HISTORY + 1, [worker(0)])))
    assert [h.sequence for _, h in still.members[0].history] == list(range(1, HISTORY + 1))
    assert still.members[0].history.maxlen == HISTORY


def summed(*by_rank: str, step: int = 8) -> list[Verdict]:
    grid = Grid(data=len(by_rank), ranks_per_host=1)
    beats = {r: [heartbeat(r, 1, [worker(r)], checksums={f"{step}:{r}": s})] for r, s in enumerate(by_rank)}
    return rules.judge(view(beats, grid))


def test_copies_that_differ_are_found_and_the_minority_is_named():
    assert not summed("aa", "aa", "aa")
    verdict = one(summed("aa", "ab", "aa"), "checksum_mismatch")
    assert (verdict.nodes, verdict.ranks, verdict.action) == (("node-1",), (1,), "evict")
    both = one(summed("aa", "ab"), "checksum_mismatch")
    assert (both.nodes, both.action) == (("node-0", "node-1"), "diagnose")


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
    """Whatever the senders' clocks and wherever the driver's clock begins, the verdicts are the same."""
    bad = state.members[-1]
    bad.last_seen = state.now - WINDOW - 1.5
    before = rules.judge(state)
    shift = skew / 1e3
    state.now += shift
    state.started += shift
    for member in state.members:
        member.last_seen += shift
        member.history = deque(
            ((t + shift, replace(h, sent_ns=h.sent_ns + abs(skew))) for t, h in member.history),
            HISTORY,
        )
        if member.heartbeat:
            member.heartbeat = member.history[-1][1]
    assert [(v.kind, v.nodes, v.action) for v in rules.judge(state)] == [(v.kind, v.nodes, v.action) for v in before]


def test_a_killed_rank_is_worse_than_an_alert():
    found = ended(worker(1, state="signalled", code=signal.SIGSEGV))
    assert max(SEVERITY[v.action] for v in found) >= SEVERITY["recover"]
