"""What each rank did in each step, from roll-ups: parts that add up, as arrays of ranks by steps.

    busy = compute + update + outside + samples + garbage + queued

is what a rank does itself; others wait for the one that has most of it. `waits` are for other ranks, by axis.
`queued` is when its thread was ready to run and other processes had the processor: of a rank that computes on its
host that lies in the times of its actions and is taken out of them, of a rank on a GPU it is not known to cost
anything and counts nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.core.calls import MOST_RANKS
from megascale.errors import ConfigError, DataError
from megascale.observe.store.tables import SpanTables

Array = np.ndarray[Any, Any]

PARTS = ("compute", "update", "outside", "samples", "garbage", "queued")
ON_HOST = ("compute", "update", "outside")
AXES = ("tensor", "pipeline", "data", "world", "stage", "embedding")
STEPS = 50
_MOST = 1000  # steps of a window: as many as the last minute has, and STEPS at least
_MINUTE = 60e9
_SILENT = 10e9  # nanoseconds, well above what a rank's roll-ups are late

# A column: how rows of a rank and step add up.
_SUMS = {
    "whole": "sum(total_ns) FILTER (action = 'step')",
    "whole_waited": "sum(waited_ns) FILTER (action = 'step')",
    "compute": "sum(total_ns - waited_ns) FILTER (action IN ('forward', 'backward'))",
    "compute_whole": "sum(total_ns) FILTER (action IN ('forward', 'backward'))",
    "host": "sum(host_ns) FILTER (action IN ('forward', 'backward'))",
    "count": "sum(count) FILTER (action IN ('forward', 'backward'))",
    "forward": "sum(total_ns - waited_ns) FILTER (action = 'forward')",
    "backward": "sum(total_ns - waited_ns) FILTER (action = 'backward')",
    "update": "sum(total_ns - waited_ns) FILTER (action = 'optimizer')",
    "samples": "sum(total_ns) FILTER (action = 'data_wait')",
    "garbage": "sum(total_ns) FILTER (action = 'garbage')",
    "pauses": "sum(total_ns) FILTER (action = 'garbage_pause')",
    "pause_count": "sum(count) FILTER (action = 'garbage_pause')",
    "queue": "sum(total_ns) FILTER (action = 'processor_wait')",
    "retries": "sum(count) FILTER (action = 'allocator_retry')",
    "stall": "sum(total_ns) FILTER (action = 'checkpoint_stall')",
    "reductions_wait": "sum(waited_ns) FILTER (action = 'finish_reductions')",
    "reductions_begin": "min(first_ns) FILTER (action = 'finish_reductions' AND first_ns > 0)",
    "first": "min(first_ns) FILTER (action = 'step' AND first_ns > 0)",
    "last": "max(last_ns) FILTER (action = 'step')",
} | {f"wait_{axis}": f"sum(total_ns) FILTER (action = 'wait' AND axis = '{axis}')" for axis in AXES}
_ACTIONS = (
    "forward", "backward", "optimizer", "step", "wait", "data_wait", "garbage", "garbage_pause", "allocator_retry",
    "processor_wait", "checkpoint_stall", "finish_reductions",
)  # fmt: skip


@dataclass(frozen=True)
class RankParts:
    """Figures of ranks by steps, float64 [ranks, steps] in seconds; NaN where a rank told nothing of a step.

    Attributes:
        ranks, steps: their numbers, ascending.
        attempt: which start of the run.
        place: tensor, pipeline and data coordinate of each rank, int [ranks, 3]; -1 where nobody wrote it.
        host, device, hostname: of each rank.
        seconds: of the step and the collection of garbage that is planned after it.
        parts: by name of PARTS; `busy` is their sum.
        waits: for other ranks, by axis.
        more: further figures by the names above, such as the host's time in computes ("host"), times of day in
            nanoseconds ("first", "reductions_begin"), counts ("retries").
    """

    ranks: Array
    steps: Array
    attempt: int
    coordinates: Array
    host: Array
    device: list[str]
    hostname: list[str]
    seconds: Array
    parts: dict[str, Array]
    waits: dict[str, Array]
    details: dict[str, Array]

    @property
    def busy(self) -> Array:
        """What each rank did itself, [ranks, steps]."""
        return np.asarray(sum(self.parts.values()))

    @property
    def working(self) -> Array:
        """The same without what other processes took, [ranks, steps]."""
        return np.asarray(self.busy - self.parts["queued"])

    @property
    def peer_groups(self) -> Array:
        """Ranks of one number do the same work on the same kind of device: [ranks]."""
        work = np.nan_to_num(np.nanmax(self.details["count"], 1)).astype(np.int64)
        keys = list(zip(self.coordinates[:, 1].tolist(), self.device, work.tolist(), strict=True))
        numbers = {key: n for n, key in enumerate(sorted(set(keys)))}
        return np.array([numbers[key] for key in keys])

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the job of which nothing is recorded in these steps, by the coordinates of those that are."""
        known = self.coordinates[(self.coordinates >= 0).all(1)]
        world = math.prod((known.max(0) + 1).tolist()) if len(known) else 0
        world = max(world, int(self.ranks.max()) + 1)
        return sorted(set(range(min(world, MOST_RANKS))) - set(self.ranks.tolist()))

    @property
    def silent_ranks(self) -> dict[int, int]:
        """Ranks that told of no step for _SILENT seconds while others did, and the last step that they told of."""
        told = self.details["last"] > 0
        newest = np.where(told, self.details["last"], 0.0).max(1)
        late = np.flatnonzero(newest < newest.max() - _SILENT)
        return {int(self.ranks[r]): int(self.steps[told[r]].max(initial=0)) for r in late}

    def only(self, mask: Array) -> RankParts:
        """These of its steps (bool [steps])."""

        def cut(found: dict[str, Array]) -> dict[str, Array]:
            return {name: values[:, mask] for name, values in found.items()}

        return RankParts(
            self.ranks, self.steps[mask], self.attempt, self.coordinates, self.host, self.device, self.hostname,
            self.seconds[:, mask], cut(self.parts), cut(self.waits), cut(self.details),
        )  # fmt: skip

    def at(self, index: int) -> str:
        """Where a rank is, in words."""
        tensor, stage, data = self.coordinates[index]
        return f"stage {stage}, tensor {tensor}, data {data}" if stage >= 0 else "place unknown"


def choose_window(tables: SpanTables, wanted: str = "", last: int | None = None) -> tuple[int, int, int]:
    """(attempt, first, last) step: those that --steps names ("7-90"), or the last so many of the newest attempt,
    without its first two, which warm up. By default those of the last minute, and STEPS at least."""
    from megascale.observe.analysis.run_steps import step_range

    found = tables.query(
        "SELECT attempt, step, max(last_ns) AS at FROM rollups WHERE action = 'step' GROUP BY ALL ORDER BY attempt, "
        "step"
    )
    if not len(found["step"]):
        raise DataError(f"{tables.folder} holds no roll-ups of steps yet; they come some seconds after the steps")
    attempts, steps, times = (found[name] for name in ("attempt", "step", "at"))
    if wanted:
        low, high = step_range(wanted)
        mask = (steps >= low) & (steps <= high)
        if not mask.any():
            raise ConfigError(f"--steps={wanted}: roll-ups are there of steps {steps.min()} to {steps.max()}")
        newest = attempts[mask].max()
        mask &= attempts == newest
        return int(newest), int(steps[mask].min()), int(steps[mask].max())
    newest = attempts.max()
    steps, times = steps[attempts == newest], times[attempts == newest]
    steps, times = (steps[2:], times[2:]) if len(steps) > 2 else (steps, times)
    if last is None:
        last = min(_MOST, max(STEPS, int((times > times[-1] - _MINUTE).sum())))
    return int(newest), int(steps[-last:][0]), int(steps[-1])


def rank_parts(tables: SpanTables, attempt: int, first: int, last: int) -> RankParts:
    """What the ranks did in the steps from `first` to `last`. DataError if nothing is there of them.

    Steps that some ranks have not told of yet are there, with NaN.
    """
    sums = ", ".join(
        f"({text.replace('FILTER (', 'FILTER (WHERE ')})::DOUBLE AS {name}" for name, text in _SUMS.items()
    )
    found = tables.query(
        f"SELECT rank, step, {sums} FROM rollups WHERE attempt = ? AND step BETWEEN ? AND ? AND action IN "
        f"({', '.join(repr(name) for name in _ACTIONS)}) GROUP BY rank, step",
        [attempt, first, last],
    )
    ranks, row = np.unique(found["rank"], return_inverse=True)
    steps, column = np.unique(found["step"], return_inverse=True)
    if not len(ranks):
        raise DataError(f"{tables.folder} holds nothing of steps {first} to {last}")
    each = {name: _grid(found[name], row, column, len(ranks), len(steps)) for name in _SUMS}
    told = each["whole"] > 0
    times = ("first", "last", "reductions_begin")
    for name, values in each.items():
        if name not in times:
            values[:] = np.where(told, np.nan_to_num(values), np.nan)
            if not name.endswith("count") and name not in ("count", "retries"):
                values /= 1e9
    waits = {axis: each[f"wait_{axis}"] for axis in AXES}
    own = each["whole"] - each["whole_waited"] - each["stall"]
    parts = {
        # Pauses of the collector lie in what was computed then.
        "compute": np.maximum(0.0, each["compute"] - each["pauses"]),
        "update": each["update"],
        "samples": each["samples"],
        "garbage": each["garbage"] + each["pauses"],
    }
    parts["outside"] = np.maximum(0.0, own - each["compute"] - each["update"])
    facts = _facts(tables, attempt, ranks)
    parts["queued"] = _take_queued(parts, each["queue"], np.array([name.startswith("cpu") for name in facts[2]]))
    return RankParts(
        ranks,
        steps,
        attempt,
        *facts,
        each["whole"] + each["garbage"],
        {name: parts[name] for name in PARTS},
        waits,
        each,
    )


def _take_queued(parts: dict[str, Array], queue: Array, on_host: Array) -> Array:
    """Take the time without a processor out of parts that run on it, each by its share; that time."""
    own = sum(parts[name] for name in ON_HOST)
    queued = np.where(on_host[:, None], np.minimum(queue, own), 0.0 * own)
    with np.errstate(all="ignore"):
        left = np.nan_to_num(1.0 - queued / own)
    for name in ON_HOST:
        parts[name] = parts[name] * left
    return np.asarray(queued)


def _grid(values: Array, row: Array, column: Array, ranks: int, steps: int) -> Array:
    made = np.full((ranks, steps), np.nan)
    filled = np.ma.filled(values.astype(np.float64), np.nan) if np.ma.isMaskedArray(values) else values
    made[row, column] = filled
    return made


def _facts(tables: SpanTables, attempt: int, ranks: Array) -> tuple[Array, Array, list[str], list[str]]:
    found = tables.query("SELECT * FROM ranks WHERE attempt = ?", [attempt])
    names = list(found)
    told = {}
    for values in zip(*(found[name].tolist() for name in names), strict=True):
        one = dict(zip(names, values, strict=True))
        told[one["rank"]] = one
    empty = {"tensor": -1, "pipeline": -1, "data": -1, "host": -1, "device": "", "hostname": ""}
    rows = [told.get(rank, empty) for rank in ranks.tolist()]
    place = np.array([[one["tensor"], one["pipeline"], one["data"]] for one in rows], np.int64)
    host = np.array([one["host"] for one in rows], np.int64)
    return place, host, [one["device"] for one in rows], [one["hostname"] for one in rows]
