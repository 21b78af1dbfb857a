"""Measurement of the time that a rank waits for other ranks. Each rank measures its own waits.

A synchronous step takes all ranks equally long, so the slow rank is the one that waits least. Gloo does not record how
long a collective call takes. `HostClock` therefore measures `Work.wait` and the end of each backward pass, in which
DistributedDataParallel waits for its buckets in C++. On NCCL the host does not wait. `DeviceClock` therefore reads the
durations of the collective calls from torch's flight recorder.
"""

from __future__ import annotations

import bisect
import functools
import json
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

READ_INTERVAL_SECONDS = 5.0  # between reads of the flight recorder, because each read takes milliseconds
LONG_STEP = 1.5  # times the median: a step with a save or an evaluation takes longer, a slow rank's steps do not


class WaitClock(ABC):
    """Clock that separates a rank's compute time from its waits for other ranks."""

    @abstractmethod
    def measure_step(self, seconds: float) -> float:
        """Return the compute seconds of the step that ends now and took `seconds`, or 0 if they are not known yet."""


class HostClock(WaitClock):
    """Clock of a rank whose backend is gloo."""

    def __init__(self) -> None:
        self.wait_seconds = 0.0

    def measure_step(self, seconds: float) -> float:
        """Return the compute seconds of the step that ends now."""
        compute_seconds = max(0.0, seconds - self.wait_seconds)
        self.wait_seconds = 0.0
        return compute_seconds

    def time_wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `wait` and adds its duration to `wait_seconds`."""

        @functools.wraps(wait)
        def timed_wait(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                self.wait_seconds += time.perf_counter() - start

        return timed_wait

    def time_backward(self, backward: Callable[..., Any], queue_callback: Callable[..., None]) -> Callable[..., Any]:
        """Return a function that calls `backward` and adds the time after its last gradient to `wait_seconds`.

        Args:
            backward: `torch.autograd.backward`.
            queue_callback: registers a function that autograd calls after the last gradient. Autograd calls such
                functions in the order of their registration.
        """

        @functools.wraps(backward)
        def timed_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, Iterator):
                tensors = tuple(tensors)  # reading the first output from an iterator would hide it from autograd
            if hasattr(tensors, "register_hook"):
                root = tensors
            else:
                root = next(iter(tensors), None)
            # `tensors` may also hold edges of autograd's graph, which have no hooks.
            if root is None or not getattr(root, "requires_grad", False):
                return backward(tensors, *args, **kwargs)
            last_gradient_time: float | None = None
            earlier_wait_seconds = 0.0

            def record_last_gradient() -> None:
                nonlocal last_gradient_time, earlier_wait_seconds
                last_gradient_time = time.perf_counter()
                earlier_wait_seconds = self.wait_seconds

            # The root's gradient comes first, so this callback precedes the callbacks of DistributedDataParallel.
            hook = root.register_hook(lambda _: queue_callback(record_last_gradient))
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                hook.remove()
                if last_gradient_time is not None:
                    # `timed_wait` has already added the waits after the last gradient. Starting from the total before
                    # them counts each wait once.
                    self.wait_seconds = earlier_wait_seconds + time.perf_counter() - last_gradient_time

        return timed_backward


class DeviceClock(WaitClock):
    """Clock of a rank whose backend is NCCL.

    The compute time of a step is its duration without the durations of its collective calls, averaged over a period of
    READ_INTERVAL_SECONDS. A call starts when this rank's device reaches it. Its duration includes the transfer, which
    takes all ranks equally long. Long steps do not count: in a save, a rank that writes looks slow while others wait.
    Steps with calls that have not ended count in the next period.

    Args:
        dump_recorder: returns the flight recorder's content as JSON.
    """

    def __init__(self, dump_recorder: Callable[[], str]) -> None:
        self._dump_recorder = dump_recorder
        self._newest_record_id = -1
        self._pending_ids: set[int] = set()  # calls of the last read that had not ended
        self._period_start = 0.0
        self._dropped_end = 0  # Unix time in nanoseconds at which the last step of an earlier period ended
        # Of each step since the start of the period:
        self._step_ends: list[int] = []  # Unix time in nanoseconds
        self._step_seconds: list[float] = []
        self._call_seconds: list[float] = []
        self._compute_seconds = 0.0

    def measure_step(self, seconds: float) -> float:
        """Return the mean compute seconds per step of the last complete period, or 0 before the first one."""
        current_time = time.perf_counter()
        self._step_ends.append(time.time_ns())
        self._step_seconds.append(seconds)
        self._call_seconds.append(0.0)
        if current_time - self._period_start < READ_INTERVAL_SECONDS:
            return self._compute_seconds
        step_count = len(self._step_ends)
        ended_count, is_complete = self._read_new_calls()
        if self._period_start and is_complete:
            step_count = ended_count
            if ended_count:
                self._compute_seconds = self._average_usual_steps(ended_count)
        self._period_start = current_time
        if step_count:
            self._dropped_end = self._step_ends[step_count - 1]
        for values in (self._step_ends, self._step_seconds, self._call_seconds):
            del values[:step_count]
        return self._compute_seconds

    def _average_usual_steps(self, count: int) -> float:
        """Return the mean compute seconds of the first `count` steps without those much longer than the median."""
        step_seconds = self._step_seconds[:count]
        longest = LONG_STEP * statistics.median(step_seconds)
        steps = zip(step_seconds, self._call_seconds[:count], strict=True)
        return statistics.mean(max(0.0, seconds - calls) for seconds, calls in steps if seconds <= longest)

    def _read_new_calls(self) -> tuple[int, bool]:
        """Add the durations of the calls that have ended since the last read to their steps.

        A call belongs to the step in which the host has made it. The device may be some calls behind the host.

        Returns:
            The number of steps at the start of the period all of whose calls have ended, and whether the recorder still
            holds all calls since the last read. A call that has not ended at two reads no longer counts for the first.
        """
        entries = json.loads(self._dump_recorder()).get("entries", ())
        ended = [entry for entry in entries if entry.get("duration_ms")]
        pending = [entry for entry in entries if not entry.get("duration_ms") and not entry.get("retired")]
        new_entries = [
            entry
            for entry in ended
            if entry["record_id"] > self._newest_record_id or entry["record_id"] in self._pending_ids
        ]
        new_pending = [entry for entry in pending if entry["record_id"] > self._newest_record_id]
        record_ids = {entry["record_id"] for entry in entries}
        # The recorder is a ring. If an entry of the last read is still there, no later entry was overwritten.
        has_earlier = self._newest_record_id < 0 or any(number <= self._newest_record_id for number in record_ids)
        is_complete = has_earlier and self._pending_ids <= record_ids and bool(new_entries)
        self._newest_record_id = max(record_ids, default=self._newest_record_id)
        self._pending_ids = {entry["record_id"] for entry in pending}
        for entry in new_entries:
            if entry["time_created_ns"] <= self._dropped_end:
                continue  # its step has been averaged or dropped without it
            step = self._find_step(entry)
            self._call_seconds[step] += float(entry["duration_ms"]) / 1000
        ended_count = len(self._step_ends)
        if new_pending:
            ended_count = min(self._find_step(entry) for entry in new_pending)
        return ended_count, is_complete

    def _find_step(self, entry: dict[str, Any]) -> int:
        """Return the index in the period of the step in which the host has made a call."""
        step = bisect.bisect_left(self._step_ends, entry["time_created_ns"])
        return min(step, len(self._step_ends) - 1)


def start_wait_clock() -> WaitClock | None:
    """Start a clock for the backend of this process.

    Waits for functional collectives on gloo (tensor parallelism with DTensor) count as compute time.

    Returns:
        The clock, or None before the process group exists, on another backend, or on NCCL without recorded durations.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from megascale.torch_private import autograd_engine, dump_flight_recorder

    backend = torch.distributed.get_backend_config()
    if "nccl" in backend:
        is_timed = os.environ.get("TORCH_NCCL_ENABLE_TIMING") == "1"
        return DeviceClock(dump_flight_recorder) if is_timed else None
    if "gloo" not in backend:
        return None
    clock = HostClock()
    work = torch.distributed.Work
    work.wait = clock.time_wait(work.wait)
    torch.autograd.backward = clock.time_backward(torch.autograd.backward, autograd_engine.queue_callback)
    return clock
