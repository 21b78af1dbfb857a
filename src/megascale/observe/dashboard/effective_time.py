"""Effective training time of a run, and the causes of lost time, from the run's metrics and events.

Effective training time is the time of steps that counted divided by the total time (MegaScale section 6.3). The time of
a step that was repeated after a restart is lost. Of a step without some replicas, the share of these replicas is lost.
The time between two steps (a gap) is attributed to the events in it. A *start* is the begin of the ranks' processes,
after the begin of a run or after a failure.
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

# Names of causes that follow from steps.
TRAINING = "training"
REPEATED = "repeated steps"
BETWEEN_STEPS = "between steps"
MISSING = "replicas missing"
# Events that mark a start. If a start has several of them, the first in this order gives its time.
_STARTS = (Event.ATTEMPT_STARTED, Event.RUN_STARTED, Event.RESUMED)
# Name of the cause for each event that explains why a run stood still.
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
# Requests of a person. Trainers then run a few more steps, save, and end with the event `interrupted`.
_REQUESTS = {Event.EVICTION_ASKED, Event.PAUSED, Event.RESTARTED, Event.UPDATED, Event.JOB_INTERRUPTED}
# No process runs from the last event of _ENDS to the first event of _BEGINS. If a driver starts the ranks, only the
# begins of the driver count, because the driver also runs between two attempts.
_ENDS = {Event.DRIVER_ENDED, Event.RUN_FINISHED, Event.RUN_FAILED, Event.INTERRUPTED}
_DRIVER_BEGINS = {Event.DRIVER_STARTED, Event.DRIVER_TOOK_OVER}
_BEGINS = _DRIVER_BEGINS | {Event.RUN_STARTED, Event.RESUMED}
_CLOCK_DIFFERENCE_SECONDS = 1.0  # largest difference between the clocks of hosts
_LONGEST_STEP_SECONDS = 1e9  # the record of a longer step is damaged
_SHORTEST_ACTIVITY_SECONDS = 0.001  # a shorter gap is not attributed to an evaluation or a save
_ACTIVITIES = {Event.EVALUATED: "evaluation", Event.CHECKPOINT_SAVED: "saving checkpoints"}  # by the event at its end
# Causes that are usually the consequence of another one. They are named only if there is no other.
_VAGUE_CAUSES = {"process ended", "node lost", "process killed"}


def choose_cause(causes: Sequence[str]) -> str:
    """Return the first cause that is more specific than the end of a process or node, else the first cause."""
    specific_causes = [cause for cause in causes if cause not in _VAGUE_CAUSES]
    if specific_causes:
        return specific_causes[0]
    return causes[0]


@dataclass(frozen=True)
class EffectiveTime:
    """A run's time.

    Attributes:
        total: seconds from the first to the last record, or to the present.
        seconds: seconds by cause, "training" first; their sum is `total`.
    """

    total: float
    seconds: dict[str, float]

    @property
    def share(self) -> float:
        """Seconds of training divided by the total; NaN if the total is 0."""
        if self.total > 0:
            return self.seconds.get(TRAINING, 0.0) / self.total
        return float("nan")


def measure_effective_time(
    columns: dict[str, Array],
    events: Sequence[dict[str, Any]],
    current_time: float | None = None,
    activity: str = BETWEEN_STEPS,
) -> EffectiveTime:
    """Return the time of a run by cause.

    Args:
        columns: columns of MetricColumns.
        events: records of events.jsonl.
        current_time: seconds since 1970 for a live run; None: the run ended with its last record.
        activity: activity of a live run since its last event, such as "evaluation".
    """
    timed_events = [(to_float(event.get("time")), event) for event in events]
    timed_events = sorted(
        ((time, event) for time, event in timed_events if is_plausible_time(time)), key=lambda item: item[0]
    )
    rows = _select_usable_rows(columns)  # one row per step
    if not len(rows) and not timed_events:
        return EffectiveTime(0.0, {})
    empty = np.zeros(0)
    ends = columns.get("time", empty)[rows]
    durations = columns.get("seconds", empty)[rows]
    record_times: list[float] = []
    if timed_events:
        record_times += [timed_events[0][0], timed_events[-1][0]]
    if len(rows):
        record_times += [float(ends[0] - durations[0]), float(ends[-1])]
    start = min(record_times)
    last = max(record_times if current_time is None else record_times + [current_time])
    # Gap i is the time before step i; the last gap follows the last step.
    gap_begins = np.maximum.accumulate(np.concatenate([[start], ends]))
    gap_ends = np.append(np.maximum(gap_begins[:-1], ends - durations), last)
    step_seconds = np.maximum(0.0, ends - gap_ends[:-1])
    seconds: dict[str, float] = defaultdict(float)
    _add_steps(seconds, step_seconds, columns, rows)
    _add_gaps(seconds, _group_by_gap(timed_events, gap_begins, gap_ends), gap_begins, gap_ends, activity)
    causes = sorted((name for name in seconds if name != TRAINING), key=lambda name: -seconds[name])
    return EffectiveTime(
        last - start, {name: seconds[name] for name in (TRAINING,) + tuple(causes) if seconds[name] > 0}
    )


def _add_steps(seconds: dict[str, float], step_seconds: Array, columns: dict[str, Array], rows: Array) -> None:
    """Add the time of the steps to the seconds by cause: training, repeated steps and missing replicas."""
    is_repeated = np.zeros(0, bool)
    if len(rows):
        is_repeated = columns["redone"][rows]  # the step was trained again later
    missing_fraction = np.zeros(len(rows))
    if "missing_share" in columns:
        missing_fraction = np.nan_to_num(columns["missing_share"][rows])  # fraction of the replicas that were missing
    seconds[TRAINING] = float((step_seconds * (1 - missing_fraction))[~is_repeated].sum())
    seconds[MISSING] = float((step_seconds * missing_fraction)[~is_repeated].sum())
    seconds[REPEATED] = float(step_seconds[is_repeated].sum())


def _add_gaps(
    seconds: dict[str, float],
    events_by_gap: dict[int, list[tuple[float, str]]],
    gap_begins: Array,
    gap_ends: Array,
    activity: str,
) -> None:
    """Add the time of the gaps to the seconds by cause. `activity` is that of a live run since its last event."""
    gap_seconds = gap_ends - gap_begins
    last_gap = len(gap_seconds) - 1
    for index, gap_events in events_by_gap.items():
        if gap_seconds[index] > 0:
            next_activity = activity if index == last_gap else ""
            gap = _Gap(gap_events, float(gap_begins[index]), float(gap_ends[index]), next_activity)
            gap.add_to(seconds)
    has_no_event = np.ones(len(gap_seconds), bool)
    has_no_event[list(events_by_gap)] = False
    if has_no_event[last_gap]:
        seconds[activity] += max(0.0, float(gap_seconds[last_gap]))
        has_no_event[last_gap] = False
    seconds[BETWEEN_STEPS] += float(np.maximum(0.0, gap_seconds[has_no_event]).sum())


def _select_usable_rows(columns: dict[str, Array]) -> Array:
    """Return the numbers of the rows with a plausible time and duration, sorted by time."""
    if "time" not in columns or "seconds" not in columns:
        return np.zeros(0, np.int64)
    times, seconds = columns["time"], columns["seconds"]
    with np.errstate(invalid="ignore"):
        is_usable = np.array([is_plausible_time(time) for time in times.tolist()], bool)
        is_usable &= (seconds >= 0) & (seconds <= _LONGEST_STEP_SECONDS)
    rows = np.flatnonzero(is_usable)
    return rows[np.argsort(times[rows], kind="stable")]


def _group_by_gap(
    timed_events: Sequence[tuple[float, dict[str, Any]]], gap_begins: Array, gap_ends: Array
) -> dict[int, list[tuple[float, str]]]:
    """Return the events of each gap with events, as time and name.

    A request belongs to the gap that it led to, since trainers run a few more steps after a request.
    """
    groups: dict[int, list[tuple[float, str]]] = defaultdict(list)
    requests: list[tuple[float, str]] = []  # requests that have not led to a gap yet
    gaps = np.searchsorted(gap_ends, [time for time, _ in timed_events]).tolist()  # of each event
    for (time, event), gap in zip(timed_events, gaps, strict=True):
        kind = str(event.get("event"))
        begin = float(gap_begins[gap])
        if kind in _REQUESTS:
            requests.append((time, kind))
            continue
        if kind in (Event.INTERRUPTED, *_STARTS):
            # The trainers have ended or start again. A start without an interruption shows that only requests within
            # this gap were carried out.
            for request_time, request in requests:
                if kind == Event.INTERRUPTED or request_time >= begin:
                    groups[gap].append((max(request_time, begin), request))
            requests.clear()
        elif kind == Event.NODE_EVICTED:
            # A request to evict a node without ranks does not stop the run.
            requests = [request for request in requests if request[1] != Event.EVICTION_ASKED]
        # Leave out events within the step before the gap, and events that had no consequence.
        if time >= begin - _CLOCK_DIFFERENCE_SECONDS and event.get("action") != "alert":
            groups[gap].append((time, kind))
    groups[len(gap_begins) - 1] += [request for request in requests if request[0] >= gap_begins[-1]]
    return {gap: events for gap, events in groups.items() if events}


@dataclass(frozen=True)
class _Gap:
    """The time between two steps.

    Attributes:
        events: times and events in order.
        begin, end: seconds since 1970.
        next_activity: activity after the last event; empty if the next step follows.
    """

    events: list[tuple[float, str]]
    begin: float
    end: float
    next_activity: str

    def add_to(self, seconds: dict[str, float]) -> None:
        """Add the gap's time to the seconds of its causes."""
        kinds = [kind for _, kind in self.events]
        idle_seconds = self._measure_idle_seconds(kinds)
        if idle_seconds:
            seconds["not running"] += idle_seconds
        remaining = self.end - self.begin - idle_seconds
        # In a launched job the driver's event marks the start. If several attempts began without a step, use the last.
        start_kind = next((kind for kind in _STARTS if kind in kinds), "")
        starts = [max(self.begin, min(self.end, time)) for time, kind in self.events if kind == start_kind]
        causes = [CAUSES[Event(kind)] for kind in kinds if kind in CAUSES]
        if starts:
            stopped = max(0.0, starts[-1] - self.begin - idle_seconds)
            reason = f"stopped: {choose_cause(causes)}" if causes else "waiting for nodes"
            seconds[reason] += stopped
            seconds["starting and loading"] += remaining - stopped
        elif causes:
            seconds[f"stopped: {causes[0]}"] += remaining
        elif any(kind in _ACTIVITIES for kind in kinds) and self.end - self.begin > _SHORTEST_ACTIVITY_SECONDS:
            self._attribute_activities(seconds, self.end - idle_seconds)
        else:
            seconds[self.next_activity or BETWEEN_STEPS] += remaining

    def _measure_idle_seconds(self, kinds: list[str]) -> float:
        """Return the seconds in which no process ran."""
        if Event.ATTEMPT_STARTED in kinds:
            begin_kinds = _DRIVER_BEGINS
        else:
            begin_kinds = _BEGINS
        ends = [i for i, kind in enumerate(kinds) if kind in _ENDS]
        if not ends:
            return 0.0
        end_time, _ = self.events[ends[-1]]
        begin_times = [time for time, kind in self.events[ends[-1] :] if kind in begin_kinds]
        if not begin_times:
            return 0.0
        return min(self.end, begin_times[0]) - max(self.begin, end_time)

    def _attribute_activities(self, seconds: dict[str, float], end: float) -> None:
        """Split the time until `end` at the events that end an evaluation or a save."""
        begin = self.begin
        name = ""
        for time, kind in self.events:
            if kind in _ACTIVITIES:
                name = _ACTIVITIES[Event(kind)]
                activity_end = max(begin, min(end, time))
                seconds[name] += activity_end - begin
                begin = activity_end
        seconds[self.next_activity or name] += max(0.0, end - begin)
