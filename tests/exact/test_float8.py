"""Float8 on a CPU, where the numbers that float8 values stand for are multiplied in float64: layouts agree.

Scales are those of whole tensors or rows wherever they are cut, so that pipeline and data parallelism differ by the
order of sums alone; tensor parallelism adds partial sums, whose rounding may move a number to the next float8 value. It
shows in a few numbers, of which each moves by a step of the format.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.config import from_tree
from megascale.core.batch import Batch
from megascale.parallel.float8 import TensorWiseFloat8
from tests.exact.cases import TWO_LAYERS, Case, case
from tests.exact.compare import differences
from tests.exact.training import FEW_STEPS, RankReport, make_engine, run_step, train

pytestmark = pytest.mark.xdist_group("processes")
FLOAT8_RECIPES = ("float8", "float8_rowwise", "float8_rowwise_wgrad")


def layouts(recipe: str) -> dict[str, Case]:
    serial: dict[str, Any] = {"train": {"linear_precision": recipe}, "model": {"block": "serial"}}
    parallel: dict[str, Any] = {**serial, "model": {"block": "parallel"}}
    short_serial, short_parallel = ({**item, "model": {**item["model"], **TWO_LAYERS}} for item in (serial, parallel))
    selective = {"parallel": {"recompute": "selective"}}
    return {
        "pipeline": case(1, 2, 1, virtual=2, microbatches=4, **serial, parallel={"layer_split": [1, 1.5, 0.5, 1]}),
        "ZeRO-2": case(1, 1, 2, zero=2, microbatches=2, **parallel, parallel={"bucket_elements": 500}),
        "ZeRO-3": case(1, 1, 2, zero=3, microbatches=2, **parallel),
        "pipeline, data, LAMB": case(1, 2, 2, microbatches=2, optimizer={"name": "lamb"}, **short_serial),
        "tensor, serial": case(2, microbatches=2, **serial),
        "tensor, parallel, recompute": case(4, microbatches=2, **short_parallel, **selective),
        "tensor, pipeline, data, recompute": case(2, 2, 2, microbatches=2, **short_serial, **selective),
        "recompute": case(1, microbatches=2, **serial, parallel={"recompute": "full"}),
    }


def on_one_process(layout: Case) -> dict[str, Any]:
    """The same micro-batches, since scales are theirs."""
    return {**layout.tree, "parallel": {}, "overlap": {}}


def test_context_ranks_scale_their_own_tokens(pool, one_process):
    """Scales of rows are those of one process. A scale of a tensor is that of a rank's slice, which the start says."""
    for recipe, limit in (("float8_rowwise", 1e-10), ("float8", 2e-2)):
        settings: dict[str, Any] = {"train": {"linear_precision": recipe}, "parallel": {"context": 2}}
        layout = case(1, microbatches=2, **settings)
        reference = one_process(on_one_process(layout), 1)
        divided = pool.run(train, layout.world, layout.tree, 1)
        for rank in divided:
            assert abs(rank.losses[0] - reference.losses[0]) <= limit
    engine_lines = pool.run(list_active, layout.world, layout.tree)
    assert all("parallel.context" in lines["float8 scales"] for lines in engine_lines)


def list_active(rank: int, world: int, tree: dict[str, Any]) -> dict[str, str]:
    """Return the lines that the start of an engine prints."""
    return make_engine(rank, world, tree).active


@pytest.mark.parametrize("name", list(layouts("float8")))
def test_layouts_agree(name, pool, one_process):
    layout = layouts("float8")[name]
    reference = one_process(on_one_process(layout), FEW_STEPS)
    result = differences(reference, pool.run(train, layout.world, layout.tree, FEW_STEPS), from_tree(layout.tree).model)
    for subject, separate in result.items():
        if "key.bias" not in subject:  # zero but for rounding
            assert separate < (1e-5 if "tensor" in name else 1e-10), subject


@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        (name, overlap)
        for name in layouts("float8_rowwise")
        for overlap in ("async", "off")
        if overlap == "async" or "tensor" in name
    ],
)
def test_row_wise_layouts_agree(name, overlap, pool, one_process):
    """Ranks agree on the scales of rows that they share, and whole rows travel with their scales."""
    layout = layouts("float8_rowwise")[name]
    tree = {**layout.tree, "overlap": {"tensor": overlap}}
    reference = one_process(on_one_process(layout), FEW_STEPS)
    result = differences(reference, pool.run(train, layout.world, tree, FEW_STEPS), from_tree(layout.tree).model)
    for subject, separate in result.items():
        if "key.bias" not in subject:
            assert separate < (1e-5 if "tensor" in name else 1e-10), subject


@pytest.mark.parametrize(
    "name", ["pipeline", "ZeRO-2", "tensor, serial", "tensor, parallel, recompute", "tensor, pipeline, data, recompute"]
)
def test_layouts_agree_with_float8_weight_gradients(name, pool, one_process):
    """Rows and their scales are gathered, and the scale of the matrix is the largest of all ranks' scales."""
    layout = layouts("float8_rowwise_wgrad")[name]
    reference = one_process(on_one_process(layout), FEW_STEPS)
    result = differences(reference, pool.run(train, layout.world, layout.tree, FEW_STEPS), from_tree(layout.tree).model)
    for subject, separate in result.items():
        if "key.bias" not in subject:
            assert separate < (1e-5 if "tensor" in name else 1e-10), subject


def cast_cut_rows(rank: int, world: int, tree: dict[str, Any]) -> torch.Tensor:
    """Return the float8 values of this rank's columns of rows whose halves differ in size by 2 ** 16."""
    linears = make_engine(rank, world, tree).chunks[0].linears
    x = torch.randn(4, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[..., 8:] *= 2.0**-16
    columns = x.shape[-1] // world
    operand = linears.prepare_input(x[..., rank * columns : (rank + 1) * columns], torch.empty(0))
    assert operand.scale is not None
    return operand.data.view(torch.float8_e4m3fn).double() * operand.scale


def test_ranks_agree_on_the_scales_of_rows_that_they_share(pool):
    """The small half is flushed by the scale of the whole row, and would not be by a scale of its own."""
    options: dict[str, Any] = {"microbatches": 2, "model": TWO_LAYERS, "train": {"linear_precision": "float8_rowwise"}}
    [full] = pool.run(cast_cut_rows, 1, case(1, **options).tree)
    parts = pool.run(cast_cut_rows, 2, case(2, **options).tree)
    assert torch.equal(torch.cat(parts, -1), full)


def weights_in_use(rank: int, world: int, tree: dict[str, Any]) -> tuple[list[bool], bool]:
    """Whether the float8 weights of a step were cast from those in use; whether any is left for the update."""
    engine, report = make_engine(rank, world, tree), RankReport()
    linears = engine.chunks[0].linears
    assert isinstance(linears, TensorWiseFloat8)
    current, remaining = [], False

    def look(step: int) -> None:
        matrices = engine.chunks[0].collect_linear_weights()
        assert {id(weight) for weight in matrices.values()} == set(linears._weights)
        for weight in matrices.values():
            current.append(torch.equal(linears.get_weight(weight).rows, linears.cast_weight(weight.detach()).rows))

    def updated(step: int) -> None:
        nonlocal remaining
        remaining |= bool(linears._weights)

    engine.before_update_hooks.append(look)
    engine.after_update_hooks.append(updated)
    for step in (1, 2):
        run_step(engine, step, report)
    engine.sum_losses(Batch(*torch.zeros(2, 8, 1, dtype=torch.int64)))
    assert linears._weights
    with engine.loading_weights():
        pass
    return current, remaining or bool(linears._weights)


def test_weights_are_cast_anew_when_they_change(pool):
    [(current, remaining)] = pool.run(
        weights_in_use, 1, case(1, microbatches=2, train={"linear_precision": "float8"}).tree
    )
    assert current == [True] * 2 * 2 * 4  # steps, layers, matrices
    assert not remaining


def counted(rank: int, world: int, tree: dict[str, Any], outlier: bool) -> list[float]:
    """Shares clipped and flushed in a step, and how many numbers were looked at."""
    engine = make_engine(rank, world, tree)
    if outlier:  # all but a few numbers of the norms' outputs are below what float8 can tell from zero beside it
        norm = engine.chunks[0].blocks[0].norm1
        with torch.no_grad():
            norm.weight[0] = 1e6
    column = torch.arange(9).repeat(1, 1).t() % 21
    step = engine.step(lambda i: Batch(column[:-1], column[1:]), 1, 0.0, count_casts=True)
    clipped, flushed, looked_at = step.cast_counts.tolist()
    assert engine.step(lambda i: Batch(column[:-1], column[1:]), 2, 0.0).cast_counts.tolist() == [0.0, 0.0, 0.0]
    return [clipped / looked_at, flushed / looked_at, looked_at]


def test_what_casts_clip_and_flush_is_counted_over_all_ranks(pool):
    def tree(data: int) -> dict[str, Any]:
        return case(1, 1, data, microbatches=2, train={"linear_precision": "float8"}).tree

    [(clipped, flushed, looked_at)] = pool.run(counted, 1, tree(1), False)
    # Two micro-batches of 8 tokens in two layers: hidden, heads, hidden, MLP in; and gradients of the outputs.
    assert looked_at == 2 * 8 * 2 * ((16 + 16 + 16 + 64) + (48 + 16 + 64 + 16))
    assert clipped == 0  # scales are those of the tensor itself
    assert flushed < 0.05
    pair = pool.run(counted, 2, tree(2), False)
    assert pair[0] == pair[1]
    assert pair[0][2] == 2 * looked_at
    [(_, more, _)] = pool.run(counted, 1, tree(1), True)
    assert more > flushed + 0.01


def test_it_is_near_training_without_float8_and_not_equal(one_process):
    trees = {
        name: on_one_process(case(1, microbatches=2, train={"linear_precision": name}))
        for name in ("default", *FLOAT8_RECIPES)
    }
    losses = {name: one_process(tree, FEW_STEPS).losses for name, tree in trees.items()}
    for name in FLOAT8_RECIPES:
        assert losses[name] != losses["default"]
        assert losses[name] == pytest.approx(losses["default"], rel=0.02)
    assert len({tuple(losses[name]) for name in FLOAT8_RECIPES}) == len(FLOAT8_RECIPES)
