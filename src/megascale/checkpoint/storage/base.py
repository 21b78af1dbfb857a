"""Where checkpoints lie: the one interface of a mounted folder (local_disk.py) and any fsspec URL (object_store.py).

Three promises that the commit protocol rests on, kept by both: `write` puts a small object in place whole or not at
all and lastingly; a large file written piece by piece is lasting once `finish` returns; what is removed is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

PAGE = 4096
UNFINISHED = ".part"  # ends the names, which `list` shows, of small files that are not in place yet

Buffer = memoryview | bytes | bytearray


class StorageWriter(Protocol):
    """A large file being written from front to back."""

    def write(self, data: Buffer) -> None:
        """Append. The caller may reuse the memory at once."""

    def finish(self) -> None:
        """Make what was written last; OSError if that failed."""

    def abort(self) -> None:
        """Give up; never raises."""


class Storage(Protocol):
    """A folder and what lies under it; paths are relative, parts separated by '/'."""

    url: str

    def list(self, path: str = "") -> list[str]:
        """Names in a folder, empty if there is no such folder."""

    def size(self, path: str) -> int | None:
        """Bytes of a file, None if there is none."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> Buffer:
        """Bytes of a file from `offset` on; fewer than `length` where it ends. Several threads may read at a time.
        FileNotFoundError if there is none."""

    def write(self, path: str, data: bytes) -> None:
        """Put a small file in place, whole and lasting."""

    def create_exclusively(self, path: str, data: bytes) -> bool:
        """Put a small file in place, whole and lasting, unless one is there; return whether it was put there.

        Of several that try at once one succeeds. Storage that cannot promise this may let the last one succeed too:
        read the file afterwards.
        """

    def create(self, path: str) -> StorageWriter:
        """Begin a large file."""

    def remove(self, path: str) -> None:
        """Delete a file or a folder with all in it, of a link the link alone; nothing happens if there is none."""

    def clear(self, path: str, names: Iterable[str]) -> None:
        """Delete these files in a folder, and it if nothing else is in it: what others put there just now stays."""

    def is_link(self, path: str) -> bool:
        """Return whether `path` is a link to a file or folder elsewhere; False on storage that has no links."""

    def free(self) -> int | None:
        """Bytes that still fit, None where nobody knows."""
