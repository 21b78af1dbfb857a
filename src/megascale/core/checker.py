"""Proof that a schedule runs: no deadlock for any message timing, every message matched, memory as stated.

Model of the machine. Each stage is a process that walks its action list. Each communicator has two ends, each end a
FIFO of posted sends and receives. Transport is pessimistic (*rendezvous*): a transfer takes place only when the send is
at the head of its FIFO and the matching receive at the head of the other end's. Transitions:

- *step of a stage*: it passes its next action. SEND_* and RECV_* are posted and never block. FORWARD and BACKWARD need
  their own receive delivered. If they produce a message, they also need the send SEND_SLOTS messages earlier on the
  same channel delivered (its buffer is free). Without overlap (`Schedule.exposed`) they also need the stage's earlier
  sends delivered. GATHER_PARAMS and REDUCE_GRADS are posted and never block.
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

from megascale.core.schedule import SEND_SLOTS, Action, ActionKind, Channel, Schedule
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

    Every micro-batch runs forward and backward once in every chunk, forward before backward; each compute has the
    its receive before it and its send after it, and no other; parameters are gathered once before a
    chunk's first forward; a reduction is armed for each chunk's last backward alone, or for each one.
    """
    for stage in range(schedule.stages):
        _check_stage(schedule, stage)


def has_message(schedule: Schedule, stage: int, kind: ActionKind) -> np.ndarray:
    """Return which chunks 0..v-1 of a stage have a SEND or RECV of this kind: [v] booleans.

    The model's first chunk neither receives activations nor sends a gradient; the last chunk is the reverse.
    """
    g = np.arange(schedule.virtual_stages) * schedule.stages + stage
    lacks_first_chunk = kind in (ActionKind.RECV_FORWARD, ActionKind.SEND_BACKWARD)
    if lacks_first_chunk:
        excluded = 0
    else:
        excluded = schedule.chunks - 1
    return (schedule.stages > 1) & (g != excluded)


def _check_stage(schedule: Schedule, stage: int) -> None:
    v = schedule.virtual_stages
    m = schedule.microbatches
    table = schedule.table[stage]
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

    expected = np.zeros_like(count)
    for k in ActionKind:
        if k.is_compute:
            expected[k, :, :m] = 1
        elif k.is_send or k.is_receive:
            expected[k, :, :m] = has_message(schedule, stage, k)[:, None]
    expected[ActionKind.GATHER_PARAMS, :, m] = 1
    reduce = ActionKind.REDUCE_GRADS
    once = count[reduce, :, m] == 1
    expected[reduce, :, m] = once
    expected[reduce, :, :m] = ~once[:, None]
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
    for first, then in (
        (ActionKind.RECV_FORWARD, ActionKind.FORWARD),
        (ActionKind.FORWARD, ActionKind.SEND_FORWARD),
        (ActionKind.FORWARD, ActionKind.BACKWARD),
        (ActionKind.RECV_BACKWARD, ActionKind.BACKWARD),
        (ActionKind.BACKWARD, ActionKind.SEND_BACKWARD),
    ):
        require_order(first, then, pos[first], pos[then], exists[first] & exists[then])
    gathered = np.broadcast_to(position[ActionKind.GATHER_PARAMS, :, m:], (v, m))
    require_order(
        ActionKind.GATHER_PARAMS, ActionKind.FORWARD, gathered, pos[ActionKind.FORWARD], exists[ActionKind.FORWARD]
    )
    # A reduction arms the chunk's next backward, so the positions of both must alternate.
    backwards = np.sort(pos[ActionKind.BACKWARD], axis=1)
    each = np.take_along_axis(pos[reduce], np.argsort(pos[ActionKind.BACKWARD], axis=1), axis=1)
    arms = np.where(once[:, None], position[reduce, :, m:], each)
    previous_backwards = np.concatenate([np.full((v, 1), -1), backwards[:, :-1]], axis=1)
    stray = (arms < previous_backwards) | (arms > backwards)
    stray[:, :-1] &= ~once[:, None]
    if stray.any():
        c, order = (int(n) for n in np.unravel_index(int(stray.argmax()), stray.shape))
        if once[c]:
            j = -1
        else:
            j = int(np.argsort(pos[ActionKind.BACKWARD][c])[order])
        target = "last backward" if once[c] else "backward"
        raise ScheduleError(f"{stage_name} has {Action(reduce, c, j)} not right before the chunk's {target}")
    if schedule.stages == 1:
        # No messages enforce the order between chunks, so the list itself must.
        f, b = pos[ActionKind.FORWARD], pos[ActionKind.BACKWARD]
        require_order(ActionKind.FORWARD, ActionKind.FORWARD, f[:-1], f[1:], exists[ActionKind.FORWARD][1:])
        require_order(ActionKind.BACKWARD, ActionKind.BACKWARD, b[1:], b[:-1], exists[ActionKind.BACKWARD][1:])


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
        self.lengths = [len(table) for table in schedule.table]
        # Waits of each action: (communicator, number of transfers that it must have delivered).
        self.needs: list[list[tuple[tuple[int, int], ...]]] = [[()] * n for n in self.lengths]
        self.posts: list[list[int]] = [[-1] * n for n in self.lengths]
        self.ends: list[list[_End]] = []
        numbers: dict[Hashable, int] = {}
        for stage in range(schedule.stages):
            self._compile(stage, communicator, numbers)

    def _compile(self, stage: int, communicator: CommunicatorOf, numbers: dict[Hashable, int]) -> None:
        schedule, table = self.schedule, self.schedule.table[stage]
        comm_by_kind = {}
        for kind in ActionKind:
            if (kind.is_send or kind.is_receive) and (table[:, 0] == kind).any():
                key = communicator(schedule.channel(stage, Action(kind, 0, 0)))
                comm_by_kind[int(kind)] = numbers.setdefault(key, len(numbers))
        self.ends += [[] for _ in range(len(numbers) - len(self.ends))]
        stage_ends = {comm: _End(stage, [], [], []) for comm in comm_by_kind.values()}
        received: dict[tuple[int, int, int], tuple[int, int]] = {}
        send_numbers: dict[tuple[int, int, int], int] = {}
        sends: dict[int, list[tuple[int, int]]] = {}
        messages = _number_messages(schedule, stage).tolist()
        rows = table.tolist()
        waits: list[tuple[tuple[int, int], ...]] = [()] * len(rows)
        for position, (kind, chunk, i) in enumerate(rows):
            comm = comm_by_kind.get(kind)
            if comm is None:
                if schedule.exposed and ActionKind(kind).is_compute:
                    # Sends of one channel are delivered in order, so the last one implies the earlier ones.
                    waits[position] = tuple(channel_sends[-1] for channel_sends in sends.values())
                continue
            end = stage_ends[comm]
            is_send = ActionKind(kind).is_send
            delivery = (comm, len(end.positions) + 1)
            if is_send:
                send_numbers[kind, chunk, i] = len(sends.setdefault(kind, []))
                sends[kind].append(delivery)
            else:
                received[kind, chunk, i] = delivery
            end.positions.append(position)
            end.sends.append(is_send)
            end.messages.append(messages[position])
            self.posts[stage][position] = comm
        inputs = {0: int(ActionKind.RECV_FORWARD), 1: int(ActionKind.RECV_BACKWARD)}
        outputs = {0: int(ActionKind.SEND_FORWARD), 1: int(ActionKind.SEND_BACKWARD)}
        for position, (kind, chunk, i) in enumerate(rows):
            if kind in inputs:
                needs = []
                message = (inputs[kind], chunk, i)
                if message in received:
                    needs.append(received[message])
                slot_holder = send_numbers.get((outputs[kind], chunk, i), -1) - self.send_slots
                if slot_holder >= 0:
                    needs.append(sends[outputs[kind]][slot_holder])
                self.needs[stage][position] = tuple(needs) + waits[position]
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


def _number_messages(schedule: Schedule, stage: int) -> np.ndarray:
    """Return a number for the message of each SEND and RECV in a stage's list, equal on both sides."""
    kind, chunk, i = schedule.table[stage].astype(np.int64).T
    g = chunk * schedule.stages + stage
    # The sender's chunk numbers a message: an activation comes from the previous chunk, a gradient from the next.
    g -= kind == ActionKind.RECV_FORWARD
    g += kind == ActionKind.RECV_BACKWARD
    backward = (kind == ActionKind.SEND_BACKWARD) | (kind == ActionKind.RECV_BACKWARD)
    return (backward * schedule.chunks + g) * schedule.microbatches + i
