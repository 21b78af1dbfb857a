"""Experts in float8 on a CPU, where dequantised numbers are multiplied in float64: layouts agree.

Each row and each column of an expert's matrix has a scale of its own, so no scale depends on the layout. The order of
sums may move a number to the next float8 value.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.config import from_tree
from megascale.core.batch import Batch
from tests.exact.compare import differences
from tests.exact.test_experts import BALANCED, BIASED, DEEPSEEK, FEW, ROUTED, SINKS, data_case, experts_case
from tests.exact.training import FEW_STEPS, RankReport, make_engine, run_step, train

pytestmark = pytest.mark.xdist_group("processes")
ROWWISE: dict[str, Any] = {"linear_precision": "float8_rowwise"}
TENSORWISE: dict[str, Any] = {"linear_precision": "float8"}

CASES = {
    "data": experts_case(1, 1, 2, experts=BALANCED, zero=1, train=ROWWISE),
    "data, ZeRO-2, recomputed": experts_case(
        1, 1, 2, experts=DEEPSEEK, zero=2, train=ROWWISE, parallel={"recompute": "full", "bucket_elements": 700}
    ),
    "data, ZeRO-3, selective": experts_case(
        1, 1, 2, experts=BALANCED, zero=3, train=ROWWISE, parallel={"recompute": "selective"}
    ),
    "tensor": experts_case(2, experts=DEEPSEEK, train=ROWWISE),
    "tensor, one scale per dense matrix": experts_case(
        2, 1, 2, experts=BALANCED, zero=1, train=TENSORWISE, parallel={"gather_precision": "auto"}
    ),
    "pipeline": experts_case(1, 2, 1, virtual=2, experts=BALANCED, train=TENSORWISE, model={"layers": 4}),
    "over data, gathered": data_case(4, 1, experts=BALANCED, zero=1, train=ROWWISE),
    "over data, all-to-all": data_case(4, 1, experts={**BALANCED, "top_k": 2}, zero=1, train=ROWWISE),
    "over data, all-to-all, ZeRO-3, recomputed": data_case(
        2, 1, 1, 2, experts=FEW, zero=3, train=TENSORWISE, parallel={"recompute": "full"}
    ),
    "over data and tensor, biases": data_case(2, 2, experts=BIASED, model=SINKS, zero=1, train=ROWWISE),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layout_equals_one_process(name, pool, one_process):
    case = CASES[name]
    result = pool.run(train, case.world, case.tree, FEW_STEPS)
    # Scales of dense matrices are those of a rank's micro-batch, so the reference has the same micro-batches.
    reference = one_process({**case.tree, "parallel": {}, "overlap": {}}, FEW_STEPS)
    for subject, difference in differences(reference, result, from_tree(case.tree).model).items():
        if "key.bias" not in subject:  # zero but for rounding
            assert difference < (1e-5 if "tensor" in name else 1e-9), subject


def test_it_is_near_training_without_float8_and_not_equal(one_process):
    losses = {
        name: one_process(experts_case(1, experts=BALANCED, train={"linear_precision": name}).tree, FEW_STEPS).losses
        for name in ("default", "float8", "float8_rowwise")
    }
    for name in ("float8", "float8_rowwise"):
        assert losses[name] != losses["default"]
        assert losses[name] == pytest.approx(losses["default"], rel=0.02)
    assert losses["float8"] != losses["float8_rowwise"]


def count_casts(rank: int, world: int, tree: dict[str, Any]) -> tuple[list[int], bool]:
    """Return how many stacks were cast per step, and whether each cast was that of the weights in use."""
    engine, report = make_engine(rank, world, tree), RankReport()
    chunk = engine.chunks[0]
    linears, stacks = chunk.linears, chunk.collect_expert_stacks()
    cast_counts, is_current = [], True

    def look(step: int) -> None:
        nonlocal is_current
        cached = [linears._weights[id(stack)][1] for stack in stacks.values()]
        cast_counts.append(len(cached))
        for stack, cast in zip(stacks.values(), cached, strict=True):
            assert linears.get_weight(stack) is cast
            fresh = type(linears)().get_weight(stack)
            is_current &= torch.equal(fresh.rows.view(torch.uint8), cast.rows.view(torch.uint8))

    engine.before_update_hooks.append(look)
    for step in (1, 2):
        run_step(engine, step, report)
    return cast_counts, is_current


def test_stacks_are_cast_once_per_step(pool):
    [(cast_counts, is_current)] = pool.run(count_casts, 1, experts_case(1, experts=BALANCED, train=ROWWISE).tree)
    assert cast_counts == [4, 4]  # two layers with two stacks
    assert is_current


def test_casts_of_experts_are_counted():
    """Tokens, and the gradients of the results and of the rows' inner activations, next to those of attention."""
    tree = experts_case(1, experts=ROUTED, train=ROWWISE).tree
    engine = make_engine(0, 1, tree)
    column = torch.arange(9).repeat(1, 1).t() % 21
    step = engine.step(lambda i: Batch(column[:-1], column[1:]), 1, 0.0, count_casts=True)
    clipped, _, cast = step.cast_counts.tolist()
    assert clipped == 0
    hidden, width, top_k = 16, ROUTED["width"], ROUTED["top_k"]
    attention = 2 * hidden + 3 * hidden + hidden  # inputs of both GEMMs, and gradients of their results
    # On a CPU no kernel copies the rows of gradients, so tokens are cast.
    experts = 2 * hidden + top_k * 2 * width
    assert cast == 2 * 8 * 2 * (attention + experts)  # micro-batches, tokens, layers
