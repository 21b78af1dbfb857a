"""A launch clock with fixed times, for engines on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from megascale.core.graph_choice import LaunchTimes


class FixedClock:
    """Reports the same times for each measured forward or backward.

    Attributes:
        measurements: number of measurements that have ended.
    """

    def __init__(self, host_ms: float, device_ms: float) -> None:
        self.times = LaunchTimes(host_ms, device_ms)
        self.measurements = 0
        self._is_running = False

    def start(self) -> None:
        """Start a measurement; measurements never overlap."""
        assert not self._is_running
        self._is_running = True

    def stop(self) -> Callable[[], LaunchTimes]:
        """End the measurement."""
        assert self._is_running
        self._is_running = False
        self.measurements += 1
        times = self.times
        return lambda: times
