"""The closed form and the event level agree where they must, and both give the textbook pipeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.core.schedule import compute_ideal_bubble
from megascale.simulate.case import Case
from megascale.simulate.closed import compute_step_parts
from megascale.simulate.event import simulate_step
from megascale.simulate.software import MEGASCALE, MEGATRON_2023
from megascale.simulate.stage_times import compute_stage_times
from tests.simulate.simulator_cases import GPT_13B, calm, case, with_part

SHAPES = st.tuples(
    st.sampled_from([1, 2, 4]),  # tensor
    st.sampled_from([1, 2, 4, 5, 8]),  # pipeline
    st.sampled_from([1, 2, 5]),  # virtual
    st.sampled_from([1, 2, 4]),  # micro-batch
    st.sampled_from([2, 4, 6]),  # rounds of the pipeline
)


def build(shape, software, data=1):
    tensor, pipeline, virtual, micro, rounds = shape
    virtual = 1 if pipeline == 1 or 40 % (pipeline * virtual) else virtual
    batch = pipeline * rounds * micro * data
    return case(tensor, pipeline, virtual, data, micro, batch, software, GPT_13B)


def tolerance(single):
    """Blocking exchanges: the last stage of plain 1F1B has half as many, hops within hosts wait for those between."""
    if single.pp_overlap or single.pipeline == 1:
        return 0.003
    return 0.015 if single.virtual == 1 else 0.006


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.sampled_from([MEGASCALE, MEGATRON_2023]))
def test_levels_agree_on_the_pipeline(shape, software):
    """One replica, no jitter, no slow hosts: schedule, transfers, logits and blocking exchanges are the same."""
    single = build(shape, software)
    cluster = calm()
    assert simulate_step(cluster, single).seconds == pytest.approx(
        float(compute_step_parts(cluster, single).total), rel=tolerance(single)
    )


@settings(max_examples=15, deadline=None)
@given(SHAPES, st.sampled_from([2, 4, 8]))
def test_levels_agree_on_data_parallelism_without_overlap(shape, data):
    single = build(shape, MEGATRON_2023, data)
    cluster = calm()
    # Stages that drain early reduce while others still compute: up to 0.52 % over all of these shapes.
    rel = max(tolerance(single), 0.006)
    assert simulate_step(cluster, single).seconds == pytest.approx(
        float(compute_step_parts(cluster, single).total), rel=rel
    )


@pytest.mark.parametrize("data", [4, 48, 192])
@pytest.mark.parametrize("virtual", [1, 2, 6])
def test_levels_stay_close_with_everything_overlapped(data, virtual):
    """Overlapped collectives meet compute in ways that a formula can only approach."""
    single = case(data=data, virtual=virtual, batch=32 * data)
    cluster = calm()
    assert simulate_step(cluster, single).seconds == pytest.approx(
        float(compute_step_parts(cluster, single).total), rel=0.025
    )


@settings(max_examples=20, deadline=None)
@given(SHAPES)
def test_free_communication_gives_the_ideal_bubble(shape):
    """Without communication the step is m times the last stage and an idle time of (p-1)/(v m) of the others'."""
    single = build(shape, MEGASCALE)
    free = with_part(calm(), "inside", bus=[[2, 1e12]], p2p_gbs=1e12, latency_us=0.0, hop_us=0.0)
    free = with_part(free, "between", gbs=1e12, bus=[[2, 1e12]], p2p_gbs=1e12, latency_us=0.0, hop_us=0.0)
    p = int(single.pipeline)
    v = int(single.virtual)
    m = int(single.microbatches)
    parts, times = compute_step_parts(free, single), compute_stage_times(free, single)
    busy = m * float(times.forward + times.backward)
    idle = compute_ideal_bubble(p, v, m) * busy
    assert float(parts.bubble) == pytest.approx(idle, rel=1e-6, abs=1e-9)
    event = simulate_step(free, single).seconds - float(parts.optimizer)
    logits = m * float(times.last_forward + times.last_backward)
    assert event - busy - logits == pytest.approx(idle, rel=1e-4, abs=1e-6)


def test_lock_step_exchanges_pay_for_jitter_and_overlapped_ones_do_not():
    """The closed form's COUPLING holds against the event level."""
    cluster = with_part(calm(), "stragglers", jitter=0.02)
    for software, most in ((MEGATRON_2023, 0.02), (MEGASCALE, 0.004)):
        single = case(data=4, batch=256, software=software)
        steady = simulate_step(cluster, single).seconds
        shaken = sum(simulate_step(cluster, single, jitter=0.02, seed=s).seconds for s in range(3)) / 3
        assert steady <= shaken * 1.0005
        assert shaken / steady - 1.0 < most
        closed_cost = float(compute_step_parts(cluster, single).total / compute_step_parts(calm(), single).total) - 1.0
        assert closed_cost == pytest.approx(shaken / steady - 1.0, abs=0.004)


def test_parts_add_up():
    single = case(software=MEGATRON_2023)
    parts = compute_step_parts(calm(), single)
    assert sum(float(v) for v in parts.as_dict().values()) == pytest.approx(float(parts.total))
    assert all(float(v) >= 0 for v in parts.as_dict().values())


def test_one_case_or_many_give_the_same():
    """Arrays price as scalars do."""
    single = [
        case(data=d, micro=b, batch=768, software=s) for d in (4, 8) for b in (1, 2) for s in (MEGASCALE, MEGATRON_2023)
    ]
    together = compute_step_parts(calm(), Case.stack(single)).total
    assert np.allclose(together, [float(compute_step_parts(calm(), c).total) for c in single], rtol=1e-12)


def test_zero_2_pays_for_reducing_every_micro_batch():
    once = case(data=8, batch=256)
    each = replace(once, reduces_each_microbatch=True)
    slow_net = with_part(calm(), "between", gbs=1.0, bus=[[2, 0.8]], p2p_gbs=0.8)
    assert float(compute_step_parts(slow_net, each).total) > float(compute_step_parts(slow_net, once).total)
    assert simulate_step(slow_net, each).seconds > simulate_step(slow_net, once).seconds


@pytest.mark.parametrize("pipeline", [1, 2])
def test_long_rounds_hide_a_slow_network_on_both_levels(pipeline):
    """And cost nothing where there is nothing to hide."""
    single = case(1, pipeline, 5, 8 // pipeline, 2, 8 * 2 * 8 // pipeline, model=GPT_13B)
    fast = calm("h200-host")
    slow = with_part(fast, "inside", bus=[[2, 11.2]], p2p_gbs=11.0)
    longer = [replace(single, micro_batch_group_size=size) for size in (pipeline, 4, 8)]
    for level in (lambda net, c: simulate_step(net, c).seconds, lambda net, c: float(compute_step_parts(net, c).total)):
        a, b, c = (level(slow, case) for case in longer)
        assert a > 1.05 * b > 1.05 * 1.05 * c
        assert a - c > 0.3 * (a - level(fast, longer[0]))
        assert level(fast, longer[2]) == pytest.approx(level(fast, longer[0]), rel=0.03)
