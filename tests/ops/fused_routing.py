"""Kernels of routing against plain PyTorch: ties, experts of other ranks and without tokens, too small a capacity."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config.experts_section import ExpertsConfig
from megascale.ops import dispatch
from megascale.ops.gradient_sink import GradientSink
from megascale.ops.grouped_linear import add_matrix_gradients, run_experts, run_experts_backward
from megascale.ops.linear import Operand
from megascale.ops.routing import (
    RowLimit,
    combine_rows,
    compute_router_logits,
    count_choices_by_expert,
    count_choices_by_sequence,
    plan_rows,
    select_experts,
)
from megascale.ops.routing_kernels import FUSED_ACTIVATIONS, sort_choices, split_float32
from tests.ops.tools import TOLERANCE, distance

REFERENCE = dispatch.Kernels("reference")


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


def draw_indices(seed: int, tokens: int, number: int, top_k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, number, generator=generator).argsort(1)[:, :top_k].contiguous()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    tokens=st.integers(1, 40),
    number=st.sampled_from([2, 3, 16, 33]),
    levels=st.sampled_from([1, 2, 5, 1000]),
    with_bias=st.booleans(),
    with_nan=st.booleans(),
)
def test_the_best_experts_are_those_of_a_stable_sort(seed, tokens, number, levels, with_bias, with_nan):
    generator = torch.Generator().manual_seed(seed)
    experts = ExpertsConfig(number=number, top_k=min(number, 3))
    scores = torch.randint(0, levels, (tokens, 1, number), generator=generator) / levels
    if with_nan:
        scores[0, 0, number // 2] = torch.nan
    bias = torch.randint(-2, 2, (number,), generator=generator) / 4 if with_bias else None
    indices = select_experts(scores, experts, bias)
    with REFERENCE.as_current():
        expected = select_experts(scores, experts, bias)
    assert torch.equal(indices, expected)
    assert torch.equal(count_choices_by_expert(scores, indices), count_choices_by_sequence(expected, number).sum(0))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    tokens=st.sampled_from([1, 7, 300]),
    ranks=st.integers(1, 3),
    local=st.integers(1, 5),
)
def test_a_plan_has_the_rows_of_a_stable_sort(seed, tokens, ranks, local):
    number = ranks * local
    indices = draw_indices(seed, tokens, number, min(3, number))
    weights = torch.ones(indices.shape)
    for rank in range(ranks):
        plan = plan_rows(indices, rank * local, local, weights, number)
        with REFERENCE.as_current():
            expected = plan_rows(indices, rank * local, local, weights, number)
        assert torch.equal(plan.offsets, expected.offsets)
        assert torch.equal(plan.row_tokens, expected.row_tokens)
        assert torch.equal(plan.row_slots, expected.row_slots)
        assert torch.equal(plan.rows_TK.clamp(max=len(plan.row_tokens)), expected.rows_TK)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), tokens=st.integers(1, 20), rows=st.integers(0, 30))
def test_choices_beyond_the_capacity_get_no_row(seed, tokens, rows):
    indices = draw_indices(seed, tokens, 4, 2)
    offsets, token, slot, row, needed = sort_choices(indices, 0, 4, rows)
    expected_offsets, expected_token, expected_slot, expected_row, _ = sort_choices(indices, 0, 4, 2 * tokens)
    used = min(rows, 2 * tokens)
    assert int(needed) == 2 * tokens
    assert torch.equal(offsets, expected_offsets.clamp(max=rows))
    assert torch.equal(token[:used], expected_token[:used])
    assert torch.equal(slot[:used], expected_slot[:used])
    assert torch.equal(row, expected_row.clamp(max=rows))


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    width=st.sampled_from([16, 24]),
    kind=st.sampled_from(sorted(FUSED_ACTIVATIONS)),
    ranks=st.sampled_from([1, 2]),
)
def test_experts_agree_with_the_loop_in_float64(seed, dtype, width, kind, ranks):
    """Outputs and gradients of two of the four experts, or of all of them."""
    generator = torch.Generator().manual_seed(seed)
    tokens, hidden, number, top_k = 13, 16, 4, 2
    local = number // ranks
    matrices = 2 if FUSED_ACTIVATIONS[kind][0] else 1
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    dy = torch.randn(tokens, hidden, generator=generator).to(dtype)
    weights = torch.rand(tokens, top_k, generator=generator)
    into = torch.randn(local, matrices, width, hidden, generator=generator).to(dtype) / 4
    out = torch.randn(local, hidden, width, generator=generator).to(dtype) / 4
    indices = draw_indices(seed, tokens, number, top_k)

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        x, dy, weights, into, out = tensors
        for parameter in (into, out):
            wide = torch.promote_types(parameter.dtype, torch.float32)
            parameter.gradient_sink = GradientSink(torch.zeros(parameter.shape, dtype=wide), lambda: None)
        plan = plan_rows(indices, number - local, local, weights, number)
        y, inner = run_experts(Operand(x), weights, plan, into, out, kind)
        rows = run_experts_backward(dy, weights, inner, plan, into, out, kind)
        add_matrix_gradients(rows, x, plan, into, out)
        return [y, rows.x_TH, rows.weights_TK, into.gradient_sink.main_grad, out.gradient_sink.main_grad]

    results = run(x, dy, weights, into, out)
    with REFERENCE.as_current():
        expected = run(*(tensor.double() for tensor in (x, dy, weights, into, out)))
    for result, reference in zip(results, expected, strict=True):
        assert distance(result, reference) <= 2 * TOLERANCE[dtype]
    assert dispatch.list_choices()["sum over experts"] == "triton"
    assert dispatch.list_choices()["gradient of experts' activation"] == "triton"


def test_a_rank_without_tokens_adds_zeros():
    indices = torch.tensor([[0, 1], [1, 0]])
    weights = torch.ones(2, 2)
    plan = plan_rows(indices, 2, 2, weights, 4)
    assert len(plan.row_tokens) == 0
    assert torch.equal(combine_rows(torch.empty(0, 8), plan, weights), torch.zeros(2, 8))


def test_an_activation_without_a_gradient_kernel_reads_no_undefined_index():
    """A limited plan has undefined indices beyond the last offset, and swiglu_clamped has no kernel that skips them."""
    kind = "swiglu_clamped"
    assert kind not in FUSED_ACTIVATIONS
    generator = torch.Generator().manual_seed(0)
    indices = torch.tensor([[0, 1], [2, 3], [0, 2]])
    x = torch.randn(3, 16, generator=generator)
    weights = torch.rand(3, 2, generator=generator)
    into = torch.randn(2, 2, 16, 16, generator=generator).requires_grad_()
    out = torch.randn(2, 16, 16, generator=generator).requires_grad_()
    results = []
    for limit in (None, RowLimit(6, torch.zeros((), dtype=torch.bool))):
        plan = plan_rows(indices, 0, 2, weights, 4, limit)
        used = int(plan.offsets[-1])
        plan.row_tokens[used:] = -1_000_000
        plan.row_slots[used:] = 1_000_000
        y, inner = run_experts(Operand(x), weights, plan, into, out, kind)
        rows = run_experts_backward(x, weights, inner, plan, into, out, kind)
        results.append((y, rows.x_TH, rows.weights_TK, *add_matrix_gradients(rows, x, plan, into, out)))
    assert len(plan.row_tokens) > used
    for exact, limited in zip(*results, strict=True):
        assert torch.equal(exact, limited)


def test_a_rank_that_received_no_tokens_has_an_empty_plan():
    indices = torch.empty(0, 2, dtype=torch.int64)
    plan = plan_rows(indices, 2, 2, torch.empty(0, 2), 4)
    assert plan.offsets.tolist() == [0, 0, 0]
    assert (plan.row_tokens.shape, plan.row_slots.shape, plan.rows_TK.shape) == ((0,), (0,), (0, 2))
    assert combine_rows(torch.empty(0, 8), plan).shape == (0, 8)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999), columns=st.sampled_from([3, 16]), exponent=st.integers(-30, 30))
def test_three_parts_have_the_bits_of_float32(seed, columns, exponent):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, columns, generator=generator) * 2.0**exponent
    parts = split_float32(x).double().view(5, 3, columns)
    assert torch.equal(parts.sum(1), x.double())


@pytest.mark.parametrize("has_sink", [False, True])
def test_gradients_of_the_router_have_the_precision_of_float32(has_sink):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 32, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(4, 32, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(6, 2, 4, generator=generator)
    main_grad = torch.ones(4, 32)
    if has_sink:
        weight.gradient_sink = GradientSink(main_grad, lambda: None)
    logits = compute_router_logits(x, weight)
    logits.backward(dy)
    expected = x.detach().double() @ weight.detach().double().t()
    assert logits.dtype == torch.float32
    assert distance(logits, expected) <= TOLERANCE[torch.float32]
    assert distance(x.grad, dy.double() @ weight.detach().double()) <= TOLERANCE[torch.bfloat16]
    gradient = dy.double().flatten(0, 1).t() @ x.detach().double().flatten(0, 1)
    if has_sink:
        assert distance(main_grad, gradient + 1) <= TOLERANCE[torch.float32]
    else:
        assert distance(weight.grad, gradient) <= TOLERANCE[torch.bfloat16]


def test_logits_are_float32_where_no_gemm_has_a_float32_result():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 64, generator=generator).bfloat16()
    weight = torch.randn(4, 64, generator=generator).bfloat16()
    kernels = dispatch.Kernels("fused")
    kernels.wide_gemm = False
    with kernels.as_current():
        logits = compute_router_logits(x, weight)
    assert distance(logits, x.double() @ weight.double().t()) <= TOLERANCE[torch.float32]
