"""Connections are cut for both ends; listeners, files and reused descriptors are left alone."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from megascale.rendezvous import group_sockets
from megascale.rendezvous.group_sockets import (
    cut_connections,
    list_listeners,
    list_new_sockets,
    list_sockets,
    select_connections,
    select_internet_sockets,
)

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")


def test_new_connections_are_cut_and_their_listener_stays():
    before = list_sockets()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with client, server:
            sockets = list_new_sockets(before)
            assert set(sockets) == {listener.fileno(), client.fileno(), server.fileno()}
            assert cut_connections(sockets) == 2
            assert client.recv(1) == b""
            assert server.recv(1) == b""
        with socket.create_connection(listener.getsockname()):
            pass


def test_a_descriptor_that_another_socket_has_taken_is_not_cut():
    first, second = socket.socketpair()
    sockets = {fd: identity for fd, identity in list_sockets().items() if fd in (first.fileno(), second.fileno())}
    assert len(sockets) == 2
    first.close()
    second.close()
    other, end = socket.socketpair()
    with other, end:
        assert {other.fileno(), end.fileno()} & set(sockets)  # the lowest free descriptors
        assert cut_connections(sockets) == 0
        other.sendall(b"x")
        assert end.recv(1) == b"x"


def test_internet_sockets_are_selected_and_descriptors_with_another_file_are_not():
    before = list_sockets()
    closed = socket.socket()
    first, second = socket.socketpair()
    with first, second, socket.create_server(("127.0.0.1", 0)) as listener:
        sockets = list_new_sockets(before)
        assert set(sockets) == {closed.fileno(), first.fileno(), second.fileno(), listener.fileno()}
        descriptor = closed.fileno()
        closed.close()
        file = os.open(os.devnull, os.O_RDONLY)
        try:
            assert file == descriptor  # the lowest free one
            assert set(select_internet_sockets(sockets)) == {listener.fileno()}
        finally:
            os.close(file)


def test_connections_from_and_to_endpoints_are_selected_and_others_are_not():
    before = list_sockets()
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    endpoints = [server.getsockname() for server in servers]
    clients = [socket.create_connection(server.getsockname()) for server in servers]
    accepted = [server.accept()[0] for server in servers]
    with socket.socket() as unconnected:
        sockets = list_new_sockets(before)
        assert unconnected.fileno() in sockets
        assert set(endpoints) <= list_listeners()
        assert set(select_connections(sockets, set(), {endpoints[0]})) == {clients[0].fileno()}
        assert set(select_connections(sockets, {endpoints[1]}, set())) == {accepted[1].fileno()}
        assert not select_connections(sockets, set(), set())
    for opened in servers + clients + accepted:
        opened.close()
    assert not set(endpoints) & list_listeners()


@contextlib.contextmanager
def connect(listener: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection to a listener: the connecting one and the accepted one."""
    with socket.create_connection(listener.getsockname()[:2]) as connecting:
        accepted, _ = listener.accept()
        with accepted:
            yield connecting, accepted


def test_a_port_of_a_peer_on_another_host_is_another_service() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gloo:
        endpoint = gloo.getsockname()
        with (
            socket.create_server(("127.0.0.2", endpoint[1])) as other,
            connect(gloo) as ends,
            connect(other) as other_ends,
        ):
            listed = group_sockets.list_listeners()
            assert {endpoint, other.getsockname()} <= listed
            sockets = group_sockets.select_internet_sockets(group_sockets.list_sockets())
            descriptors = [end.fileno() for end in (*ends, *other_ends)]
            assert set(descriptors) <= set(sockets)
            connecting, accepted = ends

            def select(local: set[group_sockets.Endpoint], peer: set[group_sockets.Endpoint]) -> set[int]:
                return set(group_sockets.select_connections(sockets, local, peer)) & set(descriptors)

            assert select(set(), {endpoint}) == {connecting.fileno()}
            assert select({endpoint}, set()) == {accepted.fileno()}
            # A peer that listens on all addresses is known by its port only.
            assert select(set(), {("", endpoint[1])}) == {connecting.fileno(), other_ends[0].fileno()}


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        (("10.0.0.1", 5), ("10.0.0.1", 5)),
        (("0.0.0.0", 5), ("", 5)),
        (("::", 5, 0, 0), ("", 5)),
        (("::ffff:10.0.0.1", 5, 0, 0), ("10.0.0.1", 5)),
        (("fe80::1%eth0", 5, 0, 2), ("fe80::1", 5)),
    ],
)
def test_addresses_of_both_families_are_compared(address: tuple[object, ...], endpoint: tuple[str, int]) -> None:
    assert group_sockets._normalize(address) == endpoint
