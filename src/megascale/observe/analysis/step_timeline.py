"""Timeline of one step of several ranks: actions, waits with their reasons, and the planned schedule.

A wait is split at the moment at which the other ranks were ready:

- *bubble*: the peer had not yet sent the message, or had not yet joined the collective.
- *exposed* (non-overlapped) communication: all ranks were ready, and bytes were transferred.

The plan consists of the same actions in the same order. A compute takes the median duration, without waits, of its
chunk and stage over the ranks that were read. A transfer takes the shortest time of the transfers that a rank waited
for. The plan has no other waits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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


class _View(NamedTuple):
    """View of a timeline: the axis whose ranks are next to each other.

    Attributes:
        axis: index of the axis in the coordinates (tensor, pipeline, data).
        sort_axes: indexes of all axes, in the order in which their coordinates sort the ranks. The last one is `axis`.
    """

    axis: int
    sort_axes: tuple[int, int, int]


_VIEWS = {"pipeline": _View(1, (2, 0, 1)), "tensor": _View(0, (2, 1, 0)), "data": _View(2, (1, 0, 2))}
# In jobs of at most this number of ranks all ranks are read, so that the reason of each wait is known. In larger jobs
# only the shown ranks, their pipelines and their tensor peers are read.
_MAX_READ_RANKS = 256
_NO_WAIT_NS = 100_000  # a recorded wait that is shorter is overhead: the message had already arrived
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
        action: description of the action, with micro-batch and chunk.
        kind: "bubble", "exposed" or "samples".
        axis: axis of the communication, empty for samples.
        waited_on: the rank that was ready last, -1 if unknown.
        reason: text.
        root: rank that caused the wait: if `waited_on` itself waited for another rank at that time, that rank, and so
            on.
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
    """A compute of the plan. Times are nanoseconds since the timeline's begin."""

    is_backward: bool
    chunk: int
    microbatch: int
    begin: int
    end: int


@dataclass(frozen=True)
class Track:
    """The step of one rank.

    Attributes:
        coordinates: tensor, pipeline and data coordinate.
        begin, end: nanoseconds since the timeline's begin.
        seconds: seconds by category: compute, bubble, exposed AXIS, samples, optimizer, other. Their sum is the step.
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
        origin: begin of the timeline, nanoseconds since 1970.
        length: end of the last rank's step, nanoseconds since the begin.
        virtual: model chunks per stage.
        messages: messages between shown ranks as (sender, begin of the send, receiver, begin of its compute).
        planned_seconds: duration of the planned pipeline; NaN if the pipelines of the shown ranks are incomplete.
        pipeline_seconds: recorded time from the first to the last compute of the same ranks.
        clock_error: largest error of the ranks' clocks in nanoseconds.
        bubbles: seconds of the shown ranks' bubbles by the rank that caused them (Wait.root), the largest first.
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
        ranks: ranks to show, such as "0-3,8" or "all"; empty: the first rank's group along the view's axis.
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
    columns = [column.tolist() for column in rows.values()]
    coordinates = {rank: (tensor, stage, data) for rank, tensor, stage, data in zip(*columns, strict=True)}
    shown_ranks = _parse_ranks(ranks, view, coordinates)
    read_ranks = list(coordinates)
    if len(read_ranks) > _MAX_READ_RANKS:
        shown_coordinates = [coordinates[rank] for rank in shown_ranks]
        pipelines = {(tensor, data) for tensor, _, data in shown_coordinates}
        tensor_groups = {(stage, data) for _, stage, data in shown_coordinates}
        read_ranks = [
            rank
            for rank, (tensor, stage, data) in coordinates.items()
            if (tensor, data) in pipelines or (stage, data) in tensor_groups
        ]
    steps = {rank_step.rank: rank_step for rank_step in read_rank_steps(tables, [number], read_ranks)}
    missing = [rank for rank in shown_ranks if rank not in steps]
    if missing:
        raise DataError(f"step {number}: spans of rank {missing[0]} were lost; choose another step")
    stages = {rank: stage for rank, (_, stage, _) in coordinates.items()}
    return _TimelineBuilder(steps, stages, read_placement(tables)).build(number, shown_ranks, view)


def _parse_ranks(ranks: str, view: str, coordinates: dict[int, tuple[int, int, int]]) -> list[int]:
    """Return the ranks to show, ordered by the view. Raises ConfigError for an invalid list or an unknown rank."""
    axis, sort_axes = _VIEWS[view]
    if not ranks:
        fixed_axes = [n for n in range(3) if n != axis]
        first = coordinates[min(coordinates)]
        chosen = []
        for rank, rank_coordinates in coordinates.items():
            if all(rank_coordinates[n] == first[n] for n in fixed_axes):
                chosen.append(rank)
    elif ranks == "all":
        chosen = list(coordinates)
    else:
        chosen = []
        for rank_range in ranks.split(","):
            first_rank, dash, last_rank = rank_range.strip().partition("-")
            if not dash:
                last_rank = first_rank
            if not first_rank.isdecimal() or not last_rank.isdecimal():
                raise ConfigError(f"--ranks={ranks} is not a list of ranks; write 0,1 or 0-3,8 or all")
            for rank in range(int(first_rank), int(last_rank) + 1):
                if rank not in coordinates:
                    raise ConfigError(
                        f"--ranks={ranks}: the run has no rank {rank}; its ranks are {min(coordinates)} to "
                        f"{max(coordinates)}"
                    )
                chosen.append(rank)
    return sorted(set(chosen), key=lambda rank: tuple(coordinates[rank][n] for n in sort_axes))


# Axis, coordinates that all members share, action, chunk, micro-batch, number among the action's collectives.
_CollectiveKey = tuple[Any, ...]


class _TimelineBuilder:
    """Builds a timeline from the steps of ranks, and the messages and collectives that connect the ranks.

    Args:
        steps: the step of each rank that was read.
        stage_by_rank: stage of every rank of the job.
    """

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
        self.rank_by_coordinates = {rank_step.coordinates: rank_step.rank for rank_step in steps.values()}
        # Sending rank and action, by replica, tensor coordinate, direction, sending chunk's position in the model, and
        # micro-batch.
        self.sends: dict[tuple[int, int, str, int, int], tuple[int, ActionSpan]] = {}
        # Time at which each rank joined a collective, by rank.
        self.join_times: dict[_CollectiveKey, dict[int, int]] = defaultdict(dict)
        # Collectives by rank and axis.
        self.collectives: dict[tuple[int, str], list[tuple[_CollectiveKey, InnerSpan]]] = defaultdict(list)
        for rank_step in steps.values():
            tensor, stage, data = rank_step.coordinates
            for act in rank_step.actions:
                if act.action.startswith("send_"):
                    key = (
                        data,
                        tensor,
                        act.action.removeprefix("send_"),
                        self._find_chunk_position(stage, act),
                        act.microbatch,
                    )
                    self.sends[key] = (rank_step.rank, act)
                self._add_collectives(rank_step, act)

    def _add_collectives(self, rank_step: RankStep, act: ActionSpan) -> None:
        tensor, stage, data = rank_step.coordinates
        # The coordinates that the members of a collective share, by axis.
        groups: dict[str, tuple[int, ...]] = {
            "tensor": (stage, data), "data": (stage, tensor), "stage": (stage,), "embedding": (tensor, data),
            "world": (), "context": (stage, tensor, data - rank_step.context),
        }  # fmt: skip
        collective_counts: Counter[str] = Counter()
        for span in act.inner_spans:
            if span.action != "transfer" or span.axis not in groups:
                continue
            number = collective_counts[span.axis]
            key = (span.axis, groups[span.axis], act.action, act.chunk, act.microbatch, number)
            collective_counts[span.axis] += 1
            self.join_times[key][rank_step.rank] = span.begin
            self.collectives[rank_step.rank, span.axis].append((key, span))

    def _find_chunk_position(self, stage: int, act: ActionSpan) -> int:
        """Return the position of an action's chunk in the model; a position beyond the model for a damaged number."""
        if not 0 <= act.chunk < self.virtual:
            return self.chunk_map.chunks + 1
        return int(self.chunk_map.positions[stage, act.chunk])

    def build(self, number: int, shown: list[int], view: str) -> StepTimeline:
        """Return the timeline of the shown ranks in a step.

        Args:
            number: number of the step.
        """
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
        """Return the sending rank and the send of a compute's input; None without input, or if it was not read."""
        direction = _INPUT_DIRECTIONS.get(act.action)
        if direction is None or self.stages == 1:
            return None
        tensor, stage, data = rank_step.coordinates
        sender_chunk = self._find_chunk_position(stage, act) + (-1 if direction == "forward" else 1)
        return self.sends.get((data, tensor, direction, sender_chunk, act.microbatch))

    def _explain_waits(self, rank_step: RankStep, act: ActionSpan) -> list[Wait]:
        """Return the waits of an action, split at the time when the other ranks were ready, with reasons."""
        waits: list[Wait] = []
        message = self._find_message(rank_step, act)
        for span in act.inner_spans:
            if span.action == "data_wait":
                reason = "samples from the loader"
                waits.append(self._make_wait(rank_step.rank, act, span, kind="samples", waited_on=-1, reason=reason))
            elif span.action != "wait":
                continue
            elif span.axis == "pipeline" and message is not None:
                waits += self._split_message_wait(rank_step.rank, act, span, message)
                message = None  # the first wait is for the message, further waits are for the buffers of sends
            elif span.axis == "pipeline":
                reason = f"an earlier send to rank {span.waited_on} still occupies its buffer"
                waits.append(
                    self._make_wait(rank_step.rank, act, span, kind="exposed", waited_on=span.waited_on, reason=reason)
                )
            else:
                waits += self._split_collective_wait(rank_step.rank, act, span)
        return [wait for wait in waits if wait.end > wait.begin]

    def _make_wait(self, rank: int, act: ActionSpan, span: InnerSpan, kind: str, waited_on: int, reason: str) -> Wait:
        begin, end = span.begin - self.origin, span.end - self.origin
        return Wait(rank, _describe_action(act), kind, span.axis, begin, end, waited_on, reason)

    def _split_message_wait(
        self, rank: int, act: ActionSpan, span: InnerSpan, message: tuple[int, ActionSpan]
    ) -> list[Wait]:
        sender, send = message
        send_time = min(max(send.begin, span.begin), span.end)
        before, after = replace(span, end=send_time), replace(span, begin=send_time)
        bubble_reason = f"rank {sender} had not yet sent it: {self._describe_activity(sender, span, send)}"
        exposed_reason = f"rank {sender}'s {_describe_action(send)} under way"
        return [
            self._make_wait(rank, act, before, kind="bubble", waited_on=sender, reason=bubble_reason),
            self._make_wait(rank, act, after, kind="exposed", waited_on=sender, reason=exposed_reason),
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
            _, key = min(candidates, key=lambda candidate: candidate[0])
            join_times = self.join_times[key]
            last = max(join_times, key=lambda member: join_times[member])
            ready = min(max(join_times[last], span.begin), span.end)
        before, after = replace(span, end=ready), replace(span, begin=ready)
        bubble_reason = f"rank {last} had not yet joined the {span.axis} collective"
        exposed_reason = f"{span.axis} collective under way"
        return [
            self._make_wait(rank, act, before, kind="bubble", waited_on=last, reason=bubble_reason),
            self._make_wait(rank, act, after, kind="exposed", waited_on=last, reason=exposed_reason),
        ]

    def _describe_activity(self, rank: int, wait: InnerSpan, send: ActionSpan) -> str:
        """Describe the action in which `rank` spent most time while another rank waited for its send."""
        longest = 0
        description = "in no action that was timed"
        for act in self.steps[rank].actions:
            overlap = min(act.end, send.begin, wait.end) - max(act.begin, wait.begin)
            if overlap <= longest:
                continue
            longest = overlap
            wait_ns = sum(
                max(0, min(span.end, wait.end) - max(span.begin, wait.begin))
                for span in act.inner_spans
                if span.action == "wait"
            )
            description = f"in {_describe_action(act)}"
            if wait_ns > overlap / 2:
                description += ", which itself waited"
        return description

    def _plan(self, shown: list[int]) -> tuple[dict[int, list[PlannedCompute]], float, float]:
        """Plan the pipelines of the shown ranks.

        Returns:
            The planned computes of each rank of the complete pipelines, the planned and the recorded duration of a
            pipeline in seconds (NaN without a complete pipeline).
        """
        pipelines = sorted({(self.steps[rank].coordinates[0], self.steps[rank].coordinates[2]) for rank in shown})
        complete = [
            (tensor, data)
            for tensor, data in pipelines
            if all((tensor, stage, data) in self.rank_by_coordinates for stage in range(self.stages))
        ]
        if not complete:
            return {}, float("nan"), float("nan")
        graph = self._make_graph(*complete[0])
        plan = replay_schedule(graph, self._measure_durations(graph))
        computes = np.flatnonzero(graph.is_compute)
        planned: dict[int, list[PlannedCompute]] = {}
        recorded_seconds = 0.0
        for tensor, data in complete:
            members = [self.steps[self.rank_by_coordinates[tensor, stage, data]] for stage in range(self.stages)]
            acts = [act for rank_step in members for act in rank_step.actions if act.action in COMPUTE_LABELS]
            # The pipeline begins with the first work, since waits for samples or for earlier work do not belong to it.
            work_begin = min(_find_work_begin(act) for act in acts)
            recorded_seconds = max(recorded_seconds, (max(act.end for act in acts) - work_begin) / 1e9)
            begin = work_begin - self.origin
            for rank_step in members:
                nodes = computes[graph.stage[computes] == rank_step.coordinates[1]].tolist()
                planned[rank_step.rank] = [
                    PlannedCompute(
                        is_backward=bool(graph.kind[n] != ActionKind.FORWARD),
                        chunk=int(graph.chunk[n]),
                        microbatch=int(graph.microbatch[n]),
                        begin=round(begin + plan.start[n]),
                        end=round(begin + plan.end[n]),
                    )
                    for n in nodes
                ]
        return planned, float(plan.makespan) / 1e9, recorded_seconds

    def _make_graph(self, tensor: int, data: int) -> ActionGraph:
        """Return the dependency graph of a pipeline's recorded schedule. Raises DataError if it is not valid."""
        tables = []
        for stage in range(self.stages):
            acts = self.steps[self.rank_by_coordinates[tensor, stage, data]].actions
            rows = [
                (_SCHEDULE_ACTIONS[act.action], act.chunk, act.microbatch)
                for act in acts
                if act.action in _SCHEDULE_ACTIONS
            ]
            tables.append(rows)
        microbatches = 1 + max((microbatch for rows in tables for _, _, microbatch in rows), default=0)
        try:
            # Each stage records at least one action per micro-batch and chunk. If a damaged span has a huge number, the
            # product exceeds the number of recorded actions.
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
        """Return the planned duration of each action in nanoseconds, [actions]."""
        work_times: dict[tuple[int, str, int], list[int]] = defaultdict(list)
        transfer_times: list[int] = []
        for rank_step in self.steps.values():
            for act in rank_step.actions:
                if act.action not in COMPUTE_LABELS:
                    continue
                work_time = act.end - act.begin - act.sum_waits()
                work_times[rank_step.coordinates[1], act.action, act.chunk].append(work_time)
                message = self._find_message(rank_step, act)
                waits = act.select_waits("pipeline")
                if message is not None and waits and waits[0].end - waits[0].begin > _NO_WAIT_NS:
                    transfer_times.append(waits[0].end - max(message[1].begin, waits[0].begin))
        durations = np.full(graph.action_count, float(max(0, min(transfer_times, default=0))))
        for n in np.flatnonzero(graph.is_compute).tolist():
            label = SPAN_OF_ACTION[ActionKind(int(graph.kind[n]))].label
            durations[n] = np.median(work_times[int(graph.stage[n]), label, int(graph.chunk[n])])
        return durations


def _find_work_begin(act: ActionSpan) -> int:
    """Return the time at which a compute began to work, after its initial waits.

    Initial waits follow the begin of the action, or each other, without a gap.
    """
    begin = act.begin
    for span in act.inner_spans:
        if span.action != "transfer" and span.begin - begin < _NO_WAIT_NS:
            begin = max(begin, span.end)
    return begin


def _find_root(wait: Wait, waits_by_rank: dict[int, list[Wait]]) -> int:
    """Return the rank that caused a wait, by following the bubbles of the awaited ranks at the same time."""
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
        # A bubble that covers less than half of the wait does not explain it.
        if cause is None or 2 * longest < end - begin or cause.waited_on in visited:
            break
        begin = max(cause.begin, begin)
        end = min(cause.end, end)
        root = cause.waited_on
    return root


def _describe_action(act: ActionSpan) -> str:
    text = act.action
    if act.microbatch >= 0:
        text += f" of micro-batch {act.microbatch}"
    if act.chunk > 0:
        text += f", chunk {act.chunk}"
    return text


def _sum_by_kind(rank_step: RankStep, waits: list[Wait]) -> dict[str, float]:
    """Return the seconds of a rank's step by category, as Track.seconds."""
    totals: Counter[str] = Counter()
    category_by_action = dict.fromkeys(COMPUTE_LABELS, "compute") | {"optimizer": "optimizer"}
    for act in rank_step.actions:
        if act.action in category_by_action:
            totals[category_by_action[act.action]] += act.end - act.begin - act.sum_waits()
    for wait in waits:
        if wait.kind == "exposed":
            category = f"exposed {wait.axis}"
        else:
            category = wait.kind
        totals[category] += wait.end - wait.begin
    exposed_categories = sorted(name for name in totals if name.startswith("exposed"))
    categories = ["compute", "bubble", "samples", "optimizer"] + exposed_categories
    totals["other"] = rank_step.end - rank_step.begin - sum(totals[name] for name in categories)
    return {name: totals[name] / 1e9 for name in categories + ["other"]}
