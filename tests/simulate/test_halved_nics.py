"""Both levels say alike what a slower network costs, which is what a planner asks them."""

from __future__ import annotations

import pytest

from megascale.simulate.calibration import Constants
from megascale.simulate.closed import compute_step_parts
from megascale.simulate.cluster import set_value
from megascale.simulate.event import simulate_step
from megascale.simulate.software import MEGASCALE, MEGATRON_2023
from tests.simulate.simulator_cases import calm, case


@pytest.mark.parametrize("software", [MEGASCALE, MEGATRON_2023])
@pytest.mark.parametrize("data", [4, 48, 192])
def test_nics_half_as_fast_cost_the_same_on_both_levels_to_a_point(software, data):
    single, full = case(data=data, batch=32 * data, software=software), calm()
    half = set_value(full, "between", "gbs", full.between.gbs / 2)
    closed, event = (
        100 * (level(half) / level(full) - 1)
        for level in (lambda c: float(compute_step_parts(c, single).total), lambda c: simulate_step(c, single).seconds)
    )
    assert closed > 0.3
    assert closed == pytest.approx(event, abs=1.0)


def test_a_longer_start_never_makes_a_step_shorter():
    """The first gather is charged regardless of the other work at a step's ends."""
    single, cluster = case(data=192, batch=6144), calm()
    seconds = [float(compute_step_parts(cluster, single, Constants(fixed=f)).total) for f in (0.0, 0.05, 0.2, 1.0)]
    events = [simulate_step(cluster, single, Constants(fixed=f)).seconds for f in (0.0, 0.05, 0.2, 1.0)]
    assert seconds == sorted(seconds)
    assert [b - a for a, b in zip(events, seconds, strict=True)] == pytest.approx([seconds[0] - events[0]] * 4)
