"""Proof that a schedule finishes: no deadlock for any message timing, and a matching receive for every send.

Model of the machine. Each stage is a process that walks its action list. Each communicator has two ends, and each end
has a FIFO of posted sends and receives. Transport is pessimistic (*rendezvous*): a transfer takes place only when the
send is at the head of one FIFO and the matching receive is at the head of the other. Transitions:

- *step of a stage*: the stage passes its next action. SEND_* and RECV_* are posted in their FIFO and never block.
  FORWARD, BACKWARD and BACKWARD_INPUT wait until their receive is delivered. If they produce a message, they also wait
  for a buffer: an earlier send on the same channel must be delivered, namely the one SEND_SLOTS messages before.
  BACKWARD_WEIGHT waits for nothing. If transfers are exposed (`Schedule.exposed`), every compute, BACKWARD_WEIGHT
  included, also waits for the stage's earlier sends. GATHER_PARAMS and REDUCE_GRADS start collectives outside the FIFOs
  and never block.
- *delivery on a communicator*: the two heads are a send and a receive that match; both are removed.

Why one maximal run decides for every timing. (1) An enabled transition stays enabled until it is taken: a step waits
only for deliveries, which are never undone, and a pair of heads can only be removed by its own delivery. (2) Two
enabled transitions commute: steps of different stages touch different lists and different FIFOs (appending at the
tail), deliveries touch different communicators, and a step appends at tails while a delivery removes heads. So the
system is strongly confluent (a Kahn network with bounded channels): by induction every maximal run takes the same
transitions and ends in the same state. If one run finishes, no other order and no delay can hang. The tests
visit *all* interleavings of small schedules to verify this argument; `check_schedule` makes a single run, in a random
order if a seed is given.

Data-parallel collectives are outside the stages' processes. All replicas of a stage hold the same list, so the run of
one replica, taken by all replicas in lockstep, is a run of the whole system; confluence then covers all other runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megascale.core.schedule import COMPUTES, RECEIVES, SEND_SLOTS, SENDS, Action, ActionKind, Channel, Schedule
from megascale.errors import MegascaleError

# Maps a channel to the communicator of its messages.
CommunicatorOf = Callable[[Channel], Hashable]


class ScheduleError(MegascaleError):
    """A wrong schedule: it deadlocks, mismatches messages, or computes in an impossible order."""


@dataclass(frozen=True)
class CheckReport:
    """Result of a check.

    Attributes:
        messages: number of transfers between stages in a training step.
        in_flight: for each stage, the maximum number of forwards (of a chunk and micro-batch) whose backward has not
            run.
    """

    messages: int
    in_flight: tuple[int, ...]


def channel_communicator(channel: Channel) -> Hashable:
    """Return the channel itself: the executor has one communicator per channel."""
    return channel


def check_schedule(
    schedule: Schedule,
    communicator: CommunicatorOf = channel_communicator,
    seed: int | None = None,
) -> CheckReport:
    """Prove that `schedule` finishes for any message timing and computes every micro-batch in order.

    Args:
        communicator: maps channels to communicators; several channels may share one.
        seed: seed of a random order of the enabled transitions; None: a fixed order.

    Raises ScheduleError with the action that each blocked stage awaits, or with the first wrong action.
    """
    check_order(schedule)
    machine = Machine(schedule, communicator)
    passed, delivered = machine.start()
    rng = None if seed is None else random.Random(seed)
    machine.run(passed, delivered, rng)
    if not machine.is_finished(passed, delivered):
        raise ScheduleError(f"the schedule {schedule.name} deadlocks: {machine.describe(passed, delivered)}")
    in_flight = tuple(schedule.count_in_flight(stage) for stage in range(schedule.stages))
    return CheckReport(sum(delivered), in_flight)


def check_order(schedule: Schedule) -> None:
    """Check each stage's list separately. Raises ScheduleError at the first fault.

    Every micro-batch runs forward and backward once in every chunk, forward before backward. A backward may be two
    actions, BACKWARD_INPUT before BACKWARD_WEIGHT. Each compute has its receive before it and its send after it. There
    are no other sends and receives. Neighbouring chunks of one stage run in model order. Parameters are gathered once,
    before a chunk's first forward. A chunk has one REDUCE_GRADS, before its last backward of weights, or one before
    each. REDUCE_GRADS only arms the gradient buckets: during the backward that follows, each bucket is reduced as soon
    as it is full.
    """
    for stage in range(schedule.stages):
        _check_stage(schedule, stage)


class _StageActions(NamedTuple):
    """Counts and positions of each possible action in a stage's list.

    Arrays are [kinds, chunks, micro-batches + 1]. The last column is that of actions for the whole step, whose
    micro-batch is -1.

    Attributes:
        stage_name: stage and schedule, for messages.
        counts: how often the list has each action, 0 or 1.
        position: position of each action in the list; 0 if the list does not have the action.
    """

    stage_name: str
    counts: np.ndarray
    position: np.ndarray


def _check_stage(schedule: Schedule, stage: int) -> None:
    """Check the list of one stage, as `check_order` says."""
    actions = _count_actions(schedule, stage)
    m = schedule.microbatches
    position = actions.position[:, :, :m]  # of actions for a micro-batch
    exists = actions.counts[:, :, :m] > 0
    for first, then in _ORDERED_PAIRS:
        _require_order(actions.stage_name, first, then, position[first], position[then], exists[first] & exists[then])
    forward_position = position[ActionKind.FORWARD]
    gather_position = np.broadcast_to(actions.position[ActionKind.GATHER_PARAMS, :, m:], forward_position.shape)
    _require_order(
        actions.stage_name,
        ActionKind.GATHER_PARAMS,
        ActionKind.FORWARD,
        first_position=gather_position,
        then_position=forward_position,
        applies=exists[ActionKind.FORWARD],
    )
    is_split = exists[ActionKind.BACKWARD_WEIGHT]
    weight_backwards = np.where(is_split, position[ActionKind.BACKWARD_WEIGHT], position[ActionKind.BACKWARD])
    _check_reductions(
        actions.stage_name,
        actions.counts[ActionKind.REDUCE_GRADS],
        position=actions.position[ActionKind.REDUCE_GRADS],
        backwards=weight_backwards,
    )
    input_backwards = np.where(is_split, position[ActionKind.BACKWARD_INPUT], position[ActionKind.BACKWARD])
    _check_neighbours(schedule, stage, actions.stage_name, forwards=forward_position, backwards=input_backwards)


def _count_actions(schedule: Schedule, stage: int) -> _StageActions:
    """Return the actions of a stage's list. Raises ScheduleError if their counts are not those expected."""
    v = schedule.virtual_stages
    m = schedule.microbatches
    table = schedule.tables[stage]
    stage_name = f"stage {stage} of the schedule {schedule.name}"
    kinds, chunks, microbatches = table.T
    is_outside = (chunks < 0) | (chunks >= v) | (microbatches < -1) | (microbatches >= m)
    if is_outside.any():
        raise ScheduleError(
            f"{stage_name} has {schedule[stage][int(is_outside.argmax())]}, outside {v} chunks and {m} micro-batches"
        )
    count = np.zeros((len(ActionKind), v, m + 1), dtype=np.int64)
    np.add.at(count, (kinds, chunks, microbatches), 1)  # index -1 is the last column
    position = np.zeros_like(count)
    position[kinds, chunks, microbatches] = np.arange(len(table))
    expected = _expected_counts(schedule, stage, count)
    for is_wrong, verb in ((count < expected, "lacks"), (count > expected, "has a needless")):
        if is_wrong.any():
            kind, chunk, column = (int(n) for n in np.unravel_index(int(is_wrong.argmax()), is_wrong.shape))
            action = Action(ActionKind(kind), chunk, column if column < m else -1)
            raise ScheduleError(f"{stage_name} {verb} {action}")
    return _StageActions(stage_name, count, position)


def _require_order(
    stage_name: str,
    first: ActionKind,
    then: ActionKind,
    first_position: np.ndarray,
    then_position: np.ndarray,
    applies: np.ndarray,
) -> None:
    """Raise ScheduleError if an action of kind `then` stands before the `first` of its chunk and micro-batch.

    Args:
        applies: chunks and micro-batches for which the list has both actions.
    """
    is_late = applies & (first_position >= then_position)
    if is_late.any():
        chunk, microbatch = np.unravel_index(int(is_late.argmax()), is_late.shape)
        raise ScheduleError(f"{stage_name} has {Action(then, int(chunk), int(microbatch))} before its {first.label}")


def _check_neighbours(
    schedule: Schedule, stage: int, stage_name: str, forwards: np.ndarray, backwards: np.ndarray
) -> None:
    """Check that neighbouring chunks of one stage run in model order; no message between them enforces the order.

    Args:
        forwards, backwards: position of each chunk's forwards, and of the backwards of its input: [v, m].
    """
    model_positions = schedule.chunk_map.positions[stage]
    is_next_neighbour = np.diff(model_positions) == 1
    for chunk in np.flatnonzero(is_next_neighbour).tolist():
        following = chunk + 1
        for pass_name, positions, first_chunk, then_chunk in (
            ("forward", forwards, chunk, following),
            ("backward", backwards, following, chunk),
        ):
            is_late = positions[first_chunk] >= positions[then_chunk]
            if is_late.any():
                microbatch = int(is_late.argmax())
                raise ScheduleError(
                    f"{stage_name} has the {pass_name} of chunk {then_chunk} before that of chunk {first_chunk}, for "
                    f"micro-batch {microbatch}"
                )


# Actions of one chunk and micro-batch: the first stands before the second if the list has both.
_ORDERED_PAIRS = (
    (ActionKind.RECV_FORWARD, ActionKind.FORWARD),
    (ActionKind.FORWARD, ActionKind.SEND_FORWARD),
    (ActionKind.FORWARD, ActionKind.BACKWARD),
    (ActionKind.RECV_BACKWARD, ActionKind.BACKWARD),
    (ActionKind.BACKWARD, ActionKind.SEND_BACKWARD),
    (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT),
    (ActionKind.RECV_BACKWARD, ActionKind.BACKWARD_INPUT),
    (ActionKind.BACKWARD_INPUT, ActionKind.SEND_BACKWARD),
    (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT),
)


def _expected_counts(schedule: Schedule, stage: int, count: np.ndarray) -> np.ndarray:
    """Return how often the list must have each action: [kinds, v, m + 1].

    Where a schedule has a choice (whole or divided backwards, one or m reductions), `count` shows its choice.

    Args:
        count: how often the list has each action, of the same shape.
    """
    m = schedule.microbatches
    expected = np.zeros_like(count)
    expected[ActionKind.FORWARD, :, :m] = 1
    halves = count[ActionKind.BACKWARD_INPUT] + count[ActionKind.BACKWARD_WEIGHT]
    is_split = ((count[ActionKind.BACKWARD] == 0) & (halves > 0))[:, :m]
    expected[ActionKind.BACKWARD, :, :m] = ~is_split
    expected[ActionKind.BACKWARD_INPUT, :, :m] = is_split
    expected[ActionKind.BACKWARD_WEIGHT, :, :m] = is_split
    for kind in SENDS + RECEIVES:
        expected[kind, :, :m] = schedule.message_mask(stage, kind)[:, None]
    expected[ActionKind.GATHER_PARAMS, :, m] = 1
    is_once_per_step = count[ActionKind.REDUCE_GRADS, :, m] == 1
    expected[ActionKind.REDUCE_GRADS, :, m] = is_once_per_step
    expected[ActionKind.REDUCE_GRADS, :, :m] = ~is_once_per_step[:, None]
    return expected


def _check_reductions(stage_name: str, count: np.ndarray, position: np.ndarray, backwards: np.ndarray) -> None:
    """Check that each REDUCE_GRADS stands before the right backward. Raises ScheduleError at the first that does not.

    REDUCE_GRADS arms the chunk's gradient buckets, and the chunk's next backward of weights reduces them. So reductions
    and backwards must alternate in the list.

    Args:
        count, position: count and position of the REDUCE_GRADS of each chunk and micro-batch: [v, m + 1]. Column m is
            that of the whole step.
        backwards: position of each chunk's backward of weights: [v, m].
    """
    v, m = backwards.shape
    is_once_per_step = count[:, m] == 1
    order = np.argsort(backwards, axis=1)
    sorted_backwards = np.take_along_axis(backwards, order, axis=1)
    sorted_reductions = np.take_along_axis(position[:, :m], order, axis=1)
    reductions = np.where(is_once_per_step[:, None], position[:, m:], sorted_reductions)
    previous_backwards = np.concatenate([np.full((v, 1), -1), sorted_backwards[:, :-1]], axis=1)
    is_misplaced = (reductions < previous_backwards) | (reductions > sorted_backwards)
    is_misplaced[:, :-1] &= ~is_once_per_step[:, None]  # one reduction per step belongs to the last backward only
    if not is_misplaced.any():
        return
    chunk, index = (int(n) for n in np.unravel_index(int(is_misplaced.argmax()), is_misplaced.shape))
    if is_once_per_step[chunk]:
        microbatch = -1
        target = "last backward"
    else:
        microbatch = int(order[chunk, index])
        target = "backward"
    reduction = Action(ActionKind.REDUCE_GRADS, chunk, microbatch)
    raise ScheduleError(f"{stage_name} has {reduction} not right before the chunk's {target}")


@dataclass(frozen=True)
class _CommunicatorEnd:
    """One end of a communicator, with the operations that its stage posts there in a training step, in order.

    Attributes:
        positions: position of each operation in the stage's list.
        is_send: whether each operation is a send.
        message_ids: id of each operation's message (see `_number_messages`).
    """

    stage: int
    positions: list[int]
    is_send: list[bool]
    message_ids: list[int]


class Machine:
    """Transition system of a schedule under rendezvous semantics.

    A state is (passed, delivered): the number of actions that each stage has passed, and the number of transfers
    that each communicator has delivered. The FIFOs follow from both: the k-th operation of an end is posted once its
    stage has passed it, and removed once k transfers are delivered.
    """

    def __init__(self, schedule: Schedule, communicator: CommunicatorOf, send_slots: int = SEND_SLOTS) -> None:
        self.schedule, self.send_slots = schedule, send_slots
        self.lengths = [len(table) for table in schedule.tables]
        # For each stage and action: the waits of the action. A wait (communicator, count) ends when the communicator
        # has delivered `count` transfers in total.
        self.waits: list[list[tuple[tuple[int, int], ...]]] = [[()] * n for n in self.lengths]
        # For each stage and action: the communicator to which the action posts, or -1.
        self.posts: list[list[int]] = [[-1] * n for n in self.lengths]
        # For each communicator: its ends.
        self.ends: list[list[_CommunicatorEnd]] = []
        index_by_communicator: dict[Hashable, int] = {}
        for stage in range(schedule.stages):
            self._compile(stage, communicator, index_by_communicator)

    def _compile(self, stage: int, communicator: CommunicatorOf, index_by_communicator: dict[Hashable, int]) -> None:
        """Set `waits`, `posts` and `ends` of a stage."""
        schedule = self.schedule
        table = schedule.tables[stage]
        comms: dict[tuple[int, int], int] = {}  # index of the communicator by (kind, chunk)
        for kind in SENDS + RECEIVES:
            for chunk in np.unique(table[table[:, 0] == kind, 1]).tolist():
                key = communicator(schedule.channel(stage, Action(kind, chunk, 0)))
                comms[int(kind), chunk] = index_by_communicator.setdefault(key, len(index_by_communicator))
        self.ends += [[] for _ in range(len(index_by_communicator) - len(self.ends))]
        stage_ends = {comm: _CommunicatorEnd(stage, [], [], []) for comm in comms.values()}
        # Waits for the delivery of each transfer of the stage, in the form of `waits`.
        receive_waits: dict[tuple[int, int, int], tuple[int, int]] = {}  # by (kind, chunk, micro-batch)
        send_index: dict[tuple[int, int, int], int] = {}  # by (kind, chunk, micro-batch): index in the list below
        # Lists of the sends of each channel, by (kind, communicator). The key identifies the channel: the kind gives
        # the pass, and a communicator joins this stage to one other stage only.
        send_waits: dict[tuple[int, int], list[tuple[int, int]]] = {}
        message_ids = _number_messages(schedule, stage).tolist()
        rows = table.tolist()
        waits = self.waits[stage]
        row_comms = _find_communicators(table, comms)
        self.posts[stage] = row_comms
        send_kinds = {int(kind) for kind in SENDS}
        compute_kinds = {int(kind) for kind in COMPUTES}
        for position, (kind, chunk, microbatch) in enumerate(rows):
            comm = row_comms[position]
            if comm < 0:
                if schedule.exposed and kind in compute_kinds:
                    # Sends of one channel are delivered in order, so the last one implies the earlier ones.
                    waits[position] = tuple(channel_waits[-1] for channel_waits in send_waits.values())
                continue
            end = stage_ends[comm]
            is_send = kind in send_kinds
            wait = (comm, len(end.positions) + 1)
            if is_send:
                channel_waits = send_waits.setdefault((kind, comm), [])
                send_index[kind, chunk, microbatch] = len(channel_waits)
                channel_waits.append(wait)
            else:
                receive_waits[kind, chunk, microbatch] = wait
            end.positions.append(position)
            end.is_send.append(is_send)
            end.message_ids.append(message_ids[position])
        # A compute waits for its receive, and for the send that last used the buffer of its own send.
        for position, (kind, chunk, microbatch) in enumerate(rows):
            if kind not in _TRANSFERS_OF_COMPUTE:
                continue
            receive, send = _TRANSFERS_OF_COMPUTE[kind]
            if (receive, chunk, microbatch) in receive_waits:
                waits[position] += (receive_waits[receive, chunk, microbatch],)
            last_use_index = send_index.get((send, chunk, microbatch), -1) - self.send_slots  # negative without a send
            if last_use_index >= 0:
                waits[position] += (send_waits[send, comms[send, chunk]][last_use_index],)
        for comm, end in stage_ends.items():
            self.ends[comm].append(end)

    def start(self) -> tuple[list[int], list[int]]:
        """Return the initial state (passed, delivered)."""
        return [0] * len(self.lengths), [0] * len(self.ends)

    def is_finished(self, passed: list[int], delivered: list[int]) -> bool:
        """Return whether all stages have passed all their actions and all messages are delivered."""
        if passed != self.lengths:
            return False
        for delivered_count, ends in zip(delivered, self.ends, strict=True):
            if any(delivered_count != len(end.positions) for end in ends):
                return False
        return True

    def can_step(self, passed: list[int], delivered: list[int], stage: int) -> bool:
        """Return whether a stage may pass its next action."""
        position = passed[stage]  # of the next action
        if position == self.lengths[stage]:
            return False
        return all(delivered[comm] >= count for comm, count in self.waits[stage][position])

    def can_complete(self, passed: list[int], delivered: list[int], comm: int) -> bool:
        """Return whether a delivery is possible: a send is at the head of one FIFO, a receive at that of the other.

        Raises ScheduleError if the two do not belong to the same message.
        """
        head = delivered[comm]  # index in the end's operations of the first one that is not delivered
        if len(self.ends[comm]) < 2:
            return False
        a, b = self.ends[comm]
        for end in (a, b):
            if head >= len(end.positions) or passed[end.stage] <= end.positions[head]:
                return False
        if a.is_send[head] == b.is_send[head]:
            return False
        if a.message_ids[head] != b.message_ids[head]:
            first, second = (str(self.schedule[end.stage][end.positions[head]]) for end in (a, b))
            raise ScheduleError(f"{first} of stage {a.stage} meets {second} of stage {b.stage}")
        return True

    def run(self, passed: list[int], delivered: list[int], rng: random.Random | None = None) -> None:
        """Take transitions, changing the state in place, until none is enabled.

        The order is random with `rng`.
        """
        # A candidate is stage s as s, or communicator c as ~c. Each transition adds the candidates that it may enable.
        candidates = list(range(len(passed)))
        while candidates:
            if rng is not None:
                index = rng.randrange(len(candidates))
                candidates[index], candidates[-1] = candidates[-1], candidates[index]
            candidate = candidates.pop()
            if candidate >= 0:
                stage = candidate
                if not self.can_step(passed, delivered, stage):
                    continue
                comm = self.posts[stage][passed[stage]]
                passed[stage] += 1
                candidates.append(stage)
                if comm >= 0:
                    candidates.append(~comm)
            else:
                comm = ~candidate
                if not self.can_complete(passed, delivered, comm):
                    continue
                delivered[comm] += 1
                candidates.append(candidate)
                candidates += [end.stage for end in self.ends[comm]]

    def describe(self, passed: list[int], delivered: list[int]) -> str:
        """Return a text that names each blocked stage's next action and the action for which it waits."""
        blocked = []
        for stage, position in enumerate(passed):
            if position == self.lengths[stage]:
                continue
            for comm, count in self.waits[stage][position]:
                if delivered[comm] < count:
                    end = next(end for end in self.ends[comm] if end.stage == stage)
                    actions = self.schedule[stage]
                    blocked.append(f"stage {stage} at {actions[position]} awaits {actions[end.positions[count - 1]]}")
                    break
        return "; ".join(blocked) or "some messages are never delivered"


# By kind of compute: the kind of its input's receive, and the kind of its result's send.
_TRANSFERS_OF_COMPUTE: dict[int, tuple[int, int]] = {
    int(ActionKind.FORWARD): (int(ActionKind.RECV_FORWARD), int(ActionKind.SEND_FORWARD)),
    int(ActionKind.BACKWARD): (int(ActionKind.RECV_BACKWARD), int(ActionKind.SEND_BACKWARD)),
    int(ActionKind.BACKWARD_INPUT): (int(ActionKind.RECV_BACKWARD), int(ActionKind.SEND_BACKWARD)),
}


def _find_communicators(table: np.ndarray, communicators: dict[tuple[int, int], int]) -> list[int]:
    """Return the communicator of each action of a list, -1 for actions that are not transfers.

    Args:
        communicators: index of the communicator by (kind, chunk).
    """
    by_kind = np.full((len(ActionKind), int(table[:, 1].max(initial=0)) + 1), -1)
    for (kind, chunk), communicator in communicators.items():
        by_kind[kind, chunk] = communicator
    result: list[int] = by_kind[table[:, 0], table[:, 1]].tolist()
    return result


def _number_messages(schedule: Schedule, stage: int) -> np.ndarray:
    """Return an id of the message of each SEND and RECV in a stage's list, equal on both sides.

    The pass, the sender's chunk and the micro-batch identify a message.
    """
    kind, chunk, microbatch = schedule.tables[stage].astype(np.int64).T
    sender_chunk = schedule.chunk_map.positions[stage, chunk]
    # An activation comes from the previous chunk of the model, a gradient from the next.
    sender_chunk -= kind == ActionKind.RECV_FORWARD
    sender_chunk += kind == ActionKind.RECV_BACKWARD
    is_backward = (kind == ActionKind.SEND_BACKWARD) | (kind == ActionKind.RECV_BACKWARD)
    return (is_backward * schedule.chunks + sender_chunk) * schedule.microbatches + microbatch
