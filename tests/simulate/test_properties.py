"""Laws that any machine obeys: more bandwidth is never slower, a straggler less is never slower."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.core.grid import Grid
from megascale.simulate.calibration import Constants
from megascale.simulate.closed import compute_step_parts, last_host_delay_seconds, slow_host_seconds
from megascale.simulate.cluster import load_cluster
from megascale.simulate.event import draw_hosts, simulate_step
from megascale.simulate.exposed_communication import count_hops_on_host, estimate_contention
from megascale.simulate.network import RingNetwork, flow_slowdown
from megascale.simulate.sensitivity import scale_cluster
from megascale.simulate.software import MEGASCALE, MEGATRON_2023, MEGATRON_DEEPSPEED
from megascale.simulate.stage_times import compute_stage_times, estimate_slowest_deviation
from tests.simulate.simulator_cases import GPT_13B, calm, case, with_part

BANDWIDTHS = st.sampled_from([("inside", "bus"), ("between", "gbs"), ("gpu", "memory_gbs")])
LAYOUTS = st.tuples(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 5]),
    st.sampled_from([1, 2, 8, 16]),
    st.sampled_from([1, 2, 4]),
)
STACKS = st.sampled_from([MEGASCALE, MEGATRON_2023, MEGATRON_DEEPSPEED])


def build(layout, software):
    tensor, pipeline, virtual, data, micro = layout
    virtual = 1 if pipeline == 1 else virtual
    return case(tensor, pipeline, virtual, data, micro, 4 * pipeline * data * micro, software, GPT_13B)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, STACKS, BANDWIDTHS, st.floats(1.01, 8))
def test_more_bandwidth_is_never_slower(layout, software, figure, factor):
    cluster = load_cluster("a100-roce")
    single = build(layout, software)
    faster = scale_cluster(cluster, *figure, factor)
    assert float(compute_step_parts(faster, single).total) <= float(compute_step_parts(cluster, single).total) * (
        1 + 1e-9
    )


@settings(max_examples=20, deadline=None)
@given(LAYOUTS, st.sampled_from([MEGASCALE, MEGATRON_2023]), st.sampled_from([("inside", "bus"), ("between", "gbs")]))
def test_more_bandwidth_is_never_slower_event_by_event(layout, software, figure):
    single, cluster = build(layout, software), calm()
    faster = scale_cluster(cluster, *figure, 2.0)
    assert simulate_step(faster, single).seconds <= simulate_step(cluster, single).seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(LAYOUTS, STACKS, st.floats(1.01, 4))
def test_a_faster_gpu_is_never_slower(layout, software, factor):
    cluster, single = load_cluster("a100-roce"), build(layout, software)
    faster = scale_cluster(cluster, "gpu", "peak_tflops", factor)
    assert float(compute_step_parts(faster, single).total) <= float(compute_step_parts(cluster, single).total)


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 31), min_size=1, max_size=6), st.sampled_from([MEGASCALE, MEGATRON_2023]))
def test_a_straggler_removed_is_never_slower(slow, software):
    """256 GPUs, 32 hosts: take slow hosts away one by one."""
    single, cluster = case(data=4, batch=64, software=software), calm()
    hosts = dict.fromkeys(sorted(slow), 1.1)
    seconds = [simulate_step(cluster, single, slow_hosts=hosts).seconds]
    for host in sorted(slow):
        hosts.pop(host)
        seconds.append(simulate_step(cluster, single, slow_hosts=dict(hosts)).seconds)
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(seconds))
    # The slack before the logits hides a little of a slow middle stage, never all of it.
    assert 1.0 < seconds[0] / seconds[-1] <= 1.1 + 1e-6


@given(st.floats(0, 0.2), st.floats(0, 0.2), st.floats(0, 0.5))
def test_fewer_or_milder_stragglers_never_cost_more(rate, second, by):
    low, high = sorted((rate, second))
    single = case(data=16, batch=1024)
    sample, batch = (with_part(calm(), "stragglers", slow_hosts=q) for q in (low, high))
    constants = Constants(slow_by=by)
    times = compute_stage_times(sample, single)
    small, large = (float(slow_host_seconds(c, single, constants, times)) for c in (sample, batch))
    assert 0.0 <= small <= large + 1e-12 <= by * float(times.forward_kernels) + 1e-9


def test_slow_hosts_cost_what_the_paper_gained_by_removing_them():
    """Section 6.3: about 0.7 MFU points on more than 10,000 GPUs, of 55."""
    single = case(data=192, batch=6144)
    with_them, without = (float(compute_step_parts(c, single).total) for c in (load_cluster("a100-roce"), calm()))
    assert 55 * (with_them / without - 1) == pytest.approx(0.7, abs=0.35)


def test_the_last_of_many_is_later_and_the_slowest_slower():
    cluster, constants = load_cluster("a100-roce"), Constants(fixed=0.2)
    cases = [case(1, 1, 1, d, 1, d, MEGATRON_2023) for d in (8, 64, 1024, 8192)]
    late = [float(last_host_delay_seconds(cluster, one, constants)) for one in cases]
    assert late == sorted(late)
    assert late[0] < 0.12 < 1.0 < late[-1] < 2.0
    # Expected largest of n normal values: tables give 0.564, 1.424, 2.508, 3.241.
    assert estimate_slowest_deviation([1, 2, 8, 100, 1000]) == pytest.approx(
        [0.0, 0.564, 1.424, 2.508, 3.241], abs=0.03
    )


def test_neighbours_stand_where_the_grid_puts_them():
    """Hops of a model that stay on a host, counted rank by rank."""
    cluster = load_cluster("h200-host")
    for tensor, pipeline, data in ((1, 8, 1), (2, 4, 1), (2, 8, 1), (4, 4, 1), (2, 2, 2), (8, 4, 2), (1, 16, 2)):
        grid = Grid(tensor=tensor, data=data, pipeline=pipeline)
        ranks = grid.groups("pipeline")
        near = [sum(a // 8 == b // 8 for a, b in pairwise(model)) for model in ranks]
        single = case(tensor, pipeline, 1, data, 1, pipeline * data, MEGASCALE, GPT_13B)
        assert float(count_hops_on_host(cluster, single)) == pytest.approx(sum(near) / len(near))


def test_leaf_switches_slow_transfers_that_all_leave_them():
    cluster = load_cluster("a100-roce")
    # The research note's Monte Carlo of 64 flows on 32 uplinks that carry two each: 1.55.
    assert flow_slowdown(cluster.between) == pytest.approx(1.55, abs=0.01)
    assert flow_slowdown(load_cluster("a100-hdr").between) == 1.0
    within, across = case(data=4, batch=256), case(data=192, batch=6144)
    assert estimate_contention(cluster, within) == 1.0 < float(estimate_contention(cluster, across))


def test_a_slow_host_slows_its_own_stage_only():
    single, cluster = case(data=4, batch=64), calm()
    event = simulate_step(cluster, single, slow_hosts={5: 1.25})
    assert (event.slow > 1).sum() == 1
    assert event.replicas.max() > event.replicas.min()
    # Host 5 holds ranks 40 to 47: tensor fastest, then data, so stage 1, replica 1.
    assert event.slow[1, 1] == 1.25


def test_the_fleet_is_drawn_by_seed():
    single, cluster = case(data=192, batch=6144), load_cluster("a100-roce")
    assert draw_hosts(cluster, single, 3) == draw_hosts(cluster, single, 3)
    counts = [len(draw_hosts(cluster, single, s)) for s in range(40)]
    assert sum(counts) / 40 == pytest.approx(0.005 * 1536, rel=0.25)


@settings(max_examples=30, deadline=None)
@given(LAYOUTS)
def test_overlap_never_makes_a_step_slower(layout):
    """Each overlap, switched on alone on the baseline."""
    cluster, plain = load_cluster("a100-roce"), build(layout, MEGATRON_2023)
    before = float(compute_step_parts(cluster, plain).total)
    for switch in ("tp_overlap", "pp_overlap", "fused_operators", "parallel_block"):
        assert float(compute_step_parts(cluster, replace(plain, **{switch: True})).total) <= before * (1 + 1e-9)


class HalfSpeed(RingNetwork):
    """A finer network model stands in through the same two methods."""

    def collective(self, bytes, ranks, ranks_per_host):
        return 2.0 * super().collective(bytes, ranks, ranks_per_host)

    def p2p(self, bytes, inside):
        return 2.0 * super().p2p(bytes, inside)


@pytest.mark.parametrize("software", [MEGASCALE, MEGATRON_2023])
def test_another_network_model_can_be_hooked_in(software):
    single, cluster = case(software=software), calm()
    slow = HalfSpeed(cluster)
    assert float(compute_step_parts(cluster, single, network=slow).total) > float(
        compute_step_parts(cluster, single).total
    )
    assert simulate_step(cluster, single, network=slow).seconds > simulate_step(cluster, single).seconds
