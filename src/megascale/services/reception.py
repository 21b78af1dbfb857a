"""Where connections come in: each has one deadline to show who it is, few are strangers at once, no flood ends it."""

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

STRANGERS = 64  # connections that have not yet shown who they are
AUTHENTICATION_TIMEOUT = 5.0  # that each has for it
_LOOK = 0.2  # seconds between questions whether all is done while nobody is here
_BREATH = 0.02  # seconds after an accept that failed: descriptors come free meanwhile


class Reception:
    """Hands each connection that has shown who it is to `talk`, in a thread of its own.

    A connection that comes while there are STRANGERS takes the place of the one that has been silent longest: those who
    know the token need milliseconds. Where no descriptor is left half of them go, and accepting goes on.

    Args:
        listener: listens.
        meet: makes sure within PROOF_SECONDS who has come, and returns the conversation.
        talk: ends when the conversation does.

    Attributes:
        came: whether somebody has been here.
        left_at: when the last one left, or this began (monotonic).
    """

    def __init__(
        self,
        listener: socket.socket,
        meet: Callable[[socket.socket], Conversation],
        talk: Callable[[Conversation], None],
        max_unauthenticated: int = STRANGERS,
    ) -> None:
        listener.setblocking(False)
        self._listener, self._meet, self._talk, self._most = listener, meet, talk, max_unauthenticated
        self._strangers: dict[int, socket.socket] = {}
        self._inside: set[Conversation] = set()
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._number = 0
        self._ended = False
        self.has_had_clients, self.left_at = False, time.monotonic()

    @property
    def client_count(self) -> int:
        """Connections that have shown who they are."""
        return len(self._inside)

    def deserted(self, seconds: float) -> bool:
        """Whether nobody has been here for longer than that."""
        with self._lock:
            return not self._inside and time.monotonic() - self.left_at > seconds

    def record_activity(self) -> None:
        """Something was done here: count from now on."""
        with self._lock:
            self.left_at = time.monotonic()

    def serve(self, done: Callable[[], bool]) -> None:
        """Take connections until `done` says so; it is asked when one has left, and often while nobody is here."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not done():
            for handle, _ in poll.poll(None if self.client_count else 1000 * _LOOK):
                if handle == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                else:
                    self._accept()

    def stop(self) -> None:
        """Take no more; conversations that there are end with the process."""
        self._listener.close()
        with self._lock:
            self._ended = True

    def wake(self) -> None:
        """Have `done` asked now."""
        os.eventfd_write(self._wake, 1)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor, no memory, or it has hung up again
            log.warning("a connection could not be taken: %s", error)
            self._drop_oldest(len(self._strangers) // 2)
            time.sleep(_BREATH)
            return
        self._drop_oldest(self._most - 1)
        with self._lock:
            self._number += 1
            number = self._number
            self._strangers[number] = sock
        try:
            threading.Thread(target=self._welcome, args=(number, sock), daemon=True).start()
        except RuntimeError as error:
            log.warning("a connection could not be served: %s", error)
            with self._lock:
                self._strangers.pop(number, None)
            sock.close()

    def _drop_oldest(self, most: int) -> None:
        """Hang up on those who have been strangers longest; their threads close them."""
        with self._lock:
            while len(self._strangers) > most:
                sock = self._strangers.pop(next(iter(self._strangers)))
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _welcome(self, number: int, sock: socket.socket) -> None:
        with sock:
            try:
                conversation = self._meet(sock)
            except (OSError, EOFError) as error:
                log.info("a stranger was sent away: %s", error or type(error).__name__)
                return
            finally:
                with self._lock:
                    known = self._strangers.pop(number, None) is not None
            with self._lock:
                if not known or self._ended:
                    return
                self._inside.add(conversation)
                self.has_had_clients = True
            try:
                self._talk(conversation)
            except (OSError, EOFError) as error:
                if not isinstance(error, EOFError):
                    log.info("a conversation ended: %s", error)
            finally:
                with self._lock:
                    self._inside.discard(conversation)
                    self.left_at = time.monotonic()
                self.wake()
