"""Trainers of a node: the agent starts them by the fork server, observes their status files and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from megascale.config import ForeignConfig, ResilienceConfig
from megascale.core.addresses import find_interface, is_loopback
from megascale.core.exit_record import ExitKind
from megascale.core.failure import FailureLog, free_bytes
from megascale.core.process_orders import (
    EARLY_VARIABLE,
    MISSING_VARIABLE,
    PREPARED_VARIABLE,
    Park,
    Resume,
    encode_order,
)
from megascale.core.python_process import module_command
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.core.untrusted_files import read_tail
from megascale.errors import EXIT_FAILED
from megascale.resilience.agent.rank_programs import (
    ForeignProgram,
    MegascaleTrainer,
    Progress,
    RankProgram,
    TrainerProcess,
)
from megascale.resilience.protocol.agent_messages import Start
from megascale.resilience.protocol.fork_messages import (
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    Broken,
    Ended,
    Fork,
    Forked,
    ForkServerReady,
    Instruct,
)
from megascale.resilience.protocol.heartbeat import RankStart, Worker, truncate
from megascale.services.messages import FrameReader, Message
from megascale.services.shared_token import derive_token

log = logging.getLogger("megascale.agent")
# Ranks that have not left their attempt this long before the end of keep_seconds are asked for their stacks.
_STACK_SECONDS = 0.1
_DATA_SIZE_OPTION = "--parallel.data="
# Environment variables that a rank receives again if it continues in its process.
_RESUMED_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MEGASCALE_ATTEMPT",
    "MEGASCALE_NODE_ADDRESS",
    MISSING_VARIABLE,
)
_NO_ATTEMPT = 0  # number of the attempt of a process that is started before the driver orders an attempt
EARLY_SECONDS = 120.0  # time that such a process waits for the order
START_SECONDS = 30.0  # heartbeats describe a rank's start until this many seconds after its state was loaded


class Trainers:
    """Ranks of this node, of one attempt at a time.

    Args:
        run: folder to which the trainers write. Its name is the name of the run.
        folder: folder of the node, which receives the settings of each start order.
        on_change: called when a process has started or ended.
        shared: whether the settings already name `run` as their run folder. Otherwise trainers get an option for it.
        limits: section `resilience` of the configuration.

    Attributes:
        attempt: number of the present attempt.
        trainers: processes of the present attempt by rank.
        program: program of the present attempt's ranks.
    """

    def __init__(
        self,
        run: Path,
        folder: Path,
        on_change: Callable[[], None],
        shared: bool = True,
        limits: ResilienceConfig = ResilienceConfig(),
    ) -> None:
        self.run = run
        self.folder = folder
        self.attempt = 0
        self.trainers: dict[int, TrainerProcess] = {}
        self._on_change = on_change
        self._shared = shared
        self._limits = limits
        self.program: RankProgram = MegascaleTrainer(run, folder / "job.toml", shared)
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._read_task: asyncio.Task[None] | None = None  # reads the fork server's reports
        self._is_server_ready = False
        self._end_reason = ""  # reason for which the agent killed the fork server
        self._start_failure: Broken | None = None  # report of a fork server that could not start
        self._start_order: Start | None = None  # start order of the present attempt
        self._is_preparing = False  # whether the processes were only prepared and wait for their first attempt
        self._replacement_reasons: dict[int, str] = {}  # by rank: why its process was replaced since the last start
        self._common_environment: dict[str, str] = {}  # environment variables of all ranks
        # By rank: process that waits to replace the rank's ended process, or 0 while the fork server forks it.
        self._early_pids: dict[int, int] = {}
        self._dying_pids: set[int] = set()  # killed processes whose memory the kernel still frees

    # the fork server ------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """Start the fork server, after killing an older one with its children."""
        self.end_server()
        agent_end, server_end = socket.socketpair()
        agent_end.setblocking(False)
        module = "megascale.resilience.agent.fork_server"
        modules = MegascaleTrainer.modules if self._limits.preload else ForeignProgram.modules
        with open(self.folder / "forkserver.log", "ab") as out:
            self._server = subprocess.Popen(
                module_command(module, str(server_end.fileno()), str(os.getpid()), *modules),
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        server_end.close()
        self._socket = agent_end
        self._is_server_ready = False
        self._start_failure = None
        self._read_task = asyncio.get_running_loop().create_task(self._read_reports(agent_end))

    def end_server(self) -> None:
        """Kill the fork server and all trainers with it."""
        if self._read_task is not None:
            self._read_task.cancel()
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            self._kill_programs(self.list_running())
            self._server.kill()
            self._server.wait()
        for trainer in self.list_running():
            trainer.end(signal.SIGKILL, by_agent=True)  # the wait status of a killed process is the signal's number
        self._server = None
        self._socket = None
        self._read_task = None
        self._early_pids = {}
        self._dying_pids = set()

    def _kill_programs(self, ranks: Sequence[TrainerProcess]) -> None:
        """Kill ranks and their child processes, which would outlive the fork server."""
        for trainer in ranks:
            if trainer.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    self.program.signal(trainer.pid, signal.SIGKILL)

    async def _read_reports(self, sock: socket.socket) -> None:
        """Handle the reports of the fork server until it ends. Then start a new one."""
        loop = asyncio.get_running_loop()
        frames = FrameReader(FROM_FORK_SERVER)
        try:
            while data := await loop.sock_recv(sock, 65536):
                for message in frames.feed(data):
                    self._handle_report(message)
        except OSError as error:
            log.warning("the connection to the fork server ended: %s", error)
        except Exception as error:
            # Without the reports, the ends of the server's ranks would stay unknown, so the server is replaced.
            FailureLog(log, "reading from the fork server").note(error, "the server and its ranks are ended")
            if not self._end_reason:
                self._end_reason = f"reports of the fork server cannot be read: {error}"
            if self._server is not None:
                self._server.kill()
        # The server has ended, and its children with it. Start a new one, unless this one failed during its imports.
        self._read_task = None
        if isinstance(self.program, ForeignProgram):
            self._kill_programs(self.list_running())  # their children outlive the server
        self._record_server_end()
        self.end_server()
        self._on_change()
        if self._is_server_ready:
            self.start_server()

    def _record_server_end(self) -> None:
        """Record why the fork server ended as the end of the running ranks, which the kernel has killed with it."""
        if self._start_failure:
            failure = {
                "record": self._start_failure.record,
                "error": self._start_failure.error,
                "tail": self._start_failure.tail,
            }
            for trainer in self.list_running():
                trainer.end(1 << 8, **failure)  # wait status of a process with exit code 1
        elif self._server is not None and self.list_running():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(1.0)
            code = self._server.returncode or 0
            if code < 0:
                description = f"signal {signal.Signals(-code).name}"
            else:
                description = f"exit code {code}"
            error = self._end_reason or f"its fork server (process {self._server.pid}) ended with {description}"
            self._end_reason = ""
            for trainer in self.list_running():
                trainer.end(signal.SIGKILL, by_agent=True, error=error)

    def _handle_report(self, message: Message) -> None:
        """Apply a report of the fork server."""
        if isinstance(message, ForkServerReady):
            self._is_server_ready = True
        elif isinstance(message, Broken):
            self._start_failure = message
        elif isinstance(message, Forked) and message.attempt == _NO_ATTEMPT:
            if self._early_pids.get(message.rank) == 0:
                self._early_pids[message.rank] = message.pid
                loop = asyncio.get_running_loop()
                loop.call_later(EARLY_SECONDS, self._end_unused_process, message.rank, message.pid)
            else:
                self._end_early_process(message.pid)
        elif isinstance(message, Forked) and message.attempt == self.attempt:
            if message.rank in self.trainers:
                self.trainers[message.rank].pid = message.pid
        elif isinstance(message, Ended) and message.pid in self._dying_pids:
            self._dying_pids.discard(message.pid)
        elif isinstance(message, Ended):
            for trainer in self.trainers.values():
                if trainer.pid == message.pid:
                    trainer.end(message.status, record=message.record, error=message.error)
                    self._start_early_process(trainer)
            self._early_pids = {rank: pid for rank, pid in self._early_pids.items() if pid != message.pid}
        self._on_change()

    # an attempt -----------------------------------------------------------------------------------------------------

    def start(self, order: Start, address: str, token: bytes) -> None:
        """Start the ranks of an attempt.

        Args:
            order: start order of the driver.
            address: address of this node.
            token: token of the job. The token of replicas derives from it unless the agent's environment has one.
        """
        parked = self._take_parked_trainers(order)
        assert len(parked) == len(self.list_running()), "the previous attempt has not ended"
        replacement_reasons = self._explain_replacements()
        early_pids = self._take_early_processes(order)
        self._start_order = order
        self._is_preparing = order.prepares
        self.attempt = order.attempt
        if order.fresh or self._socket is None:
            self.start_server()
        logs = self.run / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.program.close()
        self.program = self._choose_program(order)
        self.program.prepare(order)
        common = order.env | {
            "LOCAL_WORLD_SIZE": str(len(order.ranks)),
            "WORLD_SIZE": str(order.world),
            "MASTER_ADDR": order.master[0],
            "MASTER_PORT": str(order.master[1]),
            "MEGASCALE_JOB": order.job,
            REPLICA_VARIABLE: os.environ.get(REPLICA_VARIABLE) or derive_token(token, f"replicas of {order.job}"),
            "MEGASCALE_ATTEMPT": str(self.attempt),
            "MEGASCALE_NODE": self.folder.name,
            "MEGASCALE_NODE_ADDRESS": address,
            MISSING_VARIABLE: f"{_compute_missing_fraction(order):g}",
        }
        common = _make_network_variables(address) | common
        self._common_environment = common
        self.trainers = {}
        for local_rank, rank in enumerate(order.ranks):
            log_file = logs / f"rank-{rank}.log"
            log_start = log_file.stat().st_size if log_file.exists() else 0
            trainer = TrainerProcess(rank, log_file, log_start, progress_time=time.monotonic())
            self.trainers[rank] = trainer
            env = common | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            if order.prepares:
                env[PREPARED_VARIABLE] = "1"
            if rank in early_pids:
                pid = early_pids[rank]
            elif local_rank in parked:
                pid = parked[local_rank].pid
            else:
                pid = 0
            if rank in early_pids or not pid:
                trainer.replacement_reason = replacement_reasons.get(rank, "")
            if pid:
                trainer.pid = pid
                trainer.attempt_start_ns = time.time_ns()
                environment = {name: env[name] for name in _RESUMED_VARIABLES}
                self._send_order_to(pid, Resume(environment, data=_read_data_size(order)))
            else:
                self._send_to_server(self.program.make_fork(rank, self.attempt, env, log_file))

    def _take_parked_trainers(self, order: Start) -> dict[int, TrainerProcess]:
        """Return the parked trainers that continue in their processes, by local rank.

        If the order needs other processes, replace the fork server, which ends all parked trainers.
        """
        parked = {trainer.rank: trainer for trainer in self.list_running() if trainer.is_parked}
        reason = _explain_change(self._start_order, order)
        if parked and reason:
            self._replacement_reasons |= dict.fromkeys(parked, reason)
            self.start_server()
            return {}
        local_ranks = {rank: local_rank for local_rank, rank in enumerate(self.trainers)}
        return {local_ranks[rank]: trainer for rank, trainer in parked.items()}

    def _start_early_process(self, trainer: TrainerProcess) -> None:
        """Start the process that replaces an ended rank before the driver orders it. It loads its modules."""
        is_needed = trainer.status != 0 and not trainer.by_agent and self._server is not None
        if not is_needed or self._start_order is None or not self._keeps_processes:
            return
        if trainer.rank not in self._start_order.ranks or not isinstance(self.program, MegascaleTrainer):
            return
        local_rank = self._start_order.ranks.index(trainer.rank)
        env = self._common_environment | {"RANK": str(trainer.rank), "LOCAL_RANK": str(local_rank), EARLY_VARIABLE: "1"}
        self._early_pids[trainer.rank] = 0
        self._send_to_server(self.program.make_fork(trainer.rank, _NO_ATTEMPT, env, trainer.log))

    def _take_early_processes(self, order: Start) -> dict[int, int]:
        """Return the process ids of early processes that the order can use, by rank. End the other early processes."""
        early_pids = self._early_pids
        self._early_pids = {}
        is_usable = not order.fresh and not order.prepares and not _explain_change(self._start_order, order)
        used_pids = {}
        for rank, pid in early_pids.items():
            if is_usable and pid and rank in order.ranks:
                used_pids[rank] = pid
            else:
                self._end_early_process(pid)
        return used_pids

    def _end_unused_process(self, rank: int, pid: int) -> None:
        """End an early process that no attempt has used, because it occupies device memory."""
        if self._early_pids.get(rank) == pid:
            del self._early_pids[rank]
            self._end_early_process(pid)

    def _end_early_process(self, pid: int) -> None:
        """End an early process. If it is still being forked (pid 0), `_handle_report` ends it later."""
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _explain_replacements(self) -> dict[int, str]:
        """Return the reason by rank why a process was replaced, although the rank itself had no fault."""
        reasons = {}
        for rank, trainer in self.trainers.items():
            outlived_fault = not trainer.by_agent and trainer.record.kind is ExitKind.LOST_PEER
            if trainer.status is not None and outlived_fault and self._keeps_processes:
                reasons[rank] = trainer.exit_reason or "it ended although only a peer was lost"
        reasons |= self._replacement_reasons
        self._replacement_reasons = {}
        return reasons

    @property
    def _keeps_processes(self) -> bool:
        """Return whether ranks without a fault stay in their processes after a failed attempt."""
        return self._limits.keep_seconds > 0

    def continue_preparation(self, order: Start) -> bool:
        """Let the processes that were prepared before wait for the attempt after that of `order`, if they can.

        Returns:
            Whether `order` is thereby carried out.
        """
        is_same = self._is_preparing and order.prepares and not _explain_change(self._start_order, order)
        if not is_same or len(self.list_running()) != len(order.ranks):
            return False
        self.attempt = order.attempt
        self._start_order = order
        return True

    def is_prepared(self) -> bool:
        """Return whether the order was to prepare processes, and all of them wait for the next attempt."""
        return self._is_preparing and all(trainer.is_parked for trainer in self.trainers.values())

    def has_active_ranks(self) -> bool:
        """Return whether ranks of an attempt run. Parked ranks do not count."""
        return any(not trainer.is_parked for trainer in self.list_running())

    def _choose_program(self, order: Start) -> RankProgram:
        tree = tomllib.loads(order.settings)
        foreign = ForeignConfig.model_validate(tree.get("foreign", {}))
        if foreign.command:
            return ForeignProgram(self.run, foreign, self._limits.no_progress_limit)
        return MegascaleTrainer(self.run, self.folder / "job.toml", self._shared, self._keeps_processes)

    def _send_order_to(self, pid: int, order: Park | Resume) -> None:
        self._send_to_server(Instruct(pid, encode_order(order)))

    def _send_to_server(self, order: Fork | Instruct) -> None:
        assert self._socket is not None
        self._socket.setblocking(True)  # the socket's buffer has space for the orders of all ranks
        try:
            self._socket.sendall(TO_FORK_SERVER.encode_frame(order))
        finally:
            self._socket.setblocking(False)

    def list_running(self) -> list[TrainerProcess]:
        """Return the ranks whose processes have not ended."""
        return [trainer for trainer in list(self.trainers.values()) if trainer.status is None]

    def kill_from_thread(self, reason: str) -> None:
        """Kill all ranks at once, because the driver may start them on another node. Any thread may call it."""
        server = self._server
        if server is None or server.returncode is not None or not self.list_running():
            return
        if not self._end_reason:
            log.error("ending the ranks of this node: %s", reason)
        self._end_reason = reason
        ranks = self.list_running()
        with contextlib.suppress(OSError):
            os.kill(server.pid, signal.SIGKILL)  # the kernel ends its ranks with it
        # After the server, so that it does not report their ends as if another process had killed them.
        self._kill_programs(ranks)

    async def stop(self, how: Literal["save", "keep", "leave", "kill"], grace_period: float) -> None:
        """End or park all ranks.

        Args:
            how: "save" gives the ranks `grace_period` seconds to save a checkpoint and then kills them. "kill" kills
                them at once. "keep" makes the ranks leave the attempt and wait in their processes, and kills ranks that
                do not leave. "leave" is like "keep", but first gives the ranks `grace_period` seconds to complete their
                step and to copy its state to memory.
        """
        if how in ("keep", "leave") and self._keeps_processes and isinstance(self.program, MegascaleTrainer):
            if how == "leave":
                await self._await_leaving(grace_period)
            await self._park_ranks()
            return
        for pid in self._early_pids.values():
            self._end_early_process(pid)
        self._early_pids = {}
        if how == "kill":
            reason = "the driver ordered new processes, because the fault may concern all ranks"
            self._replacement_reasons |= {trainer.rank: reason for trainer in self.list_running() if trainer.is_parked}
        deadline = time.monotonic() + grace_period
        signalled_pids: set[int] = set()
        while how == "save" and self.list_running() and time.monotonic() < deadline:
            # A rank that is still being forked has no process id yet, and gets the signal in a later round.
            signalled_pids |= self._signal_ranks(signal.SIGTERM, exclude=signalled_pids)
            await asyncio.sleep(0.02)
        while self.list_running() and self._server is not None:
            self._signal_ranks(signal.SIGKILL)
            await asyncio.sleep(0.01)

    async def _await_leaving(self, seconds: float) -> None:
        """Order the ranks to leave the attempt after their step, and wait for it at most `seconds`."""
        deadline = time.monotonic() + seconds
        instructed_pids: set[int] = set()
        while self._server is not None and self.has_active_ranks() and time.monotonic() < deadline:
            for trainer in self.list_running():
                self._read_progress(trainer)
                if trainer.pid and trainer.pid not in instructed_pids and not trainer.is_parked:
                    instructed_pids.add(trainer.pid)
                    self._send_order_to(trainer.pid, Park(self.attempt, after_step=True))
            await asyncio.sleep(0.01)

    async def _park_ranks(self) -> None:
        """Order the ranks to leave the attempt, and kill ranks that do not within `resilience.keep_seconds`."""
        deadline = time.monotonic() + self._limits.keep_seconds
        instructed_pids: set[int] = set()
        stack_request_pids: set[int] = set()
        while self._server is not None:
            active = []
            for trainer in self.list_running():
                self._read_progress(trainer)
                if not trainer.is_parked:
                    active.append(trainer)
            if not active:
                return
            is_late = time.monotonic() >= deadline
            for trainer in active:
                if not trainer.pid:
                    continue  # the rank is being forked, and gets its order in a later round
                if trainer.pid not in instructed_pids:
                    instructed_pids.add(trainer.pid)
                    self._send_order_to(trainer.pid, Park(self.attempt))
                if trainer.by_agent:
                    continue
                if read_usage(trainer.pid).stopped:
                    self._kill_unparked(trainer, "it was stopped by a signal")
                elif is_late:
                    self._kill_unparked(trainer, self._describe_delay(trainer))
                elif time.monotonic() >= deadline - _STACK_SECONDS and trainer.pid not in stack_request_pids:
                    stack_request_pids.add(trainer.pid)
                    self._replacement_reasons[trainer.rank] = self._describe_delay(trainer)
                    with contextlib.suppress(ProcessLookupError):
                        self.program.signal(trainer.pid, signal.SIGUSR2)  # writes its stack
            await asyncio.sleep(0.01)

    def _describe_delay(self, trainer: TrainerProcess) -> str:
        """Return a description of a rank that does not leave its attempt: its step and, if known, its line of code."""
        step = trainer.progress.step if trainer.progress is not None else 0
        text = f"it did not leave step {step} within {self._limits.keep_seconds:g} s"
        stack = ""
        with contextlib.suppress(OSError):
            stack = read_tail(self.run / "status" / f"rank-{trainer.rank}.stack")
        stack = stack.rpartition("most recent call first")[2]
        frame = re.search(r'File ".*?([^/"]+)", line (\d+) in (\S+)', stack)
        if frame is not None:
            text += f", in {frame[3]} ({frame[1]}:{frame[2]})"
        return text

    def _kill_unparked(self, trainer: TrainerProcess, reason: str) -> None:
        """Kill a rank that did not leave its attempt, and store the reason."""
        self._replacement_reasons[trainer.rank] = reason
        trainer.by_agent = True
        with contextlib.suppress(ProcessLookupError):
            self.program.signal(trainer.pid, signal.SIGKILL)

    def _signal_ranks(self, number: int, exclude: Collection[int] = ()) -> set[int]:
        """Send a signal to the running ranks except the processes `exclude`, and return the signalled processes."""
        pids = set()
        for trainer in self.list_running():
            if trainer.pid and trainer.pid not in exclude:
                trainer.by_agent = True
                # A process that was just forked has no process group yet.
                with contextlib.suppress(ProcessLookupError):
                    self.program.signal(trainer.pid, number)
                    pids.add(trainer.pid)
        return pids

    def note_kills(self) -> None:
        """Record the ends of killed ranks as soon as the kernel begins them.

        The fork server learns of an end when all memory is freed: after seconds, for tens of gigabytes that are
        page-locked and a GPU's context. The other ranks leave the attempt meanwhile.
        """
        for trainer in self.list_running():
            if trainer.by_agent or trainer.pid <= 0 or not is_being_killed(trainer.pid):
                continue
            if self._server is None or self._server.poll() is not None or is_being_killed(self._server.pid):
                return  # the ends of ranks follow from the fork server's
            self._dying_pids.add(trainer.pid)
            trainer.end(signal.SIGKILL)
            self._start_early_process(trainer)
            self._on_change()

    async def await_exits(self) -> None:
        """Wait until killed ranks have freed their memory, above all the GPU's, which the next attempt needs."""
        while self._dying_pids:
            await asyncio.sleep(0.01)

    # telemetry --------------------------------------------------------------------------------------------------------

    def describe_workers(self) -> tuple[Worker, ...]:
        """Return the state of every rank of the attempt for a heartbeat."""
        if self._is_preparing:
            return ()
        return tuple(self._describe_worker(self.trainers[rank]) for rank in sorted(self.trainers))

    def read_stages(self) -> dict[int, tuple[str, bool]]:
        """Return the stage of each running rank: its phase, and whether it has completed a step.

        A change of the result causes a heartbeat at once.
        """
        stages = {}
        self.note_kills()
        for trainer in self.list_running():
            self._read_progress(trainer)
            if trainer.progress is not None:
                stages[trainer.rank] = (trainer.progress.phase, trainer.progress.step > trainer.first_step)
        return stages

    def read_checksums(self) -> dict[str, str]:
        """Return the newest checksum of weights of each rank that computes checksums, by "STEP:RANK"."""
        checksums = {}
        for trainer in self.trainers.values():
            if trainer.checksum:
                step, _, value = trainer.checksum.partition(":")
                checksums[f"{step}:{trainer.rank}"] = value
        return checksums

    def read_step_seconds(self) -> dict[int, float]:
        """Return the compute seconds of the last step by rank."""
        return {rank: trainer.compute_seconds for rank, trainer in self.trainers.items() if trainer.compute_seconds}

    def find_saved_step(self) -> int:
        """Return the step of the newest complete checkpoint of a foreign trainer, or 0 if it is unknown."""
        return self.program.find_saved_step()

    def measure_free_disks(self) -> dict[str, float]:
        """Return the free bytes of the disks to which trainers write, by folder. Empty unless a trainer has failed."""
        if not any(trainer.status for trainer in self.trainers.values()):
            return {}
        return free_bytes([self.run, self.run / "logs", self.run / "checkpoints", tempfile.gettempdir(), "/dev/shm"])

    def _read_progress(self, trainer: TrainerProcess) -> None:
        """Update the progress of a rank from its files."""
        self.program.read_progress(trainer)

    def _describe_worker(self, trainer: TrainerProcess) -> Worker:
        """Return the state of a rank for a heartbeat."""
        self._read_progress(trainer)
        current_time = time.monotonic()
        progress = trainer.progress or Progress()
        usage = ProcessUsage()
        state: Literal["running", "exited", "signalled"] = "running"
        code = 0
        tail = ""
        ended_age = 0.0
        if trainer.is_parked:
            # To the driver, a parked rank is a process that ended because it lost its peers.
            state = "exited"
            code = EXIT_FAILED
            ended_age = current_time - trainer.progress_time
        elif trainer.status is None:
            usage = read_usage(trainer.pid) if trainer.pid else usage
        else:
            ended_age = current_time - trainer.ended
            if os.WIFSIGNALED(trainer.status):
                state = "signalled"
                code = os.WTERMSIG(trainer.status)
            else:
                state = "exited"
                code = os.WEXITSTATUS(trainer.status)
            if code:
                tail = trainer.tail or trainer.read_tail()
        return Worker(
            rank=trainer.rank,
            pid=trainer.pid,
            state=state,
            code=code,
            phase=progress.phase,
            step=progress.step,
            action=truncate(progress.action, 200),
            microbatch=progress.microbatch,
            completed_steps=progress.completed_steps,
            status_age=current_time - trainer.progress_time,
            message=truncate(progress.message),
            rss=usage.resident_bytes,
            cpu_seconds=usage.cpu_seconds,
            stopped=usage.stopped,
            stderr_tail=tail,
            exit=trainer.record,
            error=truncate(trainer.error),
            ended_age=ended_age,
            by_agent=trainer.by_agent,
            start=_describe_start(trainer),
        )


def _describe_start(trainer: TrainerProcess) -> RankStart | None:
    """Return the progress of a rank's start, or None after enough heartbeats have reported the complete start."""
    start = trainer.start
    if start is None or trainer.status is not None:
        return None
    current_time = time.time_ns()

    def measure_age(time_ns: int) -> float:
        """Return the seconds since a time, or -1 if the time is 0 (unknown)."""
        return max(0.0, (current_time - time_ns) / 1e9) if time_ns else -1.0

    progress = trainer.progress or Progress()
    if progress.step > trainer.first_step >= 0 and measure_age(start.state_ns) > START_SECONDS:
        return None
    return RankStart(
        process_age=measure_age(start.process_ns),
        groups_age=measure_age(start.groups_ns),
        state_age=measure_age(start.state_ns),
        step=start.step,
        source=start.source,
        is_reused=start.is_reused,
        is_standing=start.is_standing,
        left_age=measure_age(start.left_ns),
        doubt=trainer.replacement_reason[:200],
    )


def _explain_change(previous: Start | None, order: Start) -> str:
    """Return why processes of the previous attempt cannot be used in the next one, or an empty text if they can."""
    if order.fresh:
        return "the fork server of its node is renewed"
    if previous is None or (len(previous.ranks), previous.job) != (len(order.ranks), order.job):
        return "the number of ranks of its node changes"
    has_same_options = _list_fixed_options(previous) == _list_fixed_options(order)
    if previous.settings != order.settings or not has_same_options or previous.env != order.env:
        return "the settings change"
    return ""


def _list_fixed_options(order: Start) -> list[str]:
    """Return the options of the trainers' command line without the data-parallel size, which may change."""
    return [option for option in order.words if not option.startswith(_DATA_SIZE_OPTION)]


def _read_data_size(order: Start) -> int:
    """Return the data-parallel size of an attempt, or 0 if neither the command line nor the settings give it."""
    sizes = [option.removeprefix(_DATA_SIZE_OPTION) for option in order.words if option.startswith(_DATA_SIZE_OPTION)]
    return int(sizes[-1]) if sizes else _read_full_size(order)


def _read_full_size(order: Start) -> int:
    """Return the data-parallel size of the settings, or 0 if they do not give it."""
    return int(tomllib.loads(order.settings).get("parallel", {}).get("data", 0))


def _compute_missing_fraction(order: Start) -> float:
    """Return the fraction of replicas that are missing in an attempt, or 0 if the job has shrunk permanently."""
    is_degraded = bool(order.state) and json.loads(order.state).get("missing_since", 0) > 0
    if not is_degraded:
        return 0.0
    full_size = _read_full_size(order)
    if not full_size:
        return 0.0
    return 1 - _read_data_size(order) / full_size


def _make_network_variables(address: str) -> dict[str, str]:
    """Return environment variables that bind gloo and NCCL to the interface of `address`, unless they are set.

    By default both libraries use the interface of the host's name or the first interface. Other nodes may not reach it.
    """
    interface = "" if is_loopback(address) else find_interface(address)
    if not interface:
        return {}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if name not in os.environ}


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessUsage(NamedTuple):
    """Resources of a process. `stopped` is whether a signal or a debugger has stopped it."""

    resident_bytes: int = 0
    cpu_seconds: float = 0.0
    stopped: bool = False


def read_usage(pid: int) -> ProcessUsage:
    """Return the resources of a process, or zeros if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return ProcessUsage()
    ticks = int(fields[11]) + int(fields[12])
    return ProcessUsage(int(fields[21]) * _PAGE_BYTES, ticks / _TICKS_PER_SECOND, fields[0] in (b"T", b"t"))


_FLAGS, _EXIT_CODE = 6, 49  # fields of /proc/PID/stat after the name
_PF_EXITING = 0x4


def is_being_killed(pid: int) -> bool:
    """Return whether SIGKILL has ended a process, although it may not be reaped yet; False where that is unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    if len(fields) <= _EXIT_CODE or not int(fields[_FLAGS]) & _PF_EXITING:
        return False
    return int(fields[_EXIT_CODE]) & 0x7F == signal.SIGKILL
