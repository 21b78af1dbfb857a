"""The check of the first updates: its sums need little memory and notice each change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megascale.optim import first_updates

MEBIBYTE = 1 << 20


def measure_peak() -> int:
    """Return the largest resident memory of this process in bytes since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def reset_peak() -> int:
    """Make the present resident memory the peak, and return it."""
    Path("/proc/self/clear_refs").write_text("5")
    return measure_peak()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_convert_a_small_part_of_the_shard_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_updates, "_PART_ELEMENTS", MEBIBYTE // 8)
    master = torch.ones(8 * MEBIBYTE)
    params = master.to(dtype)
    first_updates._sum_twice(params)  # loads the code of the operators
    before = reset_peak()
    first_updates._sum_twice(params)
    assert first_updates._is_rounded(params, master)
    assert measure_peak() - before < 12 * MEBIBYTE  # a copy of the shard in float64 takes 64 MiB


def test_sums_notice_a_change_in_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_updates, "_PART_ELEMENTS", 3)
    tensor = torch.arange(8.0)
    total, norm = first_updates._sum_twice(tensor)
    assert total == 28
    assert norm == pytest.approx(140**0.5, rel=1e-15)
    for index in range(8):
        changed = tensor.clone()
        changed[index] += 1
        assert first_updates._sum_twice(changed) != (total, norm)
        assert not first_updates._is_rounded(tensor, changed)
    assert first_updates._sum_twice(torch.empty(0)) == (0, 0)
