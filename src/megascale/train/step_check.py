"""Interface of a check that the engine calls in its steps, such as replays (train/replay_check.py)."""

from __future__ import annotations

from typing import Protocol

from megascale.parallel.pipeline import EagerRunner


class StepCheck(Protocol):
    """Checks the results of some steps."""

    def begin_step(self, step: int) -> None:
        """Prepare for a step, before its first micro-batch."""

    def watch(self, runner: EagerRunner) -> EagerRunner:
        """Return a runner that observes the step's micro-batches, or `runner` itself."""

    def needs_eager_step(self) -> bool:
        """Return whether the present step must run without CUDA graphs, which would hide its results."""

    def end_step(self, step: int) -> None:
        """Compare the results when gradients are complete, before the update."""

    def restart(self) -> None:
        """Forget the results of earlier steps, and restore what the check has replaced in the engine."""
