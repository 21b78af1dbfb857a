"""The interval of replays by their cost, and layouts without replays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megascale.config import load
from megascale.core.grid import Grid
from megascale.core.replay_interval import (
    CHECK_TIME,
    MARGIN,
    MAX_COST,
    MIN_INTERVAL,
    compute_interval,
    lengthen_interval,
    list_unsupported_settings,
)


@given(st.integers(1, 10_000))
def test_checks_cost_at_most_one_percent_and_no_shorter_interval_does(microbatches):
    interval = compute_interval(microbatches)
    check_time = MARGIN * CHECK_TIME / microbatches  # in steps
    assert interval >= MIN_INTERVAL
    assert check_time / interval <= MAX_COST * (1 + 1e-9)
    assert interval == MIN_INTERVAL or check_time / (interval - 1) > MAX_COST


def test_measured_runs_cost_at_most_one_percent():
    for step_share, microbatches in ((0.236, 16), (0.393, 8)):  # docs/silent-corruption.md
        assert step_share / compute_interval(microbatches) <= MAX_COST
    assert [compute_interval(m) for m in (1, 2, 4, 8, 15, 16)] == [760, 380, 190, 95, 51, 50]


def test_a_check_of_some_percent_of_a_step_needs_that_many_steps():
    assert [lengthen_interval(percent / 100) for percent in (0, 1, 7, 35, 700)] == [0, 1, 7, 35, 700]
    assert lengthen_interval(0.0701) == 8


def test_unsupported_settings_are_listed_with_remedies():
    config = load(None, [])
    assert list_unsupported_settings(config, Grid(data=2)) == []
    settings = list_unsupported_settings(config, Grid(data=2, replicate=2))
    assert settings == [("parallel.replicate=2", "--parallel.replicate=1")]
