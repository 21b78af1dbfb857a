"""An agent's channel to the current driver: opened to the one of the newest epoch, left for one that replaces it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megascale.core.background import keep_running
from megascale.errors import MegascaleError
from megascale.resilience.agent.node_folder import known_epoch
from megascale.resilience.agent.rank_lease import RankLease
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import LIMIT, Order, Refuse, Welcome
from megascale.resilience.protocol.given import given_token, read_job
from megascale.services.framing import ProtocolError
from megascale.services.messages import Message
from megascale.services.silence import notice_silence

log = logging.getLogger("megascale.agent")
RETRY = 0.25  # seconds between attempts to reach a driver
WAIT = 0.2  # seconds between looks at a channel that is full


class DriverLink:
    """Args:
    folder: the agent's own, where its cluster says who drives.
    address: of this node.
    hello: what the agent says of itself, but for the epoch and the version.
    begun: called when a driver has taken the agent in.
    obey: called with each order.
    lease: of this node's ranks, which the driver's answers renew.

    Attributes:
        epoch: newest driver that was obeyed.
        channel: to the driver, None while there is none.
        token: the job's secret, as it was proved to the driver; before that empty.
        alone_since: when the last one was lost, on the monotonic clock.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        hello: Callable[[], dict[str, Any]],
        begun: Callable[[], None],
        obey: Callable[[Order], Awaitable[None]],
        lease: RankLease,
    ) -> None:
        self._folder, self._address, self._hello, self._begun, self._obey = folder, address, hello, begun, obey
        self.epoch = known_epoch(folder)
        self.channel: agent_channel.AgentChannel | None = None
        self.token = b""
        self.alone_since = time.monotonic()
        self._lease = lease
        self._tried = 0  # of the places where a driver may be
        self._said = ""

    async def talk(self) -> None:
        """Keep a channel to whichever driver is the newest; does not return."""
        while True:
            by_end = False  # whether the driver's kernel has closed the connection
            try:
                await self._session()
            except (
                OSError,
                EOFError,
                ValueError,
                TimeoutError,
                MegascaleError,
            ) as error:
                by_end = isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)
                self._tried += self.channel is None
                if (text := str(error) or type(error).__name__) != self._said:  # four times a second
                    self._said = text
                    log.info("no driver: %s", text)
            except Exception:
                log.exception("the session with the driver broke")
            if self.channel is not None:
                self.channel.close()
                self.channel, self.alone_since = None, time.monotonic()
                self._lease.closed(by_end)
            await asyncio.sleep(RETRY)

    def say(self, **message: Any) -> None:
        """Send a message by its fields; it is lost where there is no driver."""
        if self.channel is not None:
            with contextlib.suppress(ConnectionError):
                self.channel.send_message(**message)

    def send(self, message: Message) -> None:
        """Send a message; it is lost where there is no driver."""
        if self.channel is not None:
            with contextlib.suppress(ConnectionError):
                self.channel.send(message)

    async def send_when_free(self, message: Message) -> None:
        """Send what is large once what was queued before has gone."""
        while not self.free and self.channel is not None:
            await asyncio.sleep(WAIT)
        self.send(message)

    @property
    def free(self) -> bool:
        """Whether there is a driver, and little on its way to it."""
        return self.channel is not None and self.channel.backlog <= LIMIT

    async def _session(self) -> None:
        job = read_job(self._folder)
        places = (job.driver, *job.elsewhere)
        host, port = places[self._tried % len(places)]
        async with asyncio.timeout(5.0):
            reader, writer = await connect(host, port, self._local(host))
            try:
                notice_silence(writer.get_extra_info("socket"), 2 * job.limits.window)
                token = given_token(self._folder)  # read anew: the next driver may have made another one
                channel = await agent_channel.open_channel(reader, writer, token, driver=False)
                own = {"epoch": self.epoch, "pid": os.getpid(), "version": agent_channel.VERSION}
                sent = time.monotonic()
                channel.send_message(do="hello", **self._hello(), **own)
                welcome = await channel.receive()
            except BaseException:
                writer.close()
                raise
        if not isinstance(welcome, Welcome):
            channel.close()
            why = welcome.reason if isinstance(welcome, Refuse) else f"it said {welcome.do!r} first"
            raise ProtocolError(f"the driver refused this node: {why}")
        if welcome.version != agent_channel.VERSION:
            channel.close()
            raise ProtocolError(f"the driver is of MegaScale {welcome.version}, this agent of {agent_channel.VERSION}")
        self._accept(welcome.epoch)
        self.channel, self.token, self._said = channel, token, ""
        self._lease.opened(sent)
        log.info("driver of epoch %d at %s:%d", self.epoch, host, port)
        self._begun()
        watch = asyncio.create_task(keep_running(lambda: self._newer(channel), "the look for a newer driver", log))
        try:
            while True:
                order = await channel.receive()
                if not isinstance(order, Order):
                    raise ProtocolError(f"the driver said {order.do!r} amid its orders")
                self._accept(order.epoch)
                await self._obey(order)
        finally:
            watch.cancel()

    async def _newer(self, channel: agent_channel.AgentChannel) -> None:
        """Leave a driver that another has replaced: one that hangs keeps its connections open."""
        while True:
            await asyncio.sleep(RETRY)
            with contextlib.suppress(MegascaleError):
                if read_job(self._folder).epoch > self.epoch:
                    channel.close()
                    return

    def _local(self, host: str) -> tuple[str, int] | None:
        """A node of a local cluster talks from its own loopback address."""
        return (self._address, 0) if self._address.startswith("127.") and host.startswith("127.") else None

    def _accept(self, epoch: int) -> None:
        """Obey the newest driver only: an older one has been replaced, whatever it still believes."""
        if epoch < self.epoch:
            raise ProtocolError(f"a driver of epoch {epoch}, but epoch {self.epoch} is known: it has been replaced")
        if epoch > self.epoch:
            self.epoch = epoch
            try:
                _write(self._folder / "epoch", str(epoch))
            except OSError as error:  # a full disk keeps nobody from obeying; an agent started anew knows less then
                log.warning("the epoch %d could not be written down: %s", epoch, error)


async def connect(
    host: str, port: int, local: tuple[str, int] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a driver; OSError that names the place where there is none."""
    try:
        return await asyncio.open_connection(host, port, local_addr=local)
    except socket.gaierror as error:
        raise OSError(f"the name {host} does not resolve on this machine ({error.strerror})") from None
    except OSError as error:
        raise OSError(f"nothing answers at {host}:{port} ({error.strerror or error})") from None


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
