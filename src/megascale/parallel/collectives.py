"""Collectives of the engine along dimension 0.

Activations are [sequence, batch, hidden]. Gathering or scattering the sequence is therefore gathering or scattering
dimension 0 of a contiguous tensor, and needs no copy before or after.

Functions that return a `Pending` are asynchronous. An exchange (exchange.py) copies data between the GPUs of one host.
`exchange_...`, `gather_and_consume`, `gather_from_peers` and `scatter_and_wait` use the axis's exchange, which must
exist. Functions without such a name use the process group, or say in their docstring how they choose.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.core.spans import SpanAxis
from megascale.parallel.exchange import Exchange, WriteParts
from megascale.parallel.runtime import Runtime, Transfer

# torch 2.13 renames these two functions and warns about the old names on every rank.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    """One axis of the grid: the ranks along it, with their communicator and this rank's index.

    Attributes:
        group: process group, None for an axis with a single rank.
        size, rank: number of ranks, and the index of this rank.
        overlap: how tensor-parallel GEMMs hide their collective: "fused" (by the exchange), "async" (the collective
            overlaps with independent GEMMs) or "off". On the context axis "parts": the exchange of one part of the
            heads overlaps with the attention of another part.
        exchange: copies between the GPUs of one host (parallel/exchange.py); None: collectives only.
        name: name of the group in the record of calls (core/calls.py); calls of "" are not recorded.
        kind: the axis of the grid, for timers.
    """

    group: Any = None
    size: int = 1
    rank: int = 0
    overlap: str = "async"
    name: str = ""
    kind: SpanAxis = SpanAxis.NONE
    exchange: Exchange | None = None
    runtime: Runtime = field(default_factory=Runtime, compare=False)

    def __post_init__(self) -> None:
        if self.group is not None:
            self.runtime.axes.append(weakref.ref(self))  # rejoin.py gives all axes of a runtime new groups

    def transfer(self, op: str, nbytes: int) -> Transfer:
        """Record the start of a collective along this axis, and return the record, whose end the caller reports."""
        return Transfer(self.runtime, self.name, op, self.kind, nbytes)


SINGLE_RANK = Axis()  # a single-member group


class Pending:
    """The result of an asynchronous collective, which `wait()` returns.

    Args:
        work: handle of torch whose `wait` makes the current stream wait (on a CPU the caller); None if there is nothing
            to wait for.
        finish: called once after the wait; it may return another tensor as the result.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        work: Any = None,
        transfer: Transfer | None = None,
        finish: Callable[[], Any] | None = None,
    ) -> None:
        self._tensor = tensor
        self._work = work
        self._transfer = transfer
        self._finish = finish

    def wait(self) -> torch.Tensor:
        """Return the result. On CUDA the current stream waits for it, on a CPU the caller does."""
        transfer, self._transfer = self._transfer, None
        if self._work is not None:
            work, self._work = self._work, None
            if transfer is None:
                work.wait()
            else:
                wait_start = transfer.begin_wait()
                work.wait()
                transfer.done(wait_start)
                transfer = None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            result = finish()
            if result is not None:
                self._tensor = result
        if transfer is not None:
            # Without a handle the transfer is one of an exchange, which records its waits itself.
            transfer.done()
        return self._tensor


def all_gather(x: torch.Tensor, axis: Axis) -> Pending:
    """Concatenate every rank's `x` on dimension 0: [n, ...] -> [size * n, ...]."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    transfer = axis.transfer("all_gather", out.nbytes)
    return Pending(out, _all_gather(out, x, group=axis.group, async_op=True), transfer)


def exchange_gather(x: torch.Tensor, axis: Axis) -> Pending:
    """All-gather like `all_gather`, by the axis's exchange."""
    assert axis.exchange is not None
    if axis.runtime.sent_observer is not None:  # a replay compares sent tensors (compute_trace.py)
        axis.runtime.sent_observer(axis, "gather", x)
    transfer = axis.transfer("fused_gather", axis.size * x.nbytes)
    return Pending(x, transfer=transfer, finish=axis.exchange.gather(x.contiguous()))


def gather_from_peers(
    out: torch.Tensor, shards: Sequence[torch.Tensor], axis: Axis, copies_own: bool = True
) -> Pending:
    """All-gather every rank's shard into flat `out` by the axis's exchange.

    Args:
        shards: every rank's shard, in memory that this rank can read.
        copies_own: whether to copy this rank's shard; False if `out` contains it.
    """
    assert axis.exchange is not None
    transfer = axis.transfer("fused_gather", out.nbytes)
    wait = axis.exchange.gather_from_peers(out.view(axis.size, -1), shards, copies_own=copies_own)
    return Pending(out, transfer=transfer, finish=wait)


def gather_and_consume(
    x: torch.Tensor, axis: Axis, consume: Callable[[torch.Tensor, int], None], keep_local: bool
) -> torch.Tensor:
    """All-gather x by the axis's exchange, see `Exchange.gather_and_consume`."""
    assert axis.exchange is not None
    if axis.runtime.sent_observer is not None:
        axis.runtime.sent_observer(axis, "gather", x)
    transfer = axis.transfer("fused_gather", axis.size * x.nbytes)
    gathered = axis.exchange.gather_and_consume(x.contiguous(), consume, keep_local)
    transfer.done()
    return gathered


def exchange_scatter(write: WriteParts, shape: tuple[int, ...], like: torch.Tensor, axis: Axis) -> Pending:
    """Reduce-scatter asynchronously by the axis's exchange, see `Exchange.scatter`."""
    assert axis.exchange is not None
    if axis.runtime.sent_observer is not None:
        write = _observe_parts(write, axis)
    transfer = axis.transfer("fused_scatter", axis.size * math.prod(shape) * like.element_size())
    return Pending(like, transfer=transfer, finish=axis.exchange.scatter(write, shape, like))


def scatter_and_wait(write: WriteParts, shape: tuple[int, ...], like: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Reduce-scatter by the axis's exchange and wait, see `Exchange.scatter_and_wait`."""
    assert axis.exchange is not None
    if axis.runtime.sent_observer is not None:
        write = _observe_parts(write, axis)
    transfer = axis.transfer("fused_scatter", axis.size * math.prod(shape) * like.element_size())
    out = axis.exchange.scatter_and_wait(write, shape, like)
    transfer.done()
    return out


def _observe_parts(write: WriteParts, axis: Axis) -> WriteParts:
    """Return a function that calls `write`, and then the observer with the written part."""
    observer = axis.runtime.sent_observer
    assert observer is not None

    def write_observed(out: torch.Tensor, rank: int | None) -> None:
        write(out, rank)
        observer(axis, "scatter", out)

    return write_observed


def reduce_scatter(x: torch.Tensor, axis: Axis) -> Pending:
    """Sum over ranks and keep this rank's slice of dimension 0: [size * n, ...] -> [n, ...]."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    transfer = axis.transfer("reduce_scatter", x.nbytes)
    return Pending(out, _reduce_scatter(out, x, group=axis.group, async_op=True), transfer)


def all_reduce(x: torch.Tensor, axis: Axis, op: Any = None, call_name: str = "all_reduce") -> Pending:
    """Sum over ranks in place, or reduce by `op`.

    Args:
        call_name: name in the record of calls, one of `OPS` in core/calls.py.
    """
    if axis.size == 1:
        return Pending(x)
    transfer = axis.transfer(call_name, x.nbytes)
    return Pending(x, dist.all_reduce(x, op or dist.ReduceOp.SUM, group=axis.group, async_op=True), transfer)


def can_exchange(axis: Axis, nbytes: int) -> bool:
    """Return whether the axis has an exchange with room for a shard of `nbytes`; collectives send larger shards."""
    return axis.size > 1 and axis.exchange is not None and nbytes <= axis.exchange.shard_bytes


def all_reduce_small(x: torch.Tensor, axis: Axis, op: Any = None) -> torch.Tensor:
    """Sum a small tensor over ranks (or take the maximum), in place, and wait for the result.

    If the axis has an exchange with room for it, every rank gathers all ranks' `x` and reduces them in the same order.
    """
    op = op or dist.ReduceOp.SUM
    if not can_exchange(axis, x.nbytes):
        return all_reduce(x, axis, op).wait()
    gathered = exchange_gather(x.view(1, -1), axis).wait()
    reduce = torch.amax if op == dist.ReduceOp.MAX else torch.sum
    reduce(gathered, 0, out=x.view(-1))
    return x


def all_reduce_amax(amax: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Take the maximum over ranks of `amax`, float32 [], in place: the amax of a tensor that ranks divide.

    It uses the exchange's kernel for a maximum if there is one.
    """
    if axis.size == 1:
        return amax
    if axis.exchange is not None and axis.exchange.peer_max is not None:
        if axis.runtime.sent_observer is not None:
            axis.runtime.sent_observer(axis, "maximum", amax)
        return axis.exchange.peer_max(amax)
    return all_reduce_small(amax, axis, dist.ReduceOp.MAX)


@torch_private.call_directly
class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return _gather_rows(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _reduce_scatter_rows(grads[0], ctx.axis), None


@torch_private.call_directly
class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return _reduce_scatter_rows(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _gather_rows(grads[0], ctx.axis), None


@torch_private.call_directly
class _TransposeSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return all_to_all_parts(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return all_to_all_parts(grads[0], ctx.axis).wait(), None


class _TransposeState:
    """The exchange in flight of an `OverlappedTranspose`: of its tensor in forward, of the gradient in backward."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._pending: Pending | None = None

    def start(self, x: torch.Tensor) -> None:
        """Start the all-to-all of x."""
        self._pending = all_to_all_parts(x, self.axis)

    def wait(self) -> torch.Tensor:
        """Return the result of the all-to-all."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        return pending.wait()


@torch_private.call_directly
class _StartTranspose(torch.autograd.Function):
    """Starts the exchange in forward. Its backward waits for the gradient's exchange.

    The result, one undefined element, connects it with `_AwaitTranspose`.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, state: _TransposeState) -> torch.Tensor:
        ctx.state = state
        state.start(x)
        return x.new_empty(1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.state.wait(), None


@torch_private.call_directly
class _AwaitTranspose(torch.autograd.Function):
    """Waits for the exchange in forward. Its backward starts the gradient's exchange."""

    @staticmethod
    def forward(ctx: Any, connection: torch.Tensor, state: _TransposeState) -> torch.Tensor:
        ctx.state = state
        return state.wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.state.start(grads[0])
        return grads[0].new_empty(1), None


class OverlappedTranspose:
    """An all-to-all in flight, differentiable, whose gradient is exchanged between the same two points of backward.

    The state does not refer to `_connection`, whose graph refers to the state: such a cycle would never be freed.
    """

    def __init__(self, x: torch.Tensor, axis: Axis) -> None:
        self._state = _TransposeState(axis)
        self._connection = _StartTranspose.apply(x, self._state)

    def wait(self) -> torch.Tensor:
        """Return the result, which has the shape of the sent tensor. Call it once."""
        return _AwaitTranspose.apply(self._connection, self._state)  # type: ignore[no-any-return]


def _gather_rows(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """All-gather on dimension 0, by the axis's exchange if it has one with room for x."""
    gather = exchange_gather if can_exchange(axis, x.nbytes) else all_gather
    return gather(x, axis).wait()


def _reduce_scatter_rows(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Reduce-scatter on dimension 0, by the axis's exchange if it has one with room for a part of x."""
    if not can_exchange(axis, x.nbytes // axis.size):
        return reduce_scatter(x, axis).wait()
    shape = (x.shape[0] // axis.size, *x.shape[1:])
    parts = x.view(axis.size, *shape)
    return scatter_and_wait(lambda out, rank: out.copy_(parts if rank is None else parts[rank]), shape, x, axis)


def gather_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """All-gather on dimension 0, differentiably; its gradient is the reduce-scatter."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def scatter_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Reduce-scatter on dimension 0, differentiably; its gradient is the all-gather."""
    return x if axis.size == 1 else _ScatterSequence.apply(x, axis)


def transpose_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """All-to-all of equal parts of dimension 0, differentiably; its gradient is the same all-to-all."""
    return x if axis.size == 1 else _TransposeSequence.apply(x, axis)


def start_transpose(x: torch.Tensor, axis: Axis) -> OverlappedTranspose:
    """Start an all-to-all of equal parts of dimension 0, which overlaps with later work until `wait`."""
    return OverlappedTranspose(x, axis)


def all_gather_into(out: torch.Tensor, shard: torch.Tensor, axis: Axis) -> Pending:
    """All-gather equal shards into `out`. `shard` may be this rank's slice of `out`."""
    if axis.size == 1:
        return Pending(out)
    transfer = axis.transfer("all_gather", out.nbytes)
    return Pending(out, _all_gather(out, shard, group=axis.group, async_op=True), transfer)


def reduce_scatter_in_place(buffer: torch.Tensor, axis: Axis) -> Pending:
    """Sum over ranks into this rank's slice of `buffer`. The other slices are undefined afterwards."""
    if axis.size == 1:
        return Pending(buffer)
    shard = buffer.view(axis.size, -1)[axis.rank]
    transfer = axis.transfer("reduce_scatter", buffer.nbytes)
    return Pending(shard, _reduce_scatter(shard, buffer, group=axis.group, async_op=True), transfer)


def reduce_scatter_rounded(buffer: torch.Tensor, axis: Axis, dtype: torch.dtype) -> Pending:
    """Reduce-scatter in place: other ranks' addends are sent as `dtype`, and added in the type of the buffer.

    An all-to-all sends each addend to its rank, so that it is rounded once. This rank's slice becomes its own value
    plus the sum of the other ranks' rounded values, in rank order. Additional memory: the buffer's elements in `dtype`.
    """
    if axis.size == 1:
        return Pending(buffer)
    shard = buffer.view(axis.size, -1)[axis.rank]
    rounded = buffer.to(dtype)
    received = _receive_buffer(buffer, axis, dtype)
    transfer = axis.transfer("all_to_all", rounded.nbytes)
    work = dist.all_to_all_single(received, rounded, group=axis.group, async_op=True)

    def add() -> None:
        parts = received.view(axis.size, -1)
        parts[axis.rank].zero_()
        shard.add_(parts.sum(0, dtype=buffer.dtype))

    return Pending(shard, work, transfer, add)


def all_to_all(
    x: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], axis: Axis, total: int
) -> Pending:
    """Send consecutive ranges of flat `x` to the ranks, and receive a range from each rank in the order of ranks.

    The caller must keep `x` alive until the result has arrived.

    Args:
        send_counts, receive_counts: number of elements sent to each rank, and received from each rank.
        total: number of elements that all ranks send together, for the record of calls.
    """
    if axis.size == 1:
        return Pending(x)
    out = x.new_empty(sum(receive_counts))
    transfer = axis.transfer("all_to_all", total * x.element_size())
    work = dist.all_to_all_single(out, x, list(receive_counts), list(send_counts), group=axis.group, async_op=True)
    return Pending(out, work, transfer)


def all_to_all_parts(x: torch.Tensor, axis: Axis) -> Pending:
    """Send equal parts of dimension 0 to the ranks, and receive a part from each rank in the order of ranks.

    The result has the shape of x, [size * n, ...]. The axis's exchange sends the parts if they fit, else a collective
    sends them. Raises ValueError if the number of rows is not divisible by the number of ranks.
    """
    if x.shape[0] % axis.size:
        raise ValueError(f"an all-to-all over {axis.size} ranks cannot divide {x.shape[0]} rows into equal parts")
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    if can_exchange(axis, x.nbytes // axis.size):
        assert axis.exchange is not None
        shape = (x.shape[0] // axis.size, *x.shape[1:])
        parts = x.detach().view(axis.size, *shape)
        if axis.runtime.sent_observer is not None:
            axis.runtime.sent_observer(axis, "all-to-all", x)
        transfer = axis.transfer("fused_all_to_all", x.nbytes)
        wait = axis.exchange.all_to_all(lambda out, rank: out.copy_(parts[rank]), shape, x)
        return Pending(x, transfer=transfer, finish=wait)
    out = torch.empty_like(x)
    transfer = axis.transfer("all_to_all", x.nbytes)
    return Pending(out, dist.all_to_all_single(out, x, group=axis.group, async_op=True), transfer)


def _receive_buffer(buffer: torch.Tensor, axis: Axis, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for the elements of `buffer` in `dtype`.

    If `dtype` has half the bytes, this is the half of `buffer` that does not contain this rank's slice, if there is
    such a half. Otherwise it is new memory.
    """
    count = buffer.numel()
    shard_count = count // axis.size
    narrow = buffer.view(dtype)
    if narrow.numel() == 2 * count:
        is_in_first_half = 2 * (axis.rank + 1) * shard_count <= count
        is_in_second_half = 2 * axis.rank * shard_count >= count
        if is_in_first_half:
            return narrow[count:]
        if is_in_second_half:
            return narrow[:count]
    return torch.empty(count, dtype=dtype, device=buffer.device)
