"""The pipeline executor runs one stage's list of actions (core/schedule.py) for any schedule.

Sends and receives are never fused. Each directed edge has a communicator for each direction of travel (a P2P stream).
A receive is posted where the schedule says and awaited by the compute that consumes it. A send is awaited only when
its buffer is needed again or, without overlap, before the next compute. The executor knows no schedule by name and
computes no rank. Neighbouring chunks of one stage hand their results to each other.
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

from megascale.core.schedule import INPUT_BACKWARDS, SEND_SLOTS, ActionKind, Schedule, peer_offset
from megascale.core.spans import SPAN_OF_ACTION, SpanAxis
from megascale.parallel.collectives import Pending
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.runtime import Runtime, Transfer
from megascale.parallel.weight_gradients import WeightGradientQueue

_LABELS = {kind: kind.label.encode() for kind in ActionKind}

# (chunk, micro-batch, input or None for the model's first chunk) -> output. On the model's last chunk the output is the
# micro-batch's share of the loss, a scalar.
Forward = Callable[[int, int, Tensor | None], Tensor]


class EagerRunner:
    """Runs forward and backward of one step's micro-batches, in the order of the schedule, operator by operator.

    Args:
        forward: runs a chunk.
        weight_gradients: the rank's queue of weight gradients.
    """

    def __init__(self, forward: Forward, weight_gradients: WeightGradientQueue) -> None:
        self._forward = forward
        self._weight_gradients = weight_gradients
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
        """Run the backward of micro-batch `i`; gradients of parameters go into their sinks.

        Args:
            grad: gradient of its output; None for the model's last chunk.

        Returns:
            The gradient of its input, if it has one.
        """
        x, y = self._in_flight.pop((chunk, i))
        torch.autograd.backward(y, grad)
        return None if x is None else x.grad

    def backward_input(self, chunk: int, i: int, grad: Tensor | None) -> Tensor | None:
        """Run the backward of micro-batch `i`, but queue the weight gradients of linear layers.

        Arguments and result are those of `backward`.
        """
        with self._weight_gradients.defer(chunk, i):
            return self.backward(chunk, i, grad)

    def backward_weight(self, chunk: int, i: int) -> None:
        """Compute the weight gradients that `backward_input` of micro-batch `i` has queued."""
        self._weight_gradients.flush(chunk, i)


@dataclass(frozen=True, eq=False)
class P2PStream:
    """One end of a communicator of two ranks that carries one direction of one edge.

    `name` identifies it in the record of calls (core/calls.py).
    """

    group: Any
    peer: int
    name: str = ""


# The P2P streams of a stage, by kind of transfer and stage at the other end.
P2PStreams = Mapping[tuple[ActionKind, int], P2PStream]


class _StepState:
    """Tensors and transfers of one step, by (chunk, micro-batch)."""

    def __init__(self) -> None:
        self.pending_receives: dict[tuple[ActionKind, int, int], Pending] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.grads: dict[tuple[int, int], Tensor] = {}
        self.pending_sends: dict[P2PStream, deque[Pending]] = {}
        self.loss: Tensor | None = None
        self.started_chunks: set[int] = set()  # chunks that have run a forward


class PipelineExecutor:
    """Runs the actions of `stage`.

    Args:
        schedule: schedule of the whole pipeline.
        stage: the stage that runs here.
        streams: its communicators.
        shape, dtype, device: of an activation between chunks; static, so that no shape is ever sent.
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
        # (stage, chunk) of the previous and the next chunk in the model, or None, of each chunk of this stage.
        chunks = range(schedule.virtual_stages)
        self._previous = [schedule.chunk_map.neighbour(stage, chunk, -1) for chunk in chunks]
        self._next = [schedule.chunk_map.neighbour(stage, chunk, 1) for chunk in chunks]

    def run(self, chunks: EagerRunner, data: DataParallel) -> Tensor | None:
        """Run one step over all micro-batches.

        Args:
            chunks: runs the micro-batches.
            data: gathers the chunks' parameters and reduces their gradients when the schedule says so.

        Returns:
            The sum of losses (detached) on the last stage, else None.
        """
        step = _StepState()
        recorder = self.runtime.recorder
        for index, (kind, chunk, i) in enumerate(self.actions):
            self.runtime.calls.set_action(_LABELS[kind], chunk, i, index)
            recorder.begin_action(SPAN_OF_ACTION[kind], chunk, i)
            if kind.is_compute and self.schedule.exposed:
                for queue in step.pending_sends.values():
                    self._limit_sends(queue, 0)
            if kind == ActionKind.FORWARD:
                self._run_forward(step, chunks, data, chunk, i)
            elif kind in INPUT_BACKWARDS:
                self._run_backward(step, chunks, data, kind, chunk, i)
            elif kind == ActionKind.BACKWARD_WEIGHT:
                data.begin_backward(chunk, kind)
                chunks.backward_weight(chunk, i)
                data.end_backward(chunk, kind)
            elif kind.is_receive:
                step.pending_receives[kind, chunk, i] = self._receive(kind, chunk)
            elif kind == ActionKind.SEND_FORWARD:
                self._start_send(step, kind, chunk, step.outputs[chunk, i])
            elif kind == ActionKind.SEND_BACKWARD:
                self._start_send(step, kind, chunk, step.grads.pop((chunk, i)))
            elif kind == ActionKind.GATHER_PARAMS:
                data.start_gather(chunk)
            elif kind == ActionKind.REDUCE_GRADS:
                data.arm_reductions(chunk)
            recorder.end_action()
        for queue in step.pending_sends.values():
            self._limit_sends(queue, 0)
        return step.loss

    def _run_forward(self, step: _StepState, chunks: EagerRunner, data: DataParallel, chunk: int, i: int) -> None:
        if chunk not in step.started_chunks:
            step.started_chunks.add(chunk)
            data.await_parameters(chunk)
        x = None
        previous = self._previous[chunk]
        if previous is not None:
            previous_stage, previous_chunk = previous
            if previous_stage == self.stage:
                x = step.outputs[previous_chunk, i]
            else:
                x = step.pending_receives.pop((ActionKind.RECV_FORWARD, chunk, i)).wait()
        self._free_send_buffer(step, ActionKind.SEND_FORWARD, self._next[chunk])
        y = chunks.forward(chunk, i, x)
        step.outputs[chunk, i] = y
        if self._next[chunk] is None:
            step.loss = y if step.loss is None else step.loss + y

    def _run_backward(
        self, step: _StepState, chunks: EagerRunner, data: DataParallel, kind: ActionKind, chunk: int, i: int
    ) -> None:
        grad = None
        following = self._next[chunk]
        if following is not None:
            next_stage, next_chunk = following
            if next_stage == self.stage:
                grad = step.grads.pop((next_chunk, i))
            else:
                grad = step.pending_receives.pop((ActionKind.RECV_BACKWARD, chunk, i)).wait()
        self._free_send_buffer(step, ActionKind.SEND_BACKWARD, self._previous[chunk])
        data.begin_backward(chunk, kind)
        if kind == ActionKind.BACKWARD_INPUT:
            x_grad = chunks.backward_input(chunk, i, grad)
        else:
            x_grad = chunks.backward(chunk, i, grad)
        data.end_backward(chunk, kind)
        del step.outputs[chunk, i]
        if x_grad is not None:
            step.grads[chunk, i] = x_grad

    def run_microbatch(self, chunks: EagerRunner, data: DataParallel) -> None:
        """Run forward and backward of micro-batch 0 alone, one chunk after another; no gradient is reduced."""
        last = len(self._next) - 1
        y: Tensor | None = None
        x_grad: Tensor | None = None
        for chunk, (previous, following) in enumerate(zip(self._previous, self._next, strict=True)):
            data.start_gather(chunk)
            data.await_parameters(chunk)
            x = None
            if previous is not None:
                if previous[0] == self.stage:
                    x = y
                else:
                    x = self._receive(ActionKind.RECV_FORWARD, chunk).wait()
            y = chunks.forward(chunk, 0, x)
            if following is not None and following[0] != self.stage:
                self._send(self._stream(ActionKind.SEND_FORWARD, chunk), y).wait()
        for chunk in range(last, -1, -1):
            previous, following = self._previous[chunk], self._next[chunk]
            grad = None
            if following is not None:
                if following[0] == self.stage:
                    grad = x_grad
                else:
                    grad = self._receive(ActionKind.RECV_BACKWARD, chunk).wait()
            x_grad = self._run_both_backwards(chunks, data, chunk, grad)
            if previous is not None and previous[0] != self.stage:
                assert x_grad is not None
                self._send(self._stream(ActionKind.SEND_BACKWARD, chunk), x_grad).wait()

    def _run_both_backwards(
        self, chunks: EagerRunner, data: DataParallel, chunk: int, grad: Tensor | None
    ) -> Tensor | None:
        """Run the backward of micro-batch 0 in one action or two, as the schedule does."""
        if not self.schedule.splits_backward:
            data.begin_backward(chunk)
            x_grad = chunks.backward(chunk, 0, grad)
            data.end_backward(chunk)
            return x_grad
        data.begin_backward(chunk, ActionKind.BACKWARD_INPUT)
        x_grad = chunks.backward_input(chunk, 0, grad)
        data.end_backward(chunk, ActionKind.BACKWARD_INPUT)
        data.begin_backward(chunk, ActionKind.BACKWARD_WEIGHT)
        chunks.backward_weight(chunk, 0)
        data.end_backward(chunk, ActionKind.BACKWARD_WEIGHT)
        return x_grad

    @torch.no_grad()
    def run_forward(self, microbatches: int, forward: Forward) -> Any:
        """Run forward passes only, one micro-batch after another; returns the last chunk's outputs in order."""
        outputs = []
        for i in range(microbatches):
            y = None
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
        stream = self._stream(kind, chunk)
        step.pending_sends.setdefault(stream, deque()).append(self._send(stream, tensor))

    def _free_send_buffer(self, step: _StepState, kind: ActionKind, target: tuple[int, int] | None) -> None:
        """Wait until a result that `kind` sends to the chunk `target` has a free buffer."""
        if target is not None and target[0] != self.stage:
            self._limit_sends(step.pending_sends.get(self.streams[kind, target[0]], deque()), SEND_SLOTS - 1)

    @staticmethod
    def _limit_sends(queue: deque[Pending], limit: int) -> None:
        """Wait for the oldest sends until at most `limit` are in flight."""
        while len(queue) > limit:
            queue.popleft().wait()

    def _stream(self, kind: ActionKind, chunk: int) -> P2PStream:
        """Return the stream on which `chunk` has a transfer of this kind."""
        if peer_offset(kind) > 0:
            neighbour = self._next[chunk]
        else:
            neighbour = self._previous[chunk]
        assert neighbour is not None, f"chunk {chunk} of stage {self.stage} has no {kind.label}"
        return self.streams[kind, neighbour[0]]

    def _receive(self, kind: ActionKind, chunk: int) -> Pending:
        stream = self._stream(kind, chunk)
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        transfer = self._transfer(stream, "recv")
        return Pending(buffer, dist.irecv(buffer, stream.peer, group=stream.group), transfer)

    def _send(self, stream: P2PStream, tensor: Tensor) -> Pending:
        tensor = tensor.contiguous()
        transfer = self._transfer(stream, "send")
        # The pending send keeps the tensor alive until it has left.
        return Pending(tensor, dist.isend(tensor, stream.peer, group=stream.group), transfer)

    def _transfer(self, stream: P2PStream, op: str) -> Transfer:
        return self.runtime.transfer(stream.name, SpanAxis.PIPELINE, op, self.activation_bytes, stream.peer)
