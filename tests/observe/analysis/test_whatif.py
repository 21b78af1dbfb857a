"""What-if replay: jobs whose answer is known by construction, and ByteDance's published trace where it is at hand."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megascale.cli.whatif import _print_tables
from megascale.errors import ConfigError, DataError
from megascale.observe.analysis.operation_trace import OperationTrace, make_trace, read_trace, write_trace
from megascale.observe.analysis.trace_graph import build_graphs
from megascale.observe.analysis.whatif import SubsetResult, WhatIf, analyse_trace
from tests.observe.analysis.recorded_jobs import Job

PUBLISHED = Path(os.environ.get("MEGASCALE_OTHERS_DATA", "../shared/data")) / "stragglers"


@pytest.mark.parametrize(("stages", "virtual", "microbatches"), [(4, 1, 8), (4, 2, 8), (2, 3, 6), (1, 1, 4)])
def test_a_slow_worker_is_found_and_its_share_is_known(stages, virtual, microbatches):
    slow = stages // 2
    job = Job(stages, virtual, microbatches, replicas=4, slow={(slow, 1): 1.5})
    result = analyse_trace(job.trace)
    assert result.recorded == pytest.approx(job.seconds)
    assert result.replayed == pytest.approx(job.seconds, rel=1e-9)
    assert result.original == pytest.approx(job.seconds, rel=0.01)
    assert result.ideal == pytest.approx(job.ideal, rel=0.01)
    assert result.slow_down == pytest.approx(job.seconds / job.ideal, rel=0.01)
    assert result.slowest == (slow * 4 + 1,)
    assert result.worker_share > 0.9
    assert np.unravel_index(result.scores.argmax(), result.scores.shape) == (slow, 1)
    # Nothing else explains it.
    peers = {rank: part.explains for rank, part in result.ranks.items() if rank not in result.slowest}
    assert max(peers.values()) < 0.1
    assert result.kinds["backward-compute"].explains > result.kinds["forward-compute"].explains > 0.1


def test_a_slow_last_stage_is_the_stages_not_a_ranks():
    job = Job(4, 1, 8, replicas=4, slow={(3, replica): 1.4 for replica in range(4)})
    result = analyse_trace(job.trace, ranks=(12, 0))
    assert result.stage_share > 0.9
    assert result.worker_share < 0.1
    assert result.ranks[0].explains < 0.1
    assert result.stages[3].alone > result.stages[0].alone


def test_two_slow_workers_share_the_blame():
    """Each is in another replica: making one normal changes next to nothing, both in one stage all."""
    job = Job(4, 1, 8, replicas=4, slow={(1, 0): 1.5, (1, 2): 1.5})
    result = analyse_trace(job.trace)
    assert {rank for rank, part in result.ranks.items() if part.alone > 1.2} == {4, 6}
    assert result.stages[1].explains > 0.9
    assert result.ranks[4].explains < 0.2


def test_a_slow_tensor_peer_is_told_by_what_it_did_not_wait():
    """Peers of a compute end together: of the slow worker's, the one that has not waited is slow."""
    single = Job(2, 1, 4, replicas=2, slow={(1, 1): 1.5}).trace
    computes = np.isin(single.kind, ("forward-compute", "backward-compute")) & (single.rank == 3)
    peers = [
        replace(single, rank=single.rank * 2, waited=np.where(computes, single.duration / 3, 0.0)),
        replace(single, rank=single.rank * 2 + 1),
    ]
    trace = OperationTrace(
        **{name: np.concatenate([getattr(peer, name) for peer in peers]) for name in vars(single)},
    )
    result = analyse_trace(trace, ranks=tuple(range(8)))
    assert result.replayed == pytest.approx(result.recorded)
    assert result.slowest == (7,)
    assert result.ranks[7].explains > 0.8
    assert result.ranks[6].explains == pytest.approx(0.0, abs=1e-9)


def test_steps_that_differ_are_replayed_apart_and_broken_ones_left_out():
    long, short = Job(2, 1, 6, steps=2).trace, Job(2, 1, 4, steps=2).trace
    short = replace(short, step=short.step + 10)
    pair = OperationTrace(**{name: np.concatenate([getattr(long, name), getattr(short, name)]) for name in vars(long)})
    graphs, left_out = build_graphs(pair)
    assert sorted(graph.steps for graph in graphs) == [(0, 1), (10, 11)]
    assert not left_out
    lost = ~((pair.step == 1) & (pair.replica == 2) & (pair.kind == "forward-send") & (pair.sequence == 3))
    graphs, left_out = build_graphs(pair.select_rows(lost))
    assert sorted(graph.steps for graph in graphs) == [(0,), (10, 11)]
    assert left_out == {1: "its replicas do different numbers of operations"}


def test_what_cannot_be_replayed_is_said():
    trace = Job(2, 1, 4, steps=1).trace
    with pytest.raises(DataError, match=r"stage 0 has 3 forward-send for 4 forward-compute|no send|no receive"):
        analyse_trace(trace.select_rows(~((trace.kind == "forward-send") & (trace.sequence == 3))))
    with pytest.raises(DataError, match="recorded twice"):
        analyse_trace(trace.select_rows(np.r_[np.arange(len(trace)), 0]))
    with pytest.raises(DataError, match="no operations of stage 1 in data-parallel replica 2"):
        analyse_trace(trace.select_rows(~((trace.stage == 1) & (trace.replica == 2))))
    with pytest.raises(ConfigError, match="--rank=6: the trace has no such rank; its ranks are 0 to 5"):
        analyse_trace(trace, ranks=(6,))


def test_a_trace_comes_back_from_its_file(tmp_path):
    trace = Job(noise=0.1, steps=1).trace
    path = tmp_path / "it's a trace.parquet"
    assert write_trace(trace, path) == len(trace)
    back = analyse_trace(read_trace(path))
    assert (back.original, back.ideal) == pytest.approx(
        (analyse_trace(trace).original, analyse_trace(trace).ideal), rel=1e-12
    )


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"duration": [1.0, -1.0]}, "duration=-1.0"),
        ({"start": [0.0, np.nan]}, "start=nan"),
        ({"stage": [0, 1 << 40]}, "stage=1099511627776"),
        ({"sequence": [0, -1]}, "sequence=-1"),
    ],
)
def test_rows_that_make_no_sense_are_named(change, output):
    columns = {name: getattr(Job(1, 1, 1, 1, 1).trace, name)[:2] for name in vars(Job(1, 1, 1, 1, 1).trace)}
    with pytest.raises(DataError, match=output):
        make_trace(columns | {name: np.array(value) for name, value in change.items()})


def test_files_that_are_no_trace_are_refused(tmp_path):
    import duckdb

    bad = tmp_path / "trace.parquet"
    bad.write_bytes(b"not a table")
    with pytest.raises(DataError, match="cannot be read as a trace"):
        read_trace(bad)
    duckdb.execute(f"COPY (SELECT 1 AS dp_rank, 2 AS stage) TO '{bad}' (FORMAT parquet)")
    with pytest.raises(DataError, match="lacks the columns rank, step, optype"):
        read_trace(bad)
    with pytest.raises(DataError, match="is not a file"):
        read_trace(tmp_path)


def test_many_ranks_take_seconds():
    """256 ranks, 20 steps of 32 micro-batches, every question: a share of the 5 s that a job of 128 ranks may take."""
    trace = Job(8, 1, 16, replicas=16, steps=4, slow={(2, 5): 1.3}, noise=0.05).trace
    begin = time.process_time()
    result = analyse_trace(trace)
    assert result.slowest[0] == 2 * 16 + 5
    assert time.process_time() - begin < 20


@pytest.mark.skipif(not (PUBLISHED / "trace-ST.parquet").is_file(), reason=f"ByteDance's trace is not in {PUBLISHED}")
def test_the_published_trace_gives_the_published_result():
    output = analyse_trace(read_trace(PUBLISHED / "trace-ST.parquet"))
    result = json.loads((PUBLISHED / "result-ST.json").read_text())
    shares = json.loads((PUBLISHED / "ms-ST.json").read_text()) | json.loads((PUBLISHED / "mw-ST.json").read_text())
    recorded = np.mean(list(result["step_t_base"].values()))
    assert (output.recorded, output.original, output.ideal) == pytest.approx(
        (recorded, shares["tori"], shares["tideal"]), rel=1e-4
    )
    assert output.slow_down == pytest.approx(result["blocking_slowdown"], rel=1e-4)
    assert (output.stage_share, output.worker_share) == pytest.approx((shares["Ms"], shares["Mw"]), rel=1e-3)
    for name, parts in (("stage", output.stages), ("dp_rank", output.replicas), ("optype", output.kinds)):
        theirs = result[f"blocking_decompose_by_{name}"]
        assert {str(key): part.alone for key, part in parts.items()} == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize(("saved_seconds", "is_explained"), [(-2e-3, True), (2e-3, False), (-1e-6, False)])
def test_a_negative_share_is_explained(capsys, saved_seconds, is_explained):
    """A row below 0.01 ms is not shown."""
    results = {0: SubsetResult(1.0, saved_seconds / 1e-2, saved_seconds), 1: SubsetResult(1.1, 1.0, 1e-2)}
    report = WhatIf(
        steps=1,
        skipped_steps={},
        recorded=1.0,
        replayed=1.0,
        original=1.0,
        ideal=0.99,
        kinds={},
        stages={},
        replicas={},
        ranks=results,
        scores=np.ones((1, 2)),
        rank_grid=np.arange(2).reshape(1, 2, 1),
        stage_share=math.nan,
        worker_share=1.0,
        slowest=(1,),
    )
    _print_tables(report)
    assert ("shorter than typical" in capsys.readouterr().out) == is_explained
