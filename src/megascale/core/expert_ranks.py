"""Way of tokens to the ranks of the expert axis (parallel.expert): gathered by all, or sent to those that need them. No
torch.
"""

from __future__ import annotations

from megascale.config.experts_section import ExpertsConfig

# Share of the ranks from which on a gather, whose sizes are known beforehand, is better than an all-to-all.
_GATHERED_SHARE = 0.5


def reached_share(settings: ExpertsConfig, tensor: int, expert: int) -> float:
    """Return the expected share of the ranks of the expert axis that have an expert of a token, for an even load.

    A rank of `tensor` tensor-parallel ones is responsible for its part of the token's experts.
    """
    return 1 - (1 - 1 / expert) ** (settings.top_k / tensor)


def gathers_expert_tokens(settings: ExpertsConfig, tensor: int, expert: int, exchange: str = "collectives") -> bool:
    """Return whether all ranks gather the tokens of all, because a token reaches most ranks anyway.

    Args:
        exchange: overlap.expert. Requested copies can gather only, and take no SMs from the GEMMs beside them.
    """
    return exchange == "copies" or reached_share(settings, tensor, expert) > _GATHERED_SHARE
