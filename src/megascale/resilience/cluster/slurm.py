"""`--cluster slurm`: the nodes of one allocation with one agent each; the driver runs on the batch node.

Slurm decides which nodes the job has. It removes a node that is down, powered off, or whose slurmd (Slurm's daemon on a
node) is silent for long. The agent of a removed node may still answer, since a task whose slurmd was killed runs until
slurmd returns. The node nevertheless no longer belongs to the job.

The driver too may run on a removed node. If Slurm has started the job again on other nodes, the driver must end. If
Slurm has only removed the driver's node, a standby on another node takes over: a process that waits to become the
driver (slurm_standby.py). The old driver then only waits, since its end would end the job.
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
from megascale.core.atomic_files import write_atomically
from megascale.core.failure import keep_running, log_failure
from megascale.core.python_process import module_command
from megascale.core.terminal import print_error
from megascale.errors import EXIT_INTERRUPTED, ConfigError
from megascale.resilience.cluster import slurm_standby
from megascale.resilience.cluster.base import ClusterRequest, count_configured_gpus
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.remote import RETRY_SECONDS, START_TIMEOUT, Host, RemoteCluster, kill_command
from megascale.resilience.cluster.slurm_container import make_container_arguments
from megascale.resilience.protocol.contact import driver_folder
from megascale.resilience.protocol.job_description import JobDescription

log = logging.getLogger("megascale.driver")

JOB_INTERVAL = 2.0  # seconds between queries of the job's state
DRAIN_INTERVAL = 10.0  # seconds between queries of drained nodes, unless a node seems to have failed
STANDBY_SILENCE = 120.0  # seconds without a sign of life after which a standby is replaced
_STANDBY_MODULE = "megascale.resilience.cluster.slurm_standby"
_JOB_VARIABLE = "SLURM_JOB_ID"


class SlurmCluster(RemoteCluster):
    """The nodes of an allocation.

    Slurm ends a job by SIGTERM to all its processes. An srun that receives the signal has its step killed, and the
    trainers of the step would die before they have saved. So no srun may wait for an agent.
    """

    waits_separately = True

    def __init__(self, request: ClusterRequest) -> None:
        self._job_id = _check_allocation()
        names = _expand_nodelist(os.environ["SLURM_JOB_NODELIST"])
        self._settings = request.config.slurm
        # A container has another interpreter than the driver.
        python = self._settings.python if self._settings.container else ""
        super().__init__(request, [Host(name, name, python=python) for name in names])
        cores = expand_counts(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        self._cores = dict(zip(names, cores, strict=False))  # number of cores by node
        self._restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._own_node = os.environ.get("SLURMD_NODENAME", "")
        self._watch_task: asyncio.Task[None] | None = None
        self._standby_task: asyncio.Task[None] | None = None
        self._wakeup = asyncio.Event()
        self._standby_node = ""  # node of the standby, "" without one
        self._standby_mtime = 0  # modification time of the standby's file, in nanoseconds
        self._standby_changed_at = 0.0  # when the file changed last, on the monotonic clock
        self._standby_attempted_at = float("-inf")  # when a start was last tried, on the monotonic clock

    @classmethod
    def describe_remote_machines(cls, config: Config) -> tuple[int, str]:
        """Return (GPUs per node, address of this node). Raises ConfigError outside of a large enough allocation."""
        _check_allocation()
        _report_ignored_tasks()
        nodelist = os.environ["SLURM_JOB_NODELIST"]
        limits = config.resilience
        node_count = len(_expand_nodelist(nodelist))
        required_count = limits.nodes + limits.spares
        if required_count > node_count:
            raise ConfigError(
                f"resilience.nodes={limits.nodes} and spares={limits.spares} take {required_count} nodes, but this "
                f"allocation has {node_count} ({nodelist}); request more from sbatch, or lower --nodes or --spares"
            )
        return count_gpus_per_node(config), _find_own_address()

    def make_command(self, host: Host, program: Sequence[str], name: str = "agent") -> list[str]:
        container: list[str] = []
        if name == "agent":  # A standby runs outside of the container, which lacks Slurm's commands.
            container = make_container_arguments(self._settings, self._job_id, self.run)
        return [
            "srun",
            f"--jobid={self._job_id}",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            "--ntasks-per-node=1",  # sbatch passes its own value on in a variable
            f"--nodelist={host.name}",
            # The task gets all cores of the node, since the agent starts the trainers within the task.
            f"--cpus-per-task={self._cores.get(host.name, 1)}",
            "--cpu-bind=none",
            "--kill-on-bad-exit=0",
            "--no-kill",
            "--quiet",
            "--export=ALL",
            f"--job-name={name}",
            *container,
            *program,
        ]

    def announce(self, job: JobDescription, token: bytes) -> None:
        super().announce(job, token)
        if self._watch_task is None:
            watch = keep_running(self._watch_job, "the query of Slurm's job", log)
            self._watch_task = asyncio.get_running_loop().create_task(watch)

    async def close(self) -> None:
        tasks = [task for task in (self._watch_task, self._standby_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    def handle_broken_connection(self, host: Host) -> None:
        self._wakeup.set()  # Query Slurm, which may know already that the node has failed.

    def wait_for_job_end(self) -> int | None:
        # The end of this process ends the batch script, and Slurm then ends the job, even if it has removed this node
        # from the job.
        while True:
            job = slurm_standby.query_job(self._job_id)
            if not self._own_node or self._own_node in slurm_standby.list_nodes(job):
                return None
            code = slurm_standby.read_exit_code(self.run, self._job_id, self._restarts)
            if code is not None:
                return code
            if job and not slurm_standby.is_running(job, self._restarts):
                return EXIT_INTERRUPTED
            time.sleep(JOB_INTERVAL)

    # Slurm's view of the job ------------------------------------------------------------------------------------------

    async def _watch_job(self) -> None:
        """Query the nodes and the drained nodes of the job, and keep a standby, until the task is cancelled."""
        next_drain_query = 0.0
        while True:
            was_woken = self._wakeup.is_set()
            self._wakeup.clear()
            current_time = time.monotonic()
            await self._query_job()
            if was_woken or current_time >= next_drain_query:
                next_drain_query = current_time + DRAIN_INTERVAL
                await self._query_drains()
            if self._standby_task is None or self._standby_task.done():
                self._standby_task = asyncio.get_running_loop().create_task(self._keep_standby())
                log_failure(self._standby_task, "the start of a standby driver", log)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(JOB_INTERVAL):
                    await self._wakeup.wait()

    async def _query_job(self) -> None:
        """Update the nodes of the job. Without an answer about this job nothing changes."""
        job = slurm_standby.parse_fields(await _run_command("scontrol", "show", "job", self._job_id, "--oneliner"))
        if job.get("JobId") != self._job_id:
            return
        if int(job.get("Restarts") or 0) > self._restarts:
            self.withdrawal_reason = f"Slurm has removed job {self._job_id} from its nodes and starts it again"
        elif job.get("JobState") == "RUNNING":
            names = await _run_command("scontrol", "show", "hostnames", job["NodeList"])
            if names:
                self.set_removed_nodes(set(self.list_machines()) - set(names.split()))

    async def _query_drains(self) -> None:
        """Update the nodes that Slurm drains, with the reasons. Without an answer nothing changes."""
        nodes = ",".join(self.list_machines())
        output = await _run_command(
            "sinfo", "--noheader", "--Node", "--states=drain", f"--nodes={nodes}", "--format=%N %E"
        )
        if output is None:
            return
        drained = {}
        for line in output.splitlines():
            name, _, reason = line.strip().partition(" ")
            drained[name] = reason or "no reason given"
        self.drained = drained

    # the standby of the driver ----------------------------------------------------------------------------------------

    async def _keep_standby(self) -> None:
        """Keep a standby on another node, which continues the job if Slurm removes this node."""
        if self._standby_node and self._standby_node not in self.removed_nodes and self._is_standby_alive():
            return
        unsuitable = self.removed_nodes | self.drained.keys() | {self._own_node}
        candidates = [name for name in self.list_machines() if name not in unsuitable]
        current_time = time.monotonic()
        if not candidates or not self._own_node or current_time - self._standby_attempted_at < RETRY_SECONDS:
            return
        self._standby_attempted_at = current_time
        name = candidates[-1]
        standby_id = secrets.token_hex(4)
        try:
            # A standby whose number differs from the file's was replaced, and ends.
            standby = json.dumps({"number": standby_id, "node": name})
            write_atomically(driver_folder(self.run) / slurm_standby.STANDBY_FILE, standby)
        except OSError as error:
            self._report("driver", f"no standby for the driver: {error}")
            return
        if await self._start_standby(name, standby_id):
            self._standby_node = name
            self._standby_mtime = 0
            self._standby_changed_at = current_time
        else:
            self._standby_node = ""
            self._report("driver", f"{name}: no standby for the driver started there; the start is repeated")

    async def _start_standby(self, name: str, standby_id: str) -> bool:
        """Start a standby on a node; return True once it has reported that it is ready."""
        program = module_command(_STANDBY_MODULE, str(self.run), standby_id, self._own_node)
        process = await asyncio.create_subprocess_exec(
            *self.make_command(Host(name, name), program, "standby"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        line = b""
        try:
            async with asyncio.timeout(START_TIMEOUT):
                assert process.stdout is not None
                line = await process.stdout.readline()
        except TimeoutError:
            pass
        finally:
            kill_command(process)  # As for agents, no srun may wait when Slurm ends the job.
            await process.communicate()
        return line.decode(errors="replace").strip() == slurm_standby.READY

    def _is_standby_alive(self) -> bool:
        """Return True if the standby has touched its file within STANDBY_SILENCE."""
        current_time = time.monotonic()
        with contextlib.suppress(OSError):
            mtime = (driver_folder(self.run) / slurm_standby.STANDBY_FILE).stat().st_mtime_ns
            if mtime != self._standby_mtime:
                self._standby_mtime = mtime
                self._standby_changed_at = current_time
        return current_time - self._standby_changed_at < STANDBY_SILENCE


def count_gpus_per_node(config: Config) -> int:
    """Return the number of GPUs per node: SLURM_GPUS_ON_NODE in an allocation, else parallel.gpus_per_host."""
    if config.train.device == "cpu":
        return 0
    if _JOB_VARIABLE in os.environ:
        return int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    return int(os.environ.get("SLURM_GPUS_ON_NODE") or count_configured_gpus(config))


def expand_counts(text: str) -> list[int]:
    """Return [4, 4, 8] for 4(x2),8, the form of SLURM_JOB_CPUS_PER_NODE."""
    counts: list[int] = []
    for group in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group)
        if match is not None:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _check_allocation() -> str:
    """Return the job's id. Raises ConfigError outside of an allocation."""
    missing = [name for name in ("srun", "scontrol", "squeue") if shutil.which(name) is None]
    if missing:
        raise ConfigError(f"cluster slurm needs Slurm's commands on this machine: {', '.join(missing)} not found")
    if not os.environ.get(_JOB_VARIABLE) or not os.environ.get("SLURM_JOB_NODELIST"):
        raise ConfigError(
            "cluster slurm runs within an allocation: `megascale launch ... --cluster slurm --dry-run > job.sbatch`, "
            "look at it, then `sbatch job.sbatch`"
        )
    return os.environ[_JOB_VARIABLE]


def _report_ignored_tasks() -> None:
    """Print a note if sbatch or salloc was called with another number of tasks per node than the batch script has."""
    tasks = os.environ.get("SLURM_NTASKS_PER_NODE", "1")
    if tasks != "1":
        print_error(
            f"note: --ntasks-per-node={tasks} of this allocation has no effect, because one agent per node starts all "
            "ranks of the node; parallel.gpus_per_host sets their number"
        )


def _expand_nodelist(nodelist: str) -> list[str]:
    """Return [n1, n2, n3] for n[1-3]."""
    result = subprocess.run(["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True)
    if result.returncode:
        raise ConfigError(f"`scontrol show hostnames {nodelist}` failed: {result.stderr.strip()}")
    return result.stdout.split()


def _find_own_address() -> str:
    """Return the address at which Slurm reaches this node, which also works for the other nodes."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    result = subprocess.run(["scontrol", "show", "node", name, "--oneliner"], capture_output=True, text=True)
    match = re.search(r"\bNodeAddr=(\S+)", result.stdout)
    try:
        if match:
            name = match[1]
        return socket.gethostbyname(name)
    except OSError:
        return "0.0.0.0"


async def _run_command(*command: str) -> str | None:
    """Return the output of a command of Slurm, None if it fails or does not answer in time."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(slurm_standby.ANSWER_TIMEOUT):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        return None
    return output.decode(errors="replace") if process.returncode == 0 else None


CLUSTERS.register("slurm", SlurmCluster)
