"""The driver's journal: one SQLite file in the run folder with the job, its nodes, every decision and its evidence.

It is the driver's memory over restarts and the fence between two drivers: each has an epoch, and a driver whose
epoch is not the newest can no longer write. Readers (`megascale events`) need no driver.

The job's state is replayed: the last whole state, then each transition since (transitions.py), and the nodes' rows.

Rows carry a checksum: SQLite notices a file that is cut or whose pages do not fit together, but no digit that turned
into another. On a network file system it goes without a write-ahead log, which does not work there.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from megascale.errors import ConfigError, DataError
from megascale.resilience.driver.state import filesystems
from megascale.resilience.driver.state.job_state import JobState, to_plain
from megascale.resilience.driver.state.journal_rows import (
    Entry,
    NodeRow,
    insert_event,
    read_events,
    read_job,
    read_nodes,
    sealed,
    unsealed,
    write_job,
)
from megascale.resilience.driver.state.transitions import JobEvent
from megascale.resilience.process_birth import born

FILE = "journal.sqlite"
_SCHEMA = """
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


class JournalFenced(Exception):
    """Another driver has taken the job over: this one must not touch it any more."""


class Journal:
    """The writing side, held by one driver. Open it with `take`.

    Attributes:
        aside: where a damaged file was set aside, None if it was complete; damage: what was wrong with it.
        network: the type of the network file system that it lies on, "" if it does not.
        tail: transitions after which the whole state is written again.
    """

    tail = 256

    def __init__(self, path: Path, connection: sqlite3.Connection, epoch: int) -> None:
        self.path, self.epoch = path, epoch
        self._db = connection
        self._beat = 0
        self.aside: Path | None = None
        self.damage = ""
        kind = filesystems.kind(path.parent)
        self.network = kind if filesystems.shared(kind) else ""

    @classmethod
    def take(cls, run: Path, lease: float, least_epoch: int = 0, ended: int = 0) -> tuple[Self, bool]:
        """Become the driver of this run: (journal with a new epoch, whether the old file was damaged and set aside).

        A holder on this host counts as dead if its process is; elsewhere, or if that cannot be known, if it does not
        renew its lease for `lease` seconds of watching; that of an epoch up to `ended` has no right to it any more,
        whatever it does. `least_epoch`: the newest known from elsewhere.

        Raises ConfigError if another driver is at work.
        """
        path = run / FILE
        aside, damage = None, ""
        try:
            db = _open(path)
        except sqlite3.DatabaseError as error:
            if _sound(error):
                raise
            aside, damage = path.with_name(f"{FILE}.damaged-{time.time_ns()}"), str(error)
            for suffix in ("", "-wal", "-shm", "-journal"):
                part = path.with_name(path.name + suffix)
                if part.exists():
                    os.replace(part, aside.with_name(aside.name + suffix))
            db = _open(path)
        while True:
            row = db.execute("SELECT epoch, beat, host, pid, born FROM lease").fetchone()
            if row is not None and row[0] > ended and not _gone(row, db, lease):
                db.close()
                raise ConfigError(
                    f"a driver already runs this job (process {row[3]} on {row[2]}, epoch {row[0]}); "
                    f"talk to it with `megascale jobs`, or end it first"
                )
            old: int = row[0] if row else 0
            epoch = max(old, least_epoch) + 1
            me = (epoch, 0, socket.gethostname(), os.getpid(), born(os.getpid()))
            with _transaction(db):
                now = db.execute("SELECT epoch FROM lease").fetchone()
                if (now[0] if now else 0) != old:
                    continue  # a third one was quicker
                db.execute("INSERT OR REPLACE INTO lease VALUES (1, ?, ?, ?, ?, ?)", me)
            journal = cls(path, db, epoch)
            journal.aside, journal.damage = aside, damage
            return journal, aside is not None

    @contextmanager
    def _write(self, lasting: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction of the current epoch. All outlive the driver's death; `lasting`: a power cut too, at the
        price of waiting for the disk, in which no heartbeat is read."""
        # Without a write-ahead log a power cut may break a file that did not wait for the disk.
        self._db.execute(f"PRAGMA synchronous = {'FULL' if lasting or self.network else 'NORMAL'}")
        with _transaction(self._db) as db:
            if db.execute("SELECT epoch FROM lease").fetchone() != (self.epoch,):
                raise JournalFenced(f"epoch {self.epoch} is over: another driver has taken the job")
            yield db

    def renew(self) -> None:
        """Show that this driver lives; Fenced if another has taken over."""
        self._beat += 1
        with self._write() as db:
            db.execute("UPDATE lease SET beat = ?", (self._beat,))

    def save_job(self, job: JobState) -> None:
        """Remember the job's state, but for its nodes (`save_node`), as the one that later transitions start from."""
        with self._write(lasting=True) as db:
            write_job(db, job)

    def record(self, event: JobEvent, changes: Mapping[str, Any], after: JobState) -> None:
        """Remember a transition, after which the job is `after`."""
        data = {name: to_plain(value) for name, value in changes.items()}
        with self._write(lasting=event is not JobEvent.STEP) as db:
            row = (time.time(), self.epoch, str(event))
            insert = "INSERT INTO transitions (time, epoch, event, data) VALUES (?, ?, ?, ?)"
            db.execute(insert, (*row, sealed(data, *row)))
            if db.execute("SELECT count(*) FROM transitions").fetchone()[0] >= self.tail:
                write_job(db, after)

    def save_node(self, node: NodeRow) -> None:
        """Remember a node."""
        about = (node.name, node.address, node.state, node.why, float(node.since))
        row = (*about, sealed(node.facts, *about))
        with self._write() as db:
            db.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?, ?, ?)", row)

    def add(
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
        """Append an event."""
        now = time.time()
        entry = Entry(0, now, attempt, kind, action, nodes, ranks, evidence, details)
        with self._write() as db:
            return replace(entry, id=insert_event(db, self.epoch, entry))

    def restore(self, entries: Iterable[Entry]) -> None:
        """Put back events that the file has lost, as they were; they count as of no epoch."""
        with self._write(lasting=True) as db:
            for entry in entries:
                insert_event(db, 0, entry)

    def job(self) -> JobState | None:
        """The job as last remembered."""
        return read_job(self._db)

    def nodes(self) -> list[NodeRow]:
        """All nodes ever known."""
        return read_nodes(self._db)

    def events(self, after: int = 0, limit: int = 1_000_000) -> list[Entry]:
        """Events with an id above `after`, oldest first."""
        return read_events(self._db, after, limit)

    def close(self) -> None:
        """Give the lease back and close."""
        try:
            with self._write() as db:
                db.execute("UPDATE lease SET pid = 0, host = ''")
        except (JournalFenced, sqlite3.Error):
            pass
        self._db.close()


class JournalReader:
    """The reading side, for commands; works whether or not a driver lives."""

    def __init__(self, run: Path) -> None:
        path = run / FILE
        if not path.is_file():
            raise DataError(f"{run} has no {FILE}: it was not started with `megascale launch`")
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'events'").fetchone():
                self._db.close()
                raise DataError(f"{path} is just being made; try again in a moment")
            self.job = read_job(self._db)
        except _UNREADABLE as error:
            raise _damaged(error) from None

    def nodes(self) -> list[NodeRow]:
        """All nodes ever known. DataError for one that cannot be read."""
        try:
            return read_nodes(self._db)
        except _UNREADABLE as error:
            raise _damaged(error) from None

    def events(self, after: int = 0, limit: int = 1_000_000) -> list[Entry]:
        """Events with an id above `after`, oldest first. DataError for one that cannot be read."""
        try:
            return read_events(self._db, after, limit)
        except _UNREADABLE as error:
            raise _damaged(error) from None

    def driver_alive(self) -> bool:
        """Whether the holder of the lease is a living process of this host."""
        try:
            row = self._db.execute("SELECT host, pid, born FROM lease").fetchone()
            return row is not None and row[0] == socket.gethostname() and row[1] > 0 and born(row[1]) == row[2]
        except _UNREADABLE as error:
            raise _damaged(error) from None

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()


def read_journal_events(run: Path, after: int = 0) -> list[Entry]:
    """Events of a run with an id above `after`, oldest first; none if it has no journal yet, or a damaged one."""
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


# What reading a row raises whose text or types are garbled.
_UNREADABLE = (sqlite3.DatabaseError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


def _damaged(error: BaseException) -> DataError:
    return DataError(f"the journal is damaged ({error}); the next `megascale launch` sets it aside")


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=10.0, isolation_level=None)
    try:
        os.chmod(path, 0o600)
        if filesystems.shared(filesystems.kind(path.parent)):
            # One that came with a write-ahead log is brought home by whoever holds it alone.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute("PRAGMA locking_mode = NORMAL")
            db.execute("SELECT 1 FROM sqlite_master").fetchone()  # which lets go of the lock
        else:
            db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        if db.execute("PRAGMA quick_check").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("the check of the file failed")
        db.executescript(_SCHEMA)
        _check(db)
    except sqlite3.DatabaseError:
        db.close()
        raise
    except _UNREADABLE as error:
        db.close()
        raise sqlite3.DatabaseError(str(error)) from None
    except BaseException:
        db.close()
        raise
    return db


def _check(db: sqlite3.Connection) -> None:
    """Read all that a driver will; ValueError for a row whose checksum is not its own."""
    row = db.execute("SELECT epoch, beat, host, pid, born FROM lease").fetchone()
    if row is not None:
        kinds = [type(value) for value in row]
        if kinds != [int, int, str, int, int] or not 0 <= row[0] < 1 << 53:
            raise ValueError(f"the lease is {row}")
    job = db.execute("SELECT state FROM job").fetchone()
    if job is not None:
        unsealed(job[0])
        read_job(db)
    for *about, data in db.execute("SELECT time, epoch, event, data FROM transitions"):
        unsealed(data, *about)
    for *about, facts in db.execute("SELECT name, address, state, why, since, facts FROM nodes"):
        unsealed(facts, *about)
    columns = "time, attempt, kind, action, nodes, ranks, evidence, details"
    for *rest, details in db.execute(f"SELECT {columns} FROM events"):
        unsealed(details, *rest)
        for part in rest[4:]:
            list(json.loads(part))


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # on a full disk SQLite ends it by itself, or not
            db.execute("ROLLBACK")
        raise


def _sound(error: sqlite3.DatabaseError) -> bool:
    """Whether an error says nothing against the file: no room, no right, or somebody holds it."""
    extended = getattr(error, "sqlite_errorcode", None) or 0
    code = 0 if extended == sqlite3.SQLITE_IOERR_SHORT_READ else extended & 0xFF  # a file that was cut
    outside = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
    return code in (*outside, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PERM)


def _gone(row: tuple[int, int, str, int, int], db: sqlite3.Connection, lease: float) -> bool:
    _, _, host, pid, started = row
    if not pid:
        return True  # given back
    if host == socket.gethostname() and born(pid) != started:
        return True
    deadline = time.monotonic() + lease
    while time.monotonic() < deadline:
        if db.execute("SELECT epoch, beat, host, pid, born FROM lease").fetchone() != row:
            return False
        time.sleep(0.05)
    # On this host it lives but does nothing; where it is elsewhere it may be dead. Its epoch ends here either way.
    return True
