"""The frame that everything between processes of a job travels in, and the greeting before it. Does no input or output.

    frame    = head | [seal] | message | attached bytes
    head     = "MS" | form (1 byte) | open files (1) | bytes of the message (4) | bytes attached (8), big endian
    greeting = head | nonce, in place of the first frame where both ends have to show that they know a token

Whatever is wrong with what the other side sent is a ProtocolError, told before anything is allocated for it.
"""

from __future__ import annotations

import hmac
import struct

from megascale.services.shared_token import NONCE_BYTES, secrets_equal

# Counted up with each change of a frame, a greeting or a message: ends of different forms do not talk.
FORM = 8
HEAD = struct.Struct(">2sBBIQ")
GREETING_BYTES = HEAD.size + NONCE_BYTES
SEAL_BYTES = 16
_MAGIC = b"MS"
_NUMBER = struct.Struct(">cQ")


class ProtocolError(ConnectionError):
    """The other side broke the rules of a conversation; the message says how. The connection is of no more use."""


def make_head(size: int, attached: int = 0, files: int = 0) -> bytes:
    """The head of a frame with a message of `size` bytes."""
    return HEAD.pack(_MAGIC, FORM, files, size, attached)


def read_head(data: bytes | bytearray, limit: int, attached: int = 0) -> tuple[int, int, int]:
    """(bytes of the message, bytes attached, open files) of a frame's head; ProtocolError if it is none or too large.

    limit, attached: the most bytes that either may have.
    """
    magic, form, files, size, extra = HEAD.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError(f"what came is no frame of MegaScale's protocol (form {FORM}): a version before it?")
    if form != FORM:
        raise ProtocolError(
            f"the other side speaks form {form} of the protocol, this one form {FORM}: install one version on both"
        )
    if not 1 <= size <= limit:
        raise ProtocolError(f"a message of {size} bytes; 1 to {limit} are allowed")
    if extra > attached:
        raise ProtocolError(f"a message with {extra} bytes attached; at most {attached} are allowed")
    return size, extra, files


def make_greeting(nonce: bytes) -> bytes:
    """What each end sends first where a token is to be proved."""
    return make_head(NONCE_BYTES) + nonce


def read_greeting(data: bytes | bytearray) -> bytes:
    """The nonce of the other side's greeting; ProtocolError if it speaks another form or something else."""
    size, _, files = read_head(data[: HEAD.size], NONCE_BYTES)
    if size != NONCE_BYTES or files:
        raise ProtocolError("what came is no greeting")
    return bytes(data[HEAD.size :])


class Seal:
    """HMACs over direction, running number and contents: a frame that is forged, repeated, left out or brought from
    another connection is refused. Contents are not encrypted.

    Args:
        key: of this connection (`TokenProof.key`).
        server: whether this end is the server.
    """

    def __init__(self, key: bytes, server: bool) -> None:
        self._key = key
        self._out, self._in = (b"S", b"C") if server else (b"C", b"S")
        self._sent = self._received = 0

    def make(self, contents: bytes) -> bytes:
        """SEAL_BYTES for the next frame that is sent."""
        self._sent += 1
        return self._mac(self._out, self._sent, contents)

    def check(self, seal: bytes | bytearray, contents: bytes | bytearray) -> None:
        """ProtocolError if `seal` is not that of the next frame received."""
        self._received += 1
        if not secrets_equal(bytes(seal), self._mac(self._in, self._received, bytes(contents))):
            raise ProtocolError("a message that is forged, repeated or out of order")

    def _mac(self, direction: bytes, number: int, contents: bytes) -> bytes:
        return hmac.digest(self._key, _NUMBER.pack(direction, number) + contents, "sha256")[:SEAL_BYTES]
