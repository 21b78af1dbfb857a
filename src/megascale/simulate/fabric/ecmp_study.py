"""Hash conflicts of a fabric's traffic, drawn and in closed form, for several numbers of queue pairs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from megascale.errors import ConfigError
from megascale.simulate.fabric.ecmp import (
    Entropy,
    Flows,
    expected_conflicts,
    five_tuple_keys,
    leaf_uplink_counts,
    measured_conflicts,
    route,
)
from megascale.simulate.fabric.max_min import fair_rates
from megascale.simulate.fabric.topology import Topology


def neighbours(topology: Topology, same_leaf: float) -> Flows:
    """Every NIC sends 1 byte to its peer under the next set of leaf switches; a share stays under its own."""
    spec = topology.spec
    host, rail = np.divmod(np.arange(topology.nics), spec.nics)
    place = host % spec.hosts_per_set
    is_local = place < round(same_leaf * spec.hosts_per_set)
    base = host - place
    near = base + (place + 1) % np.minimum(spec.hosts_per_set, spec.hosts - base)
    far = (host + spec.hosts_per_set) % spec.hosts
    return Flows.from_arrays(host * spec.nics + rail, np.where(is_local, near, far) * spec.nics + rail, 1.0)


def study(
    topology: Topology, queue_pairs: list[int], same_leaf: float, draws: int, seed: int, entropy: Entropy,
    polarised: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each number of queue pairs: conflicts at the first leaf switch, and the slowest flow's whole path."""
    if topology.leaves < 2:
        raise ConfigError(
            "hosts: one set of leaf switches has no uplinks to hash over; use more hosts than hosts_per_set"
        )
    flows = neighbours(topology, same_leaf)
    leaf = topology.leaf_of
    ours = (leaf[flows.source] == 0) & (leaf[flows.target] != 0)
    if not ours.any():
        raise ConfigError(f"--same-leaf={same_leaf:g} leaves no flow on the uplinks; use less than 1")
    uplinks = topology.uplinks.shape[1]
    speed = topology.spec.port_gbps / topology.spec.plane_gbps
    rows = []
    for count in queue_pairs:
        seen = leaf_uplink_counts(topology, flows, 0, draws, count, seed, entropy, polarised)
        # All queue pairs of a flow share one path if the NIC gives them one port: then they are one flow.
        cut = count if entropy == "qp" else 1
        closed = expected_conflicts(int(ours.sum()) * cut, uplinks, speed * cut)
        worst = []
        split = flows.split(count)
        for draw in range(min(draws, 5)):
            keys = five_tuple_keys(split, seed + draw, count, entropy)
            rates = fair_rates(route(topology, split, keys, seed + draw, polarised), topology.bandwidth)
            whole = rates.reshape(-1, count)
            # The flow ends with its slowest queue pair.
            worst.append(topology.bandwidth[0] / (count * whole.min(axis=1).min()))
        rows.append({
            "queue_pairs": count, "flows": int(ours.sum()), "uplinks": uplinks, "capacity": speed,
            "hashed": asdict(measured_conflicts(seen, speed * count)), "closed": asdict(closed),
            "path_worst": float(np.mean(worst)),
        })  # fmt: skip
    return rows
