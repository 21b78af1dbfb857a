"""Side stream for GEMMs whose results nothing waits for yet.

A GEMM rarely fills its last wave of SMs: 1,024 x 5,120 in tiles of 128 x 256 are 160 tiles for 132 SMs, two waves for
the work of 1.2. A weight's gradient is needed only when gradients are summed, so it can use what later GEMMs leave
idle. Readers and writers of gradients call `synchronize` first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

UNDER_WAY = 2  # pieces of work in flight at most, because each keeps its inputs in memory


class InlineStream:
    """The absence of a side stream: work runs when it is submitted."""

    def record_event(self) -> Any:
        """Record this point of the main stream, for `run`."""

    def run(self, work: Callable[[], Any], after: Any = None) -> None:
        """Run `work`, which only writes into allocated memory, after the event or else after all submitted so far."""
        work()

    def synchronize(self) -> None:
        """Let the main stream wait for all submitted work."""

    def wait_for_main(self) -> None:
        """Let work that is submitted later wait for this point of the main stream, whatever its event."""


class SideStream(InlineStream):
    """A CUDA stream of `device` next to the main one, which is the caller's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._in_flight: deque[tuple[Callable[[], Any], torch.cuda.Event]] = deque()

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def run(self, work: Callable[[], Any], after: Any = None) -> None:
        """See InlineStream. Objects that `work` references live until the main stream has waited for it."""
        while len(self._in_flight) >= UNDER_WAY:
            self._await_oldest()
        self._stream.wait_event(self.record_event() if after is None else after)
        with torch.cuda.stream(self._stream):
            work()
            self._in_flight.append((work, self.record_event()))

    def synchronize(self) -> None:
        while self._in_flight:
            self._await_oldest()

    def wait_for_main(self) -> None:
        self._stream.wait_event(self.record_event())

    def _await_oldest(self) -> None:
        # The memory of its inputs may be reused only by work that the main stream runs after this.
        torch.cuda.current_stream().wait_event(self._in_flight[0][1])
        self._in_flight.popleft()
