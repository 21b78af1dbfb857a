"""What an exception says about its cause besides its text: the number of the system call's error, and full disks."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# A disk without room, a quota that is used up, a file that may grow no more.
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MIN_FREE_BYTES = 1 << 20  # bytes; a disk with less is full: no checkpoint, log or journal fits on it


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, then what it was raised from or in the course of, whether or not a traceback would show that."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ if at.__cause__ is not None else at.__context__


def find_errno(error: BaseException) -> int:
    """The first error number in an exception's chain; 0: it does not come from a system call."""
    for link in chain(error):
        number = getattr(link, "errno", None)
        if isinstance(number, int) and number > 0:
            return number
    return 0


def words_of(error: BaseException) -> str:
    """ "TYPE: TEXT" of the exception that ended a process; of one that only carries an exit code, of what it hides."""
    for link in chain(error):
        if not isinstance(link, SystemExit):
            return f"{type(link).__name__}: {link}"[:1000]
    return ""


def disable_bytecode_cache() -> None:
    """Have this process cache no module that it imports later: Python does not notice where a full disk cuts such a
    file, and whoever imports the module next ends with EOFError."""
    sys.dont_write_bytecode = True


def reserve(descriptor: int, size: int) -> None:
    """Make an open file that will be mapped into memory `size` bytes long, with room on its disk.

    OSError where there is none; else the first write to the mapping would end the process by SIGBUS.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    os.ftruncate(descriptor, size)


def free_bytes(folders: Iterable[str | Path]) -> dict[str, float]:
    """Folder -> bytes that this user may still write to its disk, 0 where no new file can be made either.

    Folders that are not there are left out.
    """
    found: dict[str, float] = {}
    for folder in folders:
        try:
            disk = os.statvfs(folder)
        except OSError:
            continue
        no_files = disk.f_files > 0 and disk.f_favail == 0
        found[str(folder)[-200:]] = 0.0 if no_files else float(disk.f_bavail * disk.f_frsize)
    return found
