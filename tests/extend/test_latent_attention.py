"""Multi-head latent attention from outside the package: exact on every layout, and equal to a plain computation."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
import torch

from megascale.config import from_tree
from megascale.core.flops import count_parameters
from megascale.core.inventory import ATTENTION_PARTS, logical_shapes
from megascale.errors import ConfigError
from megascale.model import attention
from tests.exact.cases import case
from tests.exact.compare import differences
from tests.exact.training import RankReport, train
from tests.extend import latent_attention

pytestmark = pytest.mark.xdist_group("processes")

STEPS = 2
MODEL: dict[str, Any] = {"attention": "latent", "positions": "rotary", "norm": "rmsnorm", "layers": 2}


def forget() -> None:
    attention.ATTENTIONS.remove("latent")
    attention.ATTENTION_MODULES.remove("latent")
    ATTENTION_PARTS.remove("latent")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    latent_attention.register()
    yield
    forget()


def run(rank: int, world: int, tree: dict[str, Any]) -> RankReport:
    latent_attention.register()
    try:
        return train(rank, world, tree, STEPS)
    finally:
        forget()


@pytest.mark.parametrize(
    "options",
    [
        {"tensor": 2},
        {"tensor": 2, "parallel": {"recompute": "selective"}},
        {"tensor": 2, "data": 2, "zero": 2, "optimizer": {"name": "muon"}},
        {"tensor": 2, "pipeline": 2, "parallel": {"recompute": "full"}},
        {"tensor": 2, "model": {"block": "parallel"}},
        {"pipeline": 2, "data": 2, "model": {"layer_pattern": "SL", "layer_kinds": {"L": {"attention": "causal"}}}},
    ],
    ids=["tensor", "recompute", "zero-2-muon", "pipeline", "parallel-block", "two-kinds"],
)
def test_latent_attention_trains_as_one_process_does(options, pool):
    options = {**options, "model": {**MODEL, **options.get("model", {})}}
    chosen = case(microbatches=2, **options)
    [reference] = pool.run(run, 1, chosen.twin)
    result = pool.run(run, chosen.world, chosen.tree)
    worst = max(differences(reference, result, from_tree(chosen.tree).model).values())
    assert worst < 1e-10


@pytest.mark.parametrize("shape", [{}, {"layer_pattern": "SA", "layer_kinds": {"A": {"attention": "latent"}}}])
def test_a_softcap_that_it_would_ignore_is_refused(shape):
    model = {**MODEL, **shape, "attention_softcap": 2.0}
    if shape:
        model["attention"] = "causal"
    with pytest.raises(ConfigError, match=r"model.attention_softcap=2 has no effect with model.attention=latent"):
        from_tree({"model": model})
    forget()
    inventory = ATTENTION_PARTS["causal"]
    attention.register("latent", latent_attention.LatentAttention, inventory, bounds_scores=True)
    assert from_tree({"model": model}).model.attention_softcap == 2


def test_parameters_are_counted_from_its_inventory():
    model = from_tree(case(microbatches=1, model=MODEL).tree).model
    shapes = logical_shapes(model)
    assert shapes["layers.1.attention.down.weight"] == (4 + 2, 16)
    assert shapes["layers.1.attention.up.weight"] == (4 * 6, 4)
    assert count_parameters(model) == sum(prod(shape) for shape in shapes.values())


def test_a_head_attends_as_the_equations_say():
    """Compare with DeepSeek-V2, equations 9 to 19, for one layer and float64."""
    from megascale.core.inventory import resolve_layers
    from megascale.model.context import ForwardContext, LayerSetup
    from megascale.ops.rope import apply_rotary_reference, make_rotary_tables
    from megascale.parallel.linear import DEFAULT_PRECISION

    model = from_tree(case(microbatches=1, model=MODEL).tree).model
    layer = resolve_layers(model)[0]
    part = latent_attention.LatentAttention(LayerSetup(layer, 0, DEFAULT_PRECISION, torch.float64)).to_empty(
        device="cpu"
    )
    torch.manual_seed(0)
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(8, 3, 16, dtype=torch.float64)
    rotary = make_rotary_tables(8, 2, model.rotary_base, torch.device("cpu"), torch.float64)
    branch = part(x, rotary, ForwardContext())
    result = branch.x @ branch.weight.t()

    q = (x @ part.query.weight.t()).view(8, 3, 4, 4)
    compressed = x @ part.down.t()
    latent = compressed[..., :4]
    latent = latent / (latent.square().mean(-1, keepdim=True) + layer.norms.eps).sqrt() * part.norm.weight
    up = (latent @ part.up.weight.t()).view(8, 3, 4, 6)
    position = apply_rotary_reference(compressed[..., None, 4:], *rotary, False).expand(-1, -1, 4, -1)
    q = torch.cat((apply_rotary_reference(q[..., :2], *rotary, False), q[..., 2:]), -1)
    k = torch.cat((position, up[..., :2]), -1)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) / 2.0
    scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), float("-inf"))
    mixed = torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), up[..., 2:]).flatten(-2)
    torch.testing.assert_close(result, mixed @ part.out.weight.t(), rtol=1e-12, atol=1e-12)
