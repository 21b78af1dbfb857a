"""Interval of replays (train/replay_check.py) with resilience.replay_interval=auto, and layouts without replays.

A check replays one micro-batch, traces two, and checks sums, state and update. In units of the time of a micro-batch
(forward and backward) all of it took CHECK_TIME where it was measured (docs/silent-corruption.md). A step takes at
least the time of its micro-batches, so with m of them per replica an interval N costs at most CHECK_TIME / (m N).
"""

from __future__ import annotations

import math

from megascale.config import Config
from megascale.core.grid import Grid
from megascale.core.inventory import has_experts

MAX_COST = 0.01  # mean share of a step's time that checks may take
MIN_INTERVAL = 50  # steps; a fault that stays is found within them
# In units of a micro-batch's time. A check took 23.6% of a step of 16 micro-batches on two H200s, and 39.3% of a step
# of 8 micro-batches on four.
CHECK_TIME = 3.8
# Checks of smaller micro-batches take longer relative to these, because sums over weights and launches do not shrink.
MARGIN = 2.0


def compute_interval(microbatches: int) -> int:
    """Return the smallest interval, of at least MIN_INTERVAL, whose checks cost at most MAX_COST by the estimate.

    Args:
        microbatches: micro-batches per replica and step.
    """
    return max(MIN_INTERVAL, lengthen_interval(MARGIN * CHECK_TIME / microbatches))


def lengthen_interval(check_time: float) -> int:
    """Return the smallest interval with which checks cost at most MAX_COST.

    Args:
        check_time: additional time of a checked step, in units of a step.
    """
    # A quotient such as 0.07 / 0.01 is slightly above the whole number in floating point.
    return math.ceil(round(check_time / MAX_COST, 6))


def list_unsupported_settings(config: Config, grid: Grid) -> list[tuple[str, str]]:
    """Return the settings with which replicas cannot replay each other's micro-batches, each with its remedy."""
    unsupported = []
    if grid.size("slice") > 1:
        unsupported.append(("parallel.experts_over=context", "--parallel.experts_over=tensor"))
    for axis in ("expert", "replicate"):
        if grid.size(axis) > 1:
            unsupported.append((f"parallel.{axis}={grid.size(axis)}", f"--parallel.{axis}=1"))
    if config.resilience.continue_replicas:
        unsupported.append(("resilience.continue_replicas=true", "--resilience.continue_replicas=false"))
    return unsupported


def explain_checked_step_cost(config: Config, grid: Grid) -> str:
    """Return what a checked step lacks if the other steps replay CUDA graphs, or "" if it costs little."""
    if config.parallel.zero >= 2 and grid.shards > 1:
        return f"a checked step would run without CUDA graphs (parallel.zero={config.parallel.zero})"
    if has_experts(config.model):
        return "a checked step would run without CUDA graphs (model.mlp=experts)"
    return ""


def may_replay_with_graphs(config: Config, grid: Grid) -> bool:
    """Return whether replicas may replay each other's micro-batches while chunks run as CUDA graphs."""
    if config.resilience.replay_interval == "auto" and explain_checked_step_cost(config, grid):
        return False
    return may_replay(config, grid)


def may_replay(config: Config, grid: Grid) -> bool:
    """Return whether replicas may replay each other's micro-batches. A trainer may still find an obstacle."""
    if grid.replicas < 2 or config.resilience.replay_interval == 0:
        return False
    return config.requested_determinism is not False and not list_unsupported_settings(config, grid)
