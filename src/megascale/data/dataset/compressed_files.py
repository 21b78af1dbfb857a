"""Contents of .gz and .zst files in chunks of bounded size: a small file may hold much more than memory does."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megascale.data.dataset.meter import Meter, open_metered
from megascale.errors import DataError, describe_install

CHUNK = 1 << 20  # bytes read at a time, and the most that one step of gzip yields
# zstd cannot bound its output, so its input is bounded: one block of at most 128 KiB needs at least 4 bytes.
_ZSTD_INPUT = 1 << 12


def compression_of(path: str | Path) -> str:
    """Return `gz`, `zst`, or an empty string for a file that is not compressed; the suffix may be in either case."""
    suffix = Path(path).suffix.lower()[1:]
    return suffix if suffix in ("gz", "zst") else ""


def read_chunks(path: Path, meter: Meter | None = None) -> Generator[tuple[bytes, int], None, None]:
    """Yield the contents of a file, decompressed, and the bytes of input that each chunk took.

    A compressed file may have several members and zeros after them, as `gzip` reads them (tapes pad files with zeros).
    Raises DataError if it is damaged or cut off.
    """
    with open_metered(path, meter) as file:
        if not compression_of(path):
            while data := file.read(CHUNK):
                yield data, len(data)
            return
        members = _GzipMembers() if compression_of(path) == "gz" else _ZstdMembers(path)
        unpacking = nullcontext if meter is None else meter.unpacking
        try:
            while data := file.read(CHUNK):
                used = len(data)
                steps = members.feed(data)
                while True:
                    with unpacking():
                        chunk = next(steps, None)
                    if chunk is None:
                        break
                    yield chunk, used
                    used = 0
                if used:
                    yield b"", used
        except members.damage as error:
            raise DataError(f"input {path} is damaged ({error}); copy it again or leave it out") from None
        if members.is_open:
            raise DataError(f"input {path} is cut off in the middle; copy it again or leave it out")


class _GzipMembers:
    """The members of a gzip file, one after the other."""

    damage: tuple[type[Exception], ...] = (zlib.error,)

    def __init__(self) -> None:
        self._member: Any = None
        self._finished = 0

    @property
    def is_open(self) -> bool:
        return self._member is not None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what `data` decompresses to, at most CHUNK bytes at a time."""
        while True:
            if self._member is None:
                data = data.lstrip(b"\0") if self._finished else data
                if not data:
                    return
                self._member = zlib.decompressobj(31)
            chunk = self._member.decompress(data, CHUNK)
            yield chunk
            if self._member.eof:
                data = self._member.unused_data
                self._member = None
                self._finished += 1
                continue
            data = self._member.unconsumed_tail
            if not data and len(chunk) < CHUNK:
                return


class _ZstdMembers:
    """The frames of a zstd file, one after the other."""

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise DataError(f"input {path} needs the package zstandard; {describe_install('formats')}") from None
        self.damage: tuple[type[Exception], ...] = (zstandard.ZstdError,)
        # The longest window that zstd knows (`zstd --long=31`); memory for it is used only as far as the text reaches.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << zstandard.WINDOWLOG_MAX)
        self._frame: Any = None
        self._finished = 0

    @property
    def is_open(self) -> bool:
        return self._frame is not None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what `data` decompresses to, in parts that _ZSTD_INPUT bytes of input make."""
        at = 0
        while at < len(data):
            part = data[at : at + _ZSTD_INPUT]
            at += len(part)
            if self._frame is None:
                rest = part.lstrip(b"\0") if self._finished else part
                if not rest:
                    continue
                part = rest
                self._frame = self._decompressor.decompressobj()
            yield self._frame.decompress(part)
            if self._frame.eof:
                at -= len(self._frame.unused_data)
                self._frame = None
                self._finished += 1
