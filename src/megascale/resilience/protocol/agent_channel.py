"""The channel between driver and agents: messages of a schema over TCP, each authenticated, in order, of bounded size.

Both ends prove that they know the job's token without sending it (HMAC over fresh random numbers of both), and derive
a key for this connection, which seals every frame (services/framing.py). Where other machines reach the driver both
then go on in TLS: the driver says under that seal which certificate it will show, so nobody between them can answer
with another, nor keep them from encrypting. Strangers cost no TLS handshake, and no certificate is handed around.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from dataclasses import dataclass
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
    make_greeting,
    make_head,
    read_greeting,
    read_head,
)
from megascale.services.messages import Message
from megascale.services.shared_token import PROOF_BYTES, TokenProof

# What both ends must be of: a release, and the form of frames and messages.
VERSION = f"{megascale.__version__} (form {FORM})"


_PLAIN = bytes(32)  # in place of a certificate's fingerprint: this connection stays as it is


@dataclass(frozen=True)
class DriverTls:
    """What a driver encrypts with. fingerprint: SHA-256 of the certificate (DER) that `context` shows."""

    context: ssl.SSLContext
    fingerprint: bytes


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
        self._writer.write(make_head(len(data)) + self._seal.make(data) + data)

    def send_message(self, *, do: str, **fields: Any) -> None:
        """As `send`, of the kind `do`."""
        self.send(self._out.build(do, fields))

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

    async def secure(self, tls: DriverTls | None) -> None:
        """The driver's end, once the agent has proved itself: say whether this connection is encrypted, and do it."""
        fingerprint = tls.fingerprint if tls is not None else _PLAIN
        self._writer.write(self._seal.make(fingerprint) + fingerprint)
        if tls is not None:
            await self._writer.start_tls(tls.context)

    async def secured(self) -> None:
        """The agent's end of `secure`. ProtocolError if the certificate is not the one that the driver named."""
        try:
            data = await self._reader.readexactly(SEAL_BYTES + len(_PLAIN))
        except asyncio.IncompleteReadError:
            raise ProtocolError("the driver hung up: it knows another token, or takes no more agents") from None
        fingerprint = data[SEAL_BYTES:]
        self._seal.check(data[:SEAL_BYTES], fingerprint)
        if fingerprint == _PLAIN:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate itself is known
        await self._writer.start_tls(context)
        shown = self._writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
        if hashlib.sha256(shown).digest() != fingerprint:
            raise ProtocolError("somebody between this node and its driver shows another certificate than the driver's")

    @property
    def encrypted(self) -> bool:
        """Whether it goes over TLS."""
        return self._writer.get_extra_info("ssl_object") is not None

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
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: bytes,
    *,
    driver: bool,
    tls: DriverTls | None = None,
) -> AgentChannel:
    """Prove the token both ways, then encrypt if the driver does (`tls`).

    ProtocolError if the other side does not know the token or shows a wrong certificate; ssl.SSLError (an OSError) if
    TLS fails. The caller sets a time limit.
    """
    proof = TokenProof(token, "agents", "server" if driver else "client")
    writer.write(make_greeting(proof.nonce))
    try:
        writer.write(proof.answer_nonce(read_greeting(await reader.readexactly(GREETING_BYTES))))
        answer = await reader.readexactly(PROOF_BYTES)
    except asyncio.IncompleteReadError:
        raise ProtocolError("left before it had shown that it knows the job's token") from None
    if not proof.accepts(answer):
        raise ProtocolError("does not know the job's token")
    channel = AgentChannel(reader, writer, proof.connection_key(), driver)
    await (channel.secure(tls) if driver else channel.secured())
    return channel
