"""Readers of the files that trainers append to: log lines, lines that match patterns, and step metrics."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from megascale.config import ResilienceConfig
from megascale.core import strict_json
from megascale.core.bounded_pattern import MAX_CHARACTERS, BoundedPattern
from megascale.core.untrusted_files import open_regular
from megascale.resilience.protocol.agent_messages import StepFigures, Steps
from megascale.resilience.protocol.heartbeat import LogMatch, truncate

_LOG_CHUNK = 256 * 1024  # bytes of a log per read; the middle of a faster growing log is skipped
_MATCH_LIMIT = 64  # matches per heartbeat
STEP_LIMIT = 400  # steps that a new driver receives
_LONGEST_STEP = 1e9  # seconds; a longer step is a damaged record
_METRICS_CHUNK = 1 << 20  # bytes of metrics per read, and of a long file's end


class LogTail:
    """The new lines of one growing file, from its begin again if a rotation has emptied it.

    Attributes:
        size: bytes by which the file has grown.
    """

    def __init__(self, path: Path, start: int) -> None:
        self.size = 0
        self._path = path
        self._position = start
        self._partial_line = b""

    def read_lines(self, at_carriage_returns: bool = False) -> list[str]:
        """Return the complete lines since the last call; with `at_carriage_returns`, states of progress bars too."""
        try:
            with open(self._path, "rb", opener=open_regular) as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._position:
                    self._position = 0
                    self._partial_line = b""
                if size == self._position:
                    return []
                self.size += size - self._position
                if size - self._position > _LOG_CHUNK:
                    self._position = size - _LOG_CHUNK
                    self._partial_line = b""
                file.seek(self._position)
                data = file.read(_LOG_CHUNK)
        except OSError:
            return []
        self._position += len(data)
        data = self._partial_line + data
        if at_carriage_returns:
            data = data.replace(b"\r", b"\n")
        lines = data.split(b"\n")
        self._partial_line = lines.pop()[-_LOG_CHUNK:]
        return [line.decode(errors="replace").rstrip("\r") for line in lines]


class _Match(NamedTuple):
    time: float
    rank: int
    pattern: str
    line: str


class LogFilter:
    """Reader of the logs of a node's ranks.

    Args:
        patterns: regular expressions; a line counts for the first that it matches. Those that are not a default of
            resilience.log_patterns are searched in bounded time, which costs 2 microseconds per line.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        defaults = ResilienceConfig().log_patterns
        self._patterns = [_compile_log_pattern(pattern, pattern in defaults) for pattern in patterns]
        self._logs: dict[int, LogTail] = {}
        self._matches: deque[_Match] = deque(maxlen=_MATCH_LIMIT)

    def follow(self, logs: dict[int, tuple[Path, int]]) -> None:
        """Follow {rank: (file, offset at which this attempt's output begins)} from now on."""
        self._logs = {rank: LogTail(path, start) for rank, (path, start) in logs.items()}
        self._matches.clear()

    def read_new_lines(self, forwarded_rank: int | None) -> list[str]:
        """Search the new lines of all logs; return those of `forwarded_rank`."""
        forwarded_lines: list[str] = []
        for rank, log in self._logs.items():
            lines = log.read_lines()
            if rank == forwarded_rank:
                forwarded_lines = lines
            for line in lines:
                line_begin = line[:MAX_CHARACTERS]
                expression = next((text for text, search in self._patterns if search(line_begin)), None)
                if expression is not None:
                    self._matches.append(_Match(time.monotonic(), rank, expression, line))
        return forwarded_lines

    def take(self) -> tuple[LogMatch, ...]:
        """Return the matches since the last call."""
        current_time = time.monotonic()
        matches = tuple(
            LogMatch(match.rank, truncate(match.pattern, 200), truncate(match.line), current_time - match.time)
            for match in self._matches
        )
        self._matches.clear()
        return matches


def _compile_log_pattern(expression: str, is_default: bool) -> tuple[str, Callable[[str], object]]:
    """Return an expression and its search."""
    if is_default:
        return expression, re.compile(expression).search
    return expression, BoundedPattern("resilience.log_patterns", expression).search


class MetricsTail:
    """The steps in the growing `metrics.jsonl` of a folder; a resumed run rewrites the file, which is detected."""

    def __init__(self, run: Path) -> None:
        self._file = run / "metrics.jsonl"
        self._steps: deque[StepFigures] = deque(maxlen=STEP_LIMIT)
        self._inode = 0
        self._position = 0
        self._send_all = True

    def begin_session(self) -> None:
        """Return the last steps again from the next read, for another driver."""
        self._send_all = True

    def read_new_steps(self) -> Steps | None:
        """Return the steps since the last call, None if there are none."""
        new_steps: list[StepFigures] = []
        try:
            with open(self._file, "rb", opener=open_regular) as file:
                new_steps = self._read(file)
        except OSError:
            pass
        replaces_earlier = self._send_all
        self._send_all = False
        if replaces_earlier:
            steps = tuple(self._steps)
        else:
            steps = tuple(new_steps[-STEP_LIMIT:])
        return Steps(steps, replaces_earlier) if steps or replaces_earlier else None

    def _read(self, file: BinaryIO) -> list[StepFigures]:
        state = os.fstat(file.fileno())
        if state.st_ino != self._inode or state.st_size < self._position:
            self._inode = state.st_ino
            self._position = max(0, state.st_size - _METRICS_CHUNK)
            self._steps.clear()
            self._send_all = True
        file.seek(self._position)
        data = file.read(_METRICS_CHUNK)
        end = data.rfind(b"\n") + 1  # A last line without its end is still being written.
        if not end and len(data) == _METRICS_CHUNK:
            end = _METRICS_CHUNK  # Records are shorter than that, so reading resumes at the next line.
        self._position += end
        steps = [_parse_step(line) for line in data[:end].split(b"\n")]
        valid_steps = [step for step in steps if step is not None]
        self._steps.extend(valid_steps)
        return valid_steps


def _parse_step(line: bytes) -> StepFigures | None:
    """Return the metrics of a training step, None for other records, damaged lines and parts of lines.

    Only steps have `seconds`. Another trainer may print no loss or norm: the rules ignore a constant 0.
    """
    try:
        record = strict_json.loads(line, max_bytes=_METRICS_CHUNK)
        step = strict_json.to_float(record["step"])
        seconds = strict_json.to_float(record["seconds"])
        loss = float(record.get("loss", 0.0))
        grad_norm = float(record.get("grad_norm", 0.0))
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    if not 0 <= step < 1 << 53 or not 0 <= seconds < _LONGEST_STEP:
        return None
    return StepFigures(int(step), loss, grad_norm, seconds)
