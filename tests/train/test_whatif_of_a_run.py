"""What-if and timeline of a real run: two stages on two CPU ranks, as their timers recorded them."""

from __future__ import annotations

import gzip
import json

import pytest

from megascale.observe.analysis.operation_trace import read_trace
from megascale.observe.store.tables import SpanTables

OPTIONS = ["--train.steps=5", "--observe.spans=1", "--checkpoint.interval=0", "--train.eval_interval=0"]
OPTIONS += ["--parallel.pipeline=2", "--train.device=cpu"]


@pytest.fixture
def run(megascale, tiny, tmp_path):
    result = megascale("train", tiny, *OPTIONS)
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    return run


def test_a_run_is_replayed_asked_and_written_down(megascale, run, tmp_path):
    report = megascale("whatif", run, "--json", "--export", tmp_path / "trace.parquet", "--plot", tmp_path / "map.png")
    assert report.returncode == 0, report.stderr
    result = json.loads(report.stdout)
    assert result["steps"] == 4
    assert result["replayed_seconds"] == pytest.approx(result["recorded_seconds"], rel=1e-3)
    assert 0 < result["ideal_seconds"] <= result["recorded_seconds"]
    assert result["original_seconds"] <= result["recorded_seconds"]
    assert set(result["stages"]) == set(result["ranks"]) == {"0", "1"}
    # The replay is about the steps that were timed, from the first rank's begin to the last one's end.
    with SpanTables(run) as tables:
        spans = tables.query(
            "SELECT (max(end_ns) - min(start_ns)) / 1e9 AS s FROM spans "
            "WHERE action = 'step' AND step > 1 GROUP BY step"
        )
    assert 0.5 * spans["s"].mean() < result["recorded_seconds"] <= spans["s"].mean() + 1e-6
    assert (tmp_path / "map.png").stat().st_size > 1000
    # The written file gives the same, without the run.
    repeated = megascale("whatif", tmp_path / "trace.parquet", "--json")
    assert json.loads(repeated.stdout) == result
    trace = read_trace(tmp_path / "trace.parquet")
    computes = trace.select_rows((trace.kind == "forward-compute") & (trace.step == 3))
    assert sorted(computes.microbatch[computes.rank == 1]) == list(range(len(computes) // 2))
    report = megascale("whatif", run, "--steps", "90-99")
    assert report.returncode == 2
    assert "--steps=90-99: spans of all ranks exist for steps 1, 2, 3, 4, 5 only" in report.stderr
    _a_timeline(megascale, run, tmp_path)


def _a_timeline(megascale, run, tmp_path):
    """Check the timeline of the same run: each rank's parts add up, and the files agree."""
    events, picture = tmp_path / "step.json.gz", tmp_path / "step.png"
    report = megascale("timeline", run, "--step", "4", "--json", "--out", events, "--out", picture)
    assert report.returncode == 0, report.stderr
    result = json.loads(report.stdout)
    assert result["step"] == 4
    assert [row["pipeline"] for row in result["ranks"]] == [0, 1]
    with SpanTables(run) as tables:
        steps = tables.query("SELECT rank, (end_ns - start_ns) AS ns FROM spans WHERE step = 4 AND action = 'step'")
    length = dict(zip(steps["rank"].tolist(), steps["ns"].tolist(), strict=True))
    for row in result["ranks"]:
        assert sum(row["seconds"].values()) == pytest.approx(length[row["rank"]] / 1e9, rel=1e-9)
        assert min(row["seconds"].values()) >= 0
    assert result["planned_seconds"] > 0
    assert 0 < result["pipeline_seconds"] <= result["seconds"]
    assert result["waits"]
    # Each stage waits for its neighbour.
    assert all(wait["on"] == 1 - wait["rank"] for wait in result["waits"] if wait["axis"] == "pipeline")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    records = json.loads(gzip.decompress(events.read_bytes()))["traceEvents"]
    assert all(record["dur"] >= 0 for record in records if record["ph"] == "X")
    acts = [r for r in records if r["ph"] == "X" and r["tid"] == 0 and r["name"] in ("forward", "backward")]
    plan = [r for r in records if r["ph"] == "X" and r["tid"] == 2]
    named = [sorted((r["pid"], r["name"], r["args"]["microbatch"]) for r in rows) for rows in (acts, plan)]
    assert named[0] == named[1]
    sent, needed = ([r["id"] for r in records if r["ph"] == phase] for phase in "sf")
    assert sent == needed
    # A forward and a backward of each micro-batch crosses the two stages.
    assert len(sent) == len(acts) // 2
    for arguments, output in (
        (["--ranks", "0,5"], "--ranks=0,5: the run has no rank 5; its ranks are 0 to 1"),
        (["--view", "host"], "--view=host is not one of pipeline, tensor, data"),
        (["--step", "77"], "--steps=77: spans of all ranks exist for steps 1, 2, 3, 4, 5 only"),
        (["--out", "step.gif"], "--out=step.gif must end in one of .png"),
    ):
        report = megascale("timeline", run, *arguments)
        assert report.returncode == 2
        assert output in report.stderr
