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
from megascale.simulate.closed import compute_step_parts
from megascale.simulate.cluster import load_cluster
from megascale.simulate.measured_runs import check_device, load_predictions, match_predictions, measure_run
from megascale.simulate.scenario import Scenario, make_engine_software, match_hosts
from megascale.simulate.software import choose_engine_stack, find_stack
from megascale.simulate.step import estimate_step

Row = dict[str, Any]


def compare_results(first: Path, second: Path) -> list[Row]:
    """Return one row per part of the step, with the seconds of two results and their difference.

    Args:
        first, second: files of `simulate step --json`; the last result of each file is compared.

    Raises DataError if a file is missing or malformed.
    """
    result_a = _load_last_result(first)
    result_b = _load_last_result(second)
    rows: list[Row] = []
    for part in result_a["parts"] | result_b["parts"]:
        seconds_a = float(result_a["parts"].get(part, 0.0))
        seconds_b = float(result_b["parts"].get(part, 0.0))
        if max(abs(seconds_a), abs(seconds_b)) > 1e-4:
            rows.append(_make_row(part, result_a, seconds_a, result_b, seconds_b))
    rows.append(_make_row("step", result_a, float(result_a["seconds"]), result_b, float(result_b["seconds"])))
    return rows


def _make_row(part: str, result_a: dict[str, Any], seconds_a: float, result_b: dict[str, Any], seconds_b: float) -> Row:
    first_column = f"{result_a['label']} (first), s"
    second_column = f"{result_b['label']} (second), s"
    return {"part": part, first_column: seconds_a, second_column: seconds_b, "difference, s": seconds_b - seconds_a}


def _load_last_result(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(read_text(path))
        last = tree[-1] if isinstance(tree, list) else tree
        # Each conversion raises an error if the value is missing or malformed.
        float(last["seconds"])
        dict(last["parts"])
        str(last["label"])
        return last
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path} is not the output of `simulate step --json`: {error}") from None


def explain_run(
    folder: Path, cluster: str, calibration: str | None, software: str | None, gpus: int | None = None
) -> list[Row]:
    """Return rows with the predicted and the measured step of a run, and how each constant alone could close the gap.

    For each constant, the row has the value with which the prediction comes closest to the measurement.
    """
    measured = measure_run(folder, gpus)
    cluster_model = load_cluster(cluster)
    check_device(measured, cluster_model)
    stack_name = software or choose_engine_stack(cluster_model)
    base = find_stack(stack_name)
    fit = load_calibration(calibration, cluster_model.name, base.family)
    config, cluster_model = match_hosts(measured.config, cluster_model)
    scenario = Scenario(config, measured.gpus, cluster_model, fit, make_engine_software(config, base))
    result = estimate_step(scenario, check_memory=False)
    gap = result.seconds / measured.seconds - 1.0
    position = "inside" if result.low <= measured.seconds <= result.high else "outside"
    rows: list[Row] = [
        {
            "what": "measured step",
            "value": measured.seconds,
            "remark": f"{measured.steps} steps, ±{measured.spread:.1%}",
        },
        {"what": "predicted step", "value": result.seconds, "remark": f"{gap:+.1%}, measured lies {position} P10-P90"},
    ]
    case = scenario.make_case()
    for constant, (low, high, _) in BOUNDS.items():
        grid = np.linspace(low, high, 201)
        seconds = np.array(
            [
                float(compute_step_parts(cluster_model, case, replace(fit.constants, **{constant: float(value)})).total)
                for value in grid
            ]
        )
        if seconds.max() - seconds.min() < 1e-3 * measured.seconds:
            continue
        best = int(np.abs(seconds - measured.seconds).argmin())
        current = getattr(fit.constants, constant)
        remaining_gap = seconds[best] / measured.seconds - 1.0
        verdict = "closes the gap" if abs(remaining_gap) < 0.01 else f"leaves {remaining_gap:+.1%}"
        current_text = "the cluster's value" if current is None else f"{current:.3g}"
        rows.append(
            {
                "what": f"if only {constant} changed",
                "value": float(grid[best]),
                "remark": f"{verdict} (currently {current_text})",
            }
        )
    return rows


def predicted_and_measured(runs_folder: Path, predictions_file: Path) -> list[Row]:
    """Return one row per prediction, with the measurement if the run folder exists."""
    _, predictions = load_predictions(predictions_file)
    run_by_name = {prediction.name: run for prediction, run in match_predictions(predictions, runs_folder)}
    rows: list[Row] = []
    for prediction in predictions:
        measured = run_by_name.get(prediction.name)
        rows.append(
            {
                "run": prediction.name,
                "GPUs": prediction.gpus,
                "predicted, s": prediction.seconds,
                "P10 to P90": f"{prediction.low:.3f} to {prediction.high:.3f}",
                "measured, s": measured.seconds if measured else "not measured",
                "error": f"{prediction.seconds / measured.seconds - 1:+.1%}" if measured else "",
            }
        )
    return rows
