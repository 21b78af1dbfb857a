"""Side stream for GEMMs of weight gradients, whose results are needed much later.

A GEMM rarely uses all SMs in its last wave. A result of 1,024 x 5,120 has 160 tiles of 128 x 256, which take two waves
on 132 SMs. A weight's gradient is not needed before gradients are summed over ranks, so its GEMM can run on SMs that
other GEMMs leave idle. Code that reads or writes gradients must call `synchronize` first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

MAX_IN_FLIGHT = 2  # GEMMs on the side stream, because each keeps its inputs in memory


class InlineStream:
    """Replacement for a side stream that runs work on the main stream when it is submitted."""

    def record_event(self) -> Any:
        """Return an event at this point of the main stream, for `run`."""

    def run(self, work: Callable[[], Any], after: Any = None) -> None:
        """Run `work` after the event `after`; None: after all work that the main stream has so far.

        `work` may write only into memory that is already allocated.
        """
        work()

    def synchronize(self) -> None:
        """Let the main stream wait for all submitted work."""

    def discard(self) -> None:
        """Forget submitted work without waiting: it belongs to a CUDA graph whose capture has failed."""

    def wait_for_main(self) -> None:
        """Let all work that is submitted later wait for this point of the main stream, in addition to its event."""


class SideStream(InlineStream):
    """A second CUDA stream of `device`. The main stream is the caller's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._in_flight: deque[tuple[Callable[[], Any], torch.cuda.Event]] = deque()

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def run(self, work: Callable[[], Any], after: Any = None) -> None:
        """See InlineStream. Objects that `work` references live until the main stream has waited for the work."""
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._await_oldest()
        if after is None:
            after = self.record_event()
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            work()
            self._in_flight.append((work, self.record_event()))

    def synchronize(self) -> None:
        while self._in_flight:
            self._await_oldest()

    def discard(self) -> None:
        self._in_flight.clear()

    def wait_for_main(self) -> None:
        self._stream.wait_event(self.record_event())

    def _await_oldest(self) -> None:
        # Let the main stream wait before the inputs are released, because its later work may reuse their memory.
        torch.cuda.current_stream().wait_event(self._in_flight[0][1])
        self._in_flight.popleft()
