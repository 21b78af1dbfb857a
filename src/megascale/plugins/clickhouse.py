"""Span segments in ClickHouse: `observe.span_sinks = ["parquet", "clickhouse=http://HOST:8123/DATABASE"]`.

Needs `pip install 'megascale[clickhouse]'`. The tables have the identity columns (job, run, host, hostname, segment,
row) and the columns of the run folder's tables. A segment is sent once: a segment listed in the table `segments` is not
sent again. Rows that a service sends again after it was killed in between replace themselves (ReplacingMergeTree; query
with FINAL where that matters). User and password come from MEGASCALE_CLICKHOUSE_USER and
MEGASCALE_CLICKHOUSE_PASSWORD, never from the settings.

Rows go to the server's HTTP interface as CSV. The package clickhouse-connect refuses servers before version 20, and an
insert of CSV needs no more than one POST.
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
from megascale.observe.store.span_sinks import IDENTITY_COLUMNS, KINDS, make_identity_query
from megascale.observe.store.spool import Segment, read_folder_identity

_TYPES = {"INTEGER": "Int32", "UINTEGER": "UInt32", "BIGINT": "Int64", "DOUBLE": "Float64", "VARCHAR": "String"}
_SORT_COLUMNS = {
    "rollups": "action, step, rank",
    "spans": "step, rank",
    "clocks": "time_ns",
    "counters": "name, device, time_ns",
}
_TIMEOUT = 20.0  # seconds for an answer; the rings hold minutes of spans meanwhile
_DATABASE = "megascale"


class ClickHouseSink:
    """Sink that sends segments to a ClickHouse server (`SegmentSink`).

    Args:
        folder: folder of the host's spans, which holds a segment's rows while they are sent.
        address: http or https URL, whose path is the database (default: megascale).

    Raises:
        ConfigError: the address is not such a URL.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._run = read_folder_identity(folder)
        parts = urlsplit(address)
        self._name = parts.path.strip("/") or _DATABASE
        if parts.scheme not in ("http", "https") or not parts.hostname or not re.fullmatch(r"\w+", self._name):
            raise ConfigError(
                f"observe.span_sinks: clickhouse={address} is not an address; give clickhouse=http://HOST:8123/DATABASE"
            )
        if parts.scheme == "https":
            self._server: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port or 8443, timeout=_TIMEOUT
            )
        else:
            self._server = http.client.HTTPConnection(parts.hostname, parts.port or 8123, timeout=_TIMEOUT)
        credentials = {
            "X-ClickHouse-User": os.environ.get("MEGASCALE_CLICKHOUSE_USER"),
            "X-ClickHouse-Key": os.environ.get("MEGASCALE_CLICKHOUSE_PASSWORD"),
        }
        self._headers = {header: value for header, value in credentials.items() if value}
        self._lacks_next = False  # the server is known not to have the next segment
        self._has_tables = False
        self._database = duckdb.connect(config=SMALL_DATABASE)

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """Send a segment's rows and return their number by table; OSError with the server's answer if it refuses."""
        metadata = segment.header
        frames = group_by_table(segment.frames)
        host = int(metadata.get("host", -1))
        lacks_segment = self._lacks_next
        self._lacks_next = False
        if not self._has_tables:
            self._make_tables()
        if not lacks_segment:
            condition = f"run = '{self._run}' AND host = {host} AND segment = {number}"
            if int(self._query(f"SELECT count() FROM {self._name}.segments WHERE {condition}") or 0):
                self._lacks_next = True
                return {}
        rows: dict[str, int] = {}
        for table in TABLES:
            data = make_columns(frames, table, int(metadata.get("clock_ns", 0)))
            count = len(next(iter(data.values())))
            if count:
                self._insert(table, data, number, metadata)
                rows[table] = count
        self._query(f"INSERT INTO {self._name}.segments VALUES ('{self._run}', {host}, {number})")
        self._lacks_next = True
        return rows

    def _make_tables(self) -> None:
        self._query(f"CREATE DATABASE IF NOT EXISTS {self._name}")
        for table, types in TABLES.items():
            definitions = [f"{name} {_TYPES[kind]}" for name, kind in (IDENTITY_COLUMNS | types).items()]
            self._query(
                f"CREATE TABLE IF NOT EXISTS {self._name}.{table} ({', '.join(definitions)}) "
                f"ENGINE = ReplacingMergeTree ORDER BY (job, {_SORT_COLUMNS[table]}, run, host, segment, row)"
            )
        self._query(
            f"CREATE TABLE IF NOT EXISTS {self._name}.segments (run String, host Int32, segment UInt32) "
            "ENGINE = ReplacingMergeTree ORDER BY (run, host, segment)"
        )
        self._has_tables = True

    def _insert(self, table: str, data: dict[str, Any], number: int, metadata: dict[str, Any]) -> None:
        """Send a table's rows as CSV with every text in quotation marks."""
        types = IDENTITY_COLUMNS | TABLES[table]
        texts = ", ".join(name for name, kind in types.items() if kind == "VARCHAR")
        identity = make_identity_query(self._run, number, metadata, 0)
        file = self._folder / f"clickhouse-{table}.tmp"
        self._database.register("rows", data)
        try:
            self._database.execute(
                f"COPY (SELECT {identity}, * FROM ({make_table_query(table)})) TO {quote_sql(str(file))} "
                f"(FORMAT csv, HEADER false, FORCE_QUOTE ({texts}))"
            ).fetchall()
            with open(file, "rb") as body:
                self._query(f"INSERT INTO {self._name}.{table} ({', '.join(types)}) FORMAT CSV", body)
        finally:
            self._database.unregister("rows")
            file.unlink(missing_ok=True)

    def _query(self, query: str, body: IO[bytes] | None = None) -> str:
        """Return the server's answer to a query, or to an insert whose rows are the body."""
        server = f"ClickHouse at {self._server.host}:{self._server.port}"
        try:
            if body is None:
                self._server.request("POST", "/", query.encode(), self._headers)
            else:
                length = {"Content-Length": str(os.fstat(body.fileno()).st_size)}
                self._server.request("POST", f"/?{urlencode({'query': query})}", body, self._headers | length)
            answer = self._server.getresponse()
            text = answer.read().decode(errors="replace").strip()
        except (http.client.HTTPException, OSError) as error:
            self._server.close()
            raise OSError(errno.EIO, f"{server}: {error or repr(error)}") from None
        if answer.status != 200:
            self._server.close()  # it may not have read all of the body
            raise OSError(errno.EIO, f"{server} refuses: {text[:300]}")
        return text

    def close(self) -> None:
        """Close the connection to the server."""
        self._server.close()
        self._database.close()


KINDS.register("clickhouse", ClickHouseSink)
