"""Helpers for failures: causes of exceptions, free disk space, and logging and restart of background work."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

# Error numbers of a full disk, an exhausted quota, and a file at its size limit.
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MIN_FREE_BYTES = 1 << 20  # a disk with less free space counts as full, because no checkpoint, log or journal fits on it
PAUSE = 1.0  # seconds before failed work is restarted
_REPEAT_INTERVAL = 60.0  # seconds before the same failure is logged again
_MAX_FOLDER_CHARACTERS = 200


# Error numbers of a folder that this user may not write.
NOT_WRITABLE_ERRNOS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def describe_write_failure(error: OSError, folder: str | Path, key: str) -> str:
    """Return the cause of an error in DISK_FULL_ERRNOS or NOT_WRITABLE_ERRNOS, and its remedy without the next step.

    Args:
        folder: folder of most files. It is named if the error has no path, as errors of writes to open files.
        key: setting that moves the folder.
    """
    path = f"a file, probably of {folder},"
    disk = Path(folder).absolute()
    remedy = f"set another {key}"
    if isinstance(error.filename, str):
        path = error.filename
        disk = Path(path).absolute()
        if not disk.is_relative_to(Path(folder).absolute()):
            remedy = "move its folder to another disk"
    reason = error.strerror or str(error)
    if error.errno == errno.EFBIG:
        return f"{path} is at its size limit ({reason}); raise the limit (`ulimit -f`, or of the file system)"
    if error.errno in NOT_WRITABLE_ERRNOS:
        return f"{path} cannot be written ({reason}); give this user the right to write there, or {remedy}"
    space = ""
    # A file that could not be created does not exist, but one of its parents does.
    for candidate in (disk, *disk.parents):
        free = list(free_bytes([candidate]).values())
        if free:
            space = f"; {free[0]:,.0f} bytes are free, at least {MIN_FREE_BYTES:,} are needed"
            break
    cause = "the disk is full"
    if error.errno == errno.EDQUOT:
        cause = "the quota of the disk is used up"
    return f"{cause}: {path} cannot be written ({reason}{space}); free space there, or {remedy}"


def iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and then its causes and contexts, including suppressed contexts."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        yield cause
        if cause.__cause__ is not None:
            cause = cause.__cause__
        else:
            cause = cause.__context__


def find_errno(error: BaseException) -> int:
    """Return the first error number in the exception's chain of causes, or 0 if no system call failed."""
    for cause in iterate_causes(error):
        number = getattr(cause, "errno", None)
        if isinstance(number, int) and number > 0:
            return number
    return 0


def describe_error(error: BaseException) -> str:
    """Return "TYPE: TEXT" of an exception, or of the cause of a SystemExit; "" for a SystemExit without a cause."""
    for cause in iterate_causes(error):
        if not isinstance(cause, SystemExit):
            return f"{type(cause).__name__}: {cause}"[:1000]
    return ""


def describe_exit(code: int) -> str:
    """Return a phrase for the exit code of a process; a negative code is the number of the signal that ended it."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {name_signal(-code)}"


def name_signal(number: int) -> str:
    """Return the name of a signal, or its number if Python has no name for it, as for real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def reserve_file_space(descriptor: int, size: int) -> None:
    """Extend an open file that will be memory-mapped to `size` bytes, with disk blocks allocated.

    Raises OSError if the disk has no room. Without the reservation, the first write to the mapping would end the
    process by SIGBUS.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    os.ftruncate(descriptor, size)


def free_bytes(folders: Iterable[str | Path]) -> dict[str, float]:
    """Return the bytes that this user may still write, by folder; 0 if no new file can be created either.

    Folders that do not exist are left out.
    """
    free: dict[str, float] = {}
    for folder in folders:
        try:
            disk = os.statvfs(folder)
        except OSError:
            continue
        has_no_inodes = disk.f_files > 0 and disk.f_favail == 0
        if has_no_inodes:
            available = 0.0
        else:
            available = float(disk.f_bavail * disk.f_frsize)
        free[str(folder)[-_MAX_FOLDER_CHARACTERS:]] = available
    return free


class FailureLog:
    """Log of one task's failures with their tracebacks; a repeated failure is logged once per minute.

    Args:
        log: receives the errors.
        name: name of the work, a noun.
        clock: monotonic clock in seconds.
    """

    def __init__(self, log: logging.Logger, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._name = name
        self._clock = clock
        self._last_text = ""
        self._last_time = float("-inf")

    def note(self, error: BaseException, consequence: str) -> None:
        """Log that the work failed, and the consequence."""
        text = f"{type(error).__name__}: {error}"
        if text == self._last_text and self._clock() - self._last_time < _REPEAT_INTERVAL:
            return
        self._last_text = text
        self._last_time = self._clock()
        self._log.error("%s failed (%s); %s", self._name, text[:500], consequence, exc_info=error)


async def keep_running(
    work: Callable[[], Awaitable[None]], name: str, log: logging.Logger, pause: float = PAUSE
) -> None:
    """Run `work` until it returns. After a failure, which is logged, restart it in `pause` seconds."""
    import asyncio  # imported here, because it takes a tenth of the start of a service without an event loop

    failures = FailureLog(log, name)
    while True:
        try:
            return await work()
        except Exception as error:
            failures.note(error, f"it starts again in {pause:g} s")
        await asyncio.sleep(pause)


def log_failure(task: asyncio.Task[Any], name: str, log: logging.Logger) -> None:
    """Log the failure of a task when it ends; asyncio does so only once nothing refers to the task."""

    def log_error(task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            FailureLog(log, name).note(error, "it does not start again")

    task.add_done_callback(log_error)
