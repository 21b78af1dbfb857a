"""Packets: conservation, losslessness, agreement with the flow level, recovery. One worker compiles the kernel."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.errors import ConfigError, FitError
from megascale.simulate.fabric.control_settings import CONTROLS, SETS, DcqcnSettings, SwiftSettings
from megascale.simulate.fabric.ecmp import Flows, hash_five_tuples, route_flows
from megascale.simulate.fabric.fair_tuning import tune_controls
from megascale.simulate.fabric.flaps import compute_stalls, compute_timer
from megascale.simulate.fabric.max_min import compute_finish_times, compute_jain_index
from megascale.simulate.fabric.packet_settings import Flap, PacketSettings
from megascale.simulate.fabric.packets import simulate_packets
from megascale.simulate.fabric.patterns import all_to_all, build_small_fabric, get_fluid_bandwidth, make_traffic

pytest.importorskip("numba")
pytestmark = pytest.mark.xdist_group("packet_kernel")


@pytest.fixture(scope="module")
def small():
    """32 NICs, four leaf switches, two tiers."""
    return build_small_fabric(32, tiers=2)


def balanced(result) -> bool:
    """Every packet sent is delivered, thrown away for a reason, or under way."""
    c = result.counts
    ended = c["delivered"] + c["dropped"] + c["lost"] + c["out_of_order"] + c["duplicate"] + c["in_flight"]
    return c["sent"] == ended


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(sorted(CONTROLS)), st.booleans(), st.integers(0, 2**20),
    st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31), st.integers(1, 300_000)), min_size=1, max_size=20),
)  # fmt: skip
def test_packets_are_conserved_and_all_flows_finish(small, control, pfc, seed, requested):
    requested = [w for w in requested if w[0] != w[1]] or [(0, 1, 5000)]
    flows = Flows.from_arrays(*zip(*requested, strict=True))
    paths = route_flows(small, flows, hash_five_tuples(flows, seed), seed)
    result = simulate_packets(small, flows, paths, PacketSettings(control=control, pfc=pfc, seed=seed))
    assert balanced(result)
    assert not np.isnan(result.finish).any()
    assert result.counts["delivered"] == np.ceil(flows.size / 4096).sum()
    assert result.counts["dropped"] == 0
    # Not faster than light and line.
    alone = flows.size / 25e9 + 2e-6
    assert (result.finish >= alone * (1 - 1e-9)).all()


def tight(buffer_mb: float):
    return build_small_fabric(32, tiers=2, buffer_mb=buffer_mb)


def test_pfc_keeps_an_incast_lossless_that_drops_without_it():
    built = tight(6.0)
    case = make_traffic(built, "incast", 400e3, 24)
    with_pfc = simulate_packets(built, case.flows, case.paths, PacketSettings(control="none"))
    assert with_pfc.counts["dropped"] == 0
    assert with_pfc.counts["pauses"] > 0
    assert with_pfc.pause_seconds.sum() > 0
    without = simulate_packets(built, case.flows, case.paths, PacketSettings(control="none", pfc=False))
    assert without.counts["dropped"] > 0
    assert without.counts["resent"] > 0
    assert balanced(without)
    assert not np.isnan(without.finish).any()
    assert with_pfc.finish.max() < without.finish.max()
    # Control keeps queues short: that is what it is for.
    swift = simulate_packets(built, case.flows, case.paths, PacketSettings(control="swift"))
    assert swift.mean_rtt < 0.8 * with_pfc.mean_rtt
    assert swift.pause_seconds.sum() < with_pfc.pause_seconds.sum()


def test_swift_gives_the_flow_levels_times(small):
    case = make_traffic(small, "permutation", 2e6, 0)
    settings = PacketSettings(control="swift")
    result = simulate_packets(small, case.flows, case.paths, settings)
    fluid = compute_finish_times(case.paths, case.flows.size, get_fluid_bandwidth(small, settings)) + 4e-6
    assert np.abs(result.finish / fluid - 1).mean() < 0.03


@pytest.mark.parametrize("control", ["dcqcn", "swift", "hybrid-both", "hybrid-cut"])
def test_flows_of_a_bottleneck_share_it(small, control):
    case = make_traffic(small, "incast", 1e6, 8)
    result = simulate_packets(small, case.flows, case.paths, PacketSettings(control=control))
    assert compute_jain_index(1 / result.finish) > 0.9
    assert result.finish.max() > 8e6 / 25e9
    assert result.finish.max() < 1.5 * 8e6 / 25e9


def test_the_same_seed_gives_the_same_run_and_another_one_another(small):
    case = make_traffic(small, "incast", 500e3, 16)
    runs = [simulate_packets(small, case.flows, case.paths, PacketSettings(seed=s)) for s in (1, 1, 2)]
    assert (runs[0].finish == runs[1].finish).all()
    assert runs[0].mean_rtt != runs[2].mean_rtt


@pytest.mark.parametrize(("timeout", "adaptive", "lasts"), [(14, 0.0, 0.1), (14, 0.0, 1.0), (18, 16.0, 0.3)])
def test_a_flap_takes_what_the_closed_form_says(small, timeout, adaptive, lasts):
    flows = Flows.from_arrays([1], [0], 4e6)
    paths = route_flows(small, flows, hash_five_tuples(flows, 0), 0)
    chosen = PacketSettings(control="none", timeout=timeout, adaptive_us=adaptive)
    result = simulate_packets(small, flows, paths, chosen, flaps=(Flap(1, 50e-6, lasts),), horizon=60)
    expected, end = compute_stalls(np.array([lasts]), timeout, 7, adaptive)
    if np.isinf(expected[0]):
        assert np.isnan(result.finish[0])
        assert result.aborted[0] == pytest.approx(end, abs=compute_timer(timeout))
    else:
        assert result.finish[0] == pytest.approx(expected[0], abs=compute_timer(timeout) if not adaptive else 1e-3)
        assert result.counts["lost"] > 0
    assert balanced(result)


def test_later_starts_and_an_end_before_the_last(small):
    flows = Flows.from_arrays([1, 9], [0, 8], 400e3)
    paths = route_flows(small, flows, hash_five_tuples(flows, 0), 0)
    result = simulate_packets(small, flows, paths, PacketSettings(), starts=np.array([0.0, 1e-3]))
    assert result.finish[1] - result.finish[0] == pytest.approx(1e-3, rel=0.01)
    cut = simulate_packets(small, flows, paths, PacketSettings(), starts=np.array([0.0, 1e-3]), horizon=5e-4)
    assert np.isnan(cut.finish[1])
    assert balanced(cut)


def test_bad_input_is_refused(small):
    flows = Flows.from_arrays([1], [0], 1e4)
    paths = route_flows(small, flows, hash_five_tuples(flows, 0), 0)
    for changes, output in (
        ({"control": "cubic"}, "--control"), ({"mtu": 0}, "mtu"), ({"timeout": 40}, "timeout"),
        ({"retries": 9}, "retries"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=output):
            replace(PacketSettings(), **changes)
    with pytest.raises(ConfigError, match="g="):
        replace(SETS["fast"], g=0)
    with pytest.raises(ConfigError, match="negative"):
        DcqcnSettings("", 5, 200, 0.01, rise_us=-1)
    with pytest.raises(ConfigError, match="negative"):
        SwiftSettings(base_us=-1)
    with pytest.raises(ConfigError, match="0 bytes"):
        simulate_packets(small, Flows.from_arrays([1], [0], 0), paths)
    with pytest.raises(ConfigError, match="delays"):
        simulate_packets(small, flows, paths, starts=np.array([-1.0]))
    with pytest.raises(ConfigError, match="flap"):
        Flap(0, -1, 1)
    built = tight(0.5)
    with pytest.raises(FitError, match="headroom"):
        simulate_packets(built, flows, paths)
    with pytest.raises(ConfigError, match="--pattern"):
        make_traffic(small, "star", 1.0, 2)
    with pytest.raises(ConfigError, match="--senders"):
        make_traffic(small, "incast", 1.0, 99)


def test_a_run_that_would_not_end_is_refused_and_one_that_is_interrupted_ends(small):
    endless = make_traffic(small, "incast", 1e12, 16)
    with pytest.raises(ConfigError, match="minutes"):
        simulate_packets(small, endless.flows, endless.paths)
    # Some minutes of a core: the kernel must be told, since it looks at no signals.
    long = make_traffic(small, "incast", 1e11 / 16, 16)
    shares = []

    def interrupt(share: float) -> None:
        shares.append(share)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate_packets(small, long.flows, long.paths, progress=interrupt)
    assert 0 <= shares[0] < 0.1
    assert not [item for item in threading.enumerate() if item.name == "packet-kernel"]
    with pytest.raises(ConfigError, match="flows are too many"):
        all_to_all(build_small_fabric(4096, tiers=2), 1e3, 0, 4096)


def test_progress_ends_with_all_packets(small):
    shares = []
    case = make_traffic(small, "permutation", 200e3, 2)
    result = simulate_packets(small, case.flows, case.paths, progress=shares.append)
    assert result.cpu > 0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_both_parents_are_tuned_on_the_traffic(small):
    """On an incast, tuning must not lose to the settings it began with."""
    case = make_traffic(small, "incast", 200e3, 16)
    chosen, details = tune_controls(case, PacketSettings())
    assert "DCQCN" in details
    assert "Swift" in details
    for control in ("dcqcn", "swift"):
        ends = [
            simulate_packets(small, case.flows, case.paths, replace(s, control=control)).finish.max()
            for s in (PacketSettings(), chosen)
        ]
        assert ends[1] <= ends[0] * 1.011
