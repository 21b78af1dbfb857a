"""Reports of the agent to the driver: heartbeats, log lines of one rank, step metrics and file contents."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megascale.core.failure import FailureLog
from megascale.resilience.agent import gpu_health, node_health
from megascale.resilience.agent.driver_link import DriverLink
from megascale.resilience.agent.file_tails import LogFilter, MetricsTail
from megascale.resilience.agent.rank_lease import RankLease
from megascale.resilience.agent.sent_files import SentFiles
from megascale.resilience.agent.trainers import Trainers
from megascale.resilience.protocol.agent_messages import FileStored, Start
from megascale.resilience.protocol.heartbeat import Heartbeat, truncate
from megascale.resilience.protocol.job_description import JobDescription
from megascale.resilience.rules.silence import HANG_FLOOR

log = logging.getLogger("megascale.agent")
READ_INTERVAL = 0.2  # seconds between reads of logs and status files
STORE_TIMEOUT = 5.0  # seconds for the driver to store the last output of ended trainers
END_TIMEOUT = 5.0  # seconds for the driver to confirm that no rank runs on this node
POLL_INTERVAL = 0.02  # seconds between checks for that confirmation
SLOW_SECONDS = 1.0  # if a heartbeat or one of its fields takes longer, the agent logs a warning
_AFTER_FLOOR = 0.002  # seconds after HANG_FLOOR, so that the reported age exceeds it
COALESCE_SECONDS = 0.01  # for which a heartbeat is delayed, so that it reports ranks that end together
MAX_SENT_LINES = 100  # last new log lines that are sent at once
T = TypeVar("T")


class Telemetry:
    """Sender of the reports that the driver does not request.

    Args:
        job: description of the job with the intervals.
        trainers: source of the trainers' state.
        changed: event that causes a heartbeat at once.
        lease: lease of the ranks, which answers to heartbeats renew.

    Attributes:
        hardware, versions: descriptions of this node's hardware and software.
        confirmed_sequence: number of the last heartbeat that the driver confirmed.
        is_leaving: whether the agent is ending and starts no more ranks.
        last_heartbeat: last heartbeat, or None before the first.
    """

    def __init__(
        self,
        job: JobDescription,
        node: str,
        address: str,
        pod: str,
        trainers: Trainers,
        link: DriverLink,
        changed: asyncio.Event,
        lease: RankLease,
    ) -> None:
        self._job = job
        self._node = node
        self._address = address
        self._pod = pod
        self._trainers = trainers
        self._link = link
        self._changed = changed
        self._lease = lease
        self._sequence = 0  # number of the newest heartbeat
        self._forwarded_rank: int | None = None  # rank whose log lines are sent
        self._metrics = MetricsTail(Path(job.run))
        self._files = None if job.shared else SentFiles(Path(job.run))  # None: the driver reads the run folder
        self._logs = LogFilter(job.limits.log_patterns)
        self._traffic = node_health.TrafficSampler()
        self._gpus = gpu_health.GpuHealth()
        self._failures: dict[str, FailureLog] = {}  # failures to read a field of the heartbeat, by name
        self.hardware = node_health.describe_hardware()
        self.versions = node_health.read_versions()
        self.last_heartbeat: Heartbeat | None = None
        self.confirmed_sequence = 0
        self.is_leaving = False

    def begin_session(self) -> None:
        """Send the whole state again, to another driver."""
        self._metrics.begin_session()
        if self._files is not None:
            self._files.begin_session()
        self._changed.set()

    def follow_attempt(self, order: Start) -> None:
        """Send the logs and files of an attempt that was started by `order`."""
        self._forwarded_rank = order.forward
        trainers = self._trainers.trainers.values()
        self._logs.follow({trainer.rank: (trainer.log, trainer.log_start) for trainer in trainers})
        if self._files is not None:
            self._files.follow(order.ranks)
        self._changed.set()

    def confirm_file(self, order: FileStored) -> None:
        """Record that the driver has stored a file up to an offset."""
        if self._files is not None:
            self._files.confirm(order.name, order.end)

    def close(self) -> None:
        """Stop the threads that read counters."""
        self._traffic.close()
        self._gpus.close()

    # heartbeats -------------------------------------------------------------------------------------------------------

    async def send_heartbeats(self) -> None:
        """Send heartbeats at the interval, after changes, and when the ranks may hang. Never returns."""
        while True:
            pause = self._compute_pause()
            start = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()
                    await asyncio.sleep(COALESCE_SECONDS)
            delay = time.monotonic() - start - pause
            if delay > SLOW_SECONDS:
                log.warning("a heartbeat is late by %.1f s: another task of this agent took that long", delay)
            self._changed.clear()
            self._call_timed("a heartbeat", self._send_heartbeat)

    def _compute_pause(self) -> float:
        """Return the seconds until the next heartbeat.

        An additional heartbeat is sent once all ranks have stood still for HANG_FLOOR seconds. Otherwise the driver
        would learn of it one interval later.
        """
        silence = self._trainers.compute_next_silence(HANG_FLOOR) + _AFTER_FLOOR
        return min(self._job.limits.interval, silence)

    @staticmethod
    def _call_timed(name: str, function: Callable[[], T]) -> T:
        """Return the result of `function`, and log a long duration, because the driver waits for heartbeats."""
        start = time.monotonic()
        try:
            return function()
        finally:
            seconds = time.monotonic() - start
            if seconds > SLOW_SECONDS:
                log.warning("%s took %.1f s", name, seconds)

    def _read_optional(self, name: str, read: Callable[[], T], default: T) -> T:
        """Return an optional field of the heartbeat, or `default` if reading it fails."""
        try:
            return self._call_timed(name, read)
        except Exception as error:
            failures = self._failures.setdefault(name, FailureLog(log, name))
            failures.note(error, "heartbeats continue without it")
            return default

    def _send_heartbeat(self) -> int:
        """Send a heartbeat, and return its number, or 0 if it was not sent."""
        channel = self._link.channel
        if channel is None:
            return 0
        try:
            self._read_optional("new log lines", self._send_lines, None)
            heartbeat = self.make_heartbeat()
            self._lease.record_sent(heartbeat.sequence)
            channel.send(heartbeat)
        except (ConnectionError, ValueError) as error:
            log.warning("a heartbeat was not sent: %s", error)
            return 0
        return heartbeat.sequence

    def make_heartbeat(self) -> Heartbeat:
        """Return a heartbeat with the node's current state."""
        self._sequence += 1
        self.last_heartbeat = Heartbeat(
            job=self._job.name,
            attempt=self._trainers.attempt,
            node=self._node,
            sequence=self._sequence,
            sent_ns=time.time_ns(),
            address=self._address,
            pod=self._pod,
            hardware=self.hardware,
            versions=self.versions,
            workers=self._call_timed("the state of the trainers", self._trainers.describe_workers),
            logs=self._read_optional("log lines", self._logs.take, ()),
            gpus=self._read_optional("GPU health", self._gpus.get_newest_reports, ()),
            traffic=self._read_optional("network counters", self._traffic.take, ()),
            checksums=self._read_optional("checksums of weights", self._trainers.read_checksums, {}),
            step_seconds=self._read_optional("step times", self._trainers.read_step_seconds, {}),
            disks=self._read_optional("free disk space", self._trainers.measure_free_disks, {}),
            leaving=self.is_leaving,
            saved_step=self._read_optional("checkpoints", self._trainers.find_saved_step, 0),
            prepared=self._trainers.is_prepared(),
            groups=self._trainers.find_ended_groups(),
        )
        return self.last_heartbeat

    def announce_end(self) -> None:
        """Report in all further heartbeats that the agent is ending."""
        self.is_leaving = True
        self._changed.set()

    async def confirm_end(self) -> None:
        """Report that no rank runs on this node, and wait until the driver confirms it.

        Without the confirmation, the driver waits until the lease ends before it starts these ranks on another node. On
        a new connection the report is repeated.
        """
        deadline = time.monotonic() + END_TIMEOUT
        used_channel = None
        sequence = 0
        while self._lease.is_enabled and time.monotonic() < deadline:
            if sequence and self.confirmed_sequence >= sequence:
                return
            channel = self._link.channel
            if channel is not None and channel is not used_channel:
                used_channel = channel
                sequence = self._send_heartbeat()
            await asyncio.sleep(POLL_INTERVAL)

    # logs and files ---------------------------------------------------------------------------------------------------

    async def watch_files(self) -> None:
        """Send new log lines and file contents between heartbeats. Never returns.

        A new phase, the first step of a trainer, and a rank that continues after a silence cause a heartbeat.
        """
        previous: dict[int, tuple[str, bool, int]] = {}  # by rank
        while True:
            await asyncio.sleep(READ_INTERVAL)
            self._send_lines()
            self._send_files()
            stages = self._trainers.read_stages()
            if stages != previous:
                previous = stages
                self._changed.set()

    async def send_remaining_files(self) -> None:
        """Send the last output of ended trainers, and wait until the driver has stored it.

        Afterwards the driver may start the trainers on another node, or end.
        """
        deadline = time.monotonic() + STORE_TIMEOUT
        while self._files is not None and self._link.channel is not None and time.monotonic() < deadline:
            if not self._send_files(all_spans=True) and self._files.is_confirmed():
                return
            await asyncio.sleep(READ_INTERVAL)

    def _send_lines(self) -> None:
        """Send the new log lines of the forwarded rank, at most the last MAX_SENT_LINES of them."""
        lines = self._logs.read_new_lines(self._forwarded_rank)
        if lines:
            texts = [truncate(line) for line in lines[-MAX_SENT_LINES:]]
            self._link.send_message(do="lines", rank=self._forwarded_rank, lines=texts)

    def _send_files(self, all_spans: bool = False) -> int:
        """Send step metrics from the node that writes them, and contents of files that the driver cannot read.

        Returns:
            The number of messages with file contents.
        """
        if self._link.channel is None:
            return 0
        if self._trainers.program.writes_metrics(self._trainers.trainers):
            steps = self._metrics.read_new_steps()
            if steps is not None:
                self._link.send(steps)
        if self._files is None or not self._link.is_free:
            return 0
        file_messages = self._files.take(all_spans)
        for message in file_messages:
            self._link.send(message)
        return len(file_messages)
