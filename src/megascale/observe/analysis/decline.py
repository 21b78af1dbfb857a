"""Why steps take longer than they did: two windows of a run compared, the difference split by cause, with evidence.

In each step the *last* rank is the one that did most itself (rank_parts.py); all others wait for it. What it did beyond
its own usual (its medians in the earlier window) is taken apart, in the earlier window and in the later one: the growth
of each part is that much of the step's growth. What is left is communication.

    garbage collection      Python's pauses, planned or not
    allocator retries       computes of steps and ranks in which the allocator freed its cache and tried again
    throttling              computes of ranks whose GPU was throttled, by its host's counters
    samples                 waiting for the loader
    late launch             computes and code of ranks that change from step to step, each the last to launch its last
                            reduce-scatter, while the median rank takes no longer (MegaScale section 6.3)
    slow rank               the same, of the same rank each time: megascale stragglers names it
    more work               computes of all ranks
    update                  the optimizer, of all ranks
    launch                  time outside of actions, of all ranks
    other processes         time without a processor, of all ranks that compute on their hosts
    communication           waits that nobody's lateness explains, by axis
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from megascale.core.bounded_lines import RecordReader
from megascale.core.strict_json import to_float
from megascale.errors import ConfigError
from megascale.observe.analysis import gpu_counters
from megascale.observe.analysis.rank_parts import PARTS, RankParts
from megascale.observe.analysis.slow_ranks import nan_median
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]

_OWN = ("compute", "update", "outside", "queued")
GROWTH = 0.01  # of a step, from which it counts as a decline
NAMED = 0.2  # of the growth, from which a cause is named
LEAST_STEPS = 10  # of a window
_CERTAIN = 3.0  # standard errors
_SAME = 0.5  # of the steps in which one rank is the last, from which it is that rank


@dataclass(frozen=True)
class Cause:
    """What of the growth has one cause.

    Attributes:
        name: see the head of this file.
        seconds: of a step's growth.
        share: of all of it.
        evidence: sentences.
        ranks: whose it is, where it is some ranks' only.
    """

    name: str
    seconds: float
    share: float
    evidence: tuple[str, ...]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decline:
    """Two windows of a run.

    Attributes:
        before, after: (first, last) step.
        seconds: of a step in each, trimmed means.
        error: standard error of their difference.
        growth: (after - before) / before; steps that got quicker have a negative one.
        mfu: in each, NaN where the run's metrics do not say.
        causes: the largest first; those above NAMED are `named`.
        series: median seconds of each step there is a figure of, for a picture: (steps, seconds).
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
        """What the windows show: steps take longer beyond GROWTH and chance, beyond GROWTH only, or neither."""
        if not self.growth > GROWTH:
            return "unchanged"
        is_certain = self.seconds[1] - self.seconds[0] > _CERTAIN * self.error
        return "declined" if is_certain else "uncertain"

    @property
    def declined(self) -> bool:
        """Whether steps take longer, beyond GROWTH and chance."""
        return self.verdict == "declined"

    @property
    def chance(self) -> float:
        """The growth that chance explains, as a share of the step before; infinite if the windows are too short."""
        return _CERTAIN * self.error / self.seconds[0]

    @property
    def main_causes(self) -> tuple[Cause, ...]:
        """The causes that explain most."""
        return tuple(one for one in self.causes if one.share >= NAMED) if self.declined else ()


@dataclass(frozen=True)
class _Window:
    """A window's parts and in each step its last rank (index of ranks)."""

    parts: RankParts
    last: Array

    def of_last(self, values: Array) -> Array:
        """A figure of each step's last rank."""
        return np.asarray(values[self.last, np.arange(values.shape[1])])


def decline(
    read: Callable[[int, int], RankParts],
    before: tuple[int, int],
    after: tuple[int, int],
    tables: SpanTables | None = None,
    series: tuple[Array, Array] | None = None,
) -> Decline:
    """Compare two windows.

    Args:
        read: gives the parts of the steps from first to last.
        before, after: first and last step of each.
        tables: where counters and metrics are looked up; None: nowhere.
    """
    early, late = read(*before), read(*after)
    if len(early.ranks) != len(late.ranks):
        raise ConfigError(
            f"steps {before[0]}-{before[1]} have {len(early.ranks)} ranks and {after[0]}-{after[1]} "
            f"{len(late.ranks)}: they "
            "are of different layouts; compare steps of one"
        )
    times = [nan_median(parts.seconds, 0) for parts in (early, late)]
    means = [_trimmed(t) for t in times]
    error = float(np.hypot(_standard_error(times[0]), _standard_error(times[1])))
    growth = means[1] - means[0]
    causes = _causes(_last_ranks(early), _last_ranks(late), growth, tables) if growth > 0 else ()
    mfu = (_mfu(tables, before), _mfu(tables, after)) if tables is not None else (float("nan"),) * 2
    if series is None:
        series = (np.concatenate([early.steps, late.steps]), np.concatenate(times))
    return Decline(before, after, (means[0], means[1]), error, growth / means[0], mfu, causes, series)  # type: ignore[arg-type]


def step_series(tables: SpanTables, attempt: int) -> tuple[Array, Array]:
    """Steps of an attempt and the median rank's seconds of each, collection of garbage after it included."""
    found = tables.query(
        "SELECT step, median(seconds) AS seconds FROM (SELECT rank, step, sum(total_ns) / 1e9 AS seconds FROM rollups "
        "WHERE action IN ('step', 'garbage') AND attempt = ? GROUP BY ALL) GROUP BY step ORDER BY step",
        [attempt],
    )
    return found["step"], found["seconds"]


def choose_windows(tables: SpanTables, attempt: int) -> tuple[tuple[int, int], tuple[int, int], tuple[Array, Array]]:
    """The first and the last fifth of an attempt's steps (its first three, which warm up, left out), and the median
    seconds of each step."""
    steps, seconds = (values[3:] for values in step_series(tables, attempt))
    fifth = min(500, max(LEAST_STEPS, len(steps) // 5))
    if len(steps) < 2 * LEAST_STEPS:
        raise ConfigError(
            f"{tables.folder} has {len(steps)} steps of attempt {attempt} after its first three; {2 * LEAST_STEPS} are "
            "needed: wait, or name windows of an earlier attempt with --before and --after"
        )
    return (int(steps[0]), int(steps[fifth - 1])), (int(steps[-fifth]), int(steps[-1])), (steps, seconds)


def _last_ranks(parts: RankParts) -> _Window:
    """The rank with most to do of its own: where stages differ, one of a short stage is late without being the last."""
    return _Window(parts, np.nan_to_num(parts.busy, nan=-np.inf).argmax(0))


def _causes(early: _Window, late: _Window, growth: float, tables: SpanTables | None) -> tuple[Cause, ...]:
    usual = {name: nan_median(early.parts.parts[name]) for name in PARTS}
    then, now = _beyond(early, usual), _beyond(late, usual)
    # Rare long steps are what some causes are: means, not medians.
    grown = {name: now[name] - _trimmed(then[name]) for name in PARTS}
    found: list[Cause] = []
    garbage = float(np.nanmean(grown["garbage"]))
    found.append(_cause("garbage collection", garbage, growth, _garbage(early.parts, late)))
    found.append(_cause("samples", float(np.nanmean(grown["samples"])), growth, _samples(early.parts, late.parts)))
    work = np.asarray(sum(grown[name] for name in _OWN))
    work, retried = _retries(early, late, work, growth)
    found += retried
    found += _computes(early, late, work, growth, tables)
    found = [one for one in found if one.seconds > 0]
    explained = sum(one.seconds for one in found)
    left = growth - explained
    found.append(_cause("communication", max(0.0, left), growth, _communication(early.parts, late.parts)))
    # Some of what the last rank does longer may have been covered by others' waits: shares are of all of it then.
    scale = min(1.0, growth / explained) if explained > 0 else 1.0
    found = [replace(one, seconds=one.seconds * scale, share=one.share * scale) for one in found]
    return tuple(sorted((one for one in found if one.seconds > 0), key=lambda one: -one.seconds))


def _beyond(window: _Window, usual: dict[str, Array]) -> dict[str, Array]:
    """What each step's last rank did beyond its usual, by part, without what its stage's slack takes up."""
    more = {name: window.of_last(window.parts.parts[name] - usual[name][:, None]) for name in PARTS}
    own = np.asarray(sum(usual.values()))
    slack = np.nanmax(own) - own[window.last]
    whole = np.asarray(sum(more.values()))
    with np.errstate(all="ignore"):
        share = np.where(whole > 0, np.clip((whole - slack) / whole, 0.0, 1.0), 1.0)
    return {name: values * share for name, values in more.items()}


def _cause(name: str, seconds: float, growth: float, evidence: list[str], ranks: tuple[int, ...] = ()) -> Cause:
    return Cause(name, seconds, seconds / growth, tuple(text for text in evidence if text), ranks)


def _garbage(early: RankParts, late: _Window) -> list[str]:
    def told(parts: RankParts) -> tuple[float, float, float]:
        times = parts.parts["garbage"]
        longest = np.nanmax(times, 0)
        return (
            float(np.nanmean(parts.details["pause_count"])),
            float(np.nanmean(longest)),
            float((longest > 0.001).mean()),
        )

    (count, most, _), (count2, most2, often) = told(early), told(late.parts)
    text = [
        f"the rank with the longest collection stands {1e3 * most2:.1f} ms a step, {1e3 * most:.1f} ms before; some "
        f"rank "
        f"collects for over 1 ms in {often:.0%} of the steps"
    ]
    if count2 > 0:
        text.append(
            f"Python collects by itself {count2:.2f} times a rank and step ({count:.2f} before); train.gc_interval=N "
            "has all ranks collect after the same step"
        )
    return text


def _samples(early: RankParts, late: RankParts) -> list[str]:
    then, now = (float(np.nanmean(np.nanmax(parts.parts["samples"], 0))) for parts in (early, late))
    return [f"the rank that waits longest for samples waits {1e3 * now:.1f} ms a step, {1e3 * then:.1f} ms before"]


def _retries(early: _Window, late: _Window, work: Array, growth: float) -> tuple[Array, list[Cause]]:
    """What of the work's growth is retries' of allocations: by how much a last rank that had one was later than the
    last of those that had none; and the rest."""
    retried, busy = late.parts.details["retries"] > 0, np.nan_to_num(late.parts.busy, nan=0.0)
    hit = late.of_last(retried)
    if not hit.any():
        return work, []
    without = np.where(retried, -np.inf, busy).max(0)
    costs = np.where(hit, np.clip(late.of_last(busy) - without, 0.0, np.maximum(0.0, work)), 0.0)
    seconds = float(np.nanmean(costs))
    then, now = (
        float(np.nansum(w.parts.details["retries"]) / w.parts.details["retries"].shape[1]) for w in (early, late)
    )
    text = [
        f"{now:.2f} allocator retries a step over all ranks, {then:.2f} before; the last rank had one in "
        f"{hit.mean():.0%} "
        "of the steps",
        "device memory is full: lower train.micro_batch, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ]
    return work - costs, [_cause("allocator retries", seconds, growth, text)]


def _computes(early: _Window, late: _Window, work: Array, growth: float, tables: SpanTables | None) -> list[Cause]:
    """Throttling, more work of all, launching of all, and what single ranks do longer: one, or others each time."""
    found = []
    of_all = {name: _of_all(early.parts, late.parts, name) for name in _OWN}
    seconds = float(np.nanmean(work))
    common = {name: float(np.clip(of_all[name], 0.0, max(0.0, seconds))) for name in _OWN}
    single = max(0.0, seconds - sum(common.values()))
    slowed = gpu_counters.newly_throttled(tables, early.parts, late.parts) if tables is not None else None
    if slowed is not None:
        text, ranks = slowed
        # Throttled ranks that are the last: their computes' growth is the throttling's.
        share = float(np.isin(late.parts.ranks[late.last], ranks).mean())
        part = common["compute"] + common["update"] + single * share
        common["compute"], common["update"], single = 0.0, 0.0, single * (1 - share)
        found.append(_cause("throttling", part, growth, text, ranks))
    found.append(_cause("more work", common["compute"], growth, [_words(early.parts, late.parts, "compute")]))
    found.append(_cause("update", common["update"], growth, [_words(early.parts, late.parts, "update")]))
    found.append(_cause("launch", common["outside"], growth, [_words(early.parts, late.parts, "outside")]))
    found.append(_cause("other processes", common["queued"], growth, [_words(early.parts, late.parts, "queued")]))
    last = Counter(late.parts.ranks[late.last].tolist())
    (rank, times), steps = last.most_common(1)[0], len(late.last)
    if times > _SAME * steps and len(late.parts.ranks) > 1:
        text = [
            f"rank {rank} is the last in {times} of {steps} steps; megascale stragglers says what it is",
        ]
        found.append(_cause("slow rank", single, growth, text, (rank,)))
    else:
        found.append(_cause("late launch", single, growth, _late_launch(early, late)))
    return found


def _of_all(early: RankParts, late: RankParts, name: str) -> float:
    """By how much the median rank takes longer, of the stage in which it is most."""
    group = early.peer_groups
    then, now = nan_median(early.parts[name]), nan_median(late.parts[name])
    return max(float(np.nanmedian(now[group == n] - then[group == n])) for n in np.unique(group))


def _words(early: RankParts, late: RankParts, name: str) -> str:
    then, now = (float(np.nanmedian(parts.parts[name])) for parts in (early, late))
    return f"the median rank takes {1e3 * now:.1f} ms a step for it, {1e3 * then:.1f} ms before"


def _late_launch(early: _Window, late: _Window) -> list[str]:
    """When ranks come to the end of their last backward, which is when their last reduce-scatter leaves."""
    last = Counter(late.parts.ranks[late.last].tolist())
    (rank, times), steps = last.most_common(1)[0], len(late.last)
    text = []
    spans = [_launch_lag(w.parts) for w in (early, late)]
    if all(np.isfinite(one) for one in spans):
        text.append(
            f"within a data-parallel group the last rank launches its last reduce-scatter {1e3 * spans[1]:.1f} ms "
            f"after the "
            f"median rank, {1e3 * spans[0]:.1f} ms before"
        )
    text.append(
        f"it is another rank from step to step ({len(last)} ranks in {steps} steps; most often rank {rank}, {times} "
        f"times)"
    )
    text.append(_words(early.parts, late.parts, "compute").replace("for it", "for forward and backward"))
    text.append("irregular host work does so: look for other processes, logging, code that runs on some steps only")
    return text


def _launch_lag(parts: RankParts) -> float:
    """Seconds by which the last rank of a data-parallel group launches its last reduction after the median one; the
    mean over steps of the group where that is most. From waits, which need no common clock: who comes last waits
    least."""
    tensor, stage, data = parts.coordinates.T
    if data.max() < 1:
        return float("nan")
    waits = parts.details["reductions_wait"]
    lags = []
    for key in set(zip(tensor.tolist(), stage.tolist(), strict=True)):
        mine = waits[(tensor == key[0]) & (stage == key[1])]
        with np.errstate(all="ignore"):
            middle = np.max(mine, 0) if len(mine) < 3 else np.median(mine, 0)
            lags.append(middle - np.min(mine, 0))
    return float(np.nanmean(np.nanmax(np.stack(lags), 0)))


def _communication(early: RankParts, late: RankParts) -> list[str]:
    """By axis, the least wait of a step's ranks (nobody's lateness is in it) and the median one."""
    text = []
    for axis, values in late.waits.items():
        then, now = (float(np.nanmean(np.nanmin(v, 0))) for v in (early.waits[axis], values))
        if now > 1e-4 or now - then > 1e-4:
            text.append(f"{axis}: whoever waits least waits {1e3 * now:.1f} ms a step, {1e3 * then:.1f} ms before")
    return text


def _trimmed(values: Array) -> float:
    """A mean without the longest and shortest hundredth."""
    found = np.sort(values[np.isfinite(values)])
    cut = len(found) // 100
    return float(found[cut : len(found) - cut].mean()) if len(found) else float("nan")


def _standard_error(values: Array) -> float:
    """Of a window's mean; steps in a row are alike, so blocks of them count."""
    found = values[np.isfinite(values)]
    blocks = min(10, len(found) // 2)
    if blocks < 2:
        return float("inf")
    length = len(found) // blocks
    means = found[: blocks * length].reshape(blocks, length).mean(1)
    return float(means.std(ddof=1) / np.sqrt(blocks))


def _mfu(tables: SpanTables, span: tuple[int, int]) -> float:
    """The median MFU of steps by the run's metrics, where those are beside the spans."""
    found = []
    try:
        for record in RecordReader(tables.folder.parent / "metrics.jsonl"):
            step, mfu = to_float(record.get("step")), to_float(record.get("mfu"))
            if span[0] <= step <= span[1] and 0.0 < mfu < 10.0:
                found.append(mfu)
    except OSError:
        return float("nan")
    return float(np.median(found)) if found else float("nan")
