"""Small fabrics that several tests use."""

from __future__ import annotations

from typing import Any

import numpy as np

from megascale.simulate.fabric.ecmp import Flows
from megascale.simulate.fabric.fabric_spec import load_fabric
from megascale.simulate.fabric.topology import Topology, build_topology


def fabric(**changes: Any) -> Topology:
    """The shipped fabric with changes; by default 64 hosts of 2 NICs in 8 sets, three tiers."""
    small = {"hosts": 64, "nics": 2, "hosts_per_set": 8, "switch_ports": 16}
    return build_topology(load_fabric("megascale", {**small, **changes}))


def check_paths(topology: Topology, flows: Flows, paths: np.ndarray) -> None:
    """Every path leads from source to target over links that join and live."""
    for flow in range(len(flows)):
        links = paths[flow][paths[flow] >= 0]
        assert topology.tail[links[0]] == flows.source[flow]
        assert topology.head[links[-1]] == flows.target[flow]
        assert (topology.head[links[:-1]] == topology.tail[links[1:]]).all()
        assert (topology.bandwidth[links] > 0).all()
