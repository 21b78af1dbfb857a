"""Registry of the values of `parallel.schedule`; builds schedules and proves them with the checker.

Training, planner, preflight and simulator all use `build_checked_schedule`, so that they neither run nor price a
schedule that the checker has not proven. Only memory estimates of many layouts skip the proof. A plugin adds a schedule
as follows; its function may use `core/schedule.py::schedule_computes`:

    def build_mine(stages, virtual_stages, microbatches, reduce_each_microbatch, micro_batch_group_size) -> Schedule:
    ...

    SCHEDULES.register("mine", ScheduleDefinition(build_mine))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from megascale.config import ParallelConfig
from megascale.config.registry import Registry
from megascale.core.checker import ScheduleError, check_schedule
from megascale.core.chunk_map import ChunkMap, Placement, make_chunk_map, round_robin
from megascale.core.schedule import (
    ActionKind,
    Schedule,
    build_1f1b,
    build_interleaved_1f1b,
    build_pipeline_schedule,
    without_overlap,
)
from megascale.errors import ConfigError, FitError

# Function of (stages, virtual_stages, microbatches, reduce_each_microbatch, micro_batch_group_size). The last is None
# if the schedule may choose the size of a group.
Builder = Callable[[int, int, int, bool, int | None], Schedule]


@dataclass(frozen=True)
class ScheduleDefinition:
    """A registered schedule.

    Attributes:
        placement: stage of each model chunk. Layers, groups and memory of a stage depend on the placement only.
    """

    build: Builder
    placement: Placement = round_robin


def _one_f_one_b(
    stages: int,
    virtual_stages: int,
    microbatches: int,
    reduce_each_microbatch: bool,
    micro_batch_group_size: int | None,
) -> Schedule:
    if virtual_stages > 1:
        raise FitError(
            f"parallel.schedule=1f1b has one chunk on each stage and parallel.virtual_stages={virtual_stages}; set "
            "--parallel.virtual_stages=1, or --parallel.schedule=interleaved"
        )
    return build_1f1b(stages, microbatches, reduce_each_microbatch)


SCHEDULES: Registry[ScheduleDefinition] = Registry(
    "parallel.schedule",
    {
        "auto": ScheduleDefinition(build_pipeline_schedule),
        "1f1b": ScheduleDefinition(_one_f_one_b),
        "interleaved": ScheduleDefinition(build_interleaved_1f1b),
    },
    home="megascale.core",
)


def chunk_map_of(parallel: ParallelConfig) -> ChunkMap:
    """Return the stages of model chunks under parallel.schedule. Raises ConfigError for an unknown name."""
    return make_chunk_map(parallel.pipeline, parallel.virtual_stages, SCHEDULES[parallel.schedule].placement)


@lru_cache(maxsize=64)
def build_schedule(
    name: str,
    stages: int,
    virtual_stages: int,
    microbatches: int,
    reduce_each_microbatch: bool = False,
    micro_batch_group_size: int | None = None,
    overlap: bool = True,
) -> Schedule:
    """Build the schedule `name` without proving it, for estimates of layouts that are not run.

    Args:
        reduce_each_microbatch: whether gradients are reduced in each backward (ZeRO-2), not only in a chunk's last one.
        overlap: whether transfers overlap with computes; if not, every compute awaits all earlier sends.

    Raises ConfigError for an unknown name, ScheduleError if the schedule has other sizes or reductions than requested.
    """
    definition = SCHEDULES[name]
    schedule = definition.build(stages, virtual_stages, microbatches, reduce_each_microbatch, micro_batch_group_size)
    sizes = (schedule.stages, schedule.virtual_stages, schedule.microbatches)
    requested = (stages, virtual_stages, microbatches)
    if sizes != requested:
        raise ScheduleError(
            f"parallel.schedule={name} made {sizes} stages, chunks per stage and micro-batches, but {requested} were "
            "requested; return a schedule of the sizes in the function's arguments"
        )
    if schedule.chunk_map != make_chunk_map(stages, virtual_stages, definition.placement):
        raise ScheduleError(
            f"parallel.schedule={name} made a schedule whose chunks are on stages {schedule.chunk_map.stage_of}, which "
            "its placement contradicts; give the schedule and its ScheduleDefinition the same placement"
        )
    for stage, table in enumerate(schedule.tables):
        reduced_microbatches = table[table[:, 0] == ActionKind.REDUCE_GRADS, 2]  # -1: the reduction of the whole step
        if ((reduced_microbatches >= 0) != reduce_each_microbatch).any():
            if reduce_each_microbatch:
                frequency = "once per step"
            else:
                frequency = "after each backward"
            raise ScheduleError(
                f"parallel.schedule={name} reduces gradients {frequency} on stage {stage}, which contradicts "
                "parallel.zero; follow reduce_each_microbatch in the function, or set "
                f"--parallel.zero={1 if reduce_each_microbatch else 2}"
            )
    if overlap:
        return schedule
    return without_overlap(schedule)


@lru_cache(maxsize=64)
def build_checked_schedule(
    name: str,
    stages: int,
    virtual_stages: int,
    microbatches: int,
    reduce_each_microbatch: bool = False,
    micro_batch_group_size: int | None = None,
    overlap: bool = True,
) -> Schedule:
    """Build a schedule as `build_schedule` does, and prove that it finishes for any message timing.

    Raises ScheduleError if the schedule can deadlock, and ConfigError if it can deadlock only without overlap.
    """
    schedule = build_schedule(
        name, stages, virtual_stages, microbatches, reduce_each_microbatch, micro_batch_group_size, overlap
    )
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        if overlap:
            raise
        check_schedule(replace(schedule, exposed=False))
        raise ConfigError(
            f"overlap.pipeline=false: {error}; its transfers need the overlap, so set --overlap.pipeline=true or "
            "another parallel.schedule"
        ) from None
    return schedule
