"""Readers of growing files of trainers: log lines, log lines that match patterns, and step metrics."""

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

_LOG_READ_BYTES = 256 * 1024  # per read of a log; if the log has grown more, only its end is read
_MATCH_LIMIT = 64  # matching lines per heartbeat
STEP_LIMIT = 400  # number of last steps that a new driver receives
_MAX_STEP_SECONDS = 1e9  # a record with a longer step is damaged
_MAX_STEP = 1 << 53  # likewise a record with a greater step, which a float cannot hold exactly
_PATTERN_CHARACTERS = 200  # limit of the heartbeat for a pattern
_METRICS_READ_BYTES = 1 << 20  # per read of metrics; of a longer new file, only the end is read


class LogTail:
    """Reader of the new lines of a growing file. If a rotation has emptied the file, it reads from the start again.

    Args:
        start: offset in the file at which to start.

    Attributes:
        size: number of bytes by which the file has grown.
    """

    def __init__(self, path: Path, start: int) -> None:
        self.size = 0
        self._path = path
        self._position = start
        self._partial_line = b""

    def read_lines(self, at_carriage_returns: bool = False) -> list[str]:
        """Return the complete lines since the last call.

        Args:
            at_carriage_returns: whether lines also end at carriage returns, as those of progress bars do.
        """
        try:
            with open(self._path, "rb", opener=open_regular) as file:
                size = file.seek(0, os.SEEK_END)
                if size < self._position:
                    self._position = 0
                    self._partial_line = b""
                if size == self._position:
                    return []
                self.size += size - self._position
                if size - self._position > _LOG_READ_BYTES:
                    self._position = size - _LOG_READ_BYTES
                    self._partial_line = b""
                file.seek(self._position)
                data = file.read(_LOG_READ_BYTES)
        except OSError:
            return []
        self._position += len(data)
        data = self._partial_line + data
        if at_carriage_returns:
            data = data.replace(b"\r", b"\n")
        lines = data.split(b"\n")
        self._partial_line = lines.pop()[-_LOG_READ_BYTES:]
        return [line.decode(errors="replace").rstrip("\r") for line in lines]


class _Match(NamedTuple):
    """A line that matched a pattern. time: when it was read, on the monotonic clock."""

    time: float
    rank: int
    pattern: str
    line: str


class LogFilter:
    """Reader of the logs of a node's ranks, which finds lines that match patterns.

    Args:
        patterns: regular expressions. A line is reported for the first one that it matches. The user's own patterns are
            searched in bounded time, which takes 2 microseconds per line. The defaults of resilience.log_patterns are
            searched directly.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        defaults = ResilienceConfig().log_patterns
        self._patterns = [_compile_log_pattern(pattern, pattern in defaults) for pattern in patterns]
        self._logs: dict[int, LogTail] = {}
        self._matches: deque[_Match] = deque(maxlen=_MATCH_LIMIT)

    def follow(self, logs: dict[int, tuple[Path, int]]) -> None:
        """Read other logs from now on.

        Args:
            logs: file by rank, with the offset at which the output of this attempt starts.
        """
        self._logs = {rank: LogTail(path, start) for rank, (path, start) in logs.items()}
        self._matches.clear()

    def read_new_lines(self, forwarded_rank: int | None) -> list[str]:
        """Search the new lines of all logs for patterns, and return the new lines of `forwarded_rank`."""
        forwarded_lines: list[str] = []
        for rank, log in self._logs.items():
            lines = log.read_lines()
            if rank == forwarded_rank:
                forwarded_lines = lines
            for line in lines:
                line_start = line[:MAX_CHARACTERS]
                for expression, search in self._patterns:
                    if search(line_start):
                        self._matches.append(_Match(time.monotonic(), rank, expression, line))
                        break
        return forwarded_lines

    def take(self) -> tuple[LogMatch, ...]:
        """Return the matching lines since the last call, at most the last _MATCH_LIMIT."""
        current_time = time.monotonic()
        matches = []
        for match in self._matches:
            pattern = truncate(match.pattern, _PATTERN_CHARACTERS)
            age = current_time - match.time
            matches.append(LogMatch(match.rank, pattern, line=truncate(match.line), age=age))
        self._matches.clear()
        return tuple(matches)


def _compile_log_pattern(expression: str, is_default: bool) -> tuple[str, Callable[[str], object]]:
    """Return an expression, and a function that searches a line for it."""
    if is_default:
        return expression, re.compile(expression).search
    return expression, BoundedPattern("resilience.log_patterns", expression).search


class MetricsTail:
    """Reader of the steps in a growing `metrics.jsonl`. If a resumed run rewrites the file, it reads from the start."""

    def __init__(self, run: Path) -> None:
        self._file = run / "metrics.jsonl"
        self._steps: deque[StepFigures] = deque(maxlen=STEP_LIMIT)  # last steps, for a new driver
        self._inode = 0
        self._position = 0
        self._must_send_all = True  # whether the next read returns the last steps again

    def begin_session(self) -> None:
        """Make the next read return the last steps again, for another driver."""
        self._must_send_all = True

    def read_new_steps(self) -> Steps | None:
        """Return the steps since the last call, or None if there are none."""
        new_steps: list[StepFigures] = []
        try:
            with open(self._file, "rb", opener=open_regular) as file:
                new_steps = self._read_steps(file)
        except OSError:
            pass
        replaces_earlier = self._must_send_all
        self._must_send_all = False
        if replaces_earlier:
            steps = tuple(self._steps)
        else:
            steps = tuple(new_steps[-STEP_LIMIT:])
        if not steps and not replaces_earlier:
            return None
        return Steps(steps, replaces_earlier)

    def _read_steps(self, file: BinaryIO) -> list[StepFigures]:
        """Return the steps in new complete lines of the open file."""
        stat = os.fstat(file.fileno())
        if stat.st_ino != self._inode or stat.st_size < self._position:
            self._inode = stat.st_ino
            self._position = max(0, stat.st_size - _METRICS_READ_BYTES)
            self._steps.clear()
            self._must_send_all = True
        file.seek(self._position)
        data = file.read(_METRICS_READ_BYTES)
        end = data.rfind(b"\n") + 1  # a last line without its end is still being written
        if not end and len(data) == _METRICS_READ_BYTES:
            end = _METRICS_READ_BYTES  # a longer line is not a record, so it is skipped
        self._position += end
        steps = [_parse_step(line) for line in data[:end].split(b"\n")]
        valid_steps = [step for step in steps if step is not None]
        self._steps.extend(valid_steps)
        return valid_steps


def _parse_step(line: bytes) -> StepFigures | None:
    """Return the metrics of a training step, or None for other records and damaged or incomplete lines.

    Only records of steps have `seconds`. A foreign trainer may print no loss or norm. They are then 0, which the
    driver's rules ignore.
    """
    try:
        record = strict_json.loads(line, max_bytes=_METRICS_READ_BYTES)
        step = strict_json.to_float(record["step"])
        seconds = strict_json.to_float(record["seconds"])
        loss = float(record.get("loss", 0.0))
        grad_norm = float(record.get("grad_norm", 0.0))
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    if not 0 <= step < _MAX_STEP or not 0 <= seconds < _MAX_STEP_SECONDS:
        return None
    return StepFigures(int(step), loss, grad_norm, seconds)
