"""A standby for the driver of a Slurm job on another node of the allocation.

With --no-kill Slurm only removes a node that fails from the job, the batch node too. The driver has then failed with
its node, or is killed when that node's slurmd returns, and the job would stay RUNNING without end. The standby runs the
job's own batch script on its node, as Slurm would after a requeue, and the driver in it takes the job over while
training continues. The standby also does what Slurm does for a batch script: it sends the signal before the time
limit, and ends the job with the script's exit code.

    python -m megascale.resilience.cluster.slurm_standby RUN NUMBER NODE

NUMBER is the number in RUN/driver/standby.json while this is the current standby, and NODE is the driver's node. The
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

from megascale.core.python_process import module_command
from megascale.errors import DataError
from megascale.resilience.cluster.slurm_script import SIGNAL_SECONDS
from megascale.resilience.protocol.contact import ENDED_EPOCH, driver_folder, read_contact

CURRENT = "standby.json"
VERDICT = "slurm-verdict.json"
READY = "ready"
ANSWER_TIMEOUT = 10.0  # seconds for a command of Slurm
_POLL_INTERVAL = 2.0  # seconds between queries of Slurm
_END_TIMEOUT = 6.0  # seconds for the batch script on the removed node to end the job itself


def main(arguments: Sequence[str]) -> int:
    """Stand by until there is no need, or take over and run the job to its end; return the exit code."""
    run = Path(arguments[0])
    number = arguments[1]
    driver_node = arguments[2]
    job_id = os.environ["SLURM_JOB_ID"]
    own_node = os.environ["SLURMD_NODENAME"]
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    print(READY, flush=True)
    while (current := _read_json(driver_folder(run) / CURRENT)).get("number") == number:
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
            os.utime(driver_folder(run) / CURRENT)
        time.sleep(_POLL_INTERVAL)
    print(f"standby {number} was replaced by {current}", flush=True)
    return 0


def take_over(run: Path, job_id: str, restarts: int, message: str) -> int:
    """Run the batch script here and end the job like Slurm does after a script; return the script's exit code."""
    # Slurm sends SIGTERM to every process of a job that it ends; this one must wait for the script's end. Children do
    # not inherit the handler.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    job = query_job(job_id)
    text = subprocess.run(["scontrol", "write", "batch_script", job_id, "-"], capture_output=True, text=True).stdout
    script = driver_folder(run) / "standby.sbatch"
    script.write_text(text)
    environment = dict(os.environ)
    with contextlib.suppress(DataError):
        environment[ENDED_EPOCH] = str(read_contact(run).epoch)
    output = job.get("StdOut", "")
    if not output or "%" in output:
        output = f"{run}.slurm-{job_id}.out"
    with open(output, "ab") as log:
        with contextlib.suppress(OSError):  # for example on a full disk
            log.write(f"standby: {message}\n".encode())
            log.flush()
        process = subprocess.Popen(
            ["bash", str(script)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
    code = _wait_for_script(process, job_id, signal_seconds(text))
    _end_job(run, job_id, restarts, code)
    return code


def _wait_for_script(process: subprocess.Popen[bytes], job_id: str, seconds: int) -> int:
    """Return the exit code of the batch script, which gets SIGUSR1 `seconds` before the time limit."""
    was_signalled = False
    while True:
        try:
            code = process.wait(_POLL_INTERVAL)
        except subprocess.TimeoutExpired:
            if not was_signalled and seconds_left(query_job(job_id), time.time()) < seconds:
                process.send_signal(signal.SIGUSR1)
                was_signalled = True
            continue
        return code if code >= 0 else 128 - code


def _end_job(run: Path, job_id: str, restarts: int, code: int) -> None:
    """End the job with a script's exit code.

    The batch script on the removed node does so if it still runs; otherwise Slurm's library does, otherwise scancel.
    """
    file = driver_folder(run) / VERDICT
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"job": job_id, "starts": restarts, "code": code}))
    os.replace(temporary, file)
    deadline = time.monotonic() + _END_TIMEOUT
    while time.monotonic() < deadline:
        job = query_job(job_id)
        if job and not is_running(job, restarts):
            return
        time.sleep(_POLL_INTERVAL / 2)
    complete = module_command("megascale.resilience.cluster.slurm_completion", job_id, str(code))
    if subprocess.run(complete).returncode:
        subprocess.run(["scancel", job_id])


def read_exit_code(run: Path, job_id: str, restarts: int) -> int | None:
    """Return the exit code of the script that a standby ran, None before its end."""
    verdict = _read_json(driver_folder(run) / VERDICT)
    if verdict.get("job") != job_id or verdict.get("starts") != restarts:
        return None
    code = verdict.get("code")
    return code if isinstance(code, int) else None


def _read_json(file: Path) -> dict[str, object]:
    """Return the object in a JSON file, {} if there is none."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# Slurm ----------------------------------------------------------------------------------------------------------------


def parse_fields(text: str | None) -> dict[str, str]:
    """Return the fields of `scontrol show job --oneliner`; values such as paths may hold blanks."""
    if not text:
        return {}
    return dict(re.findall(r"(\w+)=(.*?)(?=\s+[\w:/]+=|\s*$)", text, re.MULTILINE))


def query_job(job_id: str) -> dict[str, str]:
    """Return Slurm's fields of a job, {} without an answer."""
    fields = parse_fields(_run("scontrol", "show", "job", job_id, "--oneliner"))
    return fields if fields.get("JobId") == job_id else {}


def is_running(job: Mapping[str, str], restarts: int) -> bool:
    """Return True if a job runs and was not started again."""
    return job.get("JobState") == "RUNNING" and int(job.get("Restarts") or 0) <= restarts


def list_nodes(job: Mapping[str, str]) -> list[str]:
    """Return the nodes of a running job, [] if they are unknown."""
    if job.get("JobState") != "RUNNING" or not job.get("NodeList"):
        return []
    return (_run("scontrol", "show", "hostnames", job["NodeList"]) or "").split()


def seconds_left(job: Mapping[str, str], current_time: float) -> float:
    """Return the seconds until a running job's time limit, infinity if it is unknown."""
    if job.get("JobState") != "RUNNING":
        return float("inf")  # For a job that is ending, EndTime is the start of its end.
    try:
        return time.mktime(time.strptime(job.get("EndTime", ""), "%Y-%m-%dT%H:%M:%S")) - current_time
    except (ValueError, OverflowError):
        return float("inf")


def signal_seconds(script: str) -> int:
    """Return the seconds before the time limit at which a batch script requests its signal."""
    values = re.findall(r"^#SBATCH .*--signal[= ]B:USR1@(\d+)", script, re.MULTILINE)
    return int(values[-1]) if values else SIGNAL_SECONDS


def _run(*command: str) -> str | None:
    """Return the output of a command of Slurm, None if it fails or does not answer in time."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
