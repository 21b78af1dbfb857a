"""Forward and backward of chunks as CUDA graphs: small micro-batches take what the GPU takes, not what Python takes.

A micro-batch of a small model is a few hundred launches, each of which costs the host more than the GPU. From the third
step on a chunk's forward and backward are captured, once for each micro-batch that may be in flight, and replayed: two
launches. They read their inputs from memory of their own and leave their outputs in it; gradients go into the same
sinks as ever. Communication over data and pipeline stays outside, between replays, so that a hang is told as ever; the
exchange of a tensor-parallel group (exchange.py) is captured, and the record of calls knows a replay as one call of it.

What captures cannot hold runs eagerly: micro-batches whose parameters are still being gathered (each chunk's first of a
step) and those whose buckets are reduced while backward goes on (its last), where there is data parallelism.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.core.calls import NoCalls
from megascale.core.schedule import Action, ActionKind
from megascale.ops.gradient_sink import GradientSink, sink_of
from megascale.parallel.buffers import FlatChunk
from megascale.parallel.captures import Capture, CapturePool, CudaCapturePool, HostCapturePool
from megascale.parallel.chunk_runner import EagerChunks, Forward
from megascale.parallel.collectives import all_reduce
from megascale.parallel.exchange import Captured
from megascale.parallel.runtime import Runtime

EAGER_STEPS = 2  # of an engine: in the first, gradients are counted and kernels chosen; the second runs as all others

# (chunk, micro-batch, input or None) -> what the chunk reads: its input and, on the model's last, the targets.
Inputs = Callable[[int, int, Tensor | None], tuple[Tensor, ...]]
# (chunk, those) -> its output, as Forward's. The same for every micro-batch and step.
Compute = Callable[[int, tuple[Tensor, ...]], Tensor]


@dataclass
class Microbatch:
    """A chunk's captures for one micro-batch in flight, and the memory they read and write.

    Attributes:
        inputs: as `Inputs` gave them, copied.
        grad: of its output; None on the model's last chunk.
        exchanged: bytes that tensor-parallel ranks exchange in the forward, and in the backward.
    """

    inputs: tuple[Tensor, ...]
    grad: Tensor | None
    forward: Capture
    backward: Capture
    exchanged: tuple[int, int] = (0, 0)

    def take(self, inputs: tuple[Tensor, ...]) -> None:
        """Replay with these from now on."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.detach().copy_(given)


@dataclass(frozen=True)
class Boundaries:
    """Which micro-batches of a chunk are not like the others.

    Attributes:
        first_forward: its parameters may still be on their way.
        first_backward: gradients are written, not added.
        reduced: those in whose backward buckets leave.
    """

    first_forward: int
    first_backward: int
    reduced: frozenset[int]


def boundaries_of(actions: Sequence[Action]) -> dict[int, Boundaries]:
    """By chunk, of a stage's list of actions."""
    forwards: dict[int, int] = {}
    backwards: dict[int, int] = {}
    reduced: dict[int, set[int]] = {}
    armed: set[int] = set()
    for kind, chunk, i in actions:
        if kind == ActionKind.FORWARD:
            forwards.setdefault(chunk, i)
        elif kind == ActionKind.REDUCE_GRADS:
            armed.add(chunk)
        elif kind == ActionKind.BACKWARD:
            backwards.setdefault(chunk, i)
            if chunk in armed:
                armed.discard(chunk)
                reduced.setdefault(chunk, set()).add(i)
    return {c: Boundaries(forwards[c], backwards[c], frozenset(reduced.get(c, ()))) for c in forwards}


class ChunkGraphs:
    """The captures of a rank's chunks.

    Args:
        flats: the chunks' buffers.
        actions: of this stage.
        compute: runs a chunk.
        runtime: what this rank runs with.
        shape: of an activation between chunks.
        device: where.

    Attributes:
        on: whether steps use them; `use` sets it.
        failed: why a capture did not succeed; "" if none has failed. All runs eagerly then.
    """

    def __init__(
        self,
        flats: Sequence[FlatChunk],
        actions: Sequence[Action],
        compute: Compute,
        runtime: Runtime,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.on, self.failure = True, ""
        self._flats, self._compute, self._runtime, self._device = list(flats), compute, runtime, device
        self._shape = shape
        self._boundaries = boundaries_of(actions)
        self._communicates, self._tensor = flats[0].axes.data.size > 1, flats[0].axes.tensor
        self._sinks = [_sinks_of(flat) for flat in flats]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pools: dict[tuple[int, int], CapturePool] = {}
        self._known: dict[tuple[int, int, bool], Microbatch] = {}
        self._steps = 0
        self._captured = False  # in the present step

    def set_enabled(self, on: bool) -> None:
        """From the next step on, replay; or launch each operator."""
        self.on = on

    def clear(self) -> None:
        """The chunks will compute something else: what was recorded is let go of."""
        self._known.clear()
        self._pools.clear()

    def begin_step(self, forward: Forward, inputs: Inputs, eagerly: bool = False) -> EagerChunks:
        """What runs the micro-batches of the step that begins; eagerly: none of them replayed."""
        self._steps += 1
        if not self.on or self.failure or eagerly or self._steps <= EAGER_STEPS:
            return EagerChunks(forward)
        return GraphedChunks(forward, inputs, self)

    def end_step(self) -> None:
        """Give back what eager micro-batches held, and captured ones now hold themselves."""
        if self._captured and self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._captured = False

    def suits(self, chunk: int, i: int) -> bool:
        """Whether this micro-batch is replayed."""
        boundaries = self._boundaries[chunk]
        return not self.failure and not (
            self._communicates and (i == boundaries.first_forward or i in boundaries.reduced)
        )

    def microbatch(self, chunk: int, i: int, slot: int, inputs: tuple[Tensor, ...]) -> Microbatch | None:
        """The captures for micro-batch i as the `slot`-th in flight, made if they are not there; None on failure."""
        first = i == self._boundaries[chunk].first_backward
        found = self._known.get((chunk, slot, first))
        if found is None:
            try:
                found = self._capture(chunk, slot, first, inputs)
            except RuntimeError as error:
                self.failure = f"capture failed: {str(error).strip().splitlines()[0]}"
            if self._some_rank_failed():
                self.failure = self.failure or "capture failed on another rank of the tensor-parallel group"
                self._runtime.kernels.note("CUDA graphs", f"off ({self.failure})")
                self.clear()  # out of memory, perhaps; what is in flight is replayed to its end
                return None
            assert found is not None
            self._known[chunk, slot, first] = found
        return found

    def _some_rank_failed(self) -> bool:
        """Whether a capture failed here or on a rank that exchanges with this one: they replay alike or not at all."""
        if self._tensor.size == 1:
            return bool(self.failure)
        failed = torch.tensor([float(bool(self.failure))], device=self._device)
        return bool(all_reduce(failed, self._tensor, dist.ReduceOp.MAX, "agree_on_capture").wait().item())

    def replay(self, capture: Capture, op: str, nbytes: int) -> None:
        """Replay; the record of calls knows it as `op` of the tensor-parallel group if there is an exchange in it."""
        exchange = self._tensor.exchange
        if exchange is None:
            capture.replay()
            return
        transfer = self._tensor.transfer(op, nbytes)
        exchange.before_replay()
        capture.replay()
        transfer.done()

    def place_weights(self, chunk: int) -> None:
        """What is made of weights once a step (float8) lies where graphs read it."""
        linears = self._flats[chunk].module.linears
        linears.place_weights(self._flats[chunk].module.matrices().values())  # type: ignore[operator, union-attr]

    def _is_last(self, chunk: int) -> bool:
        return bool(self._flats[chunk].module.last)

    def written(self, chunk: int, i: int) -> None:
        """A replayed backward has written, or added to, the gradients."""
        if i == self._boundaries[chunk].first_backward:
            for sink in self._sinks[chunk]:
                sink.overwrite = False

    def _capture(self, chunk: int, slot: int, first: bool, inputs: tuple[Tensor, ...]) -> Microbatch:
        pool = self._pools.get((chunk, slot))
        if pool is None:
            pool = self._pools[chunk, slot] = CudaCapturePool(self._stream) if self._stream else HostCapturePool()
        own = tuple(torch.empty_like(one).copy_(one) for one in inputs)
        x = own[0].requires_grad_() if own[0].is_floating_point() else None
        dtype = self._flats[chunk].params.dtype
        grad = None if self._is_last(chunk) else torch.empty(self._shape, dtype=dtype, device=self._device)
        live: list[Tensor] = []

        exchanged: list[Captured] = []

        def forward() -> Tensor:
            own[0].grad = None
            self._renew_slots()
            with self._exchange_captured(exchanged):
                live[:] = [self._compute(chunk, own)]
            return live[0].detach()

        def backward() -> Tensor | None:
            self._renew_slots()
            with self._exchange_captured(exchanged):
                torch.autograd.backward(live.pop(), grad)
                self._runtime.stream.synchronize()
            return None if x is None else x.grad

        self._runtime.stream.synchronize()
        try:
            with self._to_be_written(chunk, first), _no_garbage_collection():
                made = Microbatch(own, grad, pool.capture(forward), pool.capture(backward))
        finally:
            self._renew_slots()
        if exchanged:
            made.exchanged = exchanged[0].nbytes, exchanged[1].nbytes
        self._captured = True
        return made

    @contextmanager
    def _exchange_captured(self, told: list[Captured]) -> Iterator[None]:
        """Within, what tensor-parallel ranks exchange is captured too; it is not done, so the record knows nothing."""
        exchange = self._tensor.exchange
        if exchange is None:
            yield
            return
        record, self._runtime.calls = self._runtime.calls, NoCalls()
        try:
            with exchange.captured() as calls:
                told.append(calls)
                yield
        finally:
            self._runtime.calls = record

    @contextmanager
    def _to_be_written(self, chunk: int, first: bool) -> Iterator[None]:
        """Within, a backward of the chunk writes those gradients that a step's first one writes, or adds to all."""
        sinks = self._sinks[chunk]
        written = {id(flat.sinks[number]) for flat in self._flats for number in flat.overwritten} if first else set()
        before = [sink.overwrite for sink in sinks]
        for sink in sinks:
            sink.overwrite = id(sink) in written
        try:
            yield
        finally:
            for sink, was in zip(sinks, before, strict=True):
                sink.overwrite = was

    def _renew_slots(self) -> None:
        """Zeros that a graph collects into are made by that graph."""
        if self._runtime.kernels.amaxes is not None:
            self._runtime.kernels.amaxes.renew()


class GraphedChunks(EagerChunks):
    """The micro-batches of one step: replayed, but for those that have to be eager."""

    def __init__(self, forward: Forward, inputs: Inputs, graphs: ChunkGraphs) -> None:
        super().__init__(forward)
        self._inputs, self._graphs = inputs, graphs
        self._replayed: dict[tuple[int, int], tuple[int, Microbatch]] = {}
        self._ready: set[int] = set()  # chunks whose weights lie where graphs read them

    def forward(self, chunk: int, i: int, x: Tensor | None) -> Tensor:
        """See ChunkRunner."""
        if self._graphs.suits(chunk, i):
            inputs = self._inputs(chunk, i, x)
            if chunk not in self._ready:
                self._ready.add(chunk)
                self._graphs.place_weights(chunk)
            slot = self._free_slot(chunk)
            if (one := self._graphs.microbatch(chunk, i, slot, inputs)) is not None:
                self._replayed[chunk, i] = slot, one
                one.take(inputs)
                self._graphs.replay(one.forward, "replayed_forward", one.exchanged[0])
                assert one.forward.result is not None
                # The sum of losses is read when the step has long gone on.
                return one.forward.result.clone() if one.grad is None else one.forward.result
        return super().forward(chunk, i, x)

    def _free_slot(self, chunk: int) -> int:
        used = {slot for (c, _), (slot, _) in self._replayed.items() if c == chunk}
        return next(n for n in range(len(used) + 1) if n not in used)

    def backward(self, chunk: int, i: int, grad: Tensor | None) -> Tensor | None:
        """See ChunkRunner."""
        if (chunk, i) not in self._replayed:
            return super().backward(chunk, i, grad)
        _, one = self._replayed.pop((chunk, i))
        if one.grad is not None:
            assert grad is not None
            one.grad.copy_(grad)
        self._graphs.replay(one.backward, "replayed_backward", one.exchanged[1])
        self._graphs.written(chunk, i)
        # It may be on its way to another stage when the next micro-batch makes its own.
        return None if one.backward.result is None else one.backward.result.clone()


def _sinks_of(flat: FlatChunk) -> list[GradientSink]:
    """Where a chunk's backward puts gradients: a last chunk may read another's embedding."""
    lent = sink_of(flat.module.output_weight) if flat.module.last else None  # type: ignore[arg-type]
    return flat.sinks if lent is None or lent in flat.sinks else [*flat.sinks, lent]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A tensor that is collected during a capture would be freed in it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
