"""The journal as a driver holds it: it outlasts a disk without room, and its own removal.

What cannot be written for want of room is kept in memory, said once a minute, and written when there is room again: a
driver that ended for it would leave training alone. Should it die meanwhile, agents know the attempt and the epoch.
Files that somebody removed are made again from what the connection still holds; where another driver has made new ones,
this one is over.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megascale.core.failure import DISK_FULL_ERRNOS, MIN_FREE_BYTES, find_errno
from megascale.errors import TrainingError
from megascale.resilience.driver.state.job_state import JobState
from megascale.resilience.driver.state.journal import Entry, Journal, JournalFenced, NodeRow, _open
from megascale.resilience.driver.state.transitions import JobEvent

EVERY = 60.0  # seconds between messages about a full disk


def lacks_room(error: BaseException, folder: Path) -> bool:
    """Whether an error of SQLite or the system is for want of room (disk, quota, size of a file) in `folder`."""
    if isinstance(error, sqlite3.Error):
        # SQLite reports a full disk, but of a quota or a limit only that writing failed.
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        return code == sqlite3.SQLITE_FULL or (
            code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and _try_to_write(folder) in DISK_FULL_ERRNOS
        )
    return find_errno(error) in DISK_FULL_ERRNOS


def no_room(folder: Path) -> TrainingError:
    """The one paragraph about it."""
    try:
        disk = os.statvfs(folder)
        left = f"{disk.f_bavail * disk.f_frsize:,} bytes are left"
    except OSError:
        left = "nothing can be written there"
    return TrainingError(
        f"the disk of {str(folder)!r} has no room for the driver's journal ({left}): make room, or put train.runs on "
        "another disk, and run the same command again; checkpoints that are committed stay as they are"
    )


class LastingJournal(Journal):
    """Args as Journal's; open it with `take`.

    Attributes:
        say: called with a line when something could not be written, and when it was.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, epoch: int) -> None:
        super().__init__(path, connection, epoch)
        self.say: Callable[[str], None] = lambda text: None
        self._file = _identity(path)
        self._late: list[dict[str, Any]] = []
        self._late_job: JobState | None = None
        self._late_nodes: dict[str, NodeRow] = {}
        self._said = float("-inf")

    @property
    def behind(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._late or self._late_job or self._late_nodes)

    def renew(self) -> None:
        """Show that this driver lives, and write what is late; Fenced if another has taken over."""
        self._find_again()
        if self._written(super().renew):
            self._catch_up()

    def save_job(self, job: JobState) -> None:
        """Remember the job's state."""
        self._late_job = None if self._written(lambda: super(LastingJournal, self).save_job(job)) else job

    def record(self, event: JobEvent, changes: Mapping[str, Any], after: JobState) -> None:
        """Remember a transition; where that finds no room, the whole state is written later."""
        if self._late_job is not None or not self._written(
            lambda: super(LastingJournal, self).record(event, changes, after)
        ):
            self._late_job = after

    def save_node(self, node: NodeRow) -> None:
        """Remember a node."""
        if self._written(lambda: super(LastingJournal, self).save_node(node)):
            self._late_nodes.pop(node.name, None)
        else:
            self._late_nodes[node.name] = node

    def add(self, kind: str, **about: Any) -> Entry:
        """Append an event; one that cannot be written yet has the id 0."""
        found: list[Entry] = []
        if not self._late and self._written(lambda: found.append(super(LastingJournal, self).add(kind, **about))):
            return found[0]
        now = time.time()
        self._late.append({"kind": kind, "noted": now} | about)
        fields = {name: about.get(name, ()) for name in ("nodes", "ranks", "evidence")}
        details = {k: v for k, v in about.items() if k not in (*fields, "attempt", "action")}
        return Entry(0, now, about["attempt"], kind, about.get("action", ""), details=details, **fields)

    def raise_epoch(self, epoch: int) -> None:
        """Go on as `epoch`, since nodes know almost as high a one; Fenced if another driver holds the journal."""
        with self._write() as db:
            db.execute("UPDATE lease SET epoch = ?", (epoch,))
        self.epoch = epoch

    def _written(self, write: Callable[[], Any]) -> bool:
        """Whether `write` found room."""
        try:
            write()
        except sqlite3.OperationalError as error:
            if not lacks_room(error, self.path.parent):
                raise
            if time.monotonic() - self._said > EVERY:
                self._said = time.monotonic()
                self.say(f"{no_room(self.path.parent)}. The driver goes on and keeps in memory what it decides")
            return False
        return True

    def _catch_up(self) -> None:
        if not self.behind:
            return
        if self._late_job is not None:
            self.save_job(self._late_job)
        for node in list(self._late_nodes.values()):
            self.save_node(node)
        while self._late:
            about = self._late[0]
            if not self._written(lambda about=about: super(LastingJournal, self).add(**about)):  # type: ignore[misc]
                return
            self._late.pop(0)
        if not self.behind:
            self._said = float("-inf")
            self.say("there is room again: what the journal lacked is written")

    def _find_again(self) -> None:
        """Make removed files again."""
        now = _identity(self.path)
        if now == self._file:
            return
        if now is not None:
            raise JournalFenced(f"{self.path} is another file now: another driver has taken the job")
        held = sqlite3.connect(":memory:")
        try:
            self._db.backup(held)
            self._db.close()
            self._db = _open(self.path)
            held.backup(self._db)
        except sqlite3.Error as error:
            raise JournalFenced(
                f"{self.path} was removed and cannot be made again ({error}); run the same command"
            ) from None
        finally:
            held.close()
        self._file = _identity(self.path)
        self.say(f"{self.path} was removed; it is written again from what the driver knew")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        file = path.stat()
    except FileNotFoundError:
        return None
    return file.st_dev, file.st_ino


def _try_to_write(folder: Path) -> int:
    """The errno of making a file of a mebibyte there, 0 if that works."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, MIN_FREE_BYTES)
    except OSError as error:
        return error.errno or 0
    return 0
