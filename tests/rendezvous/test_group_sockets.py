"""Connections are cut for both ends; listeners, files and reused descriptors are left alone."""

from __future__ import annotations

import os
import socket

import pytest

from megascale.rendezvous.group_sockets import (
    cut_connections,
    list_listening_ports,
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


def test_connections_from_and_to_ports_are_selected_and_others_are_not():
    before = list_sockets()
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [server.getsockname()[1] for server in servers]
    clients = [socket.create_connection(server.getsockname()) for server in servers]
    accepted = [server.accept()[0] for server in servers]
    with socket.socket() as unconnected:
        sockets = list_new_sockets(before)
        assert unconnected.fileno() in sockets
        assert set(ports) <= list_listening_ports()
        assert set(select_connections(sockets, set(), {ports[0]})) == {clients[0].fileno()}
        assert set(select_connections(sockets, {ports[1]}, set())) == {accepted[1].fileno()}
        assert not select_connections(sockets, set(), set())
    for opened in servers + clients + accepted:
        opened.close()
    assert not set(ports) & list_listening_ports()
