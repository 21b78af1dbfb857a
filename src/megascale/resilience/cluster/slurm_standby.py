"""A standby for the driver of a Slurm job, on another node of the allocation: it goes on once Slurm has taken the
driver's node.

With --no-kill Slurm only takes a node away that fails, the batch node too. The driver is gone with it, or is killed
when that node's slurmd comes back, and nothing would end the job, which stands as RUNNING. The standby then runs the
job's own batch script on its node, as Slurm would after a requeue: the driver there takes the job over while training
goes on. It also does what Slurm does for a batch script: it signals before the time limit, and ends the job with the
script's exit code.

    python -m megascale.resilience.cluster.slurm_standby RUN NUMBER NODE

NUMBER is what RUN/driver/standby.json has while this is the current standby, NODE the driver's. It says "ready" and
needs nobody from then on.
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

from megascale.core.python_command import module_command
from megascale.errors import DataError
from megascale.resilience.cluster.slurm_script import BEFORE
from megascale.resilience.protocol.contact import ENDED_EPOCH, driver_folder, read_contact

CURRENT, VERDICT = "standby.json", "slurm-verdict.json"
READY = "ready"
_LOOK = 2.0  # seconds between questions to Slurm
_ANSWER = 10.0  # seconds that it gets to answer
_LEAVE = 6.0  # seconds for a batch script that lives on the lost node to end the job itself


def main(words: Sequence[str]) -> int:
    """Stand by until there is no need, or take over and see the job to its end."""
    run, number, driver = Path(words[0]), words[1], words[2]
    job, own = os.environ["SLURM_JOB_ID"], os.environ["SLURMD_NODENAME"]
    starts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    print(READY, flush=True)
    while (current := read_current(run)).get("number") == number:
        about = ask_about(job)
        nodes = nodes_of(about)
        if about and not runs(about, starts):
            return 0
        if nodes and own not in nodes:
            return 0
        if nodes and driver not in nodes:
            return take_over(run, job, starts, f"Slurm has taken {driver}, the driver's node: {own} goes on")
        with contextlib.suppress(OSError):
            os.utime(driver_folder(run) / CURRENT)
        time.sleep(_LOOK)
    print(f"standby {number} was followed by {current}", flush=True)
    return 0


def take_over(run: Path, job: str, starts: int, why: str) -> int:
    """Run the batch script here and end the job as Slurm does when its script ends; the script's exit code."""
    # Slurm tells every process of a job to end; what then ends the job is the script's end. (No child inherits this.)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    about = ask_about(job)
    text = subprocess.run(["scontrol", "write", "batch_script", job, "-"], capture_output=True, text=True).stdout
    script = driver_folder(run) / "standby.sbatch"
    script.write_text(text)
    environment = dict(os.environ)
    with contextlib.suppress(DataError):
        environment[ENDED_EPOCH] = str(read_contact(run).epoch)
    out = about.get("StdOut", "")
    with open(out if out and "%" not in out else f"{run}.slurm-{job}.out", "ab") as said:
        with contextlib.suppress(OSError):  # on a full disk
            said.write(f"standby: {why}\n".encode())
            said.flush()
        process = subprocess.Popen(
            ["bash", str(script)], stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment
        )
    before, told = seconds_before(text), False
    while True:
        try:
            code = process.wait(_LOOK)
            break
        except subprocess.TimeoutExpired:
            if not told and seconds_left(ask_about(job), time.time()) < before:
                process.send_signal(signal.SIGUSR1)
                told = True
    code = code if code >= 0 else 128 - code
    _end(run, job, starts, code)
    return code


def _end(run: Path, job: str, starts: int, code: int) -> None:
    """Have Slurm end the job with a script's exit code: by what is left of it on the lost node, else by its library,
    else by scancel."""
    file = driver_folder(run) / VERDICT
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"job": job, "starts": starts, "code": code}))
    os.replace(temporary, file)
    deadline = time.monotonic() + _LEAVE
    while time.monotonic() < deadline:
        about = ask_about(job)
        if about and not runs(about, starts):
            return
        time.sleep(_LOOK / 2)
    complete = module_command("megascale.resilience.cluster.slurm_completion", job, str(code))
    if subprocess.run(complete).returncode:
        subprocess.run(["scancel", job])


def verdict_of(run: Path, job: str, starts: int) -> int | None:
    """The exit code of the script that a standby ran, once it has ended."""
    found = _read(driver_folder(run) / VERDICT)
    if (found.get("job"), found.get("starts")) != (job, starts):
        return None
    code = found.get("code")
    return code if isinstance(code, int) else None


def read_current(run: Path) -> dict[str, object]:
    """What the newest driver has written of its standby: its number and node."""
    return _read(driver_folder(run) / CURRENT)


def _read(file: Path) -> dict[str, object]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# Slurm ----------------------------------------------------------------------------------------------------------------


def fields(text: str | None) -> dict[str, str]:
    """Return the fields of what `scontrol show job --oneliner` says; values such as paths may hold blanks."""
    return dict(re.findall(r"(\w+)=(.*?)(?=\s+[\w:/]+=|\s*$)", text, re.MULTILINE)) if text else {}


def ask_about(job: str) -> dict[str, str]:
    """What Slurm says of a job; nothing where it does not answer."""
    found = fields(_said("scontrol", "show", "job", job, "--oneliner"))
    return found if found.get("JobId") == job else {}


def runs(about: Mapping[str, str], starts: int) -> bool:
    """Whether a job is at work, and was not started anew."""
    return about.get("JobState") == "RUNNING" and int(about.get("Restarts") or 0) <= starts


def nodes_of(about: Mapping[str, str]) -> list[str]:
    """The nodes that a running job has now; none where that is not known."""
    if about.get("JobState") != "RUNNING" or not about.get("NodeList"):
        return []
    return (_said("scontrol", "show", "hostnames", about["NodeList"]) or "").split()


def seconds_left(about: Mapping[str, str], now: float) -> float:
    """Until a running job's time limit; of one that is ending Slurm says when that began."""
    if about.get("JobState") != "RUNNING":
        return float("inf")
    try:
        return time.mktime(time.strptime(about.get("EndTime", ""), "%Y-%m-%dT%H:%M:%S")) - now
    except (ValueError, OverflowError):
        return float("inf")


def seconds_before(script: str) -> int:
    """How long before the time limit a batch script wants its signal."""
    found = re.findall(r"^#SBATCH .*--signal[= ]B:USR1@(\d+)", script, re.MULTILINE)
    return int(found[-1]) if found else BEFORE


def _said(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
