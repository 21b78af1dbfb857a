"""Timeline of one step of several ranks: actions, waits with their reasons, and the planned schedule.

Waits are explained by `wait_reasons`, the plan is made by `planned_pipeline`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from megascale.core.chunk_map import Placement, round_robin
from megascale.core.spans import COMPUTE_LABELS
from megascale.errors import ConfigError, DataError
from megascale.observe.analysis.planned_pipeline import PlannedCompute, plan_pipelines
from megascale.observe.analysis.run_steps import (
    ActionSpan,
    RankStep,
    choose_sampled_steps,
    read_placement,
    read_rank_steps,
)
from megascale.observe.analysis.step_connections import StepConnections
from megascale.observe.analysis.wait_reasons import Wait, WaitExplainer, find_root
from megascale.observe.store.tables import SpanTables

Coordinates = tuple[int, int, int]  # tensor, pipeline and data coordinate of a rank
_TENSOR, _PIPELINE, _DATA = range(3)  # index of each axis in Coordinates


class _View(NamedTuple):
    """View of a timeline: the axis whose ranks are next to each other.

    Attributes:
        sort_axes: indexes of all axes, in the order in which their coordinates sort the ranks. The last one is `axis`.
    """

    axis: int
    sort_axes: tuple[int, int, int]


_VIEWS = {
    "pipeline": _View(_PIPELINE, sort_axes=(_DATA, _TENSOR, _PIPELINE)),
    "tensor": _View(_TENSOR, sort_axes=(_DATA, _PIPELINE, _TENSOR)),
    "data": _View(_DATA, sort_axes=(_PIPELINE, _TENSOR, _DATA)),
}
# In jobs of at most this number of ranks all ranks are read, so that the reason of each wait is known. In larger jobs
# only the shown ranks, their pipelines and their tensor peers are read.
_MAX_READ_RANKS = 256


@dataclass(frozen=True)
class Track:
    """The step of one rank.

    Attributes:
        coordinates: tensor, pipeline and data coordinate.
        begin, end: nanoseconds since the timeline's begin.
        seconds: seconds by category: compute, bubble, exposed AXIS, samples, optimizer, other. Their sum is the step.
    """

    rank: int
    coordinates: Coordinates
    begin: int
    end: int
    actions: list[ActionSpan]
    waits: list[Wait]
    planned_computes: list[PlannedCompute]
    seconds: dict[str, float]


class Message(NamedTuple):
    """A message between stages. Times are nanoseconds since the timeline's begin.

    Attributes:
        compute_begin: begin of the receiver's compute that needs the message.
    """

    sender: int
    send_begin: int
    receiver: int
    compute_begin: int


@dataclass(frozen=True)
class StepTimeline:
    """The timeline of a step.

    Attributes:
        origin: begin of the timeline, nanoseconds since 1970.
        length: nanoseconds from `origin` to the end of the last shown rank's step.
        virtual: model chunks per stage.
        messages: messages between shown ranks.
        planned_seconds: duration of the planned pipeline; NaN if all pipelines of the shown ranks are incomplete.
        pipeline_seconds: recorded duration of the longest of these pipelines, from its first work to its last compute;
            NaN like `planned_seconds`.
        clock_error: largest error of the ranks' clocks in nanoseconds.
        bubbles: seconds of the shown ranks' bubbles by the rank that caused them (Wait.root), the largest first.
    """

    step: int
    view: str
    origin: int
    length: int
    virtual: int
    tracks: list[Track]
    messages: list[Message]
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
    chosen_step = choose_sampled_steps(tables, "" if step is None else str(step), last=1)[-1]
    rows = tables.query(
        "SELECT rank, any_value(tensor) AS tensor, any_value(pipeline) AS pipeline, any_value(data) AS data FROM ranks "
        "WHERE attempt = (SELECT max(attempt) FROM spans WHERE step = ?) GROUP BY rank ORDER BY rank",
        [chosen_step],
    )
    columns = [column.tolist() for column in rows.values()]
    coordinates_by_rank = {rank: (tensor, stage, data) for rank, tensor, stage, data in zip(*columns, strict=True)}
    shown_ranks = _parse_ranks(ranks, view, coordinates_by_rank)
    needed_ranks = _choose_needed_ranks(shown_ranks, coordinates_by_rank)
    rank_steps = {rank_step.rank: rank_step for rank_step in read_rank_steps(tables, [chosen_step], needed_ranks)}
    missing_ranks = [rank for rank in shown_ranks if rank not in rank_steps]
    if missing_ranks:
        raise DataError(f"step {chosen_step}: spans of rank {missing_ranks[0]} were lost; choose another step")
    stages = 1 + max(stage for _, stage, _ in coordinates_by_rank.values())
    return build_timeline(
        chosen_step, rank_steps, shown_ranks, view=view, stages=stages, placement=read_placement(tables)
    )


def _choose_needed_ranks(shown_ranks: list[int], coordinates_by_rank: dict[int, Coordinates]) -> list[int]:
    """Return the ranks whose spans are read, because they are shown or may be the reason of a shown wait."""
    if len(coordinates_by_rank) <= _MAX_READ_RANKS:
        return list(coordinates_by_rank)
    shown_coordinates = [coordinates_by_rank[rank] for rank in shown_ranks]
    pipelines = {(tensor, data) for tensor, _, data in shown_coordinates}
    tensor_groups = {(stage, data) for _, stage, data in shown_coordinates}
    return [
        rank
        for rank, (tensor, stage, data) in coordinates_by_rank.items()
        if (tensor, data) in pipelines or (stage, data) in tensor_groups
    ]


def _parse_ranks(ranks: str, view: str, coordinates_by_rank: dict[int, Coordinates]) -> list[int]:
    """Return the ranks to show, ordered by the view. Raises ConfigError for an invalid list or an unknown rank."""
    axis, sort_axes = _VIEWS[view]
    if not ranks:
        fixed_axes = [index for index in sort_axes if index != axis]
        first_coordinates = coordinates_by_rank[min(coordinates_by_rank)]
        chosen = []
        for rank, rank_coordinates in coordinates_by_rank.items():
            if all(rank_coordinates[index] == first_coordinates[index] for index in fixed_axes):
                chosen.append(rank)
    elif ranks == "all":
        chosen = list(coordinates_by_rank)
    else:
        chosen = []
        for rank_range in ranks.split(","):
            first_rank, dash, last_rank = rank_range.strip().partition("-")
            if not dash:
                last_rank = first_rank
            if not first_rank.isdecimal() or not last_rank.isdecimal():
                raise ConfigError(f"--ranks={ranks} is not a list of ranks; write 0,1 or 0-3,8 or all")
            for rank in range(int(first_rank), int(last_rank) + 1):
                if rank not in coordinates_by_rank:
                    raise ConfigError(
                        f"--ranks={ranks}: the run has no rank {rank}; its ranks are {min(coordinates_by_rank)} to "
                        f"{max(coordinates_by_rank)}"
                    )
                chosen.append(rank)
    return sorted(set(chosen), key=lambda rank: tuple(coordinates_by_rank[rank][index] for index in sort_axes))


def build_timeline(
    step: int,
    rank_steps: dict[int, RankStep],
    shown_ranks: list[int],
    *,
    view: str,
    stages: int,
    placement: Placement = round_robin,
) -> StepTimeline:
    """Return the timeline of the shown ranks in a step.

    Args:
        rank_steps: the step of each rank that was read, by rank; contains the shown ranks.
        stages: number of pipeline stages of the job.
        placement: maps chunks to stages.
    """
    connections = StepConnections(rank_steps, stages, placement)
    origin = min(rank_step.begin for rank_step in rank_steps.values())
    plan = plan_pipelines(connections, shown_ranks, origin)
    explainer = WaitExplainer(connections, origin)
    waits_by_rank = {rank: explainer.explain_waits(rank_step) for rank, rank_step in rank_steps.items()}
    tracks = []
    for rank in shown_ranks:
        rank_step = rank_steps[rank]
        waits = [replace(wait, root=find_root(wait, waits_by_rank)) for wait in waits_by_rank[rank]]
        tracks.append(
            Track(
                rank=rank,
                coordinates=rank_step.coordinates,
                begin=rank_step.begin - origin,
                end=rank_step.end - origin,
                actions=rank_step.actions,
                waits=waits,
                planned_computes=plan.computes.get(rank, []),
                seconds=_sum_by_category(rank_step, waits),
            )
        )
    return StepTimeline(
        step=step,
        view=view,
        origin=origin,
        length=max(track.end for track in tracks),
        virtual=connections.chunks_per_stage,
        tracks=tracks,
        messages=_list_messages(connections, shown_ranks, origin),
        planned_seconds=plan.planned_seconds,
        pipeline_seconds=plan.recorded_seconds,
        clock_error=max(rank_step.clock_error for rank_step in rank_steps.values()),
        bubbles=_sum_bubbles(tracks),
    )


def _list_messages(connections: StepConnections, shown_ranks: list[int], origin: int) -> list[Message]:
    """Return the messages between the shown ranks, by receiver."""
    messages = []
    for rank in shown_ranks:
        rank_step = connections.rank_steps[rank]
        for act in rank_step.actions:
            message = connections.find_message(rank_step, act)
            if message is None:
                continue
            sender, send = message
            if sender in shown_ranks:
                messages.append(Message(sender, send.begin - origin, rank, compute_begin=act.begin - origin))
    return messages


def _sum_bubbles(tracks: list[Track]) -> dict[int, float]:
    """Return the seconds of all bubbles by the rank that caused them, the largest first."""
    nanoseconds: Counter[int] = Counter()
    for track in tracks:
        for wait in track.waits:
            if wait.kind == "bubble":
                nanoseconds[wait.root] += wait.end - wait.begin
    return {rank: length / 1e9 for rank, length in nanoseconds.most_common()}


def _sum_by_category(rank_step: RankStep, waits: list[Wait]) -> dict[str, float]:
    """Return the seconds of a rank's step by category (see `Track.seconds`)."""
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
