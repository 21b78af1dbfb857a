"""Telemetry of the agents: heartbeats are stored and wake the loop, other messages go to the part they concern."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megascale.resilience.driver.diagnosis.investigations import RankInvestigation
from megascale.resilience.driver.diagnosis.observations import Observations
from megascale.resilience.driver.nodes import Node, Nodes
from megascale.resilience.driver.process import LoopTasks
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.recovery import SelfChecks
from megascale.resilience.driver.recovery.response import Response
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.telemetry.membership import Adoption, LostNodes
from megascale.resilience.driver.telemetry.trainer_files import ReceivedFiles
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import (
    Diagnosed,
    Evidence,
    FileData,
    Lines,
    StartFailed,
    Steps,
    Stopped,
)
from megascale.resilience.protocol.heartbeat import Heartbeat
from megascale.resilience.rules.exits import judge_failed_start
from megascale.services.messages import Message

DISCONNECT_GRACE = 0.1  # seconds after a connection has closed in which its agent may reconnect or end
END_NOTICE = 3.0  # seconds in which a cluster on other machines learns that an agent has ended


@dataclass(kw_only=True, eq=False)
class AgentTelemetry:
    """Receives the messages of admitted agents.

    Attributes:
        job: whose agents they are.
        nodes: all nodes.
        attempts: numbers the stop orders.
        observations: learns from heartbeats and metrics.
        response: acts on failed starts.
        checks: takes the results of self-checks.
        adoption: known nodes are not judged while it waits for agents.
        lost_nodes: judges closed connections.
        ranks: takes the answers about ranks that do not move.
        files: takes what trainers elsewhere wrote.
        tasks: wakes the loop.
        log_line: called with each line for the terminal: (source, text).
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    observations: Observations
    response: Response
    checks: SelfChecks
    adoption: Adoption
    lost_nodes: LostNodes
    ranks: RankInvestigation
    files: ReceivedFiles
    tasks: LoopTasks
    log_line: Callable[[str, str], None]

    def handle_heartbeat(self, name: str, channel: agent_channel.AgentChannel, heartbeat: Heartbeat) -> None:
        """Store a heartbeat, answer it, and wake the loop if a rank entered another phase."""
        node = self.nodes[name]
        if channel is not node.channel:
            return
        previous = node.heartbeat
        node.add_heartbeat(heartbeat, time.monotonic())
        self.nodes.answer(node, heartbeat)
        self.observations.learn_durations(previous, heartbeat)
        if heartbeat.is_finished or _stages(previous) != _stages(heartbeat):
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
                if 0 in ranks:
                    self.observations.record_steps(message)
                return
            case FileData():
                loop = asyncio.get_running_loop()
                self.files.take(message, partial(self._confirm_piece, loop, node), name)
                return
            case Evidence():
                self.ranks.receive(name, message)
                if message.must_store and message.rank in ranks:
                    self.files.store_evidence(message)
                return
            case Stopped() if message.order == self.attempts.order:
                node.acknowledged = self.attempts.order
                node.port = message.port
                self.nodes.leases.holders.discard(name)
            case Diagnosed():
                self.checks.receive(node, message)
            case StartFailed():
                reason = f"{name}: {message.reason[:500]}"
                self.response.act([judge_failed_start(name, ranks, reason, message.errno)])
            case Lines():
                for line in message.lines:
                    self.log_line(f"rank {message.rank}", line)
            case _:
                pass
        self.tasks.wake.set()

    def _confirm_piece(self, loop: asyncio.AbstractEventLoop, node: Node, name: str, end: int) -> None:
        """Confirm a piece of a file, from the thread that wrote it."""
        with contextlib.suppress(RuntimeError):  # The loop may have ended.
            loop.call_soon_threadsafe(partial(self.nodes.order, node, do="kept", name=name, end=end))

    def handle_disconnect(self, name: str, channel: agent_channel.AgentChannel) -> None:
        """Watch a node whose connection closed; it may reconnect within the window."""
        node = self.nodes[name]
        if node.channel is channel:
            node.channel = None
            self.tasks.spawn(self._watch_disconnected(node))
            self.tasks.wake.set()

    async def _watch_disconnected(self, node: Node) -> None:
        deadline = time.monotonic() + END_NOTICE
        while time.monotonic() < deadline:
            await asyncio.sleep(DISCONNECT_GRACE)
            if self.adoption.is_waiting or node.channel is not None or not node.state.is_present:
                return
            self.lost_nodes.check_ended(node)


def _stages(heartbeat: Heartbeat | None) -> list[tuple[int, str, str]]:
    """Return the part of a heartbeat whose changes the loop handles at once."""
    if heartbeat is None:
        return []
    return [(worker.rank, worker.state, worker.phase) for worker in heartbeat.workers]
