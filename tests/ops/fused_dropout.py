"""Dropout through Triton's interpreter: the reference's own bits, with bias and residual in the same pass."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.ops import dispatch
from megascale.ops.dropout import dropout, dropout_add, make_dropout_key, make_keep_mask_reference
from tests.ops.tools import TOLERANCE, compare

SETTINGS = settings(max_examples=10, deadline=None)
shapes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.sampled_from([1, 3, 8, 50, 130]))
starts = st.tuples(st.integers(0, 5000), st.integers(0, 2**31 - 10))


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


@SETTINGS
@given(shapes, starts, st.integers(0, 2**62 - 1), st.sampled_from([0.01, 0.1, 0.5]), st.booleans())
def test_kernel_draws_the_bits_of_the_reference(shape, start, key, p, on_device):
    x = torch.ones(shape, requires_grad=True)
    given_key = torch.tensor([key]) if on_device else key
    given_sample = torch.tensor([start[1]]) if on_device else start[1]
    y = dropout(x, p, given_key, start[0], given_sample)
    keep = make_keep_mask_reference(x.shape, p, key, *start, x.device)
    assert torch.equal(y != 0, keep)
    y.sum().backward()
    assert torch.equal(x.grad, y)
    assert dispatch.list_choices()["dropout"] == "triton"


@SETTINGS
@given(
    shapes, starts, st.sampled_from([0.0, 0.1, 0.5]), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_dropout_add(shape, start, p, has_bias, dtype):
    key = make_dropout_key(3, *start)
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    bias = torch.randn(shape[-1]).to(dtype) if has_bias else None

    def run(x, bias, residual):
        return dropout_add(x, bias, residual, p, key, *start)

    compare(run, run, (x, bias, residual), TOLERANCE[dtype])
    assert dispatch.list_choices()["dropout add"] == "reference (float64)"  # the second of the two
