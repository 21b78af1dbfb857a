"""RMSNorm of query and key over whole projections, whose columns the tensor-parallel ranks divide."""

from __future__ import annotations

from typing import Any

import torch

from megascale import torch_private
from megascale.parallel.collectives import Axis, all_reduce


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
        eps, ctx.axis = args  # autograd ignores the tuple
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
        local_products = [(g * x).sum(-1, keepdim=True) for g, x in zip(scaled, normed, strict=True)]
        products = all_reduce(torch.stack(local_products), ctx.axis).wait()
        input_grads = []
        weight_grads = []
        for i, weight in enumerate(weights):
            # With n = x / rms(x) and g = dy w, the gradient of x is (g - n mean(g n)) / rms(x).
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
