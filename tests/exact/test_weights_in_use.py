"""In bfloat16 the weights in use are a copy of the master weights: after each update, each load, and in each layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale import checkpoint
from megascale.parallel.parameters import get_spec, list_piece_views
from megascale.train.engine import Engine
from tests.exact.cases import Case, case
from tests.exact.training import STEPS, Boxed, RankReport, make_engine, observe, run_step, state_of

pytestmark = pytest.mark.xdist_group("processes")


def layout(optimizer: str, tensor: int, pipeline: int, data: int, zero: int = 1, **parallel: Any) -> Case:
    return case(
        tensor,
        pipeline,
        data,
        zero=zero,
        microbatches=4 // data,
        optimizer={"name": optimizer},
        train={"precision": "bfloat16"},
        parallel=parallel,
    )


# Of each optimizer the layout that trains, and another that loads what it has saved.
LAYOUTS = {
    "adamw": (layout("adamw", 1, 2, 2), layout("adamw", 2, 1, 2, zero=2, bucket_elements=700)),
    "lamb": (layout("lamb", 2, 1, 2, zero=2, bucket_elements=700), layout("lamb", 1, 1, 1)),
    "adamw, ZeRO-3": (layout("adamw", 1, 1, 4, zero=3), layout("adamw", 1, 2, 2, zero=3)),
    "muon": (layout("muon", 1, 2, 2, bucket_elements=700), layout("muon", 2, 1, 2, zero=0)),
}


def weights_in_use(engine: Engine) -> list[Boxed]:
    """This rank's share of the weights as forward passes read them, whole over data-parallel ranks."""
    engine.gather_parameters()
    boxes = []
    for number, chunk in enumerate(engine.chunks):
        for parameter in chunk.parameters():
            engine.data_parallel.gather_parameter(number, parameter)
            for piece, view in list_piece_views(get_spec(parameter), parameter.data):
                boxes.append(Boxed(f"model.{piece.name}", piece.shape, piece.box.offsets, view.float().numpy().copy()))
    return boxes


def shards(engine: Engine) -> list[checkpoint.TensorShard]:
    return [checkpoint.TensorShard(*parts) for parts in engine.optimizer.logical_tensors()]


def train_and_save(
    rank: int, world: int, tree: dict[str, Any], folder: Path
) -> tuple[list[Boxed], list[Boxed], RankReport]:
    """Train all steps, saved before the last: the weights in use and the state then, and what the last step gave."""
    engine = make_engine(rank, world, tree)
    before = RankReport()
    last = RankReport()
    for step in range(1, STEPS):
        run_step(engine, step, before)
    checkpoint.save(folder, STEPS - 1, shards(engine), {}, keep=1)
    in_use, state = weights_in_use(engine), state_of(engine)
    observe(engine, last)
    run_step(engine, STEPS, last)
    last.state = state_of(engine) + weights_in_use(engine)
    return in_use, state, last


def load(
    rank: int, world: int, tree: dict[str, Any], folder: Path, steps: int
) -> tuple[list[Boxed], list[Boxed], RankReport]:
    """Load into an engine with other weights: the weights in use and the state, and what the last step gives."""
    engine, last = make_engine(rank, world, tree), RankReport()
    for state in engine.optimizer.states:
        for tensor in (state.master, state.shard.params) + tuple(state.state_tensors()):
            tensor.normal_(generator=torch.Generator().manual_seed(rank))
    with engine.loading_weights():
        checkpoint.load(folder, shards(engine))
    in_use, state = weights_in_use(engine), state_of(engine)
    if steps:
        observe(engine, last)
        run_step(engine, STEPS, last)
        last.state = state_of(engine) + weights_in_use(engine)
    return in_use, state, last


def merge(boxes: list[Boxed]) -> dict[str, np.ndarray]:
    """Logical tensors from the boxes of all ranks; where several hold an element they must agree."""
    tensors: dict[str, np.ndarray] = {}
    for box in boxes:
        tensor = tensors.setdefault(box.name, np.full(box.shape, np.nan, np.float32))
        target = tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.values.shape, strict=True))]
        assert (np.isnan(target) | (target == box.values)).all(), box.name
        target[...] = box.values
    assert not any(np.isnan(tensor).any() for tensor in tensors.values())
    return tensors


def assert_copies(in_use: list[list[Boxed]], state: list[list[Boxed]]) -> None:
    """The weights in use are the master weights in bfloat16, each element on each rank that holds it."""
    masters = merge([box for boxes in state for box in boxes])
    used = merge([box for boxes in in_use for box in boxes])
    assert used.keys() == {name for name in masters if name.startswith("model.")}
    rounded = 0
    for name, values in used.items():
        master = torch.from_numpy(masters[name])
        assert torch.equal(torch.from_numpy(values), master.bfloat16().float()), name
        rounded += int((master.bfloat16() != master).sum())
    assert rounded > 100  # a copy of masters that bfloat16 holds would prove nothing


def assert_same_bits(a: RankReport, b: RankReport) -> None:
    assert (a.losses, a.norms) == (b.losses, b.norms)
    for ours, peers in zip(a.gradients[0] + a.state, b.gradients[0] + b.state, strict=True):
        assert (ours.name, ours.offsets) == (peers.name, peers.offsets)
        assert np.array_equal(ours.values, peers.values), ours.name


@pytest.mark.parametrize("optimizer", LAYOUTS)
def test_a_bfloat16_run_goes_on_bit_for_bit(optimizer, pool, tmp_path):
    local, second = LAYOUTS[optimizer]
    folder = tmp_path / "checkpoints"
    in_use, state, last = zip(*pool.run(train_and_save, local.world, local.tree, folder), strict=True)
    assert_copies(in_use, state)
    for loader in (local, second):
        steps = 1 if loader is local else 0
        loaded = pool.run(load, loader.world, loader.tree, folder, steps)
        assert_copies([rank[0] for rank in loaded], [rank[1] for rank in loaded])
        saved = merge([box for boxes in state for box in boxes])
        restored = merge([box for rank in loaded for box in rank[1]])
        assert restored.keys() == saved.keys()
        assert all(np.array_equal(restored[name], saved[name]) for name in saved)
        if loader is local:
            for rank, resumed in enumerate(loaded):
                assert_same_bits(resumed[2], last[rank])
