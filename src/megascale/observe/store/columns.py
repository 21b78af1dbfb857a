"""Conversion of a segment's frames to the columns of tables, with times on the common clock."""

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
# Field of the frame's head and type of each column that is the same for all records of a frame.
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
    frames_by_kind: dict[int, list[tuple[FrameHead, memoryview]]] = {kind: [] for kind in RECORDS}
    for head, body in frames:
        frames_by_kind[head.kind].append((head, body))
    return {table: frames_by_kind[kind] for table, kind in _KINDS.items()}


def count_rows(columns: dict[str, Array]) -> int:
    """Return the number of rows of a table's columns, which have equal lengths."""
    return min(len(values) for values in columns.values())


def make_columns(frames: dict[str, Frames], table: str, clock_ns: int) -> dict[str, Array]:
    """Return the columns of a table. `action` and `axis` are indices into ACTION_LABELS and AXIS_LABELS.

    Args:
        frames: result of `group_by_table`.
        clock_ns: offset of the common clock from the host's monotonic clock, used without CLOCKS frames.
    """
    table_frames = frames[table]
    dtype = RECORDS[_KINDS[table]]
    records = np.frombuffer(b"".join([body for _, body in table_frames]), dtype)
    record_counts = [len(body) // dtype.itemsize for _, body in table_frames]  # by frame
    to_common_clock = _make_clock_conversion(frames["clocks"], clock_ns)
    columns: dict[str, Array] = {}
    for name in TABLES[table]:
        if name in _HEAD_COLUMNS:
            field, column_type = _HEAD_COLUMNS[name]
            head_values = np.array([getattr(head, field) for head, _ in table_frames], column_type)
            columns[name] = np.repeat(head_values, record_counts)
            continue
        values = np.ascontiguousarray(records["kind" if name == "action" else name])
        if values.dtype.kind == "S":
            values = np.array([text.decode(errors="replace") for text in values.tolist()], object)
        if name in _TIMES and table != "clocks":
            values = to_common_clock(values)
        columns[name] = values
    return columns


def _make_clock_conversion(frames: Frames, clock_ns: int) -> Callable[[Array], Array]:
    """Return a function that converts arrays of nanoseconds from the host's monotonic clock to the common clock.

    A time of 0 means "unknown" and stays 0.
    """
    clocks = np.frombuffer(b"".join([body for _, body in frames]), CLOCK)
    if not len(clocks):
        return lambda times: np.where(times > 0, times + clock_ns, 0)
    first_offset = int(clocks["offset_ns"][0])
    clock_times = clocks["time_ns"].astype(np.float64)
    # Interpolate differences from the first offset, since a float64 cannot hold nanoseconds since 1970 exactly.
    drift = (clocks["offset_ns"] - first_offset).astype(np.float64)

    def convert(times: Array) -> Array:
        interpolated = np.rint(np.interp(times.astype(np.float64), clock_times, drift)).astype(np.int64)
        return np.where(times > 0, times + first_offset + interpolated, 0)

    return convert
