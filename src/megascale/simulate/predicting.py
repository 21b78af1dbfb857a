"""Files of predictions, which are written before the runs are measured."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import tomli_w

from megascale import config as configuration
from megascale.config.text_files import read_toml
from megascale.errors import ConfigError
from megascale.simulate.calibration import load_calibration
from megascale.simulate.cluster import load_cluster
from megascale.simulate.scenario import Scenario, make_engine_software, match_hosts
from megascale.simulate.software import find_stack
from megascale.simulate.step import estimate_step


def predict(plan: Path, cluster: str, calibration: str | None, software: str, note: str = "") -> str:
    """Return the text of a predictions file for the runs of `plan`.

    Args:
        plan: TOML file with [[run]] tables, which have name, gpus and settings.
        note: text that is added to the provenance.

    Raises:
        ConfigError: the plan is damaged.
        FitError: a run does not fit.
    """
    machine = load_cluster(cluster)
    base = find_stack(software)
    constants = load_calibration(calibration, machine.name, base.family)
    try:
        planned_runs = []
        for row in read_toml(plan, "the file")["run"]:
            planned_runs.append((str(row["name"]), int(row["gpus"]), [str(setting) for setting in row["settings"]]))
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
        config = configuration.resolve_precision(configuration.load(None, settings), has_bfloat16=True)
        config, hosts = match_hosts(config, machine)
        result = estimate_step(
            Scenario(config, gpus, hosts, constants, make_engine_software(config, base)), "event", fleet=None
        )
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
    """Return a value in TOML syntax, whose escapes differ from those of JSON."""
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")
