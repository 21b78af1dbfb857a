"""Messages between trainers and checkpoint services: a JSON header, bytes and, locally, open files. No torch.

Local: a Unix socket in a folder that only this user may enter. Between hosts: TCP, where both sides prove that they
know the run's token before anything else is said (core/shared_token.py; the token itself never travels).
Contents are checked by checksum, not encrypted.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale.core.private_folder import make_private, private_base
from megascale.core.shared_token import NONCE_BYTES, PROOF_BYTES, TokenProof

_PREFIX = struct.Struct("<IQ")
_MAX_HEADER = 64 << 20
PROTOCOL = 3  # a service that lingers from another version is not talked to


class Message(dict[str, Any]):
    """A header with what came beside it."""

    body: bytearray
    handles: list[int]


def send(
    sock: socket.socket, header: dict[str, Any], body: bytes | memoryview = b"", handles: Sequence[int] = ()
) -> None:
    """Send one message; `handles` (open files) only over a Unix socket."""
    text = json.dumps(header).encode()
    prefix = _PREFIX.pack(len(text), len(body)) + text
    if handles:
        sent = socket.send_fds(sock, [prefix], list(handles))
        prefix = prefix[sent:]
    sock.sendall(prefix)
    if len(body):
        sock.sendall(body)


def receive(sock: socket.socket, max_body: int = 1 << 40) -> Message:
    """The next message; EOFError at the end of the conversation."""
    handles: list[int] = []
    first: bytes | bytearray
    if sock.family == socket.AF_UNIX:
        first, handles, _, _ = socket.recv_fds(sock, _PREFIX.size, 64)
        first += _exactly(sock, _PREFIX.size - len(first)) if first else b""
    else:
        first = _exactly(sock, _PREFIX.size)
    if not first:
        raise EOFError
    header_size, body_size = _PREFIX.unpack(first)
    if header_size > _MAX_HEADER or body_size > max_body:
        raise ConnectionError("a message is larger than allowed")
    message = Message(json.loads(_exactly(sock, header_size)))
    message.body = _exactly(sock, body_size)
    message.handles = handles
    return message


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    receive_into(sock, memoryview(data))
    return data


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view` from the socket; EOFError if the other side ends before."""
    while len(view):
        got = sock.recv_into(view, min(len(view), 1 << 20))
        if not got:
            raise EOFError
        view = view[got:]


def alive(sock: socket.socket) -> bool:
    """Whether the other side is still there; for one that says nothing while it waits for an answer."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def private_folder(run: Path | str, node: str | None = None) -> Path:
    """A folder of this user and host for the sockets of one run (see make_private).

    node: its name where a launcher plays several nodes on one host, each a host of its own; default: this process's.
    """
    node = os.environ.get("MEGASCALE_NODE", "") if node is None else node
    identity = f"{Path(run).absolute()}\0{node}\0{PROTOCOL}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return make_private(private_base() / name)


def prove(sock: socket.socket, token: bytes, server: bool) -> None:
    """Let both sides of a TCP connection show that they know `token`; ConnectionError if the other does not."""
    proof = TokenProof(token, "replicas", "server" if server else "client")
    sock.sendall(proof.nonce)
    sock.sendall(proof.answer(bytes(_exactly(sock, NONCE_BYTES))))
    if not proof.accepts(bytes(_exactly(sock, PROOF_BYTES))):
        raise ConnectionError("the other side does not know the run's token")
