"""Choice of captured chunks, from the configuration alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascale import config as configuration
from megascale.config.parts import ACTIVATIONS
from megascale.core.graph_choice import LaunchTimes, decide_graphs
from megascale.core.grid import Grid
from megascale.core.layout import lay_out
from megascale.core.rank_memory import explain_no_graphs


def why(*settings: str, data: int = 1, tensor: int = 1) -> str:
    tree = configuration.load(None, ["model.preset=gpt2-124m", "train.global_batch=16"] + list(settings))
    return explain_no_graphs(tree, Grid(tensor=tensor, data=data))


def test_a_measurement_replaces_the_estimate_of_launches():
    settings = ["model.preset=gpt-13b", "train.micro_batch=8", "train.global_batch=64", "parallel.pipeline=2"]
    tree = configuration.load(None, settings)
    assert "longer than its launches" in explain_no_graphs(tree, Grid())
    assert explain_no_graphs(tree, Grid(), measures_launches=True) == ""
    layout = lay_out(tree, 2)
    memory, reason = layout.stage_memory(0, measures_launches=True)
    assert reason == ""
    assert memory.graph_buffers > 0
    refused, reason = layout.stage_memory(0, memory.total - 1, measures_launches=True)
    assert "do not fit in the remaining memory" in reason
    assert refused.graph_buffers == 0


def find_graph_bytes(world: int, *settings: str) -> tuple[int, int]:
    """Return the buffers of graphs and the activations of a rank of gpt2-124m."""
    arguments = ["model.preset=gpt2-124m", "train.global_batch=16", "train.micro_batch=2", "train.precision=bfloat16"]
    tree = configuration.load(None, [*arguments, "kernels.graphs=on", *settings])
    memory, reason = lay_out(tree, world).stage_memory(0)
    assert reason == ""
    return memory.graph_buffers, memory.activations


UNCHECKED = "resilience.replay_interval=0"


@pytest.mark.parametrize("settings", [(), ("parallel.zero=0",), ("parallel.zero=2", "train.linear_precision=float8")])
def test_graphs_of_data_parallel_ranks_hold_no_activations_twice(settings):
    """All micro-batches are replayed, so no eager one holds activations beside those of graphs."""
    graph_bytes, _ = find_graph_bytes(2, "parallel.data=2", UNCHECKED, *settings)
    assert graph_bytes == 0


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        # The exchange of tensor parallelism is not cut, so the first and the last micro-batch are eager.
        (4, ("parallel.tensor=2", UNCHECKED)),
        # Steps that a replay check traces are eager.
        (2, ()),
        (2, ("resilience.replay_interval=10",)),
        (2, ("resilience.replay_interval=10", "parallel.zero=2")),
        (2, ("resilience.replay_interval=10", "parallel.zero=3")),
    ],
)
def test_graphs_hold_the_activations_of_an_eager_micro_batch(world, settings):
    graph_bytes, activation_bytes = find_graph_bytes(world, "parallel.data=2", *settings)
    assert graph_bytes > activation_bytes / 2


@pytest.mark.parametrize(
    "settings", [("parallel.zero=2",), ("model.mlp=experts", "model.experts.number=4", "model.mlp_bias=false")]
)
def test_graphs_of_sharded_gradients_and_experts_have_no_checks_by_default(settings):
    """With resilience.replay_interval=auto the trainer leaves out the checks of these graphs."""
    graph_bytes, _ = find_graph_bytes(2, "parallel.data=2", *settings)
    assert graph_bytes == 0
    graph_bytes, activation_bytes = find_graph_bytes(2, "parallel.data=2", "resilience.replay_interval=10", *settings)
    assert graph_bytes > activation_bytes / 4


def test_runs_without_determinism_have_no_replay_checks():
    graph_bytes, _ = find_graph_bytes(2, "parallel.data=2", "kernels.deterministic=false")
    assert graph_bytes == 0


@pytest.mark.parametrize(
    ("times", "uses_graphs", "slowest_rank"),
    [
        ([(60, 100)], False, 0),
        ([(75, 100)], True, 0),
        ([(60, 100), (12, 15), (50, 100)], True, 1),
        ([(60, 100), (0, 0)], False, 0),
        ([(0, 0), (0, 0)], False, 0),
    ],
)
def test_the_rank_with_the_largest_share_decides(times, uses_graphs, slowest_rank):
    decision = decide_graphs([LaunchTimes(*pair) for pair in times], [0.0] * len(times))
    assert (decision.uses_graphs, decision.slowest_rank) == (uses_graphs, slowest_rank)
    assert decision.times == LaunchTimes(*times[slowest_rank])


def test_the_line_names_times_and_obstacle():
    slow = decide_graphs([LaunchTimes(10.0, 40.0), LaunchTimes(124.04, 136.5)], [0.0, 0.0])
    measured = "rank 1 submits a micro-batch in 124.0 ms, and its GPU runs it in 136.5 ms: a share of 0.91"
    assert slow.describe("at once").startswith(f"forward and backward of each chunk, at once ({measured}")
    assert slow.describe("at once", "no memory").startswith(f"off (no memory; {measured}")
    assert decide_graphs([LaunchTimes(10.0, 40.0)], [0.0]).describe("at once").startswith("off (rank 0 submits")
    unmeasured = decide_graphs([LaunchTimes()], [0.0])
    assert unmeasured.describe("at once") == "off (no micro-batch of a step can be replayed)"
    assert unmeasured.describe("at once", "no memory") == "off (no memory)"


def test_a_rank_without_memory_keeps_all_ranks_eager():
    decision = decide_graphs([LaunchTimes(9.0, 10.0)] * 3, [0.0, 2.04, 1.0])
    assert not decision.uses_graphs
    text = decision.describe("at once")
    assert text.startswith(
        "off (rank 1 lacks 2.0 GiB of memory for the graphs' buffers; --kernels.graphs=on tries anyway"
    )
    assert "in 9.0 ms, and its GPU runs it in 10.0 ms" in text


def test_small_micro_batches_are_and_large_ones_gain_nothing():
    assert why("train.micro_batch=4") == ""
    large = ("model.preset=gpt-13b", "train.micro_batch=8")
    assert "longer than its launches" in why(*large)
    assert why("model.preset=gpt-13b", "train.micro_batch=2", tensor=2) == ""  # each rank has half of it to do
    assert "longer than its launches" in why("model.preset=gpt-13b", "train.micro_batch=2")
    assert why(*large, "kernels.graphs=on") == ""


@pytest.mark.parametrize("graphs", ["auto", "on"])
def test_what_cannot_be_captured(graphs):
    requested = f"kernels.graphs={graphs}"
    assert why(requested, tensor=2) == ""
    assert "only overlap.tensor=fused" in why(requested, "overlap.tensor=async", tensor=2)
    assert "dropout" in why(requested, "model.dropout=0.1")
    for zero in ("parallel.zero=2", "parallel.zero=3"):
        assert why(requested, zero, data=2) == ""
        assert why(requested, zero, tensor=2) == ""
        assert f"{zero} cuts graphs" in why(requested, zero, data=2, tensor=2)
    rowwise = (requested, "train.linear_precision=float8_rowwise")
    assert why(*rowwise, "parallel.zero=2", data=2) == ""
    assert "makes copies of all" in why(*rowwise, "parallel.zero=3", data=2)
    assert why("kernels.graphs=off") == "kernels.graphs=off"


def test_a_part_from_outside_is_not_captured_unless_its_user_says_so():
    """It may draw random numbers, which a replay would repeat without a word."""
    ACTIVATIONS.register("noisy", replace(ACTIVATIONS["gelu"]))
    try:
        reason = why("model.activation=noisy", "train.micro_batch=4")
        assert "model.activation=noisy is registered by a package" in reason
        assert why("model.activation=noisy", "train.micro_batch=4", "kernels.graphs=on") == ""
    finally:
        ACTIVATIONS.remove("noisy")
