"""Rotary positions and the QKV split through Triton's interpreter against float64 references."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.ops import dispatch
from megascale.ops.activation import RecomputedActivation, gelu, swiglu
from megascale.ops.fused_projection import split_fused_projection
from megascale.ops.gradient_sink import GradientSink, SinkParameter, attach, get_main_grad
from megascale.ops.rope import (
    apply_rotary,
    apply_rotary_reference,
    find_packed_gradients,
    make_rotary_tables,
    split_qkv,
)
from megascale.parallel.linear import DEFAULT_PRECISION
from megascale.parallel.tensor import linear_scatter
from tests.ops.tools import TOLERANCE, compare, distance

SETTINGS = settings(max_examples=10, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


@SETTINGS
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5)),
    sizes=st.sampled_from([(2, 2), (6, 2), (16, 16), (20, 6), (24, 24), (40, 12)]),
    interleaved=st.booleans(),
    offset=st.integers(0, 9),
    has_positions=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_apply_rotary_on_a_strided_view(shape, sizes, interleaved, offset, has_positions, dtype):
    (S, B, N), (D, R) = shape, sizes
    cos, sin = (t[offset : offset + S] for t in make_rotary_tables(20, R, 100.0, "cpu"))
    if has_positions:
        cos, sin = _at_positions(cos, sin, B)
    base = torch.randn(S, B, N + 2, D).to(dtype)

    def on_view(function):
        return lambda x: function(x[:, :, 1 : N + 1], cos, sin, interleaved)

    compare(on_view(apply_rotary), on_view(apply_rotary_reference), (base,), TOLERANCE[dtype])
    assert dispatch.list_choices()["rotary"] == "triton"


def _at_positions(cos, sin, batch):
    """Tables [S, batch, ...] of samples that each have positions of their own."""
    positions = torch.randint(0, len(cos), (len(cos), batch))
    return cos[positions], sin[positions]


def _joined(parts):
    """q, k, v as one output, each scaled apart so that a swap shows."""
    return torch.cat([(i + 1) * t.flatten(2) for i, t in enumerate(parts)], dim=-1)


@SETTINGS
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 1)]),
    sizes=st.sampled_from([(6, 0), (16, 16), (20, 6), (24, 24)]),
    interleaved=st.booleans(),
    has_positions=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_split_qkv(shape, heads, sizes, interleaved, has_positions, dtype):
    (S, B), (N, G), (D, R) = shape, heads, sizes
    tables = make_rotary_tables(S, R, 100.0, "cpu") if R else (None, None)
    if R and has_positions:
        tables = _at_positions(*tables, B)
    x = torch.randn(S, B, (N + 2 * G) * D).to(dtype)

    def split(qkv):
        # A projection's output: nobody else reads it, so it may be turned in place. Float64 takes the reference.
        return _joined(split_qkv(qkv * 1.0, N, G, *tables, interleaved))

    compare(split, split, (x,), TOLERANCE[dtype])


def test_split_qkv_returns_views_of_its_input_and_takes_packed_gradients_without_a_copy():
    qkv = torch.randn(3, 2, 8 * 6, requires_grad=True)
    inner = qkv * 1.0
    parts = split_qkv(inner, 4, 2, *make_rotary_tables(3, 6, 100.0, "cpu"))
    assert all(t.untyped_storage().data_ptr() == inner.untyped_storage().data_ptr() for t in parts)
    written = torch.randn(3, 2, 8, 6)
    address, retained = written.data_ptr(), written.clone()
    observed = []
    inner.register_hook(lambda g: observed.append(g.data_ptr()))
    torch.autograd.backward(parts, written.split((4, 2, 2), dim=2))
    assert observed == [address]
    want = retained.clone()
    want[:, :, :6] = apply_rotary_reference(
        retained[:, :, :6], *_opposite(make_rotary_tables(3, 6, 100.0, "cpu")), False
    )
    assert distance(qkv.grad, want.flatten(2)) < 1e-6


def _opposite(tables):
    return tables[0], -tables[1]


def test_packed_refuses_what_is_not_one_tensor():
    full = torch.randn(3, 2, 8, 6)
    assert find_packed_gradients(full.split((4, 2, 2), dim=2)).data_ptr() == full.data_ptr()
    q, k, v = full.split((4, 2, 2), dim=2)
    assert find_packed_gradients((q, v, k)) is None
    assert find_packed_gradients((q, k.clone(), v)) is None
    assert find_packed_gradients(tuple(t.contiguous() for t in (q, k, v))) is None


@SETTINGS
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    sizes=st.sampled_from([(6, 0), (16, 16), (20, 6)]),
    ffn=st.sampled_from([1, 24, 50]),
    activation=st.sampled_from(["gelu", "gelu_tanh", "swiglu", "geglu_tanh"]),
    has_bias=st.sampled_from(["no", "mlp", "wide"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_split_fused_projection(shape, heads, sizes, ffn, activation, has_bias, dtype):
    (S, B), (N, G), (D, R) = shape, heads, sizes
    columns = 2 * ffn if "glu" in activation else ffn
    tables = make_rotary_tables(S, R, 100.0, "cpu") if R else (None, None)
    x = torch.randn(S, B, (N + 2 * G) * D + columns).to(dtype)
    bias = None if has_bias == "no" else torch.randn(columns if has_bias == "mlp" else x.shape[-1]).to(dtype)

    def split(wide, bias):
        mlp, full = (None, bias) if has_bias == "wide" else (bias, None)
        *parts, inner, _ = split_fused_projection(wide * 1.0, N, G, D, activation, mlp, *tables, True, full)
        return torch.cat([_joined(parts), 4 * inner], dim=-1)

    # A bias of one column has a gradient of one sum, whose terms may cancel.
    compare(split, split, (x, bias), 4 * TOLERANCE[dtype])
    assert dispatch.list_choices()["split fused projection"] == "reference (float64)"  # the second of the two


@SETTINGS
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    ffn=st.sampled_from([1, 24, 50]),
    activation=st.sampled_from(["gelu", "gelu_tanh", "swiglu", "geglu_tanh"]),
    has_bias=st.sampled_from(["no", "mlp", "wide"]),
    collected=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_an_activation_made_again_gives_the_bits_of_one_that_was_kept(
    shape, ffn, activation, has_bias, collected, dtype
):
    (S, B), (N, G, D, R) = shape, (4, 2, 16, 8)
    columns = 2 * ffn if "glu" in activation else ffn
    tables = make_rotary_tables(S, R, 100.0, "cpu")
    inputs = torch.randn(S, B, (N + 2 * G) * D + columns).to(dtype)
    weight = torch.randn(12, ffn).to(dtype)
    bias = None if has_bias == "no" else torch.randn(columns if has_bias == "mlp" else inputs.shape[-1]).to(dtype)

    def run(repeated: bool) -> list[torch.Tensor | None]:
        x, w = inputs.clone().requires_grad_(), weight.clone().requires_grad_()
        b = None if bias is None else SinkParameter(bias.clone())
        if collected and b is not None:
            attach(b, GradientSink(torch.ones(b.shape)))
        locations = (None, b) if has_bias == "wide" else (b, None)
        parts = (x * 1.0, N, G, D, activation, locations[0]) + tables + (True, locations[1])
        *qkv, inner, produce = split_fused_projection(*parts, repeated)
        assert (produce is not None) == repeated
        y = linear_scatter(DEFAULT_PRECISION, inner, w, recompute_fns=(produce,))
        (y.square().sum() + _joined(qkv).square().sum()).backward()
        return [y.detach(), x.grad, w.grad, None if b is None else get_main_grad(b) if collected else b.grad]

    for retained, built in zip(run(False), run(True), strict=True):
        assert (retained is None and built is None) or torch.equal(retained, built)
    assert dispatch.list_choices()["split fused projection"] == "triton"


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_the_activation_of_a_gemm_of_its_own_recomputed(kind, added):
    weight = torch.randn(12, 20)

    def run(repeated: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        x = torch.randn(5, 2, 40 if kind == "swiglu" else 20).requires_grad_()
        w, b = weight.clone().requires_grad_(), torch.randn(x.shape[-1]).requires_grad_()
        activate = RecomputedActivation(kind, b, added)
        if repeated:
            y = linear_scatter(DEFAULT_PRECISION, x, w, recompute_fns=(activate,))
        else:
            y = linear_scatter(DEFAULT_PRECISION, (swiglu if kind == "swiglu" else gelu)(x, b, is_bias_added=added), w)
        y.square().sum().backward()
        return [y.detach(), x.grad, w.grad, b.grad]

    for retained, built in zip(run(False), run(True), strict=True):
        assert torch.equal(retained, built)
