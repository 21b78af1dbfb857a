"""Rotary positions (Su et al. 2021): full or partial, halves (Llama, GPT-NeoX) or neighbouring pairs (GPT-J)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(
    length: int, rotary_dim: int, base: float, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, rotary_dim / 2] of position * base^(-2i / rotary_dim), computed in float64."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * base**-exponent
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rotary_reference(x_SBND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first 2 x cos.shape[1] of the last dimension by the tables' angles; the rest passes."""
    width = 2 * cos.shape[1]
    wide = torch.promote_types(x_SBND.dtype, cos.dtype)
    turned, rest = x_SBND[..., :width].to(wide), x_SBND[..., width:]
    cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((out.to(x_SBND.dtype), rest), dim=-1)


def apply_rotary(x_SBND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary positions for queries or keys.

    x_SBND: [sequence, batch, heads, head size], strided views welcome. cos, sin: rows of `rotary_tables` for the
    S positions of x (slice the tables to offset them: a cache, a sequence shard). Only the first
    2 x cos.shape[1] entries of a head turn. interleaved: neighbouring pairs (GPT-J) instead of halves.
    """
    return apply_rotary_reference(x_SBND, cos, sin, interleaved)
