"""Loss weights and positions of samples: every layout trains as one process does, in float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from megascale.config import from_tree
from megascale.core.batch import NO_FIELDS, SampleFields
from megascale.core.layout import lay_out
from megascale.errors import ConfigError
from megascale.train.engine import Engine
from tests.exact import training
from tests.exact.cases import SMALL, TWO_LAYERS, Case, case, cases
from tests.exact.compare import assert_equal
from tests.exact.training import FEW_STEPS, RankReport, make_engine, observe, run_step, state_of, train
from tests.extend import parts, test_own_axis

pytestmark = pytest.mark.xdist_group("processes")

WEIGHTED = SampleFields(loss_weights=True)
ROTARY = {**TWO_LAYERS, "positions": "rotary"}
EXAMPLES = 6
EMPTY_STEP = 2  # without any loss weight

LAYOUTS = {
    "tensor, pipeline, data": case(2, 2, 2, virtual=2, microbatches=2, zero=2, train={"micro_batch": 2}),
    "pipeline, recomputed": case(1, 2, 2, microbatches=4, parallel={"recompute": "full"}),
    "two chunks on one stage": case(
        1, 1, 2, virtual=2, microbatches=3, zero=0, parallel={"micro_batch_group_size": 3}, model={"dropout": 0.1}
    ),
    "data, nothing overlapped": case(1, 1, 4, microbatches=3, zero=1, model=TWO_LAYERS, overlap={"data": False}),
    "tensor, LAMB": case(4, 1, 2, microbatches=2, model=TWO_LAYERS, optimizer={"name": "lamb"}),
}


def check(case: Case, fields: SampleFields, pool) -> None:
    """Compare a layout with one process, both on samples with `fields`."""
    [expected] = pool.run(train, 1, case.twin, FEW_STEPS, nullcontext, fields)
    report = pool.run(train, case.world, case.tree, FEW_STEPS, nullcontext, fields)
    assert_equal(expected, report, from_tree(case.tree).model)


@pytest.mark.parametrize("name", LAYOUTS)
def test_unequal_weights_over_ranks_and_micro_batches(name: str, pool) -> None:
    check(LAYOUTS[name], WEIGHTED, pool)


def test_any_layout(pool) -> None:
    @seed(0)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(), st.booleans())
    def check_some(case: Case, has_positions: bool) -> None:
        note(from_tree(case.tree).to_toml())
        is_rotary = case.tree["model"].get("positions") == "rotary"
        check(case, SampleFields(loss_weights=True, positions=has_positions and is_rotary), pool)

    check_some()


@pytest.mark.parametrize(
    "layout",
    [
        case(2, 2, 2, microbatches=2, model=ROTARY, train={"micro_batch": 2}),
        case(1, 4, 1, microbatches=3, model={"positions": "rotary", "block": "parallel", "rotary_fraction": 0.5}),
        case(2, 2, 2, microbatches=2, train={"micro_batch": 2}),
    ],
    ids=["all axes", "stages between the first and the last", "learned"],
)
def test_positions(layout: Case, pool) -> None:
    fields = SampleFields(positions=True)
    check(layout, fields, pool)
    [with_positions] = pool.run(train, 1, layout.twin, 1, nullcontext, fields)
    [without] = pool.run(train, 1, layout.twin, 1)
    assert abs(with_positions.losses[0] - without.losses[0]) > 1e-6


def train_along_own_axes(rank: int, world: int, tree: dict[str, Any]) -> RankReport:
    """Train on weighted samples in a worker with a plugin's axes."""
    test_own_axis.register()
    try:
        return train(rank, world, tree, FEW_STEPS, nullcontext, WEIGHTED)
    finally:
        test_own_axis.unregister()


@pytest.mark.parametrize(
    ("axes", "sizes", "options"),
    [
        ({"rows": 2, "copies": 2}, (2,), {}),
        ({"experts": 2}, (1, 2, 2), {"model": {"mlp": "exchanged"}}),
    ],
    ids=["cuts the batch, replicates", "cuts samples and a matrix"],
)
def test_weights_are_summed_over_the_axes_that_cut_samples(axes, sizes, options, pool) -> None:
    test_own_axis.register()
    try:
        layout = test_own_axis.axis_case(axes, *sizes, **options)
        [expected] = pool.run(train_along_own_axes, 1, layout.twin)
        report = pool.run(train_along_own_axes, layout.world, layout.tree)
        assert_equal(expected, report, from_tree(layout.tree).model)
    finally:
        test_own_axis.unregister()


def train_with_equal_weights(rank: int, world: int, tree: dict[str, Any], fields: SampleFields) -> RankReport:
    """Train on samples whose targets all have weight 1."""
    unit_weights = lambda config, step, sample: np.ones(config.model.sequence_length, np.float32)
    with mock.patch.object(training, "loss_weights", unit_weights):
        return train(rank, world, tree, FEW_STEPS, nullcontext, fields)


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("zero", [1, 2])
def test_equal_weights_give_the_bits_of_no_weights(precision: str, zero: int, pool) -> None:
    layout = case(1, 2, 2, microbatches=2, zero=zero, model=TWO_LAYERS, train={"precision": precision})
    weighted = pool.run(train_with_equal_weights, layout.world, layout.tree, WEIGHTED)
    plain = pool.run(train_with_equal_weights, layout.world, layout.tree, NO_FIELDS)
    for with_weights, without in zip(weighted, plain, strict=True):
        assert (with_weights.losses, with_weights.norms) == (without.losses, without.norms)
        for box, expected in zip(with_weights.state, without.state, strict=True):
            assert np.array_equal(box.values, expected.values), box.name


def train_over_an_empty_step(rank: int, world: int, tree: dict[str, Any]) -> tuple[RankReport, bool]:
    """Train with weights that are all 0 in one step. Return the report, and whether that step kept the state."""
    weights = training.loss_weights

    def empty(config: Any, step: int, sample: int) -> np.ndarray:
        return weights(config, step, sample) * np.float32(step != EMPTY_STEP)

    engine, report = make_engine(rank, world, tree, WEIGHTED), RankReport()
    observe(engine, report)
    with mock.patch.object(training, "loss_weights", empty):
        run_step(engine, 1, report)
        before = state_of(engine)
        run_step(engine, EMPTY_STEP, report)
        after = state_of(engine)
        run_step(engine, EMPTY_STEP + 1, report)
    report.state = state_of(engine)
    is_reused = all(np.array_equal(box.values, earlier.values) for box, earlier in zip(after, before, strict=True))
    # One process tells 0 for loss and norm too; the comparison divides by them.
    assert (report.losses.pop(1), report.norms.pop(1)) == (0.0, 0.0)
    return report, is_reused


@pytest.mark.parametrize("name", ["tensor, pipeline, data", "tensor, LAMB"])
def test_a_step_without_weights_changes_nothing(name: str, pool) -> None:
    layout = LAYOUTS[name]
    [(expected, _)] = pool.run(train_over_an_empty_step, 1, layout.twin)
    report = pool.run(train_over_an_empty_step, layout.world, layout.tree)
    assert all(is_reused for _, is_reused in report)
    assert_equal(expected, [outcome for outcome, _ in report], from_tree(layout.tree).model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (SampleFields(positions=True), "model.positions=none"),
        (SampleFields(max_documents=4), "document boundaries, which model.attention=average ignores"),
    ],
)
def test_a_field_that_the_model_would_ignore_is_refused(fields: SampleFields, message: str) -> None:
    parts.register()
    attention = "average" if fields.max_documents else "causal"
    model = {**SMALL["model"], "positions": "none", "attention": attention}
    config = from_tree({**SMALL, "model": model, "train": {**SMALL["train"], "global_batch": 1}})
    with pytest.raises(ConfigError, match=message):
        Engine(lay_out(config, 1), None, torch.device("cpu"), fields=fields)
    parts.unregister()
