"""Replays on another replica: equal bits while all ranks are healthy, the right rank after one wrong bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megascale.core.batch import NO_FIELDS, SampleFields
from megascale.ops.segments import TILE
from megascale.parallel.chunk_graphs import EAGER_STEPS
from megascale.train.update_check import RANGE
from tests.chaos.corruption.bit_flips import EVERY_RANK, BitFlip
from tests.chaos.corruption.checked_training import CheckedResult, train_checked
from tests.exact.cases import HARD, TWO_LAYERS, Case, case
from tests.exact.recorded_graphs import recorded_graphs
from tests.exact.test_experts import BALANCED, experts_case

STEP = 2  # the first step that is checked with an interval of 2
CHECKED_STEPS = 3  # the second check follows an update that the first one checked
BFLOAT16 = {"precision": "bfloat16"}
DROPOUT = {**TWO_LAYERS, "dropout": 0.1}
HEALTHY = {
    "tensor": case(2, 1, 2, microbatches=2, zero=0, model=DROPOUT),
    "tied over interleaved stages": case(
        1, 2, 2, microbatches=3, virtual=2, zero=1, model={"layers": 4}, parallel={"bucket_elements": 700}
    ),
    "ZeRO-2, recomputed": case(1, 1, 3, microbatches=1, zero=2, model=DROPOUT, parallel={"recompute": "full"}),
    "ZeRO-2, tables divided by rows": HARD["ZeRO-2, tables divided by rows"],
    "ZeRO-3, reduced in bfloat16": case(
        2,
        1,
        2,
        microbatches=2,
        zero=3,
        model=TWO_LAYERS,
        parallel={"reduce_dtype": "bfloat16"},
        train={"precision": "bfloat16"},
    ),
    "context": case(1, 1, 2, microbatches=2, zero=1, model=DROPOUT, parallel={"context": 2}),
    "experts": experts_case(2, 1, 2, experts=BALANCED, zero=2),
    "adapters": case(2, 1, 2, microbatches=2, zero=2, model=TWO_LAYERS, train={"lora": {"rank": 3, "alpha": 6.0}}),
    "adapters in stages": case(
        1, 2, 2, microbatches=2, zero=1, model=TWO_LAYERS, train={"lora": {"rank": 3, "alpha": 6.0}}
    ),
    "LAMB": case(1, 1, 2, microbatches=1, zero=2, model=TWO_LAYERS, optimizer={"name": "lamb"}),
    "Muon": case(2, 1, 2, microbatches=1, zero=1, model=TWO_LAYERS, optimizer={"name": "muon"}),
    "float8, gathered in float8": case(
        1,
        1,
        2,
        microbatches=2,
        model=TWO_LAYERS,
        parallel={"gather_precision": "float8"},
        train={"linear_precision": "float8", "precision": "bfloat16"},
    ),
    "float8": case(
        2, 1, 2, microbatches=2, model=TWO_LAYERS, train={"linear_precision": "float8", "precision": "float32"}
    ),
}


def run(
    layout: Case,
    pool: Any,
    flip: BitFlip | None = None,
    steps: int = STEP,
    interval: int = 2,
    update_range: int = RANGE,
    fields: SampleFields = NO_FIELDS,
) -> CheckedResult:
    """Return what rank 0 reports; all ranks must report the same verdict."""
    results = pool.run(train_checked, layout.world, layout.tree, steps, interval, flip, (), update_range, fields)
    assert all(result.verdicts == results[0].verdicts for result in results)
    return replace(results[0], state=[result.state for result in results])


@pytest.mark.parametrize("name", HEALTHY)
def test_replays_agree_and_leave_the_training_as_it_is(name, pool):
    layout = HEALTHY[name]
    checked = run(layout, pool, steps=CHECKED_STEPS, interval=1, update_range=TILE)
    assert not checked.verdicts
    assert checked.confirmed_step == CHECKED_STEPS
    assert checked.state == run(layout, pool, steps=CHECKED_STEPS, interval=0).state


def train_with_graphs(rank: int, world: int, tree: dict[str, Any], steps: int, interval: int) -> CheckedResult:
    """Train as `train_checked` does, with recorded operators as graphs. A replay runs no Python of the chunk."""
    with recorded_graphs():
        return train_checked(rank, world, {**tree, "kernels": {"graphs": "on"}}, steps, interval, None)


@pytest.mark.parametrize("zero", [1, 2])
def test_a_checked_step_runs_without_graphs(zero, pool):
    """A trace does not see the operators of a replayed micro-batch, so the replica's replay would differ."""
    layout = case(1, 1, 2, microbatches=2, zero=zero, model=TWO_LAYERS, parallel={"bucket_elements": 700})
    steps = EAGER_STEPS + 4  # the last two checks follow captures
    checked = pool.run(train_with_graphs, layout.world, layout.tree, steps, 2)
    unchecked = pool.run(train_with_graphs, layout.world, layout.tree, steps, 0)
    for result, reference in zip(checked, unchecked, strict=True):
        assert not result.verdicts
        assert result.confirmed_step == steps
        assert result.state == reference.state


DOCUMENTS = SampleFields(loss_weights=True, positions=True, max_documents=4)
ROTARY = {**DROPOUT, "positions": "rotary"}
WITH_FIELDS = {
    "stages": case(1, 2, 2, microbatches=3, zero=1, model=ROTARY),
    "tensor, ZeRO-3": case(2, 1, 2, microbatches=2, zero=3, model=ROTARY),
    "context": case(1, 1, 2, microbatches=2, zero=2, model=ROTARY, parallel={"context": 2}),
}


@pytest.mark.parametrize("name", WITH_FIELDS)
def test_documents_and_loss_weights_go_to_the_other_replica(name, pool):
    """Each third sample has no weight at all: its replay has only zeros as gradients."""
    layout = WITH_FIELDS[name]
    checked = run(layout, pool, fields=DOCUMENTS)
    assert not checked.verdicts
    assert checked.confirmed_step == STEP
    assert checked.state == run(layout, pool, interval=0, fields=DOCUMENTS).state
    flip = BitFlip("gemm", 3, STEP, is_persistent=False, position=2, bit=40)
    (verdict,) = run(layout, pool, flip, fields=DOCUMENTS).verdicts
    assert verdict.ranks == (3,)


def test_updates_while_the_check_is_off_are_no_fault(pool):
    layout = case(1, 1, 2, microbatches=2, zero=1, model=DROPOUT)
    results = pool.run(train_checked, layout.world, layout.tree, 5, 1, None, (3, 4))
    assert [result.verdicts for result in results] == [[], []]
    assert results[0].confirmed_step == 5


NAMED = [
    # layout, kind, position, whether it is persistent, suspects
    (case(1, 1, 3, microbatches=2, zero=2, model=DROPOUT), "gemm", 2, True, (1,)),
    (case(2, 1, 2, microbatches=2, zero=3, model=DROPOUT), "gemm", 4, False, (3,)),
    (case(1, 2, 2, microbatches=2, zero=1, model=DROPOUT), "activation gradient", 1, False, (2,)),
    (case(1, 2, 2, microbatches=2, zero=1, model=DROPOUT), "activation", 0, True, (2, 3)),
    (experts_case(2, 1, 2, experts=BALANCED), "weight gradient", 5, False, (1,)),
    (case(1, 1, 2, microbatches=2, model=DROPOUT, parallel={"context": 2}), "gemm", 2, False, (3,)),
    (case(1, 1, 2, microbatches=2, zero=3, model=DROPOUT), "reduced gradient", 1, False, (1,)),
    (case(1, 2, 2, microbatches=2, zero=1, model=DROPOUT), "reduced gradient", 4, False, (2,)),
    (case(2, 1, 2, microbatches=2, zero=1, model=DROPOUT), "optimizer state", 3, False, (2,)),
    (case(1, 1, 3, microbatches=1, zero=2, model=TWO_LAYERS), "update", 1, True, (1,)),
    (case(2, 1, 2, microbatches=1, zero=0, model=TWO_LAYERS), "update", 2, False, (3,)),
    (
        case(1, 1, 2, microbatches=1, zero=3, model=TWO_LAYERS, train={"precision": "bfloat16"}),
        "update",
        3,
        True,
        (0, 1),
    ),
    (HARD["ZeRO-2, tables divided by rows"], "gemm", 20, False, (3,)),
    (HARD["ZeRO-2, tables divided by rows"], "reduced gradient", 1, False, (1,)),
    (case(1, 1, 2, microbatches=1, model=TWO_LAYERS, optimizer={"name": "lamb"}), "update", 0, False, (1,)),
    (case(1, 1, 3, microbatches=1, model=TWO_LAYERS, optimizer={"name": "lamb"}), "update", 1, True, (2,)),
    (case(1, 1, 2, microbatches=1, model=TWO_LAYERS, optimizer={"name": "muon"}), "update", 3, False, (1,)),
    (case(2, 1, 3, microbatches=1, model=TWO_LAYERS, optimizer={"name": "muon"}), "update", 1, True, (4,)),
    # The wrong element is in the last matrix of a stack.
    (case(1, 1, 2, microbatches=1, model=TWO_LAYERS, optimizer={"name": "muon"}), "update", 2003, False, (1,)),
]


@pytest.mark.parametrize(("layout", "kind", "position", "is_persistent", "ranks"), NAMED)
def test_a_wrong_bit_is_found_and_its_rank_named(layout, kind, position, is_persistent, ranks, pool):
    flip = BitFlip(kind, ranks[-1], STEP, is_persistent, position, bit=40)
    (verdict,) = run(layout, pool, flip).verdicts
    assert verdict.ranks == ranks
    assert verdict.is_sure == (len(ranks) == 1)
    assert verdict.is_persistent == is_persistent


def test_a_wrong_sum_that_all_ranks_receive_is_not_surely_the_fault_of_each(pool):
    layout = case(1, 1, 2, microbatches=2, zero=0, model=DROPOUT)
    flip = BitFlip("reduced gradient", EVERY_RANK, STEP, is_persistent=False, position=1, bit=40)
    (verdict,) = run(layout, pool, flip).verdicts
    assert (verdict.ranks, verdict.is_sure) == ((0, 1), False)


def test_an_alert_leaves_the_gradients_to_the_update(pool):
    """The replica at fault errs in the replay alone, so that the training itself is right."""
    layout = case(1, 1, 3, microbatches=2, zero=2, model=DROPOUT)
    flip = BitFlip("gemm", 1, STEP, is_persistent=False, position=2, bit=40, in_replay=True)
    checked = run(layout, pool, flip)
    assert [verdict.ranks for verdict in checked.verdicts] == [(1,)]
    assert checked.state == run(layout, pool, interval=0).state
