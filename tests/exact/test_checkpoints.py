"""A checkpoint knows nothing of the layout that wrote it: any other loads it and goes on as if it had been there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megascale import checkpoint
from megascale.config import from_tree
from megascale.train.engine import Engine
from tests.exact.cases import Case, case
from tests.exact.compare import assert_equal
from tests.exact.training import FEW_STEPS, RankReport, make_engine, observe, run_step, state_of

pytestmark = pytest.mark.xdist_group("processes")

SAVED_STEP = 1  # it leaves moments, biases of experts and weights that moved
EXPERTS = {
    "layers": 2,
    "mlp": "experts",
    "mlp_bias": False,
    "kv_heads": 4,
    "experts": {"number": 8, "top_k": 2, "width": 12, "bias_rate": 0.02, "sequence_loss": 0.1, "shared_width": 16},
}
MODEL = {"layers": 6, "kv_heads": 2, "dropout": 0.1, "vocab_size": 19, "head_bias": True}


def layout(
    tensor: int,
    pipeline: int,
    data: int,
    virtual: int = 1,
    zero: int = 1,
    *,
    tied: bool,
    optimizer: str = "lamb",
    block: str = "parallel",
    model: dict[str, Any] | None = None,
    **parallel: Any,
) -> Case:
    """Four samples a step in any layout."""
    plain = case(
        tensor,
        pipeline,
        data,
        virtual=virtual,
        zero=zero,
        microbatches=4 // data,
        model={**MODEL, "tied_embeddings": tied, "block": block, **(model or {})},
        optimizer={"name": optimizer},
        parallel=parallel,
    )
    return Case(plain.tree, plain.world * parallel.get("expert", 1))


def shards(engine: Engine) -> list[checkpoint.TensorShard]:
    return [checkpoint.TensorShard(*parts) for parts in engine.logical_tensors()]


def save(rank: int, world: int, tree: dict[str, Any], folder: Path) -> RankReport:
    """Train up to the saved step, save, and return a report with the state of that step."""
    engine, report = make_engine(rank, world, tree), RankReport()
    observe(engine, report)
    for step in range(1, SAVED_STEP + 1):
        run_step(engine, step, report)
    checkpoint.save(folder, SAVED_STEP, shards(engine), {"samples": 8}, keep=1)
    report.state = state_of(engine)
    return report


def load(rank: int, world: int, tree: dict[str, Any], folder: Path) -> tuple[RankReport, RankReport]:
    """The state as it was loaded, and what the last step made of it."""
    engine = make_engine(rank, world, tree)
    loaded = RankReport()
    report = RankReport()
    for state in engine.optimizer.states:
        for tensor in (state.master,) + tuple(state.state_tensors()):
            tensor.normal_(generator=torch.Generator().manual_seed(rank))
    if engine.experts is not None:
        for _, _, _, bias in engine.experts.logical_tensors():
            bias.normal_(generator=torch.Generator().manual_seed(rank))
    with engine.loading_weights():
        assert checkpoint.load(folder, shards(engine)) == {"samples": 8}
    loaded.state = state_of(engine)
    observe(engine, report)
    run_step(engine, SAVED_STEP + 1, report)
    report.state = state_of(engine)
    return loaded, report


PAIRS = {
    "Muon's momentum": (
        layout(2, 2, 2, 2, tied=True, optimizer="muon", bucket_elements=700),
        layout(1, 3, 2, zero=2, tied=True, optimizer="muon"),
    ),
    "one process to eight": (layout(1, 1, 1, tied=True), layout(2, 2, 2, 2, 2, tied=True)),
    "eight to one": (layout(2, 2, 2, 2, 2, tied=True, bucket_elements=700), layout(1, 1, 1, tied=True)),
    "tensor to pipeline": (layout(2, 1, 2, zero=2, tied=False), layout(1, 4, 2, zero=1, tied=False)),
    "pipeline to data": (layout(1, 2, 2, 3, tied=True), layout(1, 1, 4, zero=2, tied=True, bucket_elements=900)),
    "ZeRO-3 to ZeRO-0 of fewer": (layout(1, 2, 2, zero=3, tied=False), layout(1, 1, 2, zero=0, tied=False)),
    "ZeRO-1 to ZeRO-3 of more": (
        layout(2, 1, 2, tied=True, bucket_elements=700, optimizer="muon"),
        layout(1, 1, 4, zero=3, tied=True, optimizer="muon"),
    ),
    "ZeRO-2 to ZeRO-3 of chunks": (
        layout(1, 1, 4, zero=2, tied=False, block="serial"),
        layout(1, 2, 2, 5, zero=3, tied=False, block="serial", layer_split=[0, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
    ),
    "chunks on one stage to pipeline": (
        layout(2, 1, 2, 3, tied=True, micro_batch_group_size=2, bucket_elements=700),
        layout(1, 2, 2, 3, tied=True, micro_batch_group_size=2),
    ),
    "experts of four ranks to one process": (
        layout(4, 1, 2, tied=True, model=EXPERTS, bucket_elements=700),
        layout(1, 1, 1, tied=True, model=EXPERTS),
    ),
    "experts of one process to two ranks": (
        layout(1, 1, 1, tied=True, model=EXPERTS, optimizer="muon"),
        layout(2, 2, 2, zero=2, tied=True, model=EXPERTS, optimizer="muon"),
    ),
    "experts over data, four ranks to one process": (
        layout(1, 1, 1, tied=True, model=EXPERTS, expert=4, experts_over="data", bucket_elements=700),
        layout(1, 1, 1, tied=True, model=EXPERTS),
    ),
    "experts over context to tensor ranks": (
        layout(1, 1, 1, zero=2, tied=True, model=EXPERTS, context=2, experts_over="context", bucket_elements=700),
        layout(2, 1, 1, tied=True, model=EXPERTS),
    ),
    "experts over data to tensor ranks": (
        layout(2, 1, 1, zero=1, tied=True, model=EXPERTS, expert=4, experts_over="data", optimizer="muon"),
        layout(2, 1, 2, zero=2, tied=True, model=EXPERTS, optimizer="muon"),
    ),
    "experts of four ranks to two": (
        layout(4, 2, 1, zero=0, tied=False, model=EXPERTS, optimizer="adamw"),
        layout(2, 1, 4, tied=False, model=EXPERTS, optimizer="adamw", recompute="full"),
    ),
    "slices of sequences to one process": (
        layout(2, 1, 2, zero=2, tied=True, context=2, bucket_elements=700),
        layout(1, 1, 1, tied=True),
    ),
    "data to slices of sequences": (
        layout(1, 2, 2, tied=False, optimizer="muon"),
        layout(1, 2, 1, 2, zero=3, tied=False, optimizer="muon", context=4),
    ),
    "another split of layers and buckets": (
        layout(2, 2, 1, 2, tied=False, block="serial", bucket_elements=500, layer_split=[0, 4, 1, 1]),
        layout(2, 2, 2, 1, 0, tied=False, block="serial", layer_split=[4.5, 1.5], recompute="full"),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_saved_by_one_layout_loaded_by_another(name, pool, one_process, tmp_path):
    saver, loader = PAIRS[name]
    model, folder = from_tree(saver.tree).model, tmp_path / "checkpoints"
    saved = pool.run(save, saver.world, saver.tree, folder)
    before, full = one_process(saver.twin, SAVED_STEP), one_process(saver.twin, FEW_STEPS)
    assert_equal(before, saved, model)
    loaded, report = zip(*pool.run(load, loader.world, loader.tree, folder), strict=True)
    assert_equal(RankReport(state=before.state), list(loaded), model)
    last = RankReport(full.losses[-1:], full.norms[-1:], full.gradients[-1:], full.state)
    assert_equal(last, list(report), model)
