"""Predictions of runs written down before they are measured."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import tomli_w

from megascale import config as configuration
from megascale.config.text_files import read_toml
from megascale.errors import ConfigError
from megascale.simulate.calibration import load_calibration
from megascale.simulate.cluster import load_cluster
from megascale.simulate.software import stack
from megascale.simulate.step import Scenario, engine_software, run


def predict(plan: Path, cluster: str, calibration: str | None, software: str, note: str = "") -> str:
    """Return the text of a predictions file for the runs of `plan`.

    Raises:
        ConfigError: the plan is damaged.
        FitError: a run does not fit.
    """
    machine = load_cluster(cluster)
    chosen = stack(software)
    constants = load_calibration(calibration, machine.name, chosen.family)
    try:
        planned_runs = [(str(r["name"]), int(r["gpus"]), list(map(str, r["settings"]))) for r in _tree(plan)["run"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{plan} is damaged ({type(error).__name__}: {error}); it needs [[run]] tables with name, gpus, settings"
        ) from None
    provenance = f"{date.today().isoformat()}, calibration {constants.name}{', ' + note if note else ''}"
    lines = [
        "# Step times of this project's own engine, said before they were measured. Start a run with `megascale train`",
        "# and its settings (the step time does not depend on the data), then `megascale simulate compare`.",
        f"provenance = {_toml(provenance)}",
    ]
    for name, gpus, settings in planned_runs:
        settings = settings + [f"train.name={name}"]
        config = configuration.load(None, settings)
        result = run(Scenario(config, gpus, machine, constants, engine_software(config, chosen)), "event", fleet=None)
        lines += [
            "",
            "[[run]]",
            f"name = {_toml(name)}",
            f"gpus = {gpus}",
            f"settings = {_toml(settings)}",
            f"software = {_toml(software)}",
            f"seconds = {result.seconds:.4f}",
            f"p10 = {result.low:.4f}",
            f"p90 = {result.high:.4f}",
        ]
    return "\n".join(lines) + "\n"


def _toml(value: str | list[str]) -> str:
    """A value as TOML writes it; JSON escapes differ."""
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def _tree(path: Path) -> dict[str, Any]:
    return read_toml(path, "the file")
