"""Pauses of the host between and within steps: planned garbage collections, and counts of unplanned pauses.

A pause of one rank makes all ranks wait that depend on it (MegaScale section 6.3).
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from typing import Any

import torch

from megascale.core.spans import Recorder, SpanKind


class GarbageCollector:
    """Collects Python's garbage on all ranks after the same step.

    By default each rank collects when its own counters demand it, each at another step, and makes the other ranks wait
    for some 50 ms. This class turns automatic collections off and excludes the objects of start-up. A collection runs
    while the device still works on the previous step.

    Args:
        interval: steps between collections; 0 leaves collection to Python.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._was_enabled = gc.isenabled()
        self._is_frozen = False

    def is_due(self, step: int) -> bool:
        """Return whether `collect` will collect after `step`."""
        return self.interval > 0 and (not self._is_frozen or step % self.interval == 0)

    def collect(self, step: int) -> None:
        """Collect if it is due after `step`, whose operations are queued on the device."""
        if not self.is_due(step):
            return
        gc.collect()
        if not self._is_frozen:
            gc.freeze()
            gc.disable()
            self._is_frozen = True

    def close(self) -> None:
        """Restore Python's own collection."""
        if not self._is_frozen:
            return
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._is_frozen = False


class HostPauses:
    """Counts the pauses of the thread that makes it, until `close`.

    Counted are collections that Python begins by itself, the allocator's retries, and the time that the thread waited
    for a processor. Collections while `is_planned` is set are not counted: they have a span of their own.

    Args:
        device: device whose allocator is counted; a CPU has none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_planned = False
        self._started_ns = 0
        self._count = 0
        self._total_ns = 0
        self._longest_ns = 0
        self._retries = self._count_retries()
        self._schedstat = -1
        with contextlib.suppress(OSError):  # a system without this file reports no waits
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._wait_at_begin_ns = 0
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Note a collection. The interpreter calls this at any point of the thread, so it only changes numbers."""
        if phase == "start":
            self._started_ns = time.perf_counter_ns()
        elif self._started_ns and not self.is_planned:
            duration_ns = time.perf_counter_ns() - self._started_ns
            self._count += 1
            self._total_ns += duration_ns
            self._longest_ns = max(self._longest_ns, duration_ns)

    def _count_retries(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats_as_nested_dict(self._device).get("num_alloc_retries", 0))

    def _read_wait_ns(self) -> int:
        """Return the nanoseconds that the thread was ready but did not run; 0 if the system does not report them."""
        if self._schedstat < 0:
            return 0
        return int(os.pread(self._schedstat, 100, 0).split()[1])

    def begin_step(self) -> None:
        """Note that a step's first operation comes next."""
        self._wait_at_begin_ns = self._read_wait_ns()

    def record(self, recorder: Recorder) -> None:
        """Record the pauses since the last call as pauses of the step that ends."""
        wait_ns = self._read_wait_ns() - self._wait_at_begin_ns
        if wait_ns:
            recorder.record_count(SpanKind.PROCESSOR_WAIT, 1, wait_ns, wait_ns)
        if self._count:
            recorder.record_count(SpanKind.GARBAGE_PAUSE, self._count, self._total_ns, self._longest_ns)
            self._count = 0
            self._total_ns = 0
            self._longest_ns = 0
        retries = self._count_retries()
        if retries > self._retries:
            recorder.record_count(SpanKind.ALLOCATOR_RETRY, retries - self._retries)
        self._retries = retries

    def close(self) -> None:
        """Stop counting."""
        gc.callbacks.remove(self._on_collection)
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1
