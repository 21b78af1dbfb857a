"""Timers on a GPU: marks are pooled CUDA events, read once they have completed; the host never waits for one.

The device's clock is aligned with the host's by bounds (clock_bounds.py): an event completes after the host enqueues it
and before the host observes it. The upper bound is tight when the host runs ahead of the device, the lower bound when
the host lags behind. Times between events come from `elapsed_time`, so that only one anchor has to be aligned.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from megascale.core.spans import SpanKind
from megascale.observe.clock_bounds import ClockBounds
from megascale.observe.rank.timers import Block, SpanSink, Timers

_NEVER = -1  # time of a mark that was dropped
_MAX_PENDING_BLOCKS = 64  # blocks whose events have not completed; further blocks are dropped


class Mark:
    """A point in the main stream. `device_ns`: its time once known; `host_ns`: when the host enqueued it."""

    __slots__ = ("device_ns", "event", "host_ns")

    def __init__(self, event: torch.cuda.Event, host_ns: int) -> None:
        self.event: torch.cuda.Event | None = event
        self.host_ns = host_ns
        self.device_ns = 0


class _PendingBlock:
    """A closed block with its marks, and the time at which the last of them was first seen to have completed."""

    __slots__ = ("block", "marks", "seen_ns")

    def __init__(self, block: Block, marks: list[Mark]) -> None:
        self.block = block
        self.marks = marks
        self.seen_ns = 0

    def poll(self) -> bool:
        """Return whether the last event has completed, and record when that was first seen."""
        if not self.seen_ns:
            last = self.marks[-1].event
            assert last is not None
            if last.query():
                self.seen_ns = time.perf_counter_ns()
        return bool(self.seen_ns)


class DeviceTimers(Timers):
    """A recorder on the main stream of a GPU.

    Args:
        device: whose current stream is timed.
        sink, sample_every: as `sink` and `every` of Timers.

    Attributes:
        dropped: blocks that were dropped because the device was too far behind.
    """

    def __init__(self, device: torch.device, sink: SpanSink | None = None, sample_every: int = 0) -> None:
        super().__init__(sink, sample_every)
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._pool: list[torch.cuda.Event] = []
        self._marks: list[Mark] = []
        self._pending: deque[_PendingBlock] = deque()
        self._clock = ClockBounds()
        self.dropped = 0
        # The device is idle, so this single synchronisation costs nothing and bounds the clock offset from both sides.
        first = self.mark()
        assert first is not None
        self._stream.synchronize()
        synchronised = time.perf_counter_ns()
        self._marks = []
        self._anchor = first  # the newest mark whose time is known
        self._newest = first
        # The first mark is time 0 of the device's clock.
        self._clock.add_lower_bound(first.device_ns, first.host_ns - first.device_ns)
        self._clock.add_upper_bound(first.device_ns, synchronised - first.device_ns)

    def mark(self) -> Mark | None:  # type: ignore[override]
        """See Recorder. Return None within a capture, where the event would become a part of the graph."""
        if torch.cuda.is_current_stream_capturing():
            return None
        if self._pool:
            event = self._pool.pop()
        else:
            event = torch.cuda.Event(enable_timing=True)
        mark = Mark(event, time.perf_counter_ns())
        event.record(self._stream)
        self._marks.append(mark)
        self._newest = mark
        return mark

    def begin_step(self, step: int) -> None:
        """See Recorder."""
        self._stream = torch.cuda.current_stream(self._device)
        super().begin_step(step)

    def begin_action(self, kind: int, chunk: int = -1, microbatch: int = -1) -> None:
        """See Recorder."""
        super().begin_action(kind, chunk, microbatch)
        if self._pending:
            self._pending[0].poll()  # an early observation gives tighter bounds of the clock offset

    def begin_transfer(self, axis: int, nbytes: int) -> Any:
        """See Recorder. The start is marked in sampled steps."""
        return self.mark() if self._block.sampled else None

    def end_transfer(self, since: Any, axis: int, nbytes: int, waited_on: int = -1) -> None:
        """See Recorder. Without a start mark, the row has zero duration and records only the bytes."""
        last = self._newest  # end of the wait that has just ended
        _, chunk, microbatch = self._open or (-1, -1, -1)
        self._add_row(SpanKind.TRANSFER, axis, chunk, microbatch, waited_on, nbytes, -1, since or last, last)

    # reading ------------------------------------------------------------------------------------------------------

    def _process(self, block: Block) -> None:
        """Queue a closed block until its events have completed."""
        if not self._marks:
            return
        self._pending.append(_PendingBlock(block, self._marks))
        self._marks = []
        self.collect()
        if len(self._pending) > _MAX_PENDING_BLOCKS:
            for mark in self._pending.pop().marks:
                mark.device_ns = _NEVER
                self._recycle(mark)
            self.dropped += 1

    def collect(self) -> None:
        """Write the blocks whose last event has completed."""
        while self._pending and self._pending[0].poll():
            self._read(self._pending.popleft())

    def _read(self, pending: _PendingBlock) -> None:
        anchor = self._anchor
        assert anchor.event is not None
        tightest_ns = 0  # device time of the mark with the largest lower bound
        lower_bound = -1e30
        for mark in pending.marks:
            assert mark.event is not None
            mark.device_ns = anchor.device_ns + round(anchor.event.elapsed_time(mark.event) * 1e6)
            if mark.host_ns - mark.device_ns > lower_bound:
                tightest_ns = mark.device_ns
                lower_bound = mark.host_ns - mark.device_ns
        last = pending.marks[-1]
        self._clock.add_lower_bound(tightest_ns, lower_bound)
        self._clock.add_upper_bound(last.device_ns, pending.seen_ns - last.device_ns)
        for mark in pending.marks[:-1] + [anchor]:
            self._recycle(mark)
        self._anchor = last
        offset, error = self._clock.estimate(last.device_ns) or (pending.seen_ns - last.device_ns, 0)
        to_host = round(offset)
        rows = []
        for *fields, start, end in pending.block.rows:
            if start.device_ns != _NEVER and end.device_ns != _NEVER:
                rows.append((*fields, start.device_ns + to_host, end.device_ns + to_host, end.host_ns - start.host_ns))
        if rows:
            self._write(pending.block, rows, round(error))

    def _recycle(self, mark: Mark) -> None:
        if mark.event is not None:
            self._pool.append(mark.event)
            mark.event = None

    def close(self) -> None:
        """Write the blocks that have completed, and drop the others."""
        super().close()
        self.collect()
        self._pending.clear()
