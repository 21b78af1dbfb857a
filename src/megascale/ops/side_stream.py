"""GEMMs that nothing waits for yet, on a side stream.

A GEMM rarely fills its last wave of SMs: 1,024 x 5,120 in tiles of 128 x 256 are 160 tiles for 132 of
them, two waves for the work of 1.2. A weight's gradient is needed only when gradients are summed, so it may run in
what the GEMMs after it leave idle. Whoever reads or writes gradients calls `synchronize` first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

UNDER_WAY = 2  # works that may be on the side stream at once: each keeps its inputs in memory


class InlineStream:
    """No side stream: each work runs where it is asked for."""

    def record_event(self) -> Any:
        """This point of the main stream, for `run`."""

    def run(self, work: Callable[[], Any], after: Any = None) -> None:
        """Run `work`, which only writes into memory that is there already, after the event or else after all so far."""
        work()

    def synchronize(self) -> None:
        """The main stream goes on only when all works are done."""


class SideStream(InlineStream):
    """A CUDA stream of `device` other than the main one, which is the caller's current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._open: deque[tuple[Callable[[], Any], torch.cuda.Event]] = deque()

    def record_event(self) -> torch.cuda.Event:
        """See InOrder."""
        event = torch.cuda.Event()
        event.record()
        return event

    def run(self, work: Callable[[], Any], after: Any = None) -> None:
        """See InOrder. What `work` refers to lives until the main stream has waited for it."""
        while len(self._open) >= UNDER_WAY:
            self._close()
        self._stream.wait_event(self.record_event() if after is None else after)
        with torch.cuda.stream(self._stream):
            work()
            self._open.append((work, self.record_event()))

    def synchronize(self) -> None:
        """See InOrder."""
        while self._open:
            self._close()

    def _close(self) -> None:
        # Its inputs' memory may be used anew only by what the main stream runs after this.
        torch.cuda.current_stream().wait_event(self._open[0][1])
        self._open.popleft()
