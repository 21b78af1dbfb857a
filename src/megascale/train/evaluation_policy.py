"""Policy of evaluations: after which steps the held-out file is evaluated, and the records of the losses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from megascale.config import Config
from megascale.core.events import Event
from megascale.core.spans import SpanKind
from megascale.core.status import StatusFile
from megascale.train.engine import Engine
from megascale.train.evaluation import Evaluation, evaluate_file
from megascale.train.reporter import Reporter


class EvaluationPolicy:
    """Evaluates the held-out file of a run, at intervals of steps and at the run's end.

    Args:
        reporter: writes metrics and events.
        status: this rank's status file.
        report: called with each evaluation, on all ranks.

    Attributes:
        is_awaited: whether the evaluation after the last counted step is due and not complete.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        reporter: Reporter,
        status: StatusFile,
        report: Callable[[Evaluation], None],
    ) -> None:
        self.is_awaited = False
        self._engine = engine
        self._config = config
        self._reporter = reporter
        self._status = status
        self._report = report

    def is_due(self, step: int) -> bool:
        """Return whether the held-out file is evaluated after a step that is not the run's last one."""
        train = self._config.train
        if self._config.data.valid is None or not train.eval_interval:
            return False
        return 0 < step < train.steps and step % train.eval_interval == 0

    def evaluate(
        self, step: int, trained_tokens: int, *, is_last: bool = False, is_repeated: bool = False
    ) -> Evaluation | None:
        """Evaluate train.eval_samples windows of the held-out file, the same ones each time, and record the loss.

        If `is_last`, evaluate the complete file too; its loss has the key valid_whole_loss in the metrics. Return the
        evaluation with the most windows; None without a held-out file.

        Args:
            step: the last step, whose results were read.
            is_repeated: whether the evaluation precedes the first step of this start. The status then stays "load",
                since agent and driver conclude from "evaluate" that the start has completed a step.
        """
        prefix = self._config.data.valid
        if prefix is None:
            return None
        if not is_repeated:
            self._status.update("evaluate", step)
        recorder = self._engine.runtime.recorder
        recorder.begin_action(SpanKind.EVALUATE)
        evaluation = evaluate_file(self._engine, self._config, prefix, self._config.train.eval_samples)
        record = {
            "step": step,
            "time": time.time(),
            "tokens": trained_tokens,
            "valid_loss": evaluation.loss,
            "valid_tokens": evaluation.tokens,
        }
        if is_last:
            if not evaluation.complete:
                self._report(evaluation)
                evaluation = evaluate_file(self._engine, self._config, prefix)
            record |= {"valid_whole_loss": evaluation.loss, "valid_whole_tokens": evaluation.tokens}
        recorder.end_action()
        self._engine.check_peers()
        if evaluation.bits_per_byte is not None:
            record["valid_bits_per_byte"] = evaluation.bits_per_byte
        self._reporter.write_metrics(record)
        self.is_awaited = False
        self._reporter.write_event(
            Event.EVALUATED,
            step=step,
            loss=evaluation.loss,
            tokens=evaluation.tokens,
            bits_per_byte=evaluation.bits_per_byte,
        )
        self._report(evaluation)
        return replace(evaluation, step=step)
