"""What is known of a job when its journal is not to be trusted: every event stands in the run's events.jsonl too.

A journal that was damaged, or that SQLite brought back to an older state because the end of its log was broken, gets
the events back that it has lost. What then runs, the agents know (telemetry/adoption.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megascale.core import strict_json
from megascale.core.events import Event, is_plausible_time
from megascale.core.json_lines import read_bounded_lines
from megascale.resilience.driver.state.job_state import NodeState
from megascale.resilience.driver.state.journal import Entry, Journal, NodeRow

_MOST = 1 << 63  # numbers that SQLite holds are below
_OURS = ("time", "date", "event", "by", "attempt", "action", "nodes", "ranks", "evidence")


@dataclass(frozen=True)
class Recalled:
    """What was put back.

    Attributes:
        events: how many the journal had lost.
        attempt: the newest of any event.
        paused: by the last event about it, a person has paused the job.
        evicted: nodes that were taken out for good.
    """

    events: int = 0
    attempt: int = 0
    paused: bool = False
    evicted: tuple[str, ...] = ()


def restore(journal: Journal, run: Path) -> Recalled:
    """Put back what `journal` has lost and the run's events.jsonl still has."""
    logged = read(run / "events.jsonl")
    # One that found no room on the disk at first has its time among its details (lasting_journal.py).
    known = {(entry.details.get("noted", entry.time), entry.kind) for entry in journal.events()}
    lost = [entry for entry in logged if (entry.time, entry.kind) not in known]
    if lost:
        journal.restore(lost)
    evicted = _evicted(lost, {row.name for row in journal.nodes() if row.state == NodeState.EVICTED})
    rows = {row.name: row for row in journal.nodes()}
    for name, entry in evicted.items():
        address = rows[name].address if name in rows else ""
        facts = rows[name].facts if name in rows else {}
        why = "; ".join(entry.evidence)
        journal.save_node(NodeRow(name, address, NodeState.EVICTED.value, why, entry.time, facts))
    attempt = max((entry.attempt for entry in logged), default=0)
    return Recalled(len(lost), attempt, _paused(logged), tuple(evicted))


def least_epoch(run: Path) -> int:
    """An epoch that drivers of this run have had: each start is an event."""
    started = (Event.DRIVER_STARTED, Event.DRIVER_TOOK_OVER)
    return sum(entry.kind in started for entry in read(run / "events.jsonl"))


def read(file: Path) -> list[Entry]:
    """The driver's events in an events.jsonl, oldest first; lines that cannot be read are left out."""
    found: list[Entry] = []
    try:
        for line in read_bounded_lines(file):
            if line is not None and b'"by": "driver"' in line and (entry := _entry(line)) is not None:
                found.append(entry)
    except OSError:
        return found
    return found


def _entry(line: bytes) -> Entry | None:
    """Return the event of a line, None if it is damaged or was being written when the machine went down."""
    try:
        record = strict_json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # half a character is none that SQLite holds
        entry = Entry(
            id=0,
            time=float(record["time"]),
            attempt=int(record["attempt"]),
            kind=str(record["event"]),
            action=str(record.get("action", "")),
            nodes=tuple(str(node) for node in record.get("nodes", ())),
            ranks=tuple(int(rank) for rank in record.get("ranks", ())),
            evidence=tuple(str(text) for text in record.get("evidence", ())),
            details={name: value for name, value in record.items() if name not in _OURS},
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    is_sound = is_plausible_time(entry.time) and 0 <= entry.attempt < _MOST
    return entry if is_sound else None


def _evicted(lost: Iterable[Entry], already: set[str]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in lost:
        for name in entry.nodes:
            if entry.kind == Event.NODE_EVICTED and name not in already:
                found[name] = entry
            elif entry.kind == Event.NODE_UNCORDONED:
                found.pop(name, None)
    return found


def _paused(logged: Iterable[Entry]) -> bool:
    deciding = (Event.PAUSED, Event.CONTINUED, Event.ATTEMPT_STARTED, Event.JOB_INTERRUPTED, Event.JOB_FAILED)
    last = ""
    for entry in logged:
        if entry.kind in deciding:
            last = entry.kind
    return last == Event.PAUSED
