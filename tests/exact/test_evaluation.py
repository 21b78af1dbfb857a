"""The held-out loss of a model is the same in every layout, after training steps and with samples that do not count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megascale.data.dataset.samples import IGNORE
from tests.exact.cases import case
from tests.exact.training import Told, make_engine, run_step, tokens

pytestmark = pytest.mark.xdist_group("processes")

SAMPLES = 7  # not a multiple of the ranks: the last batch is filled up with targets that count nothing


def evaluate(rank: int, world: int, tree: dict[str, Any]) -> list[float]:
    """Loss before training, after a step, and of a step after that: evaluation must leave training as it was."""
    engine = make_engine(rank, world, tree)
    told = Told()
    before = _sum(engine)
    run_step(engine, 1, told)
    after = _sum(engine)
    run_step(engine, 2, told)
    return [before, after, *told.losses]


def _sum(engine) -> float:
    engine.whole()
    size, data, total = engine.config.train.micro_batch, engine.layout.grid.data, 0.0
    for start in range(0, SAMPLES, size * data):
        mine = range(start + engine.data_rank * size, start + (engine.data_rank + 1) * size)
        rows = torch.from_numpy(np.stack([tokens(engine.config, 99, i) for i in mine])).t().contiguous()
        inputs, targets = rows[:-1], rows[1:].clone()
        targets[:, [k for k, i in enumerate(mine) if i >= SAMPLES]] = IGNORE
        total += float(engine.losses(inputs, targets))
    return total


@pytest.mark.parametrize(
    "layout",
    [
        case(2, 2, 2, virtual=2, microbatches=2, zero=2, train={"micro_batch": 2}, model={"block": "parallel"}),
        case(1, 4, 2, microbatches=2, zero=1, train={"micro_batch": 2}, model={"tied_embeddings": False}),
        case(2, 1, 2, microbatches=2, zero=0, train={"micro_batch": 2}, model={"vocab_size": 17, "dropout": 0.3}),
        case(2, 1, 2, virtual=3, microbatches=2, train={"micro_batch": 2}, parallel={"micro_batch_group_size": 2}),
    ],
    ids=["all axes", "pipeline", "tensor", "chunks on one stage"],
)
def test_held_out_loss(layout, pool):
    [expected] = pool.run(evaluate, 1, layout.twin)
    for found in pool.run(evaluate, layout.world, layout.tree):
        np.testing.assert_allclose(found, expected, rtol=1e-11)
