"""The spool of a host: frames as they came, appended to a segment file until they are made into columns.

    spool-N.bin = "MSspool1" | length | JSON: whose it is, and the last frame of each ring before it | frames

What was written stays: a process that is killed loses nothing of it, a machine that dies the last second. A torn end is
not read. A segment ends by being made into Parquet files of its number (parquet.py) and removed: while `spool-N.bin` is
there it alone counts, and what may exist of its Parquet files does not.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from megascale.core import strict_json
from megascale.core.untrusted_files import open_regular, read_small_text
from megascale.observe.store.frames import FrameHead, TornFrame, pack_bytes, scan

LEFT = "left-"  # a file that a rank left whose frames no service took, in a segment's form
RINGS = "rings.json"  # the last frame's number of each ring in the segments that are no more
_MAGIC = b"MSspool1"
_LENGTH = struct.Struct("<I")
_MOST_HEAD = 1 << 24
_MOST_FRAMES = 1 << 30  # bytes of a segment; a service ends one at 16 MiB, or with what ranks left while it was away
_BLOCK = 8 << 20  # bytes read at a time


def segment_file(folder: Path, number: int) -> Path:
    """The file of a segment."""
    return folder / f"spool-{number:06d}.bin"


def segments(folder: Path) -> list[int]:
    """Numbers of the segments that there are, in order."""
    found = (path.stem.removeprefix("spool-") for path in folder.glob("spool-*.bin"))
    return sorted(int(text) for text in found if text.isdigit())


@dataclass
class Segment:
    """What a segment file holds.

    Attributes:
        about: whose it is.
        last: the last frame's number of each ring, at its end.
        frames: (head, records) in order.
        torn: why reading ended before the file did, "" if it did not.
    """

    about: dict[str, Any]
    last: dict[int, int]
    frames: list[tuple[FrameHead, memoryview]] = field(default_factory=list)
    torn: str = ""


def read_segment(file: Path, check: bool = True) -> Segment:
    """Return all whole frames of a segment: reading ends at the first frame that is damaged or cut.

    Args:
        check: whether checksums are compared; the process that wrote the segment need not.

    Raises:
        FileNotFoundError: the file is gone.
        OSError: it cannot be read, or is a pipe or a device.
        ValueError: it is not a segment.
    """
    with open(file, "rb", opener=open_regular) as data:
        first = data.read(len(_MAGIC) + _LENGTH.size)
        if len(first) < len(_MAGIC) + _LENGTH.size:
            return Segment({}, {}, torn="the file's head is cut off")
        (length,) = _LENGTH.unpack_from(first, len(_MAGIC))
        if first[: len(_MAGIC)] != _MAGIC or length > _MOST_HEAD:
            raise ValueError(f"{file} is not a spool of spans")
        text = data.read(length)
        if len(text) < length:
            return Segment({}, {}, torn="the file's head is cut off")
        try:
            segment = Segment(*_read_about(text))
        except (ValueError, AttributeError, TypeError, OverflowError):
            raise ValueError(f"the head of {file} is damaged: it is not a spool of spans") from None
        _read_frames(data, segment, check)
    return segment


def _read_about(text: bytes) -> tuple[dict[str, Any], dict[int, int]]:
    """Return whose a segment is, and the last frame of each ring before it. An error of any kind if it is damaged."""
    about = strict_json.loads(text, max_bytes=_MOST_HEAD)
    last = {int(ring): int(number) for ring, number in about.pop("rings", {}).items()}
    about["ranks"] = [dict(rank) for rank in about.get("ranks", ())]
    about["clock_ns"] = int(about.get("clock_ns", 0))
    if abs(about["clock_ns"]) >= 1 << 62:
        raise ValueError("a clock that is damaged")
    return about, last


def _read_frames(data: BinaryIO, segment: Segment, check: bool) -> None:
    """Read frames block by block, so that a file of any length takes no more memory than its whole frames."""
    rest, total = b"", 0
    while True:
        block = data.read(_BLOCK)
        view = memoryview(rest + block)
        try:
            for head, body, _ in scan(view, check):
                segment.frames.append((head, body))
                segment.last[head.ring] = head.number  # a ring's frames lie in order
            rest = b""
        except TornFrame as torn:
            if not torn.is_truncated or not block:
                segment.torn = str(torn)
                return
            rest = bytes(view[torn.offset :])
        total += len(block)
        if not block or total > _MOST_FRAMES:
            segment.torn = f"it holds more than {_MOST_FRAMES:,} bytes" if block else ""
            return


def segment_head(about: dict[str, Any], last: dict[int, int]) -> bytes:
    """What a segment file begins with."""
    text = strict_json.dumps(about | {"rings": {str(ring): number for ring, number in last.items()}}).encode()
    return _MAGIC + _LENGTH.pack(len(text)) + text


def save_orphan(folder: Path, about: dict[str, Any], ring: int, frames: bytes) -> None:
    """Leave a ring's frames in `folder` for whoever reads it, and for its next service. OSError if there is no room."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{LEFT}{ring:016x}.bin"
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(segment_head(about, {}) + frames)
    os.replace(temporary, file)


def adopt(left: Path, segment: Path, last: dict[int, int]) -> None:
    """Make a left file into a segment, without the frames that were kept before; `last` is brought up to date."""
    with contextlib.suppress(OSError, ValueError):
        found = read_segment(left)
        temporary = segment.with_suffix(".tmp")
        fresh = b"".join([pack_bytes(h, body) for h, body in found.frames if h.number > last.get(h.ring, 0)])
        for head, _ in found.frames:
            last[head.ring] = max(head.number, last.get(head.ring, 0))
        temporary.write_bytes(segment_head(found.about, last) + fresh)
        os.replace(temporary, segment)
    left.unlink(missing_ok=True)


def last_numbers(folder: Path) -> dict[int, int]:
    """The last frame's number of each ring that a folder keeps."""
    last: dict[int, int] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        told = strict_json.loads(read_small_text(folder / RINGS))
        last = {int(ring): int(number) for ring, number in told.items()}
    for number in segments(folder):
        with contextlib.suppress(OSError, ValueError):
            for ring, count in read_segment(segment_file(folder, number)).last.items():
                last[ring] = max(count, last.get(ring, 0))
    return last


class Spool:
    """The segment under way of a folder; the only writer there.

    Args:
        folder: which must exist.
        about: what its segments say of themselves.
        number: of the first segment.
        last: the last frame's number of each ring before it.

    Attributes:
        size: bytes written to the segment.
    """

    def __init__(self, folder: Path, about: dict[str, Any], number: int, last: dict[int, int]) -> None:
        self.folder, self.about, self.number, self.last = folder, about, number, last
        self.size = 0
        self._file = -1

    def append(self, frames: bytes | memoryview) -> None:
        """Write whole frames; OSError if there is no room, and then nothing of them is there."""
        if self._file < 0:
            self._open()
        begun = self.size
        try:
            view = memoryview(frames)
            while len(view):
                done = os.write(self._file, view)
                self.size += done
                view = view[done:]
        except OSError:
            self.size = begun
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, begun)
                os.lseek(self._file, begun, os.SEEK_SET)
            raise

    def _open(self) -> None:
        file = segment_file(self.folder, self.number)
        head = segment_head(self.about, self.last)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if os.write(handle, head) != len(head):
                raise OSError(28, "no space left for a segment's head", str(file))
        except OSError:
            os.close(handle)
            file.unlink(missing_ok=True)
            raise
        self._file, self.size = handle, len(head)

    def flush(self) -> None:
        """Have what was written outlive the machine."""
        if self._file >= 0:
            os.fdatasync(self._file)

    def rotate(self) -> int | None:
        """End the segment; its number, None if nothing was written."""
        if self._file < 0:
            return None
        os.close(self._file)
        self._file, self.size = -1, 0
        self.number += 1
        return self.number - 1


def held(folder: Path) -> Iterator[tuple[Path, Segment | str]]:
    """Each segment of a folder as it can be read now, or why it cannot; one that is removed meanwhile is left out.

    Of what ranks left only frames that no segment has.
    """
    last: dict[int, int] | None = None
    lefts = sorted(folder.glob(f"{LEFT}*.bin"))
    for file in [*(segment_file(folder, number) for number in segments(folder)), *lefts]:
        try:
            found = read_segment(file)
            if file in lefts:
                last = last_numbers(folder) if last is None else last
                found.frames = [(h, body) for h, body in found.frames if h.number > last.get(h.ring, 0)]
            yield file, found
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            yield file, str(error)
