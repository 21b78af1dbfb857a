"""Planned pipelines of a step: its recorded schedule, replayed with one duration per kind of action.

The plan consists of the recorded actions in the recorded order. A compute takes the median duration, without waits, of
its chunk and stage over the ranks that were read. A transfer takes the shortest time of the transfers that a rank
waited for. The plan has no other waits.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megascale.core.replay import ActionGraph, Timeline, replay_schedule
from megascale.core.schedule import COMPUTES, RECEIVES, SENDS, ActionKind, Schedule
from megascale.core.spans import COMPUTE_LABELS, SPAN_OF_ACTION
from megascale.errors import DataError
from megascale.observe.analysis.run_steps import ActionSpan
from megascale.observe.analysis.step_connections import StepConnections

_NO_WAIT_NS = 100_000  # a recorded wait that is shorter is overhead: the message had already arrived
_SCHEDULE_ACTIONS = {SPAN_OF_ACTION[kind].label: kind for kind in COMPUTES + SENDS + RECEIVES}


@dataclass(frozen=True)
class PlannedCompute:
    """A compute of the plan. Times are nanoseconds since the timeline's begin."""

    is_backward: bool
    chunk: int
    microbatch: int
    begin: int
    end: int


@dataclass
class PipelinePlan:
    """Planned pipelines next to the recorded ones.

    Attributes:
        computes: planned computes of each rank of the complete pipelines, by rank.
        planned_seconds: duration of a planned pipeline; NaN without a complete pipeline.
        recorded_seconds: recorded time of the longest complete pipeline, from its first work to its last compute; NaN
            without one.
    """

    computes: dict[int, list[PlannedCompute]] = field(default_factory=dict)
    planned_seconds: float = float("nan")
    recorded_seconds: float = float("nan")


def plan_pipelines(connections: StepConnections, ranks: list[int], origin: int) -> PipelinePlan:
    """Plan the pipelines that contain `ranks`, as far as the ranks of all stages were read.

    Args:
        origin: begin of the timeline, nanoseconds since 1970.
    """
    rank_by_coordinates = connections.rank_by_coordinates
    stages = range(connections.stages)
    complete_pipelines = []
    for tensor, data in sorted(
        {(tensor, data) for tensor, _, data in (connections.rank_steps[rank].coordinates for rank in ranks)}
    ):
        if all((tensor, stage, data) in rank_by_coordinates for stage in stages):
            complete_pipelines.append([rank_by_coordinates[tensor, stage, data] for stage in stages])
    if not complete_pipelines:
        return PipelinePlan()
    # All pipelines have the same schedule and the same planned durations.
    graph = _make_graph(connections, complete_pipelines[0])
    replay = replay_schedule(graph, _measure_durations(connections, graph))
    plan = PipelinePlan(planned_seconds=float(replay.makespan) / 1e9, recorded_seconds=0.0)
    for pipeline_ranks in complete_pipelines:
        computes = [
            act
            for rank in pipeline_ranks
            for act in connections.rank_steps[rank].actions
            if act.action in COMPUTE_LABELS
        ]
        # The pipeline begins with the first work, since waits for samples or for earlier work do not belong to it.
        work_begin = min(_find_work_begin(act) for act in computes)
        seconds = (max(act.end for act in computes) - work_begin) / 1e9
        plan.recorded_seconds = max(plan.recorded_seconds, seconds)
        for stage, rank in enumerate(pipeline_ranks):
            plan.computes[rank] = _list_computes(graph, replay, stage, begin=work_begin - origin)
    return plan


def _list_computes(graph: ActionGraph, replay: Timeline, stage: int, begin: int) -> list[PlannedCompute]:
    """Return the planned computes of a stage; `begin` is the pipeline's begin, nanoseconds since the timeline's."""
    return [
        PlannedCompute(
            is_backward=bool(graph.kind[node] != ActionKind.FORWARD),
            chunk=int(graph.chunk[node]),
            microbatch=int(graph.microbatch[node]),
            begin=round(begin + replay.start[node]),
            end=round(begin + replay.end[node]),
        )
        for node in np.flatnonzero(graph.is_compute & (graph.stage == stage)).tolist()
    ]


def _make_graph(connections: StepConnections, pipeline_ranks: list[int]) -> ActionGraph:
    """Return the dependency graph of the recorded schedule of a pipeline, given by its rank of each stage.

    Raises DataError if the schedule is not valid.
    """
    stages, chunks_per_stage = connections.stages, connections.chunks_per_stage
    actions_by_stage = []
    for rank in pipeline_ranks:
        actions = [
            (_SCHEDULE_ACTIONS[act.action], act.chunk, act.microbatch)
            for act in connections.rank_steps[rank].actions
            if act.action in _SCHEDULE_ACTIONS
        ]
        actions_by_stage.append(actions)
    last_microbatch = max((microbatch for actions in actions_by_stage for _, _, microbatch in actions), default=0)
    microbatches = last_microbatch + 1
    try:
        # Each stage records at least one action per micro-batch and chunk. If a damaged span has a huge number, the
        # product exceeds the number of recorded actions.
        if stages * chunks_per_stage * microbatches > sum(map(len, actions_by_stage)):
            raise ValueError(
                f"{microbatches:,} micro-batches of {chunks_per_stage:,} chunks have more passes than recorded"
            )
        schedule = Schedule(
            "recorded",
            stages,
            chunks_per_stage,
            microbatches,
            tables=tuple(np.array(actions, dtype=np.int32) for actions in actions_by_stage),
            placement=connections.placement,
        )
        return ActionGraph.compile(schedule)
    except (ValueError, IndexError) as error:
        raise DataError(f"the recorded actions are not a valid schedule ({error}); choose another step") from None


def _measure_durations(connections: StepConnections, graph: ActionGraph) -> np.ndarray[Any, Any]:
    """Return the planned duration of each action in nanoseconds, [actions]."""
    # Durations without waits, by stage, action and chunk.
    work_times: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    transfer_times: list[int] = []
    for rank_step in connections.rank_steps.values():
        for act in rank_step.actions:
            if act.action not in COMPUTE_LABELS:
                continue
            work_time = act.end - act.begin - act.sum_waits()
            work_times[rank_step.coordinates[1], act.action, act.chunk].append(work_time)
            message = connections.find_message(rank_step, act)
            waits = act.select_waits("pipeline")
            if message is not None and waits and waits[0].end - waits[0].begin > _NO_WAIT_NS:
                _, send = message
                transfer_times.append(waits[0].end - max(send.begin, waits[0].begin))
    # Errors of clocks can make a transfer time negative.
    durations = np.full(graph.action_count, float(max(0, min(transfer_times, default=0))))
    for node in np.flatnonzero(graph.is_compute).tolist():
        label = SPAN_OF_ACTION[ActionKind(int(graph.kind[node]))].label
        durations[node] = np.median(work_times[int(graph.stage[node]), label, int(graph.chunk[node])])
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
