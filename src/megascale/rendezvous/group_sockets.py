"""The connections of gloo's groups, which a rank cuts to end calls that wait for a peer.

gloo has no call that ends an operation under way: it waits for its time-out, or until a connection breaks. Cutting this
process's own connections ends all of its calls at once with an error, and those of peers that wait for it.
"""

from __future__ import annotations

import contextlib
import os
import socket

_DESCRIPTORS = "/proc/self/fd"


def list_sockets() -> dict[int, str]:
    """Return the identity of each socket of this process by its descriptor; empty without /proc."""
    sockets: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            identity = _identify(int(name))
            if identity.startswith("socket:"):
                sockets[int(name)] = identity
    return sockets


def list_new_sockets(before: dict[int, str]) -> dict[int, str]:
    """Return the sockets that were opened since `before` was listed."""
    return {fd: identity for fd, identity in list_sockets().items() if before.get(fd) != identity}


def cut_connections(sockets: dict[int, str]) -> int:
    """Shut down those of these sockets that are connected and still open; return their number. For any thread.

    A listener stays open, since gloo's event loop ends the process if it fails.
    """
    count = 0
    for fd, identity in sockets.items():
        try:
            duplicate = os.dup(fd)
        except OSError:
            continue
        # The descriptor may have been closed and given to another file.
        if _identify(duplicate) != identity:
            os.close(duplicate)
            continue
        with socket.socket(fileno=duplicate) as connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _identify(fd: int) -> str:
    try:
        return os.readlink(f"{_DESCRIPTORS}/{fd}")
    except OSError:
        return ""
