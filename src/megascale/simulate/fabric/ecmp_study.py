"""Study of hash conflicts on a fabric, measured and in closed form, for several numbers of queue pairs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from megascale.errors import ConfigError
from megascale.simulate.fabric.conflicts import (
    compute_expected_conflicts,
    compute_measured_conflicts,
    count_leaf_uplink_flows,
)
from megascale.simulate.fabric.ecmp import Entropy, Flows, hash_five_tuples, route_flows
from megascale.simulate.fabric.max_min import compute_fair_rates
from megascale.simulate.fabric.topology import Topology


def make_ring_flows(topology: Topology, leaf_share: float) -> Flows:
    """Return flows of 1 byte from every NIC to the same NIC of another host.

    The share `leaf_share` of the hosts sends to the next host under the same leaf switches, the others to the host at
    the same position under the next set of leaf switches.
    """
    spec = topology.spec
    host, rail = np.divmod(np.arange(topology.nics), spec.nics)
    position_in_set = host % spec.hosts_per_set
    is_local = position_in_set < round(leaf_share * spec.hosts_per_set)
    first_in_set = host - position_in_set
    set_size = np.minimum(spec.hosts_per_set, spec.hosts - first_in_set)
    near = first_in_set + (position_in_set + 1) % set_size
    far = (host + spec.hosts_per_set) % spec.hosts
    return Flows.from_arrays(host * spec.nics + rail, np.where(is_local, near, far) * spec.nics + rail, 1.0)


def study_hash_conflicts(
    topology: Topology, queue_pairs: list[int], leaf_share: float, draws: int, seed: int, entropy: Entropy,
    polarised: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return one row per number of queue pairs: conflicts at the first leaf switch, and the slowest flow of the fabric.

    Raises ConfigError if no flow uses the uplinks.
    """
    if topology.leaves < 2:
        raise ConfigError(
            "hosts: one set of leaf switches has no uplinks to hash over; use more hosts than hosts_per_set"
        )
    flows = make_ring_flows(topology, leaf_share)
    leaf = topology.leaf_of
    uses_uplinks = (leaf[flows.source] == 0) & (leaf[flows.target] != 0)  # of the first leaf switch
    flow_count = int(uses_uplinks.sum())
    if not flow_count:
        raise ConfigError(f"--same-leaf={leaf_share:g} leaves no flow on the uplinks; use less than 1")
    uplinks = topology.uplinks.shape[1]
    capacity = topology.spec.port_gbps / topology.spec.plane_gbps  # flows that an uplink carries at full rate
    rows = []
    for count in queue_pairs:
        counts = count_leaf_uplink_flows(
            topology,
            flows,
            leaf=0,
            draws=draws,
            queue_pairs=count,
            seed=seed,
            entropy=entropy,
            polarised=polarised,
        )
        # If the NIC has one port for all queue pairs of a flow, they have one path and count as one flow.
        hashed_per_flow = count if entropy == "qp" else 1
        expected = compute_expected_conflicts(flow_count * hashed_per_flow, uplinks, capacity * hashed_per_flow)
        slowest_times = []
        split_flows = flows.split(count)
        for draw in range(min(draws, 5)):
            keys = hash_five_tuples(split_flows, seed + draw, entropy)
            rates = compute_fair_rates(
                route_flows(topology, split_flows, keys, seed + draw, polarised), topology.bandwidth
            )
            # A flow ends with its slowest queue pair.
            slowest_rate = rates.reshape(-1, count).min(axis=1).min()
            slowest_times.append(topology.bandwidth[0] / (count * slowest_rate))
        rows.append({
            "queue_pairs": count, "flows": flow_count, "uplinks": uplinks, "capacity": capacity,
            "hashed": asdict(compute_measured_conflicts(counts, capacity * count)), "closed": asdict(expected),
            "path_worst": float(np.mean(slowest_times)),
        })  # fmt: skip
    return rows
