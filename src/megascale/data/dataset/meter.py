"""Where the time of reading goes: what a loader counts to name the cause when it is too slow."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass
class Meter:
    """Counters.

    Attributes:
        bytes_read: from files, compressed as they lie there.
        read_seconds: in which the files were waited for.
        unpack_seconds: of decompression.
        encode_seconds, encode_cpu_seconds: of parsing and tokenising (or of copying tokens), by the wall clock and
            by this thread's processor time: far apart where others want the processor.
    """

    bytes_read: float = 0
    read_seconds: float = 0
    unpack_seconds: float = 0
    encode_seconds: float = 0
    encode_cpu_seconds: float = 0

    def add(self, other: Meter) -> None:
        """Count another's too."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @contextmanager
    def unpacking(self) -> Iterator[None]:
        """Time spent inside is decompression, but for reading of files."""
        started, read = time.perf_counter(), self.read_seconds
        yield
        self.unpack_seconds += time.perf_counter() - started - (self.read_seconds - read)

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Time spent inside is parsing and tokenising, but for reading and decompression."""
        started, cpu = time.perf_counter(), time.thread_time()
        other = self.read_seconds + self.unpack_seconds
        yield
        self.encode_seconds += time.perf_counter() - started - (self.read_seconds + self.unpack_seconds - other)
        self.encode_cpu_seconds += time.thread_time() - cpu


class MeteredFile(io.RawIOBase):
    """A file open for reading whose bytes and waiting are counted."""

    def __init__(self, path: Path, meter: Meter) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with this object
        self._meter = meter

    def readinto(self, buffer: Any) -> int:
        started = time.perf_counter()
        count = self._file.readinto(buffer) or 0
        self._meter.read_seconds += time.perf_counter() - started
        self._meter.bytes_read += count
        return count

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def open_metered(path: Path, meter: Meter | None, buffer: int = 1 << 15) -> Any:
    """A file open for reading, its bytes counted if there is a meter."""
    return open(path, "rb") if meter is None else io.BufferedReader(MeteredFile(path, meter), buffer)
