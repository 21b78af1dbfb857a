"""The channel between driver and agents: messages of a schema over TCP, each authenticated, in order, of bounded size.

Both ends prove that they know the job's token without sending it (HMAC over fresh random numbers of both), and derive
a key for this connection, which seals every frame (services/framing.py). Contents are not encrypted; nothing secret
travels here.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import megascale
from megascale.resilience.protocol.agent_messages import FROM_AGENT, FROM_DRIVER
from megascale.services.framing import (
    FORM,
    GREETING_BYTES,
    HEAD,
    SEAL_BYTES,
    ProtocolError,
    Seal,
    greeting,
    head,
    read_greeting,
    read_head,
)
from megascale.services.messages import Message
from megascale.services.shared_token import PROOF_BYTES, TokenProof

# What both ends must be of: a release, and the form of frames and messages.
VERSION = f"{megascale.__version__} (form {FORM})"


class AgentChannel:
    """One authenticated connection. Only one task may receive at a time; sending never interleaves.

    Args:
        key: of this connection.
        driver: whether this end is the driver's.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, driver: bool) -> None:
        self._reader, self._writer, self._seal = reader, writer, Seal(key, driver)
        self._out, self._in = (FROM_DRIVER, FROM_AGENT) if driver else (FROM_AGENT, FROM_DRIVER)

    def send(self, message: Message) -> None:
        """Queue one message.

        ValueError if the other side would refuse it; ConnectionError if the connection is closing or the other side
        has long stopped reading.
        """
        if self._writer.is_closing():
            raise ConnectionError("the connection is closed")
        data = self._out.encode(message)
        if self.backlog > 4 * self._out.limit:
            self.close()
            raise ConnectionError("the other side does not read")
        self._writer.write(head(len(data)) + self._seal.make(data) + data)

    def send_message(self, *, do: str, **fields: Any) -> None:
        """As `send`, of the kind `do`."""
        self.send(self._out.make(do, fields))

    async def receive(self) -> Any:
        """The next message. ProtocolError: one too large, forged, repeated or malformed; EOFError at the end."""
        try:
            size, _, files = read_head(await self._reader.readexactly(HEAD.size), self._in.limit)
            data = await self._reader.readexactly(SEAL_BYTES + size)
        except asyncio.IncompleteReadError:
            raise EOFError from None
        if files:
            raise ProtocolError("open files do not travel over a network")
        self._seal.check(data[:SEAL_BYTES], data[SEAL_BYTES:])
        return self._in.decode(data[SEAL_BYTES:])

    @property
    def backlog(self) -> int:
        """Bytes that were queued and are not on their way yet."""
        return int(self._writer.transport.get_write_buffer_size())

    async def drain(self) -> None:
        """Wait until what was queued is on its way."""
        await self._writer.drain()

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(Exception):
            self._writer.close()

    @property
    def peer(self) -> str:
        """Address of the other side."""
        name = self._writer.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if name else "?"


async def open_channel(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, *, driver: bool
) -> AgentChannel:
    """Prove the token both ways; ProtocolError if the other side does not know it. The caller sets a time limit."""
    proof = TokenProof(token, "agents", "server" if driver else "client")
    writer.write(greeting(proof.nonce))
    try:
        writer.write(proof.answer(read_greeting(await reader.readexactly(GREETING_BYTES))))
        answer = await reader.readexactly(PROOF_BYTES)
    except asyncio.IncompleteReadError:
        raise ProtocolError("left before it had shown that it knows the job's token") from None
    if not proof.accepts(answer):
        raise ProtocolError("does not know the job's token")
    return AgentChannel(reader, writer, proof.key(), driver)
