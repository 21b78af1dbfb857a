"""Proof that a schedule runs: no deadlock for any message timing, every message matched, memory as stated.

Model of the machine. Each stage is a process that walks its action list. Each communicator has two ends, each end a
FIFO of posted sends and receives. Transport is pessimistic (*rendezvous*): a transfer takes place only when the send is
at the head of its FIFO and the matching receive at the head of the other end's. Transitions:

- *step of a stage*: it passes its next action. SEND_* and RECV_* are posted and never block. FORWARD, BACKWARD and
  BACKWARD_INPUT need their own receive delivered. If they produce a message, they also need the send SEND_SLOTS
  messages earlier on the same channel delivered (its buffer is free). Without overlap (`Schedule.exposed`) all computes
  also need the stage's earlier sends delivered. GATHER_PARAMS and REDUCE_GRADS are posted and never block.
- *delivery on a communicator*: the two heads are a send and a receive that match; both are removed.

Why one maximal run decides for every timing. (1) An enabled transition stays enabled until it is taken: a step waits
only for deliveries, which are never undone, and a pair of heads can only be removed by its own delivery. (2) Two
enabled transitions commute: steps of different stages touch different programs and different FIFO ends (appending at
the tail), deliveries touch different communicators, and a step appends at tails while a delivery removes heads. So the
system is strongly confluent (a Kahn network with bounded channels): by induction every maximal run takes the same
transitions and ends in the same state. If one run finishes, no order and no delay can make another one hang. The tests
visit *all* interleavings of small schedules to verify this argument; `check_schedule` makes a single run, in a random
order if a seed is given.

Data-parallel collectives are outside the stages' processes. All replicas of a stage hold the same list, so the run of
one replica, taken by all replicas in step, is a run of the whole system; confluence then covers all other runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass

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
        messages: number of transfers between stages in a step.
        in_flight: for each stage, the maximum number of chunk-forwards whose backward has not run.
        transitions: number of steps and deliveries.
    """

    messages: int
    in_flight: tuple[int, ...]
    transitions: int


def channel_communicator(channel: Channel) -> Hashable:
    """Use one communicator for each directed edge and direction of travel, like the executor."""
    return channel


def check_schedule(
    schedule: Schedule,
    communicator: CommunicatorOf = channel_communicator,
    seed: int | None = None,
) -> CheckReport:
    """Prove that `schedule` finishes for any message timing and computes every micro-batch in order.

    Args:
        communicator: maps channels to communicators, which they may share.
        seed: take enabled transitions in a random order drawn from this seed.

    Raises ScheduleError with the wait of each stuck stage, or with the first wrong action.
    """
    check_order(schedule)
    machine = Machine(schedule, communicator)
    positions, delivered = machine.start()
    transitions = machine.run(positions, delivered, random.Random(seed) if seed is not None else None)
    if not machine.finished(positions, delivered):
        raise ScheduleError(f"the schedule {schedule.name} deadlocks: {machine.describe(positions, delivered)}")
    return CheckReport(sum(delivered), tuple(schedule.count_in_flight(s) for s in range(schedule.stages)), transitions)


def check_order(schedule: Schedule) -> None:
    """Check each stage's list separately. Raises ScheduleError at the first fault.

    Every micro-batch runs forward and backward once in every chunk, forward before backward. A backward may be two
    actions, that of the input before that of the weights. Each compute has its receive before it and its send after it,
    and no other. Neighbouring chunks of one stage run in order. Parameters are gathered once, before a chunk's first
    forward. A reduction is armed for each chunk's last backward of weights alone, or for each.
    """
    for stage in range(schedule.stages):
        _check_stage(schedule, stage)


def _check_stage(schedule: Schedule, stage: int) -> None:
    v = schedule.virtual_stages
    m = schedule.microbatches
    table = schedule.tables[stage]
    stage_name = f"stage {stage} of the schedule {schedule.name}"
    kind, chunk, i = table.T
    outside = (chunk < 0) | (chunk >= v) | (i < -1) | (i >= m)
    if outside.any():
        raise ScheduleError(
            f"{stage_name} has {schedule[stage][int(outside.argmax())]}, outside {v} chunks and {m} parts"
        )
    # Count and position of every possible action; micro-batch -1 lands in column m.
    count = np.zeros((len(ActionKind), v, m + 1), dtype=np.int64)
    np.add.at(count, (kind, chunk, i), 1)
    position = np.zeros_like(count)
    position[kind, chunk, i] = np.arange(len(table))

    expected = _expected_counts(schedule, stage, count)
    for wrong, word in ((count < expected, "lacks"), (count > expected, "has a needless")):
        if wrong.any():
            which, c, j = (int(n) for n in np.unravel_index(int(wrong.argmax()), wrong.shape))
            raise ScheduleError(f"{stage_name} {word} {Action(ActionKind(which), c, j if j < m else -1)}")

    def require_order(
        first: ActionKind, then: ActionKind, first_position: np.ndarray, then_position: np.ndarray, applies: np.ndarray
    ) -> None:
        late = applies & (first_position >= then_position)
        if late.any():
            c, j = np.unravel_index(int(late.argmax()), late.shape)
            raise ScheduleError(f"{stage_name} has {Action(then, int(c), int(j))} before its {first.label}")

    pos = position[:, :, :m]
    exists = expected[:, :, :m].astype(bool)
    for first, then in _ORDERED_PAIRS:
        require_order(first, then, pos[first], pos[then], exists[first] & exists[then])
    gathered = np.broadcast_to(position[ActionKind.GATHER_PARAMS, :, m:], (v, m))
    require_order(
        ActionKind.GATHER_PARAMS, ActionKind.FORWARD, gathered, pos[ActionKind.FORWARD], exists[ActionKind.FORWARD]
    )
    is_split = exists[ActionKind.BACKWARD_WEIGHT]
    weight_backwards = np.where(is_split, pos[ActionKind.BACKWARD_WEIGHT], pos[ActionKind.BACKWARD])
    _check_reductions(stage_name, count[ActionKind.REDUCE_GRADS], position[ActionKind.REDUCE_GRADS], weight_backwards)
    # No message enforces the order between neighbouring chunks of one stage, so the list itself must.
    neighbours = np.flatnonzero(np.diff(schedule.chunk_map.positions[stage]) == 1)
    f = pos[ActionKind.FORWARD]
    b = np.where(is_split, pos[ActionKind.BACKWARD_INPUT], pos[ActionKind.BACKWARD])
    for c in neighbours.tolist():
        after, before = slice(c + 1, c + 2), slice(c, c + 1)
        every = np.ones((1, m), dtype=bool)
        for kind_of_order, earlier, later, later_chunk in (
            (ActionKind.FORWARD, f[before], f[after], c + 1),
            (ActionKind.BACKWARD, b[after], b[before], c),
        ):
            late = every & (earlier >= later)
            if late.any():
                action = Action(kind_of_order, later_chunk, int(late.argmax()))
                raise ScheduleError(f"{stage_name} has {action} before its {kind_of_order.label}")


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
    """Return how often the list must have each action, given what it has: [kinds, v, m + 1]."""
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
    once = count[ActionKind.REDUCE_GRADS, :, m] == 1
    expected[ActionKind.REDUCE_GRADS, :, m] = once
    expected[ActionKind.REDUCE_GRADS, :, :m] = ~once[:, None]
    return expected


def _check_reductions(stage_name: str, count: np.ndarray, position: np.ndarray, backwards: np.ndarray) -> None:
    """Check that each reduction arms the right backward. Raises ScheduleError at the first that does not.

    A reduction arms the chunk's next backward of weights, so the positions of both must alternate.

    Args:
        count, position: of the REDUCE_GRADS of each chunk and micro-batch, the whole step's last: [v, m + 1].
        backwards: position of each chunk's backward of weights: [v, m].
    """
    v, m = backwards.shape
    once = count[:, m] == 1
    order = np.argsort(backwards, axis=1)
    sorted_backwards = np.take_along_axis(backwards, order, axis=1)
    each = np.take_along_axis(position[:, :m], order, axis=1)
    arms = np.where(once[:, None], position[:, m:], each)
    previous = np.concatenate([np.full((v, 1), -1), sorted_backwards[:, :-1]], axis=1)
    stray = (arms < previous) | (arms > sorted_backwards)
    stray[:, :-1] &= ~once[:, None]
    if not stray.any():
        return
    c, rank = (int(n) for n in np.unravel_index(int(stray.argmax()), stray.shape))
    if once[c]:
        j, target = -1, "last backward"
    else:
        j, target = int(order[c, rank]), "backward"
    reduction = Action(ActionKind.REDUCE_GRADS, c, j)
    raise ScheduleError(f"{stage_name} has {reduction} not right before the chunk's {target}")


@dataclass(frozen=True)
class _End:
    """One end of a communicator, with the operations that its stage posts there in a step, in order.

    Attributes:
        positions: positions in the stage's list.
        sends: whether each operation is a send.
        messages: number of each operation's message (see `_number_messages`).
    """

    stage: int
    positions: list[int]
    sends: list[bool]
    messages: list[int]


class Machine:
    """Transition system of a schedule under rendezvous semantics.

    A state is (positions, delivered): the number of actions that each stage has passed, and the number of transfers
    that each communicator has delivered. The FIFOs follow from both: the k-th entry of an end is posted once its stage
    has passed it, and removed once k transfers are delivered.
    """

    def __init__(self, schedule: Schedule, communicator: CommunicatorOf, send_slots: int = SEND_SLOTS) -> None:
        self.schedule, self.send_slots = schedule, send_slots
        self.lengths = [len(table) for table in schedule.tables]
        # Waits of each action: (communicator, number of transfers that it must have delivered).
        self.needs: list[list[tuple[tuple[int, int], ...]]] = [[()] * n for n in self.lengths]
        self.posts: list[list[int]] = [[-1] * n for n in self.lengths]
        self.ends: list[list[_End]] = []
        numbers: dict[Hashable, int] = {}
        for stage in range(schedule.stages):
            self._compile(stage, communicator, numbers)

    def _compile(self, stage: int, communicator: CommunicatorOf, numbers: dict[Hashable, int]) -> None:
        schedule, table = self.schedule, self.schedule.tables[stage]
        comms: dict[tuple[int, int], int] = {}  # of each kind and chunk that has messages
        for kind in SENDS + RECEIVES:
            for chunk in np.unique(table[table[:, 0] == kind, 1]).tolist():
                key = communicator(schedule.channel(stage, Action(kind, chunk, 0)))
                comms[int(kind), chunk] = numbers.setdefault(key, len(numbers))
        self.ends += [[] for _ in range(len(numbers) - len(self.ends))]
        stage_ends = {comm: _End(stage, [], [], []) for comm in comms.values()}
        received: dict[tuple[int, int, int], tuple[int, int]] = {}
        send_numbers: dict[tuple[int, int, int], int] = {}
        sends: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by kind and communicator
        messages = _number_messages(schedule, stage).tolist()
        rows = table.tolist()
        waits: list[tuple[tuple[int, int], ...]] = [()] * len(rows)
        row_comms = _find_communicators(table, comms)
        self.posts[stage] = row_comms
        send_kinds = {int(kind) for kind in SENDS}
        compute_kinds = {int(kind) for kind in COMPUTES}
        for position, (kind, chunk, i) in enumerate(rows):
            comm = row_comms[position]
            if comm < 0:
                if schedule.exposed and kind in compute_kinds:
                    # Sends of one channel are delivered in order, so the last one implies the earlier ones.
                    waits[position] = tuple(channel_sends[-1] for channel_sends in sends.values())
                continue
            end = stage_ends[comm]
            is_send = kind in send_kinds
            delivery = (comm, len(end.positions) + 1)
            if is_send:
                send_numbers[kind, chunk, i] = len(sends.setdefault((kind, comm), []))
                sends[kind, comm].append(delivery)
            else:
                received[kind, chunk, i] = delivery
            end.positions.append(position)
            end.sends.append(is_send)
            end.messages.append(messages[position])
        for position, (kind, chunk, i) in enumerate(rows):
            if kind in _MESSAGES:
                needs = []
                receive, send = _MESSAGES[kind]
                message = (receive, chunk, i)
                if message in received:
                    needs.append(received[message])
                slot_holder = send_numbers.get((send, chunk, i), -1) - self.send_slots
                if slot_holder >= 0:
                    needs.append(sends[send, comms[send, chunk]][slot_holder])
                self.needs[stage][position] = tuple(needs) + waits[position]
            else:
                self.needs[stage][position] = waits[position]
        for comm, end in stage_ends.items():
            self.ends[comm].append(end)

    def start(self) -> tuple[list[int], list[int]]:
        """Return the initial state."""
        return [0] * len(self.lengths), [0] * len(self.ends)

    def finished(self, positions: list[int], delivered: list[int]) -> bool:
        """Return whether all lists are finished and all messages delivered."""
        if positions != self.lengths:
            return False
        for count, ends in zip(delivered, self.ends, strict=True):
            if any(count != len(end.positions) for end in ends):
                return False
        return True

    def can_step(self, positions: list[int], delivered: list[int], stage: int) -> bool:
        """Return whether a stage may pass its next action."""
        position = positions[stage]
        if position == self.lengths[stage]:
            return False
        return all(delivered[comm] >= count for comm, count in self.needs[stage][position])

    def can_complete(self, positions: list[int], delivered: list[int], comm: int) -> bool:
        """Return whether a send and a receive are at the heads of both ends.

        Raises ScheduleError if they do not belong to the same message.
        """
        head = delivered[comm]
        if len(self.ends[comm]) < 2:
            return False
        a, b = self.ends[comm]
        for end in (a, b):
            if head >= len(end.positions) or positions[end.stage] <= end.positions[head]:
                return False
        if a.sends[head] == b.sends[head]:
            return False
        if a.messages[head] != b.messages[head]:
            first, second = (str(self.schedule[end.stage][end.positions[head]]) for end in (a, b))
            raise ScheduleError(f"{first} of stage {a.stage} meets {second} of stage {b.stage}")
        return True

    def run(self, positions: list[int], delivered: list[int], rng: random.Random | None = None) -> int:
        """Take transitions, changing the state in place, until none is enabled; return their number.

        The order is random with `rng`.
        """
        transitions = 0
        # Candidates: stage s as s, communicator c as ~c. A transition can only enable those that it pushes.
        ready = list(range(len(positions)))
        while ready:
            if rng is not None:
                pick = rng.randrange(len(ready))
                ready[pick], ready[-1] = ready[-1], ready[pick]
            candidate = ready.pop()
            if candidate >= 0:
                stage = candidate
                if not self.can_step(positions, delivered, stage):
                    continue
                comm = self.posts[stage][positions[stage]]
                positions[stage] += 1
                ready.append(stage)
                if comm >= 0:
                    ready.append(~comm)
            else:
                comm = ~candidate
                if not self.can_complete(positions, delivered, comm):
                    continue
                delivered[comm] += 1
                ready.append(candidate)
                ready += [end.stage for end in self.ends[comm]]
            transitions += 1
        return transitions

    def describe(self, positions: list[int], delivered: list[int]) -> str:
        """Return the wait of each unfinished stage."""
        stuck = []
        for stage, position in enumerate(positions):
            if position == self.lengths[stage]:
                continue
            for comm, count in self.needs[stage][position]:
                if delivered[comm] < count:
                    end = next(e for e in self.ends[comm] if e.stage == stage)
                    actions = self.schedule[stage]
                    stuck.append(f"stage {stage} at {actions[position]} awaits {actions[end.positions[count - 1]]}")
                    break
        return "; ".join(stuck) or "some messages are never delivered"


# Kind of compute -> kinds of its input's receive and of its result's send.
_MESSAGES: dict[int, tuple[int, int]] = {
    int(ActionKind.FORWARD): (int(ActionKind.RECV_FORWARD), int(ActionKind.SEND_FORWARD)),
    int(ActionKind.BACKWARD): (int(ActionKind.RECV_BACKWARD), int(ActionKind.SEND_BACKWARD)),
    int(ActionKind.BACKWARD_INPUT): (int(ActionKind.RECV_BACKWARD), int(ActionKind.SEND_BACKWARD)),
}


def _find_communicators(table: np.ndarray, communicators: dict[tuple[int, int], int]) -> list[int]:
    """Return the communicator of each action of a list, -1 for those that are no transfers.

    Args:
        communicators: by kind and chunk.
    """
    by_kind = np.full((len(ActionKind), int(table[:, 1].max(initial=0)) + 1), -1)
    for (kind, chunk), communicator in communicators.items():
        by_kind[kind, chunk] = communicator
    result: list[int] = by_kind[table[:, 0], table[:, 1]].tolist()
    return result


def _number_messages(schedule: Schedule, stage: int) -> np.ndarray:
    """Return a number for the message of each SEND and RECV in a stage's list, equal on both sides."""
    kind, chunk, i = schedule.tables[stage].astype(np.int64).T
    g = schedule.chunk_map.positions[stage, chunk]
    # The sender's chunk numbers a message: an activation comes from the previous chunk, a gradient from the next.
    g -= kind == ActionKind.RECV_FORWARD
    g += kind == ActionKind.RECV_BACKWARD
    backward = (kind == ActionKind.SEND_BACKWARD) | (kind == ActionKind.RECV_BACKWARD)
    return (backward * schedule.chunks + g) * schedule.microbatches + i
