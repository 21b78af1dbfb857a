"""Causes of a growing step time: compare two windows of a run, and split the difference by cause.

In each step all ranks wait for the rank with the largest busy time (rank_times.py), the *last* rank. Its excess is its
busy time minus its usual time, which is its median in the earlier window. The excess is split by category of time. The
growth of a category's excess from the earlier to the later window explains that much of the step's growth. The
remainder is communication.

    cause                   what takes longer
    garbage collection      pauses of Python's collector, planned or not
    allocator retries       computes in which the allocator freed its cache and tried again
    throttling              computes of ranks whose GPU was throttled, by the counters of the host
    samples                 waiting for the loader
    late launch             computes and code of varying ranks, each the last to launch its last reduce-scatter. The
                            median rank takes no longer (MegaScale section 6.3)
    slow rank               the same, always on the same rank: `megascale stragglers` reports it
    more work               computes of all ranks
    update                  the optimizer, on all ranks
    launch                  time outside of actions, on all ranks
    other processes         time without a processor, on all ranks that compute on their hosts
    communication           waits that no late rank explains, by axis
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from megascale.core.json_lines import RecordReader
from megascale.core.strict_json import to_float
from megascale.errors import ConfigError
from megascale.observe.analysis.gpu_counters import find_newly_throttled
from megascale.observe.analysis.rank_times import CATEGORIES, RankTimes
from megascale.observe.analysis.slow_ranks import nan_median
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]

_WORK_CATEGORIES = ("compute", "update", "outside", "queued")
MIN_GROWTH = 0.01  # smallest growth of the step time that is a decline
MAIN_CAUSE_SHARE = 0.2  # a main cause explains at least this fraction of the growth
MIN_STEPS = 10  # steps of the shortest window
_WARM_UP_STEPS = 3
_CERTAIN_ERRORS = 3.0  # a growth is certain if it exceeds this number of standard errors
_SAME_RANK_SHARE = 0.5  # one rank is slow if it is the last in more than this fraction of the steps


@dataclass(frozen=True)
class Cause:
    """A cause of growth.

    Attributes:
        name: a name from the table in this file's docstring.
        seconds: growth of the step time that the cause explains.
        share: `seconds` as a fraction of the whole growth.
        evidence: sentences.
        ranks: affected ranks; empty if all are.
    """

    name: str
    seconds: float
    share: float
    evidence: tuple[str, ...]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decline:
    """The comparison of two windows of a run.

    Attributes:
        before, after: (first, last) step of the earlier and the later window.
        seconds: trimmed mean of the step time in the earlier and the later window.
        error: standard error of the difference of these means.
        growth: difference of these means as a fraction of the earlier one; negative if steps became shorter.
        mfu: median in the earlier and the later window, NaN if the run's metrics do not contain it.
        causes: sorted by seconds, the largest first.
        step_seconds: (steps, median seconds of the ranks), for a plot.
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
        """Return whether steps grew beyond MIN_GROWTH and chance, beyond MIN_GROWTH only, or neither."""
        if not self.growth > MIN_GROWTH:
            return "unchanged"
        is_certain = self.seconds[1] - self.seconds[0] > _CERTAIN_ERRORS * self.error
        return "declined" if is_certain else "uncertain"

    @property
    def has_declined(self) -> bool:
        """Return whether steps grew beyond MIN_GROWTH and chance."""
        return self.verdict == "declined"

    @property
    def growth_by_chance(self) -> float:
        """Growth that chance explains, as a fraction of the earlier step time; infinite for too short windows."""
        return _CERTAIN_ERRORS * self.error / self.seconds[0]

    @property
    def main_causes(self) -> tuple[Cause, ...]:
        """Causes of at least MAIN_CAUSE_SHARE of the growth; empty unless the growth is certain."""
        if not self.has_declined:
            return ()
        return tuple(cause for cause in self.causes if cause.share >= MAIN_CAUSE_SHARE)


@dataclass(frozen=True)
class _Window:
    """Times of a window, and the row of the last rank in each step, [steps]."""

    times: RankTimes
    last: Array

    @classmethod
    def from_times(cls, times: RankTimes) -> _Window:
        """Make a window; the last rank of a step is the rank with the largest busy time."""
        return cls(times, np.nan_to_num(times.busy, nan=-np.inf).argmax(0))

    def select_last(self, values: Array) -> Array:
        """Return the value of each step's last rank, [ranks, steps] -> [steps]."""
        return np.asarray(values[self.last, np.arange(values.shape[1])])

    def find_most_frequent(self) -> tuple[int, int, int]:
        """Return the rank that is most often the last, the number of these steps, and the number of all last ranks."""
        counts = Counter(self.times.ranks[self.last].tolist())
        rank, step_count = counts.most_common(1)[0]
        return rank, step_count, len(counts)


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
    seconds = (_compute_trimmed_mean(early_seconds), _compute_trimmed_mean(late_seconds))
    growth_seconds = seconds[1] - seconds[0]
    causes: tuple[Cause, ...] = ()
    if growth_seconds > 0:
        causes = _Comparison(early, late, growth_seconds, tables).find_causes()
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
    """Choose the first and the last fifth of an attempt's steps after its warm-up, at most 500 steps each.

    Raises ConfigError if there are too few steps.

    Returns:
        The two windows as (first, last), and (steps, seconds) of all steps.
    """
    steps, seconds = (values[_WARM_UP_STEPS:] for values in read_step_seconds(tables, attempt))
    window_length = min(500, max(MIN_STEPS, len(steps) // 5))
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


class _Comparison:
    """Search for the causes of a growth of the step time, `growth_seconds`, between two windows."""

    def __init__(self, early: RankTimes, late: RankTimes, growth_seconds: float, tables: SpanTables | None) -> None:
        self.early = _Window.from_times(early)
        self.late = _Window.from_times(late)
        self.growth_seconds = growth_seconds
        self.tables = tables

    def find_causes(self) -> tuple[Cause, ...]:
        """Return the causes, the largest first."""
        usual = {name: nan_median(self.early.times.categories[name]) for name in CATEGORIES}
        excess_before = _measure_excess(self.early, usual)
        excess_after = _measure_excess(self.late, usual)
        # Some causes lengthen few steps by much, so use means instead of medians.
        growth = {name: excess_after[name] - _compute_trimmed_mean(excess_before[name]) for name in CATEGORIES}
        causes = [
            self._make_cause("garbage collection", float(np.nanmean(growth["garbage"])), self._describe_garbage()),
            self._make_cause("samples", float(np.nanmean(growth["samples"])), self._describe_samples()),
        ]
        work = np.asarray(sum(growth[name] for name in _WORK_CATEGORIES))
        retry_costs = self._measure_retry_costs(work)
        if retry_costs is not None:
            work = work - retry_costs
            causes.append(
                self._make_cause("allocator retries", float(np.nanmean(retry_costs)), self._describe_retries())
            )
        causes += self._split_work(work)
        causes = [cause for cause in causes if cause.seconds > 0]
        explained = sum(cause.seconds for cause in causes)
        remainder = max(0.0, self.growth_seconds - explained)
        causes.append(self._make_cause("communication", remainder, self._describe_communication()))
        # Waits of other ranks may have hidden some growth of the last rank, so the causes may exceed the whole growth.
        if explained > 0:
            scale = min(1.0, self.growth_seconds / explained)
        else:
            scale = 1.0
        causes = [replace(cause, seconds=cause.seconds * scale, share=cause.share * scale) for cause in causes]
        return tuple(sorted((cause for cause in causes if cause.seconds > 0), key=lambda cause: -cause.seconds))

    def _make_cause(self, name: str, seconds: float, evidence: list[str], ranks: tuple[int, ...] = ()) -> Cause:
        return Cause(name, seconds, share=seconds / self.growth_seconds, evidence=tuple(evidence), ranks=ranks)

    def _measure_retry_costs(self, work: Array) -> Array | None:
        """Return the seconds that allocator retries cost, [steps]; None without retries.

        If the last rank of a step has a retry, the cost is its busy time minus the longest busy time of the ranks
        without a retry. It is at most the growth of the work, [steps].
        """
        has_retry = self.late.times.details["retries"] > 0
        last_has_retry = self.late.select_last(has_retry)
        if not last_has_retry.any():
            return None
        busy = np.nan_to_num(self.late.times.busy, nan=0.0)
        longest_without_retry = np.where(has_retry, -np.inf, busy).max(0)
        costs = np.clip(self.late.select_last(busy) - longest_without_retry, 0.0, np.maximum(0.0, work))
        return np.where(last_has_retry, costs, 0.0)

    def _split_work(self, work: Array) -> list[Cause]:
        """Split the growth of the work, [steps], into throttling, growth of all ranks and growth of single ranks."""
        total = max(0.0, float(np.nanmean(work)))
        common = {name: float(np.clip(self._measure_common_growth(name), 0.0, total)) for name in _WORK_CATEGORIES}
        single = max(0.0, total - sum(common.values()))
        causes = []
        throttled = None
        if self.tables is not None:
            throttled = find_newly_throttled(self.tables, self.early.times, self.late.times)
        if throttled is not None:
            evidence, ranks = throttled
            # The growth of the computes of throttled last ranks belongs to the throttling.
            throttled_fraction = float(np.isin(self.late.times.ranks[self.late.last], ranks).mean())
            seconds = common["compute"] + common["update"] + single * throttled_fraction
            common["compute"] = 0.0
            common["update"] = 0.0
            single *= 1 - throttled_fraction
            causes.append(self._make_cause("throttling", seconds, evidence, ranks))
        for name, category in (
            ("more work", "compute"),
            ("update", "update"),
            ("launch", "outside"),
            ("other processes", "queued"),
        ):
            causes.append(self._make_cause(name, common[category], [self._describe_median(category)]))
        rank, last_count, _ = self.late.find_most_frequent()
        step_count = len(self.late.last)
        if last_count > _SAME_RANK_SHARE * step_count and len(self.late.times.ranks) > 1:
            evidence = [
                f"rank {rank} is the last in {last_count} of {step_count} steps; megascale stragglers shows its cause"
            ]
            causes.append(self._make_cause("slow rank", single, evidence, (rank,)))
        else:
            causes.append(self._make_cause("late launch", single, self._describe_late_launch()))
        return causes

    def _measure_common_growth(self, name: str) -> float:
        """Return the growth of a category in seconds on the median rank of the peer group with the largest growth."""
        groups = self.early.times.peer_groups
        growth = nan_median(self.late.times.categories[name]) - nan_median(self.early.times.categories[name])
        return max(float(np.nanmedian(growth[groups == group])) for group in np.unique(groups))

    def _describe_median(self, category: str, activity: str = "it") -> str:
        """Return a sentence about the median rank's time for a category, which the sentence calls `activity`."""
        before, after = (float(np.nanmedian(w.times.categories[category])) for w in (self.early, self.late))
        return f"the median rank takes {1e3 * after:.1f} ms per step for {activity}, {1e3 * before:.1f} ms before"

    def _describe_garbage(self) -> list[str]:
        longest = [np.nanmax(window.times.categories["garbage"], 0) for window in (self.early, self.late)]
        before, after = (1e3 * float(np.nanmean(times)) for times in longest)
        sentences = [
            f"the rank with the longest collection is stopped for {after:.1f} ms per step, {before:.1f} ms before; in "
            f"{float((longest[1] > 0.001).mean()):.0%} of the steps a rank collects for more than 1 ms"
        ]
        counts = [float(np.nanmean(window.times.details["pause_count"])) for window in (self.early, self.late)]
        if counts[1] > 0:
            sentences.append(
                f"Python starts {counts[1]:.2f} collections per rank and step ({counts[0]:.2f} before); with "
                "train.gc_interval=N all ranks collect after the same step"
            )
        return sentences

    def _describe_samples(self) -> list[str]:
        windows = (self.early, self.late)
        before, after = (float(np.nanmean(np.nanmax(w.times.categories["samples"], 0))) for w in windows)
        return [
            f"the rank with the longest wait for samples waits {1e3 * after:.1f} ms per step, {1e3 * before:.1f} ms "
            "before"
        ]

    def _describe_retries(self) -> list[str]:
        retries = [window.times.details["retries"] for window in (self.early, self.late)]
        before, after = (float(np.nansum(values) / values.shape[1]) for values in retries)
        share = self.late.select_last(retries[1] > 0).mean()
        return [
            f"{after:.2f} allocator retries per step over all ranks, {before:.2f} before; the last rank had one in "
            f"{share:.0%} of the steps",
            "device memory is full: lower train.micro_batch, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ]

    def _describe_late_launch(self) -> list[str]:
        rank, last_count, rank_count = self.late.find_most_frequent()
        before, after = (_measure_launch_lag(window.times) for window in (self.early, self.late))
        sentences = []
        if np.isfinite(before) and np.isfinite(after):
            sentences.append(
                "within a data-parallel group the last rank launches its last reduce-scatter "
                f"{1e3 * after:.1f} ms after the median rank, {1e3 * before:.1f} ms before"
            )
        sentences += [
            f"the last rank varies from step to step ({rank_count} ranks in {len(self.late.last)} steps; most often "
            f"rank {rank}, {last_count} times)",
            self._describe_median("compute", "forward and backward"),
            "irregular work on the host is the usual reason: check other processes, logging and code that runs in some "
            "steps only",
        ]
        return sentences

    def _describe_communication(self) -> list[str]:
        """Describe the shortest wait of each step along each axis, which is not caused by a late rank."""
        sentences = []
        for axis in self.late.times.waits:
            windows = (self.early, self.late)
            before, after = (float(np.nanmean(np.nanmin(window.times.waits[axis], 0))) for window in windows)
            if after > 1e-4 or after - before > 1e-4:
                sentences.append(
                    f"{axis}: the rank with the shortest wait waits {1e3 * after:.1f} ms per step, {1e3 * before:.1f} "
                    "ms before"
                )
        return sentences


def _measure_excess(window: _Window, usual: dict[str, Array]) -> dict[str, Array]:
    """Return the last rank's time beyond its usual time by category, seconds [steps].

    A rank of a stage with less work has slack: it delays the others only by what exceeds the slack.

    Args:
        usual: usual seconds of each rank by category, [ranks].
    """
    excess = {name: window.select_last(window.times.categories[name] - usual[name][:, None]) for name in CATEGORIES}
    usual_total = np.asarray(sum(usual.values()))
    slack = np.nanmax(usual_total) - usual_total[window.last]
    total = np.asarray(sum(excess.values()))
    with np.errstate(all="ignore"):
        fraction = np.where(total > 0, np.clip((total - slack) / total, 0.0, 1.0), 1.0)
    return {name: values * fraction for name, values in excess.items()}


def _measure_launch_lag(times: RankTimes) -> float:
    """Return the seconds between the launches of the last reduction by the median and by the last rank of a group.

    The groups are data-parallel. The value is the largest lag of any group, averaged over the steps; NaN without data
    parallelism. The lag is the difference of waits, since the last rank waits least. It needs no common clock.
    """
    tensor, stage, data = times.coordinates.T
    if data.max() < 1:
        return float("nan")
    waits = times.details["reductions_wait"]
    lags = []
    for group in set(zip(tensor.tolist(), stage.tolist(), strict=True)):
        members = waits[(tensor == group[0]) & (stage == group[1])]
        with np.errstate(all="ignore"):
            if len(members) < 3:
                typical = np.max(members, 0)
            else:
                typical = np.median(members, 0)
            lags.append(typical - np.min(members, 0))
    return float(np.nanmean(np.nanmax(np.stack(lags), 0)))


def _compute_trimmed_mean(values: Array) -> float:
    """Return the mean without the largest and the smallest 1% of the values; NaN without finite values."""
    ordered = np.sort(values[np.isfinite(values)])
    trimmed_count = len(ordered) // 100
    if len(ordered):
        return float(ordered[trimmed_count : len(ordered) - trimmed_count].mean())
    return float("nan")


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
            if window[0] <= to_float(record.get("step")) <= window[1] and 0.0 < mfu < 10.0:
                values.append(mfu)
    except OSError:
        return float("nan")
    if values:
        return float(np.median(values))
    return float("nan")
