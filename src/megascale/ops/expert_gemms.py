"""The GEMMs of experts' rows, in the type of their inputs or in float8: forward, and the gradient of the input.

The gradients of the matrices are computed in the type of the inputs, so that no sum runs over rows with different
scales. `LinearPrecision.expert_gemms` (parallel/linear_precision.py) has the object of a train.linear_precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megascale.ops.activation import RecomputedActivation
from megascale.ops.float8.cast import cast_rows
from megascale.ops.float8.formats import E4M3, Float8
from megascale.ops.float8.grouped import multiply_float8_groups
from megascale.ops.float8.stacks import cast_activation
from megascale.ops.grouped_gemm import multiply_groups
from megascale.ops.linear import Operand
from megascale.ops.row_copies import gather_rows


class ExpertGemms:
    """GEMMs in the type of their inputs.

    Stacks are the matrices of a rank's experts [experts, ..., inner]. `offsets` and `index` are those of
    `grouped_gemm.multiply_groups`.
    """

    def prepare(self, x: Tensor) -> Operand:
        """Return tokens or rows [..., columns] in the form that GEMMs read, and that ranks may send to each other."""
        return Operand(x)

    def activate(self, activation: str, inner: Tensor) -> Operand:
        """Return the activation of rows [rows, columns] in the form that `forward` reads."""
        return Operand(RecomputedActivation(activation, None)(inner))

    def forward(self, x: Operand, stack: Tensor, offsets: Tensor, index: Tensor | None = None) -> Tensor:
        """Multiply the rows of each group by the transpose of the group's matrix, [rows, columns]."""
        return multiply_groups(x.data, stack.detach().flatten(1, -2), offsets, index)

    def dgrad(self, dy: Operand, stack: Tensor, offsets: Tensor, index: Tensor | None = None) -> Tensor:
        """Multiply the rows of each group by the group's matrix, [rows, inner]."""
        return multiply_groups(dy.data, stack.detach().flatten(1, -2), offsets, index, transposed=True)


DEFAULT_EXPERT_GEMMS = ExpertGemms()


class Float8ExpertGemms(ExpertGemms):
    """GEMMs in E4M3, with a power-of-two scale for each row and for each column of the result.

    An operand has float8 bytes [..., columns] with scales [..., 1].

    Args:
        get_stack: returns the cast of a parameter, made by `stacks.cast_stack` at most once per step.
        get_counts: returns the tensor in which a cast of tokens counts, or None; see `cast_rows`.
    """

    def __init__(self, get_stack: Callable[[Tensor], Float8], get_counts: Callable[[Tensor], Tensor | None]) -> None:
        self._get_stack = get_stack
        self._get_counts = get_counts

    def prepare(self, x: Tensor) -> Operand:
        x = x.detach()
        rows, scale = cast_rows(x, E4M3, counts=self._get_counts(x)).require_rows()
        return Operand(rows.view(torch.uint8).view(x.shape), scale.view(*x.shape[:-1], 1))

    def activate(self, activation: str, inner: Tensor) -> Operand:
        rows, scale = cast_activation(activation, inner)
        return Operand(rows.view(torch.uint8), scale)

    def forward(self, x: Operand, stack: Tensor, offsets: Tensor, index: Tensor | None = None) -> Tensor:
        return self._multiply(x, self._get_stack(stack).require_rows(), offsets, index, stack.dtype)

    def dgrad(self, dy: Operand, stack: Tensor, offsets: Tensor, index: Tensor | None = None) -> Tensor:
        return self._multiply(dy, self._get_stack(stack).require_columns(), offsets, index, stack.dtype)

    @staticmethod
    def _multiply(
        x: Operand, matrices: tuple[Tensor, Tensor], offsets: Tensor, index: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Multiply rows by float8 matrices, given with their scales."""
        assert x.scale is not None
        data = x.data
        scale = x.scale
        if index is not None:
            data = _gather_bytes(data, index, offsets)
            scale = gather_rows(scale, index, offsets)
        return multiply_float8_groups(data.view(E4M3.dtype), scale, *matrices, offsets, dtype=dtype)


def _gather_bytes(data: Tensor, index: Tensor, offsets: Tensor) -> Tensor:
    """Return the rows of bytes at `index`; see `gather_rows`, whose kernel copies numbers of two bytes."""
    if data.shape[1] % 2:
        return data[index]
    return gather_rows(data.view(torch.bfloat16), index, offsets).view(torch.uint8)
