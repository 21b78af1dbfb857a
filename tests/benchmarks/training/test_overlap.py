"""`python -m benchmarks overlap`: the GEMMs of a layer as the model makes them, timed in real processes."""

from __future__ import annotations

import json

import pytest

from benchmarks.training.overlap import exposed, gemms_of
from megascale.config import from_tree


def test_gemms_are_timed_alone_in_communication_and_in_each_way(benchmarks, tmp_path):
    sizes = ["--model.hidden=64", "--model.heads=4", "--model.ffn_hidden=128", "--model.sequence_length=32"]
    arguments = sizes + ["--model.vocab_size=64", "--train.device=cpu", "--repeats=2"]
    result = benchmarks("overlap", "tiny", *arguments, "--out", tmp_path / "a.json")
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    assert [(case["gemm"], case["backward"]) for case in record["cases"]] == [
        (name, backward) for name in ("QKV", "attention out", "MLP in", "MLP out") for backward in (False, True)
    ]
    for case in record["cases"]:
        assert set(case["seconds"]) == {"alone", "collectives", "off", "async"}
        assert min(case["seconds"].values()) > 0
    assert "no symmetric memory" in result.stdout
    assert "attention out" in result.stdout


@pytest.mark.parametrize("arguments", [["--parallel.tensor=1"], ["--parallel.pipeline=2"], ["--parallel.data=2"]])
def test_other_layouts_are_refused(benchmarks, arguments):
    result = benchmarks("overlap", "tiny", "--train.device=cpu", *arguments)
    assert result.returncode == 2
    assert "--parallel.tensor=2" in result.stderr


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        ({}, [(True, (64,), 96), (False, (32,), 64), (True, (64,), 64), (False, (64,), 64)]),
        ({"block": "parallel"}, [(True, (64,), 160), (False, (32, 64), 64)]),
        ({"block": "parallel", "parallel_norms": 2}, [(True, (64,), 96), (True, (64,), 64), (False, (32, 64), 64)]),
        (
            {"activation": "swiglu", "kv_heads": 2},
            [(True, (64,), 64), (False, (32,), 64), (True, (64,), 128), (False, (64,), 64)],
        ),
    ],
)
def test_gemms_of_a_layer(model, shapes):
    tree = {"model": {"hidden": 64, "heads": 4, "ffn_hidden": 128, **model}, "parallel": {"tensor": 2}}
    result = gemms_of(from_tree(tree))
    assert [(p.gathers, p.inner, p.outer) for p in result] == shapes


def test_exposed_is_the_part_of_the_wire_that_shows():
    seconds = {"alone": 5.0, "collectives": 2.0, "off": 7.0, "async": 6.0, "fused": 5.5}
    assert [exposed(seconds, way) for way in ("off", "async", "fused")] == [1.0, 0.5, 0.25]
