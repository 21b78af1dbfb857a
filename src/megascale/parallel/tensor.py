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
from torch import nn

from megascale import torch_private
from megascale.core.inventory import LogicalTensor
from megascale.ops.activation import RecomputedActivation
from megascale.ops.gradient_sink import tracked
from megascale.ops.linear import Operand
from megascale.ops.reduce import bias_gradient
from megascale.parallel.collectives import (
    Axis,
    Pending,
    all_gather,
    exchange_gather,
    exchange_scatter,
    exchanges,
    gather_and_consume,
    reduce_scatter,
    scatter_now,
)
from megascale.parallel.exchange import Make
from megascale.parallel.linear import PLAIN
from megascale.parallel.linear_precision import LinearPrecision
from megascale.parallel.parameters import local_parameter


def _recomputed(
    recompute_fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`recompute_fn(x)` once more with a graph of its own: (leaf copy of x, result)."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        return leaf, recompute_fn(leaf)


def _gathered_gemm(
    x: Operand, weight: torch.Tensor, bias: torch.Tensor | None, linears: LinearPrecision, like: torch.Tensor
) -> torch.Tensor:
    """linear(all-gathered x, weight, bias) in the type of `like`, the gather hidden as `axis.overlap` says."""
    axis, (part, *rest) = linears.axis, x
    linears.prepare((weight,))
    if axis.overlap == "off":
        return linears.forward((all_gather(part, axis).wait(), *rest), weight, bias)
    n = part.shape[0]
    y = like.new_empty((axis.size * n, *part.shape[1:-1], weight.shape[0]))

    def consume(shard: torch.Tensor, rank: int) -> None:
        linears.forward((shard, *rest), weight, bias, y[rank * n : (rank + 1) * n])

    if exchanges(axis, part.nbytes):
        gather_and_consume(part, axis, consume, keep=False)
        return y
    gathering = all_gather(part, axis)
    consume(part, axis.rank)  # the own part needs no communication
    whole = gathering.wait()
    for start, stop in ((0, axis.rank), (axis.rank + 1, axis.size)):
        if start < stop:
            linears.forward((whole[start * n : stop * n], *rest), weight, bias, y[start * n : stop * n])
    return y


def _scattered(total: Make, shape: tuple[int, ...], like: torch.Tensor, axis: Axis, followed: bool) -> Pending:
    """Reduce-scatter of the sum of GEMMs that `total` writes, of `shape` on all ranks, in flight or done.

    followed: whether another GEMM follows that it can hide under.
    """
    part = (shape[0] // axis.size, *shape[1:])
    if exchanges(axis, math.prod(part) * like.element_size()):
        if followed:
            return exchange_scatter(total, part, like, axis)
        return Pending(scatter_now(total, part, like, axis))
    y = like.new_empty(shape)
    total(y, None)
    pending = reduce_scatter(y, axis)
    return Pending(pending.wait()) if axis.overlap == "off" else pending


def _rows_of(x: Operand, axis: Axis, rank: int | None) -> Operand:
    """An operand of a GEMM whose rows are those of one rank; all of them for None."""
    if rank is None:
        return x
    n = x[0].shape[0] // axis.size
    return (x[0][rank * n : (rank + 1) * n], *x[1:])


# What an operator is told beside the tensors that autograd knows (ops/gradient_sink.py::tracked): its parameters too.
@torch_private.called_directly
class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        tracked_weight: torch.Tensor | None,
        tracked_bias: torch.Tensor | None,
        told: tuple[Any, ...],
    ) -> torch.Tensor:
        weight, bias, linears, recompute_fn, given, wants_bias = told
        ctx.told = weight, bias, linears, recompute_fn, wants_bias
        if recompute_fn is None:
            operand = linears.input(x, weight, given, True)
            ctx.save_for_backward(*linears.keep(operand))
        else:
            operand = linears.input(recompute_fn(x), weight, given, True)
            ctx.save_for_backward(x)
        if linears.axis.size == 1:
            return linears.forward(operand, weight, bias)
        return _gathered_gemm(operand, weight, bias, linears, x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        kept: Operand = ctx.saved_tensors
        weight, bias, linears, recompute_fn, wants_bias = ctx.told
        leaf: torch.Tensor | None = None
        if recompute_fn is not None:
            leaf, made = _recomputed(recompute_fn, kept[0])
            kept = linears.keep(linears.input(made.detach(), weight, None, True))
        if linears.axis.size == 1:
            gradient = linears.gradient(dy, weight)
            ready = linears.axis.runtime.stream.record_event()  # what the weight's gradient reads is made by then
            dx = linears.dgrad(gradient, weight)
            dw = linears.wgrad(weight, gradient, kept, ready)
        else:
            dx, dw = _scattered_gradients(dy, weight, kept, linears)
        db = bias_gradient(bias, dy) if wants_bias else None
        if leaf is not None:
            torch.autograd.backward(made, dx)
            dx = leaf.grad
        return dx, dw, db, None


def _scattered_gradients(
    dy: torch.Tensor, weight: torch.Tensor, kept: Operand, linears: LinearPrecision
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of an input that was gathered and of the weight."""
    axis, (part, *rest) = linears.axis, kept
    linears.prepare((weight,))
    gradient = linears.gradient(dy, weight)  # first: ranks may have to agree on its scale, behind no gather
    gather = exchange_gather if exchanges(axis, part.nbytes) else all_gather
    gathering = gather(part, axis)
    if axis.overlap == "off":
        gathering.wait()
    # The scatter is in flight while the weight's gradient is computed.
    ready = axis.runtime.stream.record_event()
    shape = (*dy.shape[:-1], weight.shape[1])

    def dgrad(out: torch.Tensor, rank: int | None) -> None:
        linears.dgrad(_rows_of(gradient, axis, rank), weight, out)

    scattering = _scattered(dgrad, shape, dy, axis, followed=True)
    dw = linears.wgrad(weight, gradient, lambda: linears.gathered((gathering.wait(), *rest)), ready)
    return scattering.wait(), dw


@torch_private.called_directly
class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, told: tuple[Any, ...], *tensors: torch.Tensor | None) -> torch.Tensor:
        linears, weights, recompute_fns, given = told
        xs: Any = tensors[: len(weights)]
        kept: list[torch.Tensor] = []
        ends: list[int] = []
        operands: list[Operand] = []
        for x, weight, recompute_fn, known in zip(xs, weights, recompute_fns, given, strict=True):
            if recompute_fn is None:
                operand = linears.input(x, weight, known)
                kept += linears.keep(operand)
            else:
                operand = linears.input(recompute_fn(x), weight, known)
                kept.append(x)
            operands.append(operand)
            ends.append(len(kept))
        ctx.save_for_backward(*kept)
        ctx.told = linears, weights, recompute_fns, ends
        if linears.axis.size == 1:
            y: torch.Tensor = linears.forward(operands[0], weights[0])
            for i in range(1, len(weights)):
                linears.forward(operands[i], weights[i], None, y, True)
            return y

        linears.prepare(weights)

        def total(out: torch.Tensor, rank: int | None) -> None:
            for i, (operand, weight) in enumerate(zip(operands, weights, strict=True)):
                # Accumulating costs no concatenation.
                linears.forward(_rows_of(operand, linears.axis, rank), weight, None, out, i > 0)

        shape = (*xs[0].shape[:-1], weights[0].shape[0])
        return _scattered(total, shape, xs[0], linears.axis, followed=False).wait()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        linears, weights, recompute_fns, ends = ctx.told
        kept, start = ctx.saved_tensors, 0
        gradient, given = _gathered_input_gradients(dy, weights, linears)
        dxs: list[Any] = []
        dws: list[Any] = []
        for stop, dx, weight, recompute_fn in zip(ends, given, weights, recompute_fns, strict=True):
            x: Operand = kept[start:stop]
            if recompute_fn is not None:
                made, dx = recompute_fn.with_gradient(x[0], dx)
                x = linears.keep(linears.input(made, weight))
            dxs.append(dx)
            dws.append(linears.wgrad(weight, gradient, x))
            start = stop
        return None, *dxs, *dws


def _gathered_input_gradients(
    dy: torch.Tensor, weights: Sequence[torch.Tensor], linears: LinearPrecision
) -> tuple[Operand, list[torch.Tensor]]:
    """All-gathered dy, and dy @ weight for each weight; fused, each shard is multiplied as it arrives."""
    axis, gradient = linears.axis, linears.gradient(dy, weights[0], True)
    if axis.size == 1:
        return gradient, [linears.dgrad(gradient, weight) for weight in weights]
    part, *rest = gradient
    linears.prepare(weights)
    if not exchanges(axis, part.nbytes):
        whole: Operand = (all_gather(part, axis).wait(), *rest)
        return linears.gathered(whole), [linears.dgrad(whole, weight) for weight in weights]
    n = part.shape[0]
    dxs = [dy.new_empty((axis.size * n, *dy.shape[1:-1], weight.shape[1])) for weight in weights]

    def consume(shard: torch.Tensor, rank: int) -> None:
        for weight, dx in zip(weights, dxs, strict=True):
            linears.dgrad((shard, *rest), weight, dx[rank * n : (rank + 1) * n])

    return linears.gathered((gather_and_consume(part, axis, consume, keep=True), *rest)), dxs


def gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    linears: LinearPrecision = PLAIN,
    recompute_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    amax: Any = None,
    fused_bias_gradient: bool = False,
) -> torch.Tensor:
    """Column-parallel GEMM: [s/t, b, h] -> [s, b, columns/t].

    weight [columns/t, h] and bias [columns/t] are this rank's columns; with `fused_bias_gradient` the gradient of the
    bias is made by whoever reads the result. With `recompute_fn` (a norm) the GEMM is of recompute_fn(x), which is
    recomputed in backward instead of being kept. given: what the GEMM's input is known to be (`Gemms.input`)."""
    wants_bias = bias is not None and not fused_bias_gradient and bias.requires_grad
    told = weight, bias, linears, recompute_fn, amax, wants_bias
    return _GatherLinear.apply(x, tracked(x, weight), tracked(x, bias) if wants_bias else None, told)


def linear_scatter(
    linears: LinearPrecision,
    *inputs: torch.Tensor,
    recompute_fns: Sequence[RecomputedActivation | None] | None = None,
    amaxes: Sequence[Any] | None = None,
) -> torch.Tensor:
    """Row-parallel sum of GEMMs: x1, w1, x2, w2, ... -> [s/t, b, h], one reduce-scatter for all.

    xi [s, b, ki/t] and wi [h, ki/t] are this rank's rows of each GEMM. With `recompute_fns[i]` the i-th
    GEMM is of that activation of xi, which is recomputed in backward instead of being kept. given[i]: what the i-th
    GEMM's input is known to be (`Gemms.input`).
    """
    xs, weights = inputs[0::2], inputs[1::2]
    none = (None,) * len(weights)
    told = linears, weights, recompute_fns or none, amaxes or none
    return _LinearScatter.apply(told, *xs, *[tracked(x, weight) for x, weight in zip(xs, weights, strict=True)])


class ColumnLinear(nn.Module):
    """One GEMM whose output columns are stacked logical tensors, each cut over the tensor axis.

    Args:
        tensors: weights [rows, hidden], and their biases if they have any.
    """

    def __init__(self, tensors: Sequence[LogicalTensor], linears: LinearPrecision, dtype: torch.dtype) -> None:
        super().__init__()
        self.linears, axis = linears, linears.axis
        weights, biases = [t for t in tensors if t.gemm], [t for t in tensors if not t.gemm]
        self.weight = local_parameter(weights, axis.rank, axis.size, dtype)
        self.bias = local_parameter(biases, axis.rank, axis.size, dtype) if biases else None

    def forward(
        self,
        x_SBH: torch.Tensor,
        recompute_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        fused_bias_gradient: bool = False,
    ) -> torch.Tensor:
        """x times the weight, [s/t, b, h] -> [s, b, columns/t]. With `recompute_fn` the GEMM is of
        recompute_fn(x), which is recomputed in backward instead of being kept. With `fused_bias_gradient` whoever reads
        the result makes the bias's gradient, which is its own gradient's sum over the rows."""
        own = self._parameters  # as `self.weight` and `self.bias`, which nn.Module looks for in several places
        weight: Any = own["weight"]
        return gather_linear(x_SBH, weight, own.get("bias"), self.linears, recompute_fn, None, fused_bias_gradient)


class RowLinear(nn.Module):
    """A matrix [h, k] whose columns are cut over the tensor axis, for `linear_scatter`; its bias is added by whoever
    takes the residual sum, since it belongs to the sum over ranks.

    Args:
        tensors: the weight, and its bias if it has one.
    """

    def __init__(self, tensors: Sequence[LogicalTensor], linears: LinearPrecision, dtype: torch.dtype) -> None:
        super().__init__()
        (weight, *bias), axis = tensors, linears.axis
        self.weight = local_parameter([weight], axis.rank, axis.size, dtype)
        self.bias = local_parameter(bias, axis.rank, axis.size, dtype) if bias else None
