"""The statistic behind slow ranks: its error rates over noise, and what it says of made-up times."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.observe.stragglers import error_rates
from megascale.observe.analysis.slow_ranks import judge_ranks

STEPS = np.arange(1, 51)


def times(ranks: int, seed: int = 0, noise: float = 0.015, spread: float = 0.006) -> np.ndarray:
    random = np.random.default_rng(seed)
    return 0.1 * (1 + spread * random.standard_normal((ranks, 1))) * np.exp(noise * random.standard_normal((ranks, 50)))


def test_error_rates_are_what_is_said_of_them():
    """At most one false alarm occurs in a hundred analyses (here at most 6 of 200), and 10% is always detected."""
    for item in error_rates(3, {2: 200, 8: 100, 64: 60}):
        assert item["0.0"] <= 0.03, item
        assert item["0.1"] >= (0.9 if item["differ"] else 0.99), item
        if item["ranks"] >= 64:
            assert item["0.05"] >= 0.9, item


@pytest.mark.parametrize("ranks", [4, 32])
def test_a_slow_rank_is_named_with_how_much_and_how_sure(ranks):
    busy = times(ranks)
    busy[2] *= 1.1
    result = judge_ranks(busy, np.zeros(ranks, int), STEPS, np.arange(100, 100 + ranks))
    (single,) = result.slow
    assert (single.rank, single.state, single.first, single.last, single.peer_count) == (
        102,
        "persistent",
        1,
        50,
        ranks - 1,
    )
    assert single.excess == pytest.approx(0.10, abs=0.02)
    assert single.excess > single.limit
    assert 0.99 < single.confidence <= 1
    assert np.isnan(result.spread) == (ranks < 16)


def test_stages_are_not_compared_and_what_all_share_is_nobody_s():
    busy = times(8)
    busy[4:] *= 3
    busy[:, 20:] *= 1.5
    assert not judge_ranks(busy, np.repeat([0, 1], 4), STEPS).slow
    lonely = judge_ranks(busy, np.arange(8), STEPS)
    assert (lonely.slow, lonely.uncompared) == ((), 8)
    assert np.isnan(lonely.excess).all()


def test_passing_and_irregular_are_told_from_persistent():
    busy = times(32)
    busy[3, 10:20] *= 1.2
    busy[5, 25:] *= 1.2
    busy[7, ::6] *= 2.0
    states = {item.rank: item for item in judge_ranks(busy, np.zeros(32, int), STEPS).slow}
    assert {rank: rank_state.state for rank, rank_state in states.items()} == {
        3: "passing",
        5: "passing",
        7: "irregular",
    }
    assert (states[3].first, states[3].last) == (11, 20)
    assert (states[5].first, states[5].last) == (26, 50)
    assert states[7].excess == pytest.approx(9 / 50 * np.log(2), abs=0.05)
    busy[5, 20:25] *= 1.2
    assert {rank_state.rank: rank_state.state for rank_state in judge_ranks(busy, np.zeros(32, int), STEPS).slow}[
        5
    ] == "persistent"


def test_steps_that_are_not_told_do_not_count():
    busy = times(4)
    busy[1, ::2] = np.nan
    busy[2, 3:] = np.nan
    busy[3] *= 1.2
    busy[0, 7] = 0.0
    result = judge_ranks(busy, np.zeros(4, int), STEPS)
    assert [item.rank for item in result.slow] == [3]
    assert np.isnan(result.excess[2])
    assert result.uncompared == 1


def test_two_slow_ranks_of_four_are_both_named():
    busy = times(4)
    busy[1:3] *= 1.15
    assert {item.rank for item in judge_ranks(busy, np.zeros(4, int), STEPS).slow} == {1, 2}
