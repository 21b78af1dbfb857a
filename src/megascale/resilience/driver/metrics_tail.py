"""The last lines of a run's metrics as they grow: what the rules need of losses and step times."""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from typing import BinaryIO

from megascale.resilience.rules.view import Metric

KEPT = 400
_CHUNK = 1 << 20  # bytes read at a time; of a longer file only the end


class MetricsTail:
    """Follows `RUN/metrics.jsonl`; a resumed run rewrites the file, which is noticed."""

    def __init__(self, run: Path) -> None:
        self.file = run / "metrics.jsonl"
        self._steps: deque[Metric] = deque(maxlen=KEPT)
        self._inode = self._at = 0

    def read(self) -> list[Metric]:
        """The last steps' metrics, oldest first."""
        try:
            with open(self.file, "rb") as file:
                self._read_new(file)
        except OSError:
            pass
        return list(self._steps)

    def _read_new(self, file: BinaryIO) -> None:
        state = os.fstat(file.fileno())
        if state.st_ino != self._inode or state.st_size < self._at:
            self._inode, self._at = state.st_ino, max(0, state.st_size - _CHUNK)
            self._steps.clear()
        file.seek(self._at)
        data = file.read(_CHUNK)
        complete = data.rpartition(b"\n")[0]  # a last line without its end is still being written
        self._at += len(complete) + 1 if complete else 0
        for line in complete.splitlines():
            metric = _metric(line)
            if metric is not None:
                self._steps.append(metric)


def _metric(line: bytes) -> Metric | None:
    """A training step's metrics; None for other lines, and for the piece of a line that reading began in."""
    try:
        record = json.loads(line)
        return Metric(int(record["step"]), float(record["loss"]), float(record["grad_norm"]), float(record["seconds"]))
    except (ValueError, KeyError, TypeError):
        return None
