"""Notices at once when a connection to the store breaks while nobody reads from it.

A rank that waits inside NCCL does not look at its store; if the server restarted without its memory, the others
would wait for what this rank had written. One thread per process sleeps in epoll on all idle connections and
wakes only when one breaks. Without epoll (not Linux) there is no watcher, and repair waits for the next call.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from typing import Any, Protocol

from megascale.core.failure import FailureLog

log = logging.getLogger(__name__)


class Healer(Protocol):
    def heal(self) -> None: ...


class _Watcher:
    def __init__(self) -> None:
        self._poll = select.epoll()
        self._owners: dict[int, weakref.ReferenceType[Any]] = {}
        threading.Thread(target=self._run, name="megascale-store-watch", daemon=True).start()

    def add(self, descriptor: int, owner: Healer) -> None:
        self._owners[descriptor] = weakref.ref(owner)
        events = select.EPOLLRDHUP | select.EPOLLONESHOT
        try:
            self._poll.register(descriptor, events)
        except FileExistsError:  # the number is used again by a new connection
            self._poll.modify(descriptor, events)

    def _run(self) -> None:
        failures = FailureLog(log, "the repair of a connection to the store")
        while True:
            for descriptor, _ in self._poll.poll():
                owner = self._owners.pop(descriptor, lambda: None)()
                if owner is None:
                    continue
                try:
                    threading.Thread(target=owner.heal, name="megascale-store-heal", daemon=True).start()
                except RuntimeError as error:  # no further thread
                    failures.note(error, "the next call repairs it")


_watcher: _Watcher | None = None
_owner_pid = -1
_lock = threading.Lock()


def add(descriptor: int, owner: Healer) -> None:
    """Call `owner.heal()` in a thread of its own when the connection with this number breaks."""
    global _watcher, _owner_pid
    if not hasattr(select, "epoll"):
        return
    with _lock:
        if _watcher is None or _owner_pid != os.getpid():  # a fork has no threads
            _watcher, _owner_pid = _Watcher(), os.getpid()
        _watcher.add(descriptor, owner)
