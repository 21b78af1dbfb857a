"""Comparison of the step time in two windows of a run, and the windows that are compared by default.

`decline_causes` splits a growth by cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megascale.core.json_lines import RecordReader
from megascale.core.strict_json import to_float
from megascale.errors import ConfigError
from megascale.observe.analysis.decline_causes import Cause, WindowComparison, compute_trimmed_mean
from megascale.observe.analysis.rank_times import RankTimes
from megascale.observe.analysis.slow_ranks import nan_median
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]

MIN_GROWTH = 0.01  # smallest growth of the step time that is a decline
MAIN_CAUSE_SHARE = 0.2  # a main cause explains at least this fraction of the growth
MIN_STEPS = 10  # steps of the shortest window
_LONGEST_WINDOW = 500  # steps
_WARM_UP_STEPS = 3
_CERTAIN_ERRORS = 3.0  # a growth is certain if it exceeds this number of standard errors


@dataclass(frozen=True)
class Decline:
    """The comparison of two windows of a run.

    Attributes:
        before, after: (first, last) step of the earlier and the later window.
        seconds: trimmed mean of the step time in the earlier and the later window.
        error: standard error of the difference of these means.
        growth: difference of these means as a fraction of the earlier one; negative if steps became shorter.
        mfu: median in the earlier and the later window, NaN if the run's metrics do not contain it.
        causes: sorted by seconds, the largest first; empty if steps did not grow.
        step_seconds: (steps, seconds of the median rank in each of them), for a plot.
    """

    before: tuple[int, int]
    after: tuple[int, int]
    seconds: tuple[float, float]
    error: float
    growth: float
    mfu: tuple[float, float]
    causes: tuple[Cause, ...]
    step_seconds: tuple[Array, Array]

    @property
    def verdict(self) -> Literal["declined", "uncertain", "unchanged"]:
        """Return whether steps became longer.

        "declined": they grew by more than MIN_GROWTH and by more than chance explains. "uncertain": by more than
        MIN_GROWTH, but chance may explain it. "unchanged": otherwise, or if the growth is NaN.
        """
        if not self.growth > MIN_GROWTH:
            return "unchanged"
        before, after = self.seconds
        if after - before > _CERTAIN_ERRORS * self.error:
            return "declined"
        return "uncertain"

    @property
    def has_declined(self) -> bool:
        """Return whether the verdict is "declined"."""
        return self.verdict == "declined"

    @property
    def growth_by_chance(self) -> float:
        """Largest growth that chance may explain, as a fraction of the earlier step time.

        It is infinite if the windows are too short for an error.
        """
        return _CERTAIN_ERRORS * self.error / self.seconds[0]

    @property
    def main_causes(self) -> tuple[Cause, ...]:
        """Causes of at least MAIN_CAUSE_SHARE of the growth; empty unless the growth is certain."""
        if not self.has_declined:
            return ()
        return tuple(cause for cause in self.causes if cause.share >= MAIN_CAUSE_SHARE)


def explain_decline(
    read_times: Callable[[int, int], RankTimes],
    before: tuple[int, int],
    after: tuple[int, int],
    tables: SpanTables | None = None,
    step_seconds: tuple[Array, Array] | None = None,
) -> Decline:
    """Compare two windows of steps. Raises ConfigError if the windows have different numbers of ranks.

    Args:
        read_times: returns the times of the steps from its first to its second argument.
        before, after: first and last step of each window.
        tables: source of counters and metrics; None leaves them out.
        step_seconds: (steps, seconds) for a plot; by default the steps of both windows.
    """
    early = read_times(*before)
    late = read_times(*after)
    if len(early.ranks) != len(late.ranks):
        raise ConfigError(
            f"steps {before[0]}-{before[1]} have {len(early.ranks)} ranks and steps {after[0]}-{after[1]} have "
            f"{len(late.ranks)}: their layouts differ; compare steps of one layout"
        )
    early_seconds = nan_median(early.seconds, 0)
    late_seconds = nan_median(late.seconds, 0)
    seconds = (compute_trimmed_mean(early_seconds), compute_trimmed_mean(late_seconds))
    growth_seconds = seconds[1] - seconds[0]
    causes: tuple[Cause, ...] = ()
    if growth_seconds > 0:
        causes = WindowComparison(early, late, growth_seconds, tables).find_causes()
    if step_seconds is None:
        step_seconds = (np.concatenate([early.steps, late.steps]), np.concatenate([early_seconds, late_seconds]))
    return Decline(
        before=before,
        after=after,
        seconds=seconds,
        error=float(np.hypot(_compute_standard_error(early_seconds), _compute_standard_error(late_seconds))),
        growth=growth_seconds / seconds[0],
        mfu=(_read_mfu(tables, before), _read_mfu(tables, after)),
        causes=causes,
        step_seconds=step_seconds,
    )


def read_step_seconds(tables: SpanTables, attempt: int) -> tuple[Array, Array]:
    """Return the steps of an attempt and the median rank's seconds, including the garbage collection after each."""
    rows = tables.query(
        "SELECT step, median(seconds) AS seconds FROM (SELECT rank, step, sum(total_ns) / 1e9 AS seconds FROM rollups "
        "WHERE action IN ('step', 'garbage') AND attempt = ? GROUP BY ALL) GROUP BY step ORDER BY step",
        [attempt],
    )
    return rows["step"], rows["seconds"]


def choose_windows(tables: SpanTables, attempt: int) -> tuple[tuple[int, int], tuple[int, int], tuple[Array, Array]]:
    """Choose the first and the last fifth of an attempt's steps after its warm-up.

    Windows have at least MIN_STEPS and at most _LONGEST_WINDOW steps. Raises ConfigError if there are too few steps.

    Returns:
        The two windows as (first, last), and (steps, seconds) of all steps after the warm-up.
    """
    steps, seconds = (values[_WARM_UP_STEPS:] for values in read_step_seconds(tables, attempt))
    window_length = min(_LONGEST_WINDOW, max(MIN_STEPS, len(steps) // 5))
    if len(steps) < 2 * MIN_STEPS:
        raise ConfigError(
            f"{tables.folder} has {len(steps)} steps of attempt {attempt} after its first {_WARM_UP_STEPS}, and "
            f"{2 * MIN_STEPS} are needed: wait, or choose windows of an earlier attempt with --before and --after"
        )
    return (
        (int(steps[0]), int(steps[window_length - 1])),
        (int(steps[-window_length]), int(steps[-1])),
        (steps, seconds),
    )


def _compute_standard_error(values: Array) -> float:
    """Return the standard error of a window's mean, from blocks of steps because consecutive steps are correlated."""
    finite = values[np.isfinite(values)]
    blocks = min(10, len(finite) // 2)
    if blocks < 2:
        return float("inf")
    length = len(finite) // blocks
    block_means = finite[: blocks * length].reshape(blocks, length).mean(1)
    return float(block_means.std(ddof=1) / np.sqrt(blocks))


def _read_mfu(tables: SpanTables | None, window: tuple[int, int]) -> float:
    """Return the median MFU of a window's steps from the run's metrics, NaN if they do not contain it."""
    if tables is None:
        return float("nan")
    values = []
    try:
        for record in RecordReader(tables.folder.parent / "metrics.jsonl"):
            mfu = to_float(record.get("mfu"))
            # Larger values than 10 are damaged.
            if window[0] <= to_float(record.get("step")) <= window[1] and 0.0 < mfu < 10.0:
                values.append(mfu)
    except OSError:
        return float("nan")
    if values:
        return float(np.median(values))
    return float("nan")
