"""Segments as Parquet files, written by DuckDB: a file a table and segment, whole or not there.

    rollups-N.parquet   spans-N.parquet   counters-N.parquet   clocks-N.parquet

All are written under other names, put on the disk, renamed, and then the segment is removed: who dies in between does
it again. Small files of a table are merged, FIRST-LAST in place of the segment's number: where such a file is there,
those that it was made of do not count.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from megascale.observe.store.columns import AXES, KINDS, TABLES, Frames, by_action, group_by_table, make_columns
from megascale.observe.store.spool import Segment, list_segments

log = logging.getLogger("megascale.observe.spans")

# A DuckDB beside trainers: what it may take for a conversion.
SMALL_DATABASE: dict[str, Any] = {
    "threads": 1,
    "memory_limit": "256MB",
    "temp_directory": "",
    "autoinstall_known_extensions": False,
}
_ROWS = 122_880  # of a part of a file: what a query skips or reads
_MERGED = 32  # files that become one, none larger than
_SMALL = 2 << 20  # bytes, and all together not more than
_MERGED_BYTES = 8 << 20


def table_file(folder: Path, table: str, number: int) -> Path:
    """The file of a table and segment."""
    return folder / f"{table}-{number:06d}.parquet"


def segment_range(path: Path, table: str) -> tuple[int, int] | None:
    """The first and the last segment in a table's file; None if it is none of this table."""
    first, _, last = path.stem.removeprefix(f"{table}-").partition("-")
    if not path.name.startswith(f"{table}-") or not first.isdigit() or not (last or first).isdigit():
        return None
    return int(first), int(last or first)


def list_current_files(folder: Path, table: str) -> dict[Path, tuple[int, int]]:
    """The files of a table that count, with their segments, in order: without those that a merged one is made of."""
    found = {
        path: span for path in folder.glob(f"{table}-*.parquet") if (span := segment_range(path, table)) is not None
    }
    merged = [span for span in found.values() if span[0] < span[1]]
    return {
        path: (first, last)
        for path, (first, last) in sorted(found.items(), key=lambda one: one[1])
        if not any(a <= first and last <= b and (first, last) != (a, b) for a, b in merged)
    }


class ParquetWriter:
    """Makes segments into files of `folder`; keeps one connection to DuckDB.

    Args:
        threads: that a conversion may use; a host's service takes one from the trainers, a bench two.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        import duckdb

        self.folder = folder
        for table in TABLES:  # what a merge before a kill has left
            for path in set(folder.glob(f"{table}-*.parquet")) - list_current_files(folder, table).keys():
                path.unlink(missing_ok=True)
        self._database: Any = duckdb.connect(config=SMALL_DATABASE | {"threads": threads})

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """Write a segment's tables; rows of each. OSError if there is no room."""
        made, told = [], {}
        about, frames = segment.header, group_by_table(segment.frames)
        parts = _has_parts(frames["rollups"])
        try:
            for table in TABLES:
                found = make_columns(frames, table, int(about.get("clock_ns", 0)))
                rows = len(next(iter(found.values())))
                if not rows:
                    continue
                if table == "rollups":
                    found = by_action(found)
                file = table_file(self.folder, table, number)
                temporary = file.with_suffix(".tmp")
                made.append((temporary, file))
                self._copy(table, found, temporary, about, parts)
                told[table] = rows
            for temporary, _ in made:
                _on_disk(temporary)
            for temporary, file in made:
                os.replace(temporary, file)
            _on_disk(self.folder)
        except BaseException:
            for temporary, _ in made:
                temporary.unlink(missing_ok=True)
            raise
        for table in told:
            self.merge(table)
        return told

    def merge(self, table: str) -> Path | None:
        """Make the oldest small files of a table into one, if there are many; the new file. Nothing is lost if it
        cannot be done: it is tried again after another segment."""
        spooled, total = set(list_segments(self.folder)), 0
        small: list[tuple[Path, int, int]] = []
        for path, (first, last) in list_current_files(self.folder, table).items():
            size = path.stat().st_size
            if size > _SMALL or any(first <= number <= last for number in spooled) or total + size > _MERGED_BYTES:
                if len(small) >= _MERGED:
                    break
                small, total = [], 0  # what is merged must be of consecutive segments
                continue
            small.append((path, first, last))
            total += size
            if len(small) == _MERGED:
                break
        if len(small) < _MERGED:
            return None
        file = self.folder / f"{table}-{small[0][1]:06d}-{small[-1][2]:06d}.parquet"
        temporary = file.with_suffix(".tmp")
        source = "read_parquet([{}], union_by_name = true, hive_partitioning = false)".format(
            ", ".join(quote_sql(str(path)) for path, _, _ in small)
        )
        order = {"rollups": "ORDER BY action, step, rank", "counters": "ORDER BY name, device, time_ns"}.get(table, "")
        try:
            self._database.execute(
                f"COPY (SELECT * FROM {source} {order}) TO {quote_sql(str(temporary))} "
                f"(FORMAT parquet, COMPRESSION snappy, ROW_GROUP_SIZE {_ROWS})"
            ).fetchall()
            _on_disk(temporary)
            os.replace(temporary, file)
            _on_disk(self.folder)
        except Exception as error:
            log.warning("%d small files of %s are not merged: %s", len(small), table, error)
            temporary.unlink(missing_ok=True)
            return None
        for path, _, _ in small:
            if path != file:
                path.unlink(missing_ok=True)
        return file

    def _copy(self, table: str, found: dict[str, Any], file: Path, about: dict[str, Any], parts: bool) -> None:
        import duckdb

        self._database.register("rows", found)
        source = table_query(table, parts)
        meta = ", ".join(
            f"{key}: {quote_sql(str(about.get(key, '')))}" for key in ("job", "host", "hostname", "schema")
        )
        try:
            self._database.execute(
                f"COPY ({source}) TO {quote_sql(str(file))} "
                f"(FORMAT parquet, COMPRESSION snappy, ROW_GROUP_SIZE {_ROWS}, KV_METADATA {{{meta}}})"
            ).fetchall()
        except duckdb.Error as error:
            raise OSError(28, f"{file} cannot be written: {error}") from None
        finally:
            self._database.unregister("rows")

    def close(self) -> None:
        """Let go of DuckDB."""
        self._database.close()


def table_query(table: str, parts: bool = False, rows: str = "rows") -> str:
    """SQL that makes a table of the columns of `columns`, registered as `rows`.

    parts: whether several rows may be parts of one roll-up, to be added up.
    """
    kinds = "[" + ",".join(quote_sql(name) for name in KINDS[:64]) + "]"
    axes = "[" + ",".join(quote_sql(name) for name in AXES[:16]) + "]"
    how = {
        "action": f"coalesce({kinds}[action::INTEGER + 1], 'kind_' || action)",
        "axis": f"coalesce({axes}[axis::INTEGER + 1], 'axis_' || axis)",
    }
    listed = ", ".join(
        f"CAST({how.get(name, name) if table != 'clocks' else name} AS {kind}) AS {name}"
        for name, kind in TABLES[table].items()
    )
    if table != "rollups" or not parts:
        return f"SELECT {listed} FROM {rows}"
    keys = ("attempt", "rank", "step", "action", "axis")
    sums = {"longest_ns": "max", "last_ns": "max", "clock_error_ns": "max", "lost": "max"}
    gathered = ", ".join(
        f"min(nullif(first_ns, 0))::BIGINT AS {name}"
        if name == "first_ns"
        else f"{sums.get(name, 'sum')}({name})::BIGINT AS {name}"
        for name in TABLES[table]
        if name not in keys
    )
    added = f"SELECT {', '.join(keys)}, {gathered} FROM {rows} GROUP BY ALL ORDER BY action, step, rank"
    return f"SELECT {listed} FROM ({added})"


def _has_parts(rollups: Frames) -> bool:
    """Whether a rank and step was told in more than one frame of roll-ups."""
    return len({(head.ring, head.rank, head.step) for head, _ in rollups}) < len(rollups)


def quote_sql(words: str) -> str:
    """As an SQL string."""
    return "'" + words.replace("'", "''") + "'"


def _on_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
