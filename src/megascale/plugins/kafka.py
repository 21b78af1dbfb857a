"""Span segments in Kafka: `observe.span_sinks = ["parquet", "kafka=HOST:9092;HOST:9092/PREFIX"]`.

Needs `pip install 'megascale[kafka]'`. The topics are PREFIX.rollups, PREFIX.spans, PREFIX.clocks and PREFIX.counters
(default prefix: megascale). A message holds up to 1,000 rows of one rank, one JSON object per line (JSONEachRow): the
identity columns (job, run, host, hostname, segment, row) and the columns of the run folder's tables. The key is
run/host/rank, so that a rank's rows stay in order. Every message arrives at least once; run, host, segment and row
identify a repeated one.

The file that MEGASCALE_KAFKA_PROPERTIES names holds librdkafka's settings, such as TLS and SASL, as `name=value` lines.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import confluent_kafka
import duckdb

from megascale.config.text_files import read_text
from megascale.errors import ConfigError
from megascale.observe.store.columns import TABLES, group_by_table, make_columns
from megascale.observe.store.parquet import SMALL_DATABASE, make_table_query
from megascale.observe.store.span_sinks import KINDS, make_identity_query
from megascale.observe.store.spool import Segment, read_folder_identity

log = logging.getLogger("megascale.observe.spans")

_PREFIX = "megascale"
_MESSAGE_ROWS = 1000  # rows per message, about 300 KB at most
_BATCH_ROWS = 50_000  # rows that become messages at once
_TIMEOUT = 20.0  # seconds for the brokers to take a message; the rings hold minutes of spans meanwhile


class KafkaSink:
    """Sink that sends segments to Kafka (`SegmentSink`).

    Args:
        folder: folder of the host's spans.
        address: brokers, separated by semicolons, and after a slash the topics' prefix.

    Raises:
        ConfigError: the address names no broker, or librdkafka rejects a property.
    """

    def __init__(self, folder: Path, address: str) -> None:
        brokers, _, prefix = address.partition("/")
        if not brokers:
            raise ConfigError("observe.span_sinks: kafka names no broker; give kafka=HOST:9092")
        self._prefix = prefix or _PREFIX
        self._run = read_folder_identity(folder)
        properties = {
            "bootstrap.servers": brokers.replace(";", ","),
            "client.id": "megascale-spans",
            "enable.idempotence": True,
            "message.timeout.ms": round(1e3 * _TIMEOUT),
            "compression.type": "lz4",
            "linger.ms": 20,
            **_read_properties(os.environ.get("MEGASCALE_KAFKA_PROPERTIES", "")),
        }
        try:
            self._producer: Any = confluent_kafka.Producer(properties, logger=log)
        except confluent_kafka.KafkaException as error:
            raise ConfigError(f"observe.span_sinks: kafka={address}: {error}") from None
        self._rejection = ""
        self._database = duckdb.connect(config=SMALL_DATABASE)

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """Send a segment's rows and return their number by table; OSError if the brokers do not take all of them."""
        metadata = segment.header
        frames = group_by_table(segment.frames)
        rows: dict[str, int] = {}
        self._rejection = ""
        try:
            for table in TABLES:
                data = make_columns(frames, table, int(metadata.get("clock_ns", 0)))
                count = len(next(iter(data.values())))
                for begin in range(0, count, _BATCH_ROWS):
                    batch = {name: values[begin : begin + _BATCH_ROWS] for name, values in data.items()}
                    self._send(table, batch, begin, number=number, metadata=metadata)
                if count:
                    rows[table] = count
            unsent = self._producer.flush(_TIMEOUT + 1)
        except (confluent_kafka.KafkaException, BufferError) as error:
            self._rejection = str(error)
            unsent = len(self._producer)
        if self._rejection or unsent:
            self._producer.purge()  # the whole segment is sent again
            self._producer.flush(0)
            reason = self._rejection or f"{unsent} messages left"
            raise OSError(errno.EIO, f"Kafka has not taken segment {number}: {reason}")
        return rows

    def _send(self, table: str, data: dict[str, Any], first_row: int, *, number: int, metadata: dict[str, Any]) -> None:
        """Queue rows of `table`, counted from `first_row`, as messages of one rank each."""
        identity = make_identity_query(self._run, number, metadata, first_row)
        # JSON has no NaN and no infinity.
        if table == "counters":
            finite = " REPLACE (CASE WHEN isfinite(value) THEN value END AS value)"
        else:
            finite = ""
        rank_column = "rank" if "rank" in TABLES[table] else "-1"
        self._database.register("rows", data)
        try:
            messages = self._database.execute(
                f"WITH identified AS (SELECT {identity}, *{finite} FROM ({make_table_query(table)})), "
                f"texts AS (SELECT {rank_column} AS rank, row, to_json(identified)::VARCHAR AS text FROM identified) "
                f"SELECT rank, string_agg(text, chr(10) ORDER BY row) FROM texts "
                f"GROUP BY rank, row // {_MESSAGE_ROWS} ORDER BY min(row)"
            ).fetchall()
        finally:
            self._database.unregister("rows")
        topic = f"{self._prefix}.{table}"
        for rank, text in messages:
            self._produce(topic, f"{self._run}/{int(metadata.get('host', -1))}/{rank}", text.encode())

    def _produce(self, topic: str, key: str, message: bytes) -> None:
        """Queue a message, waiting while the producer's queue is full."""
        while not self._rejection:
            try:
                self._producer.produce(topic, message, key, on_delivery=self._note_delivery)
                break
            except BufferError:
                self._producer.poll(0.1)
        self._producer.poll(0)

    def _note_delivery(self, error: Any, message: Any) -> None:
        if error is not None:
            self._rejection = self._rejection or str(error)

    def close(self) -> None:
        """Close the connections to the brokers."""
        self._producer.flush(1.0)
        self._database.close()


def _read_properties(file: str) -> dict[str, str]:
    """Read a file of `name=value` lines; ConfigError if it cannot be read."""
    if not file:
        return {}
    try:
        lines = read_text(Path(file)).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"MEGASCALE_KAFKA_PROPERTIES={file} cannot be read: {error}") from None
    pairs = (line.partition("=") for line in lines if line.strip() and not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}


KINDS.register("kafka", KafkaSink)
