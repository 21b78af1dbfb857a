"""Pipeline executor: runs one stage's list of actions (core/schedule.py) for any schedule.

A stage may have several chunks of the model. `i` is the number of a micro-batch, x a chunk's input, y its output.

Sends and receives are never fused. Each pair of neighbouring stages has one communicator for activations and one for
gradients (P2P streams). A receive is posted where the schedule says, and awaited by the forward or backward that reads
it. A send is awaited only when its buffer is needed again or, without overlap, before the next forward or backward.
Neighbouring chunks of one stage pass their results to each other without communication.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.core.schedule import INPUT_BACKWARDS, SEND_SLOTS, ActionKind, Schedule, get_peer_offset
from megascale.core.spans import SPAN_OF_ACTION, SpanAxis
from megascale.parallel.collectives import Pending
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.runtime import Runtime, Transfer
from megascale.parallel.weight_gradients import WeightGradientQueue

_LABELS = {kind: kind.label.encode() for kind in ActionKind}  # name of each action in the record of calls

# (chunk, micro-batch, input or None for the model's first chunk) -> output. The output of the model's last chunk is a
# scalar: what the micro-batch adds to the step's loss.
Forward = Callable[[int, int, Tensor | None], Tensor]


class EagerRunner:
    """Runs forward and backward of one step's micro-batches, in the order of the schedule, operator by operator."""

    def __init__(self, forward: Forward, weight_gradients: WeightGradientQueue) -> None:
        self._forward = forward
        self._weight_gradients = weight_gradients
        # By (chunk, micro-batch) in flight: the chunk's input and output.
        self._in_flight: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def forward(self, chunk: int, i: int, x: Tensor | None) -> Tensor:
        """Run micro-batch `i` through `chunk`.

        Args:
            x: output of the previous chunk; None for the model's first chunk.

        Returns:
            The output, which stays valid until the micro-batch's backward.
        """
        if x is not None:
            x = x.detach().requires_grad_()
        y = self._forward(chunk, i, x)
        self._in_flight[chunk, i] = x, y
        return y.detach()

    def backward(self, chunk: int, i: int, grad: Tensor | None) -> Tensor | None:
        """Run the backward of micro-batch `i`. Gradients of parameters go into their sinks.

        Args:
            grad: gradient of the chunk's output; None for the model's last chunk.

        Returns:
            The gradient of the chunk's input; None for the model's first chunk.
        """
        x, y = self._in_flight.pop((chunk, i))
        torch.autograd.backward(y, grad)
        return None if x is None else x.grad

    def backward_input(self, chunk: int, i: int, grad: Tensor | None) -> Tensor | None:
        """Run the backward of micro-batch `i`, and queue the weight gradients of linear layers.

        Arguments and result are those of `backward`.
        """
        with self._weight_gradients.defer(chunk, i):
            return self.backward(chunk, i, grad)

    def backward_weight(self, chunk: int, i: int) -> None:
        """Compute the weight gradients that `backward_input` of micro-batch `i` has queued."""
        self._weight_gradients.flush(chunk, i)


@dataclass(frozen=True, eq=False)
class P2PStream:
    """A communicator of this rank and a rank of a neighbouring stage, for one kind of transfer.

    Attributes:
        group: process group of the two ranks.
        name: name in the record of calls (core/calls.py).
    """

    group: Any
    peer: int
    name: str = ""


# The P2P streams of a stage, by kind of transfer and the other rank's stage.
P2PStreams = Mapping[tuple[ActionKind, int], P2PStream]


class _StepState:
    """Tensors and transfers of one step. Keys (chunk, micro-batch) name a chunk of this stage.

    Attributes:
        pending_receives: receives in flight by kind, chunk and micro-batch.
        outputs: output of each forward whose backward has not run.
        input_grads: gradient of each chunk's input, until it is sent or read by the previous chunk.
        pending_sends: sends in flight by stream, oldest first.
        loss: sum of the losses so far; None before the first one.
        started_chunks: chunks that have run a forward.
    """

    def __init__(self) -> None:
        self.pending_receives: dict[tuple[ActionKind, int, int], Pending] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.input_grads: dict[tuple[int, int], Tensor] = {}
        self.pending_sends: dict[P2PStream, deque[Pending]] = {}
        self.loss: Tensor | None = None
        self.started_chunks: set[int] = set()


class PipelineExecutor:
    """Runs the actions of one stage.

    Args:
        schedule: schedule of all stages.
        stage: index of this rank's stage.
        streams: communicators with neighbouring stages.
        shape, dtype, device: properties of an activation between chunks. All activations have the same shape, so that
            no shape is ever sent.
        runtime: the rank's runtime.
    """

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        streams: P2PStreams,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        runtime: Runtime | None = None,
    ) -> None:
        self.runtime = runtime or Runtime()
        if schedule.splits_backward:
            self.runtime.weight_gradients.limit_bytes = sys.maxsize  # the schedule bounds the queue
        self.schedule = schedule
        self.stage = stage
        self.streams = streams
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.actions = schedule[stage]
        self.first_gather = schedule.first_gather(stage)
        self.activation_bytes = dtype.itemsize * torch.Size(shape).numel()
        # For each chunk of this stage, (stage, chunk) of the previous and of the next chunk in the model, or None.
        chunks = range(schedule.virtual_stages)
        self._previous = [schedule.chunk_map.neighbour(stage, chunk, -1) for chunk in chunks]
        self._next = [schedule.chunk_map.neighbour(stage, chunk, 1) for chunk in chunks]

    def run(self, runner: EagerRunner, data_parallel: DataParallel) -> Tensor | None:
        """Run one step over all micro-batches.

        Args:
            runner: runs forward and backward of a micro-batch.
            data_parallel: gathers the chunks' parameters and reduces their gradients when the schedule says so.

        Returns:
            The sum of the micro-batches' losses, detached, on the last stage; else None.
        """
        step = _StepState()
        recorder = self.runtime.recorder
        for index, (kind, chunk, i) in enumerate(self.actions):
            self.runtime.check_orders()
            self.runtime.calls.set_action(_LABELS[kind], chunk, i, index)
            recorder.begin_action(SPAN_OF_ACTION[kind], chunk, i)
            if kind.is_compute and self.schedule.exposed:  # without overlap, sends end before the next computation
                for queue in step.pending_sends.values():
                    self._limit_sends(queue, limit=0)
            if kind == ActionKind.FORWARD:
                self._run_forward(step, runner, data_parallel, chunk, i)
            elif kind in INPUT_BACKWARDS:
                self._run_backward(step, runner, data_parallel, kind, chunk, i)
            elif kind == ActionKind.BACKWARD_WEIGHT:
                data_parallel.begin_backward(chunk, kind)
                runner.backward_weight(chunk, i)
                data_parallel.end_backward(chunk, kind)
            elif kind.is_receive:
                step.pending_receives[kind, chunk, i] = self._receive(kind, chunk)
            elif kind == ActionKind.SEND_FORWARD:
                self._start_send(step, kind, chunk, step.outputs[chunk, i])
            elif kind == ActionKind.SEND_BACKWARD:
                self._start_send(step, kind, chunk, step.input_grads.pop((chunk, i)))
            elif kind == ActionKind.GATHER_PARAMS:
                data_parallel.start_gather(chunk)
            elif kind == ActionKind.REDUCE_GRADS:
                data_parallel.arm_reductions(chunk)
            recorder.end_action()
        for queue in step.pending_sends.values():
            self._limit_sends(queue, limit=0)
        return step.loss

    def _run_forward(
        self, step: _StepState, runner: EagerRunner, data_parallel: DataParallel, chunk: int, i: int
    ) -> None:
        """Run a forward, after the parameters, the input and a free send buffer are there."""
        if chunk not in step.started_chunks:
            step.started_chunks.add(chunk)
            data_parallel.await_parameters(chunk)
        x = None
        previous = self._previous[chunk]
        if previous is not None:
            previous_stage, previous_chunk = previous
            if previous_stage == self.stage:
                x = step.outputs[previous_chunk, i]
            else:
                x = step.pending_receives.pop((ActionKind.RECV_FORWARD, chunk, i)).wait()
        self._free_send_buffer(step, ActionKind.SEND_FORWARD, self._next[chunk])
        y = runner.forward(chunk, i, x)
        step.outputs[chunk, i] = y
        if self._next[chunk] is None:
            step.loss = y if step.loss is None else step.loss + y

    def _run_backward(
        self, step: _StepState, runner: EagerRunner, data_parallel: DataParallel, kind: ActionKind, chunk: int, i: int
    ) -> None:
        """Run a whole backward, or the half of it for the chunk's input, as `kind` says."""
        grad = None
        following = self._next[chunk]
        if following is not None:
            next_stage, next_chunk = following
            if next_stage == self.stage:
                grad = step.input_grads.pop((next_chunk, i))
            else:
                grad = step.pending_receives.pop((ActionKind.RECV_BACKWARD, chunk, i)).wait()
        self._free_send_buffer(step, ActionKind.SEND_BACKWARD, self._previous[chunk])
        data_parallel.begin_backward(chunk, kind)
        if kind == ActionKind.BACKWARD_INPUT:
            x_grad = runner.backward_input(chunk, i, grad)
        else:
            x_grad = runner.backward(chunk, i, grad)
        data_parallel.end_backward(chunk, kind)
        del step.outputs[chunk, i]
        if x_grad is not None:
            step.input_grads[chunk, i] = x_grad

    def run_microbatch(self, runner: EagerRunner, data_parallel: DataParallel) -> None:
        """Run forward and backward of micro-batch 0 alone, one chunk after another, without reducing gradients."""
        last_chunk = len(self._next) - 1
        y: Tensor | None = None  # output of the previous chunk in the loop
        x_grad: Tensor | None = None  # gradient of the following chunk's input
        for chunk, (previous, following) in enumerate(zip(self._previous, self._next, strict=True)):
            data_parallel.start_gather(chunk)
            data_parallel.await_parameters(chunk)
            x = None
            if previous is not None:
                if previous[0] == self.stage:
                    x = y
                else:
                    x = self._receive(ActionKind.RECV_FORWARD, chunk).wait()
            y = runner.forward(chunk, 0, x)
            if following is not None and following[0] != self.stage:
                self._send(self._stream(ActionKind.SEND_FORWARD, chunk), y).wait()
        for chunk in range(last_chunk, -1, -1):
            previous, following = self._previous[chunk], self._next[chunk]
            grad = None
            if following is not None:
                if following[0] == self.stage:
                    grad = x_grad
                else:
                    grad = self._receive(ActionKind.RECV_BACKWARD, chunk).wait()
            x_grad = self._run_whole_backward(runner, data_parallel, chunk, grad)
            if previous is not None and previous[0] != self.stage:
                assert x_grad is not None
                self._send(self._stream(ActionKind.SEND_BACKWARD, chunk), x_grad).wait()

    def _run_whole_backward(
        self, runner: EagerRunner, data_parallel: DataParallel, chunk: int, grad: Tensor | None
    ) -> Tensor | None:
        """Run the complete backward of micro-batch 0, in one action or in two as the schedule does."""
        if not self.schedule.splits_backward:
            data_parallel.begin_backward(chunk)
            x_grad = runner.backward(chunk, 0, grad)
            data_parallel.end_backward(chunk)
            return x_grad
        data_parallel.begin_backward(chunk, ActionKind.BACKWARD_INPUT)
        x_grad = runner.backward_input(chunk, 0, grad)
        data_parallel.end_backward(chunk, ActionKind.BACKWARD_INPUT)
        data_parallel.begin_backward(chunk, ActionKind.BACKWARD_WEIGHT)
        runner.backward_weight(chunk, 0)
        data_parallel.end_backward(chunk, ActionKind.BACKWARD_WEIGHT)
        return x_grad

    @torch.no_grad()
    def run_forward(self, microbatches: int, forward: Forward) -> list[Tensor]:
        """Run only forwards, one micro-batch after another.

        Return the outputs of the model's last chunk in order; an empty list on stages without that chunk.
        """
        outputs = []
        for i in range(microbatches):
            y: Tensor | None = None
            for chunk, (previous, following) in enumerate(zip(self._previous, self._next, strict=True)):
                x = None
                self.runtime.calls.set_action(b"evaluate", chunk, i)
                if previous is not None:
                    # The previous chunk of the same stage has run just before.
                    x = y if previous[0] == self.stage else self._receive(ActionKind.RECV_FORWARD, chunk).wait()
                y = forward(chunk, i, x)
                if following is None:
                    outputs.append(y)
                elif following[0] != self.stage:
                    self._send(self._stream(ActionKind.SEND_FORWARD, chunk), y).wait()
        return outputs

    def _start_send(self, step: _StepState, kind: ActionKind, chunk: int, tensor: Tensor) -> None:
        """Start a send, and put it at the end of the stream's sends in flight."""
        stream = self._stream(kind, chunk)
        step.pending_sends.setdefault(stream, deque()).append(self._send(stream, tensor))

    def _free_send_buffer(self, step: _StepState, kind: ActionKind, target: tuple[int, int] | None) -> None:
        """Wait until an earlier send of `kind` to the chunk `target` has freed a buffer for the next result."""
        if target is not None and target[0] != self.stage:
            self._limit_sends(step.pending_sends.get(self.streams[kind, target[0]], deque()), SEND_SLOTS - 1)

    @staticmethod
    def _limit_sends(queue: deque[Pending], limit: int) -> None:
        """Wait for the oldest sends until at most `limit` are in flight."""
        while len(queue) > limit:
            queue.popleft().wait()

    def _stream(self, kind: ActionKind, chunk: int) -> P2PStream:
        """Return the stream on which `chunk` has a transfer of this kind."""
        if get_peer_offset(kind) > 0:
            neighbour = self._next[chunk]
        else:
            neighbour = self._previous[chunk]
        assert neighbour is not None, f"chunk {chunk} of stage {self.stage} has no {kind.label}"
        return self.streams[kind, neighbour[0]]

    def _receive(self, kind: ActionKind, chunk: int) -> Pending:
        """Post a receive into new memory."""
        stream = self._stream(kind, chunk)
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        transfer = self._transfer(stream, "recv")
        return Pending(buffer, dist.irecv(buffer, stream.peer, group=stream.group), transfer)

    def _send(self, stream: P2PStream, tensor: Tensor) -> Pending:
        tensor = tensor.contiguous()
        transfer = self._transfer(stream, "send")
        # The pending send keeps the tensor alive until it has been sent.
        return Pending(tensor, dist.isend(tensor, stream.peer, group=stream.group), transfer)

    def _transfer(self, stream: P2PStream, op: str) -> Transfer:
        """Record the start of a transfer, and return the record."""
        return Transfer(self.runtime, stream.name, op, SpanAxis.PIPELINE, self.activation_bytes, stream.peer)
