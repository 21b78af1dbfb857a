"""Largest magnitudes that kernels collect of what they store, through Triton's interpreter."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import pytest
import torch

from megascale.ops import dispatch
from megascale.ops.activation import gelu, swiglu
from megascale.ops.amax import AmaxPool, get_attached_amax
from megascale.ops.float8.cast import compute_amax
from megascale.ops.fused_projection import split_fused_projection
from megascale.ops.norm import add_norm, layer_norm, rms_norm
from megascale.ops.norm_launch import MAX_BLOCK_WITH_BIAS_SUM
from megascale.parallel.collectives import SINGLE_RANK
from megascale.parallel.linear import make_linears
from megascale.parallel.tensor import linear_scatter

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _collecting():
    kernels = dispatch.Kernels("fused")
    kernels.amaxes = AmaxPool()
    with kernels.as_current():
        yield


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype).requires_grad_()


class _RecordGradient(torch.autograd.Function):
    """Keeps the gradient that comes to it."""

    gradient: torch.Tensor

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        _RecordGradient.gradient = dy
        return dy


def right(x: torch.Tensor) -> bool:
    """Its maker's largest magnitude is that of a pass over it, bit for bit."""
    result = get_attached_amax(x)
    assert result is not None
    return torch.equal(result, x.detach().abs().max().float())


@pytest.mark.parametrize("width", [7, 100, 5120 // 16])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_norms_and_activations_know_what_they_made(width, dtype):
    x = random(11, 2, width, dtype=dtype)
    w = random(width, dtype=dtype)
    b = random(width, dtype=dtype)
    # A bias alone would be larger than any result: what lies outside the tensor must not count.
    assert right(layer_norm(x, w, b.detach() + 100, 1e-5))
    assert right(rms_norm(x, w, 1e-5))
    total, normed = add_norm(_RecordGradient.apply(x), random(11, 2, width, dtype=dtype), w, b, 1e-5, "layernorm", b)
    assert get_attached_amax(total) is None
    assert right(normed)
    torch.autograd.backward((total, normed), (random(11, 2, width, dtype=dtype).detach(), normed.detach()))
    assert right(_RecordGradient.gradient)
    for activation, wide in ((gelu, width), (swiglu, 2 * width)):
        y = activation(_RecordGradient.apply(random(11, 2, wide, dtype=dtype)), random(wide, dtype=dtype))
        assert right(y)
        y.backward(random(*y.shape, dtype=dtype).detach())
        assert right(_RecordGradient.gradient)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_rows_in_two_blocks_of_columns(kind):
    width = MAX_BLOCK_WITH_BIAS_SUM + 40
    x, w = random(3, width), random(width)
    b = random(width) if kind == "layernorm" else None
    total, normed = add_norm(_RecordGradient.apply(x), random(3, width), w, b, 1e-5, kind, random(width))
    assert right(normed)
    torch.autograd.backward((total, normed), (torch.zeros_like(total), random(3, width).detach()))
    assert right(_RecordGradient.gradient)


def test_the_activation_of_a_fused_projection_knows_what_it_made():
    fused = random(8, 2, (2 + 2) * 8 + 64)
    *_, inner, recomputed = split_fused_projection(fused * 1, 2, 1, 8, "gelu", random(64))
    assert recomputed is None
    assert right(inner)


def test_what_is_no_number_is_known_too():
    x = random(4, 32, dtype=torch.float32)
    with torch.no_grad():
        x[1, 3] = torch.nan
    assert get_attached_amax(gelu(x)).isnan()


def test_what_was_written_into_since_is_not_known():
    y = gelu(random(4, 32))
    assert get_attached_amax(y) is not None
    y.detach().add_(1)
    assert get_attached_amax(y) is None


def test_float8_takes_what_is_known(monkeypatch):
    linears, passes = make_linears("float8", SINGLE_RANK), []
    monkeypatch.setattr("megascale.parallel.float8.compute_amax", lambda x: passes.append(x.shape) or compute_amax(x))
    w = random(16, 32)
    y = linear_scatter(linears, gelu(random(8, 2, 32)), w)
    assert passes == [w.shape]
    _, normed = add_norm(y, random(8, 2, 16), random(16), None, 1e-5, "rmsnorm")
    normed.backward(random(8, 2, 16).detach())  # the gradient of y comes from the norm
    assert passes == [w.shape]
    dispatch.CURRENT.get().amaxes = None
    linear_scatter(linears, gelu(random(8, 2, 32)), w)
    assert passes == [w.shape, (8, 2, 32)]
