"""`benchmarks exposed`: time by kind out of a trace, what shows of it, and the table that compares with alone."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.training import exposed
from benchmarks.training.exposed import COMPUTE, IDLE, KINDS, BusyTime
from megascale.errors import ConfigError, TrainingError


def event(name: str, start: float, duration: float, purpose: str = "", category: str = "kernel") -> dict:
    """Milliseconds in, a trace's microseconds out."""
    args = {"Process Group Description": purpose} if purpose else {}
    return {"cat": category, "name": name, "ts": 1e6 + 1e3 * start, "dur": 1e3 * duration, "args": args}


def test_events_are_sorted_into_kinds():
    trace = [
        event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 4, 2, "data_reduce"),
        event("nvjet_tst_256x128", 0, 3),
        event("ncclDevKernel_SendRecv", 1, 1, "forward"),
        event("ncclDevKernel_AllGather_RING_LL", 2, 1, "data_gather"),
        event("ncclDevKernel_AllReduce_Sum_f64_RING_LL", 7, 1, "default_pg"),
        event("Memcpy PtoP (Device -> Device)", 1, 1, category="gpu_memcpy"),
        event("Memset (Device)", 6, 1, category="gpu_memset"),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1},
        {"ph": "M", "name": "process_name"},
    ]
    result = exposed.busy(trace)
    assert [b.kind for b in result] == [
        COMPUTE, "pipeline", "tensor", "data gather", "data reduce", COMPUTE, "other",
    ]  # fmt: skip
    assert result[0] == BusyTime(0.0, pytest.approx(3e-3), COMPUTE)
    assert [b.group for b in result if b.group] == ["forward", "data_gather", "data_reduce", "default_pg"]
    assert (result[-1].start, result[-1].stop) == (pytest.approx(7e-3), pytest.approx(8e-3))
    assert [b.kind for b in exposed.busy(trace, copy_kind="data reduce")].count("data reduce") == 2


@pytest.mark.parametrize(
    ("exchanges", "expected"),
    [
        ([], "tensor"),
        (["tensor"], "tensor"),
        (["gather"], "data gather"),
        (["reduction"], "data reduce"),
        (["gather", "reduction"], "copies between GPUs serve data gather, data reduce, and"),
        (["tensor", "context"], "copies between GPUs serve tensor, context or expert, and"),
    ],
)
def test_copies_belong_to_the_only_exchange(exchanges: list[str], expected: str):
    """With ZeRO-3 gathers and reductions are copies too, and the events of a trace do not say which."""
    exchanges_by_kind = {name: object() for name in exchanges}
    engine = SimpleNamespace(
        tensor_axis=SimpleNamespace(exchange=exchanges_by_kind.get("tensor")),
        gather_exchange=exchanges_by_kind.get("gather"),
        reduction_exchange=exchanges_by_kind.get("reduction"),
        list_exchanges=lambda: list(exchanges_by_kind.values()),
    )
    if " " in expected and not expected.startswith("data"):
        with pytest.raises(ConfigError, match=expected):
            exposed.find_copy_kind(engine)
    else:
        assert exposed.find_copy_kind(engine) == expected


def test_a_stream_is_known_by_the_group_that_a_trace_with_the_hosts_side_names():
    def on(stream: int, name: str, purpose: str = "") -> dict:
        built = event(name, 0, 1, purpose)
        built["args"]["stream"] = stream
        return built

    gather = "ncclDevKernel_AllGather_RING_LL"
    full = [on(7, gather, "tensor"), on(20, gather, "data_gather"), on(21, "ncclDevKernel_SendRecv", "forward/0-1/0")]
    serves = exposed.groups_of(full + [on(7, "nvjet"), {"cat": "cpu_op", "name": "nccl:all_gather", "ts": 0, "dur": 1}])
    assert serves == {7: "tensor", 20: "data_gather", 21: "forward/0-1/0"}
    bare = [on(20, gather), on(7, gather), on(21, "ncclDevKernel_SendRecv"), on(22, gather), on(7, "nvjet")]
    assert [b.kind for b in exposed.busy(bare, serves)] == ["data gather", "tensor", "pipeline", "other", COMPUTE]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30)), max_size=12), st.sampled_from([1, 5, 20]))
def test_shares_of_a_timelines_bins_are_those_of_every_moment(parts, bins):
    runs = [(float(a), float(min(100, a + n))) for a, n in parts]
    result = exposed.share_of_time(runs, 0.0, 100.0, bins)
    on = [any(a <= t < b for a, b in runs) for t in range(100)]
    width = 100 // bins
    assert result == pytest.approx([sum(on[i * width : (i + 1) * width]) / width for i in range(bins)])


def test_what_runs_without_compute_is_exposed_and_shared_by_those_that_wait():
    stretches = [
        BusyTime(0.0, 4.0, COMPUTE),
        BusyTime(3.0, 6.0, "tensor"),  # one second hidden, two shown
        BusyTime(5.0, 7.0, "pipeline"),  # one of them together
        BusyTime(9.0, 10.0, COMPUTE),
    ]
    result = exposed.shares(stretches)
    assert result[COMPUTE]["busy"] == 5.0
    assert result["tensor"] == {"busy": 3.0, "exposed": 1.5}
    assert result["pipeline"] == {"busy": 2.0, "exposed": 1.5}
    assert result[IDLE]["busy"] == 2.0
    assert result["data gather"] == {"busy": 0.0, "exposed": 0.0}


spans = st.tuples(st.integers(0, 50), st.integers(1, 20), st.sampled_from([COMPUTE] + list(KINDS)))


@given(st.lists(spans, min_size=1, max_size=30))
def test_shares_add_up_to_the_whole_step(parts):
    stretches = [BusyTime(float(start), float(start + length), kind) for start, length, kind in parts]
    result = exposed.shares(stretches)
    full = max(b.stop for b in stretches) - min(b.start for b in stretches)
    shown = sum(result[kind]["exposed"] for kind in KINDS)
    assert result[COMPUTE]["busy"] + shown + result[IDLE]["busy"] == pytest.approx(full)
    for kind in KINDS:
        assert result[kind]["exposed"] <= result[kind]["busy"] + 1e-9


def test_the_meeting_before_the_step_does_not_count():
    stretches = [BusyTime(0.0, 5.0, "other"), BusyTime(5.0, 6.0, "data gather"), BusyTime(6.0, 7.0, "other")]
    assert exposed.after_meeting(stretches) == [BusyTime(0.0, 1.0, "data gather"), BusyTime(1.0, 2.0, "other")]
    assert exposed.after_meeting([]) == []


def test_a_step_is_what_lies_between_two_norms():
    """LAMB's step on the last stage: the tied embedding, the norm, then the trust ratios, whose end does not count."""
    peers = ["embedding/0", "world", "stage/1"]
    single = [
        BusyTime(0.0, 4.0, COMPUTE), BusyTime(4.0, 5.0, "other", "embedding/0"),
        BusyTime(5.0, 5.5, "other" + exposed.WAITS, "0"),
        BusyTime(5.5, 6.0, "other", "0"), BusyTime(6.0, 7.0, "other", "stage/1"),
        BusyTime(6.5, 8.0, "data gather", "gather"),
    ]  # fmt: skip
    two = [exposed.replace(b, start=b.start + 8.0, stop=b.stop + 8.0) for b in single]
    step = exposed.between_norms(single + two, peers)
    assert max(b.stop for b in step) == 8.0
    times = exposed.shares(step)
    assert times[COMPUTE]["busy"] == 4.0
    assert times["data gather"]["busy"] == times["data gather"]["exposed"] + 0.25 == 1.5  # shared with the ratios
    assert (times["other"]["busy"], times["other waits"]["busy"]) == (2.5, 0.5)
    assert sum(t["exposed"] for t in times.values()) + times[COMPUTE]["busy"] + times[IDLE]["busy"] == 8.0
    running = BusyTime(5.0, 9.0, "data reduce")  # over the edge: only its part
    assert exposed.between_norms([running] + single + two[:-1], peers)[0].start == 0.0
    for wrong in (single + two[:-2], single):
        with pytest.raises(TrainingError, match="two steps"):
            exposed.between_norms(wrong, peers)
    with pytest.raises(TrainingError, match="two steps"):
        exposed.between_norms(single + two, ["embedding/0", "stage/1", "stage/1"])


ms = st.integers(0, 200)


@given(st.lists(st.tuples(ms, ms, st.integers(1, 50)), min_size=1, max_size=8), st.integers(-5000, 5000))
def test_a_transfer_waits_until_its_last_member_comes_whatever_the_clocks_say(transfers, skew):
    """Transfers one after another: when each of two members comes, and how long its bytes move."""
    ours = []
    theirs = []
    meetings = []
    at = 0.0
    for a, b, length in transfers:
        met = at + max(a, b)
        ours.append(BusyTime(at + a, met + length, "pipeline", "forward/0-1"))
        theirs.append(BusyTime(at + b + skew, met + length + skew, "pipeline", "forward/0-1"))
        meetings.append(met)
        at = met + length
    cut = exposed.with_waits([ours, theirs])
    for trace, shift, full in ((cut[0], 0, ours), (cut[1], skew, theirs)):
        moving = [b for b in trace if b.kind == "pipeline"]
        assert [b.start - shift for b in moving] == pytest.approx(meetings)
        assert [b.stop for b in moving] == pytest.approx([b.stop for b in full])
        assert sum(b.stop - b.start for b in trace) == pytest.approx(sum(b.stop - b.start for b in full))


def test_collectives_that_cannot_be_matched_are_left_whole():
    single = [
        BusyTime(0.0, 4.0, "data gather", "data_gather/0"),
        BusyTime(5.0, 6.0, "other"),
        BusyTime(6.0, 9.0, COMPUTE),
    ]
    two = [BusyTime(3.0, 4.0, "data gather", "data_gather/0"), BusyTime(8.0, 9.0, "data gather", "data_gather/0")]
    assert exposed.with_waits([single, two]) == [single, two]


def record() -> dict:
    def rank(stage: int, scale: float) -> dict:
        stretches = [
            (0.0, 8.0, COMPUTE), (6.0, 7.0 + scale, "pipeline" + exposed.WAITS), (7.0 + scale, 8.5 + scale, "pipeline"),
            (1.0, 2.0, "tensor"),
        ]  # fmt: skip
        times = exposed.shares([BusyTime(*stretch) for stretch in stretches])
        return {"stage": stage, "times": times, "alone": {"pipeline": 2.0, "tensor": 2.0}, "stretches": stretches}

    details = {"preset": "gpt-13b", "processes": 2, "device": "H200", "date": "2026-11-21", "active": {}}
    return details | {"ranks": [rank(0, 1.0), rank(1, 2.0)]}


def test_waiting_for_another_ranks_compute_is_no_transfer_time():
    rows = {row["kind"]: row for row in exposed.table(record())}
    assert set(rows) == {"tensor", "pipeline"}
    assert rows["pipeline"]["waits"] == pytest.approx(0.5)  # none on stage 0, one second on stage 1
    assert rows["pipeline"]["exposed"] == pytest.approx(1.5)
    assert rows["pipeline"]["share"] == pytest.approx(0.75)
    assert rows["tensor"]["share"] == 0.0


def test_the_stage_that_computes_most_bounds_the_step():
    report = record()
    report["ranks"][1]["times"][COMPUTE]["busy"] += 1.0
    result = exposed.bounding(report)
    exposed_there = report["ranks"][1]["times"]["pipeline"]["exposed"]
    assert result == {"stage": 1, "exposed": exposed_there, "share": exposed_there / 2.0}
    assert exposed.bounding(report | {"ranks": report["ranks"][:1]}) is None


def test_the_timeline_has_a_panel_a_stage(tmp_path):
    exposed.draw(record(), tmp_path / "deep" / "timeline.png")
    assert (tmp_path / "deep" / "timeline.png").read_bytes()[:4] == b"\x89PNG"


def test_without_gpus_there_is_nothing_to_trace(benchmarks):
    result = benchmarks("exposed", "gpt-13b", env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 2
    assert "GPU" in result.stderr


def test_calls_are_counted_by_communicator_operation_and_size():
    counting = exposed.Counting()
    for size in (8, 8, 16):
        assert counting.begin_call("data_reduce/0", "reduce_scatter", size) == -1
    assert json.loads(json.dumps([list(key) + [n] for key, n in sorted(counting.calls.items())])) == [
        ["data_reduce/0", "reduce_scatter", 8, 2],
        ["data_reduce/0", "reduce_scatter", 16, 1],
    ]
    counting.begin_call("world", "all_reduce", 24)
    counting.begin_call("tensor/1", "all_gather", 24)
    assert counting.other_calls == ["world"]
