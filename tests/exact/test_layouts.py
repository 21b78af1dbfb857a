"""Losses, gradients, weights and moments of every layout are those of the one-process run, in float64."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings

from megascale.config import from_tree

from .cases import HARD, Case, cases
from .compare import assert_equal
from .training import train

pytestmark = pytest.mark.xdist_group("processes")

# More of them, or others, for a search that may take its time.
EXAMPLES = int(os.environ.get("MEGASCALE_EXACT_EXAMPLES", "40"))
SEED = int(os.environ.get("MEGASCALE_EXACT_SEED", "0"))
PARTS = 4


def check(case: Case, pool, one_process) -> None:
    config = from_tree(case.tree)
    assert_equal(one_process(case.twin), pool.run(train, case.world, case.tree), config.model)


@pytest.mark.parametrize("name", HARD)
def test_known_hard(name, pool, one_process):
    check(HARD[name], pool, one_process)


@pytest.mark.parametrize("part", range(PARTS))
def test_any_layout(part, pool, one_process):
    @seed(SEED * PARTS + part)
    @settings(
        max_examples=EXAMPLES // PARTS,
        database=None,
        deadline=None,
        # A failing layout is small already, and its configuration is printed: no time goes into shrinking it.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def check_some(case):
        note(from_tree(case.tree).to_toml())
        check(case, pool, one_process)

    check_some()
