"""Captures of work as CUDA graphs, and a substitute on a CPU that runs the work again.

A capture may be cut into several graphs. A cut ends the present graph, adds an action that is not captured, and begins
another graph. Each replay runs the action between the graphs. Under ZeRO-2 and 3 the gathers and reductions of units
run at such cuts (unit_cuts.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megascale import torch_private

# Work to capture; the returned tensor is the result of each replay.
Work = Callable[[], Tensor | None]


@dataclass
class CudaCapture:
    """Captured CUDA graphs with the actions at their cuts.

    Attributes:
        actions: launches of graphs and actions at cuts, in order.
        result: the tensor that a replay writes.
    """

    actions: list[Callable[[], None]] = field(default_factory=list)
    result: Tensor | None = None

    def replay(self) -> None:
        """Launch the graphs, and run the actions between them."""
        for action in self.actions:
            action()


class CudaCapturePool:
    """Captures the CUDA graphs of one chunk and one micro-batch in flight, which share a memory pool."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._capture = CudaCapture()
        self._graph: torch.cuda.CUDAGraph | None = None  # the graph that is being captured

    def capture(self, work: Work) -> CudaCapture:
        """Capture `work` without running it. Raises RuntimeError for work that cannot be captured."""
        self._capture = CudaCapture()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # two cuts may follow each other
            try:
                self._begin_graph()
                self._capture.result = work()
                self._end_graph()
            except BaseException:
                self._abandon_graph()
                raise
        return self._capture

    def cut(self, action: Callable[[], None]) -> None:
        """End the present graph, let each replay run `action` at this point, and begin another graph.

        Work on other streams must have joined the present stream.
        """
        self._end_graph()
        self._capture.actions.append(action)
        self._begin_graph()

    def _begin_graph(self) -> None:
        graph = self._graph = torch.cuda.CUDAGraph()
        # In other modes, CUDA calls of other threads (the loader's, NCCL's watchdog) would end the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end_graph(self) -> None:
        graph = self._graph
        assert graph is not None
        graph.capture_end()
        self._graph = None
        self._capture.actions.append(graph.replay)

    def _abandon_graph(self) -> None:
        """End the present graph after an error, and restore the state of torch that a failed end leaves behind."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError:  # the error only repeats that the capture has failed
            _release_generator()
            self._release_memory()

    def _release_memory(self) -> None:
        """Let torch's allocator leave its capturing mode, in which it frees no memory when memory is short."""
        device = torch.cuda.current_device()
        try:
            torch_private.end_allocate_to_pool(device, self._pool)
        except RuntimeError:
            return  # the allocator had left it
        torch_private.release_pool(device, self._pool)


def _release_generator() -> None:
    """Give the device's default generator a copy of its state after a capture that could not be ended.

    The old state would stay in its capturing mode, and the next random numbers outside of a capture would raise an
    error.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())


@dataclass
class HostCapture:
    """The substitute for a CUDA graph on a CPU: work that each replay runs again on the same memory.

    As on a GPU, a result that is read after a later replay has wrong values, so that tests notice such a read.
    """

    work: Work
    result: Tensor | None = None  # allocated by the first replay

    def replay(self) -> None:
        """Run the work, and copy its output into `result`."""
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
