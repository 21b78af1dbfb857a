"""A threaded connection server: each client has one deadline to authenticate, and a flood of clients cannot stop it."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from megascale.services.conversation import Conversation

log = logging.getLogger("megascale.services")

MAX_UNAUTHENTICATED = 64  # connections that have not authenticated themselves yet
AUTHENTICATION_TIMEOUT = 5.0  # seconds that each has for it
_POLL_SECONDS = 0.2  # between two calls of `is_done` while no client is connected
_ACCEPT_RETRY_SECONDS = 0.02  # after a failed accept, in which file descriptors may become free


class ConnectionServer:
    """Serves each authenticated connection by `handle` in a thread of its own.

    A connection that arrives while MAX_UNAUTHENTICATED wait replaces the oldest of them: clients that know the token
    need milliseconds. When file descriptors run out, half of them are dropped and accepting goes on.

    Args:
        listener: listening socket.
        authenticate: checks a client within AUTHENTICATION_TIMEOUT and returns the conversation with it.
        handle: serves a conversation and returns at its end.

    Attributes:
        has_had_clients: whether any client was ever authenticated.
        last_activity: monotonic time at which the last client left, or the server was created.
    """

    def __init__(
        self,
        listener: socket.socket,
        authenticate: Callable[[socket.socket], Conversation],
        handle: Callable[[Conversation], None],
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
    ) -> None:
        listener.setblocking(False)
        self.has_had_clients = False
        self.last_activity = time.monotonic()
        self._listener = listener
        self._authenticate = authenticate
        self._handle = handle
        self._max_unauthenticated = max_unauthenticated
        self._unauthenticated: dict[int, socket.socket] = {}
        self._clients: set[Conversation] = set()
        self._lock = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._accepted = 0
        self._stopped = False

    @property
    def client_count(self) -> int:
        """Return the number of authenticated connections."""
        return len(self._clients)

    def is_idle(self, seconds: float) -> bool:
        """Return whether no client has been connected for more than `seconds`."""
        with self._lock:
            return not self._clients and time.monotonic() - self.last_activity > seconds

    def record_activity(self) -> None:
        """Restart the time that `is_idle` measures."""
        with self._lock:
            self.last_activity = time.monotonic()

    def serve(self, is_done: Callable[[], bool]) -> None:
        """Accept connections until `is_done`, which is called when a client has left and regularly while none is."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while not is_done():
            for handle, _ in poll.poll(None if self.client_count else 1000 * _POLL_SECONDS):
                if handle == self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wakeup)
                else:
                    self._accept()

    def stop(self) -> None:
        """Accept no more connections; open conversations end with the process."""
        self._listener.close()
        with self._lock:
            self._stopped = True

    def wake(self) -> None:
        """Have `serve` call `is_done` now."""
        os.eventfd_write(self._wakeup, 1)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no file descriptor, no memory, or the client has disconnected already
            log.warning("a connection could not be accepted: %s", error)
            self._drop_oldest(len(self._unauthenticated) // 2)
            time.sleep(_ACCEPT_RETRY_SECONDS)
            return
        self._drop_oldest(self._max_unauthenticated - 1)
        with self._lock:
            self._accepted += 1
            number = self._accepted
            self._unauthenticated[number] = sock
        try:
            threading.Thread(target=self._serve_connection, args=(number, sock), daemon=True).start()
        except RuntimeError as error:
            log.warning("a connection could not be served: %s", error)
            with self._lock:
                self._unauthenticated.pop(number, None)
            sock.close()

    def _drop_oldest(self, limit: int) -> None:
        """Shut down the oldest unauthenticated connections until `limit` are left; their threads close them."""
        with self._lock:
            while len(self._unauthenticated) > limit:
                sock = self._unauthenticated.pop(next(iter(self._unauthenticated)))
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _serve_connection(self, number: int, sock: socket.socket) -> None:
        with sock:
            try:
                conversation = self._authenticate(sock)
            except (OSError, EOFError) as error:
                log.info("a client was refused: %s", error or type(error).__name__)
                return
            finally:
                with self._lock:
                    was_waiting = self._unauthenticated.pop(number, None) is not None
            with self._lock:
                if not was_waiting or self._stopped:
                    return
                self._clients.add(conversation)
                self.has_had_clients = True
            try:
                self._handle(conversation)
            except EOFError:
                pass
            except OSError as error:
                log.info("a conversation ended: %s", error)
            finally:
                with self._lock:
                    self._clients.discard(conversation)
                    self.last_activity = time.monotonic()
                self.wake()
