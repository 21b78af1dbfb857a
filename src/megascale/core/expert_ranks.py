"""Choice between a gather and an all-to-all of tokens over the expert axis (parallel.expert). No torch."""

from __future__ import annotations

from megascale.config.experts_section import ExpertsConfig

# If a token reaches more than this share of the ranks, a gather is better than an all-to-all, because the sizes of its
# messages are known in advance.
_GATHERED_SHARE = 0.5


def reached_share(settings: ExpertsConfig, tensor: int, expert: int) -> float:
    """Return the expected fraction of expert-axis ranks that have at least one of a token's experts, for an even load.

    Each of `tensor` tensor-parallel ranks sends the token to its part of the token's experts only.
    """
    return 1 - (1 - 1 / expert) ** (settings.top_k / tensor)


def gathers_expert_tokens(settings: ExpertsConfig, tensor: int, expert: int, exchange: str = "collectives") -> bool:
    """Return whether every rank gathers all tokens, because a token would reach most ranks anyway.

    Args:
        exchange: value of overlap.expert. "copies" can only gather. Its gathers use copy engines and no SMs.
    """
    return exchange == "copies" or reached_share(settings, tensor, expert) > _GATHERED_SHARE
