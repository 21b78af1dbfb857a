"""Timers of a rank: durations and waits of its schedule's actions, measured without waiting.

On a CPU a mark is the host's clock. On a GPU it is a pooled CUDA event (device_timers.py), which is read long after it
has happened. Marks make rows; rows make roll-ups for every step, and spans for sampled steps.

Work on the device's other streams (weight gradients on the side stream, NCCL's kernels) is visible only when the main
stream waits for it. Of the operations captured in a CUDA graph only the total is visible.

Roll-ups are computed in plain Python: a step has some dozen to some thousand rows, and numpy functions that were last
called a step ago are slower than their work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from megascale.core.spans import WAIT_KINDS, Recorder, SpanAxis, SpanKind
from megascale.observe.store.frames import ROLLUP, ROLLUPS, SPAN, SPANS

Array = np.ndarray[Any, Any]

# kind, axis, chunk, micro-batch, waited on, bytes, parent's kind (-1: none), start, end, the host's time; times in ns
Row = tuple[int, int, int, int, int, int, int, int, int, int]

PERIOD_NS = 500_000_000  # a long step is written in parts at least this often, so that a crash loses no more
_MAX_ROWS = 8192  # of a block: an evaluation may have very many
_STEP_KEY = SpanKind.STEP << 8
_BETWEEN_STEPS = (SpanKind.EVALUATE, SpanKind.CHECKPOINT_SAVE, SpanKind.GARBAGE)


def roll_up(rows: Sequence[Row]) -> Array:
    """Return ROLLUP records of rows: one per kind and axis, in their order.

    A wait counts in its own record, in `waited_ns` of the action that contains it, and in that of the step. The three
    may be made in different calls: they are added.
    """
    sums: dict[int, list[int]] = {}  # count, total, longest, host's time, bytes, first, last
    waited: dict[int, int] = {}
    for kind, axis, _, _, _, nbytes, parent, start, end, host in rows:
        duration = end - start
        key = kind << 8 | axis
        entry = sums.get(key)
        if entry is None:
            sums[key] = [1, duration, duration, host, nbytes, start, end]
        else:
            entry[0] += 1
            entry[1] += duration
            entry[3] += host
            entry[4] += nbytes
            if duration > entry[2]:
                entry[2] = duration
            if start < entry[5]:
                entry[5] = start
            if end > entry[6]:
                entry[6] = end
        if kind in WAIT_KINDS:
            if parent >= 0:
                waited[parent << 8] = waited.get(parent << 8, 0) + duration
            if parent not in _BETWEEN_STEPS:
                waited[_STEP_KEY] = waited.get(_STEP_KEY, 0) + duration
    records = []
    for key in sorted(sums.keys() | waited.keys()):
        count, total, longest, host, nbytes, first, last = sums.get(key, (0,) * 7)
        records.append((key >> 8, key & 255, 0, count, total, waited.get(key, 0), longest, host, nbytes, first, last))
    return np.array(records, ROLLUP)


def make_count_rollups(counts: Sequence[tuple[int, int, int, int]]) -> Array:
    """Return ROLLUP records of counted events: (kind, count, the host's nanoseconds, the longest)."""
    return np.array([(kind, 0, 0, n, ns, 0, longest, ns, 0, 0, 0) for kind, n, ns, longest in counts], ROLLUP)


def make_spans(rows: Sequence[Row]) -> Array:
    """Return SPAN records of rows."""
    return np.array([(row[0], row[1], row[2], row[3], row[4], 0, row[5], row[7], row[8]) for row in rows], SPAN)


class StepTotals:
    """Durations of a step so far, from its roll-ups, in seconds.

    Attributes:
        step: its number.
        seconds: from its first operation to its last.
        own: time without waits for other ranks, for samples and for a checkpoint's copy.
        waits: waits for other ranks by axis, and for samples ("samples").
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.seconds = 0.0
        self.own_seconds = 0.0
        self.waits: dict[str, float] = {}

    def add(self, rollups: Array) -> None:
        """Add the roll-ups of a part of the step."""
        for row in rollups.tolist():
            kind, axis = row[0], row[1]
            total, waited = row[4] / 1e9, row[5] / 1e9
            if kind == SpanKind.STEP:
                self.seconds += total
                self.own_seconds += total - waited
            elif kind == SpanKind.CHECKPOINT_STALL:
                self.own_seconds -= total
            elif kind in WAIT_KINDS:
                if kind == SpanKind.WAIT:
                    name = SpanAxis(axis).label
                else:
                    name = "samples"
                self.waits[name] = self.waits.get(name, 0.0) + total


class SpanSink(Protocol):
    """The receiver of a rank's records; it never waits."""

    def write(self, kind: int, step: int, records: Array, error_ns: int) -> None:
        """Write records (store/frames.py) of one step, or drop and count them."""

    def is_requested(self, step: int) -> bool:
        """Return whether all spans of a step were requested."""

    def mark_sampled(self, step: int) -> None:
        """Announce the begin of a step whose spans are all recorded; 0 announces its end."""


class Nowhere:
    """A sink that drops everything."""

    def write(self, kind: int, step: int, records: Array, error_ns: int) -> None: ...

    def is_requested(self, step: int) -> bool:
        return False

    def mark_sampled(self, step: int) -> None: ...


class Block:
    """Rows of one step that are not written yet. `sampled`: their spans are recorded."""

    __slots__ = ("counts", "ended", "rows", "sampled", "step")

    def __init__(self, step: int, sampled: bool) -> None:
        self.step = step
        self.sampled = sampled
        self.ended = False
        self.rows: list[tuple[Any, ...]] = []
        self.counts: list[tuple[int, int, int, int]] = []  # kind, count, nanoseconds, longest


class Timers(Recorder):
    """A recorder (core/spans.py::Recorder) on the host's clock: for gloo, where the host does the work itself.

    Args:
        sink: receives roll-ups and spans.
        every: interval of sampled steps; 0: only steps that the sink requests.

    Attributes:
        last: totals of the newest complete step.
    """

    def __init__(self, sink: SpanSink | None = None, every: int = 0) -> None:
        self.sink = sink or Nowhere()
        self.every = every
        self.last: StepTotals | None = None
        self._totals = StepTotals(0)
        self._block = Block(0, sampled=False)
        self._open: tuple[int, int, int] | None = None  # kind, chunk, micro-batch
        self._since: Any = None
        self._step_since: Any = None
        self._block_end = time.perf_counter_ns()

    mark = staticmethod(time.perf_counter_ns)

    # the recorder -------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """See Recorder."""
        self._close_block()
        is_sampled = (bool(self.every) and step % self.every == 0) or self.sink.is_requested(step)
        self._block = Block(step, is_sampled)
        if is_sampled:
            self.sink.mark_sampled(step)
        self._open = None
        self._step_since = self.mark()

    def end_step(self) -> None:
        """See Recorder."""
        if self._step_since is not None:
            self._add_row(SpanKind.STEP, 0, -1, -1, -1, 0, -1, self._step_since, self.mark())
            self._step_since = None
        self._block.ended = True
        if self._block.sampled:
            self.sink.mark_sampled(0)
        self._close_block()

    def begin_action(self, kind: int, chunk: int = -1, microbatch: int = -1) -> None:
        """See Recorder."""
        self._open = (kind, chunk, microbatch)
        self._since = self.mark()

    def end_action(self) -> None:
        """See Recorder."""
        if self._open is None:
            return
        kind, chunk, microbatch = self._open
        self._open = None
        self._add_row(kind, 0, chunk, microbatch, -1, 0, -1, self._since, self.mark())
        if time.perf_counter_ns() - self._block_end > PERIOD_NS:
            self._close_block()

    def record_wait(self, since: Any, kind: int, axis: int = 0, waited_on: int = -1) -> None:
        """See Recorder."""
        parent, chunk, microbatch = self._open or (-1, -1, -1)
        self._add_row(kind, axis, chunk, microbatch, waited_on, 0, parent, since, self.mark())

    def begin_transfer(self, axis: int, nbytes: int) -> Any:
        """See Recorder."""
        return self.mark()

    def end_transfer(self, since: Any, axis: int, nbytes: int, waited_on: int = -1) -> None:
        """See Recorder."""
        _, chunk, microbatch = self._open or (-1, -1, -1)
        self._add_row(SpanKind.TRANSFER, axis, chunk, microbatch, waited_on, nbytes, -1, since, self.mark())

    def record_count(self, kind: int, count: int, nanoseconds: int = 0, longest: int = 0) -> None:
        """See Recorder; written with the step's rows."""
        self._block.counts.append((kind, count, nanoseconds, longest))

    # writing ------------------------------------------------------------------------------------------------------

    def _add_row(self, *row: Any) -> None:
        """Add a row of kind, axis, chunk, micro-batch, waited on, bytes, parent's kind, start and end."""
        if row[-2] is None or row[-1] is None:
            return
        rows = self._block.rows
        rows.append(row)
        if len(rows) >= _MAX_ROWS:
            self._close_block()

    def _close_block(self) -> None:
        """Close the block and begin another of the same step."""
        block = self._block
        self._block_end = time.perf_counter_ns()
        self._block = Block(block.step, block.sampled)
        if block.rows:
            self._process(block)

    def _process(self, block: Block) -> None:
        """Write a closed block."""
        self._write(block, [(*row, row[8] - row[7]) for row in block.rows], error_ns=0)  # type: ignore[misc]

    def _write(self, block: Block, rows: list[Row], error_ns: int) -> None:
        """Write rows with times of the host's monotonic clock."""
        rollups = roll_up(rows)
        if block.counts:
            rollups = np.concatenate([rollups, make_count_rollups(block.counts)])
        if block.step != self._totals.step:
            self._totals = StepTotals(block.step)
        self._totals.add(rollups)
        if block.ended:
            self.last = self._totals
        self.sink.write(ROLLUPS, block.step, rollups, error_ns)
        if block.sampled:
            self.sink.write(SPANS, block.step, make_spans(rows), error_ns)

    def collect(self) -> None:
        """Write the rows whose times are known; called between steps."""

    def close(self) -> None:
        """Write the remaining rows."""
        self._close_block()
