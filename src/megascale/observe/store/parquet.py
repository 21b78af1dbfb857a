"""Conversion of segments to Parquet files by DuckDB: one file per table and segment, either complete or absent.

    rollups-N.parquet   spans-N.parquet   counters-N.parquet   clocks-N.parquet

The files are written under temporary names, flushed to the disk and renamed. Then the segment is removed. If the
process dies in between, the next service repeats the conversion. Small files of a table are merged. The name of a
merged file has the numbers FIRST-LAST of its segments, and the merged file replaces the small files.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

from megascale.observe.store.columns import (
    ACTION_LABELS,
    AXIS_LABELS,
    TABLES,
    count_rows,
    group_by_table,
    make_columns,
)
from megascale.observe.store.spool import Segment, list_segments

log = logging.getLogger("megascale.observe.spans")

# Limits of a DuckDB that runs next to trainers.
SMALL_DATABASE: dict[str, Any] = {
    "threads": 1,
    "memory_limit": "256MB",
    "temp_directory": "",
    "autoinstall_known_extensions": False,
}
_ROW_GROUP = 122_880
_FORMAT = f"FORMAT parquet, COMPRESSION snappy, ROW_GROUP_SIZE {_ROW_GROUP}"
_MERGED_FILES = 32  # number of files that are merged into one
_SMALL_BYTES = 2 << 20  # size of the largest file that is merged
_MERGED_BYTES = 8 << 20  # largest total size of the merged files
_MERGED_ORDER = {"rollups": "ORDER BY action, step, rank", "counters": "ORDER BY name, device, time_ns"}
# A roll-up may consist of several rows with the same key. Their other columns are added, or aggregated as follows.
_ROLLUP_KEY = ("attempt", "rank", "step", "action", "axis")
_ROLLUP_AGGREGATES = {
    "longest_ns": "max(longest_ns)",
    "last_ns": "max(last_ns)",
    "clock_error_ns": "max(clock_error_ns)",
    "lost": "max(lost)",
    "first_ns": "min(nullif(first_ns, 0))",
}


def get_table_file(folder: Path, table: str, number: int) -> Path:
    """Return the path of the file of a table and segment."""
    return folder / f"{table}-{number:06d}.parquet"


def parse_segment_range(path: Path, table: str) -> tuple[int, int] | None:
    """Return the first and the last segment in a table's file; None if it is not a file of this table."""
    first, _, last = path.stem.removeprefix(f"{table}-").partition("-")
    last = last or first
    if not path.name.startswith(f"{table}-") or not first.isdigit() or not last.isdigit():
        return None
    return int(first), int(last)


def list_current_files(folder: Path, table: str) -> dict[Path, tuple[int, int]]:
    """Return a table's files in order, with first and last segment, without files that a merged file replaces."""
    ranges = {path: parse_segment_range(path, table) for path in folder.glob(f"{table}-*.parquet")}
    files = sorted((numbers, path) for path, numbers in ranges.items() if numbers is not None)
    merged_ranges = [(first, last) for (first, last), _ in files if first < last]
    current_files = {}
    for (first, last), path in files:
        is_replaced = any(
            merged_first <= first and last <= merged_last and (first, last) != (merged_first, merged_last)
            for merged_first, merged_last in merged_ranges
        )
        if not is_replaced:
            current_files[path] = (first, last)
    return current_files


class ParquetWriter:
    """Converts segments to files of `folder` with one DuckDB connection.

    Args:
        threads: threads of a conversion. By default one, since more would take processors from the trainers.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        import duckdb

        self.folder = folder
        for table in TABLES:
            # Remove the small files that a killed process had merged and not yet removed.
            for path in set(folder.glob(f"{table}-*.parquet")) - list_current_files(folder, table).keys():
                path.unlink(missing_ok=True)
        self._database: Any = duckdb.connect(config=SMALL_DATABASE | {"threads": threads})

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """Write a segment's tables; return the number of rows by table. Raises OSError if there is no space."""
        frames = group_by_table(segment.frames)
        rollup_keys = {(head.ring, head.rank, head.step) for head, _ in frames["rollups"]}
        has_split_rollups = len(rollup_keys) < len(frames["rollups"])
        files: dict[Path, Path] = {}
        rows: dict[str, int] = {}
        try:
            for table in TABLES:
                columns = make_columns(frames, table, int(segment.header.get("clock_ns", 0)))
                row_count = count_rows(columns)
                if not row_count:
                    continue
                if table == "rollups":
                    # Sort by action, so that each row group of the file has few actions and queries skip most groups.
                    order = columns["action"].argsort(kind="stable")
                    columns = {name: values[order] for name, values in columns.items()}
                file = get_table_file(self.folder, table, number)
                temporary = file.with_suffix(".tmp")
                files[temporary] = file
                query = make_table_query(table, has_split_rollups)
                self._write_file(columns, query, temporary, segment.header)
                rows[table] = row_count
            for temporary in files:
                _flush_to_disk(temporary)
            for temporary, file in files.items():
                os.replace(temporary, file)
            _flush_to_disk(self.folder)
        except BaseException:
            for temporary in files:
                temporary.unlink(missing_ok=True)
            raise
        for table in rows:
            self.merge(table)
        return rows

    def merge(self, table: str) -> Path | None:
        """Merge the oldest small files of a table if there are enough; return the new file, or None.

        A failed merge loses no data and is repeated after the next segment.
        """
        small_files = self._select_small_files(table)
        if not small_files:
            return None
        first, last = small_files[0][1], small_files[-1][2]
        file = self.folder / f"{table}-{first:06d}-{last:06d}.parquet"
        temporary = file.with_suffix(".tmp")
        names = ", ".join(quote_sql(str(path)) for path, _, _ in small_files)
        source = f"read_parquet([{names}], union_by_name = true, hive_partitioning = false)"
        try:
            self._database.execute(
                f"COPY (SELECT * FROM {source} {_MERGED_ORDER.get(table, '')}) TO {quote_sql(str(temporary))} "
                f"({_FORMAT})"
            ).fetchall()
            _flush_to_disk(temporary)
            os.replace(temporary, file)
            _flush_to_disk(self.folder)
        except Exception as error:
            log.warning("%d small files of %s could not be merged: %s", len(small_files), table, error)
            temporary.unlink(missing_ok=True)
            return None
        for path, _, _ in small_files:
            if path != file:
                path.unlink(missing_ok=True)
        return file

    def _select_small_files(self, table: str) -> list[tuple[Path, int, int]]:
        """Return _MERGED_FILES consecutive files to merge, as (file, first segment, last segment); else no files."""
        segments = list_segments(self.folder)
        small_files: list[tuple[Path, int, int]] = []
        total = 0
        for path, (first, last) in list_current_files(self.folder, table).items():
            size = path.stat().st_size
            is_pending = any(first <= number <= last for number in segments)
            if size <= _SMALL_BYTES and not is_pending and total + size <= _MERGED_BYTES:
                small_files.append((path, first, last))
                total += size
            elif len(small_files) < _MERGED_FILES:
                small_files = []  # merged files must belong to consecutive segments
                total = 0
            if len(small_files) == _MERGED_FILES:
                return small_files
        return []

    def _write_file(self, columns: dict[str, Any], query: str, file: Path, header: dict[str, Any]) -> None:
        """Write the result of a query over the table `rows` of these columns to a Parquet file."""
        import duckdb

        metadata = ", ".join(
            f"{key}: {quote_sql(str(header.get(key, '')))}" for key in ("job", "host", "hostname", "schema")
        )
        self._database.register("rows", columns)
        try:
            self._database.execute(
                f"COPY ({query}) TO {quote_sql(str(file))} ({_FORMAT}, KV_METADATA {{{metadata}}})"
            ).fetchall()
        except duckdb.Error as error:
            raise OSError(errno.ENOSPC, f"{file} cannot be written: {error}") from None
        finally:
            self._database.unregister("rows")

    def close(self) -> None:
        self._database.close()


def make_table_query(table: str, has_split_rollups: bool = False) -> str:
    """Return SQL that makes a table from the columns of `make_columns`, which are registered as `rows`.

    Args:
        has_split_rollups: several rows may belong to one roll-up and must be added.
    """
    actions = "[" + ",".join(quote_sql(name) for name in ACTION_LABELS[:64]) + "]"
    axes = "[" + ",".join(quote_sql(name) for name in AXIS_LABELS[:16]) + "]"
    expressions = {
        "action": f"coalesce({actions}[action::INTEGER + 1], 'kind_' || action)",
        "axis": f"coalesce({axes}[axis::INTEGER + 1], 'axis_' || axis)",
    }
    selected = ", ".join(
        f"CAST({expressions.get(name, name)} AS {kind}) AS {name}" for name, kind in TABLES[table].items()
    )
    if table != "rollups" or not has_split_rollups:
        return f"SELECT {selected} FROM rows"
    aggregates = ", ".join(
        f"{_ROLLUP_AGGREGATES.get(name, f'sum({name})')}::BIGINT AS {name}"
        for name in TABLES[table]
        if name not in _ROLLUP_KEY
    )
    sums = f"SELECT {', '.join(_ROLLUP_KEY)}, {aggregates} FROM rows GROUP BY ALL ORDER BY action, step, rank"
    return f"SELECT {selected} FROM ({sums})"


def quote_sql(text: str) -> str:
    """Return a text as an SQL string."""
    return "'" + text.replace("'", "''") + "'"


def _flush_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
