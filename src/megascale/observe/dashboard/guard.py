"""Who may ask, and what a browser may do with an answer: checked before anything of the application runs.

A request must name this server in its Host (a page elsewhere whose name was made to point here does not), come from no
other origin, and show the token for reading, unless the server was started without one. Orders show the run's
acting token, always (application.py). Tokens travel in a header that no browser sends by itself: there are no cookies.
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
BODY_BYTES = 16 << 10
ANSWER_SECONDS = 120.0  # from the head of a request to the last byte of its answer; a stream has no end
_STREAM = "/api/live"


class Guard:
    """Args:
    app: behind it.
    names: hosts, without a port, by which this server is asked.
    scheme: http or https.
    token: for reading; None: whoever reaches it may read.
    """

    def __init__(self, app: App, names: frozenset[str], scheme: str, token: bytes | None) -> None:
        self._app, self._names, self._scheme, self._token = app, names, scheme, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        status, why = self._refusal(scope, headers)
        if status:
            body = json.dumps({"detail": why}).encode()
            head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await answer({"type": "http.response.start", "status": status, "headers": head})
            await answer({"type": "http.response.body", "body": body})
            return
        self._allow_answer(scope)
        await self._app(scope, receive, answer)

    def _allow_answer(self, scope: Scope) -> None:
        """Tell the connection how long its answer may take, and whether it keeps its place until then.

        Pages are for everybody and an order has shown no token yet: those make room when places are short.
        """
        connection = scope.get("state", {}).get("connection")
        if connection is None:
            return
        if not scope["path"].startswith("/api/") or scope["method"] not in ("GET", "HEAD"):
            connection.allow(ANSWER_SECONDS)
        else:
            connection.let_in(None if scope["path"] == _STREAM else ANSWER_SECONDS)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str]:
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if _name(host) not in self._names:
            return 421, f"this server is none of that name; it is {', '.join(sorted(self._names))}"
        origin = headers.get(b"origin")
        ours = f"{self._scheme}://{host}".encode()
        if origin is not None and origin.lower() != ours:
            return 403, "another site's page may not ask here"
        if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin") and scope["path"] != "/":
            return 403, "another site's page may not ask here"
        if scope["method"] not in ("GET", "HEAD"):
            if origin is None:
                return 403, "an order names the page it comes from (Origin)"
            if headers.get(b"content-type", b"").partition(b";")[0].strip() != b"application/json":
                return 415, "an order is application/json"
            size = headers.get(b"content-length", b"")
            if not size.isdigit() or int(size) > BODY_BYTES:
                return 413, f"an order says its length, at most {BODY_BYTES} bytes"
        elif (
            scope["path"].startswith("/api/")
            and self._token is not None
            and not secrets_equal(bearer(headers), self._token)
        ):
            return 401, "show the token for reading: the text of the file that the dashboard's command named"
        return 0, ""


def bearer(headers: dict[bytes, bytes]) -> bytes:
    """The token of an Authorization header, empty if there is none."""
    kind, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if kind.lower() == b"bearer" else b""


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0][1:]
    return host.rpartition(":")[0] if ":" in host else host
