"""CUDA graphs of the forward and backward of chunks: small micro-batches cost GPU time instead of launch time.

A micro-batch of a small model is a few hundred launches, each of which costs the host more than the GPU. From the
third step on, a chunk's forward and backward are captured, once for each micro-batch that may be in flight, and
replayed with one launch each. They read inputs from memory of their own and leave outputs there. Gradients go into
the same sinks as without graphs. Data- and pipeline-parallel communication stays outside, between replays, so that
hangs are reported as before. The exchange of a tensor-parallel group (exchange.py) is captured, and the record of
calls counts a replay as one call of it.

Two kinds of micro-batches run eagerly with data parallelism: those whose parameters are still being gathered (each
chunk's first in a step) and those whose buckets are reduced during backward (its last). Under ZeRO-2 and 3 captures
are cut between units (unit_cuts.py), and all micro-batches are replayed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.core.calls import NullCallLog
from megascale.core.schedule import Action, ActionKind
from megascale.ops.gradient_sink import GradientSink, get_sink
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.captures import CudaCapture, CudaCapturePool, HostCapture, HostCapturePool
from megascale.parallel.collectives import all_reduce
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.exchange import CapturedCalls
from megascale.parallel.pipeline import EagerRunner, Forward
from megascale.parallel.runtime import Runtime
from megascale.parallel.unit_cuts import UnitCuts
from megascale.parallel.weight_gradients import WeightGradientQueue

EAGER_STEPS = 2  # of an engine: the first counts gradients and chooses kernels; the second runs as all later ones do

# (chunk, micro-batch, input or None) -> the tensors that the chunk reads: its input and fields of the micro-batch.
Inputs = Callable[[int, int, Tensor | None], tuple[Tensor, ...]]
# (chunk, inputs) -> its output, as Forward's. The same for every micro-batch and step.
Compute = Callable[[int, tuple[Tensor, ...]], Tensor]


@dataclass
class CapturedMicrobatch:
    """A chunk's captures for one micro-batch in flight, and the memory that they read and write.

    Attributes:
        inputs: copies of the tensors that `Inputs` gave.
        grad: gradient of the output; None on the model's last chunk.
        exchanged: bytes that tensor-parallel ranks exchange in the forward, and in the backward.
    """

    inputs: tuple[Tensor, ...]
    grad: Tensor | None
    forward: CudaCapture | HostCapture
    backward: CudaCapture | HostCapture
    exchanged: tuple[int, int] = (0, 0)

    def copy_inputs(self, inputs: tuple[Tensor, ...]) -> None:
        """Copy the inputs of the next replay into the memory that it reads."""
        for static_input, value in zip(self.inputs, inputs, strict=True):
            static_input.detach().copy_(value)


@dataclass(frozen=True)
class Boundaries:
    """The micro-batches of a chunk that differ from all others.

    Attributes:
        first_forward: its parameters may still be in flight.
        first_backward: it overwrites gradients instead of adding to them.
        reduced: micro-batches in whose backward buckets are reduced.
    """

    first_forward: int
    first_backward: int
    reduced: frozenset[int]


def find_boundaries(actions: Sequence[Action]) -> dict[int, Boundaries]:
    """Return the boundaries of each chunk in a stage's list of actions."""
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
        buffers: the chunks' buffers.
        actions: actions of this stage.
        compute: runs a chunk.
        runtime: the rank's runtime.
        shape: shape of an activation between chunks.
        device: device of the chunks.
        data_parallel: communicates for the units of chunks (ZeRO-2 and 3).

    Attributes:
        enabled: whether steps use the captures; `set_enabled` sets it.
        failure: why a capture failed, or "" if none has failed. After a failure all micro-batches run eagerly.
    """

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        actions: Sequence[Action],
        compute: Compute,
        runtime: Runtime,
        shape: tuple[int, ...],
        device: torch.device,
        data_parallel: DataParallel,
    ) -> None:
        self.enabled = True
        self.failure = ""
        self._buffers = list(buffers)
        self._compute = compute
        self._runtime = runtime
        self._device = device
        self._shape = shape
        self._boundaries = find_boundaries(actions)
        self._is_data_parallel = buffers[0].axes.data.size > 1
        self._tensor = buffers[0].axes.tensor
        self._cuts: UnitCuts | None = None
        self._agreement = self._tensor  # its ranks replay alike or not at all
        if buffers[0].zero >= 2:
            self._cuts = UnitCuts(buffers, data_parallel, runtime)
            self._agreement = buffers[0].axes.stage
        self._sinks = [_find_sinks(buffer) for buffer in buffers]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pools: dict[tuple[int, int], CudaCapturePool | HostCapturePool] = {}
        self._captures: dict[tuple[int, int, bool], CapturedMicrobatch] = {}
        self._steps = 0
        self._has_captured = False  # in the present step

    def set_enabled(self, enabled: bool) -> None:
        """Replay from the next step on, or launch each operator."""
        self.enabled = enabled

    def clear(self) -> None:
        """Drop all captures, because the chunks will compute something else."""
        self._captures.clear()
        self._pools.clear()

    def restart(self) -> None:
        """Drop all captures, which hold groups that are gone, and run as many eager steps as a new engine does."""
        self.clear()
        self._steps = 0
        self._has_captured = False

    def begin_step(self, forward: Forward, inputs: Inputs, eagerly: bool = False) -> EagerRunner:
        """Return the runner of the next step's micro-batches; `eagerly` replays none of them."""
        self._steps += 1
        if not self.enabled or self.failure or eagerly or self._steps <= EAGER_STEPS:
            return EagerRunner(forward, self._runtime.weight_gradients)
        return GraphedRunner(forward, inputs, self, self._runtime.weight_gradients)

    def end_step(self) -> None:
        """Free the memory that eager micro-batches used once captured ones hold memory of their own."""
        if self._has_captured and self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._has_captured = False

    def can_replay(self, chunk: int, i: int) -> bool:
        """Return whether micro-batch `i` of the chunk is replayed."""
        if self.failure:
            return False
        boundaries = self._boundaries[chunk]
        if self._cuts is not None:
            module = self._buffers[chunk].module
            # Copies of weights are made of all of the chunk's weights, which have arrived after the first forward.
            return not (module.linears.copies_weights and i == boundaries.first_forward)  # type: ignore[union-attr]
        return not (self._is_data_parallel and (i == boundaries.first_forward or i in boundaries.reduced))

    def microbatch(self, chunk: int, i: int, slot: int, inputs: tuple[Tensor, ...]) -> CapturedMicrobatch | None:
        """Return the captures for micro-batch i as the `slot`-th in flight, capturing if needed; None on failure."""
        is_first = i == self._boundaries[chunk].first_backward
        microbatch = self._captures.get((chunk, slot, is_first))
        if microbatch is not None:
            return microbatch
        try:
            microbatch = self._capture(chunk, slot, is_first, inputs)
        except RuntimeError as error:
            self.failure = f"capture failed: {str(error).strip().splitlines()[0]}"
        if self._has_any_rank_failed():
            group = "tensor-parallel group" if self._agreement is self._tensor else "pipeline stage"
            self.failure = self.failure or f"capture failed on another rank of the {group}"
            self._runtime.kernels.record_choice("CUDA graphs", f"off ({self.failure})")
            self.clear()  # possibly out of memory; micro-batches in flight are replayed to their end
            return None
        assert microbatch is not None
        self._captures[chunk, slot, is_first] = microbatch
        return microbatch

    def _has_any_rank_failed(self) -> bool:
        """Return whether a capture failed on a rank that must replay alike."""
        if self._agreement.size == 1:
            return bool(self.failure)
        failed = torch.tensor([float(bool(self.failure))], device=self._device)
        return bool(all_reduce(failed, self._agreement, dist.ReduceOp.MAX, "agree_on_capture").wait().item())

    def replay(self, capture: CudaCapture | HostCapture, op: str, nbytes: int) -> None:
        """Replay. With an exchange inside, the record of calls counts it as `op` of the tensor-parallel group."""
        exchange = self._tensor.exchange
        if exchange is None:
            capture.replay()
            return
        transfer = self._tensor.transfer(op, nbytes)
        exchange.before_replay()
        capture.replay()
        exchange.after_replay()
        transfer.done()

    def replay_backward(self, chunk: int, i: int, microbatch: CapturedMicrobatch) -> None:
        """Replay the backward of micro-batch `i`, which overwrites gradients or adds to them."""
        op, nbytes = "replayed_backward", microbatch.exchanged[1]
        if self._cuts is None:
            self.replay(microbatch.backward, op, nbytes)
        else:
            with self._cuts.replay(chunk):
                self.replay(microbatch.backward, op, nbytes)
        if i == self._boundaries[chunk].first_backward:
            for sink in self._sinks[chunk]:
                sink.overwrite = False

    def pin_weights(self, chunk: int) -> None:
        """Put float8 copies of the chunk's weights where graphs read them."""
        module = self._buffers[chunk].module
        module.linears.pin_weights(module.collect_linear_weights().values())  # type: ignore[operator, union-attr]

    def _make_pool(self) -> CudaCapturePool | HostCapturePool:
        return CudaCapturePool(self._stream) if self._stream else HostCapturePool()

    def _capture(self, chunk: int, slot: int, is_first: bool, inputs: tuple[Tensor, ...]) -> CapturedMicrobatch:
        pool = self._pools.get((chunk, slot))
        if pool is None:
            pool = self._make_pool()
            self._pools[chunk, slot] = pool
        static_inputs = tuple(torch.empty_like(value).copy_(value) for value in inputs)
        if static_inputs[0].is_floating_point():
            static_inputs[0].requires_grad_()
        grad = None
        if not self._buffers[chunk].module.last:
            grad = torch.empty(self._shape, dtype=self._buffers[chunk].params.dtype, device=self._device)
        outputs: list[Tensor] = []
        exchanged: list[CapturedCalls] = []
        self._runtime.stream.synchronize()
        if self._cuts is not None and self._device.type == "cuda":
            # No micro-batch runs eagerly from here on, and a capture cannot take the memory that eager ones have left.
            torch.cuda.empty_cache()
        try:
            with ExitStack() as stack:
                stack.enter_context(self._set_overwrites(chunk, is_first))
                stack.enter_context(_no_garbage_collection())
                if self._cuts is not None and not isinstance(pool, HostCapturePool):
                    stack.enter_context(self._cuts.capture_in(pool))
                forward = pool.capture(partial(self._run_forward, chunk, static_inputs, outputs, exchanged))
                backward = pool.capture(partial(self._run_backward, static_inputs[0], outputs, grad, exchanged))
        finally:
            self._renew_amax_slots()
        self._has_captured = True
        microbatch = CapturedMicrobatch(static_inputs, grad, forward, backward)
        if exchanged:
            microbatch.exchanged = exchanged[0].nbytes, exchanged[1].nbytes
        return microbatch

    def _run_forward(
        self, chunk: int, inputs: tuple[Tensor, ...], outputs: list[Tensor], exchanged: list[CapturedCalls]
    ) -> Tensor:
        """Run the forward that is captured; its output is appended to `outputs` for the backward."""
        inputs[0].grad = None
        self._renew_amax_slots()
        with self._capture_exchange(exchanged):
            outputs[:] = [self._compute(chunk, inputs)]
        return outputs[0].detach()

    def _run_backward(
        self, x: Tensor, outputs: list[Tensor], grad: Tensor | None, exchanged: list[CapturedCalls]
    ) -> Tensor | None:
        """Run the backward that is captured; returns the gradient of the chunk's input, if it has one."""
        self._renew_amax_slots()
        with self._capture_exchange(exchanged):
            torch.autograd.backward(outputs.pop(), grad)
            self._runtime.stream.synchronize()
        return x.grad

    @contextmanager
    def _capture_exchange(self, exchanged: list[CapturedCalls]) -> Iterator[None]:
        """Capture the exchange of tensor-parallel ranks. It does not run, so the record of calls does not see it."""
        exchange = self._tensor.exchange
        if exchange is None:
            yield
            return
        record = self._runtime.calls
        self._runtime.calls = NullCallLog()
        try:
            with exchange.capture() as calls:
                exchanged.append(calls)
                yield
        finally:
            self._runtime.calls = record

    @contextmanager
    def _set_overwrites(self, chunk: int, is_first: bool) -> Iterator[None]:
        """Let a backward of the chunk overwrite the gradients that a step's first one does, or add to all."""
        sinks = self._sinks[chunk]
        overwritten: set[int] = set()
        if is_first:
            overwritten = {id(buffer.sinks[i]) for buffer in self._buffers for i in buffer.overwritten_params}
        previous = [sink.overwrite for sink in sinks]
        for sink in sinks:
            sink.overwrite = id(sink) in overwritten
        try:
            yield
        finally:
            for sink, overwrite in zip(sinks, previous, strict=True):
                sink.overwrite = overwrite

    def _renew_amax_slots(self) -> None:
        """Take new zeros for amax, because each graph must make the ones that it updates."""
        if self._runtime.kernels.amaxes is not None:
            self._runtime.kernels.amaxes.renew()


class GraphedRunner(EagerRunner):
    """Runs the micro-batches of one step by replays, except those that have to be eager."""

    def __init__(
        self, forward: Forward, inputs: Inputs, graphs: ChunkGraphs, weight_gradients: WeightGradientQueue
    ) -> None:
        super().__init__(forward, weight_gradients)
        self._inputs = inputs
        self._graphs = graphs
        self._replayed: dict[tuple[int, int], tuple[int, CapturedMicrobatch]] = {}
        self._pinned: set[int] = set()  # chunks whose weights lie where graphs read them

    def forward(self, chunk: int, i: int, x: Tensor | None) -> Tensor:
        """Replay the forward of micro-batch `i`, or run it eagerly."""
        if not self._graphs.can_replay(chunk, i):
            return super().forward(chunk, i, x)
        inputs = self._inputs(chunk, i, x)
        if chunk not in self._pinned:
            self._pinned.add(chunk)
            self._graphs.pin_weights(chunk)
        slot = self._free_slot(chunk)
        microbatch = self._graphs.microbatch(chunk, i, slot, inputs)
        if microbatch is None:
            return super().forward(chunk, i, x)
        self._replayed[chunk, i] = slot, microbatch
        microbatch.copy_inputs(inputs)
        self._graphs.replay(microbatch.forward, "replayed_forward", microbatch.exchanged[0])
        output = microbatch.forward.result
        assert output is not None
        # The sum of losses is read after later replays have overwritten this memory.
        return output.clone() if microbatch.grad is None else output

    def _free_slot(self, chunk: int) -> int:
        used = {slot for (c, _), (slot, _) in self._replayed.items() if c == chunk}
        return next(n for n in range(len(used) + 1) if n not in used)

    def backward(self, chunk: int, i: int, grad: Tensor | None) -> Tensor | None:
        """Replay the backward of a micro-batch whose forward was replayed."""
        if (chunk, i) not in self._replayed:
            return super().backward(chunk, i, grad)
        _, microbatch = self._replayed.pop((chunk, i))
        if microbatch.grad is not None:
            assert grad is not None
            microbatch.grad.copy_(grad)
        self._graphs.replay_backward(chunk, i, microbatch)
        # The next micro-batch may overwrite the gradient while it is still being sent to another stage.
        x_grad = microbatch.backward.result
        return None if x_grad is None else x_grad.clone()


def _find_sinks(buffer: ParamAndGradBuffer) -> list[GradientSink]:
    """Return the sinks that a chunk's backward writes: a last chunk may read another's embedding."""
    if not buffer.module.last:
        return buffer.sinks
    output_sink = get_sink(buffer.module.output_weight)  # type: ignore[arg-type]
    if output_sink is None or output_sink in buffer.sinks:
        return buffer.sinks
    return [*buffer.sinks, output_sink]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: a tensor that is collected during a capture would be freed in the graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
