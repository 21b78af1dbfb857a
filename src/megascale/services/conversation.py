"""One end of a connection between two processes of a job: messages of a schema, with bytes and open files beside them.

Over a Unix socket the kernel says whose process the other end is; over TCP both ends prove that they know a token, and
every message is sealed. Bytes beside a message are not: their receiver checks them by checksum.
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

_RUN = 1 << 20  # bytes received at once: no more is allocated before it is there
_FILES = 64
_PEER = struct.Struct("3i")


class Done(Message, frozen=True):
    """It is done; there is no more to say."""


class ErrorReply(Message, frozen=True):
    """What was asked for failed. error: in words; kind: class of the error; record: its fault as a code."""

    error: Text
    kind: Name = ""
    record: ExitRecord = NO_RECORD


class Conversation:
    """Messages in order, each whole. Several threads may send; one at a time may receive.

    Args:
        sock: connected; the conversation's from now on.
        out, into: what this end says and accepts.
        seal: of a connection over a network.

    Attributes:
        timeout: seconds in which one call must get on with sending or receiving; None: any time.
        body, files: what came beside the last message. Who receives files must close them.
    """

    def __init__(self, sock: socket.socket, out: Schema, into: Schema, seal: Seal | None = None) -> None:
        self.sock, self._out, self._into, self._seal = sock, out, into, seal
        self.timeout: float | None = None
        self.body = bytearray()
        self.files: list[int] = []
        self._deadline: float | None = None
        self._sending = threading.Lock()

    @contextlib.contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """All that is sent and received inside has so many seconds together; TimeoutError."""
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def send(self, message: Message, body: bytes | memoryview = b"", files: Sequence[int] = ()) -> None:
        """Send one message; `files` (open files) only over a Unix socket. ValueError if it would be refused."""
        data = self._out.encode(message)
        with self._sending:
            seal = self._seal.make(data) if self._seal is not None else b""
            frame = make_head(len(data), len(body), len(files)) + seal + data
            if files:
                self._limit()
                frame = frame[socket.send_fds(self.sock, [frame], list(files)) :]
            self._all(memoryview(frame))
            self._all(memoryview(body))

    def receive(self, attached: int = 0) -> Any:
        """The next message; EOFError at the end of the conversation, ProtocolError if it is not as it should be.

        attached: the most bytes that may come beside it.
        """
        first, files = self._first()
        try:
            size, extra, count = read_head(first, self._into.limit, attached)
            if count != len(files):
                raise ProtocolError(f"a message with {count} open files, of which {len(files)} came")
            seal = self._exactly(SEAL_BYTES) if self._seal is not None else b""
            data = self._exactly(size)
            if self._seal is not None:
                self._seal.check(seal, data)
            message = self._into.decode(data)
            self.body = self._exactly(extra)
        except BaseException:
            for file in files:
                os.close(file)
            raise
        self.files = files
        return message

    def request(self, question: Message, body: bytes | memoryview = b"") -> Any:
        """The answer to a question; OSError with the other side's words if it failed there."""
        self.send(question, body)
        return self.receive_reply()

    def receive_reply(self, attached: int = 1 << 40) -> Any:
        """What the other side answers; OSError with its words if it failed there."""
        try:
            reply = self.receive(attached)
        except EOFError:
            raise ConnectionError("the other side has ended") from None
        if isinstance(reply, ErrorReply):
            failed = OSError(reply.error)
            if reply.record.kind is ExitKind.DISK_FULL:  # Other faults are judged by the process that asked.
                attach_record(failed, ExitKind.DISK_FULL, subject=reply.record.subject)
            raise failed
        return reply

    def send_bytes(self, view: memoryview) -> None:
        """Bytes that belong to no message."""
        self._all(view)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with what `send_bytes` sent; EOFError if the other side ends before."""
        while len(view):
            self._limit()
            got = self.sock.recv_into(view, min(len(view), _RUN))
            if not got:
                raise EOFError
            view = view[got:]

    def is_connected(self) -> bool:
        """Whether the other side is still there; for one that says nothing while it waits for an answer."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def hang_up(self) -> None:
        """End it from another thread than the one that receives."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it."""
        self.sock.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _first(self) -> tuple[bytes | bytearray, list[int]]:
        """A head, and the open files that came with it."""
        if self.sock.family != socket.AF_UNIX:
            return self._exactly(HEAD.size), []
        self._limit()
        first, files, _, _ = socket.recv_fds(self.sock, HEAD.size, _FILES)
        if not first:
            raise EOFError
        try:
            return first + self._exactly(HEAD.size - len(first)), files
        except BaseException:
            for file in files:
                os.close(file)
            raise

    def _all(self, view: memoryview) -> None:
        """Send it. Not by `sendall`, whose time limit is for the whole: gigabytes take longer than a pause."""
        while len(view):
            self._limit()
            view = view[self.sock.send(view) :]

    def _exactly(self, count: int) -> bytearray:
        data = bytearray()
        while len(data) < count:
            self._limit()
            run = self.sock.recv(min(count - len(data), _RUN))
            if not run:
                raise EOFError
            data += run
        return data

    def _limit(self) -> None:
        left = self.timeout
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it took too long")
        self.sock.settimeout(left)


def authenticate(conversation: Conversation, token: bytes, purpose: str, role: Literal["server", "client"]) -> None:
    """Have both ends of a TCP connection show that they know `token` and seal all that follows.

    ProtocolError if the other does not know it; EOFError if it hangs up. Set a time limit (`Conversation.within`).
    """
    proof = TokenProof(token, purpose, role)
    conversation.send_bytes(memoryview(make_greeting(proof.nonce)))
    conversation.send_bytes(memoryview(proof.answer_nonce(read_greeting(conversation._exactly(GREETING_BYTES)))))
    if not proof.accepts(bytes(conversation._exactly(PROOF_BYTES))):
        raise ProtocolError("the other side does not know the token")
    conversation._seal = Seal(proof.connection_key(), role == "server")


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(process id, user) at the other end of a Unix socket, as the kernel noted them."""
    pid, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


def check_peer(sock: socket.socket) -> None:
    """ProtocolError unless the process at the other end of a Unix socket is this user's (or root's)."""
    _, user = peer_credentials(sock)
    if user not in (0, os.geteuid()):
        raise ProtocolError(f"the other side is a process of user {user}")
