"""Storage in a folder of a mounted file system. Data files bypass the page cache. Needs no torch.

All changes go through a `Disk`, so that tests can record, fail or truncate each change.
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
_BLOCK_BYTES = 16 << 20  # bytes per write
_MAX_BLOCKS = 4  # blocks per file that wait for the disk or are being filled
# Blocks of finished files, which the next file uses again. In a virtual machine, allocating new memory instead reduces
# the rate of writing by a quarter.
_spare_blocks: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()


class Disk:
    """Changes that a checkpoint makes to a disk, with one method for each kind of change."""

    def create(self, path: Path, direct: bool) -> tuple[int, bool]:
        """Create an empty file.

        Args:
            direct: whether to bypass the page cache if the file system supports it.

        Returns:
            The file descriptor, and whether writes bypass the page cache.
        """
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        if direct:
            with contextlib.suppress(OSError):
                return os.open(path, flags | os.O_DIRECT, 0o644), True
        return os.open(path, flags, 0o644), False

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Write the start of `data` at byte `offset`, and return the number of written bytes, which may be smaller."""
        return os.pwrite(descriptor, data, offset)

    def sync(self, descriptor: int) -> None:
        """Make a file's contents durable."""
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make a folder's entries durable, so that they survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, old: Path, new: Path) -> None:
        """Rename a file atomically within its folder."""
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """Give a file an additional name. Raises FileExistsError if this name exists."""
        os.link(old, new)

    def make_folder(self, path: Path) -> None:
        """Make a folder in an existing folder."""
        path.mkdir(exist_ok=True)

    def remove(self, path: Path) -> None:
        """Delete a file if it exists."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Delete a folder with its contents."""
        shutil.rmtree(path, ignore_errors=True)

    def remove_empty_folder(self, path: Path) -> None:
        """Delete a folder if it is empty."""
        with contextlib.suppress(OSError):
            path.rmdir()


class LocalStorage:
    """`Storage` on local disks, NFS, Lustre or mounted buckets. Each method returns after its change is durable."""

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
            # Unlike bytearray, np.empty does not fill the memory with zeros first.
            if length is None:
                length = available
            data = np.empty(min(length, available), np.uint8).data
            filled_bytes = 0
            while filled_bytes < len(data):
                read_bytes = os.preadv(file.fileno(), [data[filled_bytes:]], offset + filled_bytes)
                if not read_bytes:
                    break
                filled_bytes += read_bytes
            return data[:filled_bytes]

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
            except OSError:  # the file system has no hard links; the run lock then excludes concurrent starts
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
        """Write `data` durably to a file next to `target`, and yield its path. Remove it if the body fails."""
        # Two processes may write the same file at the same time, such as a commit, so the name has a random part.
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}{UNFINISHED}")
        descriptor, _ = self._create_in_folder(target.parent, lambda: self.disk.create(temporary, direct=False))
        try:
            try:
                _write_all(self.disk, descriptor, memoryview(data))
                self.disk.sync(descriptor)
            finally:
                os.close(descriptor)
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
            self.disk.remove_empty_folder(folder)
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
        """Make the folder if it is missing, and call `create`. Repeat if another process removed the empty folder."""
        remaining_attempts = 3
        while True:
            self._make_folders(folder)
            try:
                return create()
            except FileNotFoundError:
                remaining_attempts -= 1
                if not remaining_attempts:
                    raise

    def _make_folders(self, folder: Path) -> None:
        """Make a folder and its parents durably."""
        if not folder.is_dir():
            self._make_folders(folder.parent)
            self.disk.make_folder(folder)
            self.disk.sync_folder(folder.parent)


def _write_all(disk: Disk, descriptor: int, data: memoryview) -> None:
    offset = 0
    while offset < len(data):
        offset += disk.write(descriptor, data[offset:], offset)


class _FileWriter:
    """`StorageWriter` that bypasses the page cache if the file system supports it.

    Bypassing is several times faster and leaves the page cache to the data loader. Data is collected in blocks, which a
    thread writes, so that the caller's work overlaps with the disk's.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self.disk = disk
        self.path = path
        self._handle, self._is_direct = disk.create(path, direct=True)
        self._open_block: mmap.mmap | None = None  # block that is being filled
        self._filled_bytes = 0  # of the open block
        self._submitted_bytes = 0  # of the file, without the open block
        self._free_blocks: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._block_count = 0
        # (block, number of bytes, offset in the file) for the writing thread; None ends it.
        self._full_blocks: queue.SimpleQueue[tuple[mmap.mmap, int, int] | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        while len(view):
            if not self._filled_bytes and len(view) >= _BLOCK_BYTES and _is_page_aligned(view):
                # Whole pages of aligned memory, such as staging memory, are written directly from it without a copy.
                byte_count = len(view) - len(view) % PAGE
                self._wait_for_writes()
                self._write_at(view[:byte_count], self._submitted_bytes)
                self._submitted_bytes += byte_count
                view = view[byte_count:]
                continue
            if self._open_block is None:
                self._open_block = self._take_block()
            byte_count = min(len(view), _BLOCK_BYTES - self._filled_bytes)
            target = np.frombuffer(self._open_block, np.uint8)
            target[self._filled_bytes : self._filled_bytes + byte_count] = np.frombuffer(view[:byte_count], np.uint8)
            self._filled_bytes += byte_count
            view = view[byte_count:]
            if self._filled_bytes == _BLOCK_BYTES:
                self._submit_block(_BLOCK_BYTES)

    def finish(self) -> None:
        try:
            aligned_bytes = self._filled_bytes - self._filled_bytes % PAGE
            if self._open_block is not None:
                remainder = bytes(self._open_block[aligned_bytes : self._filled_bytes])
            else:
                remainder = b""
            if aligned_bytes:
                self._submit_block(aligned_bytes)
            self._wait_for_writes()
            if remainder:
                self._write_at(memoryview(remainder), self._submitted_bytes)
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
        """Return an empty block: a new one, or the next block that the thread has written."""
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

    def _submit_block(self, byte_count: int) -> None:
        """Pass the first `byte_count` bytes of the open block to the writing thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_blocks, daemon=True)
            self._thread.start()
        assert self._open_block is not None
        self._full_blocks.put((self._open_block, byte_count, self._submitted_bytes))
        self._submitted_bytes += byte_count
        self._open_block = None
        self._filled_bytes = 0

    def _write_blocks(self) -> None:
        while (item := self._full_blocks.get()) is not None:
            block, byte_count, offset = item
            try:
                if self._error is None:
                    self._write_at(memoryview(block)[:byte_count], offset)
            except OSError as error:
                self._error = error
            except Exception as error:  # if this thread ended, the caller would wait for a free block forever
                self._error = OSError(f"writing {self.path} failed: {error!r}")
            self._free_blocks.put(block)

    def _write_at(self, view: memoryview, offset: int) -> None:
        while len(view):
            # The last bytes of a file, and the rest of a short write, may be unaligned and need the page cache.
            if self._is_direct and (len(view) % PAGE or offset % PAGE):
                self._use_page_cache()
            written_bytes = self.disk.write(self._handle, view[: 1 << 30], offset)
            view = view[written_bytes:]
            offset += written_bytes

    def _use_page_cache(self) -> None:
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
        fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_direct = False

    def _wait_for_writes(self) -> None:
        """Wait until all submitted blocks are written. Raises the error of a failed write."""
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
        if self._open_block is not None:
            self._free_blocks.put(self._open_block)
            self._open_block = None
        while not self._free_blocks.empty():
            block = self._free_blocks.get()
            if _spare_blocks.qsize() < _MAX_BLOCKS:
                _spare_blocks.put(block)


def _is_page_aligned(view: memoryview) -> bool:
    return np.frombuffer(view, np.uint8).ctypes.data % PAGE == 0
