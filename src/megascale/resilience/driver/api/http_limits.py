"""Limits of the driver's HTTP API: connections, time and bytes are bounded before a token is shown.

uvicorn bounds the size of a head (h11_max_incomplete_event_size) and closes each connection after one answer
(headers). It lacks other limits, so a LimitedListener (services/limited_listener.py) accepts the connections:

- A deadline for TLS and the head: uvicorn's timeout_keep_alive begins after the first answer only.
- Room for new connections: at uvicorn's limit_concurrency, silent connections make it answer 503 to all other clients.
  A LimitedListener closes the oldest unauthenticated connection instead.
- A pace of accepting: a flood must not keep the loop from the agents' heartbeats.

`Guard` admits or refuses a request by its head alone, so that no byte of an unauthenticated request's body is read.
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

from megascale.resilience.driver.api.access import ApiTokens
from megascale.services.shared_token import secrets_equal

log = logging.getLogger("megascale.driver")

CONNECTIONS = 64  # connections at the same time, authenticated or not
HEAD_SECONDS = 5.0  # from the connection to the end of a head with a token, TLS included
REQUEST_SECONDS = 30.0  # from the end of the head to the last byte of the answer
HEAD_BYTES = 16 << 10  # longest head
BODY_BYTES = 256 << 10  # longest body
_MAX_LENGTH_DIGITS = 12  # of a content-length, so that a longer number need not be converted
_PATH_CHARACTERS = 200  # of a path in a log line

# Types of ASGI: the head of a request, a message about its body or the answer, and the functions that pass messages.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI middleware that admits a request with a token, unless the request is for another host or from another site.

    GET and HEAD accept either token; other methods need the token for orders. The application gets a body as a whole.

    Args:
        hosts: accepted names of this server. Addresses are always accepted, since a page of another site cannot make a
            browser send them as the host.
    """

    def __init__(self, app: App, tokens: ApiTokens, hosts: Collection[str]) -> None:
        self._app = app
        self._tokens = tokens
        self._hosts = {host.lower() for host in hosts} | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._find_refusal(scope)
        if refusal is not None:
            with contextlib.suppress(LocalProtocolError):  # The rest of the request is not HTTP.
                await _answer(send, *refusal)
            return
        connection = scope.get("state", {}).get("connection")
        if connection is not None:
            connection.mark_authenticated(REQUEST_SECONDS)
        body = b""
        is_complete = False
        while not is_complete:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > BODY_BYTES:
                return await _answer(send, 413, f"the request is longer than {BODY_BYTES} bytes")
            is_complete = not message.get("more_body", False)
        unread_messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_whole() -> Message:
            """Return the whole body at the first call, later messages such as a disconnect at the next ones."""
            if unread_messages:
                return unread_messages.pop()
            return await receive()

        try:
            await self._app(scope, receive_whole, send)
        except LocalProtocolError:
            pass  # The rest of the request is not HTTP, so it cannot be answered.
        except Exception:
            log.exception("the API failed at %s %s", scope["method"], scope["path"][:_PATH_CHARACTERS])

    def _find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return (HTTP status, reason) if the head shows that a request must be refused, else None."""
        headers = dict(scope["headers"])  # Of a repeated header the last one counts.
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not self._is_own_name(host):
            return 400, "the request names another host; use the address in RUN/driver/contact.json"
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() != f"{scope['scheme']}://{host}":
            return 403, "pages of other sites may not send requests"
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            token = b""
        may_act = secrets_equal(token.strip(), self._tokens.act)
        may_read = secrets_equal(token.strip(), self._tokens.read)
        if not (may_act or may_read):
            return 401, "the token is missing or wrong; it is in RUN/driver/token.read or token.act"
        if not may_act and scope["method"] not in ("GET", "HEAD"):
            return 403, (
                "this token is for reading; the one for orders is in RUN/driver/token.act, and in the file that "
                "`megascale access RUN --act` writes for other machines"
            )
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS or int(length) > BODY_BYTES:
            return 413, f"the request is longer than {BODY_BYTES} bytes"
        return None

    def _is_own_name(self, host: str) -> bool:
        """Return True for a name of this server or an IP address, each with or without a port."""
        name = re.sub(r":\d{0,5}$", "", host)
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


async def _answer(send: Send, status: int, reason: str) -> None:
    """Send a refusal as JSON."""
    body = json.dumps({"detail": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
