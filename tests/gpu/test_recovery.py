"""`tests/gpu/recovery.py` on the CPU: kills timed by phase, kept between calls, and a model that fits the machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from benchmarks.harness import launched
from megascale.core.capacity import Capacity
from megascale.resilience.driver import start_driver
from tests.forked import NEW_SERVICES, PACED, Forked
from tests.gpu import recovery

OPTIONS = ["--preset=tiny", "--train.device=cpu", "--model.vocab_size=256", "--kills=1"]


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
    assert recovery.main(arguments + ["--kind=rank", "--seconds=400"]) == 0
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
    output = capsys.readouterr().out
    assert "seconds of" in output
    assert "missing" not in output
    assert recovery.main(arguments + ["--seconds=400"]) == 0
    assert len(json.loads(out.read_text())["starts"]) == 2  # no job was started for it
    with pytest.raises(SystemExit, match="name another file"):
        recovery.main(arguments + ["--train.micro_batch=4"])


def test_the_first_kill_needs_30_seconds_and_later_ones_go_by_those_measured():
    assert recovery.find_time_obstacle(33.0, []) == ""
    assert recovery.find_time_obstacle(8.0, [5.0, 6.0]) == ""
    obstacle = recovery.find_time_obstacle(29.0, [])
    assert obstacle == "29 s remain before the job's end begins, and 30 s are needed"
    assert "52 s are needed" in recovery.find_time_obstacle(33.0, [40.0])


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
    with pytest.raises(SystemExit, match="not one layer fits"):
        layers(8, 139)
