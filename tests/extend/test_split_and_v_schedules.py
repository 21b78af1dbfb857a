"""Schedules whose backward is two actions, or whose chunks stand in a V: exact, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascale.config import from_tree
from megascale.core.layout import lay_out
from megascale.errors import ConfigError
from megascale.observe.analysis.run_trace import read_run_trace
from megascale.observe.analysis.step_timeline import read_step_timeline
from megascale.observe.store.tables import SpanTables
from megascale.parallel.linear_precision import LinearPrecision
from megascale.simulate.event import simulate_step
from tests.exact import test_checkpoints as checkpoints
from tests.exact.cases import Case, case
from tests.exact.compare import assert_equal
from tests.exact.training import FEW_STEPS, RankReport, make_engine, run_step, train
from tests.extend import schedules  # registers them, in the worker processes too
from tests.extend.packaged import install
from tests.simulate.simulator_cases import GPT_13B, calm
from tests.simulate.simulator_cases import case as simulated_case

pytestmark = pytest.mark.xdist_group("processes")


def train_own(rank: int, world: int, tree: dict[str, Any], steps: int) -> RankReport:
    """As `train`; that a worker looks for this function here makes it register the schedules."""
    return train(rank, world, tree, steps)


def own_case(
    schedule: str, *sizes: int, microbatches: int = 5, zero: int = 1, recompute: str = "none", **model: Any
) -> Case:
    """Return a case with one layer per chunk, and at least two layers."""
    virtual = 1 if schedule.startswith("zb_h1") else 2
    return case(
        *sizes,
        microbatches=microbatches,
        virtual=virtual,
        zero=zero,
        parallel={"schedule": schedule, "bucket_elements": 900, "recompute": recompute},
        model=model,
    )


EXPERTS: dict[str, Any] = {
    "mlp": "experts",
    "mlp_bias": False,
    "experts": {"number": 4, "top_k": 2, "width": 12, "bias_rate": 0.01, "sequence_loss": 0.1, "shared_width": 16},
}

CASES = {
    "ZB-H1 PP2 x TP2, experts": own_case("zb_h1", 2, 2, 1, **EXPERTS),
    "ZB-V PP2 x DP2, ZeRO-2, experts, recomputed": own_case(
        "zb_v", 1, 2, 2, zero=2, recompute="full", tied_embeddings=False, **EXPERTS
    ),
    "ZB-H1 PP2": own_case("zb_h1", 1, 2, 1),
    "ZB-H1 PP4": own_case("zb_h1", 1, 4, 1),
    "ZB-H1 PP4 x TP2": own_case("zb_h1", 2, 4, 1, recompute="selective"),
    "ZB-H1 PP2 x DP2, ZeRO-0": own_case("zb_h1", 1, 2, 2, zero=0),
    "ZB-H1 PP2 x TP2 x DP2": own_case("zb_h1", 2, 2, 2, recompute="full"),
    "ZB-H1 PP4 x DP2, ZeRO-2": own_case("zb_h1", 1, 4, 2, zero=2),
    "ZB-H1 PP2 x DP2, armed early": own_case("zb_h1_armed_early", 1, 2, 2),
    "ZB-H1 PP2 x DP2, armed early, ZeRO-2": own_case("zb_h1_armed_early", 1, 2, 2, zero=2),
    "V PP2": own_case("v", 1, 2, 1),
    "V PP4, tied": own_case("v", 1, 4, 1, tied_embeddings=True),
    "V PP2 x TP2 x DP2": own_case("v", 2, 2, 2),
    "V PP2 x DP2, ZeRO-2": own_case("v", 1, 2, 2, zero=2, tied_embeddings=False),
    "ZB-V PP2 x DP2, tied, ZeRO-0": own_case("zb_v", 1, 2, 2, zero=0, tied_embeddings=True),
    "ZB-V PP2 x DP2, ZeRO-2": own_case("zb_v", 1, 2, 2, zero=2, tied_embeddings=False),
    "V PP2 x DP2, tied, ZeRO-2": own_case("v", 1, 2, 2, zero=2, tied_embeddings=True),
    "ZB-V PP2 x DP2, tied, ZeRO-2": own_case("zb_v", 1, 2, 2, zero=2, tied_embeddings=True),
    "ZB-V PP2 x DP2, tied, ZeRO-3": own_case("zb_v", 1, 2, 2, zero=3, tied_embeddings=True),
    "ZB-V PP2 x DP2, ZeRO-3": own_case("zb_v", 1, 2, 2, zero=3, tied_embeddings=False),
    "ZB-V PP4 x TP2": own_case("zb_v", 2, 4, 1, tied_embeddings=True),
    "ZB-V PP2 x TP2 x DP2": own_case("zb_v", 2, 2, 2, recompute="full", tied_embeddings=False),
}


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(name, pool, one_process):
    local = CASES[name]
    report = pool.run(train_own, local.world, local.tree, FEW_STEPS)
    assert_equal(one_process(local.twin, FEW_STEPS), report, from_tree(local.tree).model)


def count_weight_gradients(rank: int, world: int, tree: dict[str, Any]) -> dict[str, list[int]]:
    """Return how many weight gradients each action of a step computes, by kind."""
    engine = make_engine(rank, world, tree)
    counts: dict[str, list[int]] = {}
    computed = 0
    accumulate = LinearPrecision.accumulate_wgrad

    def count(*args: Any, **options: Any) -> Any:
        nonlocal computed
        computed += 1
        return accumulate(*args, **options)

    begin = engine.runtime.recorder.begin_action

    def begin_action(kind: Any, *args: Any) -> None:
        nonlocal computed
        computed = 0
        label = kind.label
        engine.runtime.recorder.end_action = lambda: counts.setdefault(label, []).append(computed)  # type: ignore[method-assign]
        begin(kind, *args)

    engine.runtime.recorder.begin_action = begin_action  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearPrecision, "accumulate_wgrad", count)
        run_step(engine, 1, RankReport())
    return counts


def test_the_second_half_of_a_backward_computes_the_weight_gradients(pool):
    local = own_case("zb_h1", 1, 2, 1, microbatches=3)
    for counts in pool.run(count_weight_gradients, local.world, local.tree):
        assert counts["backward_input"] == [0, 0, 0]
        assert min(counts["backward_weight"]) > 0
        assert len(counts["backward_weight"]) == 3


def save_own(rank: int, world: int, tree: dict[str, Any], folder: Path) -> RankReport:
    """As `checkpoints.save`, in a process that has the schedules."""
    return checkpoints.save(rank, world, tree, folder)


def load_own(rank: int, world: int, tree: dict[str, Any], folder: Path) -> tuple[RankReport, RankReport]:
    """As `checkpoints.load`, in a process that has the schedules."""
    return checkpoints.load(rank, world, tree, folder)


def resumable(schedule: str, *sizes: int, virtual: int, zero: int = 1) -> Case:
    """Four samples a step."""
    return case(
        *sizes,
        virtual=virtual,
        zero=zero,
        microbatches=4 // sizes[2],
        model={**checkpoints.MODEL, "layers": 8, "tied_embeddings": True},
        optimizer={"name": "lamb"},
        parallel={"schedule": schedule, "bucket_elements": 700},
    )


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (resumable("auto", 1, 2, 2, virtual=2), resumable("zb_v", 1, 4, 1, virtual=2)),
        (resumable("v", 2, 2, 1, virtual=2), resumable("zb_h1", 1, 4, 2, virtual=1, zero=2)),
    ],
    ids=["interleaved to ZB-V", "V to ZB-H1"],
)
def test_a_schedule_resumes_the_run_of_another_with_other_places_of_chunks(saver, loader, pool, one_process, tmp_path):
    model, folder = from_tree(saver.tree).model, tmp_path / "checkpoints"
    pool.run(save_own, saver.world, saver.tree, folder)
    loaded, report = zip(*pool.run(load_own, loader.world, loader.tree, folder), strict=True)
    before, full = one_process(saver.twin, checkpoints.SAVED_STEP), one_process(saver.twin, checkpoints.SAVED_STEP + 1)
    assert_equal(RankReport(state=before.state), list(loaded), model)
    last = RankReport(full.losses[-1:], full.norms[-1:], full.gradients[-1:], full.state)
    assert_equal(last, list(report), model)


def laid_out(tree: dict[str, Any], world: int, **sections: dict[str, Any]) -> Any:
    merged = {**tree, **{name: {**tree.get(name, {}), **values} for name, values in sections.items()}}
    return lay_out(from_tree(merged), world)


def test_what_a_schedule_cannot_do_is_refused_before_the_first_step():
    split = own_case("zb_h1", 1, 2, 1)
    layout = laid_out(split.tree, split.world, kernels={"graphs": "on"})
    assert "parallel.schedule=zb_h1" in layout.stage_memory(0)[1]
    exposed = own_case("v", 1, 2, 1)
    with pytest.raises(ConfigError, match=r"overlap.pipeline=false.*overlap.pipeline=true"):
        laid_out(exposed.tree, exposed.world, overlap={"pipeline": False}).schedule()


def test_memory_of_a_v_and_of_a_split_backward():
    """Both ends of a V have their layers' and embeddings' parameters on the first stage; queued gradients need more."""
    tree = own_case("zb_v", 1, 4, 1, microbatches=12, tied_embeddings=False).tree
    split = lay_out(from_tree(tree), 4)
    built = laid_out(tree, 4, parallel={"schedule": "v"})
    interleaved = laid_out(tree, 4, parallel={"schedule": "interleaved"})
    weights = [layout.stage_memory(0)[0].weights for layout in (split, built, interleaved)]
    assert weights[0] == weights[1] > weights[2]
    assert built.stage_memory(3)[0].logits == 0 < built.stage_memory(0)[0].logits
    saved = [layout.stage_memory(3)[0].activations for layout in (split, built)]
    assert saved[0] > 0
    assert saved[1] > 0


def test_gradients_of_a_stage_are_its_chunks():
    """A stage's modules are those of the chunks that the placement gives it."""
    local = own_case("v", 1, 4, 1)
    layout = lay_out(from_tree(local.tree), local.world)
    assert layout.chunk_map.stage_of == (0, 1, 2, 3, 3, 2, 1, 0)
    first, last = layout.stage_layers(0)
    assert [layer for layer, _ in first] == [0]
    assert [layer for layer, _ in last] == [7]


def test_a_run_with_a_v_is_trained_recorded_explained_and_planned(megascale, tiny, tmp_path, monkeypatch):
    install(tmp_path / "site", "zero_bubbles", Path(schedules.__file__).read_text(), monkeypatch)
    arguments = ["--parallel.schedule=zb_v", "--parallel.pipeline=2", "--parallel.virtual_stages=2", "--model.layers=4"]
    arguments += ["--train.global_batch=16", "--train.micro_batch=4", "--train.device=cpu"]
    result = megascale(
        "train", tiny, *arguments, "--train.steps=3", "--observe.spans=1", "--checkpoint.interval=0",
        "--train.eval_interval=2", "--train.eval_samples=2",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "runs").iterdir()
    with SpanTables(run) as tables:
        counts = tables.query("SELECT action, count(*) AS n FROM spans WHERE step = 2 AND rank = 0 GROUP BY action")
        timeline = read_step_timeline(tables, 3, "all", "pipeline")
        trace = read_run_trace(tables, [3])
    by_action = dict(zip(counts["action"].tolist(), counts["n"].tolist(), strict=True))
    assert by_action["forward"] == by_action["backward_input"] == by_action["backward_weight"] == 8
    assert "backward" not in by_action
    # Four micro-batches pass from stage 0 to 1 and back, in both directions. Every message has its compute.
    assert len(timeline.messages) == 16
    assert timeline.planned_seconds > 0
    assert all(track.seconds["compute"] > 0 for track in timeline.tracks)
    chunks = {
        (int(stage), int(c)): int(g)
        for stage, c, g in zip(trace.stage, trace.chunk, trace.global_chunk, strict=True)
        if g >= 0
    }
    assert chunks == {(0, 0): 0, (1, 0): 1, (1, 1): 2, (0, 1): 3}
    explained = megascale("whatif", run, "--json")
    assert explained.returncode == 0, explained.stderr
    parts = json.loads(explained.stdout)
    assert parts["replayed_seconds"] == pytest.approx(parts["recorded_seconds"], rel=1e-3)
    planned = megascale("plan", tiny, *arguments, "--gpus", "2", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["schedule"]


def test_the_simulator_prices_smaller_bubbles():
    """Replayed with times of a model and a cluster, a split backward is faster than a whole one."""
    seconds = {
        name: simulate_step(calm(), simulated_case(1, 4, virtual, 1, 1, 32, model=GPT_13B), schedule=name).seconds
        for name, virtual in (("1f1b", 1), ("zb_h1", 1), ("interleaved", 2), ("zb_v", 2))
    }
    assert seconds["zb_v"] < seconds["zb_h1"] < seconds["interleaved"] < seconds["1f1b"]
