"""A robust statistic that finds ranks slower than comparable ranks, with known error rates. It reads no files.

Let y be the logarithm of a rank's busy seconds in a step, minus the median logarithm of the ranks with the same work in
that step. A rank's *excess* is the mean of the middle three fifths of its y over the steps. Effects on all ranks
(longer samples, a slow network) cancel, and single long steps are ignored.

Healthy machines differ too. With at least LARGE_JOB ranks this spread is measured: 1.4826 times the median absolute
deviation of the excesses, minus the noise. A rank is slow if its excess exceeds MIN_EXCESS and a quantile of the normal
distribution of healthy ranks. The quantile is chosen such that a fraction ALARM_RATE of the analyses of healthy jobs
reports a rank.

With fewer ranks the spread cannot be measured. Healthy ranks are then assumed to differ by HEALTHY_DIFFERENCE, as GPUs
of one model do. The excess of a slow rank must exceed HEALTHY_DIFFERENCE by the noise of the rank's steps, and it must
exceed MIN_EXCESS_OF_FEW. `python -m benchmarks observe --parts stragglers` measures the rates of false alarms and
misses.

MegaScale section 5.1 reports hosts that were 10% slower.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ALARM_RATE = 0.01  # share of analyses of a healthy job that report a slow rank
MIN_EXCESS = 0.03  # smallest excess that is reported in a job of many ranks
MIN_EXCESS_OF_FEW = 0.05  # smallest excess that is reported in a job of few ranks
HEALTHY_DIFFERENCE = 0.04  # assumed difference between healthy ranks in a job of few ranks
LARGE_JOB = 16  # ranks from which the spread of healthy ranks can be measured
BLOCKS = 10  # blocks of consecutive steps per window; slow blocks tell passing from persistent slowness
PASSING_STEPS = 5  # fewest steps of passing slowness
MIN_STEPS = 10  # fewest steps by which a rank is judged
IRREGULAR_STEPS = 3  # fewest late steps of an irregular rank
_NORMAL = NormalDist()
_SD_PER_MAD = 1.4826  # standard deviation of a normal distribution, per median absolute deviation
_MEDIAN_ERROR = 1.2533  # standard error of a median divided by that of a mean
_TRIMMED_FRACTION = 0.2  # fraction of the steps at either end that the trimmed mean leaves out
_TRIMMED_ERROR = 1.07  # standard error of the trimmed mean divided by that of a mean
# Smallest and largest y that count in the mean of an irregular rank: 0.6 and 2 times the peers' median.
_CLIP_LOW, _CLIP_HIGH = -0.5, 0.7
_MAX_CORRELATION = 0.9  # of neighbouring steps
_STATE_ORDER = {"persistent": 0, "irregular": 1, "passing": 2}


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slower than its peers. An excess of 0.05 is 5% above the peers' median.

    Attributes:
        excess: median excess over the slow steps; for an irregular rank, the mean over all steps.
        error: standard error of the excess.
        limit: smallest excess that is reported for this rank.
        confidence: 1 minus the expected number of healthy ranks with such an excess.
        state: "persistent" (slow in most of the window and at its end), "passing" (slow for a part of the window) or
            "irregular" (late in single steps).
        slow_steps: bool [steps], the slow steps of the window.
        peer_count: number of ranks with which the rank was compared.
    """

    rank: int
    excess: float
    error: float
    limit: float
    confidence: float
    state: str
    first: int
    last: int
    slow_steps: Array
    peer_count: int


@dataclass(frozen=True)
class Judgement:
    """The comparison of all ranks in a window of steps.

    Attributes:
        slow: slow ranks, persistent ones first, then by excess.
        excess: [ranks], NaN without peers.
        log_ratio: y of each rank and step, [ranks, steps].
        spread: standard deviation of healthy ranks, NaN in a job of few ranks.
        limit: smallest excess that is reported for a rank with typical noise.
        uncompared: number of ranks without peers.
    """

    slow: tuple[SlowRank, ...]
    excess: Array
    log_ratio: Array
    spread: float
    limit: float
    uncompared: int


def judge_ranks(busy: Array, group: Array, steps: Array, ranks: Array | None = None) -> Judgement:
    """Find the ranks that are slower than their peers.

    Args:
        busy: seconds, float [ranks, steps]. NaN and values that are not positive are ignored.
        group: int [ranks]; ranks with the same number are comparable.
        steps: step numbers, ascending, [steps].
        ranks: rank numbers, by default 0, 1, ...
    """
    if ranks is None:
        ranks = np.arange(len(busy))
    else:
        ranks = np.asarray(ranks)
    with np.errstate(all="ignore"):
        log_busy = np.log(np.where(busy > 0, busy, np.nan))
    log_ratio, peer_counts = subtract_peer_median(log_busy, np.asarray(group))
    counts = np.isfinite(log_ratio).sum(1)
    has_enough_steps = counts >= min(MIN_STEPS, max(2, len(steps)))
    excess = np.where(has_enough_steps, compute_trimmed_mean(log_ratio), np.nan)
    noise, correlated_steps = _measure_noise(log_ratio, excess)
    error = _TRIMMED_ERROR * noise / np.sqrt(np.maximum(counts, 1) / correlated_steps)
    compared_count = int(np.isfinite(excess).sum())
    if not compared_count:
        return Judgement((), excess, log_ratio, spread=float("nan"), limit=float("nan"), uncompared=len(busy))
    spread, z = measure_healthy_spread(excess, error)
    limit = compute_excess_limits(error, spread, z)
    mean, mean_limit = _measure_means(log_ratio, has_enough_steps, limit)
    is_slow = excess > limit
    is_irregular = ~is_slow & (mean > mean_limit)
    slow_ranks = []
    for r in np.flatnonzero(is_slow | is_irregular):
        # `deviation` is the rank's excess in multiples of its limit.
        if is_irregular[r]:
            is_slow_step = log_ratio[r] > np.maximum(limit[r], 3 * noise[r])
            if is_slow_step.sum() < IRREGULAR_STEPS:
                continue
            state = "irregular"
            log_excess = float(mean[r])
            deviation = mean[r] / mean_limit[r]
        else:
            is_slow_step = _find_slow_steps(log_ratio[r], limit[r])
            state = _classify_slowness(is_slow_step, log_ratio[r], float(limit[r]))
            log_excess = float(np.nanmedian(log_ratio[r][is_slow_step]) if is_slow_step.any() else excess[r])
            deviation = log_excess / limit[r]
        slow_steps = steps[is_slow_step] if is_slow_step.any() else steps
        slow_ranks.append(
            SlowRank(
                rank=int(ranks[r]),
                excess=float(np.expm1(log_excess)),
                error=float(error[r]),
                limit=float(np.expm1(limit[r])),
                confidence=1 - min(1.0, compared_count * _NORMAL.cdf(-z * deviation)),
                state=state,
                first=int(slow_steps[0]),
                last=int(slow_steps[-1]),
                slow_steps=is_slow_step,
                peer_count=int(peer_counts[r]),
            )
        )
    slow_ranks += _find_passing(
        log_ratio,
        noise=noise,
        limit=limit,
        candidates=~(is_slow | is_irregular),
        steps=steps,
        ranks=ranks,
        peer_counts=peer_counts,
        compared_count=compared_count,
    )
    slow_ranks.sort(key=lambda rank: (_STATE_ORDER[rank.state], -rank.excess))
    return Judgement(
        slow=tuple(slow_ranks),
        excess=np.expm1(excess),
        log_ratio=log_ratio,
        spread=spread,
        limit=float(np.expm1(np.nanmedian(limit))),
        uncompared=len(busy) - compared_count,
    )


def subtract_peer_median(values: Array, group: Array) -> tuple[Array, Array]:
    """Subtract from each value the median of the *other* members of its group in that step.

    In groups of at least LARGE_JOB ranks the median of all members is used, since one member hardly changes it.

    Args:
        values: [ranks, steps].
        group: [ranks].

    Returns:
        The differences, [ranks, steps], NaN without peers; and the number of peers, [ranks].
    """
    differences = np.full(values.shape, np.nan)
    peer_counts = np.zeros(len(values), np.int64)
    for number in np.unique(group):
        members = np.flatnonzero(group == number)
        peer_counts[members] = len(members) - 1
        if len(members) >= LARGE_JOB:
            differences[members] = values[members] - nan_median(values[members], 0)
        elif len(members) > 1:
            for r in members:
                differences[r] = values[r] - nan_median(values[members[members != r]], 0)
    return differences, peer_counts


def measure_healthy_spread(excess: Array, error: Array) -> tuple[float, float]:
    """Measure how much healthy ranks differ.

    Args:
        excess: [ranks].
        error: standard error of each excess, [ranks].

    Returns:
        The standard deviation of healthy ranks, NaN with fewer than LARGE_JOB ranks; and the limit z in such
        deviations. In a fraction ALARM_RATE of the analyses, the excess of some healthy rank is above the limit.
    """
    finite = excess[np.isfinite(excess)]
    z = _NORMAL.inv_cdf(1 - ALARM_RATE / len(finite))
    if len(finite) < LARGE_JOB:
        return float("nan"), z
    observed = _SD_PER_MAD * float(np.median(np.abs(finite - np.median(finite))))
    noise = float(np.nanmedian(error))
    # A deviation measured on few ranks may be too small by chance, so use the quantile of Student's distribution with
    # the degrees of freedom of a median deviation (Cornish-Fisher expansion). The median absolute deviation of n normal
    # values is as precise as the standard deviation of 0.37 n values.
    degrees = 0.37 * len(finite)
    z += (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return float(np.sqrt(max(0.0, observed**2 - noise**2))), z


def compute_excess_limits(error: Array, spread: float, z: float) -> Array:
    """Return the smallest excess that is reported for each rank, [ranks], as a logarithm.

    Args:
        error: standard error of each excess, [ranks].
        spread, z: results of `measure_healthy_spread`.
    """
    if np.isnan(spread):
        return np.maximum(MIN_EXCESS_OF_FEW, HEALTHY_DIFFERENCE + z * error)
    return np.maximum(MIN_EXCESS, z * np.sqrt(spread**2 + error**2))


def compute_trimmed_mean(values: Array) -> Array:
    """Return the mean of each row without the fifth at either end; NaN values are ignored."""
    ordered = np.sort(values, 1)  # NaN values come last
    counts = np.isfinite(ordered).sum(1)
    trimmed_count = (_TRIMMED_FRACTION * counts).astype(np.int64)
    column = np.arange(values.shape[1])
    is_kept = (column >= trimmed_count[:, None]) & (column < (counts - trimmed_count)[:, None])
    with np.errstate(all="ignore"):
        return np.asarray(np.where(is_kept, ordered, 0.0).sum(1) / is_kept.sum(1))


def nan_median(values: Array, axis: int = 1) -> Array:
    """Return medians along an axis, ignoring NaN values, without a warning if only NaN values are present."""
    if not np.isnan(values).any():
        return np.asarray(np.median(values, axis))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(values, axis))


def _measure_noise(log_ratio: Array, excess: Array) -> tuple[Array, float]:
    """Measure the noise of the steps.

    Returns:
        The standard deviation of each rank's steps, [ranks]; and the number of correlated steps that carry as much
        information as one independent step.
    """
    deviation: Array = _SD_PER_MAD * nan_median(np.abs(log_ratio - excess[:, None]))
    correlation = _correlate_steps(log_ratio, excess, deviation)
    change_deviation = deviation
    if log_ratio.shape[1] > 2:
        # A rank that became slow within the window is far from its own median, so measure the change between steps.
        change_deviation = _SD_PER_MAD * nan_median(np.abs(np.diff(log_ratio, axis=1))) / np.sqrt(2 * (1 - correlation))
    noise = np.fmin(deviation, change_deviation)
    # Few steps may agree by chance: assume at least half of the usual noise.
    usual_noise = 0.0
    if np.isfinite(noise).any():
        usual_noise = float(np.nanmedian(noise))
    return np.maximum(noise, usual_noise / 2), (1 + correlation) / (1 - correlation)


def _correlate_steps(log_ratio: Array, excess: Array, noise: Array) -> float:
    """Return the correlation of a step with the next one over all ranks, 0 to _MAX_CORRELATION."""
    if log_ratio.shape[1] < MIN_STEPS or not np.isfinite(excess).any():
        return 0.0
    with np.errstate(all="ignore"):
        # Clip at three standard deviations, so that single long steps do not decide.
        x = np.clip((log_ratio - excess[:, None]) / noise[:, None], -3, 3)
        products = x[:, 1:] * x[:, :-1]
    if not np.isfinite(products).any():
        return 0.0
    correlation = np.nanmean(products) / np.maximum(1e-12, np.nanmean(x * x))
    return float(np.clip(correlation, 0.0, _MAX_CORRELATION))


def _measure_means(log_ratio: Array, has_enough_steps: Array, limit: Array) -> tuple[Array, Array]:
    """Return each rank's mean over the steps, in which single long steps count, and the limit of the mean, [ranks]."""
    with np.errstate(all="ignore"):
        # Clip, so that one very long step does not decide.
        clipped = np.clip(np.where(has_enough_steps[:, None], log_ratio, 0.0), _CLIP_LOW, _CLIP_HIGH)
        step_counts = np.isfinite(clipped).sum(1)
        mean = np.where(has_enough_steps, np.nansum(clipped, 1) / step_counts, np.nan)
        deviation = np.sqrt(np.nansum((clipped - mean[:, None]) ** 2, 1) / step_counts)
    error = np.where(np.isfinite(mean), deviation / np.sqrt(step_counts), np.nan)
    usual_error = 0.0
    if np.isfinite(error).any():
        usual_error = float(np.nanmedian(error))
    # Long steps spread the means of healthy ranks too, so the limit depends on the spread of the means.
    spread = 0.0
    if np.isfinite(mean).any():
        spread = _SD_PER_MAD * float(np.nanmedian(np.abs(mean - np.nanmedian(mean))))
    # The factors keep irregular ranks rarer than slow ones: a mean must exceed one and a half times the limit of the
    # excess by three standard deviations.
    return mean, 1.5 * limit + 3 * max(usual_error, spread)


def _find_slow_steps(log_ratio: Array, limit: float) -> Array:
    """Return which steps belong to blocks whose median exceeds half of the limit, bool [steps]."""
    length = max(1, len(log_ratio) // BLOCKS)
    is_slow_step = np.zeros(len(log_ratio), bool)
    for begin in range(0, len(log_ratio), length):
        block = log_ratio[begin : begin + length]
        if np.isfinite(block).any() and np.nanmedian(block) > limit / 2:
            is_slow_step[begin : begin + length] = True
    return is_slow_step & np.isfinite(log_ratio)


def _classify_slowness(is_slow_step: Array, log_ratio: Array, limit: float) -> str:
    """Return "persistent" for a rank that is slow in most of the window and in its last third, else "passing"."""
    last_third = log_ratio[-max(1, len(log_ratio) // 3) :]
    is_slow_at_end = np.isfinite(last_third).any() and float(np.nanmedian(last_third)) > limit / 2
    if is_slow_step.mean() > 0.5 and is_slow_at_end:
        return "persistent"
    return "passing"


def _find_passing(
    log_ratio: Array,
    *,
    noise: Array,
    limit: Array,
    candidates: Array,
    steps: Array,
    ranks: Array,
    peer_counts: Array,
    compared_count: int,
) -> list[SlowRank]:
    """Find ranks that were slow in some blocks of the window only.

    Args:
        noise: standard deviation of each rank's steps, [ranks].
        limit: smallest reported excess of each rank, [ranks].
        candidates: which ranks are examined, bool [ranks].
        compared_count: number of ranks with peers.
    """
    length = max(PASSING_STEPS, len(steps) // BLOCKS)
    block_count = len(steps) // length
    if block_count < 2:
        return []
    first = len(steps) - block_count * length  # an incomplete block lies at the begin of the window
    blocks = log_ratio[:, first:].reshape(len(log_ratio), block_count, length)
    block_medians = np.stack([nan_median(blocks[:, b]) for b in range(block_count)], 1)
    z = _NORMAL.inv_cdf(1 - ALARM_RATE / (compared_count * block_count))
    block_limit = limit + z * _MEDIAN_ERROR * noise / np.sqrt(length)  # of the median of a block, [ranks]
    passing = []
    for r in np.flatnonzero((block_medians > block_limit[:, None]).any(1) & candidates):
        is_slow_step = np.zeros(len(steps), bool)
        is_slow_step[first:] = np.repeat(block_medians[r] > block_limit[r] / 2, length)
        slow_steps = steps[is_slow_step]
        log_excess = float(np.nanmedian(log_ratio[r][is_slow_step]))
        error = float(block_limit[r]) / z
        passing.append(
            SlowRank(
                rank=int(ranks[r]),
                excess=float(np.expm1(log_excess)),
                error=error,
                limit=float(np.expm1(block_limit[r])),
                confidence=1 - min(1.0, compared_count * block_count * _NORMAL.cdf(-log_excess / error)),
                state="passing",
                first=int(slow_steps[0]),
                last=int(slow_steps[-1]),
                slow_steps=is_slow_step,
                peer_count=int(peer_counts[r]),
            )
        )
    return passing
