"""Agent of a node: it has a channel to the driver, runs trainers on the driver's orders and sends heartbeats.

A killed driver is started again, so the agent continues without a driver for `resilience.orphan` seconds. Then it lets
the trainers save, and ends. The trainers end with their agent. Otherwise their state would be unknown, and they would
occupy devices and ports that the next attempt needs. A new start of the trainers costs only a fork.

Clusters run main.py, which calls `serve`. `megascale agent` (join.py) calls it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from megascale.core.addresses import find_free_port
from megascale.core.atomic_files import write_atomically
from megascale.core.failure import find_errno, keep_running, log_failure
from megascale.core.python_process import disable_bytecode_cache, module_command
from megascale.core.stopwatch import Stopwatch
from megascale.core.terminal import keep_working, termination_signals
from megascale.errors import MegascaleError, TrainingError, missing_extra
from megascale.observe.hang.evidence import collect_evidence
from megascale.observe.hang.scene import Scene, pack_evidence
from megascale.resilience.agent import node_metrics
from megascale.resilience.agent.driver_link import DriverLink
from megascale.resilience.agent.fork_server_process import ForkServerProcess
from megascale.resilience.agent.leftover_processes import end_leftover_processes
from megascale.resilience.agent.node_folder import end_checkpoint_services
from megascale.resilience.agent.rank_lease import RankLease
from megascale.resilience.agent.service_hold import ServiceHold
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
    PrepareGroups,
    RunningTrainers,
    Start,
    Stop,
)
from megascale.resilience.protocol.heartbeat import truncate
from megascale.resilience.protocol.job_description import read_job
from megascale.services.limited_listener import LimitedListener

log = logging.getLogger("megascale.agent")

_KILL_SECONDS = 5.0  # to wait for the end of a killed process
_EXCLUDED_PORTS = 100  # number of ports that the agent has offered and does not offer again


class Agent:
    """Agent of a node.

    Args:
        folder: folder of the node with the job description.
        pod: name of the node's pod or container.
        fork_server: fork server that this process has started already, or None.

    Attributes:
        boot: random name of this agent's process, by which the driver notices a restart of the agent.
        state: state of the job (JobState.to_json) when the trainers were started, or "" after an order to stop.
        shared: whether the run folder is shared with the driver's machine.
        end_requested: set when the agent must end.
    """

    def __init__(
        self, node: str, folder: Path, address: str, pod: str, fork_server: ForkServerProcess | None = None
    ) -> None:
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
        self.state = ""
        self.end_requested = asyncio.Event()
        changed = asyncio.Event()
        self.trainers = Trainers(self.run_folder, folder, changed.set, job.shared, job.limits, fork_server)
        self.lease = RankLease(self.limits.agent_lease, self.limits.orphan, self.trainers.kill_from_thread)
        self.link = DriverLink(folder, address, self._make_hello, self._begin_session, self._execute_order, self.lease)
        # The driver waits for self-checks as long.
        self.service_hold = ServiceHold(self.run_folder, node, self.limits.grace_period + self.limits.window)
        self.telemetry = Telemetry(job, node, address, pod, self.trainers, self.link, changed, self.lease)
        self._metrics_problem = ""  # why the metrics page is not served
        self._order_task: asyncio.Task[None] | None = None
        self._evidence_task: asyncio.Task[None] | None = None
        self._hold_task: asyncio.Task[None] | None = None
        self._offered_ports: deque[int] = deque(maxlen=_EXCLUDED_PORTS)  # last ports in answers to orders to stop

    async def run(self) -> None:
        """Serve until the driver or a signal orders the end, or until no driver came for `orphan` seconds."""
        self.trainers.start_server()  # first, because its imports take seconds, for which the next attempt waits
        await self._end_leftover_processes()  # the agent before this one may have been killed
        self.lease.start()
        loop = asyncio.get_running_loop()
        for number in termination_signals():
            loop.add_signal_handler(number, self.end_requested.set)
        loops = {
            "the link to the driver": self.link.run,
            "the heartbeat": self.telemetry.send_heartbeats,
            "reading logs and files": self.telemetry.watch_files,
            "the check for a lost driver": self._watch_for_orphan,
        }
        page_server = await self._serve_metrics()  # before the greeting, which tells the driver of a failure
        tasks = [loop.create_task(keep_running(work, name, log)) for name, work in loops.items()]
        await self.end_requested.wait()
        self.service_hold.release()
        self.telemetry.announce_end()
        if self.trainers.list_running():
            problem = await self.trainers.stop("save", self.limits.grace_period)
            if problem:
                log.error("%s", problem)
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
        """Serve the node's metrics page. Return None if it is off, or if the address is unusable.

        The reason is logged here, and by the driver.
        """
        address = self.limits.agent_metrics
        if not address:
            return None
        labels = self.limits.make_metric_labels(self.job) | {"node": self.node}
        page = node_metrics.make_page(
            lambda: self.telemetry.last_heartbeat, lambda: self.link.channel is not None, labels
        )
        try:
            return await page.serve(address)
        except OSError as error:
            self._metrics_problem = f"/metrics cannot be served at resilience.agent_metrics={address}: {error}"
            log.warning("%s", self._metrics_problem)
            return None

    async def _watch_for_orphan(self) -> None:
        """End the agent once it has been without a driver for `orphan` seconds."""
        while True:
            await asyncio.sleep(0.5)
            if self.link.channel is None and time.monotonic() - self.link.channel_lost_time > self.limits.orphan:
                log.error("no driver for resilience.orphan=%g seconds: saving and ending", self.limits.orphan)
                self.end_requested.set()

    # the driver -----------------------------------------------------------------------------------------------------

    def _make_hello(self) -> dict[str, Any]:
        """Return the fields of the message `Hello` to a driver."""
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
            "metrics_problem": self._metrics_problem,
        }

    def _describe_trainers(self) -> RunningTrainers | None:
        """Return the state of the job and whether a rank has completed a step, or None after an order to stop."""
        if not self.state:
            return None
        later_phases = ("save", "evaluate", "done")  # A trainer enters them only after a step.
        stages = self.trainers.read_stages().values()
        has_stepped = any(stepped or phase in later_phases for phase, stepped, _ in stages)
        return RunningTrainers(self.state, has_stepped)

    def _begin_session(self) -> None:
        self.telemetry.begin_session()

    async def _execute_order(self, order: Order) -> None:
        """Execute an order of the driver. Lengthy work becomes a task, so that the next order does not wait."""
        if isinstance(order, HeartbeatReceived):
            self.lease.confirm(order.sequence)
            self.telemetry.confirmed_sequence = order.sequence
        elif isinstance(order, NodeReleased):
            log.warning("the driver has removed this node from the job")
            self.service_hold.release()
            self.lease.revoke()
        elif isinstance(order, Stop):
            self.state = ""
            if order.how == "save" or order.forget:
                self.service_hold.release()
            else:
                self._hold_service()
            if self._order_task is not None:
                self._order_task.cancel()
            self._order_task = self._start_task(self._stop_trainers(order), "stopping the trainers")
        elif isinstance(order, Start):
            if not order.prepares:
                self._hold_service()
            reason, errno = await self._start_trainers(order)
            if reason:
                self.link.send_message(do="failed", attempt=order.attempt, reason=truncate(reason), errno=errno)
        elif isinstance(order, PrepareGroups):
            self.trainers.prepare_groups(order)
        elif isinstance(order, Diagnose):
            self._hold_service()
            self._order_task = self._start_task(self._send_diagnosis(order), "the self-checks")
        elif isinstance(order, Explain):
            self._evidence_task = self._start_task(self._send_evidence(order), "collecting evidence")
        elif isinstance(order, FileStored):
            self.telemetry.confirm_file(order)
        elif isinstance(order, Inject):
            self._write_fault(order)
        else:  # Leave
            self.end_requested.set()

    def _hold_service(self) -> None:
        """Keep the node's checkpoint service, with the copies in memory, until the next attempt has trainers."""
        self._hold_task = self._start_task(self.service_hold.renew(), "keeping the checkpoint service alive")

    @staticmethod
    def _start_task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        log_failure(task, name, log)
        return task

    async def _stop_trainers(self, order: Stop) -> None:
        """End the trainers, or let them wait for the next attempt. Report exit codes and a port for its store.

        The report divides the time of the work. If SIGKILL does not end a rank, it has the reason instead.
        """
        stopwatch = Stopwatch()
        problem = await self.trainers.stop(order.how, order.grace_period, joins_at_once=order.joins_at_once)
        if problem:
            log.error("%s", problem)
            attempt = self.trainers.attempt
            self.link.send_message(do="stopped", attempt=attempt, order=order.order, port=0, problem=truncate(problem))
            return
        stopwatch.end_phase("leave")
        await self.telemetry.send_remaining_files()
        stopwatch.end_phase("files")
        await self.trainers.await_exits(order.how)
        stopwatch.end_phase("exit")
        if order.forget:
            pids = await asyncio.to_thread(end_checkpoint_services, self.run_folder, self.node)
            log.info("memory is not trusted: ended checkpoint services %s", pids)
        codes = {worker.rank: worker.code for worker in self.trainers.describe_workers()}
        # The next offers exclude this port. If another process takes it before its use, the driver gets another port.
        port = find_free_port(self.address, self._offered_ports)
        self._offered_ports.append(port)
        self.link.send_message(
            do="stopped",
            attempt=self.trainers.attempt,
            order=order.order,
            port=port,
            codes=codes,
            leave_seconds=stopwatch.timings["leave"],
            files_seconds=stopwatch.timings["files"],
            exit_seconds=stopwatch.timings["exit"],
        )

    async def _start_trainers(self, order: Start) -> tuple[str, int]:
        """Start the ranks of an attempt. Return the reason and errno of a failure, or an empty text and 0."""
        if order.attempt <= self.trainers.attempt:
            return "", 0  # the order was sent twice
        if not self.trainers.list_running():
            await self._end_leftover_processes()
        if self.end_requested.is_set():
            return "this node's agent is ending", 0
        reason = self.lease.get_expiry_reason()
        if reason:
            return f"no ranks may run on this node: {reason}", 0
        if self.trainers.continue_preparation(order):
            return "", 0
        if order.prepares:
            self.trainers.end_preparation()
        if self.trainers.has_active_ranks():
            return "trainers of an older attempt still run", 0
        if not self.shared:  # the driver sends the remaining faults again, each to the node of its rank
            for file in (self.run_folder / "faults").glob("*.json"):
                file.unlink(missing_ok=True)
        try:
            self.trainers.start(order, self.address, self.link.token)
        except OSError as error:
            return f"could not start the trainers: {error}", find_errno(error)
        except ModuleNotFoundError as error:
            return f"could not start the trainers: {missing_extra(error) or error}", 0
        except TrainingError as error:
            return str(error), 0
        if not order.prepares:
            self.state = order.state
            self.telemetry.follow_attempt(order)
        return "", 0

    async def _end_leftover_processes(self) -> None:
        """End the processes that ranks of earlier attempts have started on this node. No rank may run meanwhile."""
        pids = await asyncio.to_thread(end_leftover_processes, self.run_folder, self.job, self.node)
        if pids:
            log.warning("ended processes %s, which ranks of an earlier attempt had started", pids)

    def _write_fault(self, order: Inject) -> None:
        """Write a fault request for the trainers, unless they read the shared run folder or have executed it."""
        file = self.run_folder / "faults" / order.name
        if self.shared or file.with_suffix(".injected").exists():
            return
        write_atomically(file, order.fault)

    async def _send_diagnosis(self, order: Diagnose) -> None:
        """Run the self-checks in a child process, and send their report."""
        result = await _run_self_checks(order.grace_period)
        self.link.send_message(do="diagnosed", order=order.order, **result)

    async def _send_evidence(self, order: Explain) -> None:
        """Collect evidence of this node's ranks, and send it."""
        self.trainers.prepare_replacements()
        ranks = tuple(self.trainers.trainers)
        # In a thread, since observing the ranks takes seconds.
        messages = await asyncio.to_thread(collect_rank_evidence, self.run_folder, ranks, order, not self.shared)
        for message in messages:
            await self.link.send_when_free(message)


def collect_rank_evidence(run: Path, ranks: Iterable[int], order: Explain, must_store: bool) -> Iterator[Evidence]:
    """Collect evidence of this machine's ranks for some seconds, and yield one message per rank."""
    try:
        scene = collect_evidence(run, watch_seconds=order.watch, ranks=frozenset(ranks))
    except (MegascaleError, OSError):
        scene = Scene({}, 0)
    for rank in ranks:
        evidence = scene.ranks.get(rank)
        data = pack_evidence(evidence, order.history) if evidence is not None else b""
        yield Evidence(order.order, rank, data=data, moving=rank in scene.moving, must_store=must_store)


async def _run_self_checks(timeout: float) -> dict[str, Any]:
    """Run `megascale diagnose`, and return the fields of a Diagnosed message except the order."""
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
            with contextlib.suppress(TimeoutError):  # the kernel cannot end a process that waits for a failed device
                async with asyncio.timeout(_KILL_SECONDS):
                    await process.wait()
    report = stdout.decode(errors="replace")[-REPORT_CHARACTERS:]
    return {"code": process.returncode, "report": report, "stderr": truncate(stderr.decode(errors="replace"))}


def _make_run_folder(run: Path, checkpoints: str) -> None:
    """Make the folder to which trainers write, with a link to the shared checkpoints folder."""
    run.mkdir(parents=True, exist_ok=True)
    if checkpoints and not (run / "checkpoints").exists():
        (run / "checkpoints").symlink_to(checkpoints)


def serve(node: str, folder: Path, address: str, pod: str, fork_server: ForkServerProcess | None = None) -> None:
    """Run the agent of a node until the driver or a signal (SIGTERM, SIGINT, SIGHUP) ends it.

    Args:
        fork_server: fork server that this process has started already, or None.
    """
    keep_working()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    disable_bytecode_cache()
    folder.mkdir(parents=True, exist_ok=True)

    async def run() -> None:
        await Agent(node, folder, address, pod, fork_server).run()

    asyncio.run(run())
