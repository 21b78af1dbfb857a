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
    result_a, result_b = _result(first), _result(second)
    rows: list[Row] = []
    for part in result_a["parts"] | result_b["parts"]:
        a, b = float(result_a["parts"].get(part, 0.0)), float(result_b["parts"].get(part, 0.0))
        if max(abs(a), abs(b)) > 1e-4:
            rows.append(_row(part, result_a, a, result_b, b))
    rows.append(_row("step", result_a, float(result_a["seconds"]), result_b, float(result_b["seconds"])))
    return rows


def _row(part: str, parts_a: dict[str, Any], seconds_a: float, parts_b: dict[str, Any], seconds_b: float) -> Row:
    first, second = f"{parts_a['label']} (first), s", f"{parts_b['label']} (second), s"
    return {"part": part, first: seconds_a, second: seconds_b, "difference, s": seconds_b - seconds_a}


def _result(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(read_text(path))
        if isinstance(tree, list):
            last = tree[-1]
        else:
            last = tree
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
    measured, machine = measure(folder, gpus), load_cluster(cluster)
    check_device(measured, machine)
    name = software or own_stack(machine)
    base = stack(name)
    fitted = load_calibration(calibration, machine.name, base.family)
    scenario = Scenario(measured.config, measured.gpus, machine, fitted, engine_software(measured.config, base))
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
    case = scenario.case()
    for constant, (low, high, _) in BOUNDS.items():
        grid = np.linspace(low, high, 201)
        seconds = np.array(
            [float(step_parts(machine, case, replace(fitted.constants, **{constant: float(x)})).total) for x in grid]
        )
        if seconds.max() - seconds.min() < 1e-3 * measured.seconds:
            continue
        best = int(np.abs(seconds - measured.seconds).argmin())
        current = getattr(fitted.constants, constant)
        closes = abs(seconds[best] / measured.seconds - 1.0) < 0.01
        if closes:
            verdict = "closes the gap"
        else:
            verdict = f"leaves {seconds[best] / measured.seconds - 1:+.1%}"
        if current is None:
            was = "the cluster's figure"
        else:
            was = f"{current:.3g}"
        rows.append({"what": f"{constant} alone at", "value": float(grid[best]), "remark": f"{verdict}; now {was}"})
    return rows


def predicted_and_measured(runs: Path, predictions: Path) -> list[Row]:
    """Return all predictions with their measurement where the run folder exists."""
    _, predictions_list = load_predictions(predictions)
    measured = {p.name: m for p, m in matching(predictions_list, runs)}
    rows: list[Row] = []
    for p in predictions_list:
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
