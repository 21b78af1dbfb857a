"""Where a run's time went, by what its metrics and events say: the share that trained, and each cause of loss.

Effective training time is the time of steps that counted over all of the time, as in section 6.3 of the paper. A step
that was done again after a restart is lost; what lies between two steps goes to what the events say happened in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.core.events import Event, is_plausible_time
from megascale.core.strict_json import to_float

TRAINING = "training"
_STARTS = (Event.ATTEMPT_STARTED, Event.RUN_STARTED, Event.RESUMED)
# Events of the driver that say in themselves why a run stood still, in words for people.
_CAUSES = {
    Event.HANG: "hang",
    Event.PROCESS_EXIT: "process ended",
    Event.PROCESS_KILLED: "process killed",
    Event.NODE_LOST: "node lost",
    Event.MISSED_HEARTBEAT: "node lost",
    Event.OUT_OF_MEMORY: "out of memory",
    Event.SEGMENTATION_FAULT: "segmentation fault",
    Event.CUDA_ERROR: "CUDA error",
    Event.NETWORK_ERROR: "network error",
    Event.USER_ERROR: "error in the program",
    Event.DISK_FULL: "disk full",
    Event.DEVICE_FAULT: "device fault",
    Event.NONFINITE_LOSS: "loss not finite",
    Event.NONFINITE_GRADIENT: "gradient not finite",
    Event.CHECKSUM_MISMATCH: "checksum mismatch",
    Event.SLOW_NODE: "slow node",
    Event.EVICTION_ASKED: "node evicted by a person",
    Event.PAUSED: "paused by a person",
    Event.RESTARTED: "restarted by a person",
    Event.UPDATED: "settings changed by a person",
    Event.INTERRUPTED: "interrupted",
    Event.JOB_INTERRUPTED: "interrupted",
}
# What a person asks for: the trainers do some steps more, save, and end with `interrupted`.
_ASKED = {Event.EVICTION_ASKED, Event.PAUSED, Event.RESTARTED, Event.UPDATED, Event.JOB_INTERRUPTED}
# Nothing is at work from the last of these to the first of those that follow it. Where a driver starts the ranks, it is
# at work when they are not: only its own end and start count.
_ENDS = {Event.DRIVER_ENDED, Event.RUN_FINISHED, Event.RUN_FAILED, Event.INTERRUPTED}
_BEGINS = {Event.DRIVER_STARTED, Event.DRIVER_TOOK_OVER}
_BEGINS_ALONE = _BEGINS | {Event.RUN_STARTED, Event.RESUMED}
_CLOCKS = 1.0  # seconds by which hosts' clocks may differ
_LONGEST = 1e9  # seconds; a longer step is damage
_ACTIVITIES = {Event.EVALUATED: "evaluation", Event.CHECKPOINT_SAVED: "saving checkpoints"}  # what such an event ends
# What says more than that a process ended or a node went.
_VAGUE = {"process ended", "node lost", "process killed"}


@dataclass(frozen=True)
class EffectiveTime:
    """seconds: of the whole run by what they went to, `training` first; they add up to `total`."""

    total: float
    seconds: dict[str, float]

    @property
    def share(self) -> float:
        """Of the time that trained; nan if there was none."""
        return self.seconds.get(TRAINING, 0.0) / self.total if self.total > 0 else float("nan")


def effective_time(
    columns: dict[str, np.ndarray[Any, Any]],
    events: Sequence[dict[str, Any]],
    now: float | None = None,
    doing: str = "between steps",
) -> EffectiveTime:
    """Return where the time of a run went.

    Args:
        columns: of MetricColumns.
        events: records of events.jsonl.
        now: seconds since 1970 for a run that goes on; None: it ended with its last record.
        doing: what a run that goes on does now, after its last event.
    """
    told = sorted(
        ((time, one) for one in events if is_plausible_time(time := to_float(one.get("time")))),
        key=lambda each: each[0],
    )
    rows = _usable_rows(columns)
    if not len(rows) and not told:
        return EffectiveTime(0.0, {})
    empty = np.zeros(0)
    ends, lasted = columns.get("time", empty)[rows], columns.get("seconds", empty)[rows]
    starts, lasts = [time for time, _ in told[:1]], [time for time, _ in told[-1:]]
    if len(rows):
        starts.append(float(ends[0] - lasted[0]))
        lasts.append(float(ends[-1]))
    if now is not None:
        lasts.append(now)
    start, last = min(starts), max(lasts)
    # Step by step, and after the last one: what lies between the end of one and the begin of the next.
    before = np.maximum.accumulate(np.concatenate([[start], ends]))
    begins = np.append(np.maximum(before[:-1], ends - lasted), last)
    gaps, spent = begins - before, np.maximum(0.0, ends - begins[:-1])
    redone = columns["redone"][rows] if len(rows) else np.zeros(0, bool)
    found: dict[str, float] = defaultdict(float)
    found[TRAINING], found["steps done again"] = float(spent[~redone].sum()), float(spent[redone].sum())
    happened = _by_gap(told, before, begins)
    final = len(gaps) - 1
    for gap, those in happened.items():
        if gaps[gap] > 0:
            rest = doing if gap == final else ""
            _explain(found, those, float(before[gap]), float(begins[gap]), rest)
    quiet = np.ones(len(gaps), bool)
    quiet[list(happened)] = False
    if quiet[final]:
        found[doing] += max(0.0, float(gaps[final]))
        quiet[final] = False
    found["between steps"] += float(np.maximum(0.0, gaps[quiet]).sum())
    order = sorted((name for name in found if name != TRAINING), key=lambda name: -found[name])
    return EffectiveTime(last - start, {name: found[name] for name in (TRAINING, *order) if found[name] > 0})


def _usable_rows(columns: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the rows that have a time and a duration, in the order of their times."""
    if "time" not in columns or "seconds" not in columns:
        return np.zeros(0, np.int64)
    times, seconds = columns["time"], columns["seconds"]
    with np.errstate(invalid="ignore"):
        usable = np.array([is_plausible_time(time) for time in times.tolist()], bool)
        usable &= (seconds >= 0) & (seconds <= _LONGEST)
    rows = np.flatnonzero(usable)
    return rows[np.argsort(times[rows], kind="stable")]


def _by_gap(
    told: Sequence[tuple[float, dict[str, Any]]], before: np.ndarray[Any, Any], begins: np.ndarray[Any, Any]
) -> dict[int, list[tuple[float, str]]]:
    """(time, event) of each gap between steps in which there are some; requests go to the gap to which they led."""
    found: dict[int, list[tuple[float, str]]] = defaultdict(list)
    asked: list[tuple[float, str]] = []
    for (time, one), gap in zip(told, np.searchsorted(begins, [time for time, _ in told]).tolist(), strict=True):
        kind, begin = str(one.get("event")), float(before[gap])
        if kind in _ASKED:
            asked.append((time, kind))
            continue
        if kind in (Event.INTERRUPTED, *_STARTS):
            found[gap] += [(max(at, begin), each) for at, each in asked if kind == Event.INTERRUPTED or at >= begin]
            asked.clear()
        elif kind == Event.NODE_EVICTED:  # what its ranks had to end for is told already, and it had none otherwise
            asked = [request for request in asked if request[1] != Event.EVICTION_ASKED]
        if time >= begin - _CLOCKS and one.get("action") != "alert":
            found[gap].append((time, kind))
    found[len(before) - 1] += [request for request in asked if request[0] >= before[-1]]
    return {gap: those for gap, those in found.items() if those}


def _explain(found: dict[str, float], happened: list[tuple[float, str]], begin: float, end: float, rest: str) -> None:
    """Give the time between two steps to what happened in it.

    Args:
        found: seconds by name, added to.
        happened: (time, event) in order.
        begin, end: of the gap.
        rest: what follows the last evaluation or checkpoint; empty: the next step does, and what follows belongs to it.
    """
    kinds = [kind for _, kind in happened]
    # Of a launched job the driver says when ranks were started; of attempts that came to no step the last counts.
    first = next((kind for kind in _STARTS if kind in kinds), "")
    starts = [max(begin, min(end, time)) for time, kind in happened if kind == first]
    causes = [_CAUSES[Event(kind)] for kind in kinds if kind in _CAUSES]
    off = 0.0
    back = _BEGINS if Event.ATTEMPT_STARTED in kinds else _BEGINS_ALONE
    ended = max((i for i, kind in enumerate(kinds) if kind in _ENDS), default=len(kinds))
    if begun := [time for time, kind in happened[ended:] if kind in back]:
        off = min(end, begun[0]) - max(begin, happened[ended][0])
        found["not running"] += off
    if starts:
        known = [cause for cause in causes if cause not in _VAGUE] or causes
        found[f"stopped: {known[0]}" if known else "waiting for nodes"] += max(0.0, starts[-1] - begin - off)
        found["starting and loading"] += end - begin - off - max(0.0, starts[-1] - begin - off)
    elif causes:
        found[f"stopped: {causes[0]}"] += end - begin - off
    elif any(kind in _ACTIVITIES for kind in kinds) and end - begin > 0.001:
        _split(found, happened, begin, end - off, rest)
    else:
        found[rest or "between steps"] += end - begin - off


def _split(found: dict[str, float], happened: list[tuple[float, str]], begin: float, end: float, rest: str) -> None:
    """Give each part of a gap to the evaluation or the checkpoint whose event ends it, and what follows to `rest`."""
    at, name = begin, ""
    for time, kind in happened:
        if kind in _ACTIVITIES:
            name = _ACTIVITIES[Event(kind)]
            upto = max(at, min(end, time))
            found[name] += upto - at
            at = upto
    found[rest or name] += max(0.0, end - at)
