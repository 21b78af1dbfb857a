"""GeLU and SwiGLU with the bias of the projection before them, forward and backward.

Only the projection's output is saved. The backward kernel reads it with the gradient, writes the input's gradient and
sums the bias's in the same pass, in a fixed order. The gradient of a bias that the projection has `added` already is
summed here too, because it is in registers, which saves a pass over the wide gradient. A result that was not saved
(`RecomputedActivation`) comes out of the same pass for the cost of one write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale import torch_private
from megascale.config.parts import ACTIVATIONS, ActivationFacts
from megascale.config.registry import Registry
from megascale.ops import dispatch
from megascale.ops.amax import as_int32, attach_amax, magnitudes, new_slot, update_amax
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.gradient_sink import tracked
from megascale.ops.reduce import accumulate_gradients, add_parts, flat_rows, split_rows

Approximate = Literal["none", "tanh"]

# Rows and columns of a tile, the approximate number of programs, and warps of each. With partial sums eight per SM of
# a large GPU: few sums and enough loads in flight; without, many small ones. Each the fastest tried on an H200.
TILE = 4, 512, 1056, 4
TILE_GELU_BACKWARD = 4, 256, 1056, 8
TILE_WITHOUT_SUMS = 2, 1024, 4224, 4
TILE_GATED_WITHOUT_SUMS = 2, 512, 1 << 30, 4
# Constants of the clamped SwiGLU (gpt-oss).
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
_MAX_PARTS = 65_535  # of a grid's second dimension


def gelu_reference(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none") -> Tensor:
    """Compute gelu(x + bias), exact (error function) or with the tanh approximation."""
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


def swiglu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up of x + bias = [gate | up] along the last dimension."""
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu_tanh_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute gelu(gate) * up of x + bias = [gate | up] along the last dimension, with the tanh approximation."""
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def swiglu_clamped_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute gate * sigmoid(1.702 gate) * (up + 1) of x + bias = [gate | up] along the last dimension (gpt-oss).

    The gate is at most 7, and up between -7 and 7.
    """
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


@jit
def _gelu(x, TANH: tl.constexpr, NARROW: tl.constexpr):
    """Return gelu(x) and its derivative in float32; NARROW: the result is rounded to 16 bits anyway."""
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh(u) = 2 sigmoid(2u) - 1, so (1 + tanh) / 2 is one sigmoid
        half = tl.sigmoid(2.0 * inner)
        slope = 2.0 * half * (1.0 - half) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
    elif NARROW:
        # The error function takes longer than the memory access. This is the tail of the normal distribution as
        # 2^q(|x|) with fitted q: relative error 4.3e-5 up to 5.5 and 2e-4 up to 8 standard deviations, where bfloat16
        # has 4e-3.
        u = tl.minimum(tl.abs(x), 14.0)
        q = 5.93538592e-05 + u * (-2.33502853e-06 + u * 3.95231585e-08)
        q = -0.0526799256 + u * (0.00806233247 + u * (-0.000861773695 + u * q))
        q = -1.00006155 + u * (-1.15044636 + u * (-0.460131009 + u * q))
        tail = tl.exp2(q)
        half = tl.where(x < 0.0, tail, 1.0 - tail)
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        half = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * half, half + x * slope


@jit
def _activation_kernel(
    x_ptr,
    bias_ptr,
    dy_ptr,
    out_ptr,
    recomputed_ptr,
    part_ptr,
    amax_ptr,
    rows,
    width,
    stride,
    dy_stride,
    out_stride,
    part_rows,
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    BACKWARD: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute GeLU; or SwiGLU (GATED), GeGLU (GATED and TANH), or the clamped SwiGLU (GATED and CLAMPED).

    Gated: on tiles of the gate and the same tiles of up, which is `width` columns further.
    """
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * part_rows
    last = tl.minimum(first + part_rows, rows)
    if HAS_BIAS and not ADDED:
        bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        if GATED:
            bias_up = tl.load(bias_ptr + width + column, mask=column < width, other=0.0).to(tl.float32)
    if HAS_BIAS:
        d_bias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        d_bias_up = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    largest = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row[:, None] < last) & (column[None, :] < width)
        row_64 = row[:, None].to(tl.int64)
        source = x_ptr + row_64 * stride + column[None, :]
        x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS and not ADDED:
            x += bias[None, :]
            if GATED:
                up += bias_up[None, :]
        if GATED and TANH:
            gate, slope = _gelu(x, TANH, NARROW)
            value = gate * up
        elif CLAMPED:
            clamped = tl.minimum(x, LIMIT)
            factor = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
            half = tl.sigmoid(ALPHA * clamped)
            value = clamped * half * factor
        elif GATED:
            half = tl.sigmoid(x)
            value = x * half * up
        else:
            value, slope = _gelu(x, TANH, NARROW)
        if RECOMPUTE:
            tl.store(recomputed_ptr + row_64 * width + column[None, :], value, mask=inside)
        target = out_ptr + row_64 * out_stride + column[None, :]
        if BACKWARD:
            dy = tl.load(dy_ptr + row_64 * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
            if GATED:
                if TANH:
                    value = dy * up * slope
                    d_up = dy * gate
                elif CLAMPED:
                    slope = factor * half * (1.0 + ALPHA * clamped * (1.0 - half))
                    value = tl.where(x <= LIMIT, dy * slope, 0.0)
                    d_up = tl.where(tl.abs(up) <= LIMIT, dy * clamped * half, 0.0)
                else:
                    value = dy * up * half * (1.0 + x * (1.0 - half))
                    d_up = dy * x * half
                tl.store(target + width, d_up, mask=inside)
                if AMAX:
                    largest = tl.maximum(largest, magnitudes(d_up, inside, out_ptr.dtype.element_ty))
                if HAS_BIAS:
                    d_bias_up += d_up
            else:
                value = dy * slope
            if HAS_BIAS:
                d_bias += value
        tl.store(target, value, mask=inside)
        if AMAX:
            largest = tl.maximum(largest, magnitudes(value, inside, out_ptr.dtype.element_ty))
    if AMAX:
        update_amax(amax_ptr, largest)
    if BACKWARD and HAS_BIAS:
        part = part_ptr + tl.program_id(1) * (2 * width if GATED else width) + column
        tl.store(part, tl.sum(d_bias, 0), mask=column < width)
        if GATED:
            tl.store(part + width, tl.sum(d_bias_up, 0), mask=column < width)


@cache
def _split_grid(T: int, width: int, tile: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return columns of a tile, tiles along columns, rows per part, and parts."""
    rows, max_columns, programs, _ = tile
    block = min(max_columns, max(16, next_power_of_2(width)))
    column_blocks = cdiv(width, block)
    return block, column_blocks, *split_rows(T, rows, max(1, min(_MAX_PARTS, programs // column_blocks)))


def _launch(
    x_TF: Tensor,
    bias: Tensor | None,
    dy_TF: Tensor | None,
    out_TF: Tensor,
    added: bool,
    main_grad: Tensor | None,
    recompute: Tensor | None,
    amax: Tensor | None,
    gated: bool = False,
    tanh: bool = False,
    clamped: bool = False,
) -> Tensor | None:
    """Launch the kernel; the arguments are those of `run_activation`."""
    T, columns = x_TF.shape
    is_backward = dy_TF is not None
    if gated:
        has_sums = amax is not None or (bias is not None and is_backward)
        tile = TILE if has_sums else TILE_GATED_WITHOUT_SUMS
    else:
        tile = TILE_GELU_BACKWARD if is_backward else TILE_WITHOUT_SUMS
    width = columns // 2 if gated else columns
    block, column_blocks, part_rows, parts = _split_grid(T, width, tile)
    partial_sums = None
    if bias is not None and is_backward:
        partial_sums = torch.empty((parts, columns), dtype=torch.float32, device=x_TF.device)
    _activation_kernel[(column_blocks, parts)](
        x_TF,
        bias,
        dy_TF,
        out_TF,
        recompute,
        partial_sums,
        as_int32(amax),
        T,
        width,
        x_TF.stride(0),
        0 if dy_TF is None else dy_TF.stride(0),
        out_TF.stride(0),
        part_rows,
        GATED=gated,
        TANH=tanh,
        CLAMPED=clamped,
        ALPHA=SWIGLU_ALPHA,
        LIMIT=SWIGLU_LIMIT,
        NARROW=x_TF.element_size() < 4,
        HAS_BIAS=bias is not None,
        ADDED=added,
        BACKWARD=is_backward,
        RECOMPUTE=recompute is not None,
        AMAX=amax is not None,
        BLOCK_R=tile[0],
        BLOCK_C=block,
        num_warps=tile[3],
    )
    if partial_sums is None or bias is None:
        return None
    if main_grad is not None:
        add_parts(partial_sums, main_grad)
        return None
    return accumulate_gradients(partial_sums, bias)[0]


# The arguments and the result of `run_activation`, without the kind.
RunActivation = Callable[
    [Tensor, Tensor | None, Tensor | None, Tensor, bool, Tensor | None, Tensor | None, Tensor | None], Tensor | None
]


@dataclass(frozen=True)
class Activation:
    """An activation that model.activation can name.

    Attributes:
        reference: plain PyTorch of x, which includes the bias; differentiable.
        operator: its name in the record of operators (ops/dispatch.py).
        run: the fused kernel, forward and backward; None without one.
    """

    reference: Callable[[Tensor], Tensor]
    operator: str
    run: RunActivation | None = None


KINDS: Registry[Activation] = Registry(
    ACTIVATIONS.key,
    {
        "gelu": Activation(gelu_reference, "gelu", _launch),
        "gelu_tanh": Activation(partial(gelu_reference, approximate="tanh"), "gelu", partial(_launch, tanh=True)),
        "swiglu": Activation(swiglu_reference, "swiglu", partial(_launch, gated=True)),
        "geglu_tanh": Activation(geglu_tanh_reference, "geglu", partial(_launch, gated=True, tanh=True)),
        "swiglu_clamped": Activation(
            swiglu_clamped_reference, "clamped swiglu", partial(_launch, gated=True, clamped=True)
        ),
    },
)


def register(name: str, activation: Activation, gated: bool = False) -> None:
    """Register `name` for `model.activation`. gated: it takes [gate | up], twice as wide as its result."""
    ACTIVATIONS.register(name, ActivationFacts(gated))
    KINDS.register(name, activation)


def run_activation(
    kind: str,
    x_TF: Tensor,
    bias: Tensor | None,
    dy_TF: Tensor | None,
    out_TF: Tensor,
    added: bool = False,
    main_grad: Tensor | None = None,
    recompute: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor | None:
    """Run a fused activation (or, with dy, its gradient) from rows into rows of any stride.

    Args:
        kind: an activation with a fused kernel.
        x_TF: [T, F], or [T, 2F] for swiglu.
        dy_TF, out_TF: upstream gradient [T, F] and the gradient of x; without dy_TF the result [T, F].
        added: x includes the bias, and only the bias's gradient is computed.
        main_grad: float32, as wide as x; the bias's gradient is added to it.
        recompute: with dy_TF, contiguous [T, F]: the result is written there as well.
        amax: float32 [], raised to the amax of out_TF.

    Returns:
        The bias's gradient, if there is one and neither `main_grad` nor its sink takes it.
    """
    assert recompute is None or (dy_TF is not None and recompute.is_contiguous())
    run = KINDS[kind].run
    assert run is not None, kind
    return run(x_TF, bias, dy_TF, out_TF, added, main_grad, recompute, amax)


def fuses(kind: str, operator: str, *tensors: Tensor | None) -> bool:
    """Return whether `operator`, which contains the activation `kind`, runs fused on these tensors."""
    if KINDS[kind].run is None:
        dispatch.note(operator, f"reference (no fused {kind})")
        return False
    return use_fused(operator, *tensors)


def fuse_bias_gradient(x: Tensor, bias: Tensor) -> Tensor:
    """Return x, which includes `bias` unknown to autograd, such that autograd computes the bias's gradient."""
    return x + (bias - bias.detach())


def activation_reference(kind: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the activation `kind` of x + bias in plain PyTorch."""
    return KINDS[kind].reference(x if bias is None else x + bias)


@torch_private.call_directly
class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tracked_bias: Tensor | None, args: tuple[Any, ...]) -> Tensor:
        rows = flat_rows(x)
        ctx.save_for_backward(rows)
        ctx.args, ctx.shape = args, x.shape
        bias, kind, added = args
        width = x.shape[-1] // 2 if ACTIVATIONS[kind].gated else x.shape[-1]
        y = torch.empty((rows.shape[0], width), dtype=x.dtype, device=x.device)
        amax = new_slot(x)
        run_activation(kind, rows, bias, None, y, added, amax=amax)
        return attach_amax(y.view(*x.shape[:-1], width), amax)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        bias, kind, added = ctx.args
        dx = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        amax = new_slot(dy)
        d_bias = run_activation(kind, rows, bias, flat_rows(dy), dx, added, amax=amax)
        return attach_amax(dx.view(ctx.shape), amax), d_bias, None


def activate(kind: str, x: Tensor, bias: Tensor | None = None, added: bool = False) -> Tensor:
    """Compute the activation `kind` of x + bias, saving only x and bias for backward.

    Args:
        x: [..., F]; gated: [gate | up], twice as wide as the result.
        bias: as wide as x.
        added: x includes the bias already (unknown to autograd), and only the bias's gradient is computed here.
    """
    if x.numel() and fuses(kind, KINDS[kind].operator, x, bias):
        return _Activation.apply(x, tracked(x, bias), (bias, kind, added))
    if added and bias is not None:
        x, bias = fuse_bias_gradient(x, bias), None
    return activation_reference(kind, x, bias)


def gelu(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none", added: bool = False) -> Tensor:
    """Compute gelu(x + bias); see `activate`."""
    return activate("gelu_tanh" if approximate == "tanh" else "gelu", x, bias, added)


def swiglu(x: Tensor, bias: Tensor | None = None, added: bool = False) -> Tensor:
    """Compute silu(gate) * up of x + bias; see `activate`."""
    return activate("swiglu", x, bias, added)


@dataclass(slots=True)
class RecomputedActivation:
    """An activation whose result is recomputed in backward, in the pass that computes its gradient.

    Attributes:
        kind: model.activation.
        bias, added: see `activate`.
    """

    kind: str
    bias: Tensor | None = None
    added: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the activation of x + bias."""
        return activate(self.kind, x, self.bias, self.added)

    def with_gradient(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Recompute the result for x, and compute the gradient of x from dy; the bias accumulates its own gradient."""
        if not (x.numel() and fuses(self.kind, KINDS[self.kind].operator, x, self.bias)):
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                y = self(leaf)
            torch.autograd.backward(y, dy)
            assert leaf.grad is not None
            return y.detach(), leaf.grad
        y = torch.empty(dy.shape, dtype=x.dtype, device=x.device)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        d_bias = run_activation(
            self.kind, flat_rows(x), self.bias, flat_rows(dy), flat_rows(dx), self.added, recompute=flat_rows(y)
        )
        self.accumulate(d_bias)
        return y, dx

    def accumulate(self, d_bias: Tensor | None) -> None:
        """Add to the bias a gradient that its sink did not take."""
        if d_bias is not None and self.bias is not None:
            self.bias.grad = d_bias if self.bias.grad is None else self.bias.grad + d_bias
