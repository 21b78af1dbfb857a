"""Attention heads of a rank when ranks along the context axis divide the tokens of each sequence. No torch.

In attention, each context rank has some heads for all tokens of a sequence instead of all heads for some tokens
(Ulysses, Jacobs et al. 2023, arXiv 2309.14509). So masks need no change, and causal attention is balanced. If there are
more context ranks than key/value heads, each key/value head is sent to several ranks. If the number of ranks does not
divide that of the query heads, keys and values are gathered instead, and each rank attends with the queries of its own
tokens.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple


class HeadShare(NamedTuple):
    """Heads of a context rank's attention.

    Attributes:
        heads, kv_heads: query heads and key/value heads with which the rank attends.
        copies: number of ranks to which each key/value head is sent.
        gathers_keys: whether the rank attends with all heads, for the queries of its own tokens, over gathered keys.
    """

    heads: int
    kv_heads: int
    copies: int = 1
    gathers_keys: bool = False


HEAD_PARTS = 2  # in which heads are exchanged with overlap.context_parts


def count_head_parts(share: HeadShare, in_parts: bool) -> int:
    """Return in how many parts a rank's heads are exchanged and attended with.

    Args:
        in_parts: value of overlap.context_parts. Heads that HEAD_PARTS does not divide are exchanged at once.
    """
    if in_parts and not share.gathers_keys and share.copies == 1 and share.kv_heads % HEAD_PARTS == 0:
        return HEAD_PARTS
    return 1


def share_heads(heads: int, kv_heads: int, ranks: int) -> HeadShare:
    """Return the heads of each of `ranks` context ranks, which divide the heads of a tensor-parallel rank."""
    if heads % ranks:
        return HeadShare(heads, kv_heads, gathers_keys=True)
    # The fewest key/value heads, copies included, that the ranks divide evenly. Both `kv_heads` and `ranks` divide
    # `heads`, so this number divides `heads` as well.
    sent_heads = lcm(kv_heads, ranks)
    return HeadShare(heads // ranks, sent_heads // ranks, copies=sent_heads // kv_heads)


def list_gather_kernels(softcap: float | None, has_documents: bool) -> tuple[str, ...]:
    """Return the attention kernels that support gathered keys: those that align the last query with the last key.

    The first kernel computes every shape on every device, with an explicit mask.
    """
    if softcap is not None:
        return ("eager",) if has_documents else ("eager", "flex")
    return ("sdpa",) if has_documents else ("sdpa", "flash_window", "flex", "cudnn_frontend", "flash4")


def find_first_key(first_query: int, window: int | None) -> int:
    """Return the index of the first key that any query from `first_query` on attends to."""
    return 0 if window is None else max(0, first_query + 1 - window)


def list_gathered_keys(length: int, ranks: int, window: int | None) -> list[int]:
    """Return for each context rank the number of gathered keys to which the queries of its slice attend."""
    rows = length // ranks
    return [(rank + 1) * rows - find_first_key(rank * rows, window) for rank in range(ranks)]
