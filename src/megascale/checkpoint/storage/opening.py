"""Choice of the storage for a path or a URL. Needs no torch.

STORAGES has the URL schemes that fsspec does not handle. A package adds a scheme with
`STORAGES.register("scheme", make_storage)`, where `make_storage(url)` returns a Storage (base.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megascale.checkpoint.storage.base import Storage
from megascale.checkpoint.storage.local_disk import LocalStorage
from megascale.checkpoint.storage.object_store import FsspecStorage
from megascale.config.registry import Registry


def _open_folder_url(url: str) -> Storage:
    return LocalStorage(Path(url.partition("://")[2]))


# By URL scheme; "local" is fsspec's name for folders.
STORAGES: Registry[Callable[[str], Storage]] = Registry(
    "checkpoint.location",
    {"file": _open_folder_url, "local": _open_folder_url},
    home="megascale.checkpoint.storage",
)


def local_folder(location: str) -> Path | None:
    """Return the folder of a path or of a folder's URL, or None for other storage."""
    scheme, separator, path = location.partition("://")
    if not separator:
        return Path(location)
    if scheme in ("file", "local"):
        return Path(path)
    return None


def open_storage(location: Storage | Path | str) -> Storage:
    """Return the storage of a folder or URL (`s3://bucket/run`, `memory://run`, `file:///runs/a`)."""
    if not isinstance(location, (str, Path)):
        return location
    text = str(location)
    if isinstance(location, str) and "://" in text:
        scheme = text.partition("://")[0]
        if scheme in STORAGES:
            return STORAGES[scheme](text)
        return FsspecStorage(text)
    return LocalStorage(Path(location))
