"""The agent of a node: keeps a channel to the driver, runs trainers for it, sends heartbeats.

It goes on without a driver (one that was killed comes back) for `resilience.orphan` seconds, then lets the trainers
save and ends. Its trainers end with it: an agent that died cannot say what its processes do, and processes that
nobody watches would hold devices and ports that the next attempt needs. Starting them again costs a fork.

Run as `python -m megascale.resilience.agent.agent --folder FOLDER --node NAME ...` by a Cluster on this machine or by
attach.py on another, and by `megascale agent` (join.py).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from megascale.core.background import keep_running, log_failure
from megascale.core.failure import disable_bytecode_cache, find_errno
from megascale.core.ports import find_free_port
from megascale.core.python_command import module_command
from megascale.core.terminal import keep_working, termination_signals
from megascale.resilience.agent.driver_link import DriverLink
from megascale.resilience.agent.metrics_page import MetricsPage
from megascale.resilience.agent.rank_lease import RankLease
from megascale.resilience.agent.services import end_services
from megascale.resilience.agent.telemetry import Telemetry
from megascale.resilience.agent.trainers import Trainers
from megascale.resilience.protocol.agent_messages import (
    REPORT,
    Diagnose,
    Explain,
    Heard,
    Inject,
    Kept,
    Order,
    Parted,
    RunningTrainers,
    Start,
    Stop,
)
from megascale.resilience.protocol.given import read_job
from megascale.resilience.protocol.heartbeat import truncate
from megascale.resilience.protocol.rank_evidence import collect_evidence

log = logging.getLogger("megascale.agent")


class Agent:
    """A node: what it holds of trainers, and what orders make of them."""

    def __init__(self, node: str, folder: Path, address: str, pod: str) -> None:
        self.node, self.address, self.pod = node, address, pod
        job = read_job(folder)
        self.job, self.config, self.run_folder = job.name, job.limits, Path(job.run)
        self.shared = job.shared
        _make_run_folder(self.run_folder, job.checkpoints)
        self.boot = secrets.token_hex(8)
        self.state = ""  # the job as the trainers were started; "" once they were ordered to stop
        self.ended = asyncio.Event()
        changed = asyncio.Event()
        self.trainers = Trainers(self.run_folder, folder, changed.set, job.shared)
        self.lease = RankLease(job.limits.agent_lease, job.limits.orphan, self.trainers.cut_off)
        self.link = DriverLink(folder, address, self._hello, self._begun, self._obey, self.lease)
        self.telemetry = Telemetry(job, node, address, pod, self.trainers, self.link, changed, self.lease)
        self._doing: asyncio.Task[None] | None = None
        self._explaining: asyncio.Task[None] | None = None
        self._offered: deque[int] = deque(maxlen=100)

    async def run(self) -> None:
        """Serve until the driver says leave, or none came for `orphan` seconds."""
        self.trainers.serve()
        self.lease.start()
        loop = asyncio.get_running_loop()
        for number in termination_signals():
            loop.add_signal_handler(number, self.ended.set)
        works = {
            "the link to the driver": self.link.talk,
            "the heartbeat": self.telemetry.beat,
            "the look at logs and files": self.telemetry.watch,
            "the look for a lost driver": self._orphan,
        }
        tasks = [loop.create_task(keep_running(work, name, log)) for name, work in works.items()]
        page = MetricsPage(lambda: self.telemetry.newest, lambda: self.link.channel is not None)
        served = await page.serve(self.config.agent_metrics) if self.config.agent_metrics else None
        await self.ended.wait()
        self.telemetry.leave()
        if self.trainers.running():
            await self.trainers.stop("save", self.config.grace_period)
        await self.telemetry.send_rest()
        await self.telemetry.say_over()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if served is not None:
            await served.close()
        self.trainers.end_server()
        self.telemetry.close()

    async def _orphan(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            if self.link.channel is None and time.monotonic() - self.link.alone_since > self.config.orphan:
                log.error("no driver for resilience.orphan=%g seconds: saving and ending", self.config.orphan)
                self.ended.set()

    # the driver -----------------------------------------------------------------------------------------------------

    def _hello(self) -> dict[str, Any]:
        hardware, versions = self.telemetry.facts
        return {
            "job": self.job,
            "node": self.node,
            "address": self.address,
            "pod": self.pod,
            "boot": self.boot,
            "attempt": self.trainers.attempt,
            "held": self._held(),
            "hardware": hardware,
            "versions": versions,
        }

    def _held(self) -> RunningTrainers | None:
        if not self.state:
            return None
        stages = self.trainers.stages().values()
        stepped = any(has or phase in ("save", "evaluate", "done") for phase, has in stages)
        return RunningTrainers(self.state, stepped)

    def _begun(self) -> None:
        self.telemetry.begin_session()

    async def _obey(self, order: Order) -> None:
        if isinstance(order, Heard):
            self.lease.answered(order.sequence)
            self.telemetry.heard = order.sequence
        elif isinstance(order, Parted):
            log.warning("the driver has given this node up")
            self.lease.parted()
        elif isinstance(order, Stop):
            self.state = ""
            if self._doing is not None:
                self._doing.cancel()
            self._doing = self._spawn(self._stop(order), "the stop of the trainers")
        elif isinstance(order, Start):
            self._start(order)
        elif isinstance(order, Diagnose):
            self._doing = self._spawn(self._diagnose(order), "the self-checks")
        elif isinstance(order, Explain):
            self._explaining = self._spawn(self._explain(order), "the look at ranks that stand still")
        elif isinstance(order, Kept):
            self.telemetry.kept(order)
        elif isinstance(order, Inject):
            self._inject(order)
        else:
            self.ended.set()

    @staticmethod
    def _spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Do what an order asks for in the background."""
        task = asyncio.create_task(work)
        log_failure(task, name, log)
        return task

    async def _stop(self, order: Stop) -> None:
        """End the trainers, then say so with a port that is free for the next attempt's store."""
        await self.trainers.stop(order.how, order.grace_period)
        await self.telemetry.send_rest()
        if order.forget:
            ended = await asyncio.to_thread(end_services, self.run_folder, self.node)
            log.info("memory is not trusted: ended checkpoint services %s", ended)
        codes = {w.rank: w.code for w in self.trainers.workers()}
        port = find_free_port(self.address, self._offered)
        self._offered.append(port)  # where it was taken by the time of its use, the next is another one
        self.link.say(do="stopped", attempt=self.trainers.attempt, order=order.order, port=port, codes=codes)

    def _start(self, order: Start) -> None:
        if order.attempt <= self.trainers.attempt:
            return  # sent twice
        if self.ended.is_set():
            self.link.say(do="failed", attempt=order.attempt, why="this node's agent has been told to end")
            return
        if why := self.lease.over():
            self.link.say(do="failed", attempt=order.attempt, why=f"no ranks may run here: {why}")
            return
        if self.trainers.running():
            self.link.say(do="failed", attempt=order.attempt, why="trainers of an older attempt still run")
            return
        if not self.shared:  # what is still wanted comes again, to wherever its rank is now
            for left in (self.run_folder / "faults").glob("*.json"):
                left.unlink(missing_ok=True)
        try:
            self.trainers.start(order, self.address, self.link.token)
        except OSError as error:
            why = f"could not start the trainers: {error}"
            self.link.say(do="failed", attempt=order.attempt, why=truncate(why), errno=find_errno(error))
            return
        self.state = order.state
        self.telemetry.follow(order)

    def _inject(self, order: Inject) -> None:
        """Have a trainer find a fault, unless it looks into the run folder itself or has taken this one."""
        file = self.run_folder / "faults" / order.name
        if self.shared or file.with_suffix(".injected").exists():
            return
        file.parent.mkdir(exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(order.fault)
        os.replace(temporary, file)

    async def _diagnose(self, order: Diagnose) -> None:
        """Run the self-checks in a process of their own and pass the report on."""
        try:
            process = await asyncio.create_subprocess_exec(
                *module_command("megascale.cli.main", "diagnose", "--json"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            reason = truncate(f"the self-checks cannot be started: {error}")
            self.link.say(do="diagnosed", order=order.order, code=1, report="", said=reason)
            return
        try:
            async with asyncio.timeout(order.grace_period):
                out, said = await process.communicate()
            report = {"code": process.returncode, "report": out.decode(errors="replace")[-REPORT:]}
            report["said"] = truncate(said.decode(errors="replace"))
        except TimeoutError:
            report = {"code": 1, "report": "", "said": f"no result within {order.grace_period:g} seconds"}
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        self.link.say(do="diagnosed", order=order.order, **report)

    async def _explain(self, order: Explain) -> None:
        """Look at the ranks that stand still, in a thread: it takes up to some seconds."""
        ranks = tuple(self.trainers.trainers)
        found = await asyncio.to_thread(collect_evidence, self.run_folder, ranks, order, not self.shared)
        for evidence in found:
            await self.link.send_when_free(evidence)


def _make_run_folder(run: Path, checkpoints: str) -> None:
    """The folder that trainers write to, with the checkpoints that all nodes share."""
    run.mkdir(parents=True, exist_ok=True)
    if checkpoints and not (run / "checkpoints").exists():
        (run / "checkpoints").symlink_to(checkpoints)


def main() -> None:
    """Command line of the agent; started by a Cluster, not by people (`megascale agent` is for them)."""
    parser = argparse.ArgumentParser(description="Agent of one node.")
    parser.add_argument("--node", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--pod", default="")
    a = parser.parse_args()
    serve(a.node, a.folder, a.address, a.pod)


def serve(node: str, folder: Path, address: str, pod: str) -> None:
    """Be the agent of a node, until the driver lets it go or it is told to end (SIGTERM, SIGINT, SIGHUP)."""
    keep_working()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    disable_bytecode_cache()
    folder.mkdir(parents=True, exist_ok=True)

    async def run() -> None:
        await Agent(node, folder, address, pod).run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
