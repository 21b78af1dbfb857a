"""Timers on a GPU: marks are CUDA events out of a pool, read once they have happened; the host never waits for one.

The device's clock is laid on the host's by bounds (clock_bounds.py): an event happens no earlier than the host recorded
it, and no later than the host sees that it has happened. Where the host runs ahead of the device the second is close,
where it lags the first. The time of one event follows from that of another by CUDA's own clock.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from megascale.core.spans import SpanKind
from megascale.observe.clock_bounds import ClockBounds
from megascale.observe.rank.timers import Block, SpanSink, Timers

_NEVER = -1  # the time of a mark that was given up
_MOST_WAITING = 64  # blocks whose events have not happened; beyond them whole blocks are dropped


class Mark:
    """A point in the main stream. `ns` on the device's clock once that is known; `host` when it was queued."""

    __slots__ = ("event", "host", "ns")

    def __init__(self, event: torch.cuda.Event, host: int) -> None:
        self.event: torch.cuda.Event | None = event
        self.host, self.ns = host, 0


class _Waiting:
    """A closed block, the marks made in it, and when the last of them was first seen to have happened."""

    __slots__ = ("block", "marks", "seen")

    def __init__(self, block: Block, marks: list[Mark]) -> None:
        self.block, self.marks, self.seen = block, marks, 0

    def happened(self) -> bool:
        if not self.seen:
            last = self.marks[-1].event
            assert last is not None
            if last.query():
                self.seen = time.perf_counter_ns()
        return bool(self.seen)


class DeviceTimers(Timers):
    """A recorder on the main stream of a GPU.

    Args:
        sink, every: see Timers.
        device: whose current stream is timed.

    Attributes:
        dropped: blocks that were given up because the device was too far behind.
    """

    def __init__(self, device: torch.device, sink: SpanSink | None = None, every: int = 0) -> None:
        super().__init__(sink, every)
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._pool: list[torch.cuda.Event] = []
        self._marks: list[Mark] = []
        self._waiting: deque[_Waiting] = deque()
        self._anchor: Mark | None = None  # the newest mark whose time is known
        self._clock = ClockBounds()
        self.dropped = 0
        # Nothing runs yet, so this costs nothing: the one close look that bounds the clocks from both sides.
        first = self._newest = self.mark()
        assert first is not None
        self._stream.synchronize()
        seen = time.perf_counter_ns()
        self._marks = []
        self._anchor = first
        self._clock.at_least(first.host, first.host)
        self._clock.at_most(seen, seen)

    def mark(self) -> Mark | None:  # type: ignore[override]
        """See Recorder. Nothing within a capture: an event of this kind would become a part of the graph."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        made = Mark(event, time.perf_counter_ns())
        event.record(self._stream)
        self._marks.append(made)
        self._newest = made
        return made

    def step_begins(self, step: int) -> None:
        """See Recorder."""
        self._stream = torch.cuda.current_stream(self._device)
        super().step_begins(step)

    def begin_action(self, kind: int, chunk: int = -1, microbatch: int = -1) -> None:
        """See Recorder."""
        super().begin_action(kind, chunk, microbatch)
        if self._waiting:
            self._waiting[0].happened()  # the sooner it is seen, the better are the clocks known

    def begin_transfer(self, axis: int, nbytes: int) -> Any:
        """See Recorder. Its start is marked in steps whose spans are kept."""
        return self.mark() if self._block.kept else None

    def landed(self, since: Any, axis: int, nbytes: int, waited_on: int = -1) -> None:
        """See Recorder. Where its start was not marked, only its bytes count."""
        last = self._newest  # of the wait that has just ended
        _, chunk, microbatch = self._open or (-1, -1, -1)
        self._row(SpanKind.TRANSFER, axis, chunk, microbatch, waited_on, nbytes, -1, since or last, last)

    # reading ------------------------------------------------------------------------------------------------------

    def _closed(self, block: Block) -> None:
        if not self._marks:
            return
        self._waiting.append(_Waiting(block, self._marks))
        self._marks = []
        self.collect()
        if len(self._waiting) > _MOST_WAITING:
            for mark in self._waiting.pop().marks:
                mark.ns = _NEVER
                self._recycle(mark)
            self.dropped += 1

    def collect(self) -> None:
        """Tell of the blocks whose last event has happened."""
        while self._waiting and self._waiting[0].happened():
            self._read(self._waiting.popleft())

    def _read(self, told: _Waiting) -> None:
        anchor = self._anchor
        assert anchor is not None
        assert anchor.event is not None
        latest, bound = 0, -1e30
        for mark in told.marks:
            assert mark.event is not None
            mark.ns = anchor.ns + round(anchor.event.elapsed_time(mark.event) * 1e6)
            if mark.host - mark.ns > bound:
                latest, bound = mark.ns, mark.host - mark.ns
        last = told.marks[-1]
        self._clock.at_least(latest, bound)
        self._clock.at_most(last.ns, told.seen - last.ns)
        for mark in told.marks[:-1]:
            self._recycle(mark)
        self._recycle(anchor)
        self._anchor = last
        known = self._clock.estimate(last.ns)
        offset, error = known if known is not None else (told.seen - last.ns, 0)
        add = round(offset)
        made = [
            (*row[:-2], start.ns + add, end.ns + add, end.host - start.host)
            for row in told.block.rows
            if (start := row[-2]).ns != _NEVER and (end := row[-1]).ns != _NEVER
        ]
        if made:
            self._emit(told.block, made, round(error))  # type: ignore[arg-type]

    def _recycle(self, mark: Mark) -> None:
        if mark.event is not None:
            self._pool.append(mark.event)
            mark.event = None

    def close(self) -> None:
        """Tell what has happened by now; what has not is given up."""
        super().close()
        self.collect()
        self._waiting.clear()
