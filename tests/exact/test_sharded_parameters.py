"""ZeRO-3 gives the one-process run's losses, gradients, weights and moments in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from megascale.config import from_tree
from megascale.parallel.parameter_slots import ParameterSlots
from tests.exact.cases import TWO_LAYERS, Case, case
from tests.exact.compare import assert_equal
from tests.exact.training import FEW_STEPS, STEPS, Told, make_engine, run_step, train

pytestmark = pytest.mark.xdist_group("processes")

UNTIED = {"tied_embeddings": False}
CASES = {
    "accumulation, tied": case(data=2, microbatches=3, zero=3, parallel={"bucket_elements": 700}),
    "accumulation, untied, LAMB": case(
        data=4, microbatches=2, zero=3, model={**UNTIED, "head_bias": True}, optimizer={"name": "lamb"}
    ),
    "full recompute, dropout": case(
        data=2, microbatches=2, zero=3, model={**UNTIED, "dropout": 0.1}, parallel={"recompute": "full"}
    ),
    "selective recompute, parallel block, TP2, Muon": case(
        2,
        data=2,
        microbatches=2,
        zero=3,
        model={**UNTIED, "block": "parallel", "activation": "swiglu", "positions": "rotary"},
        parallel={"recompute": "selective"},
        optimizer={"name": "muon"},
    ),
    "TP2, nothing overlapped": case(
        2, data=2, microbatches=2, zero=3, model=UNTIED, overlap={"tensor": "off", "data": False}
    ),
    "one micro-batch": case(data=2, microbatches=1, zero=3, model=TWO_LAYERS),
    "two stages of one chunk, tied": case(1, 2, 2, microbatches=3, zero=3, model={"layers": 3}),
    "two stages of two chunks, untied": case(1, 2, 2, virtual=2, microbatches=4, zero=3, model=UNTIED),
    "two stages of five chunks": case(1, 2, 2, virtual=5, microbatches=4, zero=3, model={**UNTIED, "layers": 10}),
    "two stages of five chunks, tied, full recompute, LAMB": case(
        1,
        2,
        2,
        virtual=5,
        microbatches=3,
        zero=3,
        model={"layers": 11},
        parallel={"recompute": "full"},
        optimizer={"name": "lamb"},
    ),
    "four chunks on one stage, one round": case(
        data=2,
        virtual=4,
        microbatches=3,
        zero=3,
        model=UNTIED,
        parallel={"micro_batch_group_size": 3},
    ),
    "layers divided between chunks": case(
        1, 2, 2, virtual=2, microbatches=2, zero=3, model={"layers": 3}, parallel={"layer_split": [0.5, 1, 1, 0.5]}
    ),
}


@contextmanager
def poisoned_slots() -> Iterator[None]:
    """Fill a slot with NaN when its unit is not in use."""
    with mock.patch.object(ParameterSlots, "poisons", True):
        yield


@pytest.mark.parametrize("name", CASES)
def test_zero_3_is_exact_and_reads_no_released_slot(name, pool, one_process):
    layout: Case = CASES[name]
    result = pool.run(train, layout.world, layout.tree, FEW_STEPS, poisoned_slots)
    assert_equal(one_process(layout.twin, FEW_STEPS), result, from_tree(layout.tree).model)


@pytest.mark.parametrize("name", ["accumulation, tied", "full recompute, dropout", "two stages of five chunks"])
def test_zero_3_is_exact_where_slots_stay_gathered(name, pool, one_process):
    layout: Case = CASES[name]
    result = pool.run(train, layout.world, layout.tree, STEPS)
    assert_equal(one_process(layout.twin, STEPS), result, from_tree(layout.tree).model)


def count_gathers(rank: int, world: int, tree: dict[str, Any]) -> int:
    """Return the gathers of the second step."""
    engine = make_engine(rank, world, tree)
    report = Told()
    run_step(engine, 1, report)
    slots = engine.data_parallel.parameter_slots
    assert slots is not None
    before = slots.gathers
    run_step(engine, 2, report)
    engine.synchronize()
    return slots.gathers - before


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        # Five blocks: a micro-batch's forward gathers embedding, blocks and head, and its backward the three blocks
        # that the slots have lost. Full recompute gathers no more. The next forward finds two blocks in their slots.
        (case(data=2, microbatches=1, zero=3, model={**UNTIED, "layers": 5}), 7 + 3),
        (
            case(data=2, microbatches=1, zero=3, model={**UNTIED, "layers": 5}, parallel={"recompute": "full"}),
            7 + 3,
        ),
        (case(data=2, microbatches=2, zero=3, model={**UNTIED, "layers": 5}), 2 * (7 + 3) - 2),
        # Five chunks in rounds of all eight micro-batches: forward gathers each, backward the two that are lost.
        (
            case(
                data=2,
                virtual=5,
                microbatches=8,
                zero=3,
                model={**UNTIED, "layers": 5},
                parallel={"micro_batch_group_size": 8},
            ),
            5 + 2,
        ),
    ],
    ids=["one micro-batch", "full recompute", "two micro-batches", "rounds"],
)
def test_gathers_of_a_step(layout, most, pool):
    assert pool.run(count_gathers, layout.world, layout.tree) == [most] * 2
