"""The pipeline executor runs one stage's list of actions (core/schedule.py) for any schedule.

Sends and receives are never fused. Each directed edge has a communicator for each direction of travel (a P2P stream).
A receive is posted where the schedule says and awaited by the compute that consumes it. A send is awaited only when
its buffer is needed again or, without overlap, before the next compute. The executor does not distinguish 1F1B from
interleaved schedules and computes no rank. On a single stage one chunk hands its results to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.core.schedule import SEND_SLOTS, ActionKind, Schedule
from megascale.core.spans import SpanAxis
from megascale.parallel.collectives import Pending
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.runtime import Runtime, Transfer

_LABELS = {kind: kind.label.encode() for kind in ActionKind}

# (chunk, micro-batch, input or None for the model's first chunk) -> output. On the model's last chunk the output is the
# micro-batch's share of the loss, a scalar.
Forward = Callable[[int, int, Tensor | None], Tensor]


class EagerRunner:
    """Runs forward and backward of one step's micro-batches, in the order of the schedule, operator by operator."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
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


@dataclass(frozen=True)
class P2PStream:
    """One end of a communicator of two ranks that carries one direction of one edge.

    `name` identifies it in the record of calls (core/calls.py).
    """

    group: Any
    peer: int
    name: str = ""


@dataclass(frozen=True)
class P2PStreams:
    """The P2P streams of a stage; None where it has no neighbour."""

    send_forward: P2PStream | None = None
    recv_forward: P2PStream | None = None
    send_backward: P2PStream | None = None
    recv_backward: P2PStream | None = None


class _StepState:
    """Tensors and transfers of one step, by (chunk, micro-batch)."""

    def __init__(self) -> None:
        self.received: dict[tuple[ActionKind, int, int], Pending] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.grads: dict[tuple[int, int], Tensor] = {}
        self.sending: dict[ActionKind, deque[Pending]] = {
            ActionKind.SEND_FORWARD: deque(),
            ActionKind.SEND_BACKWARD: deque(),
        }
        self.loss: Tensor | None = None
        self.started: set[int] = set()  # chunks that have run a forward


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
        self.schedule = schedule
        self.stage = stage
        self.streams = streams
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.actions = schedule[stage]
        self.first_gather = schedule.first_gather(stage)
        self.bytes = dtype.itemsize * torch.Size(shape).numel()
        self._is_single_stage = schedule.stages == 1
        global_chunks = [schedule.global_chunk(stage, chunk) for chunk in range(schedule.virtual_stages)]
        self._is_first = [chunk == 0 for chunk in global_chunks]
        self._is_last = [chunk == schedule.chunks - 1 for chunk in global_chunks]

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
            recorder.begin_action(kind, chunk, i)
            if kind.is_compute and self.schedule.exposed:
                for queue in step.sending.values():
                    self._limit_sends(queue, 0)
            if kind == ActionKind.FORWARD:
                self._run_forward(step, chunks, data, chunk, i)
            elif kind == ActionKind.BACKWARD:
                self._run_backward(step, chunks, data, chunk, i)
            elif kind.is_receive:
                step.received[kind, chunk, i] = self._receive(kind)
            elif kind == ActionKind.SEND_FORWARD:
                step.sending[kind].append(self._send(kind, step.outputs[chunk, i]))
            elif kind == ActionKind.SEND_BACKWARD:
                step.sending[kind].append(self._send(kind, step.grads.pop((chunk, i))))
            elif kind == ActionKind.GATHER_PARAMS:
                data.start_gather(chunk)
            elif kind == ActionKind.REDUCE_GRADS:
                data.arm_reductions(chunk)
            recorder.end_action()
        for queue in step.sending.values():
            self._limit_sends(queue, 0)
        return step.loss

    def _run_forward(self, step: _StepState, chunks: EagerRunner, data: DataParallel, chunk: int, i: int) -> None:
        if chunk not in step.started:
            step.started.add(chunk)
            data.await_parameters(chunk)
        x = None
        if not self._is_first[chunk]:
            if self._is_single_stage:
                x = step.outputs[chunk - 1, i]
            else:
                x = step.received.pop((ActionKind.RECV_FORWARD, chunk, i)).wait()
        self._limit_sends(step.sending[ActionKind.SEND_FORWARD], SEND_SLOTS - 1)
        y = chunks.forward(chunk, i, x)
        step.outputs[chunk, i] = y
        if self._is_last[chunk]:
            step.loss = y if step.loss is None else step.loss + y

    def _run_backward(self, step: _StepState, chunks: EagerRunner, data: DataParallel, chunk: int, i: int) -> None:
        grad = None
        if not self._is_last[chunk]:
            if self._is_single_stage:
                grad = step.grads.pop((chunk + 1, i))
            else:
                grad = step.received.pop((ActionKind.RECV_BACKWARD, chunk, i)).wait()
        self._limit_sends(step.sending[ActionKind.SEND_BACKWARD], SEND_SLOTS - 1)
        data.begin_backward(chunk)
        x_grad = chunks.backward(chunk, i, grad)
        data.end_backward(chunk)
        del step.outputs[chunk, i]
        if x_grad is not None:
            step.grads[chunk, i] = x_grad

    @torch.no_grad()
    def run_forward(self, microbatches: int, forward: Forward) -> Any:
        """Run forward passes only, one micro-batch after another; returns the last chunk's outputs in order."""
        outputs = []
        for i in range(microbatches):
            y = None
            for chunk in range(self.schedule.virtual_stages):
                x = y if self._is_single_stage else None
                self.runtime.calls.set_action(b"evaluate", chunk, i)
                if not self._is_single_stage and not self._is_first[chunk]:
                    x = self._receive(ActionKind.RECV_FORWARD).wait()
                y = forward(chunk, i, x)
                if self._is_last[chunk]:
                    outputs.append(y)
                elif not self._is_single_stage:
                    self._send(ActionKind.SEND_FORWARD, y).wait()
        return outputs

    @staticmethod
    def _limit_sends(queue: deque[Pending], limit: int) -> None:
        """Wait for the oldest sends until at most `limit` are in flight."""
        while len(queue) > limit:
            queue.popleft().wait()

    def _stream(self, kind: ActionKind) -> P2PStream:
        stream: P2PStream | None = getattr(self.streams, kind.label)
        assert stream is not None, f"stage {self.stage} has no P2P stream for {kind.label}"
        return stream

    def _receive(self, kind: ActionKind) -> Pending:
        stream = self._stream(kind)
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        transfer = self._transfer(stream, "recv")
        return Pending(buffer, dist.irecv(buffer, stream.peer, group=stream.group), transfer)

    def _send(self, kind: ActionKind, tensor: Tensor) -> Pending:
        stream = self._stream(kind)
        tensor = tensor.contiguous()
        transfer = self._transfer(stream, "send")
        # The pending send keeps the tensor alive until it has left.
        return Pending(tensor, dist.isend(tensor, stream.peer, group=stream.group), transfer)

    def _transfer(self, stream: P2PStream, op: str) -> Transfer:
        return self.runtime.transfer(stream.name, SpanAxis.PIPELINE, op, self.bytes, stream.peer)
