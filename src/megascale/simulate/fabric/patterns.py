"""Traffic patterns for the packet level (permutation, incast, all-to-all), and small fabrics for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.errors import ConfigError
from megascale.simulate.fabric.ecmp import Flows, hash_five_tuples, route_flows
from megascale.simulate.fabric.fabric_spec import load_fabric
from megascale.simulate.fabric.packet_settings import PacketSettings
from megascale.simulate.fabric.packets import PacketResult
from megascale.simulate.fabric.topology import Floats, Ints, Topology, build_topology

MAX_FLOWS = 4_000_000  # of a pattern


@dataclass(frozen=True)
class Traffic:
    """Flows on their paths."""

    topology: Topology
    flows: Flows
    paths: Ints


def build_small_fabric(nics: int, tiers: int = 3, **changes: object) -> Topology:
    """Return a fabric with the links of fabric "megascale", one NIC per host, and three tiers for hundreds of NICs.

    A leaf switch has 8 hosts; switches have 16 ports and packet memory in proportion to their ports. Cables are split
    as in "megascale", so that 8 NICs have 4 uplinks of 400G.
    """
    sizes: dict[str, Any] = {
        "hosts": nics,
        "nics": 1,
        "rails": False,
        "hosts_per_set": min(8, nics),
        "switch_ports": 16,
        "tiers": tiers,
    }
    if tiers == 2:
        sizes["switch_ports"] = max(sizes["hosts_per_set"], -(-nics // sizes["hosts_per_set"]))
    full_fabric = load_fabric("megascale")
    sizes["buffer_mb"] = full_fabric.buffer_mb * sizes["switch_ports"] / full_fabric.switch_ports
    return build_topology(load_fabric("megascale", {**sizes, **changes}))


def permutation(topology: Topology, size: float, seed: int, senders: int) -> Flows:
    """Return flows from every NIC to the same position under the next leaf switch.

    They are data-parallel rings whose neighbours are one leaf switch apart.
    """
    nics = np.arange(topology.nics)
    return Flows.from_arrays(nics, (nics + topology.spec.hosts_per_set * topology.spec.nics) % topology.nics, size)


def incast(topology: Topology, size: float, seed: int, senders: int) -> Flows:
    """Return flows from the `senders` NICs with the largest distance to NIC 0."""
    if not 1 <= senders < topology.nics:
        raise ConfigError(f"--senders={senders}: between 1 and {topology.nics - 1} on this fabric")
    return Flows.from_arrays(np.arange(topology.nics - senders, topology.nics), 0, size)


def all_to_all(topology: Topology, size: float, seed: int, senders: int) -> Flows:
    """Return an all-to-all of `senders` NICs that are spread evenly over the fabric, with `size` bytes per pair.

    Each NIC sends to the following NICs in order, as NCCL does.
    """
    if not 2 <= senders <= topology.nics:
        raise ConfigError(f"--senders={senders}: between 2 and {topology.nics} on this fabric")
    if senders * (senders - 1) > MAX_FLOWS:
        maximum = math.isqrt(MAX_FLOWS)
        raise ConfigError(
            f"--senders={senders}: {senders * (senders - 1):,} flows are too many; use at most {maximum:,}"
        )
    nics = np.linspace(0, topology.nics - 1, senders).astype(np.int64)
    sender, step = np.divmod(np.arange(senders * (senders - 1)), senders - 1)
    return Flows.from_arrays(nics[sender], nics[(sender + 1 + step) % senders], size)


def shuffle(topology: Topology, size: float, seed: int, senders: int) -> Flows:
    """Return flows of a random permutation without fixed points."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(topology.nics)
    return Flows.from_arrays(order, np.roll(order, 1), size)


# All patterns take (topology, bytes per flow, seed, number of senders), and ignore what they do not need.
PATTERNS: dict[str, Callable[[Topology, float, int, int], Flows]] = {
    "permutation": permutation, "incast": incast, "all-to-all": all_to_all, "shuffle": shuffle
}  # fmt: skip


def make_traffic(topology: Topology, pattern: str, size: float, senders: int, seed: int = 0) -> Traffic:
    """Return the flows of a pattern with their paths.

    Args:
        pattern: key of PATTERNS.
        size: bytes of a flow.
        senders: number of senders, for incast and all-to-all.

    Raises ConfigError for an unknown pattern or a size that is not positive.
    """
    if pattern not in PATTERNS:
        raise ConfigError(f"--pattern={pattern!r} is unknown; {', '.join(PATTERNS)}")
    if not 0 < size < np.inf:
        raise ConfigError(f"--mb={size / 1e6:g}: flows must have more than 0 bytes")
    # One plane is simulated, which carries its share of the bytes.
    flows = PATTERNS[pattern](topology, size / topology.spec.planes, seed, senders)
    return Traffic(topology, flows, route_flows(topology, flows, hash_five_tuples(flows, seed), seed))


def get_fluid_bandwidth(topology: Topology, settings: PacketSettings) -> Floats:
    """Return the bandwidth for payload of each link, for a comparison of the flow level with packets: [E] bytes/s."""
    return topology.bandwidth * settings.payload_share


def summarise_result(result: PacketResult, traffic: Traffic) -> dict[str, float]:
    """Return the figures by which controls are compared: times in us, queues in KB, payload in GB/s."""
    done = result.finish[~np.isnan(result.finish)] * 1e6
    if not len(done):
        return {"finished": 0.0}
    return {
        "finished": len(done) / len(result.finish),
        "mean_us": float(done.mean()),
        "p99_us": float(np.percentile(done, 99)),
        "max_us": float(done.max()),
        "gbs": float(traffic.flows.size.sum() / done.max() / 1e3),
        "queue_kb": float(result.max_queue_bytes.max() / 1e3),
        "rtt_us": result.mean_rtt * 1e6,
        "pauses": float(result.counts["pauses"]),
        "pause_us": float(result.pause_seconds.sum() * 1e6),
        "drops": float(result.counts["dropped"]),
        "resent": float(result.counts["resent"]),
    }
