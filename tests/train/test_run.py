"""Whole runs through the command line: the folder, resuming after SIGKILL, interruption, and wrong input."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from megascale import checkpoint
from megascale.api import load_config, train
from megascale.train.restore import restore_engine
from tests.conftest import lines
from tests.forked import DRAW, PACED, Forked


def weights(run: Path) -> dict[str, torch.Tensor]:
    engine, _ = restore_engine(run, device="cpu")
    return {
        name: tensor.clone() for name, _, _, tensor in engine.optimizer.logical_tensors() if name.startswith("model.")
    }


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in lines(run / "metrics.jsonl") if "loss" in r]


def test_a_run_learns_and_leaves_its_story(tiny, tmp_path):
    result = train(load_config(tiny, ["--train.steps=40", "--checkpoint.interval=20", "--train.eval_interval=10"]))
    run = tmp_path / "runs" / "tiny"
    assert result.finished
    assert result.evaluation is not None
    assert result.evaluation.loss < 3.0 < losses(run)[0][1]
    assert [step for step, _, _ in losses(run)] == list(range(1, 41))
    ledger = lines(run / "samples" / "ledger.jsonl")
    assert [(r["first"], r["count"]) for r in ledger] == [(4 * i, 4) for i in range(40)]
    assert checkpoint.steps(run / "checkpoints") == [20, 40]
    events = [r["event"] for r in lines(run / "events.jsonl")]
    assert events[0] == "run_started"
    assert events[-1] == "run_finished"
    assert load_config(run / "config.toml").model.vocab_size == 64
    assert [r["step"] for r in lines(run / "metrics.jsonl") if "valid_loss" in r] == [10, 20, 30, 40]


def test_an_event_that_a_crash_has_cut_confuses_no_later_attempt(tiny, tmp_path):
    run = tmp_path / "runs" / "tiny"
    for attempt in range(4):
        train(load_config(tiny, ["--train.steps=8", "--train.stop_after=1", "--train.eval_samples=1"]))
        if attempt < 3:
            text = (run / "events.jsonl").read_text()
            (run / "events.jsonl").write_text(text[: -15 - attempt])
    events = lines(run / "events.jsonl")
    assert [e["attempt"] for e in events if e["event"] in ("run_started", "resumed")] == [0, 1, 2, 3]
    assert [e["attempt"] for e in events] == sorted(e["attempt"] for e in events)


def test_a_finished_run_says_so_and_goes_on_with_more_steps(tiny, megascale, tmp_path):
    assert megascale("train", tiny, "--train.steps=3").returncode == 0
    repeated = megascale("train", tiny, "--train.steps=3")
    assert repeated.returncode == 0
    assert "complete" in repeated.stdout
    assert "--train.steps=6" in repeated.stdout
    more = megascale("train", tiny, "--train.steps=5", env={DRAW: "1"})
    assert "resuming" in more.stdout
    assert [step for step, _, _ in losses(tmp_path / "runs" / "tiny")] == [1, 2, 3, 4, 5]
    assert (tmp_path / "runs" / "tiny" / "plots" / "loss.png").stat().st_size > 10_000


def kill_when(run: Path, process: Forked, step: int, delay: float) -> None:
    """SIGKILL the process `delay` seconds after `step` stands in the metrics."""
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            break
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_and_restarted_equals_undisturbed_bit_for_bit(tiny, tmp_path):
    rng = random.Random(os.getpid())
    dropout = ["--model.dropout=0.1", "--train.steps=14", "--checkpoint.interval=3"]
    train(load_config(tiny, dropout + ["--train.name=calm"]))
    command = ["train", tiny] + dropout + ["--train.name=killed"]
    run = tmp_path / "runs" / "killed"
    for step in sorted(rng.sample(range(2, 13), 2)):
        kill_when(run, Forked(command), step, rng.random() * 0.02)
    assert Forked(command).wait(120) == 0
    calm = tmp_path / "runs" / "calm"
    assert losses(run) == losses(calm)
    assert lines(run / "samples" / "ledger.jsonl") == lines(calm / "samples" / "ledger.jsonl")
    expected = weights(calm)
    for name, tensor in weights(run).items():
        assert torch.equal(tensor, expected[name]), name


def test_an_interruption_saves_and_the_same_command_goes_on(tiny, tmp_path):
    options = ["--train.steps=100000", "--checkpoint.interval=0"]
    process = Forked(["train", tiny] + options, before=PACED)
    run = tmp_path / "runs" / "tiny"
    while process.poll() is None and not (
        (run / "metrics.jsonl").exists() and '"step": 5,' in (run / "metrics.jsonl").read_text()
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "is saved" in output
    done = checkpoint.latest(run / "checkpoints")
    assert done is not None
    assert losses(run)[-1][0] == done
    result = train(load_config(tiny, [f"--train.steps={done + 2}"]))
    assert [step for step, _, _ in losses(run)] == list(range(1, done + 3))
    assert result.finished


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(tiny, megascale, tmp_path):
    settings = ["--train.steps=60", "--lr.peak=1e30", "--optimizer.clip=0", "--lr.schedule=constant"]
    result = megascale("train", tiny, *settings)
    assert result.returncode == 1
    assert "lr.peak" in result.stderr
    assert "Traceback" not in result.stderr
    run = tmp_path / "runs" / "tiny"
    events = [r["event"] for r in lines(run / "events.jsonl")]
    assert "nonfinite_loss" in events
    assert events[-1] == "run_failed"
    retained = checkpoint.latest(run / "checkpoints")
    assert retained is None or f"step {retained} is kept" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["--model.layrs=3"], 2, ["model.layrs", "model.layers"]),
        (["--train.steps"], 2, ["--train.steps", "VALUE"]),
        (["steps=3"], 2, ["steps=3", "--section.key=value"]),
        (["--train.global_batch=7"], 3, ["train.global_batch=7", "train.micro_batch"]),
        (["--model.sequence_length=9000"], 4, ["sequence_length", "tokens"]),
        (["--data.train=nowhere/train"], 4, ["nowhere/train"]),
        (["--model.vocab_size=60"], 4, ["vocab_size=60", "token id"]),
        (["--train.device=cuda"], 2, ["train.device=cuda", "--train.device=cpu"]),
    ],
)
def test_wrong_input_is_one_paragraph_and_the_right_exit_code(tiny, megascale, arguments, code, parts):
    if "--train.device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = megascale("train", tiny, *arguments)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in " ".join(result.stderr.split()), result.stderr


def test_a_checkpoint_of_another_model_is_refused(tiny, megascale, tmp_path):
    assert megascale("train", tiny, "--train.steps=2").returncode == 0
    result = megascale("train", tiny, "--train.steps=4", "--model.hidden=64")
    assert result.returncode == 4
    assert "hidden" in result.stderr
    assert checkpoint.latest(tmp_path / "runs" / "tiny" / "checkpoints") == 2


def test_dry_run_starts_nothing(tiny, megascale, tmp_path):
    result = megascale("train", tiny, "--dry-run", "--train.steps=12")
    assert result.returncode == 0
    for part in ("steps = 12", "parameters", "FLOPs per token", "memory of a rank", "optimizer"):
        assert part in result.stdout
    assert not (tmp_path / "runs").exists()


def test_runs_under_torchrun(tiny, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command += ["-m", "megascale.cli.main", "train", str(tiny), "--train.steps=3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "runs" / "tiny")[-1][0] == 3


def test_evaluate_and_plot(tiny, megascale, tmp_path):
    train(load_config(tiny, ["--train.steps=2"]))
    run = tmp_path / "runs" / "tiny"
    result = megascale("evaluate", run, "--json")
    assert result.returncode == 0, result.stderr
    expected = lines(run / "metrics.jsonl")[-1]["valid_loss"]
    assert f'"loss": {expected}' in result.stdout
    for options, picture in ((["--out", tmp_path / "a.png"], tmp_path / "a.png"), ([], run / "plots" / "loss.png")):
        picture.unlink(missing_ok=True)
        drawn = megascale("plot", run, *options)
        assert drawn.returncode == 0, drawn.stderr
        assert picture.read_bytes()[:4] == b"\x89PNG"
    missing = megascale("evaluate", tmp_path / "nowhere")
    assert missing.returncode == 4
    assert "run folder" in missing.stderr


def test_an_interruption_while_the_command_line_loads_ends_quietly(tmp_path):
    # What a shell starts in the background ignores interruptions, and so do its children.
    listen = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    (tmp_path / "typer.py").write_text(f"import os, signal\n{listen}\nos.kill(os.getpid(), signal.SIGINT)\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "megascale", "--help"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_the_installed_command_is_the_module(megascale):
    with open(Path(__file__).parents[2] / "pyproject.toml", "rb") as file:
        scripts = tomllib.load(file)["project"]["scripts"]
    assert scripts == {"megascale": "megascale.__main__:main"}
    command = [sys.executable, "-m", "megascale", "--version"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert report == megascale("--version").stdout != ""
