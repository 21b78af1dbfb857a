"""Connections from untrusted clients on an event loop: few at once, each with a deadline, robust against floods.

A connection that arrives while all slots are in use replaces the one that has been unauthenticated for longest.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megascale.core.failure import keep_running, log_failure

log = logging.getLogger("megascale.services")

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the cost of connections.

    Attributes:
        connections: open at once, authenticated or not.
        head_seconds: from the connection, TLS included, to a request that authenticates itself.
        backlog: connections that the kernel queues until they are accepted.
        pace: seconds between two accepted connections, so that a flood leaves the loop time for other work.
    """

    connections: int
    head_seconds: float
    backlog: int = 64
    pace: float = 0.002


class Connection:
    """One connection, which is aborted when its deadline passes.

    Attributes:
        is_authenticated: whether its request was let in; such a connection is never dropped for another one.
    """

    def __init__(self, listener: LimitedListener, sock: socket.socket) -> None:
        self.is_authenticated = False
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.BaseTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expire_after(listener.limits.head_seconds)
        self._task = self._loop.create_task(self._open(sock))
        log_failure(self._task, "accepting a connection", log)

    async def _open(self, sock: socket.socket) -> None:
        context = self._listener.context
        seconds = self._listener.limits.head_seconds
        if context:
            timeouts = {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": 1.0}
        else:
            timeouts = {}
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._listener.make_protocol(self), sock, ssl=context, **timeouts
            )
        except (OSError, TimeoutError, asyncio.CancelledError):
            sock.close()
            self.detach()

    def attach(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the established connection, TLS handshake included."""
        self._transport = transport

    def detach(self) -> None:
        """Forget the connection, which has ended."""
        self._expire_after(None)
        self._listener.remove(self)

    def let_in(self, seconds: float | None) -> None:
        """Mark the connection as authenticated; its response may take `seconds`, None: any time."""
        self.is_authenticated = True
        self._expire_after(seconds)

    def allow(self, seconds: float) -> None:
        """Give the response of an unauthenticated request `seconds`; the connection may still be dropped."""
        self._expire_after(seconds)

    def restart_deadline(self) -> None:
        """Require the next request on the connection to authenticate itself like the first."""
        self.is_authenticated = False
        self._expire_after(self._listener.limits.head_seconds)
        self._listener.move_to_end(self)

    def abort(self) -> None:
        """End the connection immediately."""
        if isinstance(self._transport, asyncio.Transport):
            self._transport.abort()
        else:
            self._task.cancel()

    def _expire_after(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if seconds is not None:
            self._timer = self._loop.call_later(seconds, self.abort)
        else:
            self._timer = None


class LimitedListener:
    """Accepts the connections of listening sockets within limits.

    Args:
        listeners: bound sockets; `close` closes them.
        make_protocol: makes the protocol of a connection, which calls its `attach`, `detach` and, when a request has
            authenticated itself, `let_in`.
        context: TLS context; None: no TLS.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        make_protocol: Callable[[Connection], asyncio.Protocol],
        limits: ConnectionLimits,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.make_protocol = make_protocol
        self.limits = limits
        self.context = context
        self._listeners = listeners
        self._connections: dict[Connection, None] = {}  # ordered by waiting time, longest first
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(limits.backlog)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(keep_running(partial(self._accept, listener), "a listening socket", log))
            for listener in listeners
        ]

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def ports(self) -> list[int]:
        """Return the ports of the listening sockets."""
        return [listener.getsockname()[1] for listener in self._listeners]

    def remove(self, connection: Connection) -> None:
        """Free the slot of a connection that has ended."""
        self._connections.pop(connection, None)

    def move_to_end(self, connection: Connection) -> None:
        """Make a connection that was just served the last one to be dropped."""
        if connection in self._connections:
            del self._connections[connection]
            self._connections[connection] = None

    async def close(self) -> None:
        """Accept no more connections, and end those that are not authenticated."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            if not connection.is_authenticated:
                connection.abort()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Either the client has already disconnected, or file descriptors ran out and one must be freed.
                if error.errno in _OUT_OF_RESOURCES:
                    self._drop_oldest()
                    await asyncio.sleep(0.1)
                continue
            if len(self._connections) < self.limits.connections or self._drop_oldest():
                self._connections[Connection(self, sock)] = None
            else:
                sock.close()
            await asyncio.sleep(self.limits.pace)

    def _drop_oldest(self) -> bool:
        """End the connection that has been unauthenticated for longest; return whether there was one."""
        oldest = next((connection for connection in self._connections if not connection.is_authenticated), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.abort()
        return True
