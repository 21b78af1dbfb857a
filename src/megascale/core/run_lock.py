"""Who may write into a run folder: one training at a time, held by rank 0 and freed by the kernel when it ends.

Two files, locked as a whole with flock, say who is there. RUN/trainer.lock is held exclusively by rank 0 of whatever
trains, and for a moment by commands that change checkpoints. RUN/driver.lock is held, shared, by the drivers of a
launched job (two for a moment when one replaces the other), so that nobody slips in between two attempts; their
trainers do not ask it. The text in a file names its holder for people; the lock alone decides.

A lock ends with its process, whatever ended it, so nothing is ever left to clear away. It holds between hosts where the
file system passes flock on: NFS as Linux mounts it by default (not with `nolock` or `local_lock=flock`), CephFS, GPFS,
Lustre with `-o flock`. Where there is none, or only one for each host, `RunLock.warning` says so or nothing can.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megascale.core.untrusted_files import read_small_text
from megascale.core.writers import other_writers
from megascale.errors import ConfigError, TrainingError

TRAINERS, DRIVERS = "trainer.lock", "driver.lock"
GRACE_PERIOD = 5.0  # seconds for a holder that was just killed to be gone
_LOOK = 0.05  # seconds between two looks
_BUSY = (errno.EAGAIN, errno.EACCES)  # NFS says the second


@dataclass(frozen=True)
class Holder:
    """What a lock's file says of who holds it.

    Attributes:
        what: the command, such as `megascale train`.
        host, pid: the process.
        since: local time at which it came.
        driver: whether a driver started it.
    """

    what: str = "another process"
    host: str = ""
    pid: int = 0
    since: str = ""
    driver: bool = False

    def __str__(self) -> str:
        if not self.pid:
            return self.what
        return f"process {self.pid} on {self.host} ({self.what}, since {self.since})"


class Busy(ConfigError):
    """Somebody else trains here (exit 2)."""


def started_by_driver() -> bool:
    """Whether an agent of a driver started this process."""
    return "MEGASCALE_NODE" in os.environ


class RunLock:
    """A lock that this process holds until `release` or its end.

    Attributes:
        warning: why it keeps nobody out, or may not, and who else may write into the folder; "" where all is well.
    """

    def __init__(self, handle: int, warning: str = "") -> None:
        self._handle, self.warning = handle, warning
        self._signed = False
        _held.add(self)

    def sign(self, holder: Holder) -> None:
        """Say who holds it; what cannot be said on a full disk is left out."""
        self._signed = True
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps(asdict(holder)).encode() + b"\n", 0)

    def release(self) -> None:
        """Let the next one in."""
        if self._signed and self._handle >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)
        self.drop()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def drop(self) -> None:
        """Let go and leave what the file says; in a child of a fork the parent goes on holding it."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _drop_all() -> None:
    for lock in list(_held):
        lock.drop()


# A child's copy of the handle would hold the lock when its parent has ended.
os.register_at_fork(after_in_child=_drop_all)


def acquire_trainer_lock(folder: Path, what: str, grace_period: float = GRACE_PERIOD) -> RunLock:
    """The right to train in a folder (of a run, or of checkpoints), or to change what is there.

    Args:
        folder: made if it is not there.
        what: the command, for those who come second.
        grace_period: seconds to wait for a holder to go.

    Raises:
        Busy: somebody else trains there, or a driver holds the run for its job; says who, and what to do.
        TrainingError: an older attempt of the job that this process belongs to still runs; or no file can be made.
    """
    lock = _claim(folder, grace_period)
    before, host = _read(folder / TRAINERS), socket.gethostname()
    if not started_by_driver() and before.host not in ("", host) and not lock.warning:
        lock.warning = (
            f"{before} did not say good-bye in {folder}: if it still runs, the hosts' file system does not share "
            "locks, and it must be ended"
        )
    lock.sign(_me(what, started_by_driver()))
    return _told(lock, folder)


def check_available(folder: Path, grace_period: float = GRACE_PERIOD) -> None:
    """Raise what `take` would, before anything is started."""
    if (folder / TRAINERS).exists() or (folder / DRIVERS).exists():
        _claim(folder, grace_period).drop()


def _claim(folder: Path, grace_period: float) -> RunLock:
    lock, driven = _lock(folder / TRAINERS, fcntl.LOCK_EX, grace_period), started_by_driver()
    if lock is None:
        holder = _read(folder / TRAINERS)
        if driven and holder.driver:
            raise TrainingError(
                f"{folder} is still held by {holder}, which an older attempt of this job has left and which did not "
                f"end within {grace_period:g} seconds; end it if it hangs"
            )
        raise _busy(folder, holder)
    if not driven and (folder / DRIVERS).exists():
        probe = _lock(folder / DRIVERS, fcntl.LOCK_EX, 0.0)
        if probe is None:
            lock.drop()
            raise _busy(folder, replace(_read(folder / DRIVERS), driver=True))
        probe.drop()
    return lock


def acquire_driver_lock(folder: Path, what: str, grace_period: float = GRACE_PERIOD) -> RunLock:
    """A driver's hold on its run; others of the same job may hold it too, and trainers of that job may be running.

    Raises Busy if somebody trains there who belongs to no driver.
    """
    deadline = time.monotonic() + grace_period
    lock = _lock(folder / DRIVERS, fcntl.LOCK_SH, grace_period)
    if lock is None:  # held exclusively by somebody who only looks: not for long
        raise _busy(folder, _read(folder / TRAINERS))
    lock.sign(_me(what, driver=True))
    while (folder / TRAINERS).exists():
        probe = _lock(folder / TRAINERS, fcntl.LOCK_EX, 0.0)
        if probe is not None:
            probe.drop()
            break
        holder = _read(folder / TRAINERS)
        if holder.driver:
            break
        if time.monotonic() > deadline:
            lock.drop()
            raise _busy(folder, holder)
        time.sleep(_LOOK)
    return _told(lock, folder)


def _told(lock: RunLock, folder: Path) -> RunLock:
    """With a word on who else may write there: whoever writes into a run's folders is trusted."""
    lock.warning = "; ".join(filter(None, (lock.warning, other_writers(folder))))
    return lock


def _lock(path: Path, kind: int, grace_period: float) -> RunLock | None:
    """A lock on the file that is at `path` in the end; None if others held it all the time."""
    deadline = time.monotonic() + grace_period
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TrainingError(f"the lock {path} cannot be made: {error.strerror}; make its folder writable") from None
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return RunLock(handle)
        except FileNotFoundError:
            pass  # the folder was removed between our two calls
        except OSError as error:
            if error.errno not in _BUSY:
                why = f"{path}: this file system has no locks ({error.strerror}); nothing keeps a second training out"
                return RunLock(handle, why)
            if time.monotonic() >= deadline:
                os.close(handle)
                return None
            time.sleep(_LOOK)
        os.close(handle)


def _me(what: str, driver: bool) -> Holder:
    return Holder(what, socket.gethostname(), os.getpid(), time.strftime("%F %T"), driver)


def _read(path: Path) -> Holder:
    try:
        return Holder(**json.loads(read_small_text(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return Holder()


def _busy(folder: Path, holder: Holder) -> Busy:
    if holder.driver:
        remedy = (
            f"`megascale events {folder}` tells how its job stands, Ctrl-C in its terminal saves and ends it, and "
            "`megascale launch` goes on"
        )
    else:
        remedy = "wait for it, or end it (it saves on SIGTERM)"
    return Busy(f"{folder} is in use by {holder}: {remedy}; for a run beside it give another --train.name")
