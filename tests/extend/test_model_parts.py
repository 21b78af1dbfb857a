"""Parts of the model registered from outside the package, and training with them, on one process and on two."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch

from megascale.config import from_tree
from megascale.config.parts import OPTIMIZERS
from megascale.core.flops import count_parameters, layer_flops
from megascale.core.inventory import logical_shapes, resolve_layers
from megascale.core.layers import ChunkLayers
from megascale.core.parameter_counts import count_checkpoint_elements, count_chunk_parameters
from megascale.core.saved_tensors import layer_saved_tensors
from megascale.errors import ConfigError
from megascale.model.transformer import Chunk
from megascale.parallel.collectives import Axis
from megascale.parallel.parameters import get_spec
from tests.exact.cases import case
from tests.exact.compare import differences
from tests.exact.training import RankReport, train
from tests.extend import parts

pytestmark = pytest.mark.xdist_group("processes")

STEPS = 2
LAYERS = 2


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    parts.register()
    yield
    parts.unregister()


def run(rank: int, world: int, tree: dict[str, Any]) -> tuple[RankReport, dict[str, int], set[torch.dtype], int, str]:
    """A worker's training with the parts registered, and what the precisions counted."""
    parts.register()
    try:
        parts.EightBit.calls.clear()
        parts.EightBit.sent.clear()
        parts.Deferred.most = 0
        report = train(rank, world, tree, STEPS)
        layers = report.active["linear layers"]
        return report, dict(parts.EightBit.calls), set(parts.EightBit.sent), parts.Deferred.most, layers
    finally:
        parts.unregister()


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    "model",
    [
        {"activation": "squared_relu"},
        {"activation": "squared_relu", "block": "parallel"},
        {"mlp": "scaled"},
        {"mlp": "scaled", "block": "parallel"},
        {"mlp": "gather"},
        {"norm": "l1"},
        {"block": "mlp_first"},
        {"mlp": "gather", "block": "parallel", "parallel_norms": 2},
        {"layer_pattern": "SG", "layer_kinds": {"G": {"mlp": "gather"}}},
        {"layer_pattern": "AG", "layer_kinds": {"A": {"attention": "average"}, "G": {"mlp": "gather"}}},
    ],
)
def test_a_part_from_outside_trains_the_same_on_two_ranks(model, recompute, pool):
    first, second = (
        case(tensor, microbatches=2, model={**model, "layers": LAYERS}, parallel={"recompute": recompute}).tree
        for tensor in (1, 2)
    )
    reference, plain = pool.run(run, 1, first)[0][0], pool.run(train, 1, case(microbatches=2).tree, STEPS)[0]
    result = [row[0] for row in pool.run(run, 2, second)]
    assert reference.losses[-1] < reference.losses[0] * 1.5
    assert reference.losses != plain.losses
    assert max(differences(reference, result, from_tree(second).model).values()) < 1e-10


@pytest.mark.parametrize("mlp", ["scaled", "gather"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_all_that_is_counted_knows_a_part_from_outside(mlp, tensor):
    model = from_tree(case(tensor, microbatches=1, model={"mlp": mlp, "layers": LAYERS}).tree).model
    chunk = Chunk(model, range(LAYERS), is_first=True, is_last=True, axis=Axis(size=tensor))
    stored = sum(p.numel() for p in chunk.parameters())
    assert stored == count_chunk_parameters(model, ChunkLayers.from_range(range(LAYERS)), 0, 1, tensor)
    names = {piece.name for p in chunk.parameters() for piece in get_spec(p).pieces}
    assert names == set(logical_shapes(model))
    assert ("layers.1.mlp.scale" in names) == (mlp == "scaled")
    assert count_parameters(model) == sum(prod(shape) for shape in logical_shapes(model).values())
    layer = resolve_layers(model)[0]
    assert layer_flops(layer, model.sequence_length).mlp == 2 * 2 * model.hidden * model.ffn
    retained = [saved.name for saved in layer_saved_tensors(layer, model.sequence_length, tensor, 1, "float32")]
    assert ("mlp_projection" in retained) == (mlp == "scaled")


def test_what_an_optimizer_keeps_of_a_part_from_outside_is_counted():
    """It has two matrices where the model's own, gated, has three."""
    model = from_tree({"model": {"layers": 3, "vocab_size": 50, "mlp": "gather", "activation": "swiglu"}}).model
    retained = OPTIMIZERS["muon"].state_names
    stored = sum(prod(shape) * (1 + len(retained(name, shape))) for name, shape in logical_shapes(model).items())
    assert count_checkpoint_elements("muon", model) == stored


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_precision_from_outside_does_every_gemm_of_a_real_step(block, recompute, pool):
    def tree(tensor: int, precision: str) -> dict[str, Any]:
        options = {"model": {"block": block, "layers": LAYERS}, "parallel": {"recompute": recompute}}
        return case(tensor, microbatches=2, train={"linear_precision": precision}, **options).tree

    [(single, calls, sent, _, name)] = pool.run(run, 1, tree(1, "eight_bit"))
    pair = pool.run(run, 2, tree(2, "eight_bit"))
    assert name == pair[0][-1] == "eight_bit"
    # Serial: four matrices a layer; parallel: the fused one and two that share a sum.
    passes, matrices = STEPS * 2 * LAYERS, 4 if block == "serial" else 3
    repeated = 2 if recompute == "full" else 1
    assert calls["dgrad"] == calls["wgrad"] == passes * matrices
    assert calls["forward"] == passes * matrices * repeated
    # What forward quantised is kept for backward; only what backward recomputes is quantised again.
    made_again = {"none": 0, "full": passes * matrices, "selective": passes * (3 if block == "serial" else 2)}[
        recompute
    ]
    assert calls["input"] == passes * matrices + made_again
    assert calls["gradient"] == passes * (matrices if block == "serial" else 2)
    for report, counted, travelled, _, _ in pair:
        # Two ranks: each multiplies its own part while the other's is on its way, and then that.
        assert counted["wgrad"] == calls["wgrad"]
        assert counted["input"] == calls["input"]
        assert counted["forward"] > calls["forward"]
        assert travelled == sent == {torch.int8}
        assert report.losses == pytest.approx(single.losses, rel=1e-10)
    assert single.losses != pool.run(train, 1, tree(1, "default"), STEPS)[0].losses


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("overlap", ["async", "off"])
def test_scales_of_blocks_travel_with_their_rows(block, recompute, overlap, pool):
    def tree(tensor: int, precision: str) -> dict[str, Any]:
        options: dict[str, Any] = {"model": {"block": block, "layers": LAYERS}, "overlap": {"tensor": overlap}}
        options["parallel"] = {"recompute": recompute}
        return case(tensor, microbatches=2, train={"linear_precision": precision}, **options).tree

    [single] = pool.run(run, 1, tree(1, "blocks"))
    pair = pool.run(run, 2, tree(2, "blocks"))
    assert pair[0][-1] == "blocks"
    result = differences(single[0], [row[0] for row in pair], from_tree(tree(2, "blocks")).model)
    for subject, separate in result.items():
        if "key.bias" not in subject:  # zero but for rounding
            assert separate < 1e-5, subject
    assert single[0].losses != pool.run(train, 1, tree(1, "default"), STEPS)[0].losses


def test_weight_gradients_can_be_made_later(pool):
    def tree(tensor: int, precision: str) -> dict[str, Any]:
        return case(tensor, microbatches=2, model={"layers": LAYERS}, train={"linear_precision": precision}).tree

    for tensor in (1, 2):
        current = pool.run(train, tensor, tree(tensor, "default"), STEPS)
        later = pool.run(run, tensor, tree(tensor, "deferred"))
        for (report, _, _, most, _), peer in zip(later, current, strict=True):
            assert most == 4 * LAYERS
            assert (report.losses, report.norms) == (peer.losses, peer.norms)


def test_a_name_is_taken_once():
    with pytest.raises(ConfigError, match=r"model\.mlp='scaled' is registered already"):
        parts.mlp.register("scaled", parts.ScaledMlp, parts.DENSE)


def test_layers_of_other_parts_are_counted_as_what_they_are():
    kinds = {"A": {"attention": "average"}, "G": {"mlp": "gather"}}
    model = from_tree({"model": {"layers": 3, "vocab_size": 50, "layer_pattern": "SAG", "layer_kinds": kinds}}).model
    layers = resolve_layers(model)
    assert [layer.mixer.name for layer in layers] == ["causal", "average", "causal"]
    assert [layer.feed_forward.name for layer in layers] == ["dense", "dense", "gather"]
    assert [layer.window for layer in layers] == [None] * 3
    counts = [layer_flops(layer, model.sequence_length) for layer in layers]
    assert counts[1].attention == 1.0
    assert counts[1].projections == counts[0].projections / 2
    assert count_parameters(model) == sum(prod(shape) for shape in logical_shapes(model).values())
