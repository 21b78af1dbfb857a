"""Segments into Kafka: `observe.span_sinks = ["parquet", "kafka=HOST:9092;HOST:9092/PREFIX"]`; pip install '.[kafka]'.

Topics PREFIX.rollups, PREFIX.spans, PREFIX.clocks and PREFIX.counters (prefix: megascale). A message holds up to 1,000
rows of one rank, a JSON object a line (JSONEachRow): the columns of the run folder's tables and before them job, run
(one folder of one host), host, hostname, segment, row. Its key is run/host/rank, so that a rank's rows stay in order.
Every message is there at least once; run, host, segment and row tell one that came again.
Settings of librdkafka such as TLS and SASL stand, `name=value` a line, in the file MEGASCALE_KAFKA_PROPERTIES names.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from megascale.config.text_files import read_text
from megascale.errors import ConfigError, describe_install
from megascale.observe.store.columns import TABLES, by_table, columns
from megascale.observe.store.folder_identity import folder_identity
from megascale.observe.store.parquet import SMALL, select, sql_text
from megascale.observe.store.spool import Segment

log = logging.getLogger("megascale.observe.spans")

_PREFIX = "megascale"
_ROWS = 1000  # of a message, at most some 300 KB
_SLICE = 50_000  # rows that are made into messages at once
_TIMEOUT = 20.0  # seconds for the brokers to have a message: rings hold minutes meanwhile


class KafkaSink:
    """See SegmentSink (span_sinks.py).

    Args:
        folder: of the host's spans.
        address: brokers and the topics' prefix.

    Raises ConfigError for an address that is none, without confluent-kafka, and for properties that it does not know.
    """

    def __init__(self, folder: Path, address: str) -> None:
        import duckdb

        try:
            import confluent_kafka
        except ImportError:
            raise ConfigError(
                f"observe.span_sinks: kafka needs confluent-kafka; {describe_install('kafka')}, or leave it out"
            ) from None
        brokers, _, prefix = address.partition("/")
        if not brokers:
            raise ConfigError("observe.span_sinks: kafka names no broker; give kafka=HOST:9092")
        self._prefix, self._run = prefix or _PREFIX, folder_identity(folder)
        properties = {
            "bootstrap.servers": brokers.replace(";", ","),
            "client.id": "megascale-spans",
            "enable.idempotence": True,
            "message.timeout.ms": round(1e3 * _TIMEOUT),
            "compression.type": "lz4",
            "linger.ms": 20,
            **_properties(os.environ.get("MEGASCALE_KAFKA_PROPERTIES", "")),
        }
        self._error = confluent_kafka.KafkaException
        try:
            self._producer: Any = confluent_kafka.Producer(properties, logger=log)
        except self._error as error:
            raise ConfigError(f"observe.span_sinks: kafka={address}: {error}") from None
        self._refused = ""
        self._rows: Any = duckdb.connect(config=SMALL)

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """See SegmentSink; OSError if a message was not taken by the brokers."""
        about, frames, told = segment.about, by_table(segment.frames), {}
        self._refused = ""
        try:
            for table in TABLES:
                found = columns(frames, table, int(about.get("clock_ns", 0)))
                if rows := len(next(iter(found.values()))):
                    for begin in range(0, rows, _SLICE):
                        self._send(
                            table, {k: v[begin : begin + _SLICE] for k, v in found.items()}, begin, number, about
                        )
                    told[table] = rows
            left = self._producer.flush(_TIMEOUT + 1)
        except (self._error, BufferError) as error:
            self._refused, left = str(error), len(self._producer)
        if self._refused or left:
            self._producer.purge()  # all of it comes again with the segment
            self._producer.flush(0)
            raise OSError(5, f"Kafka has not taken segment {number}: {self._refused or f'{left} messages left'}")
        return told

    def _send(self, table: str, found: dict[str, Any], begin: int, number: int, about: dict[str, Any]) -> None:
        """Hand rows, the first of them number `begin`, to the producer's queue."""
        host = int(about.get("host", -1))
        whose = {
            "job": sql_text(str(about.get("job", ""))), "run": sql_text(self._run), "host": str(host),
            "hostname": sql_text(str(about.get("hostname", ""))), "segment": str(number),
            "row": f"row_number() OVER () + {begin - 1}",
        }  # fmt: skip
        listed = ", ".join(f"{value} AS {name}" for name, value in whose.items())
        # JSON has no numbers that are none.
        finite = " REPLACE (CASE WHEN isfinite(value) THEN value END AS value)" if table == "counters" else ""
        whose_rank = "rank" if "rank" in TABLES[table] else "-1"
        self._rows.register("rows", found)
        try:
            messages = self._rows.execute(
                f"WITH one AS (SELECT {listed}, *{finite} FROM ({select(table)})), "
                f"told AS (SELECT {whose_rank} AS whose, row, to_json(one)::VARCHAR AS text FROM one) "
                f"SELECT whose, string_agg(text, chr(10) ORDER BY row) FROM told "
                f"GROUP BY whose, row // {_ROWS} ORDER BY min(row)"
            ).fetchall()
        finally:
            self._rows.unregister("rows")
        for rank, text in messages:
            key = f"{self._run}/{host}/{rank}"
            while not self._refused:
                try:
                    self._producer.produce(f"{self._prefix}.{table}", text.encode(), key, on_delivery=self._delivered)
                    break
                except BufferError:  # its queue is full
                    self._producer.poll(0.1)
            self._producer.poll(0)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self._refused = self._refused or str(error)

    def close(self) -> None:
        """Let go of the brokers."""
        self._producer.flush(1.0)
        self._rows.close()


def _properties(file: str) -> dict[str, str]:
    """Settings by name of a file with a `name=value` a line; ConfigError if it cannot be read."""
    if not file:
        return {}
    try:
        lines = read_text(Path(file)).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"MEGASCALE_KAFKA_PROPERTIES={file} cannot be read: {error}") from None
    pairs = (line.partition("=") for line in lines if line.strip() and not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}
