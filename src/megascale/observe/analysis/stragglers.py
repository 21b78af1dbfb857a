"""Search for slow ranks and slow links of a run, with the steps, the confidence and the cause of each.

The analysis reads a run's spans folder or a copy of it. It compares each rank's busy time (rank_times.py) with that of
ranks with the same work (slow_ranks.py). The cause is the category of time that is longer:

    GPU                 forward, backward or the update take longer on the device
    processor           the same, on a rank that computes on its host
    host: launch        time outside of all actions, or computes that take as long as their launch
    host: loader        waiting for samples
    host: garbage       Python's garbage collection
    host: processes     other processes occupy the processor of a rank that computes on its host

*Queued* time is the time of a rank without a processor ("host: processes"). *Excess* is the time beyond that of the
peers, the ranks with the same work. Slow links are detected by waits that no late rank explains (slow_links.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megascale.observe.analysis.gpu_counters import describe_gpu
from megascale.observe.analysis.rank_times import CATEGORIES, RankTimes
from megascale.observe.analysis.slow_links import SlowLink, find_slow_links
from megascale.observe.analysis.slow_ranks import Judgement, SlowRank, judge_ranks, nan_median
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]

# Cause by category of time (rank_times.py).
_CAUSES = {
    "compute": "GPU",
    "update": "GPU",
    "outside": "host: launch",
    "samples": "host: loader",
    "garbage": "host: garbage",
    "queued": "host: processes",
}
# Description of each category in evidence.
_LABELS = {
    "compute": "forward and backward",
    "update": "the update",
    "outside": "outside of all actions (launching, other code)",
    "samples": "waiting for samples",
    "garbage": "garbage collection",
    "queued": "ready to run while other processes occupy the processor",
}
# The host is the bottleneck if launching takes more than the fraction _LAUNCH_BOUND of a compute's time, and if the
# peers' fraction is lower than _LAUNCH_BOUND by more than _PEER_MARGIN.
_LAUNCH_BOUND = 0.97
_PEER_MARGIN = 0.05
_REPORTED_FRACTION = 0.2  # report a category that causes at least this fraction of the excess
_MAX_MEDIAN_RANKS = 256  # this number of ranks suffices for a median
_WHOLE_HOST_CAUSES = ("GPU", "processor")  # causes that may affect all ranks of a host


@dataclass(frozen=True)
class Straggler:
    """A rank for which other ranks wait.

    Attributes:
        slow_rank: how slow it is, since when, with which confidence.
        cause: a cause from the table in this file's docstring.
        shares: fraction of the excess by category (CATEGORIES); their sum is about 1.
        position: its coordinates as text.
        delay_seconds: seconds per step by which the rank delays the job; 0 if another rank delays it more.
        evidence: sentences.
    """

    slow_rank: SlowRank
    cause: str
    shares: dict[str, float]
    position: str
    host: int
    hostname: str
    device: str
    delay_seconds: float
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Stragglers:
    """Slow ranks and links of a window of steps."""

    times: RankTimes
    judgement: Judgement
    ranks: tuple[Straggler, ...]
    links: tuple[SlowLink, ...]

    @property
    def persistent(self) -> tuple[Straggler, ...]:
        """Ranks that are slow in most of the window and at its end."""
        return tuple(straggler for straggler in self.ranks if straggler.slow_rank.state == "persistent")


def find_stragglers(times: RankTimes, tables: SpanTables | None = None) -> Stragglers:
    """Find the slow ranks and links of a window.

    Args:
        times: times of the window's steps.
        tables: source of the hosts' counters; None leaves them out.
    """
    groups = times.peer_groups
    judgement = judge_ranks(times.running, groups, times.steps, times.ranks)
    machine_categories = tuple(name for name in CATEGORIES if name != "queued")
    stragglers = [
        _explain(times, slow_rank, groups, judged_time=times.running, names=machine_categories)
        for slow_rank in judgement.slow
    ]
    if times.categories["queued"].any():
        # Queued time is noisy, so the search above leaves it out. Search again with it for ranks on busy hosts.
        straggler_ranks = {straggler.slow_rank.rank for straggler in stragglers}
        for slow_rank in judge_ranks(times.busy, groups, times.steps, times.ranks).slow:
            if slow_rank.rank in straggler_ranks:
                continue
            straggler = _explain(times, slow_rank, groups, judged_time=times.busy, names=CATEGORIES)
            if straggler.cause == _CAUSES["queued"]:
                stragglers.append(straggler)
    stragglers = _merge_whole_hosts(stragglers, times)
    if tables is not None:
        stragglers = [_add_counters(straggler, times, tables) for straggler in stragglers]
    links = find_slow_links(times, {slow_rank.rank for slow_rank in judgement.slow})
    # All ranks wait for the slowest one, so only the longest delay of the persistent stragglers counts.
    persistent = [straggler for straggler in stragglers if straggler.slow_rank.state == "persistent"]
    longest_delay = max((straggler.delay_seconds for straggler in persistent), default=0.0)
    for index, straggler in enumerate(stragglers):
        if straggler in persistent and straggler.delay_seconds != longest_delay:
            stragglers[index] = replace(straggler, delay_seconds=0.0)
    return Stragglers(times, judgement, ranks=tuple(stragglers), links=tuple(links))


def _explain(
    times: RankTimes, slow_rank: SlowRank, groups: Array, *, judged_time: Array, names: tuple[str, ...]
) -> Straggler:
    """Compare the times of a slow rank by category with those of its peers, in its slow steps.

    Args:
        groups: peer group of each rank, [ranks].
        judged_time: time by which the rank was judged slow, [ranks, steps].
        names: categories of which that time consists.
    """
    r = int(np.flatnonzero(times.ranks == slow_rank.rank)[0])  # row of the rank
    peers = np.flatnonzero((groups == groups[r]) & (np.arange(len(groups)) != r))  # rows
    steps = np.flatnonzero(slow_rank.slow_steps)  # columns
    excess: dict[str, float] = {}  # seconds per step by category
    for name in names:
        differences = times.categories[name][r, steps] - nan_median(times.categories[name][np.ix_(peers, steps)], 0)
        # A median would ignore delays that occur in few of the steps.
        is_rare = slow_rank.state == "irregular" or name in ("garbage", "samples")
        excess[name] = float(np.nanmean(differences) if is_rare else np.nanmedian(differences))
    total = max(1e-12, sum(max(0.0, seconds) for seconds in excess.values()))
    shares = {name: max(0.0, seconds) / total for name, seconds in excess.items()}
    share_by_cause: dict[str, float] = {}
    for name, share in shares.items():
        share_by_cause[_CAUSES[name]] = share_by_cause.get(_CAUSES[name], 0.0) + share
    cause = max(share_by_cause, key=lambda name: share_by_cause[name])
    plural = "s" if len(peers) != 1 else ""
    evidence = [
        f"{_LABELS[name]}: {1e3 * excess[name]:+.2f} ms per step compared with {len(peers):,} comparable rank{plural} "
        f"({shares[name]:.0%} of the difference)"
        for name in sorted(shares, key=lambda name: -shares[name])
        if shares[name] >= _REPORTED_FRACTION
    ]
    if cause == "GPU":
        cause, sentences = _explain_compute(times, r, peers, steps)
        evidence += sentences
    return Straggler(
        slow_rank=slow_rank,
        cause=cause,
        shares=shares,
        position=times.describe_position(r),
        host=int(times.host[r]),
        hostname=times.hostname[r],
        device=times.device[r],
        delay_seconds=float(slow_rank.excess * np.nanmedian(judged_time[groups == groups[r]])),
        evidence=tuple(evidence),
    )


def _explain_compute(times: RankTimes, r: int, peers: Array, steps: Array) -> tuple[str, list[str]]:
    """Return the cause of longer computes, and sentences of evidence.

    Args:
        r, peers: row of the slow rank, and rows of its peers.
        steps: columns of the slow steps.
    """
    if times.device[r].startswith("cpu"):
        return "processor", []
    launch_fraction = _measure_launch_fraction(times, np.array([r]), steps)
    peer_fraction = _measure_launch_fraction(times, peers, steps)
    if launch_fraction > _LAUNCH_BOUND > peer_fraction + _PEER_MARGIN:
        return "host: launch", [
            f"its host takes {launch_fraction:.0%} of a compute's time to launch it: the GPU waits for its host"
        ]
    return "GPU", [_compare_computes(times, r, peers, steps)]


def _measure_launch_fraction(times: RankTimes, rows: Array, steps: Array) -> float:
    """Return the launch time of computes divided by their duration: the median over ranks and steps."""
    cells = np.ix_(rows[:_MAX_MEDIAN_RANKS], steps)
    with np.errstate(all="ignore"):
        fractions = times.details["host"][cells] / times.details["compute_total"][cells]
        return float(np.nan_to_num(np.nanmedian(fractions)))


def _compare_computes(times: RankTimes, r: int, peers: Array, steps: Array) -> str:
    """Describe how much longer forward, backward and the update take than on the peers."""
    differences = []
    for name, values in (
        ("forward", times.details["forward"]),
        ("backward", times.details["backward"]),
        ("update", times.categories["update"]),
    ):
        with np.errstate(all="ignore"):
            usual = float(np.nanmedian(nan_median(values[np.ix_(peers, steps)], 0)))
            if usual > 0:
                growth = float(np.nanmedian(values[r, steps])) / usual - 1
            else:
                growth = float("nan")
        if np.isfinite(growth):
            differences.append(f"{name} {growth:+.1%}")
    return ", ".join(differences)


def _merge_whole_hosts(stragglers: list[Straggler], times: RankTimes) -> list[Straggler]:
    """Add "whole host" to the cause of slow computes if most ranks of the host are slow.

    Power supply, cooling and other processes slow down all ranks of a host.
    """
    rank_counts = Counter(times.host.tolist())
    if len(rank_counts) < 2:
        return stragglers
    slow_counts = Counter(
        straggler.host
        for straggler in stragglers
        if straggler.cause in _WHOLE_HOST_CAUSES and straggler.slow_rank.state == "persistent"
    )
    merged = []
    for straggler in stragglers:
        slow_count = slow_counts[straggler.host]
        rank_count = rank_counts[straggler.host]
        are_most_slow = slow_count >= 2 and slow_count > rank_count / 2
        is_host_known = straggler.host >= 0
        if straggler.cause in _WHOLE_HOST_CAUSES and is_host_known and are_most_slow:
            sentence = (
                f"{slow_count} of the {rank_count} ranks of host {straggler.host} are slow: check its power supply and "
                "cooling"
            )
            straggler = replace(
                straggler, cause=f"{straggler.cause}, whole host", evidence=straggler.evidence + (sentence,)
            )
        merged.append(straggler)
    return merged


def _add_counters(straggler: Straggler, times: RankTimes, tables: SpanTables) -> Straggler:
    """Return the straggler with evidence from the counters of its GPU in its slow steps."""
    slow_rank = straggler.slow_rank
    sentences = describe_gpu(tables, times, slow_rank.rank, slow_rank.first, slow_rank.last)
    return replace(straggler, evidence=straggler.evidence + tuple(sentences))
