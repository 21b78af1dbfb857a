"""Hashing: against the binomial form, with and without entropy, polarised."""

from __future__ import annotations

import numpy as np
import pytest

from megascale.errors import ConfigError
from megascale.simulate.fabric import conflicts, ecmp
from megascale.simulate.fabric.ecmp_study import make_ring_flows, study_hash_conflicts
from tests.simulate.fabric.fabric_cases import fabric


@pytest.mark.parametrize(("flows", "uplinks"), [(1, 4), (6, 3), (7, 1), (40, 8)])
def test_the_fullest_uplinks_distribution_is_the_multinomials(flows, uplinks):
    exact = conflicts.compute_fullest_uplink_probabilities(flows, uplinks)
    assert exact.sum() == pytest.approx(1)
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(flows, np.full(uplinks, 1 / uplinks), 20000).max(axis=1)
    observed = np.bincount(drawn, minlength=flows + 1) / 20000
    assert np.abs(observed - exact).max() < 0.02


def test_closed_form_gives_the_notes_table():
    """Figures of an independent calculation made before this code (per-flow mean, worst; utilisation)."""
    for flows, uplinks, capacity, utilisation, mean, worst in (
        (64, 64, 1, 0.64, 1.99, 3.96), (64, 32, 2, 0.73, 1.55, 2.70), (256, 32, 8, 0.86, 1.20, 1.80),
        (1024, 32, 32, 0.93, 1.09, 1.38),
    ):  # fmt: skip
        result = conflicts.compute_expected_conflicts(flows, uplinks, capacity)
        assert result.utilisation == pytest.approx(utilisation, abs=0.006)
        assert result.slowdown == pytest.approx(mean, abs=0.011)
        assert result.worst == pytest.approx(worst, abs=0.011)


def test_hashes_spread_as_the_closed_form_says():
    built = fabric()
    observed = conflicts.count_leaf_uplink_flows(built, make_ring_flows(built, 0.0), 0, 3000)
    closed = conflicts.compute_expected_conflicts(8, built.uplinks.shape[1], 2.0)
    result = conflicts.compute_measured_conflicts(observed, 2.0)
    assert result.utilisation == pytest.approx(closed.utilisation, rel=0.01)
    assert result.worst == pytest.approx(closed.worst, rel=0.02)


def test_more_queue_pairs_help_unless_all_share_a_port():
    built = fabric()
    single, four = study_hash_conflicts(built, [1, 4], 0.0, 100, 0, "qp", False)
    assert four["hashed"]["worst"] < single["hashed"]["worst"]
    assert four["path_worst"] < single["path_worst"]
    single, four = study_hash_conflicts(built, [1, 4], 0.0, 100, 0, "pair", False)
    assert four["hashed"]["worst"] == pytest.approx(single["hashed"]["worst"])


def test_one_seed_everywhere_polarises():
    built = fabric(hosts=128)
    far = ecmp.Flows.from_arrays(np.arange(built.nics), (np.arange(built.nics) + built.nics // 2) % built.nics, 1.0)
    keys = ecmp.hash_five_tuples(far, 0)
    used = [len(np.unique(ecmp.route_flows(built, far, keys, 0, polarised)[:, 2])) for polarised in (False, True)]
    assert used[1] < 0.6 * used[0]


def test_bad_flows_are_refused():
    with pytest.raises(ConfigError, match="bytes"):
        ecmp.Flows.from_arrays([0], [1], -1)
    flows = ecmp.Flows.from_arrays([0], [9999], 1)
    with pytest.raises(ConfigError, match="NIC 9999"):
        ecmp.route_flows(fabric(), flows, ecmp.hash_five_tuples(flows, 0))
    with pytest.raises(ConfigError, match="queue pairs"):
        ecmp.Flows.from_arrays([0], [1], 1).split(0)
    with pytest.raises(ConfigError, match="positive"):
        conflicts.compute_expected_conflicts(0, 4, 1)
    with pytest.raises(ConfigError, match="no uplinks"):
        study_hash_conflicts(fabric(hosts=8, rails=False, hosts_per_set=8), [1], 0.0, 2, 0, "qp", False)
    with pytest.raises(ConfigError, match="no flow"):
        study_hash_conflicts(fabric(), [1], 1.0, 2, 0, "qp", False)
