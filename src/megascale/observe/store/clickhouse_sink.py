"""Segments into a ClickHouse server over HTTP: `observe.span_sinks = ["parquet", "clickhouse=http://HOST:8123/DATABASE"]`.

The tables are those of the run folder (columns.py), with whose rows they are before them: job, run (one folder of one
host), host, hostname, segment, row. A segment is told once: what a table `segments` has is not sent again, and what a
service killed between the two sends again replaces itself (ReplacingMergeTree; ask with FINAL where that matters).
User and password are in MEGASCALE_CLICKHOUSE_USER and MEGASCALE_CLICKHOUSE_PASSWORD, never in the settings.
"""

from __future__ import annotations

import http.client
import os
import re
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode, urlsplit

from megascale.errors import ConfigError
from megascale.observe.store.columns import TABLES, group_by_table, make_columns
from megascale.observe.store.parquet import SMALL_DATABASE, quote_sql, table_query
from megascale.observe.store.spool import Segment, folder_identity

_TYPES = {"INTEGER": "Int32", "BIGINT": "Int64", "DOUBLE": "Float64", "VARCHAR": "String"}
_WHOSE = {"job": "String", "run": "String", "host": "Int32", "hostname": "String", "segment": "UInt32", "row": "UInt32"}
_ORDER = {
    "rollups": "action, step, rank", "spans": "step, rank", "clocks": "time_ns", "counters": "name, device, time_ns",
}  # fmt: skip
_TIMEOUT = 20.0  # seconds for an answer: rings hold minutes meanwhile
_DATABASE = "megascale"


class ClickHouseSink:
    """See SegmentSink (span_sinks.py).

    Args:
        folder: of the host's spans; a segment's rows are made there.
        address: http or https URL, its path the database (megascale).

    Raises ConfigError for an address that is none.
    """

    def __init__(self, folder: Path, address: str) -> None:
        import duckdb

        self._folder, self._run = folder, folder_identity(folder)
        parts = urlsplit(address)
        self._database = parts.path.strip("/") or _DATABASE
        if parts.scheme not in ("http", "https") or not parts.hostname or not re.fullmatch(r"\w+", self._database):
            raise ConfigError(
                f"observe.span_sinks: clickhouse={address} is no address; give clickhouse=http://HOST:8123/DATABASE"
            )
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        port = parts.port or (8443 if parts.scheme == "https" else 8123)
        self._server = kind(parts.hostname, port, timeout=_TIMEOUT)
        self._headers = {}
        for header, name in (("X-ClickHouse-User", "USER"), ("X-ClickHouse-Key", "PASSWORD")):
            if value := os.environ.get(f"MEGASCALE_CLICKHOUSE_{name}"):
                self._headers[header] = value
        self._sure = False  # whether the server is known to have no segment that comes now
        self._made = False
        self._rows: Any = duckdb.connect(config=SMALL_DATABASE)

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """See SegmentSink; OSError with the server's words if it refuses."""
        about, frames, told = segment.header, group_by_table(segment.frames), {}
        host = int(about.get("host", -1))
        key = f"run = '{self._run}' AND host = {host} AND segment = {number}"
        sure, self._sure = self._sure, False
        if not self._made:
            self._make_tables()
        if not sure and int(self._ask(f"SELECT count() FROM {self._database}.segments WHERE {key}") or 0):
            self._sure = True
            return {}
        for table in TABLES:
            found = make_columns(frames, table, int(about.get("clock_ns", 0)))
            if rows := len(next(iter(found.values()))):
                self._insert(table, found, number, about)
                told[table] = rows
        self._ask(f"INSERT INTO {self._database}.segments VALUES ('{self._run}', {host}, {number})")
        self._sure = True
        return told

    def _make_tables(self) -> None:
        self._ask(f"CREATE DATABASE IF NOT EXISTS {self._database}")
        for table, kinds in TABLES.items():
            listed = _WHOSE | {name: _TYPES[kind] for name, kind in kinds.items()}
            self._ask(
                f"CREATE TABLE IF NOT EXISTS {self._database}.{table} "
                f"({', '.join(f'{name} {kind}' for name, kind in listed.items())}) ENGINE = ReplacingMergeTree "
                f"ORDER BY (job, {_ORDER[table]}, run, host, segment, row)"
            )
        self._ask(
            f"CREATE TABLE IF NOT EXISTS {self._database}.segments (run String, host Int32, segment UInt32) "
            "ENGINE = ReplacingMergeTree ORDER BY (run, host, segment)"
        )
        self._made = True

    def _insert(self, table: str, found: dict[str, Any], number: int, about: dict[str, Any]) -> None:
        """Send a table's rows, as CSV with every text in quotation marks."""
        names = [*_WHOSE, *TABLES[table]]
        whose = {
            "job": quote_sql(str(about.get("job", ""))),
            "run": quote_sql(self._run),
            "host": str(int(about.get("host", -1))),
            "hostname": quote_sql(str(about.get("hostname", ""))),
            "segment": str(number),
            "row": "row_number() OVER () - 1",
        }
        texts = ", ".join(["job", "run", "hostname", *(n for n, kind in TABLES[table].items() if kind == "VARCHAR")])
        listed = ", ".join(f"{value} AS {name}" for name, value in whose.items())
        file = self._folder / f"clickhouse-{table}.tmp"
        self._rows.register("rows", found)
        try:
            self._rows.execute(
                f"COPY (SELECT {listed}, * FROM ({table_query(table)})) TO {quote_sql(str(file))} "
                f"(FORMAT csv, HEADER false, FORCE_QUOTE ({texts}))"
            ).fetchall()
            with open(file, "rb") as body:
                self._ask(f"INSERT INTO {self._database}.{table} ({', '.join(names)}) FORMAT CSV", body)
        finally:
            self._rows.unregister("rows")
            file.unlink(missing_ok=True)

    def _ask(self, query: str, body: IO[bytes] | None = None) -> str:
        """The server's answer to a query, or to an insert whose rows are the body."""
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
            raise OSError(5, f"ClickHouse at {self._server.host}:{self._server.port}: {error or repr(error)}") from None
        if answer.status != 200:
            self._server.close()  # it may not have read all of the body
            raise OSError(5, f"ClickHouse at {self._server.host}:{self._server.port} refuses: {text[:300]}")
        return text

    def close(self) -> None:
        """Let go of the server."""
        self._server.close()
        self._rows.close()
