"""Metrics and health of a node for its metrics page, made from the agent's newest heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from megascale.observe.prometheus import Family
from megascale.resilience.metrics_page import MetricsPage
from megascale.resilience.protocol.heartbeat import Heartbeat

# Name, attribute of GpuReport and help text of the metrics of each GPU.
_GPU_METRICS = (
    ("temperature_celsius", "temperature", "Temperature of each GPU."),
    ("power_watts", "power_watts", "Power of each GPU."),
    ("throttled", "throttled", "1 for a GPU whose clocks are reduced by heat or a power brake."),
    ("xid", "xid", "Last Xid error, 0 if there was none."),
    ("ecc_errors", "ecc_errors", "Uncorrected ECC errors since boot."),
)


def make_page(
    get_newest: Callable[[], Heartbeat | None], is_connected: Callable[[], bool], labels: Mapping[str, str]
) -> MetricsPage:
    """Return the metrics page of a node.

    Args:
        get_newest: returns the agent's newest heartbeat, or None before the first.
        is_connected: returns whether the agent has a driver.
        labels: labels of every series.
    """

    async def read_families() -> list[Family]:
        return make_node_families(get_newest(), is_connected())

    def judge_health() -> tuple[bool, str]:
        if get_newest() is None or not is_connected():
            return False, "the agent has no driver"
        return True, "ok"

    return MetricsPage(read_families, judge_health, labels)


def make_node_families(heartbeat: Heartbeat | None, is_connected: bool) -> list[Family]:
    """Return the metric families of a node.

    Args:
        heartbeat: newest heartbeat, or None before the first.
        is_connected: the agent has a driver.
    """
    connected = Family("megascale_agent_connected", "gauge", "1 while this node's agent has a driver.")
    connected.add(is_connected)
    if heartbeat is None:
        return [connected]
    ranks = Family("megascale_agent_ranks", "gauge", "Trainers of this node by state.")
    for state in ("running", "exited", "signalled"):
        ranks.add(sum(worker.state == state for worker in heartbeat.workers), state=state)
    step = Family("megascale_agent_step", "gauge", "Step of this node's slowest rank.")
    step.add(min((worker.step for worker in heartbeat.workers), default=None))
    compute = Family("megascale_agent_compute_seconds", "gauge", "Seconds per step without waits, by rank.")
    for rank, seconds in sorted(heartbeat.step_seconds.items()):
        compute.add(seconds, rank=str(rank))
    families = [connected, ranks, step, compute]
    for name, attribute, help_text in _GPU_METRICS:
        family = Family(f"megascale_agent_gpu_{name}", "gauge", help_text)
        for gpu in heartbeat.gpus:
            family.add(getattr(gpu, attribute), gpu=str(gpu.index))
        families.append(family)
    traffic = Family("megascale_agent_network_bytes_per_second", "gauge", "Traffic of each interface.")
    for interface in heartbeat.traffic:
        traffic.add(interface.rx_bytes_per_s, interface=interface.interface, direction="receive")
        traffic.add(interface.tx_bytes_per_s, interface=interface.interface, direction="send")
    age = Family("megascale_agent_heartbeat_age_seconds", "gauge", "Time since the newest heartbeat was made.")
    age.add(max(0.0, time.time() - heartbeat.sent_ns / 1e9))
    return families + [traffic, age]
