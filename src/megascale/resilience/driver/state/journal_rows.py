"""The rows of the journal: each with a checksum of itself, and read back to what was written."""

from __future__ import annotations

import json
import sqlite3
import zlib
from dataclasses import dataclass, replace
from typing import Any

from megascale.core import strict_json
from megascale.resilience.driver.state.job_state import JobState, NodeRecord, NodeState, from_plain
from megascale.resilience.driver.state.transitions import JobEvent, follow


@dataclass(frozen=True)
class Entry:
    """One event of the journal. time: seconds since 1970 on the driver's clock."""

    id: int
    time: float
    attempt: int
    kind: str
    action: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    evidence: tuple[str, ...]
    details: dict[str, Any]


@dataclass(frozen=True)
class NodeRow:
    """A node as the journal knows it. state: of NodeState; since: seconds since 1970; facts: also whether cordoned."""

    name: str
    address: str
    state: str
    why: str
    since: float
    facts: dict[str, Any]

    @classmethod
    def of(cls, name: str, record: NodeRecord) -> NodeRow:
        """What is remembered of the node `name`."""
        facts = {**record.facts, "cordoned": record.cordoned}
        return cls(name, record.address, record.state.value, record.why, record.changed_at, facts)

    def record(self) -> NodeRecord:
        """As the job's state has it."""
        facts = dict(self.facts)
        cordoned = bool(facts.pop("cordoned", False))
        return NodeRecord(NodeState(self.state), self.address, cordoned, self.why, self.since, facts)


_SUM = "sum"


def sealed(record: dict[str, Any], *columns: Any) -> str:
    """A record as JSON with a checksum of itself and of the other columns of its row."""
    return strict_json.dumps(record | {_SUM: _sum(record, columns)})


def unsealed(text: str, *columns: Any) -> dict[str, Any]:
    """Return the record of a sealed row. Raise ValueError if its checksum is missing or wrong."""
    record = json.loads(text)
    if type(record) is not dict:
        raise ValueError("a row that is no record")
    kept = record.pop(_SUM, None)
    if kept != _sum(record, columns):
        raise ValueError(f"the checksum of a row is wrong: {text[:100]}")
    return record


def _sum(record: dict[str, Any], columns: tuple[Any, ...]) -> int:
    # As it is read back: keys that are no strings, tuples.
    return zlib.crc32(json.dumps([json.loads(strict_json.dumps(record)), *columns], sort_keys=True).encode())


def insert_event(db: sqlite3.Connection, epoch: int, entry: Entry) -> int:
    lists = [strict_json.dumps(list(part)) for part in (entry.nodes, entry.ranks, entry.evidence)]
    about = (entry.time, entry.attempt, entry.kind, entry.action, *lists)
    row = (entry.time, epoch, *about[1:], sealed(entry.details, *about))
    columns = "time, epoch, attempt, kind, action, nodes, ranks, evidence, details"
    number = db.execute(f"INSERT INTO events ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row).lastrowid
    return number or 0


def write_job(db: sqlite3.Connection, job: JobState) -> None:
    db.execute("INSERT OR REPLACE INTO job VALUES (1, ?)", (sealed(job.fields()),))
    db.execute("DELETE FROM transitions")


def read_job(db: sqlite3.Connection) -> JobState | None:
    """The state as the transitions lead to it; ValueError for one that could not happen."""
    row = db.execute("SELECT state FROM job").fetchone()
    if row is None:
        return None
    job = JobState.from_json(row[0])
    for event, data in db.execute("SELECT event, data FROM transitions ORDER BY id"):
        changes = {name: from_plain(name, value) for name, value in _open_record(data).items()}
        job = follow(job, JobEvent(event), changes)
    return replace(job, nodes={node.name: node.record() for node in read_nodes(db)})


def read_nodes(db: sqlite3.Connection) -> list[NodeRow]:
    rows = db.execute("SELECT name, address, state, why, since, facts FROM nodes ORDER BY rowid").fetchall()
    return [NodeRow(a, b, c, d, e, _open_record(f)) for a, b, c, d, e, f in rows]


def read_events(db: sqlite3.Connection, after: int, limit: int) -> list[Entry]:
    rows = db.execute(
        "SELECT id, time, attempt, kind, action, nodes, ranks, evidence, details FROM events WHERE id > ? "
        "ORDER BY id LIMIT ?",
        (after, limit),
    ).fetchall()
    return [
        Entry(
            id=row[0],
            time=row[1],
            attempt=row[2],
            kind=row[3],
            action=row[4],
            nodes=tuple(json.loads(row[5])),
            ranks=tuple(json.loads(row[6])),
            evidence=tuple(json.loads(row[7])),
            details=_open_record(row[8]),
        )
        for row in rows
    ]


def _open_record(text: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(text)
    record.pop(_SUM, None)
    return record
