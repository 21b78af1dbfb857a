"""A folder of a mounted file system, written past the page cache; changes become durable in order. No torch.

All changes to the disk go through one `Disk`, so that tests can record, fail or cut short each of them.
"""

from __future__ import annotations

import contextlib
import fcntl
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

T = TypeVar("T")
_BLOCK_BYTES = 16 << 20
_MAX_BLOCKS = 4
# Blocks of finished files for the next file: fresh memory costs a virtual machine a quarter of a disk's rate.
_spare_blocks: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()


class Disk:
    """The changes that a checkpoint makes to a disk, one method each; paths are absolute or relative to the process."""

    def create(self, path: Path, direct: bool) -> tuple[int, bool]:
        """Create an empty file and return (handle, whether writes bypass the page cache).

        Args:
            direct: bypass the page cache if the file system can.
        """
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        if direct:
            with contextlib.suppress(OSError):
                return os.open(path, flags | os.O_DIRECT, 0o644), True
        return os.open(path, flags, 0o644), False

    def write(self, handle: int, data: memoryview, offset: int) -> int:
        """Write some of `data` at byte `offset` and return how many bytes were written."""
        return os.pwrite(handle, data, offset)

    def sync(self, handle: int) -> None:
        """Make a file's contents durable."""
        os.fsync(handle)

    def sync_folder(self, path: Path) -> None:
        """Make a folder's entries durable, so that they survive a power cut."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def replace(self, old: Path, new: Path) -> None:
        """Rename a file atomically within its folder."""
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """Give a file another name. Raises FileExistsError if that name exists."""
        os.link(old, new)

    def make_folder(self, path: Path) -> None:
        """Make a folder within an existing one."""
        path.mkdir(exist_ok=True)

    def remove(self, path: Path) -> None:
        """Delete a file if it exists."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Delete a folder with its contents."""
        shutil.rmtree(path, ignore_errors=True)

    def drop_folder(self, path: Path) -> None:
        """Delete a folder if it is empty."""
        with contextlib.suppress(OSError):
            path.rmdir()


class LocalStorage:
    """A Storage on local disks, NFS, Lustre or mounted buckets."""

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
            available = max(0, os.fstat(file.fileno()).st_size - offset)
            # numpy does not fill the memory with zeros first.
            data = np.empty(available if length is None else min(length, available), np.uint8).data
            filled = 0
            while filled < len(data):
                count = os.preadv(file.fileno(), [data[filled:]], offset + filled)
                if not count:
                    break
                filled += count
            return data[:filled]

    def write(self, path: str, data: bytes) -> None:
        target = self.root / path
        with self._write_temporary(target, data) as temporary:
            self.disk.replace(temporary, target)
        self.disk.sync_folder(target.parent)

    def create_exclusively(self, path: str, data: bytes) -> bool:
        target = self.root / path
        with self._write_temporary(target, data) as temporary:
            try:
                self.disk.link(temporary, target)
            except FileExistsError:
                self.disk.remove(temporary)
                return False
            except OSError:  # a file system without hard links; there the run lock keeps concurrent starts apart
                if target.exists():
                    self.disk.remove(temporary)
                    return False
                self.disk.replace(temporary, target)
            else:
                self.disk.remove(temporary)
        self.disk.sync_folder(target.parent)
        return True

    @contextlib.contextmanager
    def _write_temporary(self, target: Path, data: bytes) -> Iterator[Path]:
        """Write `data` durably to a file next to `target` and yield its path; remove it if the body fails."""
        # The random part keeps apart two processes that write the same file at once, as for a commit.
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}{UNFINISHED}")
        handle, _ = self._create_in_folder(target.parent, lambda: self.disk.create(temporary, direct=False))
        try:
            try:
                _write_all(self.disk, handle, memoryview(data))
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
        return self._create_in_folder(target.parent, lambda: _FileWriter(self.disk, target))

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
        folder = self.root.absolute()
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def _delete(self, target: Path) -> None:
        if target.is_dir() and not target.is_symlink():
            self.disk.remove_folder(target)
        else:
            with contextlib.suppress(NotADirectoryError):
                self.disk.remove(target)

    def _create_in_folder(self, folder: Path, create: Callable[[], T]) -> T:
        """Make the folder if it is missing and call `create`; retry if the empty folder was cleared in between."""
        attempts = 3
        while True:
            self._make_folders(folder)
            try:
                return create()
            except FileNotFoundError:
                attempts -= 1
                if not attempts:
                    raise

    def _make_folders(self, folder: Path) -> None:
        """Make a folder and its parents durably."""
        if not folder.is_dir():
            self._make_folders(folder.parent)
            self.disk.make_folder(folder)
            self.disk.sync_folder(folder.parent)


def _write_all(disk: Disk, handle: int, data: memoryview) -> None:
    offset = 0
    while offset < len(data):
        offset += disk.write(handle, data[offset:], offset)


class _FileWriter:
    """A StorageWriter that bypasses the page cache where the file system supports it.

    That is several times faster and leaves the page cache to the loader. A thread writes up to _MAX_BLOCKS blocks
    behind the caller, so that gathering, checksums and the disk overlap.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self.disk = disk
        self.path = path
        self._handle, self._direct = disk.create(path, direct=True)
        self._block: mmap.mmap | None = None  # being filled
        self._filled = 0
        self._size = 0
        self._free_blocks: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._block_count = 0
        self._full_blocks: queue.SimpleQueue[tuple[mmap.mmap, int, int] | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        while len(view):
            if not self._filled and len(view) >= _BLOCK_BYTES and _is_page_aligned(view):
                # The memory is laid out as the file needs it (staging memory), so it is written without a copy.
                count = len(view) - len(view) % PAGE
                self._wait_for_writes()
                self._write_at(view[:count], self._size)
                self._size += count
                view = view[count:]
                continue
            if self._block is None:
                self._block = self._take_block()
            count = min(len(view), _BLOCK_BYTES - self._filled)
            target = np.frombuffer(self._block, np.uint8)
            target[self._filled : self._filled + count] = np.frombuffer(view[:count], np.uint8)
            self._filled += count
            view = view[count:]
            if self._filled == _BLOCK_BYTES:
                self._submit_block(_BLOCK_BYTES)

    def finish(self) -> None:
        try:
            aligned = self._filled - self._filled % PAGE
            if self._block is not None:
                remainder = bytes(self._block[aligned : self._filled])
            else:
                remainder = b""
            if aligned:
                self._submit_block(aligned)
            self._wait_for_writes()
            if remainder:
                self._write_at(memoryview(remainder), self._size)
            self.disk.sync(self._handle)
            self.disk.sync_folder(self.path.parent)
        finally:
            self._close()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._wait_for_writes()
        self._close()
        with contextlib.suppress(OSError):
            self.disk.remove(self.path)

    def _take_block(self) -> mmap.mmap:
        """Return a block to fill: a new one, or the next one that has been written."""
        if self._error is not None:
            self._wait_for_writes()
        if self._block_count < _MAX_BLOCKS and self._free_blocks.empty():
            self._block_count += 1
            with contextlib.suppress(queue.Empty):
                return _spare_blocks.get_nowait()
            block = mmap.mmap(-1, _BLOCK_BYTES)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                block.madvise(mmap.MADV_HUGEPAGE)
            return block
        return self._free_blocks.get()

    def _submit_block(self, count: int) -> None:
        """Hand the first `count` bytes of the block to the writing thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_blocks, daemon=True)
            self._thread.start()
        assert self._block is not None
        self._full_blocks.put((self._block, count, self._size))
        self._size += count
        self._block = None
        self._filled = 0

    def _write_blocks(self) -> None:
        while (item := self._full_blocks.get()) is not None:
            block, count, offset = item
            try:
                if self._error is None:
                    self._write_at(memoryview(block)[:count], offset)
            except OSError as error:
                self._error = error
            except Exception as error:  # otherwise the caller would wait for the next block forever
                self._error = OSError(f"writing {self.path} failed: {error!r}")
            self._free_blocks.put(block)

    def _write_at(self, view: memoryview, offset: int) -> None:
        while len(view):
            # A short write may leave an unaligned remainder, which needs the page cache.
            if self._direct and (len(view) % PAGE or offset % PAGE):
                self._use_page_cache()
            count = self.disk.write(self._handle, view[: 1 << 30], offset)
            view = view[count:]
            offset += count

    def _use_page_cache(self) -> None:
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False

    def _wait_for_writes(self) -> None:
        """Wait until all submitted blocks are written. Raises the OSError of a write that failed."""
        if self._thread is not None:
            self._full_blocks.put(None)
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        if self._block is not None:
            self._free_blocks.put(self._block)
            self._block = None
        while not self._free_blocks.empty():
            block = self._free_blocks.get()
            if _spare_blocks.qsize() < _MAX_BLOCKS:
                _spare_blocks.put(block)


def _is_page_aligned(view: memoryview) -> bool:
    return np.frombuffer(view, np.uint8).ctypes.data % PAGE == 0
