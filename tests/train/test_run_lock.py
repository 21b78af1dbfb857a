"""Lock of a run folder: a second process gets the name of the first, and the lock ends with its holder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from megascale import checkpoint
from megascale.api import load_config, train
from megascale.cli.checkpoint import prune
from megascale.core import run_lock
from megascale.core.layout import lay_out
from megascale.core.run_lock import RunBusyError
from megascale.errors import TrainingError
from megascale.resilience.driver import start_driver
from megascale.train import launcher as launch
from tests.conftest import lines
from tests.exact.processes import Start, launched, run_ranks, wait_for_step
from tests.train.test_run import losses

HOLD = """
import sys
from pathlib import Path
from megascale.core import run_lock
lock = getattr(run_lock, sys.argv[1])(Path(sys.argv[2]), "a test")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(folder: Path, how: str = "acquire_trainer_lock", **env: str):
    """Another process that holds a lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, how, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_second_is_told_who_holds_it_and_death_frees_it(tmp_path):
    with holding(tmp_path) as process:
        with pytest.raises(RunBusyError) as caught:
            run_lock.acquire_trainer_lock(tmp_path, "b", 0.0)
        for part in (str(tmp_path), str(process.pid), os.uname().nodename, "a test", "--train.name"):
            assert part in str(caught.value)
        with pytest.raises(RunBusyError):
            run_lock.check_available(tmp_path, 0.0)
        process.send_signal(signal.SIGKILL)
        with run_lock.acquire_trainer_lock(tmp_path, "b") as lock:
            assert lock.warning == ""


def test_a_child_of_the_holder_does_not_keep_it(tmp_path):
    lock = run_lock.acquire_trainer_lock(tmp_path, "parent")
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        os._exit(0)
    lock.release()
    run_lock.acquire_trainer_lock(tmp_path, "next").release()  # once the child has run its first lines
    os.write(write, b"x")
    assert os.waitpid(child, 0)[1] == 0


def test_a_folder_that_was_replaced_is_locked_anew(tmp_path):
    folder = tmp_path / "run"
    old = run_lock.acquire_trainer_lock(folder, "old")
    (folder / run_lock.TRAINER_LOCK).unlink()
    with run_lock.acquire_trainer_lock(folder, "new", 0.0), pytest.raises(RunBusyError):
        run_lock.acquire_trainer_lock(folder, "third", 0.0)
    old.release()


def test_a_holder_of_another_host_that_vanished_is_named(tmp_path):
    record = {"what": "megascale train", "host": "elsewhere", "pid": 7, "since": "2026-01-01 00:00:00", "driver": False}
    (tmp_path / run_lock.TRAINER_LOCK).write_text(json.dumps(record))
    with run_lock.acquire_trainer_lock(tmp_path, "b") as lock:
        assert "process 7 on elsewhere" in lock.warning


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(handle: int, kind: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    with run_lock.acquire_trainer_lock(tmp_path, "b") as lock:
        assert "no locks (Operation not supported)" in lock.warning


def test_a_driver_keeps_others_out_and_its_own_trainers_in(tmp_path, monkeypatch):
    with holding(tmp_path, "acquire_driver_lock") as driver:
        with pytest.raises(RunBusyError, match=rf"{driver.pid}.*megascale launch"):
            run_lock.acquire_trainer_lock(tmp_path, "train", 0.0)
        run_lock.acquire_driver_lock(tmp_path, "another driver: the journal decides which").drop()
        with holding(tmp_path, MEGASCALE_NODE="n1") as attempt:
            run_lock.acquire_driver_lock(tmp_path, "one that takes the job over").drop()
            monkeypatch.setenv("MEGASCALE_NODE", "n2")
            # An older attempt that has not ended: the driver may start again, a person need not come.
            with pytest.raises(TrainingError, match=rf"{attempt.pid}.*older attempt"):
                run_lock.acquire_trainer_lock(tmp_path, "train", 0.0)
            attempt.kill()
            run_lock.acquire_trainer_lock(tmp_path, "train").release()
            monkeypatch.delenv("MEGASCALE_NODE")
    with holding(tmp_path) as trainer, pytest.raises(RunBusyError, match=str(trainer.pid)):
        run_lock.acquire_driver_lock(tmp_path, "launch", 0.0)


def test_a_driver_waits_for_a_trainer_that_ends(tmp_path, monkeypatch):
    """A trainer that belongs to no driver has the grace period to end."""
    with holding(tmp_path) as trainer:

        def end_trainer(seconds: float) -> None:
            trainer.kill()
            trainer.wait()

        monkeypatch.setattr(run_lock.time, "sleep", end_trainer)
        run_lock.acquire_driver_lock(tmp_path, "launch", 60.0).drop()


def test_a_training_is_alone_with_its_run(tiny, tmp_path):
    run, location = tmp_path / "runs" / "tiny", tmp_path / "elsewhere"
    arguments = ["--train.steps=100000", "--parallel.tensor=2", f"--checkpoint.location={location}"]
    with launched(tiny, *arguments) as (launcher, ranks):
        wait_for_step(run, 4, launcher)
        # Each refusal takes the seconds that a killed holder is given; the run need not train all that time.
        for rank in ranks.values():
            rank.suspend()
        before = (run / "config.toml").read_bytes()
        alone = load_config(tiny, ["--train.steps=3", "--lr.peak=1e-3"])
        several = load_config(tiny, ["--parallel.tensor=2"])
        sharer = load_config(tiny, ["--train.name=other", f"--checkpoint.location=file://{location}"])
        for second in (
            lambda: train(alone),
            lambda: train(sharer),
            lambda: launch.launch(["train", str(tiny)], lay_out(several, 2)),
            lambda: start_driver.drive(*start_driver.prepare(several), lambda source, text: None),
            lambda: prune(str(run), 1),
            lambda: prune(str(location), 1),
            lambda: prune(f"local://{location}", 1),
        ):
            with pytest.raises(RunBusyError, match=str(ranks[0].pid)) as caught:
                second()
            assert caught.value.exit_code == 2
        pair = run_ranks(tiny, ["--parallel.tensor=2"], [Start(0, 2), Start(1, 2)])
        assert [(p.code, str(ranks[0].pid) in p.said) for p in pair] == [(2, True)] * 2
        assert before == (run / "config.toml").read_bytes()
        done = len(losses(run))
        for rank in ranks.values():
            rank.resume()
        wait_for_step(run, done + 2, launcher)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(60)
    events = [r["event"] for r in lines(run / "events.jsonl") if r["event"] != "checkpoint_saved"]
    assert events == ["run_started", "active", "interrupted"]
    steps = [step for step, _, _ in losses(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert [r["first"] for r in lines(run / "samples" / "ledger.jsonl")] == [4 * i for i in range(len(steps))]
    prune(str(run), 1)
    assert len(checkpoint.steps(location)) == 1
