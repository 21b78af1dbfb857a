"""The last lines of a run's metrics as they grow: what the driver's rules need of losses and step times."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import BinaryIO

from megascale.core import strict_json
from megascale.core.untrusted_files import open_regular
from megascale.resilience.protocol.agent_messages import StepFigures, Steps

KEPT = 400
_LONGEST = 1e9  # seconds; a longer step is damage
_CHUNK = 1 << 20  # bytes read at a time; of a longer file only the end


class MetricsTail:
    """Follows `metrics.jsonl` in the folder that trainers write to; a resumed run rewrites it, which is noticed."""

    def __init__(self, run: Path) -> None:
        self.file = run / "metrics.jsonl"
        self._steps: deque[StepFigures] = deque(maxlen=KEPT)
        self._inode = self._at = 0
        self._anew = True

    def begin_session(self) -> None:
        """Another driver listens: it is told the last steps again."""
        self._anew = True

    def read_new_steps(self) -> Steps | None:
        """What is new since the last look, None if nothing is."""
        fresh: list[StepFigures] = []
        try:
            with open(self.file, "rb", opener=open_regular) as file:
                fresh = self._read_new(file)
        except OSError:
            pass
        anew, self._anew = self._anew, False
        told = tuple(self._steps if anew else fresh[-KEPT:])
        return Steps(told, anew) if told or anew else None

    def _read_new(self, file: BinaryIO) -> list[StepFigures]:
        state = os.fstat(file.fileno())
        if state.st_ino != self._inode or state.st_size < self._at:
            self._inode, self._at = state.st_ino, max(0, state.st_size - _CHUNK)
            self._steps.clear()
            self._anew = True
        file.seek(self._at)
        data = file.read(_CHUNK)
        end = data.rfind(b"\n") + 1  # a last line without its end is still being written
        if not end and len(data) == _CHUNK:
            end = _CHUNK  # no record is as long: what follows is taken up at the next line
        self._at += end
        fresh = [figures for line in data[:end].split(b"\n") if (figures := _figures(line)) is not None]
        self._steps.extend(fresh)
        return fresh


def _figures(line: bytes) -> StepFigures | None:
    """Return the figures of a training step; None for other lines, damaged ones and pieces of lines."""
    try:
        record = strict_json.loads(line, max_bytes=_CHUNK)
        step, seconds = strict_json.to_float(record["step"]), strict_json.to_float(record["seconds"])
        loss, norm = float(record["loss"]), float(record["grad_norm"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    if not 0 <= step < 1 << 53 or not 0 <= seconds < _LONGEST:
        return None
    return StepFigures(int(step), loss, norm, seconds)
