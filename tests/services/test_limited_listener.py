"""Connections of strangers on real sockets: few at once, each head with a deadline, and room for those who ask."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("uvicorn")

from uvicorn import Config
from uvicorn.server import ServerState

from megascale.services.http_protocol import make_http_protocol
from megascale.services.limited_listener import ConnectionLimits, LimitedListener

HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n"


class Application:
    """ASGI: lets each request in, and answers when `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.requests = 0

    async def __call__(self, scope, receive, send) -> None:
        scope["state"]["connection"].mark_authenticated(None)
        self.requests += 1
        await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def serve(limits: ConnectionLimits, work: Callable[[int, Application, LimitedListener], Awaitable[None]]) -> None:
    async def run_both() -> None:
        application = Application()
        config = Config(application, http="h11", ws="none", log_level="critical")
        door = LimitedListener(
            [socket.create_server(("127.0.0.1", 0))], make_http_protocol(config, ServerState()), limits
        )
        try:
            async with asyncio.timeout(20):
                await work(door.ports[0], application, door)
        finally:
            application.release.set()
            await door.close()

    asyncio.run(run_both())


async def connect(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def read_rest(reader: asyncio.StreamReader) -> bytes:
    """Return what comes until the server ends the connection."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("half", [b"", HEAD])
def test_a_head_has_a_deadline(half):
    async def work(port, application, door):
        reader, writer = await connect(port, half)
        assert await read_rest(reader) == b""
        writer.close()

    serve(ConnectionLimits(4, 0.1), work)


def test_each_head_of_a_connection_has_a_deadline():
    async def work(port, application, door):
        application.release.set()
        reader, writer = await connect(port, HEAD + b"\r\n" + HEAD)  # the second has no end
        assert (await read_rest(reader)).startswith(b"HTTP/1.1 200")
        assert application.requests == 1
        writer.close()

    serve(ConnectionLimits(4, 0.1), work)


def test_who_waits_for_an_answer_keeps_a_place_and_who_is_silent_makes_room():
    async def work(port, application, door):
        asking, writer = await connect(port, HEAD + b"\r\n")
        while not application.requests:
            await asyncio.sleep(0)
        silent = [await connect(port, HEAD) for _ in range(20)]
        late, late_writer = await connect(port, HEAD + b"\r\n")
        while application.requests < 2:
            await asyncio.sleep(0)
        assert len(door) <= 4
        application.release.set()
        assert (await asking.readline()).startswith(b"HTTP/1.1 200")
        assert (await late.readline()).startswith(b"HTTP/1.1 200")
        for each in (writer, late_writer) + tuple(writer for _, writer in silent):
            each.close()

    serve(ConnectionLimits(4, 60.0), work)


def test_a_connection_that_was_answered_makes_room_again():
    async def work(port, application, door):
        application.release.set()
        connections = [await connect(port, HEAD + b"\r\n") for _ in range(4)]
        for reader, _ in connections:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        late, late_writer = await connect(port, HEAD + b"\r\n")
        assert (await late.readline()).startswith(b"HTTP/1.1 200")
        for each in (late_writer,) + tuple(writer for _, writer in connections):
            each.close()

    serve(ConnectionLimits(4, 60.0), work)
