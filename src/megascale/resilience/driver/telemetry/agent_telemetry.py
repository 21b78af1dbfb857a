"""What agents send: each message is taken in, and handed to the part of the driver that it is for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial

from megascale.core.events import Event
from megascale.resilience.agent.node_health import versions
from megascale.resilience.driver.diagnosis.observations import Observations
from megascale.resilience.driver.diagnosis.standing_ranks import StandingRanks
from megascale.resilience.driver.nodes.compatibility import unfit
from megascale.resilience.driver.nodes.nodes import Node, Nodes, Note
from megascale.resilience.driver.nodes.received_files import ReceivedFiles
from megascale.resilience.driver.process.loop_tasks import LoopTasks
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.self_checks import SelfChecks
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import ENDED, NodeState
from megascale.resilience.driver.state.transitions import NodeEvent
from megascale.resilience.driver.telemetry.adoption import Adoption
from megascale.resilience.driver.telemetry.lost_nodes import LostNodes
from megascale.resilience.driver.telemetry.response import Response
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
from megascale.services.messages import Message

GONE = 0.1  # grace period, seconds, after a connection has closed in which its agent may come again or end
TOLD = 3.0  # seconds in which a cluster on other machines learns that an agent has ended
_REFUSALS = 10_000  # different ones that are written down


class AgentTelemetry:
    """What the agent server hands on to.

    Args:
        job, nodes, attempts: whose agents they are.
        seen: learns from heartbeats.
        response: for starts that failed.
        checks: for results of self-checks.
        adoption: for what agents hold.
        lost: for connections that closed.
        standing: for evidence of ranks that stand still.
        files: for what trainers elsewhere wrote.
        tasks: wakes the loop.
        outgrown: called with a greeting from an agent that knows a newer driver.
        say: called with each line for the terminal: (who, text).
        note: writes an event down.
        device: train.device, by which nodes are judged.
        told: the fields of `Described` that do not change.
    """

    def __init__(
        self,
        job: Job,
        nodes: Nodes,
        attempts: Attempts,
        seen: Observations,
        response: Response,
        checks: SelfChecks,
        adoption: Adoption,
        lost: LostNodes,
        standing: StandingRanks,
        files: ReceivedFiles,
        tasks: LoopTasks,
        outgrown: Callable[[Hello], None],
        say: Callable[[str, str], None],
        note: Note,
        device: str,
        told: dict[str, str],
    ) -> None:
        self._device, self._told, self._versions = device, told, versions()
        self._job, self._nodes, self._attempts, self._seen, self._response = job, nodes, attempts, seen, response
        self._checks, self._adoption, self._lost, self._tasks = checks, adoption, lost, tasks
        self._standing, self._files = standing, files
        self._outgrown, self._say, self._note = outgrown, say, note
        self._refusals: set[tuple[str, ...]] = set()

    def handle_hello(self, channel: agent_channel.AgentChannel, hello: Hello) -> str:
        """A node's agent has come, or come again."""
        if hello.epoch > self._job.state.epoch:
            self._outgrown(hello)
        name, now = hello.node, time.monotonic()
        if self._job.phase in ENDED:
            return f"the job is {self._job.phase}"
        if why := self._unfit(hello):
            return why
        if name in self._nodes.taken:  # a task whose slurmd was killed, say: it must not train beside its replacement
            epoch = self._job.state.epoch
            channel.send_message(do="welcome", epoch=epoch, version=agent_channel.VERSION)
            channel.send_message(do="stop", epoch=epoch, order=0, how="kill", grace_period=0.0)
            channel.send_message(do="leave", epoch=epoch)
            self._nodes.known(name)
            return ""
        node = self._nodes.known(name)
        if node.channel is not None:
            node.channel.close()  # a connection that broke unnoticed, or an agent started anew
        self._nodes.leases.came(node, node.boot == hello.boot, hello.trainers is not None)
        again, node.boot = node.boot not in ("", hello.boot), hello.boot
        node.ends, node.given_up = node.ends and not again, False
        node.channel, node.last_seen, node.joined, node.attempt = channel, now, now, hello.attempt
        channel.send_message(do="welcome", epoch=self._job.state.epoch, version=agent_channel.VERSION)
        self._came(node, hello)
        if again or node.attempt < self._job.state.attempt:
            node.forget_attempt()
        self._adoption.came(node, hello)
        self._tasks.wake.set()
        return ""

    def asked(self, join: Join) -> JobOffer | str:
        """A node that knows only where to ask: what its agent must know, or why it is refused."""
        if self._job.phase in ENDED:
            return f"the job is {self._job.phase}"
        there = self._nodes.get(join.node)
        if there is not None and there.channel is not None and there.record.address != join.address:
            return (
                f"a node {join.node} is in the job already, at {there.record.address}: give this one another name "
                "(--node)"
            )
        return self._unfit(join) or JobOffer(epoch=self._job.state.epoch, version=agent_channel.VERSION, **self._told)

    def _unfit(self, hello: Hello | Join) -> str:
        others = [
            (n.name, n.record.facts.get("hardware", {}), n.record.facts.get("versions", {}))
            for n in self._nodes.all()
            if n.channel is not None and n.name != hello.node
        ]
        ranks = self._job.state.ranks_per_node
        return unfit(hello.node, hello.hardware, hello.versions, self._versions, others, ranks, self._device)

    def _came(self, node: Node, hello: Hello) -> None:
        """Remember where it is and what its machine is like."""
        facts = {"pod": hello.pod, "hardware": hello.hardware, "versions": hello.versions}
        about = {"address": hello.address, "facts": facts}
        if node.state is NodeState.UP and (node.record.address, node.record.facts) == (hello.address, facts):
            return
        new = node.state not in (NodeState.UP, NodeState.EVICTED)
        self._nodes.change(node.name, NodeEvent.CONNECTED, **about, **({"why": "its agent came"} if new else {}))
        if new:
            text = f"{node.name} at {hello.address} joined"
            self._note(Event.NODE_JOINED, nodes=(node.name,), evidence=(text,))

    def handle_heartbeat(self, name: str, channel: agent_channel.AgentChannel, heartbeat: Heartbeat) -> None:
        """A heartbeat, already checked."""
        node, now = self._nodes[name], time.monotonic()
        if channel is not node.channel:
            return
        before = node.heartbeat
        node.beat(heartbeat, now)
        self._nodes.answer(node, heartbeat)
        self._seen.learn(before, heartbeat)
        if _stages(before) != _stages(heartbeat) or heartbeat.is_finished:
            self._tasks.wake.set()

    def handle_message(self, name: str, channel: agent_channel.AgentChannel, message: Message) -> None:
        """Any other message of a node."""
        node = self._nodes[name]
        if channel is not node.channel:
            return
        node.last_seen = time.monotonic()
        if isinstance(message, Stopped) and message.order == self._attempts.order:
            node.acknowledged, node.port = self._attempts.order, message.port
            node.may_run = False
        elif isinstance(message, Diagnosed):
            self._checks.received(node, message)
        elif isinstance(message, StartFailed):
            why = f"{name}: {message.reason[:500]}"
            self._response.act([judge_failed_start(name, self._job.state.ranks(name), why, message.errno)])
        elif isinstance(message, Lines):
            for line in message.lines:
                self._say(f"rank {message.rank}", line)
        elif isinstance(message, Steps):
            if 0 in self._job.state.ranks(name):
                self._seen.told(message)
            return
        elif isinstance(message, FileData):
            self._files.take(message, partial(self._confirm, asyncio.get_running_loop(), node), name)
            return
        elif isinstance(message, Evidence):
            self._standing.received(name, message)
            if message.must_store and message.rank in self._job.state.ranks(name):
                self._files.keep(message)
            return
        self._tasks.wake.set()

    def _confirm(self, loop: asyncio.AbstractEventLoop, node: Node, name: str, end: int) -> None:
        """A piece of a file was written, in another thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(partial(self._nodes.order, node, do="kept", name=name, end=end))

    def left(self, name: str, channel: agent_channel.AgentChannel) -> None:
        """A connection ended; the node may come back within the window."""
        node = self._nodes[name]
        if node.channel is channel:
            node.channel = None
            self._tasks.spawn(self._look_after(node))
            self._tasks.wake.set()

    async def _look_after(self, node: Node) -> None:
        deadline = time.monotonic() + TOLD
        while time.monotonic() < deadline:
            await asyncio.sleep(GONE)
            if self._adoption.unsure or node.channel is not None or node.state is not NodeState.UP:
                return
            self._lost.look_after(node)

    def refused(self, peer: str, node: str, why: str) -> None:
        """Somebody was turned away."""
        key = (peer.rpartition(":")[0], node, why.split(";")[0])
        if key not in self._refusals and len(self._refusals) < _REFUSALS:
            self._refusals.add(key)
            self._note(Event.MESSAGE_REFUSED, action="refused", evidence=(f"{node or peer}: {why}",), peer=peer)


def _stages(heartbeat: Heartbeat | None) -> list[tuple[int, str, str]]:
    """What of a heartbeat is worth a look at once."""
    return [(w.rank, w.state, w.phase) for w in heartbeat.workers] if heartbeat is not None else []
