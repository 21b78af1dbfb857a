"""Durations of the phases of a piece of work that follow each other."""

from __future__ import annotations

import time


class Stopwatch:
    """Measures phases, in seconds. The first one begins with the construction.

    Attributes:
        timings: seconds by phase, in order.
    """

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self._phase_start = time.perf_counter()

    def end_phase(self, phase: str) -> None:
        """Add the duration of `phase`, which ends now, and start to measure the next phase."""
        phase_end = time.perf_counter()
        self.timings[phase] = self.timings.get(phase, 0.0) + phase_end - self._phase_start
        self._phase_start = phase_end

    def describe(self) -> str:
        """Return phases and seconds as text."""
        return ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self.timings.items())
