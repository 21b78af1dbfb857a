"""Effective training time of a run, from its metrics and events, and the causes of lost time.

Effective training time is the time of steps that counted divided by the total time (MegaScale section 6.3). A step that
was repeated after a restart is lost time. A step without some replicas loses their share. The time between two
steps is attributed to the events in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.core.events import Event, is_plausible_time
from megascale.core.strict_json import to_float

Array = np.ndarray[Any, Any]

TRAINING = "training"
REPEATED = "repeated steps"
BETWEEN_STEPS = "between steps"
MISSING = "replicas missing"
_STARTS = (Event.ATTEMPT_STARTED, Event.RUN_STARTED, Event.RESUMED)
# The driver's events that say why a run stood still, and the cause that is shown.
CAUSES = {
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
    Event.REPLAY_MISMATCH: "replay mismatch",
    Event.SLOW_NODE: "slow node",
    Event.REPLICAS_JOINING: "replicas joining",
    Event.REPLICAS_OVERDUE: "replicas missing",
    Event.EVICTION_ASKED: "node evicted by a person",
    Event.PAUSED: "paused by a person",
    Event.RESTARTED: "restarted by a person",
    Event.UPDATED: "settings changed by a person",
    Event.INTERRUPTED: "interrupted",
    Event.JOB_INTERRUPTED: "interrupted",
}
# Requests of a person: trainers run some more steps, save, and end with `interrupted`.
_REQUESTS = {Event.EVICTION_ASKED, Event.PAUSED, Event.RESTARTED, Event.UPDATED, Event.JOB_INTERRUPTED}
# No process runs from the last of the first set to the first of the second set. If a driver starts the ranks, only its
# own end and start count, because it runs while they do not.
_ENDS = {Event.DRIVER_ENDED, Event.RUN_FINISHED, Event.RUN_FAILED, Event.INTERRUPTED}
_DRIVER_BEGINS = {Event.DRIVER_STARTED, Event.DRIVER_TOOK_OVER}
_BEGINS = _DRIVER_BEGINS | {Event.RUN_STARTED, Event.RESUMED}
_CLOCK_DIFFERENCE = 1.0  # seconds by which hosts' clocks may differ
_LONGEST_STEP = 1e9  # seconds; a longer step is damage
_ACTIVITIES = {Event.EVALUATED: "evaluation", Event.CHECKPOINT_SAVED: "saving checkpoints"}  # the event ends it
_VAGUE_CAUSES = {"process ended", "node lost", "process killed"}


def choose_cause(causes: Sequence[str]) -> str:
    """Return the first of the causes that is not merely the end of a process or node, else the first."""
    return next((cause for cause in causes if cause not in _VAGUE_CAUSES), causes[0])


@dataclass(frozen=True)
class EffectiveTime:
    """A run's time. seconds: by cause, `training` first; their sum is `total`."""

    total: float
    seconds: dict[str, float]

    @property
    def share(self) -> float:
        """Share of the time that trained; NaN without any time."""
        if self.total > 0:
            return self.seconds.get(TRAINING, 0.0) / self.total
        return float("nan")


def measure_effective_time(
    columns: dict[str, Array],
    events: Sequence[dict[str, Any]],
    current_time: float | None = None,
    activity: str = BETWEEN_STEPS,
) -> EffectiveTime:
    """Attribute the time of a run.

    Args:
        columns: columns of MetricColumns.
        events: records of events.jsonl.
        now: seconds since 1970 for a live run; None: the run ended with its last record.
        activity: what a live run has done since its last event.
    """
    timed_events = [(to_float(event.get("time")), event) for event in events]
    timed_events = sorted(
        ((time, event) for time, event in timed_events if is_plausible_time(time)), key=lambda item: item[0]
    )
    rows = _select_usable_rows(columns)
    if not len(rows) and not timed_events:
        return EffectiveTime(0.0, {})
    empty = np.zeros(0)
    ends = columns.get("time", empty)[rows]
    durations = columns.get("seconds", empty)[rows]
    if timed_events:
        times = [timed_events[0][0], timed_events[-1][0]]
    else:
        times = []
    if len(rows):
        times += [float(ends[0] - durations[0]), float(ends[-1])]
    start = min(times)
    last = max(times if current_time is None else times + [current_time])
    # Gap i is the time before step i; the last gap follows the last step.
    gap_begins = np.maximum.accumulate(np.concatenate([[start], ends]))
    gap_ends = np.append(np.maximum(gap_begins[:-1], ends - durations), last)
    gaps = gap_ends - gap_begins
    step_times = np.maximum(0.0, ends - gap_ends[:-1])
    if len(rows):
        redone = columns["redone"][rows]
    else:
        redone = np.zeros(0, bool)
    seconds: dict[str, float] = defaultdict(float)
    missing = np.nan_to_num(columns["missing_share"][rows]) if "missing_share" in columns else np.zeros(len(rows))
    seconds[TRAINING] = float((step_times * (1 - missing))[~redone].sum())
    seconds[MISSING] = float((step_times * missing)[~redone].sum())
    seconds[REPEATED] = float(step_times[redone].sum())
    events_by_gap = _group_by_gap(timed_events, gap_begins, gap_ends)
    final = len(gaps) - 1
    for gap, gap_events in events_by_gap.items():
        if gaps[gap] > 0:
            next_activity = activity if gap == final else ""
            _Gap(gap_events, float(gap_begins[gap]), float(gap_ends[gap]), next_activity).attribute(seconds)
    is_quiet = np.ones(len(gaps), bool)
    is_quiet[list(events_by_gap)] = False
    if is_quiet[final]:
        seconds[activity] += max(0.0, float(gaps[final]))
        is_quiet[final] = False
    seconds[BETWEEN_STEPS] += float(np.maximum(0.0, gaps[is_quiet]).sum())
    causes = sorted((name for name in seconds if name != TRAINING), key=lambda name: -seconds[name])
    return EffectiveTime(
        last - start, {name: seconds[name] for name in (TRAINING,) + tuple(causes) if seconds[name] > 0}
    )


def _select_usable_rows(columns: dict[str, Array]) -> Array:
    """Return the rows that have a time and a duration, in the order of their times."""
    if "time" not in columns or "seconds" not in columns:
        return np.zeros(0, np.int64)
    times, seconds = columns["time"], columns["seconds"]
    with np.errstate(invalid="ignore"):
        usable = np.array([is_plausible_time(time) for time in times.tolist()], bool)
        usable &= (seconds >= 0) & (seconds <= _LONGEST_STEP)
    rows = np.flatnonzero(usable)
    return rows[np.argsort(times[rows], kind="stable")]


def _group_by_gap(
    timed_events: Sequence[tuple[float, dict[str, Any]]], gap_begins: Array, gap_ends: Array
) -> dict[int, list[tuple[float, str]]]:
    """Return (time, event) of each gap with events; requests belong to the gap to which they led."""
    groups: dict[int, list[tuple[float, str]]] = defaultdict(list)
    requests: list[tuple[float, str]] = []
    gaps = np.searchsorted(gap_ends, [time for time, _ in timed_events]).tolist()
    for (time, event), gap in zip(timed_events, gaps, strict=True):
        kind = str(event.get("event"))
        begin = float(gap_begins[gap])
        if kind in _REQUESTS:
            requests.append((time, kind))
            continue
        if kind in (Event.INTERRUPTED, *_STARTS):
            for request_time, request in requests:
                if kind == Event.INTERRUPTED or request_time >= begin:
                    groups[gap].append((max(request_time, begin), request))
            requests.clear()
        elif kind == Event.NODE_EVICTED:
            # The end of the node's ranks was already attributed; without ranks the eviction cost no time.
            requests = [request for request in requests if request[1] != Event.EVICTION_ASKED]
        if time >= begin - _CLOCK_DIFFERENCE and event.get("action") != "alert":
            groups[gap].append((time, kind))
    groups[len(gap_begins) - 1] += [request for request in requests if request[0] >= gap_begins[-1]]
    return {gap: events for gap, events in groups.items() if events}


@dataclass(frozen=True)
class _Gap:
    """The time between two steps.

    Attributes:
        events: (time, event) in order.
        next_activity: what follows the last evaluation or checkpoint; empty if the next step does.
    """

    events: list[tuple[float, str]]
    begin: float
    end: float
    next_activity: str

    def attribute(self, seconds: dict[str, float]) -> None:
        """Add the gap's time to its causes."""
        kinds = [kind for _, kind in self.events]
        not_running = self._measure_not_running(kinds)
        if not_running:
            seconds["not running"] += not_running
        remaining = self.end - self.begin - not_running
        # In a launched job the driver's event marks the start. Of attempts without a step the last one counts.
        start_kind = next((kind for kind in _STARTS if kind in kinds), "")
        starts = [max(self.begin, min(self.end, time)) for time, kind in self.events if kind == start_kind]
        causes = [CAUSES[Event(kind)] for kind in kinds if kind in CAUSES]
        if starts:
            stopped = max(0.0, starts[-1] - self.begin - not_running)
            seconds[f"stopped: {choose_cause(causes)}" if causes else "waiting for nodes"] += stopped
            seconds["starting and loading"] += remaining - stopped
        elif causes:
            seconds[f"stopped: {causes[0]}"] += remaining
        elif any(kind in _ACTIVITIES for kind in kinds) and self.end - self.begin > 0.001:
            self._attribute_activities(seconds, self.end - not_running)
        else:
            seconds[self.next_activity or BETWEEN_STEPS] += remaining

    def _measure_not_running(self, kinds: list[str]) -> float:
        """Return the time in which no process ran."""
        if Event.ATTEMPT_STARTED in kinds:
            begin_kinds = _DRIVER_BEGINS
        else:
            begin_kinds = _BEGINS
        ended = max((i for i, kind in enumerate(kinds) if kind in _ENDS), default=len(kinds))
        begun = [time for time, kind in self.events[ended:] if kind in begin_kinds]
        if begun:
            return min(self.end, begun[0]) - max(self.begin, self.events[ended][0])
        return 0.0

    def _attribute_activities(self, seconds: dict[str, float], end: float) -> None:
        """Split the gap at the events that end an evaluation or a checkpoint."""
        begin = self.begin
        name = ""
        for time, kind in self.events:
            if kind in _ACTIVITIES:
                name = _ACTIVITIES[Event(kind)]
                activity_end = max(begin, min(end, time))
                seconds[name] += activity_end - begin
                begin = activity_end
        seconds[self.next_activity or name] += max(0.0, end - begin)
