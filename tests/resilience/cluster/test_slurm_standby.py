"""The standby of a driver under Slurm: when it goes on, what it runs, and how it ends the job. Commands of Slurm's are
scripts here; a real slurmctld has its part in tests/slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale.config import Config, ResilienceConfig
from megascale.resilience.cluster import slurm_completion, slurm_standby
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.slurm import SlurmCluster
from megascale.resilience.protocol.contact import Contact, write_contact
from tests.conftest import POLL_INTERVAL

SCONTROL = """#!/bin/bash
cd "$(dirname "$0")" || exit 1
case "$*" in
    "show job 17 --oneliner") cat about; touch asked;;
    "show hostnames "*) tr , '\\n' <<< "$3";;
    "write batch_script 17 -") cat script;;
    *) exit 1;;
esac
"""
SCANCEL = """#!/bin/bash
cd "$(dirname "$0")" && echo "$@" >> cancelled && sed -i s/RUNNING/CANCELLED/ about
"""


class Slurm:
    """A job of three nodes, the driver on n1; the standby is on n2."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.run = folder, folder / "runs" / "job"
        (self.run / "driver").mkdir(parents=True)
        for name, text in (("scontrol", SCONTROL), ("scancel", SCANCEL), ("srun", SCANCEL), ("squeue", SCANCEL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n1,n2,n3")
        monkeypatch.setenv("SLURMD_NODENAME", "n2")
        self.has("n1,n2,n3")
        self.current("a")
        write_contact(self.run, Contact("job", 5, 1, ("n1", 1), ""))
        self.processes: list[subprocess.Popen[str]] = []

    def has(self, nodes: str, state: str = "RUNNING", more: str = "") -> None:
        details = f"JobId=17 JobName=job JobState={state} NodeList={nodes} StdOut={self.folder}/out {more}\n"
        (self.folder / "about.new").write_text(details)
        (self.folder / "about.new").replace(self.folder / "about")

    def current(self, number: str) -> None:
        (self.run / "driver" / slurm_standby.STANDBY_FILE).write_text(json.dumps({"number": number, "node": "n2"}))

    def script(self, text: str) -> None:
        (self.folder / "script").write_text(f"#!/bin/bash\ncd {self.folder}\n{text}\n")

    def stand_by(self) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-m", slurm_standby.__name__, str(self.run), "a", "n1"]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == f"{slurm_standby.READY}\n"
        return process

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 20.0
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(POLL_INTERVAL)

    def until_asked(self) -> None:
        """The standby has taken in what Slurm says now."""
        for _ in range(2):
            (self.folder / "asked").unlink(missing_ok=True)
            self.wait_for("asked")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_standby, "_POLL_INTERVAL", 0.05)
    result = Slurm(tmp_path, monkeypatch)
    yield result
    for process in result.processes:
        process.kill()
        process.communicate()


def test_it_runs_the_jobs_script_once_slurm_has_taken_the_drivers_node_and_ends_the_job(slurm):
    slurm.script('echo "epoch $MEGASCALE_ENDED_EPOCH"; exit 3')
    process = slurm.stand_by()
    slurm.has("n2,n3")
    assert process.wait(30) == 3
    output = (slurm.folder / "out").read_text()
    assert "Slurm has removed n1" in output
    assert "epoch 5" in output
    # A waiter on the lost node may end the job with the code. There was none, and there is no library here.
    assert slurm_standby.read_exit_code(slurm.run, "17", 0) == 3
    assert slurm_standby.read_exit_code(slurm.run, "18", 0) is None
    assert slurm_standby.read_exit_code(slurm.run, "17", 1) is None
    assert (slurm.folder / "cancelled").read_text() == "17\n"


@pytest.mark.parametrize("why", ["followed", "its own node", "over", "begun anew"])
def test_it_ends_where_it_has_no_part_any_more(slurm, why):
    slurm.script("touch ran")
    process = slurm.stand_by()
    assert process.poll() is None
    if why == "followed":
        slurm.current("b")
    elif why == "its own node":
        slurm.has("n1,n3")
    else:
        slurm.has("n1,n2,n3", *(["COMPLETED"] if why == "over" else ["RUNNING", "Restarts=1"]))
    assert process.wait(30) == 0
    assert not (slurm.folder / "ran").exists()


def test_it_signals_the_script_before_the_time_limit_and_leaves_a_job_alone_that_has_ended(slurm):
    slurm.script("#SBATCH --signal=B:USR1@60\ntrap 'rm up; exit 0' USR1\ntouch up; while :; do sleep 0.05; done")
    process = slurm.stand_by()
    slurm.has("n2,n3", more="EndTime=2999-01-01T00:00:00")
    slurm.wait_for("up")
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 50))
    slurm.has("n2,n3", more=f"EndTime={soon}")
    while (slurm.folder / "up").exists():
        assert process.poll() is None
        time.sleep(POLL_INTERVAL)
    slurm.has("n2,n3", "COMPLETED")
    assert process.wait(30) == 0
    assert not (slurm.folder / "cancelled").exists()


def test_told_to_end_with_all_of_the_job_it_sees_the_scripts_end(slurm):
    slurm.script("trap 'exit 130' TERM\ntrap 'touch again' USR1\ntouch up; while :; do sleep 0.05; done")
    process = slurm.stand_by()
    slurm.has("n2,n3")
    slurm.wait_for("up")
    slurm.has("n2,n3", "CANCELLED", "EndTime=2026-01-01T00:00:00")
    slurm.until_asked()
    process.send_signal(signal.SIGTERM)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[:1]
    os.kill(int(child), signal.SIGTERM)
    assert process.wait(30) == 130
    assert not (slurm.folder / "again").exists()  # no next job, as before a time limit


def test_the_driver_that_was_replaced_waits_for_the_jobs_end(slurm, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    config = Config(resilience=ResilienceConfig(cluster="slurm", nodes=2, spares=1))
    cluster = SlurmCluster(ClusterRequest(slurm.run, config, (), lambda source, text: None))
    assert cluster.wait_for_job_end() is None  # the node is the job's: somebody else has the run
    slurm.has("n2,n3")
    verdict = {"job": "17", "starts": 0, "code": 4}
    (slurm.run / "driver" / slurm_standby.EXIT_CODE_FILE).write_text(json.dumps(verdict))
    assert cluster.wait_for_job_end() == 4
    (slurm.run / "driver" / slurm_standby.EXIT_CODE_FILE).unlink()
    slurm.has("n2,n3", "CANCELLED")
    assert cluster.wait_for_job_end() == 130


def test_what_slurm_says_is_read(slurm, monkeypatch):
    assert slurm_standby.compute_seconds_left({"JobState": "RUNNING", "EndTime": "Unknown"}, 0.0) == float("inf")
    assert (
        slurm_standby.parse_signal_seconds("#SBATCH --signal=B:USR1@300\n#SBATCH --time=4 --signal=B:USR1@120\n") == 120
    )
    assert slurm_standby.parse_signal_seconds("") == 300
    assert "job 17 is cancelled" in slurm_completed(17, 0)
    monkeypatch.setenv("PATH", "")
    assert slurm_completion.find_library() == ""


def slurm_completed(job: int, code: int) -> str:
    arguments = [sys.executable, "-m", slurm_completion.__name__, str(job), str(code)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr


def test_fields_of_a_job_may_hold_blanks():
    text = (
        "JobId=17 JobName=demo JobState=RUNNING Restarts=0 ReqB:S:C:T=0:0:*:* Socks/Node=* "
        "WorkDir=/home/me/my runs StdOut=/home/me/my runs/demo.slurm-17.out Power=\n"
    )
    fields = slurm_standby.parse_fields(text)
    assert (fields["JobId"], fields["JobState"], fields["WorkDir"]) == ("17", "RUNNING", "/home/me/my runs")
    assert fields["StdOut"] == "/home/me/my runs/demo.slurm-17.out"
    assert slurm_standby.parse_fields(None) == {}
