"""The open run: killed, stopped, carried to another folder, and equal to an uninterrupted run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.carried_folder import list_pieces, pack_folder, unpack_folder
from benchmarks.training.open_run import select_plan
from benchmarks.training.open_run_plan import PLANS
from benchmarks.training.open_run_report import (
    Kill,
    OpenRunRecord,
    compare_repeated_steps,
    describe_comparison,
    list_failures,
)


def test_a_run_over_two_machines_ends_as_an_uninterrupted_one(tmp_path, benchmarks):
    """The first call ends before the run does; the second has the packed files only, and another folder."""
    first, second, carried, out = (tmp_path / name for name in ("first", "second", "carried", "out"))
    command = ["open-run", "--size", "tiny", "--carry", carried, "--minutes"]
    done = benchmarks(*command, "0.01", "--folder", first)
    assert done.returncode == 0, done.stderr
    assert "the same command goes on" in " ".join(done.stdout.split())
    assert 1 <= len(list_pieces(carried)) <= 6

    done = benchmarks(*command, "9", "--folder", second, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "uninterrupted" not in json.loads((second / "open-run.json").read_text())["result"]

    # The time ends before the run without kills does, and its unfinished state is not compared.
    done = benchmarks(*command, "0.01", "--folder", second, "--uninterrupted")
    assert done.returncode == 0, done.stderr
    assert "uninterrupted" not in json.loads((second / "open-run.json").read_text())["result"]

    done = benchmarks(*command, "9", "--folder", second, "--uninterrupted", "--out", out)
    assert done.returncode == 0, done.stderr
    record = json.loads((second / "open-run.json").read_text())
    assert len(record["calls"]) == 4
    planned = PLANS["tiny"].kill_steps()
    assert [kill["step"] >= step for kill, step in zip(record["kills"], planned, strict=True)] == [True, True]
    assert all(kill["different"] == [] for kill in record["kills"])
    assert all(kill["repeated"] > 0 for kill in record["kills"])
    assert record["result"]["steps"] == 30
    assert record["result"]["state"] == record["result"]["uninterrupted"]
    assert record["result"]["bits_per_byte"] > 0
    assert {file.name for file in out.iterdir()} >= {"open-run.json", "events.jsonl", "metrics.jsonl", "loss.png"}
    assert "have equal bits" in done.stdout


def test_a_prediction_does_not_apply_to_other_settings():
    assert select_plan("one", []).prediction is not None
    assert select_plan("one", ["--lr.peak=1e-3"]).prediction is None


def test_another_folder_is_refused_for_another_size(tmp_path, benchmarks):
    (tmp_path / "open-run.json").write_text('{"size": "one", "kills": []}')
    done = benchmarks("open-run", "--size", "tiny", "--folder", tmp_path)
    assert done.returncode == 2
    assert "--size=one" in done.stderr


def test_a_repeated_step_with_other_bits_is_named():
    kill = Kill(step=4, before={"3": [2.5, 1.0], "4": [2.25, 1.0]})
    records = [{"step": step, "loss": 2.5, "grad_norm": 1.0} for step in (3, 4, 5)]
    compare_repeated_steps(kill, records)
    assert (kill.repeated, kill.different) == (2, [4])


def test_a_run_that_compared_nothing_or_differs_fails():
    plan = PLANS["tiny"]
    kills = [Kill(step=13, before={}, repeated=3), Kill(step=22, before={}, repeated=2)]
    record = OpenRunRecord("tiny", kills=kills, result={"state": "a", "uninterrupted": "a"})
    assert list_failures(record, plan) == []

    kills[0].different = [12]
    kills[1].repeated = 0
    record.result["uninterrupted"] = "b"
    assert list_failures(record, plan) == [
        "after the kill at step 13: 3 repeated steps differ at steps [12]",
        "after the kill at step 22: no step was repeated, so none was compared",
        "the final state is a, and that of the uninterrupted run is b",
    ]
    assert "equal" not in describe_comparison(kills[1])


def test_a_run_without_its_kills_ends_with_an_error(tmp_path, benchmarks):
    """Settings that end the run before the first planned kill leave nothing to compare."""
    out = tmp_path / "out"
    done = benchmarks("open-run", "--size", "tiny", "--folder", tmp_path / "run", "--out", out, "--train.steps=3")
    assert done.returncode == 1
    assert "the run was killed 0 times, and 2 kills are planned" in " ".join(done.stderr.split())
    assert (out / "open-run.json").exists()


@pytest.mark.parametrize("size", ["four", "one"])
def test_the_published_sizes_repeat_steps_after_each_kill(size):
    """A kill lies well between two checkpoints, and the predictions are ordered."""
    plan = PLANS[size]
    for step in plan.kill_steps():
        assert plan.save_interval // 4 <= step % plan.save_interval <= 3 * plan.save_interval // 4
    for expected, lowest, highest in (plan.prediction.loss, plan.prediction.bits_per_byte, plan.prediction.seconds):
        assert lowest < expected < highest


@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=5), pieces=st.integers(1, 8))
def test_a_packed_folder_comes_back(tmp_path_factory, sizes, pieces):
    folder = tmp_path_factory.mktemp("folder")
    (folder / "run").mkdir()
    for number, size in enumerate(sizes):
        (folder / "run" / f"{number}.bin").write_bytes(bytes([number]) * size)
    (folder / "record.json").write_text("{}")
    carried, copy = folder / "carried", folder / "copy"
    size = pack_folder(folder, ["record.json", "run", "absent"], carried, pieces)
    assert len(list_pieces(carried)) <= pieces
    assert size == sum(file.stat().st_size for file in list_pieces(carried))
    unpack_folder(carried, copy)
    for file in [folder / "record.json", *(folder / "run").iterdir()]:
        assert (copy / file.relative_to(folder)).read_bytes() == file.read_bytes()
