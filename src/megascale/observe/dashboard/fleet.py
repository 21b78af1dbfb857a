"""The table of all runs in a folder: state, progress, speed, effective time and last event of each run.

Each request for the table reads the ends of the runs' files. The effective time needs complete files. Within a time
limit per request it is measured for runs with long files; for the remaining runs it is measured by later requests. A
run that has ended is read again only if its files change.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megascale.core.strict_json import to_float
from megascale.observe.dashboard.effective_time import measure_effective_time
from megascale.observe.dashboard.rank_values import to_json_number
from megascale.observe.dashboard.run_reader import ENDED_PHASES, ReadJob, RunList, RunReader

NEWEST_BYTES = 16 << 10  # bytes that are read from the end of metrics and events; about 50 steps
_RECENT_STEPS = 50  # the median of these steps is the present speed
_FILES = ("metrics.jsonl", "events.jsonl", "config.toml", "journal.sqlite", "journal.sqlite-wal")
_MEASURE_SECONDS = 0.5  # time per request for effective times that need complete files
_MEASURE_INTERVAL_SECONDS = 60.0  # the effective time of a live run is measured again after this time
_MAX_READS = 64  # refreshes for a complete file

# Inode, size and modification time of each file; None for a missing file.
Signature = tuple[tuple[int, int, int] | None, ...]


@dataclass
class _Run:
    """The state of a run at the last request.

    Attributes:
        signature: state of the run's files when they were read.
        share: effective time divided by total time; None if the run has none or it is unmeasured.
        share_time: time of the measurement of `share` (time.monotonic).
        share_signature: state of the files at the measurement of `share`.
        is_partial: only the ends of the files were read, which do not suffice for the effective time.
    """

    signature: Signature
    row: dict[str, Any]
    share: float | None = None
    share_time: float = -1e9
    share_signature: Signature = ()
    is_partial: bool = False


class Fleet:
    """The table of all runs in a folder.

    Args:
        read_job: returns the state of a run's driver or journal, None if it was not launched.
        measure_seconds: time limit per request for effective times that need complete files.
    """

    def __init__(self, read_job: ReadJob, measure_seconds: float = _MEASURE_SECONDS) -> None:
        self._read_job = read_job
        self._measure_seconds = measure_seconds
        self._runs: dict[Path, _Run] = {}

    def list_rows(self, folder: Path) -> dict[str, Any]:
        """Return the rows, the most recently written run first, and the number of unmeasured effective times.

        Raises DataError if the folder has no runs.
        """
        runs = RunList(folder)
        paths = [folder] if runs.is_single else [folder / name for name in runs.list_names()]
        self._runs = {path: self._read_run(path) for path in paths}
        remaining = self._measure_shares()
        return {"runs": [run.row | {"effective": run.share} for run in self._runs.values()], "unmeasured": remaining}

    def _read_run(self, path: Path) -> _Run:
        signature = _read_signature(path)
        previous = self._runs.get(path)
        # A live run is read even if its files have not changed, since it may have become silent.
        if previous is not None and previous.signature == signature and not previous.row["alive"]:
            return previous
        reader = RunReader(path, self._read_job, NEWEST_BYTES)
        reader.refresh()
        run = _Run(signature, _make_row(path, reader))
        run.is_partial = reader.is_partial
        if not run.is_partial:
            run.share = _measure_share(reader, run.row["alive"])
        elif previous is not None:
            run.share = previous.share
            run.share_time = previous.share_time
            run.share_signature = previous.share_signature
        return run

    def _measure_shares(self) -> int:
        """Measure effective times within the time limit, at least one; return how many remain unmeasured."""
        begin = time.monotonic()
        pending = [path for path, run in self._runs.items() if run.is_partial and run.share_signature != run.signature]
        pending.sort(key=lambda path: self._runs[path].share_time)
        for path in pending:
            run = self._runs[path]
            is_first = run.share_time < 0
            if not is_first and time.monotonic() - run.share_time < _MEASURE_INTERVAL_SECONDS and run.row["alive"]:
                continue
            reader = RunReader(path, self._read_job)
            _read_complete_files(reader)
            run.share = _measure_share(reader, run.row["alive"])
            run.share_time = time.monotonic()
            run.share_signature = run.signature
            if time.monotonic() - begin > self._measure_seconds:
                break
        return sum(run.is_partial and run.share_time < 0 for run in self._runs.values())


def _read_signature(path: Path) -> Signature:
    states: list[tuple[int, int, int] | None] = []
    for name in _FILES:
        try:
            status = os.stat(path / name)
            states.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            states.append(None)
    return tuple(states)


def _read_complete_files(reader: RunReader) -> None:
    """Refresh until there are no new records, since one refresh reads a limited number of bytes."""
    for _ in range(_MAX_READS):
        before = (reader.metrics.rows, reader.event_count)
        reader.refresh()
        if before == (reader.metrics.rows, reader.event_count):
            return


def _measure_share(reader: RunReader, is_alive: bool) -> float | None:
    current_time = time.time() if is_alive else None
    return to_json_number(
        measure_effective_time(reader.metrics.read_columns(), list(reader.events), current_time).share
    )


def _make_row(path: Path, reader: RunReader) -> dict[str, Any]:
    job, problem = reader.read_job()
    state = reader.describe_state(job)
    newest = reader.events[-1] if reader.events else {}
    columns = reader.metrics.read_columns()
    row = {key: state[key] for key in ("phase", "alive", "attempt", "step", "steps", "world")}
    row["name"] = path.absolute().name
    row["why"] = problem or state["why"]
    # The driver on another machine cannot be asked, so a recent record shows that the job is alive.
    if not row["alive"] and row["phase"] not in ENDED_PHASES.values() and reader.has_recent_record():
        row["alive"] = True
        row["why"] = ""
    for key in ("mfu", "tokens_per_second", "loss"):
        values = columns.get(key, np.zeros(0))
        values = values[np.isfinite(values)][-_RECENT_STEPS:]
        row[key] = float(np.median(values)) if len(values) else None
    row["event"] = str(newest.get("event", ""))[:100]
    row["event_time"] = to_json_number(to_float(newest.get("time")))
    return row
