"""CUDA graphs of the forward and backward of chunks, which save the host's time for launches in small micro-batches.

A micro-batch of a small model is a few hundred launches, each of which takes the host longer than the GPU. From the
third step on, a chunk's forward and backward are captured, once for each micro-batch that may be in flight, and
replayed with one launch each. A capture reads inputs from memory of its own and writes outputs there. Gradients go into
the same sinks as without graphs.

Data- and pipeline-parallel communication is not captured. It runs between replays, so that hangs are reported as in
eager steps. The exchange of a tensor-parallel group (exchange.py) is captured, and the record of calls counts each
replay as one call of the exchange.

With data parallelism captures are cut where a chunk communicates (unit_cuts.py), and all micro-batches are replayed.
The exchange of a tensor- or context-parallel group reaches across such cuts. With one of these axes, some micro-batches
of each chunk therefore run eagerly: the first one of a step, since parameters are still being gathered, and the last
one, since buckets are reduced during its backward.

Without a pipeline a chunk is captured when a replay first needs it. In a pipeline all captures of a step
(core/capture_plan.py) are made before its first forward, when nothing is in flight:

- A capture frees cached memory, for which the device waits for all its work. A send or receive may wait for a peer that
  waits in the same way.
- An eager micro-batch may be in flight, and its graph in autograd keeps the nodes alive that accumulate gradients of
  parameters. A capture would use the same nodes. They stand on the main stream, for which a captured stream cannot
  wait.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megascale.core.calls import NullCallLog
from megascale.core.capture_plan import find_boundaries, find_free_index, plan_captures, reads_complete_state
from megascale.core.schedule import Action, ActionKind
from megascale.ops.gradient_sink import GradientSink, get_sink
from megascale.parallel.buffers import Axes, ParamAndGradBuffer
from megascale.parallel.captures import CudaCapture, CudaCapturePool, HostCapture, HostCapturePool
from megascale.parallel.collectives import all_reduce
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.exchange_calls import CapturedCalls
from megascale.parallel.pipeline import EagerRunner, Forward
from megascale.parallel.runtime import Runtime
from megascale.parallel.unit_cuts import UnitCuts, list_cast_weights
from megascale.parallel.weight_gradients import WeightGradientQueue

# Number of an engine's first steps that are eager. The first one counts contributions to gradients and chooses kernels.
# The second one uses these counts, as all later steps do.
EAGER_STEPS = 2

# (chunk, micro-batch, input or None) -> the tensors that the chunk reads: its input and fields of the micro-batch.
ReadInputs = Callable[[int, int, Tensor | None], tuple[Tensor, ...]]
# (chunk, tensors that the chunk reads) -> the chunk's output, as `Forward` returns it. The operators must be the same
# for every micro-batch and step.
Compute = Callable[[int, tuple[Tensor, ...]], Tensor]
# chunk -> tensors like those that the chunk reads, with any valid values.
MakeInputs = Callable[[int], tuple[Tensor, ...]]


@dataclass
class CapturedMicrobatch:
    """A chunk's captured forward and backward for one micro-batch in flight, with the memory that they use.

    Attributes:
        inputs: the tensors that the forward reads.
        grad: gradient of the output, which the backward reads; None on the model's last chunk.
        forward_bytes, backward_bytes: bytes that tensor-parallel ranks exchange in the forward, and in the backward.
    """

    inputs: tuple[Tensor, ...]
    grad: Tensor | None
    forward: CudaCapture | HostCapture
    backward: CudaCapture | HostCapture
    forward_bytes: int = 0
    backward_bytes: int = 0

    def copy_inputs(self, inputs: tuple[Tensor, ...]) -> None:
        """Copy the inputs of the next replay into `inputs`."""
        for static_input, value in zip(self.inputs, inputs, strict=True):
            static_input.detach().copy_(value)


class ChunkGraphs:
    """The captures of a rank's chunks.

    Args:
        actions: the schedule's actions of this stage.
        shape: shape of an activation between chunks.
        data_parallel: communicates at the cuts of captures.
        make_inputs: makes the inputs of captures before the first forward of a step.

    Attributes:
        is_enabled: whether steps use the captures; `set_enabled` sets it.
        failure: why a capture failed, "" if none has failed. After a failure all micro-batches run eagerly.
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
        make_inputs: MakeInputs,
    ) -> None:
        self.is_enabled = True
        self.failure = ""
        self._buffers = list(buffers)
        self._compute = compute
        self._make_inputs = make_inputs
        self._runtime = runtime
        self._device = device
        self._shape = shape
        self._boundaries = find_boundaries(actions)
        # Chunks of which some micro-batches neither wait for parameters nor reduce gradients.
        self._chunks_with_complete_state = {
            chunk
            for kind, chunk, i in actions
            if kind == ActionKind.FORWARD and reads_complete_state(self._boundaries[chunk], i)
        }
        self._is_data_parallel = buffers[0].axes.data.size > 1
        self._tensor_axis = buffers[0].axes.tensor
        self._unit_cuts: UnitCuts | None = None
        self._agreement_axis = self._tensor_axis  # either all ranks of this axis replay, or all run eagerly
        self._data_parallel = data_parallel
        self._has_slots = buffers[0].zero >= 2
        if self._has_slots or (self._is_data_parallel and not _has_exchange(buffers[0].axes)):
            self._unit_cuts = UnitCuts(buffers, data_parallel, runtime)
        if self._has_slots:
            self._agreement_axis = buffers[0].axes.stage
        self._sinks = [_find_sinks(buffer) for buffer in buffers]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # By (chunk, index of the micro-batch in flight), and also by whether the backward overwrites gradients.
        self._pools: dict[tuple[int, int], CudaCapturePool | HostCapturePool] = {}
        self._captures: dict[tuple[int, int, bool], CapturedMicrobatch] = {}
        self._step_count = 0
        self._has_captured = False  # whether the present step has captured
        self._plan = plan_captures(actions, self._boundaries, self.can_replay)

    def set_enabled(self, enabled: bool) -> None:
        """Let the next steps replay captures if `enabled`, else launch each operator."""
        self.is_enabled = enabled

    def count_captures(self) -> int:
        """Return the number of captured micro-batches."""
        return len(self._captures)

    def clear(self) -> None:
        """Drop all captures, because the chunks will run other operators."""
        self._captures.clear()
        self._pools.clear()

    def restart(self) -> None:
        """Drop all captures, which hold groups of a failed attempt. Run as many eager steps as a new engine does."""
        self.clear()
        self._step_count = 0
        self._has_captured = False

    def begin_step(self, forward: Forward, inputs: ReadInputs, eagerly: bool = False) -> EagerRunner:
        """Return the runner of the next step's micro-batches. With `eagerly` it replays none of them."""
        self._step_count += 1
        if not self.is_enabled or self.failure or eagerly or self._step_count <= EAGER_STEPS:
            return EagerRunner(forward, self._runtime.weight_gradients)
        if self._plan.captures and not self._captures:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # captures cannot use the cached memory of eager micro-batches
            if self._plan.precedes_step:
                self._capture_plan()
            if self.failure:
                return EagerRunner(forward, self._runtime.weight_gradients)
        return GraphedRunner(forward, inputs, self, self._runtime.weight_gradients)

    def end_step(self) -> None:
        """After a step with captures, free the cached memory of eager micro-batches, which captures cannot use."""
        if self._has_captured and self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._has_captured = False

    def can_replay(self, chunk: int, i: int) -> bool:
        """Return whether micro-batch `i` of the chunk may be replayed."""
        if self.failure:
            return False
        if self._unit_cuts is not None or not self._is_data_parallel:
            return True
        return reads_complete_state(self._boundaries[chunk], i)

    def is_typical(self, chunk: int, i: int) -> bool:
        """Return whether the times of an eager micro-batch `i` show what replays of the chunk would save.

        A micro-batch that waits for parameters or reduces gradients counts only if all micro-batches do.
        """
        if not self.can_replay(chunk, i):
            return False
        if not self._is_data_parallel or chunk not in self._chunks_with_complete_state:
            return True
        return reads_complete_state(self._boundaries[chunk], i)

    def find_or_capture(
        self, chunk: int, i: int, flight_index: int, inputs: tuple[Tensor, ...]
    ) -> CapturedMicrobatch | None:
        """Return the captures for micro-batch `i`; capture if there are none yet.

        Return None if a capture fails on any rank of the tensor-parallel group (ZeRO-2 and 3: of the stage). Raise
        TrainingError if a peer of the exchange has died.

        Args:
            flight_index: index of the micro-batch among those in flight. There is memory for each index.
            inputs: example of the tensors that the chunk reads.
        """
        return self._find_or_capture(chunk, i, flight_index, lambda: inputs)

    def _capture_plan(self) -> None:
        """Make all captures of a step before its first forward, until one of them fails."""
        try:
            for planned in self._plan.captures:
                chunk = planned.chunk
                make_inputs = partial(self._make_early_inputs, chunk)
                if self._find_or_capture(chunk, planned.microbatch, planned.flight_index, make_inputs) is None:
                    return
        finally:
            for buffer in self._buffers:
                buffer.module.linears.invalidate_weights()  # type: ignore[operator, union-attr]

    def _make_early_inputs(self, chunk: int) -> tuple[Tensor, ...]:
        """Return inputs for a capture of the chunk before its weights and its micro-batches have arrived."""
        module = self._buffers[chunk].module
        module.linears.reserve_pinned_weights(list_cast_weights(module))  # type: ignore[operator, union-attr]
        return self._make_inputs(chunk)

    def _find_or_capture(
        self, chunk: int, i: int, flight_index: int, make_inputs: Callable[[], tuple[Tensor, ...]]
    ) -> CapturedMicrobatch | None:
        """Return the captures for micro-batch `i` as `find_or_capture` does. `make_inputs` makes example inputs."""
        overwrites = i == self._boundaries[chunk].first_backward
        microbatch = self._captures.get((chunk, flight_index, overwrites))
        if microbatch is not None:
            return microbatch
        self._runtime.stream.synchronize()
        try:
            microbatch = self._capture(chunk, flight_index, overwrites, make_inputs())
        except Exception as error:
            # After the loss of a peer, the ranks cannot agree on a failed capture.
            if self._tensor_axis.exchange is not None:
                self._tensor_axis.exchange.check()
            # A run does not need its captures, so no other error of a capture may end it.
            self.failure = f"capture failed: {_get_first_line(error)}"
        if self._has_any_rank_failed():
            group = "tensor-parallel group" if self._agreement_axis is self._tensor_axis else "pipeline stage"
            self.failure = self.failure or f"capture failed on another rank of the {group}"
            self._runtime.kernels.record_choice("CUDA graphs", f"off ({self.failure})")
            self._abandon_captures()
            return None
        assert microbatch is not None
        self._captures[chunk, flight_index, overwrites] = microbatch
        return microbatch

    def _abandon_captures(self) -> None:
        """Drop all captures, and what the failed one has left in the parameters and on the side stream.

        Micro-batches in flight are replayed to their end.
        """
        self.clear()
        gc.collect()  # memory may be short, and the error's traceback may hold tensors of the capture
        self._runtime.stream.discard()
        for buffer in self._buffers:
            for param in buffer.parameters:
                param.grad = None  # memory of the capture, to which an eager backward would add

    def _has_any_rank_failed(self) -> bool:
        """Return whether a capture has failed on any rank of the agreement's axis. Collective over this axis."""
        if self._agreement_axis.size == 1:
            return bool(self.failure)
        failed = torch.tensor([float(bool(self.failure))], device=self._device)
        return bool(all_reduce(failed, self._agreement_axis, dist.ReduceOp.MAX, "agree_on_capture").wait().item())

    def replay(self, capture: CudaCapture | HostCapture, op: str, nbytes: int) -> None:
        """Replay a capture.

        Args:
            op: name of the call of the tensor-parallel group in the record of calls, if the capture has an exchange.
            nbytes: bytes that the exchange moves.
        """
        exchange = self._tensor_axis.exchange
        if exchange is None:
            capture.replay()
            return
        transfer = self._tensor_axis.transfer(op, nbytes)
        exchange.before_replay()
        capture.replay()
        exchange.after_replay()
        transfer.done()

    def replay_backward(self, chunk: int, i: int, microbatch: CapturedMicrobatch) -> None:
        """Replay the backward of micro-batch `i`. A step's first one overwrites gradients, all others add to them."""
        cuts = nullcontext() if self._unit_cuts is None else self._unit_cuts.replay(chunk)
        with cuts:
            self.replay(microbatch.backward, "replayed_backward", microbatch.backward_bytes)
        if i == self._boundaries[chunk].first_backward:
            for sink in self._sinks[chunk]:
                sink.should_overwrite = False

    def pin_weights(self, chunk: int) -> None:
        """Copy the chunk's weights in float8 to the memory in which graphs read them, unless cuts do this."""
        if self._unit_cuts is not None:
            return
        module = self._buffers[chunk].module
        module.linears.pin_weights(list_cast_weights(module))  # type: ignore[operator, union-attr]

    def _make_pool(self) -> CudaCapturePool | HostCapturePool:
        return CudaCapturePool(self._stream) if self._stream else HostCapturePool()

    def _capture(
        self, chunk: int, flight_index: int, overwrites: bool, inputs: tuple[Tensor, ...]
    ) -> CapturedMicrobatch:
        """Capture a chunk's forward and backward. Raises RuntimeError if that is not possible.

        Args:
            overwrites: whether the backward overwrites gradients, as the first one of a step does.
        """
        pool = self._pools.get((chunk, flight_index))
        if pool is None:
            pool = self._make_pool()
            self._pools[chunk, flight_index] = pool
        static_inputs = tuple(torch.empty_like(value).copy_(value) for value in inputs)
        if static_inputs[0].is_floating_point():  # an activation; tokens have no gradient
            static_inputs[0].requires_grad_()
        grad = None
        if not self._buffers[chunk].module.is_last:
            grad = torch.empty(self._shape, dtype=self._buffers[chunk].params.dtype, device=self._device)
        outputs: list[Tensor] = []  # the forward puts its output here, and the backward takes it
        captured_calls: list[CapturedCalls] = []  # with an exchange, forward and backward append their calls
        if self._unit_cuts is not None and self._device.type == "cuda":
            # All micro-batches are replayed, and a capture cannot use the cached memory of eager ones.
            torch.cuda.empty_cache()
        try:
            with ExitStack() as stack:
                stack.enter_context(self._set_overwrites(chunk, overwrites))
                stack.enter_context(_no_garbage_collection())
                # Autograd's own thread could not end a graph that this thread has begun.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                if self._unit_cuts is None:
                    stack.enter_context(_without_gathers(self._buffers[chunk].module))
                elif not isinstance(pool, HostCapturePool):
                    stack.enter_context(self._unit_cuts.reserve_weights(chunk))
                    stack.enter_context(self._unit_cuts.capture_in(pool))
                    if not self._has_slots:
                        stack.enter_context(self._data_parallel.capture_reductions(chunk))
                forward = pool.capture(partial(self._run_forward, chunk, static_inputs, outputs, captured_calls))
                backward = pool.capture(partial(self._run_backward, static_inputs[0], outputs, grad, captured_calls))
        finally:
            self._renew_amaxes()
        self._has_captured = True
        microbatch = CapturedMicrobatch(static_inputs, grad, forward, backward)
        if captured_calls:
            forward_calls, backward_calls = captured_calls
            microbatch.forward_bytes = forward_calls.nbytes
            microbatch.backward_bytes = backward_calls.nbytes
        return microbatch

    def _run_forward(
        self, chunk: int, inputs: tuple[Tensor, ...], outputs: list[Tensor], captured_calls: list[CapturedCalls]
    ) -> Tensor:
        """Run the forward under capture, and put its output into `outputs` for the backward."""
        inputs[0].grad = None
        self._renew_amaxes()
        with self._capture_exchange(captured_calls):
            outputs[:] = [self._compute(chunk, inputs)]
        return outputs[0].detach()

    def _run_backward(
        self, x: Tensor, outputs: list[Tensor], grad: Tensor | None, captured_calls: list[CapturedCalls]
    ) -> Tensor | None:
        """Run the backward under capture, and return the gradient of the chunk's input, if it has one."""
        self._renew_amaxes()
        with self._capture_exchange(captured_calls):
            torch.autograd.backward(outputs.pop(), grad)
            self._runtime.stream.synchronize()
        return x.grad

    @contextmanager
    def _capture_exchange(self, captured_calls: list[CapturedCalls]) -> Iterator[None]:
        """Capture the enclosed calls of the tensor-parallel exchange, and append them to `captured_calls`.

        Captured calls do not run, so the record of calls does not count them.
        """
        exchange = self._tensor_axis.exchange
        if exchange is None:
            yield
            return
        record = self._runtime.calls
        self._runtime.calls = NullCallLog()
        try:
            with exchange.capture() as calls:
                captured_calls.append(calls)
                yield
        finally:
            self._runtime.calls = record

    @contextmanager
    def _set_overwrites(self, chunk: int, overwrites: bool) -> Iterator[None]:
        """Let the enclosed backward overwrite the gradients of GEMMs if `overwrites`, else add to all gradients."""
        sinks = self._sinks[chunk]
        overwritten_ids: set[int] = set()
        if overwrites:
            # All buffers, since a sink of this chunk may belong to another chunk's embedding (`_find_sinks`).
            overwritten_ids = {id(buffer.sinks[i]) for buffer in self._buffers for i in buffer.overwritten_params}
        previous = [sink.should_overwrite for sink in sinks]
        for sink in sinks:
            sink.should_overwrite = id(sink) in overwritten_ids
        try:
            yield
        finally:
            for sink, should_overwrite in zip(sinks, previous, strict=True):
                sink.should_overwrite = should_overwrite

    def _renew_amaxes(self) -> None:
        """Take new zeroed memory for amax values, because a graph must zero the memory that it updates."""
        if self._runtime.kernels.amaxes is not None:
            self._runtime.kernels.amaxes.renew()


class GraphedRunner(EagerRunner):
    """Runs the micro-batches of one step by replays, except those that must be eager."""

    def __init__(
        self, forward: Forward, inputs: ReadInputs, graphs: ChunkGraphs, weight_gradients: WeightGradientQueue
    ) -> None:
        super().__init__(forward, weight_gradients)
        self._read_inputs = inputs
        self._graphs = graphs
        # By (chunk, micro-batch) in flight: its flight index, and its captures.
        self._replayed: dict[tuple[int, int], tuple[int, CapturedMicrobatch]] = {}
        self._pinned_chunks: set[int] = set()  # chunks whose weights are in the memory that graphs read

    def forward(self, chunk: int, i: int, x: Tensor | None) -> Tensor:
        """Replay the forward of micro-batch `i`, or run it eagerly."""
        if not self._graphs.can_replay(chunk, i):
            return super().forward(chunk, i, x)
        inputs = self._read_inputs(chunk, i, x)
        if chunk not in self._pinned_chunks:
            self._pinned_chunks.add(chunk)
            self._graphs.pin_weights(chunk)
        flight_index = self._find_flight_index(chunk)
        microbatch = self._graphs.find_or_capture(chunk, i, flight_index, inputs)
        if microbatch is None:
            return super().forward(chunk, i, x)
        self._replayed[chunk, i] = flight_index, microbatch
        microbatch.copy_inputs(inputs)
        self._graphs.replay(microbatch.forward, "replayed_forward", microbatch.forward_bytes)
        output = microbatch.forward.result
        assert output is not None
        if microbatch.grad is not None:
            return output
        # A loss is added to the step's sum later, when another replay may have overwritten this memory.
        return output.clone()

    def _find_flight_index(self, chunk: int) -> int:
        """Return the smallest index that no micro-batch of the chunk in flight has."""
        return find_free_index(
            flight_index for (used_chunk, _), (flight_index, _) in self._replayed.items() if used_chunk == chunk
        )

    def backward(self, chunk: int, i: int, grad: Tensor | None) -> Tensor | None:
        """Replay the backward of micro-batch `i` if its forward was replayed, else run it eagerly."""
        if (chunk, i) not in self._replayed:
            return super().backward(chunk, i, grad)
        _, microbatch = self._replayed.pop((chunk, i))
        if microbatch.grad is not None:
            assert grad is not None
            microbatch.grad.copy_(grad)
        self._graphs.replay_backward(chunk, i, microbatch)
        # Copy the gradient: it may still be being sent to another stage when the next replay overwrites this memory.
        x_grad = microbatch.backward.result
        return None if x_grad is None else x_grad.clone()


def _find_sinks(buffer: ParamAndGradBuffer) -> list[GradientSink]:
    """Return the sinks that a chunk's backward writes.

    The output matrix of the model's last chunk may be the embedding of another chunk.
    """
    if not buffer.module.is_last:
        return buffer.sinks
    output_sink = get_sink(buffer.module.output_weight)  # type: ignore[arg-type]
    if output_sink is None or output_sink in buffer.sinks:
        return buffer.sinks
    return [*buffer.sinks, output_sink]


def _has_exchange(axes: Axes) -> bool:
    """Return whether chunks exchange activations with other ranks within a forward or a backward."""
    return axes.tensor.size > 1 or axes.along("context").size > 1


def _get_first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _without_gathers(module: nn.Module) -> Iterator[None]:
    """Let the enclosed forward of a chunk not wait for gathers of parameters, which no graph may await.

    Captures without cuts need this. A replay needs no such wait, since the eager first micro-batch of the step has
    waited.
    """
    pre_forward_gather = module.pre_forward_gather
    module.pre_forward_gather = lambda unit: None  # type: ignore[assignment]
    try:
        yield
    finally:
        module.pre_forward_gather = pre_forward_gather


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: a tensor that is collected during a capture would be freed within the graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
