"""Measured cost of replay checks, by which resilience.replay_interval=auto lengthens its interval.

The estimate of core/replay_interval.py was measured with one model. In a run the first MEASURED_CHECKS checked steps
are timed, and the step before each for comparison. Each timed step waits for the device twice, so no later step is
timed. The median counts, because a pause of the host may fall into one of the steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megascale.core.replay_interval import lengthen_interval
from megascale.parallel.collectives import Axis, all_reduce

MEASURED_CHECKS = 3


class CheckCost:
    """Times checked steps and the steps before them. All ranks measure the same steps.

    Args:
        world_axis: all ranks. The slowest rank's time counts.

    Attributes:
        check_times: additional time of each checked step in units of a step, the same on all ranks.
    """

    def __init__(self, device: torch.device, world_axis: Axis, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device = device
        self._world_axis = world_axis
        self._clock = clock
        self._start: float | None = None
        self._plain_seconds: float | None = None  # of the last step before a check
        self._preparation_seconds = 0.0  # after that step, for its check
        self.check_times: list[float] = []

    def begin_step(self) -> None:
        """Begin to time a step, or the preparation of a check."""
        self._start = self._read_clock()

    def end_plain_step(self) -> None:
        """End a step that is not checked, and begin to time the preparation of the next step's check."""
        end = self._read_clock()
        if self._start is not None:
            self._plain_seconds = end - self._start
        self._start = end

    def end_preparation(self) -> None:
        if self._start is not None:
            self._preparation_seconds = self._read_clock() - self._start
        self._start = None

    def end_checked_step(self) -> None:
        """End a checked step, and add its additional time if the step before it was timed. Collective."""
        if self._start is None or self._plain_seconds is None:
            return
        seconds = self._read_clock() - self._start + self._preparation_seconds
        local_time = torch.tensor([seconds / self._plain_seconds - 1], dtype=torch.float64, device=self._device)
        self.check_times.append(float(all_reduce(local_time, self._world_axis, dist.ReduceOp.MAX).wait().item()))
        self.forget_step()

    def forget_step(self) -> None:
        """Forget the step that is being timed and the step before it."""
        self._start = None
        self._plain_seconds = None

    def is_complete(self) -> bool:
        """Return whether enough checks have been timed."""
        return len(self.check_times) >= MEASURED_CHECKS

    def choose_interval(self, interval: int) -> int:
        """Return the interval, lengthened if its checks cost too much."""
        return max(interval, lengthen_interval(statistics.median(self.check_times)))

    def _read_clock(self) -> float:
        """Return the time when all work on the device has ended."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()
