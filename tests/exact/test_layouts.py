"""Losses, gradients, weights and moments of every layout are those of the one-process run, in float64."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from megascale.config import from_tree
from megascale.core.batch import NO_FIELDS
from tests.exact.cases import HARD, Case, case, cases
from tests.exact.compare import assert_equal
from tests.exact.training import FEW_STEPS, STEPS, late_gemms, make_engine, train

pytestmark = pytest.mark.xdist_group("processes")

# A sample: `python -m tests.chaos soak --parts layouts` trains a hundred. More of them, or others, by these variables.
EXAMPLES = int(os.environ.get("MEGASCALE_EXACT_EXAMPLES", "8"))
SEED = int(os.environ.get("MEGASCALE_EXACT_SEED", "0"))
PARTS = 4


def check(case: Case, pool, one_process, steps: int, late: bool = False) -> None:
    config = from_tree(case.tree)
    fault = late_gemms if late else nullcontext
    result = pool.run(train, case.world, case.tree, steps, fault, NO_FIELDS, True)
    assert_equal(one_process(case.twin, steps), result, config.model)


@pytest.mark.parametrize("name", HARD)
def test_known_hard(name, pool, one_process):
    # A third step is after the warm-up, and the first between two that gather: of every ZeRO with every optimizer.
    check(HARD[name], pool, one_process, STEPS if "ZeRO" in name and "tied" in name else FEW_STEPS)


def count_open_buckets(rank: int, world: int, tree: dict[str, Any]) -> list[int]:
    """Return the number of buckets in the slots before and after `finish_reductions` of `load_kernels`."""
    engine = make_engine(rank, world, tree)
    slots = engine.data_parallel.gradient_slots
    assert slots is not None
    finish = engine.data_parallel.finish_reductions
    counts = []

    def finish_and_count() -> None:
        counts.append(len(slots.active))
        finish()

    with mock.patch.object(engine.data_parallel, "finish_reductions", finish_and_count):
        engine.load_kernels()
    return [*counts, len(slots.active)]


@pytest.mark.parametrize("zero", [2, 3])
def test_loading_kernels_leaves_no_gradients_behind(zero, pool):
    """The step would reduce the gradients of the blank batch, which are zero, in its own time."""
    layout = case(1, 2, 2, microbatches=2, zero=zero)
    for before, after in pool.run(count_open_buckets, layout.world, layout.tree):
        assert before > 0
        assert after == 0


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
    @given(cases(), st.booleans())
    def check_some(case, late):
        note(from_tree(case.tree).to_toml())
        check(case, pool, one_process, FEW_STEPS, late)

    check_some()
