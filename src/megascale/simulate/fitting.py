"""Least-squares fit of a few bounded constants, with standard errors and warnings about undetermined constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megascale.simulate.calibration import BOUNDS, Constants

# A direction in the space of constants is not determined if a move by a tenth of the constants' ranges along it changes
# predictions by less than this.
MIN_EFFECT = 0.002
MAX_ITERATIONS = 60


@dataclass(frozen=True)
class Fit:
    """The result of a fit.

    Attributes:
        names: names of the fitted constants.
        constants: all constants, with the fitted values.
        residuals: [rows] ln(predicted / measured).
        errors: standard error by constant, from the residuals; inf if the rows do not determine the constant.
        warnings: one sentence for each constant at a bound, and for each direction that the rows do not determine.
    """

    names: tuple[str, ...]
    constants: Constants
    residuals: np.ndarray
    errors: dict[str, float]
    warnings: tuple[str, ...]


def fit_constants(
    names: Sequence[str],
    predict: Callable[[Constants], np.ndarray],
    measured: np.ndarray,
    start: Constants = Constants(),
) -> Fit:
    """Return the constants within BOUNDS that minimise the squared relative error of `predict` on `measured` seconds.

    The method is Levenberg-Marquardt on ln(predicted / measured) from a few starting points, with steps clipped to the
    bounds. Because errors are relative, a step of 6 s weighs as much as one of 40 s.

    Args:
        predict: returns the seconds of all rows for some constants.
        start: values of the constants that are not fitted.
    """
    names = tuple(names)
    low, high, guess = (np.array([BOUNDS[n][i] for n in names]) for i in range(3))
    logs = np.log(np.asarray(measured, dtype=float))

    def residual(x: np.ndarray) -> np.ndarray:
        constants = start.with_values(dict(zip(names, x.tolist(), strict=True)))
        return np.log(np.asarray(predict(constants), dtype=float)) - logs

    best: tuple[float, np.ndarray] | None = None
    for x in (guess, low + 0.25 * (high - low), low + 0.75 * (high - low)):
        x, cost = _descend(residual, x, low, high)
        if best is None or cost < best[0] - 1e-15:
            best = (cost, x)
    assert best is not None
    x = best[1]
    constants = start.with_values(dict(zip(names, x.tolist(), strict=True)))
    errors, warnings = _estimate_errors(names, residual, x, low, high)
    return Fit(names, constants, residual(x), errors, warnings)


def _jacobian(residual: Callable[[np.ndarray], np.ndarray], x: np.ndarray, low: np.ndarray, high: np.ndarray):
    """Return the Jacobian [rows, constants] by differences within the bounds."""
    columns = []
    for i in range(len(x)):
        step = 1e-4 * (high[i] - low[i])
        up, down = x.copy(), x.copy()
        up[i], down[i] = min(high[i], x[i] + step), max(low[i], x[i] - step)
        columns.append((residual(up) - residual(down)) / (up[i] - down[i]))
    return np.stack(columns, axis=1)


def _descend(
    residual: Callable[[np.ndarray], np.ndarray], x: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, float]:
    """Return (constants, sum of squared residuals) at the minimum that is reached from `x`."""
    r = residual(x)
    cost, damping = float(r @ r), 1e-3
    for _ in range(MAX_ITERATIONS):
        jac = _jacobian(residual, x, low, high) * (high - low)  # in units of each constant's range
        gradient = jac.T @ r
        # A constant at a bound stays there if the gradient points outwards.
        free = ~(((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0)))
        if not free.any():
            break
        is_improved = False
        for _ in range(12):
            normal = jac[:, free].T @ jac[:, free]
            normal += damping * (np.diag(np.diag(normal)) + 1e-12 * np.eye(len(normal)))
            step = np.zeros_like(x)
            step[free] = -np.linalg.lstsq(normal, gradient[free], rcond=None)[0]
            trial = np.clip(x + step * (high - low), low, high)
            r_trial = residual(trial)
            cost_trial = float(r_trial @ r_trial)
            if cost_trial < cost:
                is_improved = cost - cost_trial > 1e-14 + 1e-9 * cost
                x = trial
                r = r_trial
                cost = cost_trial
                damping = damping / 5
                break
            damping *= 4
        if not is_improved:
            break
    return x, cost


def _estimate_errors(
    names: tuple[str, ...],
    residual: Callable[[np.ndarray], np.ndarray],
    x: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return (standard errors by constant, warnings), from the singular values of the Jacobian.

    Constants are measured in units of their ranges.
    """
    span = high - low
    jac = _jacobian(residual, x, low, high) * span
    r = residual(x)
    degrees_of_freedom = max(1, len(r) - len(x))
    noise = max(float(r @ r) / degrees_of_freedom, 1e-8)
    _, singular_values, directions = np.linalg.svd(jac, full_matrices=len(r) < len(x))
    singular_values = np.concatenate([singular_values, np.zeros(len(x) - len(singular_values))])
    warnings = []
    variance = np.zeros(len(x))
    for value, direction in zip(singular_values, directions, strict=False):
        # Moving a tenth of the ranges along this direction changes the rows by this much (root mean square).
        effect = 0.1 * value / np.sqrt(len(r))
        if effect < MIN_EFFECT:
            terms = [(abs(w), f"{w:+.2f} {name}") for w, name in zip(direction, names, strict=True) if abs(w) > 0.2]
            warnings.append(
                f"these rows cannot tell apart: {', '.join(text for _, text in sorted(terms, reverse=True))} "
                f"(a tenth of their ranges in this direction changes predictions by {effect:.2%})"
            )
        if value > 0:
            variance += np.square(direction) * noise / value**2
        else:
            variance[np.abs(direction) > 1e-6] = np.inf
    errors = {n: float(np.sqrt(v) * s) for n, v, s in zip(names, variance, span, strict=True)}
    for n, value, a, b in zip(names, x, low, high, strict=True):
        if value <= a or value >= b:
            warnings.append(f"{n}={value:g} stands at its bound [{a:g}, {b:g}]: the rows ask for more than is physical")
        elif errors[n] > abs(value) or errors[n] > 0.5 * (b - a):
            warnings.append(f"{n}={value:.3g} has a standard error of {errors[n]:.2g}: hardly decided by these rows")
    return errors, tuple(warnings)
