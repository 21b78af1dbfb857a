"""The token embedding's gradient reduced by the rows that a step uses equals the dense gradient, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megascale.config import from_tree
from megascale.errors import ConfigError
from megascale.parallel import embedding_rows
from megascale.parallel.embedding_rows import fits_row_exchange
from tests.exact.cases import Case, case
from tests.exact.compare import TOLERANCE, assert_equal, differences
from tests.exact.training import STEPS, make_engine, train

pytestmark = pytest.mark.xdist_group("processes")

MODEL: dict[str, Any] = {"layers": 2, "vocab_size": 64, "tied_embeddings": False, "positions": "rotary"}


def rows_case(*sizes: int, **options: Any) -> Case:
    """Return a case whose embedding is reduced by rows."""
    options["overlap"] = {"embedding": "rows", **options.get("overlap", {})}
    options["parallel"] = {"bucket_elements": 700, **options.get("parallel", {})}
    return case(
        *sizes, microbatches=options.pop("microbatches", 2), model={**MODEL, **options.pop("model", {})}, **options
    )


CASES = {
    "context": rows_case(parallel={"context": 4}),
    "context, data, recompute": rows_case(1, 1, 2, parallel={"context": 2, "recompute": "full"}),
    "stages, LAMB": rows_case(1, 2, 2, microbatches=3, optimizer={"name": "lamb"}),
    "nothing overlapped, Muon": rows_case(1, 1, 2, overlap={"data": False}, optimizer={"name": "muon"}),
    "replicated shards": rows_case(1, 1, 4, parallel={"replicate": 2, "data": 2}),
}


def describe_reduction(rank: int, world: int, tree: dict[str, Any]) -> str:
    """Return what the start of an engine says about the embedding's gradient."""
    return make_engine(rank, world, tree).active.get("embedding gradient", "")


@pytest.mark.parametrize("name", CASES)
def test_layouts(name: str, pool: Any, one_process: Any) -> None:
    chosen = CASES[name]
    assert "reduced by the rows" in pool.run(describe_reduction, chosen.world, chosen.tree)[0]
    reports = pool.run(train, chosen.world, chosen.tree)
    assert_equal(one_process(chosen.twin), reports, from_tree(chosen.tree).model)


def add_all_rows(shard_VH: Tensor, tokens_T: Tensor, dy_TH: Tensor, first_row: int) -> None:
    """Add the rows of other ranks too."""
    shard_VH.index_add_(0, tokens_T % shard_VH.shape[0], dy_TH.to(shard_VH.dtype))


@contextmanager
def rows_of_other_shards() -> Iterator[None]:
    with mock.patch.object(embedding_rows, "add_token_rows", add_all_rows):
        yield


def test_a_wrong_row_is_seen(pool: Any, one_process: Any) -> None:
    """The comparison finds rows that belong to another rank's shard."""
    chosen = CASES["context"]
    reports = pool.run(train, chosen.world, chosen.tree, STEPS, rows_of_other_shards)
    found = differences(one_process(chosen.twin), reports, from_tree(chosen.tree).model)
    assert max(found.values()) > TOLERANCE


def find_refusal(rank: int, world: int, tree: dict[str, Any]) -> str:
    """Return the error of an engine that cannot reduce by rows, "" if it can."""
    try:
        make_engine(rank, world, tree)
    except ConfigError as error:
        return str(error)
    return ""


REFUSED: dict[str, tuple[Callable[[], Case], str]] = {
    "tied": (lambda: rows_case(1, 1, 2, model={"tied_embeddings": True}), "tied"),
    "tied over stages": (lambda: rows_case(1, 2, 2, model={"tied_embeddings": True}), "tied"),
    "tensor": (lambda: rows_case(2, 1, 2), "tensor parallelism"),
    "ZeRO-2": (lambda: rows_case(1, 1, 2, zero=2), "parallel.zero=1"),
    "rows of two shards": (lambda: rows_case(1, 1, 2, model={"vocab_size": 65, "vocab_multiple": 1}), "bucket"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unavailable_choice_is_an_error_with_a_remedy(name: str, pool: Any) -> None:
    make_case, reason = REFUSED[name]
    chosen = make_case()
    for refusal in pool.run(find_refusal, chosen.world, chosen.tree):
        assert reason in refusal
        assert "set --overlap.embedding=auto" in refusal


def test_auto_reduces_rows_only_of_small_steps() -> None:
    """Llama 8B: steps of up to 128,256 tokens."""
    for tokens, expected in ((32_768, True), (65_536, True), (131_072, False)):
        assert fits_row_exchange(tokens, hidden=4096, vocabulary=128_256, itemsize=2, grad_itemsize=4) == expected


def test_rows_are_added_in_the_type_of_the_shard() -> None:
    shard = torch.full((3, 2), 7.0)
    tokens = torch.tensor([4, 6, 4, 3, 7])
    dy = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [8.0, 8.0], [9.0, 9.0]], dtype=torch.bfloat16)
    embedding_rows.add_token_rows(shard, tokens, dy, first_row=4)
    assert shard.tolist() == [[13.0, 15.0], [7.0, 7.0], [10.0, 11.0]]
