"""Norms, activations and column sums through Triton's interpreter against float64 references."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.model.norm import NORM_OPERATORS
from megascale.ops import dispatch, norm_launch
from megascale.ops.activation import (
    activate,
    geglu_tanh_reference,
    gelu,
    gelu_reference,
    swiglu,
    swiglu_clamped_reference,
    swiglu_reference,
)
from megascale.ops.fused_projection import split_fused_projection
from megascale.ops.gradient_sink import GradientSink, SinkParameter, attach, get_main_grad
from megascale.ops.norm import (
    add_norm,
    add_norm_reference,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from megascale.ops.reduce import accumulate_gradients, sum_columns
from tests.ops.tools import TOLERANCE, compare, distance

SETTINGS = settings(max_examples=6, deadline=None)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
leading = st.sampled_from([(1,), (7,), (3, 5), (9, 2), (40,)])
norm_widths = st.sampled_from([7, 32, 100, 257, 600])  # gradients of narrower rows are differences of near numbers
widths = st.sampled_from([1, 2, 7, 32, 100, 257, 600])


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@SETTINGS
@given(leading, norm_widths, dtypes, st.booleans())
def test_layer_norm(lead, width, dtype, has_bias):
    x, w = random(*lead, width, dtype=dtype), random(width, dtype=dtype)
    b = random(width, dtype=dtype) if has_bias else None
    compare(
        lambda x, w, b: layer_norm(x, w, b, 1e-5),
        lambda x, w, b: layer_norm_reference(x, w, b, 1e-5),
        (x, w, b),
        5 * TOLERANCE[dtype],
    )
    assert dispatch.list_choices()["layer norm"] == "triton"


@SETTINGS
@given(leading, norm_widths, dtypes)
def test_rms_norm(lead, width, dtype):
    compare(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: rms_norm_reference(x, w, 1e-5),
        (random(*lead, width, dtype=dtype) + 0.5, random(width, dtype=dtype)),
        5 * TOLERANCE[dtype],
    )
    assert dispatch.list_choices()["rms norm"] == "triton"


@SETTINGS
@given(leading, norm_widths, dtypes, st.sampled_from(["layernorm", "rmsnorm"]), st.booleans(), st.booleans())
def test_add_norm(lead, width, dtype, kind, has_x_bias, wide):
    with mock.patch.object(norm_launch, "MAX_BLOCK_WITH_BIAS_SUM", 1 if wide else norm_launch.MAX_BLOCK_WITH_BIAS_SUM):
        add_norm_matches(lead, width, dtype, kind, has_x_bias)


@SETTINGS
@given(
    st.sampled_from([(1,), (5,), (2, 2)]),
    st.sampled_from([4096, 4097, 4352, 5120, 6100, 6144, 6145, 12288]),
    dtypes,
    st.sampled_from(["layernorm", "rmsnorm"]),
    st.booleans(),
)
def test_add_norm_of_wide_rows(lead, width, dtype, kind, has_x_bias):
    """In one block of columns or two, of which the second has all its columns, some or one."""
    tile = norm_launch.choose_forward_tile(width)
    block, remaining = tile.block, tile.tail
    assert block + remaining >= width > block // 2 + remaining // 2
    assert (remaining > 0) is (4096 < width <= 6144 or width == 12288)
    with mock.patch.object(norm_launch, "MAX_PARTIAL_SUMS", 3):  # several rows a program, and fewer in the last one
        add_norm_matches(lead, width, dtype, kind, has_x_bias)


def add_norm_matches(lead, width, dtype, kind, has_x_bias):
    norm_launch.choose_backward_tile.cache_clear()  # it is kept by sizes, and constants are patched here
    x, residual = random(*lead, width, dtype=dtype), random(*lead, width, dtype=dtype).flip(-1)
    weight = random(width, dtype=dtype)
    bias = weight.flip(0) if kind == "layernorm" else None
    x_bias = weight * 2 if has_x_bias else None

    def run_pair(function):
        def run(x, residual, x_bias, weight, bias):
            total, normed = function(x, residual, weight, bias, 1e-5, kind, x_bias)
            return torch.cat([total, normed], -1)

        return run

    tensors = (x, residual, x_bias, weight, bias)
    compare(run_pair(add_norm), run_pair(add_norm_reference), tensors, 5 * TOLERANCE[dtype])
    assert dispatch.list_choices()["add norm"] == "triton"


def test_norms_take_strided_rows_and_expanded_gradients():
    base = torch.randn(6, 40)
    x = base[:, 8:24].requires_grad_()
    w = torch.ones(16)
    (dx,) = torch.autograd.grad(rms_norm(x, w, 1e-5).sum(), x)
    (want,) = torch.autograd.grad(rms_norm_reference(x, w, 1e-5).sum(), x)
    assert distance(dx, want) < 1e-5


def test_norm_gradients_repeat_bit_for_bit():
    x = torch.randn(500, 24, requires_grad=True)
    w = torch.randn(24, requires_grad=True)
    b = torch.zeros(24)
    runs = [torch.autograd.grad(layer_norm(x, w, b, 1e-5).square().sum(), (x, w)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def parameter(*shape: int, dtype: torch.dtype, main: bool) -> torch.Tensor:
    """A leaf; with `main` it collects its gradient in float32, on top of what is there, and counts how often."""
    built = SinkParameter(random(*shape, dtype=dtype))
    if main:
        built.told = []
        attach(built, GradientSink(torch.full(shape, 3.0), lambda: built.told.append(1)))
    return built


@pytest.mark.parametrize(
    "kind",
    [
        "layernorm",
        "rmsnorm",
        "add layernorm",
        "add rmsnorm",
        "gelu",
        "gelu added",
        "swiglu",
        "swiglu added",
        "wide",
        "wide added",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_go_straight_to_their_sinks(kind, dtype):
    """What autograd would give, added to what the sink holds, each parameter told once and no gradient left over."""
    width = 40

    def run(main: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        x = random(9, 2, 2 * width if "swiglu" in kind else 6 * width if "wide" in kind else width, dtype=dtype)
        x.requires_grad_()
        added = kind.endswith("added")
        weight, bias = (parameter(width, dtype=dtype, main=main) for _ in range(2))
        x_bias = parameter(width, dtype=dtype, main=main)
        used = [weight, bias]
        if kind == "layernorm":
            y = layer_norm(x, weight, bias, 1e-5)
        elif kind == "rmsnorm":
            used, y = [weight], rms_norm(x, weight, 1e-5)
        elif kind.startswith("add"):
            plain = kind == "add rmsnorm"
            used = [weight, x_bias] if plain else [weight, bias, x_bias]
            inputs = (None, 1e-5, "rmsnorm") if plain else (bias, 1e-5, "layernorm")
            y = torch.cat(add_norm(x, x.flip(0), weight, *inputs, x_bias), -1)
        elif "gelu" in kind:
            used, y = [bias], gelu(x, bias, is_bias_added=added)
        elif kind == "wide added":
            used = [parameter(6 * width, dtype=dtype, main=main)]
            y = torch.cat(
                [
                    part.flatten(2)
                    for part in split_fused_projection(x * 1.0, 2, 1, width, "swiglu", fused_bias=used[0])[:4]
                ],
                -1,
            )
        else:
            pair = parameter(2 * width, dtype=dtype, main=main)
            used = [pair]
            if "swiglu" in kind:
                y = swiglu(x, pair, added)
            else:
                y = split_fused_projection(x, 2, 1, width, "swiglu", pair)[3]
        y.float().square().sum().backward()
        assert all(len(p.told) == 1 and p.grad is None for p in used) if main else all(p.grad is not None for p in used)
        return [get_main_grad(p) - 3.0 if main else p.grad.float() for p in used], x.grad

    (straight, dx), (returned, dx_again) = run(True), run(False)
    assert torch.equal(dx, dx_again)
    for local, remote in zip(straight, returned, strict=True):
        assert distance(local, remote) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("with_sinks", [0, 1, 2, 4, 5, 6, 7])
def test_sums_go_to_each_parameter_as_it_wants_its_gradient(count, with_sinks):
    """One launch serves parameters with a sink and those without, side by side."""
    sizes = (40, 24, 8)[:count]
    used = [parameter(size, dtype=torch.float32, main=bool(with_sinks >> i & 1)) for i, size in enumerate(sizes)]
    parts = random(7, sum(sizes), dtype=torch.float32)
    result = accumulate_gradients(parts, *used)
    for p, gradient, expected in zip(used, result, parts.sum(0).split(sizes), strict=True):
        if get_main_grad(p) is None:
            torch.testing.assert_close(gradient, expected)
        else:
            assert gradient is None
            assert p.told == [1]
            torch.testing.assert_close(get_main_grad(p), 3.0 + expected)


@SETTINGS
@given(leading, widths, dtypes, st.booleans(), st.sampled_from(["none", "tanh"]))
def test_gelu(lead, width, dtype, has_bias, approximate):
    x = 2 * random(*lead, width, dtype=dtype)
    b = random(width, dtype=dtype) if has_bias else None
    compare(
        lambda x, b: gelu(x, b, approximate),
        lambda x, b: gelu_reference(x, b, approximate),
        (x, b),
        2 * TOLERANCE[dtype],
    )
    assert dispatch.list_choices()["gelu"] == "triton"


@SETTINGS
@given(leading, widths, dtypes, st.sampled_from(["gelu", "swiglu"]))
def test_a_bias_that_is_in_already_gets_its_gradient(lead, width, dtype, kind):
    columns = width if kind == "gelu" else 2 * width
    x, b = random(*lead, columns, dtype=dtype), random(columns, dtype=dtype)
    fused, plain = (gelu, gelu_reference) if kind == "gelu" else (swiglu, swiglu_reference)
    compare(
        lambda x, b: fused((x + b.detach()).to(x.dtype), b, is_bias_added=True),
        lambda x, b: plain((x + b.detach()).to(x.dtype) + (b - b.detach())),
        (x, b),
        2 * TOLERANCE[dtype],
    )
    assert dispatch.list_choices()[kind] == "triton"


def test_gelu_of_every_bfloat16():
    """Sixteen-bit types have a shorter error function: no result may be off by more than its rounding."""
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    x = every[every.isfinite() & (every.abs() < 1e6)][None].clone().requires_grad_()
    exact = x.detach().double()
    normal = 0.5 * torch.erfc(-exact / math.sqrt(2))  # 1 + erf would cancel
    reference = exact * normal
    slope = normal + exact * torch.exp(-0.5 * exact**2) / math.sqrt(2 * math.pi)
    y = gelu(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    rounding = 2.0**-7  # the last of eight bits: the interpreter cuts where a GPU rounds
    assert ((y.double() - reference).abs() <= 1.02 * rounding * reference.abs() + 1e-37).all()
    assert ((dx.double() - slope).abs() <= rounding * slope.abs() + 1e-4).all()


@SETTINGS
@given(leading, widths, dtypes, st.booleans(), st.booleans())
def test_geglu(lead, width, dtype, has_bias, added):
    x = random(*lead, 2 * width, dtype=dtype)
    b = random(2 * width, dtype=dtype) if has_bias else None
    with_bias = added and has_bias

    def plain(x, b):
        if with_bias:
            return geglu_tanh_reference((x + b.detach()).to(x.dtype) + (b - b.detach()))
        return geglu_tanh_reference(x, b)

    compare(
        lambda x, b: activate("geglu_tanh", (x + b.detach()).to(x.dtype) if with_bias else x, b, with_bias),
        plain,
        (x, b),
        2 * TOLERANCE[dtype],
    )
    assert dispatch.list_choices()["geglu"] == "triton"


@SETTINGS
@given(leading, widths, dtypes, st.booleans())
def test_clamped_swiglu(lead, width, dtype, has_bias):
    """Inputs on both sides of both limits."""
    x = 6 * random(*lead, 2 * width, dtype=dtype)
    b = random(2 * width, dtype=dtype) if has_bias else None
    compare(lambda x, b: activate("swiglu_clamped", x, b), swiglu_clamped_reference, (x, b), 2 * TOLERANCE[dtype])
    assert dispatch.list_choices()["clamped swiglu"] == "triton"


@SETTINGS
@given(leading, norm_widths, dtypes)
def test_rms_norm_with_a_zero_centred_weight(lead, width, dtype):
    """The weight is added to 1 in float32, whose gradient is the weight's."""
    operators = NORM_OPERATORS["rmsnorm_zero_centred"]
    compare(
        lambda x, w: operators.norm(x, w, None, 1e-5),
        lambda x, w: rms_norm_reference(x, 1 + w.to(torch.promote_types(w.dtype, torch.float32)), 1e-5),
        (random(*lead, width, dtype=dtype) + 0.5, random(width, dtype=dtype)),
        5 * TOLERANCE[dtype],
    )
    assert dispatch.list_choices()["rms norm"] == "triton"


@SETTINGS
@given(leading, widths, dtypes, st.booleans())
def test_swiglu(lead, width, dtype, has_bias):
    x = random(*lead, 2 * width, dtype=dtype)
    b = random(2 * width, dtype=dtype) if has_bias else None
    compare(swiglu, swiglu_reference, (x, b), 2 * TOLERANCE[dtype])
    assert dispatch.list_choices()["swiglu"] == "triton"


@SETTINGS
@given(st.sampled_from([1, 5, 16, 1000]), widths, dtypes)
def test_column_sum_alone_and_accumulated(rows, width, dtype):
    x = random(rows, width, dtype=dtype)
    exact = x.double().sum(0)
    scale = x.double().abs().sum(0).norm()  # a sum may cancel
    assert (sum_columns(x).double() - exact).norm() <= TOLERANCE[dtype] * scale
    out = torch.ones(width)
    sum_columns(x, out)
    assert (out.double() - exact - 1).norm() <= TOLERANCE[torch.float32] * (scale + width**0.5)
