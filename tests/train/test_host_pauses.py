"""Interruptions of a rank: Python's garbage collections, and time without a processor."""

from __future__ import annotations

import gc
import os
import time
from types import SimpleNamespace

import pytest
import torch

from megascale.core.spans import SpanKind
from megascale.observe.rank.timers import Timers
from megascale.observe.store.frames import ROLLUPS
from megascale.train.host_pauses import HostPauses


class Recorder:
    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int]] = []

    def write(self, kind, step, records, error_ns):
        assert kind == ROLLUPS
        self.rows += [(int(r["kind"]), int(r["count"]), int(r["total_ns"])) for r in records]

    def is_requested(self, step):
        return False

    def mark_sampled(self, step): ...


@pytest.fixture
def pauses():
    result = HostPauses(torch.device("cpu"))
    yield result
    result.close()
    assert result._on_collection not in gc.callbacks


def step(timers: Timers, pauses: HostPauses, work) -> None:
    timers.begin_step(1)
    pauses.begin_step()
    timers.begin_action(SpanKind.FORWARD)
    work()
    timers.end_action()
    pauses.record(timers)
    timers.end_step()


def test_collections_are_counted_but_those_that_are_planned(pauses):
    sink = Recorder()
    step(Timers(sink), pauses, lambda: (gc.collect(), gc.collect(0)))
    report = {kind: (count, total) for kind, count, total in sink.rows}
    assert report[SpanKind.GARBAGE_PAUSE][0] == 2
    assert 0 < report[SpanKind.GARBAGE_PAUSE][1] < report[SpanKind.FORWARD][1]
    pauses.is_planned = True
    gc.collect()
    pauses.is_planned = False
    quiet = Recorder()
    step(Timers(quiet), pauses, lambda: None)
    assert SpanKind.GARBAGE_PAUSE not in {kind for kind, _, _ in quiet.rows}


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="this system does not tell")
def test_time_without_a_processor_is_told(pauses):
    """Two busy processes on this thread's one processor: for about half of the time it has none."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    child = os.fork()
    if child == 0:
        while True:
            pass
    try:
        sink = Recorder()

        def work() -> None:
            end = time.thread_time() + 0.2
            while time.thread_time() < end:
                pass

        step(Timers(sink), pauses, work)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.sched_setaffinity(0, allowed)
    report = {kind: total for kind, _, total in sink.rows}
    assert 0.05e9 < report[SpanKind.PROCESSOR_WAIT] < report[SpanKind.FORWARD]


def test_allocator_retries_are_told_as_they_grow(pauses, monkeypatch):
    counted = iter([3, 3, 5])
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {"num_alloc_retries": next(counted)})
    of_gpu = HostPauses(SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
    try:
        for report in ([], [(SpanKind.ALLOCATOR_RETRY, 2, 0)]):
            sink = Recorder()
            step(Timers(sink), of_gpu, lambda: None)
            assert [row for row in sink.rows if row[0] == SpanKind.ALLOCATOR_RETRY] == report
    finally:
        of_gpu.close()
