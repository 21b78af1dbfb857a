"""/metrics and /health of a node: answered by its agent where `resilience.agent_metrics` says.

Whoever reaches the address may read, and nothing else: there is no token, no order and no body. A Door keeps
connections few, each with one request, few bytes and few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from megascale.observe.prometheus.exposition import CONTENT_TYPE, Family, format_families
from megascale.resilience.protocol.heartbeat import Heartbeat
from megascale.services.door import Connection, ConnectionLimits, LimitedListener

log = logging.getLogger("megascale.agent")

LIMITS = ConnectionLimits(connections=16, head_seconds=5.0)
_HEAD_BYTES = 8192


class MetricsPage:
    """Args:
    newest: the agent's newest heartbeat, None before the first.
    connected: whether a driver listens to it.
    """

    def __init__(self, newest: Callable[[], Heartbeat | None], connected: Callable[[], bool]) -> None:
        self._newest, self._connected = newest, connected

    async def serve(self, address: str) -> LimitedListener | None:
        """Begin to answer at "HOST:PORT"; None if it cannot listen there: that ends no agent."""
        try:
            listeners = _bind(address)
        except OSError as error:
            log.warning("nobody can read this node's /metrics at %s: %s", address, error)
            return None
        return LimitedListener(listeners, lambda connection: _Exchange(connection, self._answer), LIMITS)

    def _answer(self, words: list[bytes]) -> bytes:
        method, path = [*words, b"", b""][:2]
        if method != b"GET":
            return _response(405, "only GET is answered\n")
        if path == b"/metrics":
            return _response(200, format_families(self.families()), CONTENT_TYPE)
        if path == b"/health":
            heartbeat = self._newest()
            bad = heartbeat is None or not self._connected()
            return _response(503 if bad else 200, "no driver listens\n" if bad else "ok\n")
        return _response(404, "there are /metrics and /health\n")

    def families(self) -> list[Family]:
        """This node now."""
        found = [
            Family("megascale_agent_connected", "gauge", "1 while a driver listens to this node's agent.").add(
                self._connected()
            )
        ]
        beat = self._newest()
        if beat is None:
            return found
        ranks = Family("megascale_agent_ranks", "gauge", "Trainers of this node by state.")
        for state in ("running", "exited", "signalled"):
            ranks.add(sum(worker.state == state for worker in beat.workers), state=state)
        compute = Family("megascale_agent_compute_seconds", "gauge", "A step's seconds without waits, rank by rank.")
        for rank, seconds in sorted(beat.step_seconds.items()):
            compute.add(seconds, rank=str(rank))
        families = {
            name: Family(f"megascale_agent_gpu_{name}", "gauge", text)
            for name, text in (
                ("temperature_celsius", "Of each GPU."),
                ("power_watts", "Of each GPU."),
                ("throttled", "1 for a GPU that is slowed down."),
                ("xid", "The last Xid error, 0 for none."),
                ("ecc_errors", "Uncorrected since boot."),
            )
        }
        for gpu in beat.gpus:
            for name, value in (
                ("temperature_celsius", gpu.temperature),
                ("power_watts", gpu.power_watts),
                ("throttled", gpu.throttled),
                ("xid", gpu.xid),
                ("ecc_errors", gpu.ecc_errors),
            ):
                families[name].add(value, gpu=str(gpu.index))
        traffic = Family("megascale_agent_network_bytes_per_second", "gauge", "Of each interface.")
        for nic in beat.traffic:
            traffic.add(nic.rx_bytes_per_s, interface=nic.interface, direction="receive")
            traffic.add(nic.tx_bytes_per_s, interface=nic.interface, direction="send")
        age = Family("megascale_agent_heartbeat_age_seconds", "gauge", "Since the newest heartbeat was made.")
        age.add(max(0.0, time.time() - beat.sent_ns / 1e9))
        steps = [worker.step for worker in beat.workers]
        step = Family("megascale_agent_step", "gauge", "The step that this node's slowest rank is in.")
        step.add(min(steps) if steps else None)
        return [*found, ranks, step, compute, *families.values(), traffic, age]


class _Exchange(asyncio.Protocol):
    """One request and its answer, after which the connection ends."""

    def __init__(self, connection: Connection, answer: Callable[[list[bytes]], bytes]) -> None:
        self._connection, self._answer = connection, answer
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
            self._transport.write(self._answer(self._head.split(b"\r\n", 1)[0].split()))
            self._transport.close()
        elif len(self._head) > _HEAD_BYTES:
            self._transport.abort()


def _bind(address: str) -> list[socket.socket]:
    """Return a bound socket for each address of "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, place in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            listeners.append(socket.socket(family, kind, protocol))
            listeners[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listeners[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listeners[-1].bind(place)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _response(code: int, text: str, kind: str = "text/plain; charset=utf-8") -> bytes:
    body = text.encode()
    reason = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}[code]
    lines = (f"HTTP/1.1 {code} {reason}", f"content-type: {kind}", f"content-length: {len(body)}", "connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + body
