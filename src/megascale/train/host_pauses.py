"""Pauses of the host: garbage collections at planned times, and counts of unplanned pauses.

If one rank pauses, all ranks that depend on it wait (MegaScale section 6.3).
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from typing import Any

import torch

from megascale.core.spans import Recorder, SpanKind


def exclude_imports() -> None:
    """Exclude the objects that exist now from all later collections of this process.

    Call this before the objects of a training exist, so that a collection after the training frees them. Imported
    modules are hundreds of thousands of objects. A process that stays for the next attempt would examine them several
    times between two attempts, for up to half a second each time.
    """
    gc.freeze()


class GarbageCollector:
    """Collects Python's garbage on all ranks after the same step.

    Python would collect when counters of a process demand it, on each rank after a different step, and the other ranks
    would wait for some 50 ms each time. This class turns automatic collection off after its first collection, and
    excludes the objects that exist by then. A collection runs while the device still computes queued operations.

    Args:
        interval: steps between collections; 0 leaves collection to Python.
        excludes_objects: whether to exclude objects. False in a process that may outlive the training: to collect the
            training's objects, `close` would include all objects, also those of `exclude_imports`. Instead, most later
            collections omit Python's oldest generation.
    """

    full_period = 20  # collections from a full one to the next, without which objects that grow old would pile up

    def __init__(self, interval: int, *, excludes_objects: bool = True) -> None:
        self.interval = interval
        self._excludes_objects = excludes_objects
        self._was_enabled = gc.isenabled()
        self._is_active = False  # after the first collection

    def is_due(self, step: int) -> bool:
        """Return whether `collect` will collect after `step`."""
        return self.interval > 0 and (not self._is_active or step % self.interval == 0)

    def collect(self, step: int) -> None:
        """Collect if a collection is due after `step`, whose operations are queued on the device."""
        if not self.is_due(step):
            return
        is_full = not self._is_active or self._excludes_objects or step % (self.full_period * self.interval) == 0
        if is_full:
            gc.collect()
        else:
            gc.collect(1)  # without the oldest generation, which has the objects that outlived a collection
        if not self._is_active:
            if self._excludes_objects:
                gc.freeze()
            gc.disable()
            self._is_active = True

    def close(self) -> None:
        """Restore Python's own collection."""
        if not self._is_active:
            return
        if self._excludes_objects:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._is_active = False


class HostPauses:
    """Counts the pauses of the thread that constructs this object, until `close`.

    Three kinds are counted: collections that Python begins by itself, retries of the device's allocator, and the time
    that the thread waits for a processor.

    Args:
        device: device whose allocator is counted; on a CPU there are no retries.

    Attributes:
        is_planned: true during a planned collection, which is not counted because it has a span of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_planned = False
        # Collections since the last record.
        self._collection_start_ns = 0
        self._collection_count = 0
        self._total_ns = 0
        self._longest_ns = 0
        self._recorded_retries = self._count_retries()
        self._schedstat = -1  # descriptor
        with contextlib.suppress(OSError):  # without this file, waits for a processor are not counted
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._wait_at_begin_ns = 0
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Count a collection. The interpreter calls this between any two operations, so it only changes integers."""
        if phase == "start":
            self._collection_start_ns = time.perf_counter_ns()
        elif self._collection_start_ns and not self.is_planned:
            duration_ns = time.perf_counter_ns() - self._collection_start_ns
            self._collection_count += 1
            self._total_ns += duration_ns
            self._longest_ns = max(self._longest_ns, duration_ns)

    def _count_retries(self) -> int:
        """Return how often the allocator has freed its cache and tried again, since the process started."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats_as_nested_dict(self._device).get("num_alloc_retries", 0))

    def _read_wait_ns(self) -> int:
        """Return the nanoseconds that the thread waited for a processor, 0 if the system does not report them."""
        if self._schedstat < 0:
            return 0
        return int(os.pread(self._schedstat, 100, 0).split()[1])

    def begin_step(self) -> None:
        """Store the start of a step. Call this before the step's first operation."""
        self._wait_at_begin_ns = self._read_wait_ns()

    def record(self, recorder: Recorder) -> None:
        """Record the pauses since `begin_step` or the last call as pauses of the step that ends."""
        wait_ns = self._read_wait_ns() - self._wait_at_begin_ns
        if wait_ns:
            recorder.record_count(SpanKind.PROCESSOR_WAIT, 1, wait_ns, wait_ns)
        if self._collection_count:
            recorder.record_count(SpanKind.GARBAGE_PAUSE, self._collection_count, self._total_ns, self._longest_ns)
            self._collection_count = 0
            self._total_ns = 0
            self._longest_ns = 0
        retries = self._count_retries()
        if retries > self._recorded_retries:
            recorder.record_count(SpanKind.ALLOCATOR_RETRY, retries - self._recorded_retries)
        self._recorded_retries = retries

    def close(self) -> None:
        """Stop counting."""
        gc.callbacks.remove(self._on_collection)
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1
