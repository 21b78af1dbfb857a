"""Equal-cost multi-path: which links a flow takes, by hashing its five-tuple at every switch; and what that costs.

A RoCE flow's five-tuple is source and destination address, UDP source port, port 4791, protocol UDP; NICs derive the
source port from the queue pair, so each queue pair is a flow of its own to the switches. Every switch hashes with a
seed of its own. With one seed for all (`polarised`) a switch of the second tier sees only flows whose hash chose it
and sends them all the same way: polarisation. Real switches hash by vendors' functions that are not public; a mix of
good statistics (splitmix64's finaliser) stands for them.

The closed form (binomial occupancy) is the yardstick of the Monte Carlo: n equal flows hashed over k uplinks that
carry c of them at full rate each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb, lgamma
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megascale.errors import ConfigError
from megascale.simulate.fabric.topology import Bools, Floats, Ints, Topology, find_reachable_leaves

Keys = NDArray[np.uint64]
Entropy = Literal["qp", "pair"]

UDP = 17
ROCE_PORT = 4791
HOPS = 6


@dataclass(frozen=True)
class Flows:
    """Transfers between NICs.

    Attributes:
        source, target: [F] NICs.
        size: [F] bytes.
        group: [F] number of the collective that a flow belongs to, for reports; 0 if it does not matter.
    """

    source: Ints
    target: Ints
    size: Floats
    group: Ints

    def __len__(self) -> int:
        return len(self.source)

    @classmethod
    def from_arrays(cls, source: object, target: object, size: object, group: object = 0) -> Flows:
        """Return flows from array-likes that broadcast. Raises ConfigError for negative sizes."""
        a, b, s, g = np.broadcast_arrays(
            np.asarray(source, np.int64), np.asarray(target, np.int64), np.asarray(size, float), np.asarray(group)
        )
        if (s < 0).any():
            raise ConfigError(f"a flow of {s.min():g} bytes: sizes are 0 or more")
        return cls(a.ravel(), b.ravel(), s.ravel(), g.ravel().astype(np.int64))

    @classmethod
    def join(cls, *parts: Flows) -> Flows:
        """Concatenate flows."""
        return cls(
            np.concatenate([p.source for p in parts]),
            np.concatenate([p.target for p in parts]),
            np.concatenate([p.size for p in parts]),
            np.concatenate([p.group for p in parts]),
        )

    def split(self, queue_pairs: int) -> Flows:
        """Return F x queue_pairs flows: each flow spread evenly over its queue pairs, which are neighbours."""
        if queue_pairs < 1:
            raise ConfigError(f"queue pairs={queue_pairs}: a flow has at least one")
        q = queue_pairs
        return Flows(
            np.repeat(self.source, q), np.repeat(self.target, q), np.repeat(self.size / q, q), np.repeat(self.group, q)
        )


def _mix(x: Keys) -> Keys:
    """Return splitmix64's finaliser, in which every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def five_tuple_keys(flows: Flows, seed: int, queue_pairs: int = 1, entropy: Entropy = "qp") -> Keys:
    """Return a hash of each flow's five-tuple, [F].

    Args:
        seed: stands for the queue-pair numbers and addresses of one start of the job.
        queue_pairs: number of neighbours in `flows` that are queue pairs of one flow.
        entropy: "qp": the NIC derives the UDP source port (14 bits of freedom) from the queue pair; "pair": one port
            for each pair of NICs, so that all queue pairs of a flow take one path.
    """
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed], np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
        source, target = flows.source.astype(np.uint64), flows.target.astype(np.uint64)
        address = (source << np.uint64(32)) | target
        if entropy == "qp":
            number = np.arange(len(flows), dtype=np.uint64)
        else:
            number = address
        if entropy == "qp":
            number = number + np.uint64(1) + _mix(address + start)
        port = (_mix(number ^ start) & np.uint64(0x3FFF)) | np.uint64(0xC000)
        low_bits = (port << np.uint64(24)) | np.uint64(ROCE_PORT << 8 | UDP)
        return _mix(_mix(address ^ start) + low_bits)


def route(topology: Topology, flows: Flows, keys: Keys, seed: int = 0, polarised: bool = False) -> Ints:
    """Return the numbers of the links that each flow takes, [F, 6]; -1 where a path is shorter.

    Columns: NIC to leaf, leaf up, aggregation up, core down, aggregation down, leaf to NIC. Failed links are not
    chosen, nor links to switches without a path to the target, since BGP would withdraw these routes.
    """
    outside = np.concatenate([flows.source, flows.target])
    if len(outside) and (outside.min() < 0 or outside.max() >= topology.nics):
        raise ConfigError(f"a flow names NIC {outside.max()}; fabric {topology.spec.name!r} has {topology.nics}")
    paths = np.full((len(flows), HOPS), -1, np.int64)
    paths[:, 0] = flows.source
    paths[:, 5] = topology.down_nic + flows.target
    start, goal = topology.leaf_of[flows.source], topology.leaf_of[flows.target]
    away = np.flatnonzero(start != goal)
    if not len(away):
        return paths
    start = start[away]
    goal = goal[away]
    keys = keys[away]
    with np.errstate(over="ignore"):
        switches = np.arange(topology.leaves + topology.aggregations + topology.cores, dtype=np.uint64)
        if polarised:
            seeds = np.zeros_like(switches)
        else:
            seeds = _mix(switches + np.uint64(seed * 1_000_003 + 7))

    def pick(switch: Ints, which: Keys, counts: Ints) -> Ints:
        return (_mix(which ^ seeds[switch]) % counts.astype(np.uint64)).astype(np.int64)

    is_intact = not topology.spec.failed
    agg_ok, core_ok = (None, None) if is_intact else find_reachable_leaves(topology)
    live = topology.bandwidth > 0
    width = topology.uplinks.shape[1]
    first = live[topology.up_leaf : topology.up_leaf + topology.uplinks.size].reshape(topology.uplinks.shape)
    up = _choose(
        start,
        keys,
        width,
        pick,
        None if agg_ok is None else first[start] & agg_ok[topology.uplinks[start], goal[:, None]],
    )
    paths[away, 1] = topology.up_leaf + start * width + up
    agg = topology.uplinks[start, up]

    shift = topology.leaves
    far = topology.agg_reaches[agg, goal] == 0
    if far.any():
        agg = agg.copy()
        aggregation, high = agg[far], topology.core_links.shape[1]
        links = live[topology.up_agg : topology.up_agg + topology.core_links.size].reshape(topology.core_links.shape)
        if core_ok is None:
            good = None
        else:
            good = links[aggregation] & core_ok[topology.core_links[aggregation], goal[far][:, None]]
        up = _choose(aggregation + shift, keys[far], high, pick, good)
        paths[away[far], 2] = topology.up_agg + aggregation * high + up
        core = topology.core_links[aggregation, up]
        plane = aggregation % topology.per_pod
        agg[far] = topology.pod_of[goal[far]] * topology.per_pod + plane
        counts = topology.core_reaches[core, agg[far]]
        which = pick(core + shift + topology.aggregations, keys[far], counts)
        paths[away[far], 3] = topology.down_core[core, agg[far], which]
    which = pick(agg + shift, keys, topology.agg_reaches[agg, goal])
    paths[away, 4] = topology.down_agg[agg, goal, which]
    return paths


def _choose(switch: Ints, keys: Keys, width: int, pick, good: Bools | None) -> Ints:  # type: ignore[no-untyped-def]
    """Return which of `width` links each flow takes. `good` [F, width] masks links."""
    if good is None:
        return pick(switch, keys, np.full(len(keys), width))
    counts = good.sum(axis=1)
    which = pick(switch, keys, counts)
    return (np.cumsum(good, axis=1) <= which[:, None]).sum(axis=1)


# what hashing costs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conflicts:
    """Return the conflicts of n equal flows hashed over k uplinks that each carry c flows at full rate.

    Attributes:
        utilisation: share of the flows' demand that is carried while all are active.
        slowdown: mean over flows of their finish over that without conflicts.
        worst: mean of the slowest flow's; a collective waits for it.
        worst_p99: its 99th percentile.
        shared: share of the flows on an uplink with more flows than it carries.
    """

    utilisation: float
    slowdown: float
    worst: float
    worst_p99: float
    shared: float


def occupancy_of_worst(flows: int, uplinks: int) -> Floats:
    """[n+1] probability that the fullest of k uplinks has exactly m of n hashed flows; exact, by counting functions."""
    log_factorial = np.array([lgamma(i + 1) for i in range(flows + 1)])
    below = np.zeros(flows + 1)
    for maximum in range(flows + 1):
        if maximum * uplinks < flows:
            continue
        # Coefficients of (sum_{i<=most} (x s)^i / i!)^k with s = n/k: the scale keeps them near 1.
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
        # Poisson occupancies, given that they add up to n, are the multinomial's.
        if flows:
            total = np.exp(flows * np.log(flows) - flows - log_factorial[flows])
        else:
            total = 1.0
        below[maximum] = power[flows] / total if len(power) > flows else 0.0
        if below[maximum] > 1 - 1e-12:
            below[maximum:] = 1.0
            break
    return np.diff(below, prepend=0.0)


@lru_cache(maxsize=256)
def expected_conflicts(flows: int, uplinks: int, capacity: float) -> Conflicts:
    """Return the conflicts in closed form: each occupancy is Binomial(n, 1/k), the fullest by `occupancy_of_worst`.

    A flow's slow-down is max(1, X/c). X is the number of flows on its uplink: itself and Binomial(n-1, 1/k) others.
    """
    if min(flows, uplinks) < 1 or capacity <= 0:
        raise ConfigError(f"flows={flows}, uplinks={uplinks}, capacity={capacity:g}: all must be positive")
    p = 1 / uplinks
    x = np.arange(flows + 1)
    weights = _binomial(flows, p)
    carried = uplinks * float(weights @ np.minimum(x, capacity))
    flow_probabilities = _binomial(flows - 1, p)
    counts = np.arange(1, flows + 1)
    fullest = occupancy_of_worst(flows, uplinks)
    worst = np.maximum(1.0, x / capacity)
    return Conflicts(
        utilisation=carried / min(flows, uplinks * capacity),
        slowdown=float(flow_probabilities @ np.maximum(1.0, counts / capacity)),
        worst=float(fullest @ worst),
        worst_p99=float(worst[np.searchsorted(np.cumsum(fullest), 0.99)]),
        shared=float(flow_probabilities @ (counts > capacity)),
    )


def _binomial(n: int, p: float) -> Floats:
    if p >= 1:
        return np.eye(n + 1)[n]
    k = np.arange(n + 1)
    if n < 900:
        if n < 300:
            return np.array([float(comb(n, int(i))) for i in k]) * p**k * (1 - p) ** (n - k)
        return _big(n, p)
    return _big(n, p)


def _big(n: int, p: float) -> Floats:
    k = np.arange(n + 1)
    log = np.array([lgamma(n + 1) - lgamma(i + 1) - lgamma(n - i + 1) for i in k])
    return np.exp(log + k * np.log(p) + (n - k) * np.log1p(-p))


def measured_conflicts(counts: Ints, capacity: float) -> Conflicts:
    """The same figures of occupancies seen: `counts` [draws, uplinks]."""
    flows = counts.sum(axis=1)
    slow = np.maximum(1.0, counts / capacity)
    worst = np.where(counts > 0, slow, 1.0).max(axis=1)
    total = flows.sum()
    return Conflicts(
        utilisation=float(np.minimum(counts, capacity).sum() / np.minimum(flows, counts.shape[1] * capacity).sum()),
        slowdown=float((counts * slow).sum() / total),
        worst=float(worst.mean()),
        worst_p99=float(np.percentile(worst, 99, method="inverted_cdf")),
        shared=float(counts[counts > capacity].sum() / total),
    )


def leaf_uplink_counts(
    topology: Topology, flows: Flows, leaf: int, draws: int, queue_pairs: int = 1, seed: int = 0,
    entropy: Entropy = "qp", polarised: bool = False,
) -> Ints:  # fmt: skip
    """[draws, u] flows on each uplink of a leaf switch, each draw one start of the job (new ports, same traffic)."""
    is_from_leaf = topology.leaf_of[flows.source] == leaf
    leaf_flows = Flows(
        flows.source[is_from_leaf], flows.target[is_from_leaf], flows.size[is_from_leaf], flows.group[is_from_leaf]
    ).split(queue_pairs)
    width = topology.uplinks.shape[1]
    counts = np.zeros((draws, width), np.int64)
    first = topology.up_leaf + leaf * width
    for draw in range(draws):
        keys = five_tuple_keys(leaf_flows, seed + draw, queue_pairs, entropy)
        up = route(topology, leaf_flows, keys, seed + draw, polarised)[:, 1]
        counts[draw] = np.bincount(up[up >= 0] - first, minlength=width)
    return counts
