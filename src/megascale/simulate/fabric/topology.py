"""A fabric as arrays: switches, directed links with their bandwidths, and the switches that live links lead to.

If the fabric has several planes, only one is built, because planes are separate and carry equal traffic. A NIC's link
then has the bandwidth of the NIC's port in one plane.

A NIC has the number of its GPU: host x nics + index. Switches are leaf, aggregation or core switches. Every directed
link has a number, and links of one kind have consecutive numbers, so that a path follows from arithmetic. For example,
the link from NIC n to its leaf switch is n. Failed links keep their numbers and have bandwidth 0. A *pod* is a group of
leaf switches that share aggregation switches. With `rails`, NIC i of each host is on leaf switch i of the host's set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megascale.errors import ConfigError, FitError
from megascale.simulate.fabric.fabric_spec import FabricSpec, count_leaf_ports

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

GIGABIT = 1e9 / 8  # bytes


@dataclass(frozen=True)
class Topology:
    """A fabric with N NICs, T leaf switches, A aggregation switches, C core switches and E directed links.

    Attributes:
        spec: the specification from which the topology was built.
        leaf_of: [N] leaf switch of a NIC.
        pod_of: [T] pod of a leaf switch.
        uplinks: [T, u] aggregation switch at the end of each uplink of a leaf switch.
        core_links: [A, c] core switch at the end of each uplink of an aggregation switch (c = 0 with two tiers).
        tail, head: [E] source and target node of a link. Nodes are numbered NICs first, then leaf, aggregation and
            core switches.
        bandwidth: [E] bytes/s, 0 for a failed link.
        tier: [E] 0 for NIC-leaf, 1 for leaf-aggregation, 2 for aggregation-core.
        agg_downlink_counts: [A, T] number of live links from an aggregation switch down to a leaf switch.
        core_downlink_counts: [C, A] number of live links from a core switch down to an aggregation switch.
        agg_downlinks: [A, T, k] the live links from an aggregation switch to a leaf switch, filled up with -1.
        core_downlinks: [C, A, k] the live links from a core switch to an aggregation switch, filled up with -1.
        names: names of the nodes, such as leaf3.
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
    agg_downlink_counts: Ints
    core_downlink_counts: Ints
    agg_downlinks: Ints
    core_downlinks: Ints
    names: list[str] = field(repr=False)

    @property
    def nics(self) -> int:
        """Number of NICs (and GPUs)."""
        return len(self.leaf_of)

    @property
    def leaves(self) -> int:
        """Number of leaf switches."""
        return len(self.pod_of)

    @property
    def aggregations(self) -> int:
        """Number of aggregation switches."""
        return len(self.core_links)

    @property
    def cores(self) -> int:
        """Number of core switches."""
        return len(self.core_downlink_counts)

    @property
    def links(self) -> int:
        """Number of directed links."""
        return len(self.tail)

    @property
    def pods(self) -> int:
        """Number of pods: groups of leaf switches that share aggregation switches."""
        return int(self.pod_of.max()) + 1

    @property
    def aggregations_per_pod(self) -> int:
        """Number of aggregation switches of a pod."""
        return self.aggregations // self.pods

    # The properties below are numbers of the first link of each kind. Links of a kind are in the order of their lower
    # node.

    @property
    def first_nic_downlink(self) -> int:
        """First link from a leaf switch to a NIC."""
        return self.nics

    @property
    def first_leaf_uplink(self) -> int:
        """First uplink of a leaf switch. Uplink i of leaf switch t is `first_leaf_uplink` + t x u + i."""
        return 2 * self.nics

    @property
    def first_agg_uplink(self) -> int:
        """First uplink of an aggregation switch."""
        return self.first_leaf_uplink + 2 * self.uplinks.size

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


class _Tier(NamedTuple):
    """Links between two tiers of nodes: lower and upper node of each link, and Gb/s per direction."""

    lower: Ints
    upper: Ints
    gbps: float


def build_topology(spec: FabricSpec) -> Topology:
    """Build the links of a fabric; failed parts have no bandwidth.

    Raises:
        FitError: the switches have too few ports for the sizes, or failures leave two NICs without a path.
        ConfigError: `failed` names a part that does not exist.
    """
    uplinks_per_leaf = count_leaf_ports(spec).up
    sets = -(-spec.hosts // spec.hosts_per_set)  # rounded up
    rails = spec.nics if spec.rails else 1
    leaves = sets * rails
    nic = np.arange(spec.gpus)
    leaf_of = (nic // spec.nics // spec.hosts_per_set) * rails + (nic % spec.nics if spec.rails else 0)
    uplinks, pod_of, aggregations = _wire_leaves(spec, leaves, rails=rails, up=uplinks_per_leaf)
    core_links, cores = _wire_core(spec, uplinks, pod_of, aggregations)

    # Number of the first node of each kind.
    first_leaf = spec.gpus
    first_agg = first_leaf + leaves
    first_core = first_agg + aggregations
    tiers = [_Tier(lower=nic, upper=first_leaf + leaf_of, gbps=spec.plane_gbps)]
    leaf_of_uplink = np.repeat(np.arange(leaves), uplinks.shape[1])
    tiers.append(_Tier(first_leaf + leaf_of_uplink, upper=first_agg + uplinks.ravel(), gbps=spec.port_gbps))
    if core_links.size:
        agg_of_uplink = np.repeat(np.arange(aggregations), core_links.shape[1])
        tiers.append(_Tier(first_agg + agg_of_uplink, upper=first_core + core_links.ravel(), gbps=spec.port_gbps))
    # Within a tier, all links up come before all links down.
    tail = np.concatenate([np.concatenate([links.lower, links.upper]) for links in tiers])
    head = np.concatenate([np.concatenate([links.upper, links.lower]) for links in tiers])
    tier = np.concatenate([np.full(2 * len(links.lower), index) for index, links in enumerate(tiers)])
    bandwidth = np.concatenate([np.full(2 * len(links.lower), links.gbps * GIGABIT) for links in tiers])
    node_counts = {"nic": spec.gpus, "leaf": leaves, "agg": aggregations, "core": cores}
    node_names = [f"{name}{index}" for name, count in node_counts.items() for index in range(count)]
    bandwidth = _apply_failures(spec, node_names, tail, head, bandwidth)

    first_leaf_downlink = 2 * spec.gpus + uplinks.size
    first_agg_uplink = first_leaf_downlink + uplinks.size
    first_core_downlink = first_agg_uplink + core_links.size
    is_live = (bandwidth[first_leaf_downlink:first_agg_uplink] > 0).reshape(uplinks.shape)
    agg_downlink_counts, agg_downlinks = _list_downlinks(
        uplinks, is_live, upper_count=aggregations, first_downlink=first_leaf_downlink
    )
    is_live = (bandwidth[first_core_downlink:] > 0).reshape(core_links.shape)
    core_downlink_counts, core_downlinks = _list_downlinks(
        core_links, is_live, upper_count=cores, first_downlink=first_core_downlink
    )
    topology = Topology(
        spec=spec,
        leaf_of=leaf_of,
        pod_of=pod_of,
        uplinks=uplinks,
        core_links=core_links,
        tail=tail,
        head=head,
        bandwidth=bandwidth,
        tier=tier,
        agg_downlink_counts=agg_downlink_counts,
        core_downlink_counts=core_downlink_counts,
        agg_downlinks=agg_downlinks,
        core_downlinks=core_downlinks,
        names=node_names,
    )
    _check_connected(topology)
    return topology


def _wire_leaves(spec: FabricSpec, leaves: int, rails: int, up: int) -> tuple[Ints, Ints, int]:
    """Connect the leaf switches with aggregation switches.

    A full pod has as many leaf switches as an aggregation switch has ports down, and as many aggregation switches as a
    leaf switch has uplinks, with one link between any two. In a smaller pod, several uplinks of a leaf switch go to the
    same aggregation switch.

    Args:
        leaves: number of leaf switches.
        rails: leaf switches of a set of hosts.

    Returns:
        The aggregation switch of each uplink, [T, u]; the pod of each leaf switch, [T]; and the number of aggregation
        switches.
    """
    # `down`: ports of an aggregation switch to leaf switches; with two tiers, these are all ports.
    if spec.tiers == 2:
        down = spec.switch_ports
    else:
        down = round(spec.switch_ports * _share_of_downlinks(spec.spine_oversubscription))
    per_pod = min(leaves, down)  # leaf switches
    if spec.pod == "sets" and per_pod < leaves:
        per_pod = max(1, per_pod // rails) * rails  # the sets of a pod are complete
        if per_pod > down:
            raise FitError(
                f"a set of {rails} leaf switches does not fit the {down} ports down of an aggregation switch; "
                'use pod="rail" or larger switch_ports'
            )
    # Position of each leaf switch in the order in which pods are filled.
    order = np.arange(leaves)
    if spec.pod == "rail":
        # A pod holds the leaf switches of one rail.
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
    # The smallest number of aggregation switches that have ports for a pod's uplinks, and over which the uplinks of a
    # leaf switch divide evenly.
    needed = -(-up * per_pod // down)
    aggregations_per_pod = next(count for count in range(min(needed, up), up + 1) if up % count == 0)
    agg_in_pod = np.arange(up) % aggregations_per_pod
    uplinks = pod_of[:, None] * aggregations_per_pod + agg_in_pod[None, :]
    return uplinks, pod_of, pods * aggregations_per_pod


def _share_of_downlinks(oversubscription: float) -> float:
    """Return the share of a switch's ports that go down, if these have `oversubscription` times the bandwidth up."""
    return oversubscription / (1 + oversubscription)


def _wire_core(spec: FabricSpec, uplinks: Ints, pod_of: Ints, aggregations: int) -> tuple[Ints, int]:
    """Connect the aggregation switches with core switches.

    The aggregation switches at the same position of all pods form a group, here called a core plane. Their uplinks go
    round-robin to the core switches of that plane.

    Returns:
        The core switch of each uplink, [A, c], and the number of core switches.
    """
    pods = int(pod_of.max()) + 1
    if spec.tiers == 2 or pods == 1:
        return np.zeros((aggregations, 0), np.int64), 0
    aggregations_per_pod = aggregations // pods
    down = np.bincount(uplinks.ravel(), minlength=aggregations).max()  # used ports of an aggregation switch
    up = max(1, min(spec.switch_ports - down, round(down / spec.spine_oversubscription)))
    # Core switches of a plane, as many as have ports for the plane's uplinks.
    cores = max(1, -(-pods * up // spec.switch_ports))
    if cores > up:
        raise FitError(
            f"{pods} pods with {up} uplinks per aggregation switch need {cores} core switches per plane, but each pod "
            f"reaches {up} of them only; use fewer hosts, larger switch_ports or a smaller spine_oversubscription"
        )
    pod, plane = np.divmod(np.arange(aggregations), aggregations_per_pod)
    core_in_plane = (pod[:, None] * up + np.arange(up)) % cores
    return plane[:, None] * cores + core_in_plane, aggregations_per_pod * cores


def _list_downlinks(uplinks: Ints, is_live: Bools, upper_count: int, first_downlink: int) -> tuple[Ints, Ints]:
    """List the live links down between two tiers.

    Args:
        uplinks: [lower, u] upper switch of each uplink.
        is_live: [lower, u] whether the link in the opposite direction is live.
        upper_count: number of upper switches.
        first_downlink: number of the first link down.

    Returns:
        The number of live links between two switches, [upper, lower], and their link numbers, [upper, lower, k], filled
        up with -1.
    """
    lower_count = len(uplinks)
    counts = np.zeros((upper_count, lower_count), np.int64)
    if not uplinks.size:
        return counts, np.full((upper_count, lower_count, 1), -1)
    lower_of_link = np.repeat(np.arange(lower_count), uplinks.shape[1])
    # Largest number of parallel links between two switches.
    most_parallel = int(np.bincount(uplinks.ravel() * lower_count + lower_of_link).max())
    numbers = np.full((upper_count, lower_count, most_parallel), -1)
    for port in range(uplinks.shape[1]):
        lower = np.flatnonzero(is_live[:, port])
        upper = uplinks[lower, port]
        numbers[upper, lower, counts[upper, lower]] = first_downlink + lower * uplinks.shape[1] + port
        counts[upper, lower] += 1
    return counts, numbers


def _apply_failures(spec: FabricSpec, names: list[str], tail: Ints, head: Ints, bandwidth: Floats) -> Floats:
    """Return the bandwidths [E] with 0 for failed links, in both directions, and for all links of failed switches."""
    if not spec.failed:
        return bandwidth
    node_by_name = {name: node for node, name in enumerate(names)}
    bandwidth = bandwidth.copy()
    for text in spec.failed:
        # NODE, NODE-NODE or NODE-NODE.INDEX
        match = re.fullmatch(r"(\w+?)(?:-(\w+?)(?:\.(\d+))?)?", text)
        first_node = second_node = None
        if match is not None:
            first_node = node_by_name.get(match[1])
            second_node = node_by_name.get(match[2])
        if match is None or first_node is None or (match[2] and second_node is None):
            raise ConfigError(
                f"failed={text!r} names nothing of this fabric; switches are leaf0, agg0, core0 ..., a link is "
                "leaf3-agg5 (all between the two) or leaf3-agg5.0 (one of them), a NIC's is nic0-leaf0"
            )
        if second_node is None:
            failed_links = np.flatnonzero((tail == first_node) | (head == first_node))
        else:
            forward = np.flatnonzero((tail == first_node) & (head == second_node))
            backward = np.flatnonzero((tail == second_node) & (head == first_node))
            if match[3]:
                index = int(match[3])
                forward = forward[index : index + 1]
                backward = backward[index : index + 1]
            failed_links = np.concatenate([forward, backward])
        if not len(failed_links):
            raise ConfigError(
                f"failed={text!r}: there is no such link between the two; see `megascale network topology`"
            )
        bandwidth[failed_links] = 0.0
    return bandwidth


def find_reachable_leaves(topology: Topology) -> tuple[Bools, Bools]:
    """Return which leaf switches are reachable from each aggregation switch, [A, T], and from each core switch, [C, T].

    From an aggregation switch, a path leads down directly or, to other pods, over the core.
    """
    has_downlink = topology.agg_downlink_counts > 0
    # A matrix product of floats is faster than one of integers.
    core_has_downlink = (topology.core_downlink_counts > 0).astype(np.float32)
    reachable_from_core = (core_has_downlink @ has_downlink.astype(np.float32)) > 0
    reachable_over_core = np.zeros((topology.aggregations, topology.leaves), bool)
    is_live = topology.bandwidth[topology.first_agg_uplink : topology.first_agg_uplink + topology.core_links.size] > 0
    is_live = is_live.reshape(topology.core_links.shape)
    for port in range(topology.core_links.shape[1]):
        aggs = is_live[:, port]
        reachable_over_core[aggs] |= reachable_from_core[topology.core_links[aggs, port]]
    # Traffic within a pod does not go over the core.
    is_same_pod = (
        topology.pod_of[None, :] == (np.arange(topology.aggregations) // topology.aggregations_per_pod)[:, None]
    )
    return has_downlink | (reachable_over_core & ~is_same_pod), reachable_from_core


def _check_connected(topology: Topology) -> None:
    """Raise FitError if a NIC has no live link, or if a leaf switch has no path to another one."""
    bandwidth = topology.bandwidth
    failed_nics = np.flatnonzero(bandwidth[: topology.nics] == 0)
    if len(failed_nics):
        host = failed_nics[0] // topology.spec.nics
        raise FitError(
            f"failed: nic{failed_nics[0]} (host {host}) and {len(failed_nics) - 1} more have no live link; "
            "take their hosts out (fewer `hosts`) or repair nic-leaf links first"
        )
    if topology.leaves == 1:
        return
    reachable_from_agg, _ = find_reachable_leaves(topology)
    is_live = bandwidth[topology.first_leaf_uplink : topology.first_leaf_uplink + topology.uplinks.size] > 0
    is_live = is_live.reshape(topology.uplinks.shape)
    is_connected = np.zeros((topology.leaves, topology.leaves), bool)
    for port in range(topology.uplinks.shape[1]):
        leaves = is_live[:, port]
        is_connected[leaves] |= reachable_from_agg[topology.uplinks[leaves, port]]
    np.fill_diagonal(is_connected, True)
    if not is_connected.all():
        a, b = np.argwhere(~is_connected)[0]
        raise FitError(
            f"failed leaves leaf{a} without a path to leaf{b} ({int((~is_connected).sum())} pairs of leaf switches in "
            "all); keep at least one live uplink with a way back for each"
        )
