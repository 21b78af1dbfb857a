"""The held-out loss of a token file is the same in every layout, at each step and with windows that do not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megascale.data.dataset.indexed import IndexedWriter
from megascale.train.evaluation import evaluate_file
from tests.exact.cases import TWO_LAYERS, case
from tests.exact.test_experts import ROUTED, experts_case
from tests.exact.training import STEPS, RankReport, make_engine, run_step

pytestmark = pytest.mark.xdist_group("processes")

# Eight windows of 8 tokens, the last of them incomplete. Spread over ranks, the last batch is filled up.
TOKENS = 61
SMALLEST_VOCABULARY = 17


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the prefix of a token file that fits every vocabulary below."""
    return write_held_out(tmp_path_factory.mktemp("held-out"))


def write_held_out(folder: Path) -> str:
    """Write a token file for a vocabulary of SMALLEST_VOCABULARY or more, and return its prefix."""
    prefix = folder / "valid"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document([np.random.default_rng(0).integers(0, SMALLEST_VOCABULARY, TOKENS)])
    return str(prefix)


def evaluate(rank: int, world: int, tree: dict[str, Any], held_out: str) -> list[float]:
    """Return the held-out loss before training and after each step, and the losses of the steps between.

    After the last step no gather is under way: without `Engine.gather_parameters` only a rank's own shards are current.
    """
    engine = make_engine(rank, world, tree)
    report = RankReport()
    losses = [evaluate_file(engine, engine.config, held_out).loss]
    for step in range(1, STEPS + 1):
        run_step(engine, step, report)
        # Seven windows, so that the ranks do not share them evenly.
        losses.append(evaluate_file(engine, engine.config, held_out, samples=7 if step == 1 else None).loss)
    return losses + report.losses


LAYOUTS = {
    "all axes": case(2, 2, 2, virtual=2, microbatches=2, zero=2, train={"micro_batch": 2}, model={"block": "parallel"}),
    "pipeline": case(1, 4, 2, microbatches=2, zero=1, train={"micro_batch": 2}, model={"tied_embeddings": False}),
    "tensor": case(2, 1, 2, microbatches=2, zero=0, train={"micro_batch": 2}, model={"vocab_size": 17, "dropout": 0.3}),
    "chunks on one stage": case(
        2, 1, 2, virtual=3, microbatches=2, train={"micro_batch": 2}, parallel={"micro_batch_group_size": 2}
    ),
    "ZeRO-1": case(1, 1, 4, microbatches=1, zero=1, model=TWO_LAYERS, parallel={"bucket_elements": 700}),
    "ZeRO-2": case(1, 1, 4, microbatches=1, zero=2, model=TWO_LAYERS, optimizer={"name": "muon"}),
    "ZeRO-3": case(1, 1, 4, microbatches=1, zero=3, model=TWO_LAYERS),
    "nothing overlapped": case(1, 1, 3, microbatches=1, zero=1, model=TWO_LAYERS, overlap={"data": False}),
    "context": case(2, 2, 1, microbatches=2, zero=1, model=TWO_LAYERS, parallel={"context": 2}),
    "experts over context": experts_case(
        1, 1, 2, experts=ROUTED, zero=3, parallel={"context": 2, "experts_over": "context"}
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_held_out_loss(name, pool, held_out: str):
    layout = LAYOUTS[name]
    [expected] = pool.run(evaluate, 1, layout.twin, held_out)
    assert len(set(expected[: STEPS + 1])) == STEPS + 1  # each step changes the held-out loss
    for losses in pool.run(evaluate, layout.world, layout.tree, held_out):
        np.testing.assert_allclose(losses, expected, rtol=1e-11)
