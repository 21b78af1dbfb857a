"""Outliers among the values of ranks.

A rank is an outlier if its modified z-score, 0.6745 (value - median) / MAD of the compared ranks, exceeds
max(3.5, sqrt(2 ln n)) for n ranks, and if its value differs from the median by at least 1%. MAD is the median absolute
deviation. The limit 3.5 is from Iglewicz and Hoaglin (1993). sqrt(2 ln n) is the z-score that the largest of n normal
values reaches by chance. Ranks are compared within their pipeline stage if each stage has enough ranks, because stages
do different work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.errors import ConfigError

Array = np.ndarray[Any, Any]
_MIN_STAGE_RANKS = 8  # stages are compared separately if each has at least this number of ranks
_MIN_DIFFERENCE = 0.01  # smallest difference of an outlier from the median, as a fraction of the median
_MIN_COMPARED_RANKS = 4  # among fewer ranks an outlier cannot be determined
_MAD_PER_DEVIATION = 0.6745  # MAD of a normal distribution, in standard deviations
_DEVIATION_PER_DISTANCE = 1.253314  # sqrt(pi / 2): standard deviation of it, in mean distances from the median
_MIN_LIMIT = 3.5  # smallest limit of |z|


@dataclass(frozen=True)
class Outliers:
    """Values compared with those of peers.

    Attributes:
        z: modified z-score of each rank, [ranks]; NaN without a value or with too few peers, 0 if all peers are equal.
        median: median of each rank's peers, [ranks].
        limit: limit of |z| for each rank, [ranks]; infinite without a z-score.
        among: "stage" if each rank was compared with the ranks of its stage, "job" if with all ranks.
        outliers: indices of the outliers, the largest |z| first.
    """

    z: Array
    median: Array
    limit: Array
    among: str
    outliers: list[int]


def find_outliers(values: Array, pipeline: Array, among: str = "") -> Outliers:
    """Compare the values of ranks.

    Args:
        values: [ranks].
        pipeline: stage of each rank, [ranks].
        among: "stage", "job", or an empty string: stages if each has enough ranks, else the job.
    """
    stages, counts = np.unique(pipeline, return_counts=True)
    if among not in ("", "stage", "job"):
        raise ConfigError(f"among={among[:60]}: ranks are compared among their stage or their job")
    if not among:
        among = "stage" if len(stages) > 1 and counts.min() >= _MIN_STAGE_RANKS else "job"
    z = np.full(len(values), np.nan)
    median = np.full(len(values), np.nan)
    limit = np.full(len(values), np.inf)
    if among == "stage":
        groups = [pipeline == stage for stage in stages]
    else:
        groups = [np.ones(len(values), bool)]
    for is_member in groups:
        finite = is_member & np.isfinite(values)
        if finite.sum() < _MIN_COMPARED_RANKS:
            continue
        differences = values[finite] - np.median(values[finite])
        deviation = np.median(np.abs(differences))  # MAD
        if deviation == 0:
            # More than half of the values are equal. Take the MAD of a normal distribution with the same mean distance
            # (Iglewicz and Hoaglin).
            deviation = _MAD_PER_DEVIATION * _DEVIATION_PER_DISTANCE * np.abs(differences).mean()
        if deviation > 0:
            z[finite] = _MAD_PER_DEVIATION * differences / deviation
        else:
            z[finite] = 0.0
        median[finite] = np.median(values[finite])
        limit[finite] = max(_MIN_LIMIT, math.sqrt(2 * math.log(max(2, finite.sum()))))
    with np.errstate(invalid="ignore"):
        is_outlier = (np.abs(z) > limit) & (np.abs(values - median) > _MIN_DIFFERENCE * np.abs(median))
    outliers = np.flatnonzero(is_outlier)
    outliers = outliers[np.argsort(-np.abs(z[outliers]))]
    return Outliers(z=z, median=median, limit=limit, among=among, outliers=outliers.tolist())
