"""Captures on a CPU that record operators, so that a replay runs no Python of the chunk, as with CUDA graphs.

Unlike a CUDA capture, recording runs the operators. What they write is put back, and communication is awaited first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megascale.parallel import chunk_graphs
from megascale.parallel.captures import Work
from megascale.parallel.chunk_graphs import ChunkGraphs

STEPS = 3  # an eager step, the one that captures, and one that only replays


@contextmanager
def one_eager_step() -> Iterator[None]:
    """Let captures begin in the second step. Training waits for another one, since its memory still grows then."""
    with mock.patch.object(chunk_graphs, "EAGER_STEPS", 1):
        yield


@dataclass
class RecordedCapture:
    """Operators and actions at cuts, in order, and the tensor that they write.

    Attributes:
        cuts: the actions at cuts, which are parts too.
    """

    parts: list[Callable[[], None]] = field(default_factory=list)
    result: torch.Tensor | None = None
    cuts: list[Callable[[], None]] = field(default_factory=list)

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators on the memory that was recorded."""
        for part in self.parts:
            part()


class _Recorder(TorchDispatchMode):
    def __init__(self, parts: list[Callable[[], None]]) -> None:
        super().__init__()
        self.parts = parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "a capture reads a value on the host"
        outputs = func(*args, **kwargs)
        inputs = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}

        def replay() -> None:
            for target, value in zip(tree_leaves(outputs), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(target, torch.Tensor) and _address(target) not in inputs:
                    target.copy_(value)

        self.parts.append(replay)
        return outputs


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class RecordingPool:
    """The counterpart of `CudaCapturePool`."""

    def __init__(self, graphs: ChunkGraphs) -> None:
        self._graphs = graphs
        self._capture = RecordedCapture()

    def capture(self, work: Work) -> RecordedCapture:
        """Record `work` and put back what it has written."""
        self._capture = capture = RecordedCapture()
        with self._memory_put_back(), _Recorder(capture.parts):
            result = work()
        capture.result = None if result is None else result.detach()
        return capture

    def cut(self, action: Callable[[], None]) -> None:
        """Run `action` at this point of each replay."""
        self._capture.parts.append(action)
        self._capture.cuts.append(action)

    @contextmanager
    def _memory_put_back(self) -> Iterator[None]:
        memory = [buffer.grads for buffer in self._graphs._buffers]
        cuts = self._graphs._unit_cuts
        if cuts is not None and cuts._data_parallel.gradient_slots is not None:
            data_parallel = cuts._data_parallel
            data_parallel.gradient_slots.drain()
            memory.append(data_parallel.gradient_slots.memory)
            if data_parallel.parameter_slots is not None:
                data_parallel.parameter_slots.wait()
        copies = [part.clone() for part in memory]
        try:
            yield
        finally:
            for part, copy in zip(memory, copies, strict=True):
                part.copy_(copy)


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Replay recorded operators where a CPU would run the chunk again."""
    with mock.patch.object(ChunkGraphs, "_make_pool", lambda self: RecordingPool(self)):
        yield
