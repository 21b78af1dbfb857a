"""Causal attention with an optional sliding window, over views of the fused QKV output.

A window counts the token itself: window=1 sees only itself, window=S is full causal attention.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """True where a query sees a key, [queries, keys]; the last query is aligned with the last key."""
    q = torch.arange(keys - queries, keys, device=device)[:, None]
    k = torch.arange(keys, device=device)[None, :]
    seen = k <= q
    return seen if window is None else seen & (k > q - window)


def attention_reference(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, *, window: int | None) -> Tensor:
    """Explicit softmax over an explicit mask, in at least float32: what every backend is compared with."""
    S, B, N, D = q_SBND.shape
    G = k_SBGD.shape[2]
    wide = torch.promote_types(q_SBND.dtype, torch.float32)
    q = q_SBND.to(wide).unflatten(2, (G, N // G))
    scores = torch.einsum("sbgnd,tbgd->bgnst", q, k_SBGD.to(wide)) * D**-0.5
    seen = causal_mask(S, k_SBGD.shape[0], window, q_SBND.device)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bgnst,tbgd->sbgnd", weights, v_SBGD.to(wide)).reshape(S, B, N * D).to(q_SBND.dtype)


def attention(q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, *, window: int | None, backend: str = "auto") -> Tensor:
    """Causal attention; returns [S, B, N*D].

    q_SBND: [queries, batch, heads, head size]; k_SBGD, v_SBGD: [keys, batch, groups, head size], heads a multiple
    of groups. window: tokens a query sees, itself included; None for all before it. With fewer queries than keys
    (generation) the last query stands at the last key.
    """
    S, B, N, D = q_SBND.shape
    T, G = k_SBGD.shape[0], k_SBGD.shape[2]
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_SBGD, v_SBGD))
    windowed = window is not None and window < T
    if windowed or 1 < S < T:
        mask, causal = causal_mask(S, T, window, q.device), False
    else:
        mask, causal = None, S == T  # one query at the last key sees all
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=N != G)
    return out.permute(2, 0, 1, 3).reshape(S, B, N * D)
