"""Pipeline schedules as plain data: what each stage does, in which order. Pure functions, no torch.

One schedule serves four readers: the executor runs it, `checker` proves it free of deadlock, `replay` prices it,
the timeline lays a run over it. `schedule_registry` names those that a configuration may ask for.

How an action list is to be read (the contract with the executor):

- FORWARD and BACKWARD run one after another on the stage's compute stream, in the order given.
- RECV_* means "post the receive now"; the FORWARD or BACKWARD of the same chunk and micro-batch awaits it.
- SEND_* means "start the send now"; it is awaited only when its buffer is needed again: before the compute whose
  result is the message SEND_SLOTS later on the same channel. Without overlap (`Schedule.exposed`, non-overlapped) every
  compute awaits the sends before it as well.
- GATHER_PARAMS means "send for the chunk's parameters now", bucket by bucket in the order in which its first FORWARD
  needs them, each awaited there where it is needed. The list's first one (`Schedule.first_gather`) is begun while the
  step before updates, if that one knows of this: a bucket leaves as soon as its shard is updated.
- REDUCE_GRADS arms the chunk's buckets and stands before the BACKWARD that completes their gradients, the chunk's last
  (ZeRO-2: before every one): within that backward a bucket is reduced as soon as it is full; the optimizer awaits it.

Receives are posted one compute slot before their message can be there, in warm-up, steady and cool-down phases
alike, and never in one operation with a send, so that no compute waits for a transfer that it does not need
(MegaScale section 3.2), and no send waits long on the device for its receiver. In groups larger than the pipeline a
message that crosses the ring's end comes before its receiver needs it. A channel is one communicator for one
directed edge in one direction of travel: on two stages with several chunks the forward edges 0->1 and 1->0 and the
backward edges 1->0 and 0->1 are four channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megascale.errors import FitError

# Buffers of a channel on the sending side: one under way, one being filled. A compute that fills one waits for the send
# this many before its own on that channel.
SEND_SLOTS = 2


class ActionKind(IntEnum):
    """What an action does; `label` is the name used in spans."""

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
        """Lower-case name, such as send_forward."""
        return self.name.lower()

    @property
    def is_compute(self) -> bool:
        """FORWARD or BACKWARD."""
        return self <= ActionKind.BACKWARD

    @property
    def is_send(self) -> bool:
        """SEND_FORWARD or SEND_BACKWARD."""
        return self in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        """RECV_FORWARD or RECV_BACKWARD."""
        return self in (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD)


class Action(NamedTuple):
    """One step of a stage.

    Attributes:
        kind: what is done.
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
    """One communicator: a directed edge between stages, for activations ("forward") or gradients ("backward")."""

    direction: str
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """The actions of all stages.

    Attributes:
        name: which generator made it.
        stages: p, pipeline stages.
        virtual: v, model chunks a stage. Chunk c of stage s is global chunk c * p + s.
        microbatches: m, micro-batches in a step.
        table: a stage's actions as an int32 array [actions, 3] of (kind, chunk, microbatch), one a stage;
            `schedule[stage]` gives the same as a tuple of Action.
        exposed: whether every compute awaits all sends before it. `without_overlap` sets it.
    """

    name: str
    stages: int
    virtual_stages: int
    microbatches: int
    table: tuple[np.ndarray, ...]
    exposed: bool = False

    @classmethod
    def replace_actions(cls, like: Schedule, actions: Sequence[Iterable[Action]]) -> Schedule:
        """`like` with other actions, given as lists, one a stage."""
        table = tuple(np.array(list(rows), dtype=np.int32).reshape(-1, 3) for rows in actions)
        return replace(like, table=table)

    def __len__(self) -> int:
        return self.stages

    def __getitem__(self, stage: int) -> tuple[Action, ...]:
        return self._actions(stage)

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
        """Model chunks over all stages."""
        return self.stages * self.virtual_stages

    @cached_property
    def _kinds(self) -> list[ActionKind]:
        return list(ActionKind)

    def _actions(self, stage: int) -> tuple[Action, ...]:
        kinds = self._kinds
        return tuple(Action(kinds[k], c, i) for k, c, i in self.table[stage].tolist())

    def global_chunk(self, stage: int, chunk: int) -> int:
        """Position of a stage's chunk in the model."""
        return chunk * self.stages + stage

    def channel(self, stage: int, action: Action) -> Channel:
        """The communicator that a SEND or RECV of `stage` uses; ValueError for other actions."""
        right, left = (stage + 1) % self.stages, (stage - 1) % self.stages
        if action.kind == ActionKind.SEND_FORWARD:
            return Channel("forward", stage, right)
        if action.kind == ActionKind.RECV_FORWARD:
            return Channel("forward", left, stage)
        if action.kind == ActionKind.SEND_BACKWARD:
            return Channel("backward", stage, left)
        if action.kind == ActionKind.RECV_BACKWARD:
            return Channel("backward", right, stage)
        raise ValueError(f"{action} moves nothing between stages")

    def peer(self, stage: int, action: Action) -> tuple[int, Action]:
        """The matching action on the other side: (stage, action). ValueError if `action` is no SEND or RECV.

        Stage p-1 sends the output of its chunk c forward to chunk c+1 of stage 0, and gets that gradient back.
        """
        channel = self.channel(stage, action)
        there = channel.target if action.kind.is_send else channel.source
        kind, chunk, microbatch = action
        # Towards later chunks: sending forward or receiving a gradient. Crossing the ring's end changes the chunk.
        later = kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD)
        if later and stage == self.stages - 1:
            chunk += 1
        elif not later and stage == 0:
            chunk -= 1
        opposite = {
            ActionKind.SEND_FORWARD: ActionKind.RECV_FORWARD,
            ActionKind.RECV_FORWARD: ActionKind.SEND_FORWARD,
            ActionKind.SEND_BACKWARD: ActionKind.RECV_BACKWARD,
            ActionKind.RECV_BACKWARD: ActionKind.SEND_BACKWARD,
        }
        return there, Action(opposite[kind], chunk, microbatch)

    def first_gather(self, stage: int) -> int:
        """The chunk whose GATHER_PARAMS comes first in the stage's list; ValueError if there is none."""
        kind, chunk, _ = self.table[stage].T
        gathers = chunk[kind == ActionKind.GATHER_PARAMS]
        if not len(gathers):
            raise ValueError(f"the schedule {self.name} gathers no parameters on stage {stage}")
        return int(gathers[0])

    def channels(self) -> list[Channel]:
        """All channels that this layout uses, in one fixed order (the order in which to create communicators)."""
        p = self.stages
        if p == 1:
            return []
        edges = [(s, (s + 1) % p) for s in range(p if self.virtual_stages > 1 else p - 1)]
        return [Channel("forward", a, b) for a, b in edges] + [Channel("backward", b, a) for a, b in edges]

    def in_flight(self, stage: int) -> int:
        """Most chunk-forwards of `stage` whose backward has not run: how many sets of activations it holds."""
        kinds = self.table[stage][:, 0]
        steps = np.where(kinds == ActionKind.FORWARD, 1, np.where(kinds == ActionKind.BACKWARD, -1, 0))
        return int(steps.cumsum().max(initial=0))


def one_f_one_b(stages: int, microbatches: int, reduce_each: bool = False) -> Schedule:
    """1F1B (PipeDream-flush, Narayanan et al. 2021): stage s warms up with p-1-s forwards, then alternates.

    In flight on stage s: min(m, p - s) micro-batches. Bubble (p-1)/m of the ideal time when stages are equal. Each
    micro-batch's round trip is on the critical path, so transfers are hidden in part only; `interleaved_1f1b` with
    one chunk has twice the warm-up and hides them, for p-1-s more micro-batches in flight.

    Args:
        reduce_each: a REDUCE_GRADS before every backward (ZeRO-2) instead of one before a chunk's last.
    """
    _positive(stages, 1, microbatches)
    warmup = [stages - 1 - s for s in range(stages)]
    return _assemble("1f1b", stages, 1, microbatches, warmup, reduce_each)


def interleaved_1f1b(
    stages: int, virtual: int, microbatches: int, reduce_each: bool = False, micro_batch_group_size: int | None = None
) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021) for any number of micro-batches.

    The micro-batches form groups (`group_sizes`; of p, or about `micro_batch_group_size`). In a group each chunk takes
    its micro-batches in turn: forwards by rising chunk, backwards by falling. With g the largest group, stage
    s warms up with (v-1) g + 2 (p-1-s) forwards, then alternates. In flight on stage s: min(v m, (v-1) g + 2 (p-1-s) +
    1) chunk-forwards. Bubble (p-1)/(v m) for any m >= p when stages are equal. Where g > p, results that cross the
    ring's end come g - p forwards before stage 0 needs them, and are received then.

    Large groups are for slow networks: the reduction of a chunk's gradients hides under the g backwards of each chunk
    after it, and so does, under forwards, the gathering of parameters. One group of all m is the breadth-first
    schedule of Lamy-Poirier (2022).
    """
    _positive(stages, virtual, microbatches)
    group = max(group_sizes(stages, microbatches, micro_batch_group_size))
    warmup = [(virtual - 1) * group + 2 * (stages - 1 - s) for s in range(stages)]
    return _assemble("interleaved 1f1b", stages, virtual, microbatches, warmup, reduce_each, micro_batch_group_size)


def group_sizes(stages: int, microbatches: int, micro_batch_group_size: int | None = None) -> list[int]:
    """Micro-batches of each group of interleaved 1F1B: p each when p divides m; with `micro_batch_group_size` that
    many, where they divide m.

    A remainder is spread over the groups, so that none is smaller than p (unless m is). A smaller last group would
    save memory but deadlocks: its second chunk waits for the ring while the backwards that the ring waits for are
    listed behind it (the checker shows this for p = 4, v = 3, m = 5).
    """
    groups = max(1, microbatches // max(stages, micro_batch_group_size or 0))
    size, larger = divmod(microbatches, groups)
    return [size + 1] * larger + [size] * (groups - larger)


def pipeline_schedule(
    stages: int, virtual: int, microbatches: int, reduce_each: bool = False, micro_batch_group_size: int | None = None
) -> Schedule:
    """The schedule that a layout trains with: 1F1B for one chunk a stage, else interleaved 1F1B."""
    if virtual == 1:
        return one_f_one_b(stages, microbatches, reduce_each)
    return interleaved_1f1b(stages, virtual, microbatches, reduce_each, micro_batch_group_size)


def without_overlap(schedule: Schedule) -> Schedule:
    """`schedule` with its transfers exposed (not overlapped): a compute awaits all messages sent before it.

    The same actions in the same order, so what is trained is the same; only the waits differ. For measuring what
    the overlap of MegaScale section 3.2 gains.
    """
    return replace(schedule, exposed=True)


def ideal_bubble(stages: int, virtual: int, microbatches: int) -> float:
    """Idle time over busy time of a stage for equal stages, free transfers and m >= p: (p-1)/(v m)."""
    return (stages - 1) / (virtual * microbatches)


def _positive(stages: int, virtual: int, microbatches: int) -> None:
    for name, value in (
        ("parallel.pipeline", stages),
        ("parallel.virtual_stages", virtual),
        ("micro-batches", microbatches),
    ):
        if value < 1:
            raise FitError(f"{name}={value} is not positive; a pipeline has at least one of each")


def _orders(
    stages: int, virtual: int, microbatches: int, micro_batch_group_size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Of all forwards and of all backwards of a stage in order: two arrays [v m, 3] of (chunk, microbatch, how many
    computes of its direction before it needs a message that crossed the ring's end it can be there)."""
    forward, start = [], 0
    for size in group_sizes(stages, microbatches, micro_batch_group_size):
        batch = np.arange(start, start + size)
        start += size
        chunk = np.repeat(np.arange(virtual), len(batch))
        early = np.full(len(chunk), max(0, size - stages))
        forward.append(np.stack([chunk, np.tile(batch, virtual), early], axis=1))
    forwards = np.concatenate(forward)
    backwards = forwards.copy()
    backwards[:, 0] = virtual - 1 - backwards[:, 0]
    return forwards, backwards


def _assemble(
    name: str,
    p: int,
    v: int,
    m: int,
    warmup: list[int],
    reduce_each: bool,
    micro_batch_group_size: int | None = None,
) -> Schedule:
    """Lay forwards and backwards into slots and the transfers around them."""
    forwards, backwards = _orders(p, v, m, micro_batch_group_size)
    tables = tuple(_stage(s, p, v, min(warmup[s], v * m), forwards, backwards, reduce_each) for s in range(p))
    return Schedule(name, p, v, m, tables)


# Order of actions within a compute slot. The first slot's own receive and gather come before all else.
_OWN_RECV, _OWN_GATHER, _NEXT_GATHER, _NEXT_RECV, _REDUCE, _COMPUTE, _SEND = range(7)


def _stage(
    s: int, p: int, v: int, warmup: int, forwards: np.ndarray, backwards: np.ndarray, reduce_each: bool
) -> np.ndarray:
    """Actions of stage `s` as [actions, 3]; `forwards` and `backwards` as `_orders` gives them."""
    early_f, early_b = forwards[:, 2], backwards[:, 2]
    forwards, backwards = forwards[:, :2], backwards[:, :2]
    n = len(forwards)
    i = np.arange(n)
    f_slot = np.where(i < warmup, i, 2 * i - warmup)
    b_slot = np.where(i < n - warmup, warmup + 2 * i + 1, n + i)
    rows: list[np.ndarray] = []
    keys: list[np.ndarray] = []

    def put(kind: ActionKind, what: np.ndarray, slot: np.ndarray, order: int | np.ndarray) -> None:
        rows.append(np.concatenate([np.full((len(what), 1), int(kind)), what], axis=1))
        keys.append(slot * 8 + order)

    def receive(kind: ActionKind, what: np.ndarray, slot: np.ndarray) -> None:
        put(kind, what, np.maximum(slot - 1, 0), np.where(slot > 0, _NEXT_RECV, _OWN_RECV))

    put(ActionKind.FORWARD, forwards, f_slot, _COMPUTE)
    put(ActionKind.BACKWARD, backwards, b_slot, _COMPUTE)
    if p > 1:
        # The model's first chunk takes tokens and its last makes the loss: no transfer beyond either.
        f_first = (forwards[:, 0] == 0) & (s == 0)
        f_last = (forwards[:, 0] == v - 1) & (s == p - 1)
        b_first = (backwards[:, 0] == 0) & (s == 0)
        b_last = (backwards[:, 0] == v - 1) & (s == p - 1)
        # What crosses the ring's end comes from the group before.
        f_comes = f_slot[i - early_f * (s == 0) * (forwards[:, 0] > 0)]
        b_comes = b_slot[i - early_b * (s == p - 1) * (backwards[:, 0] < v - 1)]
        receive(ActionKind.RECV_FORWARD, forwards[~f_first], f_comes[~f_first])
        put(ActionKind.SEND_FORWARD, forwards[~f_last], f_slot[~f_last], _SEND)
        receive(ActionKind.RECV_BACKWARD, backwards[~b_last], b_comes[~b_last])
        put(ActionKind.SEND_BACKWARD, backwards[~b_first], b_slot[~b_first], _SEND)

    whole = np.stack([np.arange(v), np.full(v, -1)], axis=1)
    # A chunk's parameters are gathered one chunk ahead; the first two at the start of the step.
    first = np.array([f_slot[forwards[:, 0] == c].min() for c in range(v)])
    ahead = np.concatenate([[0], first[:-1]])
    put(ActionKind.GATHER_PARAMS, whole, ahead, np.where(np.arange(v) == 0, _OWN_GATHER, _NEXT_GATHER))
    if reduce_each:
        put(ActionKind.REDUCE_GRADS, backwards, b_slot, _REDUCE)
    else:
        last = np.array([b_slot[backwards[:, 0] == c].max() for c in range(v)])
        put(ActionKind.REDUCE_GRADS, whole, last, _REDUCE)
    order = np.argsort(np.concatenate(keys), kind="stable")
    table = np.concatenate(rows)[order].astype(np.int32)
    table.setflags(write=False)
    return table
