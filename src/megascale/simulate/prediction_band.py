"""Width of a prediction's P10-P90 band, by the evidence for its stack and its machine.

A calibration's own residuals say how steps of its series scatter. A band is wider for each of: another series, another
stack or another machine than the calibration's, no calibration at all, a stack or a machine of which no step was ever
compared with the model, sizes outside the fitted ranges. Each width below is a quantile of errors on development rows,
by group of conditions (`benchmarks/simulate/band_evidence.py` computes them, a test holds the two together). `validate`
prints how many held-out steps lie inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.simulate.calibration import Z90, Calibration, list_machines_and_stacks
from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec

# Least relative standard deviation of a calibrated prediction: steps of another series of the same machine and stack.
LEAST = 0.0302
# The same with constants of another stack on the same machine, of another machine under the same stack, of both.
UNFITTED_STACK = 0.0338
UNFITTED_MACHINE = 0.0351
UNFITTED_STACK_AND_MACHINE = 0.0374
# Nothing fitted: P10 and P90 of ln(predicted / measured), of the group of development rows (one machine, one stack)
# that is predicted worst to either side. Steps take longer than physics alone says. NOTHING_FITTED is for known
# machines and stacks; UNSEEN, with full sharding's and vTrain's groups, for those of which no step was ever compared.
NOTHING_FITTED = (-0.0956, 0.0252)
UNSEEN = (-0.2212, 0.0377)
# The same of machines and stacks that have development rows and no calibration: (cluster, family of software).
MEASURED_PAIRS = {("a100-hdr", "megatron-deepspeed"): (-0.2212, 0.0377)}
# For each doubling of GPUs beyond the fitted ones: how errors of one series drift with the number of GPUs under
# constants of another.
EACH_GPU_DOUBLING = 0.0177
# For each doubling of size, micro-batches or sequence, and each other kind of layout, outside the fitted rows: assumed.
EACH_DOUBLING, EACH_KIND = 0.01, 0.01
# A GPU without a measured sustained GEMM rate under its power limit: ln of measured over predicted, P90 of steps on
# H100s priced without that rate.
NO_POWER = 0.19
# Relative standard deviation of the time in which hosts launch the same layer (6.8, 7.3 and 8.9 ms, software.py), and
# the share of a step spent waiting for launches from which on it counts.
HOST_SPREAD, LAUNCH_BOUND = 0.14, 0.02

# Share of steps that a band is to hold.
COVERED = 0.8

# A calibration stores the range of each of these features; the first four count by doublings.
FEATURES = ("GPUs", "layer weights", "micro-batches", "sequence", "tensor", "pipeline", "micro-batch")


@dataclass(frozen=True)
class BandWidth:
    """The P10 and P90 of a prediction, with the reasons.

    Attributes:
        below, above: ln of prediction over P10, and of P90 over the prediction; numbers or arrays.
        reasons: sentences for the user; of a scalar case only.
    """

    below: Any
    above: Any
    reasons: tuple[str, ...]

    @property
    def spread(self) -> Any:
        """Relative standard deviation of a normal distribution with a band of this width."""
        return (self.below + self.above) / (2.0 * Z90)

    def around(self, seconds: Any) -> tuple[Any, Any]:
        """Return P10 and P90 around a prediction."""
        return seconds * np.exp(-self.below), seconds * np.exp(self.above)


def ends(signed: np.ndarray) -> tuple[float, float]:
    """Return the P10 and P90 of errors, rounded outwards to the next order statistic."""
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


def band_width(
    cluster: ClusterSpec, case: Case, calibration: Calibration, family: str | None = None, launches: Any = 0.0
) -> BandWidth:
    """Return the width of the band around predictions of `case` (scalar or arrays) with `calibration` on `cluster`.

    Args:
        family: of the software that is priced; None: that of the calibration.
        launches: share of the step in which the GPU waits for launches.
    """
    below, above, reasons = _base_width(cluster, calibration, family)
    variance: Any = 0.0
    for name, value in features(case).items():
        if name not in calibration.ranges:
            continue
        low, high = calibration.ranges[name]
        value = np.asarray(value, dtype=float)
        doublings = np.log2(np.maximum(1.0, np.maximum(value / high, low / value)))
        doubling: Any
        if name == "GPUs":
            doubling = EACH_GPU_DOUBLING * doublings
        else:
            if name in FEATURES[:4]:
                doubling = EACH_DOUBLING * doublings
            else:
                doubling = EACH_KIND * (doublings > 0)
        variance = np.add(variance, np.square(doubling))
        if value.ndim == 0 and doublings > 0.01:
            shown = [f"{x:,.0f}" if abs(x) < 1e7 else f"{x:.3g}" for x in (float(value), low, high)]
            reasons.append(f"{name} {shown[0]} lies outside what was fitted ({shown[1]} to {shown[2]})")
    bound = np.asarray(launches) > LAUNCH_BOUND
    variance = np.add(variance, np.where(bound, HOST_SPREAD**2, 0.0))
    if bound.ndim == 0 and bound:
        reasons.append("kernel launches bound this step, and hosts launch the same layer in times that differ by 14%")
    outside: Any = Z90 * np.sqrt(variance)
    sustained = 0.0
    if cluster.power is None:
        sustained = NO_POWER
        reasons.append(
            f"cluster {cluster.name} has no [power]: the rate that GEMMs of {cluster.gpu.name} sustain under its power "
            "limit is unknown, and steps may take a sixth longer; `megascale simulate measure` writes it"
        )
    return BandWidth(np.hypot(below, outside), np.hypot(above, outside) + sustained, tuple(reasons))


def _base_width(cluster: ClusterSpec, calibration: Calibration, family: str | None) -> tuple[float, float, list[str]]:
    """Return the ends of the band inside the fitted ranges, and why they are wider than the calibration's own."""
    if calibration.residuals and not calibration.fitted:
        # Rows that nothing was fitted to say themselves where others of their kind lie.
        low, high = ends(np.asarray(calibration.residuals))
        return high, -low, []
    if calibration.residuals:
        return _fitted_width(cluster, calibration, family)
    machines, stacks = list_machines_and_stacks()
    pair = MEASURED_PAIRS.get((cluster.name, family or ""))
    unseen = []
    if pair is None and cluster.name not in machines:
        unseen.append(f"machine {cluster.name}")
    if pair is None and family is not None and family not in stacks:
        unseen.append(f"stack {family}")
    low, high = pair or (UNSEEN if unseen else NOTHING_FITTED)
    reasons = []
    if unseen:
        reasons.append(f"no step of {' or of '.join(unseen)} was ever compared with the model: the band is a guess")
    # Measured steps that were shorter than predicted make the lower end, longer ones the upper.
    return high, -low, reasons


def _fitted_width(cluster: ClusterSpec, calibration: Calibration, family: str | None) -> tuple[float, float, list[str]]:
    """Return the ends of the band of fitted constants, wider where they are of another machine or stack."""
    is_unfitted_machine = calibration.cluster != cluster.name
    is_unfitted_stack = family is not None and bool(calibration.stacks) and family not in calibration.stacks
    spread, reasons = LEAST, []
    if is_unfitted_machine and is_unfitted_stack:
        spread = UNFITTED_STACK_AND_MACHINE
    elif is_unfitted_machine:
        spread = UNFITTED_MACHINE
    elif is_unfitted_stack:
        spread = UNFITTED_STACK
    if is_unfitted_machine:
        reasons.append(f"calibration {calibration.name} is of cluster {calibration.cluster}, not {cluster.name}")
    if is_unfitted_stack:
        reasons.append(f"calibration {calibration.name} is of stack {', '.join(calibration.stacks)}, not {family}")
    machines, stacks = list_machines_and_stacks()
    unseen = []
    if is_unfitted_machine and cluster.name not in machines:
        unseen.append(f"machine {cluster.name}")
    if is_unfitted_stack and family not in stacks:
        unseen.append(f"stack {family}")
    width = Z90 * max(spread, calibration.spread)
    if not unseen:
        return width, width, reasons
    reasons.append(f"no step of {' or of '.join(unseen)} was ever compared with the model: the band is a guess")
    return max(width, UNSEEN[1]), max(width, -UNSEEN[0]), reasons


def cautions(
    cluster: ClusterSpec, case: Case, calibration: Calibration, family: str | None = None, launches: float = 0.0
) -> tuple[str, ...]:
    """Return notes for the reader: extrapolation, constants of another machine, figures without a measurement."""
    reasons = list(band_width(cluster, case, calibration, family, launches).reasons)
    if not calibration.residuals:
        reasons.append(
            f"{cluster.name} is not calibrated for {family or 'this stack'}: nothing is fitted to its steps "
            "(`megascale simulate calibrate`)"
        )
    if case.gpus > cluster.gpus_per_host:
        guessed = [k for k in ("gbs", "bus", "p2p_gbs") if cluster.sources[f"between.{k}"].startswith("assumed")]
        if guessed:
            keys = ", ".join(f"between.{k}" for k in guessed)
            reasons.append(f"figures between hosts of {cluster.name} are assumed, not measured: {keys}")
    return tuple(reasons)
