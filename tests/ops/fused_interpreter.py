"""The interpreter as interpreted.py makes it: cheaper, and it still finds what Triton's own finds."""

from __future__ import annotations

# First: it prepares the interpreter.
from tests.ops import interpreted

# isort: split
import pytest
import torch

from megascale.ops.dispatch import jit, tl


@jit
def _combine_kernel(x_ptr, y_ptr, out_ptr, n, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    y = tl.load(y_ptr + at, mask=at < n, other=0)
    out = x + y if OPERATION == "add" else x - y if OPERATION == "sub" else x * y
    tl.store(out_ptr + at, out, mask=at < n)


def combine(operation: str, x: list[int], y: list[int], dtype: torch.dtype) -> list[int]:
    a, b = torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)
    out = torch.zeros_like(a)
    _combine_kernel[(1,)](a, b, out, len(x), OPERATION=operation, BLOCK=4)
    return out.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_that_fit_are_combined(dtype):
    big = (1 << 31) - 1
    assert combine("add", [big - 1, -big - 1, 3], [1, 0, 4], dtype) == [big, -big - 1, 7]
    assert combine("sub", [big, -big, 3], [0, 1, 4], dtype) == [big, -big - 1, -1]
    assert combine("mul", [1 << 15, -7, 3], [1 << 15, 7, 0], dtype) == [1 << 30, -49, 0]


@pytest.mark.parametrize(("operation", "x", "y"), [("add", 2**31 - 1, 1), ("sub", -(2**31), 1), ("mul", 2**16, 2**15)])
def test_one_integer_that_overflows_is_an_error(operation, x, y):
    with pytest.raises(
        interpreted.interpreter.InterpreterError, match=f"int32 overflow detected for operation {operation}"
    ):
        combine(operation, [1, x, 2], [1, y, 2], torch.int32)
    assert combine(operation, [x], [y], torch.int64) == [{"add": x + y, "sub": x - y, "mul": x * y}[operation]]
