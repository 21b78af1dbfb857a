"""A node's own folder on a machine that shares no run folder: what its agent is given, and which process that is.

FOLDER/given.json, token    the job, and its secret (protocol/given.py)
FOLDER/epoch                the newest driver that was obeyed here
FOLDER/agent.json           the agent's process
FOLDER/runs/NAME            where its trainers write
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from megascale.errors import ConfigError
from megascale.resilience.process_birth import born
from megascale.resilience.protocol.given import JobDescription, write_job
from megascale.services.private_folder import make_private

PROCESS = "agent.json"
_GONE = 5.0  # seconds for a killed process to be gone


def default_folder(job: str, node: str) -> Path:
    """Where a node keeps its things unless it is told otherwise: ~/.megascale/JOB/NODE."""
    return Path.home() / ".megascale" / job / node


def prepare(folder: Path, job: JobDescription, token: bytes, marker: str) -> JobDescription:
    """Make a node's folder and give it the job; what was given.

    Args:
        folder: named as the node; only this user may enter it from now on.
        job: as the driver describes it; trainers will write to FOLDER/runs/JOB.
        marker: a file in `job.checkpoints` that the driver has made, "" where checkpoints are elsewhere.

    Raises ConfigError where the checkpoints' folder is not the driver's, or a newer driver has this node.
    """
    if job.checkpoints and not (Path(job.checkpoints) / marker).is_file():
        raise ConfigError(
            f"{job.checkpoints} on this machine is not the driver's folder of checkpoints (its file {marker} is not "
            "there): have all machines mount it from shared storage, or set --checkpoint.location to a folder or URL "
            "that they share"
        )
    folder.parent.mkdir(0o700, parents=True, exist_ok=True)
    make_private(folder)
    known = known_epoch(folder)
    if job.epoch < known:
        raise ConfigError(
            f"a driver of epoch {known} has this node, this one is of epoch {job.epoch}: it has been replaced; end it"
        )
    job = job.on(folder / "runs" / job.name, Path(job.checkpoints) if job.checkpoints else None)
    write_job(folder, job, token)
    return job


def known_epoch(folder: Path) -> int:
    """The newest driver's that has been here, 0: none."""
    try:
        return int((folder / "epoch").read_text())
    except (OSError, ValueError):
        return 0


def remember(folder: Path, pid: int) -> None:
    """Write down which process the node's agent is."""
    temporary = folder / f"{PROCESS}.tmp"
    temporary.write_text(json.dumps({"pid": pid, "born": born(pid)}))
    os.replace(temporary, folder / PROCESS)


def agent_process(folder: Path) -> int:
    """Process id of the node's living agent, 0: none lives."""
    try:
        state = json.loads((folder / PROCESS).read_text())
        pid = int(state["pid"])
        return pid if born(pid) == state["born"] != 0 else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def end_agent(folder: Path) -> bool:
    """SIGKILL to the node's agent, with which its fork server and trainers end; whether none lives any more."""
    deadline = time.monotonic() + _GONE
    while pid := agent_process(folder):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
