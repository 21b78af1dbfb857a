"""Axes registered from outside the package: each trains exactly as one process does, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megascale.config import from_tree
from megascale.config.axes import AXES, AxisFacts
from megascale.core.chunk_map import make_chunk_map
from megascale.core.grid import Grid
from megascale.core.inventory import (
    MLP_PARTS,
    LogicalTensor,
    PartInventory,
    SavedActivation,
    linear_tensors,
)
from megascale.core.layer_spec import LayerSpec
from megascale.core.layout import lay_out
from megascale.errors import ConfigError, FitError
from megascale.model import mlp
from megascale.model.context import LayerSetup
from megascale.model.fusion import Branch
from megascale.parallel.collectives import Axis, all_reduce, gather_sequence, scatter_sequence
from megascale.parallel.parameters import local_parameter
from megascale.parallel.tensor import ColumnLinear, RowLinear
from megascale.rendezvous.group_plan import plan_groups, plan_rank_groups
from megascale.simulate.fabric.step_traffic import estimate_step_traffic
from megascale.simulate.planner.layout_cost import make_plan
from tests.exact.cases import TWO_LAYERS, Case, case
from tests.exact.compare import assert_equal
from tests.exact.training import FEW_STEPS, RankReport, train

pytestmark = pytest.mark.xdist_group("processes")

MIXED_ROWS = 6


class SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over an axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """Return x."""
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the sum of the ranks' gradients."""
        return all_reduce(grads[0].clone(), ctx.axis).wait(), None


class Sum(torch.autograd.Function):
    """Sum over an axis whose gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        """Return the sum of the ranks' x."""
        return all_reduce(x.clone(), axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient."""
        return grads[0], None


class MixedMlp(nn.Module):
    """An MLP whose input x becomes x + A'A x; the ranks of the axis `slab` divide the rows of A."""

    axis = "slab"
    columns: tuple[()] = ()

    def __init__(self, setup: LayerSetup) -> None:
        super().__init__()
        into, mix, out = setup.tensors.mlp
        self.rows_axis = setup.axes.get(self.axis, Axis())
        self.into = ColumnLinear([into], setup.linears, setup.dtype)
        self.mix = local_parameter([mix], setup.axis.rank, setup.axis.size, setup.dtype, setup.axes)
        self.out = RowLinear([out], setup.linears, setup.dtype)

    def fuses_bias_gradient(self, x: Tensor) -> bool:
        """It has no bias."""
        return False

    def forward(self, normed_SBH: Tensor, projection: ColumnLinear | None) -> Branch:
        """[s/t, b, h] -> its share of the output."""
        return Branch(torch.tanh(self.into(normed_SBH + self.mix_tokens(normed_SBH))), self.out.weight)

    def mix_tokens(self, x: Tensor) -> Tensor:
        """Return A'A x; all ranks of the axis have the same x."""
        x = SumGradient.apply(x, self.rows_axis)
        return Sum.apply((x @ self.mix.T) @ self.mix, self.rows_axis)


class ExchangedMlp(MixedMlp):
    """The same, where the ranks of the axis `experts` divide A and the samples, as experts do."""

    axis = "experts"

    def mix_tokens(self, x: Tensor) -> Tensor:
        """Return A'A x of this rank's own samples."""
        every = gather_sequence(x, self.rows_axis)
        return scatter_sequence((every @ self.mix.T) @ self.mix, self.rows_axis)


def list_mixed_tensors(axis: str, layer: LayerSpec, name: str) -> list[LogicalTensor]:
    """The matrices into and out of the MLP, and A, which the axis cuts, between them."""
    width = layer.feed_forward.width
    into = linear_tensors(f"{name}.mlp.in", width, layer.hidden, 0, False, layer.init_std)
    mix = LogicalTensor(
        f"{name}.mlp.mix.weight", (MIXED_ROWS, layer.hidden), None, layer.init_std, other_cuts=((axis, 0),)
    )
    out = linear_tensors(f"{name}.mlp.out", layer.hidden, width, 1, False, layer.output_init_std)
    return into + [mix] + out


def list_mixed_activations(layer: LayerSpec) -> list[SavedActivation]:
    """The result of tanh."""
    return [SavedActivation("mlp_activation", layer.feed_forward.width, "columns", has_gradient=True)]


def register() -> None:
    """Register the axes and the part that one of them cuts."""
    AXES.register("slab", AxisFacts(cuts_parameters=True), after="tensor")
    AXES.register("rows", AxisFacts("samples", has_group=False), after="data")
    AXES.register("copies", AxisFacts(has_group=False), after="data")
    AXES.register("experts", AxisFacts("samples", cuts_parameters=True), after="data")
    for name, part in (("mixed", MixedMlp), ("exchanged", ExchangedMlp)):
        mlp.register(name, part, PartInventory(partial(list_mixed_tensors, part.axis), list_mixed_activations))


def unregister() -> None:
    """Remove them."""
    for name in ("slab", "rows", "copies", "experts"):
        AXES.remove(name)
    for registry in (mlp.MLPS, mlp.MLP_MODULES, MLP_PARTS):
        registry.remove("mixed")
        registry.remove("exchanged")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register()
    yield
    unregister()


def run(rank: int, world: int, tree: dict[str, Any], steps: int) -> RankReport:
    """Train in a worker with the axes registered."""
    register()
    try:
        return train(rank, world, tree, steps)
    finally:
        unregister()


def axis_case(axes: dict[str, int], *sizes: int, **options: Any) -> Case:
    """Return a case with axes of these sizes beside those of `case`."""
    model = {**TWO_LAYERS, "mlp": "mixed", "positions": "learned", **options.pop("model", {})}
    entries = [f"{name}={size}" for name, size in axes.items()]
    parallel = {"axes": entries, "bucket_elements": 700}
    readers = axes.get("rows", 1) * axes.get("experts", 1)
    plain = case(*sizes, microbatches=2 * readers, model=model, parallel=parallel, **options)
    world = plain.world
    for size in axes.values():
        world *= size
    return Case(plain.tree, world)


CASES = {
    "an axis that replicates": axis_case({"copies": 2}, 2, 1, 2, zero=1),
    "an axis that replicates, LAMB without ZeRO": axis_case({"copies": 2}, 2, zero=0, optimizer={"name": "lamb"}),
    "an axis that cuts the batch": axis_case({"rows": 2}, 1, 2, 2, zero=2),
    "an axis that cuts the batch, LAMB": axis_case({"rows": 2}, 2, 1, 2, zero=1, optimizer={"name": "lamb"}),
    "an axis that cuts the batch, without ZeRO": axis_case({"rows": 3}, 2, zero=0),
    "an axis that cuts a matrix": axis_case({"slab": 2}, 2, 1, 2, zero=1),
    "an axis that cuts a matrix, over stages": axis_case({"slab": 2}, 2, 2, 1, zero=0),
    "an axis that cuts a matrix, LAMB": axis_case({"slab": 2}, 2, 1, 2, zero=2, optimizer={"name": "lamb"}),
    "an axis that cuts a matrix, LAMB without ZeRO": axis_case({"slab": 3}, 2, zero=0, optimizer={"name": "lamb"}),
    "an axis that cuts a matrix, Muon": axis_case({"slab": 2}, 2, 1, 2, zero=1, optimizer={"name": "muon"}),
    "an axis that cuts samples and a matrix": axis_case({"experts": 2}, 2, 1, 2, zero=1, model={"mlp": "exchanged"}),
    "an axis that cuts samples and a matrix, over stages": axis_case(
        {"experts": 2}, 1, 2, 2, zero=2, model={"mlp": "exchanged"}, optimizer={"name": "lamb"}
    ),
    "an axis that cuts samples and a matrix, without ZeRO": axis_case(
        {"experts": 3}, 2, zero=0, model={"mlp": "exchanged"}, optimizer={"name": "muon"}
    ),
    "all three": axis_case({"slab": 2, "rows": 2, "copies": 2}, zero=1, optimizer={"name": "muon"}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_axis_from_outside_trains_exactly(name, pool):
    chosen = CASES[name]
    [reference] = pool.run(run, 1, chosen.twin, FEW_STEPS)
    report = pool.run(run, chosen.world, chosen.tree, FEW_STEPS)
    assert_equal(reference, report, from_tree(chosen.tree).model)


def test_order_and_groups_follow_the_registration():
    grid = Grid(tensor=2, slab=2, data=2, rows=3, pipeline=2)
    assert [axis for axis, _ in grid.axes] == [
        "tensor", "slab", "context", "slice", "expert", "data", "experts", "copies", "rows", "replicate", "pipeline",
    ]  # fmt: skip
    assert grid.group("slab", 0) == [0, 2]
    assert (grid.replicas, grid.shards) == (6, 6)
    plan = plan_groups(grid, make_chunk_map(grid.pipeline, 2), True)
    assert {spec.kind: len(spec.ranks) for spec in plan} == {
        "tensor": 2,
        "slab": 2,
        "data_gather": 6,
        "data_reduce": 6,
        "stage": 24,
        "replica": 4,
        "embedding": 2,
        "forward": 2,
        "backward": 2,
    }
    for rank in range(grid.world_size):
        assert plan_rank_groups(grid, rank, make_chunk_map(grid.pipeline, 2), True) == [
            spec for spec in plan if rank in spec.ranks
        ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("stripes=2", "parallel.axes='stripes' is not known"),
        ("tensor=2", "names a built-in axis; set parallel.tensor instead"),
        ("slab=0", "has no size of 1 or more; write it as slab=2"),
        ("slab", "has no size of 1 or more; write it as slab=2"),
    ],
)
def test_a_wrong_size_names_what_is_right(entry, message):
    with pytest.raises(ConfigError, match=message):
        from_tree({"parallel": {"axes": [entry]}})


def test_a_batch_that_the_axes_do_not_divide_is_refused():
    tree = axis_case({"rows": 3}).tree
    tree["train"] = {**tree["train"], "global_batch": 4}
    with pytest.raises(FitError, match=r"train.global_batch=4 is not a multiple of .* = 1 x 3"):
        lay_out(from_tree(tree), 3)


def test_planner_and_simulator_price_data_parallelism_only():
    assert make_plan(from_tree(axis_case({"rows": 2}, 1, 1, 2).tree), 4, 80.0).layout.grid.shards == 4
    for name in ("slab", "copies"):
        config = from_tree(axis_case({name: 2}).tree)
        with pytest.raises(FitError, match=f"parallel.axes={name}=2 has no price"):
            make_plan(config, 2, 80.0)
        with pytest.raises(FitError, match=f"parallel.axes={name}=2 has no price"):
            estimate_step_traffic(config, 2)


def test_the_pipeline_stays_the_slowest_axis():
    with pytest.raises(ConfigError, match="cannot be slower than the pipeline"):
        AXES.register("last", AxisFacts(), after="pipeline")


def test_only_axes_that_cut_parameters_may_cut_one():
    tensor = LogicalTensor("w", (4, 4), other_cuts=(("rows", 0),))
    with pytest.raises(ConfigError, match="register the axis with cuts_parameters=True"):
        local_parameter([tensor], 0, 1, torch.float64)
