"""Sums over blocks of gradients: rounding, overflow and underflow are no faults, a wrong element is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megascale.train.reduction_check import BLOCK, differ_beyond_rounding, sum_blocks

EPSILON = 4 * torch.finfo(torch.float32).eps


def compare(addends: list[Tensor], reduced: Tensor, dtype: torch.dtype = torch.float32) -> list[bool]:
    """Return which blocks of a reduced gradient differ from the sums of its addends."""
    sums, magnitudes = torch.stack([sum_blocks(addend.view(1, -1)) for addend in addends]).sum(0)[:, 0]
    actual = sum_blocks(reduced.view(1, -1))[0, 0]
    epsilon = EPSILON + torch.finfo(dtype).eps
    return differ_beyond_rounding(actual, sums, magnitudes, epsilon=epsilon, dtype=dtype).tolist()


def test_a_wrong_element_is_found_in_its_block():
    addends = [torch.randn(3 * BLOCK) for _ in range(2)]
    reduced = addends[0] + addends[1]
    assert compare(addends, reduced) == [False, False, False]
    reduced[BLOCK] += 1
    assert compare(addends, reduced) == [False, True, False]
    reduced[2 * BLOCK] = torch.inf
    assert compare(addends, reduced) == [False, True, True]


def test_finite_addends_whose_sum_overflows_are_no_fault():
    addend = torch.zeros(BLOCK)
    addend[7] = 3e38
    reduced = addend + addend
    assert reduced.isinf().any()
    assert compare([addend, addend], reduced) == [False]


@pytest.mark.parametrize("magnitude", [1e-40, 1e-41])
def test_addends_that_bfloat16_flushes_are_no_fault(magnitude):
    addend = torch.full((BLOCK,), magnitude)
    reduced = addend + addend.bfloat16().float()
    assert compare([addend, addend], reduced, torch.bfloat16) == [False]
