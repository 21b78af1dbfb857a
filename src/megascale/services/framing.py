"""Format of the frames that carry messages between processes of a job, and of the greeting before them.

    frame    = head | [seal] | message | body
    head     = "MS" | protocol version (1 byte) | open files (1) | message size (4) | body size (8), big endian
    greeting = head | nonce; each end sends one before its first frame if both ends prove a token

The body is bytes attached to the message. This module only encodes and decodes; it does not read or write. A head with
a wrong size raises ProtocolError before memory is allocated for the data.
"""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple

from megascale.services.shared_token import NONCE_BYTES, secrets_equal

# Increase the version with each change of a frame, a greeting or a message. Ends with different versions refuse each
# other.
PROTOCOL_VERSION = 15
HEAD = struct.Struct(">2sBBIQ")  # in the order of the module's docstring
GREETING_BYTES = HEAD.size + NONCE_BYTES
SEAL_BYTES = 16  # of the HMAC's 32 bytes
_MAGIC = b"MS"
_SEAL_PREFIX = struct.Struct(">cQ")  # direction, sequence number


class ProtocolError(ConnectionError):
    """Error for a violation of the protocol by the other end. The connection must be closed."""


class FrameHead(NamedTuple):
    """Contents of a frame's head: sizes of the message and of the body, and number of attached open files."""

    message_bytes: int
    body_bytes: int
    file_count: int


def make_head(message_bytes: int, body_bytes: int = 0, file_count: int = 0) -> bytes:
    return HEAD.pack(_MAGIC, PROTOCOL_VERSION, file_count, message_bytes, body_bytes)


def read_head(data: bytes | bytearray, max_message_bytes: int, max_body_bytes: int = 0) -> FrameHead:
    """Decode the head of a frame.

    Raises:
        ProtocolError: `data` is not a head of this protocol version, or a size exceeds its limit.
    """
    magic, version, file_count, message_bytes, body_bytes = HEAD.unpack(data)
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
    if not 1 <= message_bytes <= max_message_bytes:
        raise ProtocolError(f"a message has {message_bytes} bytes; 1 to {max_message_bytes} are allowed")
    if body_bytes > max_body_bytes:
        raise ProtocolError(f"a message has {body_bytes} attached bytes; at most {max_body_bytes} are allowed")
    return FrameHead(message_bytes, body_bytes, file_count)


def make_greeting(nonce: bytes) -> bytes:
    """Return the greeting that each end sends first if both ends prove a token."""
    return make_head(NONCE_BYTES) + nonce


def read_greeting(data: bytes | bytearray) -> bytes:
    """Return the nonce of the other end's greeting. Raises ProtocolError for another version or other data."""
    head = read_head(data[: HEAD.size], NONCE_BYTES)
    if head.message_bytes != NONCE_BYTES or head.file_count:
        raise ProtocolError("the other side sent no greeting")
    return bytes(data[HEAD.size :])


class Seal:
    """Computes and checks the seals of one connection: HMACs over direction, sequence number and message.

    A message that was forged, repeated, dropped or copied from another connection is refused. Messages are not
    encrypted.

    Args:
        key: key of this connection (`TokenProof.connection_key`).
    """

    def __init__(self, key: bytes, *, is_server: bool) -> None:
        self._key = key
        self._send_direction = b"S" if is_server else b"C"
        self._receive_direction = b"C" if is_server else b"S"
        self._sent_count = 0
        self._received_count = 0

    def make(self, message: bytes) -> bytes:
        """Return the seal of the next message to send, SEAL_BYTES long."""
        self._sent_count += 1
        return self._compute(self._send_direction, self._sent_count, message)

    def check(self, seal: bytes | bytearray, message: bytes | bytearray) -> None:
        """Raise ProtocolError if `seal` is not the seal of the next message to receive."""
        self._received_count += 1
        expected_seal = self._compute(self._receive_direction, self._received_count, bytes(message))
        if not secrets_equal(bytes(seal), expected_seal):
            raise ProtocolError("a message is forged, repeated or out of order")

    def _compute(self, direction: bytes, number: int, message: bytes) -> bytes:
        """Return the seal of message `number` in a direction."""
        return hmac.digest(self._key, _SEAL_PREFIX.pack(direction, number) + message, "sha256")[:SEAL_BYTES]
