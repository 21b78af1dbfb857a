"""Folder of a node on a machine without the shared run folder, and the processes of the node.

FOLDER/given.json, token    description and secret of the job (protocol/job_description.py)
FOLDER/epoch                newest epoch of a driver that the agent has followed
FOLDER/agent.json           process of the agent
FOLDER/ranks.json           processes of the agent's ranks
FOLDER/runs/NAME            folder to which the trainers write
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from megascale.checkpoint.background.service_protocol import SERVICE_MODULE, locate_service, private_folder
from megascale.core.atomic_files import write_atomically
from megascale.errors import ConfigError, DataError
from megascale.resilience.agent.leftover_processes import end_leftover_processes
from megascale.resilience.process_birth import read_birth_time
from megascale.resilience.protocol.job_description import JobDescription, read_job, write_job
from megascale.services.service_location import ServiceLocation, make_private_folder

PROCESS_FILE = "agent.json"
_RANKS_FILE = "ranks.json"
_KILL_TIMEOUT = 5.0  # seconds within which a killed process must end
_POLL_SECONDS = 0.01  # between checks of a killed process


def get_default_folder(job: str, node: str) -> Path:
    """Return the default folder of a node, ~/.megascale/JOB/NODE."""
    return Path.home() / ".megascale" / job / node


def prepare_node_folder(folder: Path, job: JobDescription, token: bytes, marker: str) -> JobDescription:
    """Make the folder of a node, write the job description into it, and return the written description.

    Args:
        folder: folder of the node, which only this user may enter.
        job: description by the driver. The written description has FOLDER/runs/JOB as the run folder.
        token: secret of the job.
        marker: name of a file that the driver has made in `job.checkpoints`, by which the node recognises the folder.

    Raises:
        ConfigError: `job.checkpoints` is not the driver's folder, or a newer driver controls this node.
    """
    if job.checkpoints and not (Path(job.checkpoints) / marker).is_file():
        raise ConfigError(
            f"{job.checkpoints} on this machine is not the driver's folder of checkpoints (no file {marker}): "
            "mount that folder from shared storage on all machines, or set --checkpoint.location to a shared folder "
            "or URL"
        )
    folder.parent.mkdir(0o700, parents=True, exist_ok=True)
    make_private_folder(folder)
    epoch = read_epoch(folder)
    if job.epoch < epoch:
        raise ConfigError(
            f"a driver of epoch {epoch} controls this node, and this driver of epoch {job.epoch} has been replaced; "
            "end this driver"
        )
    job = job.with_own_folder(folder / "runs" / job.name, Path(job.checkpoints) if job.checkpoints else None)
    write_job(folder, job, token)
    return job


def read_epoch(folder: Path) -> int:
    """Return the newest epoch of a driver that the agent has followed, or 0."""
    try:
        return int((folder / "epoch").read_text())
    except (OSError, ValueError):
        return 0


def write_epoch(folder: Path, epoch: int) -> None:
    """Write the newest epoch atomically."""
    write_atomically(folder / "epoch", str(epoch))


def record_agent_process(folder: Path, pid: int) -> None:
    """Write the process id of the node's agent."""
    write_atomically(folder / PROCESS_FILE, json.dumps({"pid": pid, "born": read_birth_time(pid)}))


def find_agent(folder: Path) -> int:
    """Return the process id of the node's running agent, or 0 if none runs or its record cannot be read."""
    try:
        return read_agent_process(folder)
    except OSError:
        return 0


def read_agent_process(folder: Path) -> int:
    """Return the process id of the node's running agent, or 0 if none runs.

    Raises OSError if there is a record that cannot be read, as on a failed disk.
    """
    try:
        state = json.loads((folder / PROCESS_FILE).read_bytes())
        pid = int(state["pid"])
        # Another process may have the id of an agent that has ended.
        is_running = state["born"] != 0 and read_birth_time(pid) == state["born"]
        return pid if is_running else 0
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def record_rank_processes(folder: Path, births: Mapping[int, int]) -> None:
    """Write the birth times of the ranks' processes by process id, for an agent that starts after this one is killed.

    Raises OSError if the disk is full.
    """
    write_atomically(folder / _RANKS_FILE, json.dumps(births))


def read_rank_processes(folder: Path) -> dict[int, int]:
    """Return the birth times of the processes of the previous agent's ranks by process id, as far as they are known."""
    try:
        record = json.loads((folder / _RANKS_FILE).read_text())
        return {int(pid): int(birth) for pid, birth in record.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def end_agent(folder: Path) -> bool:
    """Kill the node's agent, with its fork server and trainers. Return False if it does not end in time.

    The processes that ranks of a foreign trainer have started are killed too. Raises OSError if the record of the agent
    cannot be read, since an agent may run.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT
    while pid := read_agent_process(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(DataError):  # a folder without a job has no ranks
        job = read_job(folder)
        end_leftover_processes(Path(job.run), job.name, folder.name)
    return True


def end_checkpoint_services(run: Path, node: str) -> list[int]:
    """Kill the checkpoint services of a node on this host, and return their process ids.

    A service of this user runs the module, and has its folder as an argument of its command line. Other programs, such
    as `ls FOLDER`, have only the latter.
    """
    location = locate_service(private_folder(run, node))
    markers = {os.fsencode(location.folder), SERVICE_MODULE.encode()}
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_permitted = process.stat().st_uid == os.geteuid()
            if is_permitted and markers <= set((process / "cmdline").read_bytes().split(b"\0")):
                os.kill(int(process.name), signal.SIGKILL)
                pids.append(int(process.name))
    if pids:
        _remove_service_files(location)
    return pids


def _remove_service_files(location: ServiceLocation) -> None:
    """Remove the files and the folder of a killed service, unless another service has started there."""
    deadline = time.monotonic() + _KILL_TIMEOUT
    while location.lock_path.exists() and time.monotonic() < deadline:
        lock = location.acquire_lock(make=False)
        if lock is not None:
            location.release(lock)
            return
        time.sleep(_POLL_SECONDS)  # the killed process still has the lock
    with contextlib.suppress(OSError):
        location.folder.rmdir()
