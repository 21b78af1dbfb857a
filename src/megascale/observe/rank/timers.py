"""Timers of a rank: what its schedule's actions take and what they wait for, told from each other, without a wait.

On a CPU a mark is the host's clock. On a GPU it is a CUDA event of a pool (device_timers.py), which is read when it has
long happened. Marks make rows, rows make roll-ups for every step and spans for the steps that are kept.

What is not seen: what runs on the device's other streams at the same time (weight gradients on the side stream, NCCL's
kernels) is seen only where the main stream waits for it; of operations captured in a CUDA graph nothing but the whole.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np

from megascale.core.spans import SpanKind
from megascale.observe.rank.rollup import Row, StepTotals, counts, roll_up, spans_of
from megascale.observe.store.frames import ROLLUPS, SPANS

_MOST_ROWS = 8192  # of a block: an evaluation may have very many
PERIOD_NS = 500_000_000  # a long step is told in parts at least so often, so that a crash loses no more


class SpanSink(Protocol):
    """Where a rank's frames go; it never waits."""

    def write(self, kind: int, step: int, records: np.ndarray[Any, Any], error_ns: int) -> None:
        """Take records (store/frames.py) of one step; what there is no room for is dropped and counted."""

    def wants(self, step: int) -> bool:
        """Whether somebody has asked for all spans of that step."""

    def keeps(self, step: int) -> None:
        """A step begins of which all spans are kept; 0: it has ended."""


class Nowhere:
    """Takes nothing."""

    def write(self, kind: int, step: int, records: np.ndarray[Any, Any], error_ns: int) -> None: ...

    def wants(self, step: int) -> bool:
        return False

    def keeps(self, step: int) -> None: ...


class Block:
    """Rows of one step, not yet told. `kept`: whether their spans are."""

    __slots__ = ("counts", "ended", "kept", "rows", "step")

    def __init__(self, step: int, kept: bool) -> None:
        self.step, self.kept, self.ended = step, kept, False
        self.rows: list[tuple[Any, ...]] = []
        self.counts: list[tuple[int, int, int, int]] = []  # kind, count, nanoseconds, longest


class Timers:
    """A recorder (core/spans.py::Recorder) on the host's clock: for gloo, where the host does the work itself.

    Args:
        sink: where roll-ups and spans go.
        every: steps from one whose spans are kept to the next; 0: none unless the sink wants it.

    Attributes:
        last: totals of the newest step that is known whole.
    """

    def __init__(self, sink: SpanSink | None = None, every: int = 0) -> None:
        self.sink, self.every = sink or Nowhere(), every
        self.last: StepTotals | None = None
        self._totals = StepTotals(0)
        self._block = Block(0, False)
        self._open: tuple[int, int, int] | None = None  # kind, chunk, micro-batch
        self._since: Any = None
        self._step_since: Any = None
        self._told = time.perf_counter_ns()

    mark = staticmethod(time.perf_counter_ns)

    # the recorder -------------------------------------------------------------------------------------------------

    def step_begins(self, step: int) -> None:
        """See Recorder."""
        self._tell()
        kept = (bool(self.every) and step % self.every == 0) or self.sink.wants(step)
        self._block = Block(step, kept)
        if kept:
            self.sink.keeps(step)
        self._open = None
        self._step_since = self.mark()

    def step_ended(self) -> None:
        """See Recorder."""
        if self._step_since is not None:
            self._row(SpanKind.STEP, 0, -1, -1, -1, 0, -1, self._step_since, self.mark())
            self._step_since = None
        self._block.ended = True
        if self._block.kept:
            self.sink.keeps(0)
        self._tell()

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
        self._row(kind, 0, chunk, microbatch, -1, 0, -1, self._since, self.mark())
        if time.perf_counter_ns() - self._told > PERIOD_NS:
            self._tell()

    def record_wait(self, since: Any, kind: int, axis: int = 0, waited_on: int = -1) -> None:
        """See Recorder."""
        parent, chunk, microbatch = self._open or (-1, -1, -1)
        self._row(kind, axis, chunk, microbatch, waited_on, 0, parent, since, self.mark())

    def begin_transfer(self, axis: int, nbytes: int) -> Any:
        """See Recorder."""
        return self.mark()

    def landed(self, since: Any, axis: int, nbytes: int, waited_on: int = -1) -> None:
        """See Recorder."""
        _, chunk, microbatch = self._open or (-1, -1, -1)
        self._row(SpanKind.TRANSFER, axis, chunk, microbatch, waited_on, nbytes, -1, since, self.mark())

    def counted(self, kind: int, count: int, nanoseconds: int = 0, longest: int = 0) -> None:
        """See Recorder; told with the step's rows."""
        self._block.counts.append((kind, count, nanoseconds, longest))

    # telling ------------------------------------------------------------------------------------------------------

    def _row(self, *row: Any) -> None:
        """kind, axis, chunk, micro-batch, waited on, bytes, parent's kind, start, end."""
        if row[-2] is None or row[-1] is None:
            return
        rows = self._block.rows
        rows.append(row)
        if len(rows) >= _MOST_ROWS:
            self._tell()

    def _tell(self) -> None:
        """Close the block and begin another of the same step."""
        block = self._block
        self._told = time.perf_counter_ns()
        self._block = Block(block.step, block.kept)
        if block.rows:
            self._closed(block)

    def _closed(self, block: Block) -> None:
        self._emit(block, [(*row, row[8] - row[7]) for row in block.rows], 0)  # type: ignore[misc]

    def _emit(self, block: Block, rows: list[Row], error_ns: int) -> None:
        """Rows with times of the host's monotonic clock."""
        rollups = roll_up(rows)
        if block.counts:
            rollups = np.concatenate([rollups, counts(block.counts)])
        if block.step != self._totals.step:
            self._totals = StepTotals(block.step)
        self._totals.add(rollups)
        if block.ended:
            self.last = self._totals
        self.sink.write(ROLLUPS, block.step, rollups, error_ns)
        if block.kept:
            self.sink.write(SPANS, block.step, spans_of(rows), error_ns)

    def collect(self) -> None:
        """Tell what is known by now; called between steps."""

    def close(self) -> None:
        """Tell what is left."""
        self._tell()
