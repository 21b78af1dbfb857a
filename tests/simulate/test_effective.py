"""Monte Carlo of effective time against what must hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megascale.simulate.effective import DAY, FaultRates, compute_young_daly_interval, find_best_interval, simulate_run

CALM = FaultRates(host_mtbf_days=1e9)


def test_without_faults_only_saving_costs():
    outcome = simulate_run(100_000.0, 100, CALM, 1000.0, trials=20)
    assert np.allclose(outcome.wall, 100_000.0 + 100 * CALM.save_stall)
    assert outcome.faults.sum() == 0


def test_faults_come_as_often_as_they_should():
    work, hosts = 20 * DAY, 1000
    outcome = simulate_run(work, hosts, FaultRates(spares=1000), 600.0, trials=300)
    expected = outcome.wall.mean() / (540 * DAY / hosts)
    assert outcome.faults.mean() == pytest.approx(expected, rel=0.1)


def test_first_order_loss():
    """Half an interval, detection, restart and manual work a fault; a stall an interval."""
    work = 30 * DAY
    hosts = 500
    interval = 900.0
    faults = FaultRates(spares=1000)
    outcome = simulate_run(work, hosts, faults, interval, trials=300)
    rate = hosts / (faults.host_mtbf_days * DAY)
    lost = rate * (interval / 2 + faults.detect + faults.restart + faults.manual_share * faults.manual)
    assert outcome.effective.mean() == pytest.approx(1 - lost - faults.save_stall / interval, abs=0.004)


def test_the_best_interval_is_near_young_daly():
    faults = FaultRates(spares=1000)
    best, curve = find_best_interval(20 * DAY, 1500, faults, trials=150)
    assert 0.4 < best / compute_young_daly_interval(faults, 1500) < 2.6
    shares = [share for _, share in curve]
    assert shares[0] < max(shares) > shares[-1]


def test_more_spares_faster_repair_and_quicker_detection_never_hurt():
    def wall(**change):
        return simulate_run(5 * DAY, 1500, replace(FaultRates(spares=2), **change), 600.0, trials=150).wall.mean()

    base = wall()
    assert wall(spares=20) <= base
    assert wall(repair_days=0.5) <= base
    assert wall(detect=60.0) <= base
    assert wall(spares=0) >= base


def test_same_seed_same_faults():
    first, second = (simulate_run(2 * DAY, 1500, FaultRates(), 600.0, trials=30, seed=7).wall for _ in range(2))
    assert np.array_equal(first, second)
