"""Listening sockets for untrusted clients on an event loop, with limits against floods of connections.

The number of connections is limited, and each has a deadline for its authentication. If a connection arrives at the
limit, it replaces the connection that has been unauthenticated for longest.
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

_EXHAUSTED_PAUSE = 0.1  # seconds before the next connection is accepted if resources are exhausted
_TLS_END_SECONDS = 1.0  # for the end of a TLS connection
# Error numbers if the process or the system has no descriptor or memory for another connection.
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the cost of connections.

    Attributes:
        connections: largest number of open connections, authenticated or not.
        head_seconds: time from the connection to the end of the head of an authenticated request, TLS included.
        backlog: number of connections that the kernel queues before they are accepted.
        pace: seconds between two accepted connections, so that a flood leaves the loop time for other work.
    """

    connections: int
    head_seconds: float
    backlog: int = 64
    pace: float = 0.002


class Connection:
    """Connection that is aborted when its deadline passes.

    Attributes:
        is_authenticated: whether its request was authenticated. Such a connection is not dropped for a new one.
    """

    def __init__(self, listener: LimitedListener, sock: socket.socket) -> None:
        self.is_authenticated = False
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.BaseTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._set_deadline(listener.limits.head_seconds)
        self._open_task = self._loop.create_task(self._open(sock))
        log_failure(self._open_task, "accepting a connection", log)

    async def _open(self, sock: socket.socket) -> None:
        """Attach a protocol to the socket, after the TLS handshake if there is a context."""
        context = self._listener.context
        seconds = self._listener.limits.head_seconds
        if context:
            timeouts = {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": _TLS_END_SECONDS}
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
        """Store the transport of the connection. Its protocol calls this method after the TLS handshake."""
        self._transport = transport

    def detach(self) -> None:
        """Stop counting the connection. Its protocol calls this method when the connection has ended."""
        self._set_deadline(None)
        self._listener.remove(self)

    def mark_authenticated(self, seconds: float | None) -> None:
        """Mark the connection as authenticated. The response may take `seconds`, or any time if `seconds` is None."""
        self.is_authenticated = True
        self._set_deadline(seconds)

    def extend_deadline(self, seconds: float) -> None:
        """Allow `seconds` for the response to an unauthenticated request.

        The connection may still be dropped for a new one.
        """
        self._set_deadline(seconds)

    def restart_deadline(self) -> None:
        """Start the deadline for the next request on the connection, which must authenticate itself again."""
        self.is_authenticated = False
        self._set_deadline(self._listener.limits.head_seconds)
        self._listener.move_to_end(self)

    def abort(self) -> None:
        """End the connection immediately."""
        if isinstance(self._transport, asyncio.Transport):
            self._transport.abort()
        else:
            self._open_task.cancel()

    def _set_deadline(self, seconds: float | None) -> None:
        """Abort the connection after `seconds` from now, or never if `seconds` is None."""
        if self._timer is not None:
            self._timer.cancel()
        if seconds is not None:
            self._timer = self._loop.call_later(seconds, self.abort)
        else:
            self._timer = None


class LimitedListener:
    """Server that accepts connections within limits.

    Args:
        listeners: bound sockets, which `close` closes.
        make_protocol: returns the protocol of a connection. The protocol must call the connection's `attach` and
            `detach`, and `mark_authenticated` after the authentication of a request.
        context: TLS context, or None for no TLS.
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
        self._connections: dict[Connection, None] = {}  # a set ordered by waiting time, longest first
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(limits.backlog)
        loop = asyncio.get_running_loop()
        self._accept_tasks = [
            loop.create_task(keep_running(partial(self._accept, listener), "a listening socket", log))
            for listener in listeners
        ]

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def ports(self) -> list[int]:
        return [listener.getsockname()[1] for listener in self._listeners]

    def remove(self, connection: Connection) -> None:
        """Stop counting a connection that has ended."""
        self._connections.pop(connection, None)

    def move_to_end(self, connection: Connection) -> None:
        """Move a connection that was just served to the end of the order in which connections are dropped."""
        if connection in self._connections:
            del self._connections[connection]
            self._connections[connection] = None

    async def close(self) -> None:
        """Accept no more connections, and abort the unauthenticated ones."""
        for task in self._accept_tasks:
            task.cancel()
        await asyncio.gather(*self._accept_tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        for connection in list(self._connections):
            if not connection.is_authenticated:
                connection.abort()

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Either the client has already disconnected, or the process is out of file descriptors or memory.
                if error.errno in _OUT_OF_RESOURCES:
                    self._abort_oldest()
                    await asyncio.sleep(_EXHAUSTED_PAUSE)
                continue
            if len(self._connections) < self.limits.connections or self._abort_oldest():
                self._connections[Connection(self, sock)] = None
            else:
                sock.close()
            await asyncio.sleep(self.limits.pace)

    def _abort_oldest(self) -> bool:
        """Abort the connection that has been unauthenticated for longest. Return False if all are authenticated."""
        for connection in self._connections:
            if not connection.is_authenticated:
                self.remove(connection)
                connection.abort()
                return True
        return False
