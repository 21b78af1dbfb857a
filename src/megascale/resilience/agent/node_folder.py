"""The folder of a node on a machine that shares no run folder, and the processes of the node.

FOLDER/given.json, token    the job's description and its secret (protocol/job_description.py)
FOLDER/epoch                the newest epoch that was obeyed
FOLDER/agent.json           the agent's process
FOLDER/runs/NAME            the folder that the trainers write to
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

from megascale.checkpoint.background.service_protocol import locate_service, private_folder
from megascale.errors import ConfigError
from megascale.resilience.process_birth import read_birth_time
from megascale.resilience.protocol.job_description import JobDescription, write_job
from megascale.services.host_service import ServiceLocation, make_private_folder

PROCESS_FILE = "agent.json"
_KILL_TIMEOUT = 5.0  # seconds for a killed process to disappear


def default_folder(job: str, node: str) -> Path:
    """Return the default folder of a node, ~/.megascale/JOB/NODE."""
    return Path.home() / ".megascale" / job / node


def prepare_node_folder(folder: Path, job: JobDescription, token: bytes, marker: str) -> JobDescription:
    """Make a node's folder, write the job into it and return the description as written.

    Args:
        folder: folder with the name of the node; only this user may enter it.
        job: description by the driver; the trainers will write to FOLDER/runs/JOB.
        marker: file in `job.checkpoints` that the driver has made, "" if checkpoints have another location.

    Raises:
        ConfigError: the folder of checkpoints is not the driver's, or a newer driver has this node.
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
            f"a driver of epoch {epoch} has this node, this one is of epoch {job.epoch}: it has been replaced; end it"
        )
    job = job.with_own_folder(folder / "runs" / job.name, Path(job.checkpoints) if job.checkpoints else None)
    write_job(folder, job, token)
    return job


def read_epoch(folder: Path) -> int:
    """Return the newest epoch that was obeyed in a folder, 0 if there is none."""
    try:
        return int((folder / "epoch").read_text())
    except (OSError, ValueError):
        return 0


def write_epoch(folder: Path, epoch: int) -> None:
    """Write the newest epoch atomically."""
    _replace_text(folder / "epoch", str(epoch))


def record_agent_process(folder: Path, pid: int) -> None:
    """Write the process id of the node's agent."""
    _replace_text(folder / PROCESS_FILE, json.dumps({"pid": pid, "born": read_birth_time(pid)}))


def find_agent(folder: Path) -> int:
    """Return the process id of the node's living agent, 0 if there is none."""
    try:
        state = json.loads((folder / PROCESS_FILE).read_text())
        pid = int(state["pid"])
        return pid if read_birth_time(pid) == state["born"] != 0 else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def end_agent(folder: Path) -> bool:
    """Kill the node's agent, and with it its fork server and trainers; return True once it has ended."""
    deadline = time.monotonic() + _KILL_TIMEOUT
    while pid := find_agent(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def end_checkpoint_services(run: Path, node: str) -> list[int]:
    """Kill a node's checkpoint services on this host, which outlive trainers and agents; return their process ids."""
    location = locate_service(private_folder(run, node))
    folder = os.fsencode(location.folder)
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder in (process / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
                pids.append(int(process.name))
    if pids:
        _remove_service_files(location)
    return pids


def _remove_service_files(location: ServiceLocation) -> None:
    """Remove the files of a killed service and its folder, unless another service has started there meanwhile."""
    deadline = time.monotonic() + _KILL_TIMEOUT
    while location.lock_path.exists() and time.monotonic() < deadline:
        lock = location.acquire_lock(make=False)
        if lock is not None:
            location.release(lock)
            return
        time.sleep(0.01)  # the killed process still holds it
    with contextlib.suppress(OSError):
        location.folder.rmdir()


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
