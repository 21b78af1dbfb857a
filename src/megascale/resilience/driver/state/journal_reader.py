"""The journal's tables and rows, each row with a checksum, and the reader that commands use.

Reading needs no driver. SQLite detects a file that is cut or whose pages do not fit together. The checksums detect a
digit that turned into another one.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.errors import DataError
from megascale.resilience.driver.state.job_state import (
    JobEvent,
    JobState,
    NodeRecord,
    NodeState,
    apply_event,
    from_plain,
)
from megascale.resilience.process_birth import read_birth_time

JOURNAL_FILE = "journal.sqlite"
# Seconds without a change after which a driver on another host counts as ended. A driver renews its lease each second.
# The margin is for network file systems that show changes late, and for clocks that differ.
MAX_SILENCE_SECONDS = 60.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS lease (id INTEGER PRIMARY KEY CHECK (id = 1), epoch INTEGER NOT NULL, beat INTEGER NOT NULL,
    host TEXT NOT NULL, pid INTEGER NOT NULL, born INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS job (id INTEGER PRIMARY KEY CHECK (id = 1), state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS transitions (id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL,
    epoch INTEGER NOT NULL, event TEXT NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS nodes (name TEXT PRIMARY KEY, address TEXT NOT NULL, state TEXT NOT NULL, why TEXT NOT NULL,
    since REAL NOT NULL, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, epoch INTEGER NOT NULL,
    attempt INTEGER NOT NULL, kind TEXT NOT NULL, action TEXT NOT NULL, nodes TEXT NOT NULL, ranks TEXT NOT NULL,
    evidence TEXT NOT NULL, details TEXT NOT NULL);
"""
READ_LEASE = "SELECT epoch, beat, host, pid, born FROM lease"
_EVENT_COLUMNS = "time, attempt, kind, action, nodes, ranks, evidence, details"
_CHECKSUM = "sum"  # key of the checksum in a row's JSON
_MAX_EPOCH = 1 << 53  # Greater integers are not exact in JSON's numbers.
# Types of the errors that reading a row with garbled text or types can raise.
ROW_READ_ERRORS = (sqlite3.DatabaseError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Entry:
    """One event of the journal.

    Attributes:
        id: number of the row; 0 before the event is written.
        time: seconds since 1970 on the driver's clock.
        kind: name of the event (core/events.py).
        action: what the driver does about it, or "".
        evidence: sentences for people.
        details: further values by name.
    """

    id: int
    time: float
    attempt: int
    kind: str
    action: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    evidence: tuple[str, ...]
    details: dict[str, Any]


# rows -----------------------------------------------------------------------------------------------------------------


def dump_with_checksum(record: dict[str, Any], *columns: Any) -> str:
    """Return a record as JSON with a checksum of itself and of the other columns of its row."""
    return strict_json.dumps(record | {_CHECKSUM: _checksum(record, columns)})


def load_with_checksum(text: str, *columns: Any) -> dict[str, Any]:
    """Return the record of a row's JSON. Raise ValueError if its checksum is missing or wrong."""
    record = json.loads(text)
    if type(record) is not dict:
        raise ValueError("a row is not a JSON object")
    checksum = record.pop(_CHECKSUM, None)
    if checksum != _checksum(record, columns):
        raise ValueError(f"the checksum of a row is wrong: {text[:100]}")
    return record


def _checksum(record: dict[str, Any], columns: tuple[Any, ...]) -> int:
    """Return the CRC-32 of a record and of the other columns of its row."""
    # Use the record as it is read back: keys become strings, tuples become lists.
    stored = json.loads(strict_json.dumps(record))
    return zlib.crc32(json.dumps([stored] + list(columns), sort_keys=True).encode())


def _read_record(text: str) -> dict[str, Any]:
    """Return the record of a row's JSON. `check_rows` has verified the checksum when the journal was opened."""
    record: dict[str, Any] = json.loads(text)
    record.pop(_CHECKSUM, None)
    return record


def write_job(db: sqlite3.Connection, job: JobState) -> None:
    """Write the whole state of the job, and delete the transitions that led to it."""
    db.execute("INSERT OR REPLACE INTO job VALUES (1, ?)", (dump_with_checksum(job.to_record()),))
    db.execute("DELETE FROM transitions")


def read_job(db: sqlite3.Connection) -> JobState | None:
    """Return the last whole state with later transitions applied, None without a state.

    Raise ValueError for an impossible transition.
    """
    row = db.execute("SELECT state FROM job").fetchone()
    if row is None:
        return None
    job = JobState.from_json(row[0])
    for event, data in db.execute("SELECT event, data FROM transitions ORDER BY id"):
        changes = {name: from_plain(name, value) for name, value in _read_record(data).items()}
        job = apply_event(job, JobEvent(event), changes)
    return replace(job, nodes=read_nodes(db))


def write_node(db: sqlite3.Connection, name: str, record: NodeRecord) -> None:
    columns = (name, record.address, record.state.value, record.reason, float(record.changed_at))
    facts = {**record.facts, "cordoned": record.cordoned}
    db.execute(
        "INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?, ?)", columns + (dump_with_checksum(facts, *columns),)
    )


def read_nodes(db: sqlite3.Connection) -> dict[str, NodeRecord]:
    """Return the records of all nodes by name, oldest first."""
    records = {}
    rows = db.execute("SELECT name, address, state, why, since, facts FROM nodes ORDER BY rowid").fetchall()
    for name, address, state, reason, changed_at, text in rows:
        facts = _read_record(text)
        cordoned = bool(facts.pop("cordoned", False))
        records[name] = NodeRecord(
            NodeState(state), address, cordoned=cordoned, reason=reason, changed_at=changed_at, facts=facts
        )
    return records


def write_event(db: sqlite3.Connection, epoch: int, entry: Entry) -> int:
    """Append an event and return its id."""
    lists = [strict_json.dumps(list(values)) for values in (entry.nodes, entry.ranks, entry.evidence)]
    columns = (entry.time, entry.attempt, entry.kind, entry.action) + tuple(lists)
    insert = f"INSERT INTO events (epoch, {_EVENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
    return db.execute(insert, (epoch,) + columns + (dump_with_checksum(entry.details, *columns),)).lastrowid or 0


def read_events(db: sqlite3.Connection, after: int, limit: int) -> list[Entry]:
    """Return the events with an id above `after`, oldest first."""
    select = f"SELECT id, {_EVENT_COLUMNS} FROM events WHERE id > ? ORDER BY id LIMIT ?"
    rows = db.execute(select, (after, limit))
    entries = []
    for event_id, event_time, attempt, kind, action, nodes, ranks, evidence, details in rows:
        entry = Entry(
            id=event_id,
            time=event_time,
            attempt=attempt,
            kind=kind,
            action=action,
            nodes=tuple(json.loads(nodes)),
            ranks=tuple(json.loads(ranks)),
            evidence=tuple(json.loads(evidence)),
            details=_read_record(details),
        )
        entries.append(entry)
    return entries


def check_rows(db: sqlite3.Connection) -> None:
    """Read everything that a driver will read. Raise ValueError for a row with a wrong checksum or type."""
    lease = db.execute(READ_LEASE).fetchone()
    if lease is not None:
        types = [type(value) for value in lease]
        if types != [int, int, str, int, int] or not 0 <= lease[0] < _MAX_EPOCH:
            raise ValueError(f"the lease is {lease}")
    job = db.execute("SELECT state FROM job").fetchone()
    if job is not None:
        load_with_checksum(job[0])
        read_job(db)
    for *columns, data in db.execute("SELECT time, epoch, event, data FROM transitions"):
        load_with_checksum(data, *columns)
    for *columns, facts in db.execute("SELECT name, address, state, why, since, facts FROM nodes"):
        load_with_checksum(facts, *columns)
    for *columns, details in db.execute(f"SELECT {_EVENT_COLUMNS} FROM events"):
        load_with_checksum(details, *columns)
        for text in columns[4:]:  # nodes, ranks and evidence
            list(json.loads(text))  # raises TypeError for text that is not a list


# reading --------------------------------------------------------------------------------------------------------------


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn the errors of a garbled row into a DataError that names the journal's file."""
    try:
        yield
    except ROW_READ_ERRORS as error:
        raise DataError(f"the journal is damaged: {path}: {error}; the next `megascale launch` sets it aside") from None


class JournalReader:
    """The reading side, for commands. All methods raise DataError for a damaged journal.

    Attributes:
        job: the job's state when the journal was opened, None if no state was stored.
    """

    def __init__(self, run: Path) -> None:
        path = run / JOURNAL_FILE
        self._path = path
        if not run.is_dir():
            raise DataError(f"{run} is not a folder; name a run folder, such as runs/NAME")
        if not path.is_file():
            raise DataError(f"{run} has no {JOURNAL_FILE}: it was not started with `megascale launch`")
        with _reading(self._path):
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchone():
                self._db.close()
                raise DataError(f"{path} is being created; try again in a moment")
            self.job = read_job(self._db)

    def nodes(self) -> dict[str, NodeRecord]:
        """Return the records of all nodes ever known, by name."""
        with _reading(self._path):
            return read_nodes(self._db)

    def events(self, after: int = 0, limit: int = 1_000_000) -> list[Entry]:
        """Return the events with an id above `after`, oldest first."""
        with _reading(self._path):
            return read_events(self._db, after, limit)

    def is_driver_alive(self) -> bool:
        """Return True if the holder of the lease is a living process, or renews its lease from another host."""
        with _reading(self._path):
            row = self._db.execute("SELECT host, pid, born FROM lease").fetchone()
        if row is None:
            return False
        host, pid, birth_time = row
        if pid <= 0:
            return False
        if host == socket.gethostname():
            return bool(read_birth_time(pid) == birth_time)
        return time.time() - self._modification_time() < MAX_SILENCE_SECONDS

    def _modification_time(self) -> float:
        """Return the time of the last change of the journal, in seconds since 1970."""
        times = [0.0]
        for path in (self._path, Path(f"{self._path}-wal")):  # new rows are in the write-ahead log first
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def close(self) -> None:
        self._db.close()


def read_journal_events(run: Path, after: int = 0) -> list[Entry]:
    """Return a run's events with an id above `after`, oldest first; empty if the journal is missing or damaged."""
    try:
        reader = JournalReader(run)
    except DataError:
        return []
    try:
        return reader.events(after)
    except DataError:
        return []
    finally:
        reader.close()


def list_evicted_nodes(run: Path) -> list[str]:
    """Return the names of a run's evicted nodes, sorted; empty if the journal is missing or damaged."""
    if not (run / JOURNAL_FILE).exists():
        return []
    try:
        reader = JournalReader(run)
        try:
            return sorted(name for name, record in reader.nodes().items() if record.state is NodeState.EVICTED)
        finally:
            reader.close()
    except DataError:
        return []
