"""Width of a prediction's P10-P90 band, from the evidence for its stack and its machine.

The residuals of a calibration show the scatter of its steps. The band is wider for another series, stack or machine
than those of the calibration, without a calibration, for a stack or machine without any measured step, and for sizes
outside the fitted ranges. The widths below are quantiles of errors on development rows (measured steps that are not
held out), by group of conditions. `benchmarks/simulate/band_evidence.py` computes them, and a test compares the values.
`validate` prints how many held-out steps are inside their bands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.simulate.calibration import Z90, Calibration, list_machines_and_stacks
from megascale.simulate.case import Case
from megascale.simulate.cluster import ClusterSpec

# Minimum relative standard deviation of a calibrated prediction: that of another series on the same machine and stack.
MIN_SPREAD = 0.0302
# The same with constants of another stack on the same machine, of another machine with the same stack, and of both.
UNFITTED_STACK = 0.0338
UNFITTED_MACHINE = 0.0351
UNFITTED_STACK_AND_MACHINE = 0.0374
# Without fitted constants: P10 and P90 of ln(predicted / measured) of the worst group of development rows (one machine,
# one stack) to either side. Steps take longer than predicted. NOTHING_FITTED is for known machines and stacks. UNSEEN
# is for those without any measured step, and includes the groups of full sharding and of vTrain.
NOTHING_FITTED = (-0.0956, 0.0252)
UNSEEN = (-0.2212, 0.0377)
# The same for each (cluster, family of software) that has development rows but no calibration.
MEASURED_PAIRS = {("a100-hdr", "megatron-deepspeed"): (-0.2212, 0.0377)}
# Additional spread per doubling of GPUs outside the fitted range: the drift of a series' errors with the number of
# GPUs, under constants of another series.
EACH_GPU_DOUBLING = 0.0177
# Assumed: the same per doubling of size, micro-batches or sequence, and for each other feature outside the range.
EACH_DOUBLING = 0.01
EACH_KIND = 0.01
# For a GPU without a measured sustained GEMM rate under its power limit: P90 of ln(measured / predicted) of steps on
# H100s that were predicted without this rate.
NO_POWER = 0.19
# Relative standard deviation over hosts of the time to launch the same layer (6.8, 7.3 and 8.9 ms, software.py). It
# counts if a larger share of the step than LAUNCH_BOUND is a wait for launches.
HOST_SPREAD = 0.14
LAUNCH_BOUND = 0.02

# The fastest NICs of 2026 have 800 Gbit/s. A larger figure is likely in Gbit/s.
FASTEST_NIC_GBS = 100.0

# Share of steps between P10 and P90.
COVERED = 0.8

# A calibration stores the range of each of these features. The first four count per doubling.
FEATURES = ("GPUs", "layer weights", "micro-batches", "sequence", "tensor", "pipeline", "micro-batch")


@dataclass(frozen=True)
class BandWidth:
    """The P10 and P90 of a prediction, with the reasons.

    Attributes:
        below, above: ln(prediction / P10) and ln(P90 / prediction); numbers or arrays.
        reasons: sentences that explain the width, for a scalar case only.
    """

    below: Any
    above: Any
    reasons: tuple[str, ...]

    @property
    def spread(self) -> Any:
        """Relative standard deviation of the normal distribution with this band."""
        return (self.below + self.above) / (2.0 * Z90)

    def around(self, seconds: Any) -> tuple[Any, Any]:
        """Return (P10, P90) of a prediction of `seconds`."""
        return seconds * np.exp(-self.below), seconds * np.exp(self.above)


def compute_band_ends(errors: np.ndarray) -> tuple[float, float]:
    """Return (P10, P90) of errors, each rounded outwards to an order statistic."""
    ordered = np.sort(errors)
    count = len(ordered)
    tail = (1.0 - COVERED) / 2.0
    low = int(np.floor(tail * (count + 1)))
    high = int(np.ceil((1.0 - tail) * (count + 1)))
    return float(ordered[max(low, 1) - 1]), float(ordered[min(high, count) - 1])


def list_features(case: Case) -> dict[str, Any]:
    """Return the values of a case for FEATURES, which are compared with the fitted ranges."""
    return {
        "GPUs": case.gpus,
        "layer weights": case.layer_parameters,
        "micro-batches": case.microbatches,
        "sequence": case.sequence,
        "tensor": case.tensor,
        "pipeline": case.pipeline,
        "micro-batch": case.micro,
    }


def list_feature_ranges(case: Case) -> dict[str, tuple[float, float]]:
    """Return (smallest, largest) of each feature over the rows of a case."""
    return {name: (float(np.min(v)), float(np.max(v))) for name, v in list_features(case).items()}


def estimate_band_width(
    cluster: ClusterSpec, case: Case, calibration: Calibration, family: str | None = None, launch_share: Any = 0.0
) -> BandWidth:
    """Return the width of the band around predictions of `case` (scalar or arrays) with `calibration` on `cluster`.

    Args:
        family: family of the predicted software; None: that of the calibration.
        launch_share: share of the step in which the GPU waits for kernel launches.
    """
    below, above, reasons = _base_width(cluster, calibration, family)
    variance: Any = 0.0
    for name, value in list_features(case).items():
        if name not in calibration.ranges:
            continue
        low, high = calibration.ranges[name]
        value = np.asarray(value, dtype=float)
        doublings = np.log2(np.maximum(1.0, np.maximum(value / high, low / value)))
        spread: Any
        if name == "GPUs":
            spread = EACH_GPU_DOUBLING * doublings
        elif name in FEATURES[:4]:
            spread = EACH_DOUBLING * doublings
        else:
            spread = EACH_KIND * (doublings > 0)
        variance = np.add(variance, np.square(spread))
        if value.ndim == 0 and doublings > 0.01:
            shown = [f"{x:,.0f}" if abs(x) < 1e7 else f"{x:.3g}" for x in (float(value), low, high)]
            reasons.append(f"{name} {shown[0]} lies outside what was fitted ({shown[1]} to {shown[2]})")
    is_launch_bound = np.asarray(launch_share) > LAUNCH_BOUND
    variance = np.add(variance, np.where(is_launch_bound, HOST_SPREAD**2, 0.0))
    if is_launch_bound.ndim == 0 and is_launch_bound:
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
    """Return (below, above, reasons) as in `BandWidth`, for a case inside the fitted ranges."""
    if calibration.residuals and not calibration.fitted:
        # The residuals of rows without a fit are the errors themselves.
        low, high = compute_band_ends(np.asarray(calibration.residuals))
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
    # P90 of ln(predicted / measured) comes from steps that were shorter than predicted: it is the lower end.
    return high, -low, reasons


def _fitted_width(cluster: ClusterSpec, calibration: Calibration, family: str | None) -> tuple[float, float, list[str]]:
    """Return (below, above, reasons) for fitted constants, which may be those of another machine or stack."""
    is_unfitted_machine = calibration.cluster != cluster.name
    is_unfitted_stack = family is not None and bool(calibration.stacks) and family not in calibration.stacks
    spread = MIN_SPREAD
    reasons = []
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


def list_cautions(
    cluster: ClusterSpec, case: Case, calibration: Calibration, family: str | None = None, launch_share: float = 0.0
) -> tuple[str, ...]:
    """Return sentences about extrapolation, constants of another machine, and figures without a measurement."""
    reasons = list(estimate_band_width(cluster, case, calibration, family, launch_share).reasons)
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
        nominal_gbs = cluster.between.gbs
        if nominal_gbs > FASTEST_NIC_GBS:
            reasons.append(
                f"between.gbs={nominal_gbs:g} GB/s are {8 * nominal_gbs:,.0f} Gbit/s per GPU and direction, more than "
                "any NIC has; a NIC of 400 Gbit/s has between.gbs=50"
            )
    return tuple(reasons)
