"""Timers on a GPU: marks are pooled CUDA events, which are read after they have completed. The host never waits.

The device's clock is aligned with the host's clock by bounds (clock_bounds.py): an event completes after the host
enqueues it and before the host observes that it has completed. The upper bound is tight if the host runs ahead of the
device, the lower bound if the host lags behind. Times between events come from `elapsed_time`, so only one event, the
anchor, has to be aligned.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from megascale.core.spans import SpanKind
from megascale.observe.clock_bounds import ClockBounds
from megascale.observe.rank.timers import Block, SpanSink, Timers

_DROPPED = -1  # time of a mark that was dropped
_MAX_PENDING_BLOCKS = 64  # blocks whose events have not completed; further blocks are dropped


class Mark:
    """A point in the main stream.

    Attributes:
        event: the CUDA event; None after it has returned to the pool.
        host_ns: time at which the host enqueued the event.
        device_ns: time of the event on the device's clock, 0 until it is known.
    """

    __slots__ = ("device_ns", "event", "host_ns")

    def __init__(self, event: torch.cuda.Event, host_ns: int) -> None:
        self.event: torch.cuda.Event | None = event
        self.host_ns = host_ns
        self.device_ns = 0


class _PendingBlock:
    """A block whose events may not have completed.

    Attributes:
        seen_ns: time at which the host first saw that the last mark had completed; 0 before.
    """

    __slots__ = ("block", "marks", "seen_ns")

    def __init__(self, block: Block, marks: list[Mark]) -> None:
        self.block = block
        self.marks = marks
        self.seen_ns = 0

    def poll(self) -> bool:
        """Return whether the last event has completed. The first time that it has, set `seen_ns`."""
        if not self.seen_ns:
            last = self.marks[-1].event
            assert last is not None
            if last.query():
                self.seen_ns = time.perf_counter_ns()
        return bool(self.seen_ns)


class DeviceTimers(Timers):
    """A recorder on the main stream of a GPU.

    Args:
        device: the device whose current stream is timed.
        sink, sample_every: as `sink` and `every` of Timers.

    Attributes:
        dropped: number of blocks that were dropped because the device was too far behind.
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
        seen_ns = time.perf_counter_ns()
        self._marks = []
        self._anchor = first  # the newest mark whose time is known
        self._newest = first  # the newest mark
        # The first mark is time 0 of the device's clock.
        self._clock.add_lower_bound(first.device_ns, first.host_ns - first.device_ns)
        self._clock.add_upper_bound(first.device_ns, seen_ns - first.device_ns)

    def mark(self) -> Mark | None:  # type: ignore[override]
        """See Recorder. Return None during a capture, since the event would become a node of the CUDA graph."""
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
            self._pending[0].poll()  # the earlier the host sees the completion, the tighter is the upper bound

    def begin_transfer(self, axis: int, nbytes: int) -> Any:
        """See Recorder. The start is marked in sampled steps only."""
        return self.mark() if self._block.is_sampled else None

    def end_transfer(self, since: Any, axis: int, nbytes: int, waited_on: int = -1) -> None:
        """See Recorder. Without a start mark, the row has zero duration and records only the bytes."""
        end = self._newest  # the wait for the transfer has just ended with this mark
        start = since or end
        _, chunk, microbatch = self._action or (-1, -1, -1)
        self._add_row(SpanKind.TRANSFER, axis, chunk, microbatch, waited_on, nbytes, -1, start, end)

    # Reading of events --------------------------------------------------------------------------------------------

    def _process_block(self, block: Block) -> None:
        """Queue a block until its events have completed."""
        if not self._marks:
            return
        self._pending.append(_PendingBlock(block, self._marks))
        self._marks = []
        self.collect()
        if len(self._pending) > _MAX_PENDING_BLOCKS:
            for mark in self._pending.pop().marks:
                mark.device_ns = _DROPPED
                self._recycle(mark)
            self.dropped += 1

    def collect(self) -> None:
        """Write the blocks whose last event has completed."""
        while self._pending and self._pending[0].poll():
            self._read_block(self._pending.popleft())

    def _read_block(self, pending: _PendingBlock) -> None:
        """Read the times of a block's marks, update the bounds of the clock offset, and write the block."""
        anchor = self._anchor
        assert anchor.event is not None
        lower_bound = float("-inf")  # tightest lower bound of the clock offset
        lower_bound_ns = 0  # device time of the mark that gives this bound
        for mark in pending.marks:
            assert mark.event is not None
            mark.device_ns = anchor.device_ns + round(anchor.event.elapsed_time(mark.event) * 1e6)
            if mark.host_ns - mark.device_ns > lower_bound:
                lower_bound_ns = mark.device_ns
                lower_bound = mark.host_ns - mark.device_ns
        last = pending.marks[-1]
        self._clock.add_lower_bound(lower_bound_ns, lower_bound)
        self._clock.add_upper_bound(last.device_ns, pending.seen_ns - last.device_ns)
        for mark in pending.marks[:-1] + [anchor]:
            self._recycle(mark)
        self._anchor = last
        offset, error = self._clock.estimate(last.device_ns) or (pending.seen_ns - last.device_ns, 0)
        host_offset = round(offset)
        rows = []
        for *fields, start, end in pending.block.rows:
            if start.device_ns != _DROPPED and end.device_ns != _DROPPED:
                host_duration = end.host_ns - start.host_ns
                rows.append((*fields, start.device_ns + host_offset, end.device_ns + host_offset, host_duration))
        if rows:
            self._write_rows(pending.block, rows, round(error))

    def _recycle(self, mark: Mark) -> None:
        if mark.event is not None:
            self._pool.append(mark.event)
            mark.event = None

    def close(self) -> None:
        """Write the blocks that have completed, and drop the others."""
        super().close()
        self.collect()
        self._pending.clear()
