"""Slow machines of a run: slow ranks and links, since when, with which confidence and cause.

The analysis reads a run's spans folder or a copy of it. It compares each rank's own time (rank_parts.py) with that of
comparable ranks (slow_ranks.py). The cause is the part of the work that takes longer:

    GPU                 forward, backward or the update take longer on the device
    processor           the same, on a rank that computes on its host
    host: launch        time outside of all actions, or computes that take as long as their launch
    host: loader        waiting for samples
    host: garbage       Python's garbage collection
    host: processes     other processes occupy the processor of a rank that computes on its host
    link                longer waits that no late peer explains (slow_links.py)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megascale.observe.analysis.gpu_counters import describe_gpu
from megascale.observe.analysis.rank_parts import PARTS, RankParts
from megascale.observe.analysis.slow_links import SlowLink, find_slow_links
from megascale.observe.analysis.slow_ranks import ALARMS, Judgement, SlowRank, judge_ranks, nan_median
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]

_CAUSES = {
    "compute": "GPU",
    "update": "GPU",
    "outside": "host: launch",
    "samples": "host: loader",
    "garbage": "host: garbage",
    "queued": "host: processes",
}
_LABELS = {
    "compute": "forward and backward",
    "update": "the update",
    "outside": "outside of all actions (launching, other code)",
    "samples": "waiting for samples",
    "garbage": "garbage collection",
    "queued": "ready to run while other processes occupy the processor",
}
_LAUNCH_BOUND = 0.97  # launch time as a share of a compute's time from which the host is the bottleneck
_LEAST_SHARE = 0.2  # share of an excess from which a part is reported
_WHOLE_HOST_CAUSES = ("GPU", "processor")


@dataclass(frozen=True)
class Straggler:
    """A rank for which other ranks wait.

    Attributes:
        slow_rank: how slow it is, since when, with which confidence.
        cause: a cause from the table at the head of this file.
        shares: of the excess by part (PARTS); their sum is about 1.
        position, host, hostname, device: its location.
        delay_seconds: time per step by which it is the latest rank of the job, 0 if another rank is later.
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

    parts: RankParts
    judgement: Judgement
    ranks: tuple[Straggler, ...]
    links: tuple[SlowLink, ...]

    @property
    def persistent(self) -> tuple[Straggler, ...]:
        """Ranks that are slow in most of the window and at its end."""
        return tuple(straggler for straggler in self.ranks if straggler.slow_rank.state == "persistent")


def find_stragglers(parts: RankParts, tables: SpanTables | None = None, alarms: float = ALARMS) -> Stragglers:
    """Find the slow ranks and links of a window.

    Args:
        parts: times of the window's steps.
        tables: source of the hosts' counters; None leaves them out.
        alarms: rate of false alarms per analysis.
    """
    groups = parts.peer_groups
    judgement = judge_ranks(parts.running, groups, parts.steps, parts.ranks, alarms)
    machine_parts = tuple(name for name in PARTS if name != "queued")
    stragglers = [_explain(parts, rank, groups, parts.running, machine_parts) for rank in judgement.slow]
    if parts.parts["queued"].any():
        # Slow machines are found without the queueing, which is noisy. Busy hosts are found with it.
        straggler_ranks = {straggler.slow_rank.rank for straggler in stragglers}
        for rank in judge_ranks(parts.busy, groups, parts.steps, parts.ranks, alarms).slow:
            if rank.rank not in straggler_ranks:
                straggler = _explain(parts, rank, groups, parts.busy, PARTS)
                if straggler.cause == _CAUSES["queued"]:
                    stragglers.append(straggler)
    stragglers = _merge_whole_hosts(stragglers, parts)
    if tables is not None:
        stragglers = [_add_counters(straggler, parts, tables) for straggler in stragglers]
    links = find_slow_links(parts, {rank.rank for rank in judgement.slow}, alarms)
    persistent = [straggler for straggler in stragglers if straggler.slow_rank.state == "persistent"]
    worst = max((straggler.delay_seconds for straggler in persistent), default=0.0)
    for index, straggler in enumerate(stragglers):
        if straggler in persistent and straggler.delay_seconds != worst:
            stragglers[index] = replace(straggler, delay_seconds=0.0)
    return Stragglers(parts, judgement, ranks=tuple(stragglers), links=tuple(links))


def _explain(
    parts: RankParts, slow_rank: SlowRank, groups: Array, own_time: Array, names: tuple[str, ...]
) -> Straggler:
    """Compare the parts of a slow rank's work with its peers' in its slow steps.

    Args:
        own_time: time by which the rank was judged, [ranks, steps].
        names: parts of which that time consists.
    """
    r = int(np.flatnonzero(parts.ranks == slow_rank.rank)[0])
    peers = np.flatnonzero((groups == groups[r]) & (np.arange(len(groups)) != r))
    steps = np.flatnonzero(slow_rank.slow_steps)
    excess: dict[str, float] = {}
    for name in names:
        differences = parts.parts[name][r, steps] - nan_median(parts.parts[name][np.ix_(peers, steps)], 0)
        is_rare = slow_rank.state == "irregular" or name in ("garbage", "samples")
        excess[name] = float(np.nanmean(differences) if is_rare else np.nanmedian(differences))
    total = sum(max(0.0, value) for value in excess.values()) or 1e-12
    shares = {name: max(0.0, value) / total for name, value in excess.items()}
    share_by_cause: dict[str, float] = {}
    for name, share in shares.items():
        share_by_cause[_CAUSES[name]] = share_by_cause.get(_CAUSES[name], 0.0) + share
    cause = max(share_by_cause, key=lambda name: share_by_cause[name])
    plural = "s" if len(peers) != 1 else ""
    evidence = [
        f"{_LABELS[name]}: {1e3 * excess[name]:+.2f} ms per step compared with {len(peers):,} comparable rank{plural} "
        f"({shares[name]:.0%} of the difference)"
        for name in sorted(shares, key=lambda name: -shares[name])
        if shares[name] >= _LEAST_SHARE
    ]
    if cause == "GPU":
        cause, sentences = _explain_compute(parts, r, peers, steps)
        evidence += sentences
    return Straggler(
        slow_rank=slow_rank,
        cause=cause,
        shares=shares,
        position=parts.describe_position(r),
        host=int(parts.host[r]),
        hostname=parts.hostname[r],
        device=parts.device[r],
        delay_seconds=float(slow_rank.excess * np.nanmedian(own_time[groups == groups[r]])),
        evidence=tuple(evidence),
    )


def _explain_compute(parts: RankParts, r: int, peers: Array, steps: Array) -> tuple[str, list[str]]:
    """Return the cause of longer computes, and sentences."""
    if parts.device[r].startswith("cpu"):
        return "processor", []
    launch_share = _measure_launch_share(parts, np.array([r]), steps)
    peer_share = _measure_launch_share(parts, peers, steps)
    if launch_share > _LAUNCH_BOUND > peer_share + 0.05:
        return "host: launch", [
            f"its host takes {launch_share:.0%} of a compute's time to launch it: the GPU waits for its host"
        ]
    return "GPU", [_compare_computes(parts, r, peers, steps)]


def _measure_launch_share(parts: RankParts, rows: Array, steps: Array) -> float:
    """Return the launch time of computes as a share of their duration."""
    cells = np.ix_(rows[:256], steps)
    with np.errstate(all="ignore"):
        shares = parts.details["host"][cells] / parts.details["compute_total"][cells]
        return float(np.nan_to_num(np.nanmedian(shares)))


def _compare_computes(parts: RankParts, r: int, peers: Array, steps: Array) -> str:
    """Return how much longer forward, backward and the update take than the peers'."""
    differences = []
    for name, values in (
        ("forward", parts.details["forward"]),
        ("backward", parts.details["backward"]),
        ("update", parts.parts["update"]),
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


def _merge_whole_hosts(stragglers: list[Straggler], parts: RankParts) -> list[Straggler]:
    """Attribute slow computes to the host if most of its ranks are slow: power, cooling or other processes."""
    rank_counts = Counter(parts.host.tolist())
    if len(rank_counts) < 2:
        return stragglers
    slow_counts = Counter(
        straggler.host
        for straggler in stragglers
        if straggler.cause in _WHOLE_HOST_CAUSES and straggler.slow_rank.state == "persistent"
    )
    merged = []
    for straggler in stragglers:
        slow = slow_counts[straggler.host]
        total = rank_counts[straggler.host]
        if straggler.cause in _WHOLE_HOST_CAUSES and straggler.host >= 0 and slow >= 2 and slow > total / 2:
            sentence = (
                f"{slow} of the {total} ranks of host {straggler.host} are slow: check its power supply and cooling"
            )
            straggler = replace(
                straggler, cause=f"{straggler.cause}, whole host", evidence=straggler.evidence + (sentence,)
            )
        merged.append(straggler)
    return merged


def _add_counters(straggler: Straggler, parts: RankParts, tables: SpanTables) -> Straggler:
    slow_rank = straggler.slow_rank
    sentences = describe_gpu(tables, parts, slow_rank.rank, slow_rank.first, slow_rank.last)
    return replace(straggler, evidence=straggler.evidence + tuple(sentences))
