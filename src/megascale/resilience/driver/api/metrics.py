"""The job in Prometheus' terms: few series, whatever the number of ranks; rank by rank it is asked in SQL (spans)."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING

from megascale.observe.prometheus.exposition import Family
from megascale.resilience.driver.state.job_state import NodeState, Phase

if TYPE_CHECKING:
    from megascale.resilience.driver.driver import Driver


def families(driver: Driver) -> list[Family]:
    """What the driver knows now."""
    return [*_job(driver), *_steps(driver), *_nodes(driver)]


def healthy(driver: Driver) -> tuple[bool, str]:
    """Whether the job goes on, in words: unhealthy is one that failed, or whose driver was replaced."""
    phase = driver.job.phase
    return phase is not Phase.FAILED, f"{phase.value}: {driver.job.state.why}".rstrip(": ")


def _job(driver: Driver) -> list[Family]:
    job = driver.job.state
    phase = Family("megascale_job_phase", "gauge", "1 for the phase that the job is in.")
    for one in Phase:
        phase.add(float(one is driver.job.phase), phase=one.value)
    incidents = Family("megascale_incidents_total", "counter", "Verdicts that named a node, by kind.")
    for kind, count in sorted(Counter(kind for _, _, kind in driver.seen.incidents).items()):
        incidents.add(count, kind=kind)
    return [
        phase,
        Family("megascale_attempts_total", "counter", "Starts of the job's trainers.").add(job.attempt),
        Family("megascale_step", "gauge", "The furthest step that a rank has reached.").add(job.step),
        Family("megascale_ranks", "gauge", "Ranks of the job.").add(job.world),
        Family("megascale_recovery_actions", "gauge", "Recovery actions under way.").add(len(job.recovery)),
        incidents,
    ]


def _steps(driver: Driver) -> list[Family]:
    view = driver.seen.view(time.monotonic())
    last = view.metrics[-1] if view.metrics else None
    recent = [metric.seconds for metric in view.metrics[-50:]]
    own = sorted(
        (seconds, rank)
        for member in view.members
        if member.heartbeat is not None and member.heartbeat.attempt == view.attempt
        for rank, seconds in member.heartbeat.step_seconds.items()
    )
    compute = Family("megascale_compute_seconds", "gauge", "A step's seconds without waits, over ranks.")
    slowest = Family("megascale_slowest_rank", "gauge", "The rank that computes longest.")
    if own:
        values = [seconds for seconds, _ in own]
        compute.add(values[0], over="fastest").add(statistics.median(values), over="median")
        compute.add(values[-1], over="slowest")
        slowest.add(own[-1][1])
    return [
        Family("megascale_loss", "gauge", "Loss of the last step.").add(last.loss if last else None),
        Family("megascale_grad_norm", "gauge", "Its gradient norm before clipping.").add(
            last.grad_norm if last else None
        ),
        Family("megascale_step_seconds", "gauge", "Seconds of a step, the median of the last 50.").add(
            statistics.median(recent) if recent else None
        ),
        Family("megascale_last_step", "gauge", "The step of the loss.").add(last.step if last else None),
        compute,
        slowest,
    ]


def _nodes(driver: Driver) -> list[Family]:
    now, nodes = time.monotonic(), [driver.nodes[name] for name in driver.nodes.names()]
    states = Family("megascale_nodes", "gauge", "Nodes by state.")
    for state in NodeState:
        states.add(sum(node.state is state for node in nodes), state=state.value)
    beats = [node.heartbeat for node in nodes if node.heartbeat is not None and node.channel is not None]
    gpus = [gpu for beat in beats for gpu in beat.gpus]
    ages = [now - node.last_seen for node in nodes if node.channel is not None]
    traffic = Family("megascale_network_bytes_per_second", "gauge", "Of all nodes' interfaces together.")
    errors = Family("megascale_network_errors", "gauge", "Errors and drops since the last heartbeats.")
    if beats:
        nics = [nic for beat in beats for nic in beat.traffic]
        traffic.add(sum(nic.rx_bytes_per_s for nic in nics), direction="receive")
        traffic.add(sum(nic.tx_bytes_per_s for nic in nics), direction="send")
        errors.add(sum(nic.errors for nic in nics))
    hot = max((gpu.temperature for gpu in gpus), default=None)
    return [
        states,
        Family("megascale_nodes_cordoned", "gauge", "Nodes that get nothing new.").add(
            sum(node.record.cordoned or bool(node.drained) for node in nodes)
        ),
        Family("megascale_heartbeat_age_seconds", "gauge", "Of the connected node that was silent longest.").add(
            max(ages, default=None)
        ),
        Family("megascale_gpu_temperature_celsius", "gauge", "Of the hottest GPU.").add(hot),
        Family("megascale_gpu_power_watts", "gauge", "Of all GPUs together.").add(
            sum(gpu.power_watts for gpu in gpus) if gpus else None
        ),
        Family("megascale_gpus_throttled", "gauge", "GPUs that are slowed down.").add(
            sum(gpu.throttled for gpu in gpus) if gpus else None
        ),
        Family("megascale_gpus_with_errors", "gauge", "GPUs with an Xid or uncorrected memory errors.").add(
            sum(bool(gpu.xid or gpu.ecc_errors) for gpu in gpus) if gpus else None
        ),
        traffic,
        errors,
    ]
