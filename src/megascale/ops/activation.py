"""GeLU and SwiGLU with the bias of the projection before them, forward and backward.

Only the projection's output is kept; the backward kernel reads it with the gradient, writes the input's gradient and
sums the bias's on the way, in a fixed order. A bias that the projection has `added` already is summed here too: its
gradient is in registers, and a pass over the wide gradient is saved. A result that was not kept
(`RecomputedActivation`) comes out of the same pass: it costs one write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale import torch_private
from megascale.config.parts import ACTIVATIONS, ActivationFacts
from megascale.config.registry import Registry
from megascale.ops import dispatch
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.gradient_sink import tracked
from megascale.ops.known_amax import as_integers, collect, magnitudes, slot_for, tell
from megascale.ops.reduce import accumulate_gradients, add_parts, flat_rows, split_rows

Approximate = Literal["none", "tanh"]

# Rows and columns of a tile, about how many programs, and warps of each. With partial sums eight an SM of a
# large GPU: few sums and enough loads in flight; without, many small ones. Each the fastest tried on an H200.
TILE = 4, 512, 1056, 4
TILE_GELU_BACKWARD = 4, 256, 1056, 8
TILE_WITHOUT_SUMS = 2, 1024, 4224, 4
TILE_GATED_WITHOUT_SUMS = 2, 512, 1 << 30, 4
_PARTS = 65_535  # what a grid's second dimension holds


def gelu_reference(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none") -> Tensor:
    """gelu(x + bias), exact (error function) or with the tanh approximation."""
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


def swiglu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up of x + bias = [gate | up] along the last dimension."""
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


@jit
def _gelu(x, TANH: tl.constexpr, NARROW: tl.constexpr):
    """gelu(x) and its derivative in float32; NARROW: where the result is rounded to 16 bits anyway."""
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh(u) = 2 sigmoid(2u) - 1, so (1 + tanh) / 2 is one sigmoid
        half = tl.sigmoid(2.0 * inner)
        slope = 2.0 * half * (1.0 - half) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
    elif NARROW:
        # The error function takes longer than the memory. Here is the tail of the normal distribution as 2^q(|x|), q
        # fitted: relative error 4.3e-5 up to 5.5 and 2e-4 up to 8 standard deviations, where bfloat16 has 4e-3.
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
def _gelu_kernel(
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
    rows_a_part,
    TANH: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    BACKWARD: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * rows_a_part
    last = tl.minimum(first + rows_a_part, rows)
    if HAS_BIAS and not ADDED:
        bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    if HAS_BIAS:
        d_bias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    most = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row[:, None] < last) & (column[None, :] < width)
        row_64 = row[:, None].to(tl.int64)
        x = tl.load(x_ptr + row_64 * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS and not ADDED:
            x += bias[None, :]
        value, slope = _gelu(x, TANH, NARROW)
        if RECOMPUTE:
            tl.store(recomputed_ptr + row_64 * width + column[None, :], value, mask=inside)
        if BACKWARD:
            dy = tl.load(dy_ptr + row_64 * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
            value = dy * slope
            if HAS_BIAS:
                d_bias += value
        tl.store(out_ptr + row_64 * out_stride + column[None, :], value, mask=inside)
        if AMAX:
            most = tl.maximum(most, magnitudes(value, inside, out_ptr.dtype.element_ty))
    if AMAX:
        collect(amax_ptr, most)
    if BACKWARD and HAS_BIAS:
        tl.store(part_ptr + tl.program_id(1) * width + column, tl.sum(d_bias, 0), mask=column < width)


@jit
def _swiglu_kernel(
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
    rows_a_part,
    HAS_BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    BACKWARD: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Tiles of the gate with the same tile of the up projection, `width` columns further."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * rows_a_part
    last = tl.minimum(first + rows_a_part, rows)
    if HAS_BIAS and not ADDED:
        bias_g = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        bias_u = tl.load(bias_ptr + width + column, mask=column < width, other=0.0).to(tl.float32)
    if HAS_BIAS:
        d_bias_g = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        d_bias_u = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    most = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row[:, None] < last) & (column[None, :] < width)
        row_64 = row[:, None].to(tl.int64)
        at = x_ptr + row_64 * stride + column[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS and not ADDED:
            gate += bias_g[None, :]
            up += bias_u[None, :]
        half = tl.sigmoid(gate)
        if RECOMPUTE:
            tl.store(recomputed_ptr + row_64 * width + column[None, :], gate * half * up, mask=inside)
        if BACKWARD:
            dy = tl.load(dy_ptr + row_64 * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
            d_gate = dy * up * half * (1.0 + gate * (1.0 - half))
            d_up = dy * gate * half
            to = out_ptr + row_64 * out_stride + column[None, :]
            tl.store(to, d_gate, mask=inside)
            tl.store(to + width, d_up, mask=inside)
            if AMAX:
                most = tl.maximum(most, magnitudes(d_gate, inside, out_ptr.dtype.element_ty))
                most = tl.maximum(most, magnitudes(d_up, inside, out_ptr.dtype.element_ty))
            if HAS_BIAS:
                d_bias_g += d_gate
                d_bias_u += d_up
        else:
            value = gate * half * up
            tl.store(out_ptr + row_64 * out_stride + column[None, :], value, mask=inside)
            if AMAX:
                most = tl.maximum(most, magnitudes(value, inside, out_ptr.dtype.element_ty))
    if AMAX:
        collect(amax_ptr, most)
    if BACKWARD and HAS_BIAS:
        to = part_ptr + tl.program_id(1) * 2 * width + column
        tl.store(to, tl.sum(d_bias_g, 0), mask=column < width)
        tl.store(to + width, tl.sum(d_bias_u, 0), mask=column < width)


@cache
def _tiles(T: int, width: int, tile: tuple[int, int, int, int]) -> tuple[int, int, int, int, int, int]:
    """Rows and columns of a tile, tiles along columns, rows a part, parts, and warps."""
    rows, most, programs, warps = tile
    block = min(most, max(16, next_power_of_2(width)))
    columns = cdiv(width, block)
    return rows, block, columns, *split_rows(T, rows, max(1, min(_PARTS, programs // columns))), warps


def _run(
    kernel: Any,
    x_TF: Tensor,
    bias: Tensor | None,
    dy_TF: Tensor | None,
    out_TF: Tensor,
    width: int,
    tile: tuple[int, int, int, int],
    added: bool,
    main: Tensor | None,
    recompute: Tensor | None,
    amax: Tensor | None,
    **meta: Any,
) -> Tensor | None:
    """Launch over [T, width] tiles; returns the bias gradient where there is one and a dy, unless `main` takes it."""
    T = x_TF.shape[0]
    rows, block, columns, a_part, parts, warps = _tiles(T, width, tile)
    partial = None
    if bias is not None and dy_TF is not None:
        partial = torch.empty((parts, x_TF.shape[1]), dtype=torch.float32, device=x_TF.device)
    kernel[(columns, parts)](
        *(x_TF, bias, dy_TF, out_TF, recompute, partial, as_integers(amax), T, width, x_TF.stride(0)),
        *(0 if dy_TF is None else dy_TF.stride(0), out_TF.stride(0), a_part),
        HAS_BIAS=bias is not None,
        ADDED=added,
        BACKWARD=dy_TF is not None,
        RECOMPUTE=recompute is not None,
        AMAX=amax is not None,
        BLOCK_R=rows,
        BLOCK_C=block,
        num_warps=warps,
        **meta,
    )
    if partial is None or bias is None:
        return None
    if main is not None:
        add_parts(partial, main)
        return None
    return accumulate_gradients(partial, bias)[0]


# Arguments and result as of `run_activation`, without the kind.
Run = Callable[
    [Tensor, Tensor | None, Tensor | None, Tensor, bool, Tensor | None, Tensor | None, Tensor | None], Tensor | None
]


@dataclass(frozen=True)
class Activation:
    """What model.activation names.

    Attributes:
        reference: plain PyTorch of x, which has the bias in it; differentiable.
        operator: its name in the record of what runs (ops/dispatch.py).
        run: the fused kernels, forward and backward; None where there are none.
    """

    reference: Callable[[Tensor], Tensor]
    operator: str
    run: Run | None = None


def _run_swiglu(
    x_TF: Tensor,
    bias: Tensor | None,
    dy_TF: Tensor | None,
    out_TF: Tensor,
    added: bool,
    main: Tensor | None,
    recompute: Tensor | None,
    amax: Tensor | None,
) -> Tensor | None:
    sums = amax is not None or (bias is not None and dy_TF is not None)
    tile = TILE if sums else TILE_GATED_WITHOUT_SUMS
    return _run(_swiglu_kernel, x_TF, bias, dy_TF, out_TF, x_TF.shape[1] // 2, tile, added, main, recompute, amax)


def _run_gelu(tanh: bool) -> Run:
    def run(
        x_TF: Tensor,
        bias: Tensor | None,
        dy_TF: Tensor | None,
        out_TF: Tensor,
        added: bool,
        main: Tensor | None,
        recompute: Tensor | None,
        amax: Tensor | None,
    ) -> Tensor | None:
        meta = {"TANH": tanh, "NARROW": x_TF.element_size() < 4}
        tile = TILE_WITHOUT_SUMS if dy_TF is None else TILE_GELU_BACKWARD
        return _run(_gelu_kernel, x_TF, bias, dy_TF, out_TF, x_TF.shape[1], tile, added, main, recompute, amax, **meta)

    return run


KINDS: Registry[Activation] = Registry(
    ACTIVATIONS.key,
    {
        "gelu": Activation(gelu_reference, "gelu", _run_gelu(False)),
        "gelu_tanh": Activation(lambda x: gelu_reference(x, None, "tanh"), "gelu", _run_gelu(True)),
        "swiglu": Activation(swiglu_reference, "swiglu", _run_swiglu),
    },
)


def register(name: str, activation: Activation, gated: bool = False) -> None:
    """Let `model.activation` be `name`. gated: it takes [gate | up], twice as wide as its result."""
    ACTIVATIONS.register(name, ActivationFacts(gated))
    KINDS.register(name, activation)


def run_activation(
    kind: str,
    x_TF: Tensor,
    bias: Tensor | None,
    dy_TF: Tensor | None,
    out_TF: Tensor,
    added: bool = False,
    main: Tensor | None = None,
    recompute: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor | None:
    """Fused activation (or, with dy, its gradient) of rows into rows, strided as they come; returns the bias gradient.

    x_TF: [T, F], or [T, 2F] for swiglu; out_TF: the result [T, F], or with dy_TF [T, F] the gradient of x. added: x has
    the bias in it, whose gradient alone is wanted. main: float32, as wide as x; the bias gradient is added to it.
    recompute: with dy_TF, contiguous [T, F]: the result is written there as well. amax: float32 [], which becomes the
    larger of itself and that of what is written to out_TF. Only of a kind with kernels.
    """
    assert recompute is None or (dy_TF is not None and recompute.is_contiguous())
    run = KINDS[kind].run
    assert run is not None, kind
    return run(x_TF, bias, dy_TF, out_TF, added, main, recompute, amax)


def fuses(kind: str, operator: str, *tensors: Tensor | None) -> bool:
    """Whether `operator` runs fused on these tensors, the activation `kind` in it included."""
    if KINDS[kind].run is None:
        dispatch.note(operator, f"reference (no fused {kind})")
        return False
    return use_fused(operator, *tensors)


def fuse_bias_gradient(x: Tensor, bias: Tensor) -> Tensor:
    """x, which has `bias` in it without autograd knowing: the same numbers, and bias gets its gradient."""
    return x + (bias - bias.detach())


def activation_reference(kind: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The plain activation called `kind` in model.activation."""
    return KINDS[kind].reference(x if bias is None else x + bias)


@torch_private.call_directly
class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tracked_bias: Tensor | None, told: tuple[Any, ...]) -> Tensor:
        flat = flat_rows(x)
        ctx.save_for_backward(flat)
        bias, kind, added = ctx.told = told
        ctx.shape = x.shape
        width = x.shape[-1] // 2 if ACTIVATIONS[kind].gated else x.shape[-1]
        y = torch.empty((flat.shape[0], width), dtype=x.dtype, device=x.device)
        amax = slot_for(x)
        run_activation(kind, flat, bias, None, y, added, amax=amax)
        return tell(y.view(*x.shape[:-1], width), amax)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (flat,) = ctx.saved_tensors
        bias, kind, added = ctx.told
        dx = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device)
        amax = slot_for(dy)
        d_bias = run_activation(kind, flat, bias, flat_rows(dy), dx, added, amax=amax)
        return tell(dx.view(ctx.shape), amax), d_bias, None


def activate(kind: str, x: Tensor, bias: Tensor | None = None, added: bool = False) -> Tensor:
    """The activation `kind` of x + bias, x [..., F] (gated: [gate | up], twice as wide) and bias as wide as x.

    Only x and bias are kept for the backward pass. added: x has the bias in it already (without autograd knowing), and
    only the bias's gradient is made here.
    """
    if x.numel() and fuses(kind, KINDS[kind].operator, x, bias):
        return _Activation.apply(x, tracked(x, bias), (bias, kind, added))
    if added and bias is not None:
        x, bias = fuse_bias_gradient(x, bias), None
    return activation_reference(kind, x, bias)


def gelu(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none", added: bool = False) -> Tensor:
    """gelu(x + bias); see `activate`."""
    return activate("gelu_tanh" if approximate == "tanh" else "gelu", x, bias, added)


def swiglu(x: Tensor, bias: Tensor | None = None, added: bool = False) -> Tensor:
    """silu(gate) * up of x + bias; see `activate`."""
    return activate("swiglu", x, bias, added)


@dataclass(slots=True)
class RecomputedActivation:
    """An activation whose result backward makes again, in the pass that makes its gradient, instead of keeping it.

    Attributes:
        kind: model.activation.
        bias, added: as for `activate`.
    """

    kind: str
    bias: Tensor | None = None
    added: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """The activation of x + bias."""
        return activate(self.kind, x, self.bias, self.added)

    def with_gradient(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """The result for x once more, and the gradient of x for dy, that of the result. The bias's goes to the bias."""
        if not (x.numel() and fuses(self.kind, KINDS[self.kind].operator, x, self.bias)):
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                y = self(leaf)
            torch.autograd.backward(y, dy)
            assert leaf.grad is not None
            return y.detach(), leaf.grad
        y = torch.empty(dy.shape, dtype=x.dtype, device=x.device)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = flat_rows(x), self.bias, flat_rows(dy), flat_rows(dx)
        self.accumulate(run_activation(self.kind, *rows, self.added, recompute=flat_rows(y)))
        return y, dx

    def accumulate(self, d_bias: Tensor | None) -> None:
        """Give the bias a gradient that its sink did not take."""
        if d_bias is not None and self.bias is not None:
            self.bias.grad = d_bias if self.bias.grad is None else self.bias.grad + d_bias
