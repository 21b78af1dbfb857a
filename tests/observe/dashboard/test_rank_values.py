"""Figures of ranks: what is read is what was recorded, and a rank that is not like its peers is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.errors import ConfigError
from megascale.observe.dashboard import rank_values
from megascale.observe.dashboard.straggler_answer import slow_machines
from megascale.observe.store.tables import SpanTables
from tests.observe.dashboard.conftest import JOB, SLOW, STEPS


@pytest.fixture(scope="module")
def tables(runs):
    with SpanTables(runs / "calm", threads=1) as found:
        yield found


def test_the_slow_rank_is_the_outlier(tables):
    found = rank_values.heat_map(tables, "", None, None)
    assert found["figure"]["name"] == "own.step"
    assert found["steps"] == {"first": 1, "last": STEPS, "low": 1, "high": STEPS}
    assert [one["rank"] for one in found["outliers"]] == [SLOW]
    assert found["among"] == "stage"
    assert found["rank"] == list(range(JOB.world))
    assert len(found["hosts"]) == JOB.world // 8
    assert found["outliers"][0]["host"] == found["hosts"][0] == "node-0000"
    places = {(t, p, d) for t, p, d in zip(found["tensor"], found["pipeline"], found["data"], strict=True)}
    assert len(places) == JOB.world


def test_values_are_means_of_a_step(tables):
    mine = tables.query(
        "SELECT rank, (sum(total_ns) - sum(waited_ns)) / 1e9 / count(*) AS own FROM rollups WHERE action = 'step' "
        "GROUP BY rank ORDER BY rank"
    )
    ranks = rank_values.ranks_of(tables)
    np.testing.assert_allclose(rank_values.values_of(tables, "own.step", 1, STEPS, ranks), mine["own"])
    told = rank_values.rank_figures(tables, SLOW, None, None)["rows"]
    (step,) = [row for row in told if row[0] == "step"]
    assert step[2] - step[3] == pytest.approx(mine["own"][SLOW])
    past = rank_values.rank_history(tables, "own.step", SLOW)
    assert past["step"] == list(range(1, STEPS + 1))
    assert past["own"] == past["high"]
    assert np.mean(past["own"]) == pytest.approx(mine["own"][SLOW], rel=1e-4)


def test_what_is_no_figure_is_refused(tables):
    for figure in ("nothing", "own.step'; DROP TABLE ranks", "counter.none"):
        with pytest.raises(ConfigError, match="figure="):
            rank_values.heat_map(tables, figure, None, None)
    with pytest.raises(ConfigError, match="among="):
        rank_values.heat_map(tables, "", None, None, "galaxy")
    assert rank_values.heat_map(tables, "", 10**9, 10**9)["value"] == [None] * JOB.world


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 64, 1024]), st.floats(0.001, 0.02))
def test_a_rank_far_off_is_found_whatever_the_spread(seed, ranks, spread):
    values = 1 + spread * np.random.default_rng(seed).standard_normal(ranks).clip(-3, 3)
    values[ranks // 2] = 1 + 40 * spread
    found = rank_values.judge(values, np.zeros(ranks, int))
    assert found.outliers[0] == ranks // 2


def test_stages_are_compared_each_for_itself():
    stage = np.repeat([0, 1], 16)
    values = np.where(stage == 0, 1.0, 2.0) + np.tile(np.linspace(0, 0.01, 16), 2)
    assert rank_values.judge(values, stage).outliers == []
    values[3] = 1.5  # between the stages, and far from its own
    assert rank_values.judge(values, stage).outliers == [3]
    assert rank_values.judge(values, stage, "job").outliers == []
    few = rank_values.judge(np.array([1.0, 1.0, 9.0]), np.zeros(3, int))
    assert few.outliers == []
    assert np.isnan(few.z).all()
    same = rank_values.judge(np.array([1.0] * 7 + [1.2]), np.zeros(8, int))
    assert same.outliers == [7]


def test_slow_machines_are_judged_in_the_same_window(tables):
    found = slow_machines(tables, None, None)
    assert [one["rank"] for one in found["ranks"]] == [SLOW]
    assert found["ranks"][0]["slower"] == pytest.approx(0.1, abs=0.04)
    assert found["ranks"][0]["evidence"]
    assert slow_machines(tables, 2, 9)["steps"] == {"first": 2, "last": 9}
