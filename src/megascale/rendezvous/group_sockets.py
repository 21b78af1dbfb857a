"""Sockets of gloo's groups. A rank shuts the sockets down to end calls that wait for a peer.

gloo cannot cancel an operation: the operation waits until its time-out or until a connection breaks. Shutting down the
connections of this process ends all its calls at once with an error. It also ends the calls of peers that wait for this
process.

/proc does not distinguish gloo's sockets from other sockets of the process. A caller therefore lists all sockets before
it makes groups, and takes those that are new afterwards.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Set

_DESCRIPTORS = "/proc/self/fd"


def list_sockets() -> dict[int, str]:
    """Return the identities (`socket:[INODE]`) of all sockets of this process by descriptor; empty without /proc."""
    sockets: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            identity = _identify(int(name))
            if identity.startswith("socket:"):
                sockets[int(name)] = identity
    return sockets


def list_new_sockets(earlier_sockets: dict[int, str]) -> dict[int, str]:
    """Return the sockets that were opened since `list_sockets` returned `earlier_sockets`, gloo's or others."""
    return {fd: identity for fd, identity in list_sockets().items() if earlier_sockets.get(fd) != identity}


def select_internet_sockets(sockets: dict[int, str]) -> dict[int, str]:
    """Return those of the given sockets that are open and use TCP, as gloo's do. Services of a host use other ones."""
    selected = {}
    for fd, identity in sockets.items():
        connection = _duplicate(fd, identity)
        if connection is None:
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                selected[fd] = identity
    return selected


def list_listening_ports() -> set[int]:
    """Return the TCP ports on which this process listens."""
    ports = set()
    for fd, identity in select_internet_sockets(list_sockets()).items():
        listener = _duplicate(fd, identity)
        if listener is None:
            continue
        with listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(listener.getsockname()[1])
    return ports


def select_connections(sockets: Mapping[int, str], local_ports: Set[int], peer_ports: Set[int]) -> dict[int, str]:
    """Return those of the given TCP sockets that are connected from or to the given ports.

    Args:
        local_ports: ports of this process that have accepted connections.
        peer_ports: ports to which this process has connected.
    """
    selected = {}
    for fd, identity in sockets.items():
        connection = _duplicate(fd, identity)
        if connection is None:
            continue
        with connection, contextlib.suppress(OSError):  # it is not connected
            has_accepted = connection.getsockname()[1] in local_ports
            if connection.getpeername()[1] in peer_ports or has_accepted:
                selected[fd] = identity
    return selected


def cut_connections(sockets: dict[int, str]) -> int:
    """Shut down the given sockets that are still open and connected. Any thread may call this function.

    Listeners stay open, because gloo's event loop ends the process if a listener fails.

    Returns:
        The number of sockets that were shut down.
    """
    cut_count = 0
    for fd, identity in sockets.items():
        connection = _duplicate(fd, identity)
        if connection is None:
            continue
        with connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                cut_count += 1
    return cut_count


def _duplicate(fd: int, identity: str) -> socket.socket | None:
    """Return a duplicate of a socket that was listed, or None if another thread has closed the socket since."""
    try:
        duplicate = os.dup(fd)
    except OSError:
        return None
    # The descriptor may have been given to another file.
    if _identify(duplicate) != identity:
        os.close(duplicate)
        return None
    return socket.socket(fileno=duplicate)


def _identify(fd: int) -> str:
    """Return what a descriptor refers to, such as `socket:[INODE]`, "" if it is closed."""
    try:
        return os.readlink(f"{_DESCRIPTORS}/{fd}")
    except OSError:
        return ""
