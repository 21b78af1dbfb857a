"""A standby for the driver of a Slurm job on another node of the allocation.

With --no-kill Slurm removes a failed node from the job and ends nothing else, even if it is the batch node. The driver
has then failed with its node, or is killed when the node's slurmd returns, and the job would stay RUNNING without end.
The standby runs the job's batch script on its own node, as Slurm would after a requeue. The driver of this script takes
the job over while training continues. Like Slurm, the standby sends the signal before the time limit, and ends the job
with the script's exit code.

    python -m megascale.resilience.cluster.slurm_standby RUN ID NODE

ID is the `number` in RUN/driver/standby.json while this standby is the current one, and NODE is the driver's node. The
standby prints "ready" and needs no other process from then on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megascale.core.atomic_files import write_atomically
from megascale.core.python_process import module_command
from megascale.errors import DataError
from megascale.resilience.cluster.slurm_script import SIGNAL_SECONDS
from megascale.resilience.protocol.contact import ENDED_EPOCH, driver_folder, read_contact

STANDBY_FILE = "standby.json"  # number and node of the current standby, which touches the file as a sign of life
EXIT_CODE_FILE = "slurm-verdict.json"  # exit code of the script that a standby ran
READY = "ready"  # line that a standby prints
ANSWER_TIMEOUT = 10.0  # seconds for a command of Slurm
_POLL_INTERVAL = 2.0  # seconds between queries of Slurm
_END_TIMEOUT = 6.0  # seconds in which a batch script that still runs on the removed node may end the job


def main(arguments: Sequence[str]) -> int:
    """Stand by until the job ends or another standby is current, or take over the job; return the exit code."""
    run = Path(arguments[0])
    standby_id = arguments[1]
    driver_node = arguments[2]
    job_id = os.environ["SLURM_JOB_ID"]
    own_node = os.environ["SLURMD_NODENAME"]
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)  # how often Slurm had started the job again
    print(READY, flush=True)
    while True:
        current = _read_json(driver_folder(run) / STANDBY_FILE)
        if current.get("number") != standby_id:
            break
        job = query_job(job_id)
        if job and not is_running(job, restarts):
            return 0
        nodes = list_nodes(job)
        if nodes and own_node not in nodes:
            return 0
        if nodes and driver_node not in nodes:
            message = f"Slurm has removed {driver_node}, the driver's node: {own_node} takes over"
            return take_over(run, job_id, restarts, message)
        with contextlib.suppress(OSError):
            os.utime(driver_folder(run) / STANDBY_FILE)
        time.sleep(_POLL_INTERVAL)
    print(f"standby {standby_id} was replaced by {current}", flush=True)
    return 0


def take_over(run: Path, job_id: str, restarts: int, message: str) -> int:
    """Run the batch script on this node, and end the job as Slurm does; return the script's exit code."""
    # Slurm sends SIGTERM to every process of a job that it ends, but this process must wait for the end of the script.
    # Children do not inherit the handler.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    job = query_job(job_id)
    text = subprocess.run(["scontrol", "write", "batch_script", job_id, "-"], capture_output=True, text=True).stdout
    script = driver_folder(run) / "standby.sbatch"
    script.write_text(text)
    environment = dict(os.environ)
    # The new driver need not wait for the lease of the driver on the removed node.
    with contextlib.suppress(DataError):
        environment[ENDED_EPOCH] = str(read_contact(run).epoch)
    output = job.get("StdOut", "")
    if not output or "%" in output:  # Slurm has not replaced a pattern such as %j.
        output = f"{run}.slurm-{job_id}.out"
    with open(output, "ab") as log:
        with contextlib.suppress(OSError):  # for example on a full disk
            log.write(f"standby: {message}\n".encode())
            log.flush()
        process = subprocess.Popen(
            ["bash", str(script)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
    code = _wait_for_script(process, job_id, parse_signal_seconds(text))
    _end_job(run, job_id, restarts, code)
    return code


def _wait_for_script(process: subprocess.Popen[bytes], job_id: str, seconds: int) -> int:
    """Return the exit code of the batch script, which gets SIGUSR1 `seconds` before the time limit."""
    was_signalled = False
    while True:
        try:
            code = process.wait(_POLL_INTERVAL)
        except subprocess.TimeoutExpired:
            if not was_signalled and compute_seconds_left(query_job(job_id), time.time()) < seconds:
                process.send_signal(signal.SIGUSR1)
                was_signalled = True
            continue
        if code < 0:
            return 128 - code  # the exit code that a shell has for a process that a signal ended
        return code


def _end_job(run: Path, job_id: str, restarts: int, code: int) -> None:
    """End the job with a script's exit code.

    If the batch script on the removed node still runs, it ends the job. Otherwise Slurm's library does, or scancel.
    """
    ending = json.dumps({"job": job_id, "starts": restarts, "code": code})
    write_atomically(driver_folder(run) / EXIT_CODE_FILE, ending)
    deadline = time.monotonic() + _END_TIMEOUT
    while time.monotonic() < deadline:
        job = query_job(job_id)
        if job and not is_running(job, restarts):
            return
        time.sleep(_POLL_INTERVAL / 2)  # twice as often, since the wait is short
    complete = module_command("megascale.resilience.cluster.slurm_completion", job_id, str(code))
    if subprocess.run(complete).returncode:
        subprocess.run(["scancel", job_id])


def read_exit_code(run: Path, job_id: str, restarts: int) -> int | None:
    """Return the exit code of the script that a standby ran, None before its end."""
    record = _read_json(driver_folder(run) / EXIT_CODE_FILE)
    if record.get("job") != job_id or record.get("starts") != restarts:
        return None
    code = record.get("code")
    return code if isinstance(code, int) else None


def _read_json(file: Path) -> dict[str, object]:
    """Return the object in a JSON file, {} for a missing or malformed file."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# Slurm ----------------------------------------------------------------------------------------------------------------


def parse_fields(text: str | None) -> dict[str, str]:
    """Return the fields of `scontrol show job --oneliner` by name. Values such as paths may have blanks."""
    if not text:
        return {}
    return dict(re.findall(r"(\w+)=(.*?)(?=\s+[\w:/]+=|\s*$)", text, re.MULTILINE))


def query_job(job_id: str) -> dict[str, str]:
    """Return Slurm's fields of a job, {} without an answer."""
    fields = parse_fields(_run_command("scontrol", "show", "job", job_id, "--oneliner"))
    return fields if fields.get("JobId") == job_id else {}


def is_running(job: Mapping[str, str], restarts: int) -> bool:
    """Return True if a job runs, and Slurm has started it again at most `restarts` times."""
    return job.get("JobState") == "RUNNING" and int(job.get("Restarts") or 0) <= restarts


def list_nodes(job: Mapping[str, str]) -> list[str]:
    """Return the nodes of a running job, [] if they are unknown."""
    if job.get("JobState") != "RUNNING" or not job.get("NodeList"):
        return []
    return (_run_command("scontrol", "show", "hostnames", job["NodeList"]) or "").split()


def compute_seconds_left(job: Mapping[str, str], current_time: float) -> float:
    """Return the seconds until a running job's time limit, infinity if it is unknown."""
    if job.get("JobState") != "RUNNING":
        return float("inf")  # For a job that is ending, EndTime is not the time limit.
    try:
        return time.mktime(time.strptime(job.get("EndTime", ""), "%Y-%m-%dT%H:%M:%S")) - current_time
    except (ValueError, OverflowError):
        return float("inf")


def parse_signal_seconds(script: str) -> int:
    """Return how many seconds before the time limit a batch script requests its signal."""
    values = re.findall(r"^#SBATCH .*--signal[= ]B:USR1@(\d+)", script, re.MULTILINE)
    return int(values[-1]) if values else SIGNAL_SECONDS


def _run_command(*command: str) -> str | None:
    """Return the output of a command of Slurm, None if it fails or does not answer in time."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
