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

CHUNK_BYTES = 1 << 20  # bytes read at a time, and the most that one step of gzip yields
# The output of a zstd step cannot be bounded, so its input is: 4 bytes of input give at most one block of 128 KiB.
_ZSTD_INPUT_BYTES = 1 << 12


@dataclass
class Meter:
    """Counters of a loader's work.

    Attributes:
        bytes_read: bytes read from files, compressed as they are stored.
        read_seconds: seconds of waiting for files.
        unpack_seconds: seconds of decompression.
        encode_seconds: seconds of parsing and tokenising, or of copying tokens.
        encode_cpu_seconds: processor seconds of the thread in encode_seconds; much fewer if other processes use the
            processor.
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
        """Count the time of the context as decompression, except the time of reading files in it."""
        started, read_before = time.perf_counter(), self.read_seconds
        yield
        self.unpack_seconds += time.perf_counter() - started - (self.read_seconds - read_before)

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Count the time of the context as parsing and tokenising, except reading and decompression in it."""
        started, cpu_before = time.perf_counter(), time.thread_time()
        input_before = self.read_seconds + self.unpack_seconds
        yield
        input_seconds = self.read_seconds + self.unpack_seconds - input_before
        self.encode_seconds += time.perf_counter() - started - input_seconds
        self.encode_cpu_seconds += time.thread_time() - cpu_before


def time_unpacking(meter: Meter | None) -> AbstractContextManager[None]:
    """Return the context `meter.unpacking()`, or a context without effect if there is no meter."""
    return nullcontext() if meter is None else meter.unpacking()


class MeteredFile(io.FileIO):
    """A file open for reading that counts bytes and seconds of waiting."""

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
    """Open a file for reading; `meter`, if given, counts its bytes."""
    return open(path, "rb") if meter is None else io.BufferedReader(MeteredFile(path, meter), buffer)


def find_compression(path: str | Path) -> str:
    """Return `gz` or `zst` by the suffix of a path, in upper or lower case; "" for other suffixes."""
    suffix = Path(path).suffix.lower()[1:]
    return suffix if suffix in ("gz", "zst") else ""


def read_chunks(path: Path, meter: Meter | None = None) -> Generator[tuple[bytes, int], None, None]:
    """Yield (chunk, bytes of input that it took) for the decompressed contents of a file.

    A compressed file may have several members, and zeros after them, with which tapes pad files. Raises DataError if it
    is damaged or cut off.
    """
    compression = find_compression(path)
    with open_metered(path, meter) as file:
        if not compression:
            while data := file.read(CHUNK_BYTES):
                yield data, len(data)
            return
        decoder = _GzipDecoder() if compression == "gz" else _ZstdDecoder(path)
        try:
            while data := file.read(CHUNK_BYTES):
                input_bytes = len(data)
                chunks = decoder.feed(data)
                while True:
                    with time_unpacking(meter):
                        chunk = next(chunks, None)
                    if chunk is None:
                        break
                    yield chunk, input_bytes  # the first chunk accounts for all bytes of input
                    input_bytes = 0
                if input_bytes:
                    yield b"", input_bytes
        except decoder.errors as error:
            raise DataError(f"input {path} is damaged ({error}); copy it again or leave it out") from None
        if decoder.current is not None:
            raise DataError(f"input {path} is cut off in the middle; copy it again or leave it out")


class _MemberDecoder:
    """Decoder of a file's compressed members, one after the other.

    Attributes:
        current: decompressor of the member that has begun and not ended; None between members.
        errors: exceptions that the library raises for damaged data.
    """

    errors: tuple[type[Exception], ...]

    def __init__(self) -> None:
        self.current: Any = None
        self._has_finished = False

    def _begin(self, data: bytes, decompressor: Any) -> bytes:
        """Begin a member if `data` holds more than padding; return the data without padding before the member.

        Args:
            decompressor: function that makes the member's decompressor.
        """
        data = data.lstrip(b"\0") if self._has_finished else data
        if data:
            self.current = decompressor()
        return data

    def _end(self) -> bytes:
        """End the current member, and return the bytes of the input that follow the member."""
        next_data = self.current.unused_data
        self.current = None
        self._has_finished = True
        return next_data


class _GzipDecoder(_MemberDecoder):
    errors = (zlib.error,)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed contents of `data`, at most CHUNK_BYTES at a time."""
        while True:
            if self.current is None:
                # zlib's code 31 stands for a window of 2^15 bytes and a gzip header.
                data = self._begin(data, lambda: zlib.decompressobj(31))
                if not data:
                    return
            chunk = self.current.decompress(data, CHUNK_BYTES)
            yield chunk
            if self.current.eof:
                data = self._end()
                continue
            data = self.current.unconsumed_tail
            if not data and len(chunk) < CHUNK_BYTES:
                return


class _ZstdDecoder(_MemberDecoder):
    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            import zstandard
        except ImportError:
            raise DataError(f"input {path} needs the package zstandard; {describe_install('formats')}") from None
        self.errors = (zstandard.ZstdError,)
        # Accept the longest window of zstd (`zstd --long=31`); memory is used only for text that exists.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << zstandard.WINDOWLOG_MAX)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed contents of `data`, one chunk per _ZSTD_INPUT_BYTES bytes of input."""
        position = 0
        while position < len(data):
            step_data = data[position : position + _ZSTD_INPUT_BYTES]
            position += len(step_data)
            if self.current is None:
                step_data = self._begin(step_data, self._decompressor.decompressobj)
                if not step_data:
                    continue
            yield self.current.decompress(step_data)
            if self.current.eof:
                position -= len(self._end())  # the next step reads the data after the member
