"""Attention heads of a rank when ranks along the context axis divide the tokens of each sequence. No torch.

Each context rank attends over whole sequences with a part of the heads (Ulysses, Jacobs et al. 2023, arXiv
2309.14509), which keeps every mask and balances causal attention. Where context ranks outnumber key/value heads, each
of these goes to several ranks. Where the ranks do not divide the query heads, keys and values are gathered, and each
rank attends with the queries of its own tokens.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple


class HeadShare(NamedTuple):
    """Heads of a rank's attention, and how often each of its key/value heads is sent.

    `gathers_keys` means that all heads attend with the queries of the rank's own tokens over gathered keys.
    """

    heads: int
    kv_heads: int
    copies: int = 1
    gathers_keys: bool = False


def share_heads(heads: int, kv_heads: int, ranks: int) -> HeadShare:
    """Return the share of each of `ranks` context ranks in the heads of a tensor-parallel rank."""
    if heads % ranks:
        return HeadShare(heads, kv_heads, gathers_keys=True)
    # The number of groups divides the heads and so does the number of ranks, hence also their common multiple.
    sent = lcm(kv_heads, ranks)
    return HeadShare(heads // ranks, sent // ranks, sent // kv_heads)


def find_gather_kernel(softcap: float | None) -> str:
    """Return the kernel of attention over gathered keys: the one with a mask for fewer queries than keys."""
    return "sdpa" if softcap is None else "eager"
