"""Prometheus metrics from the records of a run folder: speed, effective time, commits, and restarts by cause."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from pathlib import Path

import numpy as np

from megascale.core.events import Event, is_plausible_time
from megascale.core.strict_json import to_float
from megascale.observe.dashboard.effective_time import CAUSES, TRAINING, choose_cause, measure_effective_time
from megascale.observe.dashboard.run_reader import RunReader
from megascale.observe.prometheus import Family

_RECENT_STEPS = 50  # the median of these steps is the present speed


class RunRecords:
    """The metrics of a run folder. Every call reads only the records that were added since the last call.

    Args:
        run: the run folder, which may still be empty.
    """

    def __init__(self, run: Path) -> None:
        self._reader = RunReader(run, lambda folder: None)
        self._clear()

    def _clear(self) -> None:
        self._processed_count = 0  # processed events
        self._attempt_count = 0
        self._restart_counts: Counter[str] = Counter()  # by cause
        self._causes: list[str] = []  # causes since the last start
        self._mismatch_count = 0
        self._begin_time = math.nan  # times are seconds since 1970
        self._last_commit_time = math.nan

    def read_families(self, is_alive: bool) -> list[Family]:
        """Read new records and return the metrics.

        Args:
            is_alive: the run has not ended, so its time includes the time since the last record.
        """
        self._reader.refresh()
        self._count_events()
        restarts = Family("megascale_restarts_total", "counter", "Restarts of the trainers by cause.")
        for cause, count in sorted(self._restart_counts.items()):
            restarts.add(count, cause=cause.replace(" ", "_"))
        mismatches = Family("megascale_checksum_mismatches_total", "counter", "Replicas whose weights differed.")
        counters = [restarts, mismatches.add(self._mismatch_count)]
        return self._make_speed_families() + self._make_time_families(is_alive) + counters

    def _count_events(self) -> None:
        new_count = self._reader.event_count - self._processed_count
        if new_count < 0:  # The file was replaced.
            self._clear()
            new_count = self._reader.event_count
        events = self._reader.events
        for event in itertools.islice(events, max(0, len(events) - new_count), None):
            self._count_event(event["event"], event.get("action"), to_float(event.get("time")))
        self._processed_count = self._reader.event_count

    def _count_event(self, kind: str, action: object, event_time: float) -> None:
        if is_plausible_time(event_time):
            if math.isnan(self._begin_time):
                self._begin_time = event_time
            if kind == Event.CHECKPOINT_SAVED:
                self._last_commit_time = event_time
        if kind == Event.CHECKSUM_MISMATCH:
            self._mismatch_count += 1
        if kind in CAUSES and action != "alert":
            self._causes.append(CAUSES[Event(kind)])
        if kind == Event.ATTEMPT_STARTED:
            self._attempt_count += 1
            if self._attempt_count > 1:
                self._restart_counts[choose_cause(self._causes) if self._causes else "unknown"] += 1
            self._causes.clear()

    def _make_speed_families(self) -> list[Family]:
        """Return MFU and throughput, the median of the last steps."""
        families = []
        for name, key, text in (
            ("megascale_mfu_ratio", "mfu", "Model FLOPs utilisation, the median of the last 50 steps."),
            ("megascale_tokens_per_second", "tokens_per_second", "Tokens per second, the median of the last 50 steps."),
        ):
            family = Family(name, "gauge", text)
            values = self._reader.metrics.read_columns().get(key, np.zeros(0))
            values = values[np.isfinite(values)][-_RECENT_STEPS:]
            if len(values):
                family.add(float(np.median(values)))
            families.append(family)
        return families

    def _make_time_families(self, is_alive: bool) -> list[Family]:
        current_time = time.time() if is_alive else None
        effective = measure_effective_time(self._reader.metrics.read_columns(), list(self._reader.events), current_time)
        ratio = Family("megascale_effective_time_ratio", "gauge", "Time of steps that counted over the run's time.")
        lost = Family("megascale_lost_time_seconds", "gauge", "Time without training by cause.")
        if effective.total > 0:
            ratio.add(effective.share)
        for cause, seconds in effective.seconds.items():
            if cause != TRAINING:
                lost.add(seconds, cause=cause.removeprefix("stopped: ").replace(" ", "_"))
        age = Family("megascale_commit_age_seconds", "gauge", "Time since the last commit, or since the first event.")
        last_time = self._begin_time if math.isnan(self._last_commit_time) else self._last_commit_time
        if not math.isnan(last_time):
            age.add(max(0.0, time.time() - last_time))
        return [ratio, lost, age]
