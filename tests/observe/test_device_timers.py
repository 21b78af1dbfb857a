"""Timers of a GPU against a device whose clock and queue are known: events that happen later than they are recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megascale.core.spans import SpanAxis, SpanKind
from megascale.observe.rank import device_timers, timers
from megascale.observe.rank.device_timers import DeviceTimers
from megascale.observe.store.frames import ROLLUPS, SPANS

BEFORE = 5_000_000_000  # ns that the host's clock is ahead of the device's


class Device:
    """A stream that does its work in order, and a host that queues it. Times in nanoseconds."""

    def __init__(self, drift: float) -> None:
        self.host = BEFORE
        self.busy = BEFORE
        self.drift = drift
        self.waits = self.created = 0
        self.capturing = False

    def read_ns(self) -> int:
        return self.host

    def queue(self, host: int, work: int) -> None:
        """The host needs `host` to queue what takes the stream `work`."""
        self.host += host
        self.busy = max(self.busy, self.host) + work

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        self.created += 1
        return Event(self)

    def synchronize(self) -> None:
        self.waits += 1
        self.host = max(self.host, self.busy)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1

    def record(self, stream: Any) -> None:
        assert not self.device.capturing
        self.at = max(self.device.busy, self.device.host)

    def query(self) -> bool:
        assert self.at >= 0
        return self.device.host >= self.at

    def elapsed_time(self, second: Event) -> float:
        assert self.query()
        assert second.query(), "CUDA refuses events that have not happened"
        return float(np.float32((second.at - self.at) * (1 + self.device.drift) / 1e6))


class TimingSink:
    def __init__(self) -> None:
        self.timings: list[tuple[int, int, Any, int]] = []

    def write(self, kind: int, step: int, records: Any, error_ns: int) -> None:
        self.timings.append((kind, step, records, error_ns))

    def is_requested(self, step: int) -> bool:
        return True

    def mark_sampled(self, step: int) -> None: ...


@pytest.fixture(params=[0.0, 30e-6])
def device(request, monkeypatch):
    device = Device(request.param)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda which=None: device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
    for module in (timers, device_timers):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=device.read_ns))
    return device


def step(recorder: DeviceTimers, device: Device, number: int, queue: int, work: int) -> dict[str, tuple[int, int]]:
    """One step; when its forward ran on the device, and when its wait did, on the host's clock."""
    recorder.begin_step(number)
    recorder.begin_action(SpanKind.FORWARD, 0, 0)
    begun = max(device.busy, device.host)
    device.queue(queue, work)
    launched = recorder.begin_transfer(SpanAxis.TENSOR, 64)
    start, wait = recorder.mark(), max(device.busy, device.host)
    device.queue(queue, 2 * work)  # a stall: the stream waits for another rank
    recorder.record_wait(start, SpanKind.WAIT, SpanAxis.TENSOR, 3)
    waited = max(device.busy, device.host)
    recorder.end_transfer(launched, SpanAxis.TENSOR, 64, 3)
    device.queue(queue, work)
    recorder.end_action()
    ended = max(device.busy, device.host)
    recorder.end_step()
    return {"forward": (begun, ended), "wait": (wait, waited)}


@pytest.mark.parametrize(("queue", "work"), [(20_000, 3_000_000), (4_000_000, 10_000)])
def test_times_are_the_device_s_and_lie_on_the_host_s_clock(device, queue, work):
    """The host runs ahead in some steps and lags in others. Only the very first mark is waited for."""
    retained = TimingSink()
    recorder = DeviceTimers(torch.device("cuda", 0), retained)
    waits, truth = device.waits, {}
    for number in range(1, 200):
        truth[number] = step(recorder, device, number, queue, work)
        if device.busy - device.host > 20 * work:  # the loop reads the loss of an earlier step
            device.host = device.busy - 10 * work
        recorder.collect()
    assert device.waits == waits
    device.host = max(device.host, device.busy)
    recorder.close()
    assert recorder.dropped == 0
    report = {n: records for kind, n, records, _ in retained.timings if kind == SPANS}
    errors = {n: error for kind, n, _, error in retained.timings if kind == SPANS}
    assert sorted(report) == sorted(truth)
    for number, spans in report.items():
        for kind, name in ((SpanKind.FORWARD, "forward"), (SpanKind.WAIT, "wait")):
            (span,) = spans[spans["kind"] == kind]
            start, end = truth[number][name]
            # float32 milliseconds: half a microsecond
            assert abs(int(span["start_ns"]) - start) <= errors[number] + 2000, f"step {number}"
            lasted = (end - start) * (1 + device.drift)
            assert abs(int(span["end_ns"]) - int(span["start_ns"]) - lasted) <= 2000
    assert max(errors.values()) < 4 * max(work, queue)
    (rollup,) = [records for kind, n, records, _ in retained.timings if (kind, n) == (ROLLUPS, 150)]
    (forward,) = rollup[rollup["kind"] == SpanKind.FORWARD]
    assert forward["waited_ns"] == pytest.approx(max(2 * work, queue), rel=0.6)
    assert forward["host_ns"] == 3 * queue
    (transfer,) = rollup[rollup["kind"] == SpanKind.TRANSFER]
    assert transfer["bytes"] == 64
    assert recorder.last_totals is not None
    assert recorder.last_totals.step == 199
    assert device.created < 200  # events come out of the pool


def test_the_first_synchronisation_bounds_the_offset_on_a_host_that_has_run_for_days(device):
    """The first block is seen a second late, so that its upper bound can only come from the synchronisation."""
    device.host = device.busy = 10 * 86_400 * 10**9
    retained = TimingSink()
    recorder = DeviceTimers(torch.device("cuda", 0), retained)
    truth = step(recorder, device, 1, queue=20_000, work=10_000)
    device.host = device.busy + 10**9
    recorder.close()
    ((_, _, spans, error),) = [timing for timing in retained.timings if timing[0] == SPANS]
    (forward,) = spans[spans["kind"] == SpanKind.FORWARD]
    assert error < 100_000
    assert abs(int(forward["start_ns"]) - truth["forward"][0]) <= error + 2000


def test_a_device_that_stands_still_costs_blocks_and_no_wait(device):
    recorder = DeviceTimers(torch.device("cuda", 0), TimingSink())
    device.queue(1000, 10**15)
    waits, built = device.waits, 0
    for number in range(1, 300):
        step(recorder, device, number, 1000, 1000)
        if number == 150:
            built = device.created
    assert device.waits == waits
    assert recorder.dropped > 200
    assert device.created == built  # nothing grows
    device.host = device.busy
    step(recorder, device, 300, 1000, 1000)
    device.host = device.busy
    recorder.close()
    assert recorder.last_totals is not None
    assert recorder.last_totals.step == 300


def test_within_a_capture_nothing_is_recorded(device):
    retained = TimingSink()
    recorder = DeviceTimers(torch.device("cuda", 0), retained)
    recorder.begin_step(1)
    device.capturing = True
    recorder.begin_action(SpanKind.FORWARD, 0, 0)
    recorder.record_wait(recorder.mark(), SpanKind.WAIT, SpanAxis.TENSOR)
    recorder.end_transfer(recorder.begin_transfer(SpanAxis.TENSOR, 8), SpanAxis.TENSOR, 8)
    recorder.end_action()
    device.capturing = False
    device.queue(1000, 5000)
    recorder.end_step()
    device.host = device.busy
    recorder.close()
    (spans,) = [records for kind, _, records, _ in retained.timings if kind == SPANS]
    assert set(spans["kind"].tolist()) <= {SpanKind.STEP, SpanKind.TRANSFER}
    (step_span,) = spans[spans["kind"] == SpanKind.STEP]
    assert step_span["end_ns"] - step_span["start_ns"] == pytest.approx(6000, abs=1100)
