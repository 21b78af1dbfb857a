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
from typing import Any

_DESCRIPTORS = "/proc/self/fd"
_IPV4_IN_IPV6 = "::ffff:"

Endpoint = tuple[str, int]  # address, "" for all addresses of a host, and TCP port


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


def list_listeners() -> set[Endpoint]:
    """Return the TCP endpoints on which this process listens."""
    listeners = set()
    for fd, identity in select_internet_sockets(list_sockets()).items():
        listener = _duplicate(fd, identity)
        if listener is None:
            continue
        with listener:
            if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listeners.add(_normalize(listener.getsockname()))
    return listeners


def select_connections(
    sockets: Mapping[int, str], local_listeners: Set[Endpoint], peer_listeners: Set[Endpoint]
) -> dict[int, str]:
    """Return those of the given TCP sockets that are connected from or to the given endpoints.

    A port alone is not sufficient: other hosts may use the port of a peer for another service.

    Args:
        local_listeners: endpoints of this process that have accepted connections.
        peer_listeners: endpoints to which this process has connected.
    """
    selected = {}
    for fd, identity in sockets.items():
        connection = _duplicate(fd, identity)
        if connection is None:
            continue
        with connection, contextlib.suppress(OSError):  # it is not connected, such as a listener
            has_connected = _is_among(_normalize(connection.getpeername()), peer_listeners)
            if has_connected or _is_among(_normalize(connection.getsockname()), local_listeners):
                selected[fd] = identity
    return selected


def _normalize(address: tuple[Any, ...]) -> Endpoint:
    """Return the endpoint of a socket's address. IPv4 within IPv6 becomes IPv4, and the zone is removed."""
    host = str(address[0]).partition("%")[0]
    if host.startswith(_IPV4_IN_IPV6):
        host = host.removeprefix(_IPV4_IN_IPV6)
    if host in ("0.0.0.0", "::"):
        host = ""
    return host, int(address[1])


def _is_among(endpoint: Endpoint, listeners: Set[Endpoint]) -> bool:
    """Return whether a connection's end belongs to one of the listeners."""
    return endpoint in listeners or ("", endpoint[1]) in listeners


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
