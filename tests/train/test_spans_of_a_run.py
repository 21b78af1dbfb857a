"""Spans of a run's ranks: in its metrics, in its spans folder, and in `megascale spans`."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest
import torch

from megascale.config import load
from megascale.core.grid import Grid
from megascale.observe.store.span_messages import get_span_folder, locate_service
from megascale.observe.store.tables import SpanTables
from megascale.parallel.runtime import Runtime
from megascale.train.rank_info import RankInfo
from megascale.train.rank_timers import RankTimers
from tests.conftest import lines
from tests.forked import PACED, Forked

OPTIONS = ["--train.steps=6", "--observe.spans=3", "--checkpoint.interval=0", "--train.eval_interval=0"]


def test_every_step_of_every_rank_is_told(megascale, tiny, tmp_path):
    """Two stages: each waits for the other, and what they say of themselves is a part of the step."""
    result = megascale("train", tiny, *OPTIONS, "--parallel.pipeline=2", "--train.device=cpu")
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    records = [record for record in lines(run / "metrics.jsonl") if "loss" in record]
    for record in records:
        assert 0 < record["compute_seconds"] <= record["seconds"] * 1.05
        assert record["wait_pipeline_seconds"] > 0
        assert record["compute_seconds"] + record["wait_pipeline_seconds"] < record["seconds"] * 1.05
    with SpanTables(run) as tables:
        report = tables.query(
            "SELECT rank, step, sum(count)::BIGINT AS n FROM rollups WHERE action = 'step' GROUP BY ALL"
        )
        assert sorted(zip(*(c.tolist() for c in report.values()), strict=True)) == [
            (rank, step, 1) for rank in (0, 1) for step in range(1, 7)
        ]
        # Whatever was kept in full adds up to its roll-up.
        separate = tables.query(
            "SELECT r.rank, r.step, r.action, r.axis FROM (SELECT rank, step, action, axis, sum(count) AS n, "
            "sum(total_ns) AS t, sum(bytes) AS b FROM rollups GROUP BY ALL) r JOIN (SELECT rank, step, action, axis, "
            "count(*) AS n, sum(end_ns - start_ns) AS t, sum(bytes) AS b FROM spans GROUP BY ALL) s "
            "USING (rank, step, action, axis) WHERE r.n <> s.n OR r.t <> s.t OR r.b <> s.b"
        )
        assert len(separate["rank"]) == 0
        steps = tables.query("SELECT DISTINCT step FROM spans ORDER BY step")
        assert steps["step"].tolist() == [3, 6]
        sent = tables.query(
            "SELECT sum(bytes)::BIGINT AS b FROM spans WHERE rank = 0 AND action = 'transfer' AND step = 3"
        )
        assert sent["b"][0] > 0
        name = tables.query("SELECT rank, pipeline, attempt FROM ranks ORDER BY rank")
        assert name["pipeline"].tolist() == [0, 1]
        assert name["attempt"].tolist() == [0, 0]
    report = megascale("spans", run, "--export", tmp_path / "spans.jsonl")
    assert report.returncode == 0, report.stderr
    assert {"pipeline", "waits,", "own,", "rank"} <= set(report.stdout.split())
    retained = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    assert {span["step"] for span in retained} == {3, 6}
    assert {"forward", "backward", "optimizer", "wait", "step"} <= {span["action"] for span in retained}


def test_spans_of_the_next_steps_are_kept_on_demand(megascale, tiny, tmp_path):
    arguments = ["train", tiny, "--train.steps=100000", "--observe.spans=0", "--checkpoint.at_end=false"]
    arguments += ["--train.device=cpu", "--train.eval_interval=0"]
    training = Forked(arguments, cwd=tmp_path, before=PACED, env={"MEGASCALE_TEST_REST": "0.1"})
    try:
        run = tmp_path / "runs" / "tiny"
        deadline = time.monotonic() + 120
        while not (get_span_folder(run, 0) / "state.json").exists():
            assert time.monotonic() < deadline, "no span service wrote its state"
            assert training.poll() is None
            time.sleep(0.1)
        time.sleep(0.1)
        report = megascale("spans", run, "--steps", "3", "--wait", "100")
        assert report.returncode == 0, report.stdout + report.stderr
        with SpanTables(run) as tables:
            steps = tables.query("SELECT DISTINCT step FROM spans ORDER BY step")["step"].tolist()
        assert len(steps) == 3
        assert steps == list(range(steps[0], steps[0] + 3))
    finally:
        training.kill()
    deadline = time.monotonic() + 60
    while locate_service(get_span_folder(run, 0)).folder.exists():
        assert time.monotonic() < deadline, "the span service outlives its ranks"
        time.sleep(0.1)


def test_timers_can_be_off(megascale, tiny, tmp_path):
    result = megascale("train", tiny, *OPTIONS, "--observe.timers=false", "--train.device=cpu")
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert not (run / "spans").exists()
    assert "compute_seconds" not in lines(run / "metrics.jsonl")[0]
    report = megascale("spans", run)
    assert report.returncode == 4
    assert "observe.timers=true" in report.stderr


def test_without_shared_memory_there_are_times_and_no_spans(monkeypatch, caplog):
    def none(*arguments: object) -> int:
        raise OSError(1, "not permitted")

    monkeypatch.setattr(os, "memfd_create", none)
    runtime = Runtime()
    timers = RankTimers(load(None, []), RankInfo(0, 1, 0, 1, torch.device("cpu")), runtime, Grid(ranks_per_host=1), 0)
    assert "keeps no spans" in caplog.text
    runtime.recorder.begin_step(1)
    runtime.recorder.end_step()
    assert timers.timers is not None
    assert timers.timers.last_totals is not None
    assert timers.timers.last_totals.step == 1
    timers.close()


def test_a_rank_that_ends_leaves_its_span_service(monkeypatch):
    """The service keeps a ring until its rank leaves; the runtime records nothing afterwards."""
    closed: list[str] = []
    link = SimpleNamespace(close=lambda awaits_service: closed.append("link"))
    monkeypatch.setattr(RankTimers, "_connect", lambda *arguments: link)
    runtime = Runtime()
    timers = RankTimers(load(None, []), RankInfo(0, 1, 0, 1, torch.device("cpu")), runtime, Grid(ranks_per_host=1), 0)
    assert runtime.recorder is timers.timers
    timers.close()
    assert closed == ["link"]
    assert type(runtime.recorder) is type(Runtime().recorder)


@pytest.mark.parametrize("arguments", [["--steps", "2"]])
def test_a_run_that_does_not_train_is_not_waited_for(megascale, tiny, tmp_path, arguments):
    result = megascale("train", tiny, *OPTIONS, "--train.device=cpu")
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    report = megascale("spans", run, *arguments, "--wait", "1")
    assert report.returncode == 4
    assert "not training" in report.stderr


def test_a_temporary_folder_that_is_not_private_costs_spans_and_no_run(tiny, tmp_path):
    """Services of a host keep their sockets there; what needs one is refused in a sentence."""
    (tmp_path / f"megascale-{os.getuid()}").touch()
    foreign = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}"
    process = Forked(["train", tiny, "--train.steps=2"], before=foreign)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "rank 0 keeps no spans" in output
    assert "set TMPDIR" in output
    process = Forked(["train", tiny, "--train.steps=4", "--data.loader=host"], before=foreign)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert "set TMPDIR" in output.splitlines()[-1]
    assert "Traceback" not in output
