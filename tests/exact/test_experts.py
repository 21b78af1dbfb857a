"""Experts on every factorisation of four ranks: losses, gradients, weights, moments and biases of one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from megascale.config import from_tree
from megascale.core.expert_ranks import gathers_expert_tokens
from megascale.core.layout import lay_out
from megascale.errors import TrainingError
from megascale.model.experts import list_expert_layers
from megascale.model.transformer import Chunk
from megascale.train.engine import Engine
from megascale.train.expert_balance import ExpertBalance
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
# Everything that gpt-oss adds to a layer, and a gate.
BIASED = {**BALANCED, "biases": True}
SINKS = {
    "activation": "swiglu_clamped",
    "attention_bias": True,
    "attention_sinks": True,
    "attention_gate": True,
    "kv_heads": 4,
    "window": 5,
    "layer_pattern": "SL",
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
    "biases, sinks and a gate, tensor": experts_case(4, experts=BIASED, model=SINKS, optimizer={"name": "muon"}),
    "biases, sinks and a gate, ZeRO-2": experts_case(2, 1, 2, experts=BIASED, model=SINKS, zero=2),
    "biases, sinks and a gate, ZeRO-3": experts_case(
        1, 1, 2, experts=BIASED, model=SINKS, zero=3, optimizer={"name": "muon"}, parallel={"recompute": "full"}
    ),
    "biases, sinks and a gate, pipeline": experts_case(
        2, 2, 1, experts=BIASED, model=SINKS, optimizer={"name": "lamb"}, parallel={"recompute": "selective"}
    ),
    "sinks and a gate in a parallel block": experts_case(
        2, 1, 2, experts=BALANCED, model={**SINKS, "mlp": "dense", "experts": None, "block": "parallel"}, zero=1
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


def data_case(expert: int, *sizes: int, **options: Any) -> Case:
    """Return a case whose experts are divided over `expert` ranks that read different samples."""
    parallel = {"expert": expert, "experts_over": "data", "bucket_elements": 700, **options.pop("parallel", {})}
    plain = experts_case(*sizes, parallel=parallel, **options)
    train = {**plain.tree["train"], "global_batch": plain.tree["train"]["global_batch"] * expert}
    return Case({**plain.tree, "train": train}, plain.world * expert)


# With three experts a token reaches most ranks, so that all tokens are gathered. With fewer they go by an all-to-all.
FEW = {**BALANCED, "top_k": 1}
OVER_DATA = {
    "4 ranks, gathered": data_case(4, experts=BALANCED, zero=1),
    "4 ranks, all-to-all": data_case(4, experts={**BALANCED, "top_k": 2}, zero=1),
    "4 ranks, without ZeRO, LAMB, gathered": data_case(4, experts=DEEPSEEK, zero=0, optimizer={"name": "lamb"}),
    "2 ranks of 4, ZeRO-2, Muon, gathered": data_case(2, 1, 1, 2, experts=BALANCED, zero=2, optimizer={"name": "muon"}),
    "2 ranks of 4, ZeRO-2, Muon, all-to-all": data_case(2, 1, 1, 2, experts=FEW, zero=2, optimizer={"name": "muon"}),
    "2 ranks of 4, ZeRO-3, recomputed, gathered": data_case(
        2, 1, 1, 2, experts=DEEPSEEK, zero=3, parallel={"recompute": "full"}
    ),
    "2 ranks of 4, ZeRO-3, recomputed, all-to-all": data_case(
        2, 1, 1, 2, experts=FEW, zero=3, parallel={"recompute": "full"}
    ),
    "2 x 2 tensor ranks, biases and sinks, gathered": data_case(2, 2, experts=BIASED, model=SINKS, zero=1),
    "2 x 2 tensor ranks, biases and sinks, all-to-all": data_case(
        2, 2, experts={**BIASED, "top_k": 1}, model=SINKS, zero=1
    ),
    "2 ranks, 2 stages, LAMB, all-to-all": data_case(
        2, 1, 2, experts=FEW, zero=0, optimizer={"name": "lamb"}, parallel={"recompute": "selective"}
    ),
    "one expert per rank, most ranks without tokens": data_case(4, experts={**BALANCED, "number": 4, "top_k": 1}),
}


@pytest.mark.parametrize("name", OVER_DATA)
def test_experts_over_data_equal_one_process(name, pool, one_process):
    config = from_tree(OVER_DATA[name].tree)
    gathers = gathers_expert_tokens(config.model.expert_settings, config.parallel.tensor, config.parallel.expert)
    assert gathers == name.endswith("gathered")
    result = pool.run(train, OVER_DATA[name].world, OVER_DATA[name].tree, FEW_STEPS)
    assert_equal(one_process(OVER_DATA[name].twin, FEW_STEPS), result, from_tree(OVER_DATA[name].tree).model)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_equals_one_process(name, pool, one_process):
    steps = STEPS if "a parallel block" in name else FEW_STEPS
    result = pool.run(train, CASES[name].world, CASES[name].tree, steps)
    assert_equal(one_process(CASES[name].twin, steps), result, from_tree(CASES[name].tree).model)


class DeadPeer:
    """An exchange whose peer has died."""

    def check(self) -> None:
        raise TrainingError("rank 1 has died")


def test_a_dead_peer_of_the_experts_is_seen():
    """Its tokens are missing in the results, so the step must not be used."""
    engine = Engine(lay_out(from_tree(experts_case(1, experts=ROUTED).tree), 1), None, torch.device("cpu"))
    engine.check_peers()
    engine._expert_axis = replace(engine._expert_axis, exchange=DeadPeer())
    with pytest.raises(TrainingError, match="rank 1 has died"):
        engine.check_peers()


def test_a_bias_rises_where_the_global_batch_chose_too_rarely():
    config = from_tree(experts_case(1, experts={**ROUTED, "number": 4, "top_k": 1, "bias_rate": 0.1}).tree)
    chunk = Chunk(config.model, range(2), is_first=True, is_last=True)
    balance = ExpertBalance(config.model, [chunk], 16, torch.device("cpu"), counts_tokens=True, ranks=2)
    summed = torch.tensor([8.0, 0, 4, 4, 7, 7, 1, 1, 0.5, 0.25], dtype=torch.float64)
    counts = balance.update(summed, torch.tensor(False))
    first, second = list_expert_layers([chunk])
    torch.testing.assert_close(first.router_bias, torch.tensor([-0.1, 0.1, 0, 0]))
    torch.testing.assert_close(second.router_bias, torch.tensor([-0.1, -0.1, 0.1, 0.1]))
    balance.update(summed, torch.tensor(True))
    torch.testing.assert_close(first.router_bias, torch.tensor([-0.1, 0.1, 0, 0]))
    summary = counts.summarise()
    assert summary["dead_experts"] == 1
    assert summary["expert_load_max"] == 2.0
    assert summary["expert_rank_load_max"] == 1.75
    assert (summary["expert_sequence_loss"], summary["expert_z_loss"]) == (0.5, 0.25)
    assert 0.7 < summary["expert_entropy"] < 0.9
