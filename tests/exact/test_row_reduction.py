"""An embedding whose gradient is reduced by rows gives the one-process run's losses, gradients and weights."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megascale.config import from_tree
from megascale.errors import ConfigError
from megascale.parallel import data_parallel
from megascale.parallel.collectives import Axis, Pending
from megascale.parallel.row_reduction import RowReduction
from tests.exact.cases import Case, case
from tests.exact.compare import assert_equal
from tests.exact.training import FEW_STEPS, Told, train

pytestmark = pytest.mark.xdist_group("processes")

MODEL = {"tied_embeddings": False, "vocab_size": 64, "hidden": 16, "heads": 4}
ROWS = {"embedding_reduction": "rows"}
CASES = {
    "accumulation": case(data=2, microbatches=3, model=MODEL, parallel=ROWS),
    "small buckets, pipeline": case(1, 2, 2, microbatches=2, model=MODEL, parallel={**ROWS, "bucket_elements": 700}),
    "one bucket, nothing overlapped": case(
        data=4, microbatches=1, model=MODEL, parallel={**ROWS, "bucket_elements": 10**6}, overlap={"data": False}
    ),
    "context": case(1, 1, 1, microbatches=2, model=MODEL, parallel={**ROWS, "context": 2}),
}


class CountedReduction(RowReduction):
    """Counts its calls, and makes the slices of other ranks unusable."""

    count = 0

    def __call__(self, grads: torch.Tensor, axis: Axis) -> Pending:
        CountedReduction.count += 1
        pending = super().__call__(grads, axis)

        def spoil() -> torch.Tensor:
            result = pending.wait()
            for rank, part in enumerate(grads.view(axis.size, -1)):
                if rank != axis.rank:
                    part.fill_(float("nan"))
            return result

        return Pending(grads, finish=spoil)


def train_and_count(rank: int, world: int, tree: dict[str, Any], steps: int) -> tuple[Told, int]:
    CountedReduction.count = 0
    with mock.patch.object(data_parallel, "RowReduction", CountedReduction):
        report = train(rank, world, tree, steps)
    return report, CountedReduction.count


@pytest.mark.parametrize("name", CASES)
def test_reductions_by_rows_are_exact(name, pool, one_process):
    layout: Case = CASES[name]
    results = pool.run(train_and_count, layout.world, layout.tree, FEW_STEPS)
    assert max(count for _, count in results) == FEW_STEPS
    assert_equal(one_process(layout.twin, FEW_STEPS), [report for report, _ in results], from_tree(layout.tree).model)


def test_a_repeated_token_that_counts_twice_is_found(pool, one_process):
    """The test above can fail."""
    layout = CASES["accumulation"]
    results = pool.run(train_with_repetitions, layout.world, layout.tree, FEW_STEPS)
    with pytest.raises(AssertionError):
        assert_equal(one_process(layout.twin, FEW_STEPS), results, from_tree(layout.tree).model)


def train_with_repetitions(rank: int, world: int, tree: dict[str, Any], steps: int) -> Told:
    with mock.patch.object(torch.Tensor, "masked_fill", lambda x, mask, value: x):
        return train(rank, world, tree, steps)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"parallel": {"zero": 2}}, "--parallel.zero=1"),
        ({"model": {"tied_embeddings": True}}, "--model.tied_embeddings=false"),
        ({"parallel": {"tensor": 2}}, "--parallel.tensor=1"),
    ],
)
def test_what_has_no_rows_is_refused(changes, remedy):
    tree = CASES["accumulation"].tree
    tree = {**tree, **{section: {**tree[section], **values} for section, values in changes.items()}}
    with pytest.raises(ConfigError, match=f"parallel.embedding_reduction=rows.*{remedy}"):
        from_tree(tree)
