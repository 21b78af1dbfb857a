"""The agent of a node: keeps a channel to the driver, runs trainers for it, sends heartbeats.

It goes on without a driver (one that was killed comes back) for `resilience.orphan` seconds, then lets the trainers
save and ends. Its trainers end with it: an agent that died cannot say what its processes do, and processes that
nobody watches would hold devices and ports that the next attempt needs. Starting them again costs a fork.

Run as `python -m megascale.resilience.agent.agent --run RUN --node NAME ...` by a Cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from megascale.core.failure import errno_of
from megascale.core.ports import free_port
from megascale.errors import MegascaleError
from megascale.resilience.agent import gpu_health, node_health
from megascale.resilience.agent.logs import LogFilter
from megascale.resilience.agent.metrics_tail import MetricsTail
from megascale.resilience.agent.sent_files import SentFiles
from megascale.resilience.agent.services import end_services
from megascale.resilience.agent.trainers import Trainers
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import (
    LIMIT,
    REPORT,
    Diagnose,
    Explain,
    HeldTrainers,
    Kept,
    Order,
    Refuse,
    Start,
    Stop,
    Welcome,
)
from megascale.resilience.protocol.given import given, given_token
from megascale.resilience.protocol.heartbeat import Heartbeat, fit
from megascale.resilience.protocol.rank_evidence import look_at
from megascale.services.framing import ProtocolError
from megascale.services.messages import Message

log = logging.getLogger("megascale.agent")
RETRY = 0.25  # seconds between attempts to reach a driver
LOOK = 0.2  # seconds between looks at logs and status files
REST = 5.0  # seconds for the driver to have written what ended trainers wrote last


class Agent:
    """State of one node."""

    def __init__(self, node: str, folder: Path, address: str, pod: str) -> None:
        self.node, self.folder, self.address, self.pod = node, folder, address, pod
        job = given(folder)
        self.job, self.config, self.run_folder = job.name, job.limits, Path(job.run)
        _make_run_folder(self.run_folder, job.checkpoints)
        self.boot = secrets.token_hex(8)
        self.epoch = _known_epoch(folder)
        self.sequence = 0
        self.channel: agent_channel.AgentChannel | None = None
        self.trainers = Trainers(self.run_folder, folder, self.beat_soon, job.shared)
        self.metrics = MetricsTail(self.run_folder)
        self.files = None if job.shared else SentFiles(self.run_folder)
        self.logs = LogFilter(self.config.log_patterns)
        self.traffic = node_health.TrafficSampler()
        self.gpus = gpu_health.GpuHealth()
        self.facts = (node_health.hardware(), node_health.versions())
        self.forward: int | None = None
        self.state = ""  # the job as the trainers were started; "" once they were ordered to stop
        self.ended = asyncio.Event()
        self._soon = asyncio.Event()
        self._doing: asyncio.Task[None] | None = None
        self._explaining: asyncio.Task[None] | None = None
        self._offered: deque[int] = deque(maxlen=100)
        self._alone_since = time.monotonic()

    async def run(self) -> None:
        """Serve until the driver says leave, or none came for `orphan` seconds."""
        self.trainers.serve()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ended.set)
        tasks = [loop.create_task(work()) for work in (self._talk, self._beat, self._watch_logs, self._orphan)]
        await self.ended.wait()
        if self.trainers.running():
            await self.trainers.stop("save", self.config.grace_period)
        await self._send_rest()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.trainers.end_server()
        self.traffic.close()
        self.gpus.close()

    # the driver -----------------------------------------------------------------------------------------------------

    async def _talk(self) -> None:
        """Keep a channel to whichever driver is the newest."""
        while True:
            try:
                await self._session()
            except (
                OSError,
                EOFError,
                ValueError,
                TimeoutError,
                MegascaleError,
            ) as error:
                log.info("no driver: %s", error or type(error).__name__)
            except Exception:
                log.exception("the session with the driver broke")
            if self.channel is not None:
                self.channel.close()
                self.channel, self._alone_since = None, time.monotonic()
            await asyncio.sleep(RETRY)

    async def _session(self) -> None:
        host, port = given(self.folder).driver
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_connection(host, port, local_addr=self._local(host))
            try:
                token = given_token(self.folder)  # read anew: the next driver may have made another one
                channel = await agent_channel.open_channel(reader, writer, token, driver=False)
                hello: dict[str, Any] = {"job": self.job, "node": self.node, "address": self.address, "pod": self.pod}
                hello |= {"boot": self.boot, "epoch": self.epoch, "attempt": self.trainers.attempt}
                hello["held"] = self._held()
                hello |= {
                    "pid": os.getpid(),
                    "version": agent_channel.VERSION,
                    "hardware": self.facts[0],
                    "versions": self.facts[1],
                }
                channel.send_message(do="hello", **hello)
                welcome = await channel.receive()
            except BaseException:
                writer.close()
                raise
        if not isinstance(welcome, Welcome):
            channel.close()
            why = welcome.why if isinstance(welcome, Refuse) else f"it said {welcome.do!r} first"
            raise ProtocolError(f"the driver refused this node: {why}")
        if welcome.version != agent_channel.VERSION:
            channel.close()
            raise ProtocolError(f"the driver is of MegaScale {welcome.version}, this agent of {agent_channel.VERSION}")
        self._accept(welcome.epoch)
        self.metrics.begin_session()
        if self.files is not None:
            self.files.begin_session()
        self.channel = channel
        log.info("driver of epoch %d at %s:%d", self.epoch, host, port)
        self.beat_soon()
        watch = asyncio.create_task(self._newer(channel))
        try:
            while True:
                order = await channel.receive()
                if not isinstance(order, Order):
                    raise ProtocolError(f"the driver said {order.do!r} amid its orders")
                self._accept(order.epoch)
                await self._obey(order)
        finally:
            watch.cancel()

    async def _newer(self, channel: agent_channel.AgentChannel) -> None:
        """Leave a driver that another has replaced: one that hangs keeps its connections open."""
        while True:
            await asyncio.sleep(RETRY)
            with contextlib.suppress(MegascaleError):
                if given(self.folder).epoch > self.epoch:
                    channel.close()
                    return

    def _local(self, host: str) -> tuple[str, int] | None:
        """A node of a local cluster talks from its own loopback address."""
        return (self.address, 0) if self.address.startswith("127.") and host.startswith("127.") else None

    def _accept(self, epoch: int) -> None:
        """Obey the newest driver only: an older one has been replaced, whatever it still believes."""
        if epoch < self.epoch:
            raise ProtocolError(f"a driver of epoch {epoch}, but epoch {self.epoch} is known: it has been replaced")
        if epoch > self.epoch:
            self.epoch = epoch
            try:
                _write(self.folder / "epoch", str(epoch))
            except OSError as error:  # a full disk keeps nobody from obeying; an agent started anew knows less then
                log.warning("the epoch %d could not be written down: %s", epoch, error)

    async def _obey(self, order: Order) -> None:
        if isinstance(order, Stop):
            self.state = ""
            if self._doing is not None:
                self._doing.cancel()
            self._doing = asyncio.create_task(self._stop(order))
        elif isinstance(order, Start):
            self._start(order)
        elif isinstance(order, Diagnose):
            self._doing = asyncio.create_task(self._diagnose(order))
        elif isinstance(order, Explain):
            self._explaining = asyncio.create_task(self._explain(order))
        elif isinstance(order, Kept):
            if self.files is not None:
                self.files.kept(order.name, order.end)
        else:
            self.ended.set()

    async def _stop(self, order: Stop) -> None:
        """End the trainers, then say so with a port that is free for the next attempt's store."""
        await self.trainers.stop(order.how, order.grace_period)
        await self._send_rest()
        if order.forget:
            log.info("memory is not trusted: ended checkpoint services %s", end_services(self.run_folder, self.node))
        codes = {w.rank: w.code for w in self.trainers.workers()}
        port = free_port(self.address, self._offered)
        self._offered.append(port)  # where it was taken by the time of its use, the next is another one
        self._say(do="stopped", attempt=self.trainers.attempt, order=order.order, port=port, codes=codes)

    def _start(self, order: Start) -> None:
        if order.attempt <= self.trainers.attempt:
            return  # sent twice
        if self.trainers.running():
            self._say(do="failed", attempt=order.attempt, why="trainers of an older attempt still run")
            return
        try:
            self.trainers.start(order, self.address)
        except OSError as error:
            why = f"could not start the trainers: {error}"
            self._say(do="failed", attempt=order.attempt, why=fit(why), errno=errno_of(error))
            return
        self.forward, self.state = order.forward, order.state
        self.logs.follow({t.rank: (t.log, t.log_start) for t in self.trainers.trainers.values()})
        if self.files is not None:
            self.files.follow(order.ranks)
        self.beat_soon()

    async def _diagnose(self, order: Diagnose) -> None:
        """Run the self-checks in a process of their own and pass the report on."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megascale.cli.main",
            "diagnose",
            "--json",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(order.grace_period):
                out, said = await process.communicate()
            report = {"code": process.returncode, "report": out.decode(errors="replace")[-REPORT:]}
            report["said"] = fit(said.decode(errors="replace"))
        except TimeoutError:
            report = {"code": 1, "report": "", "said": f"no result within {order.grace_period:g} seconds"}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        self._say(do="diagnosed", order=order.order, **report)

    async def _explain(self, order: Explain) -> None:
        """Look at the ranks that stand still, in a thread: it takes up to some seconds."""
        ranks = tuple(self.trainers.trainers)
        found = await asyncio.to_thread(look_at, self.run_folder, ranks, order.order, order.history)
        for evidence in found:
            await self._send_when_free(evidence)

    async def _send_when_free(self, message: Message) -> None:
        """Send what is large once what was queued before has gone."""
        while self.channel is not None and self.channel.backlog > LIMIT:
            await asyncio.sleep(LOOK)
        self._send(message)

    def _held(self) -> HeldTrainers | None:
        if not self.state:
            return None
        stages = self.trainers.stages().values()
        stepped = any(has or phase in ("save", "evaluate", "done") for phase, has in stages)
        return HeldTrainers(self.state, stepped)

    def _say(self, **message: Any) -> None:
        if self.channel is not None:
            with contextlib.suppress(ConnectionError):
                self.channel.send_message(**message)

    def _send(self, message: Message) -> None:
        if self.channel is not None:
            with contextlib.suppress(ConnectionError):
                self.channel.send(message)

    # telemetry --------------------------------------------------------------------------------------------------------

    def beat_soon(self) -> None:
        """Something changed: send a heartbeat now rather than at the next interval."""
        self._soon.set()

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.interval):
                    await self._soon.wait()
                    await asyncio.sleep(0.01)  # what ends together is sent together
            self._soon.clear()
            if self.channel is None:
                continue
            try:
                self._pass_lines()
                self.channel.send(self.heartbeat())
            except (ConnectionError, ValueError) as error:
                log.warning("a heartbeat was not sent: %s", error)

    def heartbeat(self) -> Heartbeat:
        """This node now."""
        self.sequence += 1
        return Heartbeat(
            job=self.job,
            attempt=self.trainers.attempt,
            node=self.node,
            sequence=self.sequence,
            sent_ns=time.time_ns(),
            address=self.address,
            pod=self.pod,
            hardware=self.facts[0],
            versions=self.facts[1],
            workers=self.trainers.workers(),
            logs=self.logs.take(),
            gpus=self.gpus.take(),
            traffic=self.traffic.take(),
            checksums=self.trainers.checksums(),
            step_seconds=self.trainers.step_seconds(),
            disks=self.trainers.disks(),
        )

    async def _watch_logs(self) -> None:
        """Between heartbeats: new lines of rank 0, and whether a trainer has come to another phase or a first step."""
        before: dict[int, tuple[str, bool]] = {}
        while True:
            await asyncio.sleep(LOOK)
            self._pass_lines()
            self._pass_files()
            now = self.trainers.stages()
            if now != before:
                before = now
                self.beat_soon()

    def _pass_lines(self) -> None:
        lines = self.logs.look(self.forward)
        if lines:
            self._say(do="lines", rank=self.forward, lines=[fit(line) for line in lines[-100:]])

    def _pass_files(self) -> int:
        """What steps gave, where rank 0 runs; and all that trainers write, where the driver does not see it. Returns
        the number of pieces of files."""
        channel = self.channel
        if channel is None:
            return 0
        if 0 in self.trainers.trainers and (steps := self.metrics.look()) is not None:
            self._send(steps)
        pieces = self.files.take() if self.files is not None and channel.backlog < LIMIT else []
        for piece in pieces:
            self._send(piece)
        return len(pieces)

    async def _send_rest(self) -> None:
        """Send what ended trainers wrote last: told of their end, the driver may place them elsewhere or go."""
        deadline = time.monotonic() + REST
        while self.files is not None and self.channel is not None and time.monotonic() < deadline:
            if not self._pass_files() and self.files.confirmed():
                return
            await asyncio.sleep(LOOK)

    async def _orphan(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            if self.channel is None and time.monotonic() - self._alone_since > self.config.orphan:
                log.error("no driver for resilience.orphan=%g seconds: saving and ending", self.config.orphan)
                self.ended.set()


def _known_epoch(folder: Path) -> int:
    try:
        return int((folder / "epoch").read_text())
    except (OSError, ValueError):
        return 0


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _make_run_folder(run: Path, checkpoints: str) -> None:
    """The folder that trainers write to, with the checkpoints that all nodes share."""
    run.mkdir(parents=True, exist_ok=True)
    if checkpoints and not (run / "checkpoints").exists():
        (run / "checkpoints").symlink_to(checkpoints)


def main() -> None:
    """Command line of the agent; started by a Cluster, not by people."""
    parser = argparse.ArgumentParser(description="Agent of one node.")
    parser.add_argument("--node", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--pod", default="")
    a = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    a.folder.mkdir(parents=True, exist_ok=True)

    async def serve() -> None:
        await Agent(a.node, a.folder, a.address, a.pod).run()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
