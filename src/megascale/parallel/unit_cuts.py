"""Cuts of captured chunks between units, at which data-parallel ranks communicate (parallel/chunk_graphs.py).

Gathers of parameters and reductions of gradients are not captured, so that hangs are reported as in eager steps, and no
graph waits for a peer. Between graphs, a replay does the work of hooks and gradient sinks in an eager micro-batch.

With ZeRO-0 and 1:

- before a unit's forward: wait for the unit's parameters;
- after the last gradient of a bucket: start the reduction of the bucket, if the backward is the armed one.

With ZeRO-2 and 3 each unit has a graph of its forward and a graph of its backward:

- before a unit's forward: wait for the unit's parameters, and start the gather of the next unit;
- after the head's forward, if it has written the head's gradient: start the reduction of this gradient;
- before and after each write of a part of a divided table's gradient: take the part's memory, and reduce the part;
- before a unit's backward: start the reduction of the previous unit's gradients, take the slot of this unit's
  gradients from its last user, and gather parameters.

If linear layers read copies of weights (float8), the copies are made before the forward of the weights' unit, in the
memory from which all graphs read them. In a step, the first replay of a unit makes them.

Parameters and gradients have addresses that never change, so all graphs of a unit read and write the same slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.linear_precision import LinearPrecision
from megascale.parallel.runtime import Runtime
from megascale.parallel.slot_sink import TableSink


class CutPool(Protocol):
    """A pool whose present capture can be cut (captures.py)."""

    def cut(self, action: Callable[[], None]) -> None:
        """End the present graph, run `action` at this point of each replay, and begin another graph."""
        ...


class UnitCuts:
    """Replaces the gather hooks of a rank's chunks, and the hooks that reduce gradients.

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
        self._has_slots = buffers[0].zero >= 2
        self._linears: list[LinearPrecision] = []
        self._weights: list[list[list[Tensor]]] = []  # by chunk and unit: weights of which linear layers read copies
        self._cut_units: list[set[int]] = []  # by chunk: units whose forward begins with a cut
        for chunk, buffer in enumerate(buffers):
            module = buffer.module
            self._linears.append(module.linears)  # type: ignore[arg-type]
            self._weights.append(_list_copied_weights(module))
            self._cut_units.append(self._find_cut_units(chunk))
            module.pre_forward_gather = partial(  # type: ignore[assignment]
                self._before_forward,
                chunk,
                module.pre_forward_gather,  # type: ignore[arg-type]
            )
            if self._has_slots:
                module.pre_backward_gather = partial(  # type: ignore[assignment]
                    self._before_backward,
                    chunk,
                    module.pre_backward_gather,  # type: ignore[arg-type]
                )
        if not self._has_slots:
            data_parallel.run_reduction = self._run_or_cut

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
    def reserve_weights(self, chunk: int) -> Iterator[None]:
        """Enclose a capture, whose GEMMs may read copies of weights that have not arrived.

        The copies have undefined values. The next replay of each unit makes them again.
        """
        linears = self._linears[chunk]
        weights = [weight for unit_weights in self._weights[chunk] for weight in unit_weights]
        linears.reserve_pinned_weights(weights)
        try:
            yield
        finally:
            if weights:
                linears.invalidate_weights()

    @contextmanager
    def replay(self, chunk: int) -> Iterator[None]:
        """Enclose the replay of a chunk's backward.

        With ZeRO-2 and 3 cuts prepare units and reduce their gradients, which gradient sinks do in an eager backward.
        """
        if not self._has_slots:
            yield
            return
        self._is_replaying = True
        try:
            yield
            self._data_parallel.end_unit_backwards(chunk)
        finally:
            self._is_replaying = False

    def _find_cut_units(self, chunk: int) -> set[int]:
        weights = self._weights[chunk]
        if self._has_slots:
            return set(range(len(weights)))
        return {*self._data_parallel.list_awaited_units(chunk), *(i for i, unit in enumerate(weights) if unit)}

    def _before_forward(self, chunk: int, gather: Callable[[int], None], unit: int) -> None:
        if self._pool is None:
            gather(unit)
        elif unit in self._cut_units[chunk]:
            self._cut(self._pool, partial(self._prepare_forward, chunk, gather, unit))

    def _prepare_forward(self, chunk: int, gather: Callable[[int], None], unit: int) -> None:
        gather(unit)
        if self._has_slots:
            self._data_parallel.open_early_slot(chunk, unit)
        self._linears[chunk].pin_weights(self._weights[chunk][unit])

    def _complete_early(self, chunk: int, complete: Callable[[], None] | None) -> None:
        if self._pool is None:
            assert complete is not None
            complete()
        else:
            self._cut(self._pool, partial(self._data_parallel.end_unit_backwards, chunk))

    def _run_or_cut(self, action: Callable[[], None]) -> None:
        """Run communication of a backward; in a capture, cut the capture for it."""
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


def _list_copied_weights(module: nn.Module) -> list[list[Tensor]]:
    """Return for each unit of a chunk's forward the weights of which linear layers read copies."""
    units: list[list[nn.Parameter]] = module.list_forward_units()  # type: ignore[operator]
    remaining = {id(weight): weight for weight in list_cast_weights(module)}
    weights_by_unit = []
    for unit in units:
        members = [remaining.pop(id(param), None) for param in unit]
        weights_by_unit.append([weight for weight in members if weight is not None])
    return weights_by_unit


def list_cast_weights(module: nn.Module) -> list[Tensor]:
    """Return a chunk's weights of which GEMMs read casts: of linear layers, and stacks of experts' matrices."""
    if not module.linears.copies_weights:  # type: ignore[union-attr]
        return []
    weights = module.collect_linear_weights() | module.collect_expert_stacks()  # type: ignore[operator]
    return list(weights.values())
