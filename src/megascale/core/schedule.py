"""Pipeline schedules as plain data: the list of actions of each stage. Pure functions, no torch.

One schedule has four readers: the executor runs it, `checker` proves it free of deadlock, `replay` prices it, and the
timeline compares a run with it. `schedule_registry` names the schedules that a configuration may select.

Meaning of the actions (the contract with the executor):

- FORWARD and BACKWARD run one after another on the stage's compute stream, in list order.
- RECV_* posts the receive now; the FORWARD or BACKWARD of the same chunk and micro-batch awaits it.
- SEND_* starts the send now. It is awaited only when its buffer is needed again: before the compute whose result is the
  message SEND_SLOTS later on the same channel. Without overlap (`Schedule.exposed`, non-overlapped) every compute also
  awaits the sends before it.
- GATHER_PARAMS starts the gather of the chunk's parameters, bucket by bucket in the order in which its first FORWARD
  needs them; that forward awaits each bucket before its use. The list's first gather (`Schedule.first_gather`) starts
  during the previous step's update, if that step knows that another follows: a bucket leaves once its shard is updated.
- REDUCE_GRADS arms the chunk's buckets. It stands before the BACKWARD that completes their gradients, the chunk's last
  (ZeRO-2: before every one). Within that backward a bucket is reduced as soon as it is full; the optimizer awaits it.

A receive is posted one compute slot before its message can arrive, in warm-up, steady and cool-down phases alike, and
never in one operation with a send. So no compute waits for a transfer that it does not need (MegaScale section 3.2),
and no send waits long on the device for its receiver. In groups larger than the pipeline, a message that crosses the
ring's end arrives before its receiver needs it. A channel is one communicator for one directed edge in one direction of
travel: on two stages with several chunks the forward edges 0->1 and 1->0 and the backward edges 1->0 and 0->1 are four
channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from megascale.errors import FitError

# Buffers of a channel on the sending side: one in flight, one being filled. A compute that fills a buffer waits for the
# send this many before its own on that channel.
SEND_SLOTS = 2


class ActionKind(IntEnum):
    """Kind of an action; `label` is its name in spans."""

    FORWARD = 0
    BACKWARD = 1
    SEND_FORWARD = 2
    RECV_FORWARD = 3
    SEND_BACKWARD = 4
    RECV_BACKWARD = 5
    GATHER_PARAMS = 6
    REDUCE_GRADS = 7

    @property
    def label(self) -> str:
        """Lower-case name, such as `send_forward`."""
        return self.name.lower()

    @property
    def is_compute(self) -> bool:
        """True for FORWARD and BACKWARD."""
        return self <= ActionKind.BACKWARD

    @property
    def is_send(self) -> bool:
        """True for SEND_FORWARD and SEND_BACKWARD."""
        return self in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        """True for RECV_FORWARD and RECV_BACKWARD."""
        return self in (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD)


class Action(NamedTuple):
    """One action of a stage.

    Attributes:
        kind: kind of the action.
        chunk: index of the model chunk on this stage, 0 to v-1. A SEND or RECV carries the chunk that produces or
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

    direction: str
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """Actions of all stages.

    Attributes:
        name: name of its generator.
        stages: p, number of pipeline stages.
        virtual_stages: v, model chunks per stage. Chunk c of stage s is global chunk c * p + s.
        microbatches: m, micro-batches in a step.
        table: for each stage an int32 array [actions, 3] of (kind, chunk, microbatch); `schedule[stage]` gives the same
            as a tuple of Action.
        exposed: whether every compute awaits all sends before it. `without_overlap` sets it.
    """

    name: str
    stages: int
    virtual_stages: int
    microbatches: int
    table: tuple[np.ndarray, ...]
    exposed: bool = False

    def replace_actions(self, actions: Sequence[Iterable[Action]]) -> Schedule:
        """Return this schedule with other actions, one list per stage."""
        table = tuple(np.array(list(stage_actions), dtype=np.int32).reshape(-1, 3) for stage_actions in actions)
        return replace(self, table=table)

    def __len__(self) -> int:
        return self.stages

    def __getitem__(self, stage: int) -> tuple[Action, ...]:
        kinds = list(ActionKind)
        return tuple(Action(kinds[kind], chunk, i) for kind, chunk, i in self.table[stage].tolist())

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return (self[stage] for stage in range(self.stages))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and (self.stages, self.virtual_stages, self.microbatches)
            == (other.stages, other.virtual_stages, other.microbatches)
            and all(np.array_equal(a, b) for a, b in zip(self.table, other.table, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def chunks(self) -> int:
        """Number of model chunks over all stages."""
        return self.stages * self.virtual_stages

    def global_chunk(self, stage: int, chunk: int) -> int:
        """Return the position of a stage's chunk in the model."""
        return chunk * self.stages + stage

    def channel(self, stage: int, action: Action) -> Channel:
        """Return the communicator of a SEND or RECV of `stage`. Raises ValueError for other actions."""
        next_stage = (stage + 1) % self.stages
        previous_stage = (stage - 1) % self.stages
        if action.kind == ActionKind.SEND_FORWARD:
            return Channel("forward", stage, next_stage)
        if action.kind == ActionKind.RECV_FORWARD:
            return Channel("forward", previous_stage, stage)
        if action.kind == ActionKind.SEND_BACKWARD:
            return Channel("backward", stage, previous_stage)
        if action.kind == ActionKind.RECV_BACKWARD:
            return Channel("backward", next_stage, stage)
        raise ValueError(f"{action} moves nothing between stages")

    def peer(self, stage: int, action: Action) -> tuple[int, Action]:
        """Return the matching action on the other side as (stage, action).

        Stage p-1 sends the output of its chunk c forward to chunk c+1 of stage 0, and gets that gradient back. Raises
        ValueError if `action` is not a SEND or RECV.
        """
        channel = self.channel(stage, action)
        if action.kind.is_send:
            peer_stage = channel.target
        else:
            peer_stage = channel.source
        kind, chunk, microbatch = action
        # Sending forward or receiving a gradient talks to a later chunk. Crossing the ring's end changes the chunk.
        is_peer_later = kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD)
        if is_peer_later and stage == self.stages - 1:
            chunk += 1
        elif not is_peer_later and stage == 0:
            chunk -= 1
        opposite = {
            ActionKind.SEND_FORWARD: ActionKind.RECV_FORWARD,
            ActionKind.RECV_FORWARD: ActionKind.SEND_FORWARD,
            ActionKind.SEND_BACKWARD: ActionKind.RECV_BACKWARD,
            ActionKind.RECV_BACKWARD: ActionKind.SEND_BACKWARD,
        }
        return peer_stage, Action(opposite[kind], chunk, microbatch)

    def first_gather(self, stage: int) -> int:
        """Return the chunk of the first GATHER_PARAMS in the stage's list. Raises ValueError if there is none."""
        kind, chunk, _ = self.table[stage].T
        gathers = chunk[kind == ActionKind.GATHER_PARAMS]
        if not len(gathers):
            raise ValueError(f"the schedule {self.name} gathers no parameters on stage {stage}")
        return int(gathers[0])

    def channels(self) -> list[Channel]:
        """Return all channels of this layout, in the order in which communicators are created."""
        p = self.stages
        if p == 1:
            return []
        senders = range(p if self.virtual_stages > 1 else p - 1)
        forward = [Channel("forward", s, (s + 1) % p) for s in senders]
        return forward + [Channel("backward", channel.target, channel.source) for channel in forward]

    def count_in_flight(self, stage: int) -> int:
        """Return the maximum number of chunk-forwards of `stage` whose backward has not run."""
        kinds = self.table[stage][:, 0]
        steps = np.where(kinds == ActionKind.FORWARD, 1, np.where(kinds == ActionKind.BACKWARD, -1, 0))
        return int(steps.cumsum().max(initial=0))


def one_f_one_b(stages: int, microbatches: int, reduce_each_microbatch: bool = False) -> Schedule:
    """Build 1F1B (PipeDream-flush, Narayanan et al. 2021): stage s warms up with p-1-s forwards, then alternates.

    In flight on stage s: min(m, p - s) micro-batches. Bubble (p-1)/m of the ideal time when stages are equal. Each
    micro-batch's round trip is on the critical path, so transfers are hidden in part only; `interleaved_1f1b` with
    one chunk has twice the warm-up and hides them, for p-1-s more micro-batches in flight.

    Args:
        reduce_each: a REDUCE_GRADS before every backward (ZeRO-2) instead of one before a chunk's last.
    """
    _check_positive(stages, 1, microbatches)
    warmup = [stages - 1 - s for s in range(stages)]
    return _build("1f1b", stages, 1, microbatches, warmup, reduce_each_microbatch)


def interleaved_1f1b(
    stages: int,
    virtual_stages: int,
    microbatches: int,
    reduce_each_microbatch: bool = False,
    micro_batch_group_size: int | None = None,
) -> Schedule:
    """Build interleaved 1F1B (Narayanan et al. 2021) for any number of micro-batches.

    The micro-batches form groups (`group_sizes`; of p, or about `micro_batch_group_size`). In a group each chunk takes
    its micro-batches in turn: forwards by rising chunk, backwards by falling. With g the largest group, stage
    s warms up with (v-1) g + 2 (p-1-s) forwards, then alternates. In flight on stage s: min(v m, (v-1) g + 2 (p-1-s) +
    1) chunk-forwards. Bubble (p-1)/(v m) for any m >= p when stages are equal. Where g > p, results that cross the
    ring's end come g - p forwards before stage 0 needs them, and are received then.

    Large groups are for slow networks: the reduction of a chunk's gradients hides under the g backwards of each chunk
    after it, and so does, under forwards, the gathering of parameters. One group of all m is the breadth-first
    schedule of Lamy-Poirier (2022).
    """
    _check_positive(stages, virtual_stages, microbatches)
    group = max(group_sizes(stages, microbatches, micro_batch_group_size))
    warmup = [(virtual_stages - 1) * group + 2 * (stages - 1 - s) for s in range(stages)]
    return _build(
        "interleaved 1f1b", stages, virtual_stages, microbatches, warmup, reduce_each_microbatch, micro_batch_group_size
    )


def group_sizes(stages: int, microbatches: int, micro_batch_group_size: int | None = None) -> list[int]:
    """Return the micro-batches of each group of interleaved 1F1B.

    Groups have p micro-batches if p divides m, or `micro_batch_group_size` if that divides m. A remainder is spread
    over the groups, so that none is smaller than p (unless m is). A smaller last group would save memory but deadlocks:
    its second chunk waits for the ring, while the backwards that the ring awaits are listed behind it (the checker
    shows this for p = 4, v = 3, m = 5).
    """
    groups = max(1, microbatches // max(stages, micro_batch_group_size or 0))
    size, larger = divmod(microbatches, groups)
    return [size + 1] * larger + [size] * (groups - larger)


def pipeline_schedule(
    stages: int,
    virtual_stages: int,
    microbatches: int,
    reduce_each_microbatch: bool = False,
    micro_batch_group_size: int | None = None,
) -> Schedule:
    """Return 1F1B for one chunk per stage, else interleaved 1F1B."""
    if virtual_stages == 1:
        return one_f_one_b(stages, microbatches, reduce_each_microbatch)
    return interleaved_1f1b(stages, virtual_stages, microbatches, reduce_each_microbatch, micro_batch_group_size)


def without_overlap(schedule: Schedule) -> Schedule:
    """Return `schedule` with exposed (not overlapped) transfers: a compute awaits all messages sent before it.

    Actions and their order are unchanged, so training gives the same results; only the waits differ. This measures the
    gain of the overlap of MegaScale section 3.2.
    """
    return replace(schedule, exposed=True)


def ideal_bubble(stages: int, virtual_stages: int, microbatches: int) -> float:
    """Return idle over busy time of a stage for equal stages, free transfers and m >= p: (p-1)/(v m)."""
    return (stages - 1) / (virtual_stages * microbatches)


def _check_positive(stages: int, virtual: int, microbatches: int) -> None:
    for name, value in (
        ("parallel.pipeline", stages),
        ("parallel.virtual_stages", virtual),
        ("micro-batches", microbatches),
    ):
        if value < 1:
            raise FitError(f"{name}={value} is not positive; set it to 1 or more")


def _orders(
    stages: int, virtual: int, microbatches: int, micro_batch_group_size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return a stage's forwards and backwards in order, as two arrays [v m, 3] of (chunk, microbatch, lead).

    Lead: number of computes of its direction by which a message that crosses the ring's end can arrive early.
    """
    forward = []
    start = 0
    for size in group_sizes(stages, microbatches, micro_batch_group_size):
        batch = np.arange(start, start + size)
        start += size
        chunk = np.repeat(np.arange(virtual), len(batch))
        lead = np.full(len(chunk), max(0, size - stages))
        forward.append(np.stack([chunk, np.tile(batch, virtual), lead], axis=1))
    forwards = np.concatenate(forward)
    backwards = forwards.copy()
    backwards[:, 0] = virtual - 1 - backwards[:, 0]
    return forwards, backwards


def _build(
    name: str,
    p: int,
    v: int,
    m: int,
    warmup: list[int],
    reduce_each: bool,
    micro_batch_group_size: int | None = None,
) -> Schedule:
    """Build a schedule: place forwards and backwards into compute slots, and transfers around them."""
    forwards, backwards = _orders(p, v, m, micro_batch_group_size)
    tables = tuple(_build_stage(s, p, v, min(warmup[s], v * m), forwards, backwards, reduce_each) for s in range(p))
    return Schedule(name, p, v, m, tables)


# Order of actions within a compute slot. The first slot's own receive and gather precede all other actions.
_OWN_RECV, _OWN_GATHER, _NEXT_GATHER, _NEXT_RECV, _REDUCE, _COMPUTE, _SEND = range(7)


def _build_stage(
    s: int, p: int, v: int, warmup: int, forwards: np.ndarray, backwards: np.ndarray, reduce_each: bool
) -> np.ndarray:
    """Return the actions of stage `s` as [actions, 3]; `_orders` gives `forwards` and `backwards`."""
    forward_lead, backward_lead = forwards[:, 2], backwards[:, 2]
    forwards, backwards = forwards[:, :2], backwards[:, :2]
    n = len(forwards)
    i = np.arange(n)
    forward_slot = np.where(i < warmup, i, 2 * i - warmup)
    backward_slot = np.where(i < n - warmup, warmup + 2 * i + 1, n + i)
    rows: list[np.ndarray] = []
    keys: list[np.ndarray] = []

    def put(kind: ActionKind, computes: np.ndarray, slot: np.ndarray, order: int | np.ndarray) -> None:
        rows.append(np.concatenate([np.full((len(computes), 1), int(kind)), computes], axis=1))
        keys.append(slot * 8 + order)

    def receive(kind: ActionKind, computes: np.ndarray, slot: np.ndarray) -> None:
        put(kind, computes, np.maximum(slot - 1, 0), np.where(slot > 0, _NEXT_RECV, _OWN_RECV))

    put(ActionKind.FORWARD, forwards, forward_slot, _COMPUTE)
    put(ActionKind.BACKWARD, backwards, backward_slot, _COMPUTE)
    if p > 1:
        # The model's first chunk reads tokens and its last computes the loss, so there is no transfer beyond them.
        is_first_forward = (forwards[:, 0] == 0) & (s == 0)
        is_last_forward = (forwards[:, 0] == v - 1) & (s == p - 1)
        is_first_backward = (backwards[:, 0] == 0) & (s == 0)
        is_last_backward = (backwards[:, 0] == v - 1) & (s == p - 1)
        # A message that crosses the ring's end comes from the previous group.
        forward_needed = forward_slot[i - forward_lead * (s == 0) * (forwards[:, 0] > 0)]
        backward_needed = backward_slot[i - backward_lead * (s == p - 1) * (backwards[:, 0] < v - 1)]
        receive(ActionKind.RECV_FORWARD, forwards[~is_first_forward], forward_needed[~is_first_forward])
        put(ActionKind.SEND_FORWARD, forwards[~is_last_forward], forward_slot[~is_last_forward], _SEND)
        receive(ActionKind.RECV_BACKWARD, backwards[~is_last_backward], backward_needed[~is_last_backward])
        put(ActionKind.SEND_BACKWARD, backwards[~is_first_backward], backward_slot[~is_first_backward], _SEND)

    chunks = np.stack([np.arange(v), np.full(v, -1)], axis=1)
    # A chunk's parameters are gathered one chunk ahead, the first two at the start of the step.
    first = np.array([forward_slot[forwards[:, 0] == c].min() for c in range(v)])
    ahead = np.concatenate([[0], first[:-1]])
    put(ActionKind.GATHER_PARAMS, chunks, ahead, np.where(np.arange(v) == 0, _OWN_GATHER, _NEXT_GATHER))
    if reduce_each:
        put(ActionKind.REDUCE_GRADS, backwards, backward_slot, _REDUCE)
    else:
        last = np.array([backward_slot[backwards[:, 0] == c].max() for c in range(v)])
        put(ActionKind.REDUCE_GRADS, chunks, last, _REDUCE)
    order = np.argsort(np.concatenate(keys), kind="stable")
    table = np.concatenate(rows)[order].astype(np.int32)
    table.setflags(write=False)
    return table
