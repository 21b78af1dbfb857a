"""The audit log: every event of the driver goes into the journal, into the run's events.jsonl and to the terminal.

`restore_lost_events` reads events.jsonl back into a journal that has lost events. The journal may be damaged, or SQLite
may have reset it to an older state because the end of its log was broken. The agents know which trainers run
(telemetry/membership.py).
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megascale.core import json_lines, strict_json
from megascale.core.events import Event, format_time, is_plausible_time
from megascale.core.failure import DISK_FULL_ERRNOS
from megascale.core.json_lines import read_bounded_lines
from megascale.resilience.driver.process import SpareDescriptors
from megascale.resilience.driver.state.job_state import NodeRecord, NodeState
from megascale.resilience.driver.state.journal import Journal
from megascale.resilience.driver.state.journal_reader import Entry

RecordEvent = Callable[..., Entry]  # Driver.record_event
_SQLITE_LIMIT = 1 << 63  # SQLite stores integers below it
_MAX_PENDING_LINES = 10_000  # lines that wait for disk space; with more of them the oldest are lost
# Keys of a line that are columns of an Entry or repeat them. The other keys are the event's details.
_COLUMNS = ("time", "date", "event", "by", "attempt", "action", "nodes", "ranks", "evidence")


class AuditLog:
    """Writes the driver's events.

    Args:
        log_line: called with each line for the terminal: (source, text).
    """

    def __init__(self, run: Path, journal: Journal, log_line: Callable[[str, str], None]) -> None:
        self._file = run / "events.jsonl"
        self._journal = journal
        self._log_line = log_line
        self._pending_lines: deque[str] = deque(maxlen=_MAX_PENDING_LINES)
        self._descriptors = SpareDescriptors()  # kept open, so that the log can be written when none is free
        self._reported_errno = 0  # errno of the last failed write, which is reported once

    def record(
        self,
        kind: str,
        *,
        attempt: int,
        action: str = "",
        nodes: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        evidence: tuple[str, ...] = (),
        **details: Any,
    ) -> Entry:
        """Record an event. Raise JournalFenced if another driver has taken over."""
        columns: dict[str, Any] = {"action": action, "nodes": nodes, "ranks": ranks, "evidence": evidence}
        entry = self._descriptors.call_with_reserve(
            lambda: self._journal.add(kind, attempt=attempt, **columns, **details)
        )
        line: dict[str, Any] = {"time": entry.time, "date": format_time(entry.time), "event": kind, "by": "driver"}
        line["attempt"] = attempt
        for name, value in columns.items():
            if value:
                line[name] = list(value) if isinstance(value, tuple) else value
        self._append(strict_json.dumps(line | details) + "\n")
        self._log_line("driver", describe_entry(entry))
        return entry

    def _append(self, line: str) -> None:
        """Append a line to the file. A line that cannot be written is written with the next one."""
        self._pending_lines.append(line)
        try:
            self._descriptors.call_with_reserve(self._write_lines)
        except OSError as error:
            if error.errno not in (*DISK_FULL_ERRNOS, self._reported_errno):  # The journal reports a full disk.
                self._log_line("driver", f"{self._file} cannot be written ({error.strerror}); the driver continues")
            self._reported_errno = error.errno or 0
        else:
            self._reported_errno = 0

    def _write_lines(self) -> None:
        """Append all pending lines. Raises OSError."""
        handle = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            while self._pending_lines:
                json_lines.append_lines(handle, self._pending_lines[0].encode())
                self._pending_lines.popleft()
        finally:
            os.close(handle)


def describe_entry(entry: Entry) -> str:
    """Return an event as one line."""
    subject = str(entry.kind)
    if entry.nodes:
        subject += f" [{', '.join(entry.nodes)}]"
    if entry.action and entry.action != "none":
        subject += f" -> {entry.action}"
    return f"{subject}: {'; '.join(entry.evidence)}"


@dataclass(frozen=True)
class LostEvents:
    """The events that a journal has lost, and what all events of events.jsonl say about the job.

    Attributes:
        attempt: the newest attempt of any event.
        is_paused: a person has paused the job and not resumed it.
        evicted: names of the nodes whose eviction was restored.
    """

    count: int = 0
    attempt: int = 0
    is_paused: bool = False
    evicted: tuple[str, ...] = ()


def restore_lost_events(journal: Journal, run: Path) -> LostEvents:
    """Write the events that `journal` has lost and events.jsonl still has, and the evictions among them."""
    logged = list(read_logged_events(run))
    # The row of an event that was written late has the time of the event among its details.
    stored = {(entry.details.get("noted", entry.time), entry.kind) for entry in journal.events()}  # (time, kind)
    lost = [entry for entry in logged if (entry.time, entry.kind) not in stored]
    if lost:
        journal.restore(lost)
    records = journal.nodes()
    evicted_already = {name for name, record in records.items() if record.state is NodeState.EVICTED}
    evictions = _find_evictions(lost, evicted_already)
    for name, entry in evictions.items():
        record = records.get(name, NodeRecord())
        reason = "; ".join(entry.evidence)
        journal.save_node(name, replace(record, state=NodeState.EVICTED, reason=reason, changed_at=entry.time))
    attempt = max((entry.attempt for entry in logged), default=0)
    return LostEvents(len(lost), attempt, _is_paused(logged), tuple(evictions))


def count_drivers(run: Path) -> int:
    """Count the drivers that a run has had, by their events. The epoch of the next driver must be higher."""
    starts = (Event.DRIVER_STARTED, Event.DRIVER_TOOK_OVER)
    return sum(entry.kind in starts for entry in read_logged_events(run))


def read_logged_events(run: Path) -> Iterator[Entry]:
    """Yield the driver's events of events.jsonl, oldest first, without unreadable lines."""
    try:
        for line in read_bounded_lines(run / "events.jsonl"):
            if line is not None and b'"by": "driver"' in line:
                entry = _parse_line(line)
                if entry is not None:
                    yield entry
    except OSError:
        return


def _parse_line(line: bytes) -> Entry | None:
    """Return the event of a line, None if the line is damaged or incomplete."""
    try:
        record = strict_json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # SQLite stores no unpaired surrogates.
        entry = Entry(
            id=0,
            time=float(record["time"]),
            attempt=int(record["attempt"]),
            kind=str(record["event"]),
            action=str(record.get("action", "")),
            nodes=tuple(str(node) for node in record.get("nodes", ())),
            ranks=tuple(int(rank) for rank in record.get("ranks", ())),
            evidence=tuple(str(text) for text in record.get("evidence", ())),
            details={name: value for name, value in record.items() if name not in _COLUMNS},
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    is_sound = is_plausible_time(entry.time) and 0 <= entry.attempt < _SQLITE_LIMIT
    return entry if is_sound else None


def _find_evictions(lost: Iterable[Entry], evicted_already: set[str]) -> dict[str, Entry]:
    """Return the lost evictions by node, without nodes that are evicted already or were allowed again."""
    evictions: dict[str, Entry] = {}
    for entry in lost:
        for name in entry.nodes:
            if entry.kind == Event.NODE_EVICTED and name not in evicted_already:
                evictions[name] = entry
            elif entry.kind == Event.NODE_UNCORDONED:
                evictions.pop(name, None)
    return evictions


def _is_paused(logged: Iterable[Entry]) -> bool:
    """Return True if a pause is the last of the events that decide whether the job runs."""
    deciding = (Event.PAUSED, Event.CONTINUED, Event.ATTEMPT_STARTED, Event.JOB_INTERRUPTED, Event.JOB_FAILED)
    decisions = [entry.kind for entry in logged if entry.kind in deciding]
    return bool(decisions) and decisions[-1] == Event.PAUSED
