"""The job in Prometheus' terms: few series, whatever the number of ranks; rank by rank it is asked in SQL (spans)."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from megascale.observe.prometheus import Family
from megascale.resilience.driver.state.job_state import NodeState, Phase

if TYPE_CHECKING:
    from megascale.core.grid import Grid
    from megascale.resilience.driver.driver import Driver
    from megascale.resilience.rules.view import View

_LAST_SCRAPE = 60.0  # seconds for which a driver waits at most


class Scrapes:
    """When a Prometheus reads the metrics: the driver stays until the end of its job was read.

    Without that the last phase read is `running`, and the end of a job looks like the end of its driver.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._interval: float | None = None  # seconds between the last two
        self._came = asyncio.Event()

    def note(self, now: float) -> None:
        """Take down that the metrics are read now (monotonic seconds)."""
        self._interval = now - self._last if self._last is not None else None
        self._last = now
        self._came.set()

    def missing(self, ended: float, now: float) -> float:
        """Return for how many seconds to wait for a scrape after the job's end, 0 if none is due."""
        if self._last is None or self._interval is None or self._last > ended:
            return 0.0
        due = self._last + 2 * self._interval
        return min(due - now, _LAST_SCRAPE) if due > now else 0.0

    async def wait(self, seconds: float) -> None:
        """Return after the next scrape, or after so many seconds."""
        self._came.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._came.wait(), seconds)


def families(driver: Driver) -> list[Family]:
    """What the driver knows now."""
    return [*_job(driver), *_steps(driver), *_nodes(driver)]


def healthy(driver: Driver) -> tuple[bool, str]:
    """Whether the job goes on, in words: unhealthy is one that failed, or whose driver was replaced."""
    phase = driver.job.phase
    return phase is not Phase.FAILED, f"{phase.value}: {driver.job.state.reason}".rstrip(": ")


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
    return [
        Family("megascale_loss", "gauge", "Loss of the last step.").add(last.loss if last else None),
        Family("megascale_grad_norm", "gauge", "Its gradient norm before clipping.").add(
            last.grad_norm if last else None
        ),
        Family("megascale_step_seconds", "gauge", "Seconds of a step, the median of the last 50.").add(
            statistics.median(recent) if recent else None
        ),
        Family("megascale_last_step", "gauge", "The step of the loss.").add(last.step if last else None),
        *_compute(view),
    ]


def _compute(view: View) -> list[Family]:
    """Return the compute time over the ranks of each pipeline stage, and the rank that is slowest in its stage.

    Stages compute different layers, so that only ranks of one stage are compared.
    """
    stages: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for member in view.members:
        if member.heartbeat is None or member.heartbeat.attempt != view.attempt:
            continue
        for rank, seconds in member.heartbeat.step_seconds.items():
            stages[_stage(view.grid, rank)].append((seconds, rank))
    compute = Family("megascale_compute_seconds", "gauge", "A step's seconds without waits, over ranks of a stage.")
    slowest = Family("megascale_slowest_rank", "gauge", "The rank that is slowest compared with its stage's median.")
    ratios: list[tuple[float, int]] = []
    for stage, ranks in sorted(stages.items()):
        ranks.sort()
        median = statistics.median(seconds for seconds, _ in ranks)
        labels = {"stage": str(stage)} if view.grid.pipeline > 1 else {}
        compute.add(ranks[0][0], **labels, over="fastest")
        compute.add(median, **labels, over="median")
        compute.add(ranks[-1][0], **labels, over="slowest")
        if median > 0:
            ratios.append((ranks[-1][0] / median, ranks[-1][1]))
    if ratios:
        slowest.add(max(ratios)[1])
    return [compute, slowest]


def _stage(grid: Grid, rank: int) -> int:
    return grid.coordinate(rank).pipeline if grid.pipeline > 1 and rank < grid.world_size else 0


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
