"""Search for a split of layers over chunks that takes a shorter step than the default split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megascale.core.part_inventories import BLOCK_PARTS
from megascale.core.replay import replay_schedule
from megascale.simulate.planner.layout_figures import LayoutFigures

_MAX_REPLAYED_ACTIONS = 4_000_000  # actions of all splits that one replay compares, which bounds its memory
_MIN_MOVE_SAVING = 1e-3  # share of a step that each move of layers must save
_MIN_SAVING = 0.005  # share of a step that a proposed split must save


class FasterSplit(NamedTuple):
    """A split of layers with a shorter step.

    Attributes:
        layers: layers of each chunk, in model order; half layers occur if blocks can be divided.
    """

    layers: list[int | float]
    saved_share: float


class _Move(NamedTuple):
    """A split after a move of layers, and the time of its step in the unit of `LayoutFigures.timeline`."""

    split: list[int | float]
    time: float


def find_faster_split(figures: LayoutFigures) -> FasterSplit | None:
    """Return a split of layers with a shorter step than the layout's; None if the search does not find one.

    The default split balances the stages' work. But the first stage begins first and ends last, while the others wait
    for its first results, so more work on the first stage fills the bubble. The search moves one layer at a time off
    the busiest stage and replays the schedule. Then it moves half layers, if blocks can be divided. A better split may
    exist.
    """
    stages = figures.layout.grid.pipeline
    split = [chunk.layer_count for chunk in figures.layout.layers]
    if stages == 1:
        return None
    default_time = float(figures.timeline.makespan)
    shortest_time = default_time
    move_sizes: tuple[float, ...] = (1,)
    if BLOCK_PARTS[figures.config.model.block].can_split:
        move_sizes = (1, 0.5)
    for size in move_sizes:
        for _ in range(stages):
            move = _find_best_move(figures, split, size)
            if move is None or move.time > shortest_time * (1 - _MIN_MOVE_SAVING):
                break
            split, shortest_time = move
    if shortest_time < default_time * (1 - _MIN_SAVING):
        return FasterSplit(split, 1 - shortest_time / default_time)
    return None


def _find_best_move(figures: LayoutFigures, split: Sequence[int | float], size: float) -> _Move | None:
    """Return the best split after a move of `size` layers off the busiest stage; None if no move is possible."""
    stages = figures.layout.grid.pipeline
    graph = figures.timeline.graph
    forward, backward = figures.compute_work(split)
    busiest_stage = int(np.argmax((forward + backward).sum(axis=1)))
    # The search assumes that chunk c is on stage c % p.
    sources = [chunk for chunk in range(busiest_stage, len(split), stages) if split[chunk] > size]
    # Later chunks first, since later stages have fewer micro-batches in flight.
    targets = [chunk for chunk in reversed(range(len(split))) if chunk % stages != busiest_stage]
    move_count = len(sources) * len(targets)
    # With many moves, only every n-th is tried.
    stride = 1 + move_count * graph.action_count // _MAX_REPLAYED_ACTIONS
    candidates = []
    for index in range(0, move_count, stride):
        candidate = list(split)
        candidate[sources[index // len(targets)]] -= size
        candidate[targets[index % len(targets)]] += size
        # Write whole numbers of layers as integers.
        candidates.append([round(count) if count == round(count) else count for count in candidate])
    if not candidates:
        return None
    durations = []
    for candidate in candidates:
        forward, backward = figures.compute_work(candidate)
        durations.append(graph.durations(forward, backward))
    times = replay_schedule(graph, np.stack(durations, axis=-1)).makespan
    return _Move(candidates[int(np.argmin(times))], float(times.min()))
