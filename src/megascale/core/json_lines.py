"""JSON-lines files that grow while their writers may be killed: a line that a crash has cut harms no other line.

Writers append with `append`, which removes a cut last line before it adds the next. Two processes may write the same
file (rank 0 and the driver write events.jsonl): each holds a lock on the file while it appends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megascale.core import strict_json

_LOCK_SECONDS = 0.25  # most that a writer waits for another, which may have been stopped while it appends
_LOOK_SECONDS = 0.005
_BLOCK = 1 << 16  # bytes read at a time while the end of the last whole line is looked for


def append_record(file: Path, record: dict[str, Any], mode: int = 0o666) -> None:
    """Append one record as a line. OSError where it has no room; the file is then as it was.

    Args:
        mode: permissions of a file that this call makes, less the umask.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    try:
        append_lines(handle, strict_json.dumps(record).encode() + b"\n")
    finally:
        os.close(handle)


def append_lines(handle: int, lines: bytes) -> None:
    """Append whole lines to a file that is open for reading and appending, in one write.

    A last line that a crash has cut is removed first. Where another process holds the file's lock for long, or the file
    system has no locks, it is left as a line of its own.

    OSError where there is no room for all of `lines`; the file is then as it was.
    """
    with _locked(handle) as is_alone:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            lines = b"\n" + lines
            begin = _last_line(handle, size)
            if is_alone and not _is_record(os.pread(handle, size - begin, begin)):
                os.ftruncate(handle, begin)
                size, lines = begin, lines[1:]
        if os.write(handle, lines) < len(lines):
            if is_alone:
                os.ftruncate(handle, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _locked(handle: int) -> Iterator[bool]:
    """Hold the file's lock; gives False where it cannot be had within _LOCK_SECONDS, or where there are no locks."""
    deadline = time.monotonic() + _LOCK_SECONDS
    is_alone = False
    while not is_alone:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_SECONDS)
    try:
        yield is_alone
    finally:
        if is_alone:
            fcntl.flock(handle, fcntl.LOCK_UN)


def _last_line(handle: int, size: int) -> int:
    """Return the byte at which the last line begins."""
    stop = size
    while stop:
        start = max(0, stop - _BLOCK)
        newline = os.pread(handle, stop - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0


def _is_record(line: bytes) -> bool:
    """Return whether a line without its end is whole all the same."""
    try:
        return isinstance(strict_json.loads(line), dict)
    except ValueError:
        return False
