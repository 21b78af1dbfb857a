"""Where checkpoints lie: a local folder, written past the page cache, or any fsspec URL. No torch.

Three promises that the commit protocol rests on, kept by both: `write` puts a small object in place whole or not at
all and lastingly; a large file written piece by piece is lasting once `finish` returns; what is removed is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

PAGE = 4096
_BLOCK = 8 << 20

Buffer = memoryview | mmap.mmap | bytes | bytearray


class Sink(Protocol):
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

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | bytearray:
        """Bytes of a file from `offset` on; fewer than `length` where it ends. FileNotFoundError if there is none."""

    def write(self, path: str, data: bytes) -> None:
        """Put a small file in place, whole and lasting."""

    def create(self, path: str) -> Sink:
        """Begin a large file."""

    def remove(self, path: str) -> None:
        """Delete a file or a folder with all in it; nothing happens if there is none."""

    def free(self) -> int | None:
        """Bytes that still fit, None where nobody knows."""


def open_storage(place: Storage | Path | str) -> Storage:
    """The storage of a folder or URL (`s3://bucket/run`, `memory://run`, `file:///runs/a`)."""
    if not isinstance(place, (str, Path)):
        return place
    text = str(place)
    if isinstance(place, str) and "://" in text:
        scheme, _, rest = text.partition("://")
        return LocalStorage(Path(rest)) if scheme == "file" else FsspecStorage(text)
    return LocalStorage(Path(place))


class LocalStorage:
    """A folder of a mounted file system (local disk, NFS, Lustre, a mounted bucket)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def list(self, path: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.root / path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int | None:
        try:
            return (self.root / path).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytearray:
        with open(self.root / path, "rb", buffering=0) as file:
            count = os.fstat(file.fileno()).st_size - offset
            # Empty memory from numpy: a bytearray would be filled with zeros first.
            data = bytearray(max(0, count if length is None else min(length, count)))
            view, at = memoryview(data), 0
            while at < len(data):
                got = os.preadv(file.fileno(), [view[at:]], offset + at)
                if not got:
                    return data[:at]
                at += got
            return data

    def write(self, path: str, data: bytes) -> None:
        target = self.root / path
        self._make(target.parent)
        temporary = target.with_name(f"{target.name}.part")
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)

    def create(self, path: str) -> Sink:
        target = self.root / path
        self._make(target.parent)
        return _FileSink(target)

    def remove(self, path: str) -> None:
        target = self.root / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                target.unlink()
        with contextlib.suppress(FileNotFoundError):
            sync_folder(target.parent)

    def free(self) -> int | None:
        place = self.root.absolute()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    @staticmethod
    def _make(folder: Path) -> None:
        """Make a folder and let the entry in its parent last."""
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Make a folder's entries last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _FileSink:
    """Writes past the page cache where the file system lets it (several times faster than through it and kinder to
    the loader's memory), one block behind the caller, so that gathering, checksums and the disk overlap."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        self._direct = True
        try:
            self._handle = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError:
            self._handle = os.open(path, flags, 0o644)
            self._direct = False
        self._blocks = [mmap.mmap(-1, _BLOCK) for _ in range(2)]
        self._current = 0
        self._filled = 0
        self._size = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B") if len(memoryview(data).shape or ()) <= 1 else memoryview(data)
        while len(view):
            if not self._filled and len(view) >= _BLOCK and self._aligned(view):
                # Already laid out as the file wants it (staging memory): no copy.
                whole = len(view) - len(view) % PAGE
                self._wait()
                self._put(view[:whole], self._size)
                self._size += whole
                view = view[whole:]
                continue
            count = min(len(view), _BLOCK - self._filled)
            block = np.frombuffer(self._blocks[self._current], np.uint8)
            block[self._filled : self._filled + count] = np.frombuffer(view[:count], np.uint8)
            self._filled += count
            view = view[count:]
            if self._filled == _BLOCK:
                self._flush()

    def finish(self) -> None:
        try:
            whole = self._filled - self._filled % PAGE
            rest = bytes(self._blocks[self._current][whole : self._filled])
            self._filled = whole
            self._flush()
            self._wait()
            if rest:
                self._buffered()
                self._put(memoryview(rest), self._size)
            os.fsync(self._handle)
            sync_folder(self.path.parent)
        finally:
            self._close()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._wait()
        self._close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _aligned(self, view: memoryview) -> bool:
        return np.frombuffer(view, np.uint8).ctypes.data % PAGE == 0

    def _flush(self) -> None:
        """Hand the filled block to the disk and go on with the other one."""
        self._wait()
        if not self._filled:
            return
        view, at = memoryview(self._blocks[self._current])[: self._filled], self._size
        self._size += self._filled
        self._thread = threading.Thread(target=self._put_quietly, args=(view, at), daemon=True)
        self._thread.start()
        self._current ^= 1
        self._filled = 0

    def _put_quietly(self, view: memoryview, at: int) -> None:
        try:
            self._put(view, at)
        except OSError as error:
            self._error = error

    def _put(self, view: memoryview, at: int) -> None:
        while len(view):
            # A short write may leave the rest unaligned; the slow way then takes it.
            if self._direct and (len(view) % PAGE or at % PAGE):
                self._buffered()
            count = os.pwrite(self._handle, view[: 1 << 30], at)
            view, at = view[count:], at + count

    def _buffered(self) -> None:
        if self._direct:
            import fcntl

            flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            self._direct = False

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class FsspecStorage:
    """Any file system that fsspec knows. Objects become visible when they are closed, which makes writes atomic."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url
        self._fs, self._root = fsspec.core.url_to_fs(url)

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

    def create(self, path: str) -> Sink:
        self._fs.makedirs(self._path(path).rsplit("/", 1)[0], exist_ok=True)
        return _ObjectSink(self._fs.open(self._path(path), "wb", block_size=32 << 20))

    def remove(self, path: str) -> None:
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(path), recursive=True)

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
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Buffer) -> None:
        self._file.write(data)

    def finish(self) -> None:
        self._file.close()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self._file.discard()
