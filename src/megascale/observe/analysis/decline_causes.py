"""Causes of a growing step time: split the difference between two windows of a run by cause.

In each step all ranks wait for the rank with the largest busy time (rank_times.py), the *last* rank. Its excess is its
busy time minus its usual busy time, which is the rank's median in the earlier window. The excess is split by category
of time, such as computes or waits for samples. If a category's excess is larger in the later window than in the
earlier one, the difference explains that much of the step's growth. The remainder of the growth is communication.

    cause                   what takes longer
    garbage collection      pauses of Python's collector, planned or not
    allocator retries       computes in which the allocator freed its cache and tried again
    throttling              computes of ranks whose GPU was throttled, by the counters of the host
    samples                 waiting for the loader
    late launch             computes and other code of the last rank, which is another rank in most steps. Such a rank
                            launches its last reduce-scatter late, while the median rank takes no longer (MegaScale
                            section 6.3)
    slow rank               the same if one rank is the last in most steps: `megascale stragglers` reports it
    more work               computes of all ranks
    update                  the optimizer, on all ranks
    launch                  time outside of actions, on all ranks
    other processes         time without a processor, on all ranks that compute on their hosts
    communication           waits that no late rank explains, by axis
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from megascale.observe.analysis.gpu_counters import find_newly_throttled
from megascale.observe.analysis.rank_times import CATEGORIES, RankTimes
from megascale.observe.analysis.slow_ranks import nan_median
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]

# Categories of rank_times.py in which a rank works: computes, optimizer, time outside of actions, and time in which the
# process waited for a processor.
_WORK_CATEGORIES = ("compute", "update", "outside", "queued")
_SHORTEST_REPORTED_WAIT = 1e-4  # seconds
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


class _FrequentRank(NamedTuple):
    """The rank that is most often the last.

    Attributes:
        last_rank_count: number of ranks that are the last in some step.
    """

    rank: int
    step_count: int
    last_rank_count: int


@dataclass(frozen=True)
class _Window:
    """Times of a window.

    Attributes:
        last_index: index of the last rank in the rows of `times`, for each step, [steps].
    """

    times: RankTimes
    last_index: Array

    @classmethod
    def from_times(cls, times: RankTimes) -> _Window:
        """Make a window; the last rank of a step is the rank with the largest busy time."""
        return cls(times, np.nan_to_num(times.busy, nan=-np.inf).argmax(0))

    def select_last(self, values: Array) -> Array:
        """Return the value of each step's last rank, [ranks, steps] -> [steps]."""
        return np.asarray(values[self.last_index, np.arange(values.shape[1])])

    def find_most_frequent(self) -> _FrequentRank:
        """Return the rank that is most often the last."""
        counts = Counter(self.times.ranks[self.last_index].tolist())
        rank, step_count = counts.most_common(1)[0]
        return _FrequentRank(rank, step_count, last_rank_count=len(counts))


class WindowComparison:
    """Search for the causes of a growth of the step time between two windows.

    Args:
        tables: source of the counters of GPUs; None leaves them out.
    """

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
        # Growth of each category's excess in each step of the later window, [steps]. Some causes lengthen few steps by
        # much, so use means instead of medians.
        growth = {name: excess_after[name] - compute_trimmed_mean(excess_before[name]) for name in CATEGORIES}
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
        explained_seconds = sum(cause.seconds for cause in causes)
        remainder = max(0.0, self.growth_seconds - explained_seconds)
        causes.append(self._make_cause("communication", remainder, self._describe_communication()))
        # Waits of other ranks may have hidden some growth of the last rank, so the causes may explain more than the
        # whole growth. Scale them down to it.
        if explained_seconds > 0:
            scale = min(1.0, self.growth_seconds / explained_seconds)
        else:
            scale = 1.0
        causes = [replace(cause, seconds=cause.seconds * scale, share=cause.share * scale) for cause in causes]
        return tuple(sorted((cause for cause in causes if cause.seconds > 0), key=lambda cause: -cause.seconds))

    def _make_cause(self, name: str, seconds: float, evidence: list[str], ranks: tuple[int, ...] = ()) -> Cause:
        return Cause(name, seconds, share=seconds / self.growth_seconds, evidence=tuple(evidence), ranks=ranks)

    def _measure_retry_costs(self, work: Array) -> Array | None:
        """Return the seconds that allocator retries cost, [steps]; None without retries.

        If the last rank of a step has a retry, the cost is its busy time minus the longest busy time of the ranks
        without a retry.

        Args:
            work: growth of the work, [steps]; upper limit of the cost.
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
        # Seconds by which the work of all ranks grew, by category, and the remainder, by which single ranks' work grew.
        common = {name: float(np.clip(self._measure_common_growth(name), 0.0, total)) for name in _WORK_CATEGORIES}
        single = max(0.0, total - sum(common.values()))
        causes = []
        throttled = None
        if self.tables is not None:
            throttled = find_newly_throttled(self.tables, self.early.times, self.late.times)
        if throttled is not None:
            evidence, ranks = throttled
            # The growth of the computes of throttled last ranks belongs to the throttling.
            throttled_fraction = float(np.isin(self.late.times.ranks[self.late.last_index], ranks).mean())
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
        frequent = self.late.find_most_frequent()
        step_count = len(self.late.last_index)
        if frequent.step_count > _SAME_RANK_SHARE * step_count and len(self.late.times.ranks) > 1:
            evidence = [
                f"rank {frequent.rank} is the last in {frequent.step_count} of {step_count} steps; megascale "
                "stragglers shows its cause"
            ]
            causes.append(self._make_cause("slow rank", single, evidence, (frequent.rank,)))
        else:
            causes.append(self._make_cause("late launch", single, self._describe_late_launch()))
        return causes

    def _measure_common_growth(self, name: str) -> float:
        """Return the growth of a category in seconds, on the median rank of the peer group where it is the largest.

        A peer group consists of ranks that usually do equal work (see `RankTimes.peer_groups`).
        """
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
        frequent = self.late.find_most_frequent()
        before, after = (_measure_launch_lag(window.times) for window in (self.early, self.late))
        sentences = []
        if np.isfinite(before) and np.isfinite(after):
            sentences.append(
                "within a data-parallel group the last rank launches its last reduce-scatter "
                f"{1e3 * after:.1f} ms after the median rank, {1e3 * before:.1f} ms before"
            )
        sentences += [
            f"the last rank varies from step to step ({frequent.last_rank_count} ranks in "
            f"{len(self.late.last_index)} steps; most often rank {frequent.rank}, {frequent.step_count} times)",
            self._describe_median("compute", "forward and backward"),
            "irregular work on the host is the usual reason: check other processes, logging and code that runs in some "
            "steps only",
        ]
        return sentences

    def _describe_communication(self) -> list[str]:
        """Describe the shortest wait of each step along each axis.

        No late rank causes it: the late rank waits least.
        """
        sentences = []
        for axis in self.late.times.waits:
            windows = (self.early, self.late)
            before, after = (float(np.nanmean(np.nanmin(window.times.waits[axis], 0))) for window in windows)
            if after > _SHORTEST_REPORTED_WAIT or after - before > _SHORTEST_REPORTED_WAIT:
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
    slack = np.nanmax(usual_total) - usual_total[window.last_index]
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
    for group_tensor, group_stage in set(zip(tensor.tolist(), stage.tolist(), strict=True)):
        group_waits = waits[(tensor == group_tensor) & (stage == group_stage)]  # [members, steps]
        with np.errstate(all="ignore"):
            if len(group_waits) < 3:
                typical_wait = np.max(group_waits, 0)  # two ranks have no median rank
            else:
                typical_wait = np.median(group_waits, 0)
            lags.append(typical_wait - np.min(group_waits, 0))
    return float(np.nanmean(np.nanmax(np.stack(lags), 0)))


def compute_trimmed_mean(values: Array) -> float:
    """Return the mean without the largest and the smallest 1% of the values; NaN without finite values."""
    ordered = np.sort(values[np.isfinite(values)])
    trimmed_count = len(ordered) // 100
    if len(ordered):
        return float(ordered[trimmed_count : len(ordered) - trimmed_count].mean())
    return float("nan")
