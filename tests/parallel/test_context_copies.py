"""Copies of heads in elements of 16 bytes keep all bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.parallel.context import _has_wide_rows, copy_wide


@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    heads=st.integers(1, 5),
    width=st.sampled_from([1, 3, 8, 16]),
    offset=st.integers(0, 8),
)
def test_all_bits_are_copied(dtype: torch.dtype, heads: int, width: int, offset: int) -> None:
    """Any bits, NaNs among them, of strided tensors that start at any element."""
    count = 4 * 3 * heads * width
    generator = torch.Generator().manual_seed(count)
    bits = torch.randint(-128, 128, ((count + offset) * dtype.itemsize,), dtype=torch.int8, generator=generator)
    source = bits.view(dtype)[offset:].view(4, 3, heads, width).permute(2, 0, 1, 3)
    target = torch.zeros(heads * 12 * width + offset, dtype=dtype)[offset:].view(heads, 4, 3, width)
    copy_wide(target, source)
    assert torch.equal(target.view(torch.int8), source.contiguous().view(torch.int8))


@pytest.mark.parametrize(
    ("shape", "offset", "expected"),
    [((2, 128), 0, True), ((2, 128), 8, True), ((2, 128), 4, False), ((2, 4), 0, False), ((2, 12), 0, False)],
)
def test_rows_of_sixteen_bytes(shape: tuple[int, ...], offset: int, expected: bool) -> None:
    """Rows in bfloat16 have eight elements per 16 bytes."""
    memory = torch.zeros(512, dtype=torch.bfloat16)
    assert _has_wide_rows(memory[offset : offset + shape[0] * shape[1]].view(shape)) == expected
    assert not _has_wide_rows(torch.zeros(64, 8, dtype=torch.bfloat16).t())
