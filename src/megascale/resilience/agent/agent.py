"""The agent of a node: it keeps a channel to the driver, runs trainers for it and sends heartbeats.

Without a driver the agent continues for `resilience.orphan` seconds, since a killed driver is started again. Then it
lets the trainers save and ends. The trainers end with their agent: their state would be unknown otherwise, and
they would hold devices and ports that the next attempt needs. Starting them again costs a fork.

A cluster on this machine runs `python -m megascale.resilience.agent.agent --folder FOLDER --node NAME ...`; on other
machines attach.py does so, and `megascale agent` (join.py) calls `serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from megascale.core.addresses import find_free_port
from megascale.core.failure import find_errno, keep_running, log_failure
from megascale.core.python_process import disable_bytecode_cache, module_command
from megascale.core.terminal import keep_working, termination_signals
from megascale.errors import MegascaleError, missing_extra
from megascale.observe.hang.evidence import collect_evidence
from megascale.observe.hang.scene import Scene, pack_evidence
from megascale.resilience.agent import node_metrics
from megascale.resilience.agent.driver_link import DriverLink
from megascale.resilience.agent.node_folder import end_checkpoint_services
from megascale.resilience.agent.rank_lease import RankLease
from megascale.resilience.agent.telemetry import Telemetry
from megascale.resilience.agent.trainers import Trainers
from megascale.resilience.protocol.agent_messages import (
    REPORT_CHARACTERS,
    Diagnose,
    Evidence,
    Explain,
    FileStored,
    HeartbeatReceived,
    Inject,
    NodeReleased,
    Order,
    RunningTrainers,
    Start,
    Stop,
)
from megascale.resilience.protocol.heartbeat import truncate
from megascale.resilience.protocol.job_description import read_job
from megascale.services.limited_listener import LimitedListener

log = logging.getLogger("megascale.agent")


class Agent:
    """A node: its trainers, and the orders of the driver."""

    def __init__(self, node: str, folder: Path, address: str, pod: str) -> None:
        self.node = node
        self.address = address
        self.pod = pod
        job = read_job(folder)
        self.job = job.name
        self.limits = job.limits
        self.run_folder = Path(job.run)
        self.shared = job.shared
        _make_run_folder(self.run_folder, job.checkpoints)
        self.boot = secrets.token_hex(8)
        self.state = ""  # the job's state when the trainers were started, "" after an order to stop
        self.ended = asyncio.Event()
        changed = asyncio.Event()
        self.trainers = Trainers(self.run_folder, folder, changed.set, job.shared, job.limits)
        self.lease = RankLease(self.limits.agent_lease, self.limits.orphan, self.trainers.kill_from_thread)
        self.link = DriverLink(folder, address, self._make_hello, self._begin_session, self._obey, self.lease)
        self.telemetry = Telemetry(job, node, address, pod, self.trainers, self.link, changed, self.lease)
        self._order_task: asyncio.Task[None] | None = None
        self._evidence_task: asyncio.Task[None] | None = None
        self._offered_ports: deque[int] = deque(maxlen=100)

    async def run(self) -> None:
        """Serve until the driver orders the end, a signal does, or no driver came for `orphan` seconds."""
        self.trainers.start_server()
        self.lease.start()
        loop = asyncio.get_running_loop()
        for number in termination_signals():
            loop.add_signal_handler(number, self.ended.set)
        loops = {
            "the link to the driver": self.link.run,
            "the heartbeat": self.telemetry.send_heartbeats,
            "reading logs and files": self.telemetry.watch_files,
            "the check for a lost driver": self._watch_for_orphan,
        }
        tasks = [loop.create_task(keep_running(work, name, log)) for name, work in loops.items()]
        page_server = await self._serve_metrics()
        await self.ended.wait()
        self.telemetry.announce_end()
        if self.trainers.running():
            await self.trainers.stop("save", self.limits.grace_period)
        await self.telemetry.send_remaining_files()
        await self.telemetry.confirm_end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if page_server is not None:
            await page_server.close()
        self.trainers.end_server()
        self.telemetry.close()

    async def _serve_metrics(self) -> LimitedListener | None:
        """Serve this node's pages; return None if they are off or the address is unusable, which ends no agent."""
        address = self.limits.agent_metrics
        if not address:
            return None
        labels = self.limits.make_metric_labels(self.job) | {"node": self.node}
        page = node_metrics.make_page(lambda: self.telemetry.newest, lambda: self.link.channel is not None, labels)
        try:
            return await page.serve(address)
        except OSError as error:
            log.warning("this node's /metrics cannot be served at resilience.agent_metrics=%s: %s", address, error)
            return None

    async def _watch_for_orphan(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            if self.link.channel is None and time.monotonic() - self.link.alone_since > self.limits.orphan:
                log.error("no driver for resilience.orphan=%g seconds: saving and ending", self.limits.orphan)
                self.ended.set()

    # the driver -----------------------------------------------------------------------------------------------------

    def _make_hello(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "node": self.node,
            "address": self.address,
            "pod": self.pod,
            "boot": self.boot,
            "attempt": self.trainers.attempt,
            "trainers": self._describe_trainers(),
            "hardware": self.telemetry.hardware,
            "versions": self.telemetry.versions,
        }

    def _describe_trainers(self) -> RunningTrainers | None:
        if not self.state:
            return None
        later_phases = ("save", "evaluate", "done")
        stages = self.trainers.stages().values()
        stepped = any(has_stepped or phase in later_phases for phase, has_stepped in stages)
        return RunningTrainers(self.state, stepped)

    def _begin_session(self) -> None:
        self.telemetry.begin_session()

    async def _obey(self, order: Order) -> None:
        if isinstance(order, HeartbeatReceived):
            self.lease.confirm(order.sequence)
            self.telemetry.confirmed_sequence = order.sequence
        elif isinstance(order, NodeReleased):
            log.warning("the driver has removed this node from the job")
            self.lease.revoke()
        elif isinstance(order, Stop):
            self.state = ""
            if self._order_task is not None:
                self._order_task.cancel()
            self._order_task = self._spawn(self._stop(order), "stopping the trainers")
        elif isinstance(order, Start):
            reason, errno = self._start(order)
            if reason:
                self.link.send_message(do="failed", attempt=order.attempt, reason=truncate(reason), errno=errno)
        elif isinstance(order, Diagnose):
            self._order_task = self._spawn(self._diagnose(order), "the self-checks")
        elif isinstance(order, Explain):
            self._evidence_task = self._spawn(self._explain(order), "collecting evidence")
        elif isinstance(order, FileStored):
            self.telemetry.confirm_file(order)
        elif isinstance(order, Inject):
            self._inject(order)
        else:
            self.ended.set()

    @staticmethod
    def _spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        log_failure(task, name, log)
        return task

    async def _stop(self, order: Stop) -> None:
        """End the trainers, then report a port that is free for the next attempt's store."""
        await self.trainers.stop(order.how, order.grace_period)
        await self.telemetry.send_remaining_files()
        await self.trainers.await_exits()
        if order.forget:
            pids = await asyncio.to_thread(end_checkpoint_services, self.run_folder, self.node)
            log.info("memory is not trusted: ended checkpoint services %s", pids)
        codes = {worker.rank: worker.code for worker in self.trainers.workers()}
        # The port is excluded from the next offers: if another process takes it before its use, the next one differs.
        port = find_free_port(self.address, self._offered_ports)
        self._offered_ports.append(port)
        self.link.send_message(do="stopped", attempt=self.trainers.attempt, order=order.order, port=port, codes=codes)

    def _start(self, order: Start) -> tuple[str, int]:
        """Start the ranks of an attempt; return ("", 0), or the reason and errno of a failure."""
        if order.attempt <= self.trainers.attempt:
            return "", 0  # the order was sent twice
        if self.ended.is_set():
            return "this node's agent is ending", 0
        if reason := self.lease.expired_reason():
            return f"no ranks may run on this node: {reason}", 0
        if self.trainers.has_active():
            return "trainers of an older attempt still run", 0
        if not self.shared:  # The driver sends remaining faults again, to the node of their rank.
            for file in (self.run_folder / "faults").glob("*.json"):
                file.unlink(missing_ok=True)
        try:
            self.trainers.start(order, self.address, self.link.token)
        except OSError as error:
            return f"could not start the trainers: {error}", find_errno(error)
        except ModuleNotFoundError as error:
            return f"could not start the trainers: {missing_extra(error) or error}", 0
        if not order.prepares:
            self.state = order.state
            self.telemetry.follow_attempt(order)
        return "", 0

    def _inject(self, order: Inject) -> None:
        """Write a fault request for the trainers, unless they read the run folder or have taken this request."""
        file = self.run_folder / "faults" / order.name
        if self.shared or file.with_suffix(".injected").exists():
            return
        file.parent.mkdir(exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(order.fault)
        os.replace(temporary, file)

    async def _diagnose(self, order: Diagnose) -> None:
        """Run the self-checks in a child process and send their report."""
        result = await _run_self_checks(order.grace_period)
        self.link.send_message(do="diagnosed", order=order.order, **result)

    async def _explain(self, order: Explain) -> None:
        ranks = tuple(self.trainers.trainers)
        # In a thread, since observing the ranks takes seconds.
        evidence = await asyncio.to_thread(explain_ranks, self.run_folder, ranks, order, not self.shared)
        for message in evidence:
            await self.link.send_when_free(message)


def explain_ranks(run: Path, ranks: Iterable[int], order: Explain, must_store: bool) -> Iterator[Evidence]:
    """Request stacks of this machine's ranks and yield one message per rank; this takes seconds."""
    try:
        scene = collect_evidence(run, watch_seconds=order.watch, ranks=frozenset(ranks))
    except (MegascaleError, OSError):
        scene = Scene({}, 0)
    for rank in ranks:
        evidence = scene.ranks.get(rank)
        data = pack_evidence(evidence, order.history) if evidence is not None else b""
        yield Evidence(order.order, rank, data, rank in scene.moving, must_store)


async def _run_self_checks(timeout: float) -> dict[str, Any]:
    """Run `megascale diagnose`; return the fields of a Diagnosed message but for the order."""
    try:
        process = await asyncio.create_subprocess_exec(
            *module_command("megascale.cli.main", "diagnose", "--json"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        return {"code": 1, "report": "", "stderr": truncate(f"the self-checks cannot be started: {error}")}
    try:
        async with asyncio.timeout(timeout):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        return {"code": 1, "report": "", "stderr": f"no result within {timeout:g} seconds"}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    report = stdout.decode(errors="replace")[-REPORT_CHARACTERS:]
    return {"code": process.returncode, "report": report, "stderr": truncate(stderr.decode(errors="replace"))}


def _make_run_folder(run: Path, checkpoints: str) -> None:
    """Make the folder that trainers write to, with a link to the shared folder of checkpoints."""
    run.mkdir(parents=True, exist_ok=True)
    if checkpoints and not (run / "checkpoints").exists():
        (run / "checkpoints").symlink_to(checkpoints)


def main() -> None:
    """Run the agent from a command line that a cluster composes; people use `megascale agent`."""
    parser = argparse.ArgumentParser(description="Agent of one node.")
    parser.add_argument("--node", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--pod", default="")
    arguments = parser.parse_args()
    serve(arguments.node, arguments.folder, arguments.address, arguments.pod)


def serve(node: str, folder: Path, address: str, pod: str) -> None:
    """Run the agent of a node until the driver ends it or a signal does (SIGTERM, SIGINT, SIGHUP)."""
    keep_working()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    disable_bytecode_cache()
    folder.mkdir(parents=True, exist_ok=True)

    async def run() -> None:
        await Agent(node, folder, address, pod).run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
