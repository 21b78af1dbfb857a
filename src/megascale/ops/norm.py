"""LayerNorm and RMSNorm over the last dimension, alone or fused with the residual addition before them.

The kernels hold a row in registers, in one or two blocks of columns (norm_launch.py). Forward reads x once, and
backward reads x and dy once. Weight gradients are partial sums in a fixed order, so that repeated runs give the same
bits.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale import torch_private
from megascale.ops.amax import allocate_amax, attach_amax
from megascale.ops.dispatch import use_fused
from megascale.ops.gradient_sink import get_tracked
from megascale.ops.norm_launch import launch_backward, launch_forward
from megascale.ops.reduce import flatten_rows

NormKind = Literal["layernorm", "rmsnorm"]


MAX_WIDTH = 32768  # A row must fit a program's registers.


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) * weight + bias, with statistics in at least float32."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight, with statistics in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def add_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: NormKind, x_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `add_norm` in plain PyTorch."""
    total = residual + (x if x_bias is None else x + x_bias)
    if kind == "rmsnorm":
        return total, rms_norm_reference(total, weight, eps)
    return total, layer_norm_reference(total, weight, bias, eps)


@torch_private.call_directly
class _Norm(torch.autograd.Function):
    """LayerNorm (`centre`) or RMSNorm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tracked_weight: Tensor | None, tracked_bias: Tensor | None, args: tuple[Any, ...]
    ) -> Tensor:
        weight, bias, eps, centre = args
        amax = allocate_amax(x)
        x_TH, y, statistics = launch_forward(flatten_rows(x), None, None, weight, bias, eps, centre, amax)
        ctx.save_for_backward(x_TH, statistics)
        ctx.args, ctx.shape = args, x.shape
        return attach_amax(y.view(x.shape), amax)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, statistics = ctx.saved_tensors
        weight, bias, _, centre = ctx.args
        dx, d_weight, d_bias, _ = launch_backward(flatten_rows(dy), None, x_TH, weight, bias, statistics, centre)
        return dx.view(ctx.shape), d_weight, d_bias, None


@torch_private.call_directly
class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        tracked_weight: Tensor | None,
        tracked_bias: Tensor | None,
        tracked_x_bias: Tensor | None,
        args: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor]:
        weight, bias, x_bias, eps, centre = args
        amax = allocate_amax(x)
        total, y, statistics = launch_forward(
            flatten_rows(x), flatten_rows(residual), x_bias, weight, bias, eps, centre, amax
        )
        ctx.save_for_backward(total, statistics)
        ctx.args, ctx.shape = args, x.shape
        return total.view(x.shape), attach_amax(y.view(x.shape), amax)

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, statistics = ctx.saved_tensors
        weight, bias, x_bias, _, centre = ctx.args
        amax = allocate_amax(dy)
        dx, d_weight, d_bias, d_x_bias = launch_backward(
            flatten_rows(dy), flatten_rows(d_total), total, weight, bias, statistics, centre, x_bias, amax
        )
        dx = attach_amax(dx.view(ctx.shape), amax)
        return dx, dx, d_weight, d_bias, d_x_bias, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return LayerNorm of x [..., H] with weight and bias [H], in x's shape and type."""
    if x.numel() and x.shape[-1] <= MAX_WIDTH and use_fused("layer norm", x, weight, bias):
        return _Norm.apply(x, get_tracked(x, weight), get_tracked(x, bias), (weight, bias, eps, True))
    return layer_norm_reference(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x [..., H] with weight [H], in x's shape and type."""
    if x.numel() and x.shape[-1] <= MAX_WIDTH and use_fused("rms norm", x, weight):
        return _Norm.apply(x, get_tracked(x, weight), None, (weight, None, eps, False))
    return rms_norm_reference(x, weight, eps)


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    kind: NormKind,
    x_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return total = residual + x + x_bias and the norm of total, computed in one pass.

    Backward is one pass too, which also adds the gradient of `total` that the residual stream has.

    Args:
        x, residual: [..., H].
        weight, bias: [H]; RMSNorm has no bias.
        kind: value of model.norm.
        x_bias: [H], bias of the projection that computed x.
    """
    is_supported = x.numel() and x.shape[-1] <= MAX_WIDTH and residual.dtype == x.dtype
    if is_supported and use_fused("add norm", x, residual, weight, bias, x_bias):
        return _AddNorm.apply(
            x,
            residual,
            get_tracked(x, weight),
            get_tracked(x, bias),
            get_tracked(x, x_bias),
            (weight, bias, x_bias, eps, kind == "layernorm"),
        )
    return add_norm_reference(x, residual, weight, bias, eps, kind, x_bias)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return add_norm(x, residual, weight, bias, eps, "layernorm", x_bias)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return add_norm(x, residual, weight, bias, eps, "rmsnorm", x_bias)
