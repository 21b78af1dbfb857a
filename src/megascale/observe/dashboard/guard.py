"""Access checks that run before the application, and headers that limit what a browser may do with an answer.

- A request must name this server in its Host header. This excludes other sites whose name resolves to this server's
  address (DNS rebinding).
- A request must not come from another origin.
- A request for data must have the reading token, unless the server was started without one.
- Orders must have the run's acting token, which application.py passes to the driver.

Tokens are sent in a header that browsers never send automatically. There are no cookies.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from megascale.services.shared_token import secrets_equal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)
MAX_BODY_BYTES = 16 << 10
ANSWER_SECONDS = 120.0  # time limit from the head of a request to the last byte of the answer, except for streams
_STREAM = "/api/live"
_FOREIGN_PAGE = "requests from pages of other sites are refused"


class Guard:
    """The checks in front of an application.

    Args:
        names: host names of this server, without a port.
        scheme: http or https.
        token: the reading token; None: every user who can connect may read.
    """

    def __init__(self, app: App, names: frozenset[str], scheme: str, token: bytes | None) -> None:
        self._app = app
        self._names = names
        self._scheme = scheme
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        status, reason = self._check(scope, headers)
        if status:
            body = json.dumps({"detail": reason}).encode()
            head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send_with_headers({"type": "http.response.start", "status": status, "headers": head})
            await send_with_headers({"type": "http.response.body", "body": body})
            return
        self._limit_answer(scope)
        await self._app(scope, receive, send_with_headers)

    def _limit_answer(self, scope: Scope) -> None:
        """Set the time limit of the answer, and whether the connection may be closed to make room for others.

        Connections for pages, which are public, and for orders, whose token is not checked yet, may be closed.
        """
        connection = scope.get("state", {}).get("connection")
        if connection is None:
            return
        if not scope["path"].startswith("/api/") or scope["method"] not in ("GET", "HEAD"):
            connection.extend_deadline(ANSWER_SECONDS)
        else:
            connection.mark_authenticated(None if scope["path"] == _STREAM else ANSWER_SECONDS)

    def _has_token(self, headers: dict[bytes, bytes]) -> bool:
        return self._token is None or secrets_equal(get_bearer_token(headers), self._token)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str]:
        """Return HTTP status and reason of a refusal; (0, "") for an accepted request."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if _remove_port(host) not in self._names:
            return 421, f"this server does not have that name; its names are {', '.join(sorted(self._names))}"
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() != f"{self._scheme}://{host}".encode():
            return 403, _FOREIGN_PAGE
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin") and scope["path"] != "/":
            return 403, _FOREIGN_PAGE
        if scope["method"] not in ("GET", "HEAD"):
            if origin is None:
                return 403, "an order must name its page in the header Origin"
            if headers.get(b"content-type", b"").partition(b";")[0].strip() != b"application/json":
                return 415, "an order must have the content type application/json"
            size = headers.get(b"content-length", b"")
            if not size.isdigit() or int(size) > MAX_BODY_BYTES:
                return 413, f"an order must state its length, at most {MAX_BODY_BYTES} bytes"
        elif scope["path"].startswith("/api/") and not self._has_token(headers):
            return 401, "the reading token is missing or wrong; it is in the file that megascale dashboard named"
        return 0, ""


def get_bearer_token(headers: dict[bytes, bytes]) -> bytes:
    """Return the token of an Authorization header of the scheme Bearer, empty without one."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    return b""


def _remove_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0][1:]
    if ":" in host:
        return host.rpartition(":")[0]
    return host
