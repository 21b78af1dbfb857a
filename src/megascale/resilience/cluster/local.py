"""Nodes on one machine: each node is an agent process with a folder (RUN/nodes/NAME) and its own loopback address.

A file `down` in the folder of a node simulates a broken machine: no agent can be started on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.core.atomic_files import write_atomically
from megascale.core.python_process import module_command
from megascale.resilience.agent.leftover_processes import end_leftover_processes
from megascale.resilience.agent.node_folder import end_checkpoint_services, find_agent
from megascale.resilience.cluster.base import Cluster, ClusterRequest, NodeInfo
from megascale.resilience.process_birth import read_birth_time
from megascale.resilience.protocol.job_description import JobDescription, write_job

log = logging.getLogger("megascale.driver")
DOWN_FILE = "down"
STATE_FILE = "agent.json"  # process id, birth time and GPUs of a node's agent
FREE_TIMEOUT = 5.0  # seconds for the agent of a replaced node to end and free its GPUs
KILL_TIMEOUT = 5.0  # seconds for a killed agent to disappear


class LocalCluster(Cluster):
    """Nodes that share this machine and the run folder.

    Attributes:
        has_own_folders: the agents and trainers of each node use a folder of their own instead of the run folder.
    """

    has_own_folders = False

    def __init__(self, request: ClusterRequest) -> None:
        super().__init__(request)
        self.devices = request.devices  # names of the GPUs of each node, () without GPUs
        self.folder = request.run / "nodes"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._job: tuple[JobDescription, bytes] | None = None  # the announced job, and its token
        self._children: list[subprocess.Popen[bytes]] = []  # agents that this driver started
        self._blocked: set[str] = set()  # names of evicted nodes
        self._locks: dict[str, asyncio.Lock] = {}  # by node, held while its agent is started or killed
        # Held from the choice of an agent's GPUs until they are recorded, so that two agents choose different ones.
        self._gpu_lock = asyncio.Lock()

    def announce(self, job: JobDescription, token: bytes) -> None:
        self._job = (job, token)
        for path in self.folder.iterdir():
            self._write_job(path.name)

    def _write_job(self, name: str) -> Path:
        """Write the job into the folder of a node's agent; return that folder."""
        if self._job is None:
            raise RuntimeError("no job was announced")
        job, token = self._job
        folder = self.folder / name
        if self.has_own_folders:
            folder = self._get_own_folder(name)
            folder.mkdir(parents=True, exist_ok=True)
            (self.run / "checkpoints").mkdir(exist_ok=True)
            job = job.with_own_folder(self._get_run_folder(name), self.run / "checkpoints")
        write_job(folder, replace(job, run=job.run or str(self.run)), token)
        return folder

    def nodes(self) -> list[NodeInfo]:
        names = sorted((path.name for path in self.folder.iterdir()), key=_parse_number)
        return [
            NodeInfo(
                name,
                _make_address(name),
                can_start_agent=not (self.folder / name / DOWN_FILE).exists(),
                has_agent=bool(find_agent(self.folder / name)),
            )
            for name in names
        ]

    def list_possible_nodes(self, count: int) -> list[str]:
        numbers = sorted(self._list_numbers())
        first_new = max(numbers, default=-1) + 1
        new_numbers = range(first_new, first_new + max(0, count - len(numbers)))
        return [f"n{number}" for number in numbers + list(new_numbers)]

    async def start_agent(self, name: str) -> bool:
        folder = self.folder / name
        if (folder / DOWN_FILE).exists() or not folder.exists():
            return False
        await self.fence(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            await self._end_agent(name)  # another start of the node may have come first
            return await self._start_agent(name)

    async def _start_agent(self, name: str) -> bool:
        """Start the agent of a node without one. Files are written in threads, because the disk may be busy."""
        self._children = [child for child in self._children if child.poll() is None]
        try:
            agent_folder = await asyncio.to_thread(self._write_job, name)
        except OSError as error:
            log.warning("no agent on %s: its job description cannot be written: %s", name, error)
            return False
        async with self._gpu_lock:
            return await self._start_process(name, agent_folder)

    async def _start_process(self, name: str, agent_folder: Path) -> bool:
        """Start the process of a node's agent and record it; return False if that is not possible."""
        folder = self.folder / name
        environment = dict(os.environ)
        devices = ""
        if self.devices:
            devices = await self._find_free_devices(name)
            environment["CUDA_VISIBLE_DEVICES"] = devices
        command = module_command("megascale.resilience.agent.main", "--node", name, "--folder", str(agent_folder))
        command += ["--address", _make_address(name), "--pod", f"local-{name}"]
        if self._job is not None and self._job[0].limits.preload:
            command.append("--preload")
        with open(folder / "agent.log", "ab") as out:
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self._children.append(child)
        state = {"pid": child.pid, "born": read_birth_time(child.pid), "devices": devices}
        try:
            await asyncio.to_thread(write_atomically, folder / STATE_FILE, json.dumps(state))
        except OSError as error:
            child.kill()  # Without the file, nothing could find or end the agent.
            log.warning("no agent on %s: %s cannot be written: %s", name, folder / STATE_FILE, error)
            return False
        except asyncio.CancelledError:
            child.kill()
            raise
        return True

    async def fence(self, name: str) -> bool:
        """Kill the agent. The kernel then ends the agent's fork server and trainers.

        The processes that ranks of a foreign trainer have started are killed too.

        On a blocked node the checkpoint service is killed too: its snapshots are no longer read, and the other nodes of
        this machine need the memory.
        """
        async with self._locks.setdefault(name, asyncio.Lock()):
            return await self._end_agent(name)

    async def _end_agent(self, name: str) -> bool:
        """Carry out `fence`."""
        pid = find_agent(self.folder / name)
        if pid:
            with contextlib.suppress(ProcessLookupError):  # an agent of an earlier driver has just ended
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT
        while find_agent(self.folder / name) and time.monotonic() < deadline:
            for child in self._children:
                child.poll()  # This call reaps an agent that has ended.
            await asyncio.sleep(0.01)
        if find_agent(self.folder / name):
            return False
        run = self._get_run_folder(name)
        pids = await asyncio.to_thread(end_leftover_processes, run, self.run.name, name)
        if pids:
            log.info("%s: ended processes %s, which its ranks had started", name, pids)
        if name in self._blocked:
            pids = await asyncio.to_thread(end_checkpoint_services, run, name)
            log.info("%s was evicted: ended its checkpoint services %s", name, pids)
        return True

    def block(self, name: str, reason: str) -> None:
        self._blocked.add(name)

    def unblock(self, name: str) -> None:
        self._blocked.discard(name)

    async def request(self) -> str | None:
        name = f"n{max(self._list_numbers(), default=-1) + 1}"
        (self.folder / name).mkdir()
        return name if await self.start_agent(name) else None

    def _list_numbers(self) -> list[int]:
        return [_parse_number(path.name) for path in self.folder.iterdir()]

    def _get_run_folder(self, name: str) -> Path:
        """Return the folder that the trainers of a node write to."""
        if not self.has_own_folders:
            return self.run
        return self._get_own_folder(name) / "runs" / self.run.name

    def _get_own_folder(self, name: str) -> Path:
        return self.run.with_name(f"{self.run.name}.apart") / name

    # GPUs -------------------------------------------------------------------------------------------------------------

    async def _find_free_devices(self, name: str) -> str:
        """Return GPUs for a node's agent in the form of CUDA_VISIBLE_DEVICES.

        The first choice is the node's earlier group of GPUs, the second the group of its number, the third any free
        group. The result is "" if no group becomes free within FREE_TIMEOUT, since two ranks must not share a GPU.
        """
        groups = [",".join(group) for group in self.devices]
        candidates = [self._read_state(name).get("devices"), self._get_default_devices(name)]
        candidates += groups
        deadline = time.monotonic() + FREE_TIMEOUT
        while True:
            used = {  # groups of the nodes whose agents run
                self._read_state(path.name).get("devices") or self._get_default_devices(path.name)
                for path in self.folder.iterdir()
                if path.name != name and find_agent(path)
            }
            for group in candidates:
                if group in groups and group not in used:
                    return str(group)
            if time.monotonic() > deadline:
                log.warning("the agent of %s gets no GPU: running nodes use all of them", name)
                return ""
            await asyncio.sleep(0.05)

    def _get_default_devices(self, name: str) -> str:
        """Return the group of GPUs with the node's number, which is 0 for n0; "" if there are fewer groups."""
        number = _parse_number(name)
        if number >= len(self.devices):
            return ""
        return ",".join(self.devices[number])

    def _read_state(self, name: str) -> dict[str, Any]:
        """Return the record that was written when the node's agent was started."""
        try:
            state = json.loads((self.folder / name / STATE_FILE).read_text())
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}


class ApartCluster(LocalCluster):
    """Nodes that behave as on separate machines: agents and trainers share only the run's folder of checkpoints.

    The folder of a node is RUN.apart/NAME.
    """

    has_own_folders = True


def _parse_number(name: str) -> int:
    """Return 3 for n3, -1 for another form."""
    return int(name[1:]) if name[1:].isdigit() else -1


def _make_address(name: str) -> str:
    """Return a loopback address per node, 127.0.1.2 for n0. Systems other than Linux have only 127.0.0.1."""
    if sys.platform != "linux":
        return "127.0.0.1"
    number = _parse_number(name) + 1  # 0 for a name of another form
    return f"127.0.{1 + number // 250}.{number % 250 + 1}"  # The last part is between 1 and 250.
