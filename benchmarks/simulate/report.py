"""Table of the checks A1 to A13: figure, target, verdict, fitted constants, reason for a skip."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulate.held_out_checks import check_a100_stacks, check_bands, check_nemo, check_unseen_runs
from benchmarks.simulate.published_rows import (
    TRACE_FILE,
    TRACE_RESULT,
    anchor_file,
    cluster_of_round,
    list_predictions,
    list_rounds,
    load_round,
    load_round_predictions,
    strong_scaling,
)
from benchmarks.simulate.score import (
    CONTROL,
    FITTED,
    NOTHING,
    AnchorCheck,
    ScoreColumn,
    check_extrapolation,
    check_headline,
    check_left_out,
    check_mfu,
    check_vtrain,
    column,
    efficiency_control,
    percent,
    scored,
)
from megascale import config as configuration
from megascale.errors import DataError
from megascale.simulate.calibration import Constants, load_calibration
from megascale.simulate.case import Case
from megascale.simulate.cluster import load_cluster
from megascale.simulate.event import simulate_step
from megascale.simulate.measured_runs import match_predictions
from megascale.simulate.search import price_layouts
from megascale.simulate.software import MEGASCALE

# Returns the what-if result of a trace file (observe/analysis/whatif.py).
Replay = Callable[[Path], Any]

# The speed check prices this many layouts and scales to a million.
SPEED_LAYOUTS = 200_000
GOAL_LAYOUTS = 1_000_000


def check_runs(runs: Path | None) -> list[AnchorCheck]:
    """A7: this project's own runs against predictions written before them, each file of predictions by itself."""
    return [check for name in list_predictions() for check in _check_predictions(runs, name)]


def _check_predictions(runs: Path | None, predictions: str) -> list[AnchorCheck]:
    provenance, predictions_list = load_round_predictions(predictions)
    title = f"own runs against predictions {predictions} made {provenance}"
    shipped = anchor_file("own-runs").get(predictions, {}).get("seconds", {})
    if runs is not None:
        matches = [(p, m.seconds) for p, m in match_predictions(predictions_list, runs)]
    else:
        matches = []
    matches = matches or [(p, float(shipped[p.name])) for p in predictions_list if p.name in shipped]
    if not matches:
        if runs is not None:
            reason = f"no run folder of the predictions in {runs}"
        else:
            reason = "no --runs folder given"
        return [
            AnchorCheck(
                "A7", title, skipped=f"{reason}: {len(predictions_list)} predictions wait for their measurement"
            )
        ]
    errors = np.array([100.0 * (p.seconds / s - 1.0) for p, s in matches])
    inside = sum(p.low <= s <= p.high for p, s in matches)
    missing = sorted({p.name for p in predictions_list} - {p.name for p, _ in matches})
    notes = [f"{inside} of {len(matches)} measurements lie in their P10-P90 band"]
    if missing:
        notes.append(f"not measured: {', '.join(missing)}")
    return [
        AnchorCheck(
            "A7",
            title,
            {"mean": (float(np.abs(errors).mean()), 4.0, "%"), "worst": (float(np.abs(errors).max()), 10.0, "%")},
            "nothing of it",
            tuple(notes),
            tuple((p.name, s, p.seconds, False) for p, s in matches),
            columns=_today(predictions),
        )
    ]


def _today(predictions: str) -> tuple[ScoreColumn, ...]:
    """Return scores of the current model on runs that were measured since. They are not predictions."""
    if predictions not in list_rounds():
        return ()
    cluster, rows = load_cluster(cluster_of_round(predictions)), load_round(predictions)
    engine, learnt = load_calibration(None, cluster.name, "megascale"), load_round("h200")
    control = efficiency_control(rows, learnt)
    return (
        column(f"{NOTHING}, today's model", cluster, rows, None, "megascale"),
        column(f"{FITTED} ({engine.name}), today's model", cluster, rows, engine, "megascale"),
        scored(f"{CONTROL}: first round's efficiency", percent(control, rows.seconds)),
    )


def check_trace(folder: Path | None, replay: Replay) -> list[AnchorCheck]:
    """A8: replay of the ByteDance trace next to the published result.

    Args:
        replay: returns the what-if result of a trace file (observe/analysis/whatif.py), which this package does not
            import.
    """
    title = "replay of a ByteDance Megatron job (8 ranks, 32 steps)"
    if folder is None or not (folder / TRACE_FILE).is_file():
        return [AnchorCheck("A8", title, skipped="data of others is not here (see --data): the trace ST")]
    try:
        result = replay(folder / TRACE_FILE)
    except DataError as error:
        return [AnchorCheck("A8", title, skipped=str(error))]
    total = 100.0 * abs(result.replayed / result.recorded - 1.0)
    notes = [
        f"recorded step {result.recorded:.4f} s, replayed {result.replayed:.4f} s; without launch gaps "
        f"{result.original:.4f} s, ideal {result.ideal:.4f} s"
    ]
    figures = {"total time": (total, 1.0, "%")}
    try:
        published = json.loads((folder / TRACE_RESULT).read_text())
    except (OSError, ValueError):
        notes.append("the folder of the trace has no published result: slow-down not compared")
    else:
        theirs = float(published["blocking_slowdown"])
        figures["slow-down"] = (100.0 * abs((result.slow_down - 1.0) / (theirs - 1.0) - 1.0), 10.0, "%")
        notes.append(f"slow-down by stragglers {result.slow_down:.4f}, published {theirs:.4f}")
        stage = max(result.stages, key=lambda s: result.stages[s].alone)
        ours = result.stages[stage].alone
        notes.append(
            f"worst stage alone: stage {stage}, {ours:.4f}; published "
            f"{float(published['blocking_decompose_by_stage'][str(stage)]):.4f}"
        )
    return [AnchorCheck("A8", title, figures, "nothing", tuple(notes))]


def best_of(times: int, call: Callable[[], object]) -> float:
    """Shortest wall-clock seconds of several calls."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def check_speed() -> list[AnchorCheck]:
    """A9: layouts a minute in closed form, and an event-driven step of 12,288 GPUs."""
    cluster = load_cluster("a100-roce")
    model = configuration.from_tree({"model": {"preset": "gpt-175b"}}).model
    rng = np.random.default_rng(0)
    n = SPEED_LAYOUTS
    arrays = {
        "tensor": rng.choice([1, 2, 4, 8], n),
        "pipeline": rng.choice([1, 2, 4, 8, 16], n),
        "virtual": rng.choice([1, 2, 3, 6], n),
        "data": rng.choice([4, 16, 64, 192], n),
        "micro": rng.choice([1, 2, 4], n),
    }

    def price_batch() -> object:
        return price_layouts(
            lambda part: Case.from_model(model, MEGASCALE, batch=6144, **{k: v[part] for k, v in arrays.items()}),
            n,
            cluster,
            Constants(),
        )

    rows = strong_scaling()
    last = rows.subset(np.arange(len(rows)) == len(rows) - 1).cases
    case = Case(**{k: v[0].item() for k, v in vars(last).items()})
    seconds = best_of(3, price_batch) * GOAL_LAYOUTS / n
    event = best_of(3, lambda: simulate_step(cluster, case))
    jittered = best_of(2, lambda: simulate_step(cluster, case, jitter=cluster.stragglers.jitter))
    return [
        AnchorCheck(
            "A9",
            "speed",
            {"10^6 layouts": (seconds, 60.0, " s"), "12,288-GPU event step": (event, 0.5, " s")},
            "nothing",
            (
                f"one process; {60.0 / seconds:,.1f} million layouts a minute; the same step with all 192 replicas "
                f"jittered {jittered:.2f} s",
            ),
        )
    ]


def validate(data: Path | None, runs: Path | None, replay: Replay, only: list[str] | None = None) -> list[AnchorCheck]:
    """The checks asked for (all by default), in order."""
    cluster = load_cluster("a100-roce")
    suites: list[tuple[set[str], Callable[[], list[AnchorCheck]]]] = [
        ({"A1"}, lambda: [check_left_out(cluster)]),
        ({"A2"}, lambda: [check_extrapolation(cluster)]),
        ({"A3"}, lambda: [check_headline(cluster)]),
        ({"A4"}, lambda: check_vtrain(data)),
        ({"A5", "A6"}, lambda: check_mfu(cluster)),
        ({"A7"}, lambda: check_runs(runs)),
        ({"A8"}, lambda: check_trace(data, replay)),
        ({"A9"}, check_speed),
        ({"A10"}, lambda: check_bands(cluster, data)),
        ({"A11"}, lambda: [check_unseen_runs()]),
        ({"A12"}, lambda: [check_nemo()]),
        ({"A13"}, lambda: [check_a100_stacks(data)]),
    ]
    if only:
        selected = {key.upper() for key in only}
    else:
        selected = None
    checks = [check for keys, suite in suites if selected is None or keys & selected for check in suite()]
    return [check for check in checks if selected is None or check.key in selected]
