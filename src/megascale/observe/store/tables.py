"""Spans and roll-ups of a run as tables of DuckDB: what was made into Parquet and what still lies in the spool.

    with SpanTables(Path("runs/gpt")) as tables:
        tables.query("SELECT rank, sum(total_ns - waited_ns) FROM rollups WHERE action = 'step' GROUP BY rank")

Rows of `rollups` with the same rank, step, action and axis are parts that add up (`longest_ns`: the largest). Nothing
of a run is changed, and a run that goes on may be read: what it makes into files meanwhile is looked for again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megascale.core.bounded_lines import RecordReader
from megascale.core.calls import MOST_RANKS
from megascale.core.untrusted_files import open_regular
from megascale.errors import DataError
from megascale.observe.store.columns import TABLES, group_by_table, make_columns
from megascale.observe.store.parquet import list_current_files, quote_sql, table_query
from megascale.observe.store.spool import Segment, read_segments

RANKS_FILE = "ranks.jsonl"
# A step that a run did again counts as its newest attempt did it: a table for WITH of the steps from one to another,
# which are its parameters; it is joined by step and attempt.
NEWEST = (
    "newest AS (SELECT step, max(attempt) AS attempt FROM rollups WHERE action = 'step' AND step BETWEEN ? AND ? "
    "GROUP BY step)"
)
_TRIES = 5


class SpanTables:
    """The tables of a run, or of a copy of its `spans` folder; DataError if there are none.

    Args:
        run: run folder, or its `spans`.
        threads, memory: that a query may take.

    Attributes:
        skipped: files that cannot be read, and why.
    """

    def __init__(self, run: Path, threads: int | None = None, memory: str = "1GB") -> None:
        import duckdb

        self.folder = run / "spans" if (run / "spans").is_dir() else run
        self.hosts = sorted(path for path in self.folder.glob("host=*") if path.is_dir())
        if not self.hosts:
            raise DataError(
                f"{run} holds no spans (spans/host=N/); name a run folder whose training had observe.timers=true"
            )
        self.skipped: dict[str, str] = {}
        config: dict[str, Any] = {"memory_limit": memory, "temp_directory": "", "autoinstall_known_extensions": False}
        if threads is not None:
            config["threads"] = threads
        self._database: Any = duckdb.connect(config=config)
        self._open()

    def _open(self) -> None:
        for _ in range(_TRIES):
            try:
                self._look()
                return
            except FileNotFoundError:  # made into a file, or given up, between two looks
                continue
        raise DataError(f"the files of {self.folder} change faster than they can be read; try again")

    def _look(self) -> None:
        files: dict[str, list[Path]] = {table: [] for table in TABLES}
        spooled: list[tuple[int, Segment]] = []
        seen: list[Path] = []
        told: list[dict[str, Any]] = []
        self.skipped = {}
        for host in self.hosts:
            number = host_number(host)
            here = set()
            for file, found in read_segments(host):
                text = file.stem.rpartition("-")[2]
                here |= {int(text)} if file.name.startswith("spool-") else set()
                seen.append(file)
                if isinstance(found, str):
                    self.skipped[str(file)] = found
                else:
                    spooled.append((number, found))
                    told += [one | {"host": number} for one in found.header.get("ranks", [])]
            told += [one | {"host": number} for one in rank_facts(host)]
            for table in TABLES:
                for path, (first, last) in list_current_files(host, table).items():
                    # While a segment is there, it alone counts.
                    if not any(first <= segment <= last for segment in here) and self._readable(path):
                        files[table].append(path)
        if any(not file.exists() for file in seen):
            raise FileNotFoundError
        self._ranks(told)
        for table in TABLES:
            self._view(table, files[table], spooled)

    def _readable(self, path: Path) -> bool:
        """Whether a file is a Parquet file from beginning to end: what is torn is left out and named."""
        try:
            with open(path, "rb", opener=open_regular) as file:
                file.seek(-8, 2)
                size, magic = int.from_bytes(file.read(4), "little"), file.read(4)
                end = file.tell()
            if magic != b"PAR1" or size + 12 > end:
                raise ValueError("it is no whole Parquet file")
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            self.skipped[str(path)] = str(error)
            return False
        return True

    def _view(self, table: str, files: list[Path], spooled: list[tuple[int, Segment]]) -> None:
        kinds = TABLES[table]
        listed = ", ".join(kinds)
        parts = []
        source, there = self._describe(files)
        if there:
            # Files of a version that knew less have no such column.
            known = ", ".join(
                f"CAST({name} AS {kind}) AS {name}" if name in there else f"NULL::{kind} AS {name}"
                for name, kind in kinds.items()
            )
            parts.append(f"SELECT {known}, CAST(split_part(host, '@', 1) AS INTEGER) AS host FROM {source}")
        for position, (host, segment) in enumerate(spooled):
            found = make_columns(group_by_table(segment.frames), table, int(segment.header.get("clock_ns", 0)))
            if not len(next(iter(found.values()))):
                continue
            self._database.register("rows", found)
            name = f"spooled_{table}_{position}"
            made = f"SELECT *, {host}::INTEGER AS host FROM ({table_query(table)})"
            self._database.execute(f"CREATE OR REPLACE TABLE {name} AS {made}").fetchall()
            self._database.unregister("rows")
            parts.append(f"SELECT {listed}, host FROM {name}")
        empty = ", ".join(f"NULL::{kind} AS {name}" for name, kind in kinds.items())
        parts = parts or [f"SELECT {empty}, NULL::INTEGER AS host WHERE false"]
        self._database.execute(f"CREATE OR REPLACE VIEW {table} AS {' UNION ALL '.join(parts)}").fetchall()

    def _describe(self, files: list[Path]) -> tuple[str, set[str]]:
        """Return what DuckDB reads Parquet files from, and the names of its columns, none if no file can be read.

        A file whose head is damaged is left out and named.
        """
        import duckdb

        if not files:
            return "", set()
        source = _source(files)
        try:
            return source, {row[0] for row in self._database.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}
        except duckdb.IOException:
            if any(not path.exists() for path in files):
                raise FileNotFoundError from None
            return self._describe(self._sound(files))
        except duckdb.Error:
            return self._describe(self._sound(files))

    def _sound(self, files: list[Path]) -> list[Path]:
        """Return the files that DuckDB can describe one by one; the others are named."""
        import duckdb

        sound = []
        for path in files:
            try:
                self._database.execute(f"DESCRIBE SELECT * FROM {_source([path])}").fetchall()
                sound.append(path)
            except duckdb.Error as error:
                self.skipped[str(path)] = str(error).splitlines()[0][:200]
        if len(sound) == len(files):
            raise DataError(f"the files {files[0].parent}/*{files[0].suffix} do not fit together")
        return sound

    def _ranks(self, told: list[dict[str, Any]]) -> None:
        """The table `ranks`: who a rank was in each attempt."""
        kinds = {"attempt": np.int32, "rank": np.int32, "host": np.int32, "tensor": np.int32, "pipeline": np.int32}
        kinds |= {"data": np.int32}
        rows: dict[str, Any] = {}
        for name, kind in kinds.items():
            most = 1 << 31 if name == "attempt" else MOST_RANKS
            rows[name] = np.array([_whole(one.get(name), most) for one in told], kind)
        for name in ("hostname", "device"):
            texts = (str(one.get(name, ""))[:200] for one in told)
            rows[name] = np.array([text.encode(errors="replace").decode() for text in texts], object)
        self._database.register("rows", rows)
        self._database.execute(
            "CREATE OR REPLACE TABLE ranks AS SELECT DISTINCT "
            f"{', '.join(kinds)}, hostname::VARCHAR AS hostname, device::VARCHAR AS device FROM rows"
        ).fetchall()
        self._database.unregister("rows")

    def query(self, sql: str, parameters: list[Any] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Columns of a query's result by name. DataError with DuckDB's words if it fails."""
        import duckdb

        for turn in range(_TRIES):
            try:
                found: dict[str, np.ndarray[Any, Any]] = self._database.execute(sql, parameters or []).fetchnumpy()
                return found
            except duckdb.IOException as error:
                if turn == _TRIES - 1:
                    raise DataError(f"the spans of {self.folder} cannot be read: {error}") from None
                self._open()
            except duckdb.Error as error:
                raise DataError(f"the spans of {self.folder} cannot be asked this: {error}") from None
        raise AssertionError

    def close(self) -> None:
        """Let go of DuckDB."""
        self._database.close()

    def __enter__(self) -> SpanTables:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def host_number(folder: Path) -> int:
    """Which host of the job a folder is of: `host=N`, or `host=N@NODE` where nodes sent theirs; -1 if it says none."""
    text = folder.name.removeprefix("host=").partition("@")[0]
    return int(text) if text.isdigit() else -1


def rank_facts(host: Path) -> list[dict[str, Any]]:
    """Return what `ranks.jsonl` of a host's folder says of its ranks; damaged lines are left out."""
    try:
        return list(RecordReader(host / RANKS_FILE))
    except OSError:
        return []


def _source(files: list[Path]) -> str:
    names = "[" + ", ".join(quote_sql(str(path)) for path in files) + "]"
    return f"read_parquet({names}, hive_partitioning = true, hive_types_autocast = false, union_by_name = true)"


def _whole(value: Any, most: int) -> int:
    """Return a number from a file below `most`, -1 if it is not one."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if 0 <= number < most else -1
