"""Constants that measurements decide: values, bounds, where they come from, what could not be told apart.

A calibration belongs to one cluster and one family of runs. It is a TOML file; some are shipped in `calibrations/`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from megascale.errors import ConfigError


@dataclass(frozen=True)
class Constants:
    """What scales the model to a machine. The defaults are the cluster file's own figures.

    Attributes:
        compute: kernel seconds are multiplied by this (power limits, shapes that kernels do badly).
        overhead: seconds of attention and element-wise kernels are multiplied by this once more.
        fixed: seconds a step that do not depend on its size: batch preparation, host work, logging.
        dp_efficiency: share of the printed NIC bandwidth that data-parallel rings reach; None: the cluster's figure.
        tp_residual, pp_residual: replace the cluster's overlap residuals; None: the cluster's figures.
        slow_by: how much longer a slow host computes; None: the cluster's figure.
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
        """A copy with some constants set; ConfigError for a name that is none."""
        for name in values:
            if name not in BOUNDS:
                raise ConfigError(f"constant {name!r} is unknown; known: {', '.join(BOUNDS)}")
        return replace(self, **values)


# Physical limits within which a fit may move a constant, and where it starts.
BOUNDS: dict[str, tuple[float, float, float]] = {
    "compute": (0.5, 2.0, 1.0),
    "overhead": (0.5, 4.0, 1.0),
    "fixed": (0.0, 5.0, 0.2),
    "dp_efficiency": (0.05, 1.0, 0.6),
    "tp_residual": (0.0, 1.0, 0.4),
    "pp_residual": (0.0, 1.0, 0.1),
    "slow_by": (0.0, 0.5, 0.1),
    "data_share": (0.0, 1.0, 0.5),
}
