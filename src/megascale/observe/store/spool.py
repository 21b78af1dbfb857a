"""The spool of a host: files ("segments"), to which the span service appends frames until they become Parquet files.

A frame is a block of records with a head (frames.py): spans, roll-ups, clock offsets or counters. It comes from one
rank's ring buffer, and its number counts the frames of that ring.

    spool-N.bin = "MSspool1" | length of the header | header (JSON) | frames

The header holds the origin of the frames (job, host, clock), and the number of the last frame of each ring in earlier
segments. Written frames survive a killed process; a machine failure loses at most the last second. Readers ignore a
truncated last frame. When a segment has become Parquet files with its number (parquet.py), it is removed. While
`spool-N.bin` exists, Parquet files with its number are ignored.

An *orphan* is a file in the same form that a rank wrote itself because no service took the frames of its ring.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megascale.core import strict_json
from megascale.core.untrusted_files import open_regular, read_small_text
from megascale.observe.store.frames import FrameHead, TornFrame, pack_frame, scan_frames

ORPHAN_PREFIX = "left-"  # begin of an orphan's file name
RINGS_FILE = "rings.json"  # file with the number of the last frame of each ring in removed segments
_IDENTITY_FILE = "identity"
_MAGIC = b"MSspool1"
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 24
# Largest sum of frames that is read from a segment. A service ends a segment at 16 MiB, but frames that waited for its
# start may make the segment larger.
_MAX_FRAME_BYTES = 1 << 30
_BLOCK_BYTES = 8 << 20


def read_folder_identity(folder: Path) -> str:
    """Return 16 random hexadecimal digits that identify a folder of spans; the first call stores them.

    Raises OSError if they cannot be stored.
    """
    file = folder / _IDENTITY_FILE
    with contextlib.suppress(OSError, ValueError):
        text = read_small_text(file, 64)
        if re.fullmatch(r"[0-9a-f]{16}", text):
            return text
    text = os.urandom(8).hex()
    replace_file(file, text.encode())
    return text


def replace_file(file: Path, data: bytes) -> None:
    """Replace a file atomically: after a crash it has its old or its new content."""
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, file)


def get_segment_file(folder: Path, number: int) -> Path:
    return folder / f"spool-{number:06d}.bin"


def list_segments(folder: Path) -> list[int]:
    """Return the numbers of the existing segments, in order."""
    numbers = (path.stem.removeprefix("spool-") for path in folder.glob("spool-*.bin"))
    return sorted(int(text) for text in numbers if text.isdigit())


@dataclass
class Segment:
    """The content of a segment file.

    Attributes:
        header: origin of the frames, and records of the ranks' locations.
        last: number of the last frame by ring, in this and all earlier segments.
        frames: head and records of each frame, in order.
        damage: why reading ended before the end of the file, or an empty string.
    """

    header: dict[str, Any]
    last: dict[int, int]
    frames: list[tuple[FrameHead, memoryview]] = field(default_factory=list)
    damage: str = ""


def read_segment(file: Path, check: bool = True) -> Segment:
    """Return a segment with all its whole frames. Reading ends at the first damaged or truncated frame.

    Args:
        check: compare checksums; unnecessary in the process that wrote the segment.

    Raises:
        FileNotFoundError: the file does not exist.
        OSError: the file cannot be read, or is a pipe or a device.
        ValueError: the file is not a segment.
    """
    with open(file, "rb", opener=open_regular) as data:
        start = data.read(len(_MAGIC) + _LENGTH.size)
        if len(start) < len(_MAGIC) + _LENGTH.size:
            return Segment({}, {}, damage="the file's header is truncated")
        (length,) = _LENGTH.unpack_from(start, len(_MAGIC))
        if start[: len(_MAGIC)] != _MAGIC or length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is not a spool of spans")
        text = data.read(length)
        if len(text) < length:
            return Segment({}, {}, damage="the file's header is truncated")
        try:
            segment = _parse_header(text)
        except (ValueError, AttributeError, TypeError, OverflowError):
            raise ValueError(f"the header of {file} is damaged: it is not a spool of spans") from None
        _read_frames(data, segment, check)
    return segment


def _parse_header(text: bytes) -> Segment:
    """Return a segment without frames. Raises ValueError, AttributeError, TypeError or OverflowError if damaged."""
    header = strict_json.loads(text, max_bytes=_MAX_HEADER_BYTES)
    last = {int(ring): int(number) for ring, number in header.pop("rings", {}).items()}
    header["ranks"] = [dict(rank) for rank in header.get("ranks", ())]
    header["clock_ns"] = int(header.get("clock_ns", 0))
    if abs(header["clock_ns"]) >= 1 << 62:
        raise ValueError("the clock is damaged")
    return Segment(header, last)


def _read_frames(data: BinaryIO, segment: Segment, check: bool) -> None:
    """Add the file's frames to `segment`, block by block, until the first damaged frame."""
    remainder = b""  # begin of a frame whose end is in the next block
    total = 0
    while total <= _MAX_FRAME_BYTES:
        block = data.read(_BLOCK_BYTES)
        view = memoryview(remainder + block)
        remainder = b""
        try:
            for head, body, _ in scan_frames(view, check):
                segment.frames.append((head, body))
                segment.last[head.ring] = head.number  # a ring's frames are in order
        except TornFrame as torn:
            is_at_end = not block
            if not torn.is_truncated or is_at_end:
                segment.damage = str(torn)
                return
            remainder = bytes(view[torn.offset :])
        if not block:
            return
        total += len(block)
    segment.damage = f"it holds more than {_MAX_FRAME_BYTES:,} bytes"


def pack_header(header: dict[str, Any], last: dict[int, int]) -> bytes:
    """Return the bytes of a segment file before its frames.

    Args:
        last: number of the last frame by ring in earlier segments.
    """
    text = strict_json.dumps(header | {"rings": {str(ring): number for ring, number in last.items()}}).encode()
    return _MAGIC + _LENGTH.pack(len(text)) + text


def save_orphan(folder: Path, header: dict[str, Any], ring: int, frames: bytes) -> None:
    """Write a ring's frames to an orphan, for readers of the folder and for its next service.

    Raises OSError if there is no space.
    """
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{ORPHAN_PREFIX}{ring:016x}.bin", pack_header(header, {}) + frames)


def adopt_orphan(orphan: Path, segment: Path, last: dict[int, int]) -> None:
    """Write those frames of an orphan that no segment has to a new segment, and remove the orphan.

    A damaged orphan is removed without a new segment.

    Args:
        orphan, segment: the old and the new file.
        last: number of the last frame by ring; updated in place.
    """
    with contextlib.suppress(OSError, ValueError):
        content = read_segment(orphan)
        new_frames = [pack_frame(head, body) for head, body in select_new_frames(content, last)]
        for head, _ in content.frames:
            last[head.ring] = max(head.number, last.get(head.ring, 0))
        replace_file(segment, pack_header(content.header, last) + b"".join(new_frames))
    orphan.unlink(missing_ok=True)


def select_new_frames(segment: Segment, last: dict[int, int]) -> list[tuple[FrameHead, memoryview]]:
    """Return the frames whose numbers are above `last`, the number of the last known frame by ring."""
    return [(head, body) for head, body in segment.frames if head.number > last.get(head.ring, 0)]


def read_last_numbers(folder: Path) -> dict[int, int]:
    """Return the number of the last frame by ring in a folder, removed segments included."""
    last: dict[int, int] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        numbers = strict_json.loads(read_small_text(folder / RINGS_FILE))
        last = {int(ring): int(number) for ring, number in numbers.items()}
    for number in list_segments(folder):
        with contextlib.suppress(OSError, ValueError):
            segment = read_segment(get_segment_file(folder, number))
            for ring, last_number in segment.last.items():
                last[ring] = max(last_number, last.get(ring, 0))
    return last


class Spool:
    """Writer of a folder's current segment. A folder has at most one writer.

    Args:
        header: origin of the frames, which each segment's header contains.
        last: number of the last frame by ring before the first segment. The caller adds the frames that it appends.

    Attributes:
        size: bytes written to it.
    """

    def __init__(self, folder: Path, header: dict[str, Any], number: int, last: dict[int, int]) -> None:
        self.folder = folder
        self.header = header
        self.number = number
        self.last = last
        self.size = 0
        self._file = -1  # descriptor; -1: the segment has no file yet

    def append(self, frames: bytes | memoryview) -> None:
        """Append whole frames. Raises OSError if there is no space; in that case the segment is unchanged."""
        if self._file < 0:
            self._open()
        size_before = self.size
        view = memoryview(frames)
        try:
            while len(view):
                written_bytes = os.write(self._file, view)
                self.size += written_bytes
                view = view[written_bytes:]
        except OSError:
            self.size = size_before
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size_before)
                os.lseek(self._file, size_before, os.SEEK_SET)
            raise

    def _open(self) -> None:
        """Create the segment's file. Raises OSError if there is no space for its header."""
        file = get_segment_file(self.folder, self.number)
        header = pack_header(self.header, self.last)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.write(handle, header) != len(header):
                raise OSError(errno.ENOSPC, "no space left for a segment's header", str(file))
        except OSError:
            os.close(handle)
            file.unlink(missing_ok=True)
            raise
        self._file = handle
        self.size = len(header)

    def flush(self) -> None:
        """Write the segment to the disk, so that it survives a machine failure."""
        if self._file >= 0:
            os.fdatasync(self._file)

    def rotate(self) -> int | None:
        """End the segment and return its number; None if it has no frames. The next `append` begins a new segment."""
        if self._file < 0:
            return None
        os.close(self._file)
        self._file = -1
        self.size = 0
        self.number += 1
        return self.number - 1


def read_segments(folder: Path) -> Iterator[tuple[Path, Segment | str]]:
    """Yield each segment's file with its content, or with the reason why it cannot be read.

    Segments that are removed meanwhile are left out. Orphans contribute only the frames that no segment has.
    """
    orphans = sorted(folder.glob(f"{ORPHAN_PREFIX}*.bin"))
    last = read_last_numbers(folder) if orphans else {}
    for file in [get_segment_file(folder, number) for number in list_segments(folder)] + orphans:
        try:
            segment = read_segment(file)
            if file in orphans:
                segment.frames = select_new_frames(segment, last)
            yield file, segment
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            yield file, str(error)
