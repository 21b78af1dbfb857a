"""Max-min sharing: feasible, fair, conserving, monotone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.errors import ConfigError, FitError
from megascale.simulate.fabric.max_min import compute_fair_rates, compute_finish_times, compute_jain_index


@st.composite
def networks(draw):
    """(paths [F, 3], bandwidth [E]): each flow crosses one to three of a few links."""
    links = draw(st.integers(1, 6))
    bandwidth = np.array(draw(st.lists(st.integers(1, 20), min_size=links, max_size=links)), float)
    flows = draw(st.lists(st.sets(st.integers(0, links - 1), min_size=1, max_size=3), min_size=1, max_size=12))
    paths = np.full((len(flows), 3), -1)
    for row, used in enumerate(flows):
        paths[row, : len(used)] = sorted(used)
    return paths, bandwidth


def loads(paths, rates, links):
    used = paths >= 0
    return np.bincount(paths[used], weights=np.repeat(rates, used.sum(axis=1)), minlength=links)


@settings(max_examples=150, deadline=None)
@given(networks())
def test_no_link_is_overloaded_and_every_flow_has_a_bottleneck(network):
    """The definition of max-min: on each flow's path a full link on which no flow is faster."""
    paths, bandwidth = network
    rates = compute_fair_rates(paths, bandwidth)
    load = loads(paths, rates, len(bandwidth))
    assert (load <= bandwidth * (1 + 1e-9)).all()
    for flow, path in enumerate(paths):
        assert any(
            load[link] >= bandwidth[link] * (1 - 1e-9)
            and rates[flow] >= rates[(paths == link).any(axis=1)].max() * (1 - 1e-9)
            for link in path[path >= 0]
        )


@settings(max_examples=80, deadline=None)
@given(networks(), st.floats(1.1, 4.0))
def test_faster_links_and_fewer_flows_do_no_harm(network, factor):
    paths, bandwidth = network
    rates = compute_fair_rates(paths, bandwidth)
    assert compute_fair_rates(paths, factor * bandwidth) == pytest.approx(factor * rates)
    if len(paths) > 1:
        assert compute_fair_rates(paths[:-1], bandwidth).min() >= rates.min() * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(networks(), st.integers(0, 2**31))
def test_all_bytes_are_sent_and_larger_flows_end_no_earlier(network, seed):
    paths, bandwidth = network
    sizes = np.random.default_rng(seed).uniform(1, 10, len(paths))
    done = compute_finish_times(paths, sizes, bandwidth)
    # No link carried more than it can by its last flow's end.
    used = paths >= 0
    carried = loads(paths, sizes, len(bandwidth))
    for link in range(len(bandwidth)):
        local = (np.where(used, paths, -1) == link).any(axis=1)
        if local.any():
            assert carried[link] <= bandwidth[link] * done[local].max() * (1 + 1e-9)
    assert compute_finish_times(paths, 2 * sizes, bandwidth) == pytest.approx(2 * done)
    late = compute_finish_times(paths, sizes, bandwidth, tolerance=0.05)
    assert late.max() >= done.max() * (1 - 1e-9)
    assert late.max() <= done.max() * 1.2


def test_impossible_sharing_is_refused():
    with pytest.raises(FitError, match="no bandwidth"):
        compute_fair_rates(np.array([[0]]), np.array([0.0]))
    with pytest.raises(ConfigError, match="bytes"):
        compute_finish_times(np.array([[0]]), np.array([-1.0]), np.array([1.0]))


def test_jain():
    assert compute_jain_index(np.array([1.0, 1.0])) == 1
    assert compute_jain_index(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
