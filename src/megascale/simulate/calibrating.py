"""Fits of constants to measured steps, as a calibration with its evidence."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megascale.errors import ConfigError
from megascale.simulate.calibration import BOUNDS, Calibration, load_calibration
from megascale.simulate.case import Case
from megascale.simulate.closed import step_parts
from megascale.simulate.cluster import ClusterSpec
from megascale.simulate.fitting import fit
from megascale.simulate.measured_runs import check_device, measures
from megascale.simulate.prediction_band import ranges_of
from megascale.simulate.software import own_stack, stack
from megascale.simulate.step import Scenario, engine_software


@dataclass(frozen=True)
class MeasuredSteps:
    """Measured steps that constants are fitted to.

    Attributes:
        labels: one text per step, for the calibration's evidence.
        cases: the steps as cases.
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
    """Return the steps of run folders and bench files. ConfigError without a run; DataError for a damaged one."""
    if not runs:
        raise ConfigError("nothing to fit to: give --run FOLDER or --run FILE.json, once or more")
    measured = [run for source in runs for run in measures(source, gpus)]
    for run in measured:
        check_device(run, machine)
    base = software or own_stack(machine)
    uncalibrated = Calibration("uncalibrated", machine.name)
    scenarios = [
        Scenario(m.config, m.gpus, machine, uncalibrated, engine_software(m.config, stack(base))) for m in measured
    ]
    return MeasuredSteps(
        labels=[f"{m.folder.name}, {m.gpus} GPUs, {m.steps} steps, ±{m.spread:.1%}" for m in measured],
        cases=Case.stack([s.case() for s in scenarios]),
        seconds=np.array([m.seconds for m in measured]),
        stacks=(stack(base).family,),
        source=" ".join(f"--run {folder.name}" for folder in runs),
    )


def calibrate(
    steps: MeasuredSteps, machine: ClusterSpec, fitted: str, start: str | None = None, name: str | None = None
) -> tuple[Calibration, list[tuple[str, float, float]]]:
    """Fit constants to measured steps.

    Args:
        fitted: names of the constants, comma-separated.
        start: calibration that gives the constants that are not fitted.
        name: name of the new calibration; the machine's by default.

    Returns:
        The calibration, and (label, measured seconds, fitted seconds) per step.

    Raises:
        ConfigError: unknown constant.
    """
    names = [n.strip() for n in fitted.split(",")]
    unknown = [n for n in names if n not in BOUNDS]
    if unknown:
        raise ConfigError(f"--fit={fitted}: {unknown[0]!r} is not a constant; known: {', '.join(BOUNDS)}")
    if start:
        begin = load_calibration(start, machine.name).constants
    else:
        begin = Calibration("", "").constants
    seconds = steps.seconds
    result = fit(names, lambda k: np.asarray(step_parts(machine, steps.cases, k).total), seconds, begin)
    warnings = list(result.warnings)
    if len(seconds) < len(names):
        warnings.insert(0, f"{len(seconds)} rows cannot decide {len(names)} constants")
    command = f"megascale simulate calibrate {steps.source} --cluster {machine.name} --fit {','.join(names)}"
    calibration = Calibration(
        name or machine.name,
        machine.name,
        result.constants,
        result.errors,
        tuple(f"{label}: {s:.4g} s" for label, s in zip(steps.labels, seconds, strict=True)),
        tuple(result.residuals.tolist()),
        tuple(warnings),
        f"{datetime.date.today()}, {command}",
        ranges_of(steps.cases),
        steps.stacks,
    )
    predicted = seconds * np.exp(result.residuals)
    return calibration, list(zip(steps.labels, seconds.tolist(), predicted.tolist(), strict=True))
