"""Early ends of a run: message, event and status are true, and no file or process stays open."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from megascale import checkpoint
from megascale.api import load_config, train
from megascale.core import run_lock
from megascale.core.status import read_status
from megascale.errors import ConfigError, DataError
from megascale.train import loop, state_retention
from tests.conftest import lines
from tests.exact.processes import Start, run_ranks, wait_for_step
from tests.forked import PACED, Forked


def read_end(run: Path, rank: int = 0) -> tuple[str, str, str, str]:
    """The last event and its reason, and what the status file says."""
    event, status = lines(run / "events.jsonl")[-1], read_status(run / "status" / f"rank-{rank}.status")
    assert status is not None
    return event["event"], event["message"], status.phase, status.message


@pytest.mark.parametrize("interval", [0, 3])
def test_an_interruption_without_a_last_checkpoint_says_which_step_is_kept(tiny, tmp_path, interval):
    arguments = ["--train.steps=100000", "--checkpoint.at_end=false", f"--checkpoint.interval={interval}"]
    process = Forked(["train", tiny] + arguments, before=PACED)
    run = tmp_path / "runs" / "tiny"
    wait_for_step(run, 5, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    event, retained = lines(run / "events.jsonl")[-1], checkpoint.latest(run / "checkpoints")
    assert (event["event"], event["saved"]) == ("interrupted", retained)
    if retained == event["step"]:
        assert f"step {retained} is saved" in output
    else:
        assert f"step {event['step']} is not saved (checkpoint.at_end=false)" in output
        assert (f"resumes from step {retained}" if interval else "starts from step 0") in output


def test_a_failure_before_the_loop_leaves_its_reason_and_the_folder_free(tiny, tmp_path, monkeypatch):
    run = tmp_path / "runs" / "tiny"
    with pytest.raises(DataError):
        train(load_config(tiny, ["--data.train=nowhere/train"]))
    event, why, phase, message = read_end(run)
    assert (event, phase) == ("run_failed", "failed")
    assert "nowhere/train" in why
    assert why.startswith(message)

    def broken(*args: object, **options: object) -> None:
        raise ValueError("a mistake in the code")

    monkeypatch.setattr(state_retention, "Engine", broken)
    with pytest.raises(ValueError, match="a mistake"):
        train(load_config(tiny, []))
    assert read_end(run) == (
        "run_failed",
        "ValueError: a mistake in the code",
        "failed",
        "ValueError: a mistake in the code",
    )
    monkeypatch.undo()
    with pytest.raises(ConfigError):
        train(load_config(tiny, ["--train.device=cuda"]))
    assert "train.device=cuda" in read_end(run)[1]
    run_lock.acquire_trainer_lock(run, "the next", 0.0).release()
    assert train(load_config(tiny, [])).finished


def test_a_mistake_inside_the_loop_leaves_its_reason(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "compute_learning_rate", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(load_config(tiny, []))
    assert read_end(tmp_path / "runs" / "tiny")[0::2] == ("run_failed", "failed in step")
    assert "ZeroDivisionError" in read_end(tmp_path / "runs" / "tiny")[1]


def test_of_several_ranks_each_tells_why_and_all_leave_their_groups(tiny, tmp_path):
    before = """
import atexit, torch.distributed as dist
from megascale.train import state_retention
def broken(*args, **options):
    raise OSError(28, "No space left on device")
state_retention.Engine = broken
atexit.register(lambda: print("groups open:", dist.is_initialized()))
"""
    pair = run_ranks(tiny, ["--parallel.tensor=2"], [Start(0, 2, before=before), Start(1, 2, before=before)])
    for rank, match in enumerate(pair):
        assert match.code == 1, match.said
        assert "groups open: False" in match.said
        event, why, phase, message = read_end(tmp_path / "runs" / "tiny", rank)
        assert (event, phase) == ("run_failed", "failed")
        assert "No space left" in why
        assert "No space left" in message
        assert "another train.runs" in message
    assert not dist.is_initialized()


def test_a_refused_start_makes_no_folder(tiny, tmp_path):
    with pytest.raises(ConfigError):
        train(load_config(tiny, ["--train.device=cuda", "--train.name=mistyped"]))
    assert not (tmp_path / "runs" / "mistyped").exists()
