"""The storage interface of a mounted folder (local_disk.py) and any fsspec URL (object_store.py), and its errors.

The commit protocol relies on three promises that both keep. `write` creates a small file atomically and durably. A
large file written piece by piece is durable once `finish` returns. A removed file stays removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from megascale.core.exit_record import ExitKind, attach_record
from megascale.core.failure import DISK_FULL_ERRNOS
from megascale.errors import TrainingError

PAGE = 4096
UNFINISHED = ".part"  # suffix, visible to `list`, of small files that are not complete yet

Buffer = memoryview | bytes | bytearray


class StorageWriter(Protocol):
    """A large file that is written from front to back."""

    def write(self, data: Buffer) -> None:
        """Append data. The caller may reuse its memory at once."""

    def finish(self) -> None:
        """Make the written data durable. Raises OSError if that failed."""

    def abort(self) -> None:
        """Discard the file; never raises."""


class Storage(Protocol):
    """A folder and its contents; paths are relative, with parts separated by '/'."""

    url: str

    def list(self, path: str = "") -> list[str]:
        """Return the names in a folder, none if there is no such folder."""

    def size(self, path: str) -> int | None:
        """Return the bytes of a file, None if there is no such file."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Buffer:
        """Return the bytes of a file from `offset` on, fewer than `length` at its end.

        Several threads may read at once. Raises FileNotFoundError if there is no such file.
        """

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a small file, atomically and durably."""

    def create_exclusively(self, path: str, data: bytes) -> bool:
        """Create a small file atomically and durably unless it exists; return whether it was created.

        Of several processes that try at once one succeeds. Storage that cannot promise this may let the last one
        succeed too: read the file afterwards.
        """

    def create(self, path: str) -> StorageWriter:
        """Begin a large file."""

    def remove(self, path: str) -> None:
        """Delete a file or a folder with its contents, but only the link of a link; do nothing if it is missing."""

    def clear(self, path: str, names: Iterable[str]) -> None:
        """Delete these files in a folder, and the folder if it is empty then: newer files of other processes stay."""

    def is_link(self, path: str) -> bool:
        """Return whether `path` is a link to a file or folder elsewhere; False on storage without links."""

    def free(self) -> int | None:
        """Return the free bytes, None where they are unknown."""


class OwnerChangedError(OSError):
    """Another run has claimed the folder of checkpoints since this run started."""


def explain_save_error(error: Exception, storage: Storage, needed: int) -> TrainingError:
    """Return a failed save's error with its cause and remedy in one paragraph.

    Args:
        needed: bytes of the checkpoint.
    """
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        free = storage.free()
        if free is not None:
            room = f"{free:,} are free"
        else:
            room = "less is free"
        if free is not None and free >= needed:
            room = f"its index, and {room}"
        full = TrainingError(
            f"the disk of {storage.url!r} is full: a checkpoint needs {needed:,} bytes and {room}; the previous "
            "checkpoint stays as it is. Make room, lower checkpoint.keep, or put train.runs on a larger disk"
        )
        full.errno = error.errno
        return attach_record(full, ExitKind.DISK_FULL, subject=storage.url)
    if isinstance(error, OwnerChangedError):
        return TrainingError(str(error.strerror))
    reason = getattr(error, "strerror", None) or repr(error)
    return TrainingError(
        f"the checkpoint could not be written to {storage.url!r}: {reason}; the previous checkpoint stays as it is. "
        "Check the folder's rights and the storage, or put train.runs elsewhere"
    )
