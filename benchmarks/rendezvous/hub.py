"""Thousands of blocking Redis clients in one thread: greenlets that change places when a socket has nothing to read."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

from megascale.plugins.redis.redis_connection import Connection, dial

T = TypeVar("T")
_BURST = 16


def _collect(results: list[T], part: Callable[[], T]) -> None:
    results.append(part())


class Hub:
    """Runs callables side by side; inside them, reading from a Redis connection lets the others go on.

    For one run in a process of its own: it changes how connections are made there.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._waiting: dict[int, Any] = {}
        self._ready: set[int] = set()

    def run(self, parts: Sequence[Callable[[], T]]) -> list[T]:
        """The results of all parts, in no order."""
        results: list[T] = []
        main, thread = getcurrent(), get_ident()
        hub = self

        class Socket(socket.socket):
            """A socket whose recv goes to the hub while there is nothing; in a thread of the store's own it waits."""

            def recv(self, size: int, flags: int = 0) -> bytes:
                number = self.fileno()
                while True:
                    hub._ready.discard(number)
                    try:
                        return super().recv(size, flags)
                    except BlockingIOError:
                        if get_ident() != thread:
                            select.select([number], [], [], 1.0)
                        elif number not in hub._ready:
                            hub._waiting[number] = getcurrent()
                            main.switch()

        def cooperative(host: str, port: int, timeout: float) -> socket.socket:
            plain = dial(host, port, timeout)
            if get_ident() != thread:
                return plain
            local = Socket(plain.family, plain.type, plain.proto, plain.detach())
            local.setblocking(False)
            # Edge-triggered: registered once, an event for each arrival.
            self._poll.register(local.fileno(), select.EPOLLIN | select.EPOLLET)
            return local

        Connection.dial = staticmethod(cooperative)
        for count, part in enumerate(parts):
            greenlet(partial(_collect, results, part)).switch()
            # A listener queues some thousand clients; who comes faster than it accepts is dropped and stalls.
            if count % _BURST == 0:
                self._turn(0)
        while len(results) < len(parts):
            self._turn(-1)
        return results

    def _turn(self, timeout: float) -> None:
        """Let everybody go on who has something to read."""
        for number, _ in self._poll.poll(timeout):
            rank = self._waiting.pop(number, None)
            if rank is None:
                self._ready.add(number)
            else:
                rank.switch()
