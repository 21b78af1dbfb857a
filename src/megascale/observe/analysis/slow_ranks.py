"""Which ranks are slower than comparable ones: a robust statistic whose error rates are known. Numbers in, numbers out.

y = log(busy seconds) of rank r in step k, less the median of the ranks with the same work in that step, is by how much
the rank was slower then; the mean of the middle three fifths of the steps is the rank's *excess*. What all ranks
share (a step with longer samples, a slow network) cancels, and single long steps do not count.

Healthy machines differ too. Of many ranks it is seen by how much: the spread of all excesses (1.4826 times their median
deviation), without what is noise. A rank counts as slow where its excess is beyond the quantile of a normal
distribution that all healthy ranks together exceed in one of 1/ALARMS looks, and beyond LEAST. Of fewer than MANY ranks
the spread cannot be seen: healthy ones are taken to differ by HEALTHY, as GPUs of one kind do, and a rank must be
beyond that by the noise of its own steps, and beyond LEAST_OF_FEW. How often that alarms or misses is measured by
`python -m benchmarks observe --parts stragglers` and tested.

Hosts that were 10% slower were found so by hand (MegaScale section 5.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ALARMS = 0.01  # looks at a job of healthy ranks in which one of them is named
LEAST = 0.03  # of many ranks: below it nobody is named, whatever the spread
LEAST_OF_FEW = 0.05
HEALTHY = 0.04  # by which healthy ranks differ, where too few are there to see it
MANY = 16
BLOCKS = 10  # parts of the window by which persistent is told from passing
PASSING_STEPS = 5  # that a passing slowness must last
LEAST_STEPS = 10
IRREGULAR_STEPS = 3  # steps that a rank must be late in, which is late on the mean only
_NORMAL = NormalDist()
_MAD = 1.4826
_MEDIAN = 1.2533  # standard error of a median over that of a mean
_CUT = 0.2  # of the steps at either end that do not count for an excess
_MIDDLE = 1.07  # standard error of such a mean over that of a mean of all


@dataclass(frozen=True)
class SlowRank:
    """A rank that stands out. Shares are of the median of comparable ranks: 0.05 is 5% slower.

    Attributes:
        rank: its number.
        excess: by how much it is slower over the steps in `first` to `last`; of an irregular one on the mean.
        error: standard error of that.
        limit: what it had to exceed.
        confidence: 1 - the healthy ranks of this job that would be expected to show as much.
        state: "persistent" (slow in most of the window and at its end), "passing" (over again, or too new to tell), or
            "irregular" (late in some steps, as others are not).
        first, last: between which steps it was slow.
        slow: of the window's steps, in which (bool [steps]).
        peers: how many ranks it was compared with.
    """

    rank: int
    excess: float
    error: float
    limit: float
    confidence: float
    state: str
    first: int
    last: int
    slow: Array
    peer_count: int


@dataclass(frozen=True)
class Judged:
    """All ranks of a window.

    Attributes:
        slow: who stands out, the slowest first.
        excess: of each rank, NaN where it has no peers.
        ratio: log of busy time over the peers' median, [ranks, steps].
        spread: standard deviation of healthy ranks, NaN where they are too few.
        limit: that a rank with typical noise must exceed.
        lonely: ranks without anybody to be compared with.
    """

    slow: tuple[SlowRank, ...]
    excess: Array
    ratio: Array
    spread: float
    limit: float
    lonely: int


def judge_ranks(busy: Array, group: Array, steps: Array, ranks: Array | None = None, alarms: float = ALARMS) -> Judged:
    """Compare ranks.

    Args:
        busy: seconds, float [ranks, steps]; NaN where nothing is known, and those that are not above 0 do not count.
        group: of each rank, whom it may be compared with (the same number), int [ranks].
        steps: their numbers, ascending, [steps].
        ranks: their numbers; by default 0, 1, ...
        alarms: false alarms a look.
    """
    ranks = np.arange(len(busy)) if ranks is None else np.asarray(ranks)
    with np.errstate(all="ignore"):
        y = np.log(np.where(busy > 0, busy, np.nan))
    ratio, peers = against_peers(y, np.asarray(group))
    known = np.isfinite(ratio).sum(1)
    enough = known >= min(LEAST_STEPS, max(2, len(steps)))
    excess = np.where(enough, middle(ratio), np.nan)
    noise, stand_for_one = _noise(ratio, excess)
    error = _MIDDLE * noise / np.sqrt(np.maximum(known, 1) / stand_for_one)
    judged = int(np.isfinite(excess).sum())
    if not judged:
        return Judged((), excess, ratio, float("nan"), float("nan"), len(busy))
    spread, z = healthy_spread(excess, error, alarms)
    limit = limits(excess, error, spread, z)
    mean, mean_limit = _means(ratio, enough, limit)
    flagged = excess > limit
    irregular = ~flagged & (mean > mean_limit)
    found = []
    for r in np.flatnonzero(flagged | irregular):
        late = _slow_steps(ratio[r], limit[r], float(noise[r]))
        if irregular[r]:
            late = ratio[r] > np.maximum(limit[r], 3 * noise[r])
            if late.sum() < IRREGULAR_STEPS:
                continue
        state = "irregular" if irregular[r] else _state(late, ratio[r], float(limit[r]))
        by = float(mean[r] if irregular[r] else np.nanmedian(ratio[r][late]) if late.any() else excess[r])
        at = steps[late] if late.any() else steps
        sure = 1 - min(1.0, judged * _NORMAL.cdf(-z * (mean[r] / mean_limit[r] if irregular[r] else by / limit[r])))
        found.append(
            SlowRank(int(ranks[r]), float(np.expm1(by)), float(error[r]), float(np.expm1(limit[r])), sure, state,
                     int(at[0]), int(at[-1]), late, int(peers[r]))
        )  # fmt: skip
    found += _passed(ratio, noise, limit, flagged | irregular, steps, ranks, peers, judged, alarms)
    order = {"persistent": 0, "irregular": 1, "passing": 2}
    found.sort(key=lambda one: (order[one.state], -one.excess))
    typical = float(np.expm1(np.nanmedian(limit)))
    return Judged(tuple(found), np.expm1(excess), ratio, spread, typical, len(busy) - judged)


def against_peers(y: Array, group: Array) -> tuple[Array, Array]:
    """Each value less the median of the *others* of its group in that step, [ranks, steps], and how many they are.

    Of MANY and more the median of all stands for that of the others.
    """
    found, peers = np.full(y.shape, np.nan), np.zeros(len(y), np.int64)
    for number in np.unique(group):
        members = np.flatnonzero(group == number)
        peers[members] = len(members) - 1
        if len(members) >= MANY:
            found[members] = y[members] - nan_median(y[members], 0)
        elif len(members) > 1:
            for r in members:
                found[r] = y[r] - nan_median(y[members[members != r]], 0)
    return found, peers


def healthy_spread(excess: Array, error: Array, alarms: float = ALARMS) -> tuple[float, float]:
    """By how much healthy ranks differ (standard deviation; NaN of fewer than MANY), and how many deviations of it one
    of all exceeds in `alarms` of the looks."""
    known = excess[np.isfinite(excess)]
    z = _NORMAL.inv_cdf(1 - alarms / len(known))
    if len(known) < MANY:
        return float("nan"), z
    seen = _MAD * float(np.median(np.abs(known - np.median(known))))
    own = float(np.nanmedian(error))
    # A deviation that few ranks tell of may be too small by chance: the quantile of Student's distribution, with the
    # degrees of freedom that a median deviation has (Cornish-Fisher).
    free = 0.37 * len(known)
    z += (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return float(np.sqrt(max(0.0, seen**2 - own**2))), z


def limits(excess: Array, error: Array, spread: float, z: float) -> Array:
    """What each rank's excess must be above; see the head of this file."""
    if np.isnan(spread):
        return np.maximum(LEAST_OF_FEW, HEALTHY + z * error)
    return np.maximum(LEAST, z * np.sqrt(spread**2 + error**2))


def middle(values: Array) -> Array:
    """Of each row the mean without the fifth at either end, [rows]; NaN left out, NaN where nothing is left."""
    ordered = np.sort(values, 1)  # NaN come last
    known = np.isfinite(ordered).sum(1)
    cut = (_CUT * known).astype(np.int64)
    column = np.arange(values.shape[1])
    counts = (column >= cut[:, None]) & (column < (known - cut)[:, None])
    with np.errstate(all="ignore"):
        return np.asarray(np.where(counts, ordered, 0.0).sum(1) / counts.sum(1))


def nan_median(values: Array, axis: int = 1) -> Array:
    """Medians along an axis, NaN left out, without a warning where nothing is left."""
    if not np.isnan(values).any():
        return np.asarray(np.median(values, axis))
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(values, axis))


def _noise(ratio: Array, excess: Array) -> tuple[Array, float]:
    """Standard deviation of single steps of each rank, and how many steps stand for one, as slow and quick ones come in
    a row."""
    level: Array = _MAD * nan_median(np.abs(ratio - excess[:, None]))
    rho = _correlation(ratio, excess, level)
    # A rank that became slow in between is as far from its median as it is slower: what differs from step to step is
    # noise alone.
    change: Array = (
        _MAD * nan_median(np.abs(np.diff(ratio, axis=1))) / np.sqrt(2 * (1 - rho)) if ratio.shape[1] > 2 else level
    )
    own = np.fmin(level, change)
    # Few steps may agree by chance: no rank is taken to be quieter than half of what is usual.
    usual = float(np.nanmedian(own)) if np.isfinite(own).any() else 0.0
    return np.maximum(own, usual / 2), (1 + rho) / (1 - rho)


def _correlation(ratio: Array, excess: Array, noise: Array) -> float:
    """Of a step with the next, over all ranks, 0 to 0.9."""
    if ratio.shape[1] < LEAST_STEPS or not np.isfinite(excess).any():
        return 0.0
    with np.errstate(all="ignore"):
        x = np.clip((ratio - excess[:, None]) / noise[:, None], -3, 3)
        pairs, squares = x[:, 1:] * x[:, :-1], x * x
    known = np.isfinite(pairs).any()
    return float(np.clip(np.nanmean(pairs) / np.maximum(1e-12, np.nanmean(squares)), 0.0, 0.9)) if known else 0.0


def _means(ratio: Array, enough: Array, limit: Array) -> tuple[Array, Array]:
    """Means over the steps, in which single long steps count, and what they must exceed."""
    with np.errstate(all="ignore"):
        clipped = np.clip(np.where(enough[:, None], ratio, 0.0), -0.5, 0.7)
        counted = np.isfinite(clipped).sum(1)
        mean = np.where(enough, np.nansum(clipped, 1) / counted, np.nan)
        deviation = np.sqrt(np.nansum((clipped - mean[:, None]) ** 2, 1) / counted)
    own = np.where(np.isfinite(mean), deviation / np.sqrt(counted), np.nan)
    usual = float(np.nanmedian(own)) if np.isfinite(own).any() else 0.0
    # By long steps the means of healthy ranks spread too: their own spread counts, besides the limit of a median.
    far = _MAD * float(np.nanmedian(np.abs(mean - np.nanmedian(mean)))) if np.isfinite(mean).any() else 0.0
    return mean, 1.5 * limit + 3 * max(usual, far)


def _slow_steps(ratio: Array, limit: float, noise: float) -> Array:
    """In which steps a slow rank was slow: from the first to the last block that was, of those that were."""
    length = max(1, len(ratio) // BLOCKS)
    late = np.zeros(len(ratio), bool)
    for begin in range(0, len(ratio), length):
        part = ratio[begin : begin + length]
        if np.isfinite(part).any() and np.nanmedian(part) > limit / 2:
            late[begin : begin + length] = True
    return late & np.isfinite(ratio)


def _state(late: Array, ratio: Array, limit: float) -> str:
    """Slow in most of the window and in its last third is persistent; a single part may look healthy by chance."""
    end = ratio[-max(1, len(ratio) // 3) :]
    still = np.isfinite(end).any() and float(np.nanmedian(end)) > limit / 2
    return "persistent" if late.mean() > 0.5 and still else "passing"


def _passed(
    ratio: Array, noise: Array, limit: Array, known: Array, steps: Array, ranks: Array, peers: Array, judged: int,
    alarms: float,
) -> list[SlowRank]:  # fmt: skip
    """Ranks that were slow for some steps in a row only."""
    length = max(PASSING_STEPS, len(steps) // BLOCKS)
    count = len(steps) // length
    if count < 2:
        return []
    blocks = ratio[:, len(steps) - count * length :].reshape(len(ratio), count, length)
    middle = np.stack([nan_median(blocks[:, b]) for b in range(count)], 1)
    z = _NORMAL.inv_cdf(1 - alarms / (judged * count))
    most = limit[:, None] + z * (_MEDIAN * noise / np.sqrt(length))[:, None]
    found = []
    for r in np.flatnonzero((middle > most).any(1) & ~known):
        slow = np.repeat(middle[r] > most[r] / 2, length)
        late = np.concatenate([np.zeros(len(steps) - len(slow), bool), slow])
        at, by = steps[late], float(np.nanmedian(ratio[r][late]))
        scale = float(most[r, 0]) / z
        sure = 1 - min(1.0, judged * count * _NORMAL.cdf(-by / scale))
        found.append(
            SlowRank(int(ranks[r]), float(np.expm1(by)), float(scale), float(np.expm1(most[r, 0])), sure, "passing",
                     int(at[0]), int(at[-1]), late, int(peers[r]))
        )  # fmt: skip
    return found
