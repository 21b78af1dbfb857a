"""Reports that need the first steps of a start: their seconds, and the overlaps, kernels and graphs that run."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from megascale.core.status import StatusFile
from megascale.ops.compile_count import count_compilations
from megascale.parallel.launch_times import CHOICE_NAME
from megascale.train.engine import Engine
from megascale.train.rank_info import count_device_allocations
from megascale.train.reporter import Reporter

log = logging.getLogger("megascale.train")


class FirstSteps:
    """Measures the first steps of a start and reports what they show.

    Args:
        reporter: writes events and lines.
        status: this rank's status file, which receives the time of the first step's results.

    Attributes:
        number: number of the start's first step; 0 before `begin`.
        start_time: `time.monotonic()` at the beginning of the first step; None before, and once its results were read.
    """

    def __init__(self, engine: Engine, reporter: Reporter, status: StatusFile) -> None:
        self.number = 0
        self.start_time: float | None = None
        self._engine = engine
        self._reporter = reporter
        self._status = status
        self._gradient_seconds = 0.0  # from the start of the first step until the host had queued its gradients
        self._queue_seconds = 0.0  # from the start of the first step until the host had queued it
        self._allocations = 0  # of device memory in this process, before the first step
        self._has_reported_active = False
        self._has_reported_choice = False
        self._has_reported_failure = False

    def begin(self, number: int) -> None:
        """Measure from now on. `number` is the step that follows."""
        self.number = number
        self.start_time = time.monotonic()
        self._allocations = count_device_allocations(self._engine.device)

    def note_gradients(self) -> None:
        """Store when the host has queued the gradients of the first step."""
        if self.start_time is not None:
            self._gradient_seconds = time.monotonic() - self.start_time

    def log_second_step(self, step: int, queue_start: float) -> None:
        """Log the seconds of the host for the second step, if `step` is this step.

        Args:
            queue_start: `time.monotonic()` at its beginning.
        """
        if step == self.number + 1:
            log.info("second step queued in %.2f s", time.monotonic() - queue_start)

    def end(self) -> None:
        """Log the seconds of the first step when its results have been read. Later calls do nothing."""
        if self.start_time is None:
            return
        log.info(
            "first step complete after %.2f s, queued after %.2f s, its gradients after %.2f s, %d allocations of "
            "device memory",
            time.monotonic() - self.start_time,
            self._queue_seconds,
            self._gradient_seconds,
            count_device_allocations(self._engine.device) - self._allocations,
        )
        self.start_time = None
        assert self._status.start is not None
        self._status.start = replace(self._status.start, stepped_ns=time.time_ns())

    def report_choices(self) -> None:
        """Report what runs, each fact once. Call it when a step is queued: the first one has made most choices."""
        if not self._has_reported_active:
            self._report_active()
        self._report_graph_choice()
        self._report_failed_graphs()

    def _list_choices(self) -> dict[str, str]:
        """Return descriptions of the overlaps and kernels by name."""
        return self._engine.active | self._engine.runtime.kernels.list_choices()

    def _report_active(self) -> None:
        """Report which overlaps and kernels run."""
        self._has_reported_active = True
        if self.start_time is not None:
            self._queue_seconds = time.monotonic() - self.start_time
        log.info("compilations in this process: %s", count_compilations().describe())
        self._reporter.report_active(self._list_choices())

    def _report_graph_choice(self) -> None:
        """Report once whether measured launches made the ranks capture graphs."""
        choice = self._engine.graph_choice
        if choice is None or choice.decision is None or self._has_reported_choice:
            return
        self._has_reported_choice = True
        self._reporter.report_late_choice(CHOICE_NAME, self._list_choices())

    def _report_failed_graphs(self) -> None:
        """Report once that a capture failed."""
        graphs = self._engine.graphs
        if graphs is None or not graphs.failure or self._has_reported_failure:
            return
        self._has_reported_failure = True
        line = f"CUDA graphs are off from here on: {graphs.failure}; --kernels.graphs=off skips the attempt"
        self._reporter.log_line(line)
