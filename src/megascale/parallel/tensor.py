"""Tensor and sequence parallelism: linear and vocabulary layers that include their collectives.

Between layers an activation is sharded over the tensor-parallel ranks along the sequence, and within layers along heads
or MLP columns (Korthikanti et al. 2022; MegaScale section 3.2, Figure 3). `gather_linear` all-gathers its input and
multiplies by column shards. `linear_scatter` multiplies by row shards and reduce-scatters the sum. In backward,
`gather_linear` reduce-scatters the gradient of its input while it computes the gradient of the weight, and
`linear_scatter` all-gathers the gradient of its output. A forward saves only the local shard of a gathered input, and
backward gathers this input again. Embedding and logits are sharded along the vocabulary; training never gathers logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.core.inventory import LogicalTensor
from megascale.ops.activation import RecomputedActivation
from megascale.ops.cross_entropy import VocabShard, linear_cross_entropy
from megascale.ops.embedding import embedding
from megascale.ops.gradient_sink import get_tracked
from megascale.ops.linear import Operand
from megascale.ops.reduce import compute_bias_gradient
from megascale.ops.token_loss import TokenLoss
from megascale.parallel.adapters import ColumnAdapter, RowAdapter
from megascale.parallel.collectives import (
    Axis,
    Pending,
    all_gather,
    all_reduce,
    all_reduce_small,
    can_exchange,
    exchange_gather,
    exchange_scatter,
    gather_and_consume,
    gather_sequence,
    reduce_scatter,
    scatter_now,
    scatter_sequence,
)
from megascale.parallel.exchange import WriteParts
from megascale.parallel.linear import DEFAULT_PRECISION
from megascale.parallel.linear_precision import LinearPrecision
from megascale.parallel.module import DirectModule
from megascale.parallel.parameters import local_parameter

RecomputeFn = Callable[[torch.Tensor], torch.Tensor]


def _start_gather(x: Operand, axis: Axis, gather: Callable[[torch.Tensor, Axis], Pending]) -> Callable[[], Operand]:
    """Start to gather an operand's rows, with their scales. Return a function that waits for the gathered operand."""
    gathering = gather(x.data, axis)
    scale = x.scale
    if scale is None or not scale.dim():
        return lambda: Operand(gathering.wait(), scale)
    gathering_scales = gather(scale, axis)
    return lambda: Operand(gathering.wait(), gathering_scales.wait())


def _exchange_and_consume(x: Operand, axis: Axis, consume: Callable[[Operand, int], None], keep_own: bool) -> Operand:
    """Gather an operand by the axis's exchange, and call consume(rows, rank) for each rank's rows when they arrive.

    Returns:
        The gathered operand. Without `keep_own` this rank's rows of it are not written.
    """
    scale = x.scale
    if scale is None or not scale.dim():
        data = gather_and_consume(x.data, axis, lambda rows, rank: consume(Operand(rows, scale), rank), keep_own)
        return Operand(data, scale)
    n = x.data.shape[0]
    # Copies run in order, so the scales of a peer's rows arrive before the rows.
    gathering_scales = exchange_gather(scale, axis)

    def consume_rows(rows: torch.Tensor, rank: int) -> None:
        if rank == axis.rank:
            consume(Operand(rows, scale), rank)
        else:
            consume(Operand(rows, gathering_scales.wait()[rank * n : (rank + 1) * n]), rank)

    data = gather_and_consume(x.data, axis, consume_rows, keep_own)
    return Operand(data, gathering_scales.wait())


def _gathered_gemm(
    x: Operand, weight: torch.Tensor, bias: torch.Tensor | None, linears: LinearPrecision, like: torch.Tensor
) -> torch.Tensor:
    """Return linear(all-gathered x, weight, bias) in the type of `like`.

    `axis.overlap` determines how the GEMM hides the gather.
    """
    axis = linears.axis
    linears.prepare_weights((weight,))
    if axis.overlap == "off":
        return linears.forward(_start_gather(x, axis, all_gather)(), weight, bias)
    n = x.data.shape[0]
    y = like.new_empty((axis.size * n, *x.data.shape[1:-1], weight.shape[0]))

    def multiply(rows: Operand, rank: int) -> None:
        linears.forward(rows, weight, bias, y[rank * n : (rank + 1) * n])

    if axis.exchange is not None and can_exchange(axis, x.data.nbytes):
        _exchange_and_consume(x, axis, multiply, keep_own=False)
        return y
    wait = _start_gather(x, axis, all_gather)
    local = slice(axis.rank * n, (axis.rank + 1) * n)
    linears.forward(x, weight, bias, y[local])  # this rank's shard needs no communication
    gathered = wait()
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
        return Pending(scatter_now(write, shard_shape, like, axis))
    y = like.new_empty(shape)
    write(y, None)
    pending = reduce_scatter(y, axis)
    return Pending(pending.wait()) if axis.overlap == "off" else pending


def _select_rank_rows(x: Operand, axis: Axis, rank: int) -> Operand:
    """Return the rows of an operand that belong to `rank`."""
    n = x.data.shape[0] // axis.size
    return x.select_rows(rank * n, (rank + 1) * n)


# The autograd functions below take parameters in the tuple `args`, which autograd ignores. The arguments `tracked_...`
# are the same parameters for autograd, or None if a gradient sink takes the gradient (gradient_sink.py::get_tracked).
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
            saved = operand if operand.wgrad is None else operand.wgrad
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
        leaf: torch.Tensor | None = None
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
        if leaf is not None:
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
    wait = _start_gather(saved, axis, exchange_gather if has_exchange else all_gather)
    if axis.overlap == "off":
        wait()
    ready = axis.runtime.stream.record_event()

    def write_dgrad(out: torch.Tensor, rank: int | None) -> None:
        rows = gradient if rank is None else _select_rank_rows(gradient, axis, rank)
        linears.dgrad(rows, weight, out)

    # The scatter is in flight while the weight's gradient is computed.
    scattering = _reduce_scattered_gemm(write_dgrad, (*dy.shape[:-1], weight.shape[1]), dy, axis, has_next_gemm=True)
    dw = linears.wgrad(weight, gradient, lambda: linears.finish_gather(wait()), ready)
    return scattering.wait(), dw


def _scattered_input_gradient(dy: torch.Tensor, weight: torch.Tensor, linears: LinearPrecision) -> torch.Tensor:
    """Return the gradient of the input of `gather_linear`, reduce-scattered, for a weight that is not trained."""
    axis = linears.axis
    gradient = linears.prepare_gradient(dy, weight)

    def write_dgrad(out: torch.Tensor, rank: int | None) -> None:
        rows = gradient if rank is None else _select_rank_rows(gradient, axis, rank)
        linears.dgrad(rows, weight, out)

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
                saved_operand = operand if operand.wgrad is None else operand.wgrad
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
                rows = operand if rank is None else _select_rank_rows(operand, linears.axis, rank)
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
    shard = linears.prepare_gradient(dy, weights[0], for_gather=True)
    if axis.size == 1:
        return shard, [linears.dgrad(shard, weight) for weight in weights]
    linears.prepare_weights(weights)
    if axis.exchange is None or not can_exchange(axis, shard.data.nbytes):
        gathered = _start_gather(shard, axis, all_gather)()
        gradient = linears.prepare_gathered_gradient(gathered)
        return linears.finish_gather(gathered), [linears.dgrad(gradient, weight) for weight in weights]
    n = dy.shape[0]
    dxs = [dy.new_empty((axis.size * n, *dy.shape[1:-1], weight.shape[1])) for weight in weights]

    def multiply(rows: Operand, rank: int) -> None:
        gradient = linears.prepare_gathered_gradient(rows)
        for weight, dx in zip(weights, dxs, strict=True):
            linears.dgrad(gradient, weight, dx[rank * n : (rank + 1) * n])

    return linears.finish_gather(_exchange_and_consume(shard, axis, multiply, keep_own=True)), dxs


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
    return _GatherLinear.apply(x, get_tracked(x, weight), get_tracked(x, bias) if needs_bias_grad else None, args)


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
        return self.adapter.add(y, x_SBH if recompute_fn is None else recompute_fn(x_SBH))


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


def vocabulary_embedding(tokens_SB: torch.Tensor, weight: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Look up tokens [s, b] in this rank's rows [v/t, h] and sum over ranks into sequence shards [s/t, b, h]."""
    if axis.size == 1:
        return embedding(tokens_SB, weight)
    rows = weight.shape[0]
    local = tokens_SB - axis.rank * rows
    return scatter_sequence(embedding(local, weight, (local >= 0) & (local < rows)), axis)


def vocabulary_logits(
    x_SBH: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    vocab: int,
    axis: Axis,
    linears: LinearPrecision = DEFAULT_PRECISION,
) -> torch.Tensor:
    """Return the logits of the complete vocabulary [s, b, vocab] on every rank, without gradients."""
    x = gather_sequence(x_SBH, axis)
    logits = linears.logits.forward(linears.logits.prepare_input(x, weight), weight, bias)
    if axis.size > 1:
        logits = all_gather(logits.movedim(-1, 0).contiguous(), axis).wait().movedim(0, -1)
    return logits[..., :vocab]


def vocabulary_loss(
    x_SBH: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets_SB: torch.Tensor,
    vocab: int,
    axis: Axis,
    token_grad: torch.Tensor | None = None,
    linears: LinearPrecision = DEFAULT_PRECISION,
    loss: TokenLoss | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return the loss of every token, [s, b] in float32 or wider.

    Args:
        vocab: size of the vocabulary; rows of `weight` beyond it are padding.
        token_grad: upstream gradient of each token's loss, if known: gradients are then computed in forward.
        loss: loss to use instead of cross-entropy.
        softcap: bound c of the logits: c tanh(x / c) replaces logits x.
    """
    shard = None
    if axis.size > 1:
        shard = VocabShard(
            axis.rank * weight.shape[0],
            lambda x: all_reduce_small(x, axis, dist.ReduceOp.MAX),
            lambda x: all_reduce_small(x, axis),
        )
    return linear_cross_entropy(
        gather_sequence(x_SBH, axis),
        weight,
        targets_SB,
        bias=bias,
        vocab=vocab,
        token_grad=token_grad,
        shard=shard,
        gemms=linears.logits,
        loss=loss,
        softcap=softcap,
    )


@torch_private.call_directly
class _RmsNormColumns(torch.autograd.Function):
    """RMSNorm of two tensors whose columns the ranks divide, with one all-reduce for both per direction."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        args: tuple[float, Axis],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps, ctx.axis = args
        dtype = torch.promote_types(q.dtype, torch.float32)
        squares = torch.stack([x.to(dtype).square().sum(-1, keepdim=True) for x in (q, k)])
        squares = all_reduce(squares, ctx.axis).wait()
        ctx.widths = [x.shape[-1] * ctx.axis.size for x in (q, k)]
        rstds = [torch.rsqrt(square / width + eps) for square, width in zip(squares, ctx.widths, strict=True)]
        ctx.save_for_backward(q, k, q_weight, k_weight, *rstds)
        normed = []
        for x, weight, rstd in zip((q, k), (q_weight, k_weight), rstds, strict=True):
            normed.append((x.to(dtype) * rstd * weight.to(dtype)).to(x.dtype))
        return normed[0], normed[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, q_weight, k_weight, *rstds = ctx.saved_tensors
        weights = (q_weight, k_weight)
        normed = [x.to(rstd.dtype) * rstd for x, rstd in zip((q, k), rstds, strict=True)]
        upstream = [dy.to(rstd.dtype) for dy, rstd in zip(grads, rstds, strict=True)]
        scaled = [dy * weight.to(dy.dtype) for dy, weight in zip(upstream, weights, strict=True)]
        products = torch.stack([(g * x).sum(-1, keepdim=True) for g, x in zip(scaled, normed, strict=True)])
        products = all_reduce(products, ctx.axis).wait()
        input_grads, weight_grads = [], []
        for i, weight in enumerate(weights):
            mean = products[i] / ctx.widths[i]
            input_grads.append((rstds[i] * (scaled[i] - normed[i] * mean)).to(grads[i].dtype))
            weight_grads.append((upstream[i] * normed[i]).flatten(0, -2).sum(0).to(weight.dtype))
        return (*input_grads, *weight_grads, None)


def rms_norm_columns(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, axis: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMSNorms of q and k [s, b, columns/t] over the columns of all ranks, with this rank's weights."""
    normed: tuple[torch.Tensor, torch.Tensor] = _RmsNormColumns.apply(q, k, q_weight, k_weight, (eps, axis))
    return normed
