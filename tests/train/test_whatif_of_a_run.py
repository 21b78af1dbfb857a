"""What-if and timeline of a real run: two stages on two CPU ranks, as their timers recorded them."""

from __future__ import annotations

import json

import pytest

from megascale.core.operation_trace import read_trace

WORDS = ["--train.steps=5", "--observe.spans=1", "--checkpoint.interval=0", "--train.eval_interval=0"]
WORDS += ["--parallel.pipeline=2", "--train.device=cpu"]


@pytest.fixture
def run(megascale, tiny, tmp_path):
    found = megascale("train", tiny, *WORDS)
    assert found.returncode == 0, found.stderr
    (run,) = (tmp_path / "runs").iterdir()
    return run


def test_a_run_is_replayed_asked_and_written_down(megascale, run, tmp_path):
    told = megascale("whatif", run, "--json", "--export", tmp_path / "trace.parquet", "--plot", tmp_path / "map.png")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["steps"] == 4
    assert found["replayed_seconds"] == pytest.approx(found["recorded_seconds"], rel=1e-6)
    assert 0 < found["ideal_seconds"] <= found["recorded_seconds"]
    assert found["original_seconds"] <= found["recorded_seconds"]
    assert set(found["stages"]) == set(found["ranks"]) == {"0", "1"}
    # The replay is about the step that the metrics tell.
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = {record["step"]: record["seconds"] for record in records if "loss" in record}
    assert found["recorded_seconds"] <= 1.05 * sum(seconds[step] for step in (2, 3, 4, 5)) / 4
    assert (tmp_path / "map.png").stat().st_size > 1000
    # What was written down tells the same, without the run.
    again = megascale("whatif", tmp_path / "trace.parquet", "--json")
    assert json.loads(again.stdout) == found
    trace = read_trace(tmp_path / "trace.parquet")
    computes = trace.rows((trace.kind == "forward-compute") & (trace.step == 3))
    assert sorted(computes.microbatch[computes.rank == 1]) == list(range(len(computes) // 2))
    told = megascale("whatif", run, "--steps", "90-99")
    assert told.returncode == 2
    assert "--steps=90-99: spans of all ranks were kept of steps 1, 2, 3, 4, 5 only" in told.stderr
