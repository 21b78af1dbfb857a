"""Dropout whose mask is a pure function of (key, global sequence, sample and hidden index): Philox 4x32-10.

Every layout (sequence shards, micro-batches, data-parallel ranks) draws the mask that one process would draw, on
CPU and CUDA, bit for bit; nothing is stored between forward and backward. Salmon et al. 2011.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KEY_BITS = 62  # a key is two 31-bit words, so that no integer type depends on its value
_WORD = 0xFFFFFFFF
_RESOLUTION = 24  # bits of a draw that are compared with p


def dropout_key(*parts: int) -> int:
    """One key of KEY_BITS bits from integers such as (seed, step, layer, site); splitmix64 over the parts."""
    state = 0
    for part in parts:
        state = (state ^ (part & ((1 << 64) - 1))) + 0x9E3779B97F4A7C15 & ((1 << 64) - 1)
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & ((1 << 64) - 1)
        state = (state ^ state >> 27) * 0x94D049BB133111EB & ((1 << 64) - 1)
        state ^= state >> 31
    return state >> (64 - KEY_BITS)


def _mulhilo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a x b for 32-bit values held in int64."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _WORD


def philox(c0: Tensor, c1: Tensor, c2: Tensor, key: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 of counter (c0, c1, c2, 0) as four 32-bit draws in int64; counters broadcast."""
    k0, k1 = key & 0x7FFFFFFF, key >> 31
    c3 = torch.zeros_like(c0)
    for _ in range(10):
        high_a, low_a = _mulhilo(0xD2511F53, c0)
        high_b, low_b = _mulhilo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def keep_mask_reference(
    shape: torch.Size, p: float, key: int | Tensor, sequence_start: int, sample_start: int, device: torch.device
) -> Tensor:
    """True where an element of [sequence, batch, hidden] stays."""
    S, B, H = shape
    s = torch.arange(sequence_start, sequence_start + S, device=device)[:, None, None]
    b = torch.arange(sample_start, sample_start + B, device=device)[None, :, None] & _WORD
    h = torch.arange(-(-H // 4), device=device)[None, None, :]
    draws = torch.stack(philox(*torch.broadcast_tensors(h, b, s), key), dim=-1).flatten(-2)[..., :H]
    return (draws >> (32 - _RESOLUTION)) >= round(p * (1 << _RESOLUTION))


def _masked(x: Tensor, p: float, key: int | Tensor, sequence_start: int, sample_start: int) -> Tensor:
    keep = keep_mask_reference(x.shape, p, key, sequence_start, sample_start, x.device)
    return torch.where(keep, x / (1 - p), 0)


class _DropoutReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *draw: Any) -> Tensor:
        ctx.draw = draw
        return _masked(x, *draw)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _masked(grads[0], *ctx.draw), None, None, None, None


def dropout(x_SBH: Tensor, p: float, key: int, sequence_start: int, sample_start: int, training: bool = True) -> Tensor:
    """Zero each element with probability p and scale the rest by 1 / (1 - p).

    x_SBH: this rank's part of [sequence, batch, hidden]; sequence_start, sample_start: global index of its first
    row and sample. key: `dropout_key(...)` of the step, layer and site.
    """
    if p == 0 or not training:
        return x_SBH
    return _DropoutReference.apply(x_SBH, p, key, sequence_start, sample_start)


def dropout_add(
    x_SBH: Tensor,
    bias: Tensor | None,
    residual_SBH: Tensor,
    p: float,
    key: int,
    sequence_start: int,
    sample_start: int,
    training: bool = True,
) -> Tensor:
    """residual + dropout(x + bias); bias [H] or None, the rest as `dropout`."""
    x_SBH = x_SBH if bias is None else x_SBH + bias
    return residual_SBH + dropout(x_SBH, p, key, sequence_start, sample_start, training)
