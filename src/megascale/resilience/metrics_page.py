"""The pages /metrics and /health without a token, which an agent serves for its node and a driver for its job.

The addresses are `resilience.agent_metrics` and `resilience.driver_metrics`. Every client that reaches an address may
read; the pages accept no order and no request body. A LimitedListener limits the number of connections, and each
connection to one request of few bytes and seconds.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Mapping

from megascale.core.failure import log_failure
from megascale.observe.prometheus import Family, format_response
from megascale.services.limited_listener import Connection, ConnectionLimits, LimitedListener

log = logging.getLogger("megascale.metrics")

CONNECTION_LIMITS = ConnectionLimits(connections=16, head_seconds=5.0)
_HEAD_BYTES = 8192  # longest head of a request
# Reason phrases by HTTP status.
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
_ACCEPT = re.compile(rb"^accept:(.*)$", re.IGNORECASE | re.MULTILINE)


class MetricsPage:
    """The pages /metrics, /health and /live of one process. /live only shows that the process answers.

    Args:
        judge_health: returns (True if healthy, a sentence).
    """

    def __init__(
        self,
        read_families: Callable[[], Awaitable[list[Family]]],
        judge_health: Callable[[], tuple[bool, str]],
        labels: Mapping[str, str],
    ) -> None:
        self._read_families = read_families
        self._judge_health = judge_health
        self._labels = labels

    async def serve(self, address: str) -> LimitedListener:
        """Listen at "HOST:PORT". Raises OSError if that fails."""
        return LimitedListener(
            _bind(address), lambda connection: _Exchange(connection, self._answer), CONNECTION_LIMITS
        )

    async def _answer(self, head: bytes) -> bytes:
        """Return the response to a request, by the lines of its head."""
        request_line = head.split(b"\n", 1)[0].split()
        method, path = (request_line + [b"", b""])[:2]  # A malformed line may lack both.
        if method != b"GET":
            return _make_response(405, "only GET is supported\n")
        if path == b"/metrics":
            match = _ACCEPT.search(head)
            accept = match[1].decode("latin-1") if match else ""
            return _make_response(200, *format_response(await self._read_families(), self._labels, accept))
        if path == b"/live":
            return _make_response(200, "ok\n")
        if path == b"/health":
            is_healthy, sentence = self._judge_health()
            return _make_response(200 if is_healthy else 503, sentence + "\n")
        return _make_response(404, "the pages are /metrics, /health and /live\n")


class _Exchange(asyncio.Protocol):
    """One request and its response, after which the connection closes."""

    def __init__(self, connection: Connection, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._connection = connection
        self._answer = answer
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._reply: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connection.attach(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.detach()

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing() or self._reply is not None:
            return
        self._head += data
        if b"\r\n\r\n" in self._head:
            self._reply = asyncio.get_running_loop().create_task(self._send_reply(self._transport))
            log_failure(self._reply, "a reply to a scraper", log)
        elif len(self._head) > _HEAD_BYTES:
            self._transport.abort()

    async def _send_reply(self, transport: asyncio.Transport) -> None:
        """Answer the request and close the connection."""
        head, _, _ = self._head.partition(b"\r\n\r\n")
        try:
            transport.write(await self._answer(head.replace(b"\r\n", b"\n")))
        finally:
            transport.close()


def _bind(address: str) -> list[socket.socket]:
    """Return a bound socket for each address of "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    results = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, endpoint in results:
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # Otherwise the socket would take the IPv4 port too.
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(endpoint)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _make_response(code: int, text: str, content_type: str = "text/plain; charset=utf-8") -> bytes:
    """Return an HTTP response with the status `code`."""
    body = text.encode()
    head = (
        f"HTTP/1.1 {code} {_REASONS[code]}\r\n"
        f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
