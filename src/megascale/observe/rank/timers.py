"""Timers of a rank: durations and waits of the actions of its schedule, measured without waiting for the device.

Begin and end of an action are marks. On a CPU a mark is a time of the host's clock. On a GPU it is a pooled CUDA event
(device_timers.py), which is read long after it has completed. A row holds two marks and describes what lies between
them. The rows of every step are summed to roll-ups, one per kind of action and axis. The rows of sampled steps become
spans as well.

Work on other streams of the device (weight gradients on the side stream, NCCL's kernels) is visible only when the main
stream waits for it. Operations in a CUDA graph are visible only as one total.

Roll-ups are computed in plain Python: a step has a dozen to some thousand rows, and for so few rows numpy functions,
whose code has left the caches since the last step, are slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from megascale.core.spans import WAIT_KINDS, Recorder, SpanAxis, SpanKind
from megascale.observe.store.frames import ROLLUP, ROLLUPS, SPAN, SPANS

Array = np.ndarray[Any, Any]

# Fields of a row: kind, axis, chunk, micro-batch, awaited rank, bytes, kind of the action around a wait (-1: none),
# start, end, duration on the host. Times are nanoseconds. It is a plain tuple because a step makes thousands of rows.
Row = tuple[int, int, int, int, int, int, int, int, int, int]

PERIOD_NS = 500_000_000  # rows are written at least this often, even within a step, so that a crash loses little
_MAX_ROWS = 8192  # rows of a block; an evaluation may have very many rows
_STEP_KEY = SpanKind.STEP << 8  # key of the step's roll-up in `roll_up`
# Actions that are not part of a step; waits within them do not count as waits of the step.
_BETWEEN_STEPS = (SpanKind.EVALUATE, SpanKind.CHECKPOINT_SAVE, SpanKind.GARBAGE)


def roll_up(rows: Sequence[Row]) -> Array:
    """Return ROLLUP records of rows: one per kind and axis, sorted by kind and axis.

    A wait adds to its own record, to `waited_ns` of the action around it, and to `waited_ns` of the step. The rows of
    that action may be in another call, so a record may have waits only. Readers add records with the same kind and
    axis.
    """
    # Keys are kind << 8 | axis. Values: count, total, longest, duration on the host, bytes, first start, last end.
    sums: dict[int, list[int]] = {}
    waited: dict[int, int] = {}  # nanoseconds of waits by the key of the action around them
    for kind, axis, _, _, _, nbytes, parent, start, end, host_duration in rows:
        duration = end - start
        key = kind << 8 | axis
        totals = sums.get(key)
        if totals is None:
            sums[key] = [1, duration, duration, host_duration, nbytes, start, end]
        else:
            # Updates in place, in the order of the values above.
            totals[0] += 1
            totals[1] += duration
            totals[3] += host_duration
            totals[4] += nbytes
            if duration > totals[2]:
                totals[2] = duration
            if start < totals[5]:
                totals[5] = start
            if end > totals[6]:
                totals[6] = end
        if kind in WAIT_KINDS:
            if parent >= 0:
                waited[parent << 8] = waited.get(parent << 8, 0) + duration
            if parent not in _BETWEEN_STEPS:
                waited[_STEP_KEY] = waited.get(_STEP_KEY, 0) + duration
    records = []
    for key in sorted(sums.keys() | waited.keys()):
        count, total, longest, host_ns, nbytes, first, last = sums.get(key, (0,) * 7)
        kind, axis = key >> 8, key & 255
        records.append((kind, axis, 0, count, total, waited.get(key, 0), longest, host_ns, nbytes, first, last))
    return np.array(records, ROLLUP)


def make_count_rollups(counts: Sequence[tuple[int, int, int, int]]) -> Array:
    """Return ROLLUP records of counted events, such as garbage collections.

    Args:
        counts: kind, count, total nanoseconds on the host, and nanoseconds of the longest event.
    """
    records = [(kind, 0, 0, count, ns, 0, longest, ns, 0, 0, 0) for kind, count, ns, longest in counts]
    return np.array(records, ROLLUP)


def make_spans(rows: Sequence[Row]) -> Array:
    """Return SPAN records of rows."""
    return np.array([(row[0], row[1], row[2], row[3], row[4], 0, row[5], row[7], row[8]) for row in rows], SPAN)


class StepTotals:
    """Durations of a step, from the roll-ups that have been added.

    Attributes:
        seconds: time from the step's first operation to its last.
        own_seconds: the same without waits for other ranks, for samples and for the copy of a checkpoint.
        waits: seconds of waits for other ranks by axis, and of waits for samples as "samples".
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.seconds = 0.0
        self.own_seconds = 0.0
        self.waits: dict[str, float] = {}

    def add(self, rollups: Array) -> None:
        """Add ROLLUP records of the step."""
        for kind, axis, _, _, total_ns, waited_ns, *_ in rollups.tolist():
            total, waited = total_ns / 1e9, waited_ns / 1e9
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
    """The receiver of a rank's records. Its methods never wait."""

    def write(self, kind: int, step: int, records: Array, error_ns: int) -> None:
        """Write records (store/frames.py) of one step, or drop and count them if there is no space.

        Args:
            kind: ROLLUPS or SPANS.
            error_ns: largest error of the records' times.
        """

    def is_requested(self, step: int) -> bool:
        """Return whether all spans of a step were requested."""

    def mark_sampled(self, step: int) -> None:
        """Announce the begin of a step whose spans are all recorded; 0 announces its end."""


class NullSink:
    """A sink that drops all records."""

    def write(self, kind: int, step: int, records: Array, error_ns: int) -> None: ...

    def is_requested(self, step: int) -> bool:
        return False

    def mark_sampled(self, step: int) -> None: ...


class Block:
    """Rows of one step that are written together.

    Attributes:
        is_sampled: the rows are also written as spans.
        is_last: the step has ended, so no further block of it follows.
        rows: rows (`Row`) without the duration on the host, and with marks in place of times.
        counts: arguments of `make_count_rollups`.
    """

    __slots__ = ("counts", "is_last", "is_sampled", "rows", "step")

    def __init__(self, step: int, is_sampled: bool) -> None:
        self.step = step
        self.is_sampled = is_sampled
        self.is_last = False
        self.rows: list[tuple[Any, ...]] = []
        self.counts: list[tuple[int, int, int, int]] = []


class Timers(Recorder):
    """A recorder (core/spans.py::Recorder) on the host's clock, for ranks that compute on their host.

    Args:
        sink: receives roll-ups and spans.
        every: steps between two sampled steps; 0: only steps that the sink requests are sampled.

    Attributes:
        last_totals: totals of the newest complete step.
    """

    def __init__(self, sink: SpanSink | None = None, every: int = 0) -> None:
        self.sink = sink or NullSink()
        self.every = every
        self.last_totals: StepTotals | None = None
        self._totals = StepTotals(0)
        self._block = Block(0, is_sampled=False)
        self._action: tuple[int, int, int] | None = None  # kind, chunk and micro-batch of the current action
        self._action_start: Any = None  # mark
        self._step_start: Any = None  # mark
        self._block_begin_ns = time.perf_counter_ns()

    mark = staticmethod(time.perf_counter_ns)

    # Methods of Recorder ------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """See Recorder."""
        self._close_block()
        is_sampled = (bool(self.every) and step % self.every == 0) or self.sink.is_requested(step)
        self._block = Block(step, is_sampled)
        if is_sampled:
            self.sink.mark_sampled(step)
        self._action = None
        self._step_start = self.mark()

    def end_step(self) -> None:
        """See Recorder."""
        if self._step_start is not None:
            self._add_row(SpanKind.STEP, 0, -1, -1, -1, 0, -1, self._step_start, self.mark())
            self._step_start = None
        self._block.is_last = True
        if self._block.is_sampled:
            self.sink.mark_sampled(0)
        self._close_block()

    def begin_action(self, kind: int, chunk: int = -1, microbatch: int = -1) -> None:
        """See Recorder."""
        self._action = (kind, chunk, microbatch)
        self._action_start = self.mark()

    def end_action(self) -> None:
        """See Recorder."""
        if self._action is None:
            return
        kind, chunk, microbatch = self._action
        self._action = None
        self._add_row(kind, 0, chunk, microbatch, -1, 0, -1, self._action_start, self.mark())
        if time.perf_counter_ns() - self._block_begin_ns > PERIOD_NS:
            self._close_block()

    def record_wait(self, since: Any, kind: int, axis: int = 0, waited_on: int = -1) -> None:
        """See Recorder."""
        parent, chunk, microbatch = self._action or (-1, -1, -1)
        self._add_row(kind, axis, chunk, microbatch, waited_on, 0, parent, since, self.mark())

    def begin_transfer(self, axis: int, nbytes: int) -> Any:
        """See Recorder."""
        return self.mark()

    def end_transfer(self, since: Any, axis: int, nbytes: int, waited_on: int = -1) -> None:
        """See Recorder."""
        _, chunk, microbatch = self._action or (-1, -1, -1)
        self._add_row(SpanKind.TRANSFER, axis, chunk, microbatch, waited_on, nbytes, -1, since, self.mark())

    def record_count(self, kind: int, count: int, nanoseconds: int = 0, longest: int = 0) -> None:
        """See Recorder. The counts are written with the step's rows."""
        self._block.counts.append((kind, count, nanoseconds, longest))

    # Writing of rows ----------------------------------------------------------------------------------------------

    def _add_row(self, *row: Any) -> None:
        """Add a row unless one of its marks is missing.

        Args:
            row: kind, axis, chunk, micro-batch, awaited rank, bytes, kind of the action around a wait, start and end.
                The last two are marks; -1 means "none".
        """
        start, end = row[-2:]
        if start is None or end is None:
            return
        rows = self._block.rows
        rows.append(row)
        if len(rows) >= _MAX_ROWS:
            self._close_block()

    def _close_block(self) -> None:
        """Process the current block unless it is empty, and begin another block of the same step."""
        block = self._block
        self._block_begin_ns = time.perf_counter_ns()
        self._block = Block(block.step, block.is_sampled)
        if block.rows:
            self._process_block(block)

    def _process_block(self, block: Block) -> None:
        """Write a block. Its marks are times of the host, so the duration on the host is the duration."""
        rows = [(*row, row[8] - row[7]) for row in block.rows]  # fields 7 and 8 are start and end
        self._write_rows(block, rows, error_ns=0)  # type: ignore[arg-type]

    def _write_rows(self, block: Block, rows: list[Row], error_ns: int) -> None:
        """Write the rows of a block, whose times are of the host's monotonic clock with errors up to `error_ns`."""
        rollups = roll_up(rows)
        if block.counts:
            rollups = np.concatenate([rollups, make_count_rollups(block.counts)])
        if block.step != self._totals.step:
            self._totals = StepTotals(block.step)
        self._totals.add(rollups)
        if block.is_last:
            self.last_totals = self._totals
        self.sink.write(ROLLUPS, block.step, rollups, error_ns)
        if block.is_sampled:
            self.sink.write(SPANS, block.step, make_spans(rows), error_ns)

    def collect(self) -> None:
        """Write the rows whose times are known; called between steps."""

    def close(self) -> None:
        """Write the remaining rows."""
        self._close_block()
