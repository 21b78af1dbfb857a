"""What strangers may cost the driver's HTTP API: connections, time and bytes, all bounded before a token is shown.

A Door (services/door.py) takes connections, each for one request and a few seconds. `Guard` stands before the
application: by the head alone it decides who is let through, so that no byte of a body is read for anybody else.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from h11 import LocalProtocolError

from megascale.resilience.driver.api.tokens import ApiTokens
from megascale.services.shared_token import secrets_equal

log = logging.getLogger("megascale.driver")

CONNECTIONS = 64  # at once, whoever holds them
HEAD_SECONDS = 5.0  # from the connection to a head with a token, TLS included
REQUEST_SECONDS = 30.0  # from there to the last byte of the answer
HEAD_BYTES = 16 << 10
BODY_BYTES = 256 << 10

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


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
            connection.let_in(REQUEST_SECONDS)
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
        acts, reads = secrets_equal(given, self._tokens.act), secrets_equal(given, self._tokens.read)
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
