"""The pipeline executor: runs one stage's list of actions (core/schedule.py), whatever the schedule.

Sends and receives are never fused. Each directed edge has a communicator for each direction of travel (a P2P stream), a
receive is posted where the schedule says and awaited by the compute that consumes it, a send is awaited only when
its buffer is needed again (or, without overlap, by the next compute). Nothing here knows 1F1B from interleaved, and
nothing computes a rank. On a single stage one chunk hands its results to the next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megascale.core.schedule import SEND_SLOTS, ActionKind, Schedule
from megascale.core.spans import SpanAxis
from megascale.parallel.chunk_runner import ChunkRunner, Forward
from megascale.parallel.collectives import Pending
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.runtime import Runtime, Transfer

_LABELS = {kind: kind.label.encode() for kind in ActionKind}


@dataclass(frozen=True)
class P2PStream:
    """One end of a communicator of two ranks that carries one direction of one edge.

    `name` is what the record of calls (core/calls.py) knows it as.
    """

    group: Any
    peer: int
    name: str = ""


@dataclass(frozen=True)
class P2PStreams:
    """The P2P streams of a stage; None where there is no neighbour."""

    send_forward: P2PStream | None = None
    recv_forward: P2PStream | None = None
    send_backward: P2PStream | None = None
    recv_backward: P2PStream | None = None


class PipelineExecutor:
    """Runs the actions of `stage`.

    Args:
        schedule: of the whole pipeline.
        stage: which one runs here.
        streams: its communicators.
        shape, dtype, device: of an activation between chunks; static, so that nothing about it is ever sent.
        runtime: what this rank runs with.
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
        self.schedule, self.stage, self.streams = schedule, stage, streams
        self.shape, self.dtype, self.device = shape, dtype, device
        self.actions = schedule[stage]
        self.first_gather = schedule.first_gather(stage)
        self.bytes = torch.empty(0, dtype=dtype).element_size() * torch.Size(shape).numel()

    def _is_first(self, chunk: int) -> bool:
        return self.schedule.global_chunk(self.stage, chunk) == 0

    def _is_last(self, chunk: int) -> bool:
        return self.schedule.global_chunk(self.stage, chunk) == self.schedule.chunks - 1

    def run(self, chunks: ChunkRunner, data: DataParallel) -> torch.Tensor | None:
        """One step over all micro-batches; returns the sum of losses (detached) on the last stage, else None.

        Args:
            chunks: run the micro-batches.
            data: gathers the chunks' parameters and reduces their gradients when the schedule says so.
        """
        received: dict[tuple[ActionKind, int, int], tuple[torch.Tensor, Any]] = {}
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        grads: dict[tuple[int, int], torch.Tensor] = {}
        sending: dict[ActionKind, deque[tuple[torch.Tensor, Any]]] = {
            ActionKind.SEND_FORWARD: deque(),
            ActionKind.SEND_BACKWARD: deque(),
        }
        single_stage = self.schedule.stages == 1
        loss: torch.Tensor | None = None
        started: set[int] = set()
        recorder = self.runtime.recorder
        for index, (kind, chunk, i) in enumerate(self.actions):
            self.runtime.calls.at(_LABELS[kind], chunk, i, index)
            recorder.begin_action(kind, chunk, i)
            if kind.is_compute and self.schedule.exposed:
                for queue in sending.values():
                    self._free(queue, 0)
            if kind == ActionKind.FORWARD:
                if chunk not in started:
                    started.add(chunk)
                    data.await_parameters(chunk)
                x = None
                if not self._is_first(chunk):
                    if single_stage:
                        x = outputs[chunk - 1, i]
                    else:
                        x = self._arrived(received, ActionKind.RECV_FORWARD, chunk, i)
                self._free(sending[ActionKind.SEND_FORWARD], SEND_SLOTS - 1)
                y = outputs[chunk, i] = chunks.forward(chunk, i, x)
                if self._is_last(chunk):
                    loss = y if loss is None else loss + y
            elif kind == ActionKind.BACKWARD:
                grad = None
                if not self._is_last(chunk):
                    if single_stage:
                        grad = grads.pop((chunk + 1, i))
                    else:
                        grad = self._arrived(received, ActionKind.RECV_BACKWARD, chunk, i)
                self._free(sending[ActionKind.SEND_BACKWARD], SEND_SLOTS - 1)
                data.begin_backward(chunk)
                x_grad = chunks.backward(chunk, i, grad)
                data.end_backward(chunk)
                del outputs[chunk, i]
                if x_grad is not None:
                    grads[chunk, i] = x_grad
            elif kind.is_receive:
                received[kind, chunk, i] = self._receive(kind)
            elif kind == ActionKind.SEND_FORWARD:
                sending[kind].append(self._send(kind, outputs[chunk, i]))
            elif kind == ActionKind.SEND_BACKWARD:
                sending[kind].append(self._send(kind, grads.pop((chunk, i))))
            elif kind == ActionKind.GATHER_PARAMS:
                data.start_gather(chunk)
            elif kind == ActionKind.REDUCE_GRADS:
                data.arm(chunk)
            recorder.end_action()
        for queue in sending.values():
            for _, pending in queue:
                pending.wait()
        return loss

    @torch.no_grad()
    def run_forward(self, microbatches: int, forward: Forward) -> Any:
        """Forward passes only, one micro-batch after another through all chunks; the last chunk's outputs, in order."""
        outputs, single_stage = [], self.schedule.stages == 1
        for i in range(microbatches):
            y = None
            for chunk in range(self.schedule.virtual_stages):
                x = y if single_stage else None
                self.runtime.calls.at(b"evaluate", chunk, i)
                if not single_stage and not self._is_first(chunk):
                    x, pending = self._receive(ActionKind.RECV_FORWARD)
                    pending.wait()
                y = forward(chunk, i, x)
                if self._is_last(chunk):
                    outputs.append(y)
                elif not single_stage:
                    self._send(ActionKind.SEND_FORWARD, y)[1].wait()
        return outputs

    @staticmethod
    def _free(queue: deque[tuple[torch.Tensor, Any]], under_way: int) -> None:
        """Wait for the oldest sends until at most `under_way` are left."""
        while len(queue) > under_way:
            queue.popleft()[1].wait()

    def _stream(self, kind: ActionKind) -> P2PStream:
        stream: P2PStream | None = getattr(self.streams, kind.label)
        assert stream is not None, f"stage {self.stage} has no P2P stream for {kind.label}"
        return stream

    def _receive(self, kind: ActionKind) -> tuple[torch.Tensor, Any]:
        stream = self._stream(kind)
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        transfer = self._transfer(stream, "recv")
        return buffer, Pending(buffer, dist.irecv(buffer, stream.peer, group=stream.group), transfer)

    def _send(self, kind: ActionKind, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        stream = self._stream(kind)
        tensor = tensor.contiguous()
        transfer = self._transfer(stream, "send")
        return tensor, Pending(tensor, dist.isend(tensor, stream.peer, group=stream.group), transfer)

    def _transfer(self, stream: P2PStream, op: str) -> Transfer:
        return self.runtime.transfer(stream.name, SpanAxis.PIPELINE, op, self.bytes, stream.peer)

    @staticmethod
    def _arrived(
        received: dict[tuple[ActionKind, int, int], tuple[torch.Tensor, Any]], kind: ActionKind, chunk: int, i: int
    ) -> torch.Tensor:
        buffer, pending = received.pop((kind, chunk, i))
        pending.wait()
        return buffer
