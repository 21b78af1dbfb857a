"""Progress of measured steps: a line about every ten seconds, and the figures so far for a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

INTERVAL_SECONDS = 10.0  # between two lines
FIRST_SECONDS = 3.0  # from the start to the first line


def _ignore() -> None:
    return None


class StepMonitor:
    """Counts the steps of a measurement on one rank and prints their progress.

    Any thread may call `report_if_due` and `describe`.

    Attributes:
        completed: number of completed steps, warm-up included.
        rank_load: latest load of the most loaded expert rank relative to the mean load; None for a dense model, and
            before it is measured.
        rank_load_step: number of the step in which `rank_load` was measured.
        seconds: seconds of each timed step, for measurements that keep no records of their own.
        losses: loss of each step, for such measurements.
        make_result: returns the figures of the timed steps so far, and None before the first one. None on ranks that
            return no figures.
        exchange_bytes: this rank's memory for exchanges between GPUs, which torch's statistics do not count.
    """

    def __init__(
        self,
        name: str,
        *,
        warmup: int,
        steps: int,
        prints: bool,
        check: Callable[[], None] = _ignore,
        interval: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock of the first line.

        Args:
            name: begin of each line.
            warmup, steps: number of untimed and of timed steps.
            prints: whether this rank prints lines.
            check: is called after each step, and raises an error if the measurement must end.
        """
        self.completed = 0
        self.rank_load: float | None = None
        self.rank_load_step = 0
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.make_result: Callable[[], dict[str, Any] | None] | None = None
        self.exchange_bytes = 0
        self._name = name
        self._warmup = warmup
        self._steps = steps
        self._prints = prints
        self._check = check
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._start_time = clock()
        # Time of the latest line, and before it a time from which the first line is due after FIRST_SECONDS.
        self._line_time = self._start_time - interval + min(interval, FIRST_SECONDS)
        self._load_time = self._start_time
        self._step_time = self._start_time  # end of the latest step
        self._window_time = self._start_time  # start of the steps that the next line averages
        self._window_completed = 0
        self._step_seconds: float | None = None  # of the latest window with a step

    def record_step(self, rank_load: float | None = None) -> None:
        """Count a completed step, print a line if it is due, and call `check`."""
        with self._lock:
            self.completed += 1
            self._step_time = self._clock()
            if rank_load is not None:
                self.rank_load = rank_load
                self.rank_load_step = self.completed
                self._load_time = self._step_time
        self.report_if_due()
        self._check()

    def record_load(self, rank_load: float | None) -> None:
        """Record the load of a further step, which follows the timed steps."""
        if rank_load is not None:
            self.rank_load = rank_load
            self.rank_load_step = self.completed + 1

    def is_load_due(self) -> bool:
        """Return whether the load was last measured so long ago that the next line needs a new one."""
        return self._clock() - self._load_time >= self._interval

    def report_if_due(self) -> None:
        """Print a line if this rank prints and the latest line is old enough."""
        if not self._prints:
            return
        with self._lock:
            current_time = self._clock()
            if current_time - self._line_time < self._interval:
                return
            self._line_time = current_time
            text = self._describe(current_time)
            if self.completed > self._window_completed:
                self._window_time = self._step_time
                self._window_completed = self.completed
        print(f"{self._name}: {text}", flush=True)

    def describe(self) -> str:
        """Return the latest step, the mean seconds per step since the latest line, and the rank load."""
        with self._lock:
            return self._describe(self._clock())

    def _describe(self, current_time: float) -> str:
        if self.completed == 0:
            return f"the first step is not complete after {current_time - self._start_time:.0f} s"
        count = self.completed - self._window_completed
        if count > 0:
            self._step_seconds = (self._step_time - self._window_time) / count
        if self.completed <= self._warmup:
            parts = [f"warm-up step {self.completed} of {self._warmup}"]
        else:
            parts = [f"timed step {self.completed - self._warmup} of {self._steps}"]
        parts.append(f"{self._step_seconds:.4f} s per step")
        if self.rank_load is not None:
            load = f"load of the slowest rank {self.rank_load:.2f}"
            if self.rank_load_step != self.completed:
                load += f" in step {self.rank_load_step}"
            parts.append(load)
        waited = current_time - self._step_time
        if waited >= self._interval:
            parts.append(f"no step has ended for {waited:.0f} s")
        return ", ".join(parts)
