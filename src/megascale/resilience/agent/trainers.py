"""The trainers of a node: forked by the fork server, observed through their status files, and stopped."""

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
    OwnTrainer,
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
_STACK_SECONDS = 0.1  # before the end of keep_seconds, when ranks that have not left are asked for their stacks
_DATA_SIZE = "--parallel.data="
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
_NO_ATTEMPT = 0  # of a process that is started before its attempt is ordered
EARLY_SECONDS = 120.0  # for which a process that was started before its attempt waits for the order
START_SECONDS = 30.0  # seconds after its state was loaded for which heartbeats describe a rank's start


class Trainers:
    """The ranks of this node, one attempt at a time.

    Args:
        run: the folder that trainers write to; its name is the run's.
        folder: the node's own folder, which receives the settings of each start order.
        on_change: called when a process has started or ended.
        shared: `run` is the folder that the settings name; otherwise trainers get an override.
        limits: the configuration section [resilience].

    Attributes:
        program: the program of the present attempt's ranks.
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
        self.program: RankProgram = OwnTrainer(run, folder / "job.toml", shared)
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = False
        self._end_reason = ""  # reason for which the agent killed the fork server
        self._broken: Broken | None = None  # report of a fork server that cannot start
        self._order: Start | None = None  # of the present attempt
        self._is_preparing = False  # the processes wait for the next attempt, and have run none
        self._doubts: dict[int, str] = {}  # rank -> why its process was not kept, since the last start
        self._common: dict[str, str] = {}  # variables of all ranks of the present attempt
        self._early: dict[int, int] = {}  # rank -> process that waits to replace it, 0 while it is forked
        self._dying: set[int] = set()  # killed processes whose memory the kernel still frees

    # the fork server ------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """Start the fork server; an older one and its children are killed first."""
        self.end_server()
        own_end, server_end = socket.socketpair()
        own_end.setblocking(False)
        module = "megascale.resilience.agent.fork_server"
        modules = OwnTrainer.modules if self._limits.preload else ForeignProgram.modules
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
        self._socket = own_end
        self._ready = False
        self._broken = None
        self._reading = asyncio.get_running_loop().create_task(self._read_reports(own_end))

    def end_server(self) -> None:
        """Kill the fork server and with it every trainer."""
        if self._reading is not None:
            self._reading.cancel()
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            self._kill_programs(self.running())
            self._server.kill()
            self._server.wait()
        for trainer in self.running():
            trainer.end(signal.SIGKILL, by_agent=True)
        self._server = self._socket = self._reading = None
        self._early = {}
        self._dying = set()

    def _kill_programs(self, ranks: Sequence[TrainerProcess]) -> None:
        """Kill ranks and what they have started, which the end of the fork server does not end."""
        for trainer in ranks:
            if trainer.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    self.program.signal(trainer.pid, signal.SIGKILL)

    async def _read_reports(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        frames = FrameReader(FROM_FORK_SERVER)
        try:
            while data := await loop.sock_recv(sock, 65536):
                for message in frames.feed(data):
                    self._handle(message)
        except OSError as error:
            log.warning("the connection to the fork server ended: %s", error)
        except Exception as error:
            # The ends of this server's ranks would stay unknown, so the server is replaced.
            FailureLog(log, "reading from the fork server").note(error, "the server and its ranks are ended")
            self._end_reason = self._end_reason or f"reports of the fork server cannot be read: {error}"
            if self._server is not None:
                self._server.kill()
        # The server has ended and its children with it. Start a new one unless this one failed during its imports.
        self._reading = None
        if isinstance(self.program, ForeignProgram):
            self._kill_programs(self.running())  # before they count as ended; their children outlive the server
        self._record_server_end()
        self.end_server()
        self._on_change()
        if self._ready:
            self.start_server()

    def _record_server_end(self) -> None:
        """Give running ranks the reason for the fork server's end, since their own SIGKILL only follows from it."""
        if self._broken:
            failure = {"record": self._broken.record, "error": self._broken.error, "tail": self._broken.tail}
            for trainer in self.running():
                trainer.end(1 << 8, **failure)
        elif self._server is not None and self.running():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(1.0)
            code = self._server.returncode or 0
            if code < 0:
                how = f"signal {signal.Signals(-code).name}"
            else:
                how = f"exit code {code}"
            error = self._end_reason or f"its fork server (process {self._server.pid}) ended with {how}"
            self._end_reason = ""
            for trainer in self.running():
                trainer.end(signal.SIGKILL, by_agent=True, error=error)

    def _handle(self, message: Message) -> None:
        if isinstance(message, ForkServerReady):
            self._ready = True
        elif isinstance(message, Broken):
            self._broken = message
        elif isinstance(message, Forked) and message.attempt == _NO_ATTEMPT:
            if self._early.get(message.rank) == 0:
                self._early[message.rank] = message.pid
                loop = asyncio.get_running_loop()
                loop.call_later(EARLY_SECONDS, self._end_untaken, message.rank, message.pid)
            else:
                self._end_early(message.pid)
        elif isinstance(message, Forked) and message.attempt == self.attempt:
            if message.rank in self.trainers:
                self.trainers[message.rank].pid = message.pid
        elif isinstance(message, Ended) and message.pid in self._dying:
            self._dying.discard(message.pid)
        elif isinstance(message, Ended):
            for trainer in self.trainers.values():
                if trainer.pid == message.pid:
                    trainer.end(message.status, record=message.record, error=message.error)
                    self._start_early(trainer)
            self._early = {rank: pid for rank, pid in self._early.items() if pid != message.pid}
        self._on_change()

    # an attempt -----------------------------------------------------------------------------------------------------

    def start(self, order: Start, address: str, token: bytes) -> None:
        """Start the ranks of an attempt.

        Args:
            order: the driver's start order.
            address: address of this node.
            token: the job's token. The token of replicas derives from it unless the agent's environment has one.
        """
        parked = self._take_parked(order)
        assert len(parked) == len(self.running()), "the previous attempt has not ended"
        doubts = self._explain_replacements()
        early = self._take_early(order)
        self._order = order
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
            MISSING_VARIABLE: f"{_compute_missing_share(order):g}",
        }
        common = _network_variables(address) | common
        self._common = common
        self.trainers = {}
        for local_rank, rank in enumerate(order.ranks):
            log_file = logs / f"rank-{rank}.log"
            log_start = log_file.stat().st_size if log_file.exists() else 0
            trainer = TrainerProcess(rank, log_file, log_start, changed=time.monotonic())
            self.trainers[rank] = trainer
            env = common | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            if order.prepares:
                env[PREPARED_VARIABLE] = "1"
            if rank in early:
                trainer.replacement_reason = doubts.get(rank, "")
            if local_rank in parked or rank in early:
                trainer.pid = early[rank] if rank in early else parked[local_rank].pid
                trainer.since_ns = time.time_ns()
                environment = {name: env[name] for name in _RESUMED_VARIABLES}
                self._instruct(trainer.pid, Resume(environment, data=_read_data_size(order)))
            else:
                trainer.replacement_reason = doubts.get(rank, "")
                self._send(self.program.make_fork(rank, self.attempt, env, log_file))

    def _take_parked(self, order: Start) -> dict[int, TrainerProcess]:
        """Return the parked ranks that go on in their processes, by local rank.

        If the order does not suit them, end all of them.
        """
        parked = {trainer.rank: trainer for trainer in self.running() if trainer.is_parked}
        reason = _explain_change(self._order, order)
        if parked and reason:
            self._doubts |= dict.fromkeys(parked, reason)
            self.start_server()
            return {}
        local_ranks = {rank: local_rank for local_rank, rank in enumerate(self.trainers)}
        return {local_ranks[rank]: trainer for rank, trainer in parked.items()}

    def _start_early(self, trainer: TrainerProcess) -> None:
        """Start the process that replaces an ended rank before the driver orders it: it loads what a start needs."""
        is_needed = trainer.status != 0 and not trainer.by_agent and self._server is not None
        if not is_needed or self._order is None or not self._keeps_processes:
            return
        if trainer.rank not in self._order.ranks or not isinstance(self.program, OwnTrainer):
            return
        local_rank = self._order.ranks.index(trainer.rank)
        env = self._common | {"RANK": str(trainer.rank), "LOCAL_RANK": str(local_rank), EARLY_VARIABLE: "1"}
        self._early[trainer.rank] = 0
        self._send(self.program.make_fork(trainer.rank, _NO_ATTEMPT, env, trainer.log))

    def _take_early(self, order: Start) -> dict[int, int]:
        """Return the waiting processes that the order suits, by rank; end the others."""
        early, self._early = self._early, {}
        suits = not order.fresh and not order.prepares and not _explain_change(self._order, order)
        taken = {}
        for rank, pid in early.items():
            if suits and pid and rank in order.ranks:
                taken[rank] = pid
            else:
                self._end_early(pid)
        return taken

    def _end_untaken(self, rank: int, pid: int) -> None:
        """End a waiting process that no attempt has taken: its node may get no ranks, and it holds device memory."""
        if self._early.get(rank) == pid:
            del self._early[rank]
            self._end_early(pid)

    def _end_early(self, pid: int) -> None:
        """End a waiting process. One that is still being forked is ended when its process id comes."""
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _explain_replacements(self) -> dict[int, str]:
        """Return for each rank that outlived the last attempt, but not in its process, why that process has ended."""
        reasons = {}
        for rank, trainer in self.trainers.items():
            outlived_fault = not trainer.by_agent and trainer.record.kind is ExitKind.LOST_PEER
            if trainer.status is not None and outlived_fault and self._keeps_processes:
                reasons[rank] = trainer.doubt or "it ended although only a peer was lost"
        reasons |= self._doubts
        self._doubts = {}
        return reasons

    @property
    def _keeps_processes(self) -> bool:
        return self._limits.keep_seconds > 0

    def is_prepared(self) -> bool:
        """Return whether all processes that were to be prepared wait for the next attempt."""
        return self._is_preparing and all(trainer.is_parked for trainer in self.trainers.values())

    def has_active(self) -> bool:
        """Return whether ranks of an attempt run: those that are parked do not."""
        return any(not trainer.is_parked for trainer in self.running())

    def _choose_program(self, order: Start) -> RankProgram:
        tree = tomllib.loads(order.settings)
        foreign = ForeignConfig.model_validate(tree.get("foreign", {}))
        if foreign.command:
            return ForeignProgram(self.run, foreign, self._limits.no_progress_limit)
        return OwnTrainer(self.run, self.folder / "job.toml", self._shared, self._keeps_processes)

    def _instruct(self, pid: int, order: Park | Resume) -> None:
        self._send(Instruct(pid, encode_order(order)))

    def _send(self, order: Fork | Instruct) -> None:
        assert self._socket is not None
        self._socket.setblocking(True)  # The socket's buffer holds the orders of all ranks, some hundred bytes each.
        try:
            self._socket.sendall(TO_FORK_SERVER.encode_frame(order))
        finally:
            self._socket.setblocking(False)

    def running(self) -> list[TrainerProcess]:
        """List the ranks that have not ended."""
        return [trainer for trainer in list(self.trainers.values()) if trainer.status is None]

    def kill_from_thread(self, reason: str) -> None:
        """Kill all ranks at once, since the driver may start them on another node. May be called from any thread."""
        server = self._server
        if server is None or server.returncode is not None or not self.running():
            return
        if not self._end_reason:
            log.error("ending the ranks of this node: %s", reason)
        self._end_reason = reason
        ranks = self.running()
        with contextlib.suppress(OSError):
            os.kill(server.pid, signal.SIGKILL)  # the kernel ends its ranks with it
        # The server must not report their ends as if another process had killed them, so they follow.
        self._kill_programs(ranks)

    async def stop(self, how: Literal["save", "keep", "leave", "kill"], grace_period: float) -> None:
        """End all ranks.

        "save" gives them `grace_period` seconds to save a checkpoint first. "keep" lets them leave the attempt and wait
        in their processes, and ends those that do not. "leave" gives them `grace_period` seconds to complete their step
        and to copy its state to memory before that.
        """
        if how in ("keep", "leave") and self._keeps_processes and isinstance(self.program, OwnTrainer):
            if how == "leave":
                await self._await_leaving(grace_period)
            await self._park()
            return
        for pid in self._early.values():
            self._end_early(pid)
        self._early = {}
        if how == "kill":
            reason = "the driver ordered new processes: the fault may concern all"
            self._doubts |= {trainer.rank: reason for trainer in self.running() if trainer.is_parked}
        deadline = time.monotonic() + grace_period
        signalled: set[int] = set()
        while how == "save" and self.running() and time.monotonic() < deadline:
            # A rank that is still being forked gets its signal in a later round.
            signalled |= self._signal(signal.SIGTERM, exclude=signalled)
            await asyncio.sleep(0.02)
        while self.running() and self._server is not None:
            self._signal(signal.SIGKILL)
            await asyncio.sleep(0.01)

    async def _await_leaving(self, seconds: float) -> None:
        """Order the ranks to leave the attempt after their step, and wait for that."""
        deadline = time.monotonic() + seconds
        instructed: set[int] = set()
        while self._server is not None and self.has_active() and time.monotonic() < deadline:
            for trainer in self.running():
                self._update(trainer)
                if trainer.pid and trainer.pid not in instructed and not trainer.is_parked:
                    instructed.add(trainer.pid)
                    self._instruct(trainer.pid, Park(self.attempt, after_step=True))
            await asyncio.sleep(0.01)

    async def _park(self) -> None:
        """Let the ranks leave the attempt; end those that do not within `resilience.keep_seconds`."""
        deadline = time.monotonic() + self._limits.keep_seconds
        instructed: set[int] = set()
        asked: set[int] = set()
        while self._server is not None:
            active = []
            for trainer in self.running():
                self._update(trainer)
                if not trainer.is_parked:
                    active.append(trainer)
            if not active:
                return
            is_late = time.monotonic() >= deadline
            for trainer in active:
                if not trainer.pid:
                    continue  # it is being forked, and gets its order in a later round
                if trainer.pid not in instructed:
                    instructed.add(trainer.pid)
                    self._instruct(trainer.pid, Park(self.attempt))
                if trainer.by_agent:
                    continue
                if read_usage(trainer.pid).stopped:
                    self._end_unparked(trainer, "it was stopped by a signal")
                elif is_late:
                    self._end_unparked(trainer, self._describe_delay(trainer))
                elif time.monotonic() >= deadline - _STACK_SECONDS and trainer.pid not in asked:
                    asked.add(trainer.pid)
                    self._doubts[trainer.rank] = self._describe_delay(trainer)
                    with contextlib.suppress(ProcessLookupError):
                        self.program.signal(trainer.pid, signal.SIGUSR2)  # for its stack
            await asyncio.sleep(0.01)

    def _describe_delay(self, trainer: TrainerProcess) -> str:
        """Return where a rank is that does not leave its attempt."""
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

    def _end_unparked(self, trainer: TrainerProcess, reason: str) -> None:
        """Kill a rank that did not leave its attempt, and remember why."""
        self._doubts[trainer.rank] = reason
        trainer.by_agent = True
        with contextlib.suppress(ProcessLookupError):
            self.program.signal(trainer.pid, signal.SIGKILL)

    def _signal(self, number: int, exclude: Collection[int] = ()) -> set[int]:
        """Send a signal to the running ranks except the processes in `exclude`; return the ids of those that got it."""
        pids = set()
        for trainer in self.running():
            if trainer.pid and trainer.pid not in exclude:
                trainer.by_agent = True
                # A process that was just forked has no group yet.
                with contextlib.suppress(ProcessLookupError):
                    self.program.signal(trainer.pid, number)
                    pids.add(trainer.pid)
        return pids

    def note_kills(self) -> None:
        """Record the ends of killed ranks as soon as the kernel begins them.

        The fork server learns of an end when all memory is freed: after seconds, for tens of gigabytes that are
        page-locked and a GPU's context. The other ranks leave the attempt meanwhile.
        """
        for trainer in self.running():
            if trainer.by_agent or trainer.pid <= 0 or not is_being_killed(trainer.pid):
                continue
            if self._server is None or self._server.poll() is not None or is_being_killed(self._server.pid):
                return  # the ends of ranks follow from the fork server's
            self._dying.add(trainer.pid)
            trainer.end(signal.SIGKILL)
            self._start_early(trainer)
            self._on_change()

    async def await_exits(self) -> None:
        """Wait until killed ranks have freed their memory, above all the GPU's, which the next attempt needs."""
        while self._dying:
            await asyncio.sleep(0.01)

    # telemetry --------------------------------------------------------------------------------------------------------

    def workers(self) -> tuple[Worker, ...]:
        """Return the state of every rank of an attempt."""
        if self._is_preparing:
            return ()
        return tuple(self._describe(self.trainers[rank]) for rank in sorted(self.trainers))

    def stages(self) -> dict[int, tuple[str, bool]]:
        """Return {rank: (phase, has completed a step)} of the running ranks. A change causes a heartbeat at once."""
        stages = {}
        self.note_kills()
        for trainer in self.running():
            self._update(trainer)
            if trainer.progress is not None:
                stages[trainer.rank] = (trainer.progress.phase, trainer.progress.step > trainer.first_step)
        return stages

    def checksums(self) -> dict[str, str]:
        """Return {"STEP:RANK": newest checksum of weights} of the ranks that compute checksums."""
        checksums = {}
        for trainer in self.trainers.values():
            if trainer.checksum:
                step, _, value = trainer.checksum.partition(":")
                checksums[f"{step}:{trainer.rank}"] = value
        return checksums

    def step_seconds(self) -> dict[int, float]:
        """Return {rank: compute seconds of the last step}."""
        return {rank: trainer.compute_seconds for rank, trainer in self.trainers.items() if trainer.compute_seconds}

    def saved_step(self) -> int:
        """Return the step of the newest complete checkpoint of another trainer, 0 if unknown."""
        return self.program.saved_step()

    def disks(self) -> dict[str, float]:
        """Return {folder: free bytes} of the disks that trainers write to, {} unless a trainer has failed."""
        if not any(trainer.status for trainer in self.trainers.values()):
            return {}
        return free_bytes([self.run, self.run / "logs", self.run / "checkpoints", tempfile.gettempdir(), "/dev/shm"])

    def _update(self, trainer: TrainerProcess) -> None:
        """Read the progress of a rank."""
        self.program.read_progress(trainer)

    def _describe(self, trainer: TrainerProcess) -> Worker:
        self._update(trainer)
        current_time = time.monotonic()
        progress = trainer.progress or Progress()
        usage = ProcessUsage()
        state: Literal["running", "exited", "signalled"] = "running"
        code = 0
        tail = ""
        ended_age = 0.0
        if trainer.is_parked:
            # For the driver its attempt has ended, as a process that lost its peers does.
            state = "exited"
            code = EXIT_FAILED
            ended_age = current_time - trainer.changed
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
            status_age=current_time - trainer.changed,
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
    """Return how far a rank's start has come, None once the driver has had the time to learn it."""
    start = trainer.start
    if start is None or trainer.status is not None:
        return None
    current_time = time.time_ns()

    def age(moment: int) -> float:
        return max(0.0, (current_time - moment) / 1e9) if moment else -1.0

    progress = trainer.progress or Progress()
    if progress.step > trainer.first_step >= 0 and age(start.state_ns) > START_SECONDS:
        return None
    return RankStart(
        process_age=age(start.process_ns),
        groups_age=age(start.groups_ns),
        state_age=age(start.state_ns),
        step=start.step,
        source=start.source,
        is_reused=start.is_reused,
        is_standing=start.is_standing,
        doubt=trainer.replacement_reason[:200],
    )


def _explain_change(previous: Start | None, order: Start) -> str:
    """Return why ranks of the previous attempt cannot go on in the next one, "" if they can."""
    if order.fresh:
        return "the fork server of its node is renewed"
    if previous is None or (len(previous.ranks), previous.job) != (len(order.ranks), order.job):
        return "the number of ranks of its node changes"
    if (previous.settings, _list_other_words(previous), previous.env) != (
        order.settings,
        _list_other_words(order),
        order.env,
    ):
        return "the settings change"
    return ""


def _list_other_words(order: Start) -> list[str]:
    """Return the settings of the trainers' command line but for the data-parallel size, which may change."""
    return [word for word in order.words if not word.startswith(_DATA_SIZE)]


def _read_data_size(order: Start) -> int:
    """Return the data-parallel size of an attempt, 0 if neither the command line nor the settings name it."""
    sizes = [word.removeprefix(_DATA_SIZE) for word in order.words if word.startswith(_DATA_SIZE)]
    return int(sizes[-1]) if sizes else _read_full_size(order)


def _read_full_size(order: Start) -> int:
    """Return the data-parallel size of the settings, 0 if they do not name it."""
    return int(tomllib.loads(order.settings).get("parallel", {}).get("data", 0))


def _compute_missing_share(order: Start) -> float:
    """Return the share of the replicas that are missing in an attempt, 0 in a job that has shrunk for good."""
    is_degraded = bool(order.state) and json.loads(order.state).get("missing_since", 0) > 0
    if not is_degraded:
        return 0.0
    full = _read_full_size(order)
    return 1 - _read_data_size(order) / full if full else 0.0


def _network_variables(address: str) -> dict[str, str]:
    """Return variables that bind gloo and NCCL to the interface of `address`, unless the environment has them.

    By default both use the interface of the host's name or the first one, which other nodes may not reach.
    """
    interface = "" if is_loopback(address) else find_interface(address)
    if not interface:
        return {}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: interface for name in names if name not in os.environ}


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessUsage(NamedTuple):
    """Resources of a process. `stopped`: a signal or a debugger has stopped it."""

    resident_bytes: int = 0
    cpu_seconds: float = 0.0
    stopped: bool = False


def read_usage(pid: int) -> ProcessUsage:
    """Return the resources of a process, zeros if it has ended."""
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
