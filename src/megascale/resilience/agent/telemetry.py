"""What an agent tells the driver of its own accord: heartbeats, lines of a log, figures of steps, pieces of files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megascale.core.background import FailureLog
from megascale.resilience.agent import gpu_health, node_health
from megascale.resilience.agent.driver_link import DriverLink
from megascale.resilience.agent.logs import LogFilter
from megascale.resilience.agent.metrics_tail import MetricsTail
from megascale.resilience.agent.rank_lease import RankLease
from megascale.resilience.agent.sent_files import SentFiles
from megascale.resilience.agent.trainers import Trainers
from megascale.resilience.protocol.agent_messages import Kept, Start
from megascale.resilience.protocol.given import JobDescription
from megascale.resilience.protocol.heartbeat import Heartbeat, truncate

log = logging.getLogger("megascale.agent")
LOOK = 0.2  # seconds between looks at logs and status files
REST = 5.0  # seconds for the driver to have written what ended trainers wrote last
LAST = 5.0  # seconds for the driver to have heard that nothing runs here any more
SOON = 0.02  # seconds between looks whether it has
SLOW = 1.0  # seconds of a heartbeat, or of a part of it, that are worth a line
T = TypeVar("T")


class Telemetry:
    """Args:
    job: what is told of, and how often.
    node, address, pod: who tells.
    trainers: whose state is told.
    link: to the driver.
    changed: set where a heartbeat is worth sending now.
    lease: of the ranks, which answers to heartbeats renew.

    Attributes:
        facts: hardware and versions of this node.
        heard: the last heartbeat that the driver has answered.
        leaving: the agent ends, and starts no ranks any more.
        newest: the last heartbeat, None before the first.
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
        self._job, self._node, self._address, self._pod = job, node, address, pod
        self._trainers, self._link, self._changed, self._lease = trainers, link, changed, lease
        self._sequence = 0
        self.newest: Heartbeat | None = None
        self._metrics = MetricsTail(Path(job.run))
        self._files = None if job.shared else SentFiles(Path(job.run))
        self._logs = LogFilter(job.limits.log_patterns)
        self._traffic = node_health.TrafficSampler()
        self._gpus = gpu_health.GpuHealth()
        self.facts = (node_health.hardware(), node_health.versions())
        self._forward: int | None = None
        self.heard, self.leaving = 0, False
        self._failures: dict[str, FailureLog] = {}

    def begin_session(self) -> None:
        """Another driver listens: it knows nothing yet."""
        self._metrics.begin_session()
        if self._files is not None:
            self._files.begin_session()
        self._changed.set()

    def follow(self, order: Start) -> None:
        """The ranks of an attempt have been started."""
        self._forward = order.forward
        self._logs.follow({t.rank: (t.log, t.log_start) for t in self._trainers.trainers.values()})
        if self._files is not None:
            self._files.follow(order.ranks)
        self._changed.set()

    def kept(self, order: Kept) -> None:
        """The driver has written what it was sent."""
        if self._files is not None:
            self._files.kept(order.name, order.end)

    def close(self) -> None:
        """Give back what was opened for looking."""
        self._traffic.close()
        self._gpus.close()

    async def beat(self) -> None:
        """Send heartbeats, at the interval and when something has changed; does not return."""
        while True:
            begun = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._job.limits.interval):
                    await self._changed.wait()
                    await asyncio.sleep(0.01)  # what ends together is sent together
            if (late := time.monotonic() - begun - self._job.limits.interval) > SLOW:
                log.warning("a heartbeat is late by %.1f s: something else of this agent took that long", late)
            self._changed.clear()
            self._timed("a heartbeat", self._send)

    @staticmethod
    def _timed(what: str, do: Callable[[], T]) -> T:
        """What `do` gives; where it takes long the log says so, since the driver takes silence for a node's end."""
        begun = time.monotonic()
        try:
            return do()
        finally:
            if (took := time.monotonic() - begun) > SLOW:
                log.warning("%s took %.1f s", what, took)

    def _part(self, name: str, read: Callable[[], T], missing: T) -> T:
        """Return a part of the heartbeat that the driver can do without, `missing` where reading it fails."""
        try:
            return self._timed(name, read)
        except Exception as error:
            failures = self._failures.setdefault(name, FailureLog(log, name))
            failures.note(error, "heartbeats go on without it")
            return missing

    def _send(self) -> int:
        """Send a heartbeat; its number, 0 where that was not possible."""
        channel = self._link.channel
        if channel is None:
            return 0
        try:
            self._part("new log lines", self._pass_lines, None)
            heartbeat = self.heartbeat()
            self._lease.sent(heartbeat.sequence)
            channel.send(heartbeat)
        except (ConnectionError, ValueError) as error:
            log.warning("a heartbeat was not sent: %s", error)
            return 0
        return heartbeat.sequence

    def leave(self) -> None:
        """The agent ends: the driver is to know that now, and soon that nothing runs here any more."""
        self.leaving = True
        self._changed.set()

    async def say_over(self) -> None:
        """Tell the driver that nothing runs here any more, and wait until it has heard that: else it must wait for the
        lease before it starts these ranks elsewhere. A driver that has hung up meanwhile is told once it is back."""
        deadline, told, number = time.monotonic() + LAST, None, 0
        while self._lease.given and time.monotonic() < deadline and not (number and self.heard >= number):
            channel = self._link.channel
            if channel is not None and channel is not told:
                told, number = channel, self._send()
            await asyncio.sleep(SOON)

    def heartbeat(self) -> Heartbeat:
        """This node now."""
        self._sequence += 1
        self.newest = Heartbeat(
            job=self._job.name,
            attempt=self._trainers.attempt,
            node=self._node,
            sequence=self._sequence,
            sent_ns=time.time_ns(),
            address=self._address,
            pod=self._pod,
            hardware=self.facts[0],
            versions=self.facts[1],
            workers=self._timed("the state of the trainers", self._trainers.workers),
            logs=self._part("log lines", self._logs.take, ()),
            gpus=self._part("what GPUs report", self._gpus.take, ()),
            traffic=self._part("network counters", self._traffic.take, ()),
            checksums=self._part("checksums of weights", self._trainers.checksums, {}),
            step_seconds=self._part("step times", self._trainers.step_seconds, {}),
            disks=self._part("room on disks", self._trainers.disks, {}),
            leaving=self.leaving,
        )
        return self.newest

    async def watch(self) -> None:
        """Between heartbeats: new lines of rank 0, and whether a trainer has come to another phase or a first step."""
        before: dict[int, tuple[str, bool]] = {}
        while True:
            await asyncio.sleep(LOOK)
            self._pass_lines()
            self._pass_files()
            now = self._trainers.stages()
            if now != before:
                before = now
                self._changed.set()

    async def send_rest(self) -> None:
        """Send what ended trainers wrote last: told of their end, the driver may place them elsewhere or go."""
        deadline = time.monotonic() + REST
        while self._files is not None and self._link.channel is not None and time.monotonic() < deadline:
            if not self._pass_files(rest=True) and self._files.confirmed():
                return
            await asyncio.sleep(LOOK)

    def _pass_lines(self) -> None:
        lines = self._logs.look(self._forward)
        if lines:
            self._link.say(do="lines", rank=self._forward, lines=[truncate(line) for line in lines[-100:]])

    def _pass_files(self, rest: bool = False) -> int:
        """What steps gave, where rank 0 runs; and all that trainers write, where the driver does not see it. Returns
        the number of pieces of files."""
        if self._link.channel is None:
            return 0
        if 0 in self._trainers.trainers and (steps := self._metrics.read_new_steps()) is not None:
            self._link.send(steps)
        pieces = self._files.take(rest) if self._files is not None and self._link.free else []
        for piece in pieces:
            self._link.send(piece)
        return len(pieces)
