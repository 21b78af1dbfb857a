"""The time that a rank waits for other ranks, measured without their help.

A synchronous step takes all ranks equally long, so the slow rank is the one that waits least. Gloo records no times of
its calls. `HostClock` therefore measures `Work.wait`, and the end of each backward pass, in which
DistributedDataParallel waits for its buckets in C++. On NCCL the host does not wait, so `DeviceClock` reads the
durations of calls in torch's flight recorder.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

READ_INTERVAL = 5.0  # seconds between reads of the flight recorder, each of which takes milliseconds


class WaitClock(ABC):
    """A clock that separates a rank's own time from its waits."""

    @abstractmethod
    def measure_step(self, seconds: float) -> float:
        """Return the compute seconds of a step that took `seconds`, or 0 if they are not known yet."""


class HostClock(WaitClock):
    """The clock of a rank on gloo."""

    def __init__(self) -> None:
        self.wait_seconds = 0.0

    def measure_step(self, seconds: float) -> float:
        """Return the compute seconds of the step that ends now."""
        compute_seconds = max(0.0, seconds - self.wait_seconds)
        self.wait_seconds = 0.0
        return compute_seconds

    def time_wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return `wait` with its duration added to the waits."""

        @functools.wraps(wait)
        def timed_wait(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                self.wait_seconds += time.perf_counter() - start

        return timed_wait

    def time_backward(self, backward: Callable[..., Any], queue_callback: Callable[..., None]) -> Callable[..., Any]:
        """Return `backward` with the time after its last gradient added to the waits.

        Args:
            backward: `torch.autograd.backward`.
            queue_callback: adds a function that autograd calls after the last gradient, in the order of the calls.
        """

        @functools.wraps(backward)
        def timed_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, Iterator):
                tensors = tuple(tensors)  # autograd needs the first one too
            root = tensors if hasattr(tensors, "register_hook") else next(iter(tensors), None)
            # Autograd takes edges of its graph too, which have no hooks.
            if root is None or not getattr(root, "requires_grad", False):
                return backward(tensors, *args, **kwargs)
            end_of_gradients: list[tuple[float, float]] = []

            def note_end() -> None:
                end_of_gradients.append((time.perf_counter(), self.wait_seconds))

            # The gradient of the root comes first, so this callback precedes those of DistributedDataParallel.
            hook = root.register_hook(lambda _: queue_callback(note_end))
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                hook.remove()
                if end_of_gradients:
                    start, wait_seconds = end_of_gradients[0]
                    # Waits within this period are in `Work.wait` too, and count once.
                    self.wait_seconds = wait_seconds + time.perf_counter() - start

        return timed_backward


class DeviceClock(WaitClock):
    """The clock of a rank on NCCL: its time without the durations of its calls, as means over some seconds.

    A call lasts from the time at which this rank's device reaches it to its end. Transfers are in it too, but they take
    all ranks equally long.

    Args:
        dump: returns the flight recorder as JSON.
    """

    def __init__(self, dump: Callable[[], str]) -> None:
        self._dump = dump
        self._newest = -1
        self._start = 0.0
        self._steps = 0
        self._compute_seconds = 0.0

    def measure_step(self, seconds: float) -> float:
        """Return the compute seconds per step of the last period, 0 before its end."""
        current_time = time.perf_counter()
        self._steps += 1
        if current_time - self._start < READ_INTERVAL:
            return self._compute_seconds
        call_seconds, is_complete = self._read_new_calls()
        if self._start and is_complete:
            self._compute_seconds = max(0.0, current_time - self._start - call_seconds) / self._steps
        self._start = current_time
        self._steps = 0
        return self._compute_seconds

    def _read_new_calls(self) -> tuple[float, bool]:
        """Return the seconds of the calls since the last read, and whether the recorder still has all of them."""
        entries = [entry for entry in json.loads(self._dump()).get("entries", ()) if entry.get("duration_ms")]
        new = [entry for entry in entries if entry["record_id"] > self._newest]
        is_complete = len(new) < len(entries) or self._newest < 0
        self._newest = max((entry["record_id"] for entry in new), default=self._newest)
        return sum(float(entry["duration_ms"]) for entry in new) / 1000, is_complete and bool(new)


def start_wait_clock() -> WaitClock | None:
    """Start a clock for this process's backend; None before its process group exists, or on another backend.

    Waits of functional collectives on gloo (tensor parallelism with DTensor) count as own time.
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
