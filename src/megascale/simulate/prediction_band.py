"""How wide a prediction's P10-P90 band is: the calibration's own residuals, wider for every step outside what it saw.

The shares below were set on development rows alone (docs/planning.md says with which outcome). `validate` prints how
many measured steps lie inside, on both sides of the split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.simulate.calibration import Z90, Calibration
from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec

# Relative standard deviations. What no calibration says of a machine or a software stack: an uncalibrated prediction,
# or one with constants of another cluster.
UNCALIBRATED, FOREIGN = 0.06, 0.09
# Least spread of a calibrated one: rows of one series agree better with a fit than the next series will. Development
# rows of megatron-core under the constants of the own engine lie 3.7% off on average, and the reverse 3.5%.
LEAST = 0.045
# For each doubling of GPUs, size, micro-batches or sequence, and each other kind of layout, outside the fitted rows.
EACH_DOUBLING, EACH_KIND = 0.01, 0.01

# What of a case a calibration remembers the range of; the first four count by doublings.
FEATURES = ("GPUs", "layer weights", "micro-batches", "sequence", "tensor", "pipeline", "micro-batch")


@dataclass(frozen=True)
class BandWidth:
    """Relative standard deviation of predictions and why it is what it is.

    Attributes:
        spread: number or array.
        reasons: sentences for the user; of a scalar case only.
    """

    spread: Any
    reasons: tuple[str, ...]

    def around(self, seconds: Any) -> tuple[Any, Any]:
        """P10 and P90."""
        wide = Z90 * self.spread
        return seconds / (1.0 + wide), seconds * (1.0 + wide)


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
    if foreign:
        base = FOREIGN
        reasons.append(f"calibration {calibration.name} is of cluster {calibration.cluster}, not {cluster.name}")
    elif not calibration.residuals:
        base = UNCALIBRATED
    else:
        base = max(LEAST, calibration.spread)
    variance = np.asarray(base**2, dtype=float)
    for name, value in features(case).items():
        if name not in calibration.ranges:
            continue
        low, high = calibration.ranges[name]
        value = np.asarray(value, dtype=float)
        doublings = np.log2(np.maximum(1.0, np.maximum(value / high, low / value)))
        each = EACH_DOUBLING * doublings if name in FEATURES[:4] else EACH_KIND * (doublings > 0)
        variance = variance + np.square(each)
        if value.ndim == 0 and doublings > 0.01:
            shown = [f"{x:,.0f}" if abs(x) < 1e7 else f"{x:.3g}" for x in (float(value), low, high)]
            reasons.append(f"{name} {shown[0]} lies outside what was fitted ({shown[1]} to {shown[2]})")
    return BandWidth(np.sqrt(variance), tuple(reasons))


def cautions(cluster: ClusterSpec, case: Case, calibration: Calibration) -> tuple[str, ...]:
    """What a reader of a prediction should know: extrapolation, foreign constants, figures that nobody measured."""
    said = list(band_width(cluster, case, calibration).reasons)
    if case.gpus > cluster.gpus_per_host:
        guessed = [k for k in ("gbs", "bus", "p2p_gbs") if cluster.sources[f"between.{k}"].startswith("assumed")]
        if guessed:
            keys = ", ".join(f"between.{k}" for k in guessed)
            said.append(f"figures between hosts of {cluster.name} are assumed, not measured: {keys}")
    return tuple(said)
