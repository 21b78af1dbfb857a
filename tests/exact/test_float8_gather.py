"""Matrices gathered as float8 over data parallelism: to the bit what casts of gathered weights give, in every layout.

Both are told the same story: steps, one of them skipped, evaluation between them, a checkpoint loaded over what was
there, and a step after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch

from megascale import checkpoint
from megascale.core import calls
from megascale.core.batch import Batch
from megascale.errors import TrainingError
from megascale.parallel import float8_gather
from megascale.parallel.collectives import Pending
from megascale.parallel.float8_gather import Float8Gather
from megascale.train.engine import Engine
from megascale.train.weights import sum_bits
from tests.exact.cases import TWO_LAYERS, case
from tests.exact.training import Boxed, make_engine, state_of, tokens

pytestmark = pytest.mark.xdist_group("processes")

FLOAT8: dict[str, Any] = {"linear_precision": "float8"}
SERIAL: dict[str, Any] = {"train": FLOAT8, "model": {**TWO_LAYERS, "block": "serial"}}
PARALLEL: dict[str, Any] = {"train": FLOAT8, "model": {**TWO_LAYERS, "block": "parallel"}}
SMALL_BUCKETS = {"bucket_elements": 900}  # two matrices or one

LAYOUTS = {
    "data": case(1, 1, 2, microbatches=2, **SERIAL, parallel=SMALL_BUCKETS),
    "data, ZeRO-2, recompute": case(
        1, 1, 3, zero=2, microbatches=2, **PARALLEL, parallel={"bucket_elements": 500, "recompute": "full"}
    ),
    "pipeline, two chunks, LAMB": case(
        1, 2, 2, virtual=2, microbatches=2, train=FLOAT8, optimizer={"name": "lamb"}, parallel=SMALL_BUCKETS
    ),
    "tensor, pipeline, recompute": case(
        2, 2, 2, microbatches=2, **SERIAL, parallel={"recompute": "selective", **SMALL_BUCKETS}
    ),
    "tensor, recompute": case(2, 1, 2, microbatches=2, **SERIAL, parallel={"recompute": "selective", **SMALL_BUCKETS}),
    "tensor, Muon, ZeRO-2": case(2, 1, 2, zero=2, microbatches=2, **PARALLEL, optimizer={"name": "muon"}),
    "three chunks, nothing overlapped": case(
        1,
        1,
        2,
        virtual=3,
        microbatches=3,
        train=FLOAT8,
        model={"layers": 3, "tied_embeddings": False},
        parallel={"micro_batch_group_size": 3},
        overlap={"data": False},
    ),
}
WITHOUT_LAYERS = "chunks without layers, graphs"
LAYOUTS[WITHOUT_LAYERS] = case(
    1, 2, 2, virtual=2, microbatches=6, **SERIAL, parallel={"layer_split": [0, 1, 1, 0], **SMALL_BUCKETS}
)
LAYOUTS[WITHOUT_LAYERS].tree["kernels"] = {"graphs": "on"}


class Sizes(calls.NullCallLog):
    """Bytes of the gathers over data-parallel ranks, by step."""

    def __init__(self) -> None:
        self.gathers: list[int] = []

    def begin_call(self, group: str, op: str, size: int) -> int:
        if op == "all_gather" and "data" in group:
            self.gathers.append(size)
        return 0


class Story(NamedTuple):
    """What a rank tells: losses and norms of each step and evaluation, its state after some of them, bytes gathered in
    the last step, and whether its weights were the whole model's before and after `Engine.gather_parameters`."""

    numbers: list[float]
    states: list[list[Boxed]]
    sent: int
    whole: list[bool]


def run(engine: Engine, step: int, more: bool = True, bad: bool = False) -> list[float]:
    """A step on tokens of its own; bad: with a gradient that is not finite. Loss, norm, and whether all data-parallel
    ranks had the same weights in use."""
    config = engine.config
    share, micro = config.train.global_batch // engine.layout.grid.data, config.train.micro_batch

    def batch(i: int) -> Batch[torch.Tensor]:
        first = engine.data_rank * share + i * micro
        rows = np.stack([tokens(config, step, first + k) for k in range(micro)])
        columns = torch.from_numpy(rows).t().contiguous()
        return Batch(columns[:-1], columns[1:])

    equal: list[bool] = []

    def spoil(_: int) -> None:
        engine.optimizer.states[0].shard.grads[0] = torch.nan

    def compare(_: int) -> None:
        equal.append(same_on_copies(engine, sum_bits(engine.data_parallel.list_weights_in_use())))

    engine.before_update_hooks[:] = [compare, spoil] if bad else [compare]
    engine.start_gather()
    result = engine.step(batch, step, 0.01, has_next_step=more)
    return [float(result.loss), float(result.grad_norm), float(all(equal))]


def same_on_copies(engine: Engine, local: torch.Tensor) -> bool:
    every = [torch.empty_like(local) for _ in range(engine.layout.grid.data)]
    torch.distributed.all_gather(every, local, group=engine.buffers[0].axes.data.group)
    return all(torch.equal(item, local) for item in every)


def evaluated(engine: Engine) -> float:
    engine.gather_parameters()
    rows = torch.from_numpy(np.stack([tokens(engine.config, 99, engine.data_rank)])).t().contiguous()
    return float(engine.sum_losses(Batch(rows[:-1], rows[1:])))


def run_rank(rank: int, world: int, tree: dict[str, Any], gather: str, folder: Path) -> Story:
    engine = make_engine(rank, world, {**tree, "parallel": {**tree["parallel"], "gather_precision": gather}})
    shards = [checkpoint.TensorShard(*parts) for parts in engine.optimizer.logical_tensors()]
    engine.runtime.calls = sizes = Sizes()
    numbers, states = run(engine, 1), [state_of(engine)]
    numbers += [evaluated(engine)] + run(engine, 2, more=False) + run(engine, 3, bad=True) + [evaluated(engine)]
    numbers += run(engine, 4, more=False)
    states.append(state_of(engine))
    checkpoint.save(folder, 4, shards, {}, keep=1)
    numbers += run(engine, 5)
    with engine.loading_weights():  # the gather of the step before is under way
        assert not any(engine.data_parallel.is_gathering(chunk) for chunk in range(len(engine.chunks)))
        checkpoint.load(folder, shards)
    sizes.gathers.clear()
    numbers += run(engine, 6, more=False)
    sent = sum(sizes.gathers)
    engine.start_gather()  # of the first chunk, under way when all is to be whole
    before = [flat.params.clone() for flat in engine.buffers]
    numbers.append(evaluated(engine))
    full = [all(torch.equal(a, flat.params) for a, flat in zip(before, engine.buffers, strict=True))]
    states.append(state_of(engine))
    engine.synchronize()
    full.append(same_on_copies(engine, torch.cat([flat.params for flat in engine.buffers])))
    return Story(numbers, states, sent, full)


def assert_same_bits(single: Story, second: Story) -> None:
    np.testing.assert_array_equal(single.numbers, second.numbers)
    for a, b in zip(single.states, second.states, strict=True):
        for remaining, right in zip(a, b, strict=True):
            assert remaining[:3] == right[:3]
            assert np.array_equal(remaining.values, right.values), remaining.name


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_gives_the_bits_of_casts_of_gathered_weights(name, pool, tmp_path):
    layout = LAYOUTS[name]
    theirs = pool.run(run_rank, layout.world, layout.tree, "default", tmp_path / "default")
    local = pool.run(run_rank, layout.world, layout.tree, "auto", tmp_path / "float8")
    for first, second in zip(local, theirs, strict=True):
        assert_same_bits(first, second)
        assert np.isnan(first.numbers).sum() == 1  # the norm of the step that was skipped
        assert first.numbers[2] == first.numbers[-2] == 1.0  # the same weights in use
        # An eighth of float64's bytes for most, and whole when asked for and not before.
        assert first.sent < second.sent
        assert first.whole[1]
        assert second.whole[1]
    if name != WITHOUT_LAYERS:
        assert not all(story.whole[0] for story in local)
        assert all(sum(story.sent for story in local) < 0.7 * remote.sent * len(theirs) for remote in theirs)


DATA = LAYOUTS["data"]


def faulty(rank: int, world: int, tree: dict[str, Any], folder: Path, fault: str) -> Story:
    faults = {
        "scales of own parts": (float8_gather, "all_reduce", lambda x, axis, op: Pending(x)),
        "bytes of the step before": (Float8Gather, "invalidate", lambda self: None),
        "never sent": (float8_gather, "all_gather_into", lambda whole, part, axis: Pending(whole)),
    }
    owner, subject, wrong = faults[fault]
    if fault == "bytes of the step before":
        send = Float8Gather.start_gather

        def late(self: Float8Gather, bucket: int) -> Pending:
            part = self._bucket_data[bucket]
            first = not part.bytes.any()
            return send(self, bucket) if first else Pending(part.bytes)

        with mock.patch.object(Float8Gather, "start_gather", late), mock.patch.object(owner, subject, wrong):
            return run_rank(rank, world, tree, "float8", folder)
    with mock.patch.object(owner, subject, wrong):
        return run_rank(rank, world, tree, "float8", folder)


def test_faults_are_found(pool, tmp_path):
    """The comparison can fail."""
    right = pool.run(run_rank, DATA.world, DATA.tree, "float8", tmp_path / "right")
    for fault in ("scales of own parts", "bytes of the step before", "never sent"):
        wrong = pool.run(faulty, DATA.world, DATA.tree, tmp_path / fault, fault)
        with pytest.raises(AssertionError):
            assert_same_bits(right[0], wrong[0])


def not_gathered(rank: int, world: int, tree: dict[str, Any]) -> tuple[str, dict[str, str]]:
    engine = make_engine(rank, world, {**tree, "parallel": {**tree["parallel"], "gather_precision": "auto"}})
    run(engine, 1, more=False)
    try:
        engine.sum_losses(Batch(*torch.zeros(2, 8, 1, dtype=torch.int64)))
    except TrainingError as error:
        return str(error), engine.active
    return "", engine.active


def test_a_weight_that_is_not_whole_is_not_read(pool):
    for report, active in pool.run(not_gathered, DATA.world, DATA.tree):
        assert "before it was gathered" in report
        assert active["parameters gathered in"] == "float8: matrices of linear layers; float64: all other parameters"
