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


def list_gather_kernels(softcap: float | None, has_documents: bool) -> tuple[str, ...]:
    """Return the kernels of attention over gathered keys: those that align the last query with the last key.

    The first one computes every shape on every device, with an explicit mask.
    """
    if softcap is not None:
        return ("eager",) if has_documents else ("eager", "flex")
    return ("sdpa",) if has_documents else ("sdpa", "flash_window", "flex", "cudnn_frontend", "flash4")


def find_first_key(first_query: int, window: int | None) -> int:
    """Return the first key that the queries from `first_query` on see."""
    return 0 if window is None else max(0, first_query + 1 - window)


def list_gathered_keys(length: int, ranks: int, window: int | None) -> list[int]:
    """Return the keys that the queries of each context rank's slice see, where keys are gathered."""
    rows = length // ranks
    return [(rank + 1) * rows - find_first_key(rank * rows, window) for rank in range(ranks)]
