"""The time limit of a conversation is of each pause, not of all that is sent."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from megascale.services.conversation import Conversation
from megascale.services.messages import Message, Schema

LIMIT = 0.2  # seconds of a pause


class Note(Message, frozen=True):
    number: int = 0


SCHEMA = Schema(Note, limit=4096)


@pytest.fixture
def ends():
    left_end, right_end = socket.socketpair()
    left_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    with Conversation(left_end, SCHEMA, SCHEMA) as sender, Conversation(right_end, SCHEMA, SCHEMA) as receiver:
        sender.timeout = LIMIT
        yield sender, receiver


def test_sending_may_take_longer_than_the_limit_as_long_as_it_goes_on(ends):
    sender, receiver = ends
    sent, begun = bytes(range(256)) * (1 << 14), time.monotonic()
    got = bytearray(len(sent))

    def take() -> None:
        """Receive so slowly that the whole takes several times the limit on any machine."""
        assert receiver.receive(max_body_bytes=0) == Note(7)
        for start in range(0, len(sent), 1 << 16):
            receiver.receive_into(memoryview(got)[start : start + (1 << 16)])
            while time.monotonic() - begun < 3 * LIMIT * start / len(sent):
                time.sleep(0.001)

    thread = threading.Thread(target=take)
    thread.start()
    sender.send(Note(7))
    sender.send_bytes(memoryview(sent))
    thread.join()
    assert time.monotonic() - begun > 2 * LIMIT
    assert bytes(got) == sent


def test_sending_ends_once_nobody_takes_anything_for_the_limit(ends):
    sender, _ = ends
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        sender.send_bytes(memoryview(bytes(1 << 24)))
    assert time.monotonic() - begun >= LIMIT


def test_a_look_at_the_connection_does_not_wait_for_the_timeout_of_the_socket() -> None:
    ends = socket.socketpair()
    left, right = (Conversation(end, SCHEMA, SCHEMA) for end in ends)
    left.sock.settimeout(60.0)
    with left:
        start = time.monotonic()
        assert left.is_connected()
        assert time.monotonic() - start < 30.0
        right.close()
        assert not left.is_connected()
    assert not left.is_connected()
