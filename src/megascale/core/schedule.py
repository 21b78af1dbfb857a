"""Pipeline schedules as plain data: the list of actions of each stage. Pure functions, no torch.

The executor runs a schedule, `checker` proves it free of deadlock, `replay` computes its times, and the timeline
compares a run with it. `schedule_registry` names the schedules that a configuration may select.

Meaning of the actions (the contract with the executor):

- FORWARD and BACKWARD run one after another on the stage's compute stream, in list order.
- BACKWARD_INPUT and BACKWARD_WEIGHT are the two halves of a BACKWARD. The first computes the gradient of the chunk's
  input and queues the weight gradients of linear layers. The second computes the queued gradients, at any time after
  the first (Qi et al. 2023, zero bubble). A list may have some backwards whole and some in two halves.
- RECV_* posts the receive now; the FORWARD, BACKWARD or BACKWARD_INPUT of the same chunk and micro-batch awaits it.
- SEND_* starts the send now. Each channel has SEND_SLOTS buffers. A compute that would overwrite a buffer first waits
  for the send that last used it. If transfers are exposed (`Schedule.exposed`: not overlapped), every compute also
  awaits all sends before it in the list.
- GATHER_PARAMS starts the gather of the chunk's parameters, bucket by bucket in the order in which its first FORWARD
  needs them; that forward awaits each bucket before its use. The list's first gather (`Schedule.first_gather`) starts
  during the previous step's update, if that step knows that another follows: each bucket's gather starts as soon as
  its shard has been updated.
- REDUCE_GRADS arms the chunk's buckets. It stands before the chunk's last BACKWARD or BACKWARD_WEIGHT, which completes
  the gradients (ZeRO-2: before each of them). Within that backward a bucket is reduced as soon as it is full; the
  optimizer awaits the reductions.

A chunk's neighbours in the model are where the schedule's placement puts them (`chunk_map`). Between two chunks of one
stage nothing is sent: the list runs them in order, and the second takes the first one's result.

A compute slot is the position of a compute among the stage's computes. A receive is posted one compute slot before its
message can arrive, in all phases (warm-up, steady, cool-down), and never in one operation with a send. So no compute
waits for a transfer that it does not need (MegaScale section 3.2), and no send waits long on the device for its
receiver. In micro-batch groups larger than the number of stages, the wrap-around transfer from the last stage back to
stage 0 arrives before its receiver needs it.

A channel is one communicator per directed stage pair and per kind of tensor (activations or gradients). Two stages with
several chunks have four channels: the forward edges 0->1 and 1->0 and the backward edges 1->0 and 0->1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megascale.core.chunk_map import ChunkMap, Placement, make_chunk_map, round_robin
from megascale.errors import FitError

# Buffers of a channel on the sending side: one in flight, one being filled.
SEND_SLOTS = 2


class ActionKind(IntEnum):
    """Kind of an action, with its code in tables. Codes are stable; `label` is the name in records."""

    FORWARD = 0
    BACKWARD = 1
    SEND_FORWARD = 2
    RECV_FORWARD = 3
    SEND_BACKWARD = 4
    RECV_BACKWARD = 5
    GATHER_PARAMS = 6
    REDUCE_GRADS = 7
    BACKWARD_INPUT = 8
    BACKWARD_WEIGHT = 9

    @property
    def label(self) -> str:
        """Lower-case name, such as `send_forward`."""
        return self.name.lower()

    @property
    def is_compute(self) -> bool:
        """True for FORWARD and all kinds of BACKWARD."""
        return self in COMPUTES

    @property
    def is_send(self) -> bool:
        """True for SEND_FORWARD and SEND_BACKWARD."""
        return self in SENDS

    @property
    def is_receive(self) -> bool:
        """True for RECV_FORWARD and RECV_BACKWARD."""
        return self in RECEIVES


COMPUTES = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
SENDS = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)
RECEIVES = (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD)
# Backwards that compute the gradient of a chunk's input, and backwards that complete the gradients of its weights.
INPUT_BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
WEIGHT_BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
# By kind of transfer: the kind on the other side, and the peer chunk's position in the model relative to this chunk.
_OPPOSITES = {
    ActionKind.SEND_FORWARD: (ActionKind.RECV_FORWARD, 1),
    ActionKind.RECV_FORWARD: (ActionKind.SEND_FORWARD, -1),
    ActionKind.SEND_BACKWARD: (ActionKind.RECV_BACKWARD, -1),
    ActionKind.RECV_BACKWARD: (ActionKind.SEND_BACKWARD, 1),
}


def make_kind_mask(kinds: np.ndarray, *selected: ActionKind) -> np.ndarray:
    """Return which codes in `kinds` are one of `selected`: booleans of the same shape."""
    table = np.zeros(len(ActionKind), dtype=bool)
    table[list(selected)] = True
    return table[kinds]


def get_peer_offset(kind: ActionKind) -> int:
    """Return the position of a transfer's other chunk relative to its own: 1 for the next, -1 for the previous."""
    return _OPPOSITES[kind][1]


class Action(NamedTuple):
    """One action of a stage.

    Attributes:
        chunk: index of the model chunk on this stage, 0 to v-1. For a SEND or RECV it is the chunk that produces or
            consumes the tensor *on this stage* (the peer's chunk may differ: see Schedule.peer).
        microbatch: 0 to m-1; -1 for GATHER_PARAMS and for a REDUCE_GRADS of the whole step.
    """

    kind: ActionKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.label}(chunk {self.chunk}, micro-batch {self.microbatch})"


class Channel(NamedTuple):
    """A communicator: a directed edge between stages, for activations ("forward") or gradients ("backward")."""

    pass_name: str
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """Actions of all stages.

    Attributes:
        stages: p, number of pipeline stages.
        virtual_stages: v, model chunks per stage.
        microbatches: m, micro-batches in a step.
        tables: for each stage an int32 array [actions, 3] of (kind, chunk, microbatch); `schedule[stage]` gives the
            same as a tuple of Action.
        exposed: whether every compute awaits all sends before it. `without_overlap` sets it.
        placement: stage of each model chunk.
    """

    name: str
    stages: int
    virtual_stages: int
    microbatches: int
    tables: tuple[np.ndarray, ...]
    exposed: bool = False
    placement: Placement = round_robin

    def replace_actions(self, actions: Sequence[Iterable[Action]]) -> Schedule:
        """Return a copy of this schedule with other actions, given as one list per stage."""
        tables = tuple(np.array(list(stage_actions), dtype=np.int32).reshape(-1, 3) for stage_actions in actions)
        return replace(self, tables=tables)

    def __len__(self) -> int:
        return self.stages

    def __getitem__(self, stage: int) -> tuple[Action, ...]:
        kinds = list(ActionKind)
        return tuple(Action(kinds[kind], chunk, i) for kind, chunk, i in self.tables[stage].tolist())

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return (self[stage] for stage in range(self.stages))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and (self.chunk_map, self.microbatches) == (other.chunk_map, other.microbatches)
            and all(np.array_equal(a, b) for a, b in zip(self.tables, other.tables, strict=True))
        )

    def __hash__(self) -> int:
        """Return a hash of the sizes, which equal schedules have in common. A hash of the tables would take longer."""
        return hash((self.stages, self.virtual_stages, self.microbatches))

    @property
    def chunk_map(self) -> ChunkMap:
        """Stage of each model chunk, and its index on the stage."""
        return make_chunk_map(self.stages, self.virtual_stages, self.placement)

    @property
    def chunks(self) -> int:
        """Number of model chunks over all stages."""
        return self.stages * self.virtual_stages

    @cached_property
    def splits_backward(self) -> bool:
        """True if some backwards are two actions, one for input gradients and one for weight gradients."""
        return any((table[:, 0] == ActionKind.BACKWARD_WEIGHT).any() for table in self.tables)

    def global_chunk(self, stage: int, chunk: int) -> int:
        """Return the position of a stage's chunk in the model."""
        return int(self.chunk_map.positions[stage, chunk])

    def message_mask(self, stage: int, kind: ActionKind) -> np.ndarray:
        """Return the mask of the chunks of a stage that have a SEND or RECV of this kind: [v] booleans.

        A chunk has none if there is no neighbour in that direction, or if the neighbour is on the same stage.
        """
        chunk_map = self.chunk_map
        neighbours = chunk_map.positions[stage] + get_peer_offset(kind)
        exists = (neighbours >= 0) & (neighbours < self.chunks)
        peer_stages = np.array(chunk_map.stage_of)[neighbours % self.chunks]
        return exists & (peer_stages != stage)

    def channel(self, stage: int, action: Action) -> Channel:
        """Return the communicator of a SEND or RECV of `stage`. Raises ValueError for other actions."""
        peer_stage, _ = self.peer(stage, action)
        if action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD):
            pass_name = "forward"
        else:
            pass_name = "backward"
        if action.kind.is_send:
            return Channel(pass_name, stage, peer_stage)
        return Channel(pass_name, peer_stage, stage)

    def peer(self, stage: int, action: Action) -> tuple[int, Action]:
        """Return the matching action on the other side as (stage, action).

        Raises ValueError if `action` moves nothing between stages.
        """
        neighbour = None
        if action.kind in _OPPOSITES:
            opposite, offset = _OPPOSITES[action.kind]
            neighbour = self.chunk_map.neighbour(stage, action.chunk, offset)
        if neighbour is None or neighbour[0] == stage:
            raise ValueError(f"{action} of stage {stage} moves nothing between stages")
        peer_stage, peer_chunk = neighbour
        return peer_stage, Action(opposite, peer_chunk, action.microbatch)

    def first_gather(self, stage: int) -> int:
        """Return the chunk of the first GATHER_PARAMS in the stage's list. Raises ValueError if there is none."""
        kinds, chunks, _ = self.tables[stage].T
        gathered_chunks = chunks[kinds == ActionKind.GATHER_PARAMS]
        if not len(gathered_chunks):
            raise ValueError(f"the schedule {self.name} gathers no parameters on stage {stage}")
        return int(gathered_chunks[0])

    def runs_backward_at_once(self, stage: int, chunk: int) -> bool:
        """Return whether the stage runs each micro-batch's whole backward of `chunk` right after its forward."""
        computes = [row for row in self.tables[stage].tolist() if row[0] in COMPUTES]
        for index, (kind, computed_chunk, microbatch) in enumerate(computes):
            if kind != ActionKind.FORWARD or computed_chunk != chunk:
                continue
            is_last = index + 1 == len(computes)
            if is_last or computes[index + 1] != [ActionKind.BACKWARD, chunk, microbatch]:
                return False
        return True

    def channels(self) -> list[Channel]:
        """Return all channels of this layout, in the order in which communicators are created."""
        forward = [Channel("forward", source, target) for source, target in self.chunk_map.edges()]
        return forward + [Channel("backward", channel.target, channel.source) for channel in forward]

    def in_flight_deltas(self, stage: int) -> np.ndarray:
        """Return +1 for each FORWARD of a stage's list, -1 for each backward of its input, else 0: [actions]."""
        kinds = self.tables[stage][:, 0]
        is_backward = make_kind_mask(kinds, *INPUT_BACKWARDS)
        return (kinds == ActionKind.FORWARD).astype(int) - is_backward

    def count_in_flight(self, stage: int) -> int:
        """Return the maximum number of chunk-forwards of `stage` whose backward has not run."""
        return int(self.in_flight_deltas(stage).cumsum().max(initial=0))


def build_1f1b(stages: int, microbatches: int, reduce_each_microbatch: bool = False) -> Schedule:
    """Build 1F1B (PipeDream-flush, Narayanan et al. 2021): stage s warms up with p-1-s forwards, then alternates.

    In flight on stage s: min(m, p - s) micro-batches. Bubble (p-1)/m of the ideal time when stages are equal. Each
    micro-batch's round trip is on the critical path, so transfers are hidden in part only. `build_interleaved_1f1b`
    with one chunk warms up with twice as many forwards and hides all transfers, but has p-1-s more micro-batches in
    flight.

    Args:
        reduce_each_microbatch: whether a REDUCE_GRADS precedes every backward (ZeRO-2), not only a chunk's last one.
    """
    _check_positive(stages, 1, microbatches)
    warmup = [stages - 1 - s for s in range(stages)]
    return _build_with_warmup("1f1b", p=stages, v=1, m=microbatches, warmup=warmup, reduce_each=reduce_each_microbatch)


def build_interleaved_1f1b(
    stages: int,
    virtual_stages: int,
    microbatches: int,
    reduce_each_microbatch: bool = False,
    micro_batch_group_size: int | None = None,
) -> Schedule:
    """Build interleaved 1F1B (Narayanan et al. 2021) for any number of micro-batches.

    The micro-batches run in groups of p micro-batches, or of about `micro_batch_group_size` (see `list_group_sizes`).
    Within a group a stage runs one chunk after another, each for all micro-batches of the group: forwards with rising
    chunk index, backwards with falling. If g is the size of the largest group, stage s warms up with (v-1) g + 2
    (p-1-s) forwards, then alternates. In flight on stage s: min(v m, (v-1) g + 2 (p-1-s) + 1) forwards, counted per
    chunk and micro-batch. Bubble (p-1)/(v m) for any m >= p when stages are equal. Where g > p, the wrap-around
    transfers from the last stage arrive g - p forwards before stage 0 needs them, and stage 0 posts their receives that
    early.

    Large groups are for slow networks: the reduction of a chunk's gradients overlaps the next chunk's g backwards;
    parameter gathers overlap forwards in the same way. One group of all m is the breadth-first schedule of
    Lamy-Poirier (2022).
    """
    _check_positive(stages, virtual_stages, microbatches)
    largest_group = max(list_group_sizes(stages, microbatches, micro_batch_group_size))
    warmup = [(virtual_stages - 1) * largest_group + 2 * (stages - 1 - s) for s in range(stages)]
    return _build_with_warmup(
        "interleaved 1f1b",
        p=stages,
        v=virtual_stages,
        m=microbatches,
        warmup=warmup,
        reduce_each=reduce_each_microbatch,
        micro_batch_group_size=micro_batch_group_size,
    )


def list_group_sizes(stages: int, microbatches: int, micro_batch_group_size: int | None = None) -> list[int]:
    """Return the micro-batches of each group of interleaved 1F1B.

    Groups have p micro-batches if p divides m, or `micro_batch_group_size` if that divides m. A remainder is spread
    over the groups, so that none is smaller than p (unless m is). A smaller last group would save memory but deadlocks:
    its second chunk waits for the wrap-around transfer, and the backwards on which that transfer depends are listed
    behind it (the checker shows this for p = 4, v = 3, m = 5).
    """
    group_count = max(1, microbatches // max(stages, micro_batch_group_size or 0))
    size, larger_count = divmod(microbatches, group_count)
    return [size + 1] * larger_count + [size] * (group_count - larger_count)


def build_pipeline_schedule(
    stages: int,
    virtual_stages: int,
    microbatches: int,
    reduce_each_microbatch: bool = False,
    micro_batch_group_size: int | None = None,
) -> Schedule:
    """Return 1F1B for one chunk per stage, else interleaved 1F1B."""
    if virtual_stages == 1:
        return build_1f1b(stages, microbatches, reduce_each_microbatch)
    return build_interleaved_1f1b(stages, virtual_stages, microbatches, reduce_each_microbatch, micro_batch_group_size)


def without_overlap(schedule: Schedule) -> Schedule:
    """Return `schedule` with exposed (not overlapped) transfers: a compute awaits all messages sent before it.

    Actions and their order are unchanged, so training gives the same results; only the waits differ. This measures the
    gain of the overlap of MegaScale section 3.2.
    """
    return replace(schedule, exposed=True)


def compute_ideal_bubble(stages: int, virtual_stages: int, microbatches: int) -> float:
    """Return idle over busy time of a stage for equal stages, free transfers and m >= p: (p-1)/(v m)."""
    return (stages - 1) / (virtual_stages * microbatches)


def _check_positive(stages: int, virtual: int, microbatches: int) -> None:
    """Raise FitError if a size of a schedule is below 1."""
    for name, value in (
        ("parallel.pipeline", stages),
        ("parallel.virtual_stages", virtual),
        ("micro-batches", microbatches),
    ):
        if value < 1:
            raise FitError(f"{name}={value} is not positive; set it to 1 or more")


def _order_passes(
    stages: int, virtual: int, microbatches: int, micro_batch_group_size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return a stage's forwards and backwards in order, as two arrays [v m, 3] of (chunk, microbatch, lead).

    The lead is the number of computes of the same pass by which a wrap-around transfer can arrive early.
    """
    group_forwards = []
    start = 0
    for size in list_group_sizes(stages, microbatches, micro_batch_group_size):
        group_microbatches = np.arange(start, start + size)
        start += size
        chunks = np.repeat(np.arange(virtual), size)
        leads = np.full(len(chunks), max(0, size - stages))
        group_forwards.append(np.stack([chunks, np.tile(group_microbatches, virtual), leads], axis=1))
    forwards = np.concatenate(group_forwards)
    backwards = forwards.copy()
    backwards[:, 0] = virtual - 1 - backwards[:, 0]
    return forwards, backwards


def _build_with_warmup(
    name: str,
    p: int,
    v: int,
    m: int,
    warmup: list[int],
    reduce_each: bool,
    micro_batch_group_size: int | None = None,
) -> Schedule:
    """Build a 1F1B schedule: assign forwards and backwards to compute slots, and add the communication.

    Args:
        p, v, m: stages, chunks per stage and micro-batches.
        warmup: for each stage, the number of forwards before its first backward.
        reduce_each: as `reduce_each_microbatch` of `schedule_computes`.
    """
    forwards, backwards = _order_passes(p, v, m, micro_batch_group_size)
    computes = []
    arrivals = []
    for stage in range(p):
        stage_warmup = min(warmup[stage], v * m)
        stage_computes, arrival_slots = _order_computes(stage, p, v, stage_warmup, forwards, backwards)
        computes.append(stage_computes)
        arrivals.append(arrival_slots)
    return schedule_computes(name, p, v, m, computes, reduce_each_microbatch=reduce_each, arrivals=arrivals)


def _order_computes(
    s: int, p: int, v: int, warmup: int, forwards: np.ndarray, backwards: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the computes of stage `s` as [2 v m, 3], and the compute slot in which the input of each can arrive.

    Args:
        forwards, backwards: rows of `_order_passes`, [v m, 3].
    """
    n = len(forwards)
    i = np.arange(n)
    # After the warm-up, forwards and backwards alternate. When the forwards have ended, the remaining backwards follow.
    forward_slots = np.where(i < warmup, i, 2 * i - warmup)
    backward_slots = np.where(i < n - warmup, warmup + 2 * i + 1, n + i)
    computes = np.empty((2 * n, 3), dtype=np.int32)
    # The columns are kind, chunk and micro-batch.
    computes[forward_slots] = np.insert(forwards[:, :2], 0, ActionKind.FORWARD, axis=1)
    computes[backward_slots] = np.insert(backwards[:, :2], 0, ActionKind.BACKWARD, axis=1)
    # A wrap-around transfer comes from the previous chunk of the group and may arrive `lead` computes of its pass
    # early. It ends on stage 0 in forward and on the last stage in backward. All other transfers have no lead.
    forward_chunks, forward_leads = forwards[:, 0], forwards[:, 2]
    backward_chunks, backward_leads = backwards[:, 0], backwards[:, 2]
    wraps_forward = (s == 0) & (forward_chunks > 0)
    wraps_backward = (s == p - 1) & (backward_chunks < v - 1)
    arrival_slots = np.empty(2 * n, dtype=np.int64)
    arrival_slots[forward_slots] = forward_slots[i - np.where(wraps_forward, forward_leads, 0)]
    arrival_slots[backward_slots] = backward_slots[i - np.where(wraps_backward, backward_leads, 0)]
    return computes, arrival_slots


# Order of actions within a compute slot. "Next" actions prepare the following compute. Only the first slot has "own"
# actions: they prepare the first compute, and stand at the beginning of the list.
_OWN_RECV, _OWN_GATHER, _NEXT_GATHER, _NEXT_RECV, _REDUCE, _COMPUTE, _SEND = range(7)
# Sort key of an action: compute slot x _ORDERS_PER_SLOT + order within the slot.
_ORDERS_PER_SLOT = 8


def schedule_computes(
    name: str,
    stages: int,
    virtual_stages: int,
    microbatches: int,
    computes: Sequence[np.ndarray | Sequence[Action]],
    placement: Placement = round_robin,
    reduce_each_microbatch: bool = False,
    arrivals: Sequence[np.ndarray] | None = None,
) -> Schedule:
    """Build a schedule from each stage's computes, by adding transfers, gathers and reductions around them.

    Args:
        computes: for each stage an array [computes, 3] of (kind, chunk, microbatch), in order.
        reduce_each_microbatch: whether a REDUCE_GRADS precedes every backward of weights (ZeRO-2), not only a chunk's
            last one.
        arrivals: `arrivals[stage][i]` is the compute slot in which the input of compute i can arrive. Default: i.
    """
    schedule = Schedule(name, stages, virtual_stages, microbatches, tables=(), placement=placement)
    tables = []
    for stage, stage_computes in enumerate(computes):
        stage_computes = np.asarray(stage_computes, dtype=np.int32).reshape(-1, 3)
        if arrivals is None:
            arrival_slots = np.arange(len(stage_computes))
        else:
            arrival_slots = arrivals[stage]
        tables.append(
            _add_communication(
                schedule, stage, stage_computes, arrival_slots, reduce_each_microbatch=reduce_each_microbatch
            )
        )
    return replace(schedule, tables=tuple(tables))


def _add_communication(
    schedule: Schedule, stage: int, computes: np.ndarray, arrival_slots: np.ndarray, reduce_each_microbatch: bool
) -> np.ndarray:
    """Return the actions of a stage as [actions, 3]: its computes with transfers, gathers and reductions.

    Args:
        schedule: gives the placement of chunks; it has no actions yet.
        computes, arrival_slots: as `_order_computes` returns them.
    """
    slots = np.arange(len(computes))
    kinds, chunks, microbatches = computes.T
    rows = [computes]
    keys = [slots * _ORDERS_PER_SLOT + _COMPUTE]

    def add_actions(
        kind: ActionKind, chunk: np.ndarray, microbatch: np.ndarray | int, slot: np.ndarray, order: int | np.ndarray
    ) -> None:
        columns = np.broadcast_arrays(int(kind), chunk, microbatch)
        rows.append(np.column_stack(columns))
        keys.append(slot * _ORDERS_PER_SLOT + order)

    for pass_kinds, receive, send in (
        ((ActionKind.FORWARD,), ActionKind.RECV_FORWARD, ActionKind.SEND_FORWARD),
        (INPUT_BACKWARDS, ActionKind.RECV_BACKWARD, ActionKind.SEND_BACKWARD),
    ):
        is_of_pass = make_kind_mask(kinds, *pass_kinds)
        receivers = slots[is_of_pass & schedule.message_mask(stage, receive)[chunks]]
        message_slots = arrival_slots[receivers]
        order = np.where(message_slots > 0, _NEXT_RECV, _OWN_RECV)
        post_slots = np.maximum(message_slots - 1, 0)
        add_actions(receive, chunks[receivers], microbatches[receivers], slot=post_slots, order=order)
        senders = slots[is_of_pass & schedule.message_mask(stage, send)[chunks]]
        add_actions(send, chunks[senders], microbatches[senders], slot=senders, order=_SEND)

    # A chunk's gather starts with the first forward of the chunk before it. So the gathers of the first two chunks
    # start at the beginning of the step.
    forwards = slots[kinds == ActionKind.FORWARD]
    gathered_chunks, first_index = np.unique(chunks[forwards], return_index=True)
    by_first_use = np.argsort(first_index)
    first_slots = forwards[first_index[by_first_use]]
    gather_slots = np.concatenate([[0], first_slots[:-1]])
    order = np.where(np.arange(len(gather_slots)) == 0, _OWN_GATHER, _NEXT_GATHER)
    add_actions(ActionKind.GATHER_PARAMS, gathered_chunks[by_first_use], -1, slot=gather_slots, order=order)
    backwards = slots[make_kind_mask(kinds, *WEIGHT_BACKWARDS)]
    if reduce_each_microbatch:
        add_actions(ActionKind.REDUCE_GRADS, chunks[backwards], microbatches[backwards], slot=backwards, order=_REDUCE)
    else:
        # np.unique returns the first index of each chunk, which in reversed order is the chunk's last backward.
        from_last = backwards[::-1]
        reduced_chunks, last_index = np.unique(chunks[from_last], return_index=True)
        add_actions(ActionKind.REDUCE_GRADS, reduced_chunks, -1, slot=from_last[last_index], order=_REDUCE)
    table = np.concatenate(rows)[np.argsort(np.concatenate(keys), kind="stable")].astype(np.int32)
    table.setflags(write=False)
    return table
