"""Connection of an agent to the current driver, which is the driver with the newest epoch."""

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

from megascale.core.failure import keep_running
from megascale.errors import MegascaleError
from megascale.resilience.agent.node_folder import read_epoch, write_epoch
from megascale.resilience.agent.rank_lease import RankLease
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_channel import AgentChannel
from megascale.resilience.protocol.agent_messages import MESSAGE_BYTES, Order, Refuse, Welcome
from megascale.resilience.protocol.job_description import read_job, read_job_token
from megascale.services.conversation import set_peer_timeout
from megascale.services.framing import ProtocolError
from megascale.services.messages import Message

log = logging.getLogger("megascale.agent")
RETRY_INTERVAL = 0.25  # seconds between attempts to reach a driver
POLL_INTERVAL = 0.2  # seconds between checks of a channel that is full
HANDSHAKE_TIMEOUT = 5.0  # seconds until the driver has accepted the agent


class DriverLink:
    """Link to the driver, which opens a new channel whenever the channel is lost.

    Args:
        folder: folder of the node, whose job description names the driver.
        make_hello: returns the fields of `Hello` except epoch, pid and version.
        on_session: called when a driver has accepted the agent.
        lease: lease of this node's ranks, which the driver's answers renew.

    Attributes:
        epoch: newest epoch of a driver that this agent has followed.
        channel: channel to the driver, or None without a driver.
        token: secret of the job, or empty before the first session.
        channel_lost_time: time.monotonic() when the last channel was lost.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        make_hello: Callable[[], dict[str, Any]],
        on_session: Callable[[], None],
        execute_order: Callable[[Order], Awaitable[None]],
        lease: RankLease,
    ) -> None:
        self._folder = folder
        self._address = address
        self._make_hello = make_hello
        self._on_session = on_session
        self._execute_order = execute_order
        self._lease = lease
        self._failed_attempts = 0  # selects the next address of the driver
        self._logged_problem = ""
        self.epoch = read_epoch(folder)
        self.channel: AgentChannel | None = None
        self.token = b""
        self.channel_lost_time = time.monotonic()

    async def run(self) -> None:
        """Keep a channel to the newest driver. Never returns."""
        while True:
            has_process_ended = False  # whether the kernel of the driver's machine closed the connection
            try:
                await self._run_session()
            except (OSError, EOFError, ValueError, TimeoutError, MegascaleError) as error:
                has_process_ended = isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)
                if self.channel is None:
                    self._failed_attempts += 1
                self._log_problem(str(error) or type(error).__name__)
            except Exception:
                log.exception("the session with the driver failed")
            if self.channel is not None:
                self.channel.close()
                self.channel = None
                self.channel_lost_time = time.monotonic()
                self._lease.record_close(has_process_ended)
            await asyncio.sleep(RETRY_INTERVAL)

    def _log_problem(self, problem: str) -> None:
        """Log a problem once, because attempts are made four times per second."""
        if problem != self._logged_problem:
            self._logged_problem = problem
            log.info("no driver: %s", problem)

    def send_message(self, **fields: Any) -> None:
        """Send a message given by its fields. Without a driver the message is dropped."""
        if self.channel is not None:
            with contextlib.suppress(ConnectionError):
                self.channel.send_message(**fields)

    def send(self, message: Message) -> None:
        """Send a message. Without a driver the message is dropped."""
        if self.channel is not None:
            with contextlib.suppress(ConnectionError):
                self.channel.send(message)

    async def send_when_free(self, message: Message) -> None:
        """Send a large message once earlier messages have been transmitted."""
        while not self.is_free and self.channel is not None:
            await asyncio.sleep(POLL_INTERVAL)
        self.send(message)

    @property
    def is_free(self) -> bool:
        """Return whether there is a driver and the queue has at most the bytes of one message."""
        return self.channel is not None and self.channel.backlog <= MESSAGE_BYTES

    async def _run_session(self) -> None:
        """Connect to a driver and execute its orders until the connection ends."""
        job = read_job(self._folder)
        drivers = (job.driver,) + job.alternative_drivers
        host, port = drivers[self._failed_attempts % len(drivers)]
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            reader, writer = await connect(host, port, self._local_address(host))
            try:
                # A driver's machine that fails closes no connection. The kernel ends it after two windows of silence.
                set_peer_timeout(writer.get_extra_info("socket"), 2 * job.limits.window)
                token = read_job_token(self._folder)  # read again, because a new driver may have made a new token
                channel = await agent_channel.open_channel(reader, writer, token, driver=False)
                hello = self._make_hello() | {"epoch": self.epoch, "pid": os.getpid(), "version": agent_channel.VERSION}
                send_time = time.monotonic()
                channel.send_message(do="hello", **hello)
                answer = await channel.receive()
            except BaseException:
                writer.close()
                raise
        try:
            welcome = _check_welcome(answer)
        except ProtocolError:
            channel.close()
            raise
        self._accept_epoch(welcome.epoch)
        self.channel = channel
        self.token = token
        self._logged_problem = ""
        self._lease.begin_session(send_time)
        log.info("driver of epoch %d at %s:%d", self.epoch, host, port)
        self._on_session()
        watch_task = asyncio.create_task(
            keep_running(lambda: self._watch_for_newer_driver(channel), "the check for a newer driver", log)
        )
        try:
            while True:
                order = await channel.receive()
                if not isinstance(order, Order):
                    raise ProtocolError(f"the driver sent {order.do!r}, which is not an order")
                self._accept_epoch(order.epoch)
                await self._execute_order(order)
        finally:
            watch_task.cancel()

    async def _watch_for_newer_driver(self, channel: AgentChannel) -> None:
        """Close the channel when a newer driver has replaced the current one, which may hang with open connections."""
        while True:
            await asyncio.sleep(RETRY_INTERVAL)
            with contextlib.suppress(MegascaleError):
                if read_job(self._folder).epoch > self.epoch:
                    channel.close()
                    return

    def _local_address(self, host: str) -> tuple[str, int] | None:
        """Return the node's loopback address as the local address in a cluster on this machine, or None elsewhere."""
        if self._address.startswith("127.") and host.startswith("127."):
            return self._address, 0
        return None

    def _accept_epoch(self, epoch: int) -> None:
        """Record the epoch of the driver. Raises ProtocolError for an older epoch, whose driver has been replaced."""
        if epoch < self.epoch:
            raise ProtocolError(
                f"the driver has epoch {epoch}, but a driver of epoch {self.epoch} has replaced it already"
            )
        if epoch > self.epoch:
            self.epoch = epoch
            try:
                write_epoch(self._folder, epoch)
            except OSError as error:  # a full disk must not keep the agent from following the driver
                log.warning("the epoch %d could not be written: %s", epoch, error)


def _check_welcome(answer: Message) -> Welcome:
    """Return the driver's answer to `Hello`. Raises ProtocolError if it is not a welcome of the same version."""
    if isinstance(answer, Refuse):
        raise ProtocolError(f"the driver refused this node: {answer.reason}")
    if not isinstance(answer, Welcome):
        raise ProtocolError(f"the driver answered {answer.do!r} to the greeting")
    if answer.version != agent_channel.VERSION:
        raise ProtocolError(f"the driver has version {answer.version}, this agent {agent_channel.VERSION}")
    return answer


async def connect(
    host: str, port: int, local: tuple[str, int] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a driver. Raises OSError whose message names the address."""
    try:
        return await asyncio.open_connection(host, port, local_addr=local)
    except socket.gaierror as error:
        raise OSError(f"the name {host} does not resolve on this machine ({error.strerror})") from None
    except OSError as error:
        raise OSError(f"nothing answers at {host}:{port} ({error.strerror or error})") from None
