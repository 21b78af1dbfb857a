"""The job as Prometheus metrics: few series for any number of ranks. Single ranks are queried in the spans."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from megascale.observe.prometheus import Family
from megascale.observe.prometheus.run_records import RunRecords
from megascale.resilience.driver.state.job_state import ENDED, NodeState, Phase

if TYPE_CHECKING:
    from megascale.core.grid import Grid
    from megascale.resilience.driver.driver import Driver
    from megascale.resilience.rules.view import View

_LAST_SCRAPE = 60.0  # longest wait of a driver in seconds
_RECORDS_SECONDS = 5.0  # for which the metrics of the run folder are valid


class Scrapes:
    """The times at which a Prometheus reads the metrics: the driver stays until the end of its job was read.

    Otherwise the last phase read is `running`, and the end of a job looks like the end of its driver.
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._interval: float | None = None  # seconds between the last two scrapes
        self._scraped = asyncio.Event()

    def note(self, current_time: float) -> None:
        """Record that the metrics are read now (monotonic seconds)."""
        if self._last is not None:
            self._interval = current_time - self._last
        self._last = current_time
        self._scraped.set()

    def missing(self, ended: float, current_time: float) -> float:
        """Return how long to wait for a scrape after the job's end, in seconds, 0 if none is due."""
        if self._last is None or self._interval is None or self._last > ended:
            return 0.0
        due = self._last + 2 * self._interval
        if due > current_time:
            return min(due - current_time, _LAST_SCRAPE)
        return 0.0

    async def wait(self, seconds: float) -> None:
        """Wait for the next scrape, at most `seconds`."""
        self._scraped.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._scraped.wait(), seconds)


class JobMetrics:
    """The metrics of a job.

    Args:
        driver: the job's driver.

    Attributes:
        labels: of every series.
        scrapes: the times at which the metrics were read.
    """

    def __init__(self, driver: Driver) -> None:
        self.labels = driver.limits.make_metric_labels(driver.job.state.name)
        self._driver = driver
        self.scrapes = Scrapes()
        self._started = time.time()
        self._records = RunRecords(driver.run_folder)
        self._record_families: list[Family] = []
        self._records_time = -math.inf
        self._progress: tuple[object, ...] = ()
        self._progress_time = time.monotonic()
        self._lock = asyncio.Lock()

    async def read_families(self) -> list[Family]:
        """Return the metrics for a Prometheus that reads them now."""
        self.scrapes.note(time.monotonic())
        return await self.collect_families()

    async def collect_families(self) -> list[Family]:
        """Return the metrics of the job, its steps, its nodes and its run folder."""
        driver = self._driver
        age = Family("megascale_step_age_seconds", "gauge", "Time since the last step, as the scrapes saw it.")
        age.add(self._measure_step_age(time.monotonic()))
        start = Family("megascale_driver_start_time_seconds", "gauge", "Start of this driver, seconds since 1970.")
        families = (
            [start.add(self._started), age] + _job_families(driver) + _step_families(driver) + _node_families(driver)
        )
        return families + await self._read_records()

    def _measure_step_age(self, current_time: float) -> float:
        """Return the seconds since the last step, or since attempt or phase changed.

        The job's own step is the furthest, which stays while steps are replayed.
        """
        state = self._driver.job.state
        metrics = self._driver.observations.view(current_time).metrics
        last_step = metrics[-1].step if metrics else 0
        progress = (state.step, last_step, state.attempt, self._driver.job.phase)
        if progress != self._progress:
            self._progress = progress
            self._progress_time = current_time
        return current_time - self._progress_time

    async def _read_records(self) -> list[Family]:
        """Return the metrics of the run folder. A thread reads it, so that a long history delays no heartbeat."""
        async with self._lock:
            if time.monotonic() - self._records_time > _RECORDS_SECONDS:
                is_alive = self._driver.job.phase not in ENDED
                self._record_families = await asyncio.to_thread(self._records.read_families, is_alive)
                self._records_time = time.monotonic()
            return self._record_families


def judge_health(driver: Driver) -> tuple[bool, str]:
    """Return (False if the job has failed, its phase and the reason)."""
    phase = driver.job.phase
    return phase is not Phase.FAILED, f"{phase.value}: {driver.job.state.reason}".rstrip(": ")


def _job_families(driver: Driver) -> list[Family]:
    job = driver.job.state
    phase = Family("megascale_job_phase", "gauge", "1 for the phase that the job is in.")
    for each in Phase:
        phase.add(float(each is driver.job.phase), phase=each.value)
    incidents = Family("megascale_incidents_total", "counter", "Verdicts that named a node, by kind.")
    for kind, count in sorted(Counter(incident.kind for incident in driver.response.incidents).items()):
        incidents.add(count, kind=kind)
    config = driver.settings.config
    commits = Family("megascale_commit_interval_steps", "gauge", "Steps between checkpoints, 0: only at the end.")
    return [
        phase,
        commits.add(config.checkpoint.interval),
        Family("megascale_planned_steps", "gauge", "Steps of the whole run.").add(config.train.steps),
        Family("megascale_attempts_total", "counter", "Number of attempts.").add(job.attempt),
        Family("megascale_step", "gauge", "The furthest step that a rank has reached.").add(job.step),
        Family("megascale_ranks", "gauge", "Ranks of the job.").add(job.world),
        Family("megascale_recovery_actions", "gauge", "Recovery actions under way.").add(len(job.recovery)),
        incidents,
    ]


def _step_families(driver: Driver) -> list[Family]:
    view = driver.observations.view(time.monotonic())
    loss = Family("megascale_loss", "gauge", "Loss of the last step.")
    norm = Family("megascale_grad_norm", "gauge", "Gradient norm of the last step before clipping.")
    seconds = Family("megascale_step_seconds", "gauge", "Seconds per step, the median of the last 50.")
    step = Family("megascale_last_step", "gauge", "The step of the loss.")
    if view.metrics:
        last = view.metrics[-1]
        if last.loss:  # 0 means that another trainer prints none
            loss.add(last.loss)
        if last.grad_norm:
            norm.add(last.grad_norm)
        seconds.add(statistics.median(metric.seconds for metric in view.metrics[-50:]))
        step.add(last.step)
    return [loss, norm, seconds, step] + _compute_families(view)


def _compute_families(view: View) -> list[Family]:
    """Return the compute time over the ranks of each pipeline stage, and the rank that is slowest in its stage.

    Stages compute different layers, so that only ranks of one stage are compared.
    """
    stages: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for member in view.members:
        if member.heartbeat is None or member.heartbeat.attempt != view.attempt:
            continue
        for rank, seconds in member.heartbeat.step_seconds.items():
            stages[_stage(view.grid, rank)].append((seconds, rank))
    compute = Family("megascale_compute_seconds", "gauge", "Seconds per step without waits, over the ranks of a stage.")
    slowest = Family("megascale_slowest_rank", "gauge", "The rank that is slowest compared with its stage's median.")
    ratios: list[tuple[float, int]] = []
    for stage, ranks in sorted(stages.items()):
        ranks.sort()
        median = statistics.median(seconds for seconds, _ in ranks)
        if view.grid.pipeline > 1:
            labels = {"stage": str(stage)}
        else:
            labels = {}
        compute.add(ranks[0][0], **labels, over="fastest")
        compute.add(median, **labels, over="median")
        compute.add(ranks[-1][0], **labels, over="slowest")
        if median > 0:
            ratios.append((ranks[-1][0] / median, ranks[-1][1]))
    if ratios:
        slowest.add(max(ratios)[1])
    return [compute, slowest]


def _stage(grid: Grid, rank: int) -> int:
    if grid.pipeline > 1 and rank < grid.world_size:
        return grid.coordinate(rank).pipeline
    return 0


def _node_families(driver: Driver) -> list[Family]:
    current_time = time.monotonic()
    nodes = driver.nodes.all()
    connected = [node for node in nodes if node.channel is not None]
    states = Family("megascale_nodes", "gauge", "Nodes by state.")
    for state in NodeState:
        states.add(sum(node.state is state for node in nodes), state=state.value)
    missing = Family("megascale_nodes_missing", "gauge", "Configured nodes, without spares, that have no node.")
    missing.add(max(0, driver.limits.nodes - sum(node.state.is_present for node in nodes)))
    cordoned = Family("megascale_nodes_cordoned", "gauge", "Nodes that get no new ranks.")
    cordoned.add(sum(node.record.cordoned or bool(node.drain_reason) for node in nodes))
    age = Family("megascale_heartbeat_age_seconds", "gauge", "Of the connected node that was silent longest.")
    age.add(max((current_time - node.last_seen for node in connected), default=None))
    heartbeats = [node.heartbeat for node in connected if node.heartbeat is not None]
    traffic = Family("megascale_network_bytes_per_second", "gauge", "Sum over the interfaces of all nodes.")
    errors = Family("megascale_network_errors", "gauge", "Errors and drops since the last heartbeats.")
    if heartbeats:
        nics = [nic for heartbeat in heartbeats for nic in heartbeat.traffic]
        traffic.add(sum(nic.rx_bytes_per_s for nic in nics), direction="receive")
        traffic.add(sum(nic.tx_bytes_per_s for nic in nics), direction="send")
        errors.add(sum(nic.errors for nic in nics))
    temperature = Family("megascale_gpu_temperature_celsius", "gauge", "Of the hottest GPU.")
    power = Family("megascale_gpu_power_watts", "gauge", "Sum over all GPUs.")
    throttled = Family("megascale_gpus_throttled", "gauge", "GPUs that are slowed down.")
    faulty = Family("megascale_gpus_with_errors", "gauge", "GPUs with an Xid or uncorrected memory errors.")
    gpus = [gpu for heartbeat in heartbeats for gpu in heartbeat.gpus]
    if gpus:
        temperature.add(max(gpu.temperature for gpu in gpus))
        power.add(sum(gpu.power_watts for gpu in gpus))
        throttled.add(sum(gpu.throttled for gpu in gpus))
        faulty.add(sum(bool(gpu.xid or gpu.ecc_errors) for gpu in gpus))
    return [states, missing, cordoned, age, temperature, power, throttled, faulty, traffic, errors]
