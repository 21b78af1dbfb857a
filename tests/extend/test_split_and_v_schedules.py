"""Schedules whose backward is two actions, or whose chunks stand in a V: exact, in every layout."""

from __future__ import annotations

from typing import Any

import pytest

from megascale.config import from_tree
from megascale.core.layout import lay_out
from megascale.errors import ConfigError, FitError
from tests.exact.cases import case
from tests.exact.compare import assert_equal
from tests.exact.training import STEPS, Told, train
from tests.extend import schedules  # noqa: F401  registers them, in the worker processes too

pytestmark = pytest.mark.xdist_group("processes")


def train_own(rank: int, world: int, tree: dict[str, Any], steps: int) -> Told:
    """As `train`; that a worker looks for this function here makes it register the schedules."""
    return train(rank, world, tree, steps)


def own_case(schedule: str, *sizes: int, microbatches: int = 5, zero: int = 1, recompute: str = "none", **model: Any):
    virtual = 1 if schedule == "zb_h1" else 2
    return case(
        *sizes,
        microbatches=microbatches,
        virtual=virtual,
        zero=zero,
        parallel={"schedule": schedule, "bucket_elements": 900, "recompute": recompute},
        model={"layers": max(4, virtual * sizes[1]), **model},
    )


CASES = {
    "ZB-H1 PP2": own_case("zb_h1", 1, 2, 1),
    "ZB-H1 PP4": own_case("zb_h1", 1, 4, 1),
    "ZB-H1 PP4 x TP2": own_case("zb_h1", 2, 4, 1, recompute="selective"),
    "ZB-H1 PP2 x DP2, ZeRO-0": own_case("zb_h1", 1, 2, 2, zero=0),
    "ZB-H1 PP2 x TP2 x DP2": own_case("zb_h1", 2, 2, 2, recompute="full"),
    "ZB-H1 PP4 x DP2, ZeRO-2": own_case("zb_h1", 1, 4, 2, zero=2),
    "V PP2": own_case("v", 1, 2, 1),
    "V PP4, tied": own_case("v", 1, 4, 1, tied_embeddings=True),
    "V PP2 x TP2 x DP2": own_case("v", 2, 2, 2),
    "V PP2 x DP2, ZeRO-2": own_case("v", 1, 2, 2, zero=2, tied_embeddings=False),
    "ZB-V PP2 x DP2, tied, ZeRO-0": own_case("zb_v", 1, 2, 2, zero=0, tied_embeddings=True),
    "ZB-V PP2 x DP2, ZeRO-2": own_case("zb_v", 1, 2, 2, zero=2, tied_embeddings=False),
    "ZB-V PP4 x TP2": own_case("zb_v", 2, 4, 1, tied_embeddings=True),
    "ZB-V PP2 x TP2 x DP2": own_case("zb_v", 2, 2, 2, recompute="full", tied_embeddings=False),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(name, pool, one_process):
    local = CASES[name]
    report = pool.run(train_own, local.world, local.tree, STEPS)
    assert_equal(one_process(local.twin), report, from_tree(local.tree).model)
