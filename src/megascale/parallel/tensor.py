"""Tensor and sequence parallelism: linear layers whose collectives are folded into them.

Between layers an activation is cut over the tensor-parallel ranks along the sequence; inside, along heads or MLP
columns (Korthikanti et al. 2022; MegaScale section 3.2, Figure 3). `gather_linear` all-gathers its input and
multiplies by column shards; `linear_scatter` multiplies by row shards and reduce-scatters the sum. Backward mirrors
them: the gradient of the input is communicated while the gradient of the weight is computed. Only the local shard of
a gathered input is kept for backward and gathered once more there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megascale.ops import side_stream
from megascale.ops.activation import RecomputedActivation
from megascale.ops.linear import weight_gradient
from megascale.ops.reduce import bias_gradient
from megascale.parallel.collectives import (
    Axis,
    Pending,
    all_gather,
    exchange_gather,
    exchange_scatter,
    gather_and_consume,
    reduce_scatter,
    scatter_now,
)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _recomputed(
    recompute_fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`recompute_fn(x)` once more with a graph of its own: (leaf copy of x, result)."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        return leaf, recompute_fn(leaf)


def _exchanges(axis: Axis, part: torch.Size | tuple[int, ...], like: torch.Tensor) -> bool:
    """Whether the exchange carries a rank's part of this shape; one larger than training's goes by collectives."""
    if axis.size == 1 or axis.exchange is None:
        return False
    return math.prod(part) * like.element_size() <= axis.exchange.shard_bytes


def _gathered_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis) -> torch.Tensor:
    """linear(all-gathered x, weight, bias), the gather hidden as `axis.overlap` says."""
    if axis.size == 1:
        return torch.nn.functional.linear(x, weight, bias)
    if axis.overlap == "off":
        return torch.nn.functional.linear(all_gather(x, axis).wait(), weight, bias)
    n = x.shape[0]
    y = x.new_empty((axis.size * n, *x.shape[1:-1], weight.shape[0]))

    def consume(shard: torch.Tensor, rank: int) -> None:
        out = _flat(y[rank * n : (rank + 1) * n])
        if bias is None:
            torch.mm(_flat(shard), weight.t(), out=out)
        else:
            torch.addmm(bias, _flat(shard), weight.t(), out=out)

    if _exchanges(axis, x.shape, x):
        gather_and_consume(x, axis, consume, keep=False)
        return y
    gathering = all_gather(x, axis)
    consume(x, axis.rank)  # the own part needs no communication
    whole = gathering.wait()
    for start, stop in ((0, axis.rank), (axis.rank + 1, axis.size)):
        if start < stop:
            rows = _flat(whole[start * n : stop * n])
            out = _flat(y[start * n : stop * n])
            if bias is None:
                torch.mm(rows, weight.t(), out=out)
            else:
                torch.addmm(bias, rows, weight.t(), out=out)
    return y


def _sum_of_gemms(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], transposed: bool, out: torch.Tensor
) -> None:
    """out <- sum of x @ weight (or its transpose). A second GEMM that accumulates costs no concatenation."""
    for i, (x, weight) in enumerate(zip(xs, weights, strict=True)):
        matrix = weight.t() if transposed else weight
        if i == 0:
            torch.mm(_flat(x), matrix, out=_flat(out))
        else:
            _flat(out).addmm_(_flat(x), matrix)


def _scattered_gemms(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], transposed: bool, axis: Axis, followed: bool
) -> Pending:
    """Reduce-scatter of the sum of GEMMs, in flight or done.

    followed: whether another GEMM follows that it can hide under.
    """
    s = xs[0].shape[0]
    columns = weights[0].shape[0 if transposed else 1]
    shape = (s // axis.size, *xs[0].shape[1:-1], columns)
    if _exchanges(axis, shape, xs[0]):

        def make(out: torch.Tensor) -> None:
            _sum_of_gemms(xs, weights, transposed, out)

        if followed:
            return exchange_scatter(make, shape, xs[0], axis)
        return Pending(scatter_now(make, shape, xs[0], axis))
    y = xs[0].new_empty((s, *xs[0].shape[1:-1], columns))
    _sum_of_gemms(xs, weights, transposed, y)
    pending = reduce_scatter(y, axis)
    return Pending(pending.wait()) if axis.overlap == "off" else pending


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        axis: Axis,
        recompute_fn: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        # The parameters themselves, not saved copies: they carry main_grad.
        ctx.weight, ctx.bias, ctx.axis, ctx.recompute_fn = weight, bias, axis, recompute_fn
        return _gathered_gemm(x if recompute_fn is None else recompute_fn(x), weight, bias, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        dy = grads[0]
        leaf: torch.Tensor | None = None
        if ctx.recompute_fn is not None:
            leaf, x = _recomputed(ctx.recompute_fn, x)
        gather = exchange_gather if _exchanges(ctx.axis, x.shape, x) else all_gather
        gathering = gather(x.detach(), ctx.axis)
        if ctx.axis.overlap == "off":
            gathering.wait()
        # The scatter is in flight while the weight's gradient is computed.
        ready = side_stream.current.record_event()
        scattering = _scattered_gemms([dy], [ctx.weight], False, ctx.axis, followed=True)
        dw = weight_gradient(ctx.weight, dy, gathering.wait, ready)
        db = bias_gradient(ctx.bias, dy) if ctx.needs_input_grad[2] else None
        dx: torch.Tensor | None = scattering.wait()
        if leaf is not None:
            torch.autograd.backward(x, dx)
            dx = leaf.grad
        return dx, dw, db, None, None


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: Axis, recompute_fns: Sequence[RecomputedActivation | None], *inputs: torch.Tensor
    ) -> torch.Tensor:
        xs, weights = inputs[0::2], inputs[1::2]
        ctx.save_for_backward(*xs)
        ctx.weights, ctx.axis, ctx.recompute_fns = weights, axis, recompute_fns
        made = [
            x if recompute_fn is None else recompute_fn(x) for x, recompute_fn in zip(xs, recompute_fns, strict=True)
        ]
        return _scattered_gemms(made, weights, True, axis, followed=False).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        xs, weights, axis = ctx.saved_tensors, ctx.weights, ctx.axis
        dy, dxs = _gathered_input_gradients(grads[0], xs, weights, axis)
        out: list[Any] = [None, None]
        for x, dx, weight, recompute_fn in zip(xs, dxs, weights, ctx.recompute_fns, strict=True):
            if recompute_fn is not None:
                x, dx = recompute_fn.with_gradient(x, dx)
            out += [dx, weight_gradient(weight, dy, x)]
        return tuple(out)


def _gathered_input_gradients(
    dy: torch.Tensor, xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], axis: Axis
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All-gathered dy, and dy @ weight for each weight; fused, each shard is multiplied as it arrives."""
    if not _exchanges(axis, dy.shape, dy):
        whole = all_gather(dy, axis).wait()
        return whole, [torch.matmul(whole, weight) for weight in weights]
    n = dy.shape[0]
    dxs = [dy.new_empty((axis.size * n, *dy.shape[1:-1], weight.shape[1])) for weight in weights]

    def consume(shard: torch.Tensor, rank: int) -> None:
        for weight, dx in zip(weights, dxs, strict=True):
            torch.mm(_flat(shard), weight, out=_flat(dx[rank * n : (rank + 1) * n]))

    return gather_and_consume(dy, axis, consume, keep=True), dxs


def gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    axis: Axis,
    recompute_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Column-parallel GEMM: [s/t, b, h] -> [s, b, columns/t].

    weight [columns/t, h] and bias [columns/t] are this rank's columns; the gradient of a detached bias is made by
    whoever reads the result. With `recompute_fn` (a norm) the GEMM is of recompute_fn(x), which is recomputed in
    backward instead of being kept."""
    return _GatherLinear.apply(x, weight, bias, axis, recompute_fn)


def linear_scatter(
    axis: Axis,
    *inputs: torch.Tensor,
    recompute_fns: Sequence[RecomputedActivation | None] | None = None,
) -> torch.Tensor:
    """Row-parallel sum of GEMMs: x1, w1, x2, w2, ... -> [s/t, b, h], one reduce-scatter for all.

    xi [s, b, ki/t] and wi [h, ki/t] are this rank's rows of each GEMM. With `recompute_fns[i]` the i-th
    GEMM is of that activation of xi, which is recomputed in backward instead of being kept.
    """
    return _LinearScatter.apply(axis, recompute_fns or (None,) * (len(inputs) // 2), *inputs)
