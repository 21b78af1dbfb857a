"""Roll-ups of a rank's spans: one row a kind and axis, made of the rows that a recorder kept."""

from __future__ import annotations

from typing import Any

import numpy as np

from megascale.core.spans import WAITS, SpanAxis, SpanKind
from megascale.observe.store.frames import ROLLUP, SPAN

Array = np.ndarray[Any, Any]

# Columns of a recorder's rows, int64 [n, 10].
KIND, AXIS, CHUNK, MICROBATCH, WAITED_ON, BYTES, PARENT, START, END, HOST = range(10)
_AXES = len(SpanAxis)
_KEYS = (max(SpanKind) + 1) * _AXES
_STEP = SpanKind.STEP * _AXES
_OUTSIDE = (SpanKind.EVALUATE, SpanKind.CHECKPOINT_SAVE, SpanKind.GARBAGE)  # between steps


def roll_up(rows: Array) -> Array:
    """ROLLUP records of rows [n, 10]: a record for each kind and axis that there is, in their order.

    A wait is in its own record, in `waited_ns` of the action that it lies in, and in that of the step. The three may be
    told in different calls: they add up.
    """
    keys = rows[:, KIND] * _AXES + rows[:, AXIS]
    lasted = rows[:, END] - rows[:, START]
    count = np.bincount(keys, minlength=_KEYS)

    def summed(values: Array, by: Array = keys) -> Array:
        return np.bincount(by, weights=values, minlength=_KEYS).astype(np.int64)

    waits = np.isin(rows[:, KIND], WAITS)
    inside = waits & (rows[:, PARENT] >= 0)
    waited = summed(lasted[inside], rows[inside, PARENT] * _AXES)
    waited[_STEP] += lasted[waits & ~np.isin(rows[:, PARENT], _OUTSIDE)].sum()
    present = np.flatnonzero((count > 0) | (waited > 0))
    longest, last = np.zeros(_KEYS, np.int64), np.zeros(_KEYS, np.int64)
    first = np.full(_KEYS, np.iinfo(np.int64).max)
    np.maximum.at(longest, keys, lasted)
    np.minimum.at(first, keys, rows[:, START])
    np.maximum.at(last, keys, rows[:, END])
    first[count == 0] = 0
    found = np.zeros(len(present), ROLLUP)
    found["kind"], found["axis"] = present // _AXES, present % _AXES
    found["count"], found["total_ns"], found["waited_ns"] = count[present], summed(lasted)[present], waited[present]
    found["longest_ns"], found["host_ns"] = longest[present], summed(rows[:, HOST])[present]
    found["bytes"] = summed(rows[:, BYTES])[present]
    found["first_ns"], found["last_ns"] = first[present], last[present]
    return found


def spans_of(rows: Array) -> Array:
    """SPAN records of rows [n, 10]."""
    found = np.zeros(len(rows), SPAN)
    for name, column in (
        ("kind", KIND),
        ("axis", AXIS),
        ("chunk", CHUNK),
        ("microbatch", MICROBATCH),
        ("waited_on", WAITED_ON),
        ("bytes", BYTES),
        ("start_ns", START),
        ("end_ns", END),
    ):
        found[name] = rows[:, column]
    return found


class StepTotals:
    """What a step took so far, from its roll-ups. All in seconds.

    Attributes:
        step: its number.
        seconds: from its first operation to its last.
        own: of that, what this rank did itself: without its waits for others, for samples and for a checkpoint's copy.
        waits: for other ranks by axis, and for samples ("samples").
    """

    def __init__(self, step: int) -> None:
        self.step, self.seconds, self.own = step, 0.0, 0.0
        self.waits: dict[str, float] = {}

    def add(self, rollups: Array) -> None:
        """Count a part of the step in."""
        for row in rollups.tolist():
            kind, axis, total, waited = row[0], row[1], row[4] / 1e9, row[5] / 1e9
            if kind == SpanKind.STEP:
                self.seconds += total
                self.own += total - waited
            elif kind == SpanKind.CHECKPOINT_STALL:
                self.own -= total
            elif kind in WAITS:
                name = SpanAxis(axis).label if kind == SpanKind.WAIT else "samples"
                self.waits[name] = self.waits.get(name, 0.0) + total
