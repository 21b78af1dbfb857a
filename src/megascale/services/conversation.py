"""One end of a connection between two processes of a job.

The connection carries messages of a schema. A message may have a body of bytes and open files attached. On a Unix
socket the kernel identifies the process at the other end. On TCP both ends prove that they know a token, and each
message has a seal (an HMAC). The seal does not cover the body, which the receiver checks by checksum.
"""

from __future__ import annotations

import contextlib
import os
import select
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

_RECEIVE_BYTES = 1 << 20  # limit per call, so that a false size in a head does not allocate memory
_MAX_FILES = 64  # open files attached to one message
_MAX_REPLY_BYTES = 1 << 40  # in effect no limit, since the other end is trusted
_PEER_CREDENTIALS = struct.Struct("3i")  # process id, user id, group id


class Done(Message, frozen=True):
    """Reply to a request that succeeded and has no other result."""


class ErrorReply(Message, frozen=True):
    """Reply to a request that failed.

    Attributes:
        kind: name of the error's class.
        record: record of the fault, for processes that react to it.
    """

    error: Text
    kind: Name = ""
    record: ExitRecord = NO_RECORD


class Conversation:
    """Exchange of messages over a connected socket. Several threads may send; one thread at a time may receive.

    Args:
        sock: connected socket, which the conversation closes at its end.
        outgoing: schema of the messages that this end sends.
        incoming: schema of the messages that this end accepts.
        seal: computes and checks the seals of messages on a network connection.

    Attributes:
        timeout: seconds within which each call of the socket must send or receive some bytes, or None for no limit.
            Within `time_limit`, the remaining time applies instead.
        body: body of the last message received.
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
        self._send_lock = threading.Lock()

    @contextlib.contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """Raise TimeoutError if sending and receiving within the `with` block take longer than `seconds` in total."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def send(self, message: Message, body: bytes | memoryview = b"", files: Sequence[int] = ()) -> None:
        """Send one message.

        Args:
            body: bytes to attach.
            files: descriptors of open files to attach, on a Unix socket only.

        Raises:
            ValueError: the message does not fit the schema, so that the other end would refuse it.
        """
        data = self._outgoing.encode(message)
        with self._send_lock:
            seal = self._seal.make(data) if self._seal is not None else b""
            frame = make_head(len(data), len(body), len(files)) + seal + data
            if files:  # The call that attaches them may send only a part of the frame.
                self._set_timeout()
                sent_bytes = socket.send_fds(self.sock, [frame], list(files))
                frame = frame[sent_bytes:]
            self.send_bytes(memoryview(frame))
            self.send_bytes(memoryview(body))

    def receive(self, max_body_bytes: int = 0) -> Any:
        """Return the next message.

        Args:
            max_body_bytes: largest body that this end accepts.

        Raises:
            EOFError: the other end has closed the connection.
            ProtocolError: the message is malformed, too large or has a wrong seal.
        """
        head_bytes, files = self._receive_head()
        try:
            head = read_head(head_bytes, self._incoming.limit, max_body_bytes)
            if head.file_count != len(files):
                raise ProtocolError(f"a message announces {head.file_count} open files and {len(files)} arrived")
            seal = self._receive_exactly(SEAL_BYTES) if self._seal is not None else b""
            data = self._receive_exactly(head.message_bytes)
            if self._seal is not None:
                self._seal.check(seal, data)
            message = self._incoming.decode(data)
            self.body = self._receive_exactly(head.body_bytes)
        except BaseException:
            close_descriptors(files)
            raise
        self.files = files
        return message

    def request(self, message: Message, body: bytes | memoryview = b"") -> Any:
        """Send a request and return the reply. Raises OSError with the other end's message if the request failed."""
        self.send(message, body)
        return self.receive_reply()

    def receive_reply(self, max_body_bytes: int = _MAX_REPLY_BYTES) -> Any:
        """Return the reply to a request. Raises OSError with the other end's message if the request failed."""
        try:
            reply = self.receive(max_body_bytes)
        except EOFError:
            raise ConnectionError("the other side has ended") from None
        if isinstance(reply, ErrorReply):
            failure = OSError(reply.error)
            # A full disk concerns this process as well. Other records describe the other process, so they are left out.
            if reply.record.kind is ExitKind.DISK_FULL:
                attach_record(failure, ExitKind.DISK_FULL, subject=reply.record.subject)
            raise failure
        return reply

    def send_bytes(self, view: memoryview) -> None:
        """Send bytes that are not part of a message. The other end reads them with `receive_into`."""
        # `sendall` would apply the time-out to the whole transfer, which takes longer for gigabytes.
        while len(view):
            self._set_timeout()
            view = view[self.sock.send(view) :]

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with bytes that the other end sends by `send_bytes`. Raises EOFError if it closes earlier."""
        while len(view):
            self._set_timeout()
            received_bytes = self.sock.recv_into(view, min(len(view), _RECEIVE_BYTES))
            if not received_bytes:
                raise EOFError
            view = view[received_bytes:]

    def is_connected(self) -> bool:
        """Return whether the other end is still connected.

        The other end must be waiting for a reply: bytes that it has sent would hide the end of the connection.
        """
        try:
            poller = select.poll()
            poller.register(self.sock, select.POLLIN)
            if not poller.poll(0):
                return True
            # Without the poll, a socket with a timeout would wait here for all of it.
            return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except (OSError, ValueError):  # ValueError: this end is closed
            return False

    def authenticate(self, token: bytes, purpose: str, role: Literal["server", "client"]) -> None:
        """Prove the token to the other end of a TCP connection, check its proof, and seal all later messages.

        Call this method within `time_limit`.

        Raises:
            ProtocolError: the other end does not know the token.
            EOFError: the other end closed the connection.
        """
        proof = TokenProof(token, purpose, role)
        self.send_bytes(memoryview(make_greeting(proof.nonce)))
        peer_nonce = read_greeting(self._receive_exactly(GREETING_BYTES))
        self.send_bytes(memoryview(proof.answer_nonce(peer_nonce)))
        if not proof.is_valid_answer(bytes(self._receive_exactly(PROOF_BYTES))):
            raise ProtocolError("the other side does not know the token")
        self._seal = Seal(proof.connection_key(), is_server=role == "server")

    def shut_down(self) -> None:
        """End the conversation. The thread that receives then gets EOFError and closes the socket."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Only the thread that receives may call this method."""
        self.sock.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _receive_head(self) -> tuple[bytes | bytearray, list[int]]:
        """Return the bytes of a frame's head, and the descriptors of the open files attached to it."""
        if self.sock.family != socket.AF_UNIX:
            return self._receive_exactly(HEAD.size), []
        self._set_timeout()
        head_bytes, files, _, _ = socket.recv_fds(self.sock, HEAD.size, _MAX_FILES)
        if not head_bytes:
            raise EOFError
        try:
            return head_bytes + self._receive_exactly(HEAD.size - len(head_bytes)), files
        except BaseException:
            close_descriptors(files)
            raise

    def _receive_exactly(self, byte_count: int) -> bytearray:
        """Return the next `byte_count` bytes. Raises EOFError if the other end closes the connection earlier."""
        data = bytearray()
        while len(data) < byte_count:
            self._set_timeout()
            received = self.sock.recv(min(byte_count - len(data), _RECEIVE_BYTES))
            if not received:
                raise EOFError
            data += received
        return data

    def _set_timeout(self) -> None:
        """Set the time-out of the next call of the socket. Raises TimeoutError if `time_limit` has passed."""
        seconds = self.timeout
        if self._deadline is not None:
            seconds = self._deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError("the time limit of the conversation has passed")
        self.sock.settimeout(seconds)


def close_descriptors(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def read_peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end of a Unix socket, as the kernel recorded them."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, user, _ = _PEER_CREDENTIALS.unpack(data)
    return pid, user


def check_peer(sock: socket.socket) -> None:
    """Raise ProtocolError if the process at the other end of a Unix socket belongs to neither this user nor root."""
    _, user = read_peer_credentials(sock)
    if user not in (0, os.geteuid()):
        raise ProtocolError(f"the other side is a process of user {user}")


def set_peer_timeout(sock: socket.socket, seconds: float) -> None:
    """Make the kernel end a TCP connection if the other end acknowledges nothing for about `seconds`.

    Sending and receiving then raise OSError. TCP_USER_TIMEOUT (Linux) covers data in flight, and keepalive covers idle
    connections. Without this setting the kernel retries for a quarter of an hour.
    """
    keepalive_seconds = max(1, int(seconds / 3))  # idle time and two intervals between probes add up to `seconds`
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (
        ("TCP_USER_TIMEOUT", max(1000, int(1000 * seconds))),
        ("TCP_KEEPIDLE", keepalive_seconds),
        ("TCP_KEEPINTVL", keepalive_seconds),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    for level, option, value in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)
