"""Reads a file of JSON lines as it grows: each whole line once, what is damaged counted and left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.untrusted_files import open_regular

_LINE = 1 << 20  # bytes; a longer line is no record of ours
_AT_ONCE = 64 << 20  # bytes read in one call


class RecordTail:
    """Args:
        file: it may not be there yet, grow, be cut or replaced.

    Attributes:
        damaged: lines that are no JSON object, so far.
        error: why the file cannot be read; "" if it can, or is not there.
        missing: whether there is no such file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._forget()
        self.error, self.missing = "", True

    def _forget(self) -> None:
        self._at, self._inode, self._skips = 0, -1, False
        self.damaged = 0

    def read_new_records(self) -> tuple[bool, list[dict[str, Any]]]:
        """(whether the file began anew, records since the last call)."""
        try:
            with open(self.file, "rb", opener=open_regular) as file:
                about = os.fstat(file.fileno())
                anew = about.st_ino != self._inode or about.st_size < self._at
                if anew:
                    self._forget()
                    self._inode = about.st_ino
                file.seek(self._at)
                data = file.read(_AT_ONCE)
        except FileNotFoundError:
            anew, self.missing, self.error = not self.missing, True, ""
            if anew:
                self._forget()
            return anew, []
        except OSError as error:
            self.missing, self.error = False, str(error.strerror or error)
            return False, []
        self.missing, self.error = False, ""
        return anew, list(self._records(data))

    def _records(self, data: bytes) -> Iterator[dict[str, Any]]:
        lines = data.split(b"\n")
        rest = lines.pop()
        # A line that was cut by a crash is removed before the next is written: it is read once it is whole.
        self._at += len(data) - len(rest)
        skips, self._skips = self._skips, self._skips and not lines
        if len(rest) > _LINE:  # no end in sight: forgotten up to the next line's begin
            self.damaged += not self._skips
            self._at += len(rest)
            self._skips = True
        for line in lines:
            if skips:
                skips = False
                continue
            if not line.strip():
                continue
            try:
                record = strict_json.loads(line, max_bytes=_LINE)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record
            else:
                self.damaged += 1
