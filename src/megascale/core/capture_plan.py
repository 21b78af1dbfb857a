"""Plan of a stage's CUDA graphs: which captures the replays of a step need. No torch.

Micro-batches of a chunk that are in flight at the same time need captures with memory of their own. Captures differ in
chunk, in the index of the micro-batch among those in flight, and in whether the backward is the first one of the step,
which overwrites gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megascale.core.schedule import Action, ActionKind


@dataclass(frozen=True)
class Boundaries:
    """The micro-batches of a chunk that differ from all others in a step.

    Attributes:
        first_forward: micro-batch of the first forward, for which parameters may still be in flight.
        first_backward: micro-batch of the first backward, which overwrites gradients instead of adding to them.
        reduced_backwards: micro-batches whose backward reduces buckets.
    """

    first_forward: int
    first_backward: int
    reduced_backwards: frozenset[int]


def find_boundaries(actions: Sequence[Action]) -> dict[int, Boundaries]:
    """Return the boundaries of each chunk in a stage's list of actions."""
    forwards: dict[int, int] = {}
    backwards: dict[int, int] = {}
    reduced: dict[int, set[int]] = {}
    armed: set[int] = set()
    for kind, chunk, i in actions:
        if kind == ActionKind.FORWARD:
            forwards.setdefault(chunk, i)
        elif kind == ActionKind.REDUCE_GRADS:
            armed.add(chunk)
        elif kind == ActionKind.BACKWARD:
            backwards.setdefault(chunk, i)
            if chunk in armed:
                armed.discard(chunk)
                reduced.setdefault(chunk, set()).add(i)
    boundaries = {}
    for chunk, first_forward in forwards.items():
        boundaries[chunk] = Boundaries(first_forward, backwards[chunk], frozenset(reduced.get(chunk, ())))
    return boundaries


def reads_complete_state(boundaries: Boundaries, i: int) -> bool:
    """Return whether micro-batch `i` neither waits for the chunk's parameters nor reduces its gradients."""
    return i != boundaries.first_forward and i not in boundaries.reduced_backwards


def find_free_index(used_indices: Iterable[int]) -> int:
    """Return the smallest index, from 0, that is not in use."""
    used = set(used_indices)
    index = 0
    while index in used:
        index += 1
    return index


@dataclass(frozen=True)
class PlannedCapture:
    """A capture that a step needs.

    Attributes:
        microbatch: the first micro-batch of the step that the capture replays.
        flight_index: index of this micro-batch among the chunk's replayed micro-batches in flight.
    """

    chunk: int
    microbatch: int
    flight_index: int


@dataclass(frozen=True)
class CapturePlan:
    """The captures that a step needs.

    Attributes:
        captures: the captures in the order in which a step first replays them.
        precedes_step: whether the captures must be made before the step's first forward: the stage communicates with
            other stages, or an eager micro-batch is in flight when a step first replays one of the captures.
    """

    captures: tuple[PlannedCapture, ...]
    precedes_step: bool


def plan_captures(
    actions: Sequence[Action], boundaries: dict[int, Boundaries], can_replay: Callable[[int, int], bool]
) -> CapturePlan:
    """Return the captures that the replays of a stage's actions need.

    Args:
        boundaries: result of `find_boundaries` for the actions.
        can_replay: can_replay(chunk, micro-batch) returns whether the micro-batch is replayed. All others are eager.
    """
    eager: set[tuple[int, int]] = set()  # (chunk, micro-batch) in flight
    flight_indices: dict[tuple[int, int], int] = {}  # of replayed micro-batches in flight
    captures: dict[tuple[int, int, bool], PlannedCapture] = {}
    overlaps_eager = False
    # A capture may free memory, and the device then waits for all its transfers. Two stages would wait for each other.
    has_transfers = any(kind.is_send or kind.is_receive for kind, _, _ in actions)
    for kind, chunk, i in actions:
        if kind == ActionKind.BACKWARD:
            eager.discard((chunk, i))
            flight_indices.pop((chunk, i), None)
        elif kind == ActionKind.FORWARD and not can_replay(chunk, i):
            eager.add((chunk, i))
        elif kind == ActionKind.FORWARD:
            used_indices = [index for (used_chunk, _), index in flight_indices.items() if used_chunk == chunk]
            flight_index = find_free_index(used_indices)
            flight_indices[chunk, i] = flight_index
            key = (chunk, flight_index, i == boundaries[chunk].first_backward)
            if key not in captures:
                captures[key] = PlannedCapture(chunk, i, flight_index)
                overlaps_eager = overlaps_eager or bool(eager)
    precedes_step = bool(captures) and (has_transfers or overlaps_eager)
    return CapturePlan(tuple(captures.values()), precedes_step)
