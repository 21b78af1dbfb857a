"""The schedules that `parallel.schedule` may name, and the one way to one: made, compared with what was asked, checked.

Training, planner, preflight and simulator all take theirs from `checked_schedule`, so none runs or prices a list of
actions that the checker has not proven (only how much memory each of many layouts would take is asked before). Another
package adds one:

    def mine(stages, virtual, microbatches, reduce_each, micro_batch_group_size) -> Schedule: ...

    SCHEDULES.register("mine", mine)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from megascale.config.registry import Registry
from megascale.core.checker import ScheduleError, check_schedule
from megascale.core.schedule import (
    ActionKind,
    Schedule,
    interleaved_1f1b,
    one_f_one_b,
    pipeline_schedule,
    without_overlap,
)
from megascale.errors import FitError

# Of (stages, virtual, microbatches, reduce_each, micro_batch_group_size); the last is None where the length of a
# group is left to the schedule.
Maker = Callable[[int, int, int, bool, int | None], Schedule]


def _one_f_one_b(
    stages: int, virtual: int, microbatches: int, reduce_each: bool, micro_batch_group_size: int | None
) -> Schedule:
    if virtual > 1:
        raise FitError(
            f"parallel.schedule=1f1b has one chunk on each stage and parallel.virtual_stages={virtual}; set "
            "--parallel.virtual_stages=1, or --parallel.schedule=interleaved"
        )
    return one_f_one_b(stages, microbatches, reduce_each)


SCHEDULES: Registry[Maker] = Registry(
    "parallel.schedule",
    {"auto": pipeline_schedule, "1f1b": _one_f_one_b, "interleaved": interleaved_1f1b},
    home="megascale.core",
)


@lru_cache(maxsize=64)
def made_schedule(
    name: str,
    stages: int,
    virtual: int,
    microbatches: int,
    reduce_each: bool = False,
    micro_batch_group_size: int | None = None,
    overlap: bool = True,
) -> Schedule:
    """The schedule under `name`, not proven yet: for those who size many layouts and run none.

    Args:
        reduce_each: a reduction for each backward (ZeRO-2) instead of one for each chunk's last.
        overlap: False: every compute awaits what was sent before it.

    Raises ConfigError for an unknown name, ScheduleError if the list is not what was asked for.
    """
    schedule = SCHEDULES[name](stages, virtual, microbatches, reduce_each, micro_batch_group_size)
    made, asked = (schedule.stages, schedule.virtual_stages, schedule.microbatches), (stages, virtual, microbatches)
    if made != asked:
        raise ScheduleError(
            f"parallel.schedule={name} made {made} stages, chunks a stage and micro-batches where {asked} were asked "
            "for; return a schedule of the sizes that the function is given"
        )
    for stage, table in enumerate(schedule.table):
        microbatch = table[table[:, 0] == ActionKind.REDUCE_GRADS, 2]
        if ((microbatch >= 0) != reduce_each).any():
            raise ScheduleError(
                f"parallel.schedule={name} reduces gradients {'once a step' if reduce_each else 'after each backward'}"
                f" on stage {stage}, which does not go with parallel.zero; use what reduce_each says, or set "
                f"--parallel.zero={1 if reduce_each else 2}"
            )
    return schedule if overlap else without_overlap(schedule)


@lru_cache(maxsize=64)
def checked_schedule(
    name: str,
    stages: int,
    virtual: int,
    microbatches: int,
    reduce_each: bool = False,
    micro_batch_group_size: int | None = None,
    overlap: bool = True,
) -> Schedule:
    """As `made_schedule`, proven by the checker for any message timing; ScheduleError if it hangs."""
    schedule = made_schedule(name, stages, virtual, microbatches, reduce_each, micro_batch_group_size, overlap)
    check_schedule(schedule)
    return schedule
