"""Float8 gathers under ZeRO-3 give the bits of casts of gathered weights, and weights are whole where they are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megascale.parallel.float8_gather import Float8Gather
from tests.exact.cases import TWO_LAYERS, case
from tests.exact.test_float8_gather import assert_same_bits, run, run_rank
from tests.exact.test_sharded_parameters import poisoned_slots
from tests.exact.training import make_engine

pytestmark = pytest.mark.xdist_group("processes")

FLOAT8: dict[str, Any] = {"linear_precision": "float8"}
UNTIED = {"tied_embeddings": False}

LAYOUTS = {
    "tied": case(data=2, microbatches=2, zero=3, train=FLOAT8),
    "untied, full recompute, three ranks": case(
        data=3, microbatches=2, zero=3, train=FLOAT8, model={**UNTIED, "layers": 3}, parallel={"recompute": "full"}
    ),
    "TP2, parallel block, Muon": case(
        2,
        data=2,
        microbatches=2,
        zero=3,
        train=FLOAT8,
        model={**TWO_LAYERS, "block": "parallel"},
        optimizer={"name": "muon"},
    ),
    "two stages of five chunks, LAMB": case(
        1,
        2,
        2,
        virtual=5,
        microbatches=2,
        zero=3,
        train=FLOAT8,
        model={**UNTIED, "layers": 10},
        optimizer={"name": "lamb"},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_float8_gathers_give_the_bits_of_casts_of_gathered_weights(name, pool, tmp_path):
    """Over steps, one of them skipped, evaluation between them, and a checkpoint loaded over what was there."""
    layout = LAYOUTS[name]
    cast = pool.run(run_rank, layout.world, layout.tree, "default", tmp_path / "default")
    gathered = pool.run(run_rank, layout.world, layout.tree, "float8", tmp_path / "float8")
    for first, second in zip(gathered, cast, strict=True):
        assert_same_bits(first, second)
        assert np.isnan(first.numbers).sum() == 1  # the norm of the step that was skipped
        assert first.sent < 0.7 * second.sent


def read_weights(rank: int, world: int, tree: dict[str, Any], gather: str) -> tuple[list[np.ndarray], list[float]]:
    """Return each parameter, as read between two steps, and the numbers of both steps."""
    with poisoned_slots():
        engine = make_engine(rank, world, {**tree, "parallel": {**tree["parallel"], "gather_precision": gather}})
        numbers = run(engine, 1)
        engine.gather_parameters()
        weights = []
        for param in engine.buffers[0].parameters:
            engine.data_parallel.gather_parameter(0, param)
            weights.append(param.detach().numpy().copy())
        return weights, numbers + run(engine, 2, more=False)


def test_a_weight_is_read_in_its_own_type(pool):
    layout = LAYOUTS["untied, full recompute, three ranks"]
    cast = pool.run(read_weights, layout.world, layout.tree, "default")
    for weights, numbers in pool.run(read_weights, layout.world, layout.tree, "float8"):
        assert numbers == cast[0][1]
        for weight, expected in zip(weights, cast[0][0], strict=True):
            np.testing.assert_array_equal(weight, expected)


def run_with_stale_bytes(rank: int, world: int, tree: dict[str, Any]) -> list[float]:
    """Return the numbers of two steps, the second of which reads bytes of the first."""
    engine = make_engine(rank, world, {**tree, "parallel": {**tree["parallel"], "gather_precision": "float8"}})
    numbers = run(engine, 1)
    assert engine.data_parallel.parameter_slots is not None
    for float8 in engine.data_parallel.parameter_slots._float8:
        assert isinstance(float8, Float8Gather)
        float8.is_stale = False
    return numbers + run(engine, 2, more=False)


def test_bytes_of_the_step_before_are_found(pool):
    """The comparison can fail."""
    layout = LAYOUTS["tied"]
    [stale, _] = pool.run(run_with_stale_bytes, layout.world, layout.tree)
    [(_, right), _] = pool.run(read_weights, layout.world, layout.tree, "float8")
    assert stale[:3] == right[:3]
    assert stale[3] != right[3]
