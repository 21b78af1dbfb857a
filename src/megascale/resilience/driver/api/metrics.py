"""The metrics of a job, and the ways by which they leave the driver.

The number of series is small for any number of ranks, since metrics are over all ranks. Spans record the times of each
rank. Prometheus reads the metrics over HTTP. With `resilience.targets`, a file tells Prometheus the addresses of driver
and agents. With `resilience.otlp`, the metrics and recoveries also go to an OpenTelemetry collector.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import socket
import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megascale.core.addresses import is_loopback
from megascale.observe.prometheus import Family
from megascale.observe.prometheus.run_records import RunRecords
from megascale.resilience.cluster.base import format_address
from megascale.resilience.driver.state.job_state import ENDED, NodeState, Phase

if TYPE_CHECKING:
    from megascale.core.grid import Grid
    from megascale.resilience.driver.driver import Driver
    from megascale.resilience.rules.view import View

log = logging.getLogger("megascale.driver")

_LAST_SCRAPE = 60.0  # seconds for which a driver waits at most for the last scrape
_RECORDS_SECONDS = 5.0  # least number of seconds between two reads of the run folder
_MEDIAN_STEPS = 50  # newest steps whose median is the time per step
_TARGETS_INTERVAL = 2.0  # seconds between two comparisons of the targets file with the nodes
_WILDCARDS = ("", "0.0.0.0", "::")  # addresses that listen on all interfaces


class Scrapes:
    """The times at which Prometheus reads the metrics.

    The driver waits until Prometheus has read the end of the job. Without the wait, the last phase that Prometheus has
    read is `running`, as if the driver had failed.
    """

    def __init__(self) -> None:
        self._last: float | None = None  # time of the last scrape, on the monotonic clock
        self._interval: float | None = None  # seconds between the last two scrapes
        self._scraped = asyncio.Event()

    def record(self, current_time: float) -> None:
        """Record that the metrics are read now (monotonic seconds)."""
        if self._last is not None:
            self._interval = current_time - self._last
        self._last = current_time
        self._scraped.set()

    def compute_wait(self, ended: float, current_time: float) -> float:
        """Return how many seconds to wait for a scrape after the job's end, 0 if none is due.

        ended, current_time: the job's end and the present, on the monotonic clock.
        """
        if self._last is None or self._interval is None or self._last > ended:
            return 0.0
        due = self._last + 2 * self._interval  # A second interval allows for a late scrape.
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

    Attributes:
        labels: labels of every series.
        scrapes: the times at which the metrics were read.
    """

    def __init__(self, driver: Driver) -> None:
        self.labels = driver.limits.make_metric_labels(driver.job.state.name)
        self._driver = driver
        self.scrapes = Scrapes()
        self._started = time.time()
        self._records = RunRecords(driver.run_folder)  # reads metrics and events of the run folder
        self._record_families: list[Family] = []
        self._records_time = -math.inf  # time of the last read of the run folder, on the monotonic clock
        self._progress: tuple[object, ...] = ()
        self._progress_time = time.monotonic()  # when `_progress` last changed
        self._lock = asyncio.Lock()  # Two scrapes at once share one read of the run folder.

    async def read_families(self) -> list[Family]:
        """Return the metrics for a Prometheus that reads them now."""
        self.scrapes.record(time.monotonic())
        return await self.collect_families()

    async def collect_families(self) -> list[Family]:
        """Return the metrics of the job, its steps, its nodes and its run folder."""
        driver = self._driver
        age = Family("megascale_step_age_seconds", "gauge", "Time since the last step, as the scrapes saw it.")
        age.add(self._measure_step_age(time.monotonic()))
        start = Family("megascale_driver_start_time_seconds", "gauge", "Start of this driver, seconds since 1970.")
        families = [start.add(self._started), age]
        families += _collect_job_families(driver)
        families += _collect_step_families(driver)
        families += _collect_node_families(driver)
        return families + await self._read_records()

    def _measure_step_age(self, current_time: float) -> float:
        """Return the seconds since the last step, or since attempt or phase changed.

        `JobState.step` alone is not enough: it is the furthest step, and does not change while steps are replayed.
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
    """Return (True unless the job has failed, text with its phase and the reason)."""
    phase = driver.job.phase
    return phase is not Phase.FAILED, f"{phase.value}: {driver.job.state.reason}".rstrip(": ")


def _collect_job_families(driver: Driver) -> list[Family]:
    """Return the metrics of the job's state."""
    job = driver.job.state
    phase = Family("megascale_job_phase", "gauge", "1 for the phase that the job is in.")
    for candidate in Phase:
        phase.add(float(candidate is driver.job.phase), phase=candidate.value)
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


def _collect_step_families(driver: Driver) -> list[Family]:
    """Return the metrics of the last steps. A family without a value is not exported."""
    view = driver.observations.view(time.monotonic())
    loss = Family("megascale_loss", "gauge", "Loss of the last step.")
    norm = Family("megascale_grad_norm", "gauge", "Gradient norm of the last step before clipping.")
    seconds = Family("megascale_step_seconds", "gauge", "Seconds per step, the median of the last 50.")
    step = Family("megascale_last_step", "gauge", "The step of the loss.")
    if view.metrics:
        last = view.metrics[-1]
        if last.loss:  # Another trainer that prints no loss has 0 here.
            loss.add(last.loss)
        if last.grad_norm:  # likewise
            norm.add(last.grad_norm)
        seconds.add(statistics.median(metric.seconds for metric in view.metrics[-_MEDIAN_STEPS:]))
        step.add(last.step)
    return [loss, norm, seconds, step] + _collect_compute_families(view)


def _collect_compute_families(view: View) -> list[Family]:
    """Return the compute time over the ranks of each pipeline stage, and the rank that is slowest for its stage.

    Stages compute different layers, so each rank is compared only with ranks of its stage.
    """
    times_by_stage: dict[int, list[tuple[float, int]]] = defaultdict(list)  # (seconds, rank)
    for member in view.members:
        if member.heartbeat is None or member.heartbeat.attempt != view.attempt:
            continue
        for rank, seconds in member.heartbeat.step_seconds.items():
            times_by_stage[_find_stage(view.grid, rank)].append((seconds, rank))
    compute = Family("megascale_compute_seconds", "gauge", "Seconds per step without waits, over the ranks of a stage.")
    slowest = Family("megascale_slowest_rank", "gauge", "The rank that is slowest compared with its stage's median.")
    ratios: list[tuple[float, int]] = []  # (seconds of the slowest rank of a stage / median, rank)
    for stage, times in sorted(times_by_stage.items()):
        times.sort()
        fastest, _ = times[0]
        slowest_seconds, slowest_rank = times[-1]
        median = statistics.median(seconds for seconds, _ in times)
        if view.grid.pipeline > 1:
            labels = {"stage": str(stage)}
        else:
            labels = {}
        compute.add(fastest, **labels, over="fastest")
        compute.add(median, **labels, over="median")
        compute.add(slowest_seconds, **labels, over="slowest")
        if median > 0:
            ratios.append((slowest_seconds / median, slowest_rank))
    if ratios:
        _, rank = max(ratios)
        slowest.add(rank)
    return [compute, slowest]


def _find_stage(grid: Grid, rank: int) -> int:
    """Return the pipeline stage of a rank; 0 for a rank outside of the grid, as another trainer may have."""
    if grid.pipeline > 1 and rank < grid.world_size:
        return grid.coordinate(rank).pipeline
    return 0


def _collect_node_families(driver: Driver) -> list[Family]:
    """Return the metrics of nodes, their networks and their GPUs."""
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


# discovery by Prometheus ----------------------------------------------------------------------------------------------


class ScrapeTargets:
    """The file FOLDER/NAME.json with the addresses of a job, for the file-based discovery of Prometheus.

    FOLDER is `resilience.targets`. All runs share it, since Prometheus accepts a wildcard only in the name of a file.
    The file is removed after the job, since Prometheus reports a listed address that does not answer as an outage.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._file = Path(driver.limits.targets) / f"{driver.job.state.name}.json"
        self._written_text: str | None = None

    async def keep_current(self) -> None:
        """Write the file whenever the nodes have changed, until the task is cancelled."""
        while True:
            self.write()
            await asyncio.sleep(_TARGETS_INTERVAL)

    def write(self) -> None:
        """Replace the file atomically unless it is current. Raises OSError."""
        text = json.dumps(self._list_targets(), indent=1) + "\n"
        if text == self._written_text:  # The text that this driver wrote last is still current.
            return
        temporary = self._file.with_suffix(".tmp")
        temporary.write_text(text)
        os.replace(temporary, self._file)
        self._written_text = text

    def remove_if_ended(self) -> None:
        """Remove the file of a job that has ended. The file stays if another driver continues the job."""
        if self._driver.job.phase in ENDED:
            self._file.unlink(missing_ok=True)

    def _list_targets(self) -> list[dict[str, Any]]:
        """Return groups of targets in the format of Prometheus' file-based discovery."""
        driver = self._driver
        limits = driver.limits
        labels = limits.make_metric_labels(driver.job.state.name)
        groups = []
        if limits.driver_metrics:
            host, port = _split_address(limits.driver_metrics)
            if host in _WILDCARDS:
                host = limits.advertise or _find_own_host(limits.listen)
            groups.append({"targets": [format_address(host, port)], "labels": labels | {"role": "driver"}})
        if limits.agent_metrics:
            host, port = _split_address(limits.agent_metrics)
            for node in driver.nodes.all():
                # Only a Prometheus on the agent's own host reaches metrics on loopback.
                address = host if is_loopback(host) else node.record.address
                if node.state.is_present and address:
                    node_labels = labels | {"role": "agent", "node": node.name}
                    groups.append({"targets": [format_address(address, port)], "labels": node_labels})
        return groups


def _find_own_host(listen: str) -> str:
    """Return the listening address if other machines reach it, else this host's name."""
    if listen in _WILDCARDS or is_loopback(listen):
        return socket.gethostname()
    return listen


def _split_address(address: str) -> tuple[str, int]:
    """Return (host, port) of "HOST:PORT"; the host has no brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


# export to OpenTelemetry ----------------------------------------------------------------------------------------------


class TelemetryExport:
    """Sends metrics and recoveries every `resilience.otlp_interval` seconds, and at the end of the driver."""

    def __init__(self, driver: Driver, job_metrics: JobMetrics) -> None:
        from megascale.observe.open_telemetry import Telemetry  # needs the extra `otel`

        self._driver = driver
        self._job_metrics = job_metrics
        self._interval = driver.limits.otlp_interval
        self._telemetry = Telemetry(driver.limits.otlp, driver.run_folder, job_metrics.labels, begin=time.time())
        self._lock = asyncio.Lock()
        self._is_failure_reported = False

    async def keep_sending(self) -> None:
        """Send at every interval until the task is cancelled."""
        while True:
            await self._send()
            await asyncio.sleep(self._interval)

    async def _send(self) -> None:
        async with self._lock:
            families = await self._job_metrics.collect_families()
            # A collector that does not answer must delay no heartbeat.
            is_complete = await asyncio.to_thread(self._telemetry.send, families, time.time())
        if not is_complete and not self._is_failure_reported:
            endpoint = self._driver.limits.otlp
            self._driver.log_line(
                "driver", f"resilience.otlp={endpoint} does not accept metrics; the export is repeated"
            )
        self._is_failure_reported = not is_complete

    async def close(self) -> None:
        """Send the end of the job and close the connections. An absent collector costs seconds and raises nothing."""
        self._telemetry.close()
        try:
            async with self._lock:
                families = await self._job_metrics.collect_families()
                is_complete = await asyncio.to_thread(self._telemetry.send_last, families, time.time())
        except Exception as error:  # The driver's exit code must show how the job ended.
            log.error("the end of the job could not be exported: %r", error)
            return
        if not is_complete:
            endpoint = self._driver.limits.otlp
            self._driver.log_line("driver", f"resilience.otlp={endpoint} did not accept the end of the job")
