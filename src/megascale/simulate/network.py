"""Models of the network, which give the seconds of transfers.

`RingNetwork` computes latency + bytes / bandwidth. Flow and packet models implement the same protocol, `Network`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from megascale.simulate.cluster import ClusterSpec, LinkSpec
from megascale.simulate.fabric.conflicts import compute_expected_conflicts


class Network(Protocol):
    """Protocol of a network model: the transfer times that the step model needs, as numbers or arrays."""

    def collective(self, bytes: Any, ranks: Any, ranks_per_host: Any) -> Any:
        """Return the seconds of an all-gather or reduce-scatter of a tensor of `bytes`; an all-reduce takes twice that.

        The group has `ranks` members, `ranks_per_host` of them on each host.
        """

    def p2p(self, bytes: Any, inside: Any) -> Any:
        """Return the seconds to send `bytes` to the next stage while receiving as much; `inside`: on the same host."""


@runtime_checkable
class UnevenNetwork(Network, Protocol):
    """A network whose groups differ. The event level gives each group its own time."""

    def stage_shares(self) -> Any:
        """Return each stage's time of collectives between hosts, divided by that of the slowest stage: [stages]."""

    def replica_shares(self) -> Any:
        """Return each replica's time of transfers between hosts, divided by that of the slowest: [replicas]."""


@dataclass(frozen=True)
class RingNetwork:
    """Ring collectives at measured bus bandwidth, without contention between groups.

    Attributes:
        cluster: has the figures of links within and between hosts.
        between_efficiency: calibrated share of the nominal bandwidth between hosts; None: measured bus bandwidths.
    """

    cluster: ClusterSpec
    between_efficiency: float | None = None

    def collective(self, bytes: Any, ranks: Any, ranks_per_host: Any) -> Any:
        """See Network.collective."""
        inside = self.cluster.inside
        between = self.cluster.between
        local_ranks = np.minimum(ranks, ranks_per_host)
        spans_hosts = ranks > local_ranks
        # The ring enters and leaves a host through the NICs of the group's members on this host.
        nic_gbs = np.where(spans_hosts, local_ranks, 1) * self._between_gbs(ranks)
        inside_gbs = _bus_gbs(inside, np.maximum(local_ranks, 2))
        gbs = np.where(spans_hosts, np.minimum(nic_gbs, inside_gbs), _bus_gbs(inside, ranks))
        gbs = np.where(spans_hosts & (local_ranks == 1), nic_gbs, gbs)
        hops = np.maximum(ranks - 1, 0)
        # One hop per host leaves the host; the others stay inside (as in NCCL's estimate, src/graph/tuning.cc).
        between_hops = np.where(spans_hosts, np.ceil(ranks / np.maximum(local_ranks, 1)) - 1, 0)
        latency_us = np.where(spans_hosts, between.latency_us, inside.latency_us)
        latency_us = latency_us + between_hops * between.hop_us + (hops - between_hops) * inside.hop_us
        seconds = bytes * hops / np.maximum(ranks, 1) / (gbs * 1e9) + latency_us * 1e-6
        return np.where(ranks > 1, seconds, 0.0)

    def _between_gbs(self, ranks: Any) -> Any:
        """Return the GB/s per GPU between hosts for a group of this size."""
        link = self.cluster.between
        if self.between_efficiency is not None:
            return self.between_efficiency * link.gbs
        return _bus_gbs(link, ranks)

    def p2p(self, bytes: Any, inside: Any) -> Any:
        """See Network.p2p."""
        return np.where(inside, _send_seconds(self.cluster.inside, bytes), _send_seconds(self.cluster.between, bytes))


def _send_seconds(link: LinkSpec, bytes: Any) -> Any:
    return bytes / (link.p2p_gbs * 1e9) + link.latency_us * 1e-6


def flow_slowdown(link: LinkSpec) -> float:
    """Return the mean slow-down of a flow if every host under a leaf switch sends one flow over hashed uplinks.

    Flows are hashed to uplinks at random and share an uplink's bandwidth equally. The value is 1 if the cluster file
    has no figures of the leaf switches.
    """
    if link.leaf_hosts is None or link.uplinks is None or link.uplink_gbs is None:
        return 1.0
    return compute_expected_conflicts(link.leaf_hosts, link.uplinks, link.uplink_gbs / link.gbs).slowdown


def _bus_gbs(link: LinkSpec, ranks: Any) -> Any:
    """Return the GB/s of bus bandwidth for a group of this size."""
    table = np.array(link.bus)
    return np.interp(np.log(ranks), np.log(table[:, 0]), table[:, 1])


@dataclass(frozen=True, eq=False)
class SharedFabricNetwork:
    """A network in which groups share links: the times of another network model, multiplied by slow-downs.

    Attributes:
        base: network model without sharing between groups.
        data: [stages] slow-down of each stage's collectives (its slowest group), relative to `base`.
        pipeline: [replicas] slow-down of each replica's transfers between stages, relative to `base`.
    """

    base: Network
    data: Any
    pipeline: Any

    def collective(self, bytes: Any, ranks: Any, ranks_per_host: Any) -> Any:
        """See Network.collective, of the slowest stage; only groups that span hosts are slowed."""
        seconds = self.base.collective(bytes, ranks, ranks_per_host)
        return np.where(np.asarray(ranks) > np.asarray(ranks_per_host), np.max(self.data), 1.0) * seconds

    def p2p(self, bytes: Any, inside: Any) -> Any:
        """See Network.p2p, of the slowest replica."""
        return np.where(inside, 1.0, np.max(self.pipeline)) * self.base.p2p(bytes, inside)

    def stage_shares(self) -> Any:
        """See Network.stage_shares."""
        return np.asarray(self.data) / np.max(self.data)

    def replica_shares(self) -> Any:
        """See Network.replica_shares."""
        return np.asarray(self.pipeline) / np.max(self.pipeline)
