"""Which values of a weight float8 layers read: its own cast, gathered rows, or none until it has been gathered."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megascale.errors import ConfigError, TrainingError
from megascale.ops.float8 import gemm
from megascale.ops.float8.cast import cast_by_amax, compute_amax
from megascale.ops.float8.formats import E4M3, Float8, view_as_format
from megascale.parallel.float8 import RowWiseFloat8, RowWiseFloat8Wgrad, TensorWiseFloat8
from tests.ops.test_amax import CalledOperators


def draw(seed: int) -> torch.Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))


def cast(weight: torch.Tensor) -> Float8:
    return cast_by_amax(weight, E4M3, compute_amax(weight))


def assert_same(actual: Float8, expected: Float8) -> None:
    """Rows and columns hold the same bytes, with the same scales."""
    for name in ("rows", "columns", "rows_scale", "columns_scale"):
        first, second = getattr(actual, name), getattr(expected, name)
        assert first.dtype == second.dtype
        assert torch.equal(first.float(), second.float()), name


def test_a_weight_is_cast_once_per_step():
    linears, weight = TensorWiseFloat8(), draw(1)
    linears.prepare_weights([weight])
    first = linears.get_weight(weight)
    assert_same(first, cast(weight))
    weight.mul_(2)
    assert linears.get_weight(weight) is first
    linears.invalidate_weights()
    assert_same(linears.get_weight(weight), cast(weight))


def test_gathered_rows_are_read_in_place_of_the_weight():
    """The weight itself is stale on this rank; its columns are the transpose of the gathered rows."""
    linears, weight, fresh = TensorWiseFloat8(), draw(1), cast(draw(2))
    linears.get_weight(weight)
    linears.set_gathered_rows(weight, fresh.rows, fresh.rows_scale)
    assert_same(linears.get_weight(weight), fresh)
    # The weight has been gathered too, but its rows are here and the same.
    linears.set_weight_gathered(weight)
    linears.invalidate_weights()
    assert_same(linears.get_weight(weight), fresh)


def test_an_updated_weight_is_not_read_until_it_is_gathered():
    linears, weight, fresh = TensorWiseFloat8(), draw(1), cast(draw(2))
    third = draw(3)
    linears.set_gathered_rows(weight, fresh.rows, fresh.rows_scale)
    linears.get_weight(weight)
    linears.invalidate_rows(weight)
    with pytest.raises(TrainingError, match=r"weight \[32, 16\] is read after its update and before it was gathered"):
        linears.get_weight(weight)
    assert_same(linears.get_weight(third), cast(third))
    linears.set_weight_gathered(weight)
    assert_same(linears.get_weight(weight), cast(weight))


def test_a_weight_that_was_never_gathered_is_cast():
    linears, weight = TensorWiseFloat8(), draw(1)
    linears.set_weight_gathered(weight)
    assert_same(linears.get_weight(weight), cast(weight))


@pytest.mark.parametrize("is_gathered", [False, True])
def test_graphs_read_each_step_s_values_in_the_same_memory(is_gathered):
    """The first step's tensors are pinned; gathered bytes lie in memory of their own at every step."""
    linears, weight = TensorWiseFloat8(), draw(1)
    rows = torch.empty(weight.shape, dtype=E4M3.dtype)
    scale = torch.empty(())

    def begin_step(seed: int) -> Float8:
        weight.copy_(draw(seed))
        expected = cast(weight)
        linears.invalidate_weights()
        if is_gathered:
            linears.invalidate_rows(weight)
            rows.copy_(expected.rows)
            scale.copy_(expected.rows_scale)
            linears.set_gathered_rows(weight, rows, scale)
        linears.pin_weights([weight])
        return expected

    expected = begin_step(1)
    pinned = linears.get_weight(weight)
    addresses = [tensor.data_ptr() for tensor in vars(pinned).values() if tensor is not None]
    assert_same(pinned, expected)
    for seed in (2, 3):
        expected = begin_step(seed)
        assert linears.get_weight(weight) is pinned
        assert_same(pinned, expected)
        assert addresses == [tensor.data_ptr() for tensor in vars(pinned).values() if tensor is not None]


@pytest.mark.parametrize("recipe", [TensorWiseFloat8, RowWiseFloat8])
def test_eager_micro_batches_read_a_step_s_casts_where_graphs_read_them(recipe):
    """The first micro-batch is eager while weights are gathered. The memory estimate has room for each cast once."""
    linears, weight = recipe(), draw(1)
    linears.pin_weights([weight])
    pinned = linears.get_weight(weight)
    weight.copy_(draw(2))
    linears.invalidate_weights()
    assert linears.get_weight(weight) is pinned
    assert_same(pinned, recipe().cast_weight(weight))


@pytest.mark.parametrize("recipe", [TensorWiseFloat8, RowWiseFloat8])
def test_casts_are_freed_with_their_precision(recipe):
    """No reference cycle keeps them until the garbage collector runs."""
    linears = recipe()
    linears.expert_gemms.prepare(draw(1))
    rows = weakref.ref(linears.get_weight(draw(1)).rows)
    gc.disable()
    try:
        del linears
        assert rows() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("recipe", [TensorWiseFloat8, RowWiseFloat8, RowWiseFloat8Wgrad])
def test_only_outputs_are_summed_fast(monkeypatch, recipe):
    """Sums of gradients keep full precision, also those that are written into given memory."""
    calls: list[tuple[str, bool]] = []
    for name in ("matmul", "matmul_out"):
        original = getattr(gemm, name)

        def note(*arguments, name=name, original=original, fast=False, **options):
            calls.append((name, fast))
            return original(*arguments, fast=fast, **options)

        monkeypatch.setattr(gemm, name, note)
    linears = recipe()
    weight, x, dy = draw(1), draw(2), torch.randn(32, 32, generator=torch.Generator().manual_seed(3))
    operand, gradient = linears.prepare_input(x, weight), linears.prepare_gradient(dy, weight)
    y, dx = linears.forward(operand, weight), linears.dgrad(gradient, weight)
    assert torch.equal(linears.forward(operand, weight, out=torch.empty_like(y)), y)
    assert torch.equal(linears.dgrad(gradient, weight, torch.empty_like(dx)), dx)
    assert calls == [("matmul", True), ("matmul", False), ("matmul_out", True), ("matmul_out", False)]


@pytest.mark.parametrize("recipe", [TensorWiseFloat8, RowWiseFloat8, RowWiseFloat8Wgrad])
def test_casts_of_activations_are_counted_while_that_is_asked_for(recipe):
    """Numbers clipped, flushed to zero, and cast; casts of weights do not count."""
    linears = recipe()
    weight, x = draw(1), draw(2)
    linears.prepare_input(x, weight)
    assert linears.get_cast_counts() is None
    linears.count_casts(True)
    assert linears.get_cast_counts() is None
    x = x.clone()
    x[0, 0], x[0, 1] = 1e-9, 0.0  # too small beside numbers of about 1
    for calls in (1, 2):
        linears.forward(linears.prepare_input(x, weight), weight)
        counts = linears.get_cast_counts()
        assert counts is not None
        assert counts.dtype == torch.float64
        assert counts.tolist() == [0.0, calls, calls * x.numel()]
    linears.count_casts(True)  # begins at zero again
    linears.prepare_input(x, weight)
    assert linears.get_cast_counts().tolist() == [0.0, 1.0, x.numel()]
    linears.count_casts(False)
    linears.prepare_input(x, weight)
    assert linears.get_cast_counts() is None


@pytest.mark.parametrize("recipe", [TensorWiseFloat8, RowWiseFloat8, RowWiseFloat8Wgrad])
def test_devices_and_shapes_are_checked_before_the_first_step(monkeypatch, recipe):
    shapes: list[tuple[str, int, int, int]] = []
    devices: list[str] = []
    monkeypatch.setattr(gemm, "check_device", lambda device: devices.append(device.type))
    monkeypatch.setattr(gemm, "check_shape", lambda *arguments: shapes.append(arguments))
    linears = recipe()
    linears.check({"a": torch.zeros(32, 16)}, 64, torch.device("cpu"))
    assert (devices, shapes) == ([], [])
    matrices = {"a": torch.zeros(32, 16, dtype=torch.bfloat16), "b": torch.zeros(8, 4, dtype=torch.bfloat16)}
    linears.check(matrices, 64, torch.device("cuda"))
    assert (devices, shapes) == (["cuda"], [("a", 64, 16, 32), ("b", 64, 4, 8)])
    with pytest.raises(ConfigError, match=r"needs bfloat16 operators on a GPU, and train\.precision is float32"):
        linears.check({"a": torch.zeros(32, 16)}, 64, torch.device("cuda"))


def test_gathered_rows_of_a_pinned_weight_are_transposed_in_its_memory():
    """No second copy of the columns is made where CUDA graphs read them."""
    linears, weight = TensorWiseFloat8(), draw(1)
    first, second = cast(draw(2)), cast(draw(3))
    assert first.rows is not None
    assert second.rows is not None
    rows, scale = first.rows.clone(), first.rows_scale
    linears.set_gathered_rows(weight, rows, scale)
    linears.pin_weights([weight])
    pinned = linears.get_weight(weight)
    rows.copy_(second.rows)
    linears.set_gathered_rows(weight, rows, scale)
    assert linears.get_weight(weight) is pinned
    assert torch.equal(pinned.columns.float(), second.rows.float().T)


def test_weight_gradients_with_scales_of_rows_are_as_exact_as_with_one_scale():
    """Gradients of some tokens are 2 ** 12 times smaller, and the last token has none."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    x = torch.randn(256, 64, generator=generator)
    dy = torch.randn(256, 48, generator=generator)
    dy[::3] *= 2.0**-12
    dy[-1] = 0
    exact = dy.double().T @ x.double()
    errors = {}
    for recipe in (TensorWiseFloat8, RowWiseFloat8Wgrad):
        linears = recipe()
        operand, gradient = linears.prepare_input(x, weight), linears.prepare_gradient(dy, weight)
        main_grad = torch.full(weight.shape, 7.0)
        linears.accumulate_wgrad(main_grad, gradient.for_wgrad(), operand.for_wgrad(), overwrite=True)
        errors[recipe] = ((main_grad - exact).norm() / exact.norm()).item()
        before = main_grad.clone()
        linears.accumulate_wgrad(main_grad, gradient.for_wgrad(), operand.for_wgrad())
        assert torch.equal(main_grad, 2 * before)
    assert 0 < errors[RowWiseFloat8Wgrad] <= errors[TensorWiseFloat8] < 0.08


def test_an_operand_is_read_without_views_that_change_nothing():
    """Each call of torch takes the host some microseconds, hundreds of times per step."""
    linears = TensorWiseFloat8()
    x = draw(1)
    operand = linears.prepare_input(x, draw(2))
    with CalledOperators() as called:
        rows, scale = linears.get_rows(operand, E4M3)
    assert called.names == []
    assert rows.dtype == E4M3.dtype
    assert scale is operand.scale
    with CalledOperators() as called:
        linears.prepare_input(x, draw(2))
    assert "detach" not in called.names


def test_an_operand_of_a_trained_input_belongs_to_no_graph():
    x = draw(1).requires_grad_()
    operand = TensorWiseFloat8().prepare_input(x, draw(2))
    assert not operand.data.requires_grad
    assert operand.data.grad_fn is None


def test_gathered_bytes_are_read_in_the_format_of_the_operand():
    fresh = cast(draw(1))
    assert fresh.rows is not None
    values = view_as_format(fresh.rows.view(torch.uint8), E4M3)
    assert values.dtype == E4M3.dtype
    assert torch.equal(values.float(), fresh.rows.float())
    assert view_as_format(fresh.rows, E4M3) is fresh.rows
