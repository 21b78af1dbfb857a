"""Fabrics: counts, wiring, failures, and what cannot be built."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.errors import ConfigError, FitError
from megascale.simulate.fabric.ecmp import Flows, hash_five_tuples, route_flows
from megascale.simulate.fabric.fabric_spec import list_shipped_fabrics, load_fabric, validate_fabric
from megascale.simulate.fabric.max_min import compute_finish_times
from megascale.simulate.fabric.topology import build_topology
from megascale.simulate.fabric_targets import compare_dual_plane, compare_under_subscription
from tests.simulate.fabric.fabric_cases import check_paths, fabric


def test_the_shipped_fabric_has_the_papers_switches():
    built = build_topology(load_fabric("megascale"))
    # 12,288 NICs of 200G fill 6,144 ports of 400G at every tier; 32 of 64 look down on two tiers, all on the third.
    assert built.switch_counts() == {"leaf": 192, "aggregation": 192, "core": 96}
    assert set(built.cable_counts().values()) == {6144}
    for tier in range(3):
        assert built.bandwidth[built.tier == tier].sum() == pytest.approx(2 * 12288 * 25e9)
    # No switch has more links than ports.
    links = np.bincount(built.tail[built.tail >= built.nics] - built.nics)
    assert links[192:].max() <= 64


def test_dual_plane_pods_are_the_paper_s():
    """Qian et al. 2024: 15 segments of 1,024 GPUs, 16 leaf switches each, 60 aggregation switches per plane."""
    built = build_topology(load_fabric("hpn"))
    assert built.spec.gpus == 15360
    assert built.switch_counts() == {"leaf": 15 * 16, "aggregation": 2 * 60, "core": 0}
    assert built.uplinks.shape[1] == 60
    # A plane has half of each NIC and of all cables.
    assert built.bandwidth[built.tier == 0].sum() == pytest.approx(2 * 15360 * 25e9)
    assert built.cable_counts()["leaf to aggregation"] == 2 * 120 * 60
    result, _, passed = compare_dual_plane(256)
    assert passed, result


def test_under_subscribed_leaves_have_more_up_than_down():
    """Gangidi et al. 2024: twice as much, against hash conflicts."""
    built = build_topology(load_fabric("meta"))
    assert built.spec.gpus == 3072
    up, down = (built.bandwidth[built.tier == tier].sum() for tier in (1, 0))
    assert up == pytest.approx(2 * down)
    result, _, passed = compare_under_subscription(64)
    assert passed, result


def test_planes_change_no_time_but_the_parts():
    """Two planes of half the ports and leaf switches twice as wide are one network of the same speed."""
    first, second = fabric(tiers=2, hosts=16), fabric(tiers=2, hosts=16, planes=2, leaf_split=4)
    flows = Flows.from_arrays(np.arange(16), np.arange(16, 32), 1e6)
    times = []
    for built, share in ((first, 1.0), (second, 0.5)):
        paths = route_flows(built, flows, hash_five_tuples(flows, 3), 3)
        times.append(compute_finish_times(paths, share * flows.size, built.bandwidth))
    assert times[1].min() == pytest.approx(times[0].min(), rel=1e-6)
    assert second.switch_counts()["leaf"] == 2 * first.switch_counts()["leaf"]
    with pytest.raises(FitError, match="planes=2"):
        fabric(planes=2, failed=("core0",))
    tree = load_fabric("hpn").model_dump()
    del tree["sources"]["planes"]
    with pytest.raises(ConfigError, match="no source for planes"):
        validate_fabric(tree)


@pytest.mark.parametrize("name", list_shipped_fabrics())
def test_shipped_fabrics_name_their_sources(name):
    spec = load_fabric(name)
    assert all(
        spec.sources[key] for key in type(spec).model_fields if key not in ("name", "failed", "sources", "planes")
    )


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"rails": False, "hosts_per_set": 8}, {"leaf_oversubscription": 2.0}, {"leaf_oversubscription": 0.5},
        {"planes": 2}, {"spine_oversubscription": 2.0},
        {"pod": "rail"}, {"tiers": 2, "hosts": 16}, {"leaf_split": 1}, {"hosts": 8}, {"hosts": 61},
        {"failed": ("leaf3-agg2", "core0")},
    ],
    ids=str,
)  # fmt: skip
def test_every_pair_has_a_path(changes):
    built = fabric(**changes)
    pairs = np.random.default_rng(0).integers(0, built.nics, (2, 300))
    pairs = pairs[:, pairs[0] != pairs[1]]
    flows = Flows.from_arrays(pairs[0], pairs[1], 1.0)
    check_paths(built, flows, route_flows(built, flows, hash_five_tuples(flows, 1), 1))


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 15), max_size=3), st.sets(st.integers(0, 7), max_size=2))
def test_failed_links_and_switches_are_gone_round(leaves, cores):
    down = [f"leaf{leaf}-agg{leaf // 8 * 8}.0" for leaf in leaves if leaf // 8 * 8 < 8] + [f"core{c}" for c in cores]
    try:
        built = fabric(failed=tuple(down))
    except ConfigError:
        return  # a leaf switch of another pod
    flows = Flows.from_arrays(np.arange(64), (np.arange(64) + 50) % built.nics, 1.0)
    check_paths(built, flows, route_flows(built, flows, hash_five_tuples(flows, 2), 2))


def test_a_failed_link_is_not_used():
    full = fabric()
    agg = int(full.uplinks[0, 0])
    broken = fabric(failed=(f"leaf0-agg{agg}",))
    flows = Flows.from_arrays(np.arange(0, 16, 2), np.arange(100, 116, 2), 1.0)
    link = full.first_leaf_uplink
    assert (route_flows(full, flows, hash_five_tuples(flows, 0), 0)[:, 1] == link).any()
    assert not (route_flows(broken, flows, hash_five_tuples(flows, 0), 0)[:, 1] == link).any()


@pytest.mark.parametrize(
    ("changes", "error", "output"),
    [
        ({"hosts": 0}, ConfigError, "hosts"),
        ({"nic_gbps": 0.0}, ConfigError, "nic_gbps"),
        ({"cable_ns": -1.0}, ConfigError, "cable_ns"),
        ({"leaf_oversubscription": 0.0}, ConfigError, "leaf_oversubscription"),
        ({"planes": 0}, ConfigError, "planes"),
        ({"colour": 3}, ConfigError, "colour"),
        ({"leaf_split": 4}, FitError, "leaf_split=2"),
        ({"hosts_per_set": 64}, FitError, "hosts_per_set"),
        ({"tiers": 2, "hosts": 400}, FitError, "tiers=3"),
        ({"failed": ("leaf0",)}, FitError, "no live link"),
        ({"failed": ("agg99",)}, ConfigError, "agg99"),
        ({"failed": ("leaf0-core0",)}, ConfigError, "no such link"),
        ({"failed": tuple(f"leaf0-agg{i}" for i in range(4))}, FitError, "leaf0 without a path"),
    ],
)
def test_what_cannot_be_is_said(changes, error, output):
    with pytest.raises(error, match=output):
        fabric(**changes)


def test_figures_need_sources(tmp_path):
    with pytest.raises(ConfigError, match="no source"):
        validate_fabric({**load_fabric("megascale").model_dump(), "sources": {}})
    with pytest.raises(ConfigError, match="neither a shipped fabric"):
        load_fabric("nothing")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_fabric(str(tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    ("changes", "maximum"),
    [
        # 33 hosts need 17 + 17 ports. 32 hosts need 16 + 16: both NICs of each split cable are in use.
        ({"hosts_per_set": 33}, 32),
        ({"hosts_per_set": 200}, 32),
        ({"hosts_per_set": 33, "rails": False}, 16),
        ({"hosts_per_set": 33, "leaf_split": 1, "nic_gbps": 400.0}, 16),
        ({"hosts_per_set": 60, "leaf_oversubscription": 3.0}, 48),
        ({"hosts_per_set": 33, "leaf_oversubscription": 0.3}, 14),
    ],
    ids=str,
)
def test_the_suggested_set_is_the_largest_that_fits(changes, maximum):
    changes = {"switch_ports": 32, "nics": 2, "hosts": 64, **changes}
    with pytest.raises(FitError, match=f"use hosts_per_set={maximum},"):
        load_fabric("megascale", changes)
    assert load_fabric("megascale", {**changes, "hosts_per_set": maximum}).hosts_per_set == maximum
    with pytest.raises(FitError, match=f"hosts_per_set={maximum + 1} needs"):
        load_fabric("megascale", {**changes, "hosts_per_set": maximum + 1})


def test_more_ports_are_suggested_if_no_set_fits():
    with pytest.raises(FitError, match="use a larger switch_ports, since not even one host fits"):
        load_fabric("megascale", {"nics": 64, "rails": False, "hosts_per_set": 1, "switch_ports": 32})
