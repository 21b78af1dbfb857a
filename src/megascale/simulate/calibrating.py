"""Calibration: a fit of constants to measured steps, together with its evidence."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megascale.errors import ConfigError
from megascale.simulate.calibration import BOUNDS, Calibration, Constants, load_calibration
from megascale.simulate.case import Case
from megascale.simulate.closed import compute_step_parts
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.fitting import fit_constants
from megascale.simulate.measured_runs import check_device, list_measured_runs
from megascale.simulate.prediction_band import list_feature_ranges
from megascale.simulate.scenario import Scenario, make_engine_software
from megascale.simulate.software import choose_engine_stack, find_stack


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured steps for a fit of constants.

    Attributes:
        labels: one text per step, for the calibration's evidence.
        seconds: [steps] measured.
        stacks: families of the software that was measured.
        source: options of the command that selected the steps.
    """

    labels: Sequence[str]
    cases: Case
    seconds: NDArray[np.float64]
    stacks: tuple[str, ...]
    source: str


def measure_runs(runs: Sequence[Path], machine: ClusterSpec, software: str | None, gpus: int | None) -> MeasuredSteps:
    """Return the measured steps of run folders and benchmark files.

    Raises ConfigError without a run, and DataError for a damaged run.
    """
    if not runs:
        raise ConfigError("nothing to fit to: give --run FOLDER or --run FILE.json, once or more")
    measured = [run for source in runs for run in list_measured_runs(source, gpus)]
    for run in measured:
        check_device(run, machine)
    stack = find_stack(software or choose_engine_stack(machine))
    uncalibrated = Calibration("uncalibrated", machine.name)
    scenarios = [
        Scenario(run.config, run.gpus, machine, uncalibrated, make_engine_software(run.config, stack))
        for run in measured
    ]
    return MeasuredSteps(
        labels=[f"{run.folder.name}, {run.gpus} GPUs, {run.steps} steps, ±{run.spread:.1%}" for run in measured],
        cases=Case.stack([scenario.make_case() for scenario in scenarios]),
        seconds=np.array([run.seconds for run in measured]),
        stacks=(stack.family,),
        source=" ".join(f"--run {folder.name}" for folder in runs),
    )


def calibrate(
    steps: MeasuredSteps, machine: ClusterSpec, fitted: str, start: str | None = None, name: str | None = None
) -> tuple[Calibration, list[tuple[str, float, float]]]:
    """Fit constants to measured steps.

    Args:
        fitted: names of the constants, comma-separated.
        start: calibration with the values of the constants that are not fitted.
        name: name of the new calibration; default: that of the machine.

    Returns:
        (the calibration, [(label, measured seconds, fitted seconds), ...] for all steps).

    Raises:
        ConfigError: a constant is unknown.
    """
    names = [name.strip() for name in fitted.split(",")]
    unknown = [name for name in names if name not in BOUNDS]
    if unknown:
        raise ConfigError(f"--fit={fitted}: {unknown[0]!r} is not a constant; known: {', '.join(BOUNDS)}")
    start_constants = load_calibration(start, machine.name).constants if start else Constants()
    seconds = steps.seconds

    def predict(constants: Constants) -> NDArray[np.float64]:
        return np.asarray(compute_step_parts(machine, steps.cases, constants).total)

    result = fit_constants(names, predict, seconds, start_constants)
    calibration_name = name or machine.name
    warnings = list(result.warnings)
    if len(seconds) < len(names):
        warnings.insert(0, f"{len(seconds)} rows cannot decide {len(names)} constants")
    command = f"megascale simulate calibrate {steps.source} --cluster {machine.name} --fit {','.join(names)}"
    calibration = Calibration(
        calibration_name,
        machine.name,
        constants=result.constants,
        fitted=result.errors,
        rows=tuple(f"{label}: {value:.4g} s" for label, value in zip(steps.labels, seconds, strict=True)),
        residuals=tuple(result.residuals.tolist()),
        warnings=tuple(warnings),
        provenance=f"{datetime.date.today()}, {command}",
        ranges=list_feature_ranges(steps.cases),
        stacks=steps.stacks,
    )
    predicted = seconds * np.exp(result.residuals)
    return calibration, list(zip(steps.labels, seconds.tolist(), predicted.tolist(), strict=True))
