"""Interface of checkpoint storage, and its errors.

A mounted folder (local_disk.py) and any fsspec URL (object_store.py) implement it. The commit protocol relies on three
guarantees. `write` creates a small file atomically and durably. A large file that is written in several calls is
durable once `finish` returns. A removed file stays removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from megascale.core.exit_record import ExitKind, attach_record
from megascale.core.failure import DISK_FULL_ERRNOS
from megascale.errors import TrainingError

PAGE = 4096  # bytes; files are written in multiples of it without the page cache
UNFINISHED = ".part"  # suffix of small files that are not complete yet, which `list` returns too

Buffer = memoryview | bytes | bytearray


class StorageWriter(Protocol):
    """Large file that is written from its start to its end."""

    def write(self, data: Buffer) -> None:
        """Append data. The caller may reuse the memory of `data` after the call."""

    def finish(self) -> None:
        """Close the file and make its data durable. Raises OSError if a write failed."""

    def abort(self) -> None:
        """Discard the file. Raises no error."""


class Storage(Protocol):
    """Folder with its contents. Paths are relative to the folder, with '/' as the separator."""

    url: str

    def list(self, path: str = "") -> list[str]:
        """Return the names in a folder, or an empty list if it is missing."""

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if it is missing."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Buffer:
        """Return `length` bytes of a file from `offset` on, or fewer at its end. Default: all bytes to the end.

        Several threads may read at the same time.

        Raises:
            FileNotFoundError: the file is missing.
        """

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a small file, atomically and durably."""

    def create_exclusively(self, path: str, data: bytes) -> bool:
        """Create a small file atomically and durably if it is missing, and return whether it was created.

        If several processes call this method at the same time, one of them succeeds. Some storage cannot guarantee that
        and lets the last process succeed too, so callers should read the file afterwards.
        """

    def create(self, path: str) -> StorageWriter:
        """Create a large file and return its writer."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents, if it exists. If `path` is a link, only the link is removed."""

    def clear(self, path: str, names: Iterable[str]) -> None:
        """Remove the files `names` of a folder, and then the folder if it is empty."""

    def is_link(self, path: str) -> bool:
        """Return whether `path` is a link to a file or folder. Storage without links returns False."""

    def free(self) -> int | None:
        """Return the number of free bytes, or None if it is unknown."""


class OwnerChangedError(OSError):
    """Error for a checkpoints folder that another run has claimed since this run started."""


def explain_save_error(error: Exception, storage: Storage, required_bytes: int) -> TrainingError:
    """Return the error of a failed save with its cause and remedy.

    Args:
        required_bytes: size of the checkpoint.
    """
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        free_bytes = storage.free()
        if free_bytes is not None:
            space = f"{free_bytes:,} are free"
        else:
            space = "less is free"
        if free_bytes is not None and free_bytes >= required_bytes:
            space = f"its index, and {space}"
        disk_full_error = TrainingError(
            f"the disk of {storage.url!r} is full: a checkpoint needs {required_bytes:,} bytes and {space}; the "
            "previous checkpoint stays as it is. Make room, lower checkpoint.keep, or put train.runs on a larger disk"
        )
        disk_full_error.errno = error.errno
        return attach_record(disk_full_error, ExitKind.DISK_FULL, subject=storage.url)
    if isinstance(error, OwnerChangedError):
        return TrainingError(str(error.strerror))
    reason = getattr(error, "strerror", None) or repr(error)
    return TrainingError(
        f"the checkpoint could not be written to {storage.url!r}: {reason}; the previous checkpoint stays as it is. "
        "Check the folder's rights and the storage, or put train.runs elsewhere"
    )
