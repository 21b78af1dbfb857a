"""Nodes whose folders do not see each other: what driver and agents know of each other, they have said."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from megascale.checkpoint import latest
from megascale.observe.store.tables import SpanTables
from tests.conftest import lines
from tests.resilience.conftest import Launched
from tests.resilience.test_launch import assert_same_run, losses


def foreign(inputs: str, run: Path) -> list[str]:
    """Paths of the run folder in what an agent was given, but for the storage of its checkpoints."""
    shared = str(run / "checkpoints")
    return [word for word in inputs.replace(shared, "").split('"') if word.startswith(f"{run}/") or word == str(run)]


# A rank that is stopped trains, and does not save.
OPTIONS = ["--checkpoint.interval=0", "--lr.schedule=constant"]


def launch_apart(launch, *arguments: str) -> tuple[Launched, list[Path]]:
    """A job of two nodes and a spare after its first step, and the nodes' folders."""
    job = launch(
        "apart", "--nodes=2", "--spares=1", "--resilience.cluster=apart", "--train.steps=100000", *OPTIONS, *arguments
    )
    job.until("first_step")
    return job, sorted((job.run.parent / "apart.apart").iterdir())


def test_kill_hang_new_driver_and_hot_update_leave_the_weights_of_an_undisturbed_run(launch, megascale, tiny, tmp_path):
    job, hosts = launch_apart(launch)
    assert [host.name for host in hosts] == ["n0", "n1", "n2"]
    for host in hosts:
        assert not foreign((host / "given.json").read_text(), job.run)

    job.kill_rank(1)
    killed = job.until("process_killed")
    assert (killed.nodes, killed.ranks) == (("n1",), (1,))
    job.until("first_step", attempt=2)

    os.kill(job.pid(1), signal.SIGSTOP)
    hang = job.until("hang")
    assert (hang.nodes, hang.ranks) == (("n1",), (1,)), hang.evidence
    assert hang.evidence[0].startswith("stopped: rank 1, ")  # which collective: its agent has looked
    job.until("first_step", attempt=3)

    job.process.kill()
    job.process.wait()
    pids = [job.pid(0), job.pid(1)]
    job.start()  # at another address, which the agents are given
    job.until("driver_took_over")
    observed = job.wait(lambda: losses(job.run), "a step since the trainers began anew")
    job.until_step(observed[-1][0] + 3)
    assert [job.pid(0), job.pid(1)] == pids

    assert megascale("restart", job.run, "--lr.peak=0.005").returncode == 0
    job.until("first_step", attempt=4)
    resumed = job.wait(lambda: [e for e in lines(job.run / "events.jsonl") if "lr.peak" in e.get("changed", {})], "it")
    job.kill_agent("n0", down=True)  # rank 0 goes on from another folder
    assert job.until("attempt_started", attempt=5).nodes == ("n2", "n1")
    job.until("first_step", attempt=5)
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.story()

    # The run folder tells the whole story though no trainer has written there.
    last = latest(job.run / "checkpoints")
    assert [step for step, _ in losses(job.run)] == list(range(1, last + 1))
    assert [r["first"] for r in lines(job.run / "samples" / "ledger.jsonl")] == [4 * i for i in range(last)]
    assert f"step {last} is saved" in (job.run / "logs" / "rank-0.log").read_text()
    for name in ("metrics.tmp", "flight"):
        assert not (job.run / name).exists()
    with SpanTables(job.run) as tables:
        expected = tables.query("SELECT DISTINCT rank FROM rollups WHERE action = 'step' ORDER BY rank")[
            "rank"
        ].tolist()
    assert expected == [0, 1]
    folders = {folder.name for folder in (job.run / "spans").iterdir()}
    assert {"host=0@n0", "host=1@n1"} <= folders <= {"host=0@n0", "host=1@n1", "host=0@n2"}
    assert sorted(f.name for f in (job.run / "status").iterdir()) == ["rank-0.evidence", "rank-1.evidence"]  # the hang

    calm = ["train", tiny, "--train.name=calm", "--parallel.data=2"] + OPTIONS
    for more in ([f"--train.steps={resumed[0]['step']}"], [f"--train.steps={last}", "--lr.peak=0.005"]):
        done = megascale(*calm, *more)
        assert done.returncode == 0, done.stderr
    assert_same_run(job.run, tmp_path / "runs" / "calm")


def test_faults_hangs_copies_and_plots_need_no_shared_folder(launch, megascale):
    pytest.importorskip("cryptography")
    more = ["--resilience.faults=true", "--observe.tensorboard=true", "--resilience.listen=0.0.0.0"]
    more += ["--checkpoint.background=true", "--checkpoint.replicas=true", "--checkpoint.linger=20"]
    job, hosts = launch_apart(launch, *more)
    report = next(e for e in job.events() if e.kind == "address_open")
    assert "resilience.listen=0.0.0.0" in report.evidence[0]
    assert not (job.run / "checkpoints" / "replica.token").exists()  # agents made it, each for its own ranks

    calm = megascale("hang", job.run, "--json", "--watch=8")
    assert (calm.returncode, json.loads(calm.stdout)["kind"]) == (0, "none"), calm.stdout + calm.stderr
    ranks = json.loads(calm.stdout)["by_rank"]
    assert [(r["process"], r["answered"]) for r in ranks] == [("running", True)] * 2
    assert all(r["stack"] for r in ranks)

    assert megascale("faults", "inject", "exception", "--run", job.run, "--rank=1").returncode == 0
    assert job.until("user_error").ranks == (1,)
    job.until("first_step", attempt=2)
    (used,) = (job.run / "faults").iterdir()
    assert used.suffix == ".injected"
    observed = job.wait(lambda: losses(job.run), "a step since the trainers began anew")
    job.until_step(observed[-1][0] + 3)  # once only

    assert megascale("faults", "inject", "spin", "--run", job.run, "--rank=1").returncode == 0
    hang = job.until("hang")
    assert (hang.nodes, hang.ranks) == (("n1",), (1,)), hang.evidence
    job.until("first_step", attempt=3)
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.story()
    after = megascale("hang", job.run)  # No process is left to ask.
    assert after.returncode == 1
    assert "as their agents saw the ranks at" in after.stdout
    assert "rank 1" in after.stdout.splitlines()[0]

    boards = {f.name: f.read_bytes() for host in hosts for f in host.rglob("events.out.tfevents.*")}
    assert len(boards) == 3  # one an attempt
    assert {f.name: f.read_bytes() for f in (job.run / "tensorboard").iterdir()} == boards
