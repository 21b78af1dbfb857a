"""Progress of another trainer's rank under `megascale launch`: one line in its loop, without effect elsewhere.

import megascale.watch
megascale.watch.step(step, loss=loss.item())

`megascale.watch.huggingface` and `megascale.watch.lightning` have callbacks that call it.
"""

from __future__ import annotations

import operator
import os
import time
from pathlib import Path

from megascale.core.status import StatusFile
from megascale.watch.waits import WaitClock, start_wait_clock


class StepReporter:
    """The reporter of one rank.

    Args:
        folder: folder of the status files.
        rank: number of this rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._status = StatusFile(folder, rank)
        self._rank = rank
        self._number = -1
        self._time = 0.0
        self._seconds = 0.0
        self._waits: WaitClock | None = None

    def report(self, number: int, loss: float | None, grad_norm: float | None, tokens: int | None) -> None:
        """Store the step and print its metrics. A second report of the same step only prints."""
        if number != self._number:
            self._number = number
            self._measure_step()
            self._status.update("train", number)
        if self._rank == 0 and loss is not None:
            self._print_metrics(loss, grad_norm, tokens)

    def _measure_step(self) -> None:
        """Measure the step that ends now, and the part of it in which this rank did not wait for others."""
        current_time = time.perf_counter()
        self._seconds = current_time - self._time if self._time else 0.0
        self._time = current_time
        if self._waits is None:
            self._waits = start_wait_clock()
        elif self._seconds:
            self._status.compute_seconds = self._waits.measure_step(self._seconds)

    def _print_metrics(self, loss: float, grad_norm: float | None, tokens: int | None) -> None:
        # Callers pass numbers of NumPy and tensors too, whose representations the agent does not read.
        line = f"megascale step: {self._number} loss: {float(loss)!r}"
        if grad_norm is not None:
            line += f" grad_norm: {float(grad_norm)!r}"
        if tokens is not None and self._seconds:
            line += f" tokens_per_second: {tokens / self._seconds:.1f}"
        print(line, flush=True)


_reporter: StepReporter | None = None


def step(number: int, loss: float | None = None, tokens: int | None = None, grad_norm: float | None = None) -> None:
    """Report that step `number` of this rank is complete.

    The time in which the rank waits for others is measured too, so that a slow rank is named.

    Args:
        number: number of the step, increasing.
        loss: loss of the step. Rank 0 prints it, and the agent stores it in the run's metrics.
        tokens: tokens of the step over all ranks.
        grad_norm: norm of the gradient.
    """
    global _reporter
    if _reporter is None:
        folder = os.environ.get("MEGASCALE_STATUS")
        rank = os.environ.get("RANK", "")
        if folder is None or not rank.isdigit():
            return
        _reporter = StepReporter(Path(folder), int(rank))
    _reporter.report(operator.index(number), loss, grad_norm, tokens)
