"""Messages and collectives that connect the recorded actions of several ranks in one step."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from megascale.core.chunk_map import Placement, make_chunk_map
from megascale.core.spans import COMPUTE_LABELS, SpanKind
from megascale.observe.analysis.run_steps import ActionSpan, InnerSpan, RankStep

# Direction of the message that a compute awaits.
_INPUT_DIRECTIONS = {
    SpanKind.FORWARD.label: "forward",
    SpanKind.BACKWARD.label: "backward",
    SpanKind.BACKWARD_INPUT.label: "backward",
}


class CollectiveKey(NamedTuple):
    """Identity of a collective of one step, equal on all of its members.

    Attributes:
        group: coordinates that all members share; which ones depends on the axis.
        action, chunk, microbatch: the action in which each member began the collective.
        position: number of earlier ones among the action's collectives along this axis.
    """

    axis: str
    group: tuple[int, ...]
    action: str
    chunk: int
    microbatch: int
    position: int


class _MessageKey(NamedTuple):
    """Identity of a message between stages: its pipeline, direction, the sending chunk's position and micro-batch."""

    tensor: int
    data: int
    direction: str
    sender_position: int
    microbatch: int


class StepConnections:
    """The steps of the ranks that were read, with the sends and collectives between them.

    Args:
        rank_steps: the step of each rank that was read, by rank.
        stages: number of pipeline stages of the job.
        placement: maps chunks to stages.

    Attributes:
        chunks_per_stage: model chunks per stage, as recorded.
        join_times: time at which each member joined a collective, by collective and rank.
        collectives: transfers of collectives by rank and axis.
    """

    def __init__(self, rank_steps: dict[int, RankStep], stages: int, placement: Placement) -> None:
        self.rank_steps = rank_steps
        self.stages = stages
        self.placement = placement
        chunks = [
            act.chunk for rank_step in rank_steps.values() for act in rank_step.actions if act.action in COMPUTE_LABELS
        ]
        self.chunks_per_stage = 1 + max(chunks, default=0)
        self.chunk_map = make_chunk_map(stages, self.chunks_per_stage, placement)
        self.rank_by_coordinates = {rank_step.coordinates: rank_step.rank for rank_step in rank_steps.values()}
        self.join_times: dict[CollectiveKey, dict[int, int]] = defaultdict(dict)
        self.collectives: dict[tuple[int, str], list[tuple[CollectiveKey, InnerSpan]]] = defaultdict(list)
        # Sending rank and its send action.
        self._sends: dict[_MessageKey, tuple[int, ActionSpan]] = {}
        for rank_step in rank_steps.values():
            for act in rank_step.actions:
                self._add_send(rank_step, act)
                self._add_collectives(rank_step, act)

    def find_message(self, rank_step: RankStep, act: ActionSpan) -> tuple[int, ActionSpan] | None:
        """Return the sending rank and the send of a compute's input.

        Returns None if `act` receives no message, or if the sender was not read.
        """
        direction = _INPUT_DIRECTIONS.get(act.action)
        if direction is None or self.stages == 1:
            return None
        tensor, stage, data = rank_step.coordinates
        position = self._find_chunk_position(stage, act)
        if direction == "forward":
            sender_position = position - 1
        else:
            sender_position = position + 1
        return self._sends.get(_MessageKey(tensor, data, direction, sender_position, microbatch=act.microbatch))

    def _add_send(self, rank_step: RankStep, act: ActionSpan) -> None:
        if not act.action.startswith("send_"):
            return
        tensor, stage, data = rank_step.coordinates
        direction = act.action.removeprefix("send_")
        position = self._find_chunk_position(stage, act)
        self._sends[_MessageKey(tensor, data, direction, position, microbatch=act.microbatch)] = (rank_step.rank, act)

    def _add_collectives(self, rank_step: RankStep, act: ActionSpan) -> None:
        tensor, stage, data = rank_step.coordinates
        # The coordinates that the members of a collective share, by axis. The context ranks of a sequence have
        # consecutive data coordinates, so they share the data coordinate of the first of them.
        groups: dict[str, tuple[int, ...]] = {
            "tensor": (stage, data), "data": (stage, tensor), "stage": (stage,), "embedding": (tensor, data),
            "world": (), "context": (stage, tensor, data - rank_step.context),
        }  # fmt: skip
        collective_counts: Counter[str] = Counter()
        for span in act.inner_spans:
            if span.action != "transfer" or span.axis not in groups:
                continue
            key = CollectiveKey(
                axis=span.axis,
                group=groups[span.axis],
                action=act.action,
                chunk=act.chunk,
                microbatch=act.microbatch,
                position=collective_counts[span.axis],
            )
            collective_counts[span.axis] += 1
            self.join_times[key][rank_step.rank] = span.begin
            self.collectives[rank_step.rank, span.axis].append((key, span))

    def _find_chunk_position(self, stage: int, act: ActionSpan) -> int:
        """Return the position of an action's chunk in the model.

        If a damaged span has an impossible chunk, the position is two beyond the last one, so that neither it nor its
        neighbours are positions of the model.
        """
        if not 0 <= act.chunk < self.chunks_per_stage:
            return self.chunk_map.chunks + 1
        return int(self.chunk_map.positions[stage, act.chunk])
