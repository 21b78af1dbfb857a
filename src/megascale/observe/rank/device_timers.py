"""Timers on a GPU: marks are pooled CUDA events, read once they have happened; the host never waits for one.

The device's clock is aligned with the host's by bounds (clock_bounds.py): an event happens no earlier than the host
records it, and no later than the host sees that it has happened. The second bound is close if the host runs ahead of
the device, the first if it lags. The time of one event follows from that of another by CUDA's own clock.
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
_MAX_PENDING_BLOCKS = 64  # blocks whose events have not happened; further blocks are dropped


class Mark:
    """A point in the main stream. `ns`: device time once it is known; `host`: host time at which it was queued."""

    __slots__ = ("event", "host", "ns")

    def __init__(self, event: torch.cuda.Event, host: int) -> None:
        self.event: torch.cuda.Event | None = event
        self.host = host
        self.ns = 0


class _PendingBlock:
    """A closed block with its marks, and the time at which the last of them was first seen to have happened."""

    __slots__ = ("block", "marks", "seen_ns")

    def __init__(self, block: Block, marks: list[Mark]) -> None:
        self.block = block
        self.marks = marks
        self.seen_ns = 0

    def has_happened(self) -> bool:
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
        sink, every: see Timers.

    Attributes:
        dropped: blocks that were dropped because the device was too far behind.
    """

    def __init__(self, device: torch.device, sink: SpanSink | None = None, every: int = 0) -> None:
        super().__init__(sink, every)
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._pool: list[torch.cuda.Event] = []
        self._marks: list[Mark] = []
        self._pending: deque[_PendingBlock] = deque()
        self._clock = ClockBounds()
        self.dropped = 0
        # The device is idle, so this single synchronisation costs nothing and bounds the clocks from both sides.
        first = self.mark()
        assert first is not None
        self._stream.synchronize()
        synchronised = time.perf_counter_ns()
        self._marks = []
        self._anchor = first  # the newest mark whose time is known
        self._newest = first
        self._clock.add_lower_bound(first.host, first.host)
        self._clock.add_upper_bound(synchronised, synchronised)

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
            self._pending[0].has_happened()  # an early observation gives tighter bounds of the clocks

    def begin_transfer(self, axis: int, nbytes: int) -> Any:
        """See Recorder. The start is marked in sampled steps."""
        return self.mark() if self._block.sampled else None

    def end_transfer(self, since: Any, axis: int, nbytes: int, waited_on: int = -1) -> None:
        """See Recorder. Without a marked start only the bytes count."""
        last = self._newest  # end of the wait that has just ended
        _, chunk, microbatch = self._open or (-1, -1, -1)
        self._add_row(SpanKind.TRANSFER, axis, chunk, microbatch, waited_on, nbytes, -1, since or last, last)

    # reading ------------------------------------------------------------------------------------------------------

    def _process(self, block: Block) -> None:
        """Queue a closed block until its events have happened."""
        if not self._marks:
            return
        self._pending.append(_PendingBlock(block, self._marks))
        self._marks = []
        self.collect()
        if len(self._pending) > _MAX_PENDING_BLOCKS:
            for mark in self._pending.pop().marks:
                mark.ns = _NEVER
                self._recycle(mark)
            self.dropped += 1

    def collect(self) -> None:
        """Write the blocks whose last event has happened."""
        while self._pending and self._pending[0].has_happened():
            self._read(self._pending.popleft())

    def _read(self, pending: _PendingBlock) -> None:
        anchor = self._anchor
        assert anchor.event is not None
        latest = 0
        bound = -1e30
        for mark in pending.marks:
            assert mark.event is not None
            mark.ns = anchor.ns + round(anchor.event.elapsed_time(mark.event) * 1e6)
            if mark.host - mark.ns > bound:
                latest = mark.ns
                bound = mark.host - mark.ns
        last = pending.marks[-1]
        self._clock.add_lower_bound(latest, bound)
        self._clock.add_upper_bound(last.ns, pending.seen_ns - last.ns)
        for mark in pending.marks[:-1] + [anchor]:
            self._recycle(mark)
        self._anchor = last
        offset, error = self._clock.estimate(last.ns) or (pending.seen_ns - last.ns, 0)
        to_host = round(offset)
        rows = []
        for *fields, start, end in pending.block.rows:
            if start.ns != _NEVER and end.ns != _NEVER:
                rows.append((*fields, start.ns + to_host, end.ns + to_host, end.host - start.host))
        if rows:
            self._write(pending.block, rows, round(error))

    def _recycle(self, mark: Mark) -> None:
        if mark.event is not None:
            self._pool.append(mark.event)
            mark.event = None

    def close(self) -> None:
        """Write the blocks that have happened, and drop the others."""
        super().close()
        self.collect()
        self._pending.clear()
