"""JSON-lines files to which several processes append, and which may be damaged.

A crash may cut off the last line of such a file. `append_lines` removes such a line before it adds new lines, which
would otherwise continue it. Rank 0 and the driver both write events.jsonl, so a writer locks the file while it appends.

A file of a run folder may also have an endless line, be a pipe, or be a sparse file of any size. The readers here use
bounded memory: they skip a line longer than MAX_LINE_BYTES, and refuse pipes and devices.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megascale.core import strict_json
from megascale.core.untrusted_files import open_regular

MAX_LINE_BYTES = 1 << 20  # records of runs take less than a hundredth of it
_READ_BUFFER_BYTES = 1 << 16
_SKIP_BLOCK_BYTES = 1 << 20
_TAIL_BLOCK_BYTES = 1 << 16
_LOCK_TIMEOUT = 0.25  # seconds; a writer that is suspended while it holds the lock must not block other writers
_LOCK_POLL_INTERVAL = 0.005  # seconds


def append_record(file: Path, record: dict[str, Any], mode: int = 0o666) -> None:
    """Append one record as a line.

    Args:
        mode: permissions of a file that this call creates, less the umask.

    Raises OSError if the disk is full; the file is then unchanged.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    try:
        append_lines(descriptor, strict_json.dumps(record).encode() + b"\n")
    finally:
        os.close(descriptor)


def append_lines(descriptor: int, lines: bytes) -> None:
    """Append complete lines, in one write, to a file that is open for reading and appending.

    A last line that a crash has cut off is removed first. If another process keeps the file's lock for long, or the
    file system has no locks, the damaged line stays in the file, on a line by itself.

    Raises OSError if the disk has no room for all of `lines`; the file is then unchanged.
    """
    with _try_lock(descriptor) as is_locked:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line_start = _find_last_line(descriptor, size)
            if is_locked and not _is_record(os.pread(descriptor, size - line_start, line_start)):
                os.ftruncate(descriptor, line_start)
                size = line_start
            else:
                lines = b"\n" + lines
        if os.write(descriptor, lines) < len(lines):
            if is_locked:
                os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _try_lock(descriptor: int) -> Iterator[bool]:
    """Hold the file's lock; yield False if it is not free within _LOCK_TIMEOUT or the file system has no locks."""
    deadline = time.monotonic() + _LOCK_TIMEOUT
    is_locked = False
    while not is_locked:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() >= deadline:
                break
            time.sleep(_LOCK_POLL_INTERVAL)
    try:
        yield is_locked
    finally:
        if is_locked:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _find_last_line(descriptor: int, size: int) -> int:
    """Return the offset at which the last line begins."""
    stop = size
    while stop:
        start = max(0, stop - _TAIL_BLOCK_BYTES)
        newline = os.pread(descriptor, stop - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0


def _is_record(line: bytes) -> bool:
    """Return whether a line, without its newline, is a JSON object."""
    try:
        return isinstance(strict_json.loads(line), dict)
    except ValueError:
        return False


def read_bounded_lines(file: Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes | None]:
    """Yield each line without its newline, and None for a line longer than `max_bytes`.

    Raises OSError if the file cannot be read, or is a pipe or a device.
    """
    with open(file, "rb", buffering=_READ_BUFFER_BYTES, opener=open_regular) as stream:
        while line := stream.readline(max_bytes + 1):
            if line.endswith(b"\n"):
                yield line[:-1]
            elif len(line) <= max_bytes:
                yield line  # the last line has no newline
            else:
                _skip_line(stream)
                yield None


def _skip_line(stream: BinaryIO) -> None:
    """Move to the beginning of the next line."""
    while block := stream.read(_SKIP_BLOCK_BYTES):
        newline = block.find(b"\n")
        if newline >= 0:
            stream.seek(newline + 1 - len(block), os.SEEK_CUR)
            return


class RecordReader:
    """Iterable over the records of a JSON-lines file. Lines that are not JSON objects are skipped and counted.

    Iterating raises OSError if the file cannot be read, or is a pipe or a device.

    Attributes:
        damaged_lines: number of lines that the last iteration skipped.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.damaged_lines = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.damaged_lines = 0
        for line in read_bounded_lines(self.file):
            if line is not None and not line.strip():
                continue
            record = parse_record(line)
            if record is None:
                self.damaged_lines += 1
            else:
                yield record

    def describe_damage(self) -> str:
        """Return a sentence about the skipped lines, or an empty string if there are none."""
        if not self.damaged_lines:
            return ""
        if self.damaged_lines == 1:
            lines = "line is"
        else:
            lines = "lines are"
        return (
            f"{self.file}: {self.damaged_lines:,} {lines} damaged or longer than {MAX_LINE_BYTES:,} bytes, and left out"
        )


def parse_record(line: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object in a line of `read_bounded_lines`, or None if the line does not hold one."""
    if line is None:
        return None
    try:
        record = strict_json.loads(line, max_bytes=MAX_LINE_BYTES)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
