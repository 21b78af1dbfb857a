"""Checks that stay with `python -O`, which removes asserts: errors guard values, asserts only narrow types."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megascale.ops import gradient_sink
from megascale.ops.linear import Operand, accumulate_mm
from megascale.ops.reduce import add_partials
from megascale.services.shared_token import TokenProof

SOURCES = Path(__file__).parents[1] / "src" / "megascale"


def narrows_type(test: ast.expr) -> bool:
    """Return whether a condition only tells the type checker what a value is."""
    if isinstance(test, ast.BoolOp):
        return all(narrows_type(value) for value in test.values)
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    right = test.comparators[0]
    return isinstance(test.ops[0], ast.IsNot) and isinstance(right, ast.Constant) and right.value is None


def test_asserts_in_the_package_only_narrow_types() -> None:
    guards = []
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Assert) and not narrows_type(node.test):
                guards.append(f"{file.relative_to(SOURCES)}:{node.lineno}: raise an error instead of this assert")
    assert guards == []


def add_rounded() -> None:
    accumulate_mm(torch.zeros(2, 2, dtype=torch.bfloat16), torch.ones(2, 2), torch.ones(2, 2))


def add_other_columns() -> None:
    add_partials(torch.ones(2, 3), torch.zeros(4))


def select_scaled_columns() -> None:
    Operand(torch.ones(2, 4), torch.ones(2, 1)).select_columns(slice(0, 2))


def attach_to_plain_tensor() -> None:
    gradient_sink.detach(torch.ones(2))


def verify_without_nonces() -> None:
    TokenProof(b"secret", "test", "server").is_valid_answer(b"")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (add_rounded, ValueError, "set overwrite=True"),
        (add_other_columns, ValueError, "partial sums of 3 columns cannot be added to 4 elements"),
        (select_scaled_columns, ValueError, "columns of an operand with scales"),
        (attach_to_plain_tensor, TypeError, "belongs to a SinkParameter, not to a Tensor"),
        (verify_without_nonces, RuntimeError, "call answer_nonce first"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_calls_are_errors(call: Callable[[], None], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
