"""Reads what trainers write while they write it: the lines that match patterns, and new lines of one rank."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megascale.core.untrusted_files import open_regular
from megascale.resilience.protocol.heartbeat import LogMatch, truncate

_CHUNK = 256 * 1024  # most bytes of a log read at a time; a rank that writes more is skipped over
_MATCHES = 64


class Log:
    """The new lines of one growing file."""

    def __init__(self, path: Path, start: int) -> None:
        self.path, self.position, self._rest = path, start, b""

    def read(self) -> list[str]:
        """Whole lines since the last call."""
        try:
            with open(self.path, "rb", opener=open_regular) as file:
                size = file.seek(0, 2)
                if size <= self.position:
                    return []
                if size - self.position > _CHUNK:
                    self.position, self._rest = size - _CHUNK, b""
                file.seek(self.position)
                data = file.read(_CHUNK)
        except OSError:
            return []
        self.position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_CHUNK:]
        return [line.decode(errors="replace").rstrip("\r") for line in lines]


class LogFilter:
    """Follows the logs of a node's ranks.

    Args:
        patterns: regular expressions; each line is noted under the first it matches.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [(text, re.compile(text)) for text in patterns]
        self._logs: dict[int, Log] = {}
        self._found: deque[tuple[float, int, str, str]] = deque(maxlen=_MATCHES)

    def follow(self, logs: dict[int, tuple[Path, int]]) -> None:
        """From now on: rank -> (file, where this attempt's part begins)."""
        self._logs = {rank: Log(path, start) for rank, (path, start) in logs.items()}
        self._found.clear()

    def look(self, forward: int | None) -> list[str]:
        """Read what is new; returns the new lines of rank `forward`."""
        passed: list[str] = []
        for rank, log in self._logs.items():
            lines = log.read()
            if rank == forward:
                passed = lines
            for line in lines:
                for text, pattern in self._patterns:
                    if pattern.search(line[:4000]):
                        self._found.append((time.monotonic(), rank, text, line))
                        break
        return passed

    def take(self) -> tuple[LogMatch, ...]:
        """Matches since the last call."""
        now = time.monotonic()
        found = tuple(
            LogMatch(rank, truncate(text, 200), truncate(line), now - seen) for seen, rank, text, line in self._found
        )
        self._found.clear()
        return found
