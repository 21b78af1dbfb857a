"""What a run folder says beside its spans: metrics, events, checkpoints, settings, and what of it is missing."""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
import tomllib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megascale.config.text_files import decode_text
from megascale.core.calls import read_calls
from megascale.core.events import is_plausible_time
from megascale.core.status import read_status
from megascale.core.strict_json import to_float
from megascale.core.untrusted_files import read_bounded
from megascale.errors import MegascaleError
from megascale.observe.dashboard.effective_time import EffectiveTime, effective_time
from megascale.observe.dashboard.metric_columns import MetricColumns
from megascale.observe.dashboard.record_tail import RecordTail
from megascale.observe.hang.evidence import process_state

JobOf = Callable[[Path], dict[str, Any] | None]
_EVENTS = 20_000  # kept; of more the newest
_CONFIG_BYTES = 1 << 20
_MOST_CHECKPOINTS = 1000
_QUIET = 30.0  # seconds without a record after which a run without a driver is not taken for alive
_MOST_ATTEMPTS = 1 << 31  # a larger number of an attempt is damage
_DOING = {
    "start": "starting and loading",
    "load": "starting and loading",
    "evaluate": "evaluation",
    "save": "saving checkpoints",
}  # what a phase of rank 0 is called
_STEPS_QUIET = 20  # or so many steps' time, whatever is longer
TILES = ("loss", "valid_loss", "tokens_per_second", "mfu", "memory_gib", "grad_norm", "learning_rate", "seconds")


class RunReader:
    """Args:
    path: the run folder.
    job_of: says of a run folder what its driver and journal know (phase, attempt, nodes), None if none was launched.
    """

    def __init__(self, path: Path, job_of: JobOf) -> None:
        self.path = path
        self.metrics = MetricColumns(path / "metrics.jsonl")
        self._tail = RecordTail(path / "events.jsonl")
        self.events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self.event_count = 0
        self._job_of = job_of
        self._job: tuple[float, dict[str, Any] | None, str] = (-1.0, None, "")

    def refresh(self) -> None:
        """Read what was written since the last call."""
        self.metrics.refresh()
        anew, records = self._tail.read_new_records()
        if anew:
            self.events.clear()
            self.event_count = 0
        for record in records:
            record["event"] = str(record.get("event", ""))
            self.events.append(record)
        self.event_count += len(records)

    def job(self) -> tuple[dict[str, Any] | None, str]:
        """(what the driver or its journal says, why it cannot be read); asked for at most twice a second."""
        if time.monotonic() - self._job[0] > 0.5:
            try:
                found, why = self._job_of(self.path), ""
            except MegascaleError as error:
                found, why = None, str(error)
            self._job = (time.monotonic(), found, why)
        return self._job[1:]

    def pulse(self) -> dict[str, Any]:
        """What changes while a run goes on, small: sent to every page that is open."""
        self.refresh()
        job, _ = self.job()
        latest = {key: _plain(value) for key, value in self.metrics.latest.items() if key in (*TILES, "step", "time")}
        newest = self.events[-1] if self.events else {}
        return {
            "rows": self.metrics.rows,
            "events": self.event_count,
            "latest": latest,
            "event": {"event": newest.get("event", ""), "time": _plain(to_float(newest.get("time")))},
            "now": self.now(job),
        }

    def now(self, job: dict[str, Any] | None) -> dict[str, Any]:
        """Whether the run is alive, in which phase, attempt and step."""
        kinds = [one["event"] for one in self.events]
        written = [self.metrics.latest.get("time", math.nan), *(to_float(one.get("time")) for one in self._newest(1))]
        age = time.time() - max((at for at in written if is_plausible_time(at)), default=-math.inf)
        step = self.metrics.latest.get("step", 0.0)
        if job is not None:
            phase, alive = str(job["phase"]), bool(job["driver"])
            attempt, why = job["attempt"], str(job["why"])
            step = max(step, to_float(job["step"]))
            if not alive and phase not in ("done", "failed", "interrupted"):
                why = f"no driver is at work; the journal's last word: {why}"
        else:
            ended = next((k for k in reversed(kinds) if k in ("run_finished", "run_failed", "interrupted")), "")
            begun = next((k for k in reversed(kinds) if k in ("run_started", "resumed", "active")), "")
            if ended and kinds[::-1].index(ended) > (kinds[::-1].index(begun) if begun else len(kinds)):
                ended = ""
            usual = self.metrics.latest.get("seconds", 0.0)
            alive = not ended and (age < max(_QUIET, _STEPS_QUIET * usual) or self._process()[1])
            phase = {"run_finished": "done", "run_failed": "failed", "interrupted": "interrupted"}.get(ended, "")
            phase = phase or ("running" if alive else "silent")
            numbers = [to_float(one["attempt"]) for one in self.events if "attempt" in one]
            attempt = max((int(each) for each in numbers if 0 <= each < _MOST_ATTEMPTS), default=1)
            why = "" if phase != "silent" else "nothing was written for a while, and no event says that it ended"
        settings = self.settings()[0].get("train", {})
        steps = to_float(settings.get("steps")) if isinstance(settings, dict) else math.nan
        return {
            "phase": phase, "alive": alive, "attempt": attempt, "step": _plain(step), "steps": _plain(steps),
            "why": why, "launched": job is not None,
            "world": job["world"] if job else None,
        }  # fmt: skip

    def _newest(self, count: int) -> list[dict[str, Any]]:
        """Return the newest events, newest first."""
        return list(itertools.islice(reversed(self.events), count))

    def _process(self) -> tuple[str, bool]:
        """Return the phase of rank 0 by its status, and whether its process runs on this host."""
        file = self.path / "status" / "rank-0.calls"
        status, record = read_status(file.with_suffix(".status")), read_calls(file, history=False)
        if status is None or record is None or status.pid != record.pid:
            return "", False
        is_here = record.host == socket.gethostname()[:40]
        return status.phase, is_here and process_state(record.pid, str(file.resolve())) in ("running", "stopped")

    def settings(self) -> tuple[dict[str, Any], str]:
        """(config.toml as tables, what is wrong with it)."""
        try:
            return tomllib.loads(decode_text(read_bounded(self.path / "config.toml", _CONFIG_BYTES))), ""
        except FileNotFoundError:
            return {}, "config.toml is missing: no plan, and no number of steps to come"
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"config.toml cannot be read ({str(error)[:200]})"

    def overview(self) -> dict[str, Any]:
        """All of the first view but its curves."""
        self.refresh()
        job, why = self.job()
        now = self.now(job)
        doing = _DOING.get(self._process()[0], "between steps") if now["alive"] else "between steps"
        spent = effective_time(
            self.metrics.read_columns(), list(self.events), time.time() if now["alive"] else None, doing
        )
        return {
            "now": now,
            "tiles": {key: _plain(self.metrics.latest[key]) for key in TILES if key in self.metrics.latest},
            "keys": self.metrics.keys,
            "rows": self.metrics.rows,
            "events": self.event_count,
            "effective": _spent(spent),
            "marks": self.marks(),
            "nonfinite": {key: self.metrics.nonfinite(key) for key in ("loss", "grad_norm")},
            "checkpoints": self.checkpoints(),
            "notes": self.notes(why),
        }

    def marks(self) -> list[dict[str, Any]]:
        """Starts after the first, by the step at which training went on: lines in the curves."""
        columns = self.metrics.read_columns()
        times, steps = columns.get("time"), columns.get("step")
        found = []
        if times is None or steps is None or not len(times):
            return []
        for one in self.events:
            if one["event"] in ("attempt_started", "resumed") and is_plausible_time(at := to_float(one.get("time"))):
                later = int((times < at).sum())
                if 0 < later < len(steps):
                    found.append({"step": float(steps[later]), "time": at, "event": one["event"]})
        return found[-100:]

    def event_page(self, count: int) -> list[dict[str, Any]]:
        """The newest events, newest first; texts and lists cut to what a page can show."""
        return [{str(key)[:60]: _cut(value) for key, value in one.items()} for one in self._newest(count)]

    def checkpoints(self) -> list[dict[str, Any]]:
        """Those in the run folder, newest first."""
        found: list[dict[str, Any]] = []
        try:
            with os.scandir(self.path / "checkpoints") as entries:
                names = sorted(
                    (int(entry.name[5:]), entry.name)
                    for entry in entries
                    if entry.name.startswith("step-") and entry.name[5:].isdecimal() and entry.is_dir()
                )
        except OSError:
            return []
        for step, name in names[::-1][:_MOST_CHECKPOINTS]:
            folder = self.path / "checkpoints" / name
            try:
                about = (folder / "COMMIT").stat()
                size = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
                found.append({"step": step, "complete": True, "time": about.st_mtime, "bytes": size})
            except OSError:
                found.append({"step": step, "complete": False, "time": None, "bytes": None})
        return found

    def notes(self, job_error: str) -> list[str]:
        """What of the run folder is missing or damaged, in sentences."""
        found = []
        for name, tail, without in (
            ("metrics.jsonl", self.metrics.tail, "no curves"),
            ("events.jsonl", self._tail, "no events, and causes of lost time are unknown"),
        ):
            if tail.error:
                found.append(f"{name} cannot be read ({tail.error}): {without}")
            elif tail.missing:
                found.append(f"{name} is missing: {without}")
            elif tail.damaged:
                found.append(f"{tail.damaged:,} line{'s' * (tail.damaged > 1)} of {name} could not be read; left out")
        if wrong := self.settings()[1]:
            found.append(wrong)
        if job_error:
            found.append(job_error)
        if not (self.path / "spans").is_dir():
            found.append("there is no spans folder: heat map and timeline are empty (observe.timers=false, or removed)")
        incomplete = [one["step"] for one in self.checkpoints() if not one["complete"]]
        if incomplete:
            found.append(f"the checkpoint of step {incomplete[0]} has no COMMIT: it is being written, or was given up")
        return found


def _spent(found: EffectiveTime) -> dict[str, Any]:
    return {"total": found.total, "share": _plain(found.share), "seconds": found.seconds}


def _plain(value: float) -> float | None:
    """A number for JSON; None for what is none."""
    return value if math.isfinite(value) else None


def _cut(value: Any, depth: int = 0) -> Any:
    if isinstance(value, str):
        return value if len(value) <= 2000 else value[:2000] + "..."
    if isinstance(value, float):
        return _plain(value)
    if isinstance(value, int | None):
        return value
    if depth > 3:
        return "..."
    if isinstance(value, list):
        return [_cut(each, depth + 1) for each in value[:64]]
    if isinstance(value, dict):
        return {str(key)[:60]: _cut(each, depth + 1) for key, each in list(value.items())[:64]}
    return str(value)[:200]
