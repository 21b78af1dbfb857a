"""Constants fitted to measurements: values, bounds, sources, and which of them could not be separated.

A calibration belongs to one cluster and one family of runs. It is a TOML file; some are shipped in `calibrations/`.
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

# z of the 10th and 90th percentile of a normal distribution.
Z90 = 1.2816
# A calibration of fewer rows than this says nothing about its own spread: this share is assumed instead.
SMALL_SAMPLE, ASSUMED_SPREAD = 4, 0.05


@dataclass(frozen=True)
class Constants:
    """Scale factors that fit the model to a machine. The defaults are the cluster file's own figures.

    Attributes:
        compute: kernel seconds are multiplied by this (power limits, shapes that kernels do badly).
        overhead: seconds of attention and element-wise kernels are multiplied by this once more.
        fixed: mean seconds by which one host is late at a step's end (batch preparation, host work, logging); the
            step waits for the last of all hosts, which is fixed x (ln hosts + 0.58).
        dp_efficiency: share of the printed NIC bandwidth that data-parallel rings reach; None: the cluster's figure.
        tp_residual, pp_residual: replace the cluster's overlap residuals; None: the cluster's figures.
        slow_by: how much longer a slow host takes for its forward passes; None: the cluster's figure.
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


# Physical limits within which a fit may move a constant, and where it starts.
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
    """Constants with their history.

    Attributes:
        name, cluster: what it is called, which cluster it belongs to.
        constants: the values in force; those not in `fitted` are the cluster's or the defaults.
        fitted: fitted constant -> standard error.
        rows: what it was fitted on, one text a row.
        residuals: ln(predicted / measured) of those rows.
        warnings: what the rows could not decide.
        made: date and command.
        ranges: feature of the rows (prediction_band.FEATURES) -> smallest and largest.
        stacks: families of software (software.Software.family) that the rows are of; empty: not recorded.
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
        """Relative standard deviation of a prediction, from the residuals and the constants spent on them."""
        n, k = len(self.residuals), len(self.fitted or {})
        if n < max(SMALL_SAMPLE, k + 1):
            return ASSUMED_SPREAD
        return float((sum(r * r for r in self.residuals) / (n - k)) ** 0.5)

    def to_toml(self) -> str:
        """The file that `load_calibration` reads."""
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
    """Names of the calibrations that come with the package."""
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

    Without a name it is the shipped one of the cluster and the family of software; without a family, that of the
    cluster's name. Where there is none, the cluster's own figures. ConfigError naming key and value if the file is
    wrong.
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
