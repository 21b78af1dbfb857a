"""Nodes whose folders do not see each other: what driver and agents know of each other, they have said."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from megascale.checkpoint import latest
from tests.conftest import lines
from tests.resilience.test_launch import losses, same


def foreign(given: str, run: Path) -> list[str]:
    """Paths of the run folder in what an agent was given, but for the storage of its checkpoints."""
    shared = str(run / "checkpoints")
    return [word for word in given.replace(shared, "").split('"') if word.startswith(f"{run}/") or word == str(run)]


def test_kill_hang_new_driver_and_hot_update_leave_the_weights_of_an_undisturbed_run(launch, megascale, tiny, tmp_path):
    words = ["--checkpoint.interval=0", "--lr.decay=constant"]  # a rank that is stopped trains, and does not save
    job = launch("apart", "--nodes=2", "--spares=1", "--resilience.cluster=apart", "--train.steps=100000", *words)
    job.until("first_step")
    hosts = sorted((tmp_path / "runs" / "apart.apart").iterdir())
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
    job.until_step(losses(job.run)[-1][0] + 3)
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
    for name in ("status", "metrics.tmp", "flight"):
        assert not (job.run / name).exists()

    calm = ["train", tiny, "--train.name=calm", "--parallel.data=2", *words]
    for more in ([f"--train.steps={resumed[0]['step']}"], [f"--train.steps={last}", "--lr.peak=0.005"]):
        done = megascale(*calm, *more)
        assert done.returncode == 0, done.stderr
    same(job.run, tmp_path / "runs" / "calm")
