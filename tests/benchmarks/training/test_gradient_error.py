"""The bench of gradients' errors: what a format rounds away, on a tiny model."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from benchmarks.__main__ import app
from megascale.errors import ConfigError

TINY = ["layers=2", "hidden=32", "heads=2", "sequence_length=32", "vocab_size=64"]


def test_formats_of_fewer_digits_are_further_from_float32(tmp_path, tokens):
    command = ["gradients", "tiny", "--data", str(tokens / "train"), "--steps", "0", "--steps", "4"]
    command += [f"--model.{word}" for word in TINY]
    command += ["--train.device=cpu", "--train.micro_batch=2", "--train.global_batch=4", "--train.threads=1"]
    command += ["--train.precision=float32", "--lr.peak=1e-2", "--out", str(tmp_path / "g.json")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    errors = json.loads((tmp_path / "g.json").read_text())["errors"]
    assert [(e["step"], e["precision"]) for e in errors] == [
        (step, name) for step in (0, 4) for name in ("float32", "float8", "float8_rowwise")
    ]
    for exact, tensor_wise, row_wise in (errors[:3], errors[3:]):
        assert exact["error"] == 0
        assert 0.01 < row_wise["error"] < tensor_wise["error"] < 0.2
        assert set(exact["matrices"]) == set(tensor_wise["matrices"])
        assert all(0.8 < share < 1.2 for share in tensor_wise["projections"].values())
    assert errors[0]["matrices"].keys() >= {"layers.0.mlp.in.weight", "layers.1.attention.output.weight"}


def test_a_token_file_that_is_not_there_is_named(tmp_path):
    done = CliRunner().invoke(app, ["gradients", "tiny", "--data", str(tmp_path / "none")])
    assert isinstance(done.exception, ConfigError)
    assert "megascale data build" in str(done.exception)
