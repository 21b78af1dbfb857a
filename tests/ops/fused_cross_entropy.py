"""Cross-entropy kernels through Triton's interpreter against the float64 reference."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.ops import dispatch
from megascale.ops.cross_entropy import (
    compute_local_gradient_,
    compute_local_statistics,
    cross_entropy,
    linear_cross_entropy,
)
from tests.ops.tools import TOLERANCE, distance

SETTINGS = settings(max_examples=12, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


@SETTINGS
@given(
    tokens=st.integers(1, 9),
    sizes=st.sampled_from([(5, 5), (64, 50), (130, 130), (5000, 4999)]),
    chunk=st.sampled_from([None, 1, 4]),
    has_bias=st.booleans(),
    promised=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_linear_cross_entropy(tokens, sizes, chunk, has_bias, promised, dtype):
    (rows, vocab), H = sizes, 16
    x = torch.randn(tokens, H).to(dtype).requires_grad_()
    w = torch.randn(rows, H).to(dtype).requires_grad_()
    b = torch.randn(rows).to(dtype).requires_grad_() if has_bias else None
    targets = torch.randint(0, vocab, (tokens,))
    targets[tokens // 2] = -100
    upstream = torch.rand(tokens)
    inputs = [t for t in (x, w, b) if t is not None]
    loss = linear_cross_entropy(
        x, w, targets, bias=b, vocab=vocab, chunk=chunk, token_grad=upstream if promised else None
    )
    grads = torch.autograd.grad(loss, inputs, upstream)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    logits = wide[0] @ wide[1].t() + (wide[2] if has_bias else 0)
    want = cross_entropy(logits, targets, vocab)
    expected = torch.autograd.grad(want, wide, upstream.double())
    # Logits are rounded to bfloat16 as any bf16 head's are: an error of 2^-9 of a logit of about 4 sigma.
    tolerance = 5 * TOLERANCE[dtype]
    assert (loss - want).abs().max() <= tolerance * max(1, logits.abs().max().item())
    for a, c in zip(grads, expected, strict=True):
        assert distance(a, c) <= tolerance
    assert dispatch.list_choices()["cross entropy"] == "triton"


def test_pieces_on_a_shard_match_the_reference():
    logits = torch.randn(6, 40)
    targets = torch.tensor([0, 10, 24, 30, 59, -100])
    for start, valid in ((10, 40), (10, 15), (60, 0)):
        fused = compute_local_statistics(logits, targets, start, valid)
        lse, scale = torch.randn(6) + 4, torch.rand(6)
        fused_grad = compute_local_gradient_(logits.clone(), targets, lse, scale, start, valid)
        with dispatch.Kernels("reference").as_current():
            plain = compute_local_statistics(logits, targets, start, valid)
            plain_grad = compute_local_gradient_(logits.clone(), targets, lse, scale, start, valid)
        for a, b in zip(fused, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(fused_grad, plain_grad, rtol=1e-5, atol=1e-6)
