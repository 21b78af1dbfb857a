"""Seconds of transfers. `Network` is the hook for finer models; `RingNetwork` is latency + bytes / bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from megascale.simulate.cluster import ClusterSpec, LinkSpec
from megascale.simulate.fabric.ecmp import expected_conflicts


class Network(Protocol):
    """Transfer times that the step model needs, as numbers or arrays. A flow or packet model has the same methods."""

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
        """[stages] time of each stage's collectives between hosts over that of the slowest."""

    def replica_shares(self) -> Any:
        """[replicas] time of each replica's transfers between hosts over that of the slowest."""


@dataclass(frozen=True)
class RingNetwork:
    """Ring collectives at measured bus bandwidth, no contention between groups.

    Attributes:
        cluster: gives both kinds of links.
        between_efficiency: replaces the bus bandwidth between hosts by this share of the printed one (calibrated).
    """

    cluster: ClusterSpec
    between_efficiency: float | None = None

    def collective(self, bytes: Any, ranks: Any, ranks_per_host: Any) -> Any:
        """See Network.collective."""
        inside, between = self.cluster.inside, self.cluster.between
        local = np.minimum(ranks, ranks_per_host)
        spans = ranks > local
        # The ring enters and leaves a host through the NICs of the group's members there.
        nics = np.where(spans, local, 1) * self._between(ranks)
        bus = np.where(spans, np.minimum(nics, _bus(inside, np.maximum(local, 2))), _bus(inside, ranks))
        bus = np.where(spans & (local == 1), nics, bus)
        hops = np.maximum(ranks - 1, 0)
        # Of a ring's hops one a host leaves it; the others stay inside (NCCL's own estimate, src/graph/tuning.cc).
        leaving = np.where(spans, np.ceil(ranks / np.maximum(local, 1)) - 1, 0)
        latency = np.where(spans, between.latency_us, inside.latency_us)
        latency = latency + leaving * between.hop_us + (hops - leaving) * inside.hop_us
        seconds = bytes * hops / np.maximum(ranks, 1) / (bus * 1e9) + latency * 1e-6
        return np.where(ranks > 1, seconds, 0.0)

    def _between(self, ranks: Any) -> Any:
        link = self.cluster.between
        if self.between_efficiency is not None:
            return self.between_efficiency * link.gbs
        return _bus(link, ranks)

    def p2p(self, bytes: Any, inside: Any) -> Any:
        """See Network.p2p."""
        return np.where(inside, _send_seconds(self.cluster.inside, bytes), _send_seconds(self.cluster.between, bytes))


def _send_seconds(link: LinkSpec, bytes: Any) -> Any:
    return bytes / (link.p2p_gbs * 1e9) + link.latency_us * 1e-6


def flow_slowdown(link: LinkSpec) -> float:
    """Return the mean slow-down of a flow when every host of a leaf sends one over hashed uplinks.

    Equal flows fall on uplinks at random; one that shares its uplink with more than fit at full speed gets its share.
    1 where the cluster does not say how its leaves are built.
    """
    if link.leaf_hosts is None or link.uplinks is None or link.uplink_gbs is None:
        return 1.0
    return expected_conflicts(link.leaf_hosts, link.uplinks, link.uplink_gbs / link.gbs).slowdown


def _bus(link: LinkSpec, ranks: Any) -> Any:
    """GB/s of bus bandwidth for a group of this size."""
    table = np.array(link.bus)
    return np.interp(np.log(ranks), np.log(table[:, 0]), table[:, 1])


@dataclass(frozen=True, eq=False)
class SharedFabricNetwork:
    """Attributes:

    base: times without sharing between groups.
    data: [stages] slow-down of each stage's collectives (its slowest group), relative to the reference.
    pipeline: [replicas] slow-down of each replica's transfers between stages, likewise.
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
