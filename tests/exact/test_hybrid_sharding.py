"""Hybrid sharding (parallel.replicate): copies of the sharded state give the one-process run in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from megascale.config import from_tree
from megascale.core.grid import Grid
from megascale.errors import ConfigError
from megascale.parallel.data_parallel import DataParallel
from megascale.rendezvous.group_plan import plan_groups
from tests.exact.cases import Case, case
from tests.exact.compare import assert_equal
from tests.exact.test_graphs import assert_same_bits
from tests.exact.training import FEW_STEPS, RankReport, train

pytestmark = pytest.mark.xdist_group("processes")

COPIES = 2
UNTIED = {"tied_embeddings": False}


def hybrid(layout: Case) -> Case:
    """The case with two copies of its state."""
    tree = layout.tree
    tree = {
        **tree,
        "parallel": {**tree["parallel"], "replicate": COPIES},
        "train": {**tree["train"], "global_batch": COPIES * tree["train"]["global_batch"]},
    }
    return replace(layout, tree=tree, world=COPIES * layout.world)


CASES = {
    "ZeRO-1, tied, small buckets": case(data=2, microbatches=2, parallel={"bucket_elements": 700}),
    "ZeRO-1, one rank per copy": case(microbatches=2),
    "ZeRO-2, TP2, LAMB": case(2, data=2, microbatches=1, zero=2, model=UNTIED, optimizer={"name": "lamb"}),
    "ZeRO-3, accumulation": case(data=2, microbatches=3, zero=3, model=UNTIED),
    "ZeRO-3, two stages, tied, Muon": case(1, 2, 2, microbatches=2, zero=3, optimizer={"name": "muon"}),
}


@pytest.mark.parametrize("name", CASES)
def test_copies_of_the_state_are_exact(name, pool, one_process):
    layout = hybrid(CASES[name])
    result = pool.run(train, layout.world, layout.tree, FEW_STEPS)
    assert_equal(one_process(layout.twin, FEW_STEPS), result, from_tree(layout.tree).model)


def test_copies_stay_equal(pool):
    """Ranks at the same position of two copies hold the same bits."""
    layout = hybrid(CASES["ZeRO-3, accumulation"])
    first, second, third, fourth = pool.run(train, layout.world, layout.tree, FEW_STEPS)
    assert_same_bits(first, third)
    assert_same_bits(second, fourth)


def train_without_sums(rank: int, world: int, tree: dict[str, Any]) -> RankReport:
    """Train where gradients are not summed over copies."""
    with mock.patch.object(DataParallel, "_sum_copies"):
        return train(rank, world, tree, FEW_STEPS)


def test_gradients_that_are_not_summed_over_copies_are_found(pool, one_process):
    """The comparison can fail."""
    layout = hybrid(CASES["ZeRO-3, accumulation"])
    result = pool.run(train_without_sums, layout.world, layout.tree)
    with pytest.raises(AssertionError):
        assert_equal(one_process(layout.twin, FEW_STEPS), result, from_tree(layout.tree).model)


def test_a_copy_is_shared_by_neighbours():
    grid = Grid(data=4, replicate=2)
    ranks = {spec.kind: [] for spec in plan_groups(grid)}
    for spec in plan_groups(grid):
        ranks[spec.kind].append(spec.ranks)
    assert ranks["data_gather"] == ranks["data_reduce"] == ranks["state"] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert ranks["replicate"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert ranks["stage"] == [tuple(range(8))]
    assert "state" not in {spec.kind for spec in plan_groups(Grid(data=8))}


def test_copies_need_shards():
    with pytest.raises(ConfigError, match=r"parallel\.replicate=2 makes copies of sharded state"):
        from_tree({"parallel": {"replicate": 2, "zero": 0}})
