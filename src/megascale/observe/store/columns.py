"""Frames of a segment as columns: arrays by name, with times on the common clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
_KINDS = {"rollups": ROLLUPS, "spans": SPANS, "clocks": CLOCKS, "counters": COUNTERS}
ACTION_LABELS = [SpanKind(code).label if code in list(SpanKind) else f"kind_{code}" for code in range(256)]
AXIS_LABELS = [SpanAxis(code).label if code in list(SpanAxis) else f"axis_{code}" for code in range(256)]
# Columns from a frame's head, with their types: they are the same for all of its records.
_HEAD_COLUMNS = {
    "attempt": ("attempt", np.int32),
    "rank": ("rank", np.int32),
    "step": ("step", np.int64),
    "clock_error_ns": ("error_ns", np.int64),
    "lost": ("lost", np.int64),
}
_TIMES = ("first_ns", "last_ns", "start_ns", "end_ns", "time_ns")

Frames = Sequence[tuple[FrameHead, memoryview]]


def group_by_table(frames: Frames) -> dict[str, Frames]:
    """Return the frames of each table."""
    by_kind: dict[int, list[tuple[FrameHead, memoryview]]] = {kind: [] for kind in RECORDS}
    for frame in frames:
        by_kind[frame[0].kind].append(frame)
    return {table: by_kind[kind] for table, kind in _KINDS.items()}


def make_columns(frames: dict[str, Frames], table: str, clock_ns: int) -> dict[str, Array]:
    """Return the columns of a table; `action` and `axis` are codes, indices into ACTION_LABELS and AXIS_LABELS.

    Args:
        frames: result of `group_by_table`.
        clock_ns: offset of the common clock from the host's monotonic clock if there are no CLOCKS frames.
    """
    table_frames = frames[table]
    dtype = RECORDS[_KINDS[table]]
    records = np.frombuffer(b"".join([body for _, body in table_frames]), dtype)
    counts = [len(body) // dtype.itemsize for _, body in table_frames]
    to_common_clock = _make_clock_conversion(frames["clocks"], clock_ns)
    columns: dict[str, Array] = {}
    for name in TABLES[table]:
        if name in _HEAD_COLUMNS:
            field, kind = _HEAD_COLUMNS[name]
            columns[name] = np.repeat(np.array([getattr(head, field) for head, _ in table_frames], kind), counts)
            continue
        values = np.ascontiguousarray(records["kind" if name == "action" else name])
        if values.dtype.kind == "S":
            values = np.array([text.decode(errors="replace") for text in values.tolist()], object)
        if name in _TIMES and table != "clocks":
            values = to_common_clock(values)
        columns[name] = values
    return columns


def _make_clock_conversion(frames: Frames, clock_ns: int) -> Callable[[Array], Array]:
    """Return a function from the host's monotonic clock to the common one, arrays of nanoseconds; 0 stays 0."""
    clocks = np.frombuffer(b"".join([body for _, body in frames]), CLOCK)
    if not len(clocks):
        return lambda times: np.where(times > 0, times + clock_ns, 0)
    base = int(clocks["offset_ns"][0])
    clock_times = clocks["time_ns"].astype(np.float64)
    # Interpolate the difference from the first offset: an offset since 1970 would not fit a float64.
    drift = (clocks["offset_ns"] - base).astype(np.float64)

    def convert(times: Array) -> Array:
        interpolated = np.rint(np.interp(times.astype(np.float64), clock_times, drift)).astype(np.int64)
        return np.where(times > 0, times + base + interpolated, 0)

    return convert
