"""Replays of data-parallel ranks give the bits of eager steps, and units keep their addresses.

Captures record operators, so that a replay runs no Python of the chunk (recorded_graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megascale.config import from_tree
from megascale.core.layout import lay_out
from megascale.errors import ConfigError
from megascale.parallel import data_parallel, float8_gather, parameter_slots
from megascale.parallel.chunk_graphs import EAGER_STEPS, CapturedMicrobatch, ChunkGraphs, GraphedRunner
from megascale.parallel.collectives import Axis, Pending, all_gather_into
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.gradient_slots import GradientBucket
from megascale.parallel.parameter_slots import ParameterSlots, ParameterUnit
from megascale.parallel.pipeline import EagerRunner
from megascale.parallel.unit_cuts import UnitCuts
from megascale.train.engine import Engine
from megascale.train.evaluation import evaluate_file
from tests.exact.cases import TWO_LAYERS, Case, case
from tests.exact.recorded_graphs import STEPS, RecordedCapture, one_eager_step, recorded_graphs
from tests.exact.test_evaluation import write_held_out
from tests.exact.test_graphs import assert_same_bits
from tests.exact.test_sharded_parameters import poisoned_slots
from tests.exact.training import RankReport, make_engine, observe, run_step, state_of

pytestmark = pytest.mark.xdist_group("processes")

UNTIED = {"tied_embeddings": False}
FLOAT8 = {"train": {"linear_precision": "float8"}}

# Each with the backwards that a rank replays in a step.
LAYOUTS: dict[str, tuple[Case, int]] = {
    "ZeRO-1, tied": (case(data=2, microbatches=3, model=TWO_LAYERS, parallel={"bucket_elements": 700}), 3),
    "ZeRO-1, nothing overlapped": (case(data=2, microbatches=2, model=UNTIED, overlap={"data": False}), 2),
    "ZeRO-1, one micro-batch": (
        case(data=2, microbatches=1, model=TWO_LAYERS, parallel={"bucket_elements": 700}),
        1,
    ),
    "ZeRO-0, two micro-batches, full recompute": (
        case(data=2, microbatches=2, zero=0, parallel={"bucket_elements": 700, "recompute": "full"}),
        2,
    ),
    "ZeRO-1, selective recompute, parallel block, Muon": (
        case(
            data=2,
            microbatches=2,
            model={**UNTIED, "block": "parallel", "activation": "swiglu", "positions": "rotary"},
            parallel={"recompute": "selective", "bucket_elements": 700},
            optimizer={"name": "muon"},
        ),
        2,
    ),
    "ZeRO-1, float8": (
        case(data=2, microbatches=3, model={"layers": 3}, parallel={"bucket_elements": 700}, **FLOAT8),
        3,
    ),
    "ZeRO-1, float8 gathers": (
        case(
            data=2,
            microbatches=4,
            model={"layers": 3},
            parallel={"gather_precision": "float8", "bucket_elements": 700},
            **FLOAT8,
        ),
        4,
    ),
    "ZeRO-1, float8 rows": (
        case(
            data=2,
            microbatches=2,
            model={"layers": 3},
            parallel={"bucket_elements": 700},
            train={"linear_precision": "float8_rowwise"},
        ),
        2,
    ),
    "ZeRO-1, two stages of two chunks, tied, float8 gathers": (
        case(
            1,
            2,
            2,
            virtual=2,
            microbatches=4,
            parallel={"gather_precision": "float8", "bucket_elements": 700},
            **FLOAT8,
        ),
        8,
    ),
    "ZeRO-2, tied": (case(data=2, microbatches=3, zero=2, model=TWO_LAYERS, parallel={"bucket_elements": 700}), 3),
    "ZeRO-2, untied, nothing overlapped": (
        case(data=2, microbatches=2, zero=2, model=UNTIED, overlap={"data": False}),
        2,
    ),
    "ZeRO-2, one micro-batch": (case(data=2, microbatches=1, zero=2, model=TWO_LAYERS), 1),
    # The first forward makes float8 copies of weights as they arrive.
    "ZeRO-2, float8": (
        case(data=2, microbatches=3, zero=2, model=TWO_LAYERS, train={"linear_precision": "float8"}),
        3,
    ),
    "ZeRO-2, tables divided by rows": (
        case(
            data=2,
            microbatches=3,
            zero=2,
            model={**UNTIED, **TWO_LAYERS, "vocab_size": 450},
            parallel={"bucket_elements": 700},
        ),
        3,
    ),
    "ZeRO-3, tied": (case(data=2, microbatches=3, zero=3), 3),
    "ZeRO-3, five blocks, ten replays": (case(data=2, microbatches=5, zero=3, model={**UNTIED, "layers": 5}), 5),
    "ZeRO-3, one micro-batch, biased head, LAMB": (
        case(data=2, microbatches=1, zero=3, model={**UNTIED, "head_bias": True}, optimizer={"name": "lamb"}),
        1,
    ),
    "ZeRO-3, full recompute": (case(data=2, microbatches=2, zero=3, model=UNTIED, parallel={"recompute": "full"}), 2),
    "ZeRO-3, selective recompute, parallel block, Muon": (
        case(
            data=2,
            microbatches=2,
            zero=3,
            model={**UNTIED, "block": "parallel", "activation": "swiglu", "positions": "rotary"},
            parallel={"recompute": "selective"},
            optimizer={"name": "muon"},
        ),
        2,
    ),
    "ZeRO-3, float8 gathers": (
        case(
            data=2,
            microbatches=3,
            zero=3,
            model={**UNTIED, "layers": 3},
            train={"linear_precision": "float8"},
            parallel={"gather_precision": "float8"},
        ),
        3,
    ),
    "ZeRO-3, two stages of two chunks, tied": (case(1, 2, 2, virtual=2, microbatches=4, zero=3), 8),
    "ZeRO-3, two stages of five chunks": (
        case(1, 2, 2, virtual=5, microbatches=4, zero=3, model={**UNTIED, "layers": 10}),
        20,
    ),
}


EXPERTS = {"mlp": "experts", "mlp_bias": False, "experts": {"number": 4, "top_k": 2, "bias_rate": 0.01}}
# On a CPU the number of an expert's tokens is read on the host, which cannot be recorded.
UNRECORDED = {"ZeRO-3, experts": (case(data=2, microbatches=2, zero=3, model={**UNTIED, **EXPERTS}), 2)}


@one_eager_step()
def train(
    rank: int,
    world: int,
    tree: dict[str, Any],
    graphs: str,
    fault: Callable[[], AbstractContextManager[None]] = nullcontext,
    steps: int = STEPS,
) -> tuple[RankReport, int]:
    """Return a rank's report of `steps` steps, and the backwards that the last one replayed."""
    replayed = 0
    replay = ChunkGraphs.replay_backward

    def count(self: ChunkGraphs, chunk: int, i: int, microbatch: CapturedMicrobatch) -> None:
        nonlocal replayed
        replayed += 1
        replay(self, chunk, i, microbatch)

    with ExitStack() as stack:
        stack.enter_context(fault())
        stack.enter_context(poisoned_slots())
        stack.enter_context(mock.patch.object(ChunkGraphs, "replay_backward", count))
        engine = make_engine(rank, world, {**tree, "kernels": {"graphs": graphs}})
        report = RankReport()
        observe(engine, report)
        for step in range(1, steps + 1):
            replayed = 0
            run_step(engine, step, report)
        if engine.graphs is not None:
            assert not engine.graphs.failure
        report.state = state_of(engine)
    return report, replayed


@pytest.mark.parametrize("name", LAYOUTS)
def test_replays_give_the_bits_of_eager_steps(name, pool):
    """No slot is read after its release: it holds NaN then."""
    layout, expected = LAYOUTS[name]
    eager = pool.run(train, layout.world, layout.tree, "off")
    graphs = pool.run(train, layout.world, layout.tree, "on", recorded_graphs)
    for (item, none), (peer, replayed) in zip(eager, graphs, strict=True):
        assert (none, replayed) == (0, expected)
        assert_same_bits(item, peer)


@pytest.mark.parametrize("name", ["ZeRO-2, tied", "ZeRO-3, two stages of five chunks", "ZeRO-3, experts"])
def test_work_that_is_run_again_gives_the_bits_of_eager_steps(name, pool):
    """Outside of tests kernels.graphs=on runs the work again on a CPU."""
    layout, expected = (LAYOUTS | UNRECORDED)[name]
    eager = pool.run(train, layout.world, layout.tree, "off")
    graphs = pool.run(train, layout.world, layout.tree, "on")
    for (item, _), (peer, replayed) in zip(eager, graphs, strict=True):
        assert replayed == expected
        assert_same_bits(item, peer)


@contextmanager
def accumulation_overwrites() -> Iterator[None]:
    """Let each reduction of a step overwrite the shard's sum, which loses all micro-batches but the last."""
    reduce = GradientBucket.reduce

    def overwrite(self: GradientBucket) -> None:
        self.is_reduced = False
        reduce(self)

    with mock.patch.object(GradientBucket, "reduce", overwrite):
        yield


def gather_late(out: torch.Tensor, shard: torch.Tensor, axis: Axis) -> Pending:
    """Gather as `all_gather_into` does, but write other ranks' parts of `out` when the gather is awaited."""
    arrived = torch.empty_like(out)
    pending = all_gather_into(arrived, shard, axis)
    for rank, part in enumerate(out.view(torch.uint8).chunk(axis.size)):
        if rank != axis.rank:
            part.zero_()

    def arrive() -> None:
        pending.wait()
        out.copy_(arrived)

    return Pending(out, finish=arrive)


@contextmanager
def gathers_arrive_late() -> Iterator[None]:
    """Let parameters that ZeRO-1 gathers arrive when they are awaited, and be zero before."""
    with (
        recorded_graphs(),
        mock.patch.object(data_parallel, "all_gather_into", gather_late),
        mock.patch.object(float8_gather, "all_gather_into", gather_late),
    ):
        yield


@contextmanager
def gathers_are_late_and_captures_not_cut() -> Iterator[None]:
    with gathers_arrive_late(), mock.patch.object(UnitCuts, "_cut"):
        yield


@contextmanager
def gathers_are_not_awaited() -> Iterator[None]:
    """Let replays go on before a gather has arrived; gathers arrive when they are awaited."""
    wait = ParameterUnit.wait
    is_cutting = False

    def skip_wait(self: ParameterUnit) -> None:
        if is_cutting:
            self.pending.clear()
        wait(self)

    def cut(self: UnitCuts, pool: Any, action: Callable[[], None]) -> None:
        def act() -> None:
            nonlocal is_cutting
            is_cutting = True
            action()
            is_cutting = False

        pool.cut(act)

    with (
        recorded_graphs(),
        mock.patch.object(parameter_slots, "all_gather_into", gather_late),
        mock.patch.object(ParameterUnit, "wait", skip_wait),
        mock.patch.object(UnitCuts, "_cut", cut),
    ):
        yield


@contextmanager
def captures_are_not_cut() -> Iterator[None]:
    """Let gathers and reductions happen in the capture only."""
    with recorded_graphs(), mock.patch.object(UnitCuts, "_cut"):
        yield


@pytest.mark.parametrize("name", ["ZeRO-1, tied", "ZeRO-1, float8", "ZeRO-1, float8 gathers"])
def test_a_replay_awaits_parameters_before_it_reads_them(name, pool):
    layout, expected = LAYOUTS[name]
    eager = pool.run(train, layout.world, layout.tree, "off")
    late = pool.run(train, layout.world, layout.tree, "on", gathers_arrive_late)
    for (item, _), (peer, replayed) in zip(eager, late, strict=True):
        assert replayed == expected
        assert_same_bits(item, peer)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("ZeRO-3, tied", gathers_are_not_awaited),
        ("ZeRO-3, tied", captures_are_not_cut),
        ("ZeRO-3, tied", accumulation_overwrites),
        ("ZeRO-1, tied", gathers_are_late_and_captures_not_cut),
    ],
)
def test_faults_are_found(name, fault, pool):
    """The comparison can fail."""
    layout, _ = LAYOUTS[name]
    [(eager, _), _] = pool.run(train, layout.world, layout.tree, "off")
    [(faulty, _), _] = pool.run(train, layout.world, layout.tree, "on", fault)
    with pytest.raises(AssertionError):
        assert_same_bits(eager, faulty)


def list_addresses(rank: int, world: int, tree: dict[str, Any], graphs: str) -> list[list[tuple[Any, ...]]]:
    """Return, for each step, the gathers, openings and reductions of units with the addresses of their memory."""
    events: list[tuple[Any, ...]] = []
    start_gather, open_bucket, reduce = ParameterSlots._start_gather, GradientBucket.open, GradientBucket.reduce

    def note_gather(self: ParameterSlots, unit: Any, full_precision: bool = False) -> None:
        if unit is not None and not unit.owns_slot:
            events.append(("gather", unit.memory.data_ptr(), *(param.data_ptr() for param in unit.params)))
        start_gather(self, unit, full_precision)

    def note_open(self: GradientBucket) -> None:
        addresses = [self._buffer.sinks[i].view.data_ptr() for i in self._span.members]
        events.append(("open", self.chunk, self.unit, *addresses))
        open_bucket(self)

    def note_reduce(self: GradientBucket) -> None:
        if self.is_open:
            events.append(("reduce", self.chunk, self.unit, self.grads.data_ptr()))
        reduce(self)

    steps = []
    with (
        recorded_graphs(),
        mock.patch.object(ParameterSlots, "_start_gather", note_gather),
        mock.patch.object(GradientBucket, "open", note_open),
        mock.patch.object(GradientBucket, "reduce", note_reduce),
    ):
        engine = make_engine(rank, world, {**tree, "kernels": {"graphs": graphs}})
        report = RankReport()
        for step in range(1, EAGER_STEPS + 3):
            events.clear()
            run_step(engine, step, report)
            engine.synchronize()
            steps.append(list(events))
    return steps


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_addresses_of_units_repeat_from_step_to_step(graphs, zero, pool):
    """Eager steps and replays use the slots in the same order; a graph finds its unit where it was captured."""
    layout = case(data=2, microbatches=2, zero=zero, model={**UNTIED, "layers": 5})
    for steps in pool.run(list_addresses, layout.world, layout.tree, graphs):
        eager, *_, replayed = steps[1:]
        assert {event[0] for event in eager} >= {"open", "reduce"}
        if graphs == "off":
            assert eager == replayed
        for kind in ("gather", "open", "reduce"):
            order = [event for event in eager if event[0] == kind]
            assert order == [event for event in replayed if event[0] == kind]


@dataclass
class StepEvents:
    """Communication of a rank's step, and the work between.

    Attributes:
        events: ("await", bucket), ("reduce", bucket), ("forward", micro-batch) and ("backward", micro-batch) in order.
            A number stands for operators of a replay between two cuts.
    """

    events: list[Any] = field(default_factory=list)

    def list_kind(self, kind: str) -> list[Any]:
        """Return the events of a kind."""
        return [event for event in self.events if isinstance(event, tuple) and event[0] == kind]

    def split(self, direction: str) -> list[list[Any]]:
        """Return the events within each forward or backward."""
        parts: list[list[Any]] = []
        is_inside = False
        for event in self.events:
            if isinstance(event, tuple) and event[0] in ("forward", "backward"):
                is_inside = event[0] == direction
                if is_inside:
                    parts.append([])
            elif is_inside:
                parts[-1].append(event)
        return parts


@one_eager_step()
def list_communication(rank: int, world: int, tree: dict[str, Any], graphs: str) -> list[StepEvents]:
    """Return the events of each step of a rank with a single chunk."""
    step_events = StepEvents()
    reduce, await_unit = DataParallel._reduce, DataParallel._await_unit

    def note_reduce(self: DataParallel, state: Any, bucket: int) -> None:
        step_events.events.append(("reduce", bucket))
        reduce(self, state, bucket)

    def note_await(self: DataParallel, state: Any, unit: int) -> None:
        before = set(state.pending_gathers)
        await_unit(self, state, unit)
        step_events.events += [("await", bucket) for bucket in sorted(before - set(state.pending_gathers))]

    def note_replay(self: RecordedCapture) -> None:
        operators = 0
        cuts = {id(action) for action in self.cuts}
        for part in self.parts:
            if id(part) in cuts:
                step_events.events.append(operators)
                operators = 0
            else:
                operators += 1
            with torch.no_grad():
                part()
        step_events.events.append(operators)

    def note_forward(self: EagerRunner, chunk: int, i: int, x: Any) -> torch.Tensor:
        step_events.events.append(("forward", i))
        return run_forward(self, chunk, i, x)

    def note_backward(self: EagerRunner, chunk: int, i: int, grad: Any) -> torch.Tensor | None:
        step_events.events.append(("backward", i))
        return run_backward(self, chunk, i, grad)

    runner = EagerRunner if graphs == "off" else GraphedRunner
    run_forward, run_backward = runner.forward, runner.backward
    steps = []
    with (
        recorded_graphs(),
        mock.patch.object(DataParallel, "_reduce", note_reduce),
        mock.patch.object(DataParallel, "_await_unit", note_await),
        mock.patch.object(RecordedCapture, "replay", note_replay),
        mock.patch.object(runner, "forward", note_forward),
        mock.patch.object(runner, "backward", note_backward),
    ):
        engine = make_engine(rank, world, {**tree, "kernels": {"graphs": graphs}})
        for step in range(1, STEPS + 2):
            step_events = StepEvents()
            run_step(engine, step, RankReport())
            engine.synchronize()
            steps.append(step_events)
    return steps


def count_operators(events: list[Any]) -> int:
    return sum(event for event in events if isinstance(event, int))


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_replays_of_zero_1_communicate_in_the_order_of_eager_steps(microbatches, pool):
    """Each bucket is awaited before operators of its unit, and reduced while later gradients are computed."""
    layout = case(data=2, microbatches=microbatches, model={"layers": 3}, parallel={"bucket_elements": 700})
    eager = pool.run(list_communication, layout.world, layout.tree, "off")
    graphs = pool.run(list_communication, layout.world, layout.tree, "on")
    for eager_steps, replayed_steps in zip(eager, graphs, strict=True):
        for eager_step, step in zip(eager_steps[1:], replayed_steps[1:], strict=True):
            for kind in ("await", "reduce"):
                assert eager_step.list_kind(kind) == step.list_kind(kind)
            first_forward, *later_forwards = step.split("forward")
            awaits = [i for i, event in enumerate(first_forward) if not isinstance(event, int)]
            assert len(awaits) > 3
            assert count_operators(first_forward[: awaits[0]]) == 0  # no operator precedes the embedding's parameters
            assert count_operators(first_forward[awaits[0] : awaits[-1]]) > 10
            for events in later_forwards:
                assert all(isinstance(event, int) for event in events)
            *earlier_backwards, last_backward = step.split("backward")
            for events in earlier_backwards:
                assert all(isinstance(event, int) for event in events)
            reduces = [i for i, event in enumerate(last_backward) if not isinstance(event, int)]
            assert len(reduces) > 3
            assert count_operators(last_backward[: reduces[0]]) > 0
            assert count_operators(last_backward[reduces[0] : reduces[-1]]) > 10


@one_eager_step()
def train_with_interruptions(
    rank: int, world: int, tree: dict[str, Any], graphs: str, held_out: str
) -> tuple[RankReport, list[float], list[int]]:
    """Train with an evaluation after each step and a recovery after the third one.

    Return the report, the held-out losses, and the captures after each step.
    """
    with recorded_graphs():
        engine = make_engine(rank, world, {**tree, "kernels": {"graphs": graphs}})
        report = RankReport()
        observe(engine, report)
        held_out_losses = []
        capture_counts = []
        for step in range(1, 2 * STEPS + 1):
            run_step(engine, step, report)
            capture_counts.append(0 if engine.graphs is None else engine.graphs.count_captures())
            held_out_losses.append(evaluate_file(engine, engine.config, held_out).loss)
            if step == STEPS:
                engine.data_parallel.finish_gathers()
                engine.data_parallel.drop_communication()
                if engine.graphs is not None:
                    engine.graphs.restart()
        report.state = state_of(engine)
    return report, held_out_losses, capture_counts


@pytest.mark.parametrize("name", ["ZeRO-1, tied", "ZeRO-1, float8 gathers"])
def test_evaluations_and_recoveries_between_steps_keep_the_bits(name, pool, tmp_path: Path):
    layout, _ = LAYOUTS[name]
    held_out = write_held_out(tmp_path)
    eager = pool.run(train_with_interruptions, layout.world, layout.tree, "off", held_out)
    graphs = pool.run(train_with_interruptions, layout.world, layout.tree, "on", held_out)
    for (item, losses, _), (peer, replayed_losses, capture_counts) in zip(eager, graphs, strict=True):
        assert losses == replayed_losses
        assert capture_counts == [0, 2, 2] * 2  # the first backward of a step overwrites gradients, all others add
        assert_same_bits(item, peer)


def fail_on_one(rank: int, world: int, tree: dict[str, Any]) -> tuple[RankReport, int, str]:
    """Train where the captures of rank 1 fail; return the report, the replays, and why this rank has none."""
    broken = mock.Mock(side_effect=RuntimeError("out of memory"))
    failures: list[str] = []
    end_step = ChunkGraphs.end_step

    def note_failure(self: ChunkGraphs) -> None:
        failures.append(self.failure)
        self.failure = ""
        end_step(self)

    failing = mock.patch.object(ChunkGraphs, "_capture", broken) if rank else nullcontext()
    with mock.patch.object(ChunkGraphs, "end_step", note_failure), failing:
        report, replayed = train(rank, world, tree, "on", recorded_graphs, steps=STEPS - 1)
    return report, replayed, failures[-1]


def test_a_capture_that_fails_on_one_rank_leaves_its_stage_eager(pool):
    """Replays and eager micro-batches reduce buckets in different orders."""
    layout, _ = LAYOUTS["ZeRO-2, tied"]
    eager = pool.run(train, layout.world, layout.tree, "off", nullcontext, STEPS - 1)
    failed = pool.run(fail_on_one, layout.world, layout.tree)
    assert [reason for _, _, reason in failed] == [
        "capture failed on another rank of the pipeline stage",
        "capture failed: out of memory",
    ]
    for (item, _), (peer, replayed, _) in zip(eager, failed, strict=True):
        assert replayed == 0
        assert_same_bits(item, peer)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor": 2, "zero": 2}, "the exchange of parallel.tensor=2"),
        ({"zero": 3, "train": {"linear_precision": "float8_rowwise"}}, "makes copies of all"),
    ],
)
def test_graphs_on_is_refused_where_units_cannot_be_cut(settings, reason):
    layout = case(microbatches=2, data=2, **settings)
    layout = lay_out(from_tree({**layout.tree, "kernels": {"graphs": "on"}}), layout.world)
    with pytest.raises(ConfigError, match=f"kernels.graphs=on is unavailable: .*{reason}"):
        Engine(layout, None, torch.device("cpu"))
