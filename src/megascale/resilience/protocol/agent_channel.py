"""The channel between driver and agents: authenticated, ordered messages of bounded size over TCP.

Both ends prove that they know the job's token without sending it (HMAC over fresh random numbers of both). They derive
a key for the connection, which seals every frame (services/framing.py). If other machines reach the driver, both ends
then switch to TLS. The driver announces the fingerprint of its certificate under the seal, so an attacker in between
can neither show another certificate nor prevent encryption. A client without the token causes no TLS handshake.
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
    GREETING_BYTES,
    HEAD,
    PROTOCOL_VERSION,
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

# Both ends must have the same release and the same format of frames and messages.
VERSION = f"{megascale.__version__} (form {PROTOCOL_VERSION})"
_PLAIN = bytes(32)  # sent in place of a certificate's fingerprint if the connection is not encrypted
_MAX_QUEUED_MESSAGES = 4  # If the other side leaves more than as many messages of full size unread, the channel closes.


@dataclass(frozen=True)
class DriverTls:
    """A driver's TLS context, and the SHA-256 fingerprint of its certificate (DER)."""

    context: ssl.SSLContext
    fingerprint: bytes


class AgentChannel:
    """An authenticated connection. Only one task may receive at a time; several tasks may send.

    Args:
        driver: True for the end of the driver.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, driver: bool) -> None:
        self._reader = reader
        self._writer = writer
        self._seal = Seal(key, is_server=driver)
        self._sent_schema = FROM_DRIVER if driver else FROM_AGENT
        self._received_schema = FROM_AGENT if driver else FROM_DRIVER

    def send(self, message: Message) -> None:
        """Queue one message.

        Raises:
            ValueError: the other side would reject the message.
            ConnectionError: the connection is closing, or the other side does not read.
        """
        if self._writer.is_closing():
            raise ConnectionError("the connection is closed")
        data = self._sent_schema.encode(message)
        if self.backlog > _MAX_QUEUED_MESSAGES * self._sent_schema.limit:
            self.close()
            raise ConnectionError("the other side does not read")
        self._writer.write(make_head(len(data)) + self._seal.make(data) + data)

    def send_message(self, *, do: str, **fields: Any) -> None:
        """Queue a message of the kind `do`; see `send`."""
        self.send(self._sent_schema.build(do, fields))

    async def receive(self) -> Any:
        """Return the next message.

        Raises:
            ProtocolError: the message is too large, forged, repeated or malformed.
            EOFError: the connection was closed.
        """
        try:
            head = read_head(await self._reader.readexactly(HEAD.size), self._received_schema.limit)
            sealed_data = await self._reader.readexactly(SEAL_BYTES + head.message_bytes)
        except asyncio.IncompleteReadError:
            raise EOFError from None
        if head.file_count:
            raise ProtocolError("a message from the network carries open files, which is not supported")
        data = sealed_data[SEAL_BYTES:]
        self._seal.check(sealed_data[:SEAL_BYTES], data)
        return self._received_schema.decode(data)

    @property
    def backlog(self) -> int:
        """Number of queued bytes that the kernel has not accepted yet."""
        return int(self._writer.transport.get_write_buffer_size())

    async def drain(self) -> None:
        """Wait until the queued bytes are below the transport's limit."""
        await self._writer.drain()

    async def secure(self, tls: DriverTls | None) -> None:
        """Announce the fingerprint of the driver's certificate, and start TLS. Only the driver calls this.

        Without `tls` the connection stays unencrypted.
        """
        fingerprint = tls.fingerprint if tls is not None else _PLAIN
        self._writer.write(self._seal.make(fingerprint) + fingerprint)
        if tls is not None:
            await self._writer.start_tls(tls.context)

    async def accept_security(self) -> None:
        """Start TLS if the driver has announced it in `secure`. Only agents call this.

        Raises ProtocolError for another certificate than the announced one.
        """
        try:
            data = await self._reader.readexactly(SEAL_BYTES + len(_PLAIN))
        except asyncio.IncompleteReadError:
            raise ProtocolError(
                "the driver closed the connection: its token differs, or it takes no more agents"
            ) from None
        fingerprint = data[SEAL_BYTES:]
        self._seal.check(data[:SEAL_BYTES], fingerprint)
        if fingerprint == _PLAIN:
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # The certificate is verified by its fingerprint.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        await self._writer.start_tls(context)
        certificate = self._writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
        if hashlib.sha256(certificate).digest() != fingerprint:
            raise ProtocolError("a host between this node and its driver shows another certificate than the driver's")

    @property
    def is_encrypted(self) -> bool:
        """True if the connection uses TLS."""
        return self._writer.get_extra_info("ssl_object") is not None

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()

    @property
    def peer(self) -> str:
        """Address of the other side, "?" if unknown."""
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
    """Authenticate both sides by the job's token, then encrypt if the driver has `tls`. The caller sets a time limit.

    Raises:
        ProtocolError: the other side does not know the token or shows a wrong certificate.
        ssl.SSLError: TLS failed (an OSError).
    """
    proof = TokenProof(token, "agents", "server" if driver else "client")
    writer.write(make_greeting(proof.nonce))
    try:
        writer.write(proof.answer_nonce(read_greeting(await reader.readexactly(GREETING_BYTES))))
        answer = await reader.readexactly(PROOF_BYTES)
    except asyncio.IncompleteReadError:
        raise ProtocolError("closed the connection before it proved the job's token") from None
    if not proof.is_valid_answer(answer):
        raise ProtocolError("does not know the job's token")
    channel = AgentChannel(reader, writer, proof.connection_key(), driver)
    if driver:
        await channel.secure(tls)
    else:
        await channel.accept_security()
    return channel
