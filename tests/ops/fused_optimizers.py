"""AdamW, LAMB and segmented sums through Triton's interpreter against the float64 references."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.ops import dispatch
from megascale.ops.adam import adamw_apply, adamw_apply_reference
from megascale.ops.lamb import lamb_apply, lamb_apply_reference, lamb_direction, lamb_direction_reference
from megascale.ops.segments import Segments
from tests.ops.tools import distance

SETTINGS = settings(max_examples=8, deadline=None)
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


@st.composite
def tables(draw):
    """Segments of odd and even sizes, some longer than a tile, with gaps, tensors in pieces and an absent id."""
    rows, at = [], 0
    for _ in range(draw(st.integers(1, 4))):
        at += draw(st.sampled_from([0, 0, 3, 64]))
        size = draw(st.sampled_from([1, 64, 1000, 4096, 9000]))
        rows.append((at, at + size, draw(st.booleans()), draw(st.integers(0, 2))))
        at += size
    return Segments(rows, 4, "cpu"), at + draw(st.sampled_from([0, 5]))


def shard(n, out_dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(n)
    master, m, grad = (torch.randn(n, generator=g) for _ in range(3))
    v = torch.rand(n, generator=g) + 0.01
    return master, m * 0.1, v, grad, torch.zeros(n, dtype=out_dtype)


def wide(tensors):
    return [t.double() for t in tensors]


@SETTINGS
@given(tables(), st.booleans(), st.booleans(), st.booleans())
def test_adamw(table, on_device, scaled, skipped):
    segments, n = table
    state = shard(n)
    before = [t.clone() for t in state]
    exact = wide(state)
    options = {"segments": segments, "grad_scale": torch.tensor(0.3) if scaled else None, **ADAM}
    numbers = {"lr": 0.02, "step": 3}
    given_numbers = {k: torch.tensor(v) for k, v in numbers.items()} if on_device else numbers
    adamw_apply(*state, **given_numbers, **options, skip=torch.tensor(skipped))
    assert dispatch.list_choices()["adamw"] == "triton"
    if skipped:
        assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
        return
    adamw_apply_reference(*exact, **numbers, **options)
    for name, a, b in zip(("master", "exp_avg", "exp_avg_sq", "grad"), state, exact, strict=False):
        assert distance(a, b) < 1e-6, name
    assert distance(state[4], exact[4]) < 8e-3
    inside = torch.zeros(n, dtype=torch.bool)
    for row in segments.ranges:
        inside[row.start : row.stop] = True
    assert all(torch.equal(a[~inside], b[~inside]) for a, b in zip(state, before, strict=True)), "padding was touched"


@SETTINGS
@given(tables(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.5, 10.0, math.inf]))
def test_lamb(table, on_device, corrected, skipped, most):
    segments, n = table
    state = shard(n)
    before = [t.clone() for t in state]
    exact = wide(state)
    direction = {"segments": segments, "bias_correction": corrected, "grad_scale": torch.tensor(0.5), **ADAM}
    trust = {"trust_min": 0.0, "trust_max": most, "segments": segments}
    skip = torch.tensor(skipped)
    master, m, v, grad, out = state
    step, lr = (torch.tensor(2), torch.tensor(0.02)) if on_device else (2, 0.02)
    sums = lamb_direction(master, m, v, grad, grad, step=step, skip=skip, **direction)
    lamb_apply(master, grad, out, sums, lr=lr, skip=skip, **trust)
    assert dispatch.list_choices()["lamb"] == "triton"
    if skipped:
        assert all(
            torch.equal(a, b) for a, b in zip((master, m, v, out), tuple(before[:3]) + (before[4],), strict=True)
        )
        return
    master64, m64, v64, grad64, out64 = exact
    sums64 = lamb_direction_reference(master64, m64, v64, grad64, grad64, step=2, **direction)
    lamb_apply_reference(master64, grad64, out64, sums64, lr=0.02, **trust)
    assert distance(sums, sums64) < 1e-6
    assert sums[:, 3].eq(0).all(), "no element of tensor 3 is here"
    for name, a, b in (("m", m, m64), ("v", v, v64), ("update", grad, grad64), ("master", master, master64)):
        assert distance(a, b) < 2e-6, name
    assert distance(out, out64) < 8e-3


def test_trust_ratio_is_one_for_zero_weights():
    segments = Segments([(0, 10, False, 0)], 1, "cpu")
    master, update = torch.zeros(10), torch.ones(10)
    sums = torch.tensor([[0.0], [10.0]], dtype=torch.float64)
    lamb_apply(master, update, None, sums, lr=0.5, trust_min=0.0, trust_max=10.0, segments=segments)
    assert master.eq(-0.5).all()
