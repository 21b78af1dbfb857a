"""Experts in float8 through Triton's interpreter: casts of stacks and activations, grouped GEMMs, whole layers."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted  # noqa: F401

# isort: split
from itertools import accumulate
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.ops import dispatch
from megascale.ops.expert_gemms import ExpertGemms, Float8ExpertGemms
from megascale.ops.float8 import grouped, stacks
from megascale.ops.float8.cast import cast_rows
from megascale.ops.float8.formats import E4M3, Float8, dequantise
from megascale.ops.float8.grouped import multiply_float8_groups, multiply_float8_groups_reference
from megascale.ops.float8.stacks import cast_activation, cast_stack
from megascale.ops.gradient_sink import GradientSink
from megascale.ops.grouped_linear import add_matrix_gradients, run_experts, run_experts_backward
from megascale.ops.grouped_tiles import Tiling
from megascale.ops.routing import plan_rows
from tests.ops.tools import TOLERANCE, distance

TILING = Tiling(rows=16, columns=16, inner=32, grouped_rows=3)
COUNTS = st.lists(st.sampled_from([0, 0, 1, 5, 16, 17]), min_size=1, max_size=4)
REFERENCE = dispatch.Kernels("reference")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _fused():
    with dispatch.Kernels("fused").as_current():
        yield


def make_offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def draw(*shape: int, seed: int, hole: float | None = None) -> torch.Tensor:
    """Return Gaussians whose rows and columns differ in size, perhaps with a first number that is not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.randn(*shape[:-1], 1, generator=generator).mul(3).exp2()
    x *= torch.randn(shape[-1], generator=generator).mul(3).exp2()
    x[..., : shape[-1] // 8] = 0
    if hole is not None:
        x.view(-1)[0] = hole
    return x.to(BF16)


def read(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return dequantised numbers in float64."""
    return dequantise(rows, scale, torch.float64)


def assert_equal_casts(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bytes. All NaN count as equal."""
    assert result.dtype == expected.dtype == E4M3.dtype
    assert torch.equal(result.float().nan_to_num(1e4), expected.float().nan_to_num(1e4))


@settings(max_examples=6, deadline=None)
@given(
    shape=st.sampled_from([(1, 16, 16), (3, 40, 24), (2, 140, 72)]),
    hole=st.sampled_from([None, float("inf"), float("nan")]),
    seed=st.integers(0, 99),
)
def test_stacks_are_cast_like_their_matrices(shape, hole, seed):
    stack = draw(*shape, seed=seed, hole=hole)
    with mock.patch.object(stacks, "AMAX_PROGRAM_ROWS", 16):
        cast = cast_stack(stack)
    assert dispatch.list_choices()["float8 cast of stacks"] == "triton"
    for index, matrix in enumerate(stack):
        with REFERENCE.as_current():
            expected = cast_rows(matrix, E4M3, columns=True)
        assert_equal_casts(cast.rows[index], expected.rows)
        assert_equal_casts(cast.columns[index], expected.columns)
        assert torch.equal(cast.rows_scale[index], expected.rows_scale)
        assert torch.equal(cast.columns_scale[index], expected.columns_scale)


@settings(max_examples=8, deadline=None)
@given(
    rows=st.sampled_from([1, 7]),
    width=st.sampled_from([8, 48, 100]),
    kind=st.sampled_from(["swiglu", "geglu_tanh", "gelu"]),
    hole=st.sampled_from([None, float("inf"), float("nan")]),
    seed=st.integers(0, 99),
)
def test_activations_are_cast_by_row(rows, width, kind, hole, seed):
    inner = draw(rows, width * (1 if kind == "gelu" else 2), seed=seed, hole=hole)
    with mock.patch.object(stacks, "ACTIVATION_BLOCK", 32):
        activated, scale = cast_activation(kind, inner)
    with REFERENCE.as_current():
        expected, expected_scale = cast_activation(kind, inner)
    is_finite = expected.float().isfinite().all(1)
    assert torch.equal(activated.float().isfinite().all(1), is_finite)
    assert is_finite[1:].all()
    assert hole is None or not is_finite[0]
    # Kernel and reference may round the activation to neighbours in bfloat16, and these to neighbours in E4M3: 1/8 of
    # the number, or 2^-9 of its scale if it is subnormal.
    result, reference = read(activated, scale)[is_finite], read(expected, expected_scale)[is_finite]
    step = torch.maximum(result.abs(), reference.abs()) / 8 + expected_scale[is_finite].double() * 2.0**-8
    assert result.shape == (int(is_finite.sum()), width)
    assert ((result - reference).abs() <= step).all()


@settings(max_examples=20, deadline=None)
@given(
    counts=COUNTS,
    spare=st.sampled_from([0, 7]),
    sizes=st.sampled_from([(16, 32), (24, 48), (40, 16), (48, 80)]),
    precise=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_meet_the_matrix_of_their_group(counts, spare, sizes, precise, seed):
    """Groups may be empty, and neither rows nor sizes of matrices need to divide by the tile's."""
    columns, inner = sizes
    offsets, rows = make_offsets(counts), sum(counts) + spare
    x = cast_rows(draw(rows, inner, seed=seed), E4M3)
    matrices = cast_stack(draw(len(counts), columns, inner, seed=seed + 1))
    factors = x.rows, x.rows_scale, matrices.rows, matrices.rows_scale, offsets
    result = multiply_float8_groups(*factors, dtype=BF16, tiling=TILING, precise=precise)
    expected = multiply_float8_groups_reference(*factors, torch.float64)
    used = sum(counts)
    assert result.dtype == BF16
    assert distance(result[:used], expected[:used]) <= TOLERANCE[BF16]
    if rows:
        assert dispatch.list_choices()[f"experts' rows in float8, {inner} to {columns}"] == "by tensor descriptors"


@pytest.mark.parametrize(
    ("columns", "inner", "expected"),
    [(12, 16, "reference (descriptors need 8 columns"), (16, 24, "reference (descriptors need 8 columns")],
)
def test_sizes_that_descriptors_refuse_use_the_reference(columns, inner, expected):
    offsets = make_offsets([5, 4])
    x, matrices = cast_rows(draw(9, inner, seed=1), E4M3), cast_stack(draw(2, columns, inner, seed=2))
    factors = x.rows, x.rows_scale, matrices.rows, matrices.rows_scale, offsets
    result = multiply_float8_groups(*factors, dtype=BF16, tiling=TILING)
    assert torch.equal(result, multiply_float8_groups_reference(*factors, BF16))
    assert dispatch.list_choices()[f"experts' rows in float8, {inner} to {columns}"].startswith(expected)


@pytest.mark.parametrize("hole", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_spoils_itself_only(hole):
    offsets = make_offsets([3, 6])
    x, matrices = draw(9, 32, seed=1), cast_stack(draw(2, 16, 32, seed=2))
    x[4, 7] = hole
    cast = cast_rows(x, E4M3)
    factors = cast.rows, cast.rows_scale, matrices.rows, matrices.rows_scale, offsets
    y = multiply_float8_groups(*factors, dtype=BF16, tiling=TILING)
    assert y[4].isnan().all()
    assert y[torch.arange(9) != 4].isfinite().all()


@pytest.mark.parametrize("tiling", [grouped.FLOAT8_TILING, grouped.PRECISE_TILING])
def test_tiles_fit_the_shared_memory_of_hopper(tiling):
    assert tiling.count_shared_bytes(1, 2) + 2048 <= 232_448
    assert tiling.inner == 128  # bytes of one row of a block, the widest swizzle of shared memory


def make_gemms() -> Float8ExpertGemms:
    casts: dict[int, Float8] = {}

    def get_stack(parameter: torch.Tensor) -> Float8:
        if id(parameter) not in casts:
            casts[id(parameter)] = cast_stack(parameter.detach().flatten(1, -2))
        return casts[id(parameter)]

    return Float8ExpertGemms(get_stack, lambda x: None)


@pytest.mark.parametrize(("kind", "ranks"), [("swiglu", 1), ("gelu", 2)])
def test_a_layer_errs_like_the_reference(kind, ranks):
    """Compare outputs and gradients of all four experts, or of two of them, with float64 without float8.

    The interpreter truncates to bfloat16, so kernels and reference round many numbers to other neighbours in E4M3.
    """
    generator = torch.Generator().manual_seed(1)
    tokens, hidden, width, number, top_k = 13, 32, 48, 4, 2
    local = number // ranks
    matrices = 2 if kind == "swiglu" else 1
    x = torch.randn(tokens, hidden, generator=generator).to(BF16)
    dy = torch.randn(tokens, hidden, generator=generator).to(BF16)
    weights = torch.rand(tokens, top_k, generator=generator)
    into = torch.randn(local, matrices, width, hidden, generator=generator).to(BF16) / 4
    out = torch.randn(local, hidden, width, generator=generator).to(BF16) / 4
    indices = torch.rand(tokens, number, generator=generator).argsort(1)[:, :top_k]

    def run(gemms: ExpertGemms, *tensors: torch.Tensor) -> list[torch.Tensor]:
        x, dy, weights, into, out = tensors
        for parameter in (into, out):
            wide = torch.promote_types(parameter.dtype, torch.float32)
            parameter.gradient_sink = GradientSink(torch.zeros(parameter.shape, dtype=wide))
        plan = plan_rows(indices, number - local, local, weights, number)
        y, inner = run_experts(gemms.prepare(x), weights, plan, into, out, kind, gemms)
        rows = run_experts_backward(dy, weights, inner, plan, into, out, kind, gemms)
        add_matrix_gradients(rows, x, plan, into, out)
        return [y, rows.x_TH, rows.weights_TK, into.gradient_sink.main_grad, out.gradient_sink.main_grad]

    inputs = x, dy, weights, into, out
    with mock.patch.object(grouped, "FLOAT8_TILING", TILING):
        results = run(make_gemms(), *inputs)
    choices = dispatch.list_choices()
    assert choices[f"experts' rows in float8, {hidden} to {matrices * width}"] == "by tensor descriptors"
    assert choices[f"experts' rows in float8, {matrices * width} to {hidden}"] == "by tensor descriptors"
    with REFERENCE.as_current():
        references = run(make_gemms(), *inputs)
        exact = run(ExpertGemms(), *(tensor.double() for tensor in inputs))
    for result, reference, expected in zip(results, references, exact, strict=True):
        error = distance(reference, expected)
        assert 5e-3 < error < 0.1  # two GEMMs of numbers with 3.7% each
        assert distance(result, expected) <= 1.2 * error + TOLERANCE[BF16]
