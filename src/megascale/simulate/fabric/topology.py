"""A fabric as arrays: switches, directed links with bandwidth and delay, and which of them still lead where.

Of several planes, which never meet and carry the same, one is built: a NIC's link has the bandwidth of its port there.

NICs are numbered as GPUs are: host x nics + index. Switches are leaf, aggregation and core; every directed link has one
number. Links of one kind lie together, so that a path is arithmetic: `Topology.up_nic + nic` is the link from a NIC to
its leaf switch. Failed parts keep their numbers and get bandwidth 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megascale.errors import ConfigError, FitError
from megascale.simulate.fabric.fabric_spec import FabricSpec, count_leaf_ports

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

GIGABIT = 1e9 / 8
TIERS = ("NIC", "leaf", "aggregation", "core")


@dataclass(frozen=True)
class Topology:
    """Attributes (N NICs, T leaf switches, A aggregation switches, C core switches, E directed links):

    spec: the description that it was built from.
    leaf_of: [N] leaf switch of a NIC.
    pod_of: [T] pod of a leaf switch.
    uplinks: [T, u] aggregation switch at the end of each uplink of a leaf switch.
    core_links: [A, c] core switch at the end of each uplink of an aggregation switch (c = 0 with two tiers).
    tail, head: [E] nodes of a link; NICs first, then leaf, aggregation, core.
    bandwidth: [E] bytes/s, 0 where it has failed.
    tier: [E] 0 NIC-leaf, 1 leaf-aggregation, 2 aggregation-core.
    agg_reaches: [A, T] parallel live links from an aggregation switch down to a leaf switch.
    core_reaches: [C, A] live links from a core switch down to an aggregation switch.
    down_agg: [A, T, k] numbers of the links down to a leaf switch, -1 where there is none.
    down_core: [C, A, k] likewise from core to aggregation.
    """

    spec: FabricSpec
    leaf_of: Ints
    pod_of: Ints
    uplinks: Ints
    core_links: Ints
    tail: Ints
    head: Ints
    bandwidth: Floats
    tier: Ints
    agg_reaches: Ints
    core_reaches: Ints
    down_agg: Ints
    down_core: Ints
    names: list[str] = field(repr=False)

    @property
    def nics(self) -> int:
        """NICs (and GPUs)."""
        return len(self.leaf_of)

    @property
    def leaves(self) -> int:
        """Leaf switches."""
        return len(self.pod_of)

    @property
    def aggregations(self) -> int:
        """Aggregation switches."""
        return len(self.core_links)

    @property
    def cores(self) -> int:
        """Core switches."""
        return len(self.core_reaches)

    @property
    def links(self) -> int:
        """Directed links."""
        return len(self.tail)

    @property
    def pods(self) -> int:
        """Groups of leaf switches that share aggregation switches."""
        return int(self.pod_of.max()) + 1

    @property
    def per_pod(self) -> int:
        """Aggregation switches of a pod."""
        return self.aggregations // self.pods

    # first link of each kind; links of a kind are in the order of their lower end ------------------------------------

    @property
    def down_nic(self) -> int:
        """First link from a leaf switch to a NIC."""
        return self.nics

    @property
    def up_leaf(self) -> int:
        """First uplink of a leaf switch: number t x u + i."""
        return 2 * self.nics

    @property
    def up_agg(self) -> int:
        """First uplink of an aggregation switch."""
        return self.up_leaf + 2 * self.uplinks.size

    def host_of(self, nic: Ints) -> Ints:
        """Return the host of each NIC."""
        return nic // self.spec.nics

    def set_of_host(self, host: Ints) -> Ints:
        """Return the set of leaf switches of each host."""
        return host // self.spec.hosts_per_set

    def switch_counts(self) -> dict[str, int]:
        """Return the number of switches per tier, in all planes."""
        planes = self.spec.planes
        return {
            "leaf": planes * self.leaves,
            "aggregation": planes * self.aggregations,
            "core": planes * self.cores,
        }

    def cable_counts(self) -> dict[str, int]:
        """Return the number of cables per tier, in all planes; a split cable counts once."""
        planes = self.spec.planes
        return {
            "NIC to leaf": planes * -(-self.nics // self.spec.leaf_split),
            "leaf to aggregation": planes * self.uplinks.size,
            "aggregation to core": planes * self.core_links.size,
        }


def build(spec: FabricSpec) -> Topology:
    """Build the links of a fabric; failed parts have no bandwidth.

    Raises:
        FitError: the switches have too few ports for the sizes, or failures leave two NICs without a path.
        ConfigError: `failed` names a part that does not exist.
    """
    up = count_leaf_ports(spec).up
    sets = -(-spec.hosts // spec.hosts_per_set)
    rails = spec.nics if spec.rails else 1
    leaves = sets * rails
    nic = np.arange(spec.gpus)
    leaf_of = (nic // spec.nics // spec.hosts_per_set) * rails + (nic % spec.nics if spec.rails else 0)
    uplinks, pod_of, aggregations = _wire_leaves(spec, leaves, rails, up)
    core_links, cores = _wire_core(spec, uplinks, pod_of, aggregations)

    n = spec.gpus
    t = leaves
    a = aggregations
    ends = [(nic, n + leaf_of, 0, spec.plane_gbps)]
    low, high = np.repeat(np.arange(t), uplinks.shape[1]), uplinks.ravel()
    ends.append((n + low, n + t + high, 1, spec.port_gbps))
    if core_links.size:
        low = np.repeat(np.arange(a), core_links.shape[1])
        ends.append((n + t + low, n + t + a + core_links.ravel(), 2, spec.port_gbps))
    tail = np.concatenate([np.concatenate([x, y]) for x, y, _, _ in ends])
    head = np.concatenate([np.concatenate([y, x]) for x, y, _, _ in ends])
    tier = np.concatenate([np.full(2 * len(x), k) for x, _, k, _ in ends])
    bandwidth = np.concatenate([np.full(2 * len(x), g * GIGABIT) for x, _, _, g in ends])
    node_counts = {"nic": n, "leaf": t, "agg": a, "core": cores}
    node_names = [f"{name}{i}" for name, count in node_counts.items() for i in range(count)]
    bandwidth = _fail(spec, node_names, tail, head, bandwidth)

    up_leaf, half = 2 * n, uplinks.size
    live = (bandwidth[up_leaf + half : up_leaf + 2 * half] > 0).reshape(uplinks.shape)
    agg_reaches, down_agg = _downlinks(uplinks, live, a, up_leaf + half)
    first = up_leaf + 2 * half
    live = (bandwidth[first + core_links.size :] > 0).reshape(core_links.shape)
    core_reaches, down_core = _downlinks(core_links, live, cores, first + core_links.size)
    topology = Topology(
        spec, leaf_of, pod_of, uplinks, core_links, tail, head, bandwidth, tier, agg_reaches, core_reaches,
        down_agg, down_core, node_names,
    )  # fmt: skip
    _check_connected(topology)
    return topology


def _wire_leaves(spec: FabricSpec, leaves: int, rails: int, up: int) -> tuple[Ints, Ints, int]:
    """Return uplinks [T, u] and pods [T] of the leaf switches, and the number of aggregation switches.

    A pod has as many leaf switches as an aggregation switch has ports down, and as many aggregation switches as a leaf
    switch has uplinks, one to each; where fewer leaf switches come together, an aggregation switch takes several.
    """
    if spec.tiers == 2:
        down = spec.switch_ports
    else:
        down = round(spec.switch_ports * _share(spec.spine_oversubscription))
    per_pod = down if leaves >= down else leaves
    if spec.pod == "sets" and per_pod < leaves:
        per_pod = max(1, per_pod // rails) * rails
        if per_pod > down:
            raise FitError(
                f"a set of {rails} leaf switches does not fit the {down} ports down of an aggregation switch; "
                'use pod="rail" or larger switch_ports'
            )
    order = np.arange(leaves)
    if spec.pod == "rail":
        order = (order % rails) * (leaves // rails) + order // rails
        per_pod = min(per_pod, leaves // rails)
    pods = -(-leaves // per_pod)
    if pods > 1 and spec.tiers == 2 and not (spec.pod == "rail" and spec.nics == rails):
        raise FitError(
            f"tiers=2 connects at most {per_pod} leaf switches ({per_pod // rails * spec.hosts_per_set} hosts) of "
            f"{leaves}; use tiers=3"
        )
    if pods > 1 and spec.tiers == 2:
        raise FitError('pod="rail" needs tiers=3: with two tiers, NICs of different rails have no path')
    pod_of = order // per_pod
    width = -(-up * per_pod // down)  # aggregation switches that the pod's uplinks fill, rounded to spread evenly
    uplinks_per_leaf = next(k for k in range(min(width, up), up + 1) if up % k == 0)
    within = np.arange(up) % uplinks_per_leaf
    return pod_of[:, None] * uplinks_per_leaf + within[None, :], pod_of, pods * uplinks_per_leaf


def _share(oversubscription: float) -> float:
    return oversubscription / (1 + oversubscription)


def _wire_core(spec: FabricSpec, uplinks: Ints, pod_of: Ints, aggregations: int) -> tuple[Ints, int]:
    """Return the uplinks [A, c] of the aggregation switches, and the number of core switches.

    Aggregation switches of the same position in all pods form a plane. Their uplinks go round-robin to the core
    switches of this plane.
    """
    pods = int(pod_of.max()) + 1
    if spec.tiers == 2 or pods == 1:
        return np.zeros((aggregations, 0), np.int64), 0
    aggregations_per_pod = aggregations // pods
    down = np.bincount(uplinks.ravel(), minlength=aggregations).max()
    up = max(1, min(spec.switch_ports - down, round(down / spec.spine_oversubscription)))
    # A core switch per so many uplinks of a plane; every core switch must reach every pod.
    cores = max(1, -(-pods * up // spec.switch_ports))
    if cores > up:
        raise FitError(
            f"{pods} pods with {up} uplinks an aggregation switch need {cores} core switches a plane, but each pod "
            f"reaches {up} of them only; fewer hosts, larger switch_ports or a smaller spine_oversubscription"
        )
    pod, position = np.divmod(np.arange(aggregations), aggregations_per_pod)
    inside = (pod[:, None] * up + np.arange(up)) % cores
    return position[:, None] * cores + inside, aggregations_per_pod * cores


def _downlinks(links: Ints, live: Bools, tops: int, first: int) -> tuple[Ints, Ints]:
    """Return the counts [tops, bottoms] of live links down and their numbers [tops, bottoms, k].

    `links` [bottoms, u]: the upper switch of each uplink.
    """
    bottoms = len(links)
    counts = np.zeros((tops, bottoms), np.int64)
    if not links.size:
        return counts, np.full((tops, bottoms, 1), -1)
    low = np.repeat(np.arange(bottoms), links.shape[1])
    maximum = int(np.bincount(links.ravel() * bottoms + low).max())
    numbers = np.full((tops, bottoms, maximum), -1)
    for port in range(links.shape[1]):
        good = np.flatnonzero(live[:, port])
        top = links[good, port]
        numbers[top, good, counts[top, good]] = first + good * links.shape[1] + port
        counts[top, good] += 1
    return counts, numbers


def _fail(spec: FabricSpec, names: list[str], tail: Ints, head: Ints, bandwidth: Floats) -> Floats:
    """Return the bandwidth with 0 for failed parts, in both directions."""
    if not spec.failed:
        return bandwidth
    number = {name: i for i, name in enumerate(names)}
    bandwidth = bandwidth.copy()
    for text in spec.failed:
        match = re.fullmatch(r"(\w+?)(?:-(\w+?)(?:\.(\d+))?)?", text)
        a, b = (number.get(match[1]), number.get(match[2])) if match else (None, None)
        if match is None or a is None or (match[2] and b is None):
            raise ConfigError(
                f"failed={text!r} names nothing of this fabric; switches are leaf0, agg0, core0 ..., a link is "
                "leaf3-agg5 (all between the two) or leaf3-agg5.0 (one of them), a NIC's is nic0-leaf0"
            )
        if b is None:
            hit = np.flatnonzero((tail == a) | (head == a))
        else:
            forward, backward = np.flatnonzero((tail == a) & (head == b)), np.flatnonzero((tail == b) & (head == a))
            if match[3]:
                forward, backward = forward[int(match[3]) :][:1], backward[int(match[3]) :][:1]
            hit = np.concatenate([forward, backward])
        if not len(hit):
            raise ConfigError(
                f"failed={text!r}: there is no such link between the two; see `megascale network topology`"
            )
        bandwidth[hit] = 0.0
    return bandwidth


def find_reachable_leaves(topology: Topology) -> tuple[Bools, Bools]:
    """Return which leaf switches are reached by aggregation switches [A, T] and by core switches [C, T].

    An aggregation switch reaches them by its own links down or over the core.
    """
    down = topology.agg_reaches > 0
    over_core = ((topology.core_reaches > 0).astype(np.float32) @ down.astype(np.float32)) > 0
    up = np.zeros((topology.aggregations, topology.leaves), bool)
    live = topology.bandwidth[topology.up_agg : topology.up_agg + topology.core_links.size] > 0
    for port in range(topology.core_links.shape[1]):
        good = live.reshape(topology.core_links.shape)[:, port]
        up[good] |= over_core[topology.core_links[good, port]]
    # Traffic of a pod never leaves it: an aggregation switch of the leaf's own pod does not go over the core.
    is_same_pod = topology.pod_of[None, :] == (np.arange(topology.aggregations) // topology.per_pod)[:, None]
    return down | (up & ~is_same_pod), over_core


def _check_connected(topology: Topology) -> None:
    bandwidth = topology.bandwidth
    dead = np.flatnonzero(bandwidth[: topology.nics] == 0)
    if len(dead):
        raise FitError(
            f"failed: nic{dead[0]} (host {dead[0] // topology.spec.nics}) and {len(dead) - 1} more have no live link; "
            "take their hosts out (fewer `hosts`) or repair nic-leaf links first"
        )
    if topology.leaves == 1:
        return
    agg, _ = find_reachable_leaves(topology)
    live = bandwidth[topology.up_leaf : topology.up_leaf + topology.uplinks.size].reshape(topology.uplinks.shape) > 0
    reach = np.zeros((topology.leaves, topology.leaves), bool)
    for port in range(topology.uplinks.shape[1]):
        good = live[:, port]
        reach[good] |= agg[topology.uplinks[good, port]]
    np.fill_diagonal(reach, True)
    if not reach.all():
        a, b = np.argwhere(~reach)[0]
        raise FitError(
            f"failed leaves leaf{a} without a path to leaf{b} ({int((~reach).sum())} pairs of leaf switches in all); "
            "keep at least one live uplink with a way back for each"
        )
