"""Slow machines of a run, from its recorded roll-ups: which ranks and links, since when, how sure, and what it is.

All of it is read from the spans folder, or a copy of one. A rank that is slow is told from one that waits by what it
did itself (rank_parts.py), from healthy ones by slow_ranks.py, and its kind by which part of its work takes longer:

    GPU                 forward, backward or the update, the device's own time
    processor           the same, of a rank that computes on its host
    host: launch        time outside of all actions, or computes that are as long as their launching is
    host: loader        waiting for samples
    host: garbage       Python's garbage collection
    host: processes     others have the processor, of a rank that computes on its host
    link                longer waits that no late peer explains (slow_links.py)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megascale.observe.analysis.rank_parts import PARTS, RankParts
from megascale.observe.analysis.slow_links import SlowLink, slow_links
from megascale.observe.analysis.slow_ranks import ALARMS, Judged, SlowRank, judge_ranks, nan_median
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
_WORDS = {
    "compute": "forward and backward",
    "update": "the update",
    "outside": "outside of all actions (launching, other code)",
    "samples": "waiting for samples",
    "garbage": "garbage collection",
    "queued": "ready to run, while other processes have the processor",
}
_LAUNCHED = 0.97  # of a compute's time that its launching takes, where the host is the slower
_LEAST_PART = 0.2  # of an excess; parts that are less are not told


@dataclass(frozen=True)
class Straggler:
    """A rank that others wait for.

    Attributes:
        found: how slow, since when, how sure.
        cause: see the head of this file.
        shares: of the excess by part (PARTS); they add up to about 1.
        place, host, hostname, device: where it is.
        costs: seconds a step by which it is the latest of the job, 0 if another is later.
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
    """What was found in a window of steps."""

    parts: RankParts
    judgement: Judged
    ranks: tuple[Straggler, ...]
    links: tuple[SlowLink, ...]

    @property
    def persistent(self) -> tuple[Straggler, ...]:
        """Those that are slow still, and most of the time."""
        return tuple(one for one in self.ranks if one.slow_rank.state == "persistent")


def find_stragglers(parts: RankParts, tables: SpanTables | None = None, alarms: float = ALARMS) -> Stragglers:
    """Judge a window.

    Args:
        parts: of its steps.
        tables: where counters of hosts are looked up; None: nowhere.
        alarms: false alarms a look.
    """
    busy, group = parts.busy, parts.peer_groups
    judged = judge_ranks(parts.working, group, parts.steps, parts.ranks, alarms)
    index = {rank: r for r, rank in enumerate(parts.ranks.tolist())}
    machine = tuple(name for name in PARTS if name != "queued")
    late = [_explained(parts, one, index[one.rank], group, parts.working, machine) for one in judged.slow]
    if parts.parts["queued"].any():
        # Busy hosts are found by all that keeps a rank up; machines by what is left without that, which is far quieter.
        known = {one.slow_rank.rank for one in late}
        more = judge_ranks(busy, group, parts.steps, parts.ranks, alarms).slow
        kept = [_explained(parts, one, index[one.rank], group, busy, PARTS) for one in more if one.rank not in known]
        late += [one for one in kept if one.cause == _CAUSES["queued"]]
    late = _of_whole_hosts(late, parts)
    if tables is not None:
        late = [_with_counters(one, parts, tables) for one in late]
    links = slow_links(parts, {one.rank for one in judged.slow}, alarms)
    worst = max((one.delay_seconds for one in late if one.slow_rank.state == "persistent"), default=0.0)
    late = [
        one if one.delay_seconds == worst or one.slow_rank.state != "persistent" else replace(one, costs=0.0)
        for one in late
    ]
    return Stragglers(parts, judged, tuple(late), tuple(links))


def _explained(
    parts: RankParts, one: SlowRank, r: int, group: Array, judged: Array, names: tuple[str, ...]
) -> Straggler:
    """What of its work, of the parts by which it was judged, takes longer than its peers' in the steps in which it was
    slow."""
    peers = np.flatnonzero((group == group[r]) & (np.arange(len(group)) != r))
    steps = np.flatnonzero(one.slow)
    more: dict[str, float] = {}
    for name in names:
        mine = parts.parts[name][r, steps]
        theirs = nan_median(parts.parts[name][np.ix_(peers, steps)], 0)
        middle = np.nanmean if one.state == "irregular" or name in ("garbage", "samples") else np.nanmedian
        more[name] = float(middle(mine - theirs))
    whole = sum(max(0.0, value) for value in more.values()) or 1e-12
    shares = {name: max(0.0, value) / whole for name, value in more.items()}
    kinds: Counter[str] = Counter()
    for name, share in shares.items():
        kinds[_CAUSES[name]] += share  # type: ignore[assignment]
    cause = kinds.most_common(1)[0][0]
    on_gpu = not parts.device[r].startswith("cpu")
    evidence = [
        f"{_WORDS[name]}: {1e3 * more[name]:+.2f} ms a step against {_ranks(len(peers))} "
        f"({shares[name]:.0%} of "
        "the difference)"
        for name in sorted(shares, key=lambda name: -shares[name])
        if shares[name] >= _LEAST_PART
    ]
    if cause == "GPU":
        if not on_gpu:
            cause = "processor"
        elif (launched := _share_launched(parts, [r], steps)) > _LAUNCHED > _share_launched(parts, peers, steps) + 0.05:
            cause = "host: launch"
            evidence.append(
                f"its host takes {launched:.0%} of a compute's time to launch it: the GPU waits for its host"
            )
        else:
            evidence.append(_all_of_it(parts, r, peers, steps))
    return Straggler(
        one, cause, shares, parts.at(r), int(parts.host[r]), parts.hostname[r], parts.device[r],
        float(one.excess * np.nanmedian(judged[group == group[r]])), tuple(evidence),
    )  # fmt: skip


def _ranks(count: int) -> str:
    return f"{count:,} comparable rank{'s' * (count != 1)}"


def _share_launched(parts: RankParts, rows: Any, steps: Array) -> float:
    rows = np.asarray(rows)[:256]
    whole = parts.details["compute_whole"][np.ix_(rows, steps)]
    with np.errstate(all="ignore"):
        return float(np.nan_to_num(np.nanmedian(parts.details["host"][np.ix_(rows, steps)] / whole)))


def _all_of_it(parts: RankParts, r: int, peers: Array, steps: Array) -> str:
    """By how much forward, backward and the update are longer each."""
    words = []
    for name, values in (
        ("forward", parts.details["forward"]),
        ("backward", parts.details["backward"]),
        ("update", parts.parts["update"]),
    ):
        with np.errstate(all="ignore"):
            usual = float(np.nanmedian(nan_median(values[np.ix_(peers, steps)], 0)))
            by = float(np.nanmedian(values[r, steps])) / usual - 1 if usual > 0 else float("nan")
        if np.isfinite(by):
            words.append(f"{name} {by:+.1%}")
    return ", ".join(words)


def _of_whole_hosts(late: list[Straggler], parts: RankParts) -> list[Straggler]:
    """Where most ranks of a host are slow by their computes, the cause is the host's: power, cooling, other
    processes."""
    ranks = Counter(parts.host.tolist())
    slow = Counter(
        one.host for one in late if one.cause in ("GPU", "processor") and one.slow_rank.state == "persistent"
    )
    if len(ranks) < 2:
        return late
    found = []
    for one in late:
        count = slow[one.host]
        if one.cause in ("GPU", "processor") and one.host >= 0 and count >= 2 and count > ranks[one.host] / 2:
            text = f"{count} of the {ranks[one.host]} ranks of host {one.host} are slow: look at its power and cooling"
            one = replace(one, cause=f"{one.cause}, whole host", evidence=(*one.evidence, text))
        found.append(one)
    return found


def _with_counters(one: Straggler, parts: RankParts, tables: SpanTables) -> Straggler:
    from megascale.observe.analysis.gpu_counters import of_rank

    sentences = of_rank(tables, parts, one.slow_rank.rank, one.slow_rank.first, one.slow_rank.last)
    return replace(one, evidence=(*one.evidence, *sentences)) if sentences else one
