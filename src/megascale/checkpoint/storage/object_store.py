"""Any URL that fsspec knows, S3 among them, as a checkpoint's storage. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from megascale.checkpoint.storage.base import Buffer, StorageWriter
from megascale.errors import ConfigError, describe_install

_OBJECT_PART = 32 << 20  # bytes of one part of a multipart upload


class FsspecStorage:
    """Any file system that fsspec knows. Objects become visible when they are closed, which makes writes atomic.

    ConfigError for a URL of an unknown kind, or one whose package is missing.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            how = f"; {describe_install('s3')}" if url.startswith("s3") else ""
            raise ConfigError(f"{url} needs a package that is not installed ({error}){how}") from None
        except ValueError as error:
            known = "a folder, s3://bucket/path or any other URL of fsspec"
            raise ConfigError(f"{url} cannot be opened ({error}); give {known}") from None

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def list(self, path: str = "") -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path(path), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({name.rstrip("/").rsplit("/", 1)[-1] for name in found} - {""})

    def size(self, path: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return info["size"] if info["type"] == "file" else None

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else offset + length
        if length == 0:
            return b""
        return self._retry(lambda: self._fs.cat_file(self._path(path), start=offset, end=end))

    def write(self, path: str, data: bytes) -> None:
        self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
        self._retry(lambda: self._fs.pipe_file(self._path(path), data))

    def create_exclusively(self, path: str, data: bytes) -> bool:
        self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
        try:
            # S3 and its like decide which of several comes first; other file systems look before they write.
            self._fs.pipe_file(self._path(path), data, mode="create")
        except FileExistsError:
            return False
        except OSError:  # so s3fs says that there is one
            if self.size(path) is None:
                raise
            return False
        return True

    def create(self, path: str) -> StorageWriter:
        self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
        return _ObjectSink(self._fs, self._path(path))

    def remove(self, path: str) -> None:
        self._fs.invalidate_cache()
        is_link = self.is_link(path)
        with contextlib.suppress(FileNotFoundError):
            if is_link:
                self._fs.rm_file(self._path(path))
            else:
                self._fs.rm(self._path(path), recursive=True)

    def clear(self, path: str, names: Iterable[str]) -> None:
        self._fs.invalidate_cache()
        if paths := [self._path(f"{path}/{name}") for name in names]:
            try:
                self._fs.rm(paths)  # object stores delete them by the thousand
            except FileNotFoundError:  # some are gone already
                for one in paths:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.rm(one)
        with contextlib.suppress(OSError):  # there is more in it, or there are no folders here
            self._fs.rmdir(self._path(path))

    def is_link(self, path: str) -> bool:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        # Only file systems that have links give one of these: fsspec's "local" the first, its "sftp" the second.
        return bool(info.get("islink")) or info["type"] == "link"

    def free(self) -> int | None:
        return None

    @staticmethod
    def _retry(action: Callable[[], Any]) -> Any:
        """Once more after a passing error of the network; a missing file is no passing error."""
        try:
            return action()
        except FileNotFoundError:
            raise
        except OSError:
            return action()


class _ObjectSink:
    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self._file = fs.open(path, "wb", block_size=_OBJECT_PART)

    def write(self, data: Buffer) -> None:
        self._file.write(data)

    def finish(self) -> None:
        self._file.close()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True  # else it would be completed when it is collected
        with contextlib.suppress(Exception):
            self._fs.rm(self._path)
