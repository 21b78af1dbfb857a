"""Captures of work as CUDA graphs, and their stand-in on a CPU.

A capture may be cut: the graph ends, an action follows that runs anew in each replay, and another graph begins. Under
ZeRO-2 and 3 the gathers and reductions of units run at such cuts (unit_cuts.py).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Work that a capture records; the returned tensor is its result.
Work = Callable[[], Tensor | None]


@dataclass
class CudaCapture:
    """Captured CUDA graphs with the actions at their cuts, and the tensor that they write.

    Attributes:
        parts: replays of graphs and actions at cuts, in order.
    """

    actions: list[Callable[[], None]] = field(default_factory=list)
    result: Tensor | None = None

    def replay(self) -> None:
        """Launch the graphs, with the actions between them."""
        for part in self.actions:
            part()


class CudaCapturePool:
    """Captures CUDA graphs that share a memory pool: those of one chunk and one micro-batch in flight."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._capture = CudaCapture()
        self._graph: torch.cuda.CUDAGraph | None = None  # being captured

    def capture(self, work: Work) -> CudaCapture:
        """Capture `work` without running it. Raises RuntimeError for work that cannot be captured."""
        self._capture = CudaCapture()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # between cuts without work
            self._begin_graph()
            try:
                self._capture.result = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it only reports that the capture is invalid
                    self._end_graph()
                raise
            self._end_graph()
        return self._capture

    def cut(self, action: Callable[[], None]) -> None:
        """End the present graph, run `action` at this point of each replay, and begin another graph.

        Work on other streams must have joined the present stream.
        """
        self._end_graph()
        self._capture.actions.append(action)
        self._begin_graph()

    def _begin_graph(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads (the loader's, NCCL's watchdog) may make any CUDA call meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def _end_graph(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.capture_end()
            self._capture.actions.append(graph.replay)


@dataclass
class HostCapture:
    """Work that each replay runs anew on the same memory: the stand-in for a CUDA graph on a CPU.

    A reader of the memory of an overwritten replay gets wrong values here as on a GPU, so that tests find it.
    """

    work: Work
    result: Tensor | None = None  # from the first replay on

    def replay(self) -> None:
        """Run the work and copy its output into `result`."""
        output = self.work()
        if output is None:
            return
        if self.result is None:
            self.result = torch.empty_like(output)
        self.result.copy_(output.detach())


class HostCapturePool:
    """The counterpart of `CudaCapturePool` on a CPU. Its captures are not cut: actions run within the work."""

    def capture(self, work: Work) -> HostCapture:
        """Return a capture of `work`, which has not run."""
        return HostCapture(work)
