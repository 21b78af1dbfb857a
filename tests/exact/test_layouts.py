"""Losses, gradients, weights and moments of every layout are those of the one-process run, in float64."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from megascale.config import from_tree

from .cases import HARD, Case, cases
from .compare import assert_equal
from .training import train

pytestmark = pytest.mark.xdist_group("processes")

# More of them, or other ones, for a search that may take its time.
EXAMPLES = int(os.environ.get("MEGASCALE_EXACT_EXAMPLES", "40"))
SEARCH = bool(os.environ.get("MEGASCALE_EXACT_SEARCH"))


def check(case: Case, pool, one_process) -> None:
    config = from_tree(case.tree)
    assert_equal(one_process(case.twin), pool.run(train, case.world, case.tree), config.model)


@pytest.mark.parametrize("name", HARD)
def test_known_hard(name, pool, one_process):
    check(HARD[name], pool, one_process)


@pytest.mark.timeout(600)
@settings(
    max_examples=EXAMPLES,
    derandomize=not SEARCH,
    database=None,
    deadline=None,
    # A failing layout is small already, and its configuration is printed: no time goes into shrinking it.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(case=cases())
def test_any_layout(case, pool, one_process):
    note(from_tree(case.tree).to_toml())
    check(case, pool, one_process)
