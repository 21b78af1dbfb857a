"""Random schedules: any placement of chunks, whole or split backwards, computes in any order that data allows."""

from __future__ import annotations

import random
from collections.abc import Callable

from megascale.core.chunk_map import ChunkMap, make_chunk_map
from megascale.core.schedule import Action, ActionKind, Schedule, schedule_computes

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
BACKWARD_INPUT, BACKWARD_WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def random_placement(rng: random.Random, stages: int, virtual: int) -> Callable[[int, int], int]:
    """Return a placement that gives every stage as many chunks, in a random order."""
    order = [stage for stage in range(stages) for _ in range(virtual)]
    rng.shuffle(order)
    return lambda position, _: order[position]


def random_schedule(
    rng: random.Random, stages: int, virtual: int, microbatches: int, reduce_each: bool = False
) -> Schedule:
    """Return a schedule whose computes a random run of the data flow ordered."""
    placement = random_placement(rng, stages, virtual)
    chunk_map = make_chunk_map(stages, virtual, placement)
    split = {i: rng.random() < 0.5 for i in range(microbatches)}
    done: set[tuple[ActionKind, int, int]] = set()
    computes: list[list[Action]] = [[] for _ in range(stages)]
    pending = [
        (kind, position, i)
        for i in range(microbatches)
        for position in range(chunk_map.chunks)
        for kind in (FORWARD,) + tuple((BACKWARD_INPUT, BACKWARD_WEIGHT) if split[i] else (BACKWARD,))
    ]
    while pending:
        ready = [item for item in pending if _is_ready(item, done, chunk_map)]
        item = rng.choice(ready)
        pending.remove(item)
        done.add(item)
        kind, position, i = item
        computes[chunk_map.stage_of[position]].append(Action(kind, int(chunk_map.indices[position]), i))
    return schedule_computes(
        "random", stages, virtual, microbatches, computes, placement=placement, reduce_each_microbatch=reduce_each
    )


def _is_ready(item: tuple[ActionKind, int, int], done: set[tuple[ActionKind, int, int]], chunk_map: ChunkMap) -> bool:
    kind, position, i = item
    # Every chunk takes the micro-batches in order, or most schedules would mismatch messages.
    if i > 0 and not any(at == position and j == i - 1 and _alike(second, kind) for second, at, j in done):
        return False
    if kind == FORWARD:
        return position == 0 or (FORWARD, position - 1, i) in done
    if kind == BACKWARD_WEIGHT:
        return (BACKWARD_INPUT, position, i) in done
    has_gradient = position == chunk_map.chunks - 1 or (kind, position + 1, i) in done
    return has_gradient and (FORWARD, position, i) in done


def _alike(kind: ActionKind, second: ActionKind) -> bool:
    """Return whether two computes have the same message: both forwards, or both backwards of the input."""
    if second == BACKWARD_WEIGHT:
        return kind in (BACKWARD_WEIGHT, BACKWARD)
    return (kind == FORWARD) == (second == FORWARD) and kind != BACKWARD_WEIGHT
