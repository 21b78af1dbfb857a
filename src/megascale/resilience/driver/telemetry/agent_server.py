"""The agents' port: each connection is authenticated and each message checked before the driver receives it."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from megascale.resilience.driver.telemetry.admission import Admission
from megascale.resilience.driver.telemetry.agent_telemetry import AgentTelemetry
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import Hello, JobOffer, Join
from megascale.resilience.protocol.heartbeat import Heartbeat
from megascale.services.framing import ProtocolError

PROOF_SECONDS = 5.0
UNPROVED_LIMIT = 2048  # unauthenticated connections: all agents of a large job connect at once
_BUFFER = 8192  # bytes of one connection that asyncio buffers (up to twice as many)
_UNPROVED_READ = 4096  # bytes per read of an unauthenticated connection, which sends 80; asyncio's own is 256 KiB


class AgentServer:
    """Accepts the connections of agents.

    Args:
        job: name that every message must carry.
        token: secret that agents must prove.
        admission: decides about greetings.
        telemetry: receives heartbeats and other messages.
    """

    def __init__(self, job: str, token: bytes, admission: Admission, telemetry: AgentTelemetry) -> None:
        self._job = job
        self._token = token
        self._admission = admission
        self._telemetry = telemetry
        self._server: asyncio.Server | None = None
        self._tls: agent_channel.DriverTls | None = None
        self._unproved: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self, host: str, port: int, tls: agent_channel.DriverTls | None = None) -> tuple[str, int]:
        """Listen, with encryption if `tls` is given; return the address."""
        self._tls = tls
        self._server = await asyncio.start_server(self._serve, host, port, backlog=4096, limit=_BUFFER)
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._handle_connection(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = writer.get_extra_info("peername")
        peer = f"{name[0]}:{name[1]}" if name else "?"
        transport: Any = writer.transport
        transport.max_size = _UNPROVED_READ
        self._make_room()
        self._unproved[id(writer)] = writer
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                channel = await agent_channel.open_channel(reader, writer, self._token, driver=True, tls=self._tls)
                greeting = await channel.receive()
            if not isinstance(greeting, Hello | Join):
                raise ProtocolError(f"it sent {greeting.do!r} before a greeting")
        except ProtocolError as error:
            return self._admission.record_refusal(peer, "", str(error))
        except (TimeoutError, OSError, EOFError):
            return self._admission.record_refusal(peer, "", "it sent no greeting in time")
        finally:
            self._unproved.pop(id(writer), None)
        del transport.max_size  # The class's own limit applies from now on.
        node = greeting.node
        answer = self._judge_greeting(channel, greeting)
        if isinstance(answer, JobOffer):
            return channel.send(answer)
        if answer:
            channel.send_message(do="refuse", reason=answer)
            return self._admission.record_refusal(peer, node, answer)
        try:
            await self._receive(channel, node)
        except ProtocolError as error:
            self._admission.record_refusal(peer, node, str(error))
        except (OSError, EOFError):
            pass
        finally:
            channel.close()
            self._telemetry.handle_disconnect(node, channel)

    def _judge_greeting(self, channel: agent_channel.AgentChannel, greeting: Hello | Join) -> JobOffer | str:
        """Return the answer to a greeting: a description of the job, a reason to refuse it, or "" for welcome."""
        if greeting.job != self._job:
            return f"an agent of job {greeting.job[:100]!r}; this driver runs {self._job!r}"
        if greeting.version != agent_channel.VERSION:
            return (
                f"node {greeting.node} has an agent of MegaScale {greeting.version[:100]}, this driver is "
                f"{agent_channel.VERSION}; install the same version on both: until then the node is not used"
            )
        if isinstance(greeting, Join):
            return self._admission.handle_join(greeting)
        return self._admission.handle_hello(channel, greeting)

    def _make_room(self) -> None:
        """Close the oldest unauthenticated connections: an agent with the token needs milliseconds."""
        limit = min(UNPROVED_LIMIT, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        while len(self._unproved) >= limit:
            self._unproved.pop(next(iter(self._unproved))).transport.abort()

    async def _receive(self, channel: agent_channel.AgentChannel, node: str) -> None:
        sequence = 0
        while True:
            message = await channel.receive()
            if not isinstance(message, Heartbeat):
                self._telemetry.handle_message(node, channel, message)
                continue
            if (message.job, message.node) != (self._job, node):
                raise ProtocolError(f"a heartbeat in the name of {message.node[:100]!r} of {message.job[:100]!r}")
            if message.sequence <= sequence:
                raise ProtocolError(f"heartbeat {message.sequence} after {sequence}: it was sent twice")
            sequence = message.sequence
            self._telemetry.handle_heartbeat(node, channel, message)
