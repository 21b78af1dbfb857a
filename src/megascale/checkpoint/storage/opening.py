"""The storage that a folder's path or a URL names; STORAGES has those that are not fsspec's. No torch.

Another package adds one with `STORAGES.register("scheme", make)`, make(url) giving a Storage (base.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megascale.checkpoint.storage.base import Storage
from megascale.checkpoint.storage.local_disk import LocalStorage
from megascale.checkpoint.storage.object_store import FsspecStorage
from megascale.config.registry import Registry


def _file(url: str) -> Storage:
    return LocalStorage(Path(url.partition("://")[2]))


# By the URL's scheme; "local" is fsspec's name of a folder.
STORAGES: Registry[Callable[[str], Storage]] = Registry(
    "checkpoint.location", {"file": _file, "local": _file}, home="megascale.checkpoint.storage"
)


def local_folder(place: str) -> Path | None:
    """Return the folder that a path or a URL of a folder names, None for other storage."""
    scheme, separator, rest = place.partition("://")
    if not separator:
        return Path(place)
    return Path(rest) if scheme in ("file", "local") else None


def open_storage(place: Storage | Path | str) -> Storage:
    """The storage of a folder or URL (`s3://bucket/run`, `memory://run`, `file:///runs/a`)."""
    if not isinstance(place, (str, Path)):
        return place
    text = str(place)
    if isinstance(place, str) and "://" in text:
        scheme = text.partition("://")[0]
        return STORAGES[scheme](text) if scheme in STORAGES else FsspecStorage(text)
    return LocalStorage(Path(place))
