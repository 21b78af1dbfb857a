"""`python -m benchmarks layouts`: real runs, equal in float64; what is wrong is said before any of them trains."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.training.layouts import relative


def test_layouts_side_by_side(tiny, benchmarks, tmp_path):
    arguments = ["--steps=3", "--float64", "--within=1e-12", "--parallel.tensor=2", "--against=pipeline=2,data=1"]
    result = benchmarks("layouts", tiny, *arguments, "--out", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    first, second = record["runs"]
    assert [first["name"], second["name"]] == ["TP2 PP1 DP1", "TP1 PP2 DP1"]
    assert len(first["losses"]) == 3
    assert record["precision"] == "float64"
    assert record["largest_loss_difference"] <= 1e-12
    assert f"{first['losses'][2]:.12f}" in result.stdout
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "runs").exists()


def test_a_difference_beyond_the_bound_is_an_error(tiny, benchmarks, tmp_path):
    result = benchmarks("layouts", tiny, "--steps=1", "--within=-1")
    assert result.returncode == 1
    assert "--within=-1" in result.stderr
    assert (tmp_path / "bench-layouts.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--against=tensor=3"], 3, "parallel.tensor=3"),
        (["--against=tensor"], 2, "--against='tensor'"),
        (["--against=tenser=2"], 2, "parallel.tenser"),
    ],
)
def test_wrong_layouts_are_refused_before_any_trains(tiny, benchmarks, tmp_path, arguments, code, part):
    result = benchmarks("layouts", tiny, *arguments)
    assert result.returncode == code, result.stderr
    assert part in result.stderr
    assert not (tmp_path / "bench-layouts.json").exists()


def test_relative_difference():
    assert relative(1.5, 1.0) == 0.5
    assert relative(0.0, 0.0) == 0.0
    assert relative(math.nan, 1.0) == math.inf
