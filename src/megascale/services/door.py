"""Takes connections from strangers on an event loop: few at once, each with a deadline, and no flood keeps others out.

A connection that comes while all places are taken ends the one that has waited longest without proving itself.
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

from megascale.core.background import keep_running, log_failure

log = logging.getLogger("megascale.services")

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True)
class ConnectionLimits:
    """What connections may cost.

    Attributes:
        connections: at once, proved or not.
        head_seconds: from the connection, TLS included, to a request that proves itself.
        backlog: connections that the kernel holds until they are taken.
        pace: seconds between two connections that are taken, so that a flood leaves the loop to its other work.
    """

    connections: int
    head_seconds: float
    backlog: int = 64
    pace: float = 0.002


class Connection:
    """One connection, which is aborted when its time is over.

    Attributes:
        proved: whether its request may be answered at leisure; such a connection makes no room for others.
    """

    def __init__(self, door: LimitedListener, sock: socket.socket) -> None:
        self.proved = False
        self._door, self._loop = door, asyncio.get_running_loop()
        self._transport: asyncio.BaseTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expire_after(door.limits.head_seconds)
        self._task = self._loop.create_task(self._begin(sock))
        log_failure(self._task, "the begin of a connection", log)

    async def _begin(self, sock: socket.socket) -> None:
        context, seconds = self._door.context, self._door.limits.head_seconds
        secure = {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": 1.0} if context else {}
        try:
            await self._loop.connect_accepted_socket(lambda: self._door.protocol(self), sock, ssl=context, **secure)
        except (OSError, TimeoutError, asyncio.CancelledError):
            sock.close()
            self.detach()

    def attach(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport: the connection stands, and with TLS the other side speaks it."""
        self._transport = transport

    def detach(self) -> None:
        """Forget the connection, which is over."""
        self._expire_after(None)
        self._door.forget(self)

    def let_in(self, seconds: float | None) -> None:
        """Mark the connection as proved; its answer may take `seconds`, None: any time."""
        self.proved = True
        self._expire_after(seconds)

    def allow(self, seconds: float) -> None:
        """Give the answer `seconds`, though nothing was proved: the connection still makes room for others."""
        self._expire_after(seconds)

    def answered(self) -> None:
        """Start over: the next request on the connection has to prove itself like the first."""
        self.proved = False
        self._expire_after(self._door.limits.head_seconds)
        self._door.move_to_end(self)

    def abort(self) -> None:
        """End the connection now, whatever is under way."""
        if isinstance(self._transport, asyncio.Transport):
            self._transport.abort()
        else:
            self._task.cancel()

    def _expire_after(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.abort) if seconds is not None else None


class LimitedListener:
    """Takes the connections of listening sockets.

    Args:
        listeners: bound; `close` closes them.
        protocol: makes the protocol of a connection, which calls `made`, `lost` and, when a request proved itself,
            `let_in`.
        context: for TLS; None: without.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        protocol: Callable[[Connection], asyncio.Protocol],
        limits: ConnectionLimits,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.protocol, self.limits, self.context = protocol, limits, context
        self._listeners = listeners
        self._open: dict[Connection, None] = {}  # the one that has waited longest first
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(limits.backlog)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(keep_running(partial(self._take, listener), "a listening socket", log))
            for listener in listeners
        ]

    def __len__(self) -> int:
        return len(self._open)

    @property
    def ports(self) -> list[int]:
        """Return the ports on which it listens."""
        return [listener.getsockname()[1] for listener in self._listeners]

    def forget(self, connection: Connection) -> None:
        """Free the place of a connection that is over."""
        self._open.pop(connection, None)

    def move_to_end(self, connection: Connection) -> None:
        """Have a connection that was just answered make room last."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    async def close(self) -> None:
        """Take no more connections, and end those that have not proved themselves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        for connection in list(self._open):
            if not connection.proved:
                connection.abort()

    async def _take(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # A connection that is gone again; or no descriptor is left, so that one must make room.
                if error.errno in _FULL:
                    self._make_room()
                    await asyncio.sleep(0.1)
                continue
            if len(self._open) < self.limits.connections or self._make_room():
                self._open[Connection(self, sock)] = None
            else:
                sock.close()
            await asyncio.sleep(self.limits.pace)

    def _make_room(self) -> bool:
        """End the unproved connection that has waited longest; return whether there was one."""
        oldest = next((connection for connection in self._open if not connection.proved), None)
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.abort()
        return True
