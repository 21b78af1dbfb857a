"""Scaling of rotary frequencies for contexts longer than the original context (table [model.rotary_scaling])."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megascale.config.rotary_scaling import RotaryScaling

# Defaults of YaRN (Peng et al. 2023).
_BETA_FAST = 32.0
_BETA_SLOW = 1.0


def scale_frequencies(
    frequencies: Tensor, base: float, scaling: RotaryScaling, is_extended: bool = False
) -> tuple[Tensor, float]:
    """Return the scaled frequencies [rotary_dim / 2], and a factor by which rotated queries and keys are multiplied.

    Args:
        frequencies: radians per position, base^(-2i / rotary_dim).
        is_extended: whether the input is longer than the original context. Only longrope depends on it.
    """
    if scaling.method == "none":
        return frequencies, 1.0
    if scaling.method == "longrope":
        divisors = scaling.long_factors if is_extended else scaling.short_factors
        return frequencies / frequencies.new_tensor(divisors), _get_attention_factor(scaling)
    assert scaling.factor is not None
    if scaling.method == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.method == "llama3":
        retained = _compute_llama3_fraction(frequencies, scaling)
    else:
        retained = _compute_yarn_fraction(frequencies, base, scaling)
    scaled = frequencies * retained + frequencies / scaling.factor * (1 - retained)
    return scaled, _get_attention_factor(scaling)


def _get_attention_factor(scaling: RotaryScaling) -> float:
    """Return the factor by which rotated queries and keys are multiplied. YaRN's default is 0.1 ln(factor) + 1."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.method != "yarn":
        return 1.0
    assert scaling.factor is not None
    return 0.1 * math.log(scaling.factor) + 1.0


def _compute_llama3_fraction(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    """Return the fraction of each frequency that is kept, from 0 to 1. The remainder is divided by the factor.

    The fraction grows with the number of turns within the original context.
    """
    assert scaling.original_length is not None
    assert scaling.low_frequency_factor is not None
    assert scaling.high_frequency_factor is not None
    turns = scaling.original_length * frequencies / (2 * math.pi)
    range_width = scaling.high_frequency_factor - scaling.low_frequency_factor
    return ((turns - scaling.low_frequency_factor) / range_width).clamp(0, 1)


def _compute_yarn_fraction(frequencies: Tensor, base: float, scaling: RotaryScaling) -> Tensor:
    """Return the fraction of each frequency that is kept, from 0 to 1. The remainder is divided by the factor.

    Frequencies with more than beta_fast turns within the original context are kept, and those with less than beta_slow
    turns are divided. In between, YaRN interpolates linearly by the index of the frequency.
    """
    rotary_dim = 2 * frequencies.numel()
    length = scaling.original_length
    assert length is not None

    def find_index(turns: float) -> float:
        """Return the index of the frequency with this number of turns, as a fraction."""
        return rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    # Range of indices over which the fraction falls from 1 to 0.
    low = find_index(scaling.beta_fast or _BETA_FAST)
    high = find_index(scaling.beta_slow or _BETA_SLOW)
    if scaling.is_range_rounded is not False:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # The published implementation avoids a division by zero in this way.
    index = torch.arange(frequencies.numel(), dtype=frequencies.dtype, device=frequencies.device)
    return 1 - ((index - low) / (high - low)).clamp(0, 1)
