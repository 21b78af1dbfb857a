"""Storage of checkpoints at any URL that fsspec supports, such as S3. Needs no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from megascale.checkpoint.storage.base import Buffer, StorageWriter
from megascale.errors import ConfigError, describe_install

_UPLOAD_PART_BYTES = 32 << 20  # size of the parts of a multipart upload


class FsspecStorage:
    """`Storage` in any fsspec file system. An object becomes visible when it is closed, so writes are atomic.

    Raises:
        ConfigError: the scheme of the URL is unknown, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            if url.startswith("s3"):
                hint = f"; {describe_install('s3')}"
            else:
                hint = ""
            raise ConfigError(f"{url} needs a package that is not installed ({error}){hint}") from None
        except ValueError as error:
            usage = "a folder, s3://bucket/path or any other URL of fsspec"
            raise ConfigError(f"{url} cannot be opened ({error}); give {usage}") from None

    def list(self, path: str = "") -> list[str]:
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._full_path(path), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({name.rstrip("/").rsplit("/", 1)[-1] for name in paths} - {""})

    def size(self, path: str) -> int | None:
        info = self._info(path)
        if info.get("type") == "file":
            return info["size"]
        return None

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if length == 0:
            return b""
        end = None if length is None else offset + length
        return _retry_once(self._fs.cat_file, self._full_path(path), start=offset, end=end)

    def write(self, path: str, data: bytes) -> None:
        _retry_once(self._fs.pipe_file, self._make_parent(path), data)

    def create_exclusively(self, path: str, data: bytes) -> bool:
        full_path = self._make_parent(path)
        try:
            # S3 and similar stores accept only the first of several requests. Other file systems check before they
            # write, so two processes may both succeed.
            self._fs.pipe_file(full_path, data, mode="create")
        except FileExistsError:
            return False
        except OSError:  # s3fs raises this if the file exists
            if self.size(path) is None:
                raise
            return False
        return True

    def create(self, path: str) -> StorageWriter:
        return _ObjectWriter(self._fs, self._make_parent(path))

    def remove(self, path: str) -> None:
        is_link = self.is_link(path)
        with contextlib.suppress(FileNotFoundError):
            if is_link:
                self._fs.rm_file(self._full_path(path))
            else:
                self._fs.rm(self._full_path(path), recursive=True)

    def clear(self, path: str, names: Iterable[str]) -> None:
        self._fs.invalidate_cache()
        paths = [self._full_path(f"{path}/{name}") for name in names]
        if paths:
            try:
                self._fs.rm(paths)  # a list, because one request of an object store deletes up to a thousand objects
            except FileNotFoundError:  # some are missing already
                for file in paths:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm(file)
        with contextlib.suppress(OSError):  # the folder is not empty, or the storage has no folders
            self._fs.rmdir(self._full_path(path))

    def is_link(self, path: str) -> bool:
        info = self._info(path)
        # Only file systems with links set one of these: fsspec's "local" the first, its "sftp" the second.
        return bool(info.get("islink")) or info.get("type") == "link"

    def free(self) -> int | None:
        return None

    def _full_path(self, path: str) -> str:
        if path:
            return f"{self._root.rstrip('/')}/{path}"
        return self._root

    def _make_parent(self, path: str) -> str:
        """Make a file's folder and return the file's full path."""
        full_path = self._full_path(path)
        self._fs.makedirs(full_path.rsplit("/", 1)[0], exist_ok=True)
        return full_path

    def _info(self, path: str) -> dict[str, Any]:
        """Return fsspec's description of a file or folder, or an empty dictionary if it is missing."""
        self._fs.invalidate_cache()
        try:
            info: dict[str, Any] = self._fs.info(self._full_path(path))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return info


def _retry_once(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of `operation`. Call it a second time after an OSError, except if a file is missing."""
    try:
        return operation(*args, **kwargs)
    except FileNotFoundError:
        raise
    except OSError:
        return operation(*args, **kwargs)


class _ObjectWriter:
    """`StorageWriter` that uploads an object in parts."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._file = fs.open(path, "wb", block_size=_UPLOAD_PART_BYTES)

    def write(self, data: Buffer) -> None:
        self._file.write(data)

    def finish(self) -> None:
        self._file.close()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True  # otherwise the upload would be completed when the file is garbage-collected
        with contextlib.suppress(Exception):
            self._fs.rm(self._path)
