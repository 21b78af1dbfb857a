"""Proof that a schedule runs: no deadlock for any message timing, every message matched, memory as stated.

Machine that is checked. Each stage is a process that walks its action list. Each communicator has two ends, each
end a FIFO of posted sends and receives. The machine is pessimistic about transport (*rendezvous*): a transfer
takes place only when the send is at the head of its FIFO and the matching receive at the head of the other end's.
Transitions:

- *step of a stage*: it passes its next action. SEND_* and RECV_* are posted (never blocks). FORWARD and BACKWARD
  need their own receive delivered, and, if they produce a message, the send `send_slots` messages earlier on the
  same channel delivered (its buffer is free). GATHER_PARAMS and REDUCE_GRADS are posted and never block.
- *delivery on a communicator*: the two heads are a send and a receive that face each other; both are taken off.

Why one maximal run decides for every timing. (1) An enabled transition stays enabled until it is taken: a step
waits only for deliveries, which are never undone; a pair of heads can only be removed by its own delivery. (2) Two
enabled transitions commute: steps of different stages touch different programs and different FIFO ends (appending
at the tail), deliveries touch different communicators, and a step appends at tails while a delivery removes heads.
So the system is strongly confluent (a Kahn network with bounded channels): by induction every maximal run takes the
same transitions and ends in the same state. If one run finishes, no order and no delay can make another one hang.
`explore` visits *all* interleavings of small schedules and the tests hold the argument against it; `check` makes a
single run, in an order drawn at random when a seed is given.

Data-parallel collectives are outside the stage's processes. All replicas of a stage hold the same list, so the run
of one replica, taken by all replicas in step, is a run of the whole; confluence then covers all others.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from megascale.core.schedule import Action, ActionKind, Schedule
from megascale.errors import MegascaleError

# Which communicator an action of a stage posts to. The default is the schedule's own channel.
CommunicatorOf = Callable[[Schedule, int, Action], Hashable]


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


def own_channel(schedule: Schedule, stage: int, action: Action) -> Hashable:
    """One communicator for each directed edge and direction of travel."""
    return schedule.channel(stage, action)


def rank_pair(schedule: Schedule, stage: int, action: Action) -> Hashable:
    """One communicator for each pair of stages, both ways: what torch gives unbatched P2P of one group."""
    channel = schedule.channel(stage, action)
    return frozenset((channel.source, channel.target))


def check(
    schedule: Schedule,
    send_slots: int | None = None,
    communicator: CommunicatorOf = own_channel,
    seed: int | None = None,
) -> Report:
    """Prove that `schedule` finishes for any message timing and computes every micro-batch in order.

    Args:
        send_slots: sends of a channel that may be under way; default: what the schedule asks for.
        communicator: how messages share communicators.
        seed: take enabled transitions in a random order drawn from this seed.

    Raises ScheduleError naming what each stuck stage waits for, or the first wrong action.
    """
    check_order(schedule)
    machine = Machine(schedule, send_slots, communicator)
    rng = random.Random(seed) if seed is not None else None
    taken = machine.run(rng)
    if not machine.finished:
        raise ScheduleError(f"the schedule {schedule.name} deadlocks: {machine.describe()}")
    return Report(machine.delivered_total, tuple(schedule.in_flight(s) for s in range(schedule.stages)), taken)


def check_order(schedule: Schedule) -> None:
    """Check each stage's list by itself. ScheduleError at the first fault.

    Every micro-batch runs forward and backward once in every chunk, forward before backward; each compute has the
    receive it needs before it and the send it owes after it, and no other; parameters are gathered once before a
    chunk's first forward and gradients reduced after its last backward.
    """
    v, m, p = schedule.virtual, schedule.microbatches, schedule.stages
    for stage in range(p):
        seen: set[Action] = set()
        where = f"stage {stage} of the schedule {schedule.name}"
        for action in schedule[stage]:
            if action in seen:
                raise ScheduleError(f"{where} has {action} twice")
            if not 0 <= action.chunk < v or not -1 <= action.microbatch < m:
                raise ScheduleError(f"{where} has {action}, outside {v} chunks and {m} micro-batches")
            for needed in _before(schedule, stage, action):
                if needed not in seen:
                    raise ScheduleError(f"{where} has {action} before {needed}")
            seen.add(action)
        missing = _required(schedule, stage) - seen
        extra = {a for a in seen - _required(schedule, stage) if a.kind != ActionKind.REDUCE_GRADS}
        if missing or extra:
            word, example = ("lacks", min(missing)) if missing else ("has needless", min(extra))
            raise ScheduleError(f"{where} {word} {example}")
        _check_reductions(schedule, stage, where)


def _has_input(schedule: Schedule, stage: int, chunk: int, forward: bool) -> bool:
    """Whether a compute takes a message: not the model's first forward nor its last backward, nor on one stage."""
    g = schedule.global_chunk(stage, chunk)
    return schedule.stages > 1 and g != (0 if forward else schedule.chunks - 1)


def _has_output(schedule: Schedule, stage: int, chunk: int, forward: bool) -> bool:
    g = schedule.global_chunk(stage, chunk)
    return schedule.stages > 1 and g != (schedule.chunks - 1 if forward else 0)


def _before(schedule: Schedule, stage: int, action: Action) -> list[Action]:
    """Actions of the same stage that must stand earlier in its list."""
    kind, chunk, i = action
    needed: list[Action] = []
    if kind == ActionKind.FORWARD:
        needed.append(Action(ActionKind.GATHER_PARAMS, chunk, -1))
        if _has_input(schedule, stage, chunk, True):
            needed.append(Action(ActionKind.RECV_FORWARD, chunk, i))
        if schedule.stages == 1 and chunk > 0:
            needed.append(Action(ActionKind.FORWARD, chunk - 1, i))
    elif kind == ActionKind.BACKWARD:
        needed.append(Action(ActionKind.FORWARD, chunk, i))
        if _has_input(schedule, stage, chunk, False):
            needed.append(Action(ActionKind.RECV_BACKWARD, chunk, i))
        if schedule.stages == 1 and chunk < schedule.virtual - 1:
            needed.append(Action(ActionKind.BACKWARD, chunk + 1, i))
    elif kind == ActionKind.SEND_FORWARD:
        needed.append(Action(ActionKind.FORWARD, chunk, i))
    elif kind == ActionKind.SEND_BACKWARD:
        needed.append(Action(ActionKind.BACKWARD, chunk, i))
    return needed


def _required(schedule: Schedule, stage: int) -> set[Action]:
    """All actions that a stage must have, REDUCE_GRADS aside."""
    required = {Action(ActionKind.GATHER_PARAMS, c, -1) for c in range(schedule.virtual)}
    for c in range(schedule.virtual):
        kinds = [ActionKind.FORWARD, ActionKind.BACKWARD]
        kinds += [ActionKind.RECV_FORWARD] * _has_input(schedule, stage, c, True)
        kinds += [ActionKind.RECV_BACKWARD] * _has_input(schedule, stage, c, False)
        kinds += [ActionKind.SEND_FORWARD] * _has_output(schedule, stage, c, True)
        kinds += [ActionKind.SEND_BACKWARD] * _has_output(schedule, stage, c, False)
        required |= {Action(kind, c, i) for kind in kinds for i in range(schedule.microbatches)}
    return required


def _check_reductions(schedule: Schedule, stage: int, where: str) -> None:
    """Gradients of a chunk: reduced once after its last backward, or once after each backward."""
    backwards = [0] * schedule.virtual
    reduced = [0] * schedule.virtual
    for kind, chunk, i in schedule[stage]:
        backwards[chunk] += kind == ActionKind.BACKWARD
        if kind == ActionKind.REDUCE_GRADS:
            reduced[chunk] += 1
            due = schedule.microbatches if i < 0 else reduced[chunk]
            if backwards[chunk] != due:
                raise ScheduleError(f"{where} reduces gradients of chunk {chunk} after {backwards[chunk]} backwards")
    for chunk, count in enumerate(reduced):
        if count not in (1, schedule.microbatches):
            raise ScheduleError(f"{where} reduces gradients of chunk {chunk} {count} times")


class Machine:
    """The state of a run under rendezvous semantics. `steps` and `deliveries` are the enabled transitions."""

    def __init__(self, schedule: Schedule, send_slots: int | None, communicator: CommunicatorOf) -> None:
        self.schedule = schedule
        self.programs = tuple(schedule[s] for s in range(schedule.stages))
        self.at = [0] * schedule.stages
        # (communicator, end) -> FIFO of (is_send, message) where a message is (channel, chunk and micro-batch).
        self.fifo: dict[tuple[Hashable, int], deque[tuple[bool, Hashable]]] = {}
        self.ends: dict[Hashable, tuple[int, int]] = {}
        self.delivered_total = 0
        self._communicator = communicator
        self._sends: list[dict[Hashable, list[Hashable]]] = [{} for _ in self.programs]
        self._delivered: set[Hashable] = set()
        self._slots = schedule.send_slots if send_slots is None else send_slots

    @property
    def finished(self) -> bool:
        """All lists walked and all messages delivered."""
        return all(a == len(p) for a, p in zip(self.at, self.programs, strict=True)) and not any(self.fifo.values())

    def message(self, stage: int, action: Action) -> Hashable:
        """Identity of a message, the same seen from both sides: the sender's channel and action."""
        if action.kind.is_send:
            return (stage, action)
        return self.schedule.peer(stage, action)

    def waits_for(self, stage: int) -> Hashable | None:
        """The message whose delivery the stage's next action awaits, or None if it may go on."""
        action = self.programs[stage][self.at[stage]]
        if not action.kind.is_compute:
            return None
        forward = action.kind == ActionKind.FORWARD
        if _has_input(self.schedule, stage, action.chunk, forward):
            kind = ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD
            message = self.message(stage, action._replace(kind=kind))
            if message not in self._delivered:
                return message
        if _has_output(self.schedule, stage, action.chunk, forward):
            kind = ActionKind.SEND_FORWARD if forward else ActionKind.SEND_BACKWARD
            sent = self._sends[stage].get(kind, [])
            if len(sent) >= self._slots and sent[-self._slots] not in self._delivered:
                return sent[-self._slots]
        return None

    def can_step(self, stage: int) -> bool:
        """Whether the stage may pass its next action."""
        return self.at[stage] < len(self.programs[stage]) and self.waits_for(stage) is None

    def step(self, stage: int) -> Hashable | None:
        """Pass the next action of a stage; returns the communicator posted to, if any."""
        action = self.programs[stage][self.at[stage]]
        self.at[stage] += 1
        if not (action.kind.is_send or action.kind.is_receive):
            return None
        key = self._communicator(self.schedule, stage, action)
        channel = self.schedule.channel(stage, action)
        self.ends[key] = (min(channel.source, channel.target), max(channel.source, channel.target))
        message = self.message(stage, action)
        if action.kind.is_send:
            self._sends[stage].setdefault(action.kind, []).append(message)
        self.fifo.setdefault((key, stage), deque()).append((action.kind.is_send, message))
        return key

    def can_deliver(self, key: Hashable) -> bool:
        """Whether a send faces a receive at the heads of both ends. ScheduleError if they are not one message."""
        a, b = (self.fifo.get((key, end)) for end in self.ends[key])
        if not a or not b or a[0][0] == b[0][0]:
            return False
        if a[0][1] != b[0][1]:
            raise ScheduleError(f"communicator {key} pairs message {a[0][1]} with {b[0][1]}")
        return True

    def deliver(self, key: Hashable) -> tuple[int, int]:
        """Complete the transfer at the heads; returns the two stages that it may free."""
        ends = self.ends[key]
        for end in ends:
            _, message = self.fifo[(key, end)].popleft()
        self._delivered.add(message)
        self.delivered_total += 1
        return ends

    def run(self, rng: random.Random | None = None) -> int:
        """Take transitions until none is enabled; returns how many. Random order with `rng`."""
        taken = 0
        stages = list(range(self.schedule.stages))
        ready: list[tuple[bool, Hashable]] = [(True, s) for s in stages]
        while ready:
            if rng is not None:
                pick = rng.randrange(len(ready))
                ready[pick], ready[-1] = ready[-1], ready[pick]
            is_step, what = ready.pop()
            if is_step:
                stage = int(what)  # type: ignore[call-overload]
                if not self.can_step(stage):
                    continue
                key = self.step(stage)
                ready.append((True, stage))
                if key is not None:
                    ready.append((False, key))
            else:
                if not self.can_deliver(what):
                    continue
                # Either end may have more at its head, and either stage may have waited for this message.
                ready.append((False, what))
                ready += [(True, end) for end in self.deliver(what)]
            taken += 1
        return taken

    def describe(self) -> str:
        """What each unfinished stage waits for."""
        stuck = []
        for stage, program in enumerate(self.programs):
            if self.at[stage] < len(program):
                source, sent = self.waits_for(stage)  # type: ignore[misc]
                stuck.append(f"stage {stage} at {program[self.at[stage]]} awaits {sent} of stage {source}")
        return "; ".join(stuck) or "messages are left undelivered"


def explore(
    schedule: Schedule,
    send_slots: int | None = None,
    communicator: CommunicatorOf = own_channel,
    limit: int = 2_000_000,
) -> tuple[int, set[bool]]:
    """Visit every state that any interleaving of steps and deliveries can reach. For small schedules.

    Returns (number of states, outcomes), where outcomes holds True if some maximal run finishes and False if some
    run hangs. ScheduleError if messages mismatch or more than `limit` states are met.
    """
    machine = Machine(schedule, send_slots, communicator)
    start = _freeze(machine)
    seen, todo, outcomes = {start}, [start], set()
    while todo:
        state = todo.pop()
        moves: list[tuple[bool, Hashable]] = []
        _thaw(machine, state)
        moves += [(True, s) for s in range(schedule.stages) if machine.can_step(s)]
        moves += [(False, key) for key in machine.ends if machine.can_deliver(key)]
        if not moves:
            outcomes.add(machine.finished)
        for is_step, what in moves:
            _thaw(machine, state)
            if is_step:
                machine.step(what)  # type: ignore[arg-type]
            else:
                machine.deliver(what)
            after = _freeze(machine)
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if len(seen) > limit:
            raise ScheduleError(f"more than {limit} states; explore smaller schedules")
    return len(seen), outcomes


State = tuple[tuple[int, ...], frozenset[Hashable]]


def _freeze(machine: Machine) -> State:
    """A state is where each stage stands and what has been delivered: FIFOs follow from both."""
    return tuple(machine.at), frozenset(machine._delivered)


def _thaw(machine: Machine, state: State) -> None:
    at, delivered = state
    machine.at = [0] * len(at)
    machine.fifo, machine.ends = {}, {}
    machine._sends = [{} for _ in at]
    for stage, count in enumerate(at):
        for _ in range(count):
            machine.step(stage)
    machine._delivered = set(delivered)
    machine.delivered_total = len(delivered)
    for key, queue in machine.fifo.items():
        machine.fifo[key] = deque(entry for entry in queue if entry[1] not in delivered)
