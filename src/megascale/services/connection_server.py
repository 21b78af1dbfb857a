"""Server that serves each client in a thread. Clients have a deadline for their authentication, against floods."""

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

MAX_UNAUTHENTICATED = 64  # largest number of connections whose authentication is under way
AUTHENTICATION_TIMEOUT = 5.0  # seconds for the authentication of a connection
_POLL_SECONDS = 0.2  # seconds between two calls of `is_done` while no client is connected
_ACCEPT_RETRY_SECONDS = 0.02  # pause after a failed accept, so that file descriptors may become free


class ConnectionServer:
    """Server that authenticates each connection and serves it in its own thread.

    If a connection arrives while `max_unauthenticated` others are unauthenticated, it replaces the oldest of these.
    A client that knows the token needs only milliseconds, so the oldest is hardly ever such a client. If file
    descriptors run out, the server drops the older half of the unauthenticated connections.

    Args:
        authenticate: checks a client within AUTHENTICATION_TIMEOUT and returns the conversation with it.
        serve_client: serves a conversation and returns at its end.

    Attributes:
        has_had_clients: whether any client was ever authenticated.
        last_activity: time.monotonic() when the last client left, or when the server was created.
    """

    def __init__(
        self,
        listener: socket.socket,
        authenticate: Callable[[socket.socket], Conversation],
        serve_client: Callable[[Conversation], None],
        max_unauthenticated: int = MAX_UNAUTHENTICATED,
    ) -> None:
        listener.setblocking(False)
        self.has_had_clients = False
        self.last_activity = time.monotonic()
        self._listener = listener
        self._authenticate = authenticate
        self._serve_client = serve_client
        self._max_unauthenticated = max_unauthenticated
        self._unauthenticated: dict[int, socket.socket] = {}  # by connection number, oldest first
        self._clients: set[Conversation] = set()
        self._lock = threading.Lock()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # written to end a wait in `serve`
        self._connection_count = 0  # connections accepted so far, which number them
        self._is_stopped = False

    @property
    def client_count(self) -> int:
        """Return the number of authenticated connections."""
        return len(self._clients)

    def is_idle(self, seconds: float) -> bool:
        """Return whether no client has been connected for more than `seconds`."""
        with self._lock:
            return not self._clients and time.monotonic() - self.last_activity > seconds

    def record_activity(self) -> None:
        """Count the idle time from now on."""
        with self._lock:
            self.last_activity = time.monotonic()

    def serve(self, is_done: Callable[[], bool]) -> None:
        """Accept connections until `is_done` returns true.

        `is_done` is called when a client has left, after `wake`, and every _POLL_SECONDS while no client is connected.
        """
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while not is_done():
            timeout = None if self.client_count else 1000 * _POLL_SECONDS  # milliseconds
            for descriptor, _ in poll.poll(timeout):
                if descriptor == self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wakeup)
                else:
                    self._accept()

    def stop(self) -> None:
        """Accept no more connections. Open conversations go on until the process ends."""
        self._listener.close()
        with self._lock:
            self._is_stopped = True

    def wake(self) -> None:
        """Make `serve` call `is_done` now. Any thread may call this method."""
        os.eventfd_write(self._wakeup, 1)

    def _accept(self) -> None:
        """Accept one connection and start its thread."""
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no file descriptor, no memory, or the client has disconnected already
            log.warning("a connection could not be accepted: %s", error)
            self._shut_down_oldest(len(self._unauthenticated) // 2)
            time.sleep(_ACCEPT_RETRY_SECONDS)
            return
        self._shut_down_oldest(self._max_unauthenticated - 1)
        with self._lock:
            self._connection_count += 1
            number = self._connection_count
            self._unauthenticated[number] = sock
        try:
            threading.Thread(target=self._serve_connection, args=(number, sock), daemon=True).start()
        except RuntimeError as error:
            log.warning("a connection could not be served: %s", error)
            with self._lock:
                self._unauthenticated.pop(number, None)
            sock.close()

    def _shut_down_oldest(self, limit: int) -> None:
        """Shut down the oldest unauthenticated connections until `limit` remain. Their threads close the sockets."""
        with self._lock:
            while len(self._unauthenticated) > limit:
                oldest_number = min(self._unauthenticated)
                sock = self._unauthenticated.pop(oldest_number)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _serve_connection(self, number: int, sock: socket.socket) -> None:
        """Authenticate and serve one connection; the body of its thread."""
        with sock:
            try:
                conversation = self._authenticate(sock)
            except (OSError, EOFError) as error:
                log.info("a client was refused: %s", str(error) or type(error).__name__)
                return
            finally:
                with self._lock:
                    was_dropped = self._unauthenticated.pop(number, None) is None
            with self._lock:
                if was_dropped or self._is_stopped:
                    return
                self._clients.add(conversation)
                self.has_had_clients = True
            try:
                self._serve_client(conversation)
            except EOFError:
                pass
            except OSError as error:
                log.info("a conversation ended: %s", error)
            finally:
                with self._lock:
                    self._clients.discard(conversation)
                    self.last_activity = time.monotonic()
                self.wake()
