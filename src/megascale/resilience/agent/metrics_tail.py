"""The last lines of a run's metrics as they grow: what the driver's rules need of losses and step times."""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from typing import BinaryIO

from megascale.resilience.protocol.agent_messages import StepFigures, Steps

KEPT = 400
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

    def look(self) -> Steps | None:
        """What is new since the last look, None if nothing is."""
        fresh: list[StepFigures] = []
        try:
            with open(self.file, "rb") as file:
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
        complete = data.rpartition(b"\n")[0]  # a last line without its end is still being written
        self._at += len(complete) + 1 if complete else 0
        fresh = [figures for line in complete.splitlines() if (figures := _figures(line)) is not None]
        self._steps.extend(fresh)
        return fresh


def _figures(line: bytes) -> StepFigures | None:
    """What a training step gave; None for other lines, and for the piece of a line that reading began in."""
    try:
        r = json.loads(line)
        return StepFigures(max(0, int(r["step"])), float(r["loss"]), float(r["grad_norm"]), float(r["seconds"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
