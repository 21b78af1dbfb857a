"""Conflicts between flows that are hashed to the same uplink, measured on simulated routes and in closed form.

In closed form, n equal flows are hashed over k uplinks, each of which carries c flows at full rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb, lgamma

import numpy as np

from megascale.errors import ConfigError
from megascale.simulate.fabric.ecmp import Entropy, Flows, hash_five_tuples, route_flows
from megascale.simulate.fabric.topology import Floats, Ints, Topology

_MAX_EXACT_TRIALS = 300  # from here on, binomial coefficients may overflow a float


@dataclass(frozen=True)
class Conflicts:
    """Conflicts between flows that are hashed over uplinks, each of which carries c flows at full rate.

    Attributes:
        utilisation: share of the flows' demand that is carried while all are active.
        slowdown: finish time divided by the finish time without conflicts, mean over flows.
        worst: the same for the slowest flow, for which a collective waits; mean over hash seeds.
        worst_p99: the same for the slowest flow; 99th percentile over hash seeds.
        shared: share of the flows on an uplink with more flows than it carries at full rate.
    """

    utilisation: float
    slowdown: float
    worst: float
    worst_p99: float
    shared: float


def compute_fullest_uplink_probabilities(flows: int, uplinks: int) -> Floats:
    """Return the probabilities [n + 1] that the fullest of k uplinks has exactly 0 to n of n hashed flows.

    The values are exact. The number of assignments with at most m flows per uplink is n! times the coefficient of x^n
    in (sum_{i<=m} x^i / i!)^k.
    """
    log_factorial = np.array([lgamma(i + 1) for i in range(flows + 1)])
    cumulative = np.zeros(flows + 1)  # probability that the fullest uplink has at most 0 to n flows
    for maximum in range(flows + 1):
        if maximum * uplinks < flows:
            continue
        # Compute the k-th power by repeated squaring. Replacing x by x n/k, and dividing by e^(n/k), makes the
        # coefficients Poisson probabilities and keeps them from overflowing.
        i = np.arange(maximum + 1)
        if flows:
            uplink_terms = np.exp(i * np.log(flows / uplinks) - log_factorial[: maximum + 1] - flows / uplinks)
        else:
            uplink_terms = np.ones(1)
        power = np.ones(1)
        base = uplink_terms
        remaining = uplinks
        while remaining:
            if remaining & 1:
                power = np.convolve(power, base)[: flows + 1]
            base = np.convolve(base, base)[: flows + 1]
            remaining >>= 1
        # Independent Poisson occupancies whose sum is n are distributed like the hashed flows.
        if flows:
            sum_probability = np.exp(flows * np.log(flows) - flows - log_factorial[flows])
        else:
            sum_probability = 1.0
        if len(power) > flows:
            cumulative[maximum] = power[flows] / sum_probability
        if cumulative[maximum] > 1 - 1e-12:  # the remaining values are 1 up to rounding
            cumulative[maximum:] = 1.0
            break
    return np.diff(cumulative, prepend=0.0)


@lru_cache(maxsize=256)
def compute_expected_conflicts(flows: int, uplinks: int, capacity: float) -> Conflicts:
    """Return the conflicts in closed form.

    The number of flows on an uplink is distributed as Binomial(n, 1/k), and on the fullest uplink as in
    `compute_fullest_uplink_probabilities`. A flow's slow-down is max(1, X/c), where X is the number of flows on its
    uplink: the flow itself and Binomial(n-1, 1/k) other flows.
    """
    if min(flows, uplinks) < 1 or capacity <= 0:
        raise ConfigError(f"flows={flows}, uplinks={uplinks}, capacity={capacity:g}: all must be positive")
    occupancies = np.arange(flows + 1)
    probabilities = _binomial_probabilities(flows, 1 / uplinks)
    carried = uplinks * float(probabilities @ np.minimum(occupancies, capacity))
    # The same distribution, seen from a flow: its uplink has at least this flow.
    flow_occupancies = np.arange(1, flows + 1)
    flow_probabilities = _binomial_probabilities(flows - 1, 1 / uplinks)
    fullest_probabilities = compute_fullest_uplink_probabilities(flows, uplinks)
    slowdowns = np.maximum(1.0, occupancies / capacity)
    return Conflicts(
        utilisation=carried / min(flows, uplinks * capacity),
        slowdown=float(flow_probabilities @ np.maximum(1.0, flow_occupancies / capacity)),
        worst=float(fullest_probabilities @ slowdowns),
        worst_p99=float(slowdowns[np.searchsorted(np.cumsum(fullest_probabilities), 0.99)]),
        shared=float(flow_probabilities @ (flow_occupancies > capacity)),
    )


def _binomial_probabilities(n: int, p: float) -> Floats:
    """Return the probabilities of 0 to n successes: [n + 1]."""
    if p >= 1:
        return np.eye(n + 1)[n]
    k = np.arange(n + 1)
    if n < _MAX_EXACT_TRIALS:
        return np.array([float(comb(n, int(i))) for i in k]) * p**k * (1 - p) ** (n - k)
    # Use logarithms, because the coefficients would overflow.
    log_coefficients = np.array([lgamma(n + 1) - lgamma(i + 1) - lgamma(n - i + 1) for i in k])
    return np.exp(log_coefficients + k * np.log(p) + (n - k) * np.log1p(-p))


def compute_measured_conflicts(counts: Ints, capacity: float) -> Conflicts:
    """Return the conflicts of measured occupancies.

    Args:
        counts: number of flows on each uplink, [draws, uplinks].
        capacity: c, number of flows that an uplink carries at full rate.
    """
    flows = counts.sum(axis=1)
    slowdowns = np.maximum(1.0, counts / capacity)
    worst = np.where(counts > 0, slowdowns, 1.0).max(axis=1)
    total = flows.sum()
    return Conflicts(
        utilisation=float(np.minimum(counts, capacity).sum() / np.minimum(flows, counts.shape[1] * capacity).sum()),
        slowdown=float((counts * slowdowns).sum() / total),
        worst=float(worst.mean()),
        worst_p99=float(np.percentile(worst, 99, method="inverted_cdf")),
        shared=float(counts[counts > capacity].sum() / total),
    )


def count_leaf_uplink_flows(
    topology: Topology,
    flows: Flows,
    leaf: int,
    draws: int,
    queue_pairs: int = 1,
    seed: int = 0,
    entropy: Entropy = "qp",
    polarised: bool = False,
) -> Ints:
    """Return the number of flows on each uplink of a leaf switch: [draws, u].

    Each draw is one start of the job, with other UDP ports and the same traffic.
    """
    is_from_leaf = topology.leaf_of[flows.source] == leaf
    leaf_flows = Flows(
        flows.source[is_from_leaf], flows.target[is_from_leaf], flows.size[is_from_leaf], flows.group[is_from_leaf]
    ).split(queue_pairs)
    width = topology.uplinks.shape[1]
    counts = np.zeros((draws, width), np.int64)
    first = topology.first_leaf_uplink + leaf * width
    for draw in range(draws):
        keys = hash_five_tuples(leaf_flows, seed + draw, entropy)
        up = route_flows(topology, leaf_flows, keys, seed + draw, polarised)[:, 1]
        counts[draw] = np.bincount(up[up >= 0] - first, minlength=width)
    return counts
