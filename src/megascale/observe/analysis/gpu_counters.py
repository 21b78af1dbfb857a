"""What a host's counters say of a GPU while steps ran: throttling, clocks, power, temperature."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from megascale.observe.analysis.rank_parts import RankParts
from megascale.observe.analysis.slow_ranks import nan_median
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]

# NVML's bits that mean slower clocks than asked for; idle and settings by people are none of them.
REASONS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slow-down",
    0x0000000000000020: "heat",
    0x0000000000000040: "heat (hardware)",
    0x0000000000000080: "power brake",
}
MASK = sum(REASONS)
_OFTEN = 0.2  # of the seconds in which a reason must hold to be told
_NEWLY = 0.1  # of the seconds, more than before
_LONGER = 0.005  # of its computes, from which a throttled GPU counts
_CLOCK = 0.97  # of the others' clocks, below which a GPU's is told


def between(parts: RankParts, first: int, last: int) -> tuple[int, int]:
    """When steps `first` to `last` ran, nanoseconds on the common clock; (0, 0) if nobody says."""
    mask = (parts.steps >= first) & (parts.steps <= last)
    begin, end = parts.details["first"][:, mask], parts.details["last"][:, mask]
    if not np.isfinite(begin).any() or not np.isfinite(end).any():
        return 0, 0
    return int(np.nanmin(begin)), int(np.nanmax(end))


def gpu_of(parts: RankParts, rank: int) -> tuple[int, str]:
    """Host and device name in the counters of a rank: its position among the ranks of its host."""
    (r,) = np.flatnonzero(parts.ranks == rank)
    host = int(parts.host[r])
    return host, f"gpu{int((parts.host[:r] == host).sum())}"


def values(tables: SpanTables, name: str, begin: int, end: int) -> dict[tuple[int, str], Array]:
    """A counter of all GPUs in a time, by (host, device)."""
    found = tables.query(
        "SELECT host, device, value FROM counters WHERE name = ? AND time_ns BETWEEN ? AND ? ORDER BY time_ns",
        [name, begin, end],
    )
    by: dict[tuple[int, str], list[float]] = {}
    for host, device, value in zip(*(found[key].tolist() for key in ("host", "device", "value")), strict=True):
        by.setdefault((host, device), []).append(value)
    return {key: np.array(those) for key, those in by.items()}


def throttled(reasons: Array) -> tuple[float, str]:
    """Share of the samples in which something slows the GPU down, and what does most often."""
    bits = reasons.astype(np.int64)
    if not len(bits):
        return 0.0, ""
    often = {name: float(((bits & bit) > 0).mean()) for bit, name in REASONS.items()}
    return float(((bits & MASK) > 0).mean()), max(often, key=lambda name: often[name])


def of_rank(tables: SpanTables, parts: RankParts, rank: int, first: int, last: int) -> list[str]:
    """Sentences about a rank's GPU against the job's others, in the time of these steps; none if nothing is told."""
    begin, end = between(parts, first, last)
    mine = gpu_of(parts, rank)
    found = []
    if mine in (xids := values(tables, "gpu_xid", begin, end)):
        told = ", ".join(f"Xid {xid:.0f}" for xid in dict.fromkeys(xids[mine].tolist()))
        found.append(f"its GPU reported {told}")
    reasons = values(tables, "gpu_throttle_reasons", begin, end)
    if mine in reasons:
        share, name = throttled(reasons[mine])
        others = [throttled(those)[0] for key, those in reasons.items() if key != mine]
        usual = float(np.median(others)) if others else 0.0
        if share > max(_OFTEN, usual + _OFTEN):
            found.append(f"its GPU was throttled in {share:.0%} of the seconds ({name}); others {usual:.0%}")
    clocks = values(tables, "gpu_sm_clock_mhz", begin, end)
    if mine in clocks and len(clocks) > 1:
        clock = float(np.median(clocks[mine]))
        usual = float(np.median([np.median(those) for key, those in clocks.items() if key != mine]))
        if clock < _CLOCK * usual:
            found.append(f"its GPU's clock is {clock:.0f} MHz, the others' {usual:.0f} MHz")
    return found


def newly_throttled(tables: SpanTables, early: RankParts, late: RankParts) -> tuple[list[str], tuple[int, ...]] | None:
    """Ranks whose GPUs are throttled in the later window and were not, and whose computes take longer: sentences, and
    who they are; None if nobody is."""
    spans = [between(parts, int(parts.steps[0]), int(parts.steps[-1])) for parts in (early, late)]
    then, now = (values(tables, "gpu_throttle_reasons", *span) for span in spans)
    found: dict[tuple[int, str], tuple[float, str]] = {}
    for key, reasons in now.items():
        share, reason = throttled(reasons)
        before = throttled(then[key])[0] if key in then else 0.0
        if share - before > _NEWLY:
            found[key] = (share, reason)
    longer = nan_median(late.parts["compute"]) / nan_median(early.parts["compute"]) - 1
    gpus = {r: gpu_of(late, rank) for r, rank in enumerate(late.ranks.tolist())} if found else {}
    which = [r for r, gpu in gpus.items() if gpu in found and longer[r] > _LONGER]
    if not which:
        return None
    ranks, keys = tuple(int(late.ranks[r]) for r in which), [gpus[r] for r in which]
    share = float(np.mean([found[key][0] for key in keys]))
    reason = Counter(found[key][1] for key in keys).most_common(1)[0][0]
    named = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    text = [
        f"GPUs of {len(ranks)} ranks ({named}) are throttled in {share:.0%} of the seconds ({reason}), and were not "
        f"before"
    ]
    clocks = [values(tables, "gpu_sm_clock_mhz", *span) for span in spans]
    if all(any(key in one for key in keys) for one in clocks):
        mhz = [float(np.median(np.concatenate([one[key] for key in keys if key in one]))) for one in clocks]
        text.append(f"their clock is {mhz[1]:.0f} MHz, {mhz[0]:.0f} MHz before")
    text.append(f"their computes take {float(np.nanmedian(longer[which])):.1%} longer")
    return text, ranks
