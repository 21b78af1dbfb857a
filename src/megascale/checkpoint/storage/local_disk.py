"""A folder of a mounted file system, written past the page cache, every change made to last in order. No torch.

All changes to the disk go through one `Disk`, so that tests can record, fail or cut short each of them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from megascale.checkpoint.storage.base import PAGE, UNFINISHED, Buffer, StorageWriter
from megascale.core.untrusted_files import open_regular

Made = TypeVar("Made")
_BLOCK_BYTES = 16 << 20
_BLOCKS = 4
# Blocks of files that are done, for the next: fresh memory costs a virtual machine a quarter of a disk's rate.
_spare: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()


class Disk:
    """The changes that a checkpoint makes to a disk, one method each; paths are absolute or of the process."""

    def create(self, path: Path, direct: bool) -> tuple[int, bool]:
        """A new empty file, past the page cache if asked for and possible; (handle, whether it is)."""
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        if direct:
            with contextlib.suppress(OSError):
                return os.open(path, flags | os.O_DIRECT, 0o644), True
        return os.open(path, flags, 0o644), False

    def write(self, handle: int, data: memoryview, at: int) -> int:
        """Write some of `data` at byte `at`; how much."""
        return os.pwrite(handle, data, at)

    def sync(self, handle: int) -> None:
        """Make a file's contents last."""
        os.fsync(handle)

    def sync_folder(self, path: Path) -> None:
        """Make a folder's entries last through a power cut."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def replace(self, old: Path, new: Path) -> None:
        """Rename within a folder, in one piece."""
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """Give a file another name; FileExistsError if that is taken."""
        os.link(old, new)

    def make_folder(self, path: Path) -> None:
        """A folder in one that exists."""
        path.mkdir(exist_ok=True)

    def remove(self, path: Path) -> None:
        """Delete a file if it is there."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Delete a folder with all in it."""
        shutil.rmtree(path, ignore_errors=True)

    def drop_folder(self, path: Path) -> None:
        """Delete a folder if it is empty."""
        with contextlib.suppress(OSError):
            path.rmdir()


class LocalStorage:
    """See base.Storage. Local disks, NFS, Lustre, mounted buckets."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self.url = str(root)
        self.disk = disk or Disk()

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

    def read(self, path: str, offset: int = 0, length: int | None = None) -> memoryview:
        with open(self.root / path, "rb", buffering=0, opener=open_regular) as file:
            there = max(0, os.fstat(file.fileno()).st_size - offset)
            # Memory from numpy is not filled with zeros first.
            data = np.empty(there if length is None else min(length, there), np.uint8).data
            at = 0
            while at < len(data):
                got = os.preadv(file.fileno(), [data[at:]], offset + at)
                if not got:
                    break
                at += got
            return data[:at]

    def write(self, path: str, data: bytes) -> None:
        target = self.root / path
        with self._temporary(target, data) as temporary:
            self.disk.replace(temporary, target)
        self.disk.sync_folder(target.parent)

    def create_exclusively(self, path: str, data: bytes) -> bool:
        target = self.root / path
        with self._temporary(target, data) as temporary:
            try:
                self.disk.link(temporary, target)
            except FileExistsError:
                self.disk.remove(temporary)
                return False
            except OSError:  # a file system without hard links: starts are kept apart by their lock there
                if target.exists():
                    self.disk.remove(temporary)
                    return False
                self.disk.replace(temporary, target)
            else:
                self.disk.remove(temporary)
        self.disk.sync_folder(target.parent)
        return True

    @contextlib.contextmanager
    def _temporary(self, target: Path, data: bytes) -> Iterator[Path]:
        """Make a lasting file with `data` beside `target`, which is removed where the body fails."""
        # Two that write the same file at once (a commit) must not take each other's away.
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}{UNFINISHED}")
        handle, _ = self._in_folder(target.parent, lambda: self.disk.create(temporary, direct=False))
        try:
            try:
                _write_all(self.disk, handle, memoryview(data), 0)
                self.disk.sync(handle)
            finally:
                os.close(handle)
            yield temporary
        except OSError:
            with contextlib.suppress(OSError):
                self.disk.remove(temporary)
            raise

    def create(self, path: str) -> StorageWriter:
        target = self.root / path
        return self._in_folder(target.parent, lambda: _FileSink(self.disk, target))

    def remove(self, path: str) -> None:
        target = self.root / path
        self._delete(target)
        with contextlib.suppress(FileNotFoundError):
            self.disk.sync_folder(target.parent)

    def clear(self, path: str, names: Iterable[str]) -> None:
        folder = self.root / path
        for name in names:
            self._delete(folder / name)
        with contextlib.suppress(FileNotFoundError):
            self.disk.sync_folder(folder)
            self.disk.drop_folder(folder)
            self.disk.sync_folder(folder.parent)

    def is_link(self, path: str) -> bool:
        return (self.root / path).is_symlink()

    def free(self) -> int | None:
        place = self.root.absolute()
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free

    def _delete(self, target: Path) -> None:
        if target.is_dir() and not target.is_symlink():
            self.disk.remove_folder(target)
        else:
            with contextlib.suppress(NotADirectoryError):
                self.disk.remove(target)

    def _in_folder(self, folder: Path, action: Callable[[], Made]) -> Made:
        """Make the folder if there is none, and something in it; again if it, still empty, was cleared away between."""
        tries = 3
        while True:
            self._make(folder)
            try:
                return action()
            except FileNotFoundError:
                tries -= 1
                if not tries:
                    raise

    def _make(self, folder: Path) -> None:
        """Make a folder and those above it, and let their entries last."""
        if not folder.is_dir():
            self._make(folder.parent)
            self.disk.make_folder(folder)
            self.disk.sync_folder(folder.parent)


def _write_all(disk: Disk, handle: int, data: memoryview, at: int) -> None:
    while len(data):
        count = disk.write(handle, data, at)
        data, at = data[count:], at + count


class _FileSink:
    """Writes past the page cache where the file system lets it (several times faster than through it and kinder to
    the loader's memory), some blocks behind the caller, so that gathering, checksums and the disk overlap."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self.disk, self.path = disk, path
        self._handle, self._direct = disk.create(path, direct=True)
        self._block: mmap.mmap | None = None
        self._filled = 0
        self._size = 0
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._made = 0
        self._full: queue.SimpleQueue[tuple[mmap.mmap, int, int] | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        while len(view):
            if not self._filled and len(view) >= _BLOCK_BYTES and self._aligned(view):
                # Already laid out as the file wants it (staging memory): no copy.
                whole = len(view) - len(view) % PAGE
                self._finish()
                self._put(view[:whole], self._size)
                self._size += whole
                view = view[whole:]
                continue
            block = self._block = self._block or self._take()
            count = min(len(view), _BLOCK_BYTES - self._filled)
            target = np.frombuffer(block, np.uint8)
            target[self._filled : self._filled + count] = np.frombuffer(view[:count], np.uint8)
            self._filled += count
            view = view[count:]
            if self._filled == _BLOCK_BYTES:
                self._hand_over(_BLOCK_BYTES)

    def finish(self) -> None:
        try:
            whole = self._filled - self._filled % PAGE
            rest = bytes(self._block[whole : self._filled]) if self._block is not None else b""
            if whole:
                self._hand_over(whole)
            self._finish()
            if rest:
                self._put(memoryview(rest), self._size)
            self.disk.sync(self._handle)
            self.disk.sync_folder(self.path.parent)
        finally:
            self._close()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._finish()
        self._close()
        with contextlib.suppress(OSError):
            self.disk.remove(self.path)

    def _aligned(self, view: memoryview) -> bool:
        return np.frombuffer(view, np.uint8).ctypes.data % PAGE == 0

    def _take(self) -> mmap.mmap:
        """A block to fill: a new one, or the next that is written."""
        if self._error is not None:
            self._finish()
        if self._made < _BLOCKS and self._free.empty():
            self._made += 1
            with contextlib.suppress(queue.Empty):
                return _spare.get_nowait()
            block = mmap.mmap(-1, _BLOCK_BYTES)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                block.madvise(mmap.MADV_HUGEPAGE)
            return block
        return self._free.get()

    def _hand_over(self, count: int) -> None:
        """Let the disk have the block."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        assert self._block is not None
        self._full.put((self._block, count, self._size))
        self._size += count
        self._block, self._filled = None, 0

    def _work(self) -> None:
        while (item := self._full.get()) is not None:
            block, count, at = item
            try:
                if self._error is None:
                    self._put(memoryview(block)[:count], at)
            except OSError as error:
                self._error = error
            except Exception as error:  # whoever fills the next block would wait for ever
                self._error = OSError(f"writing {self.path} failed: {error!r}")
            self._free.put(block)

    def _put(self, view: memoryview, at: int) -> None:
        while len(view):
            # A short write may leave the rest unaligned; the page cache then takes it.
            if self._direct and (len(view) % PAGE or at % PAGE):
                self._buffered()
            count = self.disk.write(self._handle, view[: 1 << 30], at)
            view, at = view[count:], at + count

    def _buffered(self) -> None:
        import fcntl

        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False

    def _finish(self) -> None:
        """Wait until all that was handed over is written."""
        if self._thread is not None:
            self._full.put(None)
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if self._block is not None:
            self._free.put(self._block)
            self._block = None
        while not self._free.empty():
            block = self._free.get()
            if _spare.qsize() < _BLOCKS:
                _spare.put(block)
