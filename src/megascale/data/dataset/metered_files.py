"""Files read in chunks of bounded size, plain or compressed (.gz, .zst), with counters of bytes and time.

A small compressed file may hold much more than memory does. The counters show why a loader is too slow.
"""

from __future__ import annotations

import io
import time
import zlib
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from megascale.errors import DataError, describe_install

CHUNK = 1 << 20  # bytes read at a time, and the most that one step of gzip yields
# zstd cannot bound its output, so its input is bounded: one block of at most 128 KiB needs at least 4 bytes.
_ZSTD_INPUT = 1 << 12


@dataclass
class Meter:
    """Counters of a loader's work.

    Attributes:
        bytes_read: bytes read from files, compressed as they are stored.
        read_seconds: seconds of waiting for files.
        unpack_seconds: seconds of decompression.
        encode_seconds, encode_cpu_seconds: seconds of parsing and tokenising (or of copying tokens), by the wall clock
            and by this thread's processor time: far apart where other processes use the processor.
    """

    bytes_read: float = 0
    read_seconds: float = 0
    unpack_seconds: float = 0
    encode_seconds: float = 0
    encode_cpu_seconds: float = 0

    def add(self, meter: Meter) -> None:
        """Add the counters of another meter."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(meter, field.name))

    @contextmanager
    def unpacking(self) -> Iterator[None]:
        """Count the time inside as decompression, without the reading of files in it."""
        started, read_before = time.perf_counter(), self.read_seconds
        yield
        self.unpack_seconds += time.perf_counter() - started - (self.read_seconds - read_before)

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Count the time inside as parsing and tokenising, without the reading and decompression in it."""
        started, cpu_before = time.perf_counter(), time.thread_time()
        input_before = self.read_seconds + self.unpack_seconds
        yield
        input_seconds = self.read_seconds + self.unpack_seconds - input_before
        self.encode_seconds += time.perf_counter() - started - input_seconds
        self.encode_cpu_seconds += time.thread_time() - cpu_before


def unpacking(meter: Meter | None) -> AbstractContextManager[None]:
    """Return `meter.unpacking()`, or a context without effect if there is no meter."""
    return nullcontext() if meter is None else meter.unpacking()


class MeteredFile(io.FileIO):
    """A file open for reading that counts its bytes and its waiting."""

    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__(path, "rb")
        self._meter = meter

    def readinto(self, buffer: Any) -> int:
        started = time.perf_counter()
        count = super().readinto(buffer) or 0
        self._meter.read_seconds += time.perf_counter() - started
        self._meter.bytes_read += count
        return count


def open_metered(path: Path, meter: Meter | None, buffer: int = 1 << 15) -> BinaryIO:
    """Open a file for reading; its bytes are counted if there is a meter."""
    return open(path, "rb") if meter is None else io.BufferedReader(MeteredFile(path, meter), buffer)


def compression_of(path: str | Path) -> str:
    """Return `gz`, `zst`, or an empty string for a file that is not compressed; the suffix may be in either case."""
    suffix = Path(path).suffix.lower()[1:]
    return suffix if suffix in ("gz", "zst") else ""


def read_chunks(path: Path, meter: Meter | None = None) -> Generator[tuple[bytes, int], None, None]:
    """Yield the contents of a file, decompressed, and the bytes of input that each chunk took.

    A compressed file may have several members and zeros after them, as `gzip` reads them (tapes pad files with zeros).
    Raises DataError if it is damaged or cut off.
    """
    compression = compression_of(path)
    with open_metered(path, meter) as file:
        if not compression:
            while data := file.read(CHUNK):
                yield data, len(data)
            return
        members = _GzipMembers() if compression == "gz" else _ZstdMembers(path)
        try:
            while data := file.read(CHUNK):
                used = len(data)
                steps = members.feed(data)
                while True:
                    with unpacking(meter):
                        chunk = next(steps, None)
                    if chunk is None:
                        break
                    yield chunk, used
                    used = 0
                if used:
                    yield b"", used
        except members.damage as error:
            raise DataError(f"input {path} is damaged ({error}); copy it again or leave it out") from None
        if members.current is not None:
            raise DataError(f"input {path} is cut off in the middle; copy it again or leave it out")


class _Members:
    """Compressed members of a file, one after the other.

    Attributes:
        current: decompressor of the member that has begun and not ended.
        damage: errors of the library for damaged data.
    """

    damage: tuple[type[Exception], ...]

    def __init__(self) -> None:
        self.current: Any = None
        self._has_finished = False

    def _begin(self, data: bytes, decompressor: Any) -> bytes:
        """Begin a member unless only padding follows; return the data without padding."""
        data = data.lstrip(b"\0") if self._has_finished else data
        if data:
            self.current = decompressor()
        return data

    def _end(self) -> bytes:
        """End the current member and return the input after it."""
        following = self.current.unused_data
        self.current = None
        self._has_finished = True
        return following


class _GzipMembers(_Members):
    damage = (zlib.error,)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed contents of `data`, at most CHUNK bytes at a time."""
        while True:
            if self.current is None:
                data = self._begin(data, lambda: zlib.decompressobj(31))
                if not data:
                    return
            chunk = self.current.decompress(data, CHUNK)
            yield chunk
            if self.current.eof:
                data = self._end()
                continue
            data = self.current.unconsumed_tail
            if not data and len(chunk) < CHUNK:
                return


class _ZstdMembers(_Members):
    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            import zstandard
        except ImportError:
            raise DataError(f"input {path} needs the package zstandard; {describe_install('formats')}") from None
        self.damage = (zstandard.ZstdError,)
        # The longest window that zstd knows (`zstd --long=31`); its memory is used only as far as the text reaches.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << zstandard.WINDOWLOG_MAX)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed contents of `data`, in parts of _ZSTD_INPUT bytes of input."""
        position = 0
        while position < len(data):
            part = data[position : position + _ZSTD_INPUT]
            position += len(part)
            if self.current is None:
                part = self._begin(part, self._decompressor.decompressobj)
                if not part:
                    continue
            yield self.current.decompress(part)
            if self.current.eof:
                position -= len(self._end())
