"""Sizes that `megascale train --dry-run` prints."""

from __future__ import annotations

from typer.testing import CliRunner

from megascale.cli.main import app


def test_the_flops_of_a_large_run_have_a_prefix_that_suits_them():
    settings = ["--model.preset=llama-8b", "--model.vocab_size=128256", "--train.steps=1000"]
    settings += ["--train.global_batch=8", "--train.device=cpu"]
    output = CliRunner().invoke(app, ["train", *settings, "--dry-run"]).output
    line = next(line for line in output.splitlines() if line.startswith("# the run:"))
    assert line.endswith(" EFLOPs")
    assert float(line.split()[-2]) < 1000
