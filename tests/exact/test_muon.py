"""Muon needs matrices whole, wherever their parts lie: every layout gives what one process does."""

from __future__ import annotations

import pytest

from megascale.config import from_tree
from tests.exact.cases import TWO_LAYERS, Case, case
from tests.exact.compare import assert_equal
from tests.exact.training import FEW_STEPS, train

pytestmark = pytest.mark.xdist_group("processes")

MUON = {"name": "muon"}
SMALL = {"bucket_elements": 700}
CASES: dict[str, Case] = {
    "data": case(data=4, microbatches=1, model=TWO_LAYERS, optimizer=MUON, parallel=SMALL),
    "data, ZeRO-2, plain momentum": case(
        data=2, zero=2, microbatches=2, model=TWO_LAYERS, optimizer={**MUON, "muon_nesterov": False}, parallel=SMALL
    ),
    "tensor, ZeRO-0": case(2, 1, 2, zero=0, microbatches=2, model=TWO_LAYERS, optimizer=MUON),
    "tensor, fused projections, gated": case(
        4,
        microbatches=2,
        optimizer=MUON,
        model={**TWO_LAYERS, "block": "parallel", "activation": "swiglu", "positions": "rotary"},
    ),
    "pipeline, untied": case(pipeline=2, virtual=2, microbatches=4, optimizer=MUON, model={"tied_embeddings": False}),
    "tied, fewer key/value heads, everything cut": case(
        2, 2, 2, virtual=2, microbatches=2, optimizer=MUON, parallel=SMALL, model={"kv_heads": 2, "ffn_hidden": 20}
    ),
    "more ranks than matrices": case(
        2, 1, 4, microbatches=1, optimizer=MUON, parallel={"bucket_elements": 130}, model={"layers": 1}
    ),
    "no clipping, other constants": case(
        2,
        1,
        2,
        microbatches=2,
        model=TWO_LAYERS,
        optimizer={**MUON, "clip": 0.0, "muon_momentum": 0.5, "muon_steps": 3, "muon_rms": 0.4},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_layout_is_the_one_process_run(name, pool, one_process):
    local = CASES[name]
    result = pool.run(train, local.world, local.tree, FEW_STEPS)
    assert_equal(one_process(local.twin, FEW_STEPS), result, from_tree(local.tree).model)
    retained = {box.name.split(".", 2)[1] for item in result for box in item.state if box.name.startswith("optimizer.")}
    assert retained == {"momentum", "exp_avg", "exp_avg_sq"}
    assert not [
        box.name
        for entry in result
        for box in entry.state
        if box.name.startswith("optimizer.exp") and "layers." in box.name and box.name.endswith("query.weight")
    ]
