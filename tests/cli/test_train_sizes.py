"""Sizes that `megascale train --dry-run` prints."""

from __future__ import annotations

from typer.testing import CliRunner

from megascale.cli.main import app
from megascale.cli.train import _print_end
from megascale.config import load
from megascale.train.loop import TrainResult


def test_a_run_of_no_steps_has_a_unit_and_a_remedy(tmp_path, capsys):
    settings = ["--model.vocab_size=300", "--train.steps=0", "--train.device=cpu"]
    output = CliRunner().invoke(app, ["train", *settings, "--dry-run"]).output
    assert "# the run: 0 steps, 0 tokens, 0 FLOPs\n" in output
    config = load(None, [*settings, f"--train.runs={tmp_path}"])
    _print_end(config, TrainResult(0, finished=True, loss=None, evaluation=None))
    assert "set more steps, such as --train.steps=1000" in capsys.readouterr().out


def test_the_flops_of_a_large_run_have_a_prefix_that_suits_them():
    settings = ["--model.preset=llama-8b", "--model.vocab_size=128256", "--train.steps=1000"]
    settings += ["--train.global_batch=8", "--train.device=cpu"]
    output = CliRunner().invoke(app, ["train", *settings, "--dry-run"]).output
    line = next(line for line in output.splitlines() if line.startswith("# the run:"))
    assert line.endswith(" EFLOPs")
    assert float(line.split()[-2]) < 1000
