"""Exposed seconds of what long sequences and experts exchange inside a layer: keys and values around a ring, tokens to
experts and back. Closed form only; training itself has neither yet, so nothing of this was held against a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.network import Network


def ring_attention(cluster: ClusterSpec, case: Case, network: Network, forward: Any, backward: Any) -> tuple[Any, Any]:
    """Context parallelism: keys and values go round while attention works on those that are here.

    `forward`, `backward`: seconds of a rank's attention, which hide the transfers. In backward the gradients of keys
    and values go round too. Causal work is taken as balanced over the ranks (each has an early and a late part).
    """
    steps = case.context - 1
    block = 2.0 * 2.0 * case.tokens * case.kv / case.tensor
    inside = case.tensor * case.context <= cluster.gpus_per_host
    block_seconds = np.where(steps > 0, network.p2p(block, inside), 0.0)
    # Each step of the ring hides behind one of `context` parts of attention.
    waits = [
        np.maximum(0.0, steps * factor * block_seconds - work * steps / case.context)
        for factor, work in ((1.0, forward), (2.0, backward))
    ]
    return waits[0], waits[1]


def expert_exchange(cluster: ClusterSpec, case: Case, network: Network) -> tuple[Any, Any]:
    """Experts on several ranks: an all-to-all of tokens there and one back, forward and again backward; all exposed.

    Tokens are taken as spread evenly over experts; each goes to `top_k` of them.
    """
    away = (case.expert_parallel - 1) / case.expert_parallel
    width = case.hidden / np.where(case.sequence_parallel, case.tensor, 1)
    moved = 2.0 * case.tokens * width * case.top_k * away
    inside = case.tensor * case.context * case.expert_parallel <= cluster.gpus_per_host
    round_trip = np.where(case.expert_parallel > 1, 2.0 * network.p2p(moved, inside), 0.0)
    return round_trip, round_trip
