"""Files that may be anybody's: names that stay in their folder, reading that neither waits nor goes on without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def is_plain_name(name: str) -> bool:
    """Whether a file of this name lies in the folder that names it, whatever a storage makes of a path."""
    return 0 < len(name) <= 255 and name not in (".", "..") and name.isprintable() and not set(name) & set("/\\")


def open_regular(path: str, flags: int) -> int:
    """An `opener` for `open`: refuses what is no file, since a pipe holds its reader and a device feeds it for ever.

    OSError for those, IsADirectoryError for a folder, and whatever `os.open` raises.
    """
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return handle
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def read_bounded(path: Path, most: int) -> bytes:
    """A file's bytes. OSError if it is no file or cannot be read, ValueError if it is longer than `most`."""
    with open(path, "rb", opener=open_regular) as file:
        size = os.fstat(file.fileno()).st_size  # memory for as much is taken before anything is read
        if size > most:
            raise ValueError(f"it is {size:,} bytes long where at most {most:,} are expected")
        return file.read(size)


def is_small_file(path: Path, most: int = 1 << 20) -> bool:
    """Return whether there is a file of at most `most` bytes, and not a pipe, a device or a folder."""
    try:
        about = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_size <= most


def read_tail(path: Path, most: int = 1 << 16) -> str:
    """Return the last `most` bytes of a file as text. OSError if it is not a file or cannot be read."""
    with open(path, "rb", opener=open_regular) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        return file.read(most).decode(errors="replace")


def read_small_text(path: Path, most: int = 1 << 20) -> str:
    """Return the text of a small file. OSError if it is not a file or cannot be read, ValueError if it is too long."""
    return read_bounded(path, most).decode(errors="replace")
