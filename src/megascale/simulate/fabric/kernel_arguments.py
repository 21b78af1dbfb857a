"""Arguments of the packet level's kernel (packet_kernel.py): times in ticks, sizes in bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megascale.errors import FitError
from megascale.simulate.fabric import packet_tables as tables
from megascale.simulate.fabric.control_settings import control_number
from megascale.simulate.fabric.ecmp import Flows
from megascale.simulate.fabric.packet_settings import Flap, PacketSettings
from megascale.simulate.fabric.topology import Floats, Ints, Topology

TICK = 1e-10  # seconds; times of the kernel are counted in ticks
NEVER = 1 << 62  # ticks
_ACK_PAYLOAD_BYTES = 52  # bytes of an acknowledgement beyond the header of a data packet
_MAX_EXACT_FLOWS = 2000  # with more flows, the speed of later hops is approximated


class UsedLinks(NamedTuple):
    """Links that paths use.

    Attributes:
        links: the links, ascending.
        paths: [F, hops] index into `links` of each hop of a flow; a shorter path fills up with zeros.
        hops: [F] number of hops.
    """

    links: Ints
    paths: Ints
    hops: Ints


def find_used_links(paths: Ints) -> UsedLinks:
    """Return the links that `paths`, [F, hops] with -1 for no hop, use."""
    is_hop = paths >= 0
    links, indices = np.unique(paths[is_hop], return_inverse=True)
    index_paths = np.zeros(paths.shape, np.int64)
    index_paths[is_hop] = indices
    # Move the hops of each flow to the front, in their order.
    hops_first = np.argsort(~is_hop, axis=1, kind="stable")
    return UsedLinks(links, np.take_along_axis(index_paths, hops_first, axis=1), is_hop.sum(axis=1))


class KernelArguments(NamedTuple):
    """First arguments of `packet_kernel.run`, in order."""

    tables: tables.Tables
    links: tables.Links
    paths: tables.Paths
    outages: tables.Outages
    rules: tables.Rules


def make_kernel_arguments(
    topology: Topology,
    flows: Flows,
    settings: PacketSettings,
    *,
    used_links: UsedLinks,
    starts: Floats | None,
    flaps: tuple[Flap, ...],
) -> KernelArguments:
    """Return the arguments of the kernel that describe links, flows, outages and rules.

    Raises FitError if a switch's memory does not hold the headroom of PFC.
    """
    # The control modules need numba, which is optional.
    from megascale.simulate.fabric.control_vectors import make_state_and_vectors

    link_constants = _make_links(topology, settings, used_links.links)
    speed = link_constants.speed
    flow_paths, base_rtt = _make_paths(topology, flows, settings, used_links=used_links, starts=starts, speed=speed)
    outages = _make_outages(topology, flaps, used_links)
    window = max(1, int(settings.window_mb * 1e6 / settings.mtu))
    control_state, dcqcn_vector, swift_vector, notification_gap = make_state_and_vectors(
        settings.dcqcn,
        settings.swift,
        packet=settings.mtu + settings.header,
        line=speed[used_links.paths[:, 0]],
        hops=used_links.hops,
        base_rtt=base_rtt,
        window=window,
        tick=TICK,
    )
    has_window = settings.control not in ("none", "dcqcn")  # Swift and the hybrids adapt a window to each round trip
    longest_timer = round(4.096e-6 * 2**settings.timeout / TICK)
    first_timer = longest_timer
    if settings.adaptive_us:
        first_timer = round(settings.adaptive_us * 1e-6 / TICK)
    rules = tables.Rules(
        control=control_number(settings.control),
        has_window=has_window,
        has_rate=settings.control in ("dcqcn", "hybrid-both"),
        dcqcn=dcqcn_vector,
        swift=swift_vector,
        cnp_gap=notification_gap,
        ack_every=1 if has_window else settings.ack_every,
        window=window,
        mtu=settings.mtu,
        header=settings.header,
        rto_first=min(first_timer, longest_timer),
        rto_max=longest_timer,
        retries=settings.retries,
        adaptive=bool(settings.adaptive_us),
    )
    # Room for the packets of all windows and their retransmissions, at most 8 million.
    pool_size = int(min(2 * np.minimum(flow_paths.packets, window).sum() + 1024, 1 << 23))
    kernel_tables = tables.new_tables(link_constants, flow_paths, rules, control_state, pool_size, settings.seed)
    return KernelArguments(kernel_tables, link_constants, flow_paths, outages, rules)


def _make_links(topology: Topology, settings: PacketSettings, links: Ints) -> tables.Links:
    """Return the constants of the used links and of all switches. Raises FitError if headroom exceeds the memory."""
    cable_ticks = _count_cable_ticks(topology)
    switches = topology.leaves + topology.aggregations + topology.cores
    capacity = np.full(switches, int(topology.spec.buffer_mb * 1e6), np.int64)
    # After a pause, a link may still deliver the bytes of a round trip and the packets on the wire.
    link_headroom = 2 * cable_ticks * topology.bandwidth * TICK + 3 * (settings.mtu + settings.header)
    is_into_switch = topology.head >= topology.nics
    headroom = np.bincount(
        topology.head[is_into_switch] - topology.nics, weights=link_headroom[is_into_switch], minlength=switches
    )
    shared = capacity - headroom.astype(np.int64)
    if settings.pfc and (shared <= 0).any():
        raise FitError(
            f"buffer_mb={topology.spec.buffer_mb:g} does not hold the headroom that PFC needs "
            f"({headroom.max() / 1e6:.1f} MB); use a larger buffer_mb or a shorter cable_ns"
        )
    scale = np.ones(len(links))
    if settings.dcqcn.scale_ecn:
        scale = topology.bandwidth[links] / (25e9 / 8)  # the settings are given for ports of 25 Gb/s
    if settings.control in ("none", "swift"):
        kmin = np.full(len(links), np.inf)  # no packet is marked
    else:
        kmin = settings.dcqcn.kmin_kb * 1e3 * scale
    return tables.Links(
        nics=int(np.searchsorted(links, topology.nics)),  # the first links start at NICs
        speed=topology.bandwidth[links] * TICK,
        delay=np.full(len(links), cable_ticks, np.int64),
        node=np.maximum(topology.tail[links] - topology.nics, 0),
        capacity=capacity,
        shared=shared,
        pfc_alpha=settings.pfc_alpha if settings.pfc else 0.0,
        kmin=kmin,
        kmax=settings.dcqcn.kmax_kb * 1e3 * scale,
        pmax=settings.dcqcn.pmax,
    )


def _count_cable_ticks(topology: Topology) -> int:
    """Return the delay of a cable in ticks."""
    return round(topology.spec.cable_ns * 1e-9 / TICK)


def _make_paths(
    topology: Topology,
    flows: Flows,
    settings: PacketSettings,
    *,
    used_links: UsedLinks,
    starts: Floats | None,
    speed: Floats,
) -> tuple[tables.Paths, Floats]:
    """Return the constants of the flows, and the round trips of packets on empty paths in ticks, [F].

    Args:
        speed: bytes per tick of the used links.
    """
    _, path, hops = used_links
    cable_ticks = _count_cable_ticks(topology)
    packets = np.maximum(1, np.ceil(flows.size / settings.mtu)).astype(np.int64)
    last_bytes = np.maximum(1, np.ceil(flows.size - (packets - 1) * settings.mtu)).astype(np.int64)
    if starts is None:
        start = np.zeros(len(flows), np.int64)
    else:
        start = np.round(starts / TICK).astype(np.int64)
    # Ticks per byte over all hops of a flow. With many flows, all links are assumed to have the speed of the first one.
    if len(flows) < _MAX_EXACT_FLOWS:
        ticks_per_byte = np.array([(1.0 / speed[path[flow, : hops[flow]]]).sum() for flow in range(len(flows))])
    else:
        ticks_per_byte = hops / speed[path[:, 0]]
    ack_bytes = settings.header + _ACK_PAYLOAD_BYTES
    ack_delay = (hops * cable_ticks + ack_bytes * ticks_per_byte).astype(np.int64)
    base_rtt = ack_delay + hops * cable_ticks + (settings.mtu + settings.header) * ticks_per_byte
    nics = int(np.searchsorted(used_links.links, topology.nics))
    by_nic = np.argsort(path[:, 0], kind="stable")
    flow_paths = tables.Paths(
        path=np.ascontiguousarray(path, np.int32),
        hops=hops.astype(np.int64),
        packets=packets,
        last=last_bytes,
        start=start,
        back=ack_delay,
        by_nic=by_nic,
        nic_first=np.searchsorted(path[by_nic, 0], np.arange(nics + 1)),
    )
    return flow_paths, base_rtt.astype(float)


def _make_outages(topology: Topology, flaps: tuple[Flap, ...], used_links: UsedLinks) -> tables.Outages:
    """Return the times at which the used links are down. The last flap of a link counts."""
    links, path, hops = used_links
    down = np.full(len(links), NEVER, np.int64)
    up = np.zeros(len(links), np.int64)
    flap_link_of_flow = np.full(len(path), -1, np.int64)
    for flap in flaps:
        flapping = np.flatnonzero(np.isin(links, _link_pair(topology, flap.link)))
        down[flapping] = round(flap.start / TICK)
        up[flapping] = round((flap.start + flap.duration) / TICK)
        is_flapping_hop = np.isin(path, flapping) & (np.arange(path.shape[1]) < hops[:, None])
        is_affected = is_flapping_hop.any(axis=1)
        flap_link_of_flow[is_affected] = path[is_affected, is_flapping_hop[is_affected].argmax(axis=1)]
    return tables.Outages(down=down, up=up, flow=flap_link_of_flow)


def _link_pair(topology: Topology, link: int) -> Ints:
    """Return a link and the link in the opposite direction: [2]."""
    # All links of a tier in one direction precede those in the opposite direction.
    links_by_tier = {0: topology.nics, 1: topology.uplinks.size, 2: topology.core_links.size}
    offset = links_by_tier[int(topology.tier[link])]
    is_upward = topology.tail[link] < topology.head[link]
    opposite = link + offset if is_upward else link - offset
    return np.array([link, opposite])
