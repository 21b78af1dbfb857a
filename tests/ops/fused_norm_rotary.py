"""The split with norms and rotations of heads through Triton's interpreter against its float64 reference."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.ops import dispatch
from megascale.ops.gradient_sink import GradientSink, SinkParameter, attach
from megascale.ops.norm_rotary import split_norm_rotary, split_norm_rotary_reference
from megascale.ops.rope import allocate_qkv_gradients, make_rotary_tables
from tests.ops.tools import TOLERANCE, compare, distance

EPS = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


def make_tables(tokens, width, batch, has_positions):
    cos, sin = make_rotary_tables(tokens, width, 100.0, "cpu")
    if has_positions:
        positions = torch.randint(0, tokens, (tokens, batch))
        cos, sin = cos[positions], sin[positions]
    return cos, sin


@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 1)]),
    sizes=st.sampled_from([(16, 16), (20, 6), (24, 24)]),
    interleaved=st.booleans(),
    has_positions=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_heads_are_normed_and_rotated(shape, heads, sizes, interleaved, has_positions, dtype):
    (S, B), (N, G), (D, R) = shape, heads, sizes
    cos, sin = make_tables(S, R, B, has_positions)
    x = torch.randn(S, B, (N + 2 * G) * D).to(dtype)
    q_weight, k_weight = (torch.rand(D).to(dtype) + 0.5 for _ in range(2))

    def joined(function):
        def run(qkv, q_scale, k_scale):
            parts = function(qkv * 1.0, N, G, q_scale, k_scale, EPS, cos, sin, interleaved)
            return torch.cat([(i + 1) * part.flatten(2) for i, part in enumerate(parts)], dim=-1)

        return run

    compare(
        joined(split_norm_rotary), joined(split_norm_rotary_reference), (x, q_weight, k_weight), 2 * TOLERANCE[dtype]
    )
    assert dispatch.list_choices()["split, norm and rotary"] == "triton"


def test_packed_gradients_change_in_place_and_weights_have_sinks():
    S, B, N, G, D = 3, 2, 4, 2, 16
    cos, sin = make_tables(S, D, B, False)
    x = torch.randn(S, B, (N + 2 * G) * D, requires_grad=True)
    weights = [SinkParameter(torch.rand(D) + 0.5) for _ in range(2)]
    for weight in weights:
        attach(weight, GradientSink(torch.ones(D)))
    q, k, v = split_norm_rotary(x, N, G, *weights, EPS, cos, sin)
    grads = allocate_qkv_gradients(q, k)
    upstream = [torch.randn(grad.shape) for grad in grads]
    for grad, value in zip(grads, upstream, strict=True):
        grad.copy_(value)
    torch.autograd.backward((q, k, v), grads)

    exact = [x.detach().double().requires_grad_(), *(w.detach().double().requires_grad_() for w in weights)]
    parts = split_norm_rotary_reference(exact[0], N, G, exact[1], exact[2], EPS, cos, sin, False)
    torch.autograd.backward(parts, [value.double() for value in upstream])
    assert distance(x.grad, exact[0].grad) < 1e-6
    for weight, expected in zip(weights, exact[1:], strict=True):
        assert weight.grad is None
        assert distance(weight.gradient_sink.main_grad, 1.0 + expected.grad) < 1e-6
