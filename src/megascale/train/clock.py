"""How long steps take: CUDA events where the host runs ahead of the device, the clock elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch


class StepClock:
    """Times steps that are queued now and read later, in order.

    A step lasts from the end of the one before it, so that time the device idles between steps counts; after a
    `pause` (an evaluation, a checkpoint) it lasts from its own start.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: deque[tuple[Any, Any]] = deque()
        self._begun: Any = None

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """A step's first operation is queued next."""
        if self._begun is None:
            self._begun = self._now()

    def stop(self) -> None:
        """Its last operation has been queued."""
        end = self._now()
        self._marks.append((self._begun, end))
        self._begun = end

    def pause(self) -> None:
        """What comes now belongs to no step."""
        self._begun = None

    def read(self) -> float:
        """Seconds of the oldest step not yet read; waits for it to end."""
        begun, end = self._marks.popleft()
        if not self._cuda:
            return end - begun
        end.synchronize()
        return begun.elapsed_time(end) / 1e3
