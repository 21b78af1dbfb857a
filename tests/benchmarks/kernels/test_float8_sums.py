"""The model of sums in tensor cores: what it keeps, what it cuts, and where float32 takes over."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.kernels.float8_sums import add_like_tensor_cores, main


def test_numbers_of_one_size_are_added_exactly():
    products = torch.arange(-32.0, 32.0, dtype=torch.float64).repeat(2, 1)
    for interval in (None, 32):
        assert torch.equal(add_like_tensor_cores(products, interval), products.sum(1))


def test_small_numbers_are_cut_next_to_a_large_sum():
    products = torch.ones(1, 128, dtype=torch.float64)
    products[0, 0] = 2.0**14  # one has its bit 14 places below
    assert add_like_tensor_cores(products, None).item() == 2**14
    # The sums of later intervals begin anew.
    assert add_like_tensor_cores(products, 32).item() == 2**14 + 96


def test_casts_err_more_than_sums(tmp_path):
    main(tmp_path / "sums.json", rows=200, lengths=[512, 2048])
    short, long = json.loads((tmp_path / "sums.json").read_text())
    for row in (short, long):
        assert row["precise"] < row["fast"] < row["cast"] == pytest.approx(0.037, rel=0.2)
    assert short["fast"] < long["fast"]
