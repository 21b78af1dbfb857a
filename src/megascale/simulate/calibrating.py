"""Fits to this project's runs or to a shipped table, as a calibration with its evidence."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megascale.errors import ConfigError
from megascale.simulate.calibration import BOUNDS, Calibration, load_calibration
from megascale.simulate.case import Case
from megascale.simulate.closed import step_parts
from megascale.simulate.cluster import load_cluster
from megascale.simulate.fitting import fit
from megascale.simulate.measured_runs import measures, refuse_other_device
from megascale.simulate.prediction_band import ranges_of
from megascale.simulate.software import stack
from megascale.simulate.step import Scenario, engine_software
from megascale.simulate.validation.anchors import (
    Rows,
    h200_peers,
    later_peers,
    load_first_round,
    load_h100_runs,
    nemo_development,
    paper_development,
)

# Shipped development rows that a calibration may be fitted to, by the name that --anchor takes, with their stacks.
TABLES: dict[str, tuple[Callable[[], Rows], tuple[str, ...]]] = {
    "paper": (paper_development, ("megatron-2023", "megascale")),
    "h200-peers": (h200_peers, ("megatron-core",)),
    "h100-peers": (lambda: later_peers("peers"), ("megatron-core",)),
    "own-first": (load_first_round, ("megascale",)),
    "own-h100": (load_h100_runs, ("megascale",)),
    "nemo-h100": (nemo_development, ("nemo",)),
}


def calibrate(
    runs: Sequence[Path],
    anchor: str | None,
    cluster: str,
    software: str | None,
    fitted: str,
    start: str | None,
    name: str | None,
    gpus: int | None = None,
) -> tuple[Calibration, list[tuple[str, float, float]]]:
    """Fit to run folders or to a shipped table: (calibration, [(row, measured, fitted seconds)])."""
    machine = load_cluster(cluster)
    names = [n.strip() for n in fitted.split(",")]
    unknown = [n for n in names if n not in BOUNDS]
    if unknown:
        raise ConfigError(f"--fit={fitted}: {unknown[0]!r} is no constant; known: {', '.join(BOUNDS)}")
    begin = load_calibration(start, machine.name).constants if start else Calibration("", "").constants
    if anchor is not None:
        if anchor not in TABLES:
            raise ConfigError(f"--anchor={anchor!r} is unknown; known: {', '.join(TABLES)}")
        table, stacks = TABLES[anchor]
        rows = table()
        labels, cases, seconds = list(rows.names), rows.cases, rows.seconds
        how = f"--anchor {anchor}"
    elif runs:
        measured = [one for source in runs for one in measures(source, gpus)]
        for one in measured:
            refuse_other_device(one, machine)
        base = software or ("megascale-h200" if "cudnn" in machine.kernels.attention else "megascale")
        uncalibrated = Calibration("uncalibrated", machine.name)
        scenarios = [
            Scenario(m.config, m.gpus, machine, uncalibrated, engine_software(m.config, stack(base))) for m in measured
        ]
        labels = [f"{m.folder.name}, {m.gpus} GPUs, {m.steps} steps, ±{m.spread:.1%}" for m in measured]
        cases = Case.stack([s.case() for s in scenarios])
        seconds = np.array([m.seconds for m in measured])
        stacks = (stack(base).family,)
        how = " ".join(f"--run {folder.name}" for folder in runs)
    else:
        raise ConfigError(
            f"nothing to fit to: give --run FOLDER or FILE.json (once or more) or --anchor {'|'.join(TABLES)}"
        )
    result = fit(names, lambda k: np.asarray(step_parts(machine, cases, k).total), seconds, begin)
    warnings = list(result.warnings)
    if len(seconds) < len(names):
        warnings.insert(0, f"{len(seconds)} rows cannot decide {len(names)} constants")
    calibration = Calibration(
        name or machine.name,
        machine.name,
        result.constants,
        result.errors,
        tuple(f"{label}: {s:.4g} s" for label, s in zip(labels, seconds, strict=True)),
        tuple(result.residuals.tolist()),
        tuple(warnings),
        f"{datetime.date.today()}, megascale simulate calibrate {how} --cluster {cluster} --fit {','.join(names)}",
        ranges_of(cases),
        stacks,
    )
    predicted = seconds * np.exp(result.residuals)
    return calibration, list(zip(labels, seconds.tolist(), predicted.tolist(), strict=True))
