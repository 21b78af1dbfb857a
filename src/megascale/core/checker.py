"""Proof that a schedule runs: no deadlock for any message timing, every message matched, memory as stated.

Machine that is checked. Each stage is a process that walks its action list. Each communicator has two ends, each
end a FIFO of posted sends and receives. The machine is pessimistic about transport (*rendezvous*): a transfer
takes place only when the send is at the head of its FIFO and the matching receive at the head of the other end's.
Transitions:

- *step of a stage*: it passes its next action. SEND_* and RECV_* are posted (never blocks). FORWARD and BACKWARD
  need their own receive delivered, and, if they produce a message, the send SEND_SLOTS messages earlier on the
  same channel delivered (its buffer is free). Without overlap (`Schedule.exposed`) they also need the stage's
  earlier sends delivered. GATHER_PARAMS and REDUCE_GRADS are posted and never block.
- *delivery on a communicator*: the two heads are a send and a receive that face each other; both are taken off.

Why one maximal run decides for every timing. (1) An enabled transition stays enabled until it is taken: a step
waits only for deliveries, which are never undone; a pair of heads can only be removed by its own delivery. (2) Two
enabled transitions commute: steps of different stages touch different programs and different FIFO ends (appending
at the tail), deliveries touch different communicators, and a step appends at tails while a delivery removes heads.
So the system is strongly confluent (a Kahn network with bounded channels): by induction every maximal run takes the
same transitions and ends in the same state. If one run finishes, no order and no delay can make another one hang.
The tests visit *all* interleavings of small schedules and hold the argument against them; `check` makes a
single run, in an order drawn at random when a seed is given.

Data-parallel collectives are outside the stage's processes. All replicas of a stage hold the same list, so the run
of one replica, taken by all replicas in step, is a run of the whole; confluence then covers all others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from megascale.core.schedule import SEND_SLOTS, Action, ActionKind, Channel, Schedule
from megascale.errors import MegascaleError

# Which communicator a channel's messages are posted to.
CommunicatorOf = Callable[[Channel], Hashable]


class ScheduleError(MegascaleError):
    """A schedule that is wrong: it hangs, mismatches messages, or computes in an impossible order."""


@dataclass(frozen=True)
class Report:
    """What a check found.

    Attributes:
        messages: transfers between stages in a step.
        in_flight: a stage's largest number of chunk-forwards whose backward has not run.
        transitions: steps and deliveries taken.
    """

    messages: int
    in_flight: tuple[int, ...]
    transitions: int


def own_channel(channel: Channel) -> Hashable:
    """One communicator for each directed edge and direction of travel: what the executor makes."""
    return channel


def check_schedule(
    schedule: Schedule,
    communicator: CommunicatorOf = own_channel,
    seed: int | None = None,
) -> Report:
    """Prove that `schedule` finishes for any message timing and computes every micro-batch in order.

    Args:
        communicator: how channels share communicators.
        seed: take enabled transitions in a random order drawn from this seed.

    Raises ScheduleError naming what each stuck stage waits for, or the first wrong action.
    """
    check_order(schedule)
    machine = Machine(schedule, communicator)
    at, done = machine.start()
    transitions = machine.run(at, done, random.Random(seed) if seed is not None else None)
    if not machine.finished(at, done):
        raise ScheduleError(f"the schedule {schedule.name} deadlocks: {machine.describe(at, done)}")
    return Report(sum(done), tuple(schedule.in_flight(s) for s in range(schedule.stages)), transitions)


def check_order(schedule: Schedule) -> None:
    """Check each stage's list by itself. ScheduleError at the first fault.

    Every micro-batch runs forward and backward once in every chunk, forward before backward; each compute has the
    receive it needs before it and the send it owes after it, and no other; parameters are gathered once before a
    chunk's first forward; a reduction is armed for each chunk's last backward alone, or for each one.
    """
    for stage in range(schedule.stages):
        _check_stage(schedule, stage)


def has_message(schedule: Schedule, stage: int, kind: ActionKind) -> np.ndarray:
    """Whether chunks 0..v-1 of a stage have a SEND or RECV of this kind: [v] booleans.

    The model's first chunk takes no activations and gives no gradient, the last the other way round.
    """
    g = np.arange(schedule.virtual_stages) * schedule.stages + stage
    first = kind in (ActionKind.RECV_FORWARD, ActionKind.SEND_BACKWARD)
    return (schedule.stages > 1) & (g != (0 if first else schedule.chunks - 1))


def _check_stage(schedule: Schedule, stage: int) -> None:
    v, m, table = schedule.virtual_stages, schedule.microbatches, schedule.table[stage]
    where = f"stage {stage} of the schedule {schedule.name}"
    kind, chunk, i = table.T
    outside = (chunk < 0) | (chunk >= v) | (i < -1) | (i >= m)
    if outside.any():
        raise ScheduleError(f"{where} has {schedule[stage][int(outside.argmax())]}, outside {v} chunks and {m} parts")
    # count and position of every possible action; micro-batch -1 lands in column m.
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
            raise ScheduleError(f"{where} {word} {Action(ActionKind(which), c, j if j < m else -1)}")

    def ordered(first: ActionKind, then: ActionKind, a: np.ndarray, b: np.ndarray, due: np.ndarray) -> None:
        late = due & (a >= b)
        if late.any():
            c, j = np.unravel_index(int(late.argmax()), late.shape)
            raise ScheduleError(f"{where} has {Action(then, int(c), int(j))} before its {first.label}")

    pos = position[:, :, :m]
    there = expected[:, :, :m].astype(bool)
    for first, then in (
        (ActionKind.RECV_FORWARD, ActionKind.FORWARD),
        (ActionKind.FORWARD, ActionKind.SEND_FORWARD),
        (ActionKind.FORWARD, ActionKind.BACKWARD),
        (ActionKind.RECV_BACKWARD, ActionKind.BACKWARD),
        (ActionKind.BACKWARD, ActionKind.SEND_BACKWARD),
    ):
        ordered(first, then, pos[first], pos[then], there[first] & there[then])
    gathered = np.broadcast_to(position[ActionKind.GATHER_PARAMS, :, m:], (v, m))
    ordered(ActionKind.GATHER_PARAMS, ActionKind.FORWARD, gathered, pos[ActionKind.FORWARD], there[ActionKind.FORWARD])
    # What is armed is the chunk's next backward: the positions of both must alternate.
    backwards = np.sort(pos[ActionKind.BACKWARD], axis=1)
    each = np.take_along_axis(pos[reduce], np.argsort(pos[ActionKind.BACKWARD], axis=1), axis=1)
    arms = np.where(once[:, None], position[reduce, :, m:], each)
    before = np.concatenate([np.full((v, 1), -1), backwards[:, :-1]], axis=1)
    stray = (arms < before) | (arms > backwards)
    stray[:, :-1] &= ~once[:, None]
    if stray.any():
        c, place = (int(n) for n in np.unravel_index(int(stray.argmax()), stray.shape))
        j = -1 if once[c] else int(np.argsort(pos[ActionKind.BACKWARD][c])[place])
        what = "last backward" if once[c] else "backward"
        raise ScheduleError(f"{where} has {Action(reduce, c, j)} elsewhere than right before the chunk's {what}")
    if schedule.stages == 1:
        # No messages carry the order between chunks: the list itself must.
        f, b = pos[ActionKind.FORWARD], pos[ActionKind.BACKWARD]
        ordered(ActionKind.FORWARD, ActionKind.FORWARD, f[:-1], f[1:], there[ActionKind.FORWARD][1:])
        ordered(ActionKind.BACKWARD, ActionKind.BACKWARD, b[1:], b[:-1], there[ActionKind.BACKWARD][1:])


@dataclass(frozen=True)
class _End:
    """One end of a communicator: what its stage posts there in a step, in order.

    at: positions in the stage's list. sends: whether each is a send. messages: which message (see _message).
    """

    stage: int
    at: list[int]
    sends: list[bool]
    messages: list[int]


class Machine:
    """The transitions of a schedule under rendezvous semantics.

    A state is (at, done): how many actions each stage has passed, and how many transfers each communicator has
    delivered. FIFOs follow from both: the k-th entry of an end is posted once its stage is past it, and off once k
    transfers are done.
    """

    def __init__(self, schedule: Schedule, communicator: CommunicatorOf, send_slots: int = SEND_SLOTS) -> None:
        self.schedule, self.send_slots = schedule, send_slots
        self.lengths = [len(table) for table in schedule.table]
        # What each action awaits: (communicator, transfers that it must have done).
        self.needs: list[list[tuple[tuple[int, int], ...]]] = [[()] * n for n in self.lengths]
        self.posts: list[list[int]] = [[-1] * n for n in self.lengths]
        self.ends: list[list[_End]] = []
        numbers: dict[Hashable, int] = {}
        for stage in range(schedule.stages):
            self._compile(stage, communicator, numbers)

    def _compile(self, stage: int, communicator: CommunicatorOf, numbers: dict[Hashable, int]) -> None:
        schedule, table = self.schedule, self.schedule.table[stage]
        comm_of = {}
        for kind in ActionKind:
            if (kind.is_send or kind.is_receive) and (table[:, 0] == kind).any():
                key = communicator(schedule.channel(stage, Action(kind, 0, 0)))
                comm_of[int(kind)] = numbers.setdefault(key, len(numbers))
        self.ends += [[] for _ in range(len(numbers) - len(self.ends))]
        own = {comm: _End(stage, [], [], []) for comm in comm_of.values()}
        received: dict[tuple[int, int, int], tuple[int, int]] = {}
        send_at: dict[tuple[int, int, int], int] = {}
        sends: dict[int, list[tuple[int, int]]] = {}
        messages = _messages(schedule, stage).tolist()
        rows = table.tolist()
        waits: list[tuple[tuple[int, int], ...]] = [()] * len(rows)
        for position, (kind, chunk, i) in enumerate(rows):
            comm = comm_of.get(kind)
            if comm is None:
                if schedule.exposed and ActionKind(kind).is_compute:
                    # Of one channel in order: the last stands for those before it.
                    waits[position] = tuple(done[-1] for done in sends.values())
                continue
            end = own[comm]
            is_send = ActionKind(kind).is_send
            done = (comm, len(end.at) + 1)
            if is_send:
                send_at[kind, chunk, i] = len(sends.setdefault(kind, []))
                sends[kind].append(done)
            else:
                received[kind, chunk, i] = done
            end.at.append(position)
            end.sends.append(is_send)
            end.messages.append(messages[position])
            self.posts[stage][position] = comm
        inputs = {0: int(ActionKind.RECV_FORWARD), 1: int(ActionKind.RECV_BACKWARD)}
        outputs = {0: int(ActionKind.SEND_FORWARD), 1: int(ActionKind.SEND_BACKWARD)}
        for position, (kind, chunk, i) in enumerate(rows):
            if kind in inputs:
                needs = [received[inputs[kind], chunk, i]] if (inputs[kind], chunk, i) in received else []
                held = send_at.get((outputs[kind], chunk, i), -1) - self.send_slots
                if held >= 0:
                    needs.append(sends[outputs[kind]][held])
                self.needs[stage][position] = (*needs, *waits[position])
        for comm, end in own.items():
            self.ends[comm].append(end)

    def start(self) -> tuple[list[int], list[int]]:
        """The first state."""
        return [0] * len(self.lengths), [0] * len(self.ends)

    def finished(self, at: list[int], done: list[int]) -> bool:
        """Whether all lists are walked and all messages delivered."""
        return at == self.lengths and all(d == len(e.at) for d, ends in zip(done, self.ends, strict=True) for e in ends)

    def can_step(self, at: list[int], done: list[int], stage: int) -> bool:
        """Whether a stage may pass its next action."""
        here = at[stage]
        return here < self.lengths[stage] and all(done[comm] >= n for comm, n in self.needs[stage][here])

    def can_complete(self, at: list[int], done: list[int], comm: int) -> bool:
        """Whether a send faces a receive at the heads of both ends. ScheduleError if they are not one message."""
        head = done[comm]
        if len(self.ends[comm]) < 2:
            return False
        a, b = self.ends[comm]
        if head >= len(a.at) or head >= len(b.at) or at[a.stage] <= a.at[head] or at[b.stage] <= b.at[head]:
            return False
        if a.sends[head] == b.sends[head]:
            return False
        if a.messages[head] != b.messages[head]:
            mine, theirs = (str(self.schedule[e.stage][e.at[head]]) for e in (a, b))
            raise ScheduleError(f"{mine} of stage {a.stage} meets {theirs} of stage {b.stage}")
        return True

    def run(self, at: list[int], done: list[int], rng: random.Random | None = None) -> int:
        """Take transitions from (at, done), in place, until none is enabled; returns how many. Random with `rng`."""
        taken = 0
        # Candidates: stage s as s, communicator c as ~c. A transition can only enable those pushed after it.
        ready = list(range(len(at)))
        while ready:
            if rng is not None:
                pick = rng.randrange(len(ready))
                ready[pick], ready[-1] = ready[-1], ready[pick]
            what = ready.pop()
            if what >= 0:
                if not self.can_step(at, done, what):
                    continue
                comm = self.posts[what][at[what]]
                at[what] += 1
                ready.append(what)
                if comm >= 0:
                    ready.append(~comm)
            else:
                if not self.can_complete(at, done, ~what):
                    continue
                done[~what] += 1
                ready.append(what)
                ready += [end.stage for end in self.ends[~what]]
            taken += 1
        return taken

    def describe(self, at: list[int], done: list[int]) -> str:
        """What each unfinished stage waits for."""
        stuck = []
        for stage, here in enumerate(at):
            if here == self.lengths[stage]:
                continue
            for comm, n in self.needs[stage][here]:
                if done[comm] < n:
                    end = next(e for e in self.ends[comm] if e.stage == stage)
                    action = self.schedule[stage]
                    stuck.append(f"stage {stage} at {action[here]} awaits {action[end.at[n - 1]]}")
                    break
        return "; ".join(stuck) or "messages are left undelivered"


def _messages(schedule: Schedule, stage: int) -> np.ndarray:
    """A number for the message of each SEND and RECV in a stage's list, the same seen from both sides."""
    kind, chunk, i = schedule.table[stage].astype(np.int64).T
    g = chunk * schedule.stages + stage
    # Named by the sender's chunk: a received activation comes from the chunk before, a gradient from the next.
    g = np.where(kind == ActionKind.RECV_FORWARD, g - 1, np.where(kind == ActionKind.RECV_BACKWARD, g + 1, g))
    backward = (kind == ActionKind.SEND_BACKWARD) | (kind == ActionKind.RECV_BACKWARD)
    return (backward * schedule.chunks + g) * schedule.microbatches + i
