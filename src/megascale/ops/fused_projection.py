"""The way out of the parallel block's fused projection [q | k | v | MLP input]: rotary positions, split, activation.

Slicing its result would make autograd pad each slice's gradient to the full width and add them up. Here the
backward pass allocates the fused gradient once and every part is written into its place. The gradient
of the projection's own bias is summed here too, the MLP's part of it while that is still in registers. With `recompute`
the activation is its reader's, which recomputes it in backward and writes its gradient there as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megascale import torch_private
from megascale.config.parts import ACTIVATIONS
from megascale.ops.activation import (
    RecomputedActivation,
    activation_reference,
    fuse_bias_gradient,
    fuses,
    run_activation,
)
from megascale.ops.gradient_sink import main_grad_of, sink_of, tracked
from megascale.ops.known_amax import slot_for, tell
from megascale.ops.reduce import column_sum, flat_rows
from megascale.ops.rope import check_tables, gather_gradients, rotate_parts, split_qkv_reference


def split_fused_projection_reference(
    fused_SBC: Tensor,
    heads: int,
    groups: int,
    head_size: int,
    activation: str,
    mlp_bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plain PyTorch of `split_fused_projection`, out of place."""
    width = (heads + 2 * groups) * head_size
    q, k, v = split_qkv_reference(fused_SBC[..., :width], heads, groups, cos, sin, interleaved)
    return q, k, v, activation_reference(activation, fused_SBC[..., width:], mlp_bias)


@dataclass(slots=True)
class _FusedGradient:
    """The gradient of a fused projection, which its parts' readers fill."""

    shape: torch.Size  # [S, B, C]
    width: int  # columns of q, k and v, before the MLP's
    bias: Tensor | None  # of all columns, added in the GEMM already
    whole: Tensor | None = None
    total: Tensor | None = None  # float32: its sink, or zeros to add to

    def open(self, like: Tensor) -> Tensor:
        """The gradient, made by the first who asks."""
        if self.whole is None:
            self.whole = torch.empty(self.shape, dtype=like.dtype, device=like.device)
            if self.bias is not None:
                main = main_grad_of(self.bias)
                self.total = torch.zeros_like(self.bias, dtype=torch.float32) if main is None else main
        return self.whole

    def activation(
        self, kind: str, mlp_bias: Tensor | None, x_TF: Tensor, dy_TF: Tensor, recompute: Tensor | None = None
    ) -> Tensor | None:
        """Fill the MLP's columns from the gradient of its activation; returns mlp_bias's as run_activation does."""
        assert self.whole is not None
        dx_TF = self.whole.flatten(0, 1)[:, self.width :]
        if self.total is None:
            return run_activation(kind, x_TF, mlp_bias, dy_TF, dx_TF, recompute=recompute)
        main = self.total[self.width :]
        return run_activation(kind, x_TF, self.bias, dy_TF, dx_TF, added=True, main=main, recompute=recompute)


@dataclass(slots=True, kw_only=True)
class _FusedRecomputedActivation(RecomputedActivation):
    """The activation of a fused projection's last columns; its gradient goes into their place."""

    gradient: _FusedGradient

    def with_gradient(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        d_fused = self.gradient.open(x)
        y = torch.empty(dy.shape, dtype=x.dtype, device=x.device)
        d_bias = self.gradient.activation(self.kind, self.bias, x.flatten(0, 1), flat_rows(dy), y.flatten(0, 1))
        self.accumulate(d_bias)
        return y, d_fused[..., self.gradient.width :]


@torch_private.called_directly
class _SplitFusedProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused_SBC: Tensor,
        tracked_mlp_bias: Tensor | None,
        tracked_fused_bias: Tensor | None,
        told: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        mlp_bias, fused_bias, cos, sin, (heads, groups, head_size), activation, interleaved, gradient, recompute = told
        qkv = fused_SBC[..., : gradient.width].unflatten(-1, (-1, head_size))
        parts = rotate_parts(qkv, heads, groups, (cos, sin), interleaved)
        ctx.mlp_bias, ctx.fused_bias = mlp_bias, fused_bias
        ctx.head_size, ctx.gradient, ctx.recompute = head_size, gradient, recompute
        ctx.activation, ctx.interleaved = activation, interleaved
        x_TF = fused_SBC.flatten(0, 1)[:, gradient.width :]
        if recompute:
            ctx.save_for_backward(None, cos, sin)
            return *parts, fused_SBC[..., gradient.width :]
        columns = x_TF.shape[1] // 2 if ACTIVATIONS[activation].gated else x_TF.shape[1]
        y = torch.empty((*fused_SBC.shape[:2], columns), dtype=fused_SBC.dtype, device=fused_SBC.device)
        amax = slot_for(fused_SBC)
        run_activation(activation, x_TF, mlp_bias, None, y.flatten(0, 1), amax=amax)
        ctx.save_for_backward(x_TF, cos, sin)
        return *parts, tell(y, amax)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TF, cos, sin = ctx.saved_tensors
        gradient, bias, d_mlp_bias = ctx.gradient, ctx.fused_bias, None
        width, d_fused = gradient.width, gradient.open(grads[3])
        if not ctx.recompute:
            d_mlp_bias = gradient.activation(ctx.activation, ctx.mlp_bias, x_TF, flat_rows(grads[3]))
        # Else the reader has filled those columns already.
        assert not ctx.recompute or grads[3].data_ptr() == d_fused[..., width:].data_ptr(), (
            "the activation's reader changed"
        )
        d_qkv = d_fused[..., :width].unflatten(-1, (-1, ctx.head_size))
        gather_gradients(grads[:3], d_qkv, (cos, sin), ctx.interleaved)
        total, gradient.whole, gradient.total = gradient.total, None, None
        d_bias = None
        if bias is not None:
            column_sum(d_fused.flatten(0, 1)[:, :width], total[:width])
            if (sink := sink_of(bias)) is not None:
                sink.ready()
            else:
                d_bias = total.to(bias.dtype)
        return d_fused, d_mlp_bias, d_bias, None


def split_fused_projection(
    fused_SBC: Tensor,
    heads: int,
    groups: int,
    head_size: int,
    activation: str,
    mlp_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    fused_bias: Tensor | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, RecomputedActivation | None]:
    """Queries, keys, values (as `rope.split_qkv`) and the activated MLP input of the parallel block's fused projection.

    fused_SBC: [S, B, (heads + 2 groups) x head_size + F], F doubled for swiglu; mlp_bias: of the MLP part, or None.
    activation: model.activation. Returns q [S, B, heads, head_size], k and v [S, B, groups, head_size], the MLP's
    inner activation [S, B, F] and None. The fused path rotates in place: nobody else may read or keep fused_SBC.
    fused_bias: one for all columns that is in fused_SBC already (without autograd knowing) and gets its gradient here;
    then no mlp_bias. recompute: the MLP input comes back as it is and, for its one reader, its activation: to be called
    forward and again in backward (`parallel.tensor.linear_scatter` does both).
    """
    width = (heads + 2 * groups) * head_size
    if cos is not None and sin is not None:
        cos, sin = check_tables(cos, sin, fused_SBC.shape[0])
    if (
        fused_SBC.numel()
        and fused_SBC.is_contiguous()
        and fuses(activation, "split fused projection", fused_SBC, mlp_bias, cos, fused_bias)
    ):
        sizes, gradient = (heads, groups, head_size), _FusedGradient(fused_SBC.shape, width, fused_bias)
        told = mlp_bias, fused_bias, cos, sin, sizes, activation, interleaved, gradient, recompute
        known = tracked(fused_SBC, mlp_bias), tracked(fused_SBC, fused_bias)
        parts = _SplitFusedProjection.apply(fused_SBC, *known, told)
        return *parts, _FusedRecomputedActivation(activation, mlp_bias, gradient=gradient) if recompute else None
    if fused_bias is not None:
        fused_SBC = fuse_bias_gradient(fused_SBC, fused_bias)
    if not recompute:
        parts = split_fused_projection_reference(
            fused_SBC, heads, groups, head_size, activation, mlp_bias, cos, sin, interleaved
        )
        return *parts, None
    qkv = split_qkv_reference(fused_SBC[..., :width], heads, groups, cos, sin, interleaved)
    return *qkv, fused_SBC[..., width:], RecomputedActivation(activation, mlp_bias)
