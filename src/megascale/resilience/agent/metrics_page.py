"""/metrics and /health of a node: served by its agent at the address `resilience.agent_metrics`.

Every client that reaches the address may read; there is no token, no order and no request body. A Door limits the
number of connections, and each connection to one request of few bytes and seconds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from megascale.observe.prometheus import CONTENT_TYPE, Family, format_families
from megascale.resilience.protocol.heartbeat import Heartbeat
from megascale.services.door import Connection, ConnectionLimits, LimitedListener

log = logging.getLogger("megascale.agent")

LIMITS = ConnectionLimits(connections=16, head_seconds=5.0)
_HEAD_BYTES = 8192
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
# Metrics of each GPU: (name, attribute of a GpuReport, help).
_GPU_METRICS = (
    ("temperature_celsius", "temperature", "Temperature of each GPU."),
    ("power_watts", "power_watts", "Power of each GPU."),
    ("throttled", "throttled", "1 for a GPU whose clocks are reduced by heat or a power brake."),
    ("xid", "xid", "Last Xid error, 0 if there was none."),
    ("ecc_errors", "ecc_errors", "Uncorrected ECC errors since boot."),
)


class MetricsPage:
    """HTTP pages made from heartbeats.

    Args:
        newest: returns the agent's newest heartbeat, None before the first.
        is_connected: returns True if the agent has a driver.
    """

    def __init__(self, newest: Callable[[], Heartbeat | None], is_connected: Callable[[], bool]) -> None:
        self._newest = newest
        self._is_connected = is_connected

    async def serve(self, address: str) -> LimitedListener | None:
        """Listen at "HOST:PORT"; return None if that fails, which must not end the agent."""
        try:
            listeners = _bind(address)
        except OSError as error:
            log.warning("this node's /metrics cannot be served at %s: %s", address, error)
            return None
        return LimitedListener(listeners, lambda connection: _Exchange(connection, self._answer), LIMITS)

    def _answer(self, request_line: list[bytes]) -> bytes:
        method, path = [*request_line, b"", b""][:2]
        if method != b"GET":
            return _response(405, "only GET is supported\n")
        if path == b"/metrics":
            return _response(200, format_families(self.families()), CONTENT_TYPE)
        if path == b"/health":
            if self._newest() is None or not self._is_connected():
                return _response(503, "the agent has no driver\n")
            return _response(200, "ok\n")
        return _response(404, "the pages are /metrics and /health\n")

    def families(self) -> list[Family]:
        """Return the node's current metrics."""
        connected = Family("megascale_agent_connected", "gauge", "1 while this node's agent has a driver.")
        connected.add(self._is_connected())
        heartbeat = self._newest()
        if heartbeat is None:
            return [connected]
        ranks = Family("megascale_agent_ranks", "gauge", "Trainers of this node by state.")
        for state in ("running", "exited", "signalled"):
            ranks.add(sum(worker.state == state for worker in heartbeat.workers), state=state)
        step = Family("megascale_agent_step", "gauge", "Step of this node's slowest rank.")
        step.add(min((worker.step for worker in heartbeat.workers), default=None))
        compute = Family("megascale_agent_compute_seconds", "gauge", "Seconds per step without waits, by rank.")
        for rank, seconds in sorted(heartbeat.step_seconds.items()):
            compute.add(seconds, rank=str(rank))
        families = [connected, ranks, step, compute]
        for name, attribute, text in _GPU_METRICS:
            family = Family(f"megascale_agent_gpu_{name}", "gauge", text)
            for gpu in heartbeat.gpus:
                family.add(getattr(gpu, attribute), gpu=str(gpu.index))
            families.append(family)
        traffic = Family("megascale_agent_network_bytes_per_second", "gauge", "Traffic of each interface.")
        for interface in heartbeat.traffic:
            traffic.add(interface.rx_bytes_per_s, interface=interface.interface, direction="receive")
            traffic.add(interface.tx_bytes_per_s, interface=interface.interface, direction="send")
        age = Family("megascale_agent_heartbeat_age_seconds", "gauge", "Time since the newest heartbeat was made.")
        age.add(max(0.0, time.time() - heartbeat.sent_ns / 1e9))
        return families + [traffic, age]


class _Exchange(asyncio.Protocol):
    """One request and its response, after which the connection closes."""

    def __init__(self, connection: Connection, answer: Callable[[list[bytes]], bytes]) -> None:
        self._connection = connection
        self._answer = answer
        self._transport: asyncio.Transport | None = None
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connection.attach(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.detach()

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._head += data
        if b"\r\n\r\n" in self._head:
            request_line = self._head.split(b"\r\n", 1)[0]
            self._transport.write(self._answer(request_line.split()))
            self._transport.close()
        elif len(self._head) > _HEAD_BYTES:
            self._transport.abort()


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
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(endpoint)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _response(code: int, text: str, content_type: str = "text/plain; charset=utf-8") -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {code} {_REASONS[code]}\r\n"
        f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
