"""A run whose ranks divide the tokens of each sequence: training, resuming without it, evaluation and generation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megascale.api import evaluate, load_config, train
from megascale.errors import ConfigError
from tests.conftest import lines


def test_a_run_with_context_ranks_goes_on_without_them(tiny: Path, tokens: Path, tmp_path: Path, megascale) -> None:
    settings = ["--train.precision=float64", "--model.positions=rotary", "--data.loader=host", "--lr.decay_steps=50"]
    started = megascale("train", tiny, *settings, "--parallel.context=2", "--train.steps=3")
    assert started.returncode == 0, started.stderr
    assert "context exchange" in started.stdout
    run = tmp_path / "runs" / "tiny"
    assert train(load_config(tiny, settings + ["--train.steps=5"])).finished
    assert "as the seed and the files determine it" in megascale("data", "ledger", run).stdout
    divided = [line["loss"] for line in lines(run / "metrics.jsonl") if "loss" in line]
    whole = load_config(tiny, settings + ["--train.steps=5", "--train.name=whole"])
    assert train(whole).finished
    expected = [line["loss"] for line in lines(tmp_path / "runs" / "whole" / "metrics.jsonl") if "loss" in line]
    assert divided == pytest.approx(expected, rel=1e-12)

    arguments = ["--file", tokens / "valid", "--context", 2, "--json", "--device", "cpu"]
    evaluated = megascale("evaluate", run, *arguments)
    assert evaluated.returncode == 0, evaluated.stderr
    loss = evaluate(run, str(tokens / "valid"), device="cpu").loss
    assert json.loads(evaluated.stdout)["loss"] == pytest.approx(loss, rel=1e-12)


def test_one_process_alone_is_refused(tiny: Path, tokens: Path, tmp_path: Path) -> None:
    assert train(load_config(tiny, ["--train.steps=1"])).finished
    with pytest.raises(ConfigError, match="--context=2 needs 2 processes and this is one of 1"):
        evaluate(tmp_path / "runs" / "tiny", str(tokens / "valid"), context=2, device="cpu")
