"""The frame that carries every message between processes of a job, and the greeting before it. Does no input or output.

    frame    = head | [seal] | message | attached bytes
    head     = "MS" | protocol version (1 byte) | open files (1) | message size (4) | attached size (8), big endian
    greeting = head | nonce, in place of the first frame where both ends prove a token

Every violation raises ProtocolError before any memory is allocated for the data.
"""

from __future__ import annotations

import hmac
import struct

from megascale.services.shared_token import NONCE_BYTES, secrets_equal

# Incremented with each change of a frame, a greeting or a message: ends of different versions do not talk.
PROTOCOL_VERSION = 11
HEAD = struct.Struct(">2sBBIQ")
GREETING_BYTES = HEAD.size + NONCE_BYTES
SEAL_BYTES = 16
_MAGIC = b"MS"
_SEAL_PREFIX = struct.Struct(">cQ")


class ProtocolError(ConnectionError):
    """The other end violated the protocol, as the message says. The connection must be closed."""


def make_head(size: int, attached: int = 0, files: int = 0) -> bytes:
    """Return the head of a frame with a message of `size` bytes, `attached` bytes and `files` open files."""
    return HEAD.pack(_MAGIC, PROTOCOL_VERSION, files, size, attached)


def read_head(data: bytes | bytearray, limit: int, attached: int = 0) -> tuple[int, int, int]:
    """Return (message size, attached size, open files) of a frame's head.

    Args:
        limit: largest message accepted, in bytes.
        attached: most attached bytes accepted.

    Raises ProtocolError if it is not a head or a size exceeds its limit.
    """
    magic, version, files, size, attached_size = HEAD.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError(
            f"the other side does not speak MegaScale's protocol (version {PROTOCOL_VERSION}); "
            "it is another program or an older release"
        )
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other side speaks version {version} of the protocol, this one version {PROTOCOL_VERSION}: "
            "install one release on both"
        )
    if not 1 <= size <= limit:
        raise ProtocolError(f"a message has {size} bytes; 1 to {limit} are allowed")
    if attached_size > attached:
        raise ProtocolError(f"a message has {attached_size} attached bytes; at most {attached} are allowed")
    return size, attached_size, files


def make_greeting(nonce: bytes) -> bytes:
    """Return the greeting that each end sends first where a token is proved."""
    return make_head(NONCE_BYTES) + nonce


def read_greeting(data: bytes | bytearray) -> bytes:
    """Return the nonce of the other end's greeting. Raises ProtocolError for another version or other data."""
    size, _, files = read_head(data[: HEAD.size], NONCE_BYTES)
    if size != NONCE_BYTES or files:
        raise ProtocolError("the other side sent no greeting")
    return bytes(data[HEAD.size :])


class Seal:
    """HMACs over direction, sequence number and contents of frames.

    A frame that was forged, repeated, dropped or copied from another connection is refused. Contents are not encrypted.

    Args:
        key: of this connection (`TokenProof.connection_key`).
        server: whether this end is the server.
    """

    def __init__(self, key: bytes, server: bool) -> None:
        self._key = key
        self._send_direction = b"S" if server else b"C"
        self._receive_direction = b"C" if server else b"S"
        self._sent = 0
        self._received = 0

    def make(self, contents: bytes) -> bytes:
        """Return the SEAL_BYTES of the next frame to send."""
        self._sent += 1
        return self._compute(self._send_direction, self._sent, contents)

    def check(self, seal: bytes | bytearray, contents: bytes | bytearray) -> None:
        """Raise ProtocolError unless `seal` is that of the next frame to receive."""
        self._received += 1
        if not secrets_equal(bytes(seal), self._compute(self._receive_direction, self._received, bytes(contents))):
            raise ProtocolError("a message is forged, repeated or out of order")

    def _compute(self, direction: bytes, number: int, contents: bytes) -> bytes:
        return hmac.digest(self._key, _SEAL_PREFIX.pack(direction, number) + contents, "sha256")[:SEAL_BYTES]
