"""Captures before the first forward of a step, in pipelines whose eager micro-batches overlap with replays.

Captures record operators, so that a replay runs no Python of the chunk (recorded_graphs.py). Three conditions of a CUDA
capture are checked in each capture on a CPU: its forward shares no AccumulateGrad node with an eager micro-batch in
flight, since such a node stands on the main stream; it awaits no gather; and the gradients of parameters stay in sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from megascale.core.batch import NO_FIELDS, SampleFields
from megascale.core.capture_plan import CapturePlan
from megascale.errors import FitError
from megascale.parallel import chunk_graphs
from megascale.parallel.chunk_graphs import CapturedMicrobatch, ChunkGraphs
from megascale.parallel.collectives import Pending
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.pipeline import EagerRunner
from tests.exact.cases import Case, case
from tests.exact.recorded_graphs import STEPS, one_eager_step, recorded_graphs
from tests.exact.test_graphs import assert_same_bits
from tests.exact.training import RankReport, late_gemms, make_engine, observe, run_step, state_of

pytestmark = pytest.mark.xdist_group("processes")

FLOAT8 = {"train": {"linear_precision": "float8"}}
FIELDS = SampleFields(loss_weights=True, positions=True, max_documents=4)

# Each with the backwards that a rank replays in a step.
LAYOUTS: dict[str, tuple[Case, int]] = {
    "tied": (case(1, 2, 2, microbatches=4), 2),
    "four stages, untied, no overlap": (
        case(1, 4, 2, microbatches=6, model={"tied_embeddings": False}, overlap={"data": False}),
        4,
    ),
    "two chunks": (case(1, 2, 2, virtual=2, microbatches=4), 4),
    "two chunks, larger groups": (
        case(1, 2, 2, virtual=2, microbatches=6, parallel={"micro_batch_group_size": 3, "bucket_elements": 500}),
        8,
    ),
    "ZeRO-0": (case(1, 2, 2, zero=0, microbatches=4), 2),
    "float8": (case(1, 2, 2, microbatches=4, **FLOAT8), 2),
    "float8 gathers, two chunks": (
        case(1, 2, 2, virtual=2, microbatches=4, parallel={"gather_precision": "float8"}, **FLOAT8),
        4,
    ),
    "float8 rows": (case(1, 2, 2, microbatches=4, train={"linear_precision": "float8_rowwise"}), 2),
}


class Checks:
    """Checks captures, and counts what a step has done.

    Attributes:
        replayed: backwards that the present step has replayed.
        late_captures: captures after the first forward of a step.
        gathers_in_flight: captures that began while a gather was in flight.
        data_parallel: communication of the engine that trains.
    """

    def __init__(self) -> None:
        self.replayed = 0
        self.late_captures = 0
        self.gathers_in_flight = 0
        self.data_parallel: DataParallel | None = None
        self._is_capturing = False
        self._has_run_forward = False

    def begin_step(self) -> None:
        self.replayed = 0
        self._has_run_forward = False

    @contextmanager
    def patch(self) -> Iterator[None]:
        """Let the enclosed training be checked."""
        capture = ChunkGraphs._capture
        run_forward = ChunkGraphs._run_forward
        replay = ChunkGraphs.replay_backward
        eager_forward = EagerRunner.forward
        wait = Pending.wait

        def check_capture(graphs: ChunkGraphs, chunk: int, *arguments: Any) -> CapturedMicrobatch:
            self.late_captures += self._has_run_forward
            assert self.data_parallel is not None
            self.gathers_in_flight += self.data_parallel.is_gathering(chunk)
            self._is_capturing = True
            try:
                return capture(graphs, chunk, *arguments)
            finally:
                self._is_capturing = False

        def check_forward(graphs: ChunkGraphs, chunk: int, inputs: Any, outputs: Any, calls: Any) -> Any:
            result = run_forward(graphs, chunk, inputs, outputs, calls)
            for node in list_leaf_nodes(outputs[0]):
                assert "eager" not in node.metadata, "a capture shares a node with an eager micro-batch"
            return result

        def mark_forward(runner: EagerRunner, chunk: int, i: int, x: Any) -> torch.Tensor:
            self._has_run_forward = True
            output = eager_forward(runner, chunk, i, x)
            for node in list_leaf_nodes(runner._in_flight[chunk, i][1]):
                node.metadata["eager"] = True
            return output

        def count_replay(graphs: ChunkGraphs, chunk: int, i: int, microbatch: CapturedMicrobatch) -> None:
            self.replayed += 1
            replay(graphs, chunk, i, microbatch)

        def check_wait(pending: Pending) -> torch.Tensor:
            assert not self._is_capturing, "a capture awaits communication"
            return wait(pending)

        with (
            mock.patch.object(ChunkGraphs, "_capture", check_capture),
            mock.patch.object(ChunkGraphs, "_run_forward", check_forward),
            mock.patch.object(ChunkGraphs, "replay_backward", count_replay),
            mock.patch.object(EagerRunner, "forward", mark_forward),
            mock.patch.object(Pending, "wait", check_wait),
        ):
            yield


def list_leaf_nodes(output: torch.Tensor) -> list[Any]:
    """Return the AccumulateGrad nodes of an output's graph."""
    nodes = []
    visited = {None}
    remaining: list[Any] = [output.grad_fn]
    while remaining:
        node = remaining.pop()
        if node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            nodes.append(node)
        remaining += [following for following, _ in node.next_functions]
    return nodes


@contextmanager
def captures_without_cuts() -> Iterator[None]:
    """Do not cut captures, as with tensor parallelism: the first and the last micro-batch of each chunk are eager.

    Recorded captures cannot have collectives, and tensor parallelism on a CPU has no exchange.
    """
    with mock.patch.object(chunk_graphs, "_has_exchange", return_value=True):
        yield


@one_eager_step()
def train(
    rank: int,
    world: int,
    tree: dict[str, Any],
    graphs: str,
    fault: Callable[[], AbstractContextManager[Any]] = recorded_graphs,
    fields: SampleFields = NO_FIELDS,
) -> tuple[RankReport, Checks, str]:
    """Return the report of a rank's training, its checks, and why it has no captures."""
    checks = Checks()
    with ExitStack() as stack:
        stack.enter_context(captures_without_cuts())
        stack.enter_context(fault())
        stack.enter_context(checks.patch())
        engine = make_engine(rank, world, {**tree, "kernels": {"graphs": graphs}}, fields)
        checks.data_parallel = engine.data_parallel
        report = RankReport()
        observe(engine, report)
        for step in range(1, STEPS + 1):
            checks.begin_step()
            run_step(engine, step, report)
        report.state = state_of(engine)
        failure = "" if engine.graphs is None else engine.graphs.failure
    checks.data_parallel = None  # it stays in this process
    return report, checks, failure


@pytest.mark.parametrize("name", LAYOUTS)
def test_early_captures_give_the_bits_of_eager_steps(name, pool):
    layout, expected = LAYOUTS[name]
    eager = pool.run(train, layout.world, layout.tree, "off", nullcontext)
    graphs = pool.run(train, layout.world, layout.tree, "on")
    for (report, _, _), (peer, checks, failure) in zip(eager, graphs, strict=True):
        assert failure == ""
        assert checks.replayed == expected
        assert_same_bits(report, peer)
    assert [checks.late_captures for _, checks, _ in graphs] == [0] * layout.world
    overlaps_gathers = layout.tree["parallel"]["zero"] > 0 and layout.tree["overlap"].get("data", True)
    assert bool(graphs[0][1].gathers_in_flight) == overlaps_gathers


def test_early_captures_read_optional_fields(pool):
    layout = case(1, 2, 2, virtual=2, microbatches=4, model={"positions": "rotary"})
    eager = pool.run(train, layout.world, layout.tree, "off", nullcontext, FIELDS)
    graphs = pool.run(train, layout.world, layout.tree, "on", recorded_graphs, FIELDS)
    for (report, _, _), (peer, checks, failure) in zip(eager, graphs, strict=True):
        assert (failure, checks.replayed) == ("", 4)
        assert_same_bits(report, peer)


@contextmanager
def captures_are_late() -> Iterator[None]:
    """Capture a chunk when a replay first needs it, as in layouts without eager micro-batches in flight."""
    plan = chunk_graphs.plan_captures

    def plan_late(*arguments: Any) -> CapturePlan:
        return CapturePlan(plan(*arguments).captures, precedes_step=False)

    with recorded_graphs(), mock.patch.object(chunk_graphs, "plan_captures", plan_late):
        yield


@contextmanager
def captures_await_gathers() -> Iterator[None]:
    """Leave the waits for gathers in the captured forward."""
    with recorded_graphs(), mock.patch.object(chunk_graphs, "_without_gathers", nullcontext):
        yield


@contextmanager
def backwards_fail() -> Iterator[None]:
    """Let the captured backward fail on the first stage after it has left gradients and queued a GEMM."""

    def fail(graphs: ChunkGraphs, x: torch.Tensor, outputs: Any, grad: Any, calls: Any) -> None:
        for buffer in graphs._buffers:
            for param, sink in zip(buffer.parameters, buffer.sinks, strict=True):
                param.grad = torch.ones_like(param)
                graphs._runtime.stream.run(lambda main_grad=sink.main_grad: main_grad.fill_(torch.nan))
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with late_gemms(), recorded_graphs(), mock.patch.object(ChunkGraphs, "_run_backward", fail):
        yield


@contextmanager
def operators_are_unavailable() -> Iterator[None]:
    """Let the captured backward fail on the first stage with an error for users."""

    def fail(graphs: ChunkGraphs, x: torch.Tensor, outputs: Any, grad: Any, calls: Any) -> None:
        raise FitError("the workspace of a kernel does not fit")

    with recorded_graphs(), mock.patch.object(ChunkGraphs, "_run_backward", fail):
        yield


def test_a_capture_that_awaits_gathers_is_noticed(pool):
    layout, _ = LAYOUTS["tied"]
    first, *_ = pool.run(train, layout.world, layout.tree, "on", captures_await_gathers)
    assert first[2] == "capture failed: a capture awaits communication"


@pytest.mark.parametrize(
    ("fault", "reference", "message"),
    [
        (captures_are_late, nullcontext, "a capture shares a node with an eager micro-batch"),
        (backwards_fail, late_gemms, "operation not permitted when stream is capturing"),
        (operators_are_unavailable, nullcontext, "the workspace of a kernel does not fit"),
    ],
)
def test_a_failed_capture_leaves_the_run_eager_with_equal_bits(fault, reference, message, pool):
    """The first fault is how captures of such pipelines failed before. No failed capture changes a number."""
    layout, _ = LAYOUTS["tied"]
    eager = pool.run(train, layout.world, layout.tree, "off", reference)
    failed = pool.run(train, layout.world, layout.tree, "on", fault)
    assert failed[0][2] == f"capture failed: {message}"
    for (report, _, _), (peer, checks, failure) in zip(eager, failed, strict=True):
        assert not (failure and checks.replayed)
        assert_same_bits(report, peer)


def test_a_capture_is_repeated_after_captures_were_dropped(pool):
    """Another recomputation runs other operators, which the next step captures before its first forward."""
    layout, _ = LAYOUTS["tied"]
    for late_captures, replayed, failure in pool.run(change_recompute, layout.world, layout.tree):
        assert (late_captures, replayed, failure) == (0, 2, "")


@one_eager_step()
def change_recompute(rank: int, world: int, tree: dict[str, Any]) -> tuple[int, int, str]:
    """Train, change the recomputation, and train on; return late captures of the first stage, replays and failure."""
    checks = Checks()
    with captures_without_cuts(), recorded_graphs(), checks.patch():
        engine = make_engine(rank, world, {**tree, "kernels": {"graphs": "on"}})
        assert engine.graphs is not None
        checks.data_parallel = engine.data_parallel
        for step in range(1, STEPS + 1):
            checks.begin_step()
            if step == STEPS:
                engine.set_recompute("full")
                assert engine.graphs.count_captures() == 0
            run_step(engine, step, RankReport())
        return checks.late_captures, checks.replayed, engine.graphs.failure
