"""`benchmarks ablation`: real runs row by row, a table that adds up, wrong calls refused before any trains."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from benchmarks.training.ablation import PAPER, AblationRun, rows_of, table
from megascale.config import from_tree


def test_rows_are_trained_once_and_kept(tiny, benchmarks, tmp_path):
    arguments = ["--row=all off", "--row=pipeline overlap", "--steps=2", "--warmup=1", "--repeats=2"]
    arguments += [
        "--parallel.pipeline=2",
        "--parallel.data=1",
        "--out",
        tmp_path / "a.json",
        "--plot",
        tmp_path / "a.png",
    ]
    result = benchmarks("ablation", tiny, *arguments)
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "a.json").read_text())
    names = [(run["row"], run["repeat"]) for run in record["runs"]]
    assert names == [("all off", 0), ("pipeline overlap", 0), ("pipeline overlap", 1), ("all off", 1)]
    assert all(len(run["seconds"]) == 2 and min(run["seconds"]) > 0 for run in record["runs"])
    assert record["without_effect"] == ["tensor overlap", "data overlap"]
    off = record["rows"][0]["settings"]
    assert off["overlap.pipeline"] is False
    assert off["model.block"] == "serial"
    assert "pipeline overlap" in result.stdout
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "runs").exists()
    # Existing results are not measured again, and not mixed with other settings.
    before = (tmp_path / "a.json").read_bytes()
    repeated = benchmarks("ablation", tiny, *arguments)
    assert repeated.returncode == 0, repeated.stderr
    assert (tmp_path / "a.json").read_bytes() == before
    second = benchmarks("ablation", tiny, *arguments, "--train.seed=5")
    assert second.returncode == 2
    assert "other settings" in second.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--links=fast"], 2, "--links=fast"),
        (["--links=slow", "--train.device=cpu"], 2, "--links=slow"),
        (["--row=tensor overlap"], 2, "--row=tensor overlap"),
        (["--parallel.tensor=3"], 3, "parallel.tensor=3"),
    ],
)
def test_wrong_calls_are_refused_before_any_row_trains(tiny, benchmarks, tmp_path, arguments, code, part):
    result = benchmarks("ablation", tiny, *arguments)
    assert result.returncode == code, result.stderr
    assert part in result.stderr
    assert not (tmp_path / "bench-ablation.json").exists()


def test_each_row_adds_to_the_one_before_and_the_last_has_everything():
    config = from_tree({"model": {"vocab_size": 64}, "parallel": {"tensor": 2, "pipeline": 2}})
    rows, nothing = rows_of(config, 2, 256, cuda=True)
    assert [row.name for row in rows] == list(PAPER)
    assert nothing == []
    for before, after in pairwise(rows):
        changed = {key for key in after.settings if after.settings[key] != before.settings.get(key)}
        assert changed
        assert before.settings.keys() <= after.settings.keys()
    last = rows[-1].settings
    assert (last["overlap.tensor"], last["overlap.pipeline"], last["overlap.data"]) == ("auto", True, True)
    assert last["train.global_batch"] == 3 * config.train.global_batch
    # A window without an attention kernel that knows it would fail on a GPU.
    assert [row.settings["kernels.attention"] for row in rows[:3]] == ["flash", "flash", "flash_window"]


def test_the_table_takes_medians_and_compounds_gains():
    def run(row: str, repeat: int, seconds: list[float], tokens: int = 100) -> AblationRun:
        return AblationRun(row, "on", repeat, 2, seconds, tokens, None, None, None)

    runs = [run("all off", 0, [1.0, 9.0, 1.0]), run("all off", 1, [1.25]), run("all off", 2, [0.8])]
    runs += [run("window", 0, [0.5]), run("LAMB, 3x batch", 0, [1.0], 300)]
    result = table(["all off", "parallel block", "window", "LAMB, 3x batch"], runs, "on")
    assert [item["row"] for item in result] == ["all off", "window", "LAMB, 3x batch"]
    assert [entry["rate"] for entry in result] == [50.0, 100.0, 150.0]
    assert result[0]["spread"] == pytest.approx((62.5 - 40.0) / 50.0)
    assert [one["over_first"] for one in result] == [1.0, 2.0, 3.0]
    assert result[2]["gain"] == pytest.approx(0.5)
    assert result[2]["paper_over_first"] == pytest.approx(65.3 / 47.7)
