"""Nodes on one machine: each is an agent process with a folder (RUN/nodes/NAME) and a loopback address of its own.

A node whose folder holds a file `down` plays a broken machine: no agent can be started on it.
"""

from __future__ import annotations

import asyncio
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

from megascale.core.python_command import module_command
from megascale.resilience.agent.services import end_services
from megascale.resilience.cluster.base import Cluster, ClusterRequest, NodeInfo
from megascale.resilience.process_birth import born
from megascale.resilience.protocol.given import JobDescription, write_job

log = logging.getLogger("megascale.driver")
DOWN = "down"
STATE = "agent.json"
UNTIL_FREE = 5.0  # seconds for the agent of a node that is replaced to end


class LocalCluster(Cluster):
    """Nodes that share this machine and the run folder."""

    has_own_folders = False

    def __init__(self, request: ClusterRequest) -> None:
        super().__init__(request)
        self.devices = request.devices
        self._job: tuple[JobDescription, bytes] | None = None
        self.folder = request.run / "nodes"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._children: list[subprocess.Popen[bytes]] = []
        self._blocked: set[str] = set()

    def announce(self, job: JobDescription, token: bytes) -> None:
        self._job = (job, token)
        for path in self.folder.iterdir():
            self._give(path.name)

    def _give(self, name: str) -> Path:
        """Put into a node's folder what its agent is given; that folder."""
        if self._job is None:
            raise RuntimeError("no job was announced")
        job, token = self._job
        folder = self.folder / name
        if self.has_own_folders:
            folder = self._folder_apart(name)
            folder.mkdir(parents=True, exist_ok=True)
            (self.run / "checkpoints").mkdir(exist_ok=True)
            job = job.on(folder / "runs" / self.run.name, self.run / "checkpoints")
        write_job(folder, replace(job, run=job.run or str(self.run)), token)
        return folder

    def nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(path.name, _address(path.name), not (path / DOWN).exists(), self._agent(path.name) is not None)
            for path in sorted(self.folder.iterdir(), key=lambda p: _number(p.name))
        ]

    def foreseen(self, count: int) -> list[str]:
        numbers = sorted(_number(path.name) for path in self.folder.iterdir())
        new = max(numbers, default=-1) + 1
        return [f"n{number}" for number in (*numbers, *range(new, new + max(0, count - len(numbers))))]

    async def start_agent(self, name: str) -> bool:
        folder = self.folder / name
        if (folder / DOWN).exists() or not folder.exists():
            return False
        await self.fence(name)
        self._children = [child for child in self._children if child.poll() is None]
        try:
            own = self._give(name)
        except OSError as error:
            log.warning("no agent on %s: what it is given cannot be written: %s", name, error)
            return False
        command = module_command("megascale.resilience.agent.agent", "--node", name)
        command += ["--folder", str(own), "--address", _address(name), "--pod", f"local-{name}"]
        environment, devices = dict(os.environ), ""
        if self.devices:
            devices = await self._free_devices(name)
            environment["CUDA_VISIBLE_DEVICES"] = devices
        with open(folder / "agent.log", "ab") as out:
            child = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self._children.append(child)
        state = {"pid": child.pid, "born": born(child.pid), "devices": devices}
        temporary = folder / f"{STATE}.tmp"
        try:
            temporary.write_text(json.dumps(state))
            os.replace(temporary, folder / STATE)
        except OSError as error:
            child.kill()  # nobody could find it, nor end it
            log.warning("no agent on %s: %s cannot be written: %s", name, folder / STATE, error)
            return False
        return True

    async def fence(self, name: str) -> bool:
        """SIGKILL to the agent; the kernel then ends its fork server and trainers. Of a node that is blocked the
        checkpoint service ends too: its snapshots would be read by nobody, and this machine's other nodes need the
        memory."""
        pid = self._agent(name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while self._agent(name) is not None and time.monotonic() < deadline:
            for child in self._children:
                child.poll()
            await asyncio.sleep(0.01)
        if self._agent(name) is not None:
            return False
        if name in self._blocked:
            ended = await asyncio.to_thread(end_services, self._run_of(name), name)
            log.info("%s was evicted: ended its checkpoint services %s", name, ended)
        return True

    def block(self, name: str, why: str) -> None:
        self._blocked.add(name)

    def unblock(self, name: str) -> None:
        self._blocked.discard(name)

    def _run_of(self, name: str) -> Path:
        """The run folder as the node's trainers see it."""
        return self._folder_apart(name) / "runs" / self.run.name if self.has_own_folders else self.run

    def _folder_apart(self, name: str) -> Path:
        return self.run.with_name(f"{self.run.name}.apart") / name

    async def request(self) -> str | None:
        name = self._create()
        return name if await self.start_agent(name) else None

    def _create(self) -> str:
        numbers = [_number(path.name) for path in self.folder.iterdir()]
        name = f"n{max(numbers, default=-1) + 1}"
        (self.folder / name).mkdir()
        return name

    async def _free_devices(self, name: str) -> str:
        """GPUs for a node's agent, as CUDA_VISIBLE_DEVICES has them: those it had, else of its number, else of a node
        whose agent has ended. "" if all stay held for UNTIL_FREE: two ranks on a GPU would be worse."""
        groups = [",".join(group) for group in self.devices]
        deadline = time.monotonic() + UNTIL_FREE
        while True:
            held = {
                self._state(path.name).get("devices") or self._first_devices(path.name)
                for path in self.folder.iterdir()
                if path.name != name and self._agent(path.name) is not None
            }
            wanted = (self._state(name).get("devices"), self._first_devices(name), *groups)
            if free := next((group for group in wanted if group in groups and group not in held), ""):
                return free
            if time.monotonic() > deadline:
                log.warning("no agent on %s has a GPU: nodes that run hold all of them", name)
                return ""
            await asyncio.sleep(0.05)

    def _first_devices(self, name: str) -> str:
        """GPUs of a node of the job's first ones, by its number."""
        number = _number(name)
        return ",".join(self.devices[number]) if number < len(self.devices) else ""

    def _state(self, name: str) -> dict[str, Any]:
        """What was written of the node's agent when it was started."""
        try:
            found = json.loads((self.folder / name / STATE).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _agent(self, name: str) -> int | None:
        """Process id of the node's living agent."""
        state = self._state(name)
        try:
            pid = int(state["pid"])
            return pid if born(pid) == state["born"] != 0 else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


class ApartCluster(LocalCluster):
    """Nodes as on machines of their own: agents and trainers share only the run's folder of checkpoints.

    The folder of a node is RUN.apart/NAME.
    """

    has_own_folders = True


def _number(name: str) -> int:
    return int(name[1:]) if name[1:].isdigit() else -1


def _address(name: str) -> str:
    """127.0.1.1 for n0 and so on: loopback addresses are free on Linux; elsewhere all share 127.0.0.1."""
    number = _number(name) + 1
    return f"127.0.{1 + number // 250}.{number % 250 + 1}" if sys.platform == "linux" else "127.0.0.1"
