"""The driver's nodes: what it knows of each now, and starting, asking for, ordering and giving up their agents."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from megascale.config import ResilienceConfig
from megascale.core.events import Event
from megascale.core.preflight import wave
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.driver.nodes.agent_leases import AgentLeases
from megascale.resilience.driver.process.loop_tasks import LoopTasks
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobState, NodeRecord, NodeState
from megascale.resilience.driver.state.transitions import NodeEvent
from megascale.resilience.protocol.agent_channel import AgentChannel
from megascale.resilience.protocol.agent_messages import Diagnosed
from megascale.resilience.protocol.heartbeat import Heartbeat
from megascale.resilience.rules.view import HISTORY, RankView

log = logging.getLogger("megascale.driver")

# Agents that are started and have not come: each then imports everything for its trainers, and many at once on few
# cores all come too late.
WAVE = wave(os.cpu_count() or 1)
JOIN = 60.0  # seconds in which an agent that was started must come

Note = Callable[..., Any]  # Driver.note


@dataclass
class Node:
    """One node. Times are the driver's monotonic clock.

    Attributes:
        record: what the job's state remembers of it.
        deadline: when a joining agent must have come.
        joined: when its agent came last: what it is asked before, it hears then.
        boot: names one life of its agent.
        attempt: of which it holds processes.
        acknowledged: number of the last stop order it has carried out.
        port: free for the next attempt's store when it acknowledged.
        report: result of its last self-checks, when all nodes were ordered to run them.
        checking: number of the order to run them that it has as a spare, 0 for none.
        drained: why its cluster wants it to get nothing new, "" if it does not.
        held: the job as its trainers were started, and whether they have done a step (telemetry/adoption.py);
            None: none run.
        leaving: its cluster has it end, by whosever wish.
        ends: its agent has said that it ends.
        told: the connection over which it was told to end, as its cluster wants it.
        given_up: nothing is expected of it any more but the word that its ranks have ended.
        leased: until when its agent lets ranks run that it is not told to end, once nobody hears it.
        may_run: whether it has been given ranks and has not said that they have ended.
        tested: when it last passed them, seconds since 1970; 0: not yet.
    """

    name: str
    record: NodeRecord = field(default_factory=NodeRecord)
    channel: AgentChannel | None = None
    last_seen: float = 0.0
    deadline: float = 0.0
    joined: float = 0.0
    boot: str = ""
    attempt: int = 0
    acknowledged: int = 0
    port: int = 0
    heartbeat: Heartbeat | None = None
    history: deque[tuple[float, Heartbeat]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    report: Diagnosed | None = None
    checking: int = 0
    tested: float = 0.0
    drained: str = ""
    held: tuple[JobState, bool] | None = None
    leaving: bool = False
    ends: bool = False
    told: AgentChannel | None = None
    given_up: bool = False
    leased: float = 0.0
    may_run: bool = False

    @property
    def state(self) -> NodeState:
        """What it is to the driver."""
        return self.record.state

    @property
    def usable(self) -> bool:
        """Whether a new attempt may use it now."""
        return self.keeps and not self.drained

    @property
    def remains(self) -> bool:
        """Whether it is there, and not about to end."""
        return self.record.state is NodeState.UP and not (self.leaving or self.ends)

    @property
    def keeps(self) -> bool:
        """Whether a new attempt may leave it the ranks that it has, if no other node can take them."""
        return self.remains and self.channel is not None and not self.record.cordoned

    def forget_attempt(self) -> None:
        """A new attempt begins: what was said about older ones must not be judged again."""
        self.heartbeat = None
        self.history.clear()

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """Take in a heartbeat; what never changes is kept once."""
        old = self.heartbeat
        if old is not None and (old.hardware, old.versions) == (heartbeat.hardware, heartbeat.versions):
            heartbeat = msgspec.structs.replace(heartbeat, hardware=old.hardware, versions=old.versions)
        self.last_seen, self.heartbeat, self.attempt = now, heartbeat, heartbeat.attempt
        self.history.append((now, heartbeat))

    def member(self, ranks: tuple[int, ...]) -> RankView:
        """As the rules see it."""
        return RankView(self.name, ranks, self.last_seen, self.heartbeat, self.history, self.channel is not None)

    def disconnect(self) -> None:
        """End its connection."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class Nodes:
    """All nodes of the job, by name.

    Args:
        job: whose state remembers them.
        cluster: where they come from.
        tasks: for what takes long.
        limits: windows and budgets.
        note: writes an event down.

    Attributes:
        requests: new nodes that were asked for and have not been given yet.
        asked: when all that the job takes were last asked for, on the monotonic clock.
    """

    def __init__(self, job: Job, cluster: Cluster, tasks: LoopTasks, limits: ResilienceConfig, note: Note) -> None:
        self._job, self.cluster, self._tasks, self._limits, self._note = job, cluster, tasks, limits, note
        self._nodes = {name: Node(name, record) for name, record in job.state.nodes.items()}
        self.leases = AgentLeases(limits, cluster)
        self.requests = 0
        self.asked = 0.0
        self._on_their_way = 0  # agents started that have not come yet

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def get(self, name: str) -> Node | None:
        """The node of a name, None if there is none."""
        return self._nodes.get(name)

    def names(self) -> list[str]:
        """Of all nodes, in alphabetical order."""
        return sorted(self._nodes)

    def all(self) -> list[Node]:
        """Every node ever known."""
        return list(self._nodes.values())

    def spares(self) -> list[Node]:
        """Those that could take ranks and have none."""
        holders = set(self._job.state.placement)
        return [node for node in self._nodes.values() if node.usable and node.name not in holders]

    def change(self, name: str, event: NodeEvent, **about: Any) -> Node:
        """Something happened to a node (state/transitions.py): its state follows, and is remembered."""
        node = self._nodes.setdefault(name, Node(name))
        if self._job.apply_node(event, name, **about):
            node.record = self._job.state.nodes[name]
        return node

    def known(self, name: str) -> Node:
        """A node by its name; one that nobody has heard of is expected from now on."""
        return self._nodes[name] if name in self._nodes else self.change(name, NodeEvent.KNOWN)

    @property
    def taken(self) -> frozenset[str]:
        """Those that the cluster has taken out of the job, whatever still runs there."""
        return self.cluster.taken

    @property
    def drained(self) -> Mapping[str, str]:
        """Those that the cluster wants to get nothing new, and why."""
        return self.cluster.drained

    @property
    def slow_start(self) -> bool:
        """Whether a spare takes over sooner than a node that is started again."""
        return self.cluster.slow_start

    @property
    def ending(self) -> frozenset[str]:
        """Those that the cluster has end."""
        return self.cluster.ending

    def answers(self, node: Node) -> bool:
        """Whether a node answers, and is not about to end."""
        there = node.state is NodeState.UP and node.channel is not None
        return there and not node.ends and node.name not in self.ending

    # agents ---------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """At the driver's start: have agents on as many nodes as the job and its spares take."""
        for node in self.all():
            node.last_seen, node.deadline = now, now + self._limits.window
            self.leases.took_over(node, self._job.state, now)
            if node.state is NodeState.UP:  # whether it is there now will show
                self.change(node.name, NodeEvent.AWAITED)
        wanted = self._limits.nodes + self._limits.spares
        for info in self.cluster.nodes():
            node = self.known(info.name)
            if node.state is NodeState.EVICTED or wanted <= 0:
                continue
            if info.running:
                wanted -= 1
                # Its agent has yet to be told where this driver is: till then it is not silent.
                node.last_seen = now + self.cluster.notice_seconds
                if node.state is not NodeState.JOINING:
                    self.change(info.name, NodeEvent.AWAITED, address=node.record.address or info.address)
                node.deadline = now + JOIN
            elif info.alive:
                wanted -= 1
                self.start(node, "started with the driver")
        for _ in range(wanted):
            self.ask_for_one()
        self.asked = now

    def start(self, node: Node, why: str) -> None:
        """Start a node's agent (again), in the background."""
        self.change(node.name, NodeEvent.AWAITED, why=why)
        node.deadline = float("inf")  # until it is started
        self.give_up(node)
        self._tasks.spawn(self.start_now(node))

    async def start_now(self, node: Node) -> None:
        """Start a node's agent in its turn, and wait until it has come."""
        async with self._wave():
            started = False
            try:
                started = await self.cluster.start_agent(node.name)
            except Exception:  # a node that nobody starts would be waited for without end
                log.exception("the agent of node %s cannot be started", node.name)
            # Another start of the same node may be waiting for its turn; whichever comes last has the deadline.
            node.deadline = time.monotonic() + JOIN if started else 0.0  # it will not come
            await self._coming(node)

    @contextlib.asynccontextmanager
    async def _wave(self) -> AsyncIterator[None]:
        """Room among the agents that are on their way."""
        while self._on_their_way >= (self.cluster.at_once or WAVE):  # other machines share no cores
            await asyncio.sleep(0.05)
        self._on_their_way += 1
        try:
            yield
        finally:
            self._on_their_way -= 1

    async def _coming(self, node: Node) -> None:
        """Until an agent that was started has come, or is not waited for any more (its time is over, or another start
        of the node took its place)."""
        deadline = node.deadline
        while node.state is NodeState.JOINING and node.deadline == deadline and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def ask_for_one(self) -> None:
        """Ask the cluster for a new node."""
        self.requests += 1
        self._tasks.spawn(self.request())

    async def request(self) -> None:
        """Wait for a new node that was asked for, and until its agent has come."""
        waiting = True
        try:
            async with self._wave():
                self.cluster.bar(frozenset(node.name for node in self.all() if _barred(node)))
                name = await self.cluster.request()
                self.requests, waiting = self.requests - 1, False
                if name is None:
                    return
                node = self.known(name)
                if node.state is not NodeState.UP:
                    self.change(name, NodeEvent.AWAITED, why="requested")
                    node.deadline = time.monotonic() + JOIN
                await self._coming(node)
        finally:
            self.requests -= waiting

    def is_coming(self, among: Iterable[Node]) -> bool:
        """Whether an agent of these nodes was started and has not come yet."""
        return any(node.state is NodeState.JOINING for node in among)

    def lose(self, node: Node, why: str) -> None:
        """A node is gone."""
        self.change(node.name, NodeEvent.GONE, why=why)
        self.give_up(node)
        self._note(Event.NODE_LOST, nodes=(node.name,), evidence=(why,))

    def take_out(self, node: Node, evict: bool, why: str) -> None:
        """Have nothing of the job run on a node any more; evict: it is not used again."""
        if evict:
            self.change(node.name, NodeEvent.EVICTED, why=why)
            self._note(Event.NODE_EVICTED, nodes=(node.name,), evidence=(why,))
            self.cluster.block(node.name, why)
        elif node.state is not NodeState.LOST:
            self.change(node.name, NodeEvent.GONE, why=why)
        self.give_up(node)
        self._tasks.spawn(self.cluster.fence(node.name))

    def answer(self, node: Node, heartbeat: Heartbeat) -> None:
        """A heartbeat has come: its ranks may run on."""
        node.ends = node.ends or heartbeat.leaving
        if heartbeat.over:
            node.may_run = False
            self.cluster.note_end(node.name)
        if self.leases.given and (heartbeat.over or not node.given_up):
            self.leases.renew(node)
            self.order(node, do="heard", sequence=heartbeat.sequence)

    def held(self, now: float) -> list[Node]:
        """Those that nobody reaches and that may still run ranks."""
        return [node for node in self.all() if self.leases.held(node, now)]

    def switch(self, name: str) -> str:
        """What connects a node, "" where that is not known."""
        return self.cluster.switch(name)

    def give_up(self, node: Node) -> None:
        """Hang up on a node that may be replaced: an agent that hears it ends its ranks now.

        One that ends anyhow is heard to its end, which tells sooner than its lease that nothing runs there; unanswered,
        it has no more time than that lease.
        """
        if self.leases.given and (node.ends or node.name in self.ending | self.taken):
            node.given_up = True
            return
        if self.leases.given:
            self.order(node, do="parted")
        node.disconnect()

    def order(self, node: Node, **order: Any) -> None:
        """Send an order, if the node is there."""
        if node.channel is not None:
            with contextlib.suppress(ConnectionError):
                node.channel.send_message(epoch=self._job.state.epoch, **order)


def _barred(node: Node) -> bool:
    """Whether a cluster that chooses among machines is not to choose this one."""
    return node.state is NodeState.EVICTED or node.record.cordoned or node.channel is not None
