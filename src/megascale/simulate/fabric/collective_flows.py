"""Collectives as flows between NICs: what each algorithm sends where, in bytes of a whole call.

A GPU sends through its own NIC (rank i of a host uses NIC i); what stays on a host goes over NVLink and makes no flow.
Sizes follow NCCL's algorithms: `size` is the whole tensor of the call.
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
    child, parent = [], []
    for shift in (0, 1):
        for i in range(1, n):
            bit = i & -i
            above = (i ^ bit) | (bit << 1)
            above = above if above < n else i ^ bit
            child.append((i + shift) % n)
            parent.append((above + shift) % n)
    if n < 2:
        return Flows.from_arrays([], [], [])
    low, high = nics[np.array(child)], nics[np.array(parent)]
    return Flows.join(
        Flows.from_arrays(low, high, passes * size / 4, group), Flows.from_arrays(high, low, passes * size / 4, group)
    )


def all_to_all(nics: Ints, size: float, passes: float = 1.0, group: int = 0) -> Flows:
    """Return flows of size / n^2 bytes between every two members (`size`: bytes of all members together)."""
    n = len(nics)
    a, b = np.divmod(np.arange(n * n), n)
    return Flows.from_arrays(nics[a[a != b]], nics[b[a != b]], passes * size / n**2, group)


def hierarchical(nics: Ints, size: float, passes: float = 1.0, group: int = 0, *, per_host: int = 8) -> Flows:
    """Return the flows between hosts: one ring per position in a host, with its share of the tensor.

    `nics` must be in the order of hosts, with the same number of members on every host.
    """
    hosts = np.unique(nics // per_host)
    local = len(nics) // max(1, len(hosts))
    if local * len(hosts) != len(nics):
        raise ConfigError(f"hierarchical needs as many members on every host; {len(nics)} on {len(hosts)} hosts")
    parts = [ring(nics[i::local], size / local, passes, group) for i in range(local)]
    if parts:
        return Flows.join(*parts)
    return Flows.from_arrays([], [], [])


ALGORITHMS: dict[str, Callable[..., Flows]] = {
    "ring": ring, "tree": tree, "hierarchical": hierarchical, "all-to-all": all_to_all
}  # fmt: skip


def collective(algorithm: str, groups: Sequence[Ints], size: float, nics_per_host: int, passes: float = 1.0) -> Flows:
    """Return the flows between hosts of one collective in all groups at once.

    Args:
        groups: NICs of the members, in the order of the ring.
        size: bytes of one group's whole tensor.
        passes: 1 for an all-gather or reduce-scatter, 2 for an all-reduce.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"--algorithm={algorithm!r} is unknown; {', '.join(ALGORITHMS)}")
    if size < 0:
        raise ConfigError(f"a collective of {size:g} bytes: sizes are 0 or more")
    if algorithm == "hierarchical":
        more = {"per_host": nics_per_host}
    else:
        more = {}
    parts = [ALGORITHMS[algorithm](np.asarray(g), size, passes, i, **more) for i, g in enumerate(groups)]
    return outside_hosts(Flows.join(*parts) if parts else Flows.from_arrays([], [], []), nics_per_host)


def outside_hosts(flows: Flows, nics_per_host: int) -> Flows:
    """Return the flows that leave their host."""
    out = flows.source // nics_per_host != flows.target // nics_per_host
    return Flows(flows.source[out], flows.target[out], flows.size[out], flows.group[out])
