"""Timers: what a step's actions take and wait for, told from each other, in roll-ups that add up to the spans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megascale.core.schedule import ActionKind
from megascale.core.spans import SPAN_OF_ACTION, SpanAxis, SpanKind
from megascale.observe.clock_bounds import MAX_DRIFT, ClockBounds
from megascale.observe.rank import timers as timers_module
from megascale.observe.rank.timers import Timers, roll_up
from megascale.observe.store.frames import ROLLUP, ROLLUPS, SPAN, SPANS, FrameHead, TornFrame, pack_frame, scan_frames
from tests.exact.cases import case
from tests.exact.training import RankReport, make_engine, run_step


class TimingSink:
    """Keeps what it is told."""

    def __init__(self, expected: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.expected = expected
        self.keeping: list[int] = []
        self.timings: list[tuple[int, int, np.ndarray[Any, Any]]] = []

    def write(self, kind: int, step: int, records: np.ndarray[Any, Any], error_ns: int) -> None:
        self.timings.append((kind, step, records))

    def is_requested(self, step: int) -> bool:
        return step in self.expected

    def mark_sampled(self, step: int) -> None:
        self.keeping.append(step)

    def of(self, kind: int, step: int) -> np.ndarray[Any, Any]:
        result = [records for k, s, records in self.timings if (k, s) == (kind, step)]
        return np.concatenate(result) if result else np.zeros(0, ROLLUP if kind == ROLLUPS else SPAN)


class Clock:
    """Says what time it is."""

    def __init__(self) -> None:
        self.ns = 1000

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timers_module.time, "perf_counter_ns", clock)
    monkeypatch.setattr(Timers, "mark", staticmethod(clock))
    return clock


def rows_of(records: np.ndarray[Any, Any], kind: SpanKind, axis: SpanAxis = SpanAxis.NONE) -> np.ndarray[Any, Any]:
    return records[(records["kind"] == kind) & (records["axis"] == axis)]


def test_every_action_has_a_span_of_its_own():
    assert [SPAN_OF_ACTION[kind].label for kind in ActionKind] == [kind.label for kind in ActionKind]
    assert len(set(SPAN_OF_ACTION.values())) == len(ActionKind)


def test_waits_are_told_from_own_work(clock):
    retained = TimingSink({3})
    timers = Timers(retained)
    timers.begin_step(3)
    timers.begin_action(SpanKind.FORWARD, 0, 5)
    clock.ns += 100
    launched = timers.begin_transfer(SpanAxis.TENSOR, 4096)
    clock.ns += 10
    start = timers.mark()
    clock.ns += 30
    timers.record_wait(start, SpanKind.WAIT, SpanAxis.TENSOR, 7)
    timers.end_transfer(launched, SpanAxis.TENSOR, 4096, 7)
    clock.ns += 60
    timers.end_action()
    start = timers.mark()
    clock.ns += 5
    timers.record_wait(start, SpanKind.DATA_WAIT)  # outside of every action
    timers.begin_action(SpanKind.CHECKPOINT_STALL)
    clock.ns += 50
    timers.end_action()
    timers.end_step()
    rollups = retained.of(ROLLUPS, 3)
    (forward,) = rows_of(rollups, SpanKind.FORWARD)
    assert (forward["count"], forward["total_ns"], forward["waited_ns"]) == (1, 200, 30)
    (step,) = rows_of(rollups, SpanKind.STEP)
    assert (step["total_ns"], step["waited_ns"]) == (255, 35)
    (transfer,) = rows_of(rollups, SpanKind.TRANSFER, SpanAxis.TENSOR)
    assert (transfer["bytes"], transfer["total_ns"]) == (4096, 40)
    assert timers.last_totals is not None
    assert timers.last_totals.seconds == pytest.approx(255e-9)
    # 255 less 30 and 5 of waiting and 50 for the checkpoint.
    assert timers.last_totals.own_seconds == pytest.approx(170e-9)
    assert timers.last_totals.waits == pytest.approx({"tensor": 30e-9, "samples": 5e-9})
    (wait,) = rows_of(retained.of(SPANS, 3), SpanKind.WAIT, SpanAxis.TENSOR)
    assert (wait["microbatch"], wait["waited_on"], wait["end_ns"] - wait["start_ns"]) == (5, 7, 30)


@pytest.mark.parametrize(("work", "frames_told"), [(0, 2), (400_000_000, 5)])
def test_a_long_step_is_told_in_parts_that_add_up(clock, work, frames_told):
    retained = TimingSink()
    timers = Timers(retained)
    timers.begin_step(1)
    for _ in range(4):
        timers.begin_action(SpanKind.FORWARD, 0, 0)
        start = timers.mark()
        clock.ns += 200_000_000
        timers.record_wait(start, SpanKind.WAIT, SpanAxis.DATA)
        clock.ns += work
        timers.end_action()
    timers.end_step()
    assert len(retained.timings) == frames_told
    rows = rows_of(retained.of(ROLLUPS, 1), SpanKind.FORWARD)
    assert rows["count"].sum() == 4
    assert rows["total_ns"].sum() == 4 * (200_000_000 + work)
    assert rows["waited_ns"].sum() == 800_000_000
    assert rows_of(retained.of(ROLLUPS, 1), SpanKind.STEP)["waited_ns"].sum() == 800_000_000
    assert timers.last_totals is not None
    assert timers.last_totals.own_seconds == pytest.approx(4 * work / 1e9)


def test_spans_are_kept_for_sampled_and_for_asked_steps_only(clock):
    retained = TimingSink({5})
    timers = Timers(retained, every=3)
    for step in range(1, 7):
        timers.begin_step(step)
        timers.begin_action(SpanKind.OPTIMIZER)
        clock.ns += 1
        timers.end_action()
        timers.end_step()
    assert [step for kind, step, _ in retained.timings if kind == SPANS] == [3, 5, 6]
    assert [step for kind, step, _ in retained.timings if kind == ROLLUPS] == [1, 2, 3, 4, 5, 6]


def test_rollups_are_the_sums_of_any_spans():
    """Against sums made one by one."""
    rng = np.random.default_rng(3)
    rows = np.zeros((500, 10), np.int64)
    rows[:, 0] = rng.integers(0, len(SpanKind), 500)
    rows[:, 1] = rng.integers(0, len(SpanAxis), 500)
    rows[:, 5] = rng.integers(0, 1 << 40, 500)
    rows[:, 6] = np.where(rng.random(500) < 0.2, -1, rng.integers(0, 2, 500))
    rows[:, 7] = rng.integers(10**18, 10**18 + 10**9, 500)
    rows[:, 8] = rows[:, 7] + rng.integers(0, 10**9, 500)
    rows[:, 9] = rng.integers(0, 10**9, 500)
    result = {(int(r["kind"]), int(r["axis"])): r for r in roll_up([tuple(row) for row in rows.tolist()])}
    for kind in SpanKind:
        for axis in SpanAxis:
            local = [row for row in rows.tolist() if row[0] == kind and row[1] == axis]
            row = result.get((kind, axis))
            if not local:
                assert row is None or row["count"] == 0
                continue
            assert row["count"] == len(local)
            assert row["total_ns"] == sum(r[8] - r[7] for r in local)
            assert row["longest_ns"] == max(r[8] - r[7] for r in local)
            assert row["bytes"] == sum(r[5] for r in local)
            assert (row["first_ns"], row["last_ns"]) == (min(r[7] for r in local), max(r[8] for r in local))
    waits = [r for r in rows.tolist() if r[0] in (SpanKind.WAIT, SpanKind.DATA_WAIT)]
    for parent in (0, 1):
        assert result[parent, 0]["waited_ns"] == sum(r[8] - r[7] for r in waits if r[6] == parent)
    assert result[SpanKind.STEP, 0]["waited_ns"] == sum(r[8] - r[7] for r in waits)


def test_an_engine_times_every_action_of_its_schedule():
    tree = case(microbatches=3, model={"layers": 1}).tree
    engine = make_engine(0, 1, tree)
    retained = TimingSink({1})
    engine.runtime.recorder = timers = Timers(retained)
    timers.begin_step(1)
    run_step(engine, 1, RankReport())
    timers.end_step()
    spans = retained.of(SPANS, 1)
    action_spans = spans[np.isin(spans["kind"], list(SPAN_OF_ACTION.values()))]
    done = [(int(s["kind"]), int(s["chunk"]), int(s["microbatch"])) for s in action_spans]
    planned = [(int(SPAN_OF_ACTION[a.kind]), a.chunk, a.microbatch) for a in engine.pipeline.actions]
    assert done[-len(planned) :] == planned
    assert len(rows_of(spans, SpanKind.OPTIMIZER)) == 1
    step = rows_of(spans, SpanKind.STEP)[0]
    assert (spans["start_ns"] >= step["start_ns"]).all()
    assert (spans["end_ns"] <= step["end_ns"]).all()
    timers.begin_step(2)
    assert retained.keeping == [1, 0]  # The range of sampled steps is known.


# frames -----------------------------------------------------------------------------------------------------------


def a_frame(number: int = 1) -> bytes:
    records = np.zeros(3, SPAN)
    records["start_ns"] = [1, 2, 3]
    return pack_frame(FrameHead(SPANS, 77, number, 2, 1, 9, 40, 5), records)


def read_all(data: bytes) -> tuple[list[int], TornFrame]:
    """The numbers of the frames that are read, and what ended it."""
    read = []
    try:
        for head, _, _ in scan_frames(data):
            read.append(head.number)
    except TornFrame as torn:
        return read, torn
    raise AssertionError("nothing was said to be torn")


def test_frames_come_back_as_they_were():
    data = a_frame(1) + a_frame(2)
    result = list(scan_frames(data))
    assert [head.number for head, _, _ in result] == [1, 2]
    head, body, end = result[1]
    assert (head.kind, head.rank, head.attempt, head.step, head.error_ns, head.lost) == (SPANS, 2, 1, 9, 40, 5)
    assert np.frombuffer(body, SPAN)["start_ns"].tolist() == [1, 2, 3]
    assert end == len(data)


def test_no_cut_and_no_flipped_byte_is_read():
    full = a_frame(1)
    data = full + a_frame(2)
    for cut in range(len(full) + 1, len(data)):
        read, torn = read_all(data[:cut])
        assert read == [1]
        assert (torn.offset, torn.is_truncated) == (len(full), True)
    for at in range(len(full), len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x40
        read, torn = read_all(bytes(broken))
        assert read == [1], f"byte {at}"
        assert torn.offset == len(full)


# clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drift", [0.0, 37e-6, -80e-6])
def test_an_offset_is_within_its_stated_error(drift):
    """Exchanges with delays as a network has them; the truth is known here."""
    rng = np.random.default_rng(1)
    bounds = ClockBounds()
    errors = []
    for second in range(0, 600, 2):
        current = second * 1e9
        true = 123_456_789.0 + drift * current
        bounds.add_lower_bound(current, true - rng.exponential(200_000))
        bounds.add_upper_bound(current, true + rng.exponential(200_000))
        result, error = bounds.estimate(current)
        assert abs(result - true) <= error + 1
        errors.append(error)
    assert bounds.resets == 0
    slow, fast = bounds.rate
    assert slow <= drift <= fast
    assert fast - slow < 20e-6 < 2 * MAX_DRIFT  # the drift was measured
    assert np.median(errors[50:]) < 100_000


def test_a_clock_that_is_set_makes_it_begin_anew():
    bounds = ClockBounds()
    for second in range(20):
        offset = 0.0 if second < 10 else 180e9  # somebody sets it by minutes
        bounds.add_lower_bound(second * 1e9, offset - 1000)
        bounds.add_upper_bound(second * 1e9, offset + 1000)
    assert bounds.resets == 1
    result, error = bounds.estimate(20e9)
    assert abs(result - 180e9) <= error < 500_000
