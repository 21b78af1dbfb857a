"""Tensor and sequence parallelism: linear layers whose collectives are folded into them.

Between layers an activation is cut over the tensor-parallel ranks along the sequence; inside, along heads or MLP
columns (Korthikanti et al. 2022; MegaScale section 3.2, Figure 3). `gather_linear` all-gathers its input and
multiplies by column shards; `linear_scatter` multiplies by row shards and reduce-scatters the sum. Backward mirrors
them: the gradient of the input is on the wire while the gradient of the weight is computed. Only the local shard of
a gathered input is kept for backward and gathered again there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megascale.ops.linear import accumulate_mm, finish
from megascale.parallel.collectives import Axis, all_gather, reduce_scatter


def weight_gradient(weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """dy [..., O], x [..., I] -> the gradient of weight [O, I], or None where `weight.main_grad` took it."""
    dy_TO, x_TI = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    main = getattr(weight, "main_grad", None)
    if main is None:
        return dy_TO.t() @ x_TI
    accumulate_mm(main, dy_TO.t(), x_TI)
    finish(weight)
    return None


def bias_gradient(bias: torch.Tensor | None, dy: torch.Tensor) -> torch.Tensor | None:
    """dy [..., O] -> the gradient of bias [O], or None where there is no bias or `bias.main_grad` took it."""
    if bias is None:
        return None
    main = getattr(bias, "main_grad", None)
    if main is None:
        return dy.reshape(-1, dy.shape[-1]).sum(0)
    main.add_(dy.reshape(-1, dy.shape[-1]).sum(0, dtype=main.dtype))
    finish(bias)
    return None


def _recomputed(produce: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`produce(x)` once more with a graph of its own: (leaf copy of x, result)."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        return leaf, produce(leaf)


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        axis: Axis,
        produce: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        # The parameters themselves, not saved copies: they carry main_grad.
        ctx.weight, ctx.bias, ctx.axis, ctx.produce = weight, bias, axis, produce
        if produce is not None:
            x = produce(x)
        return torch.nn.functional.linear(all_gather(x, axis).wait(), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        dy = grads[0]
        leaf: torch.Tensor | None = None
        if ctx.produce is not None:
            leaf, x = _recomputed(ctx.produce, x)
        gathering = all_gather(x.detach(), ctx.axis)
        scattering = reduce_scatter(torch.matmul(dy, ctx.weight), ctx.axis)
        dw = weight_gradient(ctx.weight, dy, gathering.wait())
        db = bias_gradient(ctx.bias, dy)
        dx: torch.Tensor | None = scattering.wait()
        if leaf is not None:
            torch.autograd.backward(x, dx)
            dx = leaf.grad
        return dx, dw, db, None, None


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, axis: Axis, produces: Sequence[Callable[[torch.Tensor], torch.Tensor] | None], *inputs: torch.Tensor
    ) -> torch.Tensor:
        xs, weights = inputs[0::2], inputs[1::2]
        ctx.save_for_backward(*xs)
        ctx.weights, ctx.axis, ctx.produces = weights, axis, produces
        y: torch.Tensor | None = None
        for x, weight, produce in zip(xs, weights, produces, strict=True):
            x = x if produce is None else produce(x)
            if y is None:
                y = torch.nn.functional.linear(x, weight)
            else:
                # A second product that accumulates costs no concatenation of the two inputs.
                y.view(-1, y.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        assert y is not None
        return reduce_scatter(y, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dy = all_gather(grads[0], ctx.axis).wait()
        out: list[Any] = [None, None]
        for x, weight, produce in zip(ctx.saved_tensors, ctx.weights, ctx.produces, strict=True):
            dx = torch.matmul(dy, weight)
            if produce is None:
                out += [dx, weight_gradient(weight, dy, x)]
            else:
                leaf, x = _recomputed(produce, x)
                dw = weight_gradient(weight, dy, x.detach())
                torch.autograd.backward(x, dx)
                out += [leaf.grad, dw]
        return tuple(out)


def gather_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    axis: Axis,
    produce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Column-parallel product: [s/t, b, h] -> [s, b, columns/t].

    weight [columns/t, h] and bias [columns/t] are this rank's columns. With `produce` (a norm) the product is of
    produce(x), which is computed again in backward instead of being kept.
    """
    return _GatherLinear.apply(x, weight, bias, axis, produce)


def linear_scatter(
    axis: Axis,
    *inputs: torch.Tensor,
    produces: Sequence[Callable[[torch.Tensor], torch.Tensor] | None] | None = None,
) -> torch.Tensor:
    """Row-parallel sum of products: x1, w1, x2, w2, ... -> [s/t, b, h], one reduce-scatter for all.

    xi [s, b, ki/t] and wi [h, ki/t] are this rank's rows of each product. With `produces[i]` (an activation) the
    i-th product is of produces[i](xi), which is computed again in backward instead of being kept.
    """
    return _LinearScatter.apply(axis, produces or (None,) * (len(inputs) // 2), *inputs)
