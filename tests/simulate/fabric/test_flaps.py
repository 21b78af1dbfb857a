"""Flapping links: the closed form, and the advice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.errors import ConfigError, DataError
from megascale.simulate.fabric.flaps import (
    advise_timers,
    compute_stalls,
    compute_timer,
    format_environment,
    read_durations,
    score_setting,
)


@pytest.mark.parametrize(
    ("timeout", "lasts", "expected"),
    [
        (14, 0.01, 0.067), (14, 0.5, np.inf), (18, 0.5, 1.07), (18, 2.0, 2.15), (18, 5.0, 5.4), (18, 10.0, np.inf),
        (20, 5.0, 8.6), (20, 10.0, 12.9), (22, 10.0, 17.2),
    ],
)  # fmt: skip
def test_recovery_is_the_next_multiple_of_the_timer(timeout, lasts, expected):
    """Figures of the note's table, worked out by hand."""
    assert compute_stalls(np.array([lasts]), timeout, 7).seconds[0] == pytest.approx(expected, rel=0.02)


@given(st.floats(0, 100), st.integers(14, 24), st.integers(1, 7), st.sampled_from([0.0, 4.0, 16.0]))
def test_data_moves_after_the_link_is_back_and_before_giving_up(lasts, timeout, retries, adaptive):
    times, end = compute_stalls(np.array([lasts, lasts * 2]), timeout, retries, adaptive)
    assert times[0] >= lasts
    assert times[1] >= times[0]
    assert times[0] <= end or np.isinf(times[0])
    if adaptive:
        # Doubling at most doubles the wait, and never waits longer than the fixed timer does.
        assert times[0] <= max(2 * lasts + 1e-4, lasts + compute_timer(timeout)) or np.isinf(times[0])


def test_longer_timers_abort_less_and_idle_more():
    flaps = np.geomspace(0.1, 30, 200)
    short, long = (score_setting(flaps, t, 7, False, 600, 0.0) for t in (18, 22))
    assert short.abort > long.abort
    assert short.idle < long.idle
    assert score_setting(flaps, 22, 7, True, 600, 0.0).idle < long.idle


def test_advice_survives_the_flaps_it_was_given(tmp_path):
    file = tmp_path / "flaps.txt"
    file.write_text("\n".join(["3.0"] * 40 + ["6.5"] * 10))
    advice = advise_timers(None, 1.0, read_durations(file), 600, 0.02)
    assert advice.best.abort == 0
    assert advice.agreement > 0.9
    assert advice.flaps == 50
    text = format_environment(advice.best, "why")
    lines = dict(line.split("=") for line in text.splitlines() if not line.startswith("#"))
    assert lines == {"NCCL_IB_TIMEOUT": str(advice.best.timeout), "NCCL_IB_RETRY_CNT": str(advice.best.retries)}
    assert all(line.startswith(("#", "NCCL_IB_")) for line in text.splitlines())


def test_cheap_restarts_and_dead_links_shorten_the_timer():
    dear = advise_timers(3.0, 1.0, None, 3600, 0.0, adaptive=False, draws=2).best
    cheap = advise_timers(3.0, 1.0, None, 10, 0.5, adaptive=False, draws=2).best
    assert cheap.gives_up < dear.gives_up


def test_bad_flaps_are_refused(tmp_path):
    for text in ("", "x", "-1", "nan"):
        (tmp_path / "f").write_text(text)
        with pytest.raises(DataError, match="--flaps"):
            read_durations(tmp_path / "f")
    with pytest.raises(DataError, match="--flaps"):
        read_durations(tmp_path / "none")
    with pytest.raises(ConfigError, match="--restart"):
        advise_timers(3.0, 1.0, None, -1, 0.0)
    with pytest.raises(ConfigError, match="durations"):
        compute_stalls(np.array([-1.0]), 20, 7)
