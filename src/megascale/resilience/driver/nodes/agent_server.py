"""Where agents come in: each connection is authenticated, each message checked, before the driver receives it."""

from __future__ import annotations

import asyncio
import resource
from typing import Any, Protocol

from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import Hello, JobOffer, Join
from megascale.resilience.protocol.heartbeat import Heartbeat
from megascale.services.framing import ProtocolError
from megascale.services.messages import Message

PROOF_SECONDS = 5.0
STRANGERS = 2048  # connections that have not yet proved themselves: all agents of a large job come at once
_BUFFER = 8192  # bytes of one connection's that asyncio holds back (up to twice as many)
_READ = 4096  # bytes that it reads at once from a stranger, of whom 80 are due; else it takes 256 KiB


class Listener(Protocol):
    """What the driver offers to the agent server."""

    def joined(self, channel: agent_channel.AgentChannel, hello: Hello) -> str:
        """A node came: welcome it on the channel and return ""; or why it is refused."""
        ...

    def asked(self, join: Join) -> JobOffer | str:
        """A node asks into the job: what its agent must know, or why it is refused."""
        ...

    def beat(self, node: str, channel: agent_channel.AgentChannel, heartbeat: Heartbeat) -> None: ...

    def received(self, node: str, channel: agent_channel.AgentChannel, message: Message) -> None: ...

    def left(self, node: str, channel: agent_channel.AgentChannel) -> None: ...

    def refused(self, peer: str, node: str, why: str) -> None: ...


class AgentServer:
    """The agents' side of the driver.

    Args:
        job: name that every heartbeat must carry.
        token: what agents must know.
        listener: receives all that is in order, and refusals.
    """

    def __init__(self, job: str, token: bytes, listener: Listener) -> None:
        self._job, self._token, self._listener = job, token, listener
        self._server: asyncio.Server | None = None
        self._tls: agent_channel.DriverTls | None = None
        self._strangers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self, host: str, port: int, tls: agent_channel.DriverTls | None = None) -> tuple[str, int]:
        """Listen, and encrypt if `tls` is given; returns the address."""
        self._tls = tls
        self._server = await asyncio.start_server(self._serve, host, port, backlog=4096, limit=_BUFFER)
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    async def close(self) -> None:
        """End all connections."""
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
            await self._talk(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = writer.get_extra_info("peername")
        peer, node = f"{name[0]}:{name[1]}" if name else "?", ""
        transport: Any = writer.transport
        transport.max_size = _READ
        self._make_room()
        self._strangers[id(writer)] = writer
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                channel = await agent_channel.open_channel(reader, writer, self._token, driver=True, tls=self._tls)
                hello = await channel.receive()
            if not isinstance(hello, Hello | Join):
                raise ProtocolError(f"it said {hello.do!r} before it had greeted")
        except ProtocolError as error:
            return self._listener.refused(peer, node, str(error))
        except (TimeoutError, OSError, EOFError):
            return self._listener.refused(peer, node, "said nothing in time")
        finally:
            self._strangers.pop(id(writer), None)
        del transport.max_size  # the class's own from now on
        node, described = hello.node, None
        if hello.job != self._job:
            why = f"an agent of job {hello.job[:100]!r}; this driver runs {self._job!r}"
        elif hello.version != agent_channel.VERSION:
            why = (
                f"node {node} has an agent of MegaScale {hello.version[:100]}, this driver is {agent_channel.VERSION}; "
                "install the same version on both: until then the node is not used"
            )
        elif isinstance(hello, Join):
            answer = self._listener.asked(hello)
            why, described = (answer, None) if isinstance(answer, str) else ("", answer)
        else:
            why = self._listener.joined(channel, hello)
        if described is not None:
            return channel.send(described)
        if why:
            channel.send_message(do="refuse", why=why)
            return self._listener.refused(peer, node, why)
        try:
            await self._receive(channel, node)
        except ProtocolError as error:
            self._listener.refused(peer, node, str(error))
        except (OSError, EOFError):
            pass
        finally:
            channel.close()
            self._listener.left(node, channel)

    def _make_room(self) -> None:
        """Hang up on those who have been strangers longest: who knows the token needs milliseconds."""
        most = min(STRANGERS, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        while len(self._strangers) >= most:
            self._strangers.pop(next(iter(self._strangers))).transport.abort()

    async def _receive(self, channel: agent_channel.AgentChannel, node: str) -> None:
        sequence = 0
        while True:
            message = await channel.receive()
            if not isinstance(message, Heartbeat):
                self._listener.received(node, channel, message)
                continue
            if (message.job, message.node) != (self._job, node):
                raise ProtocolError(f"a heartbeat in the name of {message.node[:100]!r} of {message.job[:100]!r}")
            if message.sequence <= sequence:
                raise ProtocolError(f"heartbeat {message.sequence} after {sequence}: an old one again")
            sequence = message.sequence
            self._listener.beat(node, channel, message)
