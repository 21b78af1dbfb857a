"""Span segments in Kafka: `observe.span_sinks = ["parquet", "kafka=HOST:9092;HOST:9092/PREFIX"]`.

Needs `pip install 'megascale[kafka]'`. The topics are PREFIX.rollups, PREFIX.spans, PREFIX.clocks and PREFIX.counters
(default prefix: megascale). A message holds up to 1,000 rows of one rank, one JSON object per line (JSONEachRow): the
identity columns (job, run, host, hostname, segment, row) and the columns of the run folder's tables. The key is
run/host/rank, so that a rank's rows stay in order. Every message arrives at least once. The columns run, host, segment
and row identify a repeated row.

MEGASCALE_KAFKA_PROPERTIES names a file with librdkafka's settings, such as TLS and SASL, as `name=value` lines.
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
from megascale.observe.store.span_sinks import SINK_FACTORIES, make_identity_query
from megascale.observe.store.spool import Segment, read_folder_identity

log = logging.getLogger("megascale.observe.spans")

_DEFAULT_PREFIX = "megascale"
_MESSAGE_ROWS = 1000  # rows per message, about 300 KB at most
_BATCH_ROWS = 50_000  # rows that one query converts to messages, which bounds the memory for their texts
# Limit per message. Meanwhile newer spans wait in buffers on this host, which have room for minutes of spans, so slow
# brokers cause no loss.
_TIMEOUT_SECONDS = 20.0


class KafkaSink:
    """`SegmentSink` that sends span segments to Kafka.

    Args:
        folder: folder of the host's spans.
        address: HOST:PORT of the brokers, separated by semicolons, then optionally a slash and the topics' prefix.

    Raises:
        ConfigError: the address names no broker, or librdkafka rejects a property.
    """

    def __init__(self, folder: Path, address: str) -> None:
        brokers, _, prefix = address.partition("/")
        if not brokers:
            raise ConfigError("observe.span_sinks: kafka names no broker; give kafka=HOST:9092")
        self._prefix = prefix or _DEFAULT_PREFIX
        self._run = read_folder_identity(folder)  # value of the column run, and of run in the keys
        properties = {
            "bootstrap.servers": brokers.replace(";", ","),
            "client.id": "megascale-spans",
            "enable.idempotence": True,
            "message.timeout.ms": round(1e3 * _TIMEOUT_SECONDS),
            "compression.type": "lz4",
            "linger.ms": 20,
            **_read_properties(os.environ.get("MEGASCALE_KAFKA_PROPERTIES", "")),
        }
        try:
            self._producer: Any = confluent_kafka.Producer(properties, logger=log)
        except confluent_kafka.KafkaException as error:
            raise ConfigError(f"observe.span_sinks: kafka={address}: {error}") from None
        self._failure = ""
        self._duckdb = duckdb.connect(config=SMALL_DATABASE)

    def write_segment(self, number: int, segment: Segment) -> dict[str, int]:
        """Send the rows of segment `number`.

        Returns:
            The count of sent rows by table, without empty tables.

        Raises:
            OSError: the brokers did not accept all rows. The caller must send the whole segment again.
        """
        metadata = segment.header
        frames_by_table = group_by_table(segment.frames)
        row_counts: dict[str, int] = {}
        self._failure = ""
        clock_offset_ns = int(metadata.get("clock_ns", 0))
        try:
            for table in TABLES:
                columns = make_columns(frames_by_table, table, clock_offset_ns)
                row_count = max(len(values) for values in columns.values())
                for first_row in range(0, row_count, _BATCH_ROWS):
                    batch = {name: values[first_row : first_row + _BATCH_ROWS] for name, values in columns.items()}
                    self._send(table, batch, first_row, number=number, metadata=metadata)
                if row_count:
                    row_counts[table] = row_count
            # One second more than the limit per message, so that each late message reports its failure first.
            unsent_count = self._producer.flush(_TIMEOUT_SECONDS + 1)
        except (confluent_kafka.KafkaException, BufferError) as error:
            self._failure = str(error)
            unsent_count = len(self._producer)
        if self._failure or unsent_count:
            self._producer.purge()  # drop the queued rows, because the next call sends the whole segment again
            self._producer.flush(0)
            reason = self._failure or f"{unsent_count} messages were not delivered"
            raise OSError(errno.EIO, f"Kafka has not accepted segment {number}: {reason}")
        return row_counts

    def _send(
        self, table: str, columns: dict[str, Any], first_row: int, *, number: int, metadata: dict[str, Any]
    ) -> None:
        """Queue rows of `table` as messages of one rank each.

        Args:
            first_row: index of the first of these rows within the segment's rows of the table.
        """
        identity = make_identity_query(self._run, number, metadata, first_row)
        # JSON cannot represent NaN and infinity, so such values become null.
        if table == "counters":
            finite_clause = " REPLACE (CASE WHEN isfinite(value) THEN value END AS value)"
        else:
            finite_clause = ""
        rank_column = "rank" if "rank" in TABLES[table] else "-1"
        self._duckdb.register("rows", columns)  # the SQL of `make_table_query` selects from this name
        try:
            messages = self._duckdb.execute(
                f"WITH identified AS (SELECT {identity}, *{finite_clause} FROM ({make_table_query(table)})), "
                f"texts AS (SELECT {rank_column} AS rank, row, to_json(identified)::VARCHAR AS text FROM identified) "
                f"SELECT rank, string_agg(text, chr(10) ORDER BY row) FROM texts "
                f"GROUP BY rank, row // {_MESSAGE_ROWS} ORDER BY min(row)"
            ).fetchall()
        finally:
            self._duckdb.unregister("rows")
        topic = f"{self._prefix}.{table}"
        for rank, text in messages:
            self._produce(topic, f"{self._run}/{int(metadata.get('host', -1))}/{rank}", text.encode())

    def _produce(self, topic: str, key: str, message: bytes) -> None:
        """Queue a message, waiting while the producer's queue is full."""
        while not self._failure:
            try:
                self._producer.produce(topic, message, key, on_delivery=self._note_delivery)
                break
            except BufferError:
                self._producer.poll(0.1)
        self._producer.poll(0)

    def _note_delivery(self, error: Any, message: Any) -> None:
        """Keep the first delivery error. The producer calls this method from `poll` and `flush`."""
        if error is not None and not self._failure:
            self._failure = str(error)

    def close(self) -> None:
        """Close the connections to the brokers."""
        self._producer.flush(1.0)
        self._duckdb.close()


def _read_properties(file: str) -> dict[str, str]:
    """Return the values by name in a file of `name=value` lines. Raises ConfigError if the file is unreadable."""
    if not file:
        return {}
    try:
        lines = read_text(Path(file)).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"MEGASCALE_KAFKA_PROPERTIES={file} cannot be read: {error}; give a text file that this user can read"
        ) from None
    pairs = (line.partition("=") for line in lines if line.strip() and not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}


SINK_FACTORIES.register("kafka", KafkaSink)
