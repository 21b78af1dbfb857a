"""Time of each rank in each step by category, read from roll-ups into arrays [ranks, steps].

A rank's busy time is its step without the waits for other ranks, which all wait for the busiest rank:

    busy = compute + update + outside + samples + garbage + queued

    compute     forward and backward
    update      the optimizer
    outside     time outside of all actions, such as launching
    samples     waiting for samples from the loader
    garbage     Python's garbage collection
    queued      the rank's thread was ready to run, but other processes occupied the processor

On a rank that computes on its host, the actions contain the queued time, so it is subtracted from them. On a rank with
a GPU the cost of queued time is unknown, so it counts as zero. A roll-up holds the sums of a rank's spans in a step by
action and axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.core.calls import MAX_RANKS
from megascale.core.spans import BACKWARD_LABELS, COMPUTE_LABELS
from megascale.errors import ConfigError, DataError
from megascale.observe.analysis.run_steps import parse_step_range
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]

CATEGORIES = ("compute", "update", "outside", "samples", "garbage", "queued")
HOST_CATEGORIES = ("compute", "update", "outside")  # categories that may contain queued time
AXES = ("tensor", "context", "pipeline", "data", "world", "stage", "embedding")
MIN_DEFAULT_STEPS = 50  # smallest number of steps in the default window
_MAX_DEFAULT_STEPS = 1000
_WARM_UP_STEPS = 2
_MINUTE_NS = 60e9
_SILENT_NS = 10e9  # a rank without roll-ups for this long is silent; well above the delay of roll-ups

_BACKWARD = f"action IN ({', '.join(map(repr, BACKWARD_LABELS))})"
_COMPUTE = f"(action = 'forward' OR {_BACKWARD})"
# SQL aggregates over the roll-ups of a rank and step, by name of the result's column. `total_ns` is the time of an
# action, `waited_ns` the waits within it, `host_ns` its time on the host.
_SUMS = {
    "step_total": "sum(total_ns) FILTER (WHERE action = 'step')",
    "step_waited": "sum(waited_ns) FILTER (WHERE action = 'step')",
    "compute": f"sum(total_ns - waited_ns) FILTER (WHERE {_COMPUTE})",
    "compute_total": f"sum(total_ns) FILTER (WHERE {_COMPUTE})",
    "host": f"sum(host_ns) FILTER (WHERE {_COMPUTE})",
    "count": f"sum(count) FILTER (WHERE {_COMPUTE})",
    "forward": "sum(total_ns - waited_ns) FILTER (WHERE action = 'forward')",
    "backward": f"sum(total_ns - waited_ns) FILTER (WHERE {_BACKWARD})",
    "update": "sum(total_ns - waited_ns) FILTER (WHERE action = 'optimizer')",
    "samples": "sum(total_ns) FILTER (WHERE action = 'data_wait')",
    "garbage": "sum(total_ns) FILTER (WHERE action = 'garbage')",
    "pauses": "sum(total_ns) FILTER (WHERE action = 'garbage_pause')",
    "pause_count": "sum(count) FILTER (WHERE action = 'garbage_pause')",
    "queue": "sum(total_ns) FILTER (WHERE action = 'processor_wait')",
    "retries": "sum(count) FILTER (WHERE action = 'allocator_retry')",
    "stall": "sum(total_ns) FILTER (WHERE action = 'checkpoint_stall')",
    "reductions_wait": "sum(waited_ns) FILTER (WHERE action = 'finish_reductions')",
    "first": "min(first_ns) FILTER (WHERE action = 'step' AND first_ns > 0)",
    "last": "max(last_ns) FILTER (WHERE action = 'step')",
} | {f"wait_{axis}": f"sum(total_ns) FILTER (WHERE action = 'wait' AND axis = '{axis}')" for axis in AXES}
# Columns that are no durations.
_TIMESTAMPS = ("first", "last")
_COUNTS = ("count", "pause_count", "retries")
# Actions that the aggregates use.
_ACTIONS = (
    *COMPUTE_LABELS, "optimizer", "step", "wait", "data_wait", "garbage", "garbage_pause", "allocator_retry",
    "processor_wait", "checkpoint_stall", "finish_reductions",
)  # fmt: skip


@dataclass(frozen=True)
class RankTimes:
    """Times of ranks by step, float64 [ranks, steps] in seconds; NaN where a rank has no roll-ups of a step.

    Attributes:
        ranks, steps: their numbers, ascending.
        attempt: number of the run's attempt.
        coordinates: tensor, pipeline and data coordinate of each rank, int [ranks, 3]; -1 if not recorded.
        host, device, hostname: location of each rank.
        seconds: duration of the step and of the planned garbage collection after it.
        categories: busy seconds by name of CATEGORIES.
        waits: seconds of waiting for other ranks, by axis.
        details: further figures by column of the query, such as "host" (the host's time in computes), "first" and
            "last" (begin and end of the step in nanoseconds on the common clock), "retries" (a count).
    """

    ranks: Array
    steps: Array
    attempt: int
    coordinates: Array
    host: Array
    device: list[str]
    hostname: list[str]
    seconds: Array
    categories: dict[str, Array]
    waits: dict[str, Array]
    details: dict[str, Array]

    @property
    def busy(self) -> Array:
        """Busy time of each rank, [ranks, steps]."""
        return np.asarray(sum(self.categories.values()))

    @property
    def running(self) -> Array:
        """Busy time without the time that other processes took, [ranks, steps]."""
        return np.asarray(self.busy - self.categories["queued"])

    @property
    def peer_groups(self) -> Array:
        """Group number of each rank, [ranks].

        Ranks of a group have the same stage, the same device model and the same number of computes per step.
        """
        compute_counts = np.nan_to_num(np.nanmax(self.details["count"], 1)).astype(np.int64)
        stages = self.coordinates[:, 1]
        keys = list(zip(stages.tolist(), self.device, compute_counts.tolist(), strict=True))
        numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
        return np.array([numbers[key] for key in keys])

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the job without roll-ups in these steps.

        The job has as many ranks as the largest coordinates of the recorded ranks give, and at least the highest rank.
        """
        recorded = self.coordinates[(self.coordinates >= 0).all(1)]
        world = int(self.ranks.max()) + 1
        if len(recorded):
            world = max(world, math.prod((recorded.max(0) + 1).tolist()))
        return sorted(set(range(min(world, MAX_RANKS))) - set(self.ranks.tolist()))

    @property
    def silent_ranks(self) -> dict[int, int]:
        """Last recorded step by rank, of the ranks whose newest roll-up is 10 seconds older than the job's newest."""
        is_recorded = self.details["last"] > 0
        newest_ns = np.where(is_recorded, self.details["last"], 0.0).max(1)
        silent = np.flatnonzero(newest_ns < newest_ns.max() - _SILENT_NS)
        return {int(self.ranks[r]): int(self.steps[is_recorded[r]].max(initial=0)) for r in silent}

    def describe_position(self, index: int) -> str:
        """Return the coordinates of the rank at `index` in `ranks` as text."""
        tensor, stage, data = self.coordinates[index]
        if stage >= 0:
            return f"stage {stage}, tensor {tensor}, data {data}"
        return "coordinates unknown"


def choose_window(tables: SpanTables, step_range: str = "", last: int | None = None) -> tuple[int, int, int]:
    """Choose the steps to analyse.

    Raises DataError if the run has no roll-ups, and ConfigError if the steps of `step_range` have none.

    Args:
        step_range: steps such as "7-90", in their newest attempt. Empty: the newest steps of the newest attempt without
            its first two, which are warm-up.
        last: number of newest steps, without `step_range`. None: the steps of the last minute, but at least
            MIN_DEFAULT_STEPS and at most 1,000.

    Returns:
        Attempt, first step and last step.
    """
    rows = tables.query(
        "SELECT attempt, step, max(last_ns) AS end_ns FROM rollups WHERE action = 'step' GROUP BY ALL "
        "ORDER BY attempt, step"
    )
    attempts, steps = rows["attempt"], rows["step"]
    if not len(steps):
        raise DataError(f"{tables.folder} holds no roll-ups of steps yet; they arrive some seconds after the steps")
    if step_range:
        first_step, last_step = parse_step_range(step_range)
        mask = (steps >= first_step) & (steps <= last_step)
        if not mask.any():
            raise ConfigError(f"--steps={step_range}: roll-ups exist for steps {steps.min()} to {steps.max()} only")
        newest_attempt = attempts[mask].max()
        mask &= attempts == newest_attempt
        return int(newest_attempt), int(steps[mask].min()), int(steps[mask].max())
    newest_attempt = attempts.max()
    steps = steps[attempts == newest_attempt]
    end_times = rows["end_ns"][attempts == newest_attempt]
    if len(steps) > _WARM_UP_STEPS:
        steps = steps[_WARM_UP_STEPS:]
        end_times = end_times[_WARM_UP_STEPS:]
    if last is None:
        steps_of_last_minute = int((end_times > end_times[-1] - _MINUTE_NS).sum())
        last = min(_MAX_DEFAULT_STEPS, max(MIN_DEFAULT_STEPS, steps_of_last_minute))
    return int(newest_attempt), int(steps[-last:][0]), int(steps[-1])


def read_rank_times(tables: SpanTables, attempt: int, first: int, last: int) -> RankTimes:
    """Return the ranks' times in the steps `first` to `last`, NaN where a rank has no roll-ups yet.

    Raises DataError if these steps have no roll-ups.
    """
    sums = ", ".join(f"({expression})::DOUBLE AS {name}" for name, expression in _SUMS.items())
    rows = tables.query(
        f"SELECT rank, step, {sums} FROM rollups WHERE attempt = ? AND step BETWEEN ? AND ? AND action IN "
        f"({', '.join(repr(name) for name in _ACTIONS)}) GROUP BY rank, step",
        [attempt, first, last],
    )
    ranks, rank_index = np.unique(rows["rank"], return_inverse=True)
    steps, step_index = np.unique(rows["step"], return_inverse=True)
    if not len(ranks):
        raise DataError(f"{tables.folder} holds no roll-ups of steps {first} to {last}")
    details = {}
    for name in _SUMS:
        values = np.full((len(ranks), len(steps)), np.nan)
        values[rank_index, step_index] = np.ma.filled(rows[name].astype(np.float64), np.nan)
        details[name] = values
    is_recorded = details["step_total"] > 0
    for name, values in details.items():
        if name in _TIMESTAMPS:
            continue
        # A missing action takes no time in a step that was recorded.
        values[:] = np.where(is_recorded, np.nan_to_num(values), np.nan)
        if name not in _COUNTS:
            values /= 1e9  # nanoseconds to seconds
    busy = details["step_total"] - details["step_waited"] - details["stall"]
    categories = {
        # The computes contain the unplanned collections ("pauses") of the garbage collector, which interrupted them.
        "compute": np.maximum(0.0, details["compute"] - details["pauses"]),
        "update": details["update"],
        "outside": np.maximum(0.0, busy - details["compute"] - details["update"]),
        "samples": details["samples"],
        "garbage": details["garbage"] + details["pauses"],
    }
    locations = _read_locations(tables, attempt, ranks)
    device = [str(location["device"]) for location in locations]
    computes_on_host = np.array([name.startswith("cpu") for name in device])
    categories["queued"] = _subtract_queued(categories, details["queue"], computes_on_host)
    return RankTimes(
        ranks=ranks,
        steps=steps,
        attempt=attempt,
        coordinates=np.array(
            [[location["tensor"], location["pipeline"], location["data"]] for location in locations], np.int64
        ),
        host=np.array([location["host"] for location in locations], np.int64),
        device=device,
        hostname=[str(location["hostname"]) for location in locations],
        seconds=details["step_total"] + details["garbage"],
        categories=categories,
        waits={axis: details[f"wait_{axis}"] for axis in AXES},
        details=details,
    )


def _subtract_queued(categories: dict[str, Array], queue: Array, computes_on_host: Array) -> Array:
    """Replace the HOST_CATEGORIES in `categories` by smaller times, so that their sum no longer contains queued time.

    Args:
        queue: recorded time without a processor, [ranks, steps].
        computes_on_host: bool [ranks].

    Returns:
        The subtracted time, [ranks, steps]; NaN where a step was not recorded.
    """
    total = sum(categories[name] for name in HOST_CATEGORIES)
    # The product with zero keeps NaN where a step was not recorded.
    queued = np.where(computes_on_host[:, None], np.minimum(queue, total), 0.0 * total)
    with np.errstate(all="ignore"):
        remaining_fraction = np.nan_to_num(1.0 - queued / total)
    for name in HOST_CATEGORIES:
        categories[name] = categories[name] * remaining_fraction
    return np.asarray(queued)


def _read_locations(tables: SpanTables, attempt: int, ranks: Array) -> list[dict[str, Any]]:
    """Return the row of table `ranks` for each rank; coordinates -1 and empty texts for a rank without a row."""
    columns = tables.query("SELECT * FROM ranks WHERE attempt = ?", [attempt])
    rows = [
        dict(zip(columns, values, strict=True))
        for values in zip(*(column.tolist() for column in columns.values()), strict=True)
    ]
    rows_by_rank = {row["rank"]: row for row in rows}
    unknown = {"tensor": -1, "pipeline": -1, "data": -1, "host": -1, "device": "", "hostname": ""}
    return [rows_by_rank.get(rank, unknown) for rank in ranks.tolist()]
