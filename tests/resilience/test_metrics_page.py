"""A node's /metrics and /health over a socket, and malformed requests."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from megascale.config import load
from megascale.errors import ConfigError
from megascale.resilience import metrics_page
from megascale.resilience.agent.node_metrics import make_page
from megascale.resilience.metrics_page import CONNECTION_LIMITS, MetricsPage
from megascale.resilience.protocol.heartbeat import GpuReport, Heartbeat, NetworkTraffic, Worker

LABELS = {"run": "gpt", "job_name": "team", "node": "n0"}
BEAT = Heartbeat(
    job="job", attempt=1, node="n0", sequence=1, sent_ns=1, step_seconds={8: 0.5, 9: 0.75},
    workers=(Worker(8, 1, "running", step=4), Worker(9, 2, "signalled", step=3)),
    gpus=(GpuReport(0, "H", temperature=70.5, xid=79, throttled=True),),
    traffic=(NetworkTraffic('e"\n', 1.0, 2.0),),
)  # fmt: skip


async def send(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def talk(page: MetricsPage, work):
    """work(port) while the page is served."""

    async def read_both():
        door = await page.serve("127.0.0.1:0")
        assert door is not None
        try:
            return await work(door.ports[0])
        finally:
            await door.close()

    return asyncio.run(read_both())


def test_the_node_as_its_heartbeat_has_it():
    text = talk(
        make_page(lambda: BEAT, lambda: True, LABELS), lambda port: send(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    ).decode()
    head, _, body = text.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4")
    assert f"content-length: {len(body)}" in head
    assert all('{run="gpt",job_name="team",node="n0"' in line for line in body.splitlines() if line[0] != "#")
    report = dict(re.findall(r"^(\S+) (\S+)$", body.replace('run="gpt",job_name="team",node="n0",', ""), re.M))
    assert report['megascale_agent_compute_seconds{rank="9"}'] == "0.75"
    assert report['megascale_agent_ranks{state="signalled"}'] == "1"
    assert report['megascale_agent_step{run="gpt",job_name="team",node="n0"}'] == "3"
    assert report['megascale_agent_gpu_xid{gpu="0"}'] == "79"
    assert report[r'megascale_agent_network_bytes_per_second{interface="e\"\n",direction="send"}'] == "2"


@pytest.mark.parametrize(
    ("beat", "connected", "code"), [(BEAT, True, b"200"), (BEAT, False, b"503"), (None, True, b"503")]
)
def test_health(beat, connected, code):
    result = talk(
        make_page(lambda: beat, lambda: connected, LABELS), lambda port: send(port, b"GET /health HTTP/1.1\r\n\r\n")
    )
    assert result.split()[1] == code


def test_whoever_asks_otherwise_gets_nothing(monkeypatch):
    monkeypatch.setattr(metrics_page, "CONNECTION_LIMITS", replace(CONNECTION_LIMITS, head_seconds=0.3))
    page = make_page(lambda: BEAT, lambda: True, LABELS)

    async def work(port):
        assert (await send(port, b"POST /metrics HTTP/1.1\r\n\r\n")).split()[1] == b"405"
        assert (await send(port, b"GET /../etc/passwd HTTP/1.1\r\n\r\n")).split()[1] == b"404"
        assert (await send(port, b"\r\n\r\n")).split()[1] == b"405"
        assert await send(port, b"x" * 100_000) == b""
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        ends = await asyncio.gather(*(reader.read() for reader, _ in silent))
        assert ends == [b""] * 3

    talk(page, work)


@pytest.mark.parametrize("half", [b"", b"GET /health HTTP/1.1\r\nX: "])
def test_half_sent_heads_shut_nobody_out(monkeypatch, half):
    monkeypatch.setattr(metrics_page, "CONNECTION_LIMITS", replace(CONNECTION_LIMITS, head_seconds=600))
    page = make_page(lambda: BEAT, lambda: True, LABELS)

    async def work(port):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3 * CONNECTION_LIMITS.connections)]
        for _, writer in silent:
            writer.write(half)
        answers = [await send(port, b"GET /health HTTP/1.1\r\n\r\n") for _ in range(5)]
        for _, writer in silent:
            writer.close()
        return answers

    assert [answer.split()[1] for answer in talk(page, work)] == [b"200"] * 5


def test_an_agent_without_a_driver_is_alive_but_not_healthy():
    page = make_page(lambda: None, lambda: False, LABELS)

    async def work(port):
        return [await send(port, f"GET /{name} HTTP/1.1\r\n\r\n".encode()) for name in ("live", "health")]

    assert [response.split()[1] for response in talk(page, work)] == [b"200", b"503"]


def test_openmetrics_is_served_to_a_scraper_that_accepts_it():
    request = b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n\r\n"
    text = talk(make_page(lambda: BEAT, lambda: True, LABELS), lambda port: send(port, request)).decode()
    assert "content-type: application/openmetrics-text; version=1.0.0" in text
    assert "# UNIT megascale_agent_compute_seconds seconds\n" in text
    assert text.endswith("# EOF\n")


def test_a_taken_port_is_an_error():
    async def work(port):
        with pytest.raises(OSError, match="in use"):
            await make_page(lambda: None, lambda: True, LABELS).serve(f"127.0.0.1:{port}")

    talk(make_page(lambda: None, lambda: True, LABELS), work)


def test_the_address_is_checked_at_the_start():
    assert load(None, ["--resilience.agent_metrics=[::1]:9401"]).resilience.agent_metrics == "[::1]:9401"
    with pytest.raises(ConfigError, match="agent_metrics"):
        load(None, ["--resilience.agent_metrics=somewhere"])
