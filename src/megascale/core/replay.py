"""Replay of a schedule: computes start and end of every action from durations and the schedule's dependencies.

The planner, the simulator and the what-if analysis use it. Each stage has streams: one for compute, one for parameter
gathers, one for gradient reductions, and one for each of its channels. Work on a stream runs in list order. An action
starts when its stream is free and the following holds:

- FORWARD and all BACKWARDs: the action's message has arrived, its chunk's parameters are gathered (first forward), and
  its send buffer is free. If transfers are exposed (`Schedule.exposed`), the stage's earlier sends have arrived.
- SEND and RECV: the compute before the action in the stage's list has ended. The transfer starts when both sides have
  posted.
- GATHER_PARAMS: the compute before the action in the list has ended.
- REDUCE_GRADS: the backward that the action arms has ended. (`simulate` adds that buckets are reduced within that
  backward.) Data-parallel peers are assumed to run in step.

Times have the unit of the durations. Several data-parallel replicas with different durations can be replayed at once;
arrays then have a second axis. One numpy pass over the graph in topological levels computes all times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megascale.core.schedule import (
    COMPUTES,
    INPUT_BACKWARDS,
    RECEIVES,
    SEND_SLOTS,
    SENDS,
    WEIGHT_BACKWARDS,
    Action,
    ActionKind,
    Schedule,
    get_peer_offset,
    make_kind_mask,
)

STREAMS = ("compute", "send", "gather", "reduce")
_STREAM_KINDS = (COMPUTES, SENDS + RECEIVES, (ActionKind.GATHER_PARAMS,), (ActionKind.REDUCE_GRADS,))

DurationOf = Callable[[int, Action], float]

# Columns of `ActionGraph.predecessors`, whose docstring explains them.
_PREVIOUS_COMPUTE, _TRANSFER, _GATHER, _BUFFER_SEND, _STREAM_PREVIOUS = range(5)
_LAST_SENDS = 5  # first of one column per channel


class _Columns(NamedTuple):
    """Columns of the action tables of all stages, concatenated: int arrays [actions]."""

    stage: np.ndarray
    kind: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray

    @property
    def is_compute(self) -> np.ndarray:
        """True for computes: [actions]."""
        return make_kind_mask(self.kind, *COMPUTES)


@dataclass(frozen=True, eq=False)
class ActionGraph:
    """A schedule compiled for replay: compile once, replay many times.

    The actions of all stages are concatenated in list order; an action's index is its index in that list. A SEND and
    its RECV share one transfer, stored at the SEND's index.

    Attributes:
        stage, kind, chunk, microbatch: int arrays [actions].
        partner: index of the action on the other side of a SEND or RECV, else -1.
        predecessors: [actions, 5 + channels] indices of the actions whose end an action awaits, -1 where none.
            _PREVIOUS_COMPUTE (0): the compute before it in the list (for a reduction the backward that it arms).
            _TRANSFER (1): for a compute its transfer; for a transfer the compute before its RECV on the other stage.
            _GATHER (2): for a compute its chunk's gather.
            _BUFFER_SEND (3): for a compute the send that must free a buffer.
            _STREAM_PREVIOUS (4): the previous action on the stream.
            _LAST_SENDS (5) and later: the last send on each of the stage's channels, if transfers are exposed.
        levels: indices of all actions but RECVs in topological order, level by level. An action awaits actions of
            earlier levels only.
    """

    schedule: Schedule
    stage: np.ndarray
    kind: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    partner: np.ndarray
    predecessors: np.ndarray
    levels: tuple[np.ndarray, ...]

    @classmethod
    def compile(cls, schedule: Schedule) -> ActionGraph:
        """Compile a schedule. Raises ValueError if it can never finish (see core/checker.py)."""
        action_counts = [len(table) for table in schedule.tables]
        stage = np.repeat(np.arange(schedule.stages), action_counts)
        kind, chunk, microbatch = np.concatenate(schedule.tables).T.astype(np.int64)
        actions = _Columns(stage, kind, chunk, microbatch)
        partner = _find_partners(schedule, actions)
        channel = _number_send_channels(stage, kind, partner)
        predecessors = _find_predecessors(schedule, actions, partner, channel)
        return cls(
            schedule,
            *actions,
            partner=partner,
            predecessors=predecessors,
            levels=_find_topological_levels(predecessors, ~make_kind_mask(kind, *RECEIVES)),
        )

    def with_extra_waits(self, extra_predecessors: np.ndarray) -> ActionGraph:
        """Return a copy of the graph in which action n also awaits the actions `extra_predecessors[n]`.

        The copy models engines with more waits than the schedule, such as blocking exchanges.

        Args:
            extra_predecessors: [actions, k] indices, -1 where none.

        Raises ValueError if the waits deadlock.
        """
        predecessors = np.concatenate([self.predecessors, extra_predecessors], axis=1)
        levels = _find_topological_levels(predecessors, ~make_kind_mask(self.kind, *RECEIVES))
        return replace(self, predecessors=predecessors, levels=levels)

    @property
    def action_count(self) -> int:
        """Number of actions over all stages."""
        return len(self.kind)

    @cached_property
    def stream(self) -> np.ndarray:
        """Index into STREAMS of each action."""
        streams = np.zeros(len(ActionKind), dtype=np.int64)
        for index, kinds in enumerate(_STREAM_KINDS):
            streams[list(kinds)] = index
        return streams[self.kind]

    @cached_property
    def is_compute(self) -> np.ndarray:
        """True for actions on the compute stream: [actions]."""
        return make_kind_mask(self.kind, *COMPUTES)

    @cached_property
    def is_send(self) -> np.ndarray:
        """True for SENDs: [actions]."""
        return make_kind_mask(self.kind, *SENDS)

    @cached_property
    def position(self) -> np.ndarray:
        """Position in the model of each action's chunk: [actions]."""
        return self.schedule.chunk_map.positions[self.stage, self.chunk]

    def durations(
        self,
        forward: object,
        backward: object,
        send_forward: object = 0.0,
        send_backward: object = 0.0,
        gather: object = 0.0,
        reduce: object = 0.0,
        weight_share: float = 0.5,
    ) -> np.ndarray:
        """Return the duration of each action [actions] from durations per kind; 0 for a RECV.

        Args:
            forward, backward, send_forward, send_backward, gather, reduce: a scalar, or an array [stages, virtual
                stages]. `backward` is that of a whole backward.
            weight_share: share of a backward that computes gradients of weights, for backwards in two halves.
        """
        shape = (self.schedule.stages, self.schedule.virtual_stages)
        backward = np.asarray(backward, dtype=float)
        duration_by_kind: dict[ActionKind, object] = {
            ActionKind.FORWARD: forward,
            ActionKind.BACKWARD: backward,
            ActionKind.BACKWARD_INPUT: backward * (1 - weight_share),
            ActionKind.BACKWARD_WEIGHT: backward * weight_share,
            ActionKind.SEND_FORWARD: send_forward,
            ActionKind.SEND_BACKWARD: send_backward,
            ActionKind.GATHER_PARAMS: gather,
            ActionKind.REDUCE_GRADS: reduce,
        }
        table = np.zeros((len(ActionKind), *shape))
        for kind, duration in duration_by_kind.items():
            table[kind] = np.asarray(duration, dtype=float)
        return table[self.kind, self.stage, self.chunk]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of each action.

    Attributes:
        start, end: [actions] or [actions, replicas]. A transfer's SEND and RECV both end with it; each starts when
            its side has posted it.
        transfer_start: as `start`, but for SEND and RECV the time at which both sides were ready and bytes start to
            flow.
    """

    graph: ActionGraph
    start: np.ndarray
    end: np.ndarray
    transfer_start: np.ndarray

    @property
    def makespan(self) -> np.ndarray:
        """End of the last action: a scalar, or one value per replica."""
        return self.end.max(axis=0)

    @cached_property
    def busy(self) -> np.ndarray:
        """Compute time of each stage: [stages] or [stages, replicas]."""
        return self.stream_time("compute")

    def stream_time(self, stream: str) -> np.ndarray:
        """Return the busy time of a stream of each stage (transfers count at the sender): [stages, ...]."""
        graph = self.graph
        selected = (graph.stream == STREAMS.index(stream)) & ~make_kind_mask(graph.kind, *RECEIVES)
        total = np.zeros((graph.schedule.stages, *self.end.shape[1:]))
        np.add.at(total, graph.stage[selected], (self.end - self.transfer_start)[selected])
        return total

    @property
    def bubble(self) -> np.ndarray:
        """Idle over busy time of the busiest stage's compute stream: (p-1)/(v m) in the ideal case."""
        busy = self.busy.max(axis=0)
        return (self.makespan - busy) / busy

    def overlap(self, stream: str, other_stream: str) -> np.ndarray:
        """Return how long `other_stream` of the same stage is busy during each action on `stream`.

        A model of mutual slow-down stretches durations by the overlap and replays again. The timeline must have a
        single replica.

        Returns:
            [actions], 0 for actions on other streams.
        """
        graph = self.graph
        overlaps = np.zeros(graph.action_count)
        is_timed = ~make_kind_mask(graph.kind, *RECEIVES)
        for stage in range(graph.schedule.stages):
            in_stage = (graph.stage == stage) & is_timed
            actions = np.flatnonzero(in_stage & (graph.stream == STREAMS.index(stream)))
            other_actions = np.flatnonzero(in_stage & (graph.stream == STREAMS.index(other_stream)))
            if len(actions) and len(other_actions):
                overlaps[actions] = _busy_between(
                    self.transfer_start[other_actions],
                    self.end[other_actions],
                    self.transfer_start[actions],
                    self.end[actions],
                )
        return overlaps


def replay_schedule(schedule: Schedule | ActionGraph, durations: np.ndarray | DurationOf) -> Timeline:
    """Return the timeline of a schedule whose actions have these durations.

    Args:
        schedule: a Schedule, or an ActionGraph to replay without compiling it again.
        durations: [actions] or [actions, replicas] in the graph's order, or a function of (stage, action). A transfer
            takes the duration of its SEND; the duration of its RECV is ignored.

    Raises ValueError if there is not one duration per action, or if the schedule deadlocks.
    """
    if isinstance(schedule, ActionGraph):
        graph = schedule
    else:
        graph = ActionGraph.compile(schedule)
    if callable(durations):
        values = []
        for stage, actions in enumerate(graph.schedule):
            values += [durations(stage, action) for action in actions]
        durations = np.array(values, dtype=float)
    durations = np.asarray(durations, dtype=float)
    if durations.shape[0] != graph.action_count:
        raise ValueError(f"durations of {durations.shape[0]} actions for a schedule of {graph.action_count}")
    # The additional row stays zero and stands for "awaits nothing": index -1 reads it.
    end = np.zeros((graph.action_count + 1, *durations.shape[1:]))
    predecessors = graph.predecessors
    for level in graph.levels:
        end[level] = end[predecessors[level]].max(axis=1) + durations[level]
    transfer_start = end[:-1] - durations
    receives = np.flatnonzero(make_kind_mask(graph.kind, *RECEIVES))
    sends = graph.partner[receives]
    end[receives] = end[sends]
    transfer_start[receives] = transfer_start[sends]
    start = transfer_start.copy()
    # A side posts a transfer when the compute before it has ended and its stream is free. The other side may be later.
    transfers = np.flatnonzero(graph.partner >= 0)
    posted_after = predecessors[transfers][:, (_PREVIOUS_COMPUTE, _STREAM_PREVIOUS)]
    start[transfers] = end[posted_after].max(axis=1)
    return Timeline(graph, start, end[:-1], transfer_start)


def _busy_between(
    starts: np.ndarray, ends: np.ndarray, window_starts: np.ndarray, window_ends: np.ndarray
) -> np.ndarray:
    """Return for each window how much of it the intervals cover together: [windows].

    The busy time from the first start up to a moment is piecewise linear, so that it is interpolated.
    """
    times = np.concatenate([starts, ends])
    changes = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.argsort(times, kind="stable")
    times = times[order]
    running_count = changes[order].cumsum()
    busy = np.concatenate([[0.0], np.cumsum(np.diff(times) * (running_count[:-1] > 0))])
    return np.interp(window_ends, times, busy) - np.interp(window_starts, times, busy)


def _find_previous_computes(actions: _Columns) -> np.ndarray:
    """Return for each action the index of the last compute before it on its stage, or -1."""
    latest = np.maximum.accumulate(np.where(actions.is_compute, np.arange(len(actions.kind)), -1))
    earlier = np.concatenate([[-1], latest[:-1]])
    # The actions of a stage are contiguous, and the array of stages is sorted.
    stage_start = np.searchsorted(actions.stage, actions.stage)
    return np.where(earlier >= stage_start, earlier, -1)


def _number_microbatches(
    schedule: Schedule, stage: np.ndarray, chunk: np.ndarray, microbatch: np.ndarray
) -> np.ndarray:
    """Return a distinct number for each (stage, chunk, micro-batch)."""
    return (stage * schedule.virtual_stages + chunk) * schedule.microbatches + microbatch


def _find_partners(schedule: Schedule, actions: _Columns) -> np.ndarray:
    """Return `ActionGraph.partner`: `Schedule.peer`, vectorised.

    Raises ValueError if a transfer has no other side.
    """
    stage, kind, chunk, microbatch = actions
    chunk_map = schedule.chunk_map
    # By position in the model: the chunk's stage, and its index on that stage.
    stage_of = np.array(chunk_map.stage_of)
    chunk_of = chunk_map.indices
    partner = np.full(len(kind), -1)
    for send, receive in zip(SENDS, RECEIVES, strict=True):
        sends = np.flatnonzero(kind == send)
        receives = np.flatnonzero(kind == receive)
        target = chunk_map.positions[stage[sends], chunk[sends]] + get_peer_offset(send)
        if ((target < 0) | (target >= schedule.chunks)).any():
            raise ValueError(f"the schedule {schedule.name} sends beyond the model's ends")
        send_keys = _number_microbatches(schedule, stage_of[target], chunk_of[target], microbatch[sends])
        receive_keys = _number_microbatches(schedule, stage[receives], chunk[receives], microbatch[receives])
        order = np.argsort(receive_keys)
        if len(sends) != len(receives) or not np.array_equal(np.sort(send_keys), receive_keys[order]):
            raise ValueError(f"the schedule {schedule.name} has a send without its receive")
        match = receives[order[np.searchsorted(receive_keys[order], send_keys)]]
        partner[sends] = match
        partner[match] = sends
    return partner


def _number_send_channels(stage: np.ndarray, kind: np.ndarray, partner: np.ndarray) -> np.ndarray:
    """Return the index of each SEND's channel among the channels on which its stage sends, else -1: [actions].

    The kind of the send and the peer's stage identify a channel.
    """
    channel = np.full(len(kind), -1)
    sends = np.flatnonzero(make_kind_mask(kind, *SENDS))
    if not len(sends):
        return channel
    stages = int(stage.max()) + 1
    keys = (stage[sends] * len(ActionKind) + kind[sends]) * stages + stage[partner[sends]]
    channel_keys, channel_of_send = np.unique(keys, return_inverse=True)
    sending_stages = channel_keys // (len(ActionKind) * stages)
    # Keys are sorted by stage, so that a stage's first channel is where searchsorted finds the stage.
    index_in_stage = np.arange(len(channel_keys)) - np.searchsorted(sending_stages, sending_stages)
    channel[sends] = index_in_stage[channel_of_send]
    return channel


def _previous_of_group(group: np.ndarray, count: int = 1) -> np.ndarray:
    """Return for each element the index of the `count`-th element before it with the same group, or -1."""
    order = np.argsort(group, kind="stable")
    previous = np.full(len(group), -1)
    later, earlier = order[count:], order[:-count]
    is_same_group = group[later] == group[earlier]
    previous[later[is_same_group]] = earlier[is_same_group]
    return previous


def _find_predecessors(schedule: Schedule, actions: _Columns, partner: np.ndarray, channel: np.ndarray) -> np.ndarray:
    """Return the array `ActionGraph.predecessors`.

    Args:
        channel: as `_number_send_channels` returns it.
    """
    channel_count = int(channel.max(initial=-1)) + 1
    predecessors = np.full((len(actions.kind), _LAST_SENDS + channel_count), -1)
    predecessors[:, _PREVIOUS_COMPUTE] = _find_previous_computes(actions)
    predecessors[:, _STREAM_PREVIOUS] = _find_stream_predecessors(schedule, actions, partner)
    _set_message_predecessors(predecessors, schedule, actions, partner=partner, channel=channel)
    _set_bucket_predecessors(predecessors, schedule, actions)
    # A transfer also awaits the compute before its RECV on the other side.
    sends = np.flatnonzero(channel >= 0)
    predecessors[sends, _TRANSFER] = predecessors[partner[sends], _PREVIOUS_COMPUTE]
    if schedule.exposed:
        for index in range(channel_count):
            last_sends = _find_last_sends(actions.is_compute, actions.stage, channel == index)
            predecessors[:, _LAST_SENDS + index] = last_sends
    return predecessors


def _find_stream_predecessors(schedule: Schedule, actions: _Columns, partner: np.ndarray) -> np.ndarray:
    """Return the previous action on the stream of each action that is not a compute, or -1: [actions].

    Work of one kind on a stage is one stream: its gathers or its reductions, or the transfers of a channel.
    """
    peer_stage = np.where(partner >= 0, actions.stage[partner], 0)
    streamed = np.flatnonzero(~actions.is_compute)
    kind_and_stage = actions.kind[streamed] * schedule.stages + actions.stage[streamed]
    previous = _previous_of_group(kind_and_stage * schedule.stages + peer_stage[streamed])
    result = np.full(len(actions.kind), -1)
    result[streamed] = np.where(previous >= 0, streamed[previous], -1)
    return result


def _set_message_predecessors(
    predecessors: np.ndarray, schedule: Schedule, actions: _Columns, partner: np.ndarray, channel: np.ndarray
) -> None:
    """Set for each compute the transfer of its input, and the send that must free the buffer of its output."""
    stage, kind, chunk, microbatch = actions
    channel_count = int(channel.max(initial=-1)) + 1
    key_count = schedule.stages * schedule.virtual_stages * schedule.microbatches
    # Actions of a whole step have micro-batch -1. They have no messages, so that they may share a key.
    key = _number_microbatches(schedule, stage, chunk, np.maximum(microbatch, 0))
    index_by_key: dict[ActionKind, np.ndarray] = {}
    for action_kind in ActionKind:
        indices = np.flatnonzero(kind == action_kind)
        index_by_key[action_kind] = np.full(key_count, -1)
        index_by_key[action_kind][key[indices]] = indices
    for computes, send, receive in (
        ((ActionKind.FORWARD,), ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD),
        (INPUT_BACKWARDS, ActionKind.SEND_BACKWARD, ActionKind.RECV_BACKWARD),
    ):
        sends = np.flatnonzero(kind == send)
        # The send that used this buffer before: SEND_SLOTS earlier on the channel.
        earlier = _previous_of_group(stage[sends] * max(channel_count, 1) + channel[sends], SEND_SLOTS)
        buffer_sends = earlier
        if len(sends):
            buffer_sends = np.where(earlier >= 0, sends[earlier], -1)
        for compute in computes:
            indices = np.flatnonzero(kind == compute)
            received = index_by_key[receive][key[indices]]
            predecessors[indices, _TRANSFER] = np.where(received >= 0, partner[received], -1)
            senders = index_by_key[compute][key[sends]]
            predecessors[senders[senders >= 0], _BUFFER_SEND] = buffer_sends[senders >= 0]


def _set_bucket_predecessors(predecessors: np.ndarray, schedule: Schedule, actions: _Columns) -> None:
    """Set the backward that each reduction awaits, and the gather that each chunk's first forward awaits."""
    kind = actions.kind
    chunk_key = actions.stage * schedule.virtual_stages + actions.chunk
    reductions = np.flatnonzero(kind == ActionKind.REDUCE_GRADS)
    backwards = np.flatnonzero(make_kind_mask(kind, *WEIGHT_BACKWARDS))
    # A reduction arms the chunk's next backward in the list. Binary search finds this backward among all backwards,
    # sorted by chunk and then by position.
    by_chunk = np.lexsort((backwards, chunk_key[backwards]))
    sorted_backwards = backwards[by_chunk]
    order = chunk_key * len(kind) + np.arange(len(kind))
    predecessors[reductions, _PREVIOUS_COMPUTE] = sorted_backwards[
        np.searchsorted(order[sorted_backwards], order[reductions])
    ]
    # The first forward of a chunk awaits its gather.
    forwards = np.flatnonzero(kind == ActionKind.FORWARD)
    _, first_indices = np.unique(chunk_key[forwards], return_index=True)
    first_forwards = forwards[first_indices]
    gathers = np.flatnonzero(kind == ActionKind.GATHER_PARAMS)
    gather_by_chunk = np.full(schedule.chunks, -1)
    gather_by_chunk[chunk_key[gathers]] = gathers
    predecessors[first_forwards, _GATHER] = gather_by_chunk[chunk_key[first_forwards]]


def _find_last_sends(is_compute: np.ndarray, stage: np.ndarray, is_send: np.ndarray) -> np.ndarray:
    """Return for each compute the last send of the mask `is_send` before it on its stage: [actions], -1 where none."""
    sends = np.flatnonzero(is_send)
    computes = np.flatnonzero(is_compute)
    last = np.searchsorted(sends, computes) - 1
    if len(sends):
        candidates = sends[np.maximum(last, 0)]
    else:
        candidates = np.zeros_like(computes)
    waits = np.full(len(stage), -1)
    waits[computes] = np.where((last >= 0) & (stage[candidates] == stage[computes]), candidates, -1)
    return waits


def _find_topological_levels(predecessors: np.ndarray, is_timed: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the indices of the actions in `is_timed` by topological level (Kahn's algorithm, level by level).

    Raises ValueError if the graph has a cycle.
    """
    rows = np.flatnonzero(is_timed)
    waits = predecessors[rows]
    # The edges of the graph: target[i] awaits source[i].
    target = np.repeat(rows, waits.shape[1])[waits.ravel() >= 0]
    source = waits.ravel()[waits.ravel() >= 0]
    open_wait_counts = np.bincount(target, minlength=len(is_timed))
    # Successors of action n are successors[first[n] : first[n] + count[n]].
    order = np.argsort(source, kind="stable")
    successors = target[order]
    first = np.searchsorted(source[order], np.arange(len(is_timed) + 1))
    count = np.diff(first)
    level = rows[open_wait_counts[rows] == 0]
    levels = []
    while len(level):
        levels.append(level)
        # All successors of the level's actions, concatenated.
        level_counts = count[level]
        list_starts = np.concatenate([[0], level_counts[:-1].cumsum()])
        offsets = np.repeat(first[level] - list_starts, level_counts)
        reached = successors[offsets + np.arange(len(offsets))]
        np.subtract.at(open_wait_counts, reached, 1)
        # An action that several actions of the level precede is in `reached` several times.
        level = np.unique(reached[open_wait_counts[reached] == 0])
    if sum(len(actions) for actions in levels) != len(rows):
        raise ValueError("the schedule has a cycle of waits: it deadlocks")
    return tuple(levels)
