"""`benchmarks observe` on a small job: what is made is what comes out, and bounds that are missed are told."""

from __future__ import annotations

import numpy as np

from benchmarks.observe import kills
from benchmarks.observe.command import _show_cost
from benchmarks.observe.synthetic_spans import Job, make_records, rows_of_stage
from megascale.core import strict_json
from megascale.core.spans import SpanKind


def test_the_paper_s_job_is_made_of_its_schedule():
    job = Job()
    assert job.world == 12_288
    rows = rows_of_stage(job.schedule(), 3)
    assert len(rows) == len(job.schedule()[3]) + 2
    kinds, counts = np.unique(rows[:, 0], return_counts=True)
    assert dict(zip(kinds.tolist(), counts.tolist(), strict=True))[SpanKind.FORWARD] == 6 * 32
    small = Job(data=1, tensor=1)
    full = list(make_records(small, 2, full=True))
    assert [(rank, step) for rank, step, _ in full] == [(rank, step) for step in (1, 2) for rank in range(8)]
    totals = {rank: records for rank, step, records in make_records(small, 1, full=False)}
    for rank, step, records in full[:8]:
        forward = records[records["kind"] == SpanKind.FORWARD]
        row = totals[rank][totals[rank]["kind"] == SpanKind.FORWARD][0]
        assert step == 1
        assert row["count"] == len(forward)
        lasted = (forward["end_ns"] - forward["start_ns"]).sum()
        assert abs(int(row["total_ns"]) - int(lasted)) <= 2 * len(forward)  # rounded one by one


def test_all_of_it_goes_through_the_ingest_and_is_asked(benchmarks, tmp_path):
    arguments = ["--parts=ingest", "--full-steps=1", "--rollup-steps=2", "--data=1", "--out", tmp_path / "o.json"]
    result = benchmarks("observe", *arguments)
    record = strict_json.loads((tmp_path / "o.json").read_text())["ingest"]
    spans = sum(len(rows_of_stage(Job().schedule(), stage)) + 1 for stage in range(8)) * 8  # and the step itself
    assert record["spans"]["rows"] == spans
    assert record["lost_spans"] == 0
    assert record["questions"]["history of one rank"]["rows"] == record["rollups"]["rows"] / 64
    assert (result.returncode == 0) == ("missed" not in result.stdout)


def test_killed_services_lose_nothing(tmp_path):
    result = kills.measure(tmp_path, kills=3, seed=5)
    assert result["lost"] == 0
    assert result["steps"] > 3


def test_costs_over_their_bound_are_missed():
    single = {
        "name": "a",
        "by": "cpu_seconds",
        "pairs": 200,
        "step": 0.1,
        "share": 0.001,
        "low": 0.0,
        "high": 0.003,
        "bound": 0.004,
    }
    assert _show_cost([single]) == []
    assert "0.50%" in _show_cost([single | {"high": 0.005}])[0]
