"""The metrics of a run as columns, one row a step, and series of them that fit a screen."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from megascale.core.strict_json import to_float
from megascale.observe.dashboard.record_tail import RecordTail

_MOST_KEYS = 300
_MOST_STEP = 1 << 53
Series = dict[str, list[float | None]]


class MetricColumns:
    """Rows in the order they were written. A run that goes back to an earlier step writes later steps again: the
    rows written first are then `redone`, and series leave them out.

    Attributes:
        tail: the file.
        rows: how many there are.
        latest: each key's newest value.
    """

    def __init__(self, file: Path) -> None:
        self.tail = RecordTail(file)
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self.version = 0
        self.latest: dict[str, float] = {}
        self._columns: dict[str, array[float]] = {}
        self._cache: tuple[int, dict[str, np.ndarray[Any, Any]]] = (-1, {})

    def refresh(self) -> int:
        """Read what is new; how many rows."""
        anew, records = self.tail.read_new_records()
        if anew:
            self._clear()
        added = 0
        for record in records:
            step = to_float(record.get("step"))
            if not 0 <= step < _MOST_STEP:
                self.tail.damaged += 1
                continue
            for key, value in record.items():
                found = to_float(value)
                known = self._columns.get(key)
                # Text that is no number is no metric; a number that is none (nan) is one.
                if known is None:
                    if isinstance(value, str | bool | list | dict | None) or len(self._columns) >= _MOST_KEYS:
                        continue
                    known = self._columns[str(key)[:100]] = array("d", [math.nan]) * self.rows
                known.append(found)
                self.latest[key] = found
            self.rows += 1
            added += 1
            for column in self._columns.values():
                if len(column) < self.rows:
                    column.append(math.nan)
                elif len(column) > self.rows:  # keys that are one once cut short
                    del column[self.rows :]
        self.version += bool(added or anew)
        return added

    @property
    def keys(self) -> list[str]:
        """Names of metrics."""
        return [key for key in self._columns if key not in ("step", "time")]

    def read_columns(self) -> dict[str, np.ndarray[Any, Any]]:
        """All columns as arrays, with `redone`: rows whose step was written again later."""
        if self._cache[0] != self.version:
            found = {key: np.array(column) for key, column in self._columns.items()}
            steps = found.get("step", np.zeros(0))
            # A row counts unless some later row has its step, or an earlier one: training went back behind it. An
            # evaluation after its step has the same step and no loss.
            trained = ~np.isnan(found["loss"]) if "loss" in found else np.ones(len(steps), bool)
            behind = np.full(len(steps) + 1, np.inf)
            behind[:-1] = np.where(trained, steps, np.inf)
            least_after = np.minimum.accumulate(behind[::-1])[::-1][1:]
            found["redone"] = (least_after <= steps) & (trained | (least_after < steps)) if len(steps) else steps > 0
            self._cache = (self.version, found)
        return self._cache[1]

    def make_series(
        self, keys: list[str], x: str, points: int, low: float | None = None, high: float | None = None
    ) -> dict[str, Series]:
        """Each key as at most `points` buckets along `x`: x, mean, low and high of each.

        Args:
            x: step, tokens, or time.
            low, high: of x; None: all there is.
        """
        columns = self.read_columns()
        found: dict[str, Series] = {}
        if x not in columns:
            return {key: {"x": [], "mean": [], "low": [], "high": []} for key in keys}
        for key in keys:
            ys = columns.get(key)
            if ys is None:
                continue
            # Infinite values are shown as gaps, as those that are none.
            good = np.isfinite(ys) & np.isfinite(columns[x]) & ~columns["redone"]
            if low is not None:
                good &= columns[x] >= low
            if high is not None:
                good &= columns[x] <= high
            found[key] = _buckets(columns[x][good], ys[good], points)
        return found

    def nonfinite(self, key: str) -> list[int]:
        """The last steps whose value of `key` was written and was no finite number."""
        columns = self.read_columns()
        if key not in columns or "seconds" not in columns:
            return []
        wrong = ~np.isfinite(columns[key]) & ~np.isnan(columns["seconds"]) & ~columns["redone"]
        return [int(step) for step in columns["step"][wrong][-20:]]


def _buckets(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], points: int) -> Series:
    if len(x) > points:
        edges = np.linspace(0, len(x), points + 1).astype(np.int64)
        starts, counts = edges[:-1], np.diff(edges)
        middle = np.minimum((edges[:-1] + edges[1:]) // 2, len(x) - 1)
        means = np.add.reduceat(y, starts) / counts
        lows, highs, x = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts), x[middle]
    else:
        means = lows = highs = y
    return {"x": x.tolist(), "mean": _short(means), "low": _short(lows), "high": _short(highs)}


def _short(values: np.ndarray[Any, Any]) -> list[float | None]:
    """To six digits: enough for a screen."""
    return [float(f"{value:.6g}") for value in values.tolist()]
