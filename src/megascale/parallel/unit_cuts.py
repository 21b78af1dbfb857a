"""Cuts of captured chunks between units, at which ZeRO-2 and 3 communicate (parallel/chunk_graphs.py).

Gathers of parameters and reductions of gradients are not captured, so that hangs are reported as in eager steps, and no
graph waits for a peer. Each unit has a graph of its forward and a graph of its backward. Between graphs, a replay does
the work of hooks and gradient sinks in an eager micro-batch:

- before a unit's forward: wait for the unit's parameters, and start the gather of the next unit;
- after the head's forward, if it has written the head's gradient: start the reduction of this gradient;
- before and after each write of a part of a divided table's gradient: take the part's memory, and reduce the part;
- before a unit's backward: start the reduction of the previous unit's gradients, take the slot of this unit's
  gradients from its last user, and gather parameters.

Parameters and gradients have addresses that never change, so all graphs of a unit read and write the same slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.runtime import Runtime
from megascale.parallel.slot_sink import TableSink


class CutPool(Protocol):
    """A pool whose present capture can be cut (captures.py)."""

    def cut(self, action: Callable[[], None]) -> None:
        """End the present graph, run `action` at this point of each replay, and begin another graph."""
        ...


class UnitCuts:
    """Replaces the gather hooks of a rank's chunks, and the `complete` hook of the early gradient's sink.

    During a capture the new hooks cut the capture. In a replay of a backward on a CPU they prepare the unit. In all
    other cases they call the original hooks.

    Args:
        buffers: the chunks' buffers. Their modules' hooks are replaced.
    """

    def __init__(self, buffers: Sequence[ParamAndGradBuffer], data_parallel: DataParallel, runtime: Runtime) -> None:
        self._data_parallel = data_parallel
        self._runtime = runtime
        self._pool: CutPool | None = None  # pool of the present capture
        self._is_replaying = False
        for chunk, buffer in enumerate(buffers):
            module = buffer.module
            module.pre_forward_gather = partial(  # type: ignore[assignment]
                self._before_forward,
                chunk,
                module.pre_forward_gather,  # type: ignore[arg-type]
            )
            module.pre_backward_gather = partial(  # type: ignore[assignment]
                self._before_backward,
                chunk,
                module.pre_backward_gather,  # type: ignore[arg-type]
            )

        sink = data_parallel.early_sink
        if sink is not None:
            sink.complete = partial(self._complete_early, len(buffers) - 1, sink.complete)
        for buffer in buffers:
            for sink in buffer.sinks:
                if isinstance(sink, TableSink):
                    sink.run = self._run_or_cut

    @contextmanager
    def capture_in(self, pool: CutPool) -> Iterator[None]:
        """Let the hooks cut the enclosed capture of `pool`."""
        self._pool = pool
        try:
            yield
        finally:
            self._pool = None

    @contextmanager
    def replay(self, chunk: int) -> Iterator[None]:
        """Enclose the replay of a chunk's backward.

        Cuts prepare units and reduce their gradients, which gradient sinks do in an eager backward.
        """
        self._is_replaying = True
        try:
            yield
            self._data_parallel.end_unit_backwards(chunk)
        finally:
            self._is_replaying = False

    def _before_forward(self, chunk: int, gather: Callable[[int], None], unit: int) -> None:
        if self._pool is None:
            gather(unit)
        else:
            self._cut(self._pool, partial(self._prepare_forward, chunk, gather, unit))

    def _prepare_forward(self, chunk: int, gather: Callable[[int], None], unit: int) -> None:
        gather(unit)
        self._data_parallel.open_early_slot(chunk, unit)

    def _complete_early(self, chunk: int, complete: Callable[[], None] | None) -> None:
        if self._pool is None:
            assert complete is not None
            complete()
        else:
            self._cut(self._pool, partial(self._data_parallel.end_unit_backwards, chunk))

    def _run_or_cut(self, action: Callable[[], None]) -> None:
        """Run the communication of a table's part; in a capture, cut the capture for it."""
        if self._pool is None:
            action()
        else:
            self._cut(self._pool, action)

    def _before_backward(self, chunk: int, gather: Callable[[int], None] | None, unit: int) -> None:
        if self._pool is not None:
            self._cut(self._pool, partial(self._data_parallel.begin_unit_backward, chunk, unit))
            self._data_parallel.set_unit_overwrites(chunk, unit)
        elif self._is_replaying:
            self._data_parallel.begin_unit_backward(chunk, unit)
        elif gather is not None:
            gather(unit)

    def _cut(self, pool: CutPool, action: Callable[[], None]) -> None:
        self._runtime.stream.synchronize()  # a graph ends only after the streams that it forked have joined
        pool.cut(action)
