"""One end of a connection between two processes of a job, which carries messages of a schema, bytes and open files.

On a Unix socket the kernel names the process at the other end. On TCP both ends prove that they know a token, and every
message is sealed. Bytes attached to a message are not sealed: their receiver checks them by checksum.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from megascale.core.exit_record import NO_RECORD, ExitKind, ExitRecord, attach_record
from megascale.services.framing import (
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
from megascale.services.messages import Message, Name, Schema, Text
from megascale.services.shared_token import PROOF_BYTES, TokenProof

_RECEIVE_BYTES = 1 << 20  # received per call, so that memory is allocated only for bytes that have arrived
_MAX_FILES = 64
_PEER_CREDENTIALS = struct.Struct("3i")


class Done(Message, frozen=True):
    """Report that a request succeeded and has no other result."""


class ErrorReply(Message, frozen=True):
    """Report that a request failed.

    Attributes:
        error: the error's message.
        kind: name of the error's class.
        record: the fault as a code.
    """

    error: Text
    kind: Name = ""
    record: ExitRecord = NO_RECORD


class Conversation:
    """Messages in order, each of them complete. Several threads may send; one at a time may receive.

    Args:
        sock: connected socket, which the conversation owns from now on.
        outgoing: schema of the messages that this end sends.
        incoming: schema of the messages that this end accepts.
        seal: seals messages on a network connection.

    Attributes:
        timeout: seconds in which one call must make progress in sending or receiving; None: no limit.
        body: bytes attached to the last message received.
        files: open files attached to the last message received. The receiver must close them.
    """

    def __init__(self, sock: socket.socket, outgoing: Schema, incoming: Schema, seal: Seal | None = None) -> None:
        self.sock = sock
        self.timeout: float | None = None
        self.body = bytearray()
        self.files: list[int] = []
        self._outgoing = outgoing
        self._incoming = incoming
        self._seal = seal
        self._deadline: float | None = None
        self._sending = threading.Lock()

    @contextlib.contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Raise TimeoutError if sending and receiving in the body together take longer than `seconds`."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def send(self, message: Message, body: bytes | memoryview = b"", files: Sequence[int] = ()) -> None:
        """Send one message. Raises ValueError if the other end would refuse it.

        Args:
            files: open files to attach, on a Unix socket only.
        """
        data = self._outgoing.encode(message)
        with self._sending:
            seal = self._seal.make(data) if self._seal is not None else b""
            frame = make_head(len(data), len(body), len(files)) + seal + data
            if files:
                self._set_timeout()
                sent = socket.send_fds(self.sock, [frame], list(files))
                frame = frame[sent:]
            self.send_bytes(memoryview(frame))
            self.send_bytes(memoryview(body))

    def receive(self, attached: int = 0) -> Any:
        """Return the next message.

        Args:
            attached: upper limit of the bytes attached to it.

        Raises EOFError at the end of the conversation and ProtocolError for a malformed message.
        """
        first, files = self._receive_head()
        try:
            size, body_size, file_count = read_head(first, self._incoming.limit, attached)
            if file_count != len(files):
                raise ProtocolError(f"a message announces {file_count} open files and {len(files)} arrived")
            seal = self._receive_exactly(SEAL_BYTES) if self._seal is not None else b""
            data = self._receive_exactly(size)
            if self._seal is not None:
                self._seal.check(seal, data)
            message = self._incoming.decode(data)
            self.body = self._receive_exactly(body_size)
        except BaseException:
            _close_files(files)
            raise
        self.files = files
        return message

    def request(self, message: Message, body: bytes | memoryview = b"") -> Any:
        """Send a request and return its reply. Raises OSError with the other end's message if the request failed."""
        self.send(message, body)
        return self.receive_reply()

    def receive_reply(self, attached: int = 1 << 40) -> Any:
        """Return the reply to a request. Raises OSError with the other end's message if the request failed."""
        try:
            reply = self.receive(attached)
        except EOFError:
            raise ConnectionError("the other side has ended") from None
        if isinstance(reply, ErrorReply):
            failure = OSError(reply.error)
            if reply.record.kind is ExitKind.DISK_FULL:  # the requesting process judges other faults
                attach_record(failure, ExitKind.DISK_FULL, subject=reply.record.subject)
            raise failure
        return reply

    def send_bytes(self, view: memoryview) -> None:
        """Send bytes that belong to no message."""
        # `sendall` would apply the timeout to the whole transfer, and gigabytes take longer than one pause.
        while len(view):
            self._set_timeout()
            view = view[self.sock.send(view) :]

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with bytes of the other end's `send_bytes`. Raises EOFError if the other end closes earlier."""
        while len(view):
            self._set_timeout()
            count = self.sock.recv_into(view, min(len(view), _RECEIVE_BYTES))
            if not count:
                raise EOFError
            view = view[count:]

    def is_connected(self) -> bool:
        """Return whether the other end is connected; for one that sends nothing while it waits for a reply."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def authenticate(self, token: bytes, purpose: str, role: Literal["server", "client"]) -> None:
        """Prove the token to the other end of a TCP connection, check its proof, and seal all later messages.

        Call it within `time_limit`. Raises ProtocolError if the other end does not know the token, EOFError if it
        closes the connection.
        """
        proof = TokenProof(token, purpose, role)
        self.send_bytes(memoryview(make_greeting(proof.nonce)))
        peer_nonce = read_greeting(self._receive_exactly(GREETING_BYTES))
        self.send_bytes(memoryview(proof.answer_nonce(peer_nonce)))
        if not proof.accepts(bytes(self._receive_exactly(PROOF_BYTES))):
            raise ProtocolError("the other side does not know the token")
        self._seal = Seal(proof.connection_key(), role == "server")

    def shut_down(self) -> None:
        """End the conversation from another thread than the one that receives."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the conversation."""
        self.sock.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _receive_head(self) -> tuple[bytes | bytearray, list[int]]:
        """Return a frame's head and the open files attached to it."""
        if self.sock.family != socket.AF_UNIX:
            return self._receive_exactly(HEAD.size), []
        self._set_timeout()
        first, files, _, _ = socket.recv_fds(self.sock, HEAD.size, _MAX_FILES)
        if not first:
            raise EOFError
        try:
            return first + self._receive_exactly(HEAD.size - len(first)), files
        except BaseException:
            _close_files(files)
            raise

    def _receive_exactly(self, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            self._set_timeout()
            received = self.sock.recv(min(count - len(data), _RECEIVE_BYTES))
            if not received:
                raise EOFError
            data += received
        return data

    def _set_timeout(self) -> None:
        seconds = self.timeout
        if self._deadline is not None:
            seconds = self._deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError("the time limit of the conversation has passed")
        self.sock.settimeout(seconds)


def _close_files(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return (process id, user id) of the process at the other end of a Unix socket, as the kernel recorded them."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, user, _ = _PEER_CREDENTIALS.unpack(data)
    return pid, user


def check_peer(sock: socket.socket) -> None:
    """Raise ProtocolError unless the process at the other end of a Unix socket is this user's or root's."""
    _, user = peer_credentials(sock)
    if user not in (0, os.geteuid()):
        raise ProtocolError(f"the other side is a process of user {user}")


def set_peer_timeout(sock: socket.socket, seconds: float) -> None:
    """Have the kernel end a TCP connection whose other end has acknowledged nothing for about `seconds`.

    This covers data in flight (TCP_USER_TIMEOUT, Linux) and idle connections (keepalive); the sender or receiver then
    gets an OSError. Without it the kernel retries for a quarter of an hour.
    """
    idle = max(1, int(seconds / 3))
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (
        ("TCP_USER_TIMEOUT", max(1000, int(1000 * seconds))),
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", idle),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    for level, option, value in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)
