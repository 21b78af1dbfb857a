"""The way out of the parallel block's one wide product [q | k | v | MLP input]: rotary positions, split, activation.

Slicing the product would make autograd pad each slice's gradient to the full width and add them up. Here the
backward pass allocates the wide gradient once and every part is written into its place. The gradient of the product's
own bias is summed here too, the MLP's part of it while that is still in registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale.ops.activation import Kind, activation_reference, credit_bias, run_activation
from megascale.ops.dispatch import use_fused
from megascale.ops.reduce import column_sum, finish, flat_rows
from megascale.ops.rope import check_tables, gather_gradients, rotate_parts, split_qkv_reference


def split_wide_reference(
    wide_SBC: Tensor,
    heads: int,
    groups: int,
    head_size: int,
    activation: Kind,
    mlp_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plain PyTorch of `split_wide`, out of place."""
    width = (heads + 2 * groups) * head_size
    q, k, v = split_qkv_reference(wide_SBC[..., :width], heads, groups, cos, sin, interleaved)
    return q, k, v, activation_reference(activation, wide_SBC[..., width:], mlp_bias)


class _SplitWide(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wide_SBC: Tensor,
        mlp_bias: Tensor | None,
        wide_bias: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        sizes: tuple[int, int, int],
        activation: Kind,
        interleaved: bool,
    ) -> tuple[Tensor, ...]:
        heads, groups, head_size = sizes
        width = (heads + 2 * groups) * head_size
        qkv = wide_SBC[..., :width].unflatten(-1, (-1, head_size))
        parts = rotate_parts(qkv, heads, groups, (cos, sin), interleaved)
        x_TF = wide_SBC.flatten(0, 1)[:, width:]
        columns = x_TF.shape[1] // 2 if activation == "swiglu" else x_TF.shape[1]
        y = torch.empty((*wide_SBC.shape[:2], columns), dtype=wide_SBC.dtype, device=wide_SBC.device)
        run_activation(activation, x_TF, mlp_bias, None, y.flatten(0, 1))
        ctx.save_for_backward(x_TF, cos, sin)
        ctx.mlp_bias, ctx.wide_bias = mlp_bias, wide_bias  # the parameters themselves carry main_grad
        ctx.shape, ctx.width, ctx.head_size = wide_SBC.shape, width, head_size
        ctx.activation, ctx.interleaved = activation, interleaved
        return *parts, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TF, cos, sin = ctx.saved_tensors
        d_wide = torch.empty(ctx.shape, dtype=x_TF.dtype, device=x_TF.device)
        d_qkv = d_wide[..., : ctx.width].unflatten(-1, (-1, ctx.head_size))
        gather_gradients(grads[:3], d_qkv, (cos, sin), ctx.interleaved)
        dx_TF = d_wide.flatten(0, 1)[:, ctx.width :]
        dy_TF, bias = flat_rows(grads[3]), ctx.wide_bias
        if bias is None:
            d_mlp_bias = run_activation(ctx.activation, x_TF, ctx.mlp_bias, dy_TF, dx_TF)
            return d_wide, d_mlp_bias, None, None, None, None, None, None
        main = getattr(bias, "main_grad", None)
        total = main if main is not None else torch.zeros(bias.shape, dtype=torch.float32, device=d_wide.device)
        run_activation(ctx.activation, x_TF, bias, dy_TF, dx_TF, added=True, main=total[ctx.width :])
        column_sum(d_wide.flatten(0, 1)[:, : ctx.width], total[: ctx.width])
        if main is None:
            return d_wide, None, total.to(bias.dtype), None, None, None, None, None
        finish(bias)
        return d_wide, None, None, None, None, None, None, None


def split_wide(
    wide_SBC: Tensor,
    heads: int,
    groups: int,
    head_size: int,
    activation: Kind,
    mlp_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    wide_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values (as `rope.split_qkv`) and the activated MLP input of the parallel block's wide product.

    wide_SBC: [S, B, (heads + 2 groups) x head_size + F], F doubled for swiglu; mlp_bias: of the MLP part, or None.
    activation: model.activation. Returns q [S, B, heads, head_size], k and v [S, B, groups, head_size] and the MLP's
    inner activation [S, B, F]. The fused path rotates in place: nobody else may read or keep wide_SBC. wide_bias: one
    for all columns that is in wide_SBC already (without autograd knowing) and gets its gradient here; then no mlp_bias.
    """
    if cos is not None and sin is not None:
        cos, sin = check_tables(cos, sin, wide_SBC.shape[0])
    if wide_SBC.numel() and wide_SBC.is_contiguous() and use_fused("split wide", wide_SBC, mlp_bias, cos, wide_bias):
        sizes = (heads, groups, head_size)
        return _SplitWide.apply(wide_SBC, mlp_bias, wide_bias, cos, sin, sizes, activation, interleaved)
    if wide_bias is not None:
        wide_SBC = credit_bias(wide_SBC, wide_bias)
    return split_wide_reference(wide_SBC, heads, groups, head_size, activation, mlp_bias, cos, sin, interleaved)
