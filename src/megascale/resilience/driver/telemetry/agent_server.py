"""The agents' port and their messages.

`AgentServer` authenticates each connection and checks each message. `AgentTelemetry` stores heartbeats, wakes the loop,
and hands every other message to the part of the driver that it concerns.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megascale.resilience.driver.diagnosis.investigations import RankInvestigation
from megascale.resilience.driver.diagnosis.observations import Observations
from megascale.resilience.driver.nodes import Node, Nodes
from megascale.resilience.driver.process import LoopTasks
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.recovery import SelfChecks
from megascale.resilience.driver.recovery.response import Response
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.telemetry.admission import Admission
from megascale.resilience.driver.telemetry.membership import Adoption, LostNodes
from megascale.resilience.driver.telemetry.trainer_files import ReceivedFiles
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import (
    Diagnosed,
    Evidence,
    FileData,
    Hello,
    JobOffer,
    Join,
    Lines,
    StartFailed,
    Steps,
    Stopped,
)
from megascale.resilience.protocol.heartbeat import Heartbeat
from megascale.resilience.rules.exits import judge_failed_start
from megascale.resilience.rules.silence import HANG_FLOOR
from megascale.services.framing import ProtocolError
from megascale.services.messages import Message

PROOF_SECONDS = 5.0  # seconds within which a connection must prove the token and send a greeting
UNPROVED_LIMIT = 2048  # largest number of unauthenticated connections: all agents of a large job connect at once
_MIN_UNPROVED = 8  # unauthenticated connections that are allowed with few file descriptors
_REASON_CHARACTERS = 500  # of the reason why an agent could not start its ranks
_BUFFER_BYTES = 8192  # of the read buffer of one connection; asyncio buffers up to twice as many
# Bytes per read of an unauthenticated connection, whose agent sends 80. asyncio's default is 256 KiB, so that many
# connections without a token would take much memory.
_UNPROVED_READ_BYTES = 4096
DISCONNECT_GRACE = 0.1  # seconds between two looks at a node whose connection closed: its agent may reconnect
END_NOTICE = 3.0  # seconds in which a cluster on other machines learns that an agent has ended


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
        self._unproved: dict[int, asyncio.StreamWriter] = {}  # unauthenticated connections by id, oldest first
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self, host: str, port: int, tls: agent_channel.DriverTls | None = None) -> tuple[str, int]:
        """Listen, with encryption if `tls` is given. Return (host, port). Raise OSError for an unusable address."""
        self._tls = tls
        self._server = await asyncio.start_server(self._serve, host, port, backlog=4096, limit=_BUFFER_BYTES)
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it closes or `close` cancels this task."""
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
        """Authenticate a connection, answer its greeting, and hand on the messages of an admitted agent."""
        name = writer.get_extra_info("peername")
        peer = f"{name[0]}:{name[1]}" if name else "?"
        transport: Any = writer.transport
        transport.max_size = _UNPROVED_READ_BYTES  # overrides a class attribute of asyncio's transports
        self._make_room()
        self._unproved[id(writer)] = writer
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                channel = await agent_channel.open_channel(reader, writer, self._token, driver=True, tls=self._tls)
                greeting = await channel.receive()
            if not isinstance(greeting, Hello | Join):
                raise ProtocolError(f"it sent {greeting.do!r} before a greeting")
        except ProtocolError as error:
            self._admission.record_refusal(peer, "", str(error))
            return
        except (TimeoutError, OSError, EOFError):
            self._admission.record_refusal(peer, "", "it sent no greeting in time")
            return
        finally:
            self._unproved.pop(id(writer), None)
        del transport.max_size  # The limit of asyncio's class applies from now on.
        node = greeting.node
        answer = self._judge_greeting(channel, greeting)
        if isinstance(answer, JobOffer):
            channel.send(answer)
            return
        if answer:
            channel.send_message(do="refuse", reason=answer)
            self._admission.record_refusal(peer, node, answer)
            return
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
        """Close the oldest unauthenticated connections above the limit: an agent with the token needs milliseconds."""
        # At most half of the file descriptors may be unauthenticated connections.
        descriptor_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = min(UNPROVED_LIMIT, max(_MIN_UNPROVED, descriptor_limit // 2))
        while len(self._unproved) >= limit:
            oldest = next(iter(self._unproved))
            self._unproved.pop(oldest).transport.abort()

    async def _receive(self, channel: agent_channel.AgentChannel, node: str) -> None:
        """Hand on the messages of an admitted agent until its connection closes.

        Raises:
            ProtocolError: a message is malformed, or a heartbeat is from another node or was sent before.
            OSError, EOFError: the connection was closed.
        """
        sequence = 0  # number of the newest heartbeat; agents count from 1
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


@dataclass(kw_only=True, eq=False)
class AgentTelemetry:
    """Receives the messages of admitted agents.

    Attributes:
        nodes: all nodes.
        attempts: numbers the stop orders.
        observations: learns from heartbeats and metrics.
        response: acts on failed starts.
        self_checks: takes the results of self-checks.
        adoption: while it waits for agents, closed connections are not judged.
        lost_nodes: judges closed connections.
        rank_investigation: takes the answers about ranks that do not move.
        received_files: stores the files of trainers that do not see the run folder.
        log_line: called with each line for the terminal: (source, text).
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    observations: Observations
    response: Response
    self_checks: SelfChecks
    adoption: Adoption
    lost_nodes: LostNodes
    rank_investigation: RankInvestigation
    received_files: ReceivedFiles
    tasks: LoopTasks
    log_line: Callable[[str, str], None]

    def handle_heartbeat(self, name: str, channel: agent_channel.AgentChannel, heartbeat: Heartbeat) -> None:
        """Store a heartbeat, answer it, and wake the loop if a rank entered another phase or may hang."""
        node = self.nodes[name]
        if channel is not node.channel:  # The agent has opened a newer connection.
            return
        previous = node.heartbeat
        node.add_heartbeat(heartbeat, time.monotonic())
        self.nodes.answer_heartbeat(node, heartbeat)
        self.observations.learn_durations(previous, heartbeat)
        has_changed = _list_rank_phases(previous) != _list_rank_phases(heartbeat)
        if heartbeat.is_finished or has_changed or _begins_to_hang(previous, heartbeat):
            self.tasks.wake.set()

    def handle_message(self, name: str, channel: agent_channel.AgentChannel, message: Message) -> None:
        """Hand a message to the part that it concerns, and wake the loop if a decision may follow."""
        node = self.nodes[name]
        if channel is not node.channel:
            return
        node.last_seen = time.monotonic()
        ranks = self.job.state.ranks(name)
        match message:
            case Steps():
                if 0 in ranks:  # Rank 0's metrics are the job's.
                    self.observations.record_steps(message)
                return
            case FileData():
                loop = asyncio.get_running_loop()
                self.received_files.receive(message, partial(self._confirm_piece, loop, node), name)
                return
            case Evidence():
                self.rank_investigation.receive(name, message)
                if message.must_store and message.rank in ranks:
                    self.received_files.store_evidence(message)
                return
            case Stopped() if message.order == self.attempts.last_order and message.problem:
                node.stop_problem = (message.order, message.problem[:_REASON_CHARACTERS])
            case Stopped() if message.order == self.attempts.last_order:
                node.acknowledged_order = self.attempts.last_order
                node.port = message.port
                self.attempts.timeline.note_stopped(message, time.monotonic())
                self.nodes.leases.holders.discard(name)
            case Diagnosed():
                self.self_checks.receive_report(node, message)
            case StartFailed():
                reason = f"{name}: {message.reason[:_REASON_CHARACTERS]}"
                self.response.act([judge_failed_start(name, ranks, reason, message.errno)])
            case Lines():
                for line in message.lines:
                    self.log_line(f"rank {message.rank}", line)
            case _:  # An acknowledgement of an older stop order changes nothing.
                pass
        self.tasks.wake.set()

    def _confirm_piece(self, loop: asyncio.AbstractEventLoop, node: Node, name: str, end: int) -> None:
        """Confirm a piece of a file to its agent. Called in the thread that wrote the piece."""
        with contextlib.suppress(RuntimeError):  # The loop may have ended.
            loop.call_soon_threadsafe(partial(self.nodes.order, node, do="kept", name=name, end=end))

    def handle_disconnect(self, name: str, channel: agent_channel.AgentChannel) -> None:
        """Watch a node whose connection closed: its agent may reconnect, or the cluster may report its end."""
        node = self.nodes[name]
        if node.channel is channel:
            node.channel = None
            self.tasks.spawn(self._watch_disconnected(node))
            self.tasks.wake.set()

    async def _watch_disconnected(self, node: Node) -> None:
        """Recover a node if the cluster soon reports the end of its agent. Later its silence is judged."""
        deadline = time.monotonic() + END_NOTICE
        while time.monotonic() < deadline:
            await asyncio.sleep(DISCONNECT_GRACE)
            if self.adoption.is_waiting or node.channel is not None or not node.state.is_present:
                return
            self.lost_nodes.recover_if_agent_ended(node)


def _begins_to_hang(previous: Heartbeat | None, heartbeat: Heartbeat) -> bool:
    """Return True for the first heartbeat in which all ranks have stood still for HANG_FLOOR seconds."""
    return _find_shortest_age(heartbeat) > HANG_FLOOR >= _find_shortest_age(previous)


def _find_shortest_age(heartbeat: Heartbeat | None) -> float:
    """Return the seconds since a rank of a node last changed its status, 0 without ranks."""
    if heartbeat is None:
        return 0.0
    return min((worker.status_age for worker in heartbeat.workers), default=0.0)


def _list_rank_phases(heartbeat: Heartbeat | None) -> list[tuple[int, str, str]]:
    """Return (rank, state, phase) of every rank, whose changes the loop handles at once."""
    if heartbeat is None:
        return []
    return [(worker.rank, worker.state, worker.phase) for worker in heartbeat.workers]
