"""Experts on every factorisation of four ranks: losses, gradients, weights, moments and biases of one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megascale.config import from_tree
from tests.exact.cases import Case, case
from tests.exact.compare import assert_equal
from tests.exact.training import FEW_STEPS, STEPS, train

pytestmark = pytest.mark.xdist_group("processes")

ROUTED = {"number": 8, "top_k": 3, "width": 12}
BALANCED = {**ROUTED, "bias_rate": 0.01, "sequence_loss": 0.05, "z_loss": 0.02}
DEEPSEEK = {
    **BALANCED,
    "scores": "sigmoid",
    "scaling": 2.5,
    "groups": 4,
    "group_limit": 2,
    "shared_width": 16,
    "shared_gate": True,
    "dense_layers": 1,
}
OPTIMIZERS = ("adamw", "muon", "lamb")
RECOMPUTES = ("none", "full", "selective")


def experts_case(*sizes: int, experts: dict[str, Any], model: dict[str, Any] | None = None, **options: Any) -> Case:
    """Return a case whose layers are experts with gated activations."""
    gated = {"layers": 2, "mlp": "experts", "mlp_bias": False, "activation": "swiglu", "norm": "rmsnorm"}
    return case(*sizes, microbatches=2, model={**gated, "experts": experts, **(model or {})}, **options)


def list_factorisations() -> dict[str, Case]:
    """Return each factorisation of four ranks with each ZeRO, the other settings in turn."""
    cases = {}
    sizes = [(t, p, d) for t, p, d in product((1, 2, 4), repeat=3) if t * p * d == 4]
    for number, ((tensor, pipeline, data), zero) in enumerate(product(sizes, (0, 1, 2, 3))):
        if zero and data == 1:
            continue
        optimizer = OPTIMIZERS[number % 3]
        recompute = RECOMPUTES[number // 3 % 3]
        experts = (ROUTED, BALANCED, DEEPSEEK)[(number + number // 3) % 3]
        virtual = 2 if pipeline == 2 and number % 2 else 1
        name = f"TP{tensor} PP{pipeline}x{virtual} DP{data} ZeRO-{zero} {optimizer} {recompute} {number}"
        cases[name] = experts_case(
            tensor,
            pipeline,
            data,
            experts=experts,
            zero=zero,
            virtual=virtual,
            model={"layers": 4} if pipeline * virtual > 1 else None,
            optimizer={"name": optimizer},
            parallel={"recompute": recompute, "bucket_elements": 700},
        )
    return cases


CASES = list_factorisations() | {
    "a parallel block": experts_case(4, experts=DEEPSEEK, model={"block": "parallel"}),
    "without a gate": experts_case(2, 1, 2, experts=BALANCED, model={"activation": "gelu"}, zero=2),
    "halves of layers, dropout": experts_case(
        2,
        2,
        1,
        experts=BALANCED,
        model={"layers": 3, "dropout": 0.1},
        parallel={"layer_split": [1.5, 1.5], "recompute": "full"},
    ),
    "one expert per rank, every expert chosen": experts_case(4, experts={**BALANCED, "number": 4, "top_k": 4}),
    "layers of two kinds": experts_case(
        2,
        1,
        2,
        experts=BALANCED,
        model={"mlp": "dense", "layer_pattern": "SE", "layer_kinds": {"E": {"mlp": "experts"}}, "layers": 4},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layout_equals_one_process(name, pool, one_process):
    steps = STEPS if "a parallel block" in name else FEW_STEPS
    result = pool.run(train, CASES[name].world, CASES[name].tree, steps)
    assert_equal(one_process(CASES[name].twin, steps), result, from_tree(CASES[name].tree).model)
