"""The channel between driver and agents: framed messages over TCP, each authenticated, in order, of bounded size.

Both ends prove that they know the job's token without sending it (HMAC over fresh random numbers of both), and
derive a key for this connection. Every frame carries an HMAC over direction, running number and contents: a frame
that is forged, repeated, left out or brought from another connection ends the connection. Contents are not
encrypted; nothing secret travels here.

    frame = length (4 bytes, big endian) | HMAC-SHA-256 cut to 16 bytes | kind (1 byte) | JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import struct
from typing import Any

import megascale
from megascale.core.shared_token import NONCE_BYTES, PROOF_BYTES, TokenProof, same
from megascale.resilience.protocol.heartbeat import MAX_BYTES

_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">cQ")
_MAC = 16
LIMIT = MAX_BYTES + 1024

# What both ends must be of: a release, and the form of greetings, orders and heartbeats (counted up with each change).
FORM = 3
VERSION = f"{megascale.__version__} (form {FORM})"

HEARTBEAT = b"H"
MESSAGE = b"M"


class HandshakeRefused(Exception):
    """The other side broke the rules of the channel; the message says how."""


class AgentChannel:
    """One authenticated connection. Only one task may receive at a time; sending never interleaves."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, driver: bool, limit: int = LIMIT
    ) -> None:
        self._reader, self._writer, self._key, self._limit = reader, writer, key, limit
        self._out, self._in = (b"D", b"A") if driver else (b"A", b"D")
        self._sent = self._received = 0

    def send(self, kind: bytes, text: str) -> None:
        """Queue one frame; ConnectionError if the connection is closing or the other side has long stopped reading."""
        if self._writer.is_closing():
            raise ConnectionError("the connection is closed")
        body = kind + text.encode()
        if len(body) > self._limit:
            raise ValueError(f"a message of {len(body)} bytes is over the limit of {self._limit}")
        if self._writer.transport.get_write_buffer_size() > 4 * self._limit:
            self.close()
            raise ConnectionError("the other side does not read")
        self._writer.write(_LENGTH.pack(len(body)) + self._mac(self._out, self._sent, body) + body)
        self._sent += 1

    def send_message(self, **message: Any) -> None:
        """Queue one JSON message."""
        self.send(MESSAGE, json.dumps(message, separators=(",", ":")))

    async def receive(self) -> tuple[bytes, bytes]:
        """The next (kind, JSON text). Refused: a frame too large, forged or repeated; EOFError at the end."""
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            (size,) = _LENGTH.unpack(head)
            if not 1 <= size <= self._limit:
                raise HandshakeRefused(f"a message of {size} bytes; at most {self._limit} are allowed")
            data = await self._reader.readexactly(_MAC + size)
        except asyncio.IncompleteReadError:
            raise EOFError from None
        mac, body = data[:_MAC], data[_MAC:]
        if not same(mac, self._mac(self._in, self._received, body)):
            raise HandshakeRefused("a message that is forged, repeated or out of order")
        self._received += 1
        return body[:1], body[1:]

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, _NUMBER.pack(direction, number) + body, "sha256")[:_MAC]

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
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, *, driver: bool, limit: int = LIMIT
) -> AgentChannel:
    """Prove the token both ways; Refused if the other side does not know it. The caller sets a time limit."""
    proof = TokenProof(token, "agents", "server" if driver else "client")
    writer.write(proof.nonce)
    try:
        writer.write(proof.answer(await reader.readexactly(NONCE_BYTES)))
        answer = await reader.readexactly(PROOF_BYTES)
    except asyncio.IncompleteReadError:
        raise HandshakeRefused("left before it had shown that it knows the job's token") from None
    if not proof.accepts(answer):
        raise HandshakeRefused("does not know the job's token")
    return AgentChannel(reader, writer, proof.key(), driver, limit)
