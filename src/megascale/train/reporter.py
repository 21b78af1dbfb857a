"""Output of a run on rank 0: metrics to sinks, events and samples to the run folder, lines to the terminal."""

from __future__ import annotations

import os
from typing import Any

from megascale.config import Config
from megascale.core.events import Event
from megascale.core.json_lines import append_record
from megascale.errors import describe_install
from megascale.observe.metrics import JsonLines, MetricSink, SinkRequest, Terminal, has_tensorboard, open_sinks
from megascale.train.run_folder import RunFolder


class Reporter:
    """Writes one run's output. On all ranks but rank 0 every method does nothing.

    Args:
        folder: run folder for events and metrics.
        is_leader: whether this is rank 0.
    """

    def __init__(self, folder: RunFolder, is_leader: bool) -> None:
        self.folder = folder
        self.is_leader = is_leader
        self._sinks: list[MetricSink] = []
        self._terminal: Terminal | None = None

    def open(self, config: Config, step: int) -> None:
        """Open the sinks of a run that resumes after `step`. If a sink cannot be opened, `close` closes the others."""
        if not self.is_leader:
            return
        train, observe = config.train, config.observe
        self._terminal = Terminal(train.steps, train.log_interval, observe.progress)
        self._sinks = [JsonLines(self.folder.metrics), self._terminal]
        for sink in open_sinks(SinkRequest(self.folder.path, config, step)):
            self._sinks.append(sink)  # one by one: `open_sinks` may raise at the next sink
        if observe.tensorboard and not has_tensorboard():
            self.log_line(
                f"TensorBoard files are not written: the package is not installed; {describe_install('tensorboard')}"
            )

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def write_metrics(self, record: dict[str, Any]) -> None:
        """Write the metrics of a step or an evaluation."""
        for sink in self._sinks:
            sink.write(dict(record))  # a sink may change its record, and the next sink must not see that

    def write_samples(self, step: int, first: int, count: int, ids: str, read: dict[str, Any]) -> None:
        """Write a step's record into the ledger of samples.

        Args:
            first, count: number of the step's first sample, and number of samples.
            ids: hash of the samples' ids.
            read: totals over all samples that the ranks have read up to this step.
        """
        if self.is_leader:
            record = {"step": step, "first": first, "count": count, "ids": ids, "read": read}
            append_record(self.folder.samples, record)

    def write_event(self, event: Event, **details: Any) -> None:
        """Append an event to events.jsonl. Steps and recoveries do not wait until it is on the disk."""
        if self.is_leader:
            self.folder.append_event(event, awaits_disk=False, **details)

    def write_last_event(self, event: Event, **details: Any) -> None:
        """Append the event of the run's end to events.jsonl. All events are on the disk when this returns."""
        if self.is_leader:
            self.folder.append_event(event, **details)

    def log_line(self, text: str) -> None:
        """Print a line on the terminal, if the sinks are open."""
        if self._terminal is not None:
            self._terminal.print_line(text)

    def report_active(self, choices: dict[str, str]) -> None:
        """Report which overlaps and kernels run, why others do not, and the NCCL_ variables of the environment.

        Args:
            choices: descriptions by name. They include every feature that was requested and is off.
        """
        choices = _add_nccl_settings(choices)
        self.write_event(Event.ACTIVE, **choices)
        names_by_choice: dict[str, list[str]] = {}
        for name, choice in choices.items():
            names_by_choice.setdefault(choice, []).append(name)
        for choice, names in names_by_choice.items():
            self.log_line(f"active: {', '.join(names)}: {choice}")

    def report_late_choice(self, name: str, choices: dict[str, str]) -> None:
        """Report a choice that a later step than the first one makes.

        Args:
            choices: as for `report_active`, all of them, since readers use the newest event alone.
        """
        choices = _add_nccl_settings(choices)
        self.write_event(Event.ACTIVE, **choices)
        self.log_line(f"active: {name}: {choices[name]}")


def _add_nccl_settings(choices: dict[str, str]) -> dict[str, str]:
    """Return `choices` with the NCCL_ variables of the environment, if there are any."""
    variables = sorted(name for name in os.environ if name.startswith("NCCL_"))
    if not variables:
        return choices
    settings = " ".join(f"{name}={os.environ[name][:200]}" for name in variables)
    return choices | {"NCCL's settings": settings}
