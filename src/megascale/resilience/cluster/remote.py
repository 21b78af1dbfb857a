"""Nodes on other machines, where a command (ssh, srun) starts the agents.

The command runs agent/attach.py on the machine and gets a request with the job and its secret on stdin. It answers
with lines of JSON: {"running": PID} once an agent runs, {"over": DESCRIPTION} after the agent's end, {"refused":
REASON}, and {"ended": true} or false for a request to end the agent.

The command lives as long as the agent, so the driver learns of the agent's end at once. If the command or this driver
ends, agents continue, and the next driver adopts them by the same command. RUN/nodes/NAME/host.json records that a
machine has an agent, since the next driver may run on another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from abc import abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megascale.core.addresses import find_local_address
from megascale.core.failure import keep_running, log_failure
from megascale.core.python_process import module_command
from megascale.core.secrets import PASSWORD_VARIABLE, REPLICA_VARIABLE
from megascale.resilience.cluster.base import NO_REASONS, Cluster, ClusterRequest, NodeInfo
from megascale.resilience.protocol.job_description import JobDescription, to_record

log = logging.getLogger("megascale.driver")

ATTACH_MODULE = "megascale.resilience.agent.attach"
RECORD_FILE = "host.json"
START_TIMEOUT = 30.0  # seconds to reach a machine and start an agent's process
END_TIMEOUT = 15.0  # seconds to reach a machine and end its agent
RECONNECT_INTERVAL = 5.0  # seconds before a broken connection is opened again
RETRY_SECONDS = 20.0  # seconds from a failure of a machine to the next attempt to use it
_ANSWER_BYTES = 1 << 16  # longest line of an answer
# Variables that agents and trainers inherit from the driver; all other variables are those of their machine.
INHERITED_PREFIXES = ("NCCL_", "GLOO_", "OMP_", "UCX_")
_INHERITED_NAMES = (PASSWORD_VARIABLE, REPLICA_VARIABLE, "CUDA_DEVICE_MAX_CONNECTIONS")


@dataclass(frozen=True)
class Host:
    """A machine on which agents can be started.

    Attributes:
        name: name of the node.
        host: name or address for ssh.
        user, port: for ssh; "" and 0 leave the choice to ssh's configuration.
        gpus: number of GPUs to use, 0 if there are none or the number is unknown.
        address: address at which other nodes reach the machine. If empty, the agent uses the address of `interface`,
            or without an interface the local address of its connection to the driver.
        interface: network interface of the ranks, "": chosen by the address.
        folder: parent of the node's folder, "": ~/.megascale.
        python: interpreter on the machine, "": the path of the driver's interpreter.
    """

    name: str
    host: str
    user: str = ""
    port: int = 0
    gpus: int = 0
    address: str = ""
    interface: str = ""
    folder: str = ""
    python: str = ""


@dataclass
class _Machine:
    """The state of a machine.

    Attributes:
        has_agent: an agent was started and its end was not observed.
        is_opening: a request to start or adopt an agent is under way.
        failed_at: time of the last failure, on the monotonic clock.
        problem: description of the last failure.
        process: the command that waits for the agent's end.
        tasks: tasks of this driver's loop that start, adopt or await the agent.
    """

    host: Host
    is_node: bool = False
    has_agent: bool = False
    is_opening: bool = False
    failed_at: float = float("-inf")
    problem: str = ""
    process: asyncio.subprocess.Process | None = None
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def can_retry(self) -> bool:
        """Return True if the last failure is at least RETRY_SECONDS ago."""
        return time.monotonic() - self.failed_at > RETRY_SECONDS

    def record_end(self, problem: str) -> None:
        self.has_agent = False
        self.problem = problem


class RemoteCluster(Cluster):
    """A fixed list of machines, in the order in which they are used.

    Attributes:
        waits_separately: the command that started an agent is killed, and a separate command waits for the agent's end.
    """

    waits_separately = False
    start_limit = 64  # Agents import on their own machines, so this machine's cores set no limit.
    slow_start = True  # An agent that is started again has to import PyTorch first.
    notice_seconds = 20.0
    removed_nodes: frozenset[str] = frozenset()
    drained: Mapping[str, str] = NO_REASONS

    def __init__(self, request: ClusterRequest, hosts: Sequence[Host]) -> None:
        super().__init__(request)
        self._advertised = request.config.resilience.advertise  # host by which agents reach the driver, or ""
        self._folder = request.run / "nodes"
        self._job: tuple[JobDescription, bytes] | None = None  # the announced job, and its token
        self._marker = ""  # name of the marker file in the shared checkpoint folder, "" without such a folder
        self._processes: set[asyncio.subprocess.Process] = set()  # commands whose output was not read to its end
        self._excluded: frozenset[str] = frozenset()  # machines that the driver does not want now
        if request.config.checkpoint.location is None:
            self._marker = make_marker(request.run / "checkpoints")
        self._machines = {host.name: _Machine(host) for host in hosts}
        for name, machine in self._machines.items():
            machine.has_agent = (self._folder / name / RECORD_FILE).exists()
            machine.is_node = machine.has_agent

    @abstractmethod
    def make_command(self, host: Host, program: Sequence[str]) -> list[str]:
        """Return a local command that runs `program` on a machine and connects its stdin and stdout."""

    def handle_broken_connection(self, host: Host) -> None:
        """Handle a connection that ended without an answer: the agent or its machine may have failed."""
        return

    def list_machines(self) -> list[str]:
        return list(self._machines)

    def set_removed_nodes(self, names: set[str]) -> None:
        """Set the machines that no longer belong to the job."""
        for name in names - self.removed_nodes:
            machine = self._machines[name]
            self._stop_waiting(machine)
            self._forget_agent(name)
            machine.record_end("it was taken out of the allocation")
        self.removed_nodes = frozenset(names)

    # Cluster ----------------------------------------------------------------------------------------------------------

    def announce(self, job: JobDescription, token: bytes) -> None:
        checkpoints = str(self.run / "checkpoints") if self._marker else ""
        # Agents on other machines have a run folder of their own.
        self._job = (replace(job, run="", shared=False, checkpoints=checkpoints), token)
        for machine in self._machines.values():
            if machine.has_agent:
                self._spawn(machine, self._open_agent(machine, "adopt"))

    def exclude_nodes(self, names: frozenset[str]) -> None:
        self._excluded = names

    def nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(
                name,
                machine.host.address or machine.host.host,
                can_start_agent=machine.can_retry() and name not in self.removed_nodes,
                has_agent=machine.has_agent,
                reason=machine.problem,
            )
            for name, machine in self._machines.items()
            if machine.is_node
        ]

    def list_possible_nodes(self, count: int) -> list[str]:
        return list(self._machines)

    def prefer(self, names: Sequence[str]) -> None:
        preferred = {name: self._machines[name] for name in names if name in self._machines}
        self._machines = preferred | {
            name: machine for name, machine in self._machines.items() if name not in preferred
        }

    async def start_agent(self, name: str) -> bool:
        if name in self.removed_nodes:
            return False
        machine = self._machines.get(name)
        if machine is None:
            self._report("driver", f"{name} is no longer in the list of machines: no agent is started there")
            return False
        return await self._open_agent(machine, "start")

    async def fence(self, name: str) -> bool:
        """Return True once the agent's end was observed. An unreachable machine may still run the agent."""
        machine = self._machines.get(name)
        if machine is None or name in self.removed_nodes:
            return False
        self._stop_waiting(machine)
        answer = await self._send_request(machine, "end", END_TIMEOUT)
        if answer is None or not answer.get("ended"):
            return False
        machine.has_agent = False
        self._forget_agent(name)
        return True

    async def request(self) -> str | None:
        """Start or adopt an agent on the first machine that can have one, and return the machine's name.

        Machines that are not nodes of the job yet come first. Return None if no machine can have an agent.
        """
        for machine in sorted(self._machines.values(), key=lambda machine: machine.is_node):
            name = machine.host.name
            unusable = name in self._excluded or name in self.removed_nodes or name in self.drained
            if unusable or machine.has_agent or machine.is_opening or not machine.can_retry():
                continue
            # A machine whose connection broke may still have its agent. "adopt" starts an agent only if none runs.
            if await self._open_agent(machine, "adopt"):
                return name
        return None

    async def close(self) -> None:
        """End the commands that wait for agents; the agents continue."""
        tasks = [task for machine in self._machines.values() for task in machine.tasks]
        for machine in self._machines.values():
            self._stop_waiting(machine)
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in self._processes:
            kill_command(process)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await process.communicate()  # The pipes must be read to their end before the loop closes.

    # one machine ------------------------------------------------------------------------------------------------------

    async def _open_agent(self, machine: _Machine, action: str) -> bool:
        """Start or adopt a machine's agent. Return True if it runs, and wait for its end in the background.

        action: "start" ends a running agent and starts another; "adopt" starts an agent unless one runs.
        """
        self._stop_waiting(machine)
        machine.is_opening = True
        try:
            answer = await self._send_request(machine, action, START_TIMEOUT)
        finally:
            machine.is_opening = False
        if answer is None or "running" not in answer:
            # Without an answer to "adopt", an earlier agent may still run, so `has_agent` stays.
            if answer is not None or action != "adopt":
                machine.has_agent = False
            return False
        machine.is_node = True
        machine.has_agent = True
        machine.failed_at = float("-inf")
        machine.problem = ""
        name = machine.host.name
        try:
            (self._folder / name).mkdir(parents=True, exist_ok=True)
            (self._folder / name / RECORD_FILE).write_text(json.dumps({"host": machine.host.host}))
        except OSError as error:
            self._report("driver", f"{name}: the next driver will not find its agent: {error}")
        self._spawn(machine, keep_running(lambda: self._wait_for_end(machine), f"following {name}", log))
        return True

    async def _wait_for_end(self, machine: _Machine) -> None:
        """Wait until the agent has ended. Open a broken connection again."""
        process = machine.process
        assert process is not None
        if self.waits_separately:
            kill_command(process)
        else:
            if await self._observe_end(machine):
                return
            await asyncio.sleep(RECONNECT_INTERVAL)
        while True:
            answer = await self._send_request(machine, "watch", START_TIMEOUT)
            if answer is not None and "refused" in answer:
                return
            if answer is not None and "over" in answer:  # No agent runs, and the command knows no reason.
                machine.record_end("its agent ended unobserved")
                return
            if await self._observe_end(machine):
                return
            await asyncio.sleep(RECONNECT_INTERVAL)

    async def _observe_end(self, machine: _Machine) -> bool:
        """Wait for the next answer of the waiting command; return True if it reports the agent's end."""
        process = machine.process
        assert process is not None
        answer = await _read_answer(process)
        if answer is not None and "over" in answer:
            machine.record_end(f"its agent ended: {answer['over']}")
            return True
        self.handle_broken_connection(machine.host)
        return False

    async def _send_request(self, machine: _Machine, action: str, timeout: float) -> dict[str, Any] | None:
        """Run a command with a request, and return its first answer, None without one. Record and report a failure.

        The command stays in `machine.process` and later reports the agent's end, except after the request "end".
        """
        request_line = json.dumps(self._make_request(machine.host, action)).encode() + b"\n"
        process = await self._start_command(machine)
        if process is None:
            return None
        if action != "end":
            machine.process = process
        answer = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                assert process.stdin is not None
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(request_line)
                    await process.stdin.drain()
                    process.stdin.close()
                answer = await _read_answer(process)
        if answer is None:
            self._record_failure(machine, await _read_errors(process) or f"no answer within {timeout:g} s")
        elif "refused" in answer:
            self._record_failure(machine, str(answer["refused"]))
        return answer

    async def _start_command(self, machine: _Machine) -> asyncio.subprocess.Process | None:
        command = self.make_command(machine.host, _make_attach_command(machine.host))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_ANSWER_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            self._record_failure(machine, f"{command[0]} cannot be started: {error.strerror}")
            return None
        unfinished = {earlier for earlier in self._processes if not _is_finished(earlier)}
        self._processes = unfinished | {process}
        return process

    def _make_request(self, host: Host, action: str) -> dict[str, Any]:
        if self._job is None:
            raise RuntimeError("no job was announced")
        job, token = self._job
        return {
            "do": action,
            "node": host.name,
            "folder": host.folder,
            "job": to_record(replace(job, driver=self._find_driver_address(host, job.driver))),
            "token": token.decode(),
            "marker": self._marker,
            "address": host.address,
            "interface": host.interface,
            "pod": host.host,
            "environment": _make_agent_environment(host),
        }

    def _record_failure(self, machine: _Machine, problem: str) -> None:
        machine.failed_at = time.monotonic()
        if problem != machine.problem:
            machine.problem = problem
            self._report("driver", f"{machine.host.name}: {problem}")

    def _forget_agent(self, name: str) -> None:
        """Remove the record by which the next driver would look for an agent."""
        with contextlib.suppress(OSError):
            (self._folder / name / RECORD_FILE).unlink(missing_ok=True)

    def _stop_waiting(self, machine: _Machine) -> None:
        """Stop waiting for the end of a machine's agent."""
        current = asyncio.current_task()
        for task in list(machine.tasks):
            if task is not current:
                task.cancel()
        if machine.process is not None:
            kill_command(machine.process)
            machine.process = None

    def _spawn(self, machine: _Machine, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        machine.tasks.add(task)
        task.add_done_callback(machine.tasks.discard)
        log_failure(task, f"a task about {machine.host.name}", log)

    def _find_driver_address(self, host: Host, driver: tuple[str, int]) -> tuple[str, int]:
        """Return the address at which a machine reaches the driver."""
        listen, port = driver
        if self._advertised:
            return self._advertised, port
        if listen not in ("0.0.0.0", "::"):  # The driver listens on one address, not on all.
            return driver
        try:
            return find_local_address(host.address or host.host), port
        except OSError:  # ssh's configuration may know a name or a route that this host does not.
            return os.uname().nodename, port


def make_marker(folder: Path) -> str:
    """Return the name of the marker file in a folder, created if necessary. Other machines verify the folder by it."""
    folder.mkdir(parents=True, exist_ok=True)
    markers = sorted(folder.glob(".shared-*"))
    if markers:
        return markers[0].name
    name = f".shared-{os.urandom(8).hex()}"
    (folder / name).touch()
    return name


def kill_command(process: asyncio.subprocess.Process) -> None:
    """Kill a command that runs a program on a machine; the program itself continues."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            # Kill the whole session, since srun's second process would otherwise end the program.
            os.killpg(process.pid, signal.SIGKILL)


def _make_attach_command(host: Host) -> list[str]:
    command = module_command(ATTACH_MODULE, python=host.python)
    path = os.environ.get("PYTHONPATH")
    if path:
        return ["env", f"PYTHONPATH={path}"] + command
    return command


def _make_agent_environment(host: Host) -> dict[str, str]:
    environment = {}
    for name, value in os.environ.items():
        if name.startswith(INHERITED_PREFIXES) or name in _INHERITED_NAMES:
            environment[name] = value
    if host.interface:
        environment |= {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface}
    return environment


async def _read_answer(process: asyncio.subprocess.Process) -> dict[str, Any] | None:
    """Return the next line that is a JSON object, None at the end. Skip the output of login scripts."""
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # The line is longer than any answer.
            return None
        if not line:
            return None
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer


async def _read_errors(process: asyncio.subprocess.Process) -> str:
    """Kill a command that failed; return the end of its stderr, or its exit code."""
    assert process.stderr is not None
    output = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            output = await process.stderr.read(4096)
            await process.wait()
    kill_command(process)
    lines = [line for line in output.decode(errors="replace").strip().splitlines() if line.strip()]
    if lines:
        return "; ".join(lines[-3:])
    if process.returncode is None:
        return ""
    return f"the command ended with exit code {process.returncode} and no output"


def _is_finished(process: asyncio.subprocess.Process) -> bool:
    """Return True if a command has ended and its output was read."""
    streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
    return process.returncode is not None and all(stream.at_eof() for stream in streams)
