"""`--cluster slurm`: the nodes of one allocation, an agent each as a step of its own, the driver on the batch node.

Slurm says which nodes the job has. One that it has taken away (down, powered off, slurmd silent for long) is not the
job's any more, even if an agent there still answers: a task whose slurmd was killed runs on until that comes back.
This driver is such a task too. Where Slurm has started the job again, on other nodes, it must end; where Slurm has
taken its node, a standby on another goes on (slurm_standby.py), and this one only waits: its end would end the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence

from megascale.config import Config
from megascale.core.background import keep_running, log_failure
from megascale.core.python_command import module_command
from megascale.errors import EXIT_INTERRUPTED, ConfigError
from megascale.resilience.cluster import slurm_standby
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.hosts_file import Host
from megascale.resilience.cluster.remote import REST, START, RemoteCluster, kill_command
from megascale.resilience.protocol.contact import driver_folder
from megascale.resilience.protocol.given import JobDescription

log = logging.getLogger("megascale.driver")

LOOK = 2.0  # seconds between questions to Slurm's controller about the job
DRAINS = 10.0  # seconds between those about its nodes, unless one seems gone
_ANSWER = 10.0  # seconds that it gets to answer
_SILENT = 120.0  # seconds after which a standby that has shown no life is replaced
_STANDBY = "megascale.resilience.cluster.slurm_standby"
_JOB = "SLURM_JOB_ID"


class SlurmCluster(RemoteCluster):
    """See RemoteCluster.

    Slurm ends a job by SIGTERM to all its processes, on which srun has its step killed: no srun may be there whose step
    holds an agent, or trainers are killed before they have saved.
    """

    separate = True

    def __init__(self, request: ClusterRequest) -> None:
        self._job_id = _allocation()
        names = _names(os.environ["SLURM_JOB_NODELIST"])
        super().__init__(request, [Host(name, name) for name in names])
        self._cores = dict(zip(names, _each(os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")), strict=False))
        self._starts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._looking: asyncio.Task[None] | None = None
        self._standing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._own = os.environ.get("SLURMD_NODENAME", "")
        self._standby = ""  # the node that has one
        self._shown = (0, 0.0)  # its file's time, and when that was new
        self._tried = float("-inf")
        self.withdrawn = ""

    @classmethod
    def on_other_machines(cls, config: Config) -> tuple[int, str]:
        """ConfigError outside of an allocation, and in one that is too small."""
        _allocation()
        nodelist, limits = os.environ["SLURM_JOB_NODELIST"], config.resilience
        there, wanted = len(_names(nodelist)), limits.nodes + limits.spares
        if wanted > there:
            raise ConfigError(
                f"resilience.nodes={limits.nodes} and spares={limits.spares} take {wanted} nodes, but this allocation "
                f"has {there} ({nodelist}); ask sbatch for more, or lower --nodes or --spares"
            )
        return gpus_of_a_node(config), _own_address()

    def command(self, host: Host, words: Sequence[str], name: str = "agent") -> list[str]:
        step = ["srun", f"--jobid={self._job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}"]
        # All of the node: trainers are started by the agent within this one task.
        step += [f"--cpus-per-task={self._cores.get(host.name, 1)}", "--cpu-bind=none", "--kill-on-bad-exit=0"]
        return [*step, "--no-kill", "--quiet", "--export=ALL", f"--job-name={name}", *words]

    def announce(self, job: JobDescription, token: bytes) -> None:
        super().announce(job, token)
        if self._looking is None:
            look = keep_running(self._look, "the look at Slurm's job", log)
            self._looking = asyncio.get_running_loop().create_task(look)

    async def close(self) -> None:
        tasks = [task for task in (self._looking, self._standing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    def broke(self, host: Host) -> None:
        self._wake.set()  # Slurm may know why, and that is known at once

    async def _look(self) -> None:
        """Ask Slurm again and again which nodes the job still has, and which of them are drained."""
        drains = 0.0
        while True:
            woken, now = self._wake.is_set(), time.monotonic()
            self._wake.clear()
            await self._look_at_job()
            if woken or now >= drains:
                drains = now + DRAINS
                await self._look_for_drains()
            if self._standing is None or self._standing.done():
                self._standing = asyncio.get_running_loop().create_task(self._keep_standby())
                log_failure(self._standing, "the start of a standby driver", log)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK):
                    await self._wake.wait()

    async def _look_at_job(self) -> None:
        """What does not answer, or not of this job, says nothing of nodes."""
        about = await _ask("scontrol", "show", "job", self._job_id, "--oneliner")
        job = slurm_standby.fields(about)
        if job.get("JobId") != self._job_id:
            return
        if int(job.get("Restarts") or 0) > self._starts:
            self.withdrawn = f"Slurm has taken job {self._job_id} off its nodes and starts it again"
        elif job.get("JobState") == "RUNNING":
            names = await _ask("scontrol", "show", "hostnames", job["NodeList"])
            if names:
                self.take({name for name in self.names() if name not in names.split()})

    async def _look_for_drains(self) -> None:
        words = ["--noheader", "--Node", "--states=drain", f"--nodes={','.join(self.names())}", "--format=%N %E"]
        said = await _ask("sinfo", *words)
        if said is not None:
            self.drained = {name: why or "no reason given" for name, _, why in map(_split, said.splitlines())}

    # a driver elsewhere -----------------------------------------------------------------------------------------------

    async def _keep_standby(self) -> None:
        """Have somebody on another node who goes on should Slurm take this one out of the job."""
        now = time.monotonic()
        if self._standby and self._standby not in self.taken and self._shows_life(now):
            return
        others = [name for name in self.names() if name not in self.taken | self.drained.keys() | {self._own}]
        if not others or not self._own or now - self._tried < REST:
            return
        self._tried, name, number = now, others[-1], secrets.token_hex(4)
        try:
            file = driver_folder(self.run) / slurm_standby.CURRENT
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps({"number": number, "node": name}))
            os.replace(temporary, file)
        except OSError as error:
            self._say("driver", f"no standby: {error}")
            return
        words = module_command(_STANDBY, str(self.run), number, self._own)
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        command = self.command(Host(name, name), words, "standby")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=null, stdout=pipe, stderr=null, start_new_session=True
        )
        line = b""
        try:
            async with asyncio.timeout(START):
                assert process.stdout is not None
                line = await process.stdout.readline()
        except TimeoutError:
            pass
        finally:
            kill_command(process)  # as with agents: no srun may be there when Slurm ends the job
            await process.communicate()
        ready = line.decode(errors="replace").strip() == slurm_standby.READY
        self._standby, self._shown = (name, (0, now)) if ready else ("", self._shown)
        if not ready:
            self._say("driver", f"{name}: no standby for the driver came up there; it is tried again")

    def _shows_life(self, now: float) -> bool:
        with contextlib.suppress(OSError):
            shown = (driver_folder(self.run) / slurm_standby.CURRENT).stat().st_mtime_ns
            if shown != self._shown[0]:
                self._shown = (shown, now)
        return now - self._shown[1] < _SILENT

    def wait_for_job_end(self) -> int | None:
        """Where this process ends, its batch script does, and Slurm takes that for the job's end, even on a node that
        it has taken out of the job."""
        while True:
            about = slurm_standby.ask_about(self._job_id)
            if not self._own or self._own in slurm_standby.nodes_of(about):
                return None
            code = slurm_standby.verdict_of(self.run, self._job_id, self._starts)
            if code is not None:
                return code
            if about and not slurm_standby.runs(about, self._starts):
                return EXIT_INTERRUPTED
            time.sleep(LOOK)


def _split(line: str) -> tuple[str, str, str]:
    return line.strip().partition(" ")


def gpus_of_a_node(config: Config) -> int:
    """What Slurm has given or is to give: SLURM_GPUS_ON_NODE in an allocation, else parallel.gpus_per_host."""
    if config.train.device == "cpu":
        return 0
    return int(os.environ.get("SLURM_GPUS_ON_NODE") or (0 if _JOB in os.environ else config.parallel.gpus_per_host))


def _allocation() -> str:
    """The job's id; ConfigError where this is not one of Slurm's."""
    missing = [name for name in ("srun", "scontrol", "squeue") if shutil.which(name) is None]
    if missing:
        raise ConfigError(f"cluster slurm needs Slurm's commands on this machine: {', '.join(missing)} not found")
    if not os.environ.get(_JOB) or not os.environ.get("SLURM_JOB_NODELIST"):
        raise ConfigError(
            "cluster slurm runs within an allocation: `megascale launch ... --cluster slurm --dry-run > job.sbatch`, "
            "look at it, then `sbatch job.sbatch`"
        )
    return os.environ[_JOB]


def _names(nodelist: str) -> list[str]:
    """n1, n2, n3 of n[1-3]."""
    done = subprocess.run(["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"`scontrol show hostnames {nodelist}` failed: {done.stderr.strip()}")
    return done.stdout.split()


def _each(text: str) -> list[int]:
    """4, 4, 8 of SLURM_JOB_CPUS_PER_NODE's 4(x2),8."""
    found: list[int] = []
    for part in text.split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            found += [int(match[1])] * int(match[2] or 1)
    return found


def _own_address() -> str:
    """Where the other nodes reach this one: as Slurm does."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    done = subprocess.run(["scontrol", "show", "node", name, "--oneliner"], capture_output=True, text=True)
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    try:
        return socket.gethostbyname(found[1] if found else name)
    except OSError:
        return "0.0.0.0"


async def _ask(*words: str) -> str | None:
    """What a command of Slurm's says; None if it fails or does not answer."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*words, stdin=null, stdout=pipe, stderr=null)
    try:
        async with asyncio.timeout(_ANSWER):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        return None
    return out.decode(errors="replace") if process.returncode == 0 else None


CLUSTERS.register("slurm", SlurmCluster)
