"""The time that a rank on gloo waits for other ranks, measured without their help.

A synchronous step takes all ranks equally long, so the slow rank is the one that waits least. Gloo records no times of
its calls. The clock therefore measures `Work.wait`, and the end of each backward pass, in which
DistributedDataParallel waits for its buckets in C++. On NCCL the host does not wait, so there is no such clock.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any


class WaitClock:
    """Sum of the seconds in which this process waited for other ranks."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def time_wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return `wait` with its duration added to the clock."""

        @functools.wraps(wait)
        def timed_wait(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - start

        return timed_wait

    def time_backward(self, backward: Callable[..., Any], queue_callback: Callable[..., None]) -> Callable[..., Any]:
        """Return `backward` with the time after its last gradient added to the clock.

        Args:
            backward: `torch.autograd.backward`.
            queue_callback: adds a function that autograd calls after the last gradient, in the order of the calls.
        """

        @functools.wraps(backward)
        def timed_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            root = tensors if hasattr(tensors, "register_hook") else next(iter(tensors), None)
            if root is None or not root.requires_grad:
                return backward(tensors, *args, **kwargs)
            end_of_gradients: list[tuple[float, float]] = []

            def note_end() -> None:
                end_of_gradients.append((time.perf_counter(), self._seconds))

            # The gradient of the root comes first, so this callback precedes those of DistributedDataParallel.
            hook = root.register_hook(lambda _: queue_callback(note_end))
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                hook.remove()
                if end_of_gradients:
                    start, seconds = end_of_gradients[0]
                    # Waits within this period are in `Work.wait` too, and count once.
                    self._seconds = seconds + time.perf_counter() - start

        return timed_backward


def start_wait_clock() -> WaitClock | None:
    """Start a clock if this process trains on gloo alone; None before its process group exists, or on other backends.

    Waits of functional collectives (tensor parallelism with DTensor) are not measured: they count as own time.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    backend = torch.distributed.get_backend_config()
    if "nccl" in backend or "gloo" not in backend or torch.cuda.is_available():
        return None
    from megascale.torch_private import autograd_engine

    clock = WaitClock()
    work = torch.distributed.Work
    work.wait = clock.time_wait(work.wait)
    torch.autograd.backward = clock.time_backward(torch.autograd.backward, autograd_engine.queue_callback)
    return clock
