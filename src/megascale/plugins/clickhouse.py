"""Span segments in ClickHouse: `observe.span_sinks = ["parquet", "clickhouse=http://HOST:8123/DATABASE"]`.

Needs `pip install 'megascale[clickhouse]'`. The tables have the identity columns (job, run, host, hostname, segment,
row) and the columns of the run folder's tables. The sink lists each complete segment in the table `segments` and does
not send a listed segment again. If the span service is killed before it lists a segment, the next service repeats the
rows. ReplacingMergeTree merges repeated rows later, so a query that must not count them twice needs FINAL. User and
password come from MEGASCALE_CLICKHOUSE_USER and MEGASCALE_CLICKHOUSE_PASSWORD, never from the settings.

Rows go to the server's HTTP interface as CSV, which needs one POST per table. The package clickhouse-connect is not
used because it refuses servers before version 20.
"""

from __future__ import annotations

import errno
import http.client
import os
import re
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode, urlsplit

import duckdb

from megascale.errors import ConfigError
from megascale.observe.store.columns import TABLES, group_by_table, make_columns
from megascale.observe.store.parquet import SMALL_DATABASE, make_table_query, quote_sql
from megascale.observe.store.span_sinks import IDENTITY_COLUMNS, SINK_FACTORIES, make_identity_query
from megascale.observe.store.spool import Segment, read_folder_identity

_TYPES = {"INTEGER": "Int32", "UINTEGER": "UInt32", "BIGINT": "Int64", "DOUBLE": "Float64", "VARCHAR": "String"}
_SORT_COLUMNS = {
    "rollups": "action, step, rank",
    "spans": "step, rank",
    "clocks": "time_ns",
    "counters": "name, device, time_ns",
}
_TIMEOUT_SECONDS = 20.0  # per request; the span rings hold minutes of spans, so a slow server loses none
_DEFAULT_DATABASE = "megascale"


class ClickHouseSink:
    """`SegmentSink` that sends span segments to a ClickHouse server.

    Args:
        folder: folder of the host's spans. The sink writes a segment's CSV files there while it sends them.
        address: http or https URL, whose path is the database (default: megascale).

    Raises:
        ConfigError: the address is not an http or https URL, or its path is not a database name.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._run_identity = read_folder_identity(folder)
        url = urlsplit(address)
        self._database_name = url.path.strip("/") or _DEFAULT_DATABASE
        if url.scheme not in ("http", "https") or not url.hostname or not re.fullmatch(r"\w+", self._database_name):
            raise ConfigError(
                f"observe.span_sinks: clickhouse={address} is not an address; give clickhouse=http://HOST:8123/DATABASE"
            )
        if url.scheme == "https":
            self._server: http.client.HTTPConnection = http.client.HTTPSConnection(
                url.hostname, url.port or 8443, timeout=_TIMEOUT_SECONDS
            )
        else:
            self._server = http.client.HTTPConnection(url.hostname, url.port or 8123, timeout=_TIMEOUT_SECONDS)
        credentials = {
            "X-ClickHouse-User": os.environ.get("MEGASCALE_CLICKHOUSE_USER"),
            "X-ClickHouse-Key": os.environ.get("MEGASCALE_CLICKHOUSE_PASSWORD"),
        }
        self._headers = {header: value for header, value in credentials.items() if value}
        # Whether the server surely lacks the next segment, so that the sink need not ask. Segments arrive in order, and
        # a killed service may have sent only the first one that this sink gets.
        self._lacks_next_segment = False
        self._has_tables = False
        self._duckdb = duckdb.connect(config=SMALL_DATABASE)

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """Send the rows of segment `number`.

        Returns:
            The count of sent rows by table, without empty tables. Empty if the server already has the segment.

        Raises:
            OSError: the server cannot be reached or refuses; the text has its answer.
        """
        metadata = segment.header
        frames_by_table = group_by_table(segment.frames)
        host = int(metadata.get("host", -1))
        lacks_segment = self._lacks_next_segment
        self._lacks_next_segment = False
        if not self._has_tables:
            self._make_tables()
        if not lacks_segment:
            condition = f"run = '{self._run_identity}' AND host = {host} AND segment = {number}"
            if int(self._query(f"SELECT count() FROM {self._database_name}.segments WHERE {condition}") or 0):
                self._lacks_next_segment = True
                return {}
        row_counts: dict[str, int] = {}
        for table in TABLES:
            columns = make_columns(frames_by_table, table, int(metadata.get("clock_ns", 0)))
            row_count = max(len(values) for values in columns.values())
            if row_count:
                self._insert(table, columns, number, metadata)
                row_counts[table] = row_count
        self._query(f"INSERT INTO {self._database_name}.segments VALUES ('{self._run_identity}', {host}, {number})")
        self._lacks_next_segment = True
        return row_counts

    def _make_tables(self) -> None:
        self._query(f"CREATE DATABASE IF NOT EXISTS {self._database_name}")
        for table, types in TABLES.items():
            definitions = [f"{name} {_TYPES[column_type]}" for name, column_type in (IDENTITY_COLUMNS | types).items()]
            self._query(
                f"CREATE TABLE IF NOT EXISTS {self._database_name}.{table} ({', '.join(definitions)}) "
                f"ENGINE = ReplacingMergeTree ORDER BY (job, {_SORT_COLUMNS[table]}, run, host, segment, row)"
            )
        self._query(
            f"CREATE TABLE IF NOT EXISTS {self._database_name}.segments (run String, host Int32, segment UInt32) "
            "ENGINE = ReplacingMergeTree ORDER BY (run, host, segment)"
        )
        self._has_tables = True

    def _insert(self, table: str, columns: dict[str, Any], number: int, metadata: dict[str, Any]) -> None:
        """Send a table's rows as CSV with every text in quotation marks."""
        types = IDENTITY_COLUMNS | TABLES[table]
        text_columns = ", ".join(name for name, column_type in types.items() if column_type == "VARCHAR")
        identity = make_identity_query(self._run_identity, number, metadata, 0)
        csv_file = self._folder / f"clickhouse-{table}.tmp"
        self._duckdb.register("rows", columns)
        try:
            self._duckdb.execute(
                f"COPY (SELECT {identity}, * FROM ({make_table_query(table)})) TO {quote_sql(str(csv_file))} "
                f"(FORMAT csv, HEADER false, FORCE_QUOTE ({text_columns}))"
            ).fetchall()
            with open(csv_file, "rb") as body:
                self._query(f"INSERT INTO {self._database_name}.{table} ({', '.join(types)}) FORMAT CSV", body)
        finally:
            self._duckdb.unregister("rows")
            csv_file.unlink(missing_ok=True)

    def _query(self, query: str, body: IO[bytes] | None = None) -> str:
        """Return the server's answer to a query. For an INSERT, `body` holds the rows."""
        server = f"ClickHouse at {self._server.host}:{self._server.port}"
        try:
            if body is None:
                self._server.request("POST", "/", query.encode(), self._headers)
            else:
                headers = self._headers | {"Content-Length": str(os.fstat(body.fileno()).st_size)}
                self._server.request("POST", f"/?{urlencode({'query': query})}", body, headers)
            response = self._server.getresponse()
            text = response.read().decode(errors="replace").strip()
        except (http.client.HTTPException, OSError) as error:
            self._server.close()
            raise OSError(errno.EIO, f"{server}: {str(error) or repr(error)}") from None
        if response.status != 200:
            self._server.close()  # the server may have left a part of the body unread
            raise OSError(errno.EIO, f"{server} refuses: {text[:300]}")
        return text

    def close(self) -> None:
        """Close the connection to the server."""
        self._server.close()
        self._duckdb.close()


SINK_FACTORIES.register("clickhouse", ClickHouseSink)
