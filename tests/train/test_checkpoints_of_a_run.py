"""Checkpoints as a run makes them: in the background, from memory after a kill, somewhere else than the run folder."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from megascale import checkpoint
from megascale.api import load_config, train
from megascale.errors import TrainingError
from megascale.train import snapshot_reserve
from tests.conftest import lines
from tests.forked import PACED, Forked
from tests.train.test_run import kill_when, losses, weights

BACKGROUND = ["--checkpoint.background=true", "--checkpoint.linger=100"]


def assert_same_run(run: Path, calm: Path) -> None:
    assert losses(run) == losses(calm)
    assert lines(run / "samples" / "ledger.jsonl") == lines(calm / "samples" / "ledger.jsonl")
    expected = weights(calm)
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, expected[name]), name


def events(run: Path, name: str) -> list[dict]:
    return [r for r in lines(run / "events.jsonl") if r["event"] == name]


def test_saving_in_the_background_changes_nothing_but_the_wait(tiny, tmp_path):
    options = ["--train.steps=9", "--checkpoint.interval=2"]
    train(load_config(tiny, options + ["--train.name=calm"]))
    train(load_config(tiny, options + BACKGROUND + ["--train.name=behind"]))
    run = tmp_path / "runs" / "behind"
    assert_same_run(run, tmp_path / "runs" / "calm")
    saved = events(run, "checkpoint_saved")
    assert saved[-1]["step"] == 9
    assert all(0 <= r["stall"] <= r["seconds"] for r in saved)
    skipped = {r["step"] for r in events(run, "checkpoint_skipped")}
    assert {r["step"] for r in saved} | skipped == {2, 4, 6, 8, 9}


def test_memory_is_ordered_before_the_engine_exists_and_changes_nothing(tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(snapshot_reserve, "_LEAST_EARLY_BYTES", 0)
    options = ["--train.steps=4", "--checkpoint.interval=2"]
    train(load_config(tiny, options + ["--train.name=calm"]))
    with caplog.at_level(logging.INFO, "megascale.checkpoint"):
        train(load_config(tiny, options + BACKGROUND + ["--checkpoint.memory_interval=1", "--train.name=early"]))
    assert "2 of 2 slots as before" in caplog.text
    assert_same_run(tmp_path / "runs" / "early", tmp_path / "runs" / "calm")


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_run_goes_on_from_memory(tiny, megascale, tmp_path, world):
    options = ["--train.steps=12", "--checkpoint.interval=100", f"--parallel.tensor={world}"]
    command = ["train", tiny] + options
    calm = megascale(*command, "--train.name=calm")
    assert calm.returncode == 0, calm.stderr
    command += ["--train.name=killed"] + BACKGROUND + ["--checkpoint.memory_interval=1"]
    run = tmp_path / "runs" / "killed"
    # Resting, so that on a busy machine too a step is copied before the next is done.
    kill_when(run, Forked(command, before=PACED, env={"MEGASCALE_TEST_REST": "0.1"}), 6, 0.0)
    result = megascale(*command)
    assert result.returncode == 0, result.stderr
    (resumed,) = events(run, "resumed")
    assert resumed["loaded_from"] == "memory"
    assert resumed["load_seconds"] > 0
    assert resumed["read_bytes"] > resumed["sent_bytes"]  # each rank its own part, but for what both hold
    assert [e["step"] > resumed["step"] for e in events(run, "first_snapshot")] == [False, True]  # one an attempt
    assert resumed["step"] >= 5
    assert "from memory" in result.stdout
    assert_same_run(run, tmp_path / "runs" / "calm")


def test_checkpoints_elsewhere(tiny, megascale, tmp_path):
    location = tmp_path / "elsewhere"
    options = ["--train.steps=4", f"--checkpoint.location={location}"]
    train(load_config(tiny, options))
    run = tmp_path / "runs" / "tiny"
    assert checkpoint.steps(location) == [2, 4]
    assert checkpoint.steps(run / "checkpoints") == []
    assert weights(run)
    inspected = megascale("checkpoint", "inspect", run)
    assert inspected.returncode == 0, inspected.stderr
    assert "step-4" in inspected.stdout
    assert train(load_config(tiny, ["--train.steps=6", f"--checkpoint.location={location}"])).step == 6
    assert [step for step, _, _ in losses(run)] == [1, 2, 3, 4, 5, 6]


def test_a_last_save_in_the_background_that_fails_is_no_success(tiny, tmp_path):
    location = tmp_path / "elsewhere"
    train(load_config(tiny, ["--train.steps=2", f"--checkpoint.location={location}"]))
    (location / "step-4").write_text("a file where a folder must come")
    with pytest.raises(TrainingError, match=r"step, 4, failed.*step 2 is kept"):
        train(load_config(tiny, ["--train.steps=4", f"--checkpoint.location={location}"] + BACKGROUND))
    (failed,) = events(tmp_path / "runs" / "tiny", "checkpoint_failed")
    assert failed["step"] == 4


def test_a_run_without_steps_saves_its_initial_weights(tiny, tmp_path):
    options = ["--checkpoint.interval=3"]
    assert train(load_config(tiny, [*options, "--train.steps=0"])).finished
    run = tmp_path / "runs" / "tiny"
    assert checkpoint.steps(run / "checkpoints") == [0]
    assert train(load_config(tiny, [*options, "--train.steps=4"])).step == 4
    train(load_config(tiny, [*options, "--train.steps=4", "--train.name=direct"]))
    assert losses(run) == losses(tmp_path / "runs" / "direct")


def test_the_service_of_a_finished_run_ends_and_leaves_nothing(tiny, tmp_path):
    from megascale.checkpoint.background import service_protocol

    folder = service_protocol.private_folder(tmp_path / "runs" / "tiny")
    train(load_config(tiny, ["--train.steps=2"] + BACKGROUND))
    deadline = time.monotonic() + 30
    while folder.exists():  # the service's own while it lives
        assert time.monotonic() < deadline
        time.sleep(0.01)
