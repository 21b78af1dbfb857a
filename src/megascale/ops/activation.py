"""GeLU and SwiGLU with the bias of the projection before them, forward and backward.

Only the projection's output is saved. The backward kernel reads it with the gradient, writes the input's gradient and
sums the bias's in the same pass, in a fixed order. If the projection's GEMM has added the bias (`is_bias_added`), the
bias's gradient is summed here all the same. The gradient is in registers, which saves a pass over the wide tensor.
`RecomputedActivation` does not save the activation's result; the backward kernel writes it again in its pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from megascale import torch_private
from megascale.config.parts import ACTIVATIONS, ActivationFacts
from megascale.config.registry import Registry
from megascale.ops import dispatch
from megascale.ops.amax import allocate_amax, attach_amax, compute_magnitude_bits, update_amax, view_as_int32
from megascale.ops.dispatch import cdiv, jit, next_power_of_2, tl, use_fused
from megascale.ops.gradient_sink import get_tracked
from megascale.ops.reduce import accumulate_gradients, add_partials, divide_rows, flatten_rows

Approximate = Literal["none", "tanh"]


class Tile(NamedTuple):
    """Launch parameters of a kernel: rows and columns per tile, approximate number of programs, warps per program."""

    rows: int
    columns: int
    programs: int
    warps: int


# Gated kernels that accumulate a bias gradient or an amax, and GeLU's backward, run eight programs per SM of a large
# GPU. Partial sums are then few, and enough loads are in flight. The other two run many small programs. Each tile is
# the fastest of those tried on an H200.
TILE_GATED_ACCUMULATING = Tile(4, 512, 1056, 4)
TILE_GATED = Tile(2, 512, 1 << 30, 4)
TILE_GELU_BACKWARD = Tile(4, 256, 1056, 8)
TILE_GELU_FORWARD = Tile(2, 1024, 4224, 4)
# Constants of the clamped SwiGLU (gpt-oss).
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0
_MAX_GRID_Y = 65_535  # CUDA's limit of a grid's second dimension


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
def gelu_with_derivative(x, TANH: tl.constexpr, NARROW: tl.constexpr):
    """Return gelu(x) = x cdf(x) and its derivative in float32. NARROW: the caller rounds the result to 16 bits.

    cdf is the cumulative normal distribution or its tanh approximation, and pdf is the derivative of cdf. In the code,
    0.3989422804014327 is 1 / sqrt(2 pi) and 0.7071067811865476 is 1 / sqrt(2).
    """
    if TANH:
        # 0.7978845608028654 is sqrt(2 / pi); 0.044715 is a fitted coefficient (Hendrycks and Gimpel 2016).
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        # tanh(u) = 2 sigmoid(2u) - 1, so (1 + tanh) / 2 is one sigmoid
        cdf = tl.sigmoid(2.0 * inner)
        pdf = 2.0 * cdf * (1.0 - cdf) * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
    elif NARROW:
        # The error function takes longer than the memory access. This approximates the tail of the normal distribution
        # by 2^q(|x|) with a fitted polynomial q. Its relative error is 4.3e-5 up to 5.5 and 2e-4 up to 8 standard
        # deviations; bfloat16 has 4e-3.
        u = tl.minimum(tl.abs(x), 14.0)
        q = 5.93538592e-05 + u * (-2.33502853e-06 + u * 3.95231585e-08)
        q = -0.0526799256 + u * (0.00806233247 + u * (-0.000861773695 + u * q))
        q = -1.00006155 + u * (-1.15044636 + u * (-0.460131009 + u * q))
        tail = tl.exp2(q)
        cdf = tl.where(x < 0.0, tail, 1.0 - tail)
        pdf = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        pdf = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return x * cdf, cdf + x * pdf


@jit
def _activation_kernel(
    x_ptr,
    bias_ptr,
    dy_ptr,
    out_ptr,
    recomputed_ptr,
    partial_ptr,
    amax_ptr,
    rows,
    width,
    stride,
    dy_stride,
    out_stride,
    program_rows,
    GATED: tl.constexpr,
    TANH: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BIAS_ADDED: tl.constexpr,
    BACKWARD: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    AMAX: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute GeLU; or SwiGLU (GATED), GeGLU (GATED and TANH), or the clamped SwiGLU (GATED and CLAMPED).

    BACKWARD writes the gradient of x instead of the activation, and RECOMPUTE also the activation. BIAS_ADDED: x
    includes the bias. Gated activations read tiles of the gate, and of up `width` columns to the right.
    """
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first_row = tl.program_id(1) * program_rows
    end_row = tl.minimum(first_row + program_rows, rows)
    if HAS_BIAS and not BIAS_ADDED:
        bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        if GATED:
            bias_up = tl.load(bias_ptr + width + column, mask=column < width, other=0.0).to(tl.float32)
    if HAS_BIAS:
        d_bias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        d_bias_up = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    amax_bits = tl.zeros((BLOCK_R, BLOCK_C), tl.int32)  # Bits of floats: integer maxima keep NaN.
    for start in range(first_row, end_row, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        inside = (row[:, None] < end_row) & (column[None, :] < width)
        row_64 = row[:, None].to(tl.int64)
        source = x_ptr + row_64 * stride + column[None, :]
        x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS and not BIAS_ADDED:
            x += bias[None, :]
            if GATED:
                up += bias_up[None, :]
        if GATED and TANH:
            activated_gate, derivative = gelu_with_derivative(x, TANH, NARROW)
            out = activated_gate * up
        elif CLAMPED:
            clamped = tl.minimum(x, LIMIT)
            up_factor = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
            sigmoid = tl.sigmoid(ALPHA * clamped)
            out = clamped * sigmoid * up_factor
        elif GATED:
            sigmoid = tl.sigmoid(x)
            out = x * sigmoid * up
        else:
            out, derivative = gelu_with_derivative(x, TANH, NARROW)
        if RECOMPUTE:
            tl.store(recomputed_ptr + row_64 * width + column[None, :], out, mask=inside)
        target = out_ptr + row_64 * out_stride + column[None, :]
        if BACKWARD:
            dy = tl.load(dy_ptr + row_64 * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
            if GATED:
                if TANH:
                    dx = dy * up * derivative
                    d_up = dy * activated_gate
                elif CLAMPED:
                    derivative = up_factor * sigmoid * (1.0 + ALPHA * clamped * (1.0 - sigmoid))
                    dx = tl.where(x <= LIMIT, dy * derivative, 0.0)
                    d_up = tl.where(tl.abs(up) <= LIMIT, dy * clamped * sigmoid, 0.0)
                else:
                    dx = dy * up * sigmoid * (1.0 + x * (1.0 - sigmoid))
                    d_up = dy * x * sigmoid
                tl.store(target + width, d_up, mask=inside)
                if AMAX:
                    amax_bits = tl.maximum(amax_bits, compute_magnitude_bits(d_up, inside, out_ptr.dtype.element_ty))
                if HAS_BIAS:
                    d_bias_up += d_up
            else:
                dx = dy * derivative
            if HAS_BIAS:
                d_bias += dx
            out = dx
        tl.store(target, out, mask=inside)
        if AMAX:
            amax_bits = tl.maximum(amax_bits, compute_magnitude_bits(out, inside, out_ptr.dtype.element_ty))
    if AMAX:
        update_amax(amax_ptr, amax_bits)
    if BACKWARD and HAS_BIAS:
        partial_row = partial_ptr + tl.program_id(1) * (2 * width if GATED else width) + column
        tl.store(partial_row, tl.sum(d_bias, 0), mask=column < width)
        if GATED:
            tl.store(partial_row + width, tl.sum(d_bias_up, 0), mask=column < width)


class _Grid(NamedTuple):
    """Division of a tensor among programs: `column_blocks` x `row_programs`, each with `program_rows` rows."""

    block_columns: int
    column_blocks: int
    program_rows: int
    row_programs: int


@cache
def _make_grid(T: int, width: int, tile: Tile) -> _Grid:
    block_columns = min(tile.columns, max(16, next_power_of_2(width)))
    column_blocks = cdiv(width, block_columns)
    max_row_programs = max(1, min(_MAX_GRID_Y, tile.programs // column_blocks))
    program_rows, row_programs = divide_rows(T, tile.rows, max_row_programs)
    return _Grid(block_columns, column_blocks, program_rows, row_programs)


def _launch(
    x_TF: Tensor,
    bias: Tensor | None,
    dy_TF: Tensor | None,
    out_TF: Tensor,
    is_bias_added: bool,
    main_grad: Tensor | None,
    recomputed_TF: Tensor | None,
    amax: Tensor | None,
    gated: bool = False,
    tanh: bool = False,
    clamped: bool = False,
) -> Tensor | None:
    """Launch the kernel; the arguments are those of `run_activation`."""
    T, columns = x_TF.shape
    is_backward = dy_TF is not None
    if gated:
        sums_bias_gradient = bias is not None and is_backward
        tile = TILE_GATED
        if amax is not None or sums_bias_gradient:
            tile = TILE_GATED_ACCUMULATING
    elif is_backward:
        tile = TILE_GELU_BACKWARD
    else:
        tile = TILE_GELU_FORWARD
    width = columns // 2 if gated else columns
    grid = _make_grid(T, width, tile)
    partial_sums = None
    if bias is not None and is_backward:
        partial_sums = torch.empty((grid.row_programs, columns), dtype=torch.float32, device=x_TF.device)
    _activation_kernel[(grid.column_blocks, grid.row_programs)](
        x_TF,
        bias,
        dy_TF,
        out_TF,
        recomputed_TF,
        partial_sums,
        view_as_int32(amax),
        T,
        width,
        x_TF.stride(0),
        0 if dy_TF is None else dy_TF.stride(0),
        out_TF.stride(0),
        grid.program_rows,
        GATED=gated,
        TANH=tanh,
        CLAMPED=clamped,
        ALPHA=SWIGLU_ALPHA,
        LIMIT=SWIGLU_LIMIT,
        NARROW=x_TF.element_size() < 4,
        HAS_BIAS=bias is not None,
        BIAS_ADDED=is_bias_added,
        BACKWARD=is_backward,
        RECOMPUTE=recomputed_TF is not None,
        AMAX=amax is not None,
        BLOCK_R=tile.rows,
        BLOCK_C=grid.block_columns,
        num_warps=tile.warps,
    )
    if partial_sums is None or bias is None:
        return None
    if main_grad is not None:
        add_partials(partial_sums, main_grad)
        return None
    return accumulate_gradients(partial_sums, bias)[0]


class RunActivation(Protocol):
    """Fused kernel of one activation; arguments and result are those of `run_activation`."""

    def __call__(
        self,
        x_TF: Tensor,
        bias: Tensor | None,
        dy_TF: Tensor | None,
        out_TF: Tensor,
        is_bias_added: bool,
        main_grad: Tensor | None,
        recomputed_TF: Tensor | None,
        amax: Tensor | None,
        /,
    ) -> Tensor | None: ...


@dataclass(frozen=True)
class Activation:
    """An activation that model.activation can name.

    Attributes:
        reference: differentiable function in plain PyTorch; the caller has added the bias to its argument.
        operator: its name in the record of operators (ops/dispatch.py).
        run: the fused kernel, forward and backward; None: only the reference exists.
    """

    reference: Callable[[Tensor], Tensor]
    operator: str
    run: RunActivation | None = None


ACTIVATION_OPERATORS: Registry[Activation] = Registry(
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
    """Register `name` for `model.activation`. gated: its input is [gate | up], twice as wide as its result."""
    ACTIVATIONS.register(name, ActivationFacts(gated))
    ACTIVATION_OPERATORS.register(name, activation)


def run_activation(
    kind: str,
    x_TF: Tensor,
    bias: Tensor | None,
    dy_TF: Tensor | None,
    out_TF: Tensor,
    is_bias_added: bool = False,
    main_grad: Tensor | None = None,
    recomputed_TF: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor | None:
    """Run the fused kernel of an activation, or of its gradient if `dy_TF` is given. Rows may have any stride.

    Args:
        kind: value of model.activation. The activation must have a fused kernel.
        x_TF: input [T, F], or [gate | up] [T, 2F] of a gated activation.
        dy_TF: upstream gradient [T, F]; None: forward.
        out_TF: written: the activation [T, F], or the gradient of x, of x's shape.
        is_bias_added: x includes the bias, and only the bias's gradient is computed.
        main_grad: float32, as wide as x; the bias's gradient is added to it.
        recomputed_TF: contiguous [T, F]; backward also writes the activation there.
        amax: float32 [], raised to the amax of out_TF.

    Returns:
        The bias's gradient, or None without one, or if it was added to `main_grad` or to the bias's gradient sink.
    """
    if recomputed_TF is not None and (dy_TF is None or not recomputed_TF.is_contiguous()):
        raise ValueError("backward writes the recomputed activation to contiguous memory, and needs a gradient")
    run = ACTIVATION_OPERATORS[kind].run
    assert run is not None, kind
    return run(x_TF, bias, dy_TF, out_TF, is_bias_added, main_grad, recomputed_TF, amax)


def can_fuse(kind: str, operator: str, *tensors: Tensor | None) -> bool:
    """Return whether `operator`, which contains the activation `kind`, runs fused on these tensors."""
    if ACTIVATION_OPERATORS[kind].run is None:
        dispatch.record_choice(operator, f"reference (no fused {kind})")
        return False
    return use_fused(operator, *tensors)


def add_bias_to_graph(x: Tensor, bias: Tensor) -> Tensor:
    """Return x unchanged in value, with `bias` as an input of its autograd graph.

    A fused GEMM has added `bias` to x outside autograd, so that its gradient would be lost.
    """
    return x + (bias - bias.detach())


def activation_reference(kind: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the activation `kind` of x + bias in plain PyTorch."""
    return ACTIVATION_OPERATORS[kind].reference(x if bias is None else x + bias)


@torch_private.call_directly
class _Activation(torch.autograd.Function):
    """The fused activation as an operator of autograd.

    `args` always has the bias. `tracked_bias` is the bias only if autograd must return its gradient (`get_tracked`). It
    has no other use.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tracked_bias: Tensor | None, args: tuple[Any, ...]) -> Tensor:
        rows = flatten_rows(x)
        ctx.save_for_backward(rows)
        ctx.args, ctx.shape = args, x.shape
        bias, kind, is_bias_added = args
        width = x.shape[-1]
        if ACTIVATIONS[kind].gated:
            width //= 2
        y = torch.empty((rows.shape[0], width), dtype=x.dtype, device=x.device)
        amax = allocate_amax(x)
        run_activation(kind, rows, bias, None, y, is_bias_added, amax=amax)
        return attach_amax(y.view(*x.shape[:-1], width), amax)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        bias, kind, is_bias_added = ctx.args
        dx = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        amax = allocate_amax(dy)
        d_bias = run_activation(kind, rows, bias, flatten_rows(dy), dx, is_bias_added, amax=amax)
        return attach_amax(dx.view(ctx.shape), amax), d_bias, None


def activate(kind: str, x: Tensor, bias: Tensor | None = None, is_bias_added: bool = False) -> Tensor:
    """Compute the activation `kind` of x + bias, saving only x and bias for backward.

    Args:
        x: [..., F], or [gate | up] [..., 2F] of a gated activation.
        bias: as wide as x.
        is_bias_added: a GEMM has added the bias to x outside autograd; only the bias's gradient is computed here.
    """
    if x.numel() and can_fuse(kind, ACTIVATION_OPERATORS[kind].operator, x, bias):
        return _Activation.apply(x, get_tracked(x, bias), (bias, kind, is_bias_added))
    if is_bias_added and bias is not None:
        x, bias = add_bias_to_graph(x, bias), None
    return activation_reference(kind, x, bias)


def gelu(
    x: Tensor, bias: Tensor | None = None, approximate: Approximate = "none", is_bias_added: bool = False
) -> Tensor:
    """Compute gelu(x + bias); see `activate`."""
    return activate("gelu_tanh" if approximate == "tanh" else "gelu", x, bias, is_bias_added)


def swiglu(x: Tensor, bias: Tensor | None = None, is_bias_added: bool = False) -> Tensor:
    """Compute silu(gate) * up of x + bias; see `activate`."""
    return activate("swiglu", x, bias, is_bias_added)


@dataclass(slots=True)
class RecomputedActivation:
    """An activation whose result is recomputed in backward, in the pass that computes its gradient.

    Attributes:
        kind: model.activation.
        bias, is_bias_added: see `activate`.
    """

    kind: str
    bias: Tensor | None = None
    is_bias_added: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the activation of x + bias."""
        return activate(self.kind, x, self.bias, self.is_bias_added)

    def with_gradient(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the recomputed activation and the gradient of x; the bias's gradient is accumulated in the bias."""
        if not (x.numel() and can_fuse(self.kind, ACTIVATION_OPERATORS[self.kind].operator, x, self.bias)):
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                y = self(leaf)
            torch.autograd.backward(y, dy)
            assert leaf.grad is not None
            return y.detach(), leaf.grad
        y = torch.empty(dy.shape, dtype=x.dtype, device=x.device)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        d_bias = run_activation(
            self.kind,
            flatten_rows(x),
            self.bias,
            flatten_rows(dy),
            flatten_rows(dx),
            self.is_bias_added,
            recomputed_TF=flatten_rows(y),
        )
        self.accumulate_bias_gradient(d_bias)
        return y, dx

    def accumulate_bias_gradient(self, d_bias: Tensor | None) -> None:
        """Add a gradient that `run_activation` returned to the bias's `grad`."""
        if d_bias is None or self.bias is None:
            return
        if self.bias.grad is None:
            self.bias.grad = d_bias
        else:
            self.bias.grad = self.bias.grad + d_bias
