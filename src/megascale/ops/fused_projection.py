"""Split of a parallel block's fused projection [q | k | v | MLP input], with rotary positions and the MLP's activation.

If the projection were sliced, autograd would pad the gradient of each slice to the full width and add them. Here
backward allocates the gradient of the projection once. The gradients of q, k, v and the MLP input are written into its
columns. Backward also sums the gradient of the projection's bias. For the MLP's columns the activation's kernel does so
while they are in registers.

With `recompute` the split returns the MLP input without activation. The reader of the MLP input calls the activation,
in forward and again in backward, which writes the gradient of the MLP input into the same tensor.
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
from megascale.ops.amax import allocate_amax, attach_amax
from megascale.ops.gradient_sink import get_main_grad, get_sink, get_tracked
from megascale.ops.reduce import flatten_rows, sum_columns
from megascale.ops.rope import check_tables, rotate_and_split, rotate_gradients, split_qkv_reference


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
    """Buffer for the gradient of the fused projection. The backwards of split and activation write their columns.

    Attributes:
        shape: shape of the projection [S, B, C].
        qkv_width: number of columns of q, k and v, which precede those of the MLP.
        bias: bias of all columns, which the GEMM has added; None: no such bias.
        grad: the gradient; None before `allocate`.
        bias_grad: gradient of the bias, float32: the buffer of its sink, or a new tensor; None before `allocate`.
    """

    shape: torch.Size
    qkv_width: int
    bias: Tensor | None
    grad: Tensor | None = None
    bias_grad: Tensor | None = None

    def allocate(self, like: Tensor) -> Tensor:
        """Return the gradient. The first call allocates it with the type and device of `like`."""
        if self.grad is None:
            self.grad = torch.empty(self.shape, dtype=like.dtype, device=like.device)
            if self.bias is not None:
                self.bias_grad = get_main_grad(self.bias)
                if self.bias_grad is None:
                    self.bias_grad = torch.zeros_like(self.bias, dtype=torch.float32)
        return self.grad

    def fill_mlp(
        self, kind: str, mlp_bias: Tensor | None, x_TF: Tensor, dy_TF: Tensor, recomputed_TF: Tensor | None = None
    ) -> Tensor | None:
        """Write the gradient of the MLP input into its columns. Return the gradient of mlp_bias like `run_activation`.

        Args:
            recomputed_TF: the activation is written here too, if given.
        """
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
    """Recomputed activation of the MLP input, whose gradient is written into the gradient of the fused projection."""

    gradient: _FusedGradient

    def with_gradient(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """See RecomputedActivation. The gradient of x is a view of the projection's gradient."""
        d_fused = self.gradient.allocate(x)
        y = torch.empty(dy.shape, dtype=x.dtype, device=x.device)
        d_bias = self.gradient.fill_mlp(self.kind, self.bias, x.flatten(0, 1), flatten_rows(dy), y.flatten(0, 1))
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
        qkv_SBND = fused_SBC[..., : gradient.qkv_width].unflatten(-1, (-1, head_size))
        qkv = rotate_and_split(qkv_SBND, heads, groups, tables, interleaved)
        if recompute:
            ctx.save_for_backward(None, *tables)
            return *qkv, fused_SBC[..., gradient.qkv_width :]
        x_TF = fused_SBC.flatten(0, 1)[:, gradient.qkv_width :]
        width = x_TF.shape[1]
        if ACTIVATIONS[activation].gated:
            width //= 2
        y = torch.empty((*fused_SBC.shape[:2], width), dtype=fused_SBC.dtype, device=fused_SBC.device)
        amax = allocate_amax(fused_SBC)
        run_activation(activation, x_TF, mlp_bias, None, y.flatten(0, 1), amax=amax)
        ctx.save_for_backward(x_TF, *tables)
        return *qkv, attach_amax(y, amax)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TF, cos, sin = ctx.saved_tensors
        mlp_bias, gradient, activation, head_size, interleaved, recompute = ctx.args
        width = gradient.qkv_width
        d_fused = gradient.allocate(grads[3])
        d_mlp_bias = d_bias = None
        if not recompute:
            d_mlp_bias = gradient.fill_mlp(activation, mlp_bias, x_TF, flatten_rows(grads[3]))
        else:
            # `_FusedRecomputedActivation.with_gradient` has written the MLP's columns, and returned a view of them.
            if grads[3].data_ptr() != d_fused[..., width:].data_ptr():
                raise RuntimeError("the gradient of a recomputed activation lies outside the memory of its projection")
        d_qkv = d_fused[..., :width].unflatten(-1, (-1, head_size))
        rotate_gradients(grads[:3], d_qkv, (cos, sin), interleaved)
        bias, bias_grad = gradient.bias, gradient.bias_grad
        gradient.grad = gradient.bias_grad = None
        if bias is not None:
            sum_columns(d_fused.flatten(0, 1)[:, :width], bias_grad[:width])
            sink = get_sink(bias)
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
    """Split a parallel block's fused projection into q, k, v and the MLP's activation, with rotary positions.

    The fused kernels rotate in place, so fused_SBC must have no other reader.

    Args:
        fused_SBC: projection [S, B, (heads + 2 groups) x head_size + F], or 2 F instead of F for a gated activation.
        activation: value of model.activation.
        mlp_bias: bias of the MLP input, which is added here, or None.
        cos, sin, interleaved: as in `rope.apply_rotary`.
        fused_bias: bias of all columns, which the GEMM has added outside autograd. Backward computes its gradient. It
            excludes mlp_bias.
        recompute: whether to return the MLP input without activation, and the activation separately. The only reader
            of the MLP input calls the activation in forward and again in backward (`parallel.tensor.linear_scatter`).

    Returns:
        q [S, B, heads, head_size], k and v [S, B, groups, head_size], the MLP's activation [S, B, F] (or MLP input with
        `recompute`), and the activation to call (None without `recompute`).
    """
    width = (heads + 2 * groups) * head_size
    if cos is not None and sin is not None:
        cos, sin = check_tables(cos, sin, fused_SBC.shape)
    is_supported = fused_SBC.numel() and fused_SBC.is_contiguous()
    if is_supported and can_fuse(activation, "split fused projection", fused_SBC, mlp_bias, cos, fused_bias):
        gradient = _FusedGradient(fused_SBC.shape, width, fused_bias)
        sizes = (heads, groups, head_size)
        outputs = _SplitFusedProjection.apply(
            fused_SBC,
            get_tracked(fused_SBC, mlp_bias),
            get_tracked(fused_SBC, fused_bias),
            (mlp_bias, gradient, activation, sizes, (cos, sin), interleaved, recompute),
        )
        if not recompute:
            return *outputs, None
        return *outputs, _FusedRecomputedActivation(activation, mlp_bias, gradient=gradient)
    if fused_bias is not None:
        fused_SBC = add_bias_to_graph(fused_SBC, fused_bias)
    if not recompute:
        outputs = split_fused_projection_reference(
            fused_SBC, heads, groups, head_size, activation, mlp_bias, cos, sin, interleaved
        )
        return *outputs, None
    qkv = split_qkv_reference(fused_SBC[..., :width], heads, groups, cos, sin, interleaved)
    return *qkv, fused_SBC[..., width:], RecomputedActivation(activation, mlp_bias)
