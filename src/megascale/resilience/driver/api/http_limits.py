"""What strangers may cost the driver's HTTP API: connections, time and bytes, all bounded before a token is shown.

`Door` takes connections: few at once, the oldest silent one making room for the next, each for one request and a few
seconds. `Guard` stands before the application: by the head alone it decides who is let through, so that no byte of a
body is read for anybody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from h11 import LocalProtocolError
from uvicorn.config import Config as ServerConfig
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from megascale.core.background import keep_running, log_failure
from megascale.resilience.driver.api.tokens import ApiTokens
from megascale.services.shared_token import same

log = logging.getLogger("megascale.driver")

CONNECTIONS = 64  # at once, whoever holds them
BACKLOG = 64  # that the kernel holds until they are taken
PACE = 0.002  # seconds between two that are taken: a flood leaves the loop to the job
HEAD_SECONDS = 5.0  # from the connection to a head with a token, TLS included
REQUEST_SECONDS = 30.0  # from there to the last byte of the answer
HEAD_BYTES = 16 << 10
BODY_BYTES = 256 << 10

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Connection:
    """One connection, which ends by itself when its time is over."""

    def __init__(self, door: Door, sock: socket.socket) -> None:
        self.proved = False
        self._door, self._loop = door, asyncio.get_running_loop()
        self._transport: asyncio.BaseTransport | None = None
        self._timer = self._loop.call_later(HEAD_SECONDS, self.abort)
        self._task = self._loop.create_task(self._begin(sock))
        log_failure(self._task, "the begin of a connection to the API", log)

    async def _begin(self, sock: socket.socket) -> None:
        secure = {"ssl_handshake_timeout": HEAD_SECONDS, "ssl_shutdown_timeout": 1.0} if self._door.context else {}
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._door.protocol(self), sock, ssl=self._door.context, **secure
            )
        except (OSError, TimeoutError, asyncio.CancelledError):
            sock.close()
            self.lost()

    def made(self, transport: asyncio.BaseTransport) -> None:
        """It stands; with TLS the other side has shown that it speaks it."""
        self._transport = transport

    def lost(self) -> None:
        """It is over."""
        self._timer.cancel()
        self._door.forget(self)

    def let_in(self) -> None:
        """A head came with a token: there is time for the answer."""
        self.proved = True
        self._timer.cancel()
        self._timer = self._loop.call_later(REQUEST_SECONDS, self.abort)

    def abort(self) -> None:
        """End it now, whatever is under way."""
        if isinstance(self._transport, asyncio.Transport):
            self._transport.abort()
        else:
            self._task.cancel()


class _Protocol(H11Protocol):
    """uvicorn's, which tells its connection what becomes of it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state["connection"].made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.app_state["connection"].lost()


class Door:
    """Takes the connections of a listening socket for uvicorn, no more than CONNECTIONS at once.

    Args:
        listener: bound; it is closed by `close`.
        config, state: uvicorn's.
        context: for TLS; None: without.
    """

    def __init__(
        self, listener: socket.socket, config: ServerConfig, state: ServerState, context: ssl.SSLContext | None
    ) -> None:
        self.context = context
        self._listener, self._config, self._state = listener, config, state
        self._open: dict[Connection, None] = {}  # oldest first
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._task = asyncio.get_running_loop().create_task(keep_running(self._take, "the door of the API", log))

    def __len__(self) -> int:
        return len(self._open)

    def protocol(self, connection: Connection) -> asyncio.Protocol:
        """What speaks HTTP on a connection."""
        return _Protocol(config=self._config, server_state=self._state, app_state={"connection": connection})

    def forget(self, connection: Connection) -> None:
        """It is over."""
        self._open.pop(connection, None)

    async def close(self) -> None:
        """Take no more, and end those that have shown no token."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._listener.close()
        for connection in list(self._open):
            if not connection.proved:
                connection.abort()

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # A connection that is gone again; or no descriptor is left, so that one must make room.
                if error.errno in _FULL:
                    self._make_room()
                    await asyncio.sleep(0.1)
                continue
            if len(self._open) < CONNECTIONS or self._make_room():
                self._open[Connection(self, sock)] = None
            else:
                sock.close()
            await asyncio.sleep(PACE)

    def _make_room(self) -> bool:
        """End the oldest connection without a token, if there is one."""
        oldest = next((connection for connection in self._open if not connection.proved), None)
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.abort()
        return True


class Guard:
    """ASGI: lets requests through to `app` that name this server, come from no other site, and show a token.

    Reading takes either token, anything but GET and HEAD the one for acting. A body is handed on whole.

    Args:
        hosts: names of this server, besides addresses: a page of another site cannot make a browser send those.
    """

    def __init__(self, app: App, tokens: ApiTokens, hosts: Collection[str]) -> None:
        self._app, self._tokens = app, tokens
        self._hosts = {host.lower() for host in hosts} | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = _headers(scope)
        refused = self._refuse(scope, headers)
        if refused is not None:
            with contextlib.suppress(LocalProtocolError):  # as below
                await _answer(send, *refused)
            return
        connection = scope.get("state", {}).get("connection")
        if connection is not None:
            connection.let_in()
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > BODY_BYTES:
                return await _answer(send, 413, f"the request is longer than {BODY_BYTES} bytes")
            if not message.get("more_body", False):
                break
        rest = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return rest.pop() if rest else await receive()

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, again, closing)
        except LocalProtocolError:
            pass  # the rest of the request was no HTTP, and so there is nobody to answer
        except Exception:
            log.exception("the API failed at %s %s", scope["method"], scope["path"][:200])

    def _refuse(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not self._is_here(host):
            return 400, "the request names another host; use the address in RUN/driver/contact.json"
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() != f"{scope['scheme']}://{host}":
            return 403, "pages of other sites may not ask here"
        given = _bearer(headers.get(b"authorization", b""))
        acts, reads = same(given, self._tokens.act), same(given, self._tokens.read)
        if not (acts or reads):
            return 401, "the token is missing or wrong; it stands in RUN/driver/token.read or token.act"
        if not acts and scope["method"] not in ("GET", "HEAD"):
            return 403, (
                "this token is for reading; the one for orders stands in RUN/driver/token.act, and in what `megascale "
                "access RUN --act` writes for other machines"
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 12 or int(length) > BODY_BYTES:
            return 413, f"the request is longer than {BODY_BYTES} bytes"
        return None

    def _is_here(self, host: str) -> bool:
        name = re.sub(r":\d{0,5}$", "", host)
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """By name; of two of one name the last, which none of those that are looked at may have."""
    return dict(scope["headers"])


def _bearer(value: bytes) -> bytes:
    kind, _, token = value.partition(b" ")
    return token.strip() if kind.lower() == b"bearer" else b""


async def _answer(send: Send, code: int, why: str) -> None:
    body = json.dumps({"detail": why}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    if code == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
