"""Micro-batches that are replayed (kernels.graphs) give the bits that eager ones give, in every layout that has them.

On a CPU a replay does the captured work again on the captured memory: which micro-batches are replayed, what lies where
and who still reads it when it is written anew are as on a GPU. tests/gpu/graphs.py has the graphs themselves.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megascale.config import from_tree
from megascale.core.batch import NO_FIELDS, SampleFields
from megascale.core.layout import lay_out
from megascale.errors import ConfigError, TrainingError
from megascale.parallel.chunk_graphs import EAGER_STEPS, CapturedMicrobatch, ChunkGraphs, GraphedRunner
from megascale.train.engine import Engine
from tests.exact.cases import TWO_LAYERS, case
from tests.exact.recorded_graphs import STEPS, one_eager_step
from tests.exact.training import RankReport, make_engine, observe, run_step, state_of

pytestmark = pytest.mark.xdist_group("processes")

LAYOUTS = {
    "one rank": (case(microbatches=3, model={"block": "parallel"}), 3),
    "one micro-batch": (case(microbatches=1, train={"micro_batch": 2}), 1),
    "two chunks, LAMB": (
        case(virtual=2, microbatches=3, optimizer={"name": "lamb"}, parallel={"micro_batch_group_size": 3}),
        6,
    ),
    "all recomputed": (case(microbatches=2, model=TWO_LAYERS, parallel={"recompute": "full"}), 2),
    "float8": (case(microbatches=3, model=TWO_LAYERS, train={"linear_precision": "float8"}), 3),
    # Also the first micro-batch, whose parameters arrive, and the last, whose gradients leave.
    "data": (case(1, 1, 2, microbatches=4, model=TWO_LAYERS, parallel={"bucket_elements": 500}), 4),
    "data, two micro-batches": (case(1, 1, 2, zero=0, microbatches=2, model=TWO_LAYERS), 2),
    "pipeline, a layer divided": (case(1, 2, 1, microbatches=4, parallel={"layer_split": [2.5, 1.5]}), 4),
    "tensor": (case(2, 1, 1, microbatches=2), 2),
    "tensor, parallel, float8": (
        case(2, 1, 1, microbatches=2, model={"block": "parallel"}, train={"linear_precision": "float8"}),
        2,
    ),
    # The exchange of tensor parallelism is not cut: between the first micro-batch and the last.
    "tensor, pipeline, data": (case(2, 2, 2, microbatches=4), 2),
    "pipeline, two chunks, data, float8": (
        case(1, 2, 2, virtual=2, microbatches=4, train={"linear_precision": "float8"}),
        8,
    ),
}
EXPERTS = {**TWO_LAYERS, "mlp": "experts", "mlp_bias": False, "experts": {"number": 4, "top_k": 2, "bias_rate": 0.01}}
# Room for rows that an even load fills, which no step has: each is computed again. With room for all, none is.
EXPERT_LAYOUTS = {
    "all experts local": (case(microbatches=2, model=EXPERTS), {}, 0),
    "float8, all experts local": (
        case(microbatches=2, model=EXPERTS, train={"linear_precision": "float8_rowwise"}),
        {},
        0,
    ),
    "float8, room": (
        case(2, 1, 2, microbatches=4, model=EXPERTS, train={"linear_precision": "float8"}),
        {"expert_rows": 2},
        0,
    ),
    "recomputed": (case(2, 1, 1, microbatches=2, model=EXPERTS, parallel={"recompute": "full"}), {"expert_rows": 2}, 0),
    "room": (case(2, 1, 2, microbatches=4, model=EXPERTS), {"expert_rows": 2}, 0),
    "no room": (case(2, 1, 2, microbatches=4, model=EXPERTS), {"expert_rows": 1}, 2),
    "room, pipeline, data": (case(2, 2, 2, microbatches=4, model=EXPERTS), {"expert_rows": 2}, 0),
    "no room, pipeline": (case(2, 2, 1, microbatches=2, model=EXPERTS), {"expert_rows": 1}, 2),
}

ROTARY = {"positions": "rotary"}
FIELD_LAYOUTS = {
    "one rank, rotary": (case(microbatches=3, model={**ROTARY, "block": "parallel"}), 3),
    "two chunks, LAMB": LAYOUTS["two chunks, LAMB"],
    "pipeline, two chunks, data, rotary": (case(1, 2, 2, virtual=2, microbatches=4, model=ROTARY), 8),
    "context, pipeline, rotary": (
        case(1, 2, 1, microbatches=4, model=ROTARY, parallel={"context": 2}, overlap={"context": "auto"}),
        2,
    ),
}


@one_eager_step()
def train(
    rank: int, world: int, tree: dict[str, Any], graphs: str, fields: SampleFields = NO_FIELDS
) -> tuple[RankReport, int]:
    """What a rank tells of STEPS steps, and how many forwards of the last step were replayed."""
    engine = make_engine(rank, world, {**tree, "kernels": {"graphs": graphs}}, fields)
    report = RankReport()
    replayed = 0
    observe(engine, report)
    backward = GraphedRunner.backward

    def count(self: GraphedRunner, chunk: int, i: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        nonlocal replayed
        replayed += (chunk, i) in self._replayed
        return backward(self, chunk, i, grad)

    with mock.patch.object(GraphedRunner, "backward", count):
        for step in range(1, STEPS + 1):
            replayed = 0
            run_step(engine, step, report)
    report.state = state_of(engine)
    return report, replayed


def assert_same_bits(single: RankReport, second: RankReport) -> None:
    """All that both tell is equal."""
    assert (single.losses, single.norms) == (second.losses, second.norms)
    for a, b in zip(single.gradients + [single.state], second.gradients + [second.state], strict=True):
        for remaining, right in zip(a, b, strict=True):
            assert remaining.name == right.name
            assert np.array_equal(remaining.values, right.values), remaining.name


@pytest.mark.parametrize("name", LAYOUTS)
def test_replays_are_what_they_stand_for(name, pool):
    layout, expected = LAYOUTS[name]
    eager = pool.run(train, layout.world, layout.tree, "off")
    graphs = pool.run(train, layout.world, layout.tree, "on")
    for (item, none), (peer, replayed) in zip(eager, graphs, strict=True):
        assert (none, replayed) == (0, expected)
        assert_same_bits(item, peer)


@one_eager_step()
def train_experts(
    rank: int, world: int, tree: dict[str, Any], kernels: dict[str, Any]
) -> tuple[RankReport, list[bool], bool]:
    """What a rank tells of STEPS steps, which of them were computed twice, and whether any was replayed."""
    engine = make_engine(rank, world, {**tree, "kernels": kernels})
    report = RankReport()
    observe(engine, report)
    redone = []
    for step in range(1, STEPS + 1):
        run_step(engine, step, report)
        redone.append(engine.experts.is_repeated)
    report.state = state_of(engine)
    return report, redone, engine.graphs is not None and not engine.graphs.failure


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_steps_with_too_many_tokens_for_a_rank_are_redone(name, pool):
    layout, kernels, expected = EXPERT_LAYOUTS[name]
    eager = pool.run(train_experts, layout.world, layout.tree, {"graphs": "off"})
    graphs = pool.run(train_experts, layout.world, layout.tree, {"graphs": "on", **kernels})
    for (item, none, _), (peer, redone, is_replayed) in zip(eager, graphs, strict=True):
        assert is_replayed
        assert not any(none)
        assert redone == [False] * (STEPS - expected) + [True] * expected
        assert_same_bits(item, peer)


@pytest.mark.parametrize("name", FIELD_LAYOUTS)
@pytest.mark.parametrize("documents", [0, 4])
def test_replays_read_optional_fields(name, documents, pool):
    layout, expected = FIELD_LAYOUTS[name]
    fields = SampleFields(
        loss_weights=True,
        positions=documents > 0 or layout.tree["model"].get("positions") == "rotary",
        max_documents=documents,
    )
    eager = pool.run(train, layout.world, layout.tree, "off", fields)
    graphs = pool.run(train, layout.world, layout.tree, "on", fields)
    for (item, none), (peer, replayed) in zip(eager, graphs, strict=True):
        assert (none, replayed) == (0, expected)
        assert_same_bits(item, peer)


TWO_CHUNKS = LAYOUTS["two chunks, LAMB"][0].tree


@pytest.mark.parametrize(
    ("owner", "subject", "wrong"),
    [
        pytest.param(
            CapturedMicrobatch, "copy_inputs", lambda self, inputs: None, id="all micro-batches read the first's tokens"
        ),
        pytest.param(GraphedRunner, "_find_flight_index", lambda self, chunk: 0, id="two in flight share memory"),
    ],
)
def test_faults_are_found(owner, subject, wrong):
    """The comparison can fail."""
    eager, _ = train(0, 1, TWO_CHUNKS, "off")
    with mock.patch.object(owner, subject, wrong), pytest.raises((AssertionError, IndexError)):
        assert_same_bits(eager, train(0, 1, TWO_CHUNKS, "on")[0])


def test_captures_begin_after_the_eager_steps():
    """Layouts train with a smaller number of eager steps than a run has."""
    replayed = []
    engine = make_engine(0, 1, {**TWO_CHUNKS, "kernels": {"graphs": "on"}})
    replay = ChunkGraphs.replay_backward

    def count(self: ChunkGraphs, chunk: int, i: int, microbatch: CapturedMicrobatch) -> None:
        replayed[-1] += 1
        replay(self, chunk, i, microbatch)

    with mock.patch.object(ChunkGraphs, "replay_backward", count):
        for step in range(1, EAGER_STEPS + 3):
            replayed.append(0)
            run_step(engine, step, RankReport())
    assert replayed == [0] * EAGER_STEPS + [6, 6]


def test_a_capture_that_fails_leaves_the_run_eager():
    eager, _ = train(0, 1, TWO_CHUNKS, "off")
    broken = mock.Mock(side_effect=RuntimeError("operation not permitted when stream is capturing\nmore"))
    with mock.patch.object(ChunkGraphs, "_capture", broken):
        report, replayed = train(0, 1, TWO_CHUNKS, "on")
    assert replayed == 0
    assert broken.call_count == 1
    assert_same_bits(eager, report)


def test_a_capture_that_fails_after_the_loss_of_a_peer_ends_the_attempt():
    """The remaining ranks could not agree on the failed capture."""
    engine = make_engine(0, 1, {**TWO_CHUNKS, "kernels": {"graphs": "on"}})
    graphs = engine.graphs
    assert graphs is not None
    check = mock.Mock(side_effect=TrainingError("rank 1 has ended"))
    graphs._tensor_axis = mock.Mock(exchange=mock.Mock(check=check))
    broken = mock.Mock(side_effect=RuntimeError("out of memory"))
    with mock.patch.object(ChunkGraphs, "_capture", broken), pytest.raises(TrainingError, match="rank 1 has ended"):
        graphs.find_or_capture(0, 1, 0, ())
    assert graphs.failure == ""


def fail_on_one(rank: int, world: int, tree: dict[str, Any]) -> tuple[RankReport, int, str]:
    """As `train` with graphs, where rank 1's captures fail; why rank 0 has none."""
    broken = mock.Mock(side_effect=RuntimeError("out of memory"))
    why: list[str] = []
    end = ChunkGraphs.end_step

    def look(self: ChunkGraphs) -> None:
        why.append(self.failure)
        end(self)

    failing = mock.patch.object(ChunkGraphs, "_capture", broken) if rank else nullcontext()
    with failing, mock.patch.object(ChunkGraphs, "end_step", look):
        report, replayed = train(rank, world, tree, "on")
    return report, replayed, why[-1]


def test_a_capture_that_fails_on_one_rank_leaves_its_tensor_parallel_group_eager(pool):
    """A rank that replayed alone would wait for its peer for ever."""
    layout, _ = LAYOUTS["tensor"]
    eager = pool.run(train, layout.world, layout.tree, "off")
    failed = pool.run(fail_on_one, layout.world, layout.tree)
    assert [why for _, _, why in failed] == [
        "capture failed on another rank of the tensor-parallel group",
        "capture failed: out of memory",
    ]
    for (item, _), (peer, replayed, _) in zip(eager, failed, strict=True):
        assert replayed == 0
        assert_same_bits(item, peer)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"model": {"dropout": 0.1}}, "dropout"),
        ({"tensor": 2, "overlap": {"tensor": "async"}}, "only overlap.tensor=fused can be captured"),
    ],
)
def test_where_they_cannot_be_had(settings, why):
    layout = case(microbatches=2, **settings)
    layout = lay_out(from_tree({**layout.tree, "kernels": {"graphs": "on"}}), layout.world)
    with pytest.raises(ConfigError, match=f"kernels.graphs=on is unavailable: .*{why}"):
        Engine(layout, None, torch.device("cpu"))
