"""The storage that a folder's path or a URL names. No torch."""

from __future__ import annotations

from pathlib import Path

from megascale.checkpoint.storage.base import Storage
from megascale.checkpoint.storage.local_disk import LocalStorage
from megascale.checkpoint.storage.object_store import FsspecStorage


def open_storage(place: Storage | Path | str) -> Storage:
    """The storage of a folder or URL (`s3://bucket/run`, `memory://run`, `file:///runs/a`)."""
    if not isinstance(place, (str, Path)):
        return place
    text = str(place)
    if isinstance(place, str) and "://" in text:
        scheme, _, rest = text.partition("://")
        return LocalStorage(Path(rest)) if scheme == "file" else FsspecStorage(text)
    return LocalStorage(Path(place))
