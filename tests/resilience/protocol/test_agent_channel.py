"""The channel between driver and agents over real sockets: what is forged, repeated, huge or foreign gets nowhere."""

from __future__ import annotations

import asyncio
import secrets
import socket
import tracemalloc
from typing import Any

import pytest

from megascale.resilience.driver.telemetry.agent_server import AgentServer
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import FROM_AGENT, Hello, Refuse, Stopped, Welcome
from megascale.resilience.protocol.heartbeat import MAX_BYTES, Heartbeat
from megascale.services.framing import (
    GREETING_BYTES,
    HEAD,
    PROTOCOL_VERSION,
    SEAL_BYTES,
    ProtocolError,
    Seal,
    make_greeting,
    make_head,
)
from megascale.services.shared_token import PROOF_BYTES, TokenProof

TOKEN = b"t" * 64
HELLO = {"job": "job", "node": "n0", "address": "127.0.0.1", "pod": "", "boot": "b", "epoch": 0}
HELLO |= {"attempt": 0, "hardware": {}, "versions": {}, "version": agent_channel.VERSION}


class Recorder:
    """A driver that only listens."""

    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []
        self.refusals: list[str] = []
        self.messages: list[Any] = []
        self.disconnects = 0

    def handle_hello(self, channel, hello):
        channel.send_message(do="welcome", epoch=1, version=agent_channel.VERSION)
        return ""

    def handle_heartbeat(self, node, channel, heartbeat):
        self.beats.append(heartbeat)

    def handle_message(self, node, channel, message):
        self.messages.append(message)

    def handle_disconnect(self, node, channel):
        self.disconnects += 1

    def record_refusal(self, peer, node, why):
        self.refusals.append(why)


class Tapped:
    """A writer that keeps what went through it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.inner, self.frames = writer, []

    def write(self, data: bytes) -> None:
        self.frames.append(bytes(data))
        self.inner.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def beat(sequence: int, **changes: Any) -> Heartbeat:
    return Heartbeat(**({"job": "job", "attempt": 1, "node": "n0", "sequence": sequence, "sent_ns": 1} | changes))


def scene(play) -> Recorder:
    """Run `play(connect)` against an agent server; `connect` gives (channel, tapped writer) after a greeting."""

    async def run() -> Recorder:
        received = Recorder()
        agent_server = AgentServer("job", TOKEN, received, received)
        host, port = await agent_server.open("127.0.0.1", 0)

        async def connect(token: bytes = TOKEN, **hello: Any):
            reader, writer = await asyncio.open_connection(host, port)
            tapped = Tapped(writer)
            channel = await agent_channel.open_channel(reader, tapped, token, driver=False)
            channel.send(Hello(**HELLO | hello))
            answer = await channel.receive()
            return channel, tapped, answer

        async with asyncio.timeout(30):
            await play(connect, received, (host, port))
            await agent_server.close()
        return received

    return asyncio.run(run())


async def wait_until(result) -> None:
    while not result():
        await asyncio.sleep(0.005)


def test_heartbeats_and_messages_come_in_order():
    async def play(connect, recorder, _):
        channel, _, answer = await connect()
        assert answer == Welcome(1, agent_channel.VERSION)
        for i in range(1, 50):
            channel.send(beat(i))
        channel.send(Stopped(5, 1, 7))
        await wait_until(lambda: recorder.messages)
        channel.close()
        await wait_until(lambda: recorder.disconnects)

    received = scene(play)
    assert [b.sequence for b in received.beats] == list(range(1, 50))
    assert received.refusals == []


def test_a_wrong_token_learns_nothing():
    async def play(connect, recorder, _):
        with pytest.raises(ProtocolError, match="token"):
            await connect(token=b"x" * 64)
        await wait_until(lambda: recorder.refusals)

    received = scene(play)
    assert "token" in received.refusals[0]
    assert received.beats == []


def test_a_frame_sent_again_is_refused():
    async def play(connect, recorder, _):
        channel, tapped, _ = await connect()
        channel.send(beat(1))
        await wait_until(lambda: recorder.beats)
        tapped.inner.write(tapped.frames[-1])
        await wait_until(lambda: recorder.refusals)

    received = scene(play)
    assert "repeated" in received.refusals[0]
    assert len(received.beats) == 1


def test_a_frame_of_another_connection_is_refused():
    async def play(connect, recorder, _):
        single, tapped_one, _ = await connect()
        _, tapped_two, _ = await connect()
        single.send(beat(1))
        await wait_until(lambda: recorder.beats)
        tapped_two.inner.write(tapped_one.frames[-1])
        await wait_until(lambda: recorder.refusals)

    received = scene(play)
    assert "forged" in received.refusals[0]
    assert len(received.beats) == 1


def test_a_changed_bit_is_refused():
    async def play(connect, recorder, _):
        channel, tapped, _ = await connect()
        channel.send(beat(1))
        await wait_until(lambda: recorder.beats)
        frame = bytearray(tapped.frames[-1])
        body = FROM_AGENT.encode(beat(2))
        frame[:] = make_head(len(body)) + secrets.token_bytes(SEAL_BYTES) + body
        tapped.inner.write(bytes(frame))
        await wait_until(lambda: recorder.refusals)

    received = scene(play)
    assert "forged" in received.refusals[0]
    assert len(received.beats) == 1


@pytest.mark.parametrize("size", [0, MAX_BYTES * 2, 2**32 - 1])
def test_an_enormous_or_empty_frame_is_refused_before_it_is_read(size):
    async def play(connect, received, _):
        _, tapped, _ = await connect()
        tapped.inner.write(make_head(size))
        await wait_until(lambda: received.refusals)

    assert f"{size} bytes" in scene(play).refusals[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sequence": 1}, "sent twice"),
        ({"sequence": 9, "node": "n1"}, "n1"),
        ({"sequence": 9, "job": "other"}, "other"),
    ],
)
def test_a_heartbeat_that_is_old_or_in_another_name_ends_the_connection(changes, reason):
    async def play(connect, recorder, _):
        channel, _, _ = await connect()
        channel.send(beat(1))
        channel.send(beat(**changes))
        await wait_until(lambda: recorder.refusals)

    received = scene(play)
    assert reason in received.refusals[0]
    assert len(received.beats) == 1


def test_malformed_messages_end_the_connection_and_only_it():
    async def play(connect, received, _):
        second, _, _ = await connect(node="n1")
        for body in (b"\x80", b"\x91" * 50_000, b"not msgpack", b"\x91\x01", b"\xdd" + b"\xff" * 50_000):
            channel, tapped, _ = await connect()
            before = len(received.refusals)
            tapped.inner.write(make_head(len(body)) + channel._seal.make(body) + body)
            await wait_until(lambda n=before: len(received.refusals) > n)
        second.send(beat(1, node="n1"))
        await wait_until(lambda: received.beats)

    assert len(scene(play).refusals) == 5


def test_another_jobs_agent_and_a_bad_greeting_are_turned_away():
    async def play(connect, received, _):
        _, _, answer = await connect(job="other")
        assert isinstance(answer, Refuse)
        assert "other" in answer.reason
        for wrong in ({"node": 5}, {"attempt": "x"}, {"node": "n" * 300}, {"hardware": []}):
            with pytest.raises(ValueError):  # not even sent
                await connect(**wrong)

    assert len([why for why in scene(play).refusals if "other" in why]) == 1


def test_an_agent_of_another_version_is_refused_by_name():
    async def play(connect, recorder, address):
        _, _, answer = await connect(node="n7", version="0.0.9 (form 2)")
        assert isinstance(answer, Refuse)
        assert "node n7" in answer.reason
        await wait_until(lambda: recorder.refusals)

    received = scene(play)
    assert "MegaScale 0.0.9 (form 2), this driver is " + agent_channel.VERSION in received.refusals[0]
    assert not received.beats


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (bytes(range(1, 33)) + bytes(16), "does not speak MegaScale's protocol"),  # a release before form 4
        (
            HEAD.pack(b"MS", PROTOCOL_VERSION + 1, 0, 32, 0) + bytes(32),
            f"speaks version {PROTOCOL_VERSION + 1} of the protocol, this one version {PROTOCOL_VERSION}",
        ),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n", "does not speak MegaScale's protocol"),
        (make_head(31) + bytes(32), "no greeting"),
    ],
    ids=["an older release", "a newer release", "a browser", "a short greeting"],
)
def test_another_form_of_the_protocol_is_refused_by_name_before_anything_else(first, reason):
    async def play(connect, received, location):
        reader, writer = await asyncio.open_connection(*location)
        writer.write(first)
        await reader.read()
        writer.close()
        await wait_until(lambda: received.refusals)

    assert reason in scene(play).refusals[0]


def test_nothing_but_a_greeting_is_taken_as_one():
    async def play(connect, recorder, location):
        reader, writer = await asyncio.open_connection(*location)
        proof = TokenProof(TOKEN, "agents", "client")
        writer.write(make_greeting(proof.nonce))
        writer.write(proof.answer_nonce((await reader.readexactly(GREETING_BYTES))[HEAD.size :]))
        await reader.readexactly(PROOF_BYTES)
        body = FROM_AGENT.encode(beat(1))
        writer.write(make_head(len(body)) + Seal(proof.connection_key(), is_server=False).make(body) + body)
        await wait_until(lambda: recorder.refusals)
        writer.close()

    received = scene(play)
    assert "before a greeting" in received.refusals[0]
    assert received.beats == []


def test_strangers_that_say_nothing_do_not_keep_others_out(monkeypatch):
    monkeypatch.setattr("megascale.resilience.driver.telemetry.agent_server.PROOF_SECONDS", 0.3)

    async def play(connect, received, location):
        silent = [await asyncio.open_connection(*location) for _ in range(50)]
        channel, _, _ = await connect()
        channel.send(beat(1))
        await wait_until(lambda: received.beats and len(received.refusals) == 50)
        for _, writer in silent:
            writer.close()

    assert len(scene(play).beats) == 1


def test_a_flood_of_silent_strangers_is_bounded_and_keeps_no_agent_out(monkeypatch):
    """More strangers than there is room for, each with more to say than it may: the oldest go."""
    monkeypatch.setattr("megascale.resilience.driver.telemetry.agent_server.UNPROVED_LIMIT", 8)

    async def play(connect, received, location):
        silent = [await asyncio.open_connection(*location) for _ in range(40)]
        for _, writer in silent:
            writer.write(make_greeting(bytes(32))[:-1])
        channel, _, _ = await connect()
        channel.send(beat(1))
        await wait_until(lambda: received.beats and len(received.refusals) >= 32)
        for _, writer in silent:
            writer.close()

    assert len(scene(play).beats) == 1


def test_what_strangers_send_is_not_heaped_up():
    """40 with a quarter of a megabyte each, all there before the driver looks."""
    sent = make_greeting(bytes(32)) + bytes(1 << 18)
    peaks = []

    async def play(connect, received, location):
        silent = [socket.create_connection(location) for _ in range(40)]
        for sock in silent:
            sock.setblocking(False)
            sock.send(sent)
        tracemalloc.start()
        try:
            await wait_until(lambda: len(received.refusals) == 40)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        for sock in silent:
            sock.close()

    scene(play)
    assert peaks[0] < 40 * (1 << 16)
