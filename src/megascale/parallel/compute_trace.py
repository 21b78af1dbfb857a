"""Traces: checksums of one rank's results for one micro-batch, in the order of the computation.

Healthy devices of one kind compute the same bits from the same input, so two traces of a micro-batch are equal. The
first entry that differs names the operator. A trace has checksums of

- inputs, outputs and gradients at the boundaries of chunks;
- the result of each GEMM and of each attention operator;
- the data that a rank sends to its tensor- and context-parallel peers;
- the gradient of each parameter.

A wrong result reaches other ranks of a replica only through a collective. In the order of the trace, the faulty rank
therefore differs before its peers. A checksum is the sum of the bits as integers, so that any single flipped bit
changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megascale import torch_private
from megascale.core.replay_verdict import Phase, TracePoint
from megascale.errors import TrainingError
from megascale.ops.gradient_sink import GradientSink
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.collectives import Axis
from megascale.parallel.parameters import get_spec
from megascale.parallel.pipeline import EagerRunner
from megascale.parallel.runtime import Runtime
from megascale.parallel.slot_sink import TableSink

CAPACITY = 1 << 17  # largest number of entries of a trace; a chunk of 126 layers has some 6,000
# By bytes per element: the integer type in which the bits of an element are summed.
INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Operators of the namespace aten whose results are traced: GEMMs and attention.
_TRACED_OPERATORS = frozenset(
    (
        "mm",
        "addmm",
        "addmm_",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
        "_flash_attention_forward",
        "_flash_attention_backward",
    )
)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


class _Entry(NamedTuple):
    """A checksum's position in the computation, see `TracePoint`.

    Attributes:
        phase, chunk: section of the computation.
        collectives: number of collectives before it in the section.
        number: index among the checksums of the section.
        address: address of the parameter that the operator reads, 0 if it reads none.
    """

    phase: Phase
    chunk: int
    collectives: int
    number: int
    operator: str
    address: int


class ComputeTrace:
    """The trace of one micro-batch on this rank.

    Args:
        buffers: buffers of the rank's chunks.
        chunk_positions: position of each chunk in the model.
        axes: axes whose ranks share a micro-batch, such as the tensor axis.

    Attributes:
        sums: checksums on the device, int64 [CAPACITY]; `finish` writes the number of entries into the last element.
    """

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        chunk_positions: Sequence[int],
        axes: Iterable[Axis],
        runtime: Runtime,
    ) -> None:
        self._buffers = buffers
        self._chunk_positions = chunk_positions
        self._axes = list(axes)
        self._groups = [axis.group for axis in self._axes if axis.group is not None]
        self._runtime = runtime
        self._entries: list[_Entry] = []
        # A section is a phase and the position of a chunk in the model.
        self._section: tuple[Phase, int] = Phase.FORWARD, 0
        self._entry_counts: dict[tuple[Phase, int], int] = {}
        self._collective_counts: dict[tuple[Phase, int], int] = {}
        self.sums = torch.zeros(CAPACITY, dtype=torch.int64, device=buffers[0].params.device)

    def __len__(self) -> int:
        return len(self._entries)

    def add_checksum(self, operator: str, tensor: Tensor, address: int = 0) -> None:
        """Append the checksum of a tensor.

        Args:
            address: address of the parameter that the operator reads, 0 if it reads none.
        """
        index = len(self._entries)
        if index + 1 == CAPACITY:  # the last element is for the number of entries
            raise TrainingError(
                f"a micro-batch has more than {CAPACITY - 1} results to compare; set --resilience.replay_interval=0"
            )
        phase, chunk = self._section
        number = self._entry_counts.get(self._section, 0)
        self._entry_counts[self._section] = number + 1
        collectives = self._collective_counts.get(self._section, 0)
        self._entries.append(_Entry(phase, chunk, collectives, number, operator, address))
        bits = tensor.detach().view(INTEGER_TYPES[tensor.element_size()])
        torch.sum(bits, dim=list(range(bits.dim())), dtype=torch.int64, out=self.sums[index])

    def count_collective(self) -> None:
        """Count a collective, in which ranks that share the micro-batch exchange results."""
        self._collective_counts[self._section] = self._collective_counts.get(self._section, 0) + 1

    @contextmanager
    def record(self, phase: Phase, chunk: int) -> Iterator[None]:
        """Trace the operators of the enclosed forward or backward of a chunk."""
        self._section = phase, self._chunk_positions[chunk]
        original_hooks = self._observe_sinks()
        self._runtime.sent_observer = self._add_exchanged
        try:
            with _OperatorTrace(self, self._groups):
                yield
        finally:
            self._runtime.sent_observer = None
            for sink, ready in original_hooks:
                sink.ready = ready
                if isinstance(sink, TableSink):
                    sink.observe = None
            self._runtime.stream.synchronize()

    def _add_exchanged(self, axis: Axis, kind: str, tensor: Tensor) -> None:
        """Trace data that an exchange sends to ranks that share the micro-batch."""
        if any(member is axis for member in self._axes):
            self.add_checksum(f"input of {kind}", tensor)
            self.count_collective()

    def _observe_sinks(self) -> list[tuple[GradientSink, Callable[[], None]]]:
        """Trace each gradient before a reduction can overwrite it.

        A sink calls its `ready` after each addition to the gradient, which may start a reduction. A sink of a divided
        table passes each part before the part's reduction. Return the sinks with their original `ready`.
        """
        original_hooks = []
        for buffer in self._buffers:
            for parameter, sink in zip(buffer.parameters, buffer.sinks, strict=True):
                original_hooks.append((sink, sink.ready))
                if isinstance(sink, TableSink):
                    sink.observe = partial(self._add_part, parameter.data_ptr())
                    continue
                sink.ready = self._make_observer(sink, sink.ready, parameter.data_ptr())
        return original_hooks

    def _add_part(self, address: int, grads: Tensor) -> None:
        """Trace a part of a divided table's gradient."""
        self._runtime.stream.synchronize()
        self.add_checksum("gradient", grads, address)

    def _make_observer(self, sink: GradientSink, ready: Callable[[], None], address: int) -> Callable[[], None]:
        """Return a function that traces the gradient of a sink, and then calls `ready`."""

        def observe() -> None:
            self._runtime.stream.synchronize()  # the gradient may come from the side stream
            self.add_checksum("gradient", sink.main_grad, address)
            ready()

        return observe

    def finish(self) -> None:
        """Write the number of entries into the last element of `sums`, so that both are sent together."""
        self.sums[-1].fill_(len(self._entries))

    def list_points(self) -> list[TracePoint]:
        """Return the position in the computation of each checksum, with names of parameters."""
        names = {}
        for buffer in self._buffers:
            for parameter in buffer.parameters:
                pieces = get_spec(parameter).pieces
                names[parameter.data_ptr()] = ", ".join(dict.fromkeys(piece.name for piece in pieces))
        points = []
        for entry in self._entries:
            points.append(
                TracePoint(
                    phase=entry.phase,
                    chunk=entry.chunk,
                    collectives=entry.collectives,
                    number=entry.number,
                    operator=entry.operator,
                    parameter=names.get(entry.address, ""),
                )
            )
        return points


class _OperatorTrace(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Adds results of GEMMs and attention to a trace, and data that is sent to ranks that share the micro-batch."""

    def __init__(self, trace: ComputeTrace, groups: Sequence[Any]) -> None:
        super().__init__()
        self._trace = trace
        self._groups = groups

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self._add_sent(name, args)
        result = func(*args, **(kwargs or {}))
        if name in _TRACED_OPERATORS and func.namespace == "aten":
            address = _find_last_address(args)  # address of the weight, if a GEMM reads one
            results = result if isinstance(result, tuple | list) else (result,)
            if "attention" in name and not name.endswith("backward"):
                results = results[:1]  # further results may have padding, which no kernel writes
            for tensor in results:
                if isinstance(tensor, Tensor) and tensor.dtype in _FLOATS:  # not the states of random generators
                    self._trace.add_checksum(name.strip("_"), tensor, address)
        return result

    def _add_sent(self, name: str, args: Any) -> None:
        """Trace the inputs of a collective between ranks that share the micro-batch.

        Other collectives, such as reductions of gradients, run in training and not in a replay.
        """
        if not self._is_traced_group(args):
            return
        # An all-reduce has its inputs first. All other collectives have their outputs first.
        inputs = args[0] if name.startswith("allreduce") else args[1]
        for tensor in inputs if isinstance(inputs, list | tuple) else (inputs,):
            if isinstance(tensor, Tensor) and tensor.element_size() in INTEGER_TYPES and tensor.dtype != torch.bool:
                self._trace.add_checksum(f"input of {name.strip('_')}", tensor)
        self._trace.count_collective()

    def _is_traced_group(self, args: Any) -> bool:
        """Return whether the process group among the arguments of a collective is a traced one."""
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                try:
                    return dist.ProcessGroup.unbox(arg) in self._groups
                except RuntimeError:
                    continue  # an object of another class, such as a reduction's operator
        return False


def _find_last_address(args: Sequence[Any]) -> int:
    """Return the address of the last tensor among an operator's arguments, 0 without a tensor.

    The last tensor of a GEMM of a linear layer is its weight, in forward and for the gradient of the input.
    """
    for arg in reversed(args):
        if isinstance(arg, Tensor):
            return arg.data_ptr()
    return 0


class TracedRunner(EagerRunner):
    """Runs the micro-batches of a step by another runner, and traces one of them.

    Args:
        runner: runs all micro-batches.
        trace: receives the checksums.
        microbatch: index of the traced micro-batch.
    """

    def __init__(self, runner: EagerRunner, trace: ComputeTrace, microbatch: int = 0) -> None:
        self._runner = runner
        self._trace = trace
        self._microbatch = microbatch

    def forward(self, chunk: int, i: int, x: Tensor | None) -> Tensor:
        """Run a forward, see `EagerRunner.forward`."""
        if i != self._microbatch:
            return self._runner.forward(chunk, i, x)
        with self._trace.record(Phase.FORWARD, chunk):
            if x is not None:
                self._trace.add_checksum("input of the chunk", x)
            y = self._runner.forward(chunk, i, x)
            self._trace.add_checksum("output of the chunk" if y.dim() else "loss", y)
        return y

    def backward(self, chunk: int, i: int, grad: Tensor | None) -> Tensor | None:
        """Run a backward, see `EagerRunner.backward`."""
        if i != self._microbatch:
            return self._runner.backward(chunk, i, grad)
        with self._trace_backward(chunk, grad) as add_result:
            x_grad = self._runner.backward(chunk, i, grad)
            add_result(x_grad)
        return x_grad

    def backward_input(self, chunk: int, i: int, grad: Tensor | None) -> Tensor | None:
        """Run the first half of a backward, see `EagerRunner.backward_input`."""
        if i != self._microbatch:
            return self._runner.backward_input(chunk, i, grad)
        with self._trace_backward(chunk, grad) as add_result:
            x_grad = self._runner.backward_input(chunk, i, grad)
            add_result(x_grad)
        return x_grad

    def backward_weight(self, chunk: int, i: int) -> None:
        """Run the second half of a backward, see `EagerRunner.backward_weight`."""
        if i != self._microbatch:
            self._runner.backward_weight(chunk, i)
            return
        with self._trace.record(Phase.WEIGHT_GRADIENTS, chunk):
            self._runner.backward_weight(chunk, i)

    @contextmanager
    def _trace_backward(self, chunk: int, grad: Tensor | None) -> Iterator[Callable[[Tensor | None], None]]:
        """Trace the enclosed backward, and the gradient of its output. Yield a function that traces its result."""

        def add_result(x_grad: Tensor | None) -> None:
            if x_grad is not None:
                self._trace.add_checksum("gradient of the chunk's input", x_grad)

        with self._trace.record(Phase.BACKWARD, chunk):
            if grad is not None:
                self._trace.add_checksum("gradient of the chunk's output", grad)
            yield add_result
