"""Local parameters: their pieces, the axes that replicate them, and initial values that no layout changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megascale.core.inventory_records import LogicalTensor
from megascale.errors import ConfigError
from megascale.parallel.collectives import Axis
from megascale.parallel.parameters import (
    draw_initial_values,
    get_spec,
    initialise,
    list_piece_views,
    local_parameter,
    materialise,
)

CPU = torch.device("cpu")
QUERY = LogicalTensor("query.weight", (6, 4), partition_dim=0, init_std=0.5)
KEY = LogicalTensor("key.weight", (2, 4), partition_dim=0, init_std=0.5)
OUT = LogicalTensor("out.weight", (3, 8), partition_dim=1, init_std=0.25)
EMBEDDING = LogicalTensor("embedding.weight", (5, 4), partition_dim=0, init_std=1.0, padded_rows=8)
NORM = LogicalTensor("norm.weight", (4,), init_value=1.5)


def make_module(rank: int, ranks: int) -> nn.Module:
    """Return a module with a stack of two tensors, a row-parallel one, a padded one, and a replicated one."""
    module = nn.Module()
    for name, tensors in (("qk", [QUERY, KEY]), ("out", [OUT]), ("embedding", [EMBEDDING]), ("norm", [NORM])):
        module.register_parameter(name, local_parameter(tensors, rank, ranks, torch.float64))
    storage = {parameter: torch.full(parameter.shape, torch.nan).double() for parameter in module.parameters()}
    materialise(module, storage)
    return module


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_stacks_its_pieces(ranks: int) -> None:
    module = make_module(0, ranks)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert shapes == {"qk": (8 // ranks, 4), "out": (3, 8 // ranks), "embedding": (8 // ranks, 4), "norm": (4,)}
    assert [piece.name for piece in get_spec(module.qk).pieces] == ["query.weight", "key.weight"]
    cut = {name: get_spec(parameter).cut_dimension for name, parameter in module.named_parameters()}
    expected = {"qk": 0, "out": 1, "embedding": 0} if ranks == 2 else {}
    assert cut == {"qk": None, "out": None, "embedding": None, "norm": None} | expected


def test_a_replicated_parameter_is_summed_and_counted_once() -> None:
    module = make_module(1, 2)
    norm, out = get_spec(module.norm), get_spec(module.out)
    assert (norm.summed_axes, out.summed_axes) == (("tensor", "slice", "expert"), ("slice", "expert"))
    assert "tensor" in norm.replicated_axes
    assert "tensor" not in out.replicated_axes
    assert {"data", "context"} <= set(out.replicated_axes)
    for position, is_counted in (({}, True), ({"tensor": 0, "data": 3}, True), ({"tensor": 1}, False)):
        assert norm.is_counted(position) == is_counted
        assert out.is_counted(position)


def test_an_axis_that_sums_all_gradients_cuts_no_parameter() -> None:
    tensor = LogicalTensor("a", (4, 4), other_cuts=(("data", 0),))
    with pytest.raises(ConfigError, match=r"a is cut along the axis data, .*cuts_parameters=True"):
        local_parameter([tensor], 0, 1, torch.float32, {"data": Axis(size=2)})


@pytest.mark.parametrize("ranks", [1, 2])
def test_initial_values_are_those_of_the_whole_tensors(ranks: int) -> None:
    for rank in range(ranks):
        module = make_module(rank, ranks)
        initialise(module, 7)
        for parameter in module.parameters():
            spec = get_spec(parameter)
            used = 0
            for piece, view in list_piece_views(spec, parameter.data):
                slices = tuple(slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.sizes, strict=True))
                if spec.init_std is None:
                    assert (view == 1.5).all()
                else:
                    whole = draw_initial_values(7, piece.name, piece.shape, spec.init_std, CPU)
                    assert torch.equal(view, whole[slices].double())
                used += view.numel()
            assert (parameter.data.view(-1)[used:] == 0).all()  # rows that pad the vocabulary


def test_initial_values_depend_on_seed_and_name_and_have_their_deviation() -> None:
    def draw(seed: int, name: str, std: float) -> torch.Tensor:
        return draw_initial_values(seed, name, (100, 100), std, CPU)

    first = draw(1, "a", 0.5)
    assert first.dtype == torch.float32
    assert torch.equal(first, draw(1, "a", 0.5))
    assert abs(float(first.mean())) < 0.02
    assert abs(float(first.std()) - 0.5) < 0.02
    torch.testing.assert_close(draw(1, "a", 1.0), 2 * first)
    for values in (draw(2, "a", 0.5), draw(1, "b", 0.5)):
        assert abs(float((values * first).mean())) < 0.02


def test_storage_keeps_what_a_parameter_is() -> None:
    module = nn.Module()
    frozen = local_parameter([NORM], 0, 1, torch.float32)
    frozen.requires_grad_(False)
    module.register_parameter("norm", frozen)
    module.inner = nn.Module()
    module.inner.register_parameter("tied", frozen)
    assert module.norm.is_meta
    storage = torch.zeros(4)
    materialise(module, {frozen: storage})
    assert module.norm is module.inner.tied
    assert module.norm.data_ptr() == storage.data_ptr()
    assert not module.norm.requires_grad
    assert get_spec(module.norm) is get_spec(frozen)
