"""Attacks on a port without a token, for some seconds: floods, slow senders, malformed frames, long bodies."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SILENT = 1100  # connections of a flood: more than the usual limit of open files
_PIECE = 1 << 20


@dataclass(frozen=True)
class Attack:
    """One way to bother a port.

    Attributes:
        name: what is done.
        run: does it to (host, port) for so many seconds; returns what it came to, in words.
        http: it is HTTP, and so for the API only.
        frames: it sends frames of protocols.
    """

    name: str
    run: Callable[[tuple[str, int], float], str]
    http: bool = False
    frames: bool = False


@contextlib.contextmanager
def _silent(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """Open as many silent connections as possible."""
    stored: list[socket.socket] = []
    try:
        for _ in range(count):
            try:
                sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
            except OSError:
                break
            stored.append(sock)
            sock.setblocking(False)
            sock.connect_ex(address)
        yield stored
    finally:
        for sock in stored:
            sock.close()


def flood(address: tuple[str, int], seconds: float) -> str:
    """Many connections that say nothing, taken up again for as long as there is time."""
    deadline, count = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        with _silent(address, SILENT) as stored:
            count += len(stored)
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
    return f"{count} connections"


def drip(address: tuple[str, int], seconds: float) -> str:
    """Connections that send a byte now and then, and never what is waited for."""
    deadline = time.monotonic() + seconds
    closed = 0
    with _silent(address, 200) as stored:
        while time.monotonic() < deadline:
            for sock in stored:
                try:
                    sock.send(b"G")
                except BlockingIOError:
                    pass
                except OSError:
                    closed += 1
            time.sleep(0.1)
    return f"200 connections, {closed} bytes that found them closed"


def garbage(address: tuple[str, int], seconds: float) -> str:
    """Frames of random bytes, of lengths that lie, and of protocols that are not spoken there."""
    deadline = time.monotonic() + seconds
    count = 0
    rng = random.Random(0)
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=2) as sock:
            sock.sendall(_frame(rng))
            count += 1
            sock.settimeout(0.05)
            sock.recv(4096)
    return f"{count} frames"


def _frame(rng: random.Random) -> bytes:
    size = rng.choice((1, 8, 32, 1000, 70_000))
    return rng.choice(
        (
            rng.randbytes(size),
            struct.pack(">I", 0xFFFFFFFF) + rng.randbytes(size),
            struct.pack("<IQ", 0xFFFFFFFF, 1 << 62) + rng.randbytes(size),
            struct.pack("<Q", 1 << 63) + rng.randbytes(size),
            bytes(32) + bytes(size),
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (size // 8),
            b"\x16\x03\x01\x02\x00\x01" + rng.randbytes(size),
            b"\x80\x04\x95" + rng.randbytes(size),
            b"[" * size,
        )
    )


def _post(address: tuple[str, int], lines: list[str], size: int, seconds: float) -> int:
    """POST `size` bytes as often as there is time; how many were taken at most of one."""
    deadline, most = time.monotonic() + seconds, 0
    head = "\r\n".join(["POST /v1/job/restart HTTP/1.1", f"Host: {address[0]}"] + lines + ["", ""]).encode()
    piece = b"[" * _PIECE
    while time.monotonic() < deadline:
        sent = 0
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=2) as sock:
            sock.sendall(head)
            while sent < size and time.monotonic() < deadline:
                sent += sock.send(piece[: size - sent])
        most = max(most, sent)
    return most


def long_body(address: tuple[str, int], seconds: float) -> str:
    """A gibibyte for the API."""
    size = 1 << 30
    return f"{_post(address, [f'Content-Length: {size}'], size, seconds) / 2**20:.0f} MiB taken of 1,024"


def long_chunk(address: tuple[str, int], seconds: float) -> str:
    """Send as much without a length in the head."""
    size = 1 << 30
    return f"{_post(address, ['Transfer-Encoding: chunked'], size, seconds) / 2**20:.0f} MiB taken of 1,024"


ATTACKS = (
    Attack("silent connections", flood),
    Attack("slow senders", drip),
    Attack("malformed frames", garbage, frames=True),
    Attack("a body of 1 GiB", long_body, http=True),
    Attack("a body without end", long_chunk, http=True),
)


def plant(folder: str, names: list[str], user: int) -> int:
    """Put files of these names into a folder as another user, who may not be asked to leave; how many there are.

    Needs the right to become that user.
    """
    child = os.fork()
    if not child:
        built = 0
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            for name in names:
                with contextlib.suppress(OSError):
                    os.close(os.open(f"{folder}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                    built += 1
        finally:
            os._exit(min(built, 255))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
