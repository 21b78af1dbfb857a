"""Figures of ranks: what is read is what was recorded, and a rank that is not like its peers is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.cli import spans
from megascale.core.spans import SpanAxis, SpanKind
from megascale.errors import ConfigError
from megascale.observe.dashboard import outliers, rank_values
from megascale.observe.dashboard.questions import answer_stragglers
from megascale.observe.store.frames import ROLLUP, ROLLUPS, SPAN, SPANS
from megascale.observe.store.ingest import Ingest
from megascale.observe.store.parquet import ParquetWriter
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.tables import SpanTables, count_complete_steps
from tests.observe.dashboard.conftest import JOB, SLOW, STEPS


@pytest.fixture(scope="module")
def tables(runs):
    with SpanTables(runs / "calm", threads=1) as result:
        yield result


def test_the_slow_rank_is_the_outlier(tables):
    result = rank_values.make_heat_map(tables, "", None, None)
    assert result["figure"]["name"] == "own.step"
    assert result["steps"] == {"first": 1, "last": STEPS, "low": 1, "high": STEPS}
    assert [item["rank"] for item in result["outliers"]] == [SLOW]
    assert result["among"] == "stage"
    assert result["rank"] == list(range(JOB.world))
    assert len(result["hosts"]) == JOB.world // 8
    assert result["outliers"][0]["host"] == result["hosts"][0] == "node-0000"
    locations = {(t, p, d) for t, p, d in zip(result["tensor"], result["pipeline"], result["data"], strict=True)}
    assert len(locations) == JOB.world


def test_values_are_means_of_a_step(tables):
    local = tables.query(
        "SELECT rank, (sum(total_ns) - sum(waited_ns)) / 1e9 / count(*) AS own FROM rollups WHERE action = 'step' "
        "GROUP BY rank ORDER BY rank"
    )
    ranks = rank_values.read_ranks(tables)
    np.testing.assert_allclose(rank_values.read_values(tables, "own.step", 1, STEPS, ranks), local["own"])
    report = rank_values.read_rank_figures(tables, SLOW, None, None)["rows"]
    (step,) = [row for row in report if row[0] == "step"]
    assert step[2] - step[3] == pytest.approx(local["own"][SLOW])
    past = rank_values.read_rank_history(tables, "own.step", SLOW)
    assert past["step"] == list(range(1, STEPS + 1))
    assert past["own"] == past["high"]
    assert np.mean(past["own"]) == pytest.approx(local["own"][SLOW], rel=1e-4)


def test_what_is_no_figure_is_refused(tables):
    for figure in ("nothing", "own.step'; DROP TABLE ranks", "counter.none"):
        with pytest.raises(ConfigError, match="figure="):
            rank_values.make_heat_map(tables, figure, None, None)
    with pytest.raises(ConfigError, match="among="):
        rank_values.make_heat_map(tables, "", None, None, "galaxy")
    assert rank_values.make_heat_map(tables, "", 10**9, 10**9)["value"] == [None] * JOB.world


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 64, 1024]), st.floats(0.001, 0.02))
def test_a_rank_far_off_is_found_whatever_the_spread(seed, ranks, spread):
    values = 1 + spread * np.random.default_rng(seed).standard_normal(ranks).clip(-3, 3)
    values[ranks // 2] = 1 + 40 * spread
    result = outliers.find_outliers(values, np.zeros(ranks, int))
    assert result.outliers[0] == ranks // 2


def test_stages_are_compared_each_for_itself():
    stage = np.repeat([0, 1], 16)
    values = np.where(stage == 0, 1.0, 2.0) + np.tile(np.linspace(0, 0.01, 16), 2)
    assert outliers.find_outliers(values, stage).outliers == []
    values[3] = 1.5  # between the stages, and far from its own
    assert outliers.find_outliers(values, stage).outliers == [3]
    assert outliers.find_outliers(values, stage, "job").outliers == []
    small = outliers.find_outliers(np.array([1.0, 1.0, 9.0]), np.zeros(3, int))
    assert small.outliers == []
    assert np.isnan(small.z).all()
    equal = outliers.find_outliers(np.array([1.0] * 7 + [1.2]), np.zeros(8, int))
    assert equal.outliers == [7]


def test_slow_machines_are_judged_in_the_same_window(tables):
    result = answer_stragglers(tables, None, None)
    assert [item["rank"] for item in result["ranks"]] == [SLOW]
    assert result["ranks"][0]["slower"] == pytest.approx(0.1, abs=0.04)
    assert result["ranks"][0]["evidence"]
    assert answer_stragglers(tables, 2, 9)["steps"] == {"first": 2, "last": 9}


def write_attempt(out: Path, attempt: int, steps: range, ranks: int, total_ns: int, wait_ns: int = 0) -> None:
    """Keep the roll-ups and the spans of an attempt's steps; with `wait_ns`, each waits along the tensor axis."""
    ingest = Ingest(out, job="job", host=0, hostname="here", sink=ParquetWriter, clock_ns=10**18)
    for rank in range(ranks):
        ring = SpanRing(capacity=1 << 20)
        ring.rank, ring.attempt = rank, attempt
        for step in steps:
            rollups = np.zeros(2 if wait_ns else 1, ROLLUP)
            rollups["kind"], rollups["count"] = [SpanKind.STEP, SpanKind.WAIT][: len(rollups)], 1
            rollups["axis"] = [SpanAxis.NONE, SpanAxis.TENSOR][: len(rollups)]
            rollups["total_ns"], rollups["waited_ns"] = [total_ns, wait_ns][: len(rollups)], wait_ns
            rollups["first_ns"], rollups["last_ns"] = 10**9 * (1000 * attempt + step), 10**9 * (1000 * attempt + step)
            ring.write(ROLLUPS, step, rollups, 0)
            spans = np.zeros(1, SPAN)
            spans["kind"], spans["start_ns"], spans["end_ns"] = SpanKind.STEP, 1, 2
            ring.write(SPANS, step, spans, 0)
        ingest.take_frames(ring)
        ring.close()
    ingest.close()


def test_steps_that_were_done_again_count_once_and_as_their_newest_attempt(tmp_path):
    """Attempt 1 of four ranks came to step 40, attempt 2 began behind step 10 with two, and does not wait."""
    out = tmp_path / "spans" / "host=0"
    write_attempt(out, 1, range(1, 41), 4, 3 * 10**9, 2 * 10**9)
    write_attempt(out, 2, range(11, 21), 2, 10**9)
    with SpanTables(tmp_path) as tables:
        rows = spans._summarise_ranks(tables, 20)
        assert [(row["rank"], row["steps"], row["seconds"], row["own"], row["waits"]) for row in rows] == [
            (rank, 10, 1.0, 1.0, {}) for rank in range(2)
        ]
        assert spans._export_spans(tables, "job", tmp_path / "out.jsonl", (11, 12)) == 4
        assert rank_values.read_step_range(tables) == (1, 20)
        ranks = rank_values.read_ranks(tables)
        waits = rank_values.read_values(tables, "waited.step", 11, 20, ranks)
        np.testing.assert_array_equal(waits, [0.0, 0.0, np.nan, np.nan])
        np.testing.assert_array_equal(rank_values.read_values(tables, "wait.tensor", 11, 20, ranks), [np.nan] * 4)
        past = rank_values.read_rank_history(tables, "total.step", 0)
        assert (past["step"], past["own"]) == (list(range(1, 21)), [3.0] * 10 + [1.0] * 10)
    assert count_complete_steps(tmp_path, 11, 15) == 5  # of two ranks: two that are gone are not waited for
    assert count_complete_steps(tmp_path, 21, 25) == 0  # attempt 1 did those
