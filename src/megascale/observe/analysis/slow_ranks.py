"""A robust statistic that finds ranks slower than comparable ones, with known error rates. It reads no files.

Let y = log(busy seconds) of a rank in a step, minus the median y of the ranks with the same work in that step. The
rank's *excess* is the mean of the middle three fifths of its y over the steps. Effects that all ranks share (longer
samples, a slow network) cancel, and single long steps do not count.

Healthy machines differ too. With at least MANY ranks the spread of the excesses shows by how much: 1.4826 times their
median absolute deviation, minus the noise. A rank is slow if its excess exceeds LEAST and the quantile of a normal
distribution that any of the healthy ranks exceeds in a share ALARMS of the analyses. With fewer ranks the spread cannot
be measured. Healthy ranks are then assumed to differ by HEALTHY, as GPUs of one kind do. A slow rank must exceed that
by the noise of its own steps, and it must exceed LEAST_OF_FEW. `python -m benchmarks observe --parts stragglers`
measures the rates of false alarms and misses.

MegaScale section 5.1 reports hosts that were 10% slower.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ALARMS = 0.01  # share of analyses of a healthy job that report a slow rank
LEAST = 0.03  # smallest excess that is reported in a job of many ranks
LEAST_OF_FEW = 0.05  # smallest excess that is reported in a job of few ranks
HEALTHY = 0.04  # assumed difference between healthy ranks in a job of few ranks
LARGE_JOB = 16  # ranks from which the spread of healthy ranks can be measured
BLOCKS = 10  # parts of the window by which persistent and passing slowness are distinguished
PASSING_STEPS = 5  # shortest passing slowness
LEAST_STEPS = 10
IRREGULAR_STEPS = 3  # fewest late steps of an irregular rank
_NORMAL = NormalDist()
_MAD = 1.4826  # standard deviation divided by median absolute deviation
_MEDIAN_ERROR = 1.2533  # standard error of a median divided by that of a mean
_CUT = 0.2  # share of the steps at either end that the trimmed mean leaves out
_TRIMMED_ERROR = 1.07  # standard error of the trimmed mean divided by that of a mean
_STATE_ORDER = {"persistent": 0, "irregular": 1, "passing": 2}


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slower than its peers. Shares are of the peers' median: 0.05 is 5% slower.

    Attributes:
        rank: its number.
        excess: how much slower it is over the steps `first` to `last`; for an irregular rank, by the mean.
        error: standard error of the excess.
        limit: smallest excess that is reported for this rank.
        confidence: 1 minus the expected number of healthy ranks with such an excess.
        state: "persistent" (slow in most of the window and at its end), "passing" (slow for a part of the window) or
            "irregular" (late in single steps).
        first, last: first and last slow step.
        slow_steps: bool [steps], the slow steps of the window.
        peer_count: number of ranks it was compared with.
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
        ratio: log of busy time divided by the peers' median, [ranks, steps].
        spread: standard deviation of healthy ranks, NaN in a job of few ranks.
        limit: smallest excess that is reported for a rank with typical noise.
        uncompared: number of ranks without peers.
    """

    slow: tuple[SlowRank, ...]
    excess: Array
    ratio: Array
    spread: float
    limit: float
    uncompared: int


def judge_ranks(
    busy: Array, group: Array, steps: Array, ranks: Array | None = None, alarms: float = ALARMS
) -> Judgement:
    """Find the ranks that are slower than their peers.

    Args:
        busy: seconds, float [ranks, steps]. NaN and values that are not positive are ignored.
        group: int [ranks]; ranks with the same number are comparable.
        steps: step numbers, ascending, [steps].
        ranks: rank numbers, by default 0, 1, ...
        alarms: rate of false alarms per analysis.
    """
    if ranks is None:
        ranks = np.arange(len(busy))
    else:
        ranks = np.asarray(ranks)
    with np.errstate(all="ignore"):
        log_busy = np.log(np.where(busy > 0, busy, np.nan))
    ratio, peers = subtract_peer_median(log_busy, np.asarray(group))
    counts = np.isfinite(ratio).sum(1)
    has_enough = counts >= min(LEAST_STEPS, max(2, len(steps)))
    excess = np.where(has_enough, trimmed_mean(ratio), np.nan)
    noise, correlated_steps = _measure_noise(ratio, excess)
    error = _TRIMMED_ERROR * noise / np.sqrt(np.maximum(counts, 1) / correlated_steps)
    compared = int(np.isfinite(excess).sum())
    if not compared:
        return Judgement((), excess, ratio, spread=float("nan"), limit=float("nan"), uncompared=len(busy))
    spread, z = healthy_spread(excess, error, alarms)
    limit = excess_limits(error, spread, z)
    mean, mean_limit = _measure_means(ratio, has_enough, limit)
    is_slow = excess > limit
    is_irregular = ~is_slow & (mean > mean_limit)
    slow_ranks = []
    for r in np.flatnonzero(is_slow | is_irregular):
        if is_irregular[r]:
            late = ratio[r] > np.maximum(limit[r], 3 * noise[r])
            if late.sum() < IRREGULAR_STEPS:
                continue
            state = "irregular"
            log_excess = float(mean[r])
            deviation = mean[r] / mean_limit[r]
        else:
            late = _find_slow_steps(ratio[r], limit[r])
            state = _classify(late, ratio[r], float(limit[r]))
            log_excess = float(np.nanmedian(ratio[r][late]) if late.any() else excess[r])
            deviation = log_excess / limit[r]
        slow_steps = steps[late] if late.any() else steps
        slow_ranks.append(
            SlowRank(
                rank=int(ranks[r]),
                excess=float(np.expm1(log_excess)),
                error=float(error[r]),
                limit=float(np.expm1(limit[r])),
                confidence=1 - min(1.0, compared * _NORMAL.cdf(-z * deviation)),
                state=state,
                first=int(slow_steps[0]),
                last=int(slow_steps[-1]),
                slow_steps=late,
                peer_count=int(peers[r]),
            )
        )
    candidates = ~(is_slow | is_irregular)
    slow_ranks += _find_passing(ratio, noise, limit, candidates, steps, ranks, peers, compared, alarms)
    slow_ranks.sort(key=lambda rank: (_STATE_ORDER[rank.state], -rank.excess))
    return Judgement(
        slow=tuple(slow_ranks),
        excess=np.expm1(excess),
        ratio=ratio,
        spread=spread,
        limit=float(np.expm1(np.nanmedian(limit))),
        uncompared=len(busy) - compared,
    )


def subtract_peer_median(values: Array, group: Array) -> tuple[Array, Array]:
    """Subtract from each value the median of the *other* members of its group in that step.

    In groups of at least MANY ranks the median of all members replaces that of the others.

    Args:
        values: [ranks, steps].
        group: [ranks].

    Returns:
        The differences, [ranks, steps], NaN without peers; and the number of peers, [ranks].
    """
    differences = np.full(values.shape, np.nan)
    peers = np.zeros(len(values), np.int64)
    for number in np.unique(group):
        members = np.flatnonzero(group == number)
        peers[members] = len(members) - 1
        if len(members) >= LARGE_JOB:
            differences[members] = values[members] - nan_median(values[members], 0)
        elif len(members) > 1:
            for r in members:
                differences[r] = values[r] - nan_median(values[members[members != r]], 0)
    return differences, peers


def healthy_spread(excess: Array, error: Array, alarms: float = ALARMS) -> tuple[float, float]:
    """Return the standard deviation of healthy ranks and the limit in such deviations.

    Returns:
        The deviation, NaN with fewer than MANY ranks; and the z that any healthy rank exceeds at the rate `alarms`.
    """
    finite = excess[np.isfinite(excess)]
    z = _NORMAL.inv_cdf(1 - alarms / len(finite))
    if len(finite) < LARGE_JOB:
        return float("nan"), z
    observed = _MAD * float(np.median(np.abs(finite - np.median(finite))))
    noise = float(np.nanmedian(error))
    # A deviation measured on few ranks may be too small by chance, so use the quantile of Student's distribution with
    # the degrees of freedom of a median deviation (Cornish-Fisher expansion).
    degrees = 0.37 * len(finite)
    z += (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return float(np.sqrt(max(0.0, observed**2 - noise**2))), z


def excess_limits(error: Array, spread: float, z: float) -> Array:
    """Return the smallest excess that is reported for each rank, [ranks]."""
    if np.isnan(spread):
        return np.maximum(LEAST_OF_FEW, HEALTHY + z * error)
    return np.maximum(LEAST, z * np.sqrt(spread**2 + error**2))


def trimmed_mean(values: Array) -> Array:
    """Return the mean of each row without the fifth at either end; NaN values are ignored."""
    ordered = np.sort(values, 1)  # NaN values come last
    counts = np.isfinite(ordered).sum(1)
    cut = (_CUT * counts).astype(np.int64)
    column = np.arange(values.shape[1])
    counted = (column >= cut[:, None]) & (column < (counts - cut)[:, None])
    with np.errstate(all="ignore"):
        return np.asarray(np.where(counted, ordered, 0.0).sum(1) / counted.sum(1))


def nan_median(values: Array, axis: int = 1) -> Array:
    """Return medians along an axis, ignoring NaN values, without a warning if only NaN values are present."""
    if not np.isnan(values).any():
        return np.asarray(np.median(values, axis))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(values, axis))


def _measure_noise(ratio: Array, excess: Array) -> tuple[Array, float]:
    """Return each rank's standard deviation per step, and how many correlated steps count as one."""
    level: Array = _MAD * nan_median(np.abs(ratio - excess[:, None]))
    correlation = _correlate_steps(ratio, excess, level)
    change = level
    if ratio.shape[1] > 2:
        # A rank that became slow within the window is far from its own median, so measure the change between steps.
        change = _MAD * nan_median(np.abs(np.diff(ratio, axis=1))) / np.sqrt(2 * (1 - correlation))
    noise = np.fmin(level, change)
    # Few steps may agree by chance: assume at least half of the usual noise.
    if np.isfinite(noise).any():
        usual = float(np.nanmedian(noise))
    else:
        usual = 0.0
    return np.maximum(noise, usual / 2), (1 + correlation) / (1 - correlation)


def _correlate_steps(ratio: Array, excess: Array, noise: Array) -> float:
    """Return the correlation of a step with the next one over all ranks, 0 to 0.9."""
    if ratio.shape[1] < LEAST_STEPS or not np.isfinite(excess).any():
        return 0.0
    with np.errstate(all="ignore"):
        x = np.clip((ratio - excess[:, None]) / noise[:, None], -3, 3)
        pairs = x[:, 1:] * x[:, :-1]
    if not np.isfinite(pairs).any():
        return 0.0
    return float(np.clip(np.nanmean(pairs) / np.maximum(1e-12, np.nanmean(x * x)), 0.0, 0.9))


def _measure_means(ratio: Array, has_enough: Array, limit: Array) -> tuple[Array, Array]:
    """Return the means over the steps, in which single long steps count, and their limits."""
    with np.errstate(all="ignore"):
        clipped = np.clip(np.where(has_enough[:, None], ratio, 0.0), -0.5, 0.7)
        counted = np.isfinite(clipped).sum(1)
        mean = np.where(has_enough, np.nansum(clipped, 1) / counted, np.nan)
        deviation = np.sqrt(np.nansum((clipped - mean[:, None]) ** 2, 1) / counted)
    error = np.where(np.isfinite(mean), deviation / np.sqrt(counted), np.nan)
    if np.isfinite(error).any():
        usual = float(np.nanmedian(error))
    else:
        usual = 0.0
    # Long steps spread the means of healthy ranks too, so their own spread is added to the limit of the excess.
    if np.isfinite(mean).any():
        spread = _MAD * float(np.nanmedian(np.abs(mean - np.nanmedian(mean))))
    else:
        spread = 0.0
    return mean, 1.5 * limit + 3 * max(usual, spread)


def _find_slow_steps(ratio: Array, limit: float) -> Array:
    """Return bool [steps]: the steps of the blocks whose median exceeds half of the limit."""
    length = max(1, len(ratio) // BLOCKS)
    late = np.zeros(len(ratio), bool)
    for begin in range(0, len(ratio), length):
        block = ratio[begin : begin + length]
        if np.isfinite(block).any() and np.nanmedian(block) > limit / 2:
            late[begin : begin + length] = True
    return late & np.isfinite(ratio)


def _classify(late: Array, ratio: Array, limit: float) -> str:
    """Return "persistent" for a rank that is slow in most of the window and in its last third, else "passing"."""
    end = ratio[-max(1, len(ratio) // 3) :]
    is_slow_at_end = np.isfinite(end).any() and float(np.nanmedian(end)) > limit / 2
    if late.mean() > 0.5 and is_slow_at_end:
        return "persistent"
    return "passing"


def _find_passing(
    ratio: Array,
    noise: Array,
    limit: Array,
    candidates: Array,
    steps: Array,
    ranks: Array,
    peers: Array,
    compared: int,
    alarms: float,
) -> list[SlowRank]:
    """Find ranks among the candidates, bool [ranks], that were slow in consecutive steps of the window only."""
    length = max(PASSING_STEPS, len(steps) // BLOCKS)
    count = len(steps) // length
    if count < 2:
        return []
    blocks = ratio[:, len(steps) - count * length :].reshape(len(ratio), count, length)
    block_medians = np.stack([nan_median(blocks[:, b]) for b in range(count)], 1)
    z = _NORMAL.inv_cdf(1 - alarms / (compared * count))
    block_limit = limit[:, None] + z * (_MEDIAN_ERROR * noise / np.sqrt(length))[:, None]
    passing = []
    for r in np.flatnonzero((block_medians > block_limit).any(1) & candidates):
        late = np.zeros(len(steps), bool)
        late[len(steps) - count * length :] = np.repeat(block_medians[r] > block_limit[r] / 2, length)
        slow_steps = steps[late]
        log_excess = float(np.nanmedian(ratio[r][late]))
        error = float(block_limit[r, 0]) / z
        passing.append(
            SlowRank(
                rank=int(ranks[r]),
                excess=float(np.expm1(log_excess)),
                error=error,
                limit=float(np.expm1(block_limit[r, 0])),
                confidence=1 - min(1.0, compared * count * _NORMAL.cdf(-log_excess / error)),
                state="passing",
                first=int(slow_steps[0]),
                last=int(slow_steps[-1]),
                slow_steps=late,
                peer_count=int(peers[r]),
            )
        )
    return passing
