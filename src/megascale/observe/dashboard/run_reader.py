"""Reading of a folder of runs, and of a run folder except its spans: metrics, events, checkpoints, settings.

A *launched* run has a driver, which `megascale launch` starts and which keeps a journal. Other runs have only the
records of their trainers.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import socket
import time
import tomllib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megascale.config.text_files import decode_text
from megascale.core.calls import read_calls
from megascale.core.events import Event, is_plausible_time
from megascale.core.recovery_record import RecoveryRecord
from megascale.core.status import read_status
from megascale.core.strict_json import to_float
from megascale.core.untrusted_files import is_plain_name, read_bounded
from megascale.errors import DataError, MegascaleError
from megascale.observe.dashboard.effective_time import BETWEEN_STEPS, measure_effective_time
from megascale.observe.dashboard.metric_columns import MetricColumns, RecordTail
from megascale.observe.dashboard.rank_values import to_json_number
from megascale.observe.hang.evidence import read_process_state

ReadJob = Callable[[Path], dict[str, Any] | None]  # returns the state of a run's driver or journal
# A folder that contains one of these is a run folder.
_RUN_FILES = ("metrics.jsonl", "events.jsonl", "journal.sqlite", "config.toml", "spans")
_MIN_CLOCK_JUMP_SECONDS = 10.0  # the clocks of hosts differ by less
_MAX_RUNS = 2000
_MAX_EVENTS = 20_000
_MAX_CONFIG_BYTES = 1 << 20
_MAX_CHECKPOINTS = 1000
_MAX_RECOVERIES = 50
_MAX_RESTARTS = 100
_MAX_ATTEMPTS = 1 << 31  # a larger attempt number comes from a damaged record
_JOB_SECONDS = 0.5  # an answer of the driver is reused for this time
# A run without a driver counts as dead after _QUIET_SECONDS without a record, or after the time of _QUIET_STEPS steps
# if that is longer.
_QUIET_SECONDS = 30.0
_QUIET_STEPS = 20
# Name of the activity since the last step, by the phase of rank 0's status.
_ACTIVITIES = {
    "start": "starting and loading",
    "load": "starting and loading",
    "evaluate": "evaluation",
    "save": "saving checkpoints",
}
_TRAIN_HEADER = re.compile(r"^\[train\][ \t]*$", re.MULTILINE)
_TABLE_HEADER = re.compile(r"^\[", re.MULTILINE)
ENDED_PHASES = {"run_finished": "done", "run_failed": "failed", "interrupted": "interrupted"}
# Metrics whose newest values the overview shows as tiles.
TILES = ("loss", "valid_loss", "tokens_per_second", "mfu", "memory_gib", "grad_norm", "learning_rate", "seconds")


class RunList:
    """The runs of a folder by name. Folders outside of it cannot be read.

    Raises DataError if the folder is neither a run folder nor a folder of run folders.

    Attributes:
        is_single: whether the folder is itself a run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder; name a run folder, such as runs/stdlib, or a folder of them")
        self.is_single = _is_run(folder)
        if not self.is_single and not self.list_names():
            raise DataError(
                f"{folder} holds no run: no folder in it has {', '.join(_RUN_FILES)}; name a run folder "
                "or a folder of them"
            )

    def list_names(self) -> list[str]:
        """Return the names of the runs, the most recently written run first."""
        if self.is_single:
            return [self.folder.absolute().name or "run"]
        try:
            with os.scandir(self.folder) as entries:
                names = [entry.name for entry in entries if is_plain_name(entry.name) and entry.is_dir()]
        except OSError:
            return []
        runs = [(_read_last_write_time(self.folder / name), name) for name in names if _is_run(self.folder / name)]
        return [name for _, name in sorted(runs, reverse=True)[:_MAX_RUNS]]

    def list_unlisted(self) -> list[Path]:
        """Return the run folders that the pages leave out, because their names are not plain text."""
        if self.is_single:
            return []
        try:
            with os.scandir(self.folder) as entries:
                folders = [Path(entry.path) for entry in entries if not is_plain_name(entry.name) and entry.is_dir()]
        except OSError:
            return []
        return sorted(folder for folder in folders if _is_run(folder))

    def find_folder(self, name: str) -> Path:
        """Return the folder of a run. Raises DataError if there is no run of that name."""
        if self.is_single and name == self.list_names()[0]:
            return self.folder
        if not self.is_single and is_plain_name(name) and _is_run(self.folder / name):
            return self.folder / name
        raise DataError(f"there is no run {name[:100]!r} in {self.folder}")


def _describe_clock(columns: dict[str, Any]) -> list[str]:
    """Return a sentence if the times of steps go back, in a list that is otherwise empty.

    Args:
        columns: columns of MetricColumns, in the order in which the records were written.
    """
    times = columns.get("time", np.zeros(0))
    times = times[np.isfinite(times)]
    largest_jump = float(np.max(times[:-1] - times[1:], initial=0.0))
    if largest_jump < _MIN_CLOCK_JUMP_SECONDS:
        return []
    return [f"the clock went back by {largest_jump:,.0f} s between two steps: effective time and lost time are wrong"]


def _is_run(folder: Path) -> bool:
    # Path.exists raises PermissionError for a folder that another user keeps private.
    return any(os.path.exists(folder / name) for name in _RUN_FILES)


def _read_last_write_time(folder: Path) -> float:
    """Return the time at which a run last wrote a record, in seconds since 1970; 0 without records."""
    newest = 0.0
    for name in _RUN_FILES[:3]:
        try:
            newest = max(newest, (folder / name).stat().st_mtime)
        except OSError:
            continue
    return newest


class RunReader:
    """The content of one run folder.

    Args:
        read_job: returns the state of a run's driver, or of its journal if no driver runs (phase, attempt, nodes). None
            if the run was not launched.
        newest_bytes: the first refresh reads at most this many bytes from the end of metrics and events; None: all.
    """

    def __init__(self, path: Path, read_job: ReadJob, newest_bytes: int | None = None) -> None:
        self.path = path
        self.metrics = MetricColumns(path / "metrics.jsonl", newest_bytes)
        self._tail = RecordTail(path / "events.jsonl", newest_bytes)
        self.events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)
        self.event_count = 0
        self._read_job_state = read_job
        self._job: dict[str, Any] | None = None
        self._job_error = ""
        self._job_time = -1.0

    def refresh(self) -> None:
        """Read new records."""
        self.metrics.refresh()
        is_new_file, records = self._tail.read_new_records()
        if is_new_file:
            self.events.clear()
            self.event_count = 0
        for record in records:
            record["event"] = str(record.get("event", ""))
            self.events.append(record)
        self.event_count += len(records)

    @property
    def is_partial(self) -> bool:
        """Return whether older metrics or events were left out."""
        return self.metrics.tail.is_partial or self._tail.is_partial

    def read_job(self) -> tuple[dict[str, Any] | None, str]:
        """Return the state of the driver or its journal, and why it cannot be read.

        The state is None if the run was not launched or the state cannot be read. The reason is empty if it can be
        read. The state is read at most twice per second.
        """
        if time.monotonic() - self._job_time > _JOB_SECONDS:
            self._job_error = ""
            try:
                self._job = self._read_job_state(self.path)
            except MegascaleError as error:
                self._job = None
                self._job_error = str(error)
            self._job_time = time.monotonic()
        return self._job, self._job_error

    def read_pulse(self) -> dict[str, Any]:
        """Return the values of a live run that change often. The server sends them to every open page."""
        self.refresh()
        job, _ = self.read_job()
        latest = {
            key: to_json_number(value)
            for key, value in self.metrics.latest.items()
            if key in (TILES + ("step", "time"))
        }
        newest = self.events[-1] if self.events else {}
        return {
            "rows": self.metrics.rows,
            "events": self.event_count,
            "latest": latest,
            "event": {"event": newest.get("event", ""), "time": to_json_number(to_float(newest.get("time")))},
            "now": self.describe_state(job),
        }

    def describe_state(self, job: dict[str, Any] | None) -> dict[str, Any]:
        """Return whether the run is alive, and its phase, attempt and step.

        Args:
            job: state of the driver or its journal, None without it.
        """
        step = self.metrics.latest.get("step", 0.0)
        if job is not None:
            state = {"phase": str(job["phase"]), "alive": bool(job["driver"]), "attempt": job["attempt"]}
            state["why"] = str(job["why"])
            step = max(step, to_float(job["step"]))
            if not state["alive"] and state["phase"] not in ENDED_PHASES.values():
                state["why"] = f"no driver is running; last entry of its journal: {job['why']}"
        else:
            state = self._describe_unlaunched()
        return state | {
            "step": to_json_number(step),
            "steps": to_json_number(self._read_planned_steps()),
            "launched": job is not None,
            "world": job["world"] if job else None,
        }

    def _describe_unlaunched(self) -> dict[str, Any]:
        """Return phase, attempt and liveness of a run without a driver, from its records."""
        phase = self._find_end()
        is_alive = False
        reason = ""
        if not phase:
            _, is_process_here = self._read_process()
            is_alive = is_process_here or self.has_recent_record()
            if is_alive:
                phase = "running"
            else:
                phase = "silent"
                reason = "the run has written nothing for a while, and no event marks its end"
        attempts = [to_float(event["attempt"]) for event in self.events if "attempt" in event]
        return {
            "phase": phase,
            "alive": is_alive,
            "attempt": max((int(attempt) for attempt in attempts if 0 <= attempt < _MAX_ATTEMPTS), default=1),
            "why": reason,
        }

    def _find_end(self) -> str:
        """Return the phase in which the newest start of the run ended; empty if no event marks its end."""
        for event in reversed(self.events):
            if event["event"] in ("run_started", "resumed", "active"):
                return ""
            if event["event"] in ENDED_PHASES:
                return ENDED_PHASES[event["event"]]
        return ""

    def has_recent_record(self) -> bool:
        """Return whether the newest record is younger than the longest usual pause of a running job."""
        times = [self.metrics.latest.get("time", math.nan)]
        if self.events:
            times.append(to_float(self.events[-1].get("time")))
        age = time.time() - max((value for value in times if is_plausible_time(value)), default=-math.inf)
        return age < max(_QUIET_SECONDS, _QUIET_STEPS * self.metrics.latest.get("seconds", 0.0))

    def _read_process(self) -> tuple[str, bool]:
        """Return the phase of rank 0 in its status, and whether its process exists on this host.

        The phase is empty if rank 0 has no status, or if its two files belong to different processes.
        """
        file = self.path / "status" / "rank-0.calls"
        status = read_status(file.with_suffix(".status"))
        record = read_calls(file, history=False)
        if status is None or record is None or status.pid != record.pid:
            return "", False
        if record.host != socket.gethostname()[:40]:  # the record has room for 40 characters
            return status.phase, False
        return status.phase, read_process_state(record.pid, str(file.resolve())) in ("running", "stopped")

    def _read_planned_steps(self) -> float:
        """Return train.steps of config.toml, NaN if it is unknown. Only the table [train] is parsed, to save time."""
        try:
            text = decode_text(read_bounded(self.path / "config.toml", _MAX_CONFIG_BYTES))
            header = _TRAIN_HEADER.search(text)
            if header is not None:
                following = _TABLE_HEADER.search(text, header.end())
                text = text[header.start() : following.start() if following else None]
            train = tomllib.loads(text).get("train", {})
        except (OSError, ValueError, RecursionError):
            return math.nan
        return to_float(train.get("steps")) if isinstance(train, dict) else math.nan

    def read_settings(self) -> tuple[dict[str, Any], str]:
        """Return config.toml as dictionaries, and why it cannot be read. The reason is empty if it can be read."""
        try:
            return tomllib.loads(decode_text(read_bounded(self.path / "config.toml", _MAX_CONFIG_BYTES))), ""
        except FileNotFoundError:
            return {}, "config.toml is missing: the plan and the number of steps are unknown"
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"config.toml cannot be read ({str(error)[:200]})"

    def read_overview(self) -> dict[str, Any]:
        """Return the content of the first view except its curves."""
        self.refresh()
        job, job_error = self.read_job()
        state = self.describe_state(job)
        activity = BETWEEN_STEPS
        if state["alive"]:
            process_phase, _ = self._read_process()
            activity = _ACTIVITIES.get(process_phase, BETWEEN_STEPS)
        current_time = time.time() if state["alive"] else None
        effective = measure_effective_time(self.metrics.read_columns(), list(self.events), current_time, activity)
        return {
            "now": state,
            "tiles": {key: to_json_number(self.metrics.latest[key]) for key in TILES if key in self.metrics.latest},
            "keys": self.metrics.keys,
            "rows": self.metrics.rows,
            "events": self.event_count,
            "effective": {
                "total": effective.total,
                "share": to_json_number(effective.share),
                "seconds": effective.seconds,
            },
            "marks": self.list_restarts(),
            "recoveries": self.list_recoveries(),
            "nonfinite": {key: self.metrics.list_nonfinite_steps(key) for key in ("loss", "grad_norm")},
            "checkpoints": self.list_checkpoints(),
            "notes": self.describe_problems(job_error),
        }

    def list_restarts(self) -> list[dict[str, Any]]:
        """Return all starts after the first, with the step at which training continued, for lines in the curves."""
        columns = self.metrics.read_columns()
        times, steps = columns.get("time"), columns.get("step")
        if times is None or steps is None:
            return []
        restarts = []
        for event in self.events:
            event_time = to_float(event.get("time"))
            if event["event"] in ("attempt_started", "resumed") and is_plausible_time(event_time):
                row = int((times < event_time).sum())  # the first row of metrics after the event
                if 0 < row < len(steps):
                    restarts.append({"step": float(steps[row]), "time": event_time, "event": event["event"]})
        return restarts[-_MAX_RESTARTS:]

    def list_recoveries(self) -> list[dict[str, Any]]:
        """Return the newest recoveries first, each with its time and the details of its RecoveryRecord."""
        recoveries = []
        for event in self.events:
            if event["event"] != Event.RECOVERED or not is_plausible_time(to_float(event.get("time"))):
                continue
            record = RecoveryRecord.from_details(event)
            if record is not None:
                recoveries.append({"time": to_float(event["time"])} | record.to_details())
        return list(reversed(recoveries[-_MAX_RECOVERIES:]))

    def list_events(self, count: int) -> list[dict[str, Any]]:
        """Return the newest events, newest first, with texts and lists truncated to what a page can show."""
        newest = itertools.islice(reversed(self.events), count)
        return [{str(key)[:60]: _truncate(value) for key, value in event.items()} for event in newest]

    def list_checkpoints(self) -> list[dict[str, Any]]:
        """Return the checkpoints in the run folder, newest first."""
        folder = self.path / "checkpoints"
        try:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries if entry.is_dir()]
        except OSError:
            return []
        steps = sorted(
            ((int(name[5:]), name) for name in names if name.startswith("step-") and name[5:].isdecimal()),
            reverse=True,
        )
        checkpoints: list[dict[str, Any]] = []
        for step, name in steps[:_MAX_CHECKPOINTS]:
            try:
                written = (folder / name / "COMMIT").stat().st_mtime
                size = sum(entry.stat().st_size for entry in os.scandir(folder / name) if entry.is_file())
                checkpoints.append({"step": step, "complete": True, "time": written, "bytes": size})
            except OSError:
                checkpoints.append({"step": step, "complete": False, "time": None, "bytes": None})
        return checkpoints

    def describe_problems(self, job_error: str) -> list[str]:
        """Return sentences about missing and damaged files of the run folder."""
        notes = []
        for name, tail, consequence in (
            ("metrics.jsonl", self.metrics.tail, "there are no curves"),
            ("events.jsonl", self._tail, "there are no events, and causes of lost time are unknown"),
        ):
            if tail.error:
                notes.append(f"{name} cannot be read ({tail.error}): {consequence}")
            elif tail.missing:
                notes.append(f"{name} is missing: {consequence}")
            elif tail.damaged:
                plural = "s" if tail.damaged > 1 else ""
                notes.append(f"{tail.damaged:,} line{plural} of {name} could not be read and were skipped")
        notes += _describe_clock(self.metrics.read_columns())
        _, settings_error = self.read_settings()
        notes += [text for text in (settings_error, job_error) if text]
        if not (self.path / "spans").is_dir():
            notes.append("there is no spans folder: heat map and timeline are empty (observe.timers=false, or removed)")
        incomplete = [checkpoint["step"] for checkpoint in self.list_checkpoints() if not checkpoint["complete"]]
        if incomplete:
            notes.append(f"the checkpoint of step {incomplete[0]} has no COMMIT: its save is under way or failed")
        return notes


def _truncate(value: Any, depth: int = 0) -> Any:
    """Return a value for JSON, truncated to what a page can show.

    Args:
        depth: number of lists and dictionaries around the value.
    """
    if isinstance(value, str):
        if len(value) <= 2000:
            return value
        return value[:2000] + "..."
    if isinstance(value, float):
        return to_json_number(value)
    if isinstance(value, int | None):
        return value
    if depth > 3:
        return "..."
    if isinstance(value, list):
        return [_truncate(item, depth + 1) for item in value[:64]]
    if isinstance(value, dict):
        return {str(key)[:60]: _truncate(item, depth + 1) for key, item in list(value.items())[:64]}
    return str(value)[:200]
