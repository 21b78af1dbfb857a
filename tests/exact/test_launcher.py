"""`megascale train` with several ranks: they end together, whoever is killed, and an interruption stops them alike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megascale import checkpoint
from megascale.core.status import read_status
from megascale.train import launcher as launch
from tests.conftest import POLL_INTERVAL, lines
from tests.exact.processes import LIMIT, end, launched, wait_for_step

TWO = ("--parallel.tensor=2", "--train.steps=100000", "--checkpoint.interval=0")
FOUR = TWO + ("--parallel.pipeline=2",)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all(victim, tiny):
    with launched(tiny, *TWO) as (launcher, ranks):
        ranks[victim].kill()
        ended = end(launcher)
        assert ended.code == 1
        assert f"rank {victim} was the first to end, with signal SIGKILL" in ended.said
        assert "Traceback" not in ended.said
        assert not any(rank.is_running() for rank in ranks.values())
    if victim:
        # gloo misses its peer's end once in a hundred times on a busy machine; the launcher then ends what waits.
        lost, waited = (
            "rank 0 lost contact with another rank",
            "rank 0 had not ended 10 seconds later and is ended by the launcher",
        )
        assert lost in ended.said or waited in ended.said


def test_a_rank_that_does_not_notice_a_failure_is_ended(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.3)
    ranks = [subprocess.Popen([sys.executable, "-c", code]) for code in ("import time; time.sleep(100)", "exit(3)")]
    (tmp_path / "rank-1.log").write_text("error: no more\n")
    job = launch._LocalJob([], 2, tmp_path)
    job.ranks += ranks
    try:
        assert job.wait() == 3
    finally:
        launch.end_processes(ranks, 1.0)
        job.close()
    output = capfd.readouterr().err
    assert "rank 1 was the first to end, with exit code 3" in output
    assert "error: no more" in output
    assert "rank 0 had not ended 0.3 seconds later and is ended by the launcher" in output


class UnkillableProcess(subprocess.Popen):
    """A process that signals do not end, as while the kernel waits for a failed device."""

    def send_signal(self, sig):
        pass


def test_a_process_that_survives_sigkill_is_named_and_left(monkeypatch, capfd):
    monkeypatch.setattr(launch, "KILL_SECONDS", 0.2)
    wait = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"]
    stuck, deaf = UnkillableProcess(wait), subprocess.Popen(wait)
    try:
        launch.end_processes([stuck, deaf], 0.1)
        assert deaf.returncode is not None
        assert stuck.poll() is None
    finally:
        os.kill(stuck.pid, signal.SIGKILL)
        deaf.kill()
        stuck.wait()
        deaf.wait()
    assert f"process {stuck.pid} has not ended 0.2 s after SIGKILL" in capfd.readouterr().err


def test_the_rank_that_knows_why_is_heard_though_it_ends_last(tmp_path, monkeypatch, capfd):
    wait = "import sys; sys.stdin.read(); print('error: the data changed', file=sys.stderr); sys.exit(4)"
    ranks = [subprocess.Popen([sys.executable, "-c", c], stdin=subprocess.PIPE) for c in (wait, "exit(1)")]
    first_failed = launch._find_first_failure

    def then_let_the_other_end(ranks):
        result = first_failed(ranks)
        if result is not None:
            ranks[0].stdin.close()
        return result

    monkeypatch.setattr(launch, "_find_first_failure", then_let_the_other_end)
    job = launch._LocalJob([], 2, tmp_path)
    job.ranks += ranks
    try:
        assert job.wait() == 4
    finally:
        launch.end_processes(ranks, 1.0)
        job.close()
        ranks[1].stdin.close()
    assert capfd.readouterr().err == "error: the data changed\n"


def test_an_interruption_stops_every_rank_after_the_same_step_and_saves(tiny, tmp_path):
    run = tmp_path / "runs" / "tiny"
    with launched(tiny, *FOUR) as (launcher, ranks):
        wait_for_step(run, 3, launcher)
        launcher.send_signal(signal.SIGINT)
        ended = end(launcher)
        assert not any(rank.is_running() for rank in ranks.values())
    assert ended.code == 130, ended
    assert "is saved" in ended.said
    last = [record["step"] for record in lines(run / "metrics.jsonl")][-1]
    assert checkpoint.latest(run / "checkpoints") == last
    status = [read_status(run / "status" / f"rank-{rank}.status") for rank in range(4)]
    assert [s.step for s in status if s is not None] == [last] * 4


@pytest.mark.parametrize("started", [1, 4])
def test_an_interruption_while_ranks_are_started_reaches_them_all(tiny, started):
    command = [sys.executable, "-m", "megascale.cli.main", "train", str(tiny)] + list(FOUR)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            while len(ranks := psutil.Process(launcher.pid).children()) < started:
                assert launcher.poll() is None
                time.sleep(POLL_INTERVAL)
            launcher.send_signal(signal.SIGINT)
            ended = end(launcher)
        finally:
            launcher.kill()
    assert ended.code == 130, ended
    assert "Traceback" not in ended.said
    assert "first to end" not in ended.said
    assert not psutil.wait_procs(ranks, timeout=LIMIT)[1]


def test_no_orphan_outlives_a_killed_launcher(tiny):
    with launched(tiny, *TWO) as (launcher, ranks):
        launcher.kill()
        removed, alive = psutil.wait_procs(list(ranks.values()), timeout=LIMIT)
        assert len(removed) == 2
        assert not alive


def test_a_second_interruption_ends_a_rank_that_hears_none(tiny, tmp_path):
    """A stopped process stands for one that hangs on its device."""
    with launched(tiny, *TWO) as (launcher, ranks):
        wait_for_step(tmp_path / "runs" / "tiny", 1, launcher)
        ranks[1].suspend()
        for _ in range(2):  # the same twice in a row is one: `timeout` sends it so
            launcher.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(3.0)
        launcher.send_signal(signal.SIGTERM)
        ended = end(launcher)
        assert not any(rank.is_running() for rank in ranks.values())
    assert ended.code == 130, ended
    assert "rank 1 did not answer" in ended.said or "rank 0, 1 did not answer" in ended.said
