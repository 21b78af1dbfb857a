"""One step of some ranks on one time axis: actions, waits with their reasons, and the planned schedule.

A wait is split at the moment at which the other side was ready:

- *bubble*: the peer had not yet sent the message, or had not yet joined the collective;
- *exposed* (non-overlapped) communication: all ranks were ready, and bytes moved.

The plan consists of the same actions in the same order. Each stage's chunks take their median own time over the ranks
that were read. Transfers take the shortest time for which a rank had to wait, and there are no other waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megascale.core.chunk_map import Placement, make_chunk_map, round_robin
from megascale.core.replay import ActionGraph, replay_schedule
from megascale.core.schedule import COMPUTES, RECEIVES, SENDS, ActionKind, Schedule
from megascale.core.spans import COMPUTE_LABELS, SPAN_OF_ACTION, SpanKind
from megascale.errors import ConfigError, DataError
from megascale.observe.analysis.run_steps import (
    ActionSpan,
    InnerSpan,
    RankStep,
    choose_sampled_steps,
    read_placement,
    read_rank_steps,
)
from megascale.observe.store.tables import SpanTables

# The axis that orders the ranks, by view: index of the axis, and the order of coordinates.
_VIEWS = {"pipeline": (1, (2, 0, 1)), "tensor": (0, (2, 1, 0)), "data": (2, (1, 0, 2))}
# In jobs of up to so many ranks all ranks are read, so that the reason of each wait is known. In larger jobs only the
# shown ranks, their pipelines and their tensor peers are read.
_MAX_READ_RANKS = 256
_NO_WAIT = 100_000  # nanoseconds; a shorter wait was for a message that had already arrived
_SCHEDULE_ACTIONS = {SPAN_OF_ACTION[kind].label: kind for kind in COMPUTES + SENDS + RECEIVES}
# Direction of the message that a compute awaits.
_INPUT_DIRECTIONS = {
    SpanKind.FORWARD.label: "forward",
    SpanKind.BACKWARD.label: "backward",
    SpanKind.BACKWARD_INPUT.label: "backward",
}


@dataclass(frozen=True)
class Wait:
    """A wait of a rank within an action. Times are nanoseconds since the timeline's begin.

    Attributes:
        kind: bubble, exposed or samples.
        axis: axis of the communication, empty for samples.
        waited_on: the rank that came last, -1 if unknown.
        reason: text.
        root: for a bubble, the rank with which it began: the rank for which `waited_on` waited in the same time, and
            so on; otherwise `waited_on`.
    """

    rank: int
    action: str
    kind: str
    axis: str
    begin: int
    end: int
    waited_on: int
    reason: str
    root: int = -1


@dataclass(frozen=True)
class PlannedCompute:
    """A compute of the plan, nanoseconds since the timeline's begin."""

    backward: bool
    chunk: int
    microbatch: int
    begin: int
    end: int


@dataclass(frozen=True)
class Track:
    """The step of one rank.

    Attributes:
        seconds: duration by compute, bubble, exposed AXIS, samples, optimizer and other; their sum is the step.
    """

    rank: int
    coordinates: tuple[int, int, int]
    begin: int
    end: int
    actions: list[ActionSpan]
    waits: list[Wait]
    planned_computes: list[PlannedCompute]
    seconds: dict[str, float]


@dataclass(frozen=True)
class StepTimeline:
    """The timeline of a step.

    Attributes:
        origin: nanoseconds since 1970 of time 0.
        messages: (sender, begin of its send, receiver, begin of its compute) of messages between shown ranks.
        planned_seconds: duration of the planned pipeline; NaN if ranks of the pipelines are missing.
        pipeline_seconds: time from the first to the last compute of the same ranks, as recorded.
        clock_error: largest error of the ranks' clocks, nanoseconds.
        bubbles: seconds of the shown ranks' bubbles by the rank with which they began, the largest first.
    """

    step: int
    view: str
    origin: int
    length: int
    virtual: int
    tracks: list[Track]
    messages: list[tuple[int, int, int, int]]
    planned_seconds: float
    pipeline_seconds: float
    clock_error: int
    bubbles: dict[int, float]


def read_step_timeline(tables: SpanTables, step: int | None, ranks: str, view: str) -> StepTimeline:
    """Read the timeline of a step.

    Args:
        step: None chooses the last step with the spans of all ranks.
        ranks: "0-3,8", "all", or empty: the ranks of the first rank's group along the view's axis.
        view: axis that orders the ranks: pipeline, tensor or data.

    Raises:
        ConfigError: an option is invalid.
        DataError: the step's spans are missing.
    """
    if view not in _VIEWS:
        raise ConfigError(f"--view={view} is not one of {', '.join(_VIEWS)}")
    number = choose_sampled_steps(tables, "" if step is None else str(step), last=1)[-1]
    rows = tables.query(
        "SELECT rank, any_value(tensor) AS tensor, any_value(pipeline) AS pipeline, any_value(data) AS data FROM ranks "
        "WHERE attempt = (SELECT max(attempt) FROM spans WHERE step = ?) GROUP BY rank ORDER BY rank",
        [number],
    )
    coordinates = {row[0]: tuple(row[1:]) for row in zip(*(column.tolist() for column in rows.values()), strict=True)}
    shown = _parse_ranks(ranks, view, coordinates)
    read = list(coordinates)
    if len(read) > _MAX_READ_RANKS:
        pipelines = {(coordinates[rank][0], coordinates[rank][2]) for rank in shown}
        peers = {coordinates[rank][1:] for rank in shown}
        read = [rank for rank in read if (coordinates[rank][0], coordinates[rank][2]) in pipelines
                or coordinates[rank][1:] in peers]  # fmt: skip
    steps = {rank_step.rank: rank_step for rank_step in read_rank_steps(tables, [number], read)}
    missing = [rank for rank in shown if rank not in steps]
    if missing:
        raise DataError(f"step {number}: spans of rank {missing[0]} were lost; choose another step")
    stages = {rank: coordinate[1] for rank, coordinate in coordinates.items()}
    return _TimelineBuilder(steps, stages, read_placement(tables)).timeline(number, shown, view)


def _parse_ranks(ranks: str, view: str, coordinates: dict[int, tuple[int, ...]]) -> list[int]:
    """Return the ranks to show, ordered by the view."""
    axis, order = _VIEWS[view]
    if not ranks:
        fixed_axes = [n for n in range(3) if n != axis]
        first = coordinates[min(coordinates)]
        chosen = [rank for rank, c in coordinates.items() if all(c[n] == first[n] for n in fixed_axes)]
    elif ranks == "all":
        chosen = list(coordinates)
    else:
        chosen = []
        for part in ranks.split(","):
            low, dash, high = part.strip().partition("-")
            high = high if dash else low
            if not low.isdecimal() or not high.isdecimal():
                raise ConfigError(f"--ranks={ranks} is not a list of ranks; write 0,1 or 0-3,8 or all")
            for rank in range(int(low), int(high) + 1):
                if rank not in coordinates:
                    raise ConfigError(
                        f"--ranks={ranks}: the run has no rank {rank}; its ranks are {min(coordinates)} to "
                        f"{max(coordinates)}"
                    )
                chosen.append(rank)
    return sorted(set(chosen), key=lambda rank: tuple(coordinates[rank][n] for n in order))


# Axis, members' common coordinates, action, chunk, micro-batch, position within the action.
_CollectiveKey = tuple[Any, ...]


class _TimelineBuilder:
    """The steps of the ranks that were read, and the messages and collectives that connect them."""

    def __init__(
        self, steps: dict[int, RankStep], stage_by_rank: dict[int, int], placement: Placement = round_robin
    ) -> None:
        self.steps = steps
        self.stages = max(stage_by_rank.values()) + 1
        chunks = [
            act.chunk for rank_step in steps.values() for act in rank_step.actions if act.action in COMPUTE_LABELS
        ]
        self.virtual = 1 + max(chunks, default=0)
        self.placement = placement
        self.chunk_map = make_chunk_map(self.stages, self.virtual, placement)
        self.origin = min(rank_step.begin for rank_step in steps.values())
        self.rank_at = {rank_step.coordinates: rank_step.rank for rank_step in steps.values()}
        # Sends by replica, tensor coordinate, direction, position of the sending chunk in the model, and micro-batch.
        self.sends: dict[tuple[int, int, str, int, int], tuple[int, ActionSpan]] = {}
        # Time at which each rank joined a collective.
        self.joined: dict[_CollectiveKey, dict[int, int]] = defaultdict(dict)
        # Collectives by rank and axis.
        self.collectives: dict[tuple[int, str], list[tuple[_CollectiveKey, InnerSpan]]] = defaultdict(list)
        for rank_step in steps.values():
            tensor, stage, data = rank_step.coordinates
            for act in rank_step.actions:
                if act.action.startswith("send_"):
                    key = (data, tensor, act.action.removeprefix("send_"), self._position(stage, act), act.microbatch)
                    self.sends[key] = (rank_step.rank, act)
                self._add_collectives(rank_step, act)

    def _add_collectives(self, rank_step: RankStep, act: ActionSpan) -> None:
        tensor, stage, data = rank_step.coordinates
        groups: dict[str, tuple[int, ...]] = {
            "tensor": (stage, data), "data": (stage, tensor), "stage": (stage,), "embedding": (tensor, data),
            "world": (), "context": (stage, tensor, data - rank_step.context),
        }  # fmt: skip
        positions: Counter[str] = Counter()
        for span in act.inner_spans:
            if span.action != "transfer" or span.axis not in groups:
                continue
            key = (span.axis, groups[span.axis], act.action, act.chunk, act.microbatch, positions[span.axis])
            positions[span.axis] += 1
            self.joined[key][rank_step.rank] = span.begin
            self.collectives[rank_step.rank, span.axis].append((key, span))

    def _position(self, stage: int, act: ActionSpan) -> int:
        """Return the position in the model of the chunk of an action; beyond the model for a damaged number."""
        if not 0 <= act.chunk < self.virtual:
            return self.chunk_map.chunks + 1
        return int(self.chunk_map.positions[stage, act.chunk])

    def timeline(self, number: int, shown: list[int], view: str) -> StepTimeline:
        """Return the timeline of the shown ranks."""
        planned, planned_seconds, pipeline_seconds = self._plan(shown)
        waits_by_rank = {
            rank: [wait for act in rank_step.actions for wait in self._explain_waits(rank_step, act)]
            for rank, rank_step in self.steps.items()
        }
        tracks = []
        messages = []
        bubbles: Counter[int] = Counter()
        for rank in shown:
            rank_step = self.steps[rank]
            waits = [replace(wait, root=_find_root(wait, waits_by_rank)) for wait in waits_by_rank[rank]]
            for wait in waits:
                if wait.kind == "bubble":
                    bubbles[wait.root] += wait.end - wait.begin
            for act in rank_step.actions:
                message = self._find_message(rank_step, act)
                if message is not None and message[0] in shown:
                    sender, send = message
                    messages.append((sender, send.begin - self.origin, rank, act.begin - self.origin))
            tracks.append(
                Track(
                    rank=rank,
                    coordinates=rank_step.coordinates,
                    begin=rank_step.begin - self.origin,
                    end=rank_step.end - self.origin,
                    actions=rank_step.actions,
                    waits=waits,
                    planned_computes=planned.get(rank, []),
                    seconds=_sum_by_kind(rank_step, waits),
                )
            )
        return StepTimeline(
            step=number,
            view=view,
            origin=self.origin,
            length=max(track.end for track in tracks),
            virtual=self.virtual,
            tracks=tracks,
            messages=messages,
            planned_seconds=planned_seconds,
            pipeline_seconds=pipeline_seconds,
            clock_error=max(rank_step.clock_error for rank_step in self.steps.values()),
            bubbles={rank: length / 1e9 for rank, length in bubbles.most_common()},
        )

    def _find_message(self, rank_step: RankStep, act: ActionSpan) -> tuple[int, ActionSpan] | None:
        """Return the send of a compute's input as (rank, its action); None without input or if it was not read."""
        direction = _INPUT_DIRECTIONS.get(act.action)
        if direction is None or self.stages == 1:
            return None
        tensor, stage, data = rank_step.coordinates
        sender_chunk = self._position(stage, act) + (-1 if direction == "forward" else 1)
        return self.sends.get((data, tensor, direction, sender_chunk, act.microbatch))

    def _explain_waits(self, rank_step: RankStep, act: ActionSpan) -> list[Wait]:
        waits: list[Wait] = []
        message = self._find_message(rank_step, act)
        for span in act.inner_spans:
            if span.action == "data_wait":
                waits.append(self._make_wait(rank_step.rank, act, span, "samples", -1, "samples from the loader"))
            elif span.action != "wait":
                continue
            elif span.axis == "pipeline" and message is not None:
                waits += self._split_message_wait(rank_step.rank, act, span, message)
                message = None  # a further wait is for the buffer of a send
            elif span.axis == "pipeline":
                reason = f"an earlier send to rank {span.waited_on} still occupies its buffer"
                waits.append(self._make_wait(rank_step.rank, act, span, "exposed", span.waited_on, reason))
            else:
                waits += self._split_collective_wait(rank_step.rank, act, span)
        return [wait for wait in waits if wait.end > wait.begin]

    def _make_wait(self, rank: int, act: ActionSpan, span: InnerSpan, kind: str, waited_on: int, reason: str) -> Wait:
        begin, end = span.begin - self.origin, span.end - self.origin
        return Wait(rank, _describe(act), kind, span.axis, begin, end, waited_on, reason)

    def _split_message_wait(
        self, rank: int, act: ActionSpan, span: InnerSpan, message: tuple[int, ActionSpan]
    ) -> list[Wait]:
        sender, send = message
        sent = min(max(send.begin, span.begin), span.end)
        reason = f"rank {sender} had not yet sent it: {self._describe_activity(sender, span, send)}"
        before, after = replace(span, end=sent), replace(span, begin=sent)
        return [
            self._make_wait(rank, act, before, "bubble", sender, reason),
            self._make_wait(rank, act, after, "exposed", sender, f"rank {sender}'s {_describe(send)} under way"),
        ]

    def _split_collective_wait(self, rank: int, act: ActionSpan, span: InnerSpan) -> list[Wait]:
        # The awaited collective ends with the wait, but it may have begun in an earlier action.
        candidates = [
            (collective.end, key)
            for key, collective in self.collectives[rank, span.axis]
            if collective.begin <= span.begin and collective.end >= span.end
        ]
        ready = span.begin
        last = -1
        if candidates:
            joined = self.joined[min(candidates, key=lambda candidate: candidate[0])[1]]
            last = max(joined, key=lambda member: joined[member])
            ready = min(max(joined[last], span.begin), span.end)
        reason = f"rank {last} had not yet joined the {span.axis} collective"
        before, after = replace(span, end=ready), replace(span, begin=ready)
        return [
            self._make_wait(rank, act, before, "bubble", last, reason),
            self._make_wait(rank, act, after, "exposed", last, f"{span.axis} collective under way"),
        ]

    def _describe_activity(self, rank: int, wait: InnerSpan, send: ActionSpan) -> str:
        """Return the action in which a rank was longest while another rank waited for its send."""
        longest = 0
        description = "in no action that was timed"
        for act in self.steps[rank].actions:
            overlap = min(act.end, send.begin, wait.end) - max(act.begin, wait.begin)
            if overlap <= longest:
                continue
            longest = overlap
            waited = sum(
                max(0, min(span.end, wait.end) - max(span.begin, wait.begin))
                for span in act.inner_spans
                if span.action == "wait"
            )
            description = f"in {_describe(act)}"
            if waited > overlap / 2:
                description += ", which itself waited"
        return description

    def _plan(self, shown: list[int]) -> tuple[dict[int, list[PlannedCompute]], float, float]:
        """Return the plan of each shown rank, its duration and the recorded duration in seconds."""
        pipelines = sorted({(self.steps[rank].coordinates[0], self.steps[rank].coordinates[2]) for rank in shown})
        complete = [
            (tensor, data)
            for tensor, data in pipelines
            if all((tensor, stage, data) in self.rank_at for stage in range(self.stages))
        ]
        if not complete:
            return {}, float("nan"), float("nan")
        graph = self._make_graph(*complete[0])
        plan = replay_schedule(graph, self._measure_durations(graph))
        computes = np.flatnonzero(graph.is_compute)
        planned: dict[int, list[PlannedCompute]] = {}
        recorded_seconds = 0.0
        for tensor, data in complete:
            members = [self.steps[self.rank_at[tensor, stage, data]] for stage in range(self.stages)]
            acts = [act for rank_step in members for act in rank_step.actions if act.action in COMPUTE_LABELS]
            # Waits for samples or for work before the step do not belong to the pipeline: begin where work begins.
            first = min(_find_work_begin(act) for act in acts)
            recorded_seconds = max(recorded_seconds, (max(act.end for act in acts) - first) / 1e9)
            begin = first - self.origin
            for rank_step in members:
                nodes = computes[graph.stage[computes] == rank_step.coordinates[1]].tolist()
                planned[rank_step.rank] = [
                    PlannedCompute(
                        backward=bool(graph.kind[n] != ActionKind.FORWARD),
                        chunk=int(graph.chunk[n]),
                        microbatch=int(graph.microbatch[n]),
                        begin=round(begin + plan.start[n]),
                        end=round(begin + plan.end[n]),
                    )
                    for n in nodes
                ]
        return planned, float(plan.makespan) / 1e9, recorded_seconds

    def _make_graph(self, tensor: int, data: int) -> ActionGraph:
        """Return the dependency graph of a pipeline's recorded schedule."""
        tables = []
        for stage in range(self.stages):
            acts = self.steps[self.rank_at[tensor, stage, data]].actions
            rows = [
                (_SCHEDULE_ACTIONS[act.action], act.chunk, act.microbatch)
                for act in acts
                if act.action in _SCHEDULE_ACTIONS
            ]
            tables.append(rows)
        microbatches = 1 + max((microbatch for rows in tables for _, _, microbatch in rows), default=0)
        try:
            # A pass is recorded for each micro-batch and chunk of a stage, so damaged numbers exceed their count.
            if self.stages * self.virtual * microbatches > sum(map(len, tables)):
                raise ValueError(
                    f"{microbatches:,} micro-batches of {self.virtual:,} chunks have more passes than recorded"
                )
            actions = tuple(np.array(rows, dtype=np.int32) for rows in tables)
            schedule = Schedule(
                "recorded", self.stages, self.virtual, microbatches, tables=actions, placement=self.placement
            )
            return ActionGraph.compile(schedule)
        except (ValueError, IndexError) as error:
            raise DataError(f"the recorded actions are not a valid schedule ({error}); choose another step") from None

    def _measure_durations(self, graph: ActionGraph) -> np.ndarray[Any, Any]:
        """Return the planned duration of each action in nanoseconds."""
        own_times: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        transfer_times: list[int] = []
        for rank_step in self.steps.values():
            for act in rank_step.actions:
                if act.action not in COMPUTE_LABELS:
                    continue
                own_time = act.end - act.begin - act.sum_waits()
                own_times[rank_step.coordinates[1], act.action, act.chunk].append(own_time)
                message = self._find_message(rank_step, act)
                waits = act.select_waits("pipeline")
                if message is not None and waits and waits[0].end - waits[0].begin > _NO_WAIT:
                    transfer_times.append(waits[0].end - max(message[1].begin, waits[0].begin))
        durations = np.full(graph.action_count, float(max(0, min(transfer_times, default=0))))
        for n in np.flatnonzero(graph.is_compute).tolist():
            label = SPAN_OF_ACTION[ActionKind(int(graph.kind[n]))].label
            durations[n] = np.median(own_times[int(graph.stage[n]), label, int(graph.chunk[n])])
        return durations


def _find_work_begin(act: ActionSpan) -> int:
    """Return the time at which a compute began to work, after its initial waits."""
    begin = act.begin
    for span in act.inner_spans:
        if span.action != "transfer" and span.begin - begin < _NO_WAIT:
            begin = max(begin, span.end)
    return begin


def _find_root(wait: Wait, waits_by_rank: dict[int, list[Wait]]) -> int:
    """Return the rank with which a wait began, following the bubbles of the awaited ranks in the same time."""
    visited = {wait.rank}
    begin, end, root = wait.begin, wait.end, wait.waited_on
    while wait.kind == "bubble" and root in waits_by_rank and root not in visited:
        visited.add(root)
        longest = 0
        cause = None
        for candidate in waits_by_rank[root]:
            overlap = min(candidate.end, end) - max(candidate.begin, begin)
            if candidate.kind == "bubble" and overlap > longest:
                longest = overlap
                cause = candidate
        if cause is None or 2 * longest < end - begin or cause.waited_on in visited:
            break
        begin = max(cause.begin, begin)
        end = min(cause.end, end)
        root = cause.waited_on
    return root


def _describe(act: ActionSpan) -> str:
    text = act.action
    if act.microbatch >= 0:
        text += f" of micro-batch {act.microbatch}"
    if act.chunk > 0:
        text += f", chunk {act.chunk}"
    return text


def _sum_by_kind(rank_step: RankStep, waits: list[Wait]) -> dict[str, float]:
    """Split the duration of a rank's step; see Track.seconds."""
    totals: Counter[str] = Counter()
    names = dict.fromkeys(COMPUTE_LABELS, "compute") | {"optimizer": "optimizer"}
    for act in rank_step.actions:
        if act.action in names:
            totals[names[act.action]] += act.end - act.begin - act.sum_waits()
    for wait in waits:
        totals[f"exposed {wait.axis}" if wait.kind == "exposed" else wait.kind] += wait.end - wait.begin
    exposed = sorted(name for name in totals if name.startswith("exposed"))
    order = ["compute", "bubble", "samples", "optimizer"] + exposed
    totals["other"] = rank_step.end - rank_step.begin - sum(totals[name] for name in order)
    return {name: totals[name] / 1e9 for name in order + ["other"]}
