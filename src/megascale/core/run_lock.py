"""Locks of a run folder, which exclude a second training. Rank 0 holds one until its process ends.

Two files are locked with flock. Rank 0 of a training locks RUN/trainer.lock exclusively, and so do commands that change
checkpoints, briefly. The driver of a launched job takes a shared lock of RUN/driver.lock, so that no other training
starts between two attempts of the job. The lock is shared because two drivers hold it while one replaces the other.
Trainers of the job do not check driver.lock. The text in each file describes the holder for error messages only.

The kernel releases a lock when its process ends, so there is nothing to clean up. Locks work between hosts if the file
system supports flock: NFS as Linux mounts it by default (not with `nolock` or `local_lock=flock`), CephFS, GPFS, and
Lustre with `-o flock`. `RunLock.warning` reports a file system without locks. A file system with separate locks for
each host cannot always be detected.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megascale.core.untrusted_files import read_small_text
from megascale.errors import ConfigError, TrainingError

TRAINER_LOCK = "trainer.lock"
DRIVER_LOCK = "driver.lock"
GRACE_PERIOD = 5.0  # seconds to wait for the end of a holder that was just killed
_POLL_INTERVAL = 0.05  # seconds
_LOCKED_ERRNOS = (errno.EAGAIN, errno.EACCES)  # another process holds the lock; NFS returns EACCES
# Errors that a second try would meet again: a person must change permissions, the mount or the path.
_LASTING_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


@dataclass(frozen=True)
class Holder:
    """Holder of a lock, as the lock's file describes it.

    Attributes:
        what: the command, such as `megascale train`.
        host, pid: the process.
        since: local time at which it took the lock.
        driver: whether the process is a driver or belongs to a driver's job.
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


class RunBusyError(ConfigError):
    """Another process trains in this run folder (exit 2)."""


def started_by_driver() -> bool:
    """Return whether an agent of a driver started this process."""
    return "MEGASCALE_NODE" in os.environ


class RunLock:
    """Lock that this process holds until `release` or its end.

    Attributes:
        warning: why the lock may not exclude other processes, and which other users may write into the folder; "" if
            neither applies.
    """

    def __init__(self, descriptor: int, warning: str = "") -> None:
        self._descriptor = descriptor  # -1 once the file is closed
        self.warning = warning
        self._is_signed = False  # whether the file describes this holder
        _open_locks.add(self)

    def sign(self, holder: Holder) -> None:
        """Write the holder into the file. Errors such as a full disk are ignored, because the lock holds anyway."""
        self._is_signed = True
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(asdict(holder)).encode() + b"\n", 0)

    def release(self) -> None:
        """Clear the file and release the lock."""
        if self._is_signed and self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
        self.drop()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def drop(self) -> None:
        """Close this process's descriptor and leave the file's text; a parent process keeps its own lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_open_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _drop_all() -> None:
    """Close the descriptors of all locks."""
    for lock in list(_open_locks):
        lock.drop()


# A child's copy of the descriptor would hold the lock after its parent has ended.
os.register_at_fork(after_in_child=_drop_all)


def acquire_trainer_lock(folder: Path, command: str, grace_period: float = GRACE_PERIOD) -> RunLock:
    """Acquire the exclusive right to train in a folder (of a run or of checkpoints), or to change its checkpoints.

    Args:
        folder: created if it does not exist.
        command: the command, for the error message of a second process.
        grace_period: seconds to wait for the present holder to end.

    Raises:
        RunBusyError: another process trains there, or a driver reserves the run for its job.
        ConfigError: the lock file cannot be created by this user, or not at this path.
        TrainingError: an older attempt of this job still runs, or the file system failed.
    """
    lock = _claim(folder, grace_period)
    # A holder that releases its lock clears the file. A text that is still there is from a holder that was killed, or
    # from one on a host with separate locks. The driver restarts its own killed trainers on other hosts.
    previous = _read_holder(folder / TRAINER_LOCK)
    is_driven = started_by_driver()
    if not is_driven and previous.host not in ("", socket.gethostname()) and not lock.warning:
        lock.warning = (
            f"{previous} did not release {folder}: if it still runs, the hosts' file system does not share locks; "
            "end that process"
        )
    lock.sign(_describe_self(command, is_driven))
    return _warn_of_other_writers(lock, folder)


def check_available(folder: Path, grace_period: float = GRACE_PERIOD) -> None:
    """Raise the errors of `acquire_trainer_lock` without keeping the lock. Creates no files."""
    if (folder / TRAINER_LOCK).exists() or (folder / DRIVER_LOCK).exists():
        _claim(folder, grace_period).drop()


def _claim(folder: Path, grace_period: float) -> RunLock:
    """Lock the trainer's file. Raises the errors of `acquire_trainer_lock`, also if a driver reserves the run.

    The trainer's lock is taken first, so that a driver that starts at the same moment finds it held.
    """
    lock = _try_lock(folder / TRAINER_LOCK, fcntl.LOCK_EX, grace_period)
    is_driven = started_by_driver()
    if lock is None:
        holder = _read_holder(folder / TRAINER_LOCK)
        if is_driven and holder.driver:
            raise TrainingError(
                f"{folder} is still held by {holder}, a process of an older attempt of this job that did not end "
                f"within {grace_period:g} seconds; end it if it hangs"
            )
        raise _busy_error(folder, holder)
    if not is_driven and (folder / DRIVER_LOCK).exists():
        # An exclusive lock is available only if no driver holds the shared one.
        probe = _try_lock(folder / DRIVER_LOCK, fcntl.LOCK_EX, grace_period=0.0)
        if probe is None:
            lock.drop()
            raise _busy_error(folder, replace(_read_holder(folder / DRIVER_LOCK), driver=True))
        probe.drop()
    return lock


def acquire_driver_lock(folder: Path, command: str, grace_period: float = GRACE_PERIOD) -> RunLock:
    """Acquire a driver's shared lock on its run. Other drivers and trainers of the job may run at the same time.

    Raises RunBusyError if a training without a driver still runs there after `grace_period` seconds.
    """
    deadline = time.monotonic() + grace_period
    lock = _try_lock(folder / DRIVER_LOCK, fcntl.LOCK_SH, grace_period)
    if lock is None:  # `_claim` of another process locks the file exclusively, but only for a moment
        raise _busy_error(folder, _read_holder(folder / TRAINER_LOCK))
    lock.sign(_describe_self(command, driver=True))
    while (folder / TRAINER_LOCK).exists():
        probe = _try_lock(folder / TRAINER_LOCK, fcntl.LOCK_EX, grace_period=0.0)
        if probe is not None:  # no trainer runs
            probe.drop()
            break
        holder = _read_holder(folder / TRAINER_LOCK)
        if holder.driver:  # a trainer of an earlier attempt of the job
            break
        if time.monotonic() > deadline:
            lock.drop()
            raise _busy_error(folder, holder)
        time.sleep(_POLL_INTERVAL)
    return _warn_of_other_writers(lock, folder)


def describe_other_writers(folder: Path) -> str:
    """Return a warning about other users who may change the folder's content; "" if only this user and root may.

    A run trusts every writer of its folders. Parents are checked too, because a writer of a parent may replace the
    folder. Sticky parents such as /tmp are exempt. Access control lists are not read.
    """
    resolved_folder = Path(os.path.realpath(folder))
    for path in (resolved_folder, *resolved_folder.parents):
        try:
            status = path.stat()
        except OSError:
            continue  # the folder does not exist yet or is not readable; its parents are checked
        is_sticky = path != resolved_folder and status.st_mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to user {status.st_uid}, who may change its content"
        if status.st_mode & stat.S_IWOTH and not is_sticky:
            return f"{path} can be written by every user of this machine; run `chmod o-w {path}`"
        if path == resolved_folder and status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid():
            return f"{path} can be written by group {status.st_gid}; run `chmod g-w {path}`"
    return ""


def _warn_of_other_writers(lock: RunLock, folder: Path) -> RunLock:
    """Add the warning about other writers of the folder to the lock's warning. Return the lock."""
    warnings = (lock.warning, describe_other_writers(folder))
    lock.warning = "; ".join(warning for warning in warnings if warning)
    return lock


def _try_lock(path: Path, kind: int, grace_period: float) -> RunLock | None:
    """Lock the file at `path`; return None if another process held it during the whole `grace_period`.

    Args:
        kind: fcntl.LOCK_EX or fcntl.LOCK_SH.
    """
    deadline = time.monotonic() + grace_period
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            problem = f"the lock file {path} cannot be created: {error.strerror}"
            if error.errno in _LASTING_ERRNOS:
                # By the exit code of this error, a driver does not start the job again.
                remedy = f"make its folder writable for user {os.geteuid()}"
                if error.errno in (errno.ENOTDIR, errno.EEXIST):
                    remedy = "a part of this path is a file; remove it, or name another folder"
                raise ConfigError(f"{problem}; {remedy}") from None
            storage_error = TrainingError(f"{problem}; make its folder writable")
            storage_error.errno = error.errno or 0
            raise storage_error from None
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            # The lock counts only if the path still names the locked file, which may have been replaced meanwhile.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return RunLock(descriptor)
        except FileNotFoundError:
            pass  # another process removed the folder between `open` and `stat`
        except OSError as error:
            if error.errno not in _LOCKED_ERRNOS:
                warning = (
                    f"{path}: this file system has no locks ({error.strerror}); a second training would not be refused"
                )
                return RunLock(descriptor, warning)
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(_POLL_INTERVAL)
        os.close(descriptor)


def _describe_self(command: str, driver: bool) -> Holder:
    return Holder(command, socket.gethostname(), os.getpid(), since=time.strftime("%F %T"), driver=driver)


def _read_holder(path: Path) -> Holder:
    """Return the holder that a lock's file describes; a default one if the file is missing, empty or damaged."""
    try:
        return Holder(**json.loads(read_small_text(path)))
    except (OSError, ValueError, TypeError, RecursionError):
        return Holder()


def _busy_error(folder: Path, holder: Holder) -> RunBusyError:
    """Return the error for a folder in which `holder` trains."""
    if holder.driver:
        remedy = (
            f"`megascale events {folder}` shows the state of its job, Ctrl-C in its terminal saves and ends the job, "
            "and `megascale launch` continues it"
        )
    else:
        remedy = "wait for it, or end it (it saves on SIGTERM)"
    return RunBusyError(f"{folder} is in use by {holder}: {remedy}; for a separate run give another --train.name")
