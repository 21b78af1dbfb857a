"""What a run says of itself: metrics to its sinks, events to the run folder, lines to the terminal. Rank 0 speaks."""

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
    """The voice of one rank's run; on others than rank 0 all of it is silent.

    Args:
        folder: where events and metrics go.
        leader: whether this is rank 0.
    """

    def __init__(self, folder: RunFolder, leader: bool) -> None:
        self.folder, self.leader = folder, leader
        self._sinks: list[MetricSink] = []
        self._terminal: Terminal | None = None

    def open(self, config: Config, step: int) -> None:
        """Open the sinks of a run that goes on after `step`; what is open is closed by `close`, whatever fails."""
        if not self.leader:
            return
        train, observe = config.train, config.observe
        self._terminal = Terminal(train.steps, train.log_interval, observe.progress)
        self._sinks = [JsonLines(self.folder.metrics), self._terminal]
        for sink in open_sinks(SinkRequest(self.folder.path, config, step)):
            self._sinks.append(sink)  # one by one: those that are open are closed where the next cannot be had
        if observe.tensorboard and not has_tensorboard():
            self.say(f"no TensorBoard files: the package is not installed; {describe_install('tensorboard')}")

    def close(self) -> None:
        """Let go of the sinks."""
        for sink in self._sinks:
            sink.close()

    def record(self, record: dict[str, Any]) -> None:
        """Metrics of a step or an evaluation."""
        for sink in self._sinks:
            sink.write(record)

    def samples(self, step: int, first: int, count: int, ids: str, read: dict[str, Any]) -> None:
        """Write the step's line of the ledger: the samples that were due, and the totals of what ranks have read."""
        if self.leader:
            line = {"step": step, "first": first, "count": count, "ids": ids, "read": read}
            append_record(self.folder.samples, line)

    def event(self, event: Event, **details: Any) -> None:
        """A line of events.jsonl, on disk before returning."""
        if self.leader:
            self.folder.append_event(event, **details)

    def say(self, text: str) -> None:
        """A line on the terminal, once sinks are open."""
        if self._terminal is not None:
            self._terminal.print_line(text)

    def active(self, choices: dict[str, str]) -> None:
        """Which overlaps and kernels run, why not those that do not, and what NCCL was told by its environment: nothing
        is off in silence."""
        told = " ".join(f"{name}={value[:200]}" for name, value in sorted(os.environ.items()) if name[:5] == "NCCL_")
        choices = choices | ({"NCCL's settings": told} if told else {})
        self.event(Event.ACTIVE, **choices)
        by_choice: dict[str, list[str]] = {}
        for what, choice in choices.items():
            by_choice.setdefault(choice, []).append(what)
        for choice, names in by_choice.items():
            self.say(f"active: {', '.join(names)}: {choice}")
