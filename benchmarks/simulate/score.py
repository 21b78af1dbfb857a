"""Scores on measured steps: nothing fitted, fitted on development rows, a control without physics; A1 to A6, A10."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.simulate.published_rows import (
    LARGE,
    PAPER_PEAK,
    VTRAIN_FILE,
    Rows,
    ablation,
    anchor_file,
    strong_scaling,
    vtrain,
    vtrain_development,
    weak_scaling,
)
from benchmarks.simulate.split import SETS
from megascale.simulate.calibration import Calibration, Constants, load_calibration
from megascale.simulate.case import Case
from megascale.simulate.closed import compute_step_parts
from megascale.simulate.cluster import ClusterSpec, load_cluster
from megascale.simulate.event import simulate_step
from megascale.simulate.fitting import Fit, fit_constants
from megascale.simulate.prediction_band import estimate_band_width, list_feature_ranges

# Constants fitted, the fewest that the development rows identify; other choices are printed next to them.
TABLE_CONSTANTS = ("fixed",)
VTRAIN_CONSTANTS = ("compute",)
NOTHING = "nothing fitted"
FITTED = "fitted"
CONTROL = "control"


@dataclass(frozen=True)
class ScoreColumn:
    """The score of one way to predict a set of rows.

    Attributes:
        name: NOTHING, FITTED or CONTROL, and what of.
        rows: how many were scored.
        mean, worst, bias: of the relative errors, percent (absolute; signed for the bias).
        covered, width: share of rows inside P10 to P90, and its mean width relative to the prediction; None for a
            control, which has no band.
    """

    name: str
    rows: int
    mean: float
    worst: float
    bias: float
    covered: float | None = None
    width: float | None = None


@dataclass(frozen=True)
class AnchorCheck:
    """A row of the validation table.

    Attributes:
        key, title: A1 to A13, and what it tests.
        figures: name -> (reached, target, unit); reached may be NaN where it could not be measured.
        fitted: constants fitted and on how many rows, "nothing" if none.
        notes: honesty: what was not identifiable, what was seen when, anomalies.
        rows: (name, measured, predicted, fitted?) for the detailed listing.
        bars: (name, printed, predicted) MFU in percent, where the anchor prints MFU.
        skipped: why nothing was scored, "" if it was.
        columns: the ways to predict, side by side.
    """

    key: str
    title: str
    figures: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    fitted: str = "nothing"
    notes: tuple[str, ...] = ()
    rows: tuple[tuple[str, float, float, bool], ...] = ()
    bars: tuple[tuple[str, float, float], ...] = ()
    skipped: str = ""
    columns: tuple[ScoreColumn, ...] = ()

    @property
    def passed(self) -> bool | None:
        """Return whether every figure meets its target, or None if the check was skipped."""
        if self.skipped:
            return None
        return all(reached <= target for reached, target, _ in self.figures.values())


def predict(cluster: ClusterSpec, rows: Rows, constants: Constants = Constants()) -> np.ndarray:
    """Seconds of each row, closed form."""
    return np.asarray(compute_step_parts(cluster, rows.cases, constants).total, dtype=float)


def fit_rows(cluster: ClusterSpec, rows: Rows, names: Sequence[str], chosen: np.ndarray) -> Fit:
    """Constants fitted on the chosen rows."""
    part = rows.subset(chosen)
    return fit_constants(names, lambda constants: predict(cluster, part, constants), part.seconds)


def calibration_of(cluster: ClusterSpec, rows: Rows, names: Sequence[str], chosen: np.ndarray) -> Calibration:
    """The fit as a calibration, with its residuals and ranges."""
    result, part = fit_rows(cluster, rows, names, chosen), rows.subset(chosen)
    return Calibration(
        "fitted here",
        cluster.name,
        result.constants,
        result.errors,
        part.names,
        tuple(result.residuals.tolist()),
        result.warnings,
        ranges=list_feature_ranges(part.cases),
    )


def percent(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Relative errors in percent."""
    return 100.0 * (predicted / measured - 1.0)


def column(
    name: str, cluster: ClusterSpec, rows: Rows, calibration: Calibration | None = None, family: str | None = None
) -> ScoreColumn:
    """Rows predicted with a calibration (None: nothing fitted), with its band for software of a family."""
    calibration = calibration or Calibration("none", cluster.name)
    parts = compute_step_parts(cluster, rows.cases, calibration.constants)
    seconds = np.asarray(parts.total, dtype=float)
    launches = np.asarray(parts.host / parts.total)
    low, high = estimate_band_width(cluster, rows.cases, calibration, family, launches).around(seconds)
    inside = (low <= rows.seconds) & (rows.seconds <= high)
    return scored(name, percent(seconds, rows.seconds), float(inside.mean()), float(((high - low) / seconds).mean()))


def scored(name: str, errors: np.ndarray, covered: float | None = None, width: float | None = None) -> ScoreColumn:
    """Errors in percent as a column."""
    size = np.abs(errors)
    return ScoreColumn(name, len(errors), float(size.mean()), float(size.max()), float(errors.mean()), covered, width)


def affine_control(rows: Rows, chosen: np.ndarray) -> np.ndarray:
    """A control without physics: per system one slope a micro-batch and one intercept.

    Four numbers, fitted on the chosen rows by least squares on relative error; predictions for all rows.
    """
    m = np.asarray(rows.cases.microbatches, dtype=float)
    out = np.zeros(len(rows))
    for system in (True, False):
        is_system = rows.first == system
        design = np.stack([m, np.ones(len(m))], axis=1)
        used = is_system & chosen
        weight = 1.0 / rows.seconds[used]
        slope = np.linalg.lstsq(design[used] * weight[:, None], np.ones(int(used.sum())), rcond=None)[0]
        out[is_system] = design[is_system] @ slope
    return out


def efficiency_control(rows: Rows, learnt: Rows) -> np.ndarray:
    """A control without physics: one efficiency a system, the mean of the learnt rows', and the textbook bubble."""

    def bare(which: Rows) -> np.ndarray:
        case = which.cases
        bubble = 1.0 + (case.pipeline - 1) / (case.virtual * case.microbatches)
        return np.asarray(case.flops / (which.gpus * PAPER_PEAK) * bubble, dtype=float)

    out = np.zeros(len(rows))
    for system in (True, False):
        is_system, is_learnt_system = rows.first == system, learnt.first == system
        if is_system.any():
            if is_learnt_system.any():
                is_learnt_system = is_learnt_system
            else:
                is_learnt_system = np.ones(len(learnt), dtype=bool)
            ratio = np.exp(np.mean(np.log(learnt.seconds[is_learnt_system] / bare(learnt)[is_learnt_system])))
            out[is_system] = bare(rows)[is_system] * ratio
    return out


def level_difference(cluster: ClusterSpec, rows: Rows, constants: Constants) -> float:
    """Largest difference between the levels in percent, slow hosts and jitter off."""
    calm = cluster.stragglers.model_copy(update={"slow_hosts": 0.0, "jitter": 0.0})
    quiet = cluster.model_copy(update={"stragglers": calm})
    closed = predict(quiet, rows, constants)
    event = [
        simulate_step(quiet, Case(**{k: v[i].item() for k, v in vars(rows.cases).items()}), constants).seconds
        for i in range(len(rows))
    ]
    return float(np.abs(percent(np.array(event), closed)).max())


def _fit_alternative(
    cluster: ClusterSpec, rows: Rows, names: Sequence[str], chosen: np.ndarray, held_out: np.ndarray
) -> str:
    """Return the score of a fit of other constants on the same rows."""
    result = fit_rows(cluster, rows, names, chosen)
    errors = np.abs(percent(predict(cluster, rows, result.constants), rows.seconds))[held_out]
    return f"with {', '.join(names)} instead: mean {errors.mean():.2f}%, worst {errors.max():.1f}%"


def listing(rows: Rows, predicted: np.ndarray, chosen: np.ndarray) -> tuple[tuple[str, float, float, bool], ...]:
    """Rows for the detailed listing."""
    return tuple(
        (name, float(s), float(p), bool(c))
        for name, s, p, c in zip(rows.names, rows.seconds, predicted, chosen, strict=True)
    )


def constants_of(calibration: Calibration) -> str:
    """Fitted constants with their errors, and on how many rows."""
    fitted = calibration.fitted or {}
    values = ", ".join(f"{n} {getattr(calibration.constants, n):.3g} ± {e:.2g}" for n, e in fitted.items())
    return f"{values} on {len(calibration.residuals)} rows"


def describe_split(*names: str) -> str:
    """Return the side of the split that sets are on, and what was known of them before."""
    return "; ".join(f"{n}: {SETS[n].side}, seen before the rule: {SETS[n].prior_knowledge}" for n in names)


def _anomalies() -> tuple[str, ...]:
    return tuple(
        f"anomalous row kept and scored: {software} at {gpus:,} GPUs, {reason}"
        for software, gpus, reason in anchor_file("megascale")["strong_scaling"]["anomalies"]
    )


def _columns(cluster: ClusterSpec, rows: Rows, fitted: Calibration, control: np.ndarray) -> tuple[ScoreColumn, ...]:
    return (
        column(NOTHING, cluster, rows),
        column(FITTED, cluster, rows, fitted),
        scored(CONTROL, percent(control, rows.seconds)),
    )


def check_left_out(cluster: ClusterSpec) -> AnchorCheck:
    """A1: each row to 1,024 GPUs by a fit of the others."""
    rows = strong_scaling()
    small = rows.gpus < LARGE
    fitted = calibration_of(cluster, rows, TABLE_CONSTANTS, small)
    predicted = np.zeros(int(small.sum()))
    control_out = np.zeros(len(predicted))
    part = rows.subset(small)
    for i in range(len(part)):
        remaining = np.arange(len(part)) != i
        predicted[i] = predict(cluster, part, fit_rows(cluster, part, TABLE_CONSTANTS, remaining).constants)[i]
        control_out[i] = affine_control(part, remaining)[i]
    errors = np.abs(percent(predicted, part.seconds))
    difference = level_difference(cluster, rows, fitted.constants)
    return AnchorCheck(
        "A1",
        "strong scaling to 1,024 GPUs (development rows), each row left out of the fit in turn",
        {"mean": (float(errors.mean()), 2.0, "%"), "worst": (float(errors.max()), 6.5, "%")},
        constants_of(fitted),
        (
            f"the event level differs from the closed form by at most {difference:.2f}% on all 16 rows without slow "
            "hosts",
            _fit_alternative(cluster, rows, ("compute", "fixed"), small, small) + " (in sample)",
            describe_split("paper-small"),
            *fitted.warnings,
        ),
        listing(part, predicted, np.zeros(len(part), dtype=bool)),
        columns=_columns(cluster, part, fitted, control_out),
    )


def check_extrapolation(cluster: ClusterSpec) -> AnchorCheck:
    """A2: rows from 3,072 GPUs up by a fit of those to 1,024."""
    rows = strong_scaling()
    small = rows.gpus < LARGE
    fitted = calibration_of(cluster, rows, TABLE_CONSTANTS, small)
    got, control = predict(cluster, rows, fitted.constants), affine_control(rows, small)
    large = rows.subset(~small)
    errors = np.abs(percent(got, rows.seconds))[~small]
    return AnchorCheck(
        "A2",
        "extrapolation: fitted on the 8 rows to 1,024 GPUs, the 8 rows from 3,072 up",
        {"mean": (float(errors.mean()), 2.5, "%")},
        constants_of(fitted),
        (
            _fit_alternative(cluster, rows, ("compute", "fixed"), small, ~small),
            _fit_alternative(cluster, rows, ("compute", "fixed", "data_share"), small, ~small),
            describe_split("paper-large"),
            *_anomalies(),
        ),
        listing(rows, got, small),
        columns=_columns(cluster, large, fitted, control[~small]),
    )


def check_headline(cluster: ClusterSpec) -> AnchorCheck:
    """A3: MegaScale's rows by a fit of Megatron-LM's."""
    rows = strong_scaling()
    source = (rows.gpus < LARGE) & rows.first
    third_fit = calibration_of(cluster, rows, TABLE_CONSTANTS, source)
    megascale_rows = rows.subset(~rows.first)
    got = predict(cluster, megascale_rows, third_fit.constants)
    errors = np.abs(percent(got, megascale_rows.seconds))
    return AnchorCheck(
        "A3",
        "headline: constants from Megatron-LM's 4 rows to 1,024 GPUs, MegaScale's 8 rows by switching techniques on",
        {"mean": (float(errors.mean()), 4.0, "%")},
        constants_of(third_fit),
        (describe_split("paper-small", "paper-large"),) + third_fit.warnings,
        listing(megascale_rows, got, np.zeros(len(megascale_rows), dtype=bool)),
        columns=_columns(cluster, megascale_rows, third_fit, efficiency_control(megascale_rows, rows.subset(source))),
    )


def check_vtrain(folder: Path | None) -> list[AnchorCheck]:
    """A4: vTrain's measured rows, nothing fitted on any; and fitted on the development half, scored on the other."""
    title = "vTrain's 40 rows (64 to 512 A100, full recomputation)"
    if folder is None or not (folder / VTRAIN_FILE).is_file():
        reason = "data of others is not here (see --data): 40 rows of vTrain"
        return [AnchorCheck("A4", title, skipped=reason)]
    cluster = load_cluster("a100-hdr")
    rows = vtrain(folder)
    ours = vtrain_development(rows)
    fitted = calibration_of(cluster, rows, VTRAIN_CONSTANTS, ours)
    plain = np.abs(percent(predict(cluster, rows), rows.seconds))
    held_out = rows.subset(~ours)
    errors = np.abs(percent(predict(cluster, held_out, fitted.constants), held_out.seconds))
    paper = load_calibration("a100-roce", cluster.name)
    return [
        AnchorCheck(
            "A4",
            title + ": nothing fitted, all rows; and fitted on the development rows, scored on the held-out",
            {"not fitted": (float(plain.mean()), 6.0, "%"), "fitted": (float(errors.mean()), 8.0, "%")},
            constants_of(fitted),
            (
                f"nothing fitted: {int(ours.sum())} development rows {plain[ours].mean():.2f}%, {int((~ours).sum())} "
                f"held-out rows {plain[~ours].mean():.2f}%",
                describe_split("vtrain-multi"),
                *fitted.warnings,
            ),
            listing(rows, predict(cluster, rows), np.zeros(len(rows), dtype=bool)),
            columns=(
                column(f"{NOTHING}, all rows", cluster, rows),
                column("nothing of them: the paper's calibration, all rows", cluster, rows, paper),
                *_columns(cluster, held_out, fitted, efficiency_control(held_out, rows.subset(ours))),
            ),
        )
    ]


def check_mfu(cluster: ClusterSpec) -> list[AnchorCheck]:
    """A5 and A6: the paper's ablation and its 530B bars, with the shipped calibration and nothing of them fitted."""
    calibration = load_calibration(None, cluster.name)
    table = strong_scaling()
    learnt = table.subset(table.gpus < LARGE)
    checks = []
    for key, title, side, (rows, printed), targets in (
        ("A5", "the paper's ablation in MFU points", "ablation", ablation(), {"mean": 1.0, "worst": 1.5}),
        ("A6", "530B weak scaling in MFU points", "weak-scaling", weak_scaling(), {"mean": 2.0}),
    ):
        seconds = predict(cluster, rows, calibration.constants)
        mfu = _mfu(rows, seconds)
        gap = np.abs(mfu - printed)
        reached = {"mean": gap.mean(), "worst": gap.max()}
        plain = np.abs(_mfu(rows, predict(cluster, rows)) - printed)
        control = efficiency_control(rows, learnt)
        bare = np.abs(_mfu(rows, control) - printed)
        checks.append(
            AnchorCheck(
                key,
                title,
                {name: (float(reached[name]), target, " points") for name, target in targets.items()},
                f"nothing of it; calibration {calibration.name}: {constants_of(calibration)} of the paper's table",
                (
                    f"nothing fitted: mean {plain.mean():.2f} points; control (one efficiency a system of the table, "
                    f"textbook bubble): mean {bare.mean():.2f} points",
                    describe_split(side),
                    *(
                        f"{name}: printed {a:.1f}, predicted {b:.1f}"
                        for name, a, b in zip(rows.names, printed, mfu, strict=True)
                    ),
                ),
                listing(rows, seconds, np.zeros(len(rows), dtype=bool)),
                tuple((n, float(a), float(b)) for n, a, b in zip(rows.names, printed, mfu, strict=True)),
                columns=_columns(cluster, rows, calibration, control),
            )
        )
    return checks


def _mfu(rows: Rows, seconds: np.ndarray) -> np.ndarray:
    """MFU in percent, as the paper counts it."""
    return 100.0 * np.asarray(rows.cases.flops) / (seconds * rows.gpus * PAPER_PEAK)
