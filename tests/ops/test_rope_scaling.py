"""Scaled frequencies of rotary positions, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megascale.config.rotary_scaling import RotaryScaling
from megascale.core.layer_spec import RopeSpec
from megascale.model.rotary import RotaryTables
from megascale.ops.rope import make_rotary_tables
from megascale.ops.rope_scaling import scale_frequencies

LENGTH = 64


def turning(*turns: float) -> torch.Tensor:
    """Frequencies that make these turns in the original context."""
    return torch.tensor(turns, dtype=torch.float64) * 2 * math.pi / LENGTH


def test_llama3_divides_low_frequencies_and_keeps_high_ones():
    scaling = RotaryScaling(
        method="llama3", factor=8, original_length=LENGTH, low_frequency_factor=1, high_frequency_factor=4
    )
    scaled, factor = scale_frequencies(turning(9, 4, 2.5, 1, 0.5), 100.0, scaling)
    assert factor == 1
    # 2.5 turns are half way between 1 and 4: half of the frequency is kept, half is divided by 8.
    torch.testing.assert_close(scaled, turning(9, 4, 2.5 * (0.5 + 0.5 / 8), 1 / 8, 0.5 / 8))


def test_yarn_divides_low_frequencies_and_scales_attention():
    frequencies = 10000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    scaling = RotaryScaling(method="yarn", factor=4, original_length=4096)
    scaled, factor = scale_frequencies(frequencies, 10000.0, scaling)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    # Index i makes 4096 x 10000^(-i/16) / 2 pi turns: 32 at 5.2, 1 at 11.3; rounded outwards, 5 and 12.
    ratios = scaled / frequencies
    assert torch.equal(ratios[:6], torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(ratios[12:], torch.full((4,), 0.25, dtype=torch.float64))
    torch.testing.assert_close(ratios[6], torch.tensor(6 / 7 + 0.25 / 7, dtype=torch.float64))


def test_tables_have_the_factor_and_linear_scaling_stretches_positions():
    plain_cos, plain_sin = make_rotary_tables(8, 8, 100.0, "cpu", torch.float64)
    cos, sin = make_rotary_tables(16, 8, 100.0, "cpu", torch.float64, RotaryScaling(method="linear", factor=2))
    torch.testing.assert_close(cos[::2], plain_cos)
    torch.testing.assert_close(sin[::2], plain_sin)
    yarn = RotaryScaling(method="yarn", factor=1, original_length=8, attention_factor=1.5)
    cos, sin = make_rotary_tables(8, 8, 100.0, "cpu", torch.float64, yarn)
    torch.testing.assert_close(cos, 1.5 * plain_cos)
    torch.testing.assert_close(sin, 1.5 * plain_sin)


def test_longrope_has_divisors_for_short_and_for_long_inputs():
    scaling = RotaryScaling(
        method="longrope", original_length=8, short_factors=(1, 2), long_factors=(4, 5), attention_factor=1.5
    )
    frequencies = torch.tensor([1.0, 0.1], dtype=torch.float64)
    short, factor = scale_frequencies(frequencies, 100.0, scaling)
    long, _ = scale_frequencies(frequencies, 100.0, scaling, is_extended=True)
    assert factor == 1.5
    torch.testing.assert_close(short, torch.tensor([1.0, 0.05], dtype=torch.float64))
    torch.testing.assert_close(long, torch.tensor([0.25, 0.02], dtype=torch.float64))
    tables = RotaryTables([RopeSpec(4, 100.0, False, scaling)], 8, torch.float64)
    device = torch.device("cpu")
    for stop, divisors in ((8, (1, 2)), (9, (4, 5))):
        ((cos, _),) = tables.select(stop - 1, stop, device)
        angle = (stop - 1) * torch.tensor([1 / divisors[0], 0.1 / divisors[1]], dtype=torch.float64)
        torch.testing.assert_close(cos, 1.5 * angle.cos()[None])
    assert tables.has_different_tables(8, 9)
    assert not tables.has_different_tables(9, 10)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"method": "longrope", "original_length": 8, "short_factors": [1.0]}, "no long_factors"),
        (
            {"method": "longrope", "original_length": 8, "short_factors": [1.0], "long_factors": [0.0]},
            "0.0 among long_factors",
        ),
        ({"method": "linear", "factor": 2, "long_factors": [2.0]}, "long_factors=(2.0,), which has no effect"),
        ({"method": "yarn", "factor": 2}, "no original_length"),
        ({"method": "linear", "factor": 2, "beta_fast": 3}, "beta_fast=3.0, which has no effect"),
        ({"method": "yarn", "factor": 2, "original_length": 8, "beta_fast": 1, "beta_slow": 2}, "beta_slow=2.0"),
        (
            {
                "method": "llama3",
                "factor": 2,
                "original_length": 8,
                "low_frequency_factor": 4,
                "high_frequency_factor": 4,
            },
            "low_frequency_factor=4.0",
        ),
    ],
)
def test_keys_that_do_not_fit_the_method_are_named(keys: dict[str, Any], named: str):
    with pytest.raises(ValueError, match=r"model\.rotary_scaling") as error:
        RotaryScaling(**keys)
    assert named in str(error.value)
