"""The outputs of the parallel block's fused projection [q | k | v | MLP input]: rotary positions, split, activation.

With slices of its result autograd would pad each slice's gradient to the full width and add them. Here backward
allocates the fused gradient once, and each part is written into its columns. The gradient of the projection's own bias
is summed here too, the MLP's part of it while that is in registers. With `recompute` the reader of the MLP input
computes the activation, recomputes it in backward and writes its gradient into the fused gradient as well.
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
    add_bias_to_graph,
    can_fuse,
    run_activation,
)
from megascale.ops.amax import attach_amax, new_amax_slot
from megascale.ops.gradient_sink import main_grad_of, sink_of, tracked
from megascale.ops.reduce import column_sum, flat_rows
from megascale.ops.rope import check_tables, rotate_gradients, rotate_parts, split_qkv_reference


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
    """Compute `split_fused_projection` in plain PyTorch, out of place."""
    width = (heads + 2 * groups) * head_size
    q, k, v = split_qkv_reference(fused_SBC[..., :width], heads, groups, cos, sin, interleaved)
    return q, k, v, activation_reference(activation, fused_SBC[..., width:], mlp_bias)


@dataclass(slots=True)
class _FusedGradient:
    """The gradient of a fused projection, which the backward of each part fills.

    Attributes:
        shape: [S, B, C].
        qkv_width: columns of q, k and v, before the MLP's.
        bias: bias of all columns, which the GEMM has added already.
        grad: the gradient, from `allocate` on.
        bias_grad: the bias's gradient, float32: its sink, or zeros to add to.
    """

    shape: torch.Size
    qkv_width: int
    bias: Tensor | None
    grad: Tensor | None = None
    bias_grad: Tensor | None = None

    def allocate(self, like: Tensor) -> Tensor:
        """Return the gradient, allocated by the first call."""
        if self.grad is None:
            self.grad = torch.empty(self.shape, dtype=like.dtype, device=like.device)
            if self.bias is not None:
                self.bias_grad = main_grad_of(self.bias)
                if self.bias_grad is None:
                    self.bias_grad = torch.zeros_like(self.bias, dtype=torch.float32)
        return self.grad

    def fill_mlp(
        self, kind: str, mlp_bias: Tensor | None, x_TF: Tensor, dy_TF: Tensor, recomputed_TF: Tensor | None = None
    ) -> Tensor | None:
        """Write the activation's gradient into the MLP's columns. Returns that of mlp_bias, as `run_activation`."""
        assert self.grad is not None
        dx_TF = self.grad.flatten(0, 1)[:, self.qkv_width :]
        if self.bias_grad is None:
            return run_activation(kind, x_TF, mlp_bias, dy_TF, dx_TF, recomputed_TF=recomputed_TF)
        main_grad = self.bias_grad[self.qkv_width :]
        return run_activation(
            kind, x_TF, self.bias, dy_TF, dx_TF, is_bias_added=True, main_grad=main_grad, recomputed_TF=recomputed_TF
        )


@dataclass(slots=True, kw_only=True)
class _FusedRecomputedActivation(RecomputedActivation):
    """The activation of a fused projection's MLP columns, whose gradient goes into the fused gradient."""

    gradient: _FusedGradient

    def with_gradient(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        d_fused = self.gradient.allocate(x)
        y = torch.empty(dy.shape, dtype=x.dtype, device=x.device)
        d_bias = self.gradient.fill_mlp(self.kind, self.bias, x.flatten(0, 1), flat_rows(dy), y.flatten(0, 1))
        self.accumulate_bias_gradient(d_bias)
        return y, d_fused[..., self.gradient.qkv_width :]


@torch_private.call_directly
class _SplitFusedProjection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused_SBC: Tensor,
        tracked_mlp_bias: Tensor | None,
        tracked_fused_bias: Tensor | None,
        args: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        mlp_bias, gradient, activation, (heads, groups, head_size), tables, interleaved, recompute = args
        ctx.args = mlp_bias, gradient, activation, head_size, interleaved, recompute
        qkv = fused_SBC[..., : gradient.qkv_width].unflatten(-1, (-1, head_size))
        parts = rotate_parts(qkv, heads, groups, tables, interleaved)
        if recompute:
            ctx.save_for_backward(None, *tables)
            return *parts, fused_SBC[..., gradient.qkv_width :]
        x_TF = fused_SBC.flatten(0, 1)[:, gradient.qkv_width :]
        columns = x_TF.shape[1] // 2 if ACTIVATIONS[activation].gated else x_TF.shape[1]
        y = torch.empty((*fused_SBC.shape[:2], columns), dtype=fused_SBC.dtype, device=fused_SBC.device)
        amax = new_amax_slot(fused_SBC)
        run_activation(activation, x_TF, mlp_bias, None, y.flatten(0, 1), amax=amax)
        ctx.save_for_backward(x_TF, *tables)
        return *parts, attach_amax(y, amax)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TF, cos, sin = ctx.saved_tensors
        mlp_bias, gradient, activation, head_size, interleaved, recompute = ctx.args
        width = gradient.qkv_width
        d_fused = gradient.allocate(grads[3])
        d_mlp_bias = d_bias = None
        if not recompute:
            d_mlp_bias = gradient.fill_mlp(activation, mlp_bias, x_TF, flat_rows(grads[3]))
        else:
            # The reader has filled those columns.
            assert grads[3].data_ptr() == d_fused[..., width:].data_ptr(), "the activation's reader changed"
        d_qkv = d_fused[..., :width].unflatten(-1, (-1, head_size))
        rotate_gradients(grads[:3], d_qkv, (cos, sin), interleaved)
        bias, bias_grad = gradient.bias, gradient.bias_grad
        gradient.grad = gradient.bias_grad = None
        if bias is not None:
            column_sum(d_fused.flatten(0, 1)[:, :width], bias_grad[:width])
            sink = sink_of(bias)
            if sink is not None:
                sink.ready()
            else:
                d_bias = bias_grad.to(bias.dtype)
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
    """Split the parallel block's fused projection into rotated q, k, v and the activated MLP input.

    The fused kernels rotate in place, so fused_SBC must have no other reader.

    Args:
        fused_SBC: [S, B, (heads + 2 groups) x head_size + F], F doubled for a gated activation.
        activation: model.activation.
        mlp_bias: bias of the MLP part, or None.
        cos, sin, interleaved: as in `rope.apply_rotary`.
        fused_bias: bias of all columns that fused_SBC includes already (unknown to autograd), whose gradient is
            computed here; then without mlp_bias.
        recompute: return the MLP input without activation, and the activation for its one reader, which calls it in
            forward and again in backward (as `parallel.tensor.linear_scatter` does).

    Returns:
        q [S, B, heads, head_size], k and v [S, B, groups, head_size], the MLP's inner activation [S, B, F] (or its
        input), and the activation to recompute or None.
    """
    width = (heads + 2 * groups) * head_size
    if cos is not None and sin is not None:
        cos, sin = check_tables(cos, sin, fused_SBC.shape)
    is_supported = fused_SBC.numel() and fused_SBC.is_contiguous()
    if is_supported and can_fuse(activation, "split fused projection", fused_SBC, mlp_bias, cos, fused_bias):
        gradient = _FusedGradient(fused_SBC.shape, width, fused_bias)
        sizes = (heads, groups, head_size)
        parts = _SplitFusedProjection.apply(
            fused_SBC,
            tracked(fused_SBC, mlp_bias),
            tracked(fused_SBC, fused_bias),
            (mlp_bias, gradient, activation, sizes, (cos, sin), interleaved, recompute),
        )
        return *parts, _FusedRecomputedActivation(activation, mlp_bias, gradient=gradient) if recompute else None
    if fused_bias is not None:
        fused_SBC = add_bias_to_graph(fused_SBC, fused_bias)
    if not recompute:
        parts = split_fused_projection_reference(
            fused_SBC, heads, groups, head_size, activation, mlp_bias, cos, sin, interleaved
        )
        return *parts, None
    qkv = split_qkv_reference(fused_SBC[..., :width], heads, groups, cos, sin, interleaved)
    return *qkv, fused_SBC[..., width:], RecomputedActivation(activation, mlp_bias)
