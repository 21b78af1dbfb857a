"""Comparison of two predictions, or of a prediction with a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megascale.config.text_files import read_text
from megascale.errors import DataError
from megascale.simulate.calibration import BOUNDS, load_calibration
from megascale.simulate.closed import step_parts
from megascale.simulate.cluster import load_cluster
from megascale.simulate.measured_runs import check_device, load_predictions, matching, measure
from megascale.simulate.software import own_stack, stack
from megascale.simulate.step import Scenario, engine_software, run

Row = dict[str, Any]


def compare_results(first: Path, second: Path) -> list[Row]:
    """Part by part: seconds of both and the difference. The last result of each file is taken."""
    result_a, result_b = _load_result(first), _load_result(second)
    rows: list[Row] = []
    for part in result_a["parts"] | result_b["parts"]:
        a, b = float(result_a["parts"].get(part, 0.0)), float(result_b["parts"].get(part, 0.0))
        if max(abs(a), abs(b)) > 1e-4:
            rows.append(_row(part, result_a, a, result_b, b))
    rows.append(_row("step", result_a, float(result_a["seconds"]), result_b, float(result_b["seconds"])))
    return rows


def _row(part: str, result_a: dict[str, Any], seconds_a: float, result_b: dict[str, Any], seconds_b: float) -> Row:
    first, second = f"{result_a['label']} (first), s", f"{result_b['label']} (second), s"
    return {"part": part, first: seconds_a, second: seconds_b, "difference, s": seconds_b - seconds_a}


def _load_result(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(read_text(path))
        if isinstance(tree, list):
            last = tree[-1]
        else:
            last = tree
        # Each conversion raises if the value is missing or malformed.
        float(last["seconds"])
        dict(last["parts"])
        str(last["label"])
        return last
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path} is not the output of `simulate step --json`: {error}") from None


def explain_run(
    folder: Path, cluster: str, calibration: str | None, software: str | None, gpus: int | None = None
) -> list[Row]:
    """Predicted and measured step of a run, and for each constant the value that alone would close the gap."""
    measured, cluster_model = measure(folder, gpus), load_cluster(cluster)
    check_device(measured, cluster_model)
    stack_name = software or own_stack(cluster_model)
    base = stack(stack_name)
    fit = load_calibration(calibration, cluster_model.name, base.family)
    scenario = Scenario(measured.config, measured.gpus, cluster_model, fit, engine_software(measured.config, base))
    result = run(scenario, check_memory=False)
    gap = result.seconds / measured.seconds - 1.0
    if result.low <= measured.seconds <= result.high:
        inside = "inside"
    else:
        inside = "outside"
    rows: list[Row] = [
        {
            "what": "measured step",
            "value": measured.seconds,
            "remark": f"{measured.steps} steps, ±{measured.spread:.1%}",
        },
        {"what": "predicted step", "value": result.seconds, "remark": f"{gap:+.1%}, measured lies {inside} P10-P90"},
    ]
    inputs = scenario.case()  # of the closed form
    for constant, (low, high, _) in BOUNDS.items():
        grid = np.linspace(low, high, 201)
        seconds = np.array(
            [
                float(step_parts(cluster_model, inputs, replace(fit.constants, **{constant: float(x)})).total)
                for x in grid
            ]
        )
        if seconds.max() - seconds.min() < 1e-3 * measured.seconds:
            continue
        best = int(np.abs(seconds - measured.seconds).argmin())
        current = getattr(fit.constants, constant)
        closes = abs(seconds[best] / measured.seconds - 1.0) < 0.01
        if closes:
            verdict = "closes the gap"
        else:
            verdict = f"leaves {seconds[best] / measured.seconds - 1:+.1%}"
        if current is None:
            current_text = "the cluster's value"
        else:
            current_text = f"{current:.3g}"
        rows.append(
            {
                "what": f"if only {constant} changed",
                "value": float(grid[best]),
                "remark": f"{verdict} (currently {current_text})",
            }
        )
    return rows


def predicted_and_measured(runs_folder: Path, predictions_file: Path) -> list[Row]:
    """Return all predictions with their measurement where the run folder exists."""
    _, predictions = load_predictions(predictions_file)
    measured = {p.name: m for p, m in matching(predictions, runs_folder)}
    rows: list[Row] = []
    for p in predictions:
        m = measured.get(p.name)
        rows.append(
            {
                "run": p.name,
                "GPUs": p.gpus,
                "predicted, s": p.seconds,
                "P10 to P90": f"{p.low:.3f} to {p.high:.3f}",
                "measured, s": m.seconds if m else "not measured",
                "error": f"{p.seconds / m.seconds - 1:+.1%}" if m else "",
            }
        )
    return rows
