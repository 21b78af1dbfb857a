"""The hang verdict: real processes that hang in four ways, and what it makes of records it is given."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.config import from_tree
from megascale.core import calls
from megascale.core.calls import READER, Call, CallLog, CallRecord, GroupCounts, PendingWait, read_calls
from megascale.core.layout import Layout, lay_out
from megascale.core.status import StatusFile, read_status
from megascale.errors import DataError
from megascale.observe.hang.evidence import collect_evidence, read_process_state, signal_main_thread
from megascale.observe.hang.flight import FlightDump, read_flight
from megascale.observe.hang.scene import RankEvidence, Scene
from megascale.observe.hang.verdict import Hang, examine_run, explain_hang
from megascale.parallel.chunk_graphs import EAGER_STEPS, ChunkGraphs
from megascale.parallel.collectives import Axis
from megascale.parallel.runtime import Runtime
from megascale.torch_private import dump_flight_recorder
from megascale.train.telemetry import add_attempt
from tests.chaos.local import hang as hang_bench
from tests.chaos.local.hang import CASES, LAYOUTS, run_case
from tests.forked import context, popen
from tests.rendezvous.conftest import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process states are read from /proc")


@pytest.mark.parametrize("case", [case for case in CASES if case != "missing send"])
def test_a_real_hang_is_named(case, tmp_path, monkeypatch):
    monkeypatch.setattr(hang_bench, "subprocess", SimpleNamespace(Popen=popen))
    outcome = run_case(case, tmp_path, random.Random(f"{case} {os.getpid()}"))
    assert outcome.right, outcome


@pytest.mark.parametrize("rank", [0, 3], ids=["sends forward", "sends backward"])
def test_a_missing_send_of_each_stage_is_named(rank, tmp_path, monkeypatch):
    monkeypatch.setattr(hang_bench, "subprocess", SimpleNamespace(Popen=popen))
    rng = random.Random(f"{rank} {os.getpid()}")
    outcome = run_case("missing send", tmp_path, rng, LAYOUTS[0], rank=rank)
    assert outcome.right, outcome


def test_a_hang_of_replayed_microbatches_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(hang_bench, "subprocess", SimpleNamespace(Popen=popen))
    rng = random.Random(f"replayed {os.getpid()}")
    # The step after the one that captures, whose calls are not all made again.
    outcome = run_case("mismatched collective", tmp_path, rng, LAYOUTS[1], graphs=True, step=EAGER_STEPS + 2)
    assert outcome.right, outcome


# the record of calls -------------------------------------------------------------------------------------------------


def test_the_record_says_what_was_started_waited_for_and_finished(tmp_path):
    log = CallLog(tmp_path, 3, 8)
    log.register_group("tensor/2", 2)
    log.register_group("forward/3-5", 2)
    log.begin_step(7)
    log.set_action(b"forward", 1, 4, 12)
    first = log.begin_call("tensor/2", "all_gather", 640)
    second = log.begin_call("forward/3-5", "send", 64)
    log.begin_wait(first)
    log.end_call(first)
    log.begin_wait(second)
    record = read_calls(log.path)
    assert record is not None
    assert (record.rank, record.world, record.step, record.action, record.index) == (3, 8, 7, "forward", 12)
    assert record.groups == {"tensor/2": GroupCounts(2, 1, 1), "forward/3-5": GroupCounts(2, 1, 0)}
    assert record.waiting == PendingWait("forward/3-5", 1, record.waiting.start_ns)
    assert record.calls == (
        Call("tensor/2", 1, "all_gather", 640, 7, 1, 4),
        Call("forward/3-5", 1, "send", 64, 7, 1, 4),
    )
    assert log.begin_call("never named", "send", 1) == -1
    log.end_call(second)
    log.begin_data_wait(4711)
    record = read_calls(log.path)
    assert record.waiting.group == READER
    assert record.waiting.pid == 4711
    log.end_data_wait()
    assert read_calls(log.path).waiting is None
    log.close()


def test_the_record_forgets_old_calls_and_knows_it(tmp_path):
    log = CallLog(tmp_path, 0, 2)
    log.register_group("world", 2)
    for number in range(20_000):
        log.end_call(log.begin_call("world", "all_reduce", number))
    record = read_calls(log.path)
    assert [c.sequence for c in record.calls] == list(range(20_000 - len(record.calls) + 1, 20_001))
    assert not record.is_complete
    assert record.find_call("world", 19_999).bytes == 19_998
    assert record.find_call("world", 1) is None


def test_the_status_carries_the_place_of_the_record(tmp_path):
    status, log = StatusFile(tmp_path, 0), CallLog(tmp_path, 0, 1)
    status.update("train", 4)
    log.begin_step(4)
    log.set_action(b"backward", 0, 2, 5)
    result = read_status(status.path)
    assert (result.phase, result.step, result.action, result.microbatch) == ("train", 4, "backward", 2)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=4000))
def test_a_damaged_record_is_none(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("calls") / "rank-0.calls"
    file.write_bytes(data)
    assert read_calls(file) is None


def test_a_call_costs_little():
    """The record is always on: a thousand calls in well under what one small collective takes."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        log = CallLog(Path(folder), 0, 2)
        log.register_group("world", 2)

        def thousand() -> float:
            started = time.perf_counter()
            for _ in range(1000):
                call = log.begin_call("world", "all_reduce", 64)
                log.begin_wait(call)
                log.end_call(call)
            return time.perf_counter() - started

        assert min(thousand() for _ in range(5)) < 0.05


# verdicts on given records ---------------------------------------------------------------------------------------


def layout(data: int = 2, pipeline: int = 1) -> Layout:
    tree = {
        "parallel": {"pipeline": pipeline, "data": data},
        "model": {"vocab_size": 64},
        "train": {"global_batch": 32},
    }
    return lay_out(from_tree(tree), data * pipeline)


def record(rank: int, built: list[Call], waits: tuple[str, int] | None, world: int = 2, **changes) -> CallRecord:
    names = {c.group for c in built} | ({waits[0]} if waits else set()) | changes.pop("also", set())
    groups = {}
    for name in names:
        started = max((c.sequence for c in built if c.group == name), default=0)
        groups[name] = GroupCounts(2, started, started - (1 if waits and waits[0] == name else 0))
    waiting = PendingWait(waits[0], waits[1], 10**9) if waits else None
    step = max((c.step for c in built), default=1)
    return CallRecord(rank, 100 + rank, world, step=step, waiting=waiting, groups=groups, calls=tuple(built), **changes)


def judge(*records: CallRecord | None, where: Layout | None = None, **details) -> Hang:
    ranks = {r.rank: RankEvidence(r.rank, record=r, **details.get(f"rank{r.rank}", {})) for r in records if r}
    return explain_hang(Scene(ranks, len(records), now_ns=5 * 10**9), where)


def step_of(step: int, ops: str, group: str = "data_reduce/0", size: int = 64, start: int = 0) -> list[Call]:
    names = {"r": "reduce_scatter", "g": "all_gather", "a": "all_reduce"}
    return [Call(group, start + i + 1, names[op], size, step) for i, op in enumerate(ops)]


def steps(*each: str, **details) -> list[Call]:
    built: list[Call] = []
    for number, ops in enumerate(each, 1):
        built += step_of(number, ops, start=len(built), **details)
    return built


def test_a_rank_in_no_collective_is_named_when_others_wait():
    waits = record(0, steps("grr", "gr"), ("data_reduce/0", 5))
    busy = record(1, steps("grr", "g"), None)
    hang = judge(waits, busy)
    assert (hang.kind, hang.ranks, hang.group, hang.op, hang.sequence) == (
        "busy",
        (1,),
        "data_reduce/0",
        "reduce_scatter",
        5,
    )
    assert hang.waits[0].on == (1,)


def test_a_silent_rank_is_the_suspect():
    waits = record(0, steps("grr", "gr"), ("data_reduce/0", 5))
    second = record(1, steps("grr", "gr"), ("data_reduce/0", 5))
    hang = judge(waits, second, rank1={"answered": False}, rank0={"answered": True})
    assert (hang.kind, hang.ranks) == ("silent", (1,))
    alone = judge(waits, None)
    assert (alone.kind, alone.ranks) == ("silent", (1,))


def test_a_rank_that_departed_outweighs_one_that_cannot_answer():
    """Held up inside a driver's call by what another did not send, a rank may be unable to answer."""
    departs = record(0, steps("grr", "grr", "gaa"), ("data_reduce/0", 9))
    stored = record(1, steps("grr", "grr", "grr"), ("data_reduce/0", 8))
    hang = judge(departs, stored, rank1={"answered": False, "stack": ("state D, in the kernel's wait",)})
    assert (hang.kind, hang.ranks) == ("mismatched collective", (0,))
    text = "\n".join(hang.evidence)
    assert "rank 1 did not answer when asked for a stack" in text
    assert "state D" in text


def test_a_call_that_all_reached_accuses_the_network_and_no_rank():
    pair = [record(r, steps("grr", "gr"), ("data_reduce/0", 5)) for r in range(2)]
    hang = judge(*pair)
    assert (hang.kind, hang.ranks, hang.sequence) == ("network", (), 5)


def test_of_two_that_differ_the_one_that_left_its_habit_is_named():
    usual = ["grra"] * 4
    right = record(0, steps(*usual, "gr"), ("data_reduce/0", 18))
    wrong = record(1, steps(*usual, "gg"), ("data_reduce/0", 18))
    hang = judge(right, wrong)
    assert (hang.kind, hang.ranks, hang.op) == ("mismatched collective", (1,), "reduce_scatter")
    # Without a step to compare with neither is believed.
    hang = judge(record(0, steps("gr"), ("data_reduce/0", 2)), record(1, steps("gg"), ("data_reduce/0", 2)))
    assert (hang.kind, hang.ranks) == ("mismatched collective", (0, 1))


CAPTURED = {"c": "agree_on_capture", "f": "replayed_forward", "b": "replayed_backward", "x": "fused_gather"}


def replayed(rank: int, *each: str) -> CallRecord:
    """Calls step by step as a GPU's exchange makes them, of which a rank waits in the last; "w": on the world."""
    built: list[Call] = []
    for number, ops in enumerate(each, 1):
        for op in ops:
            group = "world" if op == "w" else "tensor/0"
            sequence = 1 + sum(c.group == group for c in built)
            built.append(Call(group, sequence, CAPTURED.get(op, "all_reduce"), 32, number))
    return record(rank, built, (built[-1].group, built[-1].sequence), also={"world"})


@pytest.mark.parametrize("departs", [3, 4, 5])
def test_steps_that_capture_accuse_nobody(departs):
    """Eager steps, one that captures as it replays, then replays alone: only a call that one rank makes is told."""
    usual = ["xxxxxxw", "xxxxxxw", "cfcfcbcbw", "ffbbw", "ffbbw"][:departs]
    wrong = usual[:-1] + [usual[-1].replace("w", "a")]
    hang = judge(replayed(0, *usual), replayed(1, *wrong))
    assert (hang.kind, hang.ranks, hang.group) == ("mismatched collective", (1,), "world")
    # Both are in the same call: the network, regardless of the step before.
    assert judge(*(replayed(rank, *usual) for rank in range(2))).kind == "network"


def on_device(record: CallRecord, pending: Call) -> dict[str, FlightDump]:
    """A flight record of NCCL calls, of which one has not finished: it knows neither steps nor replays."""
    counts = {pending.group: GroupCounts(2, pending.sequence, pending.sequence - 1)}
    waiting = PendingWait(pending.group, pending.sequence, 10**9)
    return {"flight": FlightDump(True, CallRecord(record.rank, 0, 2, waiting=waiting, groups=counts, calls=(pending,)))}


def test_on_devices_the_host_is_ahead_of_what_hangs():
    """Both hosts have launched the step after the one in which rank 1's GPU makes a call that rank 0's does not."""
    usual = ["grra"] * 4
    calm = record(0, steps(*usual, "grra", "grra"), None)
    wrong = record(1, steps(*usual, "grgra", "grra"), None)
    first, second = Call("data_reduce/0", 40, "all_gather", 64), Call("data_reduce/0", 40, "reduce_scatter", 64)
    hang = judge(calm, wrong, rank0=on_device(calm, first), rank1=on_device(wrong, second))
    assert (hang.kind, hang.ranks, hang.group) == ("mismatched collective", (1,), "data_reduce/0")
    assert "step 5" in hang.evidence[0]


def test_on_devices_a_rank_that_waits_for_samples_is_named():
    reads = replace(record(0, steps("g"), None), waiting=PendingWait(READER, 0, 10**9, 77))
    second = record(1, steps("gr"), ("data_reduce/0", 2))
    done, due = Call("data_reduce/0", 1, "all_gather", 64), Call("data_reduce/0", 2, "reduce_scatter", 64)
    idle = on_device(reads, done)["flight"]
    idle = replace(idle, record=replace(idle.record, waiting=None, groups={"data_reduce/0": GroupCounts(2, 1, 1)}))
    hang = judge(reads, second, rank0={"flight": idle}, rank1=on_device(second, due))
    assert (hang.kind, hang.ranks) == ("reader", (0,))


@pytest.mark.parametrize("flight", [True, False])
def test_on_devices_a_stopped_rank_is_missed_in_what_another_launched(flight):
    """No host waits, and a stopped process gives no flight record."""
    ahead = record(0, steps("grra", "grra") + [Call("world", 1, "all_reduce", 24, 2)], None)
    stopped = record(1, steps("grra", "gr"), None, also={"world"})
    more = {"rank0": {"process": "running"} | (on_device(ahead, ahead.calls[6]) if flight else {})}
    hang = judge(ahead, stopped, **more, rank1={"process": "stopped"})
    assert (hang.kind, hang.ranks, hang.group, hang.op, hang.sequence) == (
        "stopped",
        (1,),
        "data_reduce/0",
        "reduce_scatter",
        7,
    )
    assert any("rank 1 did not join it" in line for line in hang.evidence)


def test_of_several_stopped_ranks_those_that_did_not_come_are_named():
    ahead = record(0, steps("gra"), None, 3)
    received, did_not = record(1, steps("gr"), None, 3), record(2, steps("g"), None, 3)
    hang = judge(
        ahead,
        received,
        did_not,
        rank1={"process": "stopped"},
        rank2={"process": "stopped"},
        rank0={"process": "running"},
    )
    assert (hang.ranks, hang.op, hang.sequence) == ((1, 2), "reduce_scatter", 2)
    assert "rank 0 launched reduce_scatter (call 2 of data_reduce/0), rank 2 did not join it" in hang.evidence


def test_what_an_exchange_captures_is_no_call(tmp_path):
    """A capture launches nothing: the step after it would lack these calls, and be told for it."""
    log = CallLog(tmp_path, 0, 2)
    log.register_group("tensor/0", 2)
    runtime = Runtime(calls=log)
    exchange = SimpleNamespace(capture=lambda: nullcontext("captured"))
    axis = Axis(size=2, name="tensor/0", exchange=exchange, runtime=runtime)
    graphs, report = SimpleNamespace(_tensor_axis=axis, _runtime=runtime), []
    for fails in (False, True):
        with suppress(RuntimeError), ChunkGraphs._capture_exchange(graphs, report):
            axis.transfer("fused_gather", 32).done()
            if fails:
                raise RuntimeError("capture failed")
    axis.transfer("replayed_forward", 32).done()
    assert [c.op for c in read_calls(log.path).calls] == ["replayed_forward"]
    assert report == ["captured", "captured"]


def test_of_many_the_minority_is_named_also_in_the_first_step():
    built = [steps("gr") if rank != 2 else steps("ga") for rank in range(4)]
    hang = judge(*(record(r, c, ("data_reduce/0", 2), 4) for r, c in enumerate(built)), where=layout(4))
    assert (hang.kind, hang.ranks) == ("mismatched collective", (2,))


def test_a_call_too_many_in_the_second_step_is_named():
    """The first step makes the same calls in another order, so only their number tells."""
    single = step_of(1, "rg")
    repeated = step_of(2, "gr", start=2)
    extra = single + repeated + [Call("data_reduce/0", 5, "all_reduce", 28, 2)]
    world = [Call("world", 1, "all_reduce", 24, 1), Call("world", 2, "all_reduce", 24, 2)]
    calm = record(0, single + [world[0]] + repeated + [world[1]], ("world", 2))
    wrong = record(1, single + [world[0]] + extra[2:], ("data_reduce/0", 5))
    hang = judge(calm, wrong)
    assert (hang.kind, hang.ranks, hang.group, hang.sequence) == ("mismatched collective", (1,), "world", 2)


def test_a_circle_that_nothing_explains_names_all_in_it():
    first = record(0, [Call("world", 1, "all_reduce", 24, 1)], ("world", 1), also={"tensor/0"})
    second = record(1, [Call("tensor/0", 1, "all_reduce", 24, 1)], ("tensor/0", 1), also={"world"})
    hang = judge(first, second)
    assert (hang.kind, hang.ranks) == ("mismatched collective", (0, 1))


def test_another_size_is_a_mismatch_too():
    usual = ["grra"] * 3
    wrong = steps(*usual, "g") + [Call("data_reduce/0", 14, "reduce_scatter", 128, 4)]
    hang = judge(record(0, steps(*usual, "gr"), ("data_reduce/0", 14)), record(1, wrong, ("data_reduce/0", 14)))
    assert (hang.kind, hang.ranks) == ("mismatched collective", (1,))


def test_a_reader_outweighs_those_that_wait_for_it():
    reads = replace(record(0, steps("g"), None), waiting=PendingWait(READER, 0, 10**9, 77))
    hang = judge(reads, record(1, steps("gr"), ("data_reduce/0", 2)), rank0={"reader": "gone"})
    assert (hang.kind, hang.ranks, hang.group) == ("reader", (0,), "data_reduce/0")
    assert any("process 77, is gone" in line for line in hang.evidence)


def test_processes_outweigh_records():
    pair = [record(r, steps("gr"), ("data_reduce/0", 2)) for r in range(2)]
    dead = judge(*pair, rank1={"process": "gone"}, rank0={"process": "running"})
    assert (dead.kind, dead.ranks, dead.group) == ("dead", (1,), "data_reduce/0")
    stopped = judge(*pair, rank0={"process": "stopped"}, rank1={"process": "running"})
    assert (stopped.kind, stopped.ranks) == ("stopped", (0,))


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 6), st.integers(0, 5), st.lists(st.sampled_from("gra"), min_size=2, max_size=6), st.data())
def test_whoever_remains_behind_is_named(world, guilty, ops, data):
    """Ranks of one group that all make the same calls; one stops somewhere, the others wait at the next call."""
    guilty %= world
    usual = "".join(ops)
    stop = data.draw(st.integers(0, len(ops) - 1))
    records = []
    for rank in range(world):
        done = usual[: stop + (rank != guilty)]
        built = steps(usual, usual, usual, done)
        records.append(
            record(rank, built, None if rank == guilty else ("data_reduce/0", 3 * len(ops) + stop + 1), world)
        )
    hang = judge(*records, where=layout(world) if world in (2, 4) else None)
    assert (hang.kind, hang.ranks, hang.sequence) == ("busy", (guilty,), 3 * len(ops) + stop + 1)


# evidence ------------------------------------------------------------------------------------------------------------


def test_a_process_number_that_was_reused_is_gone():
    me = os.getpid()
    assert read_process_state(me) == "running"
    assert read_process_state(me, "/no/such/file/is/mapped") == "gone"
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert read_process_state(child.pid) == "gone"


@pytest.mark.parametrize("pause", [0.005, 0.5])  # also where it has answered long before it goes on
def test_a_calm_run_is_told_to_be_moving(tmp_path, pause):
    """A process that goes on calling while it is looked at: nothing hangs, and it survives being asked."""
    code = f"""
import faulthandler, signal, time
from pathlib import Path
from megascale.core.calls import CallLog
faulthandler.register(signal.SIGUSR2, file=open({str(tmp_path / "rank-0.stack")!r}, "w"))
log = CallLog(Path({str(tmp_path)!r}), 0, 1)
log.register_group("world", 1)
while True:
    log.end_call(log.begin_call("world", "all_reduce", 4))
    time.sleep({pause})
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for_events(tmp_path, child, 4)
        scene, hang = examine_run(tmp_path, watch_seconds=30.0)
        assert hang.kind == "none"
        assert scene.ranks[0].answered
        assert scene.ranks[0].stack
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    after = CliRunner().invoke(app, ["hang", str(tmp_path), "--json"])
    assert json.loads(after.stdout)["by_rank"][0]["process"] == "gone"


def wait_for_events(tmp_path: Path, child: subprocess.Popen[bytes], events: int) -> None:
    """Wait until the child's record of calls has so many; fail at once if the child ends before, after 30 s else."""
    deadline = time.monotonic() + 30
    while True:
        code = child.poll()
        calls = read_calls(tmp_path / "rank-0.calls", history=False)
        if calls is not None and calls.events >= events:
            return
        assert code is None, f"the child ended with code {code}; its error output is above"
        state = "none" if calls is None else calls.events
        assert time.monotonic() < deadline, f"after 30 s the child has recorded {state} of {events} events"
        time.sleep(0.02)


def test_a_child_that_ends_is_not_waited_for(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    began = time.monotonic()
    with pytest.raises(AssertionError, match="ended with code 3"):
        wait_for_events(tmp_path, child, 1)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("deaf", [False, True], ids=["main thread", "nobody"])
def test_the_main_thread_answers_or_else_the_kernel(tmp_path, monkeypatch, deaf):
    """A thread of a library's would take the signal too, and has nothing to show."""
    code = f"""
import ctypes, faulthandler, signal, time
from pathlib import Path
from megascale.core.calls import CallLog
faulthandler.register(signal.SIGUSR2, file=open({str(tmp_path / "rank-0.stack")!r}, "w"), all_threads=False)
libc = ctypes.CDLL(None)
thread = ctypes.c_ulong()
assert libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.pause, ctypes.c_void_p), None) == 0
if {deaf}:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
log = CallLog(Path({str(tmp_path)!r}), 0, 1)
log.register_group("world", 1)
log.begin_call("world", "all_reduce", 4)
def stands_here():
    time.sleep(1000)
stands_here()
"""
    monkeypatch.setattr("megascale.observe.hang.evidence._ANSWER_SECONDS", 0.3 if deaf else 30.0)
    child = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    try:
        wait_for_events(tmp_path, child, 1)
        scene, _ = examine_run(tmp_path, watch_seconds=0.0)
        assert scene.ranks[0].answered is not deaf
        output = scene.ranks[0].stack[0]
        assert output.startswith("state S") if deaf else output.startswith("stands_here")
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_rank_survives_being_asked_while_its_threads_work(tmp_path):
    """Stacks of threads that run cannot be read from outside them: who tried crashed after some ten times."""
    code = f"""
import threading
from pathlib import Path
from megascale.parallel.runtime import Runtime
from megascale.train.telemetry import Telemetry
folder = Path({str(tmp_path)!r})
telemetry = Telemetry(folder, folder, 0, 1, None, Runtime())
def deep(depth):
    return depth and deep(depth - 1)
def work():
    while True:  # threads that begin and end, as those of a pool
        short = [threading.Thread(target=deep, args=(5,)) for _ in range(4)]
        for thread in short:
            thread.start()
        for thread in short:
            thread.join()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
telemetry.begin_step(1)
telemetry._calls.begin_call("world", "all_reduce", 4)
work()
"""
    child = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    try:
        wait_for_events(tmp_path, child, 1)
        for _ in range(600):
            signal_main_thread(child.pid, int(signal.SIGUSR2))
            time.sleep(0.0005)  # so that each is taken: one that waits swallows the next
        scene, _ = examine_run(tmp_path, watch_seconds=0.0)
        assert scene.ranks[0].answered
        assert any(frame.startswith("work (<string>:") for frame in scene.ranks[0].stack)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(DataError, match=r"rank-N\.calls"):
        collect_evidence(tmp_path)


ENTRY = {
    "process_group": ["3", "data_reduce"], "p2p_seq_id": 0, "is_p2p": False, "output_sizes": [[4]],
    "output_dtypes": ["Float"], "input_sizes": [[8]], "input_dtypes": ["Float"],
}  # fmt: skip


def dump(count: int, open_: bool) -> dict:
    entries = [
        ENTRY | {"collective_seq_id": n + 1, "profiling_name": "nccl:_reduce_scatter_base", "time_created_ns": n}
        | {"retired": not (open_ and n + 1 == count), "state": "completed" if n + 1 < count or not open_ else "started"}
        for n in range(count)
    ]  # fmt: skip
    return {"entries": entries, "pg_config": {"3": {"name": "3", "desc": "data_reduce", "ranks": "[0, 1]"}}}


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_torchs_own_dumps_are_explained(tmp_path, form):
    """Only flight-recorder dumps of another program: rank 1 never came to the fifth reduce-scatter."""
    for rank, (count, open_) in enumerate([(5, True), (4, False)]):
        if form == "json":
            (tmp_path / f"rank-{rank}.json").write_text(json.dumps(dump(count, open_)))
        else:
            (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump(count, open_)))
    _, hang = examine_run(tmp_path, ask=False, watch_seconds=0)
    assert (hang.kind, hang.ranks, hang.op, hang.sequence) == ("busy", (1,), "reduce_scatter", 5)


@pytest.mark.parametrize("has_default_calls", [False, True])
def test_aborted_calls_of_earlier_attempts_are_no_evidence(has_default_calls: bool, tmp_path: Path) -> None:
    """A process that stays keeps their records, which never complete. The last of them is one of the default group."""
    entries = []
    for attempt, count, state in ((9, 30, "started"), (10, 4, "completed")):
        call = ENTRY | {"profiling_name": "nccl:all_reduce", "state": state, "time_created_ns": attempt}
        group = [f"data_reduce/0@{attempt}", "data_reduce"]
        in_group = call | {"process_group": group, "pg_id": 2 * attempt + 1}
        entries += [in_group | {"collective_seq_id": number} for number in range(1, count + 1)]
        if attempt == 9 or has_default_calls:
            default = {"process_group": ["0", "default_pg"], "pg_id": 2 * attempt, "collective_seq_id": count}
            entries.append(call | default)
    names = {f"data_reduce/0@{attempt}": ranks for attempt, ranks in ((10, "[0, 1]"), (9, "[0, 1, 2, 3]"))}
    groups = {name: {"name": name, "desc": "data_reduce", "ranks": ranks} for name, ranks in names.items()}
    (tmp_path / "rank-0.json").write_text(json.dumps({"entries": entries, "pg_config": groups}))
    record = read_flight(tmp_path / "rank-0.json").record
    assert record.waiting is None
    assert record.groups["data_reduce/0"] == GroupCounts(2, 4, 4)
    assert ("world" in record.groups) == has_default_calls
    assert len(record.calls) == 4 + has_default_calls


@pytest.mark.parametrize("is_prepared", [False, True])
def test_groups_that_are_prepared_for_the_next_attempt_are_not_the_present_ones(is_prepared: bool, tmp_path: Path):
    """In an attempt with prepared groups, the calls of its default group have the attempt in their name."""
    attempts = {4: 4, 5: 3, 6: 4}  # number of ranks by attempt
    entries, groups = [], {}
    for attempt, world in attempts.items():
        call = ENTRY | {"profiling_name": "nccl:all_reduce", "state": "completed"}
        ranks = json.dumps(list(range(world)))
        default_name = f"world@{attempt}"
        if attempt == 4 or (attempt == 5 and not is_prepared):
            default_name = "0"
        description = "default_pg" if default_name == "0" else "undefined"
        names = [(default_name, description), (f"data_reduce/0@{attempt}", "data_reduce")]
        for number, (name, text) in enumerate(names):
            group = {"process_group": [name, text], "pg_id": 2 * attempt + number}
            entries += [call | group | {"collective_seq_id": sequence} for sequence in range(1, attempt + 1)]
            groups[name] = {"name": name, "desc": text, "ranks": ranks}
    dump = json.dumps({"entries": entries, "pg_config": groups})
    (tmp_path / "rank-0.json").write_text(add_attempt(dump, 5))
    record = read_flight(tmp_path / "rank-0.json").record
    assert record.groups == {"world": GroupCounts(3, 5, 5), "data_reduce/0": GroupCounts(3, 5, 5)}
    (tmp_path / "rank-0.json").write_text(add_attempt(dump, 6))
    record = read_flight(tmp_path / "rank-0.json").record
    assert record.groups == {"world": GroupCounts(4, 6, 6), "data_reduce/0": GroupCounts(4, 6, 6)}


@pytest.mark.parametrize("dump", ["{}", ' {"entries": []}'])
def test_a_dump_keeps_its_contents_with_the_attempt(dump: str) -> None:
    assert json.loads(add_attempt(dump, 3)) == json.loads(dump) | {"megascale_attempt": 3}


def make_default_groups(file: Path) -> None:
    """Make the default group twice in this process, and write torch's records of the calls."""
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", TORCH_FR_BUFFER_SIZE="100")
    for count in (3, 1):
        os.environ["MASTER_PORT"] = str(free_port())
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)
        for _ in range(count):
            torch.distributed.all_reduce(torch.ones(1))
        torch.distributed.destroy_process_group()
    file.write_text(dump_flight_recorder())


def test_torch_numbers_the_default_groups_of_a_process(tmp_path: Path) -> None:
    """The reader tells calls of earlier attempts by this number."""
    process = context.Process(target=make_default_groups, args=(tmp_path / "rank-0.json",))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert len(json.loads((tmp_path / "rank-0.json").read_text())["entries"]) == 4
    assert len(read_flight(tmp_path / "rank-0.json").record.calls) == 1


def test_a_recorder_that_saw_no_call_hides_nothing(tmp_path):
    """NCCL's, in a build with CUDA whose ranks talk by gloo; nor one of another version, beside a rank's own record."""
    ranks = [CallLog(tmp_path, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.register_group("world", 2)
    ranks[0].begin_wait(ranks[0].begin_call("world", "all_reduce", 4))
    (tmp_path / "rank-0.json").write_text('{"nccl_comm_state":{},"pg_config":{},"pg_status":{}}')
    (tmp_path / "rank-1.json").write_text('{"new": 1}')
    assert not read_flight(tmp_path / "rank-0.json").record.calls
    with pytest.raises(DataError, match="entries"):
        read_flight(tmp_path / "rank-1.json")
    _, hang = examine_run(tmp_path, ask=False, watch_seconds=0)
    assert (hang.kind, hang.ranks, hang.op) == ("busy", (1,), "all_reduce")
    for rank in ranks:
        rank.close()


def test_a_dump_that_would_run_code_is_refused(tmp_path):
    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(pickle.dumps({"entries": os.system}))
    with pytest.raises(DataError, match="plain data"):
        read_flight(file)


@pytest.mark.parametrize("data", [b'{"a":' * 100_000, pickle.dumps(b"x" * 300)[:-5], b"\x80\x04\x8e" + b"\xff" * 8])
def test_a_dump_that_lies_or_is_cut_off_is_refused(data, tmp_path):
    (tmp_path / "nccl_trace_rank_0").write_bytes(data)
    with pytest.raises(DataError, match="not a flight-recorder dump"):
        read_flight(tmp_path / "nccl_trace_rank_0")


def test_nothing_is_recorded_without_a_trainer():
    assert type(Runtime().calls) is calls.NullCallLog
