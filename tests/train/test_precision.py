"""The type that a run computes in where nobody says: the device's, alike on all ranks."""

from __future__ import annotations

import tomllib

import pytest
import torch
from typer.testing import CliRunner

from megascale.api import evaluate, load_config, train
from megascale.cli.main import app
from megascale.config import Config, from_tree, load, resolve_precision
from megascale.errors import ConfigError
from megascale.train import rank_info
from megascale.train.attempt import compare_precision
from megascale.train.rank_info import RankInfo
from tests.conftest import lines


def losses(run):
    return [record["loss"] for record in lines(run / "metrics.jsonl") if "loss" in record]


def test_what_is_set_is_kept():
    assert resolve_precision(Config(), True).train.precision == "bfloat16"
    assert resolve_precision(Config(), False).train.precision == "float32"
    for output in ("fp32", "float32", "float64"):
        config = load(overrides=[f"--train.precision={output}"])
        assert resolve_precision(config, True) is config


def test_who_passes_settings_on_does_not_decide_for_devices_elsewhere():
    """A driver passes settings to its trainers. This once made every launched job train in float32."""
    passed_on = from_tree(tomllib.loads(load(overrides=["--train.steps=3"]).to_toml()))
    assert resolve_precision(passed_on, True).train.precision == "bfloat16"
    for output in ("float32", "bfloat16"):
        passed_on = from_tree(tomllib.loads(load(overrides=[f"--train.precision={output}"]).to_toml()))
        assert {resolve_precision(passed_on, has).train.precision for has in (True, False)} == {output}
    # And what was decided for want of bfloat16 stays, wherever it is read.
    decided = from_tree(tomllib.loads(resolve_precision(Config(), False).to_toml()))
    assert resolve_precision(decided, True).train.precision == "float32"


@pytest.mark.parametrize("command", ["plan", "network placement"])
def test_what_is_said_of_gpus_is_said_of_bfloat16(command, tmp_path):
    """A machine without GPUs plans for bfloat16: memory and traffic of float32 would be twice as large."""
    model = ["--model.preset=gpt-13b", "--model.vocab_size=50304", "--train.global_batch=64", "--parallel.tensor=8"]
    file = tmp_path / "job.toml"
    file.write_text("")
    output = {}
    for precision in ("", "--train.precision=bfloat16", "--train.precision=float32"):
        arguments = command.split() + ([str(file)] * command.startswith("network")) + ["--gpus", "16", "--json"] + model
        result = CliRunner().invoke(app, arguments + ([precision] if precision else []))
        assert result.exit_code == 0, result.output
        output[precision] = result.stdout
    assert output[""] == output["--train.precision=bfloat16"] != output["--train.precision=float32"]


def test_a_simulated_step_is_priced_in_bfloat16_and_in_no_other_precision():
    arguments = ["simulate", "step", "--gpus", "16", "--json", "--model.preset=gpt-13b", "--model.vocab_size=50304"]
    arguments += ["--train.global_batch=64", "--parallel.tensor=8"]
    unset = CliRunner().invoke(app, arguments)
    assert unset.exit_code == 0, unset.output
    assert CliRunner().invoke(app, arguments + ["--train.precision=bfloat16"]).stdout == unset.stdout
    with pytest.raises(ConfigError, match=r"train\.precision=float32 has no price.*set --train\.precision=bfloat16"):
        CliRunner().invoke(app, arguments + ["--train.precision=float32"], catch_exceptions=False)


def test_a_device_with_bfloat16_trains_in_it(tiny, monkeypatch):
    monkeypatch.setattr(rank_info, "has_bfloat16", lambda device: True)
    for name, arguments, retained in (("own", [], "bfloat16"), ("said", ["--train.precision=fp32"], "float32")):
        config = load_config(tiny, [f"--train.name={name}", "--train.steps=2"] + arguments)
        train(config)
        assert load_config(config.run_folder / "config.toml").train.precision == retained
    local, output = (losses(tiny.parent / "runs" / name) for name in ("own", "said"))
    assert local != output
    assert local == pytest.approx(output, rel=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_a_bfloat16_run_is_resumed_and_evaluated_as_it_was_trained(tiny, optimizer):
    """Its weights in use are not its master weights, which alone are saved."""
    arguments = ["--train.precision=bfloat16", f"--optimizer.name={optimizer}", "--train.steps=4", "--lr.peak=0.02"]
    full = load_config(tiny, arguments + ["--train.name=whole"])
    trained = train(full).evaluation
    assert evaluate(full.run_folder, device="cpu").loss == trained.loss
    parts = arguments + ["--train.name=parts"]
    train(load_config(tiny, parts + ["--train.stop_after=2"]))
    resumed = train(load_config(tiny, parts))
    assert losses(load_config(tiny, parts).run_folder) == losses(full.run_folder)
    assert resumed.evaluation.loss == trained.loss


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_that_would_differ_are_told_what_to_set(device):
    info = RankInfo(rank=3, world=4, local_rank=3, local_world=4, device=torch.device(device))
    assert compare_precision("float32", "float32", info) is None
    error = str(compare_precision("float32", "bfloat16", info))
    assert "train.precision is float32 on rank 3 and bfloat16 on rank 0" in error
    assert f"--train.precision={'bfloat16' if device == 'cuda' else 'float32'}" in error
