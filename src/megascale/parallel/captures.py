"""Work that is recorded once and done again on the same memory: CUDA graphs, and what stands in for them on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class CapturePool(Protocol):
    """What makes captures that share memory: of one chunk and one micro-batch in flight."""

    def capture(self, work: Callable[[], Tensor | None]) -> Capture:
        """A capture of `work`, which has not run."""


class Capture(Protocol):
    """Work that can be done again, on the same memory."""

    result: Tensor | None  # what it makes; on a CPU from its first replay on

    def replay(self) -> None:
        """Do it."""


class CudaCaptures:
    """Captures are CUDA graphs with a memory pool in common."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._pool = stream, torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Tensor | None]) -> Capture:
        """See CapturePool. Raises RuntimeError for work that cannot be captured."""
        capture = CudaCapture()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Other threads (the loader's, NCCL's watchdog) may ask CUDA for whatever they like meanwhile.
            capture.graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                capture.result = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # which only says that the capture is not valid
                    capture.graph.capture_end()
                raise
            capture.graph.capture_end()
        return capture


@dataclass
class CudaCapture:
    """See Capture."""

    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)
    result: Tensor | None = None

    def replay(self) -> None:
        """See Capture."""
        self.graph.replay()


class HostCaptures:
    """Where there are no graphs: the work itself is done at each replay, on the same memory. For tests: what reads a
    replay's memory after it has been written anew is wrong here as on a GPU."""

    def capture(self, work: Callable[[], Tensor | None]) -> Capture:
        """See CapturePool."""
        return HostCapture(work)


@dataclass
class HostCapture:
    """See Capture."""

    work: Callable[[], Tensor | None]
    result: Tensor | None = None

    def replay(self) -> None:
        """See Capture."""
        made = self.work()
        if made is not None and self.result is None:
            self.result = torch.empty_like(made)
        if made is not None and self.result is not None:
            self.result.copy_(made.detach())
