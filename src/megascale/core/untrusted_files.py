"""Bounded reading of files that other users may have written.

A file name must not lead out of its folder, opening must not block, and reading must end.
"""

from __future__ import annotations

import errno
import os
import pickletools
import stat
from pathlib import Path

_MAX_NAME_CHARACTERS = 255
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # beginning of a file that Git LFS has not downloaded


def is_plain_name(name: str) -> bool:
    """Return whether a name is a plain file name, without folders, on any storage."""
    if not 0 < len(name) <= _MAX_NAME_CHARACTERS or name in (".", ".."):
        return False
    return name.isprintable() and not set(name) & set("/\\")


def open_regular(path: str, flags: int) -> int:
    """Open a regular file; for use as the `opener` of `open`.

    A pipe would block the reader, and a device may have no end. Raises IsADirectoryError for a folder, OSError for a
    pipe or device, and the errors of `os.open`.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file.

    Raises OSError if it is not a regular file or cannot be read, ValueError if it is longer than `max_bytes`.
    """
    with open(path, "rb", opener=open_regular) as file:
        size = os.fstat(file.fileno()).st_size  # `read` allocates this much before it reads anything
        if size > max_bytes:
            raise ValueError(f"it is {size:,} bytes long, at most {max_bytes:,} are allowed")
        return file.read(size)


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is a pointer of Git LFS in the position of a file that was not downloaded."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False


def is_small_file(path: Path, max_bytes: int = 1 << 20) -> bool:
    """Return whether `path` is a regular file of at most `max_bytes` bytes."""
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size <= max_bytes


def read_tail(path: Path, max_bytes: int = 1 << 16) -> str:
    """Return the last `max_bytes` bytes of a file as text. Raises OSError if it is not a file or cannot be read."""
    with open(path, "rb", opener=open_regular) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        return file.read(max_bytes).decode(errors="replace")


def read_small_text(path: Path, max_bytes: int = 1 << 20) -> str:
    """Return the text of a small file.

    Raises OSError if it is not a regular file or cannot be read, ValueError if it is longer than `max_bytes`.
    """
    return read_bounded(path, max_bytes).decode(errors="replace")


def check_pickle(data: bytes) -> None:
    """Raise ValueError for a damaged pickle, or for one that would allocate a memo table longer than `data`.

    CPython's unpickler makes its memo table as large as the pickle says, so a dozen bytes can request gigabytes. The
    operations are therefore checked before the pickle is loaded.
    """
    try:
        for operation, argument, _ in pickletools.genops(data):
            if operation.name not in ("PUT", "BINPUT", "LONG_BINPUT") or argument is None:
                continue
            memo_index = int(argument)
            if not 0 <= memo_index <= len(data):
                raise ValueError(f"its memo has {memo_index:,} objects in {len(data):,} bytes")
    except ValueError:
        raise
    except Exception as error:  # genops raises several types for data that is not a pickle
        raise ValueError(f"it is not a pickle: {error}") from None
