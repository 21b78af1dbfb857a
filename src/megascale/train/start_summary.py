"""Summary of a start on rank 0: the state that training goes on from, as an event, lines and the rank's log."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from megascale import checkpoint
from megascale.checkpoint import setting_changes
from megascale.config import Config
from megascale.core.events import Event
from megascale.core.flops import CONVENTION, DOCUMENT_CONVENTION, FlopCount, document_flops
from megascale.core.process_orders import MISSING_VARIABLE
from megascale.core.stopwatch import Stopwatch
from megascale.data.dataset.samples import SampleSource
from megascale.optim.learning_rate import explain_warmup
from megascale.rendezvous.groups import Groups
from megascale.train.engine import Engine
from megascale.train.reporter import Reporter
from megascale.train.resume import ResumeGuard
from megascale.train.run_folder import RunFolder
from megascale.train.state_loading import StateLoader
from megascale.train.state_retention import StateRetention

log = logging.getLogger("megascale.train")


class StartSummary:
    """Reports one start of a run.

    Args:
        reporter: writes the event and the lines.
        resume_guard: has notes and the settings that have changed.
        loader: has loaded the state.
        retention: has made or retained the engine.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        reporter: Reporter,
        *,
        checkpointer: checkpoint.Checkpointer,
        resume_guard: ResumeGuard,
        loader: StateLoader,
        retention: StateRetention,
    ) -> None:
        self._config = config
        self._folder = folder
        self._reporter = reporter
        self._checkpointer = checkpointer
        self._resume_guard = resume_guard
        self._loader = loader
        self._retention = retention

    def write_event(self, world: int, *, step: int, samples: int) -> None:
        """Write the event of a resumed run, or of a run that starts at step 0.

        Args:
            world: number of ranks.
            step, samples: steps and samples trained before.
        """
        source = self._checkpointer.loaded_from
        if source != "nothing":
            details: dict[str, Any] = {"step": step, "samples": samples, "loaded_from": source}
            details |= self._loader.measures
            if self._resume_guard.changes:
                details["changed"] = {
                    change.key: [change.saved, change.present] for change in self._resume_guard.changes
                }
            self._reporter.write_event(Event.RESUMED, world=world, **details)
        elif self._config.checkpoint.resume is False and self._folder.metrics.exists():
            note = "checkpoint.resume=false: starting over"
            self._reporter.write_event(Event.RUN_STARTED, world=world, note=note)
        else:
            convention = DOCUMENT_CONVENTION if self._config.data.document_mask else CONVENTION
            self._reporter.write_event(Event.RUN_STARTED, world=world, flops_convention=convention)

    def print_lines(self, step: int, groups: Groups | None, data_notes: Sequence[str]) -> None:
        """Print the start-up lines: groups, resumed step, notes and changed settings."""
        print_line = self._reporter.log_line
        if self._config.resilience.continue_replicas and MISSING_VARIABLE not in os.environ:
            print_line("resilience.continue_replicas=true needs a driver, and there is none: use `megascale launch`")
        if groups is not None:
            print_line(groups.report())
        if step and self._checkpointer.loaded_from != "nothing":
            source = self._checkpointer.loaded_from
            line = f"resuming {self._folder.path} after step {step}"
            if source != "storage":
                line += f" from {source}"
            seconds = self._loader.measures["load_seconds"]
            if seconds >= 1.0:
                line += f": {self._loader.measures['read_bytes'] / 1e9:.1f} GB by rank 0 in {seconds:.1f} s"
            print_line(line)
        if self._retention.unconfirmed_note:
            print_line(self._retention.unconfirmed_note)
        for note in [*self._resume_guard.notes, *data_notes]:
            print_line(note)
        warmup_note = explain_warmup(self._config.lr, self._config.train.steps)
        if warmup_note:
            print_line(warmup_note)
        if self._resume_guard.changes:
            print_line(setting_changes.format_changes(self._resume_guard.changes, step))

    def log_seconds(self, stopwatch: Stopwatch, engine: Engine) -> None:
        """Log the seconds from the moment that this rank met the others until it can train.

        Args:
            stopwatch: has measured the phases of the start.
        """
        total = sum(stopwatch.timings.values())
        text = f"ready to train {total:.2f} s after the groups: {stopwatch.describe()}"
        if self._loader.parts:
            text += f"; of the load: {self._loader.parts}"
        if self._checkpointer.staging_parts:
            text += f"; of the staging memory: {self._checkpointer.staging_parts}"
        if self._retention.has_rejoined:
            text += "; the engine of the attempt before"
        else:
            parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in engine.build_seconds.items())
            text += f"; a new engine: {parts}"
        log.info("%s", text)


def measure_documents(config: Config, source: SampleSource) -> tuple[list[str], FlopCount]:
    """Return how full the packed samples are, per file, and FLOPs per token with attention within documents only."""
    notes: list[str] = []
    document_counts: dict[int, float] = {}  # weighted number of documents by length
    padding = 0.0
    weights = config.data.weights or [1.0] * len(source.files)
    for file, weight, report in zip(config.data.train, weights, source.report_packing(), strict=True):
        document_limit = source.fields.max_documents - 1  # the padding of a sample counts as its last document
        notes.append(f"{file}: packing {config.data.packing}, at most {document_limit} documents per sample: {report}")
        # Without data.weights every sample of every file counts once. A weight is for all samples of its file.
        sample_weight = weight if config.data.weights is None else weight / report.samples
        padding += sample_weight * report.padding
        for length, count in zip(report.lengths.tolist(), report.counts.tolist(), strict=True):
            document_counts[length] = document_counts.get(length, 0.0) + sample_weight * count
    return notes, document_flops(config.model, document_counts, padding)
