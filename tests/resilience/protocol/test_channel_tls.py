"""Beyond loopback: the certificate is the one named under the proof of the secret, and nothing goes in clear."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from typing import Any

import pytest

pytest.importorskip("cryptography")
from megascale.resilience.driver.api.access import create_agents_tls
from megascale.resilience.driver.telemetry.agent_server import AgentServer
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_channel import DriverTls
from megascale.resilience.protocol.agent_messages import JobOffer, Refuse
from megascale.services.framing import ProtocolError
from tests.resilience.protocol.test_agent_channel import HELLO, TOKEN, Recorder, beat, wait_until

OPEN = "192.0.2.1"  # an address other than loopback, without a listener


class TlsRecorder(Recorder):
    """A driver that also describes its job."""

    def handle_join(self, join):
        return f"node {join.node} is too old" if join.node == "old" else JobOffer(7, agent_channel.VERSION, "{}")


class Relay:
    """Somebody between agent and driver, who keeps what passes and may change it."""

    def __init__(self, port: int, change=lambda data, sent: data) -> None:
        self._to = port
        self._change = change
        self.received = bytearray()
        self._tasks: list[asyncio.Task[Any]] = []

    async def open(self) -> int:
        server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        return server.sockets[0].getsockname()[1]

    async def _meet(self, reader, writer) -> None:
        present, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._tasks = [asyncio.create_task(self._pass(*pair)) for pair in ((reader, back, 0), (present, writer, 1))]

    async def _pass(self, source, target, from_driver) -> None:
        while data := await source.read(65536):
            self.received += data
            target.write(self._change(data, from_driver))
        target.close()


def scene(play, tls: DriverTls | None) -> TlsRecorder:
    async def run() -> TlsRecorder:
        received = TlsRecorder()
        server = AgentServer("job", TOKEN, received, received)
        _, port = await server.open("127.0.0.1", 0, tls)
        async with asyncio.timeout(30):
            await play(received, port)
            await server.close()
        return received

    return asyncio.run(run())


async def enter(port: int, do: str = "hello", **changes: Any):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    channel = await agent_channel.open_channel(reader, writer, TOKEN, driver=False)
    fields = HELLO if do == "hello" else {k: HELLO[k] for k in ("job", "node", "version", "address")}
    channel.send_message(do=do, **fields | changes)
    return channel, await channel.receive()


def test_messages_of_both_sides_are_encrypted_and_long_ones_come_whole():
    async def play(recorder, port):
        relay = Relay(port)
        channel, _ = await enter(await relay.open(), node="unmistakable-name")
        assert channel.is_encrypted
        channel.send(beat(1, node="unmistakable-name"))
        channel.send_message(do="lines", rank=0, lines=["x" * 1900] * 100)
        await wait_until(lambda: recorder.messages)
        assert b"unmistakable-name" not in relay.received
        assert b"xxxx" not in relay.received

    received = scene(play, create_agents_tls(OPEN, None, None))
    assert received.refusals == []
    assert len(received.messages[0].lines) == 100


def test_on_loopback_there_is_no_certificate_and_nothing_is_encrypted():
    assert create_agents_tls("127.0.0.1", None, None) is None

    async def play(received, port):
        channel, _ = await enter(port)
        assert not channel.is_encrypted

    scene(play, None)


def test_another_certificate_than_the_one_named_is_refused():
    tls, second = create_agents_tls(OPEN, None, None), create_agents_tls(OPEN, None, None)

    async def play(received, port):
        with pytest.raises(ProtocolError, match="another certificate than the driver's"):
            await enter(port)

    scene(play, DriverTls(second.context, tls.fingerprint))


def test_nobody_between_them_can_talk_them_out_of_encrypting():
    def plain(data: bytes, from_driver: int) -> bytes:
        return data[:-32] + bytes(32) if from_driver and data.endswith(tls.fingerprint) else data

    tls = create_agents_tls(OPEN, None, None)

    async def play(received, port):
        relay = Relay(port, plain)
        with pytest.raises(ProtocolError, match="forged"):
            await enter(await relay.open())

    scene(play, tls)


def test_a_stranger_who_has_not_proved_the_secret_gets_no_handshake():
    async def play(recorder, port):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=context)
        await wait_until(lambda: recorder.refusals)

    received = scene(play, create_agents_tls(OPEN, None, None))
    assert "does not speak MegaScale's protocol" in received.refusals[0]


def test_the_fingerprint_is_the_certificates_own(tmp_path):
    tls = create_agents_tls(OPEN, None, None)

    async def play(received, port):
        channel, _ = await enter(port)
        shown = channel._writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        assert hashlib.sha256(shown).digest() == tls.fingerprint

    scene(play, tls)


def test_a_node_that_asks_in_is_told_the_job_or_why_not():
    async def play(recorder, port):
        assert (await enter(port, "join"))[1] == JobOffer(7, agent_channel.VERSION, "{}")
        for changes, why in (
            ({"node": "old"}, "node old is too old"),
            ({"job": "theirs"}, "an agent of job 'theirs'; this driver runs 'job'"),
            ({"version": "0.0.1 (form 1)"}, "an agent of MegaScale 0.0.1 (form 1)"),
        ):
            answer = (await enter(port, "join", **changes))[1]
            assert isinstance(answer, Refuse)
            assert why in answer.reason

    received = scene(play, create_agents_tls(OPEN, None, None))
    assert len(received.refusals) == 3
