"""The driver's journal: one SQLite file in the run folder with the job, its nodes, every decision and its evidence.

The journal is the driver's memory across restarts and the fence between two drivers. Each driver has an epoch, and a
driver whose epoch is not the newest can no longer write. The job's state is replayed from the last whole state, the
transitions since then (job_state.py), and the rows of the nodes.

Recoveries do not wait for the disk, which may be busy with a checkpoint for seconds. Their transitions outlive the
driver's process at once, and a power cut once a thread has flushed the write-ahead log. The same thread copies the log
into the file at times. A driver that starts after a power cut in between learns newer attempts from the agents.

The journal survives a disk without space and its own removal. Writes that fail for lack of space stay in memory, are
reported once per minute, and are written once there is space. The driver does not end, since training would then be
unsupervised. If the driver dies before there is space, the next driver learns attempt and epoch from the agents. A
removed file is written again from the open connection. If another driver has created a new file, this driver is fenced.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from megascale.core.file_flush import FileFlush
from megascale.errors import ConfigError
from megascale.resilience.driver.state.job_state import JobEvent, JobState, NodeRecord, to_plain
from megascale.resilience.driver.state.journal_disk import (
    find_network_filesystem,
    is_full_disk_error,
    make_full_disk_error,
)
from megascale.resilience.driver.state.journal_reader import (
    JOURNAL_FILE,
    READ_LEASE,
    ROW_READ_ERRORS,
    SCHEMA,
    Entry,
    check_rows,
    dump_with_checksum,
    read_events,
    read_job,
    read_nodes,
    write_event,
    write_job,
    write_node,
)
from megascale.resilience.process_birth import read_birth_time

log = logging.getLogger("megascale.driver")

# Transitions that no agent could report after a power cut: orders of a person, the end of the job, and a new epoch.
_AWAITED_EVENTS = frozenset(
    {
        JobEvent.OPENED,
        JobEvent.PAUSED,
        JobEvent.RESUMED,
        JobEvent.EVICTING,
        JobEvent.FAILED,
        JobEvent.INTERRUPTED,
        JobEvent.FINISHED,
    }
)
# Transactions after which the write-ahead log is copied into the file. Each one adds a few pages of 4 KiB to the log.
WRITES_PER_COPY = 1000
REPORT_INTERVAL = 60.0  # seconds between messages about a full disk
# SQLite's primary error codes that do not indicate a damaged file.
_EXTERNAL_CODES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PERM,
)


class JournalFenced(Exception):
    """Another driver has taken over the job; this one must not touch it any more."""


class Journal:
    """The writing side, held by one driver. Open it with `take`.

    Attributes:
        damaged_copy: where a damaged file was set aside, None if the file was sound.
        damage: the fault of the damaged file.
        network_filesystem: type of the network file system that holds the journal, "" on a local one.
        report: called with a line for the terminal when writes fail for lack of space (at most once per minute), when
            all pending records have been written, and when a removed file has been written again.
        max_transitions: number of transitions after which the whole state is written again.
    """

    max_transitions = 256

    def __init__(self, path: Path, connection: sqlite3.Connection, epoch: int) -> None:
        self.path = path
        self.epoch = epoch
        self._db = connection
        # The number of renewals is stored in the lease's row, so that a waiting driver sees that the row changes.
        self._beat = 0
        self.damaged_copy: Path | None = None
        self.damage = ""
        self.network_filesystem = find_network_filesystem(path.parent)
        self.report: Callable[[str], None] = lambda text: None
        self._inode = _read_inode(path)
        self._pending_entries: deque[Entry] = deque()
        self._pending_job: JobState | None = None
        self._pending_nodes: dict[str, NodeRecord] = {}
        self._report_time = float("-inf")  # when a full disk was last reported, on the monotonic clock
        self._write_count = 0  # transactions since SQLite was last asked to copy its log into the file
        self._is_copy_due = False
        self._flush = FileFlush(path.with_name(path.name + "-wal"), self._copy_log)

    @classmethod
    def take(cls, run: Path, lease: float, known_epoch: int = 0, ended_epoch: int = 0) -> tuple[Self, bool]:
        """Become the driver of a run. Return (journal with a new epoch, True if a damaged file was set aside).

        Args:
            run: the run folder.
            lease: seconds without a renewal after which any holder loses the lease. A holder on this host loses it at
                once if its process has ended.
            known_epoch: the newest epoch known from elsewhere.
            ended_epoch: a lease of this epoch or of an older one is taken without waiting, because its driver has lost
                its right to the job, even if it lives. 0: no such epoch.

        Raises:
            ConfigError: another driver is at work.
        """
        path = run / JOURNAL_FILE
        damaged_copy: Path | None = None
        damage = ""
        try:
            db = _open(path)
        except sqlite3.DatabaseError as error:
            if _is_external(error):
                raise
            damage = str(error)
            damaged_copy = _set_aside(path)
            db = _open(path)
        while True:
            lease_row = db.execute(READ_LEASE).fetchone()
            previous = _get_epoch(lease_row)
            if lease_row is not None and previous > ended_epoch and not _wait_for_holder_end(lease_row, db, lease):
                db.close()
                _, _, host, pid, _ = lease_row
                raise ConfigError(
                    f"a driver already runs this job (process {pid} on {host}, epoch {previous}); "
                    f"talk to it with `megascale jobs`, or end it first"
                )
            epoch = max(previous, known_epoch) + 1
            holder = (epoch, 0, socket.gethostname(), os.getpid(), read_birth_time(os.getpid()))
            with _transaction(db):
                current = db.execute("SELECT epoch FROM lease").fetchone()
                if _get_epoch(current) != previous:
                    continue  # Another driver took the lease meanwhile.
                db.execute("INSERT OR REPLACE INTO lease VALUES (1, ?, ?, ?, ?, ?)", holder)
            journal = cls(path, db, epoch)
            journal.damaged_copy = damaged_copy
            journal.damage = damage
            return journal, damaged_copy is not None

    # writing --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _write(self, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Open a transaction of the current epoch. Its changes outlive the driver's death.

        Args:
            durable: the changes outlive a power cut too. The call waits for the disk, and the driver reads no
                heartbeat meanwhile.
        """
        # On a network file system SQLite uses no write-ahead log (see `_open`). Without this log, a power cut may
        # damage a file whose writes did not wait for the disk.
        synchronous = "FULL" if durable or self.network_filesystem else "NORMAL"
        self._db.execute(f"PRAGMA synchronous = {synchronous}")
        with _transaction(self._db) as db:
            if db.execute("SELECT epoch FROM lease").fetchone() != (self.epoch,):
                raise JournalFenced(f"epoch {self.epoch} is over: another driver has taken over the job")
            yield db
        self._write_count += 1
        if self._write_count >= WRITES_PER_COPY and not self.network_filesystem:
            self._write_count = 0
            self._is_copy_due = True
            self._flush.request()

    def _copy_log(self) -> None:
        """Copy the write-ahead log into the file if that is due, in the flush's thread, because it waits for the disk.

        SQLite itself would do it within a transaction. The first transaction after a copy begins the log anew and waits
        for one flush, of a disk that has just answered.
        """
        if not self._is_copy_due:
            return
        self._is_copy_due = False
        try:
            # The default mode would create a removed file, which this driver would take for that of another driver.
            db = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=rw", uri=True)
            try:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")
            finally:
                db.close()
        except sqlite3.Error as error:
            log.warning("the write-ahead log of %s was not copied into it: %s", self.path, error)

    @contextmanager
    def _tolerating_full_disk(self) -> Iterator[None]:
        """Suppress the errors of a disk without space, and report them at intervals."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if not is_full_disk_error(error, self.path.parent):
                raise
            if time.monotonic() - self._report_time > REPORT_INTERVAL:
                self._report_time = time.monotonic()
                full = make_full_disk_error(self.path.parent)
                self.report(f"{full}. The driver continues and keeps its decisions in memory")

    @property
    def is_behind(self) -> bool:
        """True while something has not been written for lack of space."""
        return bool(self._pending_entries or self._pending_job or self._pending_nodes)

    def renew(self) -> None:
        """Renew the lease, and write pending records. Raise JournalFenced if another driver has taken over."""
        self._restore_removed_file()
        self._beat += 1
        with self._tolerating_full_disk():
            with self._write() as db:
                db.execute("UPDATE lease SET beat = ?", (self._beat,))
            self._write_pending()

    def save_job(self, job: JobState) -> None:
        """Store the job's whole state without its nodes. Later transitions start from it."""
        is_written = False
        with self._tolerating_full_disk():
            with self._write(durable=True) as db:
                write_job(db, job)
            is_written = True
        self._pending_job = None if is_written else job

    def record(self, event: JobEvent, changes: Mapping[str, Any], following: JobState) -> None:
        """Store a transition that leads to the state `following`. On a full disk the whole state is stored later.

        Transitions of a recovery do not wait for the disk. A thread makes them outlive a power cut.
        """
        if self._pending_job is not None:
            self._pending_job = following
            return
        data = {name: to_plain(value) for name, value in changes.items()}
        is_written = False
        with self._tolerating_full_disk():
            with self._write(durable=event in _AWAITED_EVENTS) as db:
                row = (time.time(), self.epoch, str(event))
                insert = "INSERT INTO transitions (time, epoch, event, data) VALUES (?, ?, ?, ?)"
                db.execute(insert, row + (dump_with_checksum(data, *row),))
                if db.execute("SELECT count(*) FROM transitions").fetchone()[0] >= self.max_transitions:
                    write_job(db, following)  # also deletes all transitions, so the count starts again from 0
            is_written = True
        if not is_written:
            self._pending_job = following
        elif event is not JobEvent.STEP and not self.network_filesystem:
            self._flush.request()

    def save_node(self, name: str, record: NodeRecord) -> None:
        is_written = False
        with self._tolerating_full_disk():
            with self._write() as db:
                write_node(db, name, record)
            is_written = True
        if is_written:
            self._pending_nodes.pop(name, None)
        else:
            self._pending_nodes[name] = record

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
        """Append an event and return it with its id; an event that cannot be written yet has the id 0."""
        entry = Entry(
            id=0,
            time=time.time(),
            attempt=attempt,
            kind=kind,
            action=action,
            nodes=nodes,
            ranks=ranks,
            evidence=evidence,
            details=details,
        )
        if not self._pending_entries:
            with self._tolerating_full_disk(), self._write() as db:
                return replace(entry, id=write_event(db, self.epoch, entry))
        self._pending_entries.append(entry)
        return entry

    def restore(self, entries: Iterable[Entry]) -> None:
        """Write events that the file has lost, with their times and without an epoch."""
        with self._write(durable=True) as db:
            for entry in entries:
                write_event(db, 0, entry)

    def raise_epoch(self, epoch: int) -> None:
        """Raise the epoch of this driver to `epoch`, which must exceed every epoch that an agent knows.

        Raise JournalFenced if another driver has taken over.
        """
        with self._write() as db:
            db.execute("UPDATE lease SET epoch = ?", (epoch,))
        self.epoch = epoch

    def _write_pending(self) -> None:
        """Write the records that could not be written for lack of space."""
        if not self.is_behind:
            return
        if self._pending_job is not None:
            self.save_job(self._pending_job)
        for name, record in list(self._pending_nodes.items()):
            self.save_node(name, record)
        while self._pending_entries:
            entry = self._pending_entries[0]
            # The row's time is the time of writing. The key `noted` of its details is the time of the event.
            details = {"noted": entry.time, **entry.details}
            with self._write() as db:
                write_event(db, self.epoch, replace(entry, time=time.time(), details=details))
            self._pending_entries.popleft()
        if not self.is_behind:
            self._report_time = float("-inf")
            self.report("the disk has space again: the journal is complete")

    def _restore_removed_file(self) -> None:
        """Write a removed file again. Raise JournalFenced if another driver has created a new one."""
        inode = _read_inode(self.path)
        if inode == self._inode:
            return
        if inode is not None:
            raise JournalFenced(f"{self.path} was replaced: another driver has taken over the job")
        copy = sqlite3.connect(":memory:")
        try:
            self._db.backup(copy)
            self._db.close()
            self._db = _open(self.path)
            copy.backup(self._db)
        except sqlite3.Error as error:
            raise JournalFenced(
                f"{self.path} was removed and cannot be written again ({error}); run the same command again"
            ) from None
        finally:
            copy.close()
        self._inode = _read_inode(self.path)
        self.report(f"{self.path} was removed; it is written again from the driver's memory")

    # reading --------------------------------------------------------------------------------------------------------

    def job(self) -> JobState | None:
        """Return the stored state of the job, None before the first one."""
        return read_job(self._db)

    def nodes(self) -> dict[str, NodeRecord]:
        """Return the records of all nodes ever known, by name."""
        return read_nodes(self._db)

    def events(self, after: int = 0, limit: int = 1_000_000) -> list[Entry]:
        """Return the events with an id above `after`, oldest first."""
        return read_events(self._db, after, limit)

    def close(self) -> None:
        """Give the lease back and close the file."""
        self._flush.close()
        try:
            with self._write() as db:
                db.execute("UPDATE lease SET pid = 0, host = ''")
        except (JournalFenced, sqlite3.Error):  # Another driver has the lease, or the lease ends by its silence.
            pass
        self._db.close()


# files ----------------------------------------------------------------------------------------------------------------


def _set_aside(path: Path) -> Path:
    """Rename a damaged file and the files that SQLite keeps next to it; return the new path."""
    damaged_copy = path.with_name(f"{JOURNAL_FILE}.damaged-{time.time_ns()}")
    for suffix in ("", "-wal", "-shm", "-journal"):
        file = path.with_name(path.name + suffix)
        if file.exists():
            os.replace(file, damaged_copy.with_name(damaged_copy.name + suffix))
    return damaged_copy


def _get_epoch(lease_row: tuple[int, ...] | None) -> int:
    """Return the epoch, which is the first column of the lease's row; 0 if no driver has held the lease."""
    return lease_row[0] if lease_row else 0


def _read_inode(path: Path) -> tuple[int, int] | None:
    """Return (device, inode) of a file, None if it does not exist."""
    try:
        file = path.stat()
    except FileNotFoundError:
        return None
    return file.st_dev, file.st_ino


def _open(path: Path) -> sqlite3.Connection:
    """Open or create the file, and check it. Raise sqlite3.DatabaseError for a damaged file."""
    db = sqlite3.connect(path, timeout=10.0, isolation_level=None)
    try:
        os.chmod(path, 0o600)
        if find_network_filesystem(path.parent):
            # A journal that was copied from a local disk still uses a write-ahead log, for which SQLite needs memory
            # shared by all its users. Only a connection with an exclusive lock can switch such a file to a rollback
            # journal.
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = DELETE")
            db.execute("PRAGMA locking_mode = NORMAL")
            db.execute("SELECT 1 FROM sqlite_master").fetchone()  # This access releases the exclusive lock.
        else:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA wal_autocheckpoint = 0")  # see Journal._copy_log
        db.execute("PRAGMA synchronous = FULL")
        if db.execute("PRAGMA quick_check").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("the check of the file failed")
        db.executescript(SCHEMA)
        check_rows(db)
    except BaseException as error:
        db.close()
        # A garbled row raises other types too, such as ValueError. Callers expect one type for a damaged file.
        if isinstance(error, ROW_READ_ERRORS) and not isinstance(error, sqlite3.DatabaseError):
            raise sqlite3.DatabaseError(str(error)) from None
        raise
    return db


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Run the block in a transaction, which an exception rolls back."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite may have ended it on a full disk.
            db.execute("ROLLBACK")
        raise


def _is_external(error: sqlite3.DatabaseError) -> bool:
    """Return True if an error does not indicate a damaged file: lack of space or rights, or a lock."""
    extended_code = getattr(error, "sqlite_errorcode", None) or 0
    if extended_code == sqlite3.SQLITE_IOERR_SHORT_READ:  # The file was cut.
        return False
    return extended_code & 0xFF in _EXTERNAL_CODES


def _wait_for_holder_end(row: tuple[int, int, str, int, int], db: sqlite3.Connection, lease: float) -> bool:
    """Wait up to `lease` seconds; return True if the holder has ended, given the lease back or not renewed it.

    Args:
        lease: seconds after which a lease that is not renewed is free.
    """
    _, _, host, pid, birth = row
    if pid == 0:
        return True
    if host == socket.gethostname() and read_birth_time(pid) != birth:
        return True
    deadline = time.monotonic() + lease
    while time.monotonic() < deadline:
        if db.execute(READ_LEASE).fetchone() != row:
            return False
        time.sleep(0.05)
    # The holder has not renewed its lease: it hangs, on this or another host, or it has died on another host. A new
    # epoch ends its writes in all cases.
    return True
