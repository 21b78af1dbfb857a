"""kernels.graphs=auto captures if the measured time of launches is long on any rank, with equal bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megascale.checkpoint.object_collectives import Peers
from megascale.parallel.chunk_graphs import EAGER_STEPS, GraphedRunner
from megascale.parallel.launch_times import MAX_SAMPLES
from megascale.train import graph_conditions, replay_conditions
from megascale.train.engine import Engine
from megascale.train.graph_conditions import GraphConditions
from megascale.train.replay_conditions import exclude_costly_graphs, share_exclusion
from tests.conftest import lines
from tests.exact.cases import TWO_LAYERS, case
from tests.exact.test_graphs import EXPERTS, assert_same_bits
from tests.exact.training import RankReport, make_engine, observe, run_step, state_of
from tests.fixed_clock import FixedClock
from tests.forked import Forked

pytestmark = pytest.mark.xdist_group("processes")

STEPS = EAGER_STEPS + 2
SLOW = (8.0, 10.0)  # milliseconds on the host and on the device
FAST = (4.0, 10.0)

# Layout, replayed micro-batches per step and rank, and measurements per rank.
LAYOUTS = {
    "one rank": (case(microbatches=4, model=TWO_LAYERS), 4, 2 * MAX_SAMPLES),
    "data": (case(1, 1, 2, microbatches=4, model=TWO_LAYERS), 4, 4),
    "data, one micro-batch": (case(1, 1, 2, microbatches=1, model=TWO_LAYERS), 1, 2),
    "tensor": (case(2, 1, 1, microbatches=2), 2, 4),
    "pipeline, two chunks, data, float8": (
        case(1, 2, 2, virtual=2, microbatches=4, train={"linear_precision": "float8"}),
        8,
        8,
    ),
    "tensor, pipeline": (case(2, 2, 1, microbatches=4), 4, 4),
    "zero 2": (case(1, 1, 2, zero=2, microbatches=2, model=TWO_LAYERS), 2, 4),
}


@dataclass
class MeasuredRun:
    """One rank's training with a clock.

    Attributes:
        replayed: number of replayed micro-batches of each step.
        lines: text of the choice after each step.
        measured: measurements after each step.
        repeated: whether each step was computed again without graphs.
        agrees_on_repetition: whether all ranks agreed on that after each step.
    """

    report: RankReport = field(default_factory=RankReport)
    replayed: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    repeated: list[bool] = field(default_factory=list)
    agrees_on_repetition: list[bool] = field(default_factory=list)


def read_line(engine: Engine) -> str:
    choices = engine.active | engine.runtime.kernels.list_choices()
    return choices.get("CUDA graphs", "")


def run_steps(engine: Engine, clock: FixedClock, run: MeasuredRun, first: int = 1) -> None:
    """Run STEPS steps, and record their replays."""
    replays = 0
    backward = GraphedRunner.backward

    def count(self: GraphedRunner, chunk: int, i: int, grad: torch.Tensor | None) -> torch.Tensor | None:
        nonlocal replays
        replays += (chunk, i) in self._replayed
        return backward(self, chunk, i, grad)

    with mock.patch.object(GraphedRunner, "backward", count):
        for step in range(first, first + STEPS):
            replays = 0
            run_step(engine, step, run.report)
            run.replayed.append(replays)
            run.lines.append(read_line(engine))
            run.measured.append(clock.measurements)
            run.repeated.append(engine.experts is not None and engine.experts.is_repeated)
            run.agrees_on_repetition.append(engine._has_row_limit)


def train(
    rank: int,
    world: int,
    tree: dict[str, Any],
    graphs: str,
    times_by_rank: list[tuple[float, float]],
    refused_ranks: tuple[int, ...] = (),
    full_rank: int | None = None,
) -> MeasuredRun:
    """Train STEPS steps with a clock that shows the rank's times.

    Args:
        refused_ranks: ranks whose memory has no room for buffers of graphs by the estimate.
        full_rank: rank whose memory is full after the eager steps.
    """
    clock = FixedClock(*times_by_rank[rank])
    kernels = {**tree.get("kernels", {}), "graphs": graphs}

    memory_limit = 1 if rank in refused_ranks else None
    with mock.patch.object(GraphConditions, "find_memory_limit", return_value=memory_limit):
        engine = make_engine(rank, world, {**tree, "kernels": kernels}, launch_clock=clock)
    run = MeasuredRun()
    observe(engine, run.report)
    spare_bytes = 0 if rank == full_rank else 1 << 30
    with mock.patch.object(GraphConditions, "find_spare_bytes", return_value=spare_bytes):
        run_steps(engine, clock, run)
    run.report.state = state_of(engine)
    return run


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_slow_host_gets_graphs_and_equal_bits(name, pool):
    layout, replayed, measured = LAYOUTS[name]
    times = [FAST] * (layout.world - 1) + [SLOW]  # the last rank alone is slow
    eager = pool.run(train, layout.world, layout.tree, "off", times)
    graphs = pool.run(train, layout.world, layout.tree, "auto", times)
    host_ms, device_ms = (value * measured / samples_per_time(name, measured) for value in SLOW)
    expected = (
        f"forward and backward of each chunk, from the third step on (rank {layout.world - 1} submits a micro-batch in "
        f"{host_ms:.1f} ms, and its GPU runs it in {device_ms:.1f} ms: a share of 0.80, and graphs are used above 0.7)"
    )
    for reference, run in zip(eager, graphs, strict=True):
        assert reference.measured == [0] * STEPS
        assert run.measured == [0] + [measured] * (STEPS - 1)  # the second step alone is measured
        assert run.replayed == [0, 0, replayed, replayed]
        assert run.lines[:2] == ["decided before the third step by the measured time of launches"] * 2
        assert run.lines[2:] == [expected] * 2
        assert_same_bits(reference.report, run.report)


def samples_per_time(name: str, measured: int) -> float:
    """Return the measurements per chunk and direction, of which the shortest counts."""
    chunks = 2 if "two chunks" in name else 1
    return measured / (2 * chunks)


@pytest.mark.parametrize("name", ["one rank", "data"])
def test_a_fast_host_stays_eager(name, pool):
    layout, _, _ = LAYOUTS[name]
    times = [FAST] * layout.world
    eager = pool.run(train, layout.world, layout.tree, "off", times)
    measured = pool.run(train, layout.world, layout.tree, "auto", times)
    for reference, run in zip(eager, measured, strict=True):
        assert run.replayed == [0] * STEPS
        assert run.lines[-1] == (
            "off (rank 0 submits a micro-batch in 8.0 ms, and its GPU runs it in 20.0 ms: a share of 0.40, and graphs "
            "are used above 0.7)"
        )
        assert_same_bits(reference.report, run.report)


def test_a_stage_without_memory_stays_eager_and_says_both_reasons(pool):
    layout = case(1, 2, 1, microbatches=4)
    eager = pool.run(train, layout.world, layout.tree, "off", [SLOW, SLOW])
    first, last = pool.run(train, layout.world, layout.tree, "auto", [SLOW, SLOW], (1,))
    assert (first.replayed, last.replayed) == ([0, 0, 4, 4], [0] * STEPS)
    assert first.lines[-1].startswith("forward and backward of each chunk")
    assert last.lines[0].startswith("off (graph buffers of 0.0 GiB do not fit in the remaining memory")
    assert "tries anyway; rank 0 submits a micro-batch in 16.0 ms, and its GPU runs it in 20.0 ms" in last.lines[-1]
    for reference, run in zip(eager, (first, last), strict=True):
        assert_same_bits(reference.report, run.report)


@pytest.mark.parametrize("refused_stage", [0, 1])
def test_a_stage_without_graphs_repeats_the_steps_in_which_the_other_exceeds_its_rows(refused_stage, pool):
    """All ranks agree on a repetition, and those without graphs keep their micro-batches for it."""
    layout = case(2, 2, 1, microbatches=2, model=EXPERTS)
    tree = {**layout.tree, "kernels": {"expert_rows": 1}}
    times = [SLOW] * layout.world
    eager = pool.run(train, layout.world, tree, "off", times)
    refused_ranks = (2 * refused_stage, 2 * refused_stage + 1)
    measured = pool.run(train, layout.world, tree, "auto", times, refused_ranks)
    for rank, (reference, run) in enumerate(zip(eager, measured, strict=True)):
        has_graphs = rank not in refused_ranks
        assert run.lines[-1].startswith("forward and backward" if has_graphs else "off (graph buffers")
        assert run.repeated == [False, False, True, True]
        assert_same_bits(reference.report, run.report)


def test_ranks_without_graphs_do_not_agree_on_repeated_steps(pool):
    """The agreement lets the host wait for the device in each step."""
    layout = case(2, 1, 1, microbatches=2, model=EXPERTS)
    for run in pool.run(train, layout.world, layout.tree, "auto", [SLOW, SLOW], (0, 1)):
        assert run.replayed == [0] * STEPS
        assert run.lines[-1].startswith("off (graph buffers")
        assert run.agrees_on_repetition == [True, True, False, False]


@pytest.mark.parametrize("name", ["tensor", "zero 2"])
def test_ranks_that_agree_on_captures_stay_eager_if_one_of_them_cannot_capture(name, pool):
    layout, _, _ = LAYOUTS[name]
    times = [SLOW] * layout.world
    eager = pool.run(train, layout.world, layout.tree, "off", times)
    measured = pool.run(train, layout.world, layout.tree, "auto", times, (1,))
    for reference, run in zip(eager, measured, strict=True):
        assert run.replayed == [0] * STEPS
        assert_same_bits(reference.report, run.report)
    first, last = (run.lines[-1] for run in measured)
    assert first.startswith("off (another rank of the axis ")
    assert last.startswith("off (graph buffers of 0.0 GiB do not fit in the remaining memory")


def test_a_rank_whose_memory_is_full_keeps_all_ranks_eager(pool):
    """Ranks of a tensor-parallel group replay together or not at all."""
    layout, _, _ = LAYOUTS["tensor, pipeline"]
    eager = pool.run(train, layout.world, layout.tree, "off", [SLOW] * layout.world)
    measured = pool.run(train, layout.world, layout.tree, "auto", [SLOW] * layout.world, (), 1)
    for reference, run in zip(eager, measured, strict=True):
        assert run.replayed == [0] * STEPS
        assert run.lines[-1].startswith("off (rank 1 lacks 0.0 GiB of memory for the graphs' buffers")
        assert_same_bits(reference.report, run.report)


def test_steps_without_replayable_micro_batches_stay_eager(pool):
    layout = case(2, 1, 2, microbatches=2, model=TWO_LAYERS)  # the exchange of tensor parallelism is not cut
    for run in pool.run(train, layout.world, layout.tree, "auto", [SLOW] * layout.world):
        assert run.measured == [0] * STEPS
        assert run.lines[-1] == "off (no micro-batch of a step can be replayed)"


def test_a_restarted_attempt_measures_and_decides_anew():
    """The next attempt may have new ranks, which have not decided."""
    layout, replayed, measured = LAYOUTS["one rank"]
    clock = FixedClock(*SLOW)
    engine = make_engine(0, 1, layout.tree, launch_clock=clock)
    run = MeasuredRun()
    run_steps(engine, clock, run)
    assert run.replayed[-1] == replayed
    assert engine.graph_choice is not None
    assert engine.graphs is not None
    engine.graph_choice.restart()
    engine.graphs.restart()
    assert read_line(engine) == "decided before the third step by the measured time of launches"
    clock.times = FixedClock(*FAST).times
    run_steps(engine, clock, run, first=STEPS + 1)
    assert run.replayed[STEPS:] == [0] * STEPS
    assert run.measured[-1] == 2 * measured
    assert run.lines[-1].startswith("off (rank 0 submits")


@pytest.mark.parametrize(("times", "has_fitted"), [(SLOW, True), (FAST, False)])
def test_memory_for_graphs_is_not_asked_for_twice(times, has_fitted):
    """After an attempt with graphs the peak of memory contains them."""
    layout, replayed, _ = LAYOUTS["one rank"]
    clock = FixedClock(*times)
    engine = make_engine(0, 1, layout.tree, launch_clock=clock)
    run = MeasuredRun()
    run_steps(engine, clock, run)
    assert engine.graph_choice is not None
    assert engine.graphs is not None
    engine.graph_choice.restart()
    engine.graphs.restart()
    clock.times = FixedClock(*SLOW).times
    with mock.patch.object(GraphConditions, "find_spare_bytes", return_value=-(1 << 30)):
        run_steps(engine, clock, run, first=STEPS + 1)
    assert run.replayed[-1] == (replayed if has_fitted else 0)
    assert run.lines[-1].startswith("forward" if has_fitted else "off (rank 0 lacks 1.0 GiB")


def test_without_a_clock_a_cpu_stays_eager_with_auto():
    engine = make_engine(0, 1, LAYOUTS["one rank"][0].tree)
    assert (engine.graphs, engine.graph_choice) == (None, None)


def test_a_reduction_by_rows_precedes_graphs_that_are_expected_to_gain_nothing():
    layout = case(1, 1, 1, microbatches=4, model=TWO_LAYERS)
    with (
        mock.patch.object(Engine, "_find_row_exchange_obstacle", return_value=""),
        mock.patch.object(graph_conditions, "explain_no_graphs", return_value="launches are short"),
    ):
        engine = make_engine(0, 1, layout.tree, launch_clock=FixedClock(*SLOW))
    assert engine.graphs is None
    assert engine.graph_choice is None


@pytest.mark.parametrize("model", [TWO_LAYERS, EXPERTS])
@pytest.mark.parametrize("expectation", ["", "launches are short"])
def test_checked_steps_precede_graphs_that_are_expected_to_gain_nothing(model, expectation):
    """A checked step of experts runs eagerly, which costs much next to graphs."""
    engine = make_engine(0, 1, case(microbatches=2, model=model).tree, launch_clock=FixedClock(*SLOW))
    with mock.patch.object(replay_conditions, "explain_no_graphs", return_value=expectation):
        exclude_costly_graphs(engine)
    if model is EXPERTS and expectation:
        assert (engine.graphs, engine.graph_choice) == (None, None)
        assert read_line(engine).startswith("off (a checked step would run without CUDA graphs (model.mlp=experts)")
    else:
        assert engine.graphs is not None
        assert engine.graph_choice is not None


def train_after_exclusion(rank: int, world: int, tree: dict[str, Any]) -> MeasuredRun:
    """Train in an attempt in which rank 0 alone has an engine of an attempt that excluded graphs."""
    clock = FixedClock(*SLOW)
    engine = make_engine(rank, world, tree, launch_clock=clock)
    if rank == 0:
        engine.exclude_graphs("a checked step would run without CUDA graphs")
    share_exclusion(engine, Peers())
    run = MeasuredRun()
    run_steps(engine, clock, run)
    return run


def test_new_ranks_adopt_the_exclusion_of_an_earlier_attempt(pool):
    layout, _, _ = LAYOUTS["data"]
    for run in pool.run(train_after_exclusion, layout.world, layout.tree):
        assert run.replayed == [0] * STEPS
        assert run.lines == ["off (a checked step would run without CUDA graphs)"] * STEPS


# Let the trainer's engine measure with a fixed clock, as on a GPU with a slow host.
SLOW_HOST = """
from functools import partial
from megascale.train import state_retention
from tests.fixed_clock import FixedClock
state_retention.Engine = partial(state_retention.Engine, launch_clock=FixedClock(8.0, 10.0))
"""


def test_a_run_and_its_resumption_report_the_decision(tiny: Path, tmp_path: Path):
    for steps in (4, 8):
        arguments = ["train", tiny, f"--train.steps={steps}", "--train.micro_batch=1"]
        process = Forked(arguments, before=SLOW_HOST, cwd=tmp_path, env={"COLUMNS": "300"})
        output = process.communicate(timeout=240)[0]
        assert process.wait() == 0, output
        assert output.count("active: CUDA graphs: decided before the third step") == 1
        assert output.count("active: CUDA graphs: forward and backward of each chunk") == 1
    events = [event for event in lines(tmp_path / "runs" / "tiny" / "events.jsonl") if event["event"] == "active"]
    texts = [event["CUDA graphs"] for event in events]
    assert ["decided" in text for text in texts] == [True, False] * 2
    assert all("GPU runs it in 20.0 ms: a share of 0.80" in text for text in texts[1::2])
    assert set(events[0]) == set(events[1])
