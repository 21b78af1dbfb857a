"""How wide a prediction's P10-P90 band is: the calibration's own residuals, wider for every step outside what it saw.

Each width below is a quantile of errors on development rows, by group of conditions (`validation/band_evidence.py`
computes them, a test holds the two together). A quantile speaks for rows that could be exchanged for those it came
from: of the same series where rows of it are known, else of another series than the constants were fitted on.
`validate` prints how many held-out steps lie inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.simulate.calibration import Z90, Calibration
from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec

# Nothing fitted: P10 and P90 of ln(predicted / measured) over all development rows, of three machines and four software
# stacks. Steps take longer than physics alone says.
UNCALIBRATED = (-0.102, 0.021)
# Relative standard deviations. With constants of another cluster: assumed.
FOREIGN = 0.09
# Least spread of a calibrated prediction: rows of one series agree better with a fit than the next series will. Four of
# five steps of another series (another software stack, another technique) on the same machine lie within 1.28 of it.
LEAST = 0.025
# For each doubling of GPUs beyond the fitted ones: how errors of one series drift with the number of GPUs under
# constants of another. Four series, none beyond 1,024 GPUs.
EACH_GPU_DOUBLING = 0.018
# For each doubling of size, micro-batches or sequence, and each other kind of layout, outside the fitted rows: assumed.
EACH_DOUBLING, EACH_KIND = 0.01, 0.01

# A GPU whose sustained GEMM rate under its power limit nobody measured: ln of measured over predicted, P90 of steps on
# H100s priced without that rate.
NO_POWER = 0.19

# Share of steps that a band is to hold.
COVERED = 0.8

# What of a case a calibration remembers the range of; the first four count by doublings.
FEATURES = ("GPUs", "layer weights", "micro-batches", "sequence", "tensor", "pipeline", "micro-batch")


@dataclass(frozen=True)
class BandWidth:
    """Where P10 and P90 of predictions lie and why.

    Attributes:
        below, above: ln of prediction over P10, and of P90 over the prediction; numbers or arrays.
        reasons: sentences for the user; of a scalar case only.
    """

    below: Any
    above: Any
    reasons: tuple[str, ...]

    @property
    def spread(self) -> Any:
        """Relative standard deviation of a normal distribution with a band as wide."""
        return (self.below + self.above) / (2.0 * Z90)

    def around(self, seconds: Any) -> tuple[Any, Any]:
        """P10 and P90."""
        return seconds * np.exp(-self.below), seconds * np.exp(self.above)


def ends(signed: np.ndarray) -> tuple[float, float]:
    """P10 and P90 of errors like these, outwards to the next rank."""
    ordered, n = np.sort(signed), len(signed)
    tail = (1.0 - COVERED) / 2.0
    low, high = int(np.floor(tail * (n + 1))), int(np.ceil((1.0 - tail) * (n + 1)))
    return float(ordered[max(low, 1) - 1]), float(ordered[min(high, n) - 1])


def features(case: Case) -> dict[str, Any]:
    """The figures by which a case lies inside or outside of what was fitted."""
    return {
        "GPUs": case.gpus,
        "layer weights": case.layer_parameters,
        "micro-batches": case.microbatches,
        "sequence": case.sequence,
        "tensor": case.tensor,
        "pipeline": case.pipeline,
        "micro-batch": case.micro,
    }


def ranges_of(case: Case) -> dict[str, tuple[float, float]]:
    """Smallest and largest of each feature over the rows of a case."""
    return {name: (float(np.min(v)), float(np.max(v))) for name, v in features(case).items()}


def band_width(cluster: ClusterSpec, case: Case, calibration: Calibration) -> BandWidth:
    """Width of the band around predictions of `case` (scalar or arrays) with `calibration` on `cluster`."""
    reasons = []
    foreign = calibration.cluster != cluster.name
    below: Any
    above: Any
    if foreign:
        below = above = Z90 * FOREIGN
        reasons.append(f"calibration {calibration.name} is of cluster {calibration.cluster}, not {cluster.name}")
    elif not calibration.residuals:
        # Measured steps that were shorter than predicted make the lower end, longer ones the upper.
        below, above = UNCALIBRATED[1], -UNCALIBRATED[0]
    elif not calibration.fitted:
        # Rows that nothing was fitted to say themselves where others of their kind lie.
        low, high = ends(np.asarray(calibration.residuals))
        below, above = high, -low
    else:
        below = above = Z90 * max(LEAST, calibration.spread)
    variance: Any = 0.0
    for name, value in features(case).items():
        if name not in calibration.ranges:
            continue
        low, high = calibration.ranges[name]
        value = np.asarray(value, dtype=float)
        doublings = np.log2(np.maximum(1.0, np.maximum(value / high, low / value)))
        each: Any
        if name == "GPUs":
            each = EACH_GPU_DOUBLING * doublings
        else:
            each = EACH_DOUBLING * doublings if name in FEATURES[:4] else EACH_KIND * (doublings > 0)
        variance = np.add(variance, np.square(each))
        if value.ndim == 0 and doublings > 0.01:
            shown = [f"{x:,.0f}" if abs(x) < 1e7 else f"{x:.3g}" for x in (float(value), low, high)]
            reasons.append(f"{name} {shown[0]} lies outside what was fitted ({shown[1]} to {shown[2]})")
    outside: Any = Z90 * np.sqrt(variance)
    held = 0.0
    if cluster.power is None:
        held = NO_POWER
        reasons.append(
            f"cluster {cluster.name} has no [power]: the rate that GEMMs of {cluster.gpu.name} sustain under its power "
            "limit is unknown, and steps may take a sixth longer; `megascale simulate measure` writes it"
        )
    return BandWidth(np.hypot(below, outside), np.hypot(above, outside) + held, tuple(reasons))


def cautions(cluster: ClusterSpec, case: Case, calibration: Calibration) -> tuple[str, ...]:
    """What a reader of a prediction should know: extrapolation, foreign constants, figures that nobody measured."""
    said = list(band_width(cluster, case, calibration).reasons)
    if case.gpus > cluster.gpus_per_host:
        guessed = [k for k in ("gbs", "bus", "p2p_gbs") if cluster.sources[f"between.{k}"].startswith("assumed")]
        if guessed:
            keys = ", ".join(f"between.{k}" for k in guessed)
            said.append(f"figures between hosts of {cluster.name} are assumed, not measured: {keys}")
    return tuple(said)
