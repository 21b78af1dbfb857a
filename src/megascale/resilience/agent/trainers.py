"""The trainers of a node: forked through the fork server, watched, stopped. One attempt at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megascale.core.background import FailureLog
from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.core.failure import free_bytes
from megascale.core.interfaces import interface_of
from megascale.core.ports import is_loopback
from megascale.core.python_command import module_command
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.core.status import read_status
from megascale.core.untrusted_files import open_regular
from megascale.resilience.protocol.agent_messages import Start
from megascale.resilience.protocol.fork_messages import (
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    Broken,
    Ended,
    Fork,
    Forked,
    ForkServerReady,
    Frames,
    framed,
)
from megascale.resilience.protocol.heartbeat import TAIL, Worker, truncate
from megascale.services.messages import Message
from megascale.services.shared_token import derive

log = logging.getLogger("megascale.agent")
# Imported once by the fork server; by name, as this package does not know the trainer's.
PRELOAD = (
    "megascale.api",
    "megascale.cli.summary",
    "megascale.train.loop",
    "megascale.train.rank_info",
    "megascale.ops.launch:prepare_forks",
)


@dataclass
class TrainerProcess:
    """One rank's process. status: its wait status once ended; last_status: of its status file; first: its first step.

    record, error: the exception it ended with; ended: when, on the monotonic clock; by_agent: not by itself;
    tail: what stands for the end of its log, where it has not come so far as to write one.
    """

    rank: int
    log: Path
    log_start: int
    pid: int = 0
    status: int | None = None
    last_status: tuple[Any, ...] = ()
    changed: float = 0.0
    first: int = -1
    checksum: str = ""
    compute_seconds: float = 0.0
    record: ExitRecord = NO_RECORD
    error: str = ""
    ended: float = 0.0
    by_agent: bool = False
    tail: str = ""

    def end(self, status: int, **about: Any) -> None:
        """It has ended."""
        self.status, self.ended = status, time.monotonic()
        for name, value in about.items():
            setattr(self, name, value)


class Trainers:
    """Starts, watches and stops this node's ranks.

    Args:
        run: the folder that trainers write to; its name is the run's.
        folder: the node's own folder, with the settings that came with the order.
        changed: called when a process has started or ended.
        shared: whether `run` is where the settings say; else trainers are told.
    """

    def __init__(self, run: Path, folder: Path, changed: Callable[[], None], shared: bool = True) -> None:
        self.run, self.folder, self._changed, self._shared = run, folder, changed, shared
        self.attempt = 0
        self.trainers: dict[int, TrainerProcess] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = False
        self._cut = ""  # why the ranks were ended without their driver
        self._broken: Broken | None = None  # what the fork server said that cannot start

    # the fork server ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Start the fork server, in place of an older one (whose children end with it)."""
        self.end_server()
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        server = "megascale.resilience.agent.fork_server"
        with open(self.folder / "forkserver.log", "ab") as out:
            self._server = subprocess.Popen(
                module_command(server, str(theirs.fileno()), str(os.getpid()), *PRELOAD),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        theirs.close()
        self._sock, self._ready, self._broken = mine, False, None
        self._reading = asyncio.get_running_loop().create_task(self._listen(mine))

    def end_server(self) -> None:
        """Kill the fork server and with it every trainer."""
        if self._reading is not None:
            self._reading.cancel()
        if self._sock is not None:
            self._sock.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        for trainer in self.running():
            trainer.end(signal.SIGKILL, by_agent=True)
        self._server = self._sock = self._reading = None

    async def _listen(self, sock: socket.socket) -> None:
        loop, frames = asyncio.get_running_loop(), Frames(FROM_FORK_SERVER)
        try:
            while data := await loop.sock_recv(sock, 65536):
                for message in frames.feed(data):
                    self._received(message)
        except OSError as error:
            log.warning("the connection to the fork server ended: %s", error)
        except Exception as error:
            # How the ranks of such a server end is unknown, so it is replaced.
            FailureLog(log, "reading from the fork server").note(error, "the server and its ranks are ended")
            self._cut = self._cut or f"the answers of its fork server cannot be read: {error}"
            if self._server is not None:
                self._server.kill()
        # The server is gone by itself, and its children with it. Have a new one ready, unless it cannot even start.
        self._reading = None
        self._server_ended()
        self.end_server()
        self._changed()
        if self._ready:
            self.serve()

    def _server_ended(self) -> None:
        """The ranks ended for what ended the fork server; that they were killed with it says nothing."""
        if self._broken:
            for trainer in self.running():
                trainer.end(1 << 8, record=self._broken.record, error=self._broken.error, tail=self._broken.tail)
        elif self._server is not None and self.running():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(1.0)
            code = self._server.returncode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            error, self._cut = self._cut or f"its fork server (process {self._server.pid}) ended with {how}", ""
            for trainer in self.running():
                trainer.end(signal.SIGKILL, by_agent=True, error=error)

    def _received(self, message: Message) -> None:
        if isinstance(message, ForkServerReady):
            self._ready = True
        elif isinstance(message, Broken):
            self._broken = message
        elif isinstance(message, Forked) and message.attempt == self.attempt:
            if message.rank in self.trainers:
                self.trainers[message.rank].pid = message.pid
        elif isinstance(message, Ended):
            for trainer in self.trainers.values():
                if trainer.pid == message.pid:
                    trainer.end(message.status, record=message.record, error=message.error)
        self._changed()

    # an attempt -----------------------------------------------------------------------------------------------------

    def start(self, order: Start, address: str, token: bytes) -> None:
        """Fork the ranks of an attempt.

        Args:
            order: as the driver sends it.
            address: of this node.
            token: the job's, from which that of its replicas is made, the same on all nodes; one that stands in this
                agent's environment goes before it.
        """
        assert not self.running(), "the attempt before must have ended"
        self.attempt = order.attempt
        if order.fresh or self._sock is None:
            self.serve()
        logs = self.run / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        if not self._shared and order.identity:
            # Checkpoints outside the run folder are this run's, also for a node that has rank 0 for the first time.
            (self.run / "identity").write_text(order.identity + "\n")
        settings = self.folder / "job.toml"
        settings.write_text(order.settings, encoding="utf-8")
        place = () if self._shared else (f"--train.runs={self.run.parent}",)
        words = ("train", str(settings), *place, *order.words)
        self.trainers = {}
        networks = _networks(address)
        replicas = os.environ.get(REPLICA_VARIABLE) or derive(token, f"replicas of {order.job}")
        for local, rank in enumerate(order.ranks):
            log = logs / f"rank-{rank}.log"
            start = log.stat().st_size if log.exists() else 0
            self.trainers[rank] = TrainerProcess(rank, log, start, changed=time.monotonic())
            env = order.env | {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(len(order.ranks)),
                "WORLD_SIZE": str(order.world),
                "MASTER_ADDR": order.master[0],
                "MASTER_PORT": str(order.master[1]),
                "MEGASCALE_JOB": order.job,
                REPLICA_VARIABLE: replicas,
                "MEGASCALE_ATTEMPT": str(self.attempt),
                "MEGASCALE_NODE": self.folder.name,
                "MEGASCALE_NODE_ADDRESS": address,
            }
            env |= {name: value for name, value in networks.items() if name not in env}
            assert self._sock is not None
            self._send(framed(TO_FORK_SERVER, Fork(rank, self.attempt, env, words, str(log))))

    def _send(self, data: bytes) -> None:
        assert self._sock is not None
        self._sock.setblocking(True)  # some hundred bytes a rank: the socket's buffer takes them
        try:
            self._sock.sendall(data)
        finally:
            self._sock.setblocking(False)

    def running(self) -> list[TrainerProcess]:
        """Those that have not ended."""
        return [t for t in self.trainers.values() if t.status is None]

    def cut_off(self, why: str) -> None:
        """End all ranks at once, from any thread: they may be started elsewhere from now on."""
        server = self._server
        # A copy: the loop may begin an attempt meanwhile.
        running = any(trainer.status is None for trainer in list(self.trainers.values()))
        if server is not None and server.returncode is None and running:
            if not self._cut:
                log.error("ending the ranks of this node: %s", why)
            self._cut = why
            with contextlib.suppress(OSError):
                os.kill(server.pid, signal.SIGKILL)  # its ranks end with it

    async def stop(self, how: Literal["save", "kill"], grace_period: float) -> None:
        """End all ranks: let them save first for at most `grace_period` seconds, or kill them at once."""
        deadline = time.monotonic() + grace_period
        asked: set[int] = set()
        while how == "save" and self.running() and time.monotonic() < deadline:
            asked |= self._signal(signal.SIGTERM, asked)  # once each: one that is just being forked a little later
            await asyncio.sleep(0.02)
        while self.running() and self._server is not None:
            self._signal(signal.SIGKILL)
            await asyncio.sleep(0.01)

    def _signal(self, number: int, leave: Collection[int] = ()) -> set[int]:
        """Send a signal to the ranks that run, but those in `leave`; returns their process ids."""
        pids = {trainer.pid for trainer in self.running() if trainer.pid and trainer.pid not in leave}
        for trainer in self.running():
            trainer.by_agent = trainer.by_agent or trainer.pid in pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    # telemetry --------------------------------------------------------------------------------------------------------

    def workers(self) -> tuple[Worker, ...]:
        """Every rank as it stands now."""
        return tuple(self._worker(self.trainers[rank]) for rank in sorted(self.trainers))

    def stages(self) -> dict[int, tuple[str, bool]]:
        """rank -> (phase, whether it has done a step): changes of it are worth a heartbeat at once."""
        for t in self.running():
            self._look(t)
        return {t.rank: (t.last_status[0], t.last_status[1] > t.first) for t in self.running() if t.last_status}

    def checksums(self) -> dict[str, str]:
        """ "STEP:RANK" -> the newest checksum of each rank that makes them."""
        pairs = ((t.rank, *t.checksum.partition(":")) for t in self.trainers.values() if t.checksum)
        return {f"{step}:{rank}": value for rank, step, _, value in pairs}

    def step_seconds(self) -> dict[int, float]:
        """Compute seconds of each rank's last step."""
        return {t.rank: t.compute_seconds for t in self.trainers.values() if t.compute_seconds}

    def _look(self, t: TrainerProcess) -> None:
        status = read_status(self.run / "status" / f"rank-{t.rank}.status")
        if status is not None and status.pid == t.pid:
            seen = (status.phase, status.step, status.action, status.microbatch, status.message, status.time_ns)
            if status.exit is not None:
                t.record = status.exit  # It knows the rank, which the exception itself may not.
            if seen != t.last_status:
                t.last_status, t.changed = seen, time.monotonic()
                if status.phase == "train" and t.first < 0:
                    t.first = status.step
            t.checksum, t.compute_seconds = status.checksum, status.compute_seconds

    def _worker(self, t: TrainerProcess) -> Worker:
        self._look(t)
        now = time.monotonic()
        phase, step, action, microbatch, message = t.last_status[:5] if t.last_status else ("", 0, "", -1, "")
        state: Literal["running", "exited", "signalled"] = "running"
        code, tail = 0, ""
        if t.status is not None:
            ended_by_signal = os.WIFSIGNALED(t.status)
            state = "signalled" if ended_by_signal else "exited"
            code = os.WTERMSIG(t.status) if ended_by_signal else os.WEXITSTATUS(t.status)
            tail = t.tail or self._tail(t) if code else ""
        rss, cpu, stopped = _usage(t.pid) if t.status is None and t.pid else (0, 0.0, False)
        return Worker(
            rank=t.rank,
            pid=t.pid,
            state=state,
            code=code,
            phase=phase,
            step=step,
            action=truncate(action, 200),
            microbatch=microbatch,
            status_age=now - t.changed,
            message=truncate(message),
            rss=rss,
            cpu_seconds=cpu,
            stopped=stopped,
            stderr_tail=tail,
            exit=t.record,
            error=truncate(t.error),
            ended_age=now - t.ended if t.status is not None else 0.0,
            by_agent=t.by_agent,
        )

    def disks(self) -> dict[str, float]:
        """Bytes left on the disks that trainers write to, when one of them has ended badly; else nothing."""
        if not any(t.status for t in self.trainers.values()):
            return {}
        return free_bytes([self.run, self.run / "logs", self.run / "checkpoints", tempfile.gettempdir(), "/dev/shm"])

    def _tail(self, t: TrainerProcess) -> str:
        """The end of what this attempt wrote into the rank's log."""
        try:
            with open(t.log, "rb", opener=open_regular) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(t.log_start, size - TAIL))
                return truncate(file.read(TAIL).decode(errors="replace"), TAIL)
        except OSError:
            return ""


def _networks(address: str) -> dict[str, str]:
    """The interface for gloo's and NCCL's connections, where a node is reached by others and nobody chose: both would
    take what the host's own name resolves to, or the first that they find."""
    name = "" if is_loopback(address) else interface_of(address)
    wanted = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {each: name for each in wanted if name and each not in os.environ}


_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def _usage(pid: int) -> tuple[int, float, bool]:
    """(resident bytes, CPU seconds, whether a signal or a debugger holds it) of a process; zeros if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0, 0.0, False
    return int(fields[21]) * _PAGE, (int(fields[11]) + int(fields[12])) / _TICKS, fields[0] in (b"T", b"t")
