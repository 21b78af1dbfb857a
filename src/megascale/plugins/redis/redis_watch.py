"""Watch over idle connections to Redis: it notices at once when one breaks."""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from typing import Protocol

from megascale.core.failure import FailureLog

log = logging.getLogger(__name__)


class Reconnects(Protocol):
    """An object that connects again after its connection broke."""

    def reconnect(self) -> None:
        """Connect again."""


class _Watcher:
    """Thread that notices at once when an idle connection breaks.

    A rank that waits inside NCCL does not use its store. If the server restarts without its data, the other ranks would
    otherwise wait for this rank's values until the rank uses its store again. One thread per process waits in epoll for
    all connections.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._connections_by_descriptor: dict[int, weakref.ReferenceType[Reconnects]] = {}
        threading.Thread(target=self._run, name="megascale-store-watch", daemon=True).start()

    def add(self, descriptor: int, connections: Reconnects) -> None:
        """Call `connections.reconnect()` when the connection with this descriptor breaks."""
        self._connections_by_descriptor[descriptor] = weakref.ref(connections)
        events = select.EPOLLRDHUP | select.EPOLLONESHOT  # the server has closed the connection; reported once
        try:
            self._poll.register(descriptor, events)
        except FileExistsError:  # a closed connection had the same descriptor
            self._poll.modify(descriptor, events)

    def _run(self) -> None:
        failures = FailureLog(log, "connecting to the store again")
        while True:
            for descriptor, _ in self._poll.poll():
                reference = self._connections_by_descriptor.pop(descriptor, None)
                connections = None if reference is None else reference()
                if connections is None:
                    continue
                # A reconnection may wait for the server, so it has its own thread.
                reconnection = threading.Thread(
                    target=connections.reconnect, name="megascale-store-reconnect", daemon=True
                )
                try:
                    reconnection.start()
                except RuntimeError as error:  # no further thread can be started
                    failures.note(error, "the next call connects again")


_watchers: dict[int, _Watcher] = {}  # by process id, because a forked process lacks the threads of its parent
_watchers_lock = threading.Lock()


def watch_connection(descriptor: int, connections: Reconnects) -> None:
    """Call `connections.reconnect()` in a new thread when the connection with this descriptor breaks.

    Systems without epoll (other than Linux) have no watcher. There the next call connects again.
    """
    if not hasattr(select, "epoll"):
        return
    with _watchers_lock:
        pid = os.getpid()
        if pid not in _watchers:
            _watchers[pid] = _Watcher()
        _watchers[pid].add(descriptor, connections)
