"""Tensor and sequence parallelism: linear layers whose collectives are folded into them.

Between layers an activation is cut over the tensor-parallel ranks along the sequence; inside, along heads or MLP
columns (Korthikanti et al. 2022; MegaScale section 3.2, Figure 3). `gather_linear` all-gathers its input and
multiplies by column shards; `linear_scatter` multiplies by row shards and reduce-scatters the sum. Backward mirrors
them: the gradient of the input is on the wire while the gradient of the weight is computed. Only the local shard of
a gathered input is kept for backward and gathered again there.
"""

from __future__ import annotations

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


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis) -> torch.Tensor:
        ctx.save_for_backward(x)
        # The parameters themselves, not saved copies: they carry main_grad.
        ctx.weight, ctx.bias, ctx.axis = weight, bias, axis
        return torch.nn.functional.linear(all_gather(x, axis).wait(), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        dy = grads[0]
        gathering = all_gather(x, ctx.axis)
        scattering = reduce_scatter(torch.matmul(dy, ctx.weight), ctx.axis)
        dw = weight_gradient(ctx.weight, dy, gathering.wait())
        return scattering.wait(), dw, bias_gradient(ctx.bias, dy), None


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, *inputs: torch.Tensor) -> torch.Tensor:
        xs, weights = inputs[0::2], inputs[1::2]
        ctx.save_for_backward(*xs)
        ctx.weights, ctx.axis = weights, axis
        first, *rest = zip(xs, weights, strict=True)
        y = torch.nn.functional.linear(*first)
        for x, weight in rest:
            # A second product that accumulates costs no concatenation of the two inputs.
            y.view(-1, y.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        return reduce_scatter(y, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dy = all_gather(grads[0], ctx.axis).wait()
        out: list[Any] = [None]
        for x, weight in zip(ctx.saved_tensors, ctx.weights, strict=True):
            out += [torch.matmul(dy, weight), weight_gradient(weight, dy, x)]
        return tuple(out)


def gather_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, axis: Axis) -> torch.Tensor:
    """Column-parallel product: [s/t, b, h] -> [s, b, columns/t].

    weight [columns/t, h] and bias [columns/t] are this rank's columns.
    """
    return _GatherLinear.apply(x, weight, bias, axis)


def linear_scatter(axis: Axis, *inputs: torch.Tensor) -> torch.Tensor:
    """Row-parallel sum of products: x1, w1, x2, w2, ... -> [s/t, b, h], one reduce-scatter for all.

    xi [s, b, ki/t] and wi [h, ki/t] are this rank's rows of each product.
    """
    return _LinearScatter.apply(axis, *inputs)
