"""Replicas with different numbers of micro-batches train as one process does, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megascale.config import from_tree
from megascale.core.batch import NO_FIELDS, Batch, SampleFields
from megascale.core.layout import lay_out
from megascale.errors import FitError
from megascale.optim.learning_rate import compute_learning_rate
from megascale.train.engine import Engine
from tests.exact.cases import TWO_LAYERS, Case, case
from tests.exact.compare import assert_equal
from tests.exact.training import STEPS, RankReport, loss_weights, make_engine, observe, state_of, tokens

pytestmark = pytest.mark.xdist_group("processes")

WEIGHTED = SampleFields(loss_weights=True)
EXPERTS: dict[str, Any] = {
    "mlp": "experts",
    "mlp_bias": False,
    "layers": 2,
    "experts": {"number": 4, "top_k": 2, "bias_rate": 0.01, "sequence_loss": 0.1, "z_loss": 0.1},
}


def uneven(microbatches: int, *sizes: int, **options: Any) -> Case:
    """Return a case whose global batch has a number of micro-batches that the replicas do not divide."""
    chosen = case(*sizes, microbatches=1, **options)
    train = {**chosen.tree["train"], "global_batch": microbatches * chosen.tree["train"]["micro_batch"]}
    consent = {
        "resilience": {"continue_replicas": True},
        "checkpoint": {"background": True, "memory_interval": 1, "replicas": True},
    }
    return Case({**chosen.tree, **consent, "train": train}, chosen.world)


LAYOUTS = {
    "ZeRO-0": uneven(4, 1, 1, 3, zero=0, model=TWO_LAYERS),
    "ZeRO-1": uneven(4, 1, 1, 3, zero=1, model=TWO_LAYERS),
    "ZeRO-2": uneven(7, 1, 1, 3, zero=2, train={"micro_batch": 2}),
    "ZeRO-3": uneven(4, 1, 1, 3, zero=3),
    "nothing overlapped": uneven(7, 1, 1, 4, model=TWO_LAYERS, overlap={"data": False}),
    "pipeline": uneven(8, 1, 2, 3, model={"tied_embeddings": True}),
    "interleaved, ZeRO-2": uneven(7, 1, 2, 3, virtual=2, zero=2),
    "tensor": uneven(4, 2, 1, 3, model=TWO_LAYERS),
    "context": uneven(4, 1, 1, 3, model=TWO_LAYERS, parallel={"context": 2}),
    "experts": uneven(4, 1, 1, 3, model=EXPERTS),
    "experts, recomputed": uneven(4, 1, 1, 3, model=EXPERTS, parallel={"recompute": "full"}),
    "LAMB": uneven(4, 2, 1, 3, model=TWO_LAYERS, optimizer={"name": "lamb"}),
    "Muon": uneven(4, 1, 1, 3, model=TWO_LAYERS, optimizer={"name": "muon"}),
    "dropout": uneven(4, 1, 1, 3, model={**TWO_LAYERS, "dropout": 0.1}),
}


def train(rank: int, world: int, tree: dict[str, Any], fields: SampleFields = NO_FIELDS) -> RankReport:
    """Train some steps on tokens that depend on the step and the sample only."""
    engine, report = make_engine(rank, world, tree, fields), RankReport()
    observe(engine, report)
    for step in range(1, STEPS + 1):
        run_step(engine, step, report, fields)
    report.state = state_of(engine)
    return report


def run_step(engine: Engine, step: int, report: RankReport, fields: SampleFields = NO_FIELDS) -> None:
    """Train one step on this rank's share of the samples."""
    config, shares = engine.config, engine.layout.shares
    width = config.train.micro_batch
    first, count = shares.first(engine.data_rank), shares.count(engine.data_rank)

    def read_batch(i: int) -> Batch[torch.Tensor]:
        assert 0 <= i < count, "a micro-batch of another share"
        samples = range((first + i) * width, (first + i + 1) * width)
        columns = torch.from_numpy(np.stack([tokens(config, step, sample) for sample in samples], axis=1))
        batch = Batch(columns[:-1].contiguous(), columns[1:].contiguous())
        if fields.loss_weights:
            weights = np.stack([loss_weights(config, step, sample) for sample in samples], axis=1)
            batch = replace(batch, loss_weights=torch.from_numpy(weights))
        return batch

    def sum_weights() -> float:
        samples = range(first * width, (first + count) * width)
        return float(sum(loss_weights(config, step, sample).sum() for sample in samples))

    engine.start_gather()
    rate = compute_learning_rate(config.lr, step, STEPS)
    result = engine.step(read_batch, step, rate, has_next_step=step < STEPS, sum_weights=sum_weights)
    assert (result.weight_sum is not None) == fields.loss_weights
    report.losses.append(float(result.loss))
    report.norms.append(float(result.grad_norm))


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_uneven_layout_trains_as_one_process(name: str, pool) -> None:
    check(LAYOUTS[name], NO_FIELDS, pool)


def test_weighted_samples(pool) -> None:
    check(LAYOUTS["pipeline"], WEIGHTED, pool)


def check(layout: Case, fields: SampleFields, pool) -> None:
    [expected] = pool.run(train, 1, layout.twin, fields)
    report = pool.run(train, layout.world, layout.tree, fields)
    assert_equal(expected, report, from_tree(layout.tree).model)


def test_every_replica_needs_a_micro_batch_and_consent() -> None:
    few = uneven(2, 1, 1, 3)
    with pytest.raises(FitError, match=r"train\.global_batch=2 is not a multiple"):
        lay_out(from_tree(few.tree), 3)
    tree = {**uneven(4, 1, 1, 3).tree, "resilience": {}}
    with pytest.raises(FitError, match=r"train\.global_batch=4 is not a multiple"):
        lay_out(from_tree(tree), 3)
    shares = lay_out(from_tree(uneven(8, 1, 1, 3).tree), 3).shares
    assert [(shares.first(replica), shares.count(replica)) for replica in range(3)] == [(0, 3), (3, 3), (6, 2)]
