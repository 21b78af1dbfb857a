"""Causes of a growing step time: two windows of a run are compared and the difference is split by cause.

In each step the rank with the largest own time (rank_parts.py) is the *last* rank; all others wait for it. Its time
beyond its usual time (its medians in the earlier window) is split into parts, in both windows. The growth of each part
explains that much of the step's growth. The remainder is communication.

    garbage collection      pauses of Python's collector, planned or not
    allocator retries       computes of steps and ranks in which the allocator freed its cache and tried again
    throttling              computes of ranks whose GPU was throttled, by the counters of its host
    samples                 waiting for the loader
    late launch             computes and code of varying ranks, each the last to launch its last reduce-scatter, while
                            the median rank takes no longer (MegaScale section 6.3)
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
from megascale.observe.analysis.rank_parts import PARTS, RankParts
from megascale.observe.analysis.slow_ranks import nan_median
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]

_WORK_PARTS = ("compute", "update", "outside", "queued")
GROWTH = 0.01  # smallest growth of a step that is a decline
NAMED = 0.2  # smallest share of the growth of a main cause
LEAST_STEPS = 10  # shortest window
_WARM_UP_STEPS = 3
_CERTAIN = 3.0  # standard errors beyond which a growth is certain
_SAME_RANK = 0.5  # share of the steps from which the same rank is always the last


@dataclass(frozen=True)
class Cause:
    """A cause of growth.

    Attributes:
        name: a name from the table at the head of this file.
        seconds: growth of the step that it explains.
        share: the same as a share of the whole growth.
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
        before, after: (first, last) step of each window.
        seconds: trimmed mean of the step time in each window.
        error: standard error of the difference.
        growth: (after - before) / before; negative if steps became shorter.
        mfu: median in each window, NaN if the run's metrics do not contain it.
        causes: the largest first.
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
        """Return whether steps grew beyond GROWTH and chance, beyond GROWTH only, or neither."""
        if not self.growth > GROWTH:
            return "unchanged"
        is_certain = self.seconds[1] - self.seconds[0] > _CERTAIN * self.error
        return "declined" if is_certain else "uncertain"

    @property
    def has_declined(self) -> bool:
        """Return whether steps grew beyond GROWTH and chance."""
        return self.verdict == "declined"

    @property
    def growth_by_chance(self) -> float:
        """Growth that chance explains, as a share of the earlier step; infinite if the windows are too short."""
        return _CERTAIN * self.error / self.seconds[0]

    @property
    def main_causes(self) -> tuple[Cause, ...]:
        """Causes with at least the share NAMED of a certain growth."""
        if not self.has_declined:
            return ()
        return tuple(cause for cause in self.causes if cause.share >= NAMED)


@dataclass(frozen=True)
class _Window:
    """A window's times and the row of the last rank in each step."""

    parts: RankParts
    last: Array

    @classmethod
    def from_parts(cls, parts: RankParts) -> _Window:
        """Choose the rank with the largest own time: a rank of a short stage can be late without being the last."""
        return cls(parts, np.nan_to_num(parts.busy, nan=-np.inf).argmax(0))

    def select_last(self, values: Array) -> Array:
        """Return the value of each step's last rank, [ranks, steps] -> [steps]."""
        return np.asarray(values[self.last, np.arange(values.shape[1])])

    def find_most_frequent(self) -> tuple[int, int, int]:
        """Return the rank that is most often the last, in how many steps, and the number of different last ranks."""
        counts = Counter(self.parts.ranks[self.last].tolist())
        rank, steps = counts.most_common(1)[0]
        return rank, steps, len(counts)


def explain_decline(
    read_parts: Callable[[int, int], RankParts],
    before: tuple[int, int],
    after: tuple[int, int],
    tables: SpanTables | None = None,
    step_seconds: tuple[Array, Array] | None = None,
) -> Decline:
    """Compare two windows of steps.

    Args:
        read_parts: reads the times of the steps from first to last.
        before, after: first and last step of each window.
        tables: source of counters and metrics; None leaves them out.
        step_seconds: (steps, seconds) for a plot; by default those of the windows.
    """
    early = read_parts(*before)
    late = read_parts(*after)
    if len(early.ranks) != len(late.ranks):
        raise ConfigError(
            f"steps {before[0]}-{before[1]} have {len(early.ranks)} ranks and steps {after[0]}-{after[1]} have "
            f"{len(late.ranks)}: their layouts differ; compare steps of one layout"
        )
    times = [nan_median(parts.seconds, 0) for parts in (early, late)]
    seconds = (_trimmed_mean(times[0]), _trimmed_mean(times[1]))
    growth = seconds[1] - seconds[0]
    causes: tuple[Cause, ...] = ()
    if growth > 0:
        causes = _Comparison(early, late, growth, tables).find_causes()
    if step_seconds is None:
        step_seconds = (np.concatenate([early.steps, late.steps]), np.concatenate(times))
    return Decline(
        before=before,
        after=after,
        seconds=seconds,
        error=float(np.hypot(_standard_error(times[0]), _standard_error(times[1]))),
        growth=growth / seconds[0],
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
    """Choose the first and the last fifth of an attempt's steps without its warm-up.

    Returns:
        The two windows as (first, last), and (steps, seconds) of all steps.
    """
    steps, seconds = (values[_WARM_UP_STEPS:] for values in read_step_seconds(tables, attempt))
    fifth = min(500, max(LEAST_STEPS, len(steps) // 5))
    if len(steps) < 2 * LEAST_STEPS:
        raise ConfigError(
            f"{tables.folder} has {len(steps)} steps of attempt {attempt} after its first {_WARM_UP_STEPS}, and "
            f"{2 * LEAST_STEPS} are needed: wait, or choose windows of an earlier attempt with --before and --after"
        )
    return (int(steps[0]), int(steps[fifth - 1])), (int(steps[-fifth]), int(steps[-1])), (steps, seconds)


class _Comparison:
    """The causes of a growth, in seconds, between two windows."""

    def __init__(self, early: RankParts, late: RankParts, growth: float, tables: SpanTables | None) -> None:
        self.early = _Window.from_parts(early)
        self.late = _Window.from_parts(late)
        self.growth = growth
        self.tables = tables

    def find_causes(self) -> tuple[Cause, ...]:
        """Return the causes, the largest first."""
        usual = {name: nan_median(self.early.parts.parts[name]) for name in PARTS}
        excess_before = _measure_excess(self.early, usual)
        excess_after = _measure_excess(self.late, usual)
        # Some causes are rare long steps, so use means, not medians.
        growth = {name: excess_after[name] - _trimmed_mean(excess_before[name]) for name in PARTS}
        causes = [
            self._cause("garbage collection", float(np.nanmean(growth["garbage"])), self._describe_garbage()),
            self._cause("samples", float(np.nanmean(growth["samples"])), self._describe_samples()),
        ]
        work = np.asarray(sum(growth[name] for name in _WORK_PARTS))
        retry_costs = self._measure_retries(work)
        if retry_costs is not None:
            work = work - retry_costs
            causes.append(self._cause("allocator retries", float(np.nanmean(retry_costs)), self._describe_retries()))
        causes += self._split_work(work)
        causes = [cause for cause in causes if cause.seconds > 0]
        explained = sum(cause.seconds for cause in causes)
        remainder = max(0.0, self.growth - explained)
        causes.append(self._cause("communication", remainder, self._describe_communication()))
        # Waits of other ranks may have covered a part of the last rank's growth; shares are of the whole in that case.
        if explained > 0:
            scale = min(1.0, self.growth / explained)
        else:
            scale = 1.0
        causes = [replace(cause, seconds=cause.seconds * scale, share=cause.share * scale) for cause in causes]
        return tuple(sorted((cause for cause in causes if cause.seconds > 0), key=lambda cause: -cause.seconds))

    def _cause(self, name: str, seconds: float, evidence: list[str], ranks: tuple[int, ...] = ()) -> Cause:
        return Cause(name, seconds, share=seconds / self.growth, evidence=tuple(evidence), ranks=ranks)

    def _measure_retries(self, work: Array) -> Array | None:
        """Return the cost of allocator retries, [steps]; None without retries.

        The cost is the time by which a last rank with a retry is later than the last of the ranks without one.
        """
        has_retry = self.late.parts.details["retries"] > 0
        is_last = self.late.select_last(has_retry)
        if not is_last.any():
            return None
        busy = np.nan_to_num(self.late.parts.busy, nan=0.0)
        last_without = np.where(has_retry, -np.inf, busy).max(0)
        costs = np.clip(self.late.select_last(busy) - last_without, 0.0, np.maximum(0.0, work))
        return np.where(is_last, costs, 0.0)

    def _split_work(self, work: Array) -> list[Cause]:
        """Split longer work, [steps], into throttling, growth of all ranks and growth of single ranks."""
        total = max(0.0, float(np.nanmean(work)))
        common = {name: float(np.clip(self._measure_common_growth(name), 0.0, total)) for name in _WORK_PARTS}
        single = max(0.0, total - sum(common.values()))
        causes = []
        throttled = None
        if self.tables is not None:
            throttled = find_newly_throttled(self.tables, self.early.parts, self.late.parts)
        if throttled is not None:
            evidence, ranks = throttled
            # The growth of the computes of throttled last ranks belongs to the throttling.
            share = float(np.isin(self.late.parts.ranks[self.late.last], ranks).mean())
            seconds = common["compute"] + common["update"] + single * share
            common["compute"] = 0.0
            common["update"] = 0.0
            single *= 1 - share
            causes.append(self._cause("throttling", seconds, evidence, ranks))
        for name, part in (
            ("more work", "compute"),
            ("update", "update"),
            ("launch", "outside"),
            ("other processes", "queued"),
        ):
            causes.append(self._cause(name, common[part], [self._describe_median(part)]))
        rank, times, _ = self.late.find_most_frequent()
        steps = len(self.late.last)
        if times > _SAME_RANK * steps and len(self.late.parts.ranks) > 1:
            evidence = [f"rank {rank} is the last in {times} of {steps} steps; megascale stragglers shows its cause"]
            causes.append(self._cause("slow rank", single, evidence, (rank,)))
        else:
            causes.append(self._cause("late launch", single, self._describe_late_launch()))
        return causes

    def _measure_common_growth(self, name: str) -> float:
        """Return the growth of a part on the median rank of the stage with the largest growth."""
        groups = self.early.parts.peer_groups
        growth = nan_median(self.late.parts.parts[name]) - nan_median(self.early.parts.parts[name])
        return max(float(np.nanmedian(growth[groups == group])) for group in np.unique(groups))

    def _describe_median(self, name: str, work: str = "it") -> str:
        before, after = (float(np.nanmedian(w.parts.parts[name])) for w in (self.early, self.late))
        return f"the median rank takes {1e3 * after:.1f} ms per step for {work}, {1e3 * before:.1f} ms before"

    def _describe_garbage(self) -> list[str]:
        longest = [np.nanmax(window.parts.parts["garbage"], 0) for window in (self.early, self.late)]
        before, after = (1e3 * float(np.nanmean(times)) for times in longest)
        sentences = [
            f"the rank with the longest collection is stopped for {after:.1f} ms per step, {before:.1f} ms before; in "
            f"{float((longest[1] > 0.001).mean()):.0%} of the steps a rank collects for more than 1 ms"
        ]
        counts = [float(np.nanmean(window.parts.details["pause_count"])) for window in (self.early, self.late)]
        if counts[1] > 0:
            sentences.append(
                f"Python starts {counts[1]:.2f} collections per rank and step ({counts[0]:.2f} before); with "
                "train.gc_interval=N all ranks collect after the same step"
            )
        return sentences

    def _describe_samples(self) -> list[str]:
        windows = (self.early, self.late)
        before, after = (float(np.nanmean(np.nanmax(w.parts.parts["samples"], 0))) for w in windows)
        return [
            f"the rank with the longest wait for samples waits {1e3 * after:.1f} ms per step, {1e3 * before:.1f} ms "
            "before"
        ]

    def _describe_retries(self) -> list[str]:
        retries = [window.parts.details["retries"] for window in (self.early, self.late)]
        before, after = (float(np.nansum(values) / values.shape[1]) for values in retries)
        share = self.late.select_last(retries[1] > 0).mean()
        return [
            f"{after:.2f} allocator retries per step over all ranks, {before:.2f} before; the last rank had one in "
            f"{share:.0%} of the steps",
            "device memory is full: lower train.micro_batch, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        ]

    def _describe_late_launch(self) -> list[str]:
        rank, times, different = self.late.find_most_frequent()
        before, after = (_measure_launch_lag(window.parts) for window in (self.early, self.late))
        sentences = []
        if np.isfinite(before) and np.isfinite(after):
            sentences.append(
                "within a data-parallel group the last rank launches its last reduce-scatter "
                f"{1e3 * after:.1f} ms after the median rank, {1e3 * before:.1f} ms before"
            )
        sentences += [
            f"the last rank varies from step to step ({different} ranks in {len(self.late.last)} steps; most often "
            f"rank {rank}, {times} times)",
            self._describe_median("compute", "forward and backward"),
            "irregular work on the host is the usual reason: check other processes, logging and code that runs in some "
            "steps only",
        ]
        return sentences

    def _describe_communication(self) -> list[str]:
        """Return by axis the smallest wait of a step's ranks, which contains no other rank's lateness."""
        sentences = []
        for axis in self.late.parts.waits:
            windows = (self.early, self.late)
            before, after = (float(np.nanmean(np.nanmin(w.parts.waits[axis], 0))) for w in windows)
            if after > 1e-4 or after - before > 1e-4:
                sentences.append(
                    f"{axis}: the rank with the shortest wait waits {1e3 * after:.1f} ms per step, {1e3 * before:.1f} "
                    "ms before"
                )
        return sentences


def _measure_excess(window: _Window, usual: dict[str, Array]) -> dict[str, Array]:
    """Return the last rank's time beyond its usual time by part, without the time that its stage's slack absorbs."""
    excess = {name: window.select_last(window.parts.parts[name] - usual[name][:, None]) for name in PARTS}
    usual_total = np.asarray(sum(usual.values()))
    slack = np.nanmax(usual_total) - usual_total[window.last]
    total = np.asarray(sum(excess.values()))
    with np.errstate(all="ignore"):
        share = np.where(total > 0, np.clip((total - slack) / total, 0.0, 1.0), 1.0)
    return {name: values * share for name, values in excess.items()}


def _measure_launch_lag(parts: RankParts) -> float:
    """Return how many seconds the last rank of a data-parallel group launches its last reduction after the median rank.

    The value is the mean over steps of the group with the largest lag. It is derived from waits, which need no common
    clock: the rank that comes last waits least.
    """
    tensor, stage, data = parts.coordinates.T
    if data.max() < 1:
        return float("nan")
    waits = parts.details["reductions_wait"]
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


def _trimmed_mean(values: Array) -> float:
    """Return the mean without the longest and the shortest hundredth."""
    ordered = np.sort(values[np.isfinite(values)])
    cut = len(ordered) // 100
    if len(ordered):
        return float(ordered[cut : len(ordered) - cut].mean())
    return float("nan")


def _standard_error(values: Array) -> float:
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
