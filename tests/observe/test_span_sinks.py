"""Span sinks beside Parquet, against real servers: Debian's ClickHouse, and Kafka brokers that librdkafka plays."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest

from megascale.config import load
from megascale.core.spans import SpanAxis, SpanKind
from megascale.errors import ConfigError
from megascale.observe.store.frames import COUNTER, COUNTERS, ROLLUP, ROLLUPS, SPAN, SPANS
from megascale.observe.store.ingest import Ingest
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.span_sinks import open_span_sinks
from megascale.observe.store.spool import read_segment
from megascale.plugins.clickhouse import ClickHouseSink
from megascale.plugins.kafka import KafkaSink
from tests.rendezvous.conftest import free_port

OFFSET = 10**18
HOSTILE = '\'; DROP \\N "x"\n{'


def step_of(ring: SpanRing, step: int) -> None:
    """A step's roll-up and 1,500 spans."""
    rollup = np.zeros(1, ROLLUP)
    rollup["kind"], rollup["count"], rollup["total_ns"], rollup["first_ns"] = SpanKind.STEP, 1, 100 * step, 5
    ring.write(ROLLUPS, step, rollup, 7)
    spans = np.zeros(1500, SPAN)
    spans["kind"], spans["axis"], spans["microbatch"] = SpanKind.WAIT, SpanAxis.DATA, np.arange(1500)
    spans["start_ns"], spans["end_ns"] = 1000 * step, 1000 * step + np.arange(1500)
    ring.write(SPANS, step, spans, 7)


OPENED: list[Ingest] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPENED:
        sink = OPENED.pop()._sink
        if sink is not None:
            sink.close()


def fed(out: Path, sinks: list[str]) -> Ingest:
    """An ingest that has taken two steps of rank 3 and a counter, its segment not ended."""
    ingest = Ingest(
        out, job=HOSTILE, host=2, hostname="node-2", clock_ns=OFFSET, sink=open_span_sinks(sinks), segment_seconds=1.0
    )
    OPENED.append(ingest)
    ring = SpanRing(rank=3, attempt=1)
    for step in (1, 2):
        step_of(ring, step)
    ingest.take_frames(ring)
    records = np.zeros(2, COUNTER)
    records["time_ns"], records["value"], records["name"], records["device"] = 9, [2.5, np.nan], HOSTILE.encode(), b"e0"
    ingest.add_records(COUNTERS, records)
    return ingest


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_settings_name_sinks_with_their_addresses():
    inputs = ["parquet", "clickhouse=http://h:8123/db", "kafka=a:9092;b:9092/x"]
    assert load(None, [f"--observe.span_sinks={','.join(inputs)}"]).observe.span_sinks == inputs
    with pytest.raises(ConfigError, match=r"needs an address: clickhouse=http://HOST:8123/DATABASE"):
        load(None, ["--observe.span_sinks=clickhouse"])
    with pytest.raises(ConfigError, match="holds a user or password"):
        load(None, ["--observe.span_sinks=clickhouse=http://me:secret@h:8123"])


@pytest.mark.parametrize("address", ["h:8123", "ftp://h", "http://h/two words", "http:///db"])
def test_an_address_that_is_none_names_the_remedy(tmp_path, address):
    with pytest.raises(ConfigError, match="give clickhouse=http://HOST:8123/DATABASE"):
        ClickHouseSink(tmp_path, address)


# ClickHouse ---------------------------------------------------------------------------------------------------------

SERVER = shutil.which("clickhouse-server", path="/usr/bin:/usr/sbin:/usr/local/bin")
CONFIG = """<yandex>
<logger><level>warning</level><log>{0}/log</log><errorlog>{0}/errors</errorlog></logger>
<listen_host>127.0.0.1</listen_host><http_port>{1}</http_port><tcp_port>{2}</tcp_port>
<path>{0}/data/</path><tmp_path>{0}/tmp/</tmp_path><mark_cache_size>5368709</mark_cache_size>
<users_config>{0}/users.xml</users_config><default_profile>default</default_profile>
<default_database>default</default_database>
</yandex>"""
USERS = """<yandex><profiles><default><max_memory_usage>1000000000</max_memory_usage></default></profiles>
<users><writer><password>secret</password><networks><ip>127.0.0.1</ip></networks><profile>default</profile>
<quota>default</quota></writer></users><quotas><default></default></quotas></yandex>"""


class Server:
    """A ClickHouse server on this machine."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        (folder / "config.xml").write_text(CONFIG.format(folder, self.port, free_port()))
        (folder / "users.xml").write_text(USERS)
        command = [str(SERVER), f"--config-file={folder}/config.xml"]
        with open(folder / "out", "wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder)
        deadline = time.monotonic() + 60
        while True:
            try:
                assert self.ask("SELECT 1") == "1"
                return
            except OSError:
                output = (folder / "out").read_text()[-2000:]
                assert self.process.poll() is None, output
                assert time.monotonic() < deadline, output
                time.sleep(0.1)

    def ask(self, query: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            details = {"X-ClickHouse-User": "writer", "X-ClickHouse-Key": "secret"}
            connection.request("GET", f"/?{urlencode({'query': query})}", headers=details)
            return connection.getresponse().read().decode().strip()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def clickhouse(tmp_path_factory) -> Iterator[Server]:
    if SERVER is None:
        pytest.skip("clickhouse-server is not installed (Debian: clickhouse-server)")
    server = Server(tmp_path_factory.mktemp("clickhouse"))
    yield server
    server.process.kill()
    server.process.wait()


def test_clickhouse_gets_each_row_once(tmp_path, clickhouse, monkeypatch):
    """Refused at first; then each segment once, also when it is told again by a service that was killed meanwhile."""
    address = f"clickhouse=http://127.0.0.1:{clickhouse.port}/spans_of_test"
    ingest = fed(tmp_path, ["parquet", address])
    current = 1e9
    ingest.maintain(current)
    assert ingest.failures == 1
    assert "refuses" in ingest.error  # no user was given
    monkeypatch.setenv("MEGASCALE_CLICKHOUSE_USER", "writer")
    monkeypatch.setenv("MEGASCALE_CLICKHOUSE_PASSWORD", "secret")
    ingest = fed(tmp_path, ["parquet", address])  # another service: the same segment, and one of its own
    ingest.maintain(current := current + 20)
    ingest.maintain(current + 20)
    assert ingest.failures == 0, ingest.error

    def count(table: str, final: str = "FINAL") -> list[str]:
        return clickhouse.ask(f"SELECT count() FROM spans_of_test.{table} {final}").splitlines()

    assert [count(table) for table in ("spans", "rollups", "counters", "segments")] == [["6000"], ["4"], ["4"], ["2"]]
    report = clickhouse.ask(
        "SELECT host, hostname, rank, step, action, axis, microbatch, start_ns, end_ns FROM spans_of_test.spans "
        "WHERE segment = 0 AND step = 2 AND row = 2999 FORMAT TSV"
    )
    assert report == f"2\tnode-2\t3\t2\twait\tdata\t1499\t{OFFSET + 2000}\t{OFFSET + 3499}"
    names = clickhouse.ask("SELECT DISTINCT job, name FROM spans_of_test.counters FORMAT JSONCompact")
    assert json.loads(names)["data"] == [[HOSTILE, HOSTILE]]

    # Killed after the rows and before the word that they are there: they come again, and replace themselves.
    clickhouse.ask("SYSTEM STOP MERGES")
    repeated = fed(tmp_path, ["parquet", address])
    number = repeated._spool.rotate()
    segment = read_segment(next(tmp_path.glob("spool-*.bin")))
    assert number == 2
    broken = ClickHouseSink(tmp_path, address.partition("=")[2])
    ask = broken._query

    def killed(query: str, body=None) -> str:
        if "segments VALUES" in query:
            raise OSError("killed")
        return ask(query, body)

    monkeypatch.setattr(broken, "_query", killed)
    with pytest.raises(OSError, match="killed"):
        broken.write_segment(number, segment)
    broken.close()
    sink = ClickHouseSink(tmp_path, address.partition("=")[2])
    assert sink.write_segment(number, segment)["spans"] == 3000
    assert sink.write_segment(number, segment)["spans"] == 3000  # as _Several never does
    sink.close()
    fresh = ClickHouseSink(tmp_path, address.partition("=")[2])
    assert fresh.write_segment(number, segment) == {}  # another does
    fresh.close()
    assert int(count("spans", "")[0]) > 9000
    assert count("spans") == ["9000"]


def test_a_clickhouse_that_is_away_is_told_later(tmp_path):
    ingest = fed(tmp_path, ["parquet", f"clickhouse=http://127.0.0.1:{closed_port()}"])
    ingest.maintain(1e9)
    assert ingest.failures == 1
    assert "Connection refused" in ingest.error
    assert list(tmp_path.glob("spool-*.bin"))


# Kafka --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def brokers() -> Iterator[str]:
    """Address of a broker that librdkafka plays on this machine, over real connections."""
    kafka = pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    owner = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": ""})
    broker = next(iter(owner.list_topics(timeout=30).brokers.values()))
    yield f"{broker.host}:{broker.port}"
    owner.flush(0)


def test_kafka_has_every_row_in_order(tmp_path, brokers):
    import confluent_kafka

    ingest = fed(tmp_path, ["parquet", f"kafka={brokers}/test"])
    ingest.maintain(1e9)
    assert ingest.failures == 0, ingest.error
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": brokers, "group.id": "g", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    )
    consumer.subscribe(["test.spans", "test.rollups", "test.counters"])
    rows: dict[str, list[dict]] = {"test.spans": [], "test.rollups": [], "test.counters": []}
    keys = set()
    messages = 0
    deadline = time.monotonic() + 60
    while sum(map(len, rows.values())) < 3004:
        assert time.monotonic() < deadline, {topic: len(match) for topic, match in rows.items()}
        message = consumer.poll(0.5)
        if message is not None and message.error() is None:
            decoded = [json.loads(line) for line in message.value().decode().split("\n")]
            assert len(decoded) <= 1000
            rows[message.topic()] += decoded
            keys.add((message.topic(), message.key().decode().partition("/")[2]))
            messages += 1
    consumer.close()
    assert keys == {("test.spans", "2/3"), ("test.rollups", "2/3"), ("test.counters", "2/-1")}
    assert messages == 3 + 1 + 1
    assert [row["row"] for row in rows["test.spans"]] == list(range(3000))
    last = rows["test.spans"][-1]
    assert (last["job"], last["hostname"], last["segment"], last["step"], last["microbatch"], last["end_ns"]) == (
        HOSTILE, "node-2", 0, 2, 1499, OFFSET + 3499,
    )  # fmt: skip
    assert [row["total_ns"] for row in rows["test.rollups"]] == [100, 200]
    assert [(row["name"], row["value"]) for row in rows["test.counters"]] == [(HOSTILE, 2.5), (HOSTILE, None)]


def test_a_kafka_that_is_away_is_told_later(tmp_path, monkeypatch):
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    file = tmp_path / "properties"
    file.write_text("# quick\nmessage.timeout.ms = 300\n")
    monkeypatch.setenv("MEGASCALE_KAFKA_PROPERTIES", str(file))
    ingest = fed(tmp_path / "spans", ["parquet", f"kafka=127.0.0.1:{closed_port()}"])
    ingest.maintain(1e9)
    assert ingest.failures == 1
    assert "has not accepted segment 0" in ingest.error
    assert list((tmp_path / "spans").glob("spool-*.bin"))
    file.write_text("message.timeout.mss = 300\n")
    with pytest.raises(ConfigError, match=r"message\.timeout\.mss"):
        KafkaSink(tmp_path, "127.0.0.1:9092")
