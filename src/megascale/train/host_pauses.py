"""What holds a step up without being an action: garbage collections that Python begins by itself, allocator retries,
and other processes that have the processor.

All end as jitter of single ranks, for which all others wait (MegaScale section 6.3); counted here, told once a step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from typing import Any

import torch

from megascale.core.spans import Recorder, SpanKind


class HostPauses:
    """Counts from now on, of the thread that makes it; `close` ends it. Collections in `planned` are left out: they are
    timed as what they are.

    Args:
        device: whose allocator is asked; a CPU has none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.planned = False
        self._began = 0
        self._count = self._total = self._longest = 0
        self._retries = self._retried()
        self._queue = -1
        with contextlib.suppress(OSError):  # a system that does not tell
            self._queue = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._queued = 0
        gc.callbacks.append(self._collecting)

    def _collecting(self, phase: str, info: dict[str, Any]) -> None:
        """Called by the interpreter, in whatever it interrupts: numbers only."""
        if phase == "start":
            self._began = time.perf_counter_ns()
        elif self._began and not self.planned:
            lasted = time.perf_counter_ns() - self._began
            self._count += 1
            self._total += lasted
            self._longest = max(self._longest, lasted)

    def _retried(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats_as_nested_dict(self._device).get("num_alloc_retries", 0))

    def _waited(self) -> int:
        """Nanoseconds so far that the thread was ready to run and did not; 0 where nobody says."""
        if self._queue < 0:
            return 0
        return int(os.pread(self._queue, 100, 0).split()[1])

    def step_begins(self) -> None:
        """A step's first operation comes next."""
        self._queued = self._waited()

    def record(self, recorder: Recorder) -> None:
        """Tell of what there was since the last call, as of the step that ends."""
        if queued := self._waited() - self._queued:
            recorder.record_count(SpanKind.PROCESSOR_WAIT, 1, queued, queued)
        if self._count:
            recorder.record_count(SpanKind.GARBAGE_PAUSE, self._count, self._total, self._longest)
            self._count = self._total = self._longest = 0
        retries = self._retried()
        if retries > self._retries:
            recorder.record_count(SpanKind.ALLOCATOR_RETRY, retries - self._retries)
        self._retries = retries

    def close(self) -> None:
        """Count nothing more."""
        gc.callbacks.remove(self._collecting)
        if self._queue >= 0:
            os.close(self._queue)
            self._queue = -1
