"""Reading of a run's spans and roll-ups as DuckDB tables, from Parquet files and the spool.

    with SpanTables(Path("runs/gpt")) as tables:
        tables.query("SELECT rank, sum(total_ns - waited_ns) FROM rollups WHERE action = 'step' GROUP BY rank")

The spool holds the newest rows, in files ("segments") that are not Parquet files yet. Several rows of `rollups` may
have the same rank, step, action and axis. Queries must add their values, or take the largest `longest_ns`. Reading does
not change the files. A live run can be read: if its files change meanwhile, they are listed again.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from megascale.core import strict_json
from megascale.core.atomic_files import write_atomically
from megascale.core.calls import MAX_RANKS
from megascale.core.json_lines import RecordReader
from megascale.core.untrusted_files import open_regular, read_small_text
from megascale.errors import DataError
from megascale.observe.store.columns import TABLES, count_rows, group_by_table, make_columns
from megascale.observe.store.parquet import list_current_files, make_table_query, quote_sql
from megascale.observe.store.span_messages import RANKS_FILE, REQUEST_FILE, STATE_FILE
from megascale.observe.store.spool import Segment, read_segments

# Definition of the table `newest` for a query's WITH clause: the newest attempt of each step, from the step in the
# first to the step in the second parameter. Queries join it by step and attempt, because a step that was repeated after
# a restart has rows of several attempts.
NEWEST = (
    "newest AS (SELECT step, max(attempt) AS attempt FROM rollups WHERE action = 'step' AND step BETWEEN ? AND ? "
    "GROUP BY step)"
)
_NEWEST_ATTEMPT = "(SELECT max(attempt) FROM rollups WHERE action = 'step')"
_REQUEST_SECONDS = 2.0  # time in which the services of all hosts read a request and inform their ranks
_TRIES = 5  # attempts to read files that change meanwhile
_RECENT_STEPS = 20  # the mean of these steps gives the time of a step
# Integer columns of the table `ranks`, with the limit of valid values.
_RANK_COLUMNS = {
    "attempt": 1 << 31, "rank": MAX_RANKS, "host": MAX_RANKS, "tensor": MAX_RANKS, "pipeline": MAX_RANKS,
    "data": MAX_RANKS, "context": MAX_RANKS,
}  # fmt: skip


class SpanTables:
    """The tables of a run, or of a copy of its `spans` folder. Raises DataError if the folder has no spans.

    Args:
        run: run folder, or its `spans` folder.
        threads, memory: limits of a query.

    Attributes:
        skipped: why files cannot be read, by path.
    """

    def __init__(self, run: Path, threads: int | None = None, memory: str = "1GB") -> None:
        import duckdb

        try:
            str(run.absolute()).encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{str(run).encode(errors='replace').decode()}: DuckDB reads no path with bytes that are not UTF-8; "
                "rename the folder, or name a link to it"
            ) from None
        if (run / "spans").is_dir():
            self.folder = run / "spans"
        else:
            self.folder = run
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
                self._list_files()
                return
            except FileNotFoundError:  # a file was converted or removed while it was read
                continue
        raise DataError(f"the files of {self.folder} change faster than they can be read; try again")

    def _list_files(self) -> None:
        """Define the tables from the current files. Raises FileNotFoundError if a file disappears meanwhile."""
        files: dict[str, list[Path]] = {table: [] for table in TABLES}  # Parquet files by table
        segments: list[tuple[int, Segment]] = []  # with the number of their host
        spool_files: list[Path] = []
        rank_records: list[dict[str, Any]] = []
        self.skipped = {}
        for host in self.hosts:
            host_number = parse_host_number(host)
            pending_segments = set()  # numbers of the host's segments in the spool
            for file, segment in read_segments(host):
                spool_files.append(file)
                if file.name.startswith("spool-"):
                    pending_segments.add(int(file.stem.rpartition("-")[2]))
                if isinstance(segment, str):  # the reason why the segment cannot be read
                    self.skipped[str(file)] = segment
                    continue
                segments.append((host_number, segment))
                rank_records += [record | {"host": host_number} for record in segment.header.get("ranks", [])]
            rank_records += [record | {"host": host_number} for record in read_rank_records(host)]
            for table in TABLES:
                for path, (first, last) in list_current_files(host, table).items():
                    # While a segment exists, its Parquet files are ignored, so that no row is read twice.
                    is_pending = any(first <= number <= last for number in pending_segments)
                    if not is_pending and self._is_complete(path):
                        files[table].append(path)
        if any(not file.exists() for file in spool_files):
            raise FileNotFoundError  # a segment became Parquet files, which may be missing in the list
        self._create_ranks(rank_records)
        for table in TABLES:
            self._create_view(table, files[table], segments)

    def _is_complete(self, path: Path) -> bool:
        """Return whether a file ends like a complete Parquet file; otherwise add it to `skipped`."""
        try:
            with open(path, "rb", opener=open_regular) as file:
                file.seek(-8, os.SEEK_END)
                footer_size = int.from_bytes(file.read(4), "little")
                magic = file.read(4)
                # The file has magic (4 bytes), data, footer, size of the footer (4) and magic (4). `tell` is its size.
                if magic != b"PAR1" or footer_size + 12 > file.tell():
                    raise ValueError("the file is not a complete Parquet file")
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            self.skipped[str(path)] = str(error)
            return False
        return True

    def _create_view(self, table: str, files: list[Path], segments: list[tuple[int, Segment]]) -> None:
        """Create the view `table` over the Parquet files and the segments (each with its host)."""
        column_types = TABLES[table]
        files = self._select_readable(table, files)
        queries = []
        if files:
            queries.append(_select_parquet(table, files))
        for index, (host, segment) in enumerate(segments):
            rows = make_columns(group_by_table(segment.frames), table, int(segment.header.get("clock_ns", 0)))
            if not count_rows(rows):
                continue
            name = f"spooled_{table}_{index}"
            self._create_table(name, f"SELECT *, {host}::INTEGER AS host FROM ({make_table_query(table)})", rows)
            queries.append(f"SELECT {', '.join(column_types)}, host FROM {name}")
        if not queries:
            empty_columns = ", ".join(f"NULL::{sql_type} AS {name}" for name, sql_type in column_types.items())
            queries.append(f"SELECT {empty_columns}, NULL::INTEGER AS host WHERE false")
        self._database.execute(f"CREATE OR REPLACE VIEW {table} AS {' UNION ALL '.join(queries)}").fetchall()

    def _create_table(self, name: str, query: str, rows: dict[str, Any]) -> None:
        """Create a table from a query over arrays, which the query calls `rows`."""
        self._database.register("rows", rows)
        self._database.execute(f"CREATE OR REPLACE TABLE {name} AS {query}").fetchall()
        self._database.unregister("rows")

    def _select_readable(self, table: str, files: list[Path]) -> list[Path]:
        """Return the files that DuckDB can read together, and add the others to `skipped`."""
        import duckdb

        if not files:
            return []
        try:
            self._database.execute(f"DESCRIBE {_select_parquet(table, files)}").fetchall()
            return files
        except (duckdb.Error, UnicodeDecodeError):  # DuckDB's message may quote bytes of a damaged file
            if any(not path.exists() for path in files):
                raise FileNotFoundError from None
        readable = []
        for path in files:
            try:
                self._database.execute(f"DESCRIBE {_select_parquet(table, [path])}").fetchall()
                readable.append(path)
            except UnicodeDecodeError:
                self.skipped[str(path)] = "the file's metadata is damaged"
            except duckdb.Error as error:
                self.skipped[str(path)] = str(error).splitlines()[0][:200]
        if len(readable) == len(files):  # each file can be read, but not all together
            raise DataError(f"the files {files[0].parent}/{table}-*.parquet have different columns")
        return self._select_readable(table, readable)

    def _create_ranks(self, records: list[dict[str, Any]]) -> None:
        """Create the table `ranks` from the services' records: coordinates and host of each rank in each attempt."""
        rows: dict[str, Any] = {}
        for name, limit in _RANK_COLUMNS.items():
            rows[name] = np.array([_parse_number(record.get(name), limit) for record in records], np.int32)
        for name in ("hostname", "device"):
            texts = (str(record.get(name, ""))[:200] for record in records)
            rows[name] = np.array([text.encode(errors="replace").decode() for text in texts], object)
        query = (
            f"SELECT DISTINCT {', '.join(_RANK_COLUMNS)}, hostname::VARCHAR AS hostname, device::VARCHAR AS device "
            "FROM rows"
        )
        self._create_table("ranks", query, rows)

    def query(self, sql: str, parameters: list[Any] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Return the columns of a query's result by name. Raises DataError with DuckDB's message if it fails."""
        import duckdb

        for attempt in range(_TRIES):
            try:
                columns: dict[str, np.ndarray[Any, Any]] = self._database.execute(sql, parameters or []).fetchnumpy()
                return columns
            except duckdb.IOException as error:
                if attempt == _TRIES - 1:
                    raise DataError(f"the spans of {self.folder} cannot be read: {error}") from None
                self._open()  # a file was removed or converted, so list the files again
            except duckdb.Error as error:
                raise DataError(f"the query over the spans of {self.folder} failed: {error}") from None
        raise AssertionError  # the last try returns or raises

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> SpanTables:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def parse_host_number(folder: Path) -> int:
    """Return the number N in a folder name `host=N`, or `host=N@NODE` if a node sent the files; -1 for other names."""
    text = folder.name.removeprefix("host=").partition("@")[0]
    return int(text) if text.isdigit() else -1


def read_rank_records(host: Path) -> list[dict[str, Any]]:
    """Return the location of each rank from `ranks.jsonl` in a host's folder; damaged lines are skipped."""
    try:
        return list(RecordReader(host / RANKS_FILE))
    except OSError:
        return []


def request_spans(run: Path, steps: int) -> tuple[int, int]:
    """Request all spans of the next `steps` steps of a live run, by a file that its span services read.

    Raises DataError if no span service has written yet.

    Returns:
        The first and the last requested step.
    """
    newest_step = 0
    for state_file in (run / "spans").glob(f"host=*/{STATE_FILE}"):
        try:
            state = strict_json.loads(read_small_text(state_file))
            newest_step = max([newest_step] + [int(step) for step in state["steps"].values()])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            continue
    if not newest_step:
        raise DataError(
            f"no span service has written to {run / 'spans'} yet: the run is not training, has just begun, or has "
            "observe.timers=false"
        )
    with SpanTables(run) as tables:
        rows = tables.query(
            "SELECT coalesce(sum(total_ns)::DOUBLE / 1e9 / count(DISTINCT step), 0) AS seconds FROM rollups "
            f"WHERE action = 'step' AND attempt = {_NEWEST_ATTEMPT} "
            f"AND rank = (SELECT min(rank) FROM rollups WHERE attempt = {_NEWEST_ATTEMPT}) AND step > ?",
            [newest_step - _RECENT_STEPS],
        )
    step_seconds = float(rows["seconds"][0])
    # Leave out the steps that run before all ranks have received the request.
    delay_steps = 1
    if step_seconds > 0:
        delay_steps = math.ceil(_REQUEST_SECONDS / step_seconds)
    first = newest_step + 1 + delay_steps
    last = first + steps - 1
    file = run / "spans" / REQUEST_FILE
    write_atomically(file, strict_json.dumps({"first": first, "last": last}) + "\n")
    return first, last


def count_complete_steps(run: Path, first: int, last: int) -> int:
    """Count the steps for which the newest attempt has the spans of all its ranks."""
    with SpanTables(run) as tables:
        rows = tables.query(
            "SELECT step FROM (SELECT step, count(DISTINCT rank) AS ranks FROM spans WHERE action = 'step' AND "
            f"attempt = {_NEWEST_ATTEMPT} AND step BETWEEN ? AND ? GROUP BY step) WHERE ranks >= (SELECT "
            f"count(DISTINCT rank) FROM rollups WHERE action = 'step' AND attempt = {_NEWEST_ATTEMPT})",
            [first, last],
        )
        return len(rows["step"])


def _select_parquet(table: str, files: list[Path]) -> str:
    """Return SQL that reads a table from files of hosts' folders."""
    names = ", ".join(quote_sql(str(path)) for path in files)
    return (
        f"SELECT {', '.join(TABLES[table])}, CAST(split_part(host, '@', 1) AS INTEGER) AS host FROM read_parquet("
        f"[{names}], hive_partitioning = true, hive_types_autocast = false, union_by_name = true)"
    )


def _parse_number(value: Any, limit: int) -> int:
    """Return a number from a file if it is from 0 to below the limit, otherwise -1."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if 0 <= number < limit else -1
