"""Calibrations: constants of the simulator that were fitted to measured steps, with errors, bounds and evidence.

A calibration belongs to one cluster and to the software stacks of its measured steps. It is a TOML file; some files are
in `calibrations/`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path

import tomli_w

from megascale.config.text_files import read_toml
from megascale.errors import ConfigError

# Distance of the 90th percentile of a normal distribution from its mean, in standard deviations.
Z90 = 1.2816
# A calibration with fewer rows than SMALL_SAMPLE has the spread ASSUMED_SPREAD.
SMALL_SAMPLE = 4
ASSUMED_SPREAD = 0.05


@dataclass(frozen=True)
class Constants:
    """Constants that fit the model to a machine. With the defaults, the cluster file's figures are used.

    Attributes:
        compute: factor on the time of all kernels (power limits, unfavourable shapes).
        overhead: additional factor on the time of attention and element-wise kernels.
        fixed: mean seconds by which a host is late at a step's end (batch preparation, host work, logging). The step
            waits for the last host: fixed x (ln hosts + 0.58).
        dp_efficiency: share of the nominal NIC bandwidth that data-parallel rings reach; None: the cluster's figure.
        tp_residual, pp_residual: replace the cluster's overlap residuals; None: the cluster's figures.
        slow_by: fraction by which a slow host's forward takes longer; None: the cluster's figure.
        data_share: share of `fixed` that asynchronous data preparation removes.
    """

    compute: float = 1.0
    overhead: float = 1.0
    fixed: float = 0.0
    dp_efficiency: float | None = None
    tp_residual: float | None = None
    pp_residual: float | None = None
    slow_by: float | None = None
    data_share: float = 0.5

    def with_values(self, values: dict[str, float]) -> Constants:
        """Return a copy with some constants set. Raises ConfigError for an unknown name."""
        for name in values:
            if name not in BOUNDS:
                raise ConfigError(f"constant {name!r} is unknown; known: {', '.join(BOUNDS)}")
        return replace(self, **values)


# By constant: (lower bound of a fit, upper bound, start of the fit). The bounds are physical limits.
BOUNDS: dict[str, tuple[float, float, float]] = {
    "compute": (0.5, 2.0, 1.0),
    "overhead": (0.5, 4.0, 1.0),
    "fixed": (0.0, 2.0, 0.1),
    "dp_efficiency": (0.05, 1.0, 0.6),
    "tp_residual": (0.0, 1.0, 0.4),
    "pp_residual": (0.0, 1.0, 0.1),
    "slow_by": (0.0, 0.5, 0.1),
    "data_share": (0.0, 1.0, 0.5),
}


@dataclass(frozen=True)
class Calibration:
    """Constants with the evidence for them.

    Attributes:
        constants: the constants; those that are not in `fitted` have the cluster's or the default values.
        fitted: standard errors by name of the fitted constant.
        rows: measured steps of the fit, one text per step.
        residuals: ln(predicted / measured) of the rows.
        warnings: sentences about constants that the rows do not determine.
        provenance: date and command.
        ranges: (smallest, largest) of the rows by feature (prediction_band.FEATURES).
        stacks: families of the rows' software (software.Software.family); empty: unknown.
    """

    name: str
    cluster: str
    constants: Constants = Constants()
    fitted: dict[str, float] | None = None
    rows: tuple[str, ...] = ()
    residuals: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()
    provenance: str = ""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    stacks: tuple[str, ...] = ()

    @property
    def spread(self) -> float:
        """Relative standard deviation of a prediction, from the residuals and the number of fitted constants."""
        row_count = len(self.residuals)
        constant_count = len(self.fitted or {})
        if row_count < max(SMALL_SAMPLE, constant_count + 1):
            return ASSUMED_SPREAD
        square_sum = sum(residual * residual for residual in self.residuals)
        return float((square_sum / (row_count - constant_count)) ** 0.5)

    def to_toml(self) -> str:
        """Return the text of a file that `load_calibration` reads."""
        lines = [
            "# Constants of the step simulator. Fitted values carry their standard errors; the rest are assumptions.",
            f"name = {_text(self.name)}",
            f"cluster = {_text(self.cluster)}",
            f"provenance = {_text(self.provenance)}",
            f"stacks = {_text(list(self.stacks))}",
            "",
            "[constants]",
        ]
        for f in fields(Constants):
            value = getattr(self.constants, f.name)
            if value is not None:
                lines.append(f"{f.name} = {value:.6g}")
        lines += ["", "[fitted] # constant = standard error"]
        lines += [f"{key} = {error:.3g}" for key, error in (self.fitted or {}).items()]
        lines += ["", "[ranges] # of the rows: smallest, largest"]
        lines += [f"{_text(key)} = [{low:.6g}, {high:.6g}]" for key, (low, high) in self.ranges.items()]
        lines += ["", "[evidence]", "rows = ["]
        lines += [f"    {_text(row)}," for row in self.rows]
        lines += ["]", "# ln(predicted / measured) of the rows", "residuals = ["]
        lines += [f"    {r:.5f}," for r in self.residuals]
        lines += ["]", "warnings = ["]
        lines += [f"    {_text(w)}," for w in self.warnings]
        lines += ["]", ""]
        return "\n".join(lines)


def _text(value: str | list[str]) -> str:
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def shipped_calibrations() -> list[str]:
    """Return the names of the calibrations that come with the package."""
    folder = resources.files("megascale.simulate") / "calibrations"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


@cache
def find_calibration(cluster: str, family: str) -> str | None:
    """Return the name of the shipped calibration of a cluster and a family of software, None if there is none."""
    for name in shipped_calibrations():
        calibration = load_calibration(name, cluster)
        if calibration.cluster == cluster and family in calibration.stacks:
            return name
    return None


@cache
def list_machines_and_stacks() -> tuple[frozenset[str], frozenset[str]]:
    """Return the clusters, and the families of software, whose steps some shipped calibration was fitted on."""
    calibrations = [load_calibration(name, "") for name in shipped_calibrations()]
    clusters = frozenset(calibration.cluster for calibration in calibrations)
    families = frozenset(family for calibration in calibrations for family in calibration.stacks)
    return clusters, families


def load_calibration(name: str | None, cluster: str, family: str | None = None) -> Calibration:
    """Return a shipped calibration or that of a TOML file.

    Args:
        name: name of a shipped calibration or of a file. None: the shipped one for the cluster and `family` or, without
            a family, the one with the cluster's name. If there is none, the result is uncalibrated.

    Raises ConfigError for an unknown name or a damaged file.
    """
    if name is None:
        if family is not None:
            name = find_calibration(cluster, family)
        elif cluster in shipped_calibrations():
            name = cluster
        if name is None:
            return Calibration("uncalibrated", cluster)
    path = Path(name)
    if name in shipped_calibrations():
        tree = tomllib.loads((resources.files("megascale.simulate") / "calibrations" / f"{name}.toml").read_text())
    elif path.is_file():
        tree = read_toml(path, "calibration")
    else:
        raise ConfigError(
            f"--calibration={name!r} is neither shipped ({', '.join(shipped_calibrations())}) nor a file; "
            "`megascale simulate calibrate` writes one"
        )
    try:
        evidence = tree.get("evidence", {})
        return Calibration(
            name=str(tree["name"]),
            cluster=str(tree["cluster"]),
            constants=Constants().with_values({k: float(v) for k, v in tree["constants"].items()}),
            fitted={k: float(v) for k, v in tree.get("fitted", {}).items()},
            rows=tuple(map(str, evidence.get("rows", []))),
            residuals=tuple(map(float, evidence.get("residuals", []))),
            warnings=tuple(map(str, evidence.get("warnings", []))),
            provenance=str(tree.get("provenance", "")),
            ranges={str(k): (float(a), float(b)) for k, (a, b) in tree.get("ranges", {}).items()},
            stacks=tuple(map(str, tree.get("stacks", []))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"calibration {name!r} is not one: {type(error).__name__}: {error}; it needs name, cluster and [constants]"
        ) from None
