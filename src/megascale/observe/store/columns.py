"""Frames of a segment as columns: arrays by name, with times on the common clock and codes spelled out by tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megascale.core.spans import SpanAxis, SpanKind
from megascale.observe.store.frames import CLOCK, CLOCKS, COUNTERS, RECORDS, ROLLUPS, SPANS, FrameHead

Array = np.ndarray[Any, Any]

# Tables and their columns with DuckDB's types, in order; `host` comes from the folder's name.
TABLES: dict[str, dict[str, str]] = {
    "rollups": {
        "attempt": "INTEGER",
        "rank": "INTEGER",
        "step": "BIGINT",
        "action": "VARCHAR",
        "axis": "VARCHAR",
        "count": "BIGINT",
        "total_ns": "BIGINT",
        "waited_ns": "BIGINT",
        "longest_ns": "BIGINT",
        "host_ns": "BIGINT",
        "bytes": "BIGINT",
        "first_ns": "BIGINT",
        "last_ns": "BIGINT",
        "clock_error_ns": "BIGINT",
        "lost": "BIGINT",
    },
    "spans": {
        "attempt": "INTEGER",
        "rank": "INTEGER",
        "step": "BIGINT",
        "action": "VARCHAR",
        "chunk": "INTEGER",
        "microbatch": "INTEGER",
        "axis": "VARCHAR",
        "bytes": "BIGINT",
        "start_ns": "BIGINT",
        "end_ns": "BIGINT",
        "waited_on": "INTEGER",
        "clock_error_ns": "BIGINT",
    },
    "clocks": {"time_ns": "BIGINT", "offset_ns": "BIGINT", "error_ns": "BIGINT"},
    "counters": {"time_ns": "BIGINT", "name": "VARCHAR", "device": "VARCHAR", "value": "DOUBLE"},
}
_NAMES = {"rollups": ROLLUPS, "spans": SPANS, "clocks": CLOCKS, "counters": COUNTERS}
KINDS = [SpanKind(code).label if code in list(SpanKind) else f"kind_{code}" for code in range(256)]
AXES = [SpanAxis(code).label if code in list(SpanAxis) else f"axis_{code}" for code in range(256)]
_TIMES = ("first_ns", "last_ns", "start_ns", "end_ns", "time_ns")

Frames = Sequence[tuple[FrameHead, memoryview]]


def group_by_table(frames: Frames) -> dict[str, Frames]:
    """Frames by the table that they belong to."""
    found: tuple[list[tuple[FrameHead, memoryview]], ...] = tuple([] for _ in RECORDS)
    for frame in frames:
        found[frame[0].kind].append(frame)
    return {table: found[code] for table, code in _NAMES.items()}


def make_columns(sorted_frames: dict[str, Frames], table: str, clock_ns: int) -> dict[str, Array]:
    """The columns of one table, of `by_table`'s frames; `action` and `axis` are codes (KINDS, AXES).

    clock_ns: how far the common clock is ahead of the host's monotonic one, where the frames do not say it.
    """
    code, mine = _NAMES[table], sorted_frames[table]
    dtype = RECORDS[code]
    records = np.frombuffer(b"".join([body for _, body in mine]), dtype)
    counts = [len(body) // dtype.itemsize for _, body in mine]
    found: dict[str, Array] = {}
    if table in ("rollups", "spans"):
        for name, kind in (("attempt", np.int32), ("rank", np.int32), ("step", np.int64)):
            found[name] = np.repeat(np.array([getattr(head, name) for head, _ in mine], kind), counts)
        found["clock_error_ns"] = np.repeat(np.array([head.error_ns for head, _ in mine], np.int64), counts)
        found["action"] = np.ascontiguousarray(records["kind"])
        if table == "rollups":
            found["lost"] = np.repeat(np.array([head.lost for head, _ in mine], np.int64), counts)
    offset = common_clock(sorted_frames["clocks"], clock_ns)
    for name in TABLES[table]:
        if name not in found:
            found[name] = np.ascontiguousarray(records[name])
            if found[name].dtype.kind == "S":
                found[name] = np.array([text.decode(errors="replace") for text in found[name].tolist()], object)
        if name in _TIMES and table != "clocks":
            found[name] = offset(found[name])
    return found


def common_clock(frames: Frames, clock_ns: int) -> Any:
    """A function from the host's monotonic clock to the common one (arrays of ns; 0 stays 0), by CLOCKS frames."""
    told = [np.frombuffer(body, CLOCK) for _, body in frames]
    clocks = np.concatenate(told) if told else np.zeros(0, CLOCK)
    if not len(clocks):
        return lambda times: np.where(times > 0, times + clock_ns, 0)
    base = int(clocks["offset_ns"][0])
    times_at, steps = clocks["time_ns"], (clocks["offset_ns"] - base).astype(np.float64)

    def convert(times: Array) -> Array:
        # Interpolated as a difference from the first: an offset since 1970 would not fit a float64.
        moved = np.interp(times.astype(np.float64), times_at.astype(np.float64), steps)
        return np.where(times > 0, times + base + np.rint(moved).astype(np.int64), 0)

    return convert


def by_action(found: dict[str, Array]) -> dict[str, Array]:
    """The rows in the order of their actions, else as they are: files then have few actions in each part."""
    order = np.argsort(found["action"], kind="stable")
    return {name: values[order] for name, values in found.items()}
