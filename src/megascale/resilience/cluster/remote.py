"""Nodes on other machines, an agent each, started through a command that runs a program there (ssh, srun).

The command runs agent/attach.py, gets the job and its secret on stdin, and lives as long as the agent, so that its end
is known at once. Agents live on where the command, or this driver, ends; the next driver finds them by the same way.
Which machines have an agent stands in RUN/nodes/NAME/host.json: the driver's own machine may be another by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megascale.core.background import keep_running, log_failure
from megascale.core.interfaces import address_towards
from megascale.core.python_command import module_command
from megascale.core.secrets import PASSWORD_VARIABLE, REPLICA_VARIABLE
from megascale.resilience.cluster.base import NO_REASONS, Cluster, ClusterRequest, NodeInfo
from megascale.resilience.cluster.hosts_file import Host
from megascale.resilience.protocol.given import JobDescription, to_record

log = logging.getLogger("megascale.driver")

ATTACH = "megascale.resilience.agent.attach"
RECORD = "host.json"
START = 30.0  # seconds to reach a machine and have an agent's process there
END = 15.0  # seconds to reach a machine and have the agent gone
AGAIN = 5.0  # seconds until a connection that broke is made again
REST = 20.0  # seconds in which a machine that could not be used is not tried again
_LINE = 1 << 16  # bytes of an answer
# What agents and their trainers take over of the driver's environment; the rest is their machine's own.
_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "UCX_")
_NAMES = (PASSWORD_VARIABLE, REPLICA_VARIABLE, "CUDA_DEVICE_MAX_CONNECTIONS")


@dataclass
class _Machine:
    """What is known of one now.

    running: an agent was seen there and its end was not; process: the command that waits for its end.
    """

    host: Host
    engaged: bool = False
    running: bool = False
    busy: bool = False
    failed: float = float("-inf")
    why: str = ""
    process: asyncio.subprocess.Process | None = None
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class RemoteCluster(Cluster):
    """Args:
    request: what it is made for.
    hosts: the machines, in the order in which they are used.

    Attributes:
        taken: those that are not the job's any more, whatever still runs there.
        drained: those that are to get nothing new, and why.
        separate: whether a command of its own waits for an agent's end, and not the one that started it.
        at_once: agents that are started at the same time.
        notice_seconds: seconds that it may take to tell a living agent of another driver.
        slow_start: a spare takes over sooner than an agent that is started again, which has to import PyTorch first.
    """

    separate = False
    at_once = 64
    slow_start = True
    notice_seconds = 20.0
    taken: frozenset[str] = frozenset()
    drained: Mapping[str, str] = NO_REASONS

    def __init__(self, request: ClusterRequest, hosts: Sequence[Host]) -> None:
        super().__init__(request)
        self._advertise = request.config.resilience.advertise
        self._folder = request.run / "nodes"
        self._job: tuple[JobDescription, bytes] | None = None
        self._marker = ""
        self._commands: set[asyncio.subprocess.Process] = set()
        self._barred: frozenset[str] = frozenset()
        if request.config.checkpoint.location is None:
            self._marker = make_marker(request.run / "checkpoints")
        self._machines = {host.name: _Machine(host) for host in hosts}
        for name, machine in self._machines.items():
            machine.engaged = machine.running = (self._folder / name / RECORD).exists()

    @abstractmethod
    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        """What to run here so that `words` run on a machine, with this process's stdin and stdout."""

    def broke(self, host: Host) -> None:
        """The connection to a machine ended without a word: its agent may be gone, or its machine."""
        return

    # Cluster ----------------------------------------------------------------------------------------------------------

    def announce(self, job: JobDescription, token: bytes) -> None:
        checkpoints = str(self.run / "checkpoints") if self._marker else ""
        self._job = (replace(job, run="", shared=False, checkpoints=checkpoints), token)
        for machine in self._machines.values():
            if machine.running:
                self._spawn(machine, self._open(machine, "adopt"))

    def bar(self, names: frozenset[str]) -> None:
        self._barred = names

    def names(self) -> list[str]:
        """Of all machines."""
        return list(self._machines)

    def take(self, names: set[str]) -> None:
        """Exactly these are not the job's any more."""
        for name in names - self.taken:
            self._let_go(self._machines[name])
            with contextlib.suppress(OSError):  # the next driver need not look for an agent there
                (self._folder / name / RECORD).unlink(missing_ok=True)
            self._machines[name].running, self._machines[name].why = False, "it was taken out of the allocation"
        self.taken = frozenset(names)

    def nodes(self) -> list[NodeInfo]:
        now = time.monotonic()
        return [
            NodeInfo(
                name, m.host.address or m.host.host, now - m.failed > REST and name not in self.taken, m.running, m.why
            )
            for name, m in self._machines.items()
            if m.engaged
        ]

    def foreseen(self, count: int) -> list[str]:
        return list(self._machines)

    def prefer(self, names: Sequence[str]) -> None:
        first = {name: self._machines[name] for name in names if name in self._machines}
        self._machines = first | {name: m for name, m in self._machines.items() if name not in first}

    async def start_agent(self, name: str) -> bool:
        machine = self._machines.get(name)
        if name in self.taken:
            return False
        if machine is None:
            self._say("driver", f"{name} is in no list of machines any more: no agent is started there")
            return False
        return await self._open(machine, "start")

    async def fence(self, name: str) -> bool:
        """True once the agent was seen to be gone; a machine that cannot be reached may still run it."""
        machine = self._machines.get(name)
        if machine is None or name in self.taken:
            return False
        self._let_go(machine)
        answer = await self._ask(machine, "end", END)
        if answer is None or not answer.get("ended"):
            return False
        machine.running = False
        with contextlib.suppress(OSError):
            (self._folder / name / RECORD).unlink(missing_ok=True)
        return True

    async def request(self) -> str | None:
        """The first machine that has no agent and takes one."""
        for machine in sorted(self._machines.values(), key=lambda m: m.engaged):
            name, rested = machine.host.name, time.monotonic() - machine.failed > REST
            if machine.running or machine.busy or not rested or name in self._barred | self.taken | self.drained.keys():
                continue
            if await self._open(machine, "adopt"):  # one that was cut off may still have its agent
                return name
        return None

    async def close(self) -> None:
        """End the commands that wait for agents' ends, and not the agents."""
        tasks = [task for machine in self._machines.values() for task in machine.tasks]
        for machine in self._machines.values():
            self._let_go(machine)
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in self._commands:
            kill_command(process)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await process.communicate()  # to the end of what it says: else a closed loop is told of it

    # a machine --------------------------------------------------------------------------------------------------------

    async def _open(self, machine: _Machine, do: str) -> bool:
        """Have an agent there, and wait for its end in the background."""
        self._let_go(machine)
        machine.busy = True
        try:
            answer = await self._ask(machine, do, START)
        finally:
            machine.busy = False
        if answer is None or "running" not in answer:
            # Whether one that was there before lives on is not known where nobody answers.
            machine.running = machine.running and do == "adopt" and answer is None
            return False
        machine.engaged = machine.running = True
        machine.failed, machine.why = float("-inf"), ""
        try:
            (self._folder / machine.host.name).mkdir(parents=True, exist_ok=True)
            (self._folder / machine.host.name / RECORD).write_text(json.dumps({"host": machine.host.host}))
        except OSError as error:
            self._say("driver", f"{machine.host.name}: the next driver will not find its agent: {error}")
        self._spawn(machine, keep_running(lambda: self._follow(machine), f"following {machine.host.name}", log))
        return True

    async def _follow(self, machine: _Machine) -> None:
        """Until the agent has ended; a connection that breaks is made again."""
        separate = self.separate
        while True:
            process = machine.process
            assert process is not None
            if separate:
                kill_command(process)
                separate = False
            else:
                answer = await _answer(process)
                if answer is not None and "over" in answer:
                    machine.running, machine.why = False, f"its agent ended: {answer['over']}"
                    return
                self.broke(machine.host)
                await asyncio.sleep(AGAIN)
            again = await self._ask(machine, "watch", START)
            if again is not None and "refused" in again:
                return
            if again is not None and "over" in again:
                machine.running, machine.why = False, "its agent ended unseen"
                return

    async def _ask(self, machine: _Machine, do: str, seconds: float) -> dict[str, Any] | None:
        """The first answer to a request, None if none comes; why stands in `machine.why` then, and is said."""
        if self._job is None:
            raise RuntimeError("no job was announced")
        host = machine.host
        job, token = self._job
        request = {
            "do": do,
            "node": host.name,
            "folder": host.folder,
            "job": to_record(replace(job, driver=self._towards(host, job.driver))),
            "token": token.decode(),
            "marker": self._marker,
            "address": host.address,
            "interface": host.interface,
            "pod": host.host,
            "environment": _environment(host),
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command(host, _attach(host)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LINE,
                start_new_session=True,
            )
        except OSError as error:
            self._failed(machine, f"{self.command(host, [])[0]} cannot be started: {error.strerror}")
            return None
        self._commands = {each for each in self._commands if not _over(each)} | {process}
        if do != "end":
            machine.process = process
        answer = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                assert process.stdin is not None
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(json.dumps(request).encode() + b"\n")
                    await process.stdin.drain()
                    process.stdin.close()
                answer = await _answer(process)
        if answer is None or "refused" in answer:
            said = answer["refused"] if answer is not None else await _said(process)
            self._failed(machine, str(said) or f"no answer within {seconds:g} s")
        return answer

    def _failed(self, machine: _Machine, why: str) -> None:
        machine.failed = time.monotonic()
        if why != machine.why:
            machine.why = why
            self._say("driver", f"{machine.host.name}: {why}")

    def _let_go(self, machine: _Machine) -> None:
        """Wait no more for the end of the agent that is there now."""
        current = asyncio.current_task()
        for task in list(machine.tasks):
            if task is not current:
                task.cancel()
        if machine.process is not None:
            kill_command(machine.process)
            machine.process = None

    def _spawn(self, machine: _Machine, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        machine.tasks.add(task)
        task.add_done_callback(machine.tasks.discard)
        log_failure(task, f"a task about {machine.host.name}", log)

    def _towards(self, host: Host, driver: tuple[str, int]) -> tuple[str, int]:
        """Where a machine reaches the driver."""
        if self._advertise:
            return self._advertise, driver[1]
        if driver[0] not in ("0.0.0.0", "::"):
            return driver
        try:
            return address_towards(host.address or host.host), driver[1]
        except OSError:  # ssh may know the name, or a way, that this machine's network does not
            return os.uname().nodename, driver[1]


def make_marker(folder: Path) -> str:
    """A file by which other machines see that a folder is this one; its name. One is enough for a run's life."""
    folder.mkdir(parents=True, exist_ok=True)
    there = sorted(folder.glob(".shared-*"))
    if there:
        return there[0].name
    name = f".shared-{os.urandom(8).hex()}"
    (folder / name).touch()
    return name


def _attach(host: Host) -> list[str]:
    words = module_command(ATTACH, python=host.python)
    path = os.environ.get("PYTHONPATH")
    return ["env", f"PYTHONPATH={path}", *words] if path else words


def _environment(host: Host) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES) or name in _NAMES}
    if host.interface:
        found |= {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface}
    return found


async def _answer(process: asyncio.subprocess.Process) -> dict[str, Any] | None:
    """The next line of JSON; what login scripts print is passed over. None at the end."""
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # longer than any answer
            return None
        if not line:
            return None
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found


async def _said(process: asyncio.subprocess.Process) -> str:
    """The end of what a command that failed said, and how it ended."""
    assert process.stderr is not None
    said = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            said = await process.stderr.read(4096)
            await process.wait()
    kill_command(process)
    lines = [line for line in said.decode(errors="replace").strip().splitlines() if line.strip()]
    code = process.returncode
    return "; ".join(lines[-3:]) or (f"the command ended with {code} and said nothing" if code is not None else "")


def _over(process: asyncio.subprocess.Process) -> bool:
    """Whether it has ended, and all that it said was read."""
    return process.returncode is not None and all(
        end is None or end.at_eof() for end in (process.stdout, process.stderr)
    )


def kill_command(process: asyncio.subprocess.Process) -> None:
    """End a command that runs something on a machine, and not what it runs there."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # srun's second process would end what the first has started


def quoted(words: Sequence[str]) -> str:
    """Words as a shell reads them."""
    return " ".join(map(shlex.quote, words))
