"""Collectives as flows between NICs, in bytes per call, for the algorithms of NCCL.

Rank i of a host sends through NIC i. Traffic within a host uses NVLink and has no flow. In all functions `size` is the
bytes of the whole tensor, and `passes` is 1 for an all-gather or a reduce-scatter and 2 for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megascale.errors import ConfigError
from megascale.simulate.fabric.ecmp import Flows
from megascale.simulate.fabric.topology import Ints


def ring(nics: Ints, size: float, passes: float = 1.0, group: int = 0) -> Flows:
    """Return the flows of a ring all-gather or reduce-scatter (one pass; an all-reduce has two).

    Every member sends (n-1)/n of the tensor to its successor.
    """
    n = len(nics)
    if n < 2:
        return Flows.from_arrays([], [], [])
    return Flows.from_arrays(nics, np.roll(nics, -1), passes * size * (n - 1) / n, group)


def tree(nics: Ints, size: float, passes: float = 1.0, group: int = 0) -> Flows:
    """Return the flows of NCCL's double binary tree.

    Each tree carries half of the tensor: up for the reduction, down for the result. A pass is half an all-reduce, so
    that it sends a quarter of the tensor each way over every edge of both trees.
    """
    n = len(nics)
    if n < 2:
        return Flows.from_arrays([], [], [])
    children = []
    parents = []
    # The second tree is the first one, shifted by a rank.
    for shift in (0, 1):
        for rank in range(1, n):
            # As in NCCL, the lowest set bit of a rank is its height in the tree.
            lowest_bit = rank & -rank
            parent = (rank ^ lowest_bit) | (lowest_bit << 1)
            if parent >= n:
                parent = rank ^ lowest_bit
            children.append((rank + shift) % n)
            parents.append((parent + shift) % n)
    child_nics = nics[np.array(children)]
    parent_nics = nics[np.array(parents)]
    up = Flows.from_arrays(child_nics, parent_nics, passes * size / 4, group)
    down = Flows.from_arrays(parent_nics, child_nics, passes * size / 4, group)
    return Flows.join(up, down)


def all_to_all(nics: Ints, size: float, passes: float = 1.0, group: int = 0) -> Flows:
    """Return flows of size / n^2 bytes between every two members. `size` is the bytes of all members together."""
    n = len(nics)
    sender, receiver = np.divmod(np.arange(n * n), n)
    differs = sender != receiver
    return Flows.from_arrays(nics[sender[differs]], nics[receiver[differs]], passes * size / n**2, group)


def hierarchical(nics: Ints, size: float, passes: float = 1.0, group: int = 0, *, per_host: int = 8) -> Flows:
    """Return the flows between hosts of a hierarchical collective: one ring per position in a host.

    Each ring has an equal share of the tensor. `nics` must be in the order of hosts.

    Raises ConfigError if hosts have different numbers of members.
    """
    hosts = np.unique(nics // per_host)
    members_per_host = len(nics) // max(1, len(hosts))
    if members_per_host * len(hosts) != len(nics):
        raise ConfigError(
            f"hierarchical needs the same number of members on every host; {len(nics)} on {len(hosts)} hosts"
        )
    rings = [
        ring(nics[index::members_per_host], size / members_per_host, passes, group) for index in range(members_per_host)
    ]
    if rings:
        return Flows.join(*rings)
    return Flows.from_arrays([], [], [])


ALGORITHMS: dict[str, Callable[..., Flows]] = {
    "ring": ring, "tree": tree, "hierarchical": hierarchical, "all-to-all": all_to_all
}  # fmt: skip


def make_collective_flows(
    algorithm: str, groups: Sequence[Ints], size: float, nics_per_host: int, passes: float = 1.0
) -> Flows:
    """Return the flows between hosts of one collective in all groups at once.

    Args:
        groups: NICs of the members, in the order of the ring.
        size: bytes of one group's whole tensor.
        passes: 1 for an all-gather or reduce-scatter, 2 for an all-reduce.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"--algorithm={algorithm!r} is unknown; {', '.join(ALGORITHMS)}")
    if size < 0:
        raise ConfigError(f"a collective of {size:g} bytes: sizes must be 0 or more")
    options = {"per_host": nics_per_host} if algorithm == "hierarchical" else {}
    group_flows = []
    for index, nics in enumerate(groups):
        group_flows.append(ALGORITHMS[algorithm](np.asarray(nics), size, passes, index, **options))
    flows = Flows.join(*group_flows) if group_flows else Flows.from_arrays([], [], [])
    return drop_flows_within_hosts(flows, nics_per_host)


def drop_flows_within_hosts(flows: Flows, nics_per_host: int) -> Flows:
    """Return the flows that leave their host."""
    leaves_host = flows.source // nics_per_host != flows.target // nics_per_host
    return Flows(
        flows.source[leaves_host], flows.target[leaves_host], flows.size[leaves_host], flows.group[leaves_host]
    )
