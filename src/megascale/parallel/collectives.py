"""The collectives that the engine uses, on dimension 0, each with an asynchronous form.

Activations are [sequence, batch, hidden], so gathering or scattering the sequence is gathering or scattering
dimension 0 of a contiguous tensor: no copy before or after. A group of None is a single-member group: nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.core.spans import SpanAxis
from megascale.parallel.exchange import Exchange, Make
from megascale.parallel.runtime import Runtime, Transfer

# torch 2.13 has new names for these two and warns of the old ones, on every rank.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    """One axis of the grid as this rank sees it.

    Attributes:
        group: its process group, None for a single-member group.
        size, rank: how many ranks, and which one this is.
        overlap: how tensor-parallel GEMMs hide their collective: "fused" (symmetric memory), "async" (the
            collective overlaps with independent GEMMs) or "off".
        exchange: with "fused", what does it (parallel/exchange.py).
        name: what the record of calls (core/calls.py) knows the group as; "" is not recorded.
        kind: which axis of the grid it is, for timers.
        runtime: what this rank runs with.
    """

    group: Any = None
    size: int = 1
    rank: int = 0
    overlap: str = "async"
    name: str = ""
    kind: SpanAxis = SpanAxis.NONE
    exchange: Exchange | None = None
    runtime: Runtime = field(default_factory=Runtime, compare=False)

    def transfer(self, op: str, nbytes: int) -> Transfer:
        """A collective along this axis starts now."""
        return self.runtime.transfer(self.name, self.kind, op, nbytes)


SINGLE_RANK = Axis()  # a single-member group


class Pending:
    """A result that is in flight: `wait()` returns it.

    Args:
        work: what has a `wait`, which makes the current stream wait (on CPU the caller).
        transfer: who records it.
        then: what makes the result of what has arrived, once; it may return another tensor.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        work: Any = None,
        transfer: Transfer | None = None,
        then: Callable[[], Any] | None = None,
    ) -> None:
        self._tensor, self._work, self._transfer, self._then = tensor, work, transfer, then

    def wait(self) -> torch.Tensor:
        """The finished tensor; on CUDA the current stream waits, on CPU the caller does."""
        transfer, self._transfer = self._transfer, None
        if self._work is not None:
            work, self._work = self._work, None
            if transfer is None:
                work.wait()
            else:
                waiting = transfer.waiting()
                work.wait()
                transfer.done(waiting)
                transfer = None
        if self._then is not None:
            then, self._then = self._then, None
            found = then()
            self._tensor = self._tensor if found is None else found
        if transfer is not None:
            transfer.done()  # by an exchange, which records what its stream waits for
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
    """As all_gather, by the axis's exchange."""
    assert axis.exchange is not None
    transfer = axis.transfer("fused_gather", axis.size * x.nbytes)
    return Pending(x, None, transfer, axis.exchange.gather(x.contiguous()))


def gather_and_consume(
    x: torch.Tensor, axis: Axis, consume: Callable[[torch.Tensor, int], None], keep: bool
) -> torch.Tensor:
    """All-gather x by the axis's exchange, with consume(part, rank) for each rank's part as it arrives."""
    assert axis.exchange is not None
    transfer = axis.transfer("fused_gather", axis.size * x.nbytes)
    whole = axis.exchange.gather_and_consume(x.contiguous(), consume, keep)
    transfer.done()
    return whole


def exchange_scatter(make: Make, shape: tuple[int, ...], like: torch.Tensor, axis: Axis) -> Pending:
    """Reduce-scatter of what make(out [size, *shape], None) writes, by the axis's exchange, under what comes next."""
    assert axis.exchange is not None
    transfer = axis.transfer("fused_scatter", axis.size * math.prod(shape) * like.element_size())
    return Pending(like, None, transfer, axis.exchange.scatter(make, shape, like))


def scatter_now(make: Make, shape: tuple[int, ...], like: torch.Tensor, axis: Axis) -> torch.Tensor:
    """As exchange_scatter, done at once, by make(out [*shape], rank) for the part of each rank."""
    assert axis.exchange is not None
    transfer = axis.transfer("fused_scatter", axis.size * math.prod(shape) * like.element_size())
    out = axis.exchange.scatter_now(make, shape, like)
    transfer.done()
    return out


def reduce_scatter(x: torch.Tensor, axis: Axis) -> Pending:
    """Sum over ranks and keep this rank's slice of dimension 0: [size * n, ...] -> [n, ...]."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    transfer = axis.transfer("reduce_scatter", x.nbytes)
    return Pending(out, _reduce_scatter(out, x, group=axis.group, async_op=True), transfer)


def all_reduce(x: torch.Tensor, axis: Axis, op: Any = None, recorded: str = "all_reduce") -> Pending:
    """Sum (or `op`) over ranks, in place. recorded: what the record of calls knows it as (core/calls.py OPS)."""
    if axis.size == 1:
        return Pending(x)
    transfer = axis.transfer(recorded, x.nbytes)
    return Pending(x, dist.all_reduce(x, op or dist.ReduceOp.SUM, group=axis.group, async_op=True), transfer)


def exchanges(axis: Axis, nbytes: int) -> bool:
    """Whether the axis's exchange carries a rank's part of so many bytes; one larger than training's goes by
    collectives."""
    return axis.size > 1 and axis.exchange is not None and nbytes <= axis.exchange.shard_bytes


def all_reduce_small(x: torch.Tensor, axis: Axis, op: Any = None) -> torch.Tensor:
    """Sum (or maximum) over ranks, in place and at once, by the axis's exchange if it has one.

    Every rank gets all ranks' `x` and reduces them itself, in the same order: for scalars and rows of them.
    """
    op = op or dist.ReduceOp.SUM
    if not exchanges(axis, x.nbytes):
        return all_reduce(x, axis, op).wait()
    whole = exchange_gather(x.view(1, -1), axis).wait()
    (torch.amax if op == dist.ReduceOp.MAX else torch.sum)(whole, 0, out=x.view(-1))
    return x


def largest_magnitude(amax: torch.Tensor, axis: Axis) -> torch.Tensor:
    """amax, float32 [], of a part of a tensor that ranks share: becomes that of all of it, in place and at once."""
    if axis.size == 1:
        return amax
    if axis.exchange is not None and axis.exchange.peer_max is not None:
        return axis.exchange.peer_max(amax)
    return all_reduce_small(amax, axis, dist.ReduceOp.MAX)


@torch_private.called_directly
class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return _gather_now(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _scatter_now(grads[0], ctx.axis), None


@torch_private.called_directly
class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return _scatter_now(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _gather_now(grads[0], ctx.axis), None


def _gather_now(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    gather = exchange_gather if exchanges(axis, x.nbytes) else all_gather
    return gather(x, axis).wait()


def _scatter_now(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    part = (x.shape[0] // axis.size, *x.shape[1:])
    if not exchanges(axis, x.nbytes // axis.size):
        return reduce_scatter(x, axis).wait()
    parts = x.view(axis.size, *part)
    return scatter_now(lambda out, rank: out.copy_(parts if rank is None else parts[rank]), part, x, axis)


def gather_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Differentiable all-gather on dimension 0; its gradient is the reduce-scatter."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def scatter_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Differentiable reduce-scatter on dimension 0; its gradient is the all-gather."""
    return x if axis.size == 1 else _ScatterSequence.apply(x, axis)


def all_gather_into(whole: torch.Tensor, part: torch.Tensor, axis: Axis) -> Pending:
    """Gather equal parts into `whole`; `part` may be this rank's slice of it."""
    if axis.size == 1:
        return Pending(whole)
    transfer = axis.transfer("all_gather", whole.nbytes)
    return Pending(whole, _all_gather(whole, part, group=axis.group, async_op=True), transfer)


def reduce_scatter_in_place(whole: torch.Tensor, axis: Axis) -> Pending:
    """Sum over ranks into this rank's slice of `whole`; the other slices hold nothing of use afterwards."""
    if axis.size == 1:
        return Pending(whole)
    part = whole.view(axis.size, -1)[axis.rank]
    transfer = axis.transfer("reduce_scatter", whole.nbytes)
    return Pending(part, _reduce_scatter(part, whole, group=axis.group, async_op=True), transfer)


def reduce_scatter_rounded(whole: torch.Tensor, axis: Axis, dtype: torch.dtype) -> Pending:
    """As `reduce_scatter_in_place`, but what others add travels as `dtype`; sums are taken in the buffer's own type.

    Parts are exchanged, not reduced on the way, so nothing is rounded twice: the slice becomes its own value plus the
    sum of the others' rounded ones, in rank order. Takes extra memory of the buffer's elements in `dtype`.
    """
    if axis.size == 1:
        return Pending(whole)
    part = whole.view(axis.size, -1)[axis.rank]
    sent = whole.to(dtype)
    got = _receive_buffer(whole, axis, dtype)
    transfer = axis.transfer("all_to_all", sent.nbytes)
    work = dist.all_to_all_single(got, sent, group=axis.group, async_op=True)

    def add() -> None:
        arrived = got.view(axis.size, -1)
        arrived[axis.rank].zero_()
        part.add_(arrived.sum(0, dtype=whole.dtype))

    return Pending(part, work, transfer, add)


def all_to_all(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis, total: int) -> Pending:
    """Elements of flat `x`, send[r] of them to each rank r in turn; what others sent, receive[r] from each in turn.

    `x` must live until the result has arrived. `total`: elements that all ranks send, for the record of calls.
    """
    if axis.size == 1:
        return Pending(x)
    out = x.new_empty(sum(receive))
    transfer = axis.transfer("all_to_all", total * x.element_size())
    work = dist.all_to_all_single(out, x, list(receive), list(send), group=axis.group, async_op=True)
    return Pending(out, work, transfer)


def _receive_buffer(whole: torch.Tensor, axis: Axis, dtype: torch.dtype) -> torch.Tensor:
    """Memory for as many elements of `dtype`: the half of `whole` without this rank's slice, if a half suffices."""
    count, slice_ = whole.numel(), whole.numel() // axis.size
    narrow = whole.view(dtype)
    if narrow.numel() == 2 * count:
        start, stop = 2 * axis.rank * slice_, 2 * (axis.rank + 1) * slice_
        if stop <= count:
            return narrow[count:]
        if start >= count:
            return narrow[:count]
    return torch.empty(count, dtype=dtype, device=whole.device)
