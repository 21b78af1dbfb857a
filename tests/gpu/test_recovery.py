"""`tests/gpu/recovery.py` on the CPU: kills timed by phase, kept between calls, and a model that fits the machine."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from benchmarks.harness import launched
from megascale.core.capacity import Capacity
from megascale.errors import FitError
from megascale.resilience.driver import start_driver
from tests.forked import NEW_SERVICES, PACED, Forked
from tests.gpu import recovery

# Short steps: the ranks take several hundred of them while the script waits, and only the kills are examined.
OPTIONS = ["--preset=tiny", "--train.device=cpu", "--model.vocab_size=256", "--model.sequence_length=64"]
OPTIONS += ["--train.global_batch=4", "--kills=1"]


def rested(command: list[str], *, stdout: IO[bytes], env: dict[str, str], **_: object) -> Forked:
    """Replace subprocess.Popen: the job is forked, and runs slowly during the restart."""
    more = {"MEGASCALE_TEST_REST": "0.05", NEW_SERVICES: "1"}
    return Forked(command[3:], env=env | more, before=PACED, output=Path(stdout.name))


def test_a_rank_and_a_node_are_killed_and_timed_by_phase_and_what_is_there_is_kept(tmp_path, capsys, monkeypatch):
    pytest.importorskip("fastapi", reason="the extra driver is not installed")
    monkeypatch.setattr(launched, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": rested}))
    out = tmp_path / "recovery.json"
    arguments = OPTIONS + [f"--out={out}"]
    assert recovery.main(arguments + ["--seconds=1"]) == 0  # nothing can be done in that time, and nothing is begun
    output = capsys.readouterr().out
    assert "1 s are too few: 20 s are kept for the job's end" in output
    assert "missing: rank 1, node 1; call again" in output
    assert recovery.main(arguments + ["--seconds=60"]) == 0
    assert "--seconds=60 is too short; call with --seconds=80" in capsys.readouterr().out
    assert recovery.main(arguments + ["--kind=rank", "--seconds=400"]) == 0
    assert "all memory for snapshots prepared" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert recovery.main(arguments + ["--seconds=400"]) == 0  # goes on with the node
    rank, node = json.loads(out.read_text())["kills"]
    assert [rank] == record["kills"]
    assert (rank["kind"], rank["target"], rank["verdict"], rank["actions"]) == (
        "rank",
        "rank 1",
        "process_killed",
        ["retry"],
    )
    assert (node["kind"], node["target"], node["actions"]) == ("node", "n1", ["respawn"])
    # The state of running ranks is used if the lost rank's snapshot of the same step was complete at the kill.
    assert rank["loaded_from"] in ("memory", "running ranks and memory")
    assert node["loaded_from"] in ("a peer's memory", "running ranks and a peer's memory")
    for row in (rank, node):
        assert row["total"] == pytest.approx(row["detect"] + row["stop"] + row["load"] + row["step"])
        assert row["lost"] <= 2
        assert row["step_seconds"] > 0
        assert sorted(row["first_steps"]) == ["0", "1"]
        assert all(", queued after " in line for line in row["first_steps"].values())
    output = capsys.readouterr().out
    assert "seconds of" in output
    assert "missing" not in output
    assert recovery.main(arguments + ["--seconds=400"]) == 0
    assert len(json.loads(out.read_text())["starts"]) == 2  # no job was started for it
    with pytest.raises(SystemExit, match="name another file"):
        recovery.main(arguments + ["--train.micro_batch=4"])


@pytest.mark.parametrize(
    ("reported", "complete_step", "resumed_step", "lost"), [(0, 8, 7, 1), (1, 7, 7, 1), (0, 7, 8, 0), (2, 9, None, 2)]
)
def test_lost_steps_count_from_the_newest_complete_step(reported, complete_step, resumed_step, lost):
    assert recovery.count_lost_steps(reported, complete_step, resumed_step) == lost


def test_the_first_kill_needs_30_seconds_and_later_ones_go_by_those_measured():
    assert recovery.find_time_obstacle(33.0, []) == ""
    assert recovery.find_time_obstacle(8.0, [5.0, 6.0]) == ""
    obstacle = recovery.find_time_obstacle(29.0, [])
    assert obstacle == "29 s remain before the job's end begins, and 30 s are needed"
    assert "52 s are needed" in recovery.find_time_obstacle(33.0, [40.0])


def test_the_estimate_counts_a_start_that_was_measured_and_waits_for_the_slower_preparation():
    estimate = recovery.estimate_first_kill(28e9, "lost-node", 6, [])
    assert recovery.describe_parts(estimate) == (
        "143 s (start 25, memory for snapshots and spare 56, steps 12, recovery 30, end 20)"
    )
    small = recovery.estimate_first_kill(1e9, "lost-node", 6, [12.0, 14.0])
    assert small == estimate | {"start": 14.0, "memory for snapshots and spare": recovery.SPARE_SECONDS}
    assert recovery.estimate_first_kill(1e9, "rank", 6, [])["memory for snapshots and spare"] == 2.0


def test_as_many_layers_as_the_machine_holds(tmp_path, monkeypatch):
    """Half of gpt-13b's 40, fewer where the copies of four states do not fit into the hosts' memory."""

    def layers(gib: int, gpu_gib: int, *arguments: str) -> int:
        capacity = Capacity(memory=gib << 30, memory_from="MemAvailable", cores=32, gpu_memory=gpu_gib << 30)
        monkeypatch.setattr(Capacity, "measure", lambda **_: capacity)
        monkeypatch.setattr(start_driver, "count_gpus", lambda: 2)
        file = tmp_path / "job.toml"
        file.write_text(recovery.SETTINGS.format(folder=tmp_path))
        return recovery.fitting(file, ["--model.preset=gpt-13b"] + list(arguments))

    assert layers(1000, 139) == 20
    assert layers(256, 139) < layers(256, 139, "--checkpoint.slots=1") < 20
    assert layers(1000, 70) < 20
    with pytest.raises(FitError, match="not one layer fits"):
        layers(8, 139)


@pytest.mark.parametrize("layers", [[], ["--layers=14"]])
@pytest.mark.parametrize(
    ("spares", "message"),
    [
        (["--resilience.spares=1"], "3 nodes and spares share 2 GPUs.*; --kind node needs no spare"),
        ([], "--kind lost-node needs a spare node: set --resilience.spares=1"),
    ],
)
def test_a_lost_node_without_gpus_for_its_spare_is_refused_in_a_line(
    tmp_path, monkeypatch, layers: list[str], spares: list[str], message: str
):
    capacity = Capacity(memory=1000 << 30, memory_from="MemAvailable", cores=32, gpu_memory=139 << 30)
    monkeypatch.setattr(Capacity, "measure", lambda **_: capacity)
    monkeypatch.setattr(start_driver, "count_gpus", lambda: 2)
    arguments = ["--kind=lost-node", "--kills=1", f"--out={tmp_path / 'recovery.json'}"]
    with pytest.raises(SystemExit) as end:
        recovery.main(arguments + layers + spares)
    assert re.search(message, str(end.value))
    assert "\n" not in str(end.value)


def test_jobs_of_one_call_have_gpus_settings_and_files_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    jobs = [recovery.read_job("rank 0,1 --resilience.nodes=1"), recovery.read_job("node 2,3")]
    visible = [recovery.make_job_environment(job)["CUDA_VISIBLE_DEVICES"] for job in jobs]
    assert visible == ["GPU-a,GPU-b", "GPU-c,GPU-d"]
    inputs = SimpleNamespace(
        preset="tiny", kills=1, steps=8, seconds=60.0, out=tmp_path / "recovery.json", layers=14, logs=tmp_path / "logs"
    )
    commands = [recovery.make_job_command(job, inputs, ["--train.micro_batch=1"]) for job in jobs]
    for command, kind in zip(commands, ("rank", "node"), strict=True):
        assert command[command.index("--kind") + 1] == kind
        assert command[command.index("--out") + 1] == str(tmp_path / f"recovery-{kind}.json")
        assert command[command.index("--logs") + 1] == str(tmp_path / "logs" / kind)
        assert command[command.index("--steps") + 1] == "8"
        assert "--train.micro_batch=1" in command
    assert [command[-1] for command in commands] == ["--resilience.nodes=1", "--train.micro_batch=1"]
    with pytest.raises(SystemExit, match="names GPU 4, and CUDA_VISIBLE_DEVICES has 4 GPUs"):
        recovery.make_job_environment(recovery.read_job("rank 3,4"))
    for text in ("rank", "disk 0,1", "rank 0;1"):
        with pytest.raises(argparse.ArgumentTypeError):
            recovery.read_job(text)


@pytest.mark.parametrize("second", ["node 1,2", "rank 2,3"])
def test_jobs_of_one_call_share_no_gpu_and_no_file(second: str, tmp_path):
    arguments = ["--job", "rank 0,1", "--job", second, f"--out={tmp_path / 'recovery.json'}"]
    with pytest.raises(SystemExit, match="that no other --job has"):
        recovery.main(arguments)


def test_jobs_of_one_call_run_at_the_same_time(monkeypatch, capsys, tmp_path):
    """Each waits for the other, and their lines are printed as they come."""
    script = "import pathlib, sys, time\nown_file, other_file = map(pathlib.Path, sys.argv[1:3])\nown_file.touch()\n"
    script += "print('began', flush=True)\nwhile not other_file.exists(): time.sleep(0.01)\nsys.exit(int(sys.argv[3]))"

    def make_command(job: recovery.ConcurrentJob, *_: object) -> list[str]:
        other = {"rank": "node", "node": "rank"}[job.kind]
        code = "1" if job.kind == "node" else "0"
        return [sys.executable, "-c", script, str(tmp_path / job.kind), str(tmp_path / other), code]

    monkeypatch.setattr(recovery, "make_job_command", make_command)
    assert recovery.main(["--job", "rank none", "--job", "node none"]) == 1
    assert sorted(capsys.readouterr().out.splitlines()) == ["node      | began", "rank      | began"]
