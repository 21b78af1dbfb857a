"""Lines of files that others write or damage, read one at a time in bounded memory.

A file of a run folder may hold a line that never ends, be a pipe, or be a sparse file of any size. Readers of JSON
lines take them from here: a line longer than MOST_LINE bytes is passed over, and what is not a file is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megascale.core import strict_json
from megascale.core.untrusted_files import open_regular

MAX_LINE_BYTES = 1 << 20  # bytes; records of runs take less than a hundredth of it
_BUFFER = 1 << 16
_BLOCK = 1 << 20  # bytes of a longer line that are passed over at a time


def read_bounded_lines(file: Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes | None]:
    """Yield each line without its end, and None for a line longer than `most` bytes.

    OSError if the file cannot be read, or is a pipe or a device.
    """
    with open(file, "rb", buffering=_BUFFER, opener=open_regular) as lines:
        while line := lines.readline(max_bytes + 1):
            if line.endswith(b"\n"):
                yield line[:-1]
            elif len(line) <= max_bytes:
                yield line  # the last one, without an end
            else:
                _pass_line(lines)
                yield None


def _pass_line(lines: BinaryIO) -> None:
    """Go to the begin of the next line."""
    while block := lines.read(_BLOCK):
        end = block.find(b"\n")
        if end >= 0:
            lines.seek(end + 1 - len(block), os.SEEK_CUR)
            return


class RecordReader:
    """Iterates over the records of a file of JSON lines; a line that is not a JSON object is left out.

    Iterating raises OSError if the file cannot be read, or is a pipe or a device.

    Attributes:
        damaged: lines that were left out.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.damaged_lines = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.damaged_lines = 0
        for line in read_bounded_lines(self.file):
            if line is not None and not line.strip():
                continue
            record = parse_record(line)
            if record is None:
                self.damaged_lines += 1
            else:
                yield record

    def describe_damage(self) -> str:
        """Return a sentence on the lines that were left out, empty if there are none."""
        if not self.damaged_lines:
            return ""
        lines = "line is" if self.damaged_lines == 1 else "lines are"
        return (
            f"{self.file}: {self.damaged_lines:,} {lines} damaged or longer than {MAX_LINE_BYTES:,} bytes, and left out"
        )


def parse_record(line: bytes | None) -> dict[str, Any] | None:
    """Return the JSON object of a line of `read_bounded_lines`, None if the line is not one."""
    if line is None:
        return None
    try:
        record = strict_json.loads(line, max_bytes=MAX_LINE_BYTES)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
