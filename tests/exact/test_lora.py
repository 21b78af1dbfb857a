"""Low-rank adapters: every layout trains them as one process does, in float64, and the model stays as it is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from megascale.config import from_tree
from megascale.core.adapters import is_adapter
from megascale.core.batch import SampleFields
from megascale.core.layout import lay_out
from megascale.errors import FitError
from megascale.train.engine import Engine
from tests.exact.cases import TWO_LAYERS, Case, case
from tests.exact.compare import assert_equal, differences, join_boxes
from tests.exact.training import FEW_STEPS, STEPS, RankReport, make_engine, observe, run_step, train
from tests.extend import schedules  # noqa: F401 - registers them, in the worker processes too

pytestmark = pytest.mark.xdist_group("processes")

LORA = {"rank": 3, "alpha": 6.0}
QUERY_VALUE_OUT = {**LORA, "targets": ["attention.query", "attention.value", "mlp.out"]}
LLAMA: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "kv_heads": 2}

# A tied embedding on both ends of the pipeline, softcaps, multipliers, and norms that are frozen.
GEMMA: dict[str, Any] = {
    "norm": "rmsnorm_zero_centred",
    "norm_placement": "both",
    "qk_norm": "head",
    "activation": "geglu_tanh",
    "positions": "rotary",
    "kv_heads": 2,
    "attention_bias": False,
    "mlp_bias": False,
    "tied_embeddings": True,
    "attention_softcap": 5.0,
    "logit_softcap": 4.0,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "window": 5,
    "layer_pattern": "SL",
}

LAYOUTS = {
    "tensor, pipeline, data, ZeRO-2": case(
        2, 2, 2, virtual=2, microbatches=2, zero=2, train={"micro_batch": 2, "lora": LORA}
    ),
    "tensor, some matrices, parallel block": case(
        4, 1, 2, microbatches=3, model={**TWO_LAYERS, "block": "parallel"}, train={"lora": QUERY_VALUE_OUT}
    ),
    "pipeline, recomputed, Llama": case(
        1, 2, 2, microbatches=4, parallel={"recompute": "full"}, model=LLAMA, train={"lora": QUERY_VALUE_OUT}
    ),
    "tensor, nothing overlapped, Llama": case(
        2,
        1,
        2,
        microbatches=2,
        zero=0,
        model={**TWO_LAYERS, **LLAMA},
        train={"lora": LORA},
        overlap={"data": False, "tensor": "off"},
    ),
    "tensor, experts": case(
        2,
        1,
        2,
        microbatches=2,
        model={
            **TWO_LAYERS,
            "mlp": "experts",
            "mlp_bias": False,
            "experts": {"number": 4, "top_k": 2, "width": 12, "shared_width": 16, "sequence_loss": 0.1},
        },
        train={"lora": LORA},
    ),
    "tensor, Muon": case(2, 1, 2, microbatches=2, model=TWO_LAYERS, optimizer={"name": "muon"}, train={"lora": LORA}),
    "tensor, pipeline, data, tied Gemma": case(2, 2, 2, microbatches=2, zero=1, model=GEMMA, train={"lora": LORA}),
    "split backward in a V": case(
        2, 2, 2, microbatches=4, virtual=2, parallel={"schedule": "zb_v"}, train={"lora": QUERY_VALUE_OUT}
    ),
    "split backward, ZeRO-2": case(
        1, 2, 2, microbatches=3, zero=2, parallel={"schedule": "zb_h1"}, train={"lora": LORA}
    ),
}


def train_registered(
    rank: int, world: int, tree: dict[str, Any], fields: SampleFields, steps: int = FEW_STEPS
) -> RankReport:
    """Train like `train`. A worker that imports this module for the function has the schedules registered."""
    return train(rank, world, tree, steps, nullcontext, fields)


def check(layout: Case, pool, fields: SampleFields = SampleFields(), steps: int = FEW_STEPS) -> list[RankReport]:
    [expected] = pool.run(train_registered, 1, layout.twin, fields, steps)
    report = pool.run(train_registered, layout.world, layout.tree, fields, steps)
    assert_equal(expected, report, from_tree(layout.tree).model)
    names = {box.name for result in report for box in result.state}
    assert all(is_adapter(name) for name in names)
    return report


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_process_does(name: str, pool) -> None:
    # Of a sharded optimizer, a third step is the first between two that gather.
    check(LAYOUTS[name], pool, steps=STEPS if "ZeRO" in name else FEW_STEPS)


@pytest.mark.parametrize("name", ["tensor, some matrices, parallel block", "tensor, pipeline, data, tied Gemma"])
def test_loss_weights(name: str, pool) -> None:
    check(LAYOUTS[name], pool, SampleFields(loss_weights=True))


FLOAT8 = {
    "data, ZeRO-2": case(1, 1, 2, zero=2, microbatches=2, model=TWO_LAYERS, train={"lora": LORA}),
    "tensor": case(2, 1, 1, microbatches=2, model=TWO_LAYERS, train={"lora": QUERY_VALUE_OUT}),
}


@pytest.mark.parametrize("recipe", ["float8", "float8_rowwise"])
@pytest.mark.parametrize("name", FLOAT8)
def test_float8_matrices_with_adapters(name: str, recipe: str, pool) -> None:
    """The model's GEMMs are float8, the adapters' are not; tolerances as in test_float8.py."""
    layout = FLOAT8[name]
    tree = {**layout.tree, "train": {**layout.tree["train"], "linear_precision": recipe}}
    single = {**tree, "parallel": {}, "overlap": {}}
    no_fields = SampleFields()
    [expected] = pool.run(train_registered, 1, single, no_fields)
    report = pool.run(train_registered, layout.world, tree, no_fields)
    for subject, difference in differences(expected, report, from_tree(tree).model).items():
        assert difference < (1e-5 if name == "tensor" else 1e-10), subject
    plain = {key: value for key, value in single["train"].items() if key != "lora"}
    [without] = pool.run(train_registered, 1, {**single, "train": plain}, no_fields)
    assert expected.losses[0] == without.losses[0]  # adapters start at zero


def run_first_step(engine: Engine) -> tuple[RankReport, dict[str, np.ndarray]]:
    report = RankReport()
    observe(engine, report)
    run_step(engine, 1, report)
    return report, join_boxes(report.gradients[0])


def list_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Return views of the trained weights of an engine with one process, by name."""
    tensors = engine.optimizer.logical_tensors()
    return {name.removeprefix("model."): view for name, _, _, view in tensors if name.startswith("model.")}


@pytest.mark.parametrize(("block", "lora"), [("serial", LORA), ("parallel", LORA), ("serial", QUERY_VALUE_OUT)])
def test_gradients_follow_from_those_of_the_merged_matrices(block: str, lora: dict[str, Any]) -> None:
    """With W = base + scale B A: dB = scale dW A^T, and dA = scale B^T dW."""
    plain = case(microbatches=2, model={**TWO_LAYERS, "block": block})
    tree = {**plain.tree, "train": {**plain.tree["train"], "lora": lora}}
    engine, merged = make_engine(0, 1, tree), make_engine(0, 1, plain.tree)
    scale = lora["alpha"] / lora["rank"]
    base = {piece.name: view.clone() for piece, view in engine.list_base_pieces()}
    with engine.loading_weights():
        for name, view in list_weights(engine).items():
            if name.endswith(".lora_b"):
                assert not view.any()  # training starts from the model as it is
                view.normal_(0, 0.3)
    factors = {name: view.clone() for name, view in list_weights(engine).items()}
    with merged.loading_weights():
        for name, view in list_weights(merged).items():
            assert torch.equal(view, base[name])
            matrix = name.removesuffix(".weight")
            if f"{matrix}.lora_b" in factors:
                view += scale * factors[f"{matrix}.lora_b"] @ factors[f"{matrix}.lora_a"]
    report, gradients = run_first_step(engine)
    expected_report, matrix_gradients = run_first_step(merged)
    assert report.losses == pytest.approx(expected_report.losses, rel=1e-12)
    assert gradients.keys() == factors.keys()
    for name, gradient in gradients.items():
        matrix = name.removesuffix(".lora_a").removesuffix(".lora_b")
        a, b = (factors[f"{matrix}.{factor}"].numpy() for factor in ("lora_a", "lora_b"))
        d_matrix = scale * matrix_gradients[f"{matrix}.weight"]
        expected = b.T @ d_matrix if name.endswith(".lora_a") else d_matrix @ a.T
        np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-13)
    for piece, view in engine.list_base_pieces():
        assert torch.equal(view, base[piece.name]), piece.name


def test_the_model_has_no_gradients_and_no_state() -> None:
    engine = make_engine(0, 1, LAYOUTS["pipeline, recomputed, Llama"].twin)
    trained = sum(flat.params.numel() for flat in engine.buffers)
    state = sum(tensor.numel() for shard in engine.optimizer.states for tensor in shard.state_tensors())
    assert sum(flat.grads.numel() for flat in engine.buffers) == trained
    assert state == 2 * trained
    assert all(
        parameter.gradient_sink is None
        for chunk in engine.chunks
        for parameter in chunk.parameters()
        if not parameter.requires_grad
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"lora": {"rank": 2, "targets": ["mlp.up"]}}}, "choose among attention.query, attention.key"),
        ({"parallel": {"recompute": "norms"}}, "set --parallel.recompute=none or full"),
        ({"parallel": {"zero": 3}}, "leaves the model whole on every rank"),
        ({"kernels": {"graphs": "on"}}, "does not capture train.lora"),
        (
            {
                "parallel": {"pipeline": 2, "layer_split": [0.5, 1.5]},
                "train": {"lora": QUERY_VALUE_OUT | {"targets": ["mlp.in"]}},
            },
            "nothing in it would be trained",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    plain = case(microbatches=4, train={"lora": LORA})
    tree = {**plain.tree}
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    with pytest.raises(FitError, match=message):
        lay_out(from_tree(tree), tree["parallel"].get("pipeline", 1))
