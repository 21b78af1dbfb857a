"""Roll-ups of a rank's spans: one row a kind and axis, made of the rows that a recorder kept.

Plain Python: a step has some dozen to some thousand rows, and functions that nothing else has called since the step
before are slower than their work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megascale.core.spans import WAITS, SpanAxis, SpanKind
from megascale.observe.store.frames import ROLLUP, SPAN

Array = np.ndarray[Any, Any]

# kind, axis, chunk, micro-batch, waited on, bytes, parent's kind (-1: none), start, end, the host's time; times in ns
Row = tuple[int, int, int, int, int, int, int, int, int, int]

_STEP = SpanKind.STEP << 8
_OUTSIDE = (SpanKind.EVALUATE, SpanKind.CHECKPOINT_SAVE, SpanKind.GARBAGE)  # between steps


def roll_up(rows: Sequence[Row]) -> Array:
    """ROLLUP records of rows: a record for each kind and axis that there is, in their order.

    A wait is in its own record, in `waited_ns` of the action that it lies in, and in that of the step. The three may be
    told in different calls: they add up.
    """
    sums: dict[int, list[int]] = {}  # count, total, longest, host's, bytes, first, last
    waited: dict[int, int] = {}
    for kind, axis, _, _, _, nbytes, parent, start, end, host in rows:
        lasted, key = end - start, kind << 8 | axis
        one = sums.get(key)
        if one is None:
            sums[key] = [1, lasted, lasted, host, nbytes, start, end]
        else:
            one[0] += 1
            one[1] += lasted
            one[3] += host
            one[4] += nbytes
            if lasted > one[2]:
                one[2] = lasted
            if start < one[5]:
                one[5] = start
            if end > one[6]:
                one[6] = end
        if kind in WAITS:
            if parent >= 0:
                waited[parent << 8] = waited.get(parent << 8, 0) + lasted
            if parent not in _OUTSIDE:
                waited[_STEP] = waited.get(_STEP, 0) + lasted
    found = []
    for key in sorted(sums.keys() | waited.keys()):
        count, total, longest, host, nbytes, first, last = sums.get(key, (0,) * 7)
        found.append((key >> 8, key & 255, 0, count, total, waited.get(key, 0), longest, host, nbytes, first, last))
    return np.array(found, ROLLUP)


def make_count_rollups(told: Sequence[tuple[int, int, int, int]]) -> Array:
    """ROLLUP records of what was only counted: (kind, count, the host's nanoseconds, the longest)."""
    return np.array([(kind, 0, 0, n, ns, 0, longest, ns, 0, 0, 0) for kind, n, ns, longest in told], ROLLUP)


def make_spans(rows: Sequence[Row]) -> Array:
    """SPAN records of rows."""
    return np.array([(row[0], row[1], row[2], row[3], row[4], 0, row[5], row[7], row[8]) for row in rows], SPAN)


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
