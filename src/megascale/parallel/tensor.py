"""Tensor and sequence parallelism: linear layers that include their collectives.

Between layers an activation is sharded over the tensor-parallel ranks along the sequence, and within layers along heads
or MLP columns (Korthikanti et al. 2022; MegaScale section 3.2, Figure 3). `gather_linear` all-gathers its input and
multiplies by column shards. `linear_scatter` multiplies by row shards and reduce-scatters the sum. In backward,
`gather_linear` reduce-scatters the gradient of its input while it computes the gradient of the weight, and
`linear_scatter` all-gathers the gradient of its output. A forward saves only the local shard of a gathered input, and
backward gathers this input again.

In shapes, s is the sequence, b the micro-batch, h the width of the layer, t the number of tensor-parallel ranks. dx, dw
and db are gradients of an input, a weight and a bias. The argument `linears` runs the GEMMs in the chosen precision and
holds the axis. A function named `recompute_fn` is applied to an input before the GEMM, and applied again in backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megascale import torch_private
from megascale.core.inventory_records import LogicalTensor
from megascale.ops.activation import RecomputedActivation
from megascale.ops.gradient_sink import get_tracked
from megascale.ops.linear import Operand
from megascale.ops.reduce import compute_bias_gradient
from megascale.parallel.adapters import ColumnAdapter, RowAdapter
from megascale.parallel.collectives import (
    Axis,
    Pending,
    all_gather,
    can_exchange,
    exchange_gather,
    exchange_scatter,
    gather_and_consume,
    reduce_scatter,
    scatter_and_wait,
)
from megascale.parallel.exchange import WriteParts
from megascale.parallel.linear import DEFAULT_PRECISION
from megascale.parallel.linear_precision import LinearPrecision
from megascale.parallel.module import DirectModule
from megascale.parallel.parameters import local_parameter

RecomputeFn = Callable[[torch.Tensor], torch.Tensor]


def start_operand_gather(
    x: Operand, axis: Axis, gather: Callable[[torch.Tensor, Axis], Pending]
) -> Callable[[], Operand]:
    """Start to gather an operand's rows, with their scales. Return a function that waits for the gathered operand."""
    gathering = gather(x.data, axis)
    scale = x.scale
    has_row_scales = scale is not None and scale.dim() > 0
    if not has_row_scales:  # all ranks have the same scale, or none
        return lambda: Operand(gathering.wait(), scale)
    assert scale is not None
    gathering_scales = gather(scale, axis)
    return lambda: Operand(gathering.wait(), gathering_scales.wait())


def _exchange_and_consume(x: Operand, axis: Axis, consume: Callable[[Operand, int], None], keep_local: bool) -> Operand:
    """Gather an operand by the axis's exchange, and call consume(rows, rank) for each rank's rows when they arrive.

    Returns:
        The gathered operand. Without `keep_local` this rank's rows of it are not written.
    """
    scale = x.scale
    if scale is None or not scale.dim():
        data = gather_and_consume(x.data, axis, lambda rows, rank: consume(Operand(rows, scale), rank), keep_local)
        return Operand(data, scale)
    n = x.data.shape[0]
    # Copies run in order, so the scales of a peer's rows arrive before the rows.
    gathering_scales = exchange_gather(scale, axis)

    def consume_rows(rows: torch.Tensor, rank: int) -> None:
        if rank == axis.rank:
            consume(Operand(rows, scale), rank)
        else:
            consume(Operand(rows, gathering_scales.wait()[rank * n : (rank + 1) * n]), rank)

    data = gather_and_consume(x.data, axis, consume_rows, keep_local)
    return Operand(data, gathering_scales.wait())  # later calls of `wait` return the same tensor


def _gathered_gemm(
    x: Operand, weight: torch.Tensor, bias: torch.Tensor | None, linears: LinearPrecision, like: torch.Tensor
) -> torch.Tensor:
    """Return linear(all-gathered x, weight, bias) in the type of `like`.

    `axis.overlap` determines how the GEMM hides the gather.
    """
    axis = linears.axis
    linears.prepare_weights((weight,))
    if axis.overlap == "off":
        return linears.forward(start_operand_gather(x, axis, all_gather)(), weight, bias)
    n = x.data.shape[0]  # rows of a rank
    y = like.new_empty((axis.size * n, *x.data.shape[1:-1], weight.shape[0]))

    def multiply(rows: Operand, rank: int) -> None:
        linears.forward(rows, weight, bias, y[rank * n : (rank + 1) * n])

    if axis.exchange is not None and can_exchange(axis, x.data.nbytes):
        _exchange_and_consume(x, axis, multiply, keep_local=False)
        return y
    wait = start_operand_gather(x, axis, all_gather)
    local = slice(axis.rank * n, (axis.rank + 1) * n)
    linears.forward(x, weight, bias, y[local])  # this rank's shard needs no communication
    gathered = wait()
    # The other ranks' rows are those before and those after this rank's.
    for start, stop in ((0, local.start), (local.stop, axis.size * n)):
        if start < stop:
            linears.forward(gathered.select_rows(start, stop), weight, bias, y[start:stop])
    return y


def _reduce_scattered_gemm(
    write: WriteParts, shape: tuple[int, ...], like: torch.Tensor, axis: Axis, has_next_gemm: bool
) -> Pending:
    """Reduce-scatter the result that `write` writes, of `shape` before the scatter; asynchronously if that can help.

    Args:
        has_next_gemm: whether another GEMM follows that can hide the collective.
    """
    shard_shape = (shape[0] // axis.size, *shape[1:])
    if axis.exchange is not None and can_exchange(axis, math.prod(shard_shape) * like.element_size()):
        if has_next_gemm:
            return exchange_scatter(write, shard_shape, like, axis)
        return Pending(scatter_and_wait(write, shard_shape, like, axis))
    y = like.new_empty(shape)
    write(y, None)
    pending = reduce_scatter(y, axis)
    if axis.overlap == "off":
        return Pending(pending.wait())
    return pending


def _select_rank_rows(x: Operand, axis: Axis, rank: int | None) -> Operand:
    """Return the rows of an operand that belong to `rank`, or all rows with None."""
    if rank is None:
        return x
    n = x.data.shape[0] // axis.size
    return x.select_rows(rank * n, (rank + 1) * n)


def _choose_saved(operand: Operand) -> Operand:
    """Return the operand in the form that the GEMM of the weight's gradient reads."""
    if operand.wgrad is None:
        return operand
    return operand.wgrad


# The autograd functions below take parameters in the tuple `args`, which autograd ignores. The arguments `tracked_...`
# are the same parameters for autograd, or None if a gradient sink takes the gradient (gradient_sink.py::get_tracked).
# `call_directly` makes calls of such a function cheaper (torch_private.py).
@torch_private.call_directly
class _GatherLinear(torch.autograd.Function):
    """The function of `gather_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        tracked_weight: torch.Tensor | None,
        tracked_bias: torch.Tensor | None,
        args: tuple[Any, ...],
    ) -> torch.Tensor:
        weight, bias, linears, recompute_fn, amax, needs_bias_grad = args
        ctx.args = weight, bias, linears, recompute_fn, needs_bias_grad
        if recompute_fn is None:
            operand = linears.prepare_input(x, weight, amax, for_gather=True)
            saved = _choose_saved(operand)
            ctx.save_for_backward(saved.data, saved.scale)
        else:
            operand = linears.prepare_input(recompute_fn(x), weight, amax, for_gather=True)
            ctx.save_for_backward(x)
        if linears.axis.size == 1:
            return linears.forward(operand, weight, bias)
        return _gathered_gemm(operand, weight, bias, linears, x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        weight, bias, linears, recompute_fn, needs_bias_grad = ctx.args
        leaf: torch.Tensor | None = None  # x, as the input of the recomputation
        if recompute_fn is None:
            saved = Operand(*ctx.saved_tensors)
        else:
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                recomputed = recompute_fn(leaf)
            saved = linears.prepare_recomputed(recomputed.detach(), weight, for_gather=True)
        if linears.axis.size == 1:
            gradient = linears.prepare_gradient(dy, weight)
            ready = linears.axis.runtime.stream.record_event()  # both operands of the weight's gradient exist now
            dx = linears.dgrad(gradient, weight)
            dw = linears.wgrad(weight, gradient, saved, ready)
        else:
            dx, dw = _scattered_gradients(dy, weight, saved, linears)
        db = compute_bias_gradient(bias, dy) if needs_bias_grad else None
        if leaf is not None:  # dx is the gradient of the recomputed value so far
            torch.autograd.backward(recomputed, dx)
            dx = leaf.grad
        return dx, dw, db, None


def _scattered_gradients(
    dy: torch.Tensor, weight: torch.Tensor, saved: Operand, linears: LinearPrecision
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of the input of `gather_linear`, reduce-scattered, and of the weight.

    Args:
        saved: this rank's rows of the input, which are gathered again.
    """
    axis = linears.axis
    linears.prepare_weights((weight,))
    if not weight.requires_grad:
        return _scattered_input_gradient(dy, weight, linears), None
    # Do this before the gather starts, since an all-reduce of the scale would wait for the gather.
    gradient = linears.prepare_gradient(dy, weight)
    has_exchange = axis.exchange is not None and can_exchange(axis, saved.data.nbytes)
    wait = start_operand_gather(saved, axis, exchange_gather if has_exchange else all_gather)
    if axis.overlap == "off":
        wait()
    ready = axis.runtime.stream.record_event()  # from here on the weight's gradient may be computed

    def write_dgrad(out: torch.Tensor, rank: int | None) -> None:
        linears.dgrad(_select_rank_rows(gradient, axis, rank), weight, out)

    # The scatter is in flight while the weight's gradient is computed.
    scattering = _reduce_scattered_gemm(write_dgrad, (*dy.shape[:-1], weight.shape[1]), dy, axis, has_next_gemm=True)
    dw = linears.wgrad(weight, gradient, lambda: linears.finish_gather(wait()), ready)
    return scattering.wait(), dw


def _scattered_input_gradient(dy: torch.Tensor, weight: torch.Tensor, linears: LinearPrecision) -> torch.Tensor:
    """Return the gradient of the input of `gather_linear`, reduce-scattered, for a weight that is not trained."""
    axis = linears.axis
    gradient = linears.prepare_gradient(dy, weight)

    def write_dgrad(out: torch.Tensor, rank: int | None) -> None:
        linears.dgrad(_select_rank_rows(gradient, axis, rank), weight, out)

    shape = (*dy.shape[:-1], weight.shape[1])
    return _reduce_scattered_gemm(write_dgrad, shape, dy, axis, has_next_gemm=False).wait()


@torch_private.call_directly
class _LinearScatter(torch.autograd.Function):
    """The function of `linear_scatter`."""

    @staticmethod
    def forward(ctx: Any, args: tuple[Any, ...], *tensors: torch.Tensor | None) -> torch.Tensor:
        linears, weights, recompute_fns, amaxes = args
        xs: Any = tensors[: len(weights)]
        saved: list[torch.Tensor | None] = []
        operands: list[Operand] = []
        for x, weight, recompute_fn, amax in zip(xs, weights, recompute_fns, amaxes, strict=True):
            if recompute_fn is None:
                operand = linears.prepare_input(x, weight, amax)
                saved_operand = _choose_saved(operand)
                saved += (saved_operand.data, saved_operand.scale)
            else:
                operand = linears.prepare_input(recompute_fn(x), weight, amax)
                saved += (x, None)
            operands.append(operand)
        ctx.save_for_backward(*saved)
        ctx.args = linears, weights, recompute_fns
        if linears.axis.size == 1:
            y: torch.Tensor = linears.forward(operands[0], weights[0])
            for i in range(1, len(weights)):
                linears.forward(operands[i], weights[i], out=y, add=True)
            return y

        linears.prepare_weights(weights)

        def write_sum(out: torch.Tensor, rank: int | None) -> None:
            for i, (operand, weight) in enumerate(zip(operands, weights, strict=True)):
                rows = _select_rank_rows(operand, linears.axis, rank)
                # Every GEMM but the first adds to `out`.
                linears.forward(rows, weight, out=out, add=i > 0)

        shape = (*xs[0].shape[:-1], weights[0].shape[0])
        return _reduce_scattered_gemm(write_sum, shape, xs[0], linears.axis, has_next_gemm=False).wait()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        linears, weights, recompute_fns = ctx.args
        saved = ctx.saved_tensors
        gradient, dxs = _gathered_input_gradients(dy, weights, linears)
        dws: list[Any] = []
        for i, (weight, recompute_fn) in enumerate(zip(weights, recompute_fns, strict=True)):
            if recompute_fn is None:
                x = Operand(saved[2 * i], saved[2 * i + 1])
            else:
                recomputed, dxs[i] = recompute_fn.with_gradient(saved[2 * i], dxs[i])
                x = linears.prepare_recomputed(recomputed, weight)
            dws.append(linears.wgrad(weight, gradient, x))
        return None, *dxs, *dws


def _gathered_input_gradients(
    dy: torch.Tensor, weights: Sequence[torch.Tensor], linears: LinearPrecision
) -> tuple[Operand, list[torch.Tensor]]:
    """Return all-gathered dy, and dy @ weight for each weight. With an exchange, multiply each shard as it arrives."""
    axis = linears.axis
    shard = linears.prepare_gradient(dy, weights[0], for_gather=True)  # the form is the same for all weights
    if axis.size == 1:
        return shard, [linears.dgrad(shard, weight) for weight in weights]
    linears.prepare_weights(weights)
    if axis.exchange is None or not can_exchange(axis, shard.data.nbytes):
        gathered = start_operand_gather(shard, axis, all_gather)()
        gradient = linears.prepare_gathered_gradient(gathered)
        return linears.finish_gather(gathered), [linears.dgrad(gradient, weight) for weight in weights]
    n = dy.shape[0]
    dxs = [dy.new_empty((axis.size * n, *dy.shape[1:-1], weight.shape[1])) for weight in weights]

    def multiply(rows: Operand, rank: int) -> None:
        gradient = linears.prepare_gathered_gradient(rows)
        for weight, dx in zip(weights, dxs, strict=True):
            linears.dgrad(gradient, weight, dx[rank * n : (rank + 1) * n])

    return linears.finish_gather(_exchange_and_consume(shard, axis, multiply, keep_local=True)), dxs


def gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    linears: LinearPrecision = DEFAULT_PRECISION,
    recompute_fn: RecomputeFn | None = None,
    amax: Any = None,
    fused_bias_gradient: bool = False,
) -> torch.Tensor:
    """Multiply column-parallel: [s/t, b, h] -> [s, b, columns/t].

    Args:
        weight, bias: this rank's columns, [columns/t, h] and [columns/t].
        recompute_fn: a function such as a norm. recompute_fn(x) is multiplied instead of x, and is computed again in
            backward instead of being saved.
        amax: amax of the GEMM's input if known (`Gemms.prepare_input`).
        fused_bias_gradient: whether the operator that reads the result computes the gradient of the bias.
    """
    needs_bias_grad = bias is not None and not fused_bias_gradient and bias.requires_grad
    args = weight, bias, linears, recompute_fn, amax, needs_bias_grad
    tracked_bias = get_tracked(x, bias) if needs_bias_grad else None
    return _GatherLinear.apply(x, get_tracked(x, weight), tracked_bias, args)


def linear_scatter(
    linears: LinearPrecision,
    *inputs: torch.Tensor,
    recompute_fns: Sequence[RecomputedActivation | None] | None = None,
    amaxes: Sequence[Any] | None = None,
) -> torch.Tensor:
    """Return the sum of row-parallel GEMMs xi @ wi.T over i and over ranks, [s/t, b, h], with one reduce-scatter.

    Args:
        inputs: x1, w1, x2, w2 and so on: xi [s, b, ki/t] and wi [h, ki/t] are this rank's columns.
        recompute_fns: an activation or None for each xi. The activation of xi is multiplied instead of xi, and is
            computed again in backward instead of being saved.
        amaxes: amax of each GEMM's input if known (`Gemms.prepare_input`).
    """
    xs = inputs[0::2]
    weights = inputs[1::2]
    nones = (None,) * len(weights)
    args = linears, weights, recompute_fns or nones, amaxes or nones
    return _LinearScatter.apply(args, *xs, *[get_tracked(x, weight) for x, weight in zip(xs, weights, strict=True)])


class ColumnLinear(DirectModule):
    """One GEMM whose weight stacks several logical matrices, each sharded along its rows over the tensor axis.

    Args:
        tensors: logical matrices [rows, hidden], and their biases if they have any.
    """

    def __init__(self, tensors: Sequence[LogicalTensor], linears: LinearPrecision, dtype: torch.dtype) -> None:
        super().__init__()
        self.linears = linears
        axis = linears.axis
        biases = [t for t in tensors if not t.is_gemm_weight]
        self.weight = local_parameter([t for t in tensors if t.is_gemm_weight], axis.rank, axis.size, dtype)
        self.bias = local_parameter(biases, axis.rank, axis.size, dtype) if biases else None
        self.adapter: ColumnAdapter | None = None
        spec = linears.adapters
        if spec is not None:
            matrices = [tensor for tensor in tensors if tensor.is_gemm_weight]
            if any(spec.is_target(matrix) for matrix in matrices):
                self.adapter = ColumnAdapter(matrices, spec, axis, dtype)

    def forward(
        self, x_SBH: torch.Tensor, recompute_fn: RecomputeFn | None = None, fused_bias_gradient: bool = False
    ) -> torch.Tensor:
        """Multiply x by the weight, [s/t, b, h] -> [s, b, columns/t]; see `gather_linear` for the arguments."""
        params = self._parameters  # direct access: nn.Module looks attributes up in several dictionaries
        weight: Any = params["weight"]
        y = gather_linear(x_SBH, weight, params.get("bias"), self.linears, recompute_fn, None, fused_bias_gradient)
        if self.adapter is None:
            return y
        if recompute_fn is not None:
            x_SBH = recompute_fn(x_SBH)
        return self.adapter.add(y, x_SBH)


class RowLinear(DirectModule):
    """A matrix [h, k] that is sharded along its columns over the tensor axis, for `linear_scatter`.

    The bias must be added once to the sum over ranks, which the reader of the residual sum does.

    Args:
        tensors: the weight, and its bias if it has one.
    """

    def __init__(self, tensors: Sequence[LogicalTensor], linears: LinearPrecision, dtype: torch.dtype) -> None:
        super().__init__()
        axis = linears.axis
        weight, *bias = tensors
        self.weight = local_parameter([weight], axis.rank, axis.size, dtype)
        self.bias = local_parameter(bias, axis.rank, axis.size, dtype) if bias else None
        self.adapter: RowAdapter | None = None
        if linears.adapters is not None and linears.adapters.is_target(weight):
            self.adapter = RowAdapter(weight, linears.adapters, axis, dtype)
            self.weight.adapter = self.adapter
