"""Oracles for schedules and their checker: every interleaving of small schedules, and a closed form."""

from __future__ import annotations

from collections.abc import Hashable

from megascale.core.checker import SEND_SLOTS, Channel, CommunicatorOf, Machine, ScheduleError, channel_communicator
from megascale.core.schedule import Schedule, list_group_sizes


def rank_pair(channel: Channel) -> Hashable:
    """One communicator for each pair of stages, both ways: what torch gives unbatched P2P of one group."""
    return frozenset((channel.source, channel.target))


def explore(
    schedule: Schedule,
    communicator: CommunicatorOf = channel_communicator,
    send_slots: int = SEND_SLOTS,
    limit: int = 2_000_000,
) -> tuple[int, set[bool]]:
    """Visit every state that any interleaving of steps and deliveries can reach. For small schedules.

    Returns (number of states, outcomes), where outcomes holds True if some maximal run finishes and False if some
    run hangs. ScheduleError if messages mismatch or more than `limit` states are met.
    """
    machine = Machine(schedule, communicator, send_slots)
    first = machine.start()
    stages = len(first[0])
    observed = {tuple(first[0]) + tuple(first[1])}
    todo = [first]
    outcomes = set()
    while todo:
        at, done = todo.pop()
        moves = [s for s in range(stages) if machine.can_step(at, done, s)]
        moves += [~c for c in range(len(done)) if machine.can_complete(at, done, c)]
        if not moves:
            outcomes.add(machine.is_finished(at, done))
        for subject in moves:
            after = (at.copy(), done.copy())
            after[subject < 0][~subject if subject < 0 else subject] += 1
            key = tuple(after[0]) + tuple(after[1])
            if key not in observed:
                observed.add(key)
                todo.append(after)
        if len(observed) > limit:
            raise ScheduleError(f"more than {limit} states; explore smaller schedules")
    return len(observed), outcomes


def in_flight_bound(
    stages: int, virtual: int, microbatches: int, stage: int, micro_batch_group_size: int | None = None
) -> int:
    """Closed form of `build_pipeline_schedule(...).in_flight(stage)`, in chunk-forwards."""
    if virtual == 1:
        return min(microbatches, stages - stage)
    group = max(list_group_sizes(stages, microbatches, micro_batch_group_size))
    return min(virtual * microbatches, (virtual - 1) * group + 2 * (stages - 1 - stage) + 1)
