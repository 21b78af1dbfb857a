"""The three GEMMs of a linear layer by formula, with and without given memory."""

from __future__ import annotations

import pytest
import torch

from megascale.ops.linear import Gemms, Operand, accumulate_mm

ROWS, BATCH, INPUTS, OUTPUTS = 3, 2, 5, 4


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, WEIGHT, BIAS = draw(ROWS, BATCH, INPUTS, seed=1), draw(OUTPUTS, INPUTS, seed=2), draw(OUTPUTS, seed=3)
DY = draw(ROWS, BATCH, OUTPUTS, seed=4)


@pytest.mark.parametrize("bias", [None, BIAS])
def test_outputs_are_returned_written_or_added(bias: torch.Tensor | None) -> None:
    gemms, x = Gemms(), Operand(X)
    expected = torch.nn.functional.linear(X, WEIGHT, bias)
    torch.testing.assert_close(gemms.forward(x, WEIGHT, bias), expected)
    out = torch.full_like(expected, torch.nan)
    rows = gemms.forward(x, WEIGHT, bias, out)
    assert rows.data_ptr() == out.data_ptr()
    assert rows.shape == (ROWS * BATCH, OUTPUTS)
    torch.testing.assert_close(out, expected)
    gemms.forward(x, WEIGHT, bias, out, True)  # adds the product without the bias
    torch.testing.assert_close(out, expected + X @ WEIGHT.T)


def test_gradients_of_inputs_are_returned_written_or_added() -> None:
    gemms, dy = Gemms(), Operand(DY)
    expected = DY @ WEIGHT
    torch.testing.assert_close(gemms.dgrad(dy, WEIGHT), expected)
    out = torch.full_like(expected, torch.nan)
    rows = gemms.dgrad(dy, WEIGHT, out)
    assert rows.shape == (ROWS * BATCH, INPUTS)
    torch.testing.assert_close(out, expected)
    gemms.dgrad(dy, WEIGHT, out, True)
    torch.testing.assert_close(out, 2 * expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_weights_are_summed_in_their_own_type(dtype: torch.dtype) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    x, dy = X.to(dtype), DY.to(dtype)
    expected = (dy.double().flatten(0, 1).T @ x.double().flatten(0, 1)).to(wide)
    main_grad = torch.full((OUTPUTS, INPUTS), torch.nan, dtype=wide)
    Gemms().accumulate_wgrad(main_grad, Operand(dy), Operand(x), overwrite=True)
    torch.testing.assert_close(main_grad, expected)
    Gemms().accumulate_wgrad(main_grad, Operand(dy), Operand(x))
    torch.testing.assert_close(main_grad, 2 * expected)


def test_a_product_of_matrices_is_added_or_written() -> None:
    target = torch.ones(2, 2, dtype=torch.float64)
    a, b = draw(2, 3, seed=1), draw(3, 2, seed=2)
    accumulate_mm(target, a, b)
    torch.testing.assert_close(target, 1 + a @ b)
    accumulate_mm(target, a, b, overwrite=True)
    torch.testing.assert_close(target, a @ b)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(None, None), (torch.tensor(3.0), 3.0), (torch.arange(4.0)[:, None], [[1.0], [2.0]])],
)
def test_rows_keep_their_scales(scale: torch.Tensor | None, expected: object) -> None:
    rows = Operand(torch.arange(8.0).view(4, 2), scale, Operand(torch.zeros(1))).select_rows(1, 3)
    assert rows.data.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert (None if rows.scale is None else rows.scale.tolist()) == expected
    assert rows.wgrad is None


def test_a_weights_gradient_reads_its_own_operand() -> None:
    operand = Operand(torch.zeros(1))
    assert operand.for_wgrad() is operand
    assert Operand(torch.ones(1), None, operand).for_wgrad() is operand
