"""Progress reports of a rank that runs any training script under `megascale launch`.

The script's training loop needs one line:

    import megascale.watch
    megascale.watch.step(step, loss=loss.item())

Without `megascale launch` this line has no effect. `megascale.watch.huggingface` and `megascale.watch.lightning` have
callbacks that call `step`.
"""

from __future__ import annotations

import operator
import os
import time
from pathlib import Path

from megascale.core.status import StatusFile
from megascale.watch.waits import WaitClock, start_wait_clock


class StepReporter:
    """Reporter of one rank, which writes the rank's status file and prints metrics.

    Args:
        folder: folder of the status files of all ranks.
        rank: global rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._status = StatusFile(folder, rank)
        self._rank = rank
        self._step = -1
        self._step_end = 0.0  # time.perf_counter() at the last reported step, 0 before the first report
        self._step_seconds = 0.0
        self._wait_clock: WaitClock | None = None

    def report(self, step: int, loss: float | None, grad_norm: float | None, tokens: int | None) -> None:
        """Write the step into the status file and print its metrics. A second report of the same step only prints."""
        if step != self._step:
            self._step = step
            self._measure_step()
            self._status.update("train", step)
        if self._rank == 0 and loss is not None:
            self._print_metrics(loss, grad_norm, tokens)

    def _measure_step(self) -> None:
        """Measure the duration of the step that ends now, with and without this rank's waits for other ranks."""
        current_time = time.perf_counter()
        if self._step_end:
            self._step_seconds = current_time - self._step_end
        self._step_end = current_time
        if self._wait_clock is None:
            self._wait_clock = start_wait_clock()
        elif self._step_seconds:
            self._status.compute_seconds = self._wait_clock.measure_step(self._step_seconds)

    def _print_metrics(self, loss: float, grad_norm: float | None, tokens: int | None) -> None:
        # Callers also pass NumPy numbers and tensors, and the agent cannot parse their representations.
        line = f"megascale step: {self._step} loss: {float(loss)!r}"
        if grad_norm is not None:
            line += f" grad_norm: {float(grad_norm)!r}"
        if tokens is not None and self._step_seconds:
            line += f" tokens_per_second: {tokens / self._step_seconds:.1f}"
        print(line, flush=True)


_reporter: StepReporter | None = None


def step(number: int, loss: float | None = None, tokens: int | None = None, grad_norm: float | None = None) -> None:
    """Report that step `number` of this rank is complete.

    The reporter also measures how long this rank waits for other ranks, from which the driver finds a slow rank.

    Args:
        number: step number, which increases from call to call.
        loss: loss of the step. Rank 0 prints it, and the agent stores it in the run's metrics.
        tokens: number of tokens in the step, summed over all ranks.
        grad_norm: global norm of the gradient.
    """
    global _reporter
    if _reporter is None:
        folder = os.environ.get("MEGASCALE_STATUS")
        rank = os.environ.get("RANK", "")
        if folder is None or not rank.isdigit():
            return
        _reporter = StepReporter(Path(folder), int(rank))
    _reporter.report(operator.index(number), loss, grad_norm, tokens)
