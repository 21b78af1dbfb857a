"""Trainers of a node: the agent starts them by the fork server, observes their status files and stops them.

A trainer is the process of one rank. If it does not train, it may be

- parked: it has left its attempt after a fault, and waits in its process for the next one;
- prepared: it was started without an attempt, and waits parked for its first one;
- early: it was started to replace an ended trainer before the driver ordered it, and waits for that order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import tempfile
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from megascale.config import ForeignConfig, ResilienceConfig
from megascale.core.failure import free_bytes
from megascale.core.process_orders import (
    DYING_VARIABLE,
    EARLY_VARIABLE,
    PREPARED_VARIABLE,
    Park,
    PrepareGroups,
    ProcessOrder,
    Resume,
    encode_order,
)
from megascale.errors import TrainingError
from megascale.resilience.agent.attempt_orders import (
    RESUMED_VARIABLES,
    explain_change,
    make_common_environment,
    read_data_size,
)
from megascale.resilience.agent.blocked_ranks import explain_blocked_ranks
from megascale.resilience.agent.dying_processes import DyingProcesses
from megascale.resilience.agent.early_processes import EarlyProcesses
from megascale.resilience.agent.foreign_program import ForeignProgram
from megascale.resilience.agent.fork_server_link import ForkServerLink
from megascale.resilience.agent.fork_server_process import LOG_FILE, ForkServerProcess
from megascale.resilience.agent.leftover_processes import kill_rank_processes
from megascale.resilience.agent.process_usage import is_being_killed, read_usage
from megascale.resilience.agent.rank_programs import MegascaleTrainer, Progress, RankProgram, TrainerProcess
from megascale.resilience.agent.replacement_reasons import ReplacementReasons
from megascale.resilience.agent.worker_report import describe_worker
from megascale.resilience.protocol.agent_messages import PrepareGroups as GroupsOrder
from megascale.resilience.protocol.agent_messages import Start
from megascale.resilience.protocol.fork_messages import (
    Ended,
    Forked,
    ForkFailed,
    Instruct,
)
from megascale.resilience.protocol.heartbeat import Worker
from megascale.services.messages import Message

log = logging.getLogger("megascale.agent")
_STACK_SECONDS = 0.1  # from the request for the stack of a late rank to the end of resilience.keep_seconds
_POLL_SECONDS = 0.01  # interval of loops that wait for processes
_NO_ATTEMPT = 0  # attempt number in the order to fork an early process; attempts count from 1
_FAILED_STATUS = 1 << 8  # wait status of a process with exit code 1


class Trainers:
    """Trainers of this node, of one attempt at a time.

    Args:
        run: run folder, to which the trainers write. Its name is the name of the run.
        folder: folder of the node, which receives the settings of each start order.
        on_change: called when a process has started or ended.
        shared: whether the settings already name `run` as the run folder. Otherwise trainers get an option for it.
        limits: section `resilience` of the configuration.
        fork_server: fork server that this process has started already, or None.

    Attributes:
        attempt: number of the present attempt, or 0 before the first.
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
        fork_server: ForkServerProcess | None = None,
    ) -> None:
        self.run = run
        self.folder = folder
        self.attempt = 0
        self.trainers: dict[int, TrainerProcess] = {}
        self._on_change = on_change
        self._shared = shared
        self._limits = limits
        self.program: RankProgram = MegascaleTrainer(run, folder / "job.toml", shared)
        self._fork_server = ForkServerLink(
            folder / LOG_FILE, self._handle_report, self._handle_server_end, started=fork_server
        )
        self._start_order: Start | None = None  # start order of the present attempt
        self._groups_number = 0  # number of the newest preparation of groups that the driver has ordered
        self._is_preparing = False  # whether the start order only prepared processes for their first attempt
        self._replacement_reasons = ReplacementReasons(run / "status", limits.keep_seconds)
        self._common_environment: dict[str, str] = {}  # environment variables of all ranks
        self._early = EarlyProcesses(limits.standby_processes, self._kill_early_process)
        self._stopped_progress: dict[int, Progress | None] = {}  # progress of stopped ranks with an early process
        self._dying = DyingProcesses(folder)

    # the fork server ------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """Start the fork server, after killing an older one with its trainers."""
        self.end_server()
        # Without resilience.preload the server imports nothing, as for a foreign program.
        self._fork_server.start(MegascaleTrainer.modules if self._limits.preload else ForeignProgram.modules)

    def end_server(self) -> None:
        """Kill the fork server and all trainers with it."""
        self._fork_server.disconnect()
        if self._fork_server.process is not None:
            self._dying.end_with_server(self._list_processes())
            self._kill_ranks(self.list_running())
        self._fork_server.kill()
        # No report of these ends will arrive. The wait status of a killed process is the signal's number.
        for trainer in self.list_running():
            trainer.end(signal.SIGKILL, by_agent=True)
        self._early.forget()
        self._dying.forget_server()

    def _list_processes(self) -> list[int]:
        """Return the ids of all processes of ranks, early ones included; 0 for a process that is being forked."""
        return [trainer.pid for trainer in self.list_running()] + list(self._early.pids.values())

    def _kill_ranks(self, trainers: Sequence[TrainerProcess]) -> None:
        """Kill ranks with their process groups.

        The kernel ends a rank with the fork server, but not the child processes of a foreign trainer. Some of these may
        have a process group of their own.
        """
        for trainer in trainers:
            if trainer.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    self.program.signal(trainer.pid, signal.SIGKILL)
        if trainers and isinstance(self.program, ForeignProgram) and self._start_order is not None:
            kill_rank_processes(self.run, self._start_order.job, self.folder.name)

    def _handle_server_end(self) -> None:
        """Record the end of a fork server, which ends its ranks. Start a new server, unless its imports failed."""
        if isinstance(self.program, ForeignProgram):
            self._kill_ranks(self.list_running())  # their child processes outlive the server
        self._record_server_end()
        self.end_server()
        self._on_change()
        if self._fork_server.is_ready:  # else a new server would fail in the same way
            self.start_server()

    def _record_server_end(self) -> None:
        """Record the end of the running ranks, which the kernel has killed with the fork server, and its reason."""
        self._dying.end_with_server(self._list_processes())
        failure = self._fork_server.start_failure
        if failure is not None:
            for trainer in self.list_running():
                trainer.end(_FAILED_STATUS, record=failure.record, error=failure.error, tail=failure.tail)
        elif self._fork_server.process is not None and self.list_running():
            reason = self._fork_server.describe_end()
            for trainer in self.list_running():
                trainer.end(signal.SIGKILL, by_agent=True, error=reason)

    def _handle_report(self, message: Message) -> None:
        """Apply a report of the fork server."""
        if isinstance(message, Forked) and message.attempt == _NO_ATTEMPT:
            self._early.add(message.rank, message.pid)
            self._dying.record(self._list_processes())
        elif isinstance(message, Forked) and message.attempt == self.attempt:
            if message.rank in self.trainers:
                self.trainers[message.rank].pid = message.pid
                self._dying.record(self._list_processes())
        elif isinstance(message, ForkFailed):
            self._record_fork_failure(message)
        elif isinstance(message, Ended) and message.pid in self._dying.pids:
            self._dying.pids.discard(message.pid)  # `note_kills` has recorded this end
            # The process may have reported an exception before it was killed, such as one for lack of memory.
            for trainer in self.trainers.values():
                if trainer.pid == message.pid:
                    trainer.record = message.record
                    trainer.error = message.error
        elif isinstance(message, Ended):
            for trainer in self.trainers.values():
                if trainer.pid == message.pid:
                    trainer.end(message.status, record=message.record, error=message.error)
                    self._start_early_process(trainer)
            self._early.drop(message)
        self._on_change()

    def _record_fork_failure(self, message: ForkFailed) -> None:
        """Record that a rank's process could not be created."""
        if message.attempt == _NO_ATTEMPT:
            self._early.fail(message.rank, message.error)
        elif message.attempt == self.attempt and message.rank in self.trainers:
            trainer = self.trainers[message.rank]
            trainer.end(_FAILED_STATUS, record=message.record, error=message.error, tail=message.error)

    # an attempt -----------------------------------------------------------------------------------------------------

    def start(self, order: Start, address: str, token: bytes) -> None:
        """Start the ranks of an attempt, or only prepare their processes if `order.prepares` is set.

        Args:
            token: token of the job. The token of replicas derives from it unless the agent's environment has one.
        """
        parked_pids = self._take_parked_trainers(order)
        running_count = len(self.list_running())
        if len(parked_pids) != running_count:
            raise TrainingError(
                f"attempt {order.attempt} cannot start: of {running_count} processes of the attempt before, "
                f"{running_count - len(parked_pids)} still train"
            )
        ended_trainers = self.trainers.values() if self._keeps_processes else ()
        replacement_reasons = self._replacement_reasons.take(ended_trainers)
        early_pids = self._take_early_processes(order, parked_pids)
        self._start_order = order
        self._is_preparing = order.prepares
        self._groups_number = 0
        self.attempt = order.attempt
        self._early.failed_ranks = set()
        self._stopped_progress = {}
        if order.fresh or not self._fork_server.is_connected:
            self.start_server()
        logs = self.run / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
            self.program.close()
            self.program = self._choose_program(order)
            self.program.prepare(order)
        except BaseException:
            for pid in early_pids.values():  # no rank uses them, and they occupy device memory
                self._kill_early_process(pid)
            raise
        dying_pids = ",".join(str(pid) for pid in self._dying.list_all())
        self._common_environment = make_common_environment(order, address, token=token, node=self.folder.name)
        self.trainers = {}
        for local_rank, rank in enumerate(order.ranks):
            log_file = logs / f"rank-{rank}.log"
            log_start = log_file.stat().st_size if log_file.exists() else 0
            trainer = TrainerProcess(rank, log_file, log_start, order.prepares, progress_time=time.monotonic())
            self.trainers[rank] = trainer
            env = self._make_rank_environment(rank, local_rank)
            if order.prepares:
                env[PREPARED_VARIABLE] = "1"
            trainer.pid = early_pids.get(rank) or parked_pids.get(local_rank, 0)
            env[DYING_VARIABLE] = ""
            if rank in early_pids or not trainer.pid:  # the rank's process is a new one
                trainer.replacement_reason = replacement_reasons.get(rank, "")
                env[DYING_VARIABLE] = dying_pids
            if trainer.pid:
                trainer.attempt_start_ns = time.time_ns()
                attempt_variables = {name: env[name] for name in RESUMED_VARIABLES}
                self._send_to_rank(trainer.pid, Resume(attempt_variables, data=read_data_size(order)))
            else:
                self._fork_server.send(self.program.make_fork(rank, self.attempt, environment=env, log=log_file))

    def _make_rank_environment(self, rank: int, local_rank: int) -> dict[str, str]:
        return self._common_environment | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}

    def _take_parked_trainers(self, order: Start) -> dict[int, int]:
        """Return the ids of the parked processes that can continue under the order, by local rank.

        If the order needs other processes, replace the fork server, which ends all parked trainers.
        """
        parked = {trainer.rank: trainer for trainer in self.list_running() if trainer.is_parked}
        reason = explain_change(self._start_order, order)
        if order.prepares and not reason:
            reason = "its node only prepares processes for a later attempt"  # these would begin the present one
        if parked and reason:
            self._replacement_reasons.add(parked, reason)
            self.start_server()
            return {}
        # A process keeps its GPU and so its local rank. Its rank may be another one in the next attempt.
        local_ranks = {rank: local_rank for local_rank, rank in enumerate(self.trainers)}
        return {local_ranks[rank]: trainer.pid for rank, trainer in parked.items()}

    def _start_early_process(self, trainer: TrainerProcess) -> None:
        """Start an early process for an ended rank, if the rank is to be replaced. It loads its modules meanwhile."""
        has_failed = trainer.status != 0 and not trainer.by_agent
        if not has_failed or not self._keeps_processes:
            return
        if self._fork_server.process is None or self._start_order is None:
            return
        if trainer.rank in self._start_order.ranks and isinstance(self.program, MegascaleTrainer):
            self._fork_early_process(trainer, self._start_order.ranks.index(trainer.rank))

    def _fork_early_process(self, trainer: TrainerProcess, local_rank: int) -> None:
        """Start an early process for a rank, unless the rank has one."""
        if not self._early.reserve(trainer.rank):
            return
        env = self._make_rank_environment(trainer.rank, local_rank)
        env[EARLY_VARIABLE] = "1"
        self._fork_server.send(self.program.make_fork(trainer.rank, _NO_ATTEMPT, environment=env, log=trainer.log))

    def prepare_replacements(self) -> None:
        """Start early processes for stopped ranks, since the driver examines a hang.

        A stopped rank cannot leave its attempt, so its process will be replaced unless it soon continues.
        """
        for trainer in self.list_running():
            if trainer.pid and not trainer.is_parked and read_usage(trainer.pid).stopped:
                self._stopped_progress[trainer.rank] = trainer.progress
                self._start_early_process(trainer)

    def _end_needless_replacements(self) -> None:
        """End the early processes of stopped ranks that continue, because they occupy memory."""
        for rank, progress in list(self._stopped_progress.items()):
            trainer = self.trainers.get(rank)
            if trainer is None or trainer.status is not None:
                del self._stopped_progress[rank]
            elif trainer.progress != progress:
                del self._stopped_progress[rank]
                if not self._limits.standby_processes and not trainer.is_parked:
                    self._early.end(rank)

    def _start_standby_processes(self) -> None:
        """Start an early process for each rank once all ranks have completed a step, with resilience.standby_processes.

        Earlier, it would delay their start and take memory that their first step needs.
        """
        if not self._limits.standby_processes or self._is_preparing or self._fork_server.process is None:
            return
        trainers = list(self.trainers.values())
        if isinstance(self.program, MegascaleTrainer) and all(trainer.has_stepped for trainer in trainers):
            for local_rank, trainer in enumerate(trainers):
                if trainer.rank not in self._early.failed_ranks:
                    self._fork_early_process(trainer, local_rank)

    def _take_early_processes(self, order: Start, parked_pids: Mapping[int, int]) -> dict[int, int]:
        """Return the process ids of early processes that the order can use, by rank, and end the others.

        Args:
            parked_pids: ids of the processes that stay, by local rank.
        """
        usable_ranks: list[int] = []
        if not order.fresh and not order.prepares and not explain_change(self._start_order, order):
            usable_ranks = [rank for rank in order.ranks if self._keeps_local_rank(rank, order)]
        parked_ranks = [rank for local_rank, rank in enumerate(order.ranks) if local_rank in parked_pids]
        return self._early.take(usable_ranks, parked_ranks)

    def _keeps_local_rank(self, rank: int, order: Start) -> bool:
        """Return whether a rank has the same local rank under the order, and so the GPU that its early process uses."""
        if self._start_order is None or rank not in self._start_order.ranks:
            return False
        return self._start_order.ranks.index(rank) == order.ranks.index(rank)

    def _kill_early_process(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            if self._fork_server.process is not None:
                self._dying.pids.add(pid)  # until the server reports the end

    @property
    def _keeps_processes(self) -> bool:
        """Return whether ranks without a fault stay in their processes after a failed attempt."""
        return self._limits.keep_seconds > 0

    def continue_preparation(self, order: Start) -> bool:
        """Let the processes that were prepared before wait for the attempt after that of `order`, if they can.

        Processes that the agent ends, and those that the fork server has not forked yet, cannot.

        Returns:
            Whether `order` is thereby carried out.
        """
        is_unchanged = self._is_preparing and order.prepares and not explain_change(self._start_order, order)
        waiting = [trainer for trainer in self.list_running() if trainer.pid and not trainer.by_agent]
        if not is_unchanged or len(waiting) != len(order.ranks):
            return False
        self.attempt = order.attempt
        self._start_order = order
        return True

    def end_preparation(self) -> None:
        """End the processes that wait for their first attempt, with their fork server."""
        if self._is_preparing and self.list_running():
            self.start_server()

    def is_prepared(self) -> bool:
        """Return whether the start order was to prepare processes, and all of them wait for their first attempt."""
        return self._is_preparing and all(trainer.is_parked for trainer in self.trainers.values())

    def prepare_groups(self, order: GroupsOrder) -> None:
        """Let the ranks make the groups of the next attempt while they train, or drop them if `order.world` is 0."""
        if order.attempt != self.attempt or not self._keeps_processes or not isinstance(self.program, MegascaleTrainer):
            return
        if order.world and len(order.ranks) != len(self.trainers):
            return
        self._groups_number = order.number
        for index, trainer in enumerate(self.trainers.values()):
            if trainer.status is not None or not trainer.pid:
                continue
            rank = trainer.rank
            if order.world:
                rank = order.ranks[index]
            if order.world and self._is_preparing:
                # The process is parked again when its preparation has ended. Earlier records do not count.
                trainer.progress = None
                trainer.attempt_start_ns = time.time_ns()
            self._send_to_rank(
                trainer.pid,
                PrepareGroups(
                    attempt=order.attempt,
                    number=order.number,
                    rank=rank,
                    world=order.world,
                    data=order.data,
                    master=order.master,
                ),
            )

    def find_ended_groups(self) -> int:
        """Return the number of the newest preparation of groups that all prepared processes have ended, 0 if none."""
        if not self.is_prepared():
            return 0
        return self._groups_number

    def has_active_ranks(self) -> bool:
        """Return whether ranks of an attempt run. Parked ranks do not count."""
        return any(not trainer.is_parked for trainer in self.list_running())

    def _choose_program(self, order: Start) -> RankProgram:
        """Return the foreign program if the order's settings have `foreign.command`, else this package's trainer."""
        foreign = ForeignConfig.model_validate(tomllib.loads(order.settings).get("foreign", {}))
        if foreign.command:
            return ForeignProgram(self.run, foreign, self._limits.no_progress_limit)
        return MegascaleTrainer(self.run, self.folder / "job.toml", self._shared, self._keeps_processes)

    def _send_to_rank(self, pid: int, order: ProcessOrder) -> None:
        """Send an order to a rank's process. The fork server forwards it."""
        self._fork_server.send(Instruct(pid, encode_order(order)))

    def list_running(self) -> list[TrainerProcess]:
        """Return the ranks whose processes have not ended, parked ranks included."""
        trainers = list(self.trainers.values())  # a copy, because `kill_from_thread` calls this in another thread
        return [trainer for trainer in trainers if trainer.status is None]

    def kill_from_thread(self, reason: str) -> None:
        """Kill all ranks at once, because the driver may start them on another node. Any thread may call it."""
        server = self._fork_server.process
        if server is None or server.returncode is not None or not self.list_running():
            return
        if not self._fork_server.end_reason:
            log.error("ending the ranks of this node: %s", reason)
        self._fork_server.end_reason = reason
        trainers = self.list_running()
        # The server is killed first, so that it does not report the ends of its ranks as if another process had
        # killed them.
        with contextlib.suppress(OSError):
            os.kill(server.pid, signal.SIGKILL)
        self._kill_ranks(trainers)

    async def stop(
        self, how: Literal["save", "keep", "leave", "kill"], grace_period: float, *, joins_at_once: bool = False
    ) -> str:
        """End or park all ranks.

        Args:
            how: "save" gives the ranks `grace_period` seconds to save a checkpoint and then kills them. "kill" kills
                them at once. "keep" parks the ranks, and kills ranks that do not leave the attempt within
                `resilience.keep_seconds`. "leave" is like "keep", but first gives the ranks `grace_period` seconds to
                complete their step. If processes cannot stay, because keep_seconds is 0 or the program is a foreign
                one, "keep" and "leave" kill them at once.
            joins_at_once: with "leave", whether the ranks need not copy the state of their step to memory.

        Returns:
            The reason why ranks still run, since SIGKILL does not end a process that a device or disk blocks. An empty
            text if all ranks have ended or are parked.
        """
        if how in ("keep", "leave") and self._keeps_processes and isinstance(self.program, MegascaleTrainer):
            if how == "leave":
                await self._await_leaving(grace_period, joins_at_once=joins_at_once)
            return await self._park_ranks()
        self._early.end_all()
        if how == "kill":
            reason = "the driver ordered new processes, because the fault may concern all ranks"
            parked_ranks = [trainer.rank for trainer in self.list_running() if trainer.is_parked]
            self._replacement_reasons.add(parked_ranks, reason)
        deadline = time.monotonic() + grace_period
        signalled_pids: set[int] = set()
        while how == "save" and self.list_running() and time.monotonic() < deadline:
            # A rank that is still being forked has no process id yet, and gets the signal in a later round.
            signalled_pids |= self._signal_ranks(signal.SIGTERM, exclude=signalled_pids)
            await asyncio.sleep(_POLL_SECONDS)
        kill_start = time.monotonic()
        while self.list_running() and self._fork_server.process is not None:
            problem = explain_blocked_ranks(self.list_running(), kill_start, self._limits.window)
            if problem:
                return problem
            self._signal_ranks(signal.SIGKILL)
            await asyncio.sleep(_POLL_SECONDS)
        return ""

    async def _await_leaving(self, seconds: float, *, joins_at_once: bool) -> None:
        """Order the ranks to leave the attempt after their step, and wait at most `seconds` until they are parked."""
        deadline = time.monotonic() + seconds
        instructed_pids: set[int] = set()
        while self._fork_server.process is not None and self.has_active_ranks() and time.monotonic() < deadline:
            for trainer in self.list_running():
                self._read_progress(trainer)
                if trainer.pid and trainer.pid not in instructed_pids and not trainer.is_parked:
                    instructed_pids.add(trainer.pid)
                    self._send_to_rank(trainer.pid, Park(self.attempt, after_step=True, joins_at_once=joins_at_once))
            await asyncio.sleep(_POLL_SECONDS)

    async def _park_ranks(self) -> str:
        """Order the ranks to leave the attempt now, and kill ranks that do not within `resilience.keep_seconds`.

        Returns:
            The reason why ranks still run, as `stop`.
        """
        deadline = time.monotonic() + self._limits.keep_seconds
        instructed_pids: set[int] = set()
        stack_request_pids: set[int] = set()
        while self._fork_server.process is not None:
            active = []
            for trainer in self.list_running():
                self._read_progress(trainer)
                if not trainer.is_parked:
                    active.append(trainer)
            if not active:
                return ""
            problem = explain_blocked_ranks(active, deadline, self._limits.window)
            if problem:
                return problem
            is_late = time.monotonic() >= deadline
            is_almost_late = time.monotonic() >= deadline - _STACK_SECONDS
            for trainer in active:
                if not trainer.pid:
                    continue  # the rank is being forked, and gets its order in a later round
                if trainer.pid not in instructed_pids:
                    instructed_pids.add(trainer.pid)
                    self._send_to_rank(trainer.pid, Park(self.attempt))
                if trainer.by_agent:
                    continue  # it was killed in an earlier round
                if read_usage(trainer.pid).stopped:
                    self._start_early_process(trainer)
                    self._replacement_reasons.add([trainer.rank], "it was stopped by a signal")
                    self._kill_unparked(trainer)
                elif is_late:
                    self._start_early_process(trainer)
                    self._replacement_reasons.add_delay(trainer)
                    self._kill_unparked(trainer)
                elif is_almost_late and trainer.pid not in stack_request_pids:
                    stack_request_pids.add(trainer.pid)
                    # This reason holds if the rank ends by itself before it is late.
                    self._replacement_reasons.add_delay(trainer)
                    with contextlib.suppress(ProcessLookupError):
                        self.program.signal(trainer.pid, signal.SIGUSR2)  # the rank writes its stack to a file
            await asyncio.sleep(_POLL_SECONDS)
        return ""

    def _kill_unparked(self, trainer: TrainerProcess) -> None:
        """Kill a rank that did not leave its attempt."""
        trainer.by_agent = True
        trainer.kill_time = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self.program.signal(trainer.pid, signal.SIGKILL)

    def _signal_ranks(self, number: int, exclude: Collection[int] = ()) -> set[int]:
        """Send a signal to the running ranks except the processes `exclude`. Return the signalled process ids."""
        pids = set()
        for trainer in self.list_running():
            if trainer.pid and trainer.pid not in exclude:
                trainer.by_agent = True
                if number == signal.SIGKILL and not trainer.kill_time:
                    trainer.kill_time = time.monotonic()
                # A process that was just forked has no process group yet.
                with contextlib.suppress(ProcessLookupError):
                    self.program.signal(trainer.pid, number)
                    pids.add(trainer.pid)
        return pids

    def note_kills(self) -> None:
        """Record the ends of killed ranks as soon as the kernel begins them.

        The fork server learns of an end only when the kernel has freed all memory. That takes seconds for a GPU's
        context and tens of gigabytes of page-locked memory. The other ranks leave the attempt meanwhile.
        """
        for trainer in self.list_running():
            if trainer.by_agent or trainer.pid <= 0 or not is_being_killed(trainer.pid):
                continue
            server = self._fork_server.process
            if server is None or server.poll() is not None or is_being_killed(server.pid):
                return  # the server is ending too, and `_record_server_end` records the ends of its ranks
            self._dying.pids.add(trainer.pid)
            trainer.end(signal.SIGKILL)
            self._start_early_process(trainer)
            self._on_change()

    async def await_exits(self, how: str) -> None:
        """Wait until killed ranks have freed their memory, because the next attempt needs the GPU's.

        If the other ranks stay in their processes, only the replacements wait (train/predecessors.py), and all ranks
        make their groups meanwhile. After `resilience.window` seconds only the replacements wait too, since the driver
        evicts a node that does not report for twice as long.

        Args:
            how: the kind of the order to stop, as for `stop`.
        """
        if how in ("keep", "leave") and self._keeps_processes and isinstance(self.program, MegascaleTrainer):
            return
        deadline = time.monotonic() + self._limits.window
        while self._dying.pids and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        if self._dying.pids:
            log.warning(
                "the kernel has not freed the memory of the killed processes %s within %g s; their replacements wait",
                sorted(self._dying.pids),
                self._limits.window,
            )

    # telemetry --------------------------------------------------------------------------------------------------------

    def describe_workers(self) -> tuple[Worker, ...]:
        """Return the state of every rank of the attempt for a heartbeat, sorted by rank."""
        if self._is_preparing:
            return ()  # the ranks belong to no attempt yet
        workers = []
        for _, trainer in sorted(self.trainers.items()):
            self._read_progress(trainer)
            workers.append(describe_worker(trainer))
        return tuple(workers)

    def read_stages(self) -> dict[int, tuple[str, bool, int]]:
        """Return the stage of each running rank.

        A stage has the phase, whether the rank has completed a step of this attempt, and the number of silences that
        have ended (TrainerProcess.ended_silences).

        The caller sends a heartbeat at once if a stage has changed.
        """
        self.note_kills()
        stages = {}
        for trainer in self.list_running():
            self._read_progress(trainer)
            if trainer.progress is not None:
                stages[trainer.rank] = (trainer.progress.phase, trainer.has_stepped, trainer.ended_silences)
        self._end_needless_replacements()
        self._start_standby_processes()
        return stages

    def compute_next_silence(self, seconds: float) -> float:
        """Return how long it takes until no running rank has changed its status for `seconds`.

        Return infinity without such a rank, or if none has for longer. The result counts from the last reading.
        """
        ages = [time.monotonic() - trainer.progress_time for trainer in self.list_running() if not trainer.is_parked]
        remaining = seconds - min(ages, default=math.inf)
        if remaining <= 0:
            return math.inf
        return remaining

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
        """Return the free bytes of the disks to which trainers write, by folder, if a trainer has failed.

        Otherwise return an empty dictionary, because only the diagnosis of a failure needs them.
        """
        if not any(trainer.status for trainer in self.trainers.values()):
            return {}
        return free_bytes([self.run, self.run / "logs", self.run / "checkpoints", tempfile.gettempdir(), "/dev/shm"])

    def _read_progress(self, trainer: TrainerProcess) -> None:
        """Update the progress of a rank from its files."""
        self.program.read_progress(trainer)
