"""Equal-cost multi-path routing (ECMP): the links of each flow.

Every switch hashes a flow's five-tuple to choose among links. The five-tuple of a RoCE flow is source and destination
address, UDP source port, destination port 4791, and protocol UDP. NICs derive the source port from the queue pair, so
switches treat each queue pair as a separate flow. Each switch has a hash seed. If all switches have the same seed, a
switch of the second tier receives only flows with equal hashes and sends all of them to one link (polarisation). The
hash functions of real switches are not public. Here splitmix64's finaliser, which has good statistics, replaces them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megascale.errors import ConfigError
from megascale.simulate.fabric.topology import Bools, Floats, Ints, Topology, find_reachable_leaves

Keys = NDArray[np.uint64]
Entropy = Literal["qp", "pair"]

UDP = 17  # number of the protocol
ROCE_PORT = 4791
HOPS = 6  # columns of a path


@dataclass(frozen=True)
class Flows:
    """Transfers between NICs.

    Attributes:
        source, target: [F] NICs.
        size: [F] bytes.
        group: [F] number of the flow's collective, for reports; 0 if it does not matter.
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
        sources, targets, sizes, groups = np.broadcast_arrays(
            np.asarray(source, np.int64), np.asarray(target, np.int64), np.asarray(size, float), np.asarray(group)
        )
        if (sizes < 0).any():
            raise ConfigError(f"a flow of {sizes.min():g} bytes: sizes must be 0 or more")
        return cls(sources.ravel(), targets.ravel(), sizes.ravel(), groups.ravel().astype(np.int64))

    @classmethod
    def join(cls, *flows: Flows) -> Flows:
        return cls(
            np.concatenate([item.source for item in flows]),
            np.concatenate([item.target for item in flows]),
            np.concatenate([item.size for item in flows]),
            np.concatenate([item.group for item in flows]),
        )

    def split(self, queue_pairs: int) -> Flows:
        """Return F x queue_pairs flows. Each flow is divided evenly over its queue pairs, which are consecutive."""
        if queue_pairs < 1:
            raise ConfigError(f"queue pairs={queue_pairs}: a flow needs at least one")
        q = queue_pairs
        return Flows(
            np.repeat(self.source, q), np.repeat(self.target, q), np.repeat(self.size / q, q), np.repeat(self.group, q)
        )


def _mix(x: Keys) -> Keys:
    """Return splitmix64's finaliser, in which every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_five_tuples(flows: Flows, seed: int, entropy: Entropy = "qp") -> Keys:
    """Return a hash of each flow's five-tuple, [F].

    Args:
        seed: determines the numbers of queue pairs and the addresses, which differ between starts of a job.
        entropy: "qp": the NIC derives the UDP source port (14 bits) from the queue pair; "pair": one port for each pair
            of NICs, so that all queue pairs of a flow take one path.
    """
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed], np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
        source, target = flows.source.astype(np.uint64), flows.target.astype(np.uint64)
        address = (source << np.uint64(32)) | target
        if entropy == "qp":
            port_source = np.arange(len(flows), dtype=np.uint64) + np.uint64(1) + _mix(address + start)
        else:
            port_source = address
        port = (_mix(port_source ^ start) & np.uint64(0x3FFF)) | np.uint64(0xC000)
        low_bits = (port << np.uint64(24)) | np.uint64(ROCE_PORT << 8 | UDP)
        return _mix(_mix(address ^ start) + low_bits)


def route_flows(topology: Topology, flows: Flows, keys: Keys, seed: int = 0, polarised: bool = False) -> Ints:
    """Return the numbers of the links of each flow's path: [F, 6], -1 for hops that a path does not have.

    The columns are NIC to leaf, leaf up, aggregation up, core down, aggregation down, leaf to NIC. Failed links are not
    used, and neither are links to switches without a path to the target, since BGP withdraws these routes.

    Args:
        keys: [F] hashes of the five-tuples (`hash_five_tuples`).
        seed: determines the hash seeds of the switches.
        polarised: whether all switches have the same hash seed.
    """
    flow_nics = np.concatenate([flows.source, flows.target])
    if len(flow_nics) and (flow_nics.min() < 0 or flow_nics.max() >= topology.nics):
        raise ConfigError(f"a flow names NIC {flow_nics.max()}; fabric {topology.spec.name!r} has {topology.nics}")
    paths = np.full((len(flows), HOPS), -1, np.int64)
    paths[:, 0] = flows.source
    paths[:, 5] = topology.first_nic_downlink + flows.target
    source_leaf = topology.leaf_of[flows.source]
    target_leaf = topology.leaf_of[flows.target]
    crossing = np.flatnonzero(source_leaf != target_leaf)  # flows that leave their leaf switch
    if not len(crossing):
        return paths
    source_leaf = source_leaf[crossing]
    target_leaf = target_leaf[crossing]
    keys = keys[crossing]
    with np.errstate(over="ignore"):
        switches = np.arange(topology.leaves + topology.aggregations + topology.cores, dtype=np.uint64)
        if polarised:
            seeds = np.zeros_like(switches)
        else:
            seeds = _mix(switches + np.uint64(seed * 1_000_003 + 7))

    def choose(switch: Ints, flow_keys: Keys, counts: Ints) -> Ints:
        """Return the index that a switch's hash gives each flow, 0 to `counts` - 1."""
        return (_mix(flow_keys ^ seeds[switch]) % counts.astype(np.uint64)).astype(np.int64)

    has_failures = bool(topology.spec.failed)
    if has_failures:
        agg_reachable, core_reachable = find_reachable_leaves(topology)
    is_live = topology.bandwidth > 0
    width = topology.uplinks.shape[1]
    usable = None  # which uplinks of its source's leaf switch each flow may take, [F, width]; None: all
    if has_failures:
        is_uplink_live = is_live[topology.first_leaf_uplink : topology.first_leaf_uplink + topology.uplinks.size]
        is_uplink_live = is_uplink_live.reshape(topology.uplinks.shape)
        usable = is_uplink_live[source_leaf] & agg_reachable[topology.uplinks[source_leaf], target_leaf[:, None]]
    up = _choose_uplinks(source_leaf, keys, width, choose, usable)
    paths[crossing, 1] = topology.first_leaf_uplink + source_leaf * width + up
    agg = topology.uplinks[source_leaf, up]

    # `seeds` holds the hash seeds of leaf, aggregation and core switches, in this order.
    first_agg = topology.leaves
    first_core = first_agg + topology.aggregations
    # Flows whose aggregation switch has no link to the target's leaf switch go over the core.
    over_core = topology.agg_downlink_counts[agg, target_leaf] == 0
    if over_core.any():
        agg = agg.copy()
        source_agg = agg[over_core]
        core_keys = keys[over_core]
        core_target_leaf = target_leaf[over_core]
        width = topology.core_links.shape[1]
        usable = None
        if has_failures:
            is_uplink_live = is_live[topology.first_agg_uplink : topology.first_agg_uplink + topology.core_links.size]
            is_uplink_live = is_uplink_live.reshape(topology.core_links.shape)
            cores = topology.core_links[source_agg]
            usable = is_uplink_live[source_agg] & core_reachable[cores, core_target_leaf[:, None]]
        up = _choose_uplinks(source_agg + first_agg, core_keys, width, choose, usable)
        paths[crossing[over_core], 2] = topology.first_agg_uplink + source_agg * width + up
        core = topology.core_links[source_agg, up]
        # A core switch leads to the aggregation switch at the same position in the target's pod.
        position = source_agg % topology.aggregations_per_pod
        target_agg = topology.pod_of[core_target_leaf] * topology.aggregations_per_pod + position
        agg[over_core] = target_agg
        parallel_link = choose(core + first_core, core_keys, topology.core_downlink_counts[core, target_agg])
        paths[crossing[over_core], 3] = topology.core_downlinks[core, target_agg, parallel_link]
    parallel_link = choose(agg + first_agg, keys, topology.agg_downlink_counts[agg, target_leaf])
    paths[crossing, 4] = topology.agg_downlinks[agg, target_leaf, parallel_link]
    return paths


def _choose_uplinks(
    switch: Ints, keys: Keys, width: int, choose: Callable[[Ints, Keys, Ints], Ints], usable: Bools | None
) -> Ints:
    """Return the index of the uplink that each flow takes, 0 to `width` - 1.

    Args:
        switch: number of each flow's switch in the order of hash seeds, [F].
        choose: returns an index by the switch's hash, below a count.
        usable: which uplinks each flow may take, [F, width]; None: all.
    """
    if usable is None:
        return choose(switch, keys, np.full(len(keys), width))
    index = choose(switch, keys, usable.sum(axis=1))  # index among the usable uplinks
    # Count the uplinks up to which there are at most `index` usable ones.
    uplinks: Ints = (np.cumsum(usable, axis=1) <= index[:, None]).sum(axis=1)
    return uplinks
