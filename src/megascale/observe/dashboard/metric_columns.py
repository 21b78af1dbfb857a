"""Readers of a run's growing record files: JSON lines, and metrics as columns with series for curves."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megascale.core import strict_json
from megascale.core.strict_json import to_float
from megascale.core.untrusted_files import open_regular
from megascale.observe.dashboard.rank_values import round_values

_MAX_LINE_BYTES = 1 << 20  # a longer line is damage
_MAX_READ_BYTES = 64 << 20  # bytes that one call reads
_MAX_KEYS = 300
_MAX_NAME = 100  # characters of a metric's name
_MAX_STEP = 1 << 53  # larger integers are not exact as floats
_MAX_NONFINITE_STEPS = 20

Array = np.ndarray[Any, Any]
Series = dict[str, list[float | None]]


class RecordTail:
    """Reader of a growing file of JSON lines. Each complete line is read once; damaged lines are counted and skipped.

    Args:
        file: path of the file, which may be missing, grow, be truncated or be replaced.
        newest_bytes: the first call reads at most this many bytes from the end, or as many as the last record needs;
            None: all.

    Attributes:
        is_partial: whether older records were left out.
        damaged: number of lines so far that are not JSON objects.
        error: why the file cannot be read; empty if it can be read or is missing.
        missing: whether the file does not exist.
    """

    def __init__(self, file: Path, newest_bytes: int | None = None) -> None:
        self.file = file
        self._newest_bytes = newest_bytes
        self.error = ""
        self.missing = True
        self._reset()

    def _reset(self, inode: int = -1) -> None:
        self._offset = 0
        self._inode = inode
        self._is_in_long_line = False  # whether the next bytes are the end of a line whose begin was skipped
        self.is_partial = False
        self.damaged = 0

    def _skip_older_records(self, file: BinaryIO, size: int) -> None:
        """Continue near the end of a file of `size` bytes, after the first line break in its last `newest_bytes`.

        The bytes are increased until they contain a whole line.
        """
        if self._newest_bytes is None:
            return
        length = self._newest_bytes
        while length < min(size, _MAX_LINE_BYTES):
            file.seek(size - length)
            if file.read(length).count(b"\n") > 1:
                break
            length *= 4  # a line may be long, such as one with the counts of many experts
        if size > length:
            self._offset = size - length
            self._is_in_long_line = True
            self.is_partial = True

    def read_new_records(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was replaced, truncated or removed, and the records since the last call."""
        try:
            with open(self.file, "rb", opener=open_regular) as file:
                status = os.fstat(file.fileno())
                is_new = status.st_ino != self._inode or status.st_size < self._offset
                if is_new:
                    self._reset(status.st_ino)
                    self._skip_older_records(file, status.st_size)
                file.seek(self._offset)
                data = file.read(_MAX_READ_BYTES)
        except FileNotFoundError:
            was_present = not self.missing
            self.missing = True
            self.error = ""
            if was_present:
                self._reset()
            return was_present, []
        except OSError as error:
            self.missing = False
            self.error = str(error.strerror or error)
            return False, []
        self.missing = False
        self.error = ""
        return is_new, list(self._parse(data))

    def _parse(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the records in the next bytes of the file, and advance the offset beyond their last line."""
        lines = data.split(b"\n")
        # An incomplete last line is read when it is complete; after a crash the writer removes it.
        partial = lines.pop()
        self._offset += len(data) - len(partial)
        if self._is_in_long_line and lines:
            lines.pop(0)  # the end of the line whose begin was skipped
            self._is_in_long_line = False
        if len(partial) > _MAX_LINE_BYTES:
            # Skip the begin of the line, and count the line as damaged once.
            if not self._is_in_long_line:
                self.damaged += 1
            self._offset += len(partial)
            self._is_in_long_line = True
        for line in lines:
            if not line.strip():
                continue
            try:
                record = strict_json.loads(line, max_bytes=_MAX_LINE_BYTES)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield record
            else:
                self.damaged += 1


class MetricColumns:
    """A run's metrics in the order in which they were written.

    A run that continues from a checkpoint writes the steps after it again. The rows that were written first are then
    marked `redone`, and series leave them out.

    Attributes:
        tail: the reader of the file.
        latest: newest value of each key.
    """

    def __init__(self, file: Path, newest_bytes: int | None = None) -> None:
        self.tail = RecordTail(file, newest_bytes)
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self.latest: dict[str, float] = {}
        self._columns: dict[str, array[float]] = {}
        self._arrays: dict[str, Array] | None = None

    def refresh(self) -> int:
        """Read new records; return their number."""
        is_new_file, records = self.tail.read_new_records()
        if is_new_file:
            self._clear()
        added_count = 0
        for record in records:
            if 0 <= to_float(record.get("step")) < _MAX_STEP:
                self._add_record(record)
                added_count += 1
            else:
                self.tail.damaged += 1
        if added_count:
            self._arrays = None
        return added_count

    def _add_record(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            name = str(key)[:_MAX_NAME]
            if key not in self._columns:
                # A metric is a number, including NaN. Text that is not a number is not a metric.
                if isinstance(value, str | bool | list | dict | None) or len(self._columns) >= _MAX_KEYS:
                    continue
                self._columns[name] = array("d", [math.nan]) * self.rows
            column = self._columns[name]
            column.append(to_float(value))
            self.latest[key] = column[-1]
        self.rows += 1
        for column in self._columns.values():
            if len(column) < self.rows:
                column.append(math.nan)
            elif len(column) > self.rows:  # several long keys have the same truncated name
                del column[self.rows :]

    @property
    def keys(self) -> list[str]:
        return [key for key in self._columns if key not in ("step", "time")]

    def read_columns(self) -> dict[str, Array]:
        """Return all columns as arrays [rows], and `redone` (bool): whether a row's step was written again later."""
        if self._arrays is not None:
            return self._arrays
        arrays = {key: np.array(column) for key, column in self._columns.items()}
        steps = arrays.get("step", np.zeros(0))
        # A row is redone if a later training row has the same or an earlier step. An evaluation has the same step as
        # the training row before it, and no loss.
        if "loss" in arrays:
            is_training = ~np.isnan(arrays["loss"])
        else:
            is_training = np.ones(len(steps), bool)
        training_steps = np.append(np.where(is_training, steps, np.inf), np.inf)
        # Smallest step of all training rows after each row.
        smallest_later = np.minimum.accumulate(training_steps[::-1])[::-1][1:]
        arrays["redone"] = (smallest_later <= steps) & (is_training | (smallest_later < steps))
        self._arrays = arrays
        return arrays

    def make_series(
        self, keys: list[str], x: str, points: int, low: float | None = None, high: float | None = None
    ) -> dict[str, Series]:
        """Return each metric in at most `points` buckets along x: position, mean, smallest and largest value of each.

        Args:
            x: metric of the x axis: step, tokens or time.
            low, high: limits of x; None: all values.
        """
        columns = self.read_columns()
        if x not in columns:
            return {key: {"x": [], "mean": [], "low": [], "high": []} for key in keys}
        positions = columns[x]
        selected = np.isfinite(positions) & ~columns["redone"]
        if low is not None:
            selected &= positions >= low
        if high is not None:
            selected &= positions <= high
        series = {}
        for key in keys:
            if key in columns:
                shown = selected & np.isfinite(columns[key])  # infinite values and NaN are gaps
                series[key] = _make_buckets(positions[shown], columns[key][shown], points)
        return series

    def list_nonfinite_steps(self, key: str) -> list[int]:
        """Return the newest steps with an infinite or NaN value of a metric, at most _MAX_NONFINITE_STEPS."""
        columns = self.read_columns()
        if key not in columns or "seconds" not in columns:
            return []
        is_training = ~np.isnan(columns["seconds"])  # evaluations lack the metrics of a step
        is_nonfinite = ~np.isfinite(columns[key]) & is_training & ~columns["redone"]
        return [int(step) for step in columns["step"][is_nonfinite][-_MAX_NONFINITE_STEPS:]]


def _make_buckets(x: Array, y: Array, points: int) -> Series:
    """Return the values y at ascending positions x in at most `points` buckets of equally many values.

    A bucket has the position of its middle value.
    """
    mean = low = high = y
    if len(x) > points:
        edges = np.linspace(0, len(x), points + 1).astype(np.int64)
        starts = edges[:-1]
        mean = np.add.reduceat(y, starts) / np.diff(edges)
        low = np.minimum.reduceat(y, starts)
        high = np.maximum.reduceat(y, starts)
        x = x[np.minimum((edges[:-1] + edges[1:]) // 2, len(x) - 1)]
    return {
        "x": x.tolist(),
        "mean": round_values(mean, digits=6),
        "low": round_values(low, digits=6),
        "high": round_values(high, digits=6),
    }
