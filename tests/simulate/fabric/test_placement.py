"""Placement: permutations, bytes by tier, files."""

from __future__ import annotations

import numpy as np
import pytest

from megascale.core import strict_json
from megascale.core.grid import Grid
from megascale.errors import ConfigError, DataError, FitError
from megascale.simulate.fabric import placement as p
from megascale.simulate.fabric.collective_flows import ALGORITHMS, make_collective_flows
from tests.simulate.fabric.fabric_cases import fabric

GRID = Grid(tensor=2, data=16, pipeline=4, ranks_per_host=2)


@pytest.mark.parametrize("strategy", p.STRATEGIES)
def test_each_host_is_used_once_and_bytes_are_all_there(strategy):
    built = fabric()
    laid = p.make_placement(GRID, built, strategy, seed=3)
    assert len(set(laid.hosts.tolist())) == GRID.host_count
    sent = p.make_step_flows(laid, "data", 16e6)
    # A ring of 16 sends 15/16 of the tensor from each of 16 members, in 8 groups.
    assert p.sum_bytes_by_tier(built, sent).sum() == pytest.approx(8 * 15 * 16e6)
    assert (p.make_step_flows(laid, "pipeline", 1.0).size.sum()) == 2 * GRID.world_size


def test_groups_are_the_grids():
    laid = p.make_placement(GRID, fabric(), "data")
    for axis in ("data", "pipeline", "tensor"):
        expected = [[int(laid.nic(np.array([r]))[0]) for r in group] for group in GRID.groups(axis)]
        assert sorted(map(list, (g.tolist() for g in laid.groups(axis)))) == sorted(expected)


def test_near_is_better_than_random_is_better_than_adversarial():
    built = fabric()
    over_core = {
        s: p.sum_bytes_by_tier(built, p.make_step_flows(p.make_placement(GRID, built, s, 1), "data", 1.0))[2:].sum()
        for s in p.STRATEGIES
    }
    assert over_core["data"] < over_core["random"] < over_core["adversarial"]


def test_a_file_gives_the_placement_back(tmp_path):
    built = fabric()
    laid = p.make_placement(GRID, built, "random", seed=5)
    file = tmp_path / "placement.json"
    p.write_placement(laid, file, [f"node{i}" for i in range(64)])
    assert (p.make_placement(GRID, built, str(file)).hosts == laid.hosts).all()
    assert strict_json.loads(file.read_text())["nodes"][0] == f"node{laid.hosts[0]}"
    with pytest.raises(DataError, match="grid"):
        p.make_placement(Grid(tensor=2, data=8, pipeline=8, ranks_per_host=2), built, str(file))
    tree = strict_json.loads(file.read_text())
    tree["hosts"][1] = tree["hosts"][0]
    file.write_text(strict_json.dumps(tree))
    with pytest.raises(DataError, match="twice"):
        p.make_placement(GRID, built, str(file))
    tree["hosts"][1] = 64
    file.write_text(strict_json.dumps(tree))
    with pytest.raises(DataError, match="machine 64"):
        p.make_placement(GRID, built, str(file))
    file.write_text("{}")
    with pytest.raises(DataError, match="not a placement file"):
        p.make_placement(GRID, built, str(file))


def test_what_does_not_fit_is_said(tmp_path):
    with pytest.raises(FitError, match="hosts=64"):
        p.make_placement(Grid(tensor=2, data=256, pipeline=4, ranks_per_host=2), fabric(), "data")
    with pytest.raises(FitError, match="nics=2"):
        p.make_placement(Grid(tensor=8, data=4), fabric(), "data")
    with pytest.raises(ConfigError, match="--placement"):
        p.make_placement(GRID, fabric(), "nearby")
    with pytest.raises(ConfigError, match="No such file"):
        p.make_placement(GRID, fabric(), str(tmp_path / "none.json"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_collectives_send_what_they_must(algorithm):
    """Every member takes at least what it lacks; ring and tree send no more than their formulas."""
    members = np.arange(0, 32, 2)  # a NIC on each of 16 hosts
    sent = make_collective_flows(algorithm, [members], 16e6, 2)
    used = np.bincount(sent.target, weights=sent.size, minlength=32)[members]
    least = {"ring": 15e6, "hierarchical": 15e6, "all-to-all": 15 * 16e6 / 256, "tree": 4e6}[algorithm]
    assert (used >= least * (1 - 1e-9)).all()
    total = {"ring": 15, "hierarchical": 15, "all-to-all": 15 / 16, "tree": 15}[algorithm] * 16e6
    assert sent.size.sum() == pytest.approx(total)


def test_collectives_refuse():
    with pytest.raises(ConfigError, match="--algorithm"):
        make_collective_flows("star", [np.arange(4)], 1.0, 1)
    with pytest.raises(ConfigError, match="bytes"):
        make_collective_flows("ring", [np.arange(4)], -1.0, 1)
