"""Limits of steps that change nothing: an infinite or NaN loss or gradient, or loss weights that sum to 0."""

from __future__ import annotations

import math
from typing import NoReturn

from megascale.config import Config
from megascale.core.events import Event
from megascale.core.exit_record import ExitKind, attach_record
from megascale.errors import DataError, TrainingError
from megascale.train.checkpoint_policy import CheckpointPolicy
from megascale.train.reporter import Reporter


class SkippedSteps:
    """Counts and reports the skipped steps of this process, and ends training after train.max_skipped_steps in a row.

    Args:
        reporter: writes events and lines.
        checkpoint_policy: names the newest checkpoint in messages.

    Attributes:
        count: steps of this process with an infinite or NaN gradient, or without loss weights.
    """

    def __init__(self, config: Config, reporter: Reporter, checkpoint_policy: CheckpointPolicy) -> None:
        self.count = 0
        self._consecutive_count = 0
        self._config = config
        self._reporter = reporter
        self._checkpoint_policy = checkpoint_policy

    def add(self, grad_norm: float, *, has_weights: bool) -> None:
        """Count a step if it was skipped.

        Args:
            has_weights: whether the loss weights of the step's targets sum to more than 0.
        """
        if math.isfinite(grad_norm) and has_weights:
            self._consecutive_count = 0
        else:
            self._consecutive_count += 1
            self.count += 1

    def check(self, step: int, loss: float, grad_norm: float, *, has_weights: bool) -> None:
        """Report a skipped step if it is the first in a row.

        Raises TrainingError for an infinite or NaN loss, and after too many skipped steps; DataError if these were
        skipped because their loss weights sum to 0.
        """
        if not has_weights:
            self._check_weights(step)
        elif not math.isfinite(loss):
            self._raise_nonfinite_loss(step, loss)
        elif self._consecutive_count:
            self._check_gradients(step, grad_norm)

    def _raise_nonfinite_loss(self, step: int, loss: float) -> NoReturn:
        """Report an infinite or NaN loss, and raise TrainingError."""
        lr = self._config.lr
        self._reporter.write_event(Event.NONFINITE_LOSS, step=step, loss=str(loss))
        nonfinite = TrainingError(
            f"the loss of step {step} is {loss} and training stopped; {self._checkpoint_policy.describe_latest()}. "
            f"Lower --lr.peak (now {lr.peak:g}), lengthen --lr.warmup_steps (now {lr.warmup_steps}) or inspect "
            "that step's data (samples/ledger.jsonl), then run again"
        )
        raise attach_record(nonfinite, ExitKind.NONFINITE_LOSS, step=step)

    def _check_weights(self, step: int) -> None:
        """Report the first of consecutive steps without loss weights. Raise DataError after train.max_skipped_steps."""
        config, count = self._config, self._consecutive_count
        if count == 1:
            self._reporter.write_event(Event.STEP_WITHOUT_WEIGHTS, step=step)
            self._reporter.log_line(f"step {step} is skipped: the loss weights of its targets sum to 0")
        if self._has_skipped_too_many(step):
            raise DataError(
                f"{count} steps in a row, up to step {step}, were skipped; the loss weights of "
                f"the last one's targets sum to 0. {self._checkpoint_policy.describe_latest()}. Check the loss weights "
                f"of data.train={config.data.train}, raise --train.global_batch (now "
                f"{config.train.global_batch}), or raise --train.max_skipped_steps (now "
                f"{config.train.max_skipped_steps}; 0 allows any number)"
            )

    def _check_gradients(self, step: int, grad_norm: float) -> None:
        """Report the first of consecutive steps without finite gradients. Raise TrainingError after too many."""
        config, count = self._config, self._consecutive_count
        if count == 1:
            self._reporter.write_event(Event.NONFINITE_GRADIENT, step=step, grad_norm=str(grad_norm))
            self._reporter.log_line(f"step {step} is skipped: its gradient norm is {grad_norm}")
        if self._has_skipped_too_many(step):
            nonfinite = TrainingError(
                f"the gradients of {count} steps in a row, up to step {step}, are not finite (norm {grad_norm}), "
                f"so these steps changed nothing and training stopped; {self._checkpoint_policy.describe_latest()}. "
                f"Lower --lr.peak (now {config.lr.peak:g}) or --model.init_std (now "
                f"{config.model.init_std:g}), check --train.precision ({config.train.precision}) and the "
                "data of these steps (samples/ledger.jsonl), then run again. --train.max_skipped_steps (now "
                f"{config.train.max_skipped_steps}) sets how many in a row are allowed; 0 allows any number"
            )
            raise attach_record(nonfinite, ExitKind.NONFINITE_GRADIENT, step=step)

    def _has_skipped_too_many(self, step: int) -> bool:
        """Return whether training must end: too many consecutive steps were skipped, or all steps of the run.

        With train.max_skipped_steps=0 it never must.
        """
        limit, last_step = self._config.train.max_skipped_steps, self._config.train.steps
        has_skipped_all = step == last_step and self.count == last_step
        return limit > 0 and (self._consecutive_count >= limit or has_skipped_all)
