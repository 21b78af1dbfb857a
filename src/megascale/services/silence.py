"""TCP connections to machines that are gone: the kernel by itself would go on trying for a quarter of an hour."""

from __future__ import annotations

import contextlib
import socket


def set_peer_timeout(sock: socket.socket, seconds: float) -> None:
    """Have the kernel end a connection whose other side has acknowledged nothing for about so long, while data is on
    its way (TCP_USER_TIMEOUT, Linux) or not (keepalive). Whoever sends or receives then gets an OSError."""
    idle = max(1, int(seconds / 3))
    wanted = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (
        ("TCP_USER_TIMEOUT", max(1000, int(1000 * seconds))),
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", idle),
        ("TCP_KEEPCNT", 3),
    ):
        if hasattr(socket, name):
            wanted.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    for level, option, value in wanted:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)
