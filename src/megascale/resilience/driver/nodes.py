"""The driver's nodes: their present state, and the starts, requests, orders and leases of their agents."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from megascale.config import ResilienceConfig
from megascale.core.events import Event
from megascale.core.preflight import max_concurrent_imports
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.driver.process import LoopTasks
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobState, NodeEvent, NodeRecord, NodeState
from megascale.resilience.protocol.agent_channel import AgentChannel
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker
from megascale.resilience.rules.view import HISTORY_LENGTH, NodeView

log = logging.getLogger("megascale.driver")

# Number of agents that start at the same time, if the cluster sets no limit. Each agent imports everything for its
# trainers, so many agents on few cores would all connect late.
MAX_STARTING_AGENTS = max_concurrent_imports(os.cpu_count() or 1)
JOIN_SECONDS = 60.0  # seconds within which an agent that was started must connect
KILL_SECONDS = 1.0  # seconds that an agent may take to end its ranks once its lease is over


class SelfCheck(StrEnum):
    """The progress of a node's self-checks."""

    NOT_RUN = "not run"
    RUNNING = "under way"
    PASSED = "passed"


@dataclass
class ClusterStatus:
    """The cluster's last report about all nodes.

    Attributes:
        drained: reasons by the names of nodes that are to get no new ranks.
        ending: names of the nodes whose agents the cluster ends.
    """

    drained: Mapping[str, str] = field(default_factory=dict)
    ending: frozenset[str] = frozenset()


@dataclass
class Node:
    """One node. Times are on the driver's monotonic clock.

    Attributes:
        record: the part of the node's state that the journal stores, from which follows what the node may be used for.
        cluster_status: the cluster's last report, shared by all nodes.
        channel: the connection of its agent, None if there is none.
        last_seen: when its last message came.
        deadline: when a joining agent must have connected.
        joined: when its agent connected. Orders that were sent earlier did not reach this agent.
        boot: random name of its agent's process. A changed name shows that the agent was restarted.
        attempt: the attempt to which its processes belong.
        acknowledged_order: number of the last stop order that it has carried out.
        stop_problem: number of the last stop order that it could not carry out, and the reason.
        port: port that was free on the node when it acknowledged the order. If the node gets rank 0, the next attempt's
            store listens on this port.
        heartbeat: the newest heartbeat of the attempt.
        history: (time received, heartbeat) of the last heartbeats, oldest first.
    """

    name: str
    record: NodeRecord = field(default_factory=NodeRecord)
    cluster_status: ClusterStatus = field(default_factory=ClusterStatus)
    channel: AgentChannel | None = None
    last_seen: float = 0.0
    deadline: float = 0.0
    joined: float = 0.0
    boot: str = ""
    attempt: int = 0
    acknowledged_order: int = 0
    stop_problem: tuple[int, str] = (0, "")
    port: int = 0
    heartbeat: Heartbeat | None = None
    history: deque[tuple[float, Heartbeat]] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))
    self_check: SelfCheck = SelfCheck.NOT_RUN

    @property
    def state(self) -> NodeState:
        return self.record.state

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The ranks of its newest heartbeat."""
        return self.heartbeat.workers if self.heartbeat is not None else ()

    @property
    def drain_reason(self) -> str:
        """Why its cluster wants it to get no new ranks, "" if it may get some."""
        return self.cluster_status.drained.get(self.name, "")

    @property
    def is_staying(self) -> bool:
        """True if its agent is present and not about to end."""
        return self.state is NodeState.UP and self.name not in self.cluster_status.ending

    @property
    def may_keep_ranks(self) -> bool:
        """True if it may keep its ranks in a new attempt for which no other node is free."""
        return self.is_staying and self.channel is not None and not self.record.cordoned

    @property
    def is_usable(self) -> bool:
        """True if a new attempt may give it ranks."""
        return self.may_keep_ranks and not self.drain_reason

    @property
    def is_prepared(self) -> bool:
        """True if its processes for the next attempt are started and wait for that attempt."""
        return self.heartbeat is not None and self.heartbeat.prepared

    def has_ended_groups(self, number: int) -> bool:
        """Return True if its prepared processes have ended the preparation of groups with this number."""
        return self.heartbeat is not None and self.heartbeat.groups == number

    def forget_attempt(self) -> None:
        """Drop the heartbeats of an older attempt, so that the rules do not judge them again."""
        self.heartbeat = None
        self.history.clear()

    def add_heartbeat(self, heartbeat: Heartbeat, current_time: float) -> None:
        """Store a heartbeat. Equal hardware and versions share the objects of the previous one, which saves memory."""
        previous = self.heartbeat
        if previous is not None and (previous.hardware, previous.versions) == (heartbeat.hardware, heartbeat.versions):
            heartbeat = msgspec.structs.replace(heartbeat, hardware=previous.hardware, versions=previous.versions)
        self.last_seen = current_time
        self.heartbeat = heartbeat
        self.attempt = heartbeat.attempt
        self.history.append((current_time, heartbeat))

    def view(self, ranks: tuple[int, ...]) -> NodeView:
        """Return the node as the rules see it."""
        return NodeView(
            self.name,
            ranks,
            last_seen=self.last_seen,
            heartbeat=self.heartbeat,
            history=self.history,
            connected=self.channel is not None,
        )

    def disconnect(self) -> None:
        """Close the connection of its agent."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class AgentLeases:
    """Tracks unreachable nodes that may still run ranks. These ranks start elsewhere only once they must have ended.

    The agents' side is agent/rank_lease.py. An agent whose heartbeats are not answered ends its ranks after
    `resilience.agent_lease` seconds. The agent counts from the sending of a heartbeat, and the driver from its arrival,
    so that the agent's lease ends first.

    Attributes:
        end_times: when the lease of each node is over, by name, on the monotonic clock.
        holders: names of the nodes that were given ranks and have not reported the end of these ranks.
    """

    def __init__(self, limits: ResilienceConfig, cluster: Cluster) -> None:
        self._lease_seconds = limits.agent_lease
        self._orphan_seconds = limits.orphan
        self._cluster = cluster
        self.end_times: dict[str, float] = {}
        self.holders: set[str] = set()

    @property
    def are_required(self) -> bool:
        """True if agents need answers to their heartbeats."""
        return self._lease_seconds is not None

    def renew(self, name: str) -> None:
        """Renew the lease of a node, whose heartbeat is being answered."""
        if self._lease_seconds is not None:
            self.end_times[name] = time.monotonic() + self._lease_seconds + KILL_SECONDS

    def admit(self, name: str, *, is_same_agent: bool, holds_ranks: bool) -> None:
        """Renew the lease of a node that connects. An agent that was started anew holds no ranks of the old agent."""
        if holds_ranks:
            self.holders.add(name)
        elif not is_same_agent:
            self.holders.discard(name)
        self.renew(name)

    def inherit(self, node: Node, job: JobState, current_time: float) -> None:
        """Take over a node of an earlier driver: its ranks may run for `resilience.orphan` seconds without a driver."""
        if self._lease_seconds is None or not job.attempt or not job.placement:
            return
        remaining = self._orphan_seconds
        # An excluded node has had no answer to its heartbeats since its exclusion, so its time began then.
        if node.state.is_excluded and node.record.changed_at:
            remaining -= max(0.0, time.time() - node.record.changed_at)
        self.end_times[node.name] = current_time + max(remaining, 0.0) + KILL_SECONDS
        if remaining > 0:
            self.holders.add(node.name)
        else:
            self.holders.discard(node.name)

    def may_run_ranks(self, node: Node, current_time: float) -> bool:
        """Return True if ranks may still run on a node that cannot report their end.

        A node whose lease is over, or whose agent has ended by the cluster's report, is no holder from then on.
        """
        is_reachable = node.state.is_present and node.channel is not None
        if self._lease_seconds is None or node.name not in self.holders or is_reachable:
            return False
        if current_time >= self.end_times.get(node.name, 0.0) or self._cluster.has_stopped(node.name):
            self.holders.discard(node.name)
        return node.name in self.holders


class Nodes:
    """All nodes of the job, by name.

    Args:
        job: the job, whose state has the records of the nodes.
        tasks: runs lengthy work.
        limits: the configuration section [resilience].
        record_event: writes an event into the audit log.

    Attributes:
        pending_requests: number of requested nodes that the cluster has not provided yet.
        last_request_time: when all missing nodes were last requested, on the monotonic clock.
        iteration_time: begin of the driver loop's present iteration, on the monotonic clock. The driver has read all
            messages that agents sent before this time.
    """

    def __init__(
        self, job: Job, cluster: Cluster, tasks: LoopTasks, limits: ResilienceConfig, record_event: RecordEvent
    ) -> None:
        self._job = job
        self.cluster = cluster
        self._tasks = tasks
        self._limits = limits
        self._record_event = record_event
        self.cluster_status = ClusterStatus()
        self._nodes = {name: Node(name, record, self.cluster_status) for name, record in job.state.nodes.items()}
        self.leases = AgentLeases(limits, cluster)
        self.pending_requests = 0
        self.last_request_time = 0.0
        self.iteration_time = time.monotonic()
        self._joining_count = 0  # agents that were started and have not connected

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def get(self, name: str) -> Node | None:
        """Return the node of a name, None if it is unknown."""
        return self._nodes.get(name)

    def names(self) -> list[str]:
        return sorted(self._nodes)

    def all(self) -> list[Node]:
        """Return every node ever known."""
        return list(self._nodes.values())

    def list_spares(self) -> list[Node]:
        """Return the nodes without ranks that may get some."""
        holders = set(self._job.state.placement)
        return [node for node in self._nodes.values() if node.is_usable and node.name not in holders]

    def change(self, name: str, event: NodeEvent, **changes: Any) -> Node:
        """Apply an event of a node (state/job_state.py) and return the node."""
        node = self._nodes.setdefault(name, Node(name, cluster_status=self.cluster_status))
        if self._job.apply_node(event, name, **changes):
            node.record = self._job.state.nodes[name]
        return node

    def ensure_known(self, name: str) -> Node:
        """Return the node of a name; an unknown node is awaited from now on."""
        if name not in self._nodes:
            self.change(name, NodeEvent.LISTED)
        return self._nodes[name]

    def is_reachable(self, node: Node) -> bool:
        """Return True if a node is connected and not about to end."""
        return node.state is NodeState.UP and node.channel is not None and node.name not in self.cluster.ending

    def refresh_cluster_status(self) -> None:
        """Read the cluster's report about all nodes."""
        self.cluster_status.drained = self.cluster.drained
        self.cluster_status.ending = self.cluster.ending

    # agents ---------------------------------------------------------------------------------------------------------

    def start_missing_agents(self, current_time: float) -> None:
        """Start agents until as many run as the job and its spares need, at the driver's start."""
        for node in self.all():
            node.last_seen = current_time
            node.deadline = current_time + self._limits.window
            self.leases.inherit(node, self._job.state, current_time)
            if node.state.is_present:  # That is its state under the last driver. It may have ended since.
                self.change(node.name, NodeEvent.AWAITED)
        missing_count = self._limits.nodes + self._limits.spares
        for info in self.cluster.nodes():
            node = self.ensure_known(info.name)
            if node.state is NodeState.EVICTED or missing_count <= 0:
                continue
            if info.has_agent:
                missing_count -= 1
                # The agent learns the address of this driver late, and does not count as silent until then.
                node.last_seen = current_time + self.cluster.notice_seconds
                if node.state is not NodeState.JOINING:
                    self.change(info.name, NodeEvent.AWAITED, address=node.record.address or info.address)
                node.deadline = current_time + JOIN_SECONDS
            elif info.can_start_agent:
                missing_count -= 1
                self.start_in_background(node, "started with the driver")
        for _ in range(missing_count):
            self.request_node()
        self.last_request_time = current_time

    def start_in_background(self, node: Node, reason: str) -> None:
        """Start a node's agent, for the first time or again, in the background."""
        self.abandon(node)
        self.change(node.name, NodeEvent.AWAITED, reason=reason)
        node.deadline = float("inf")  # until its turn to start
        self._tasks.spawn(self.start_agent(node))

    async def start_agent(self, node: Node) -> None:
        """Start a node's agent once few enough others start, and wait until it has connected."""
        async with self._wait_for_turn():
            is_started = False
            try:
                is_started = await self.cluster.start_agent(node.name)
            except Exception:  # Otherwise a node whose start failed would be awaited forever.
                log.exception("the agent of node %s cannot be started", node.name)
            # After a failed start the deadline is over at once. A later start of the node that waits for its turn sets
            # it again.
            node.deadline = 0.0
            if is_started:
                node.deadline = time.monotonic() + JOIN_SECONDS
            await self._wait_until_joined(node)

    @contextlib.asynccontextmanager
    async def _wait_for_turn(self) -> AsyncIterator[None]:
        """Wait until few enough agents start at the same time; the block counts as one of them."""
        limit = self.cluster.start_limit or MAX_STARTING_AGENTS
        while self._joining_count >= limit:
            await asyncio.sleep(0.05)
        self._joining_count += 1
        try:
            yield
        finally:
            self._joining_count -= 1

    async def _wait_until_joined(self, node: Node) -> None:
        """Wait until the agent has connected, its deadline is over, or a later start of the node replaces this one."""
        deadline = node.deadline
        while node.state is NodeState.JOINING and node.deadline == deadline and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def request_node(self) -> None:
        """Request a new node from the cluster, in the background."""
        self.pending_requests += 1
        self._tasks.spawn(self.wait_for_new_node())

    async def wait_for_new_node(self) -> None:
        """Request a node, and wait until the cluster has provided it and its agent has connected."""
        is_counted = True  # whether `pending_requests` still counts this request
        try:
            async with self._wait_for_turn():
                self.cluster.exclude_nodes(frozenset(node.name for node in self.all() if _is_barred(node)))
                name = await self.cluster.request()
                self.pending_requests -= 1
                is_counted = False
                if name is None:
                    return
                node = self.ensure_known(name)
                if not node.state.is_present:
                    self.change(name, NodeEvent.AWAITED, reason="requested")
                    node.deadline = time.monotonic() + JOIN_SECONDS
                await self._wait_until_joined(node)
        finally:
            if is_counted:
                self.pending_requests -= 1

    def is_any_joining(self, nodes: Iterable[Node]) -> bool:
        """Return True if an agent of these nodes was started and has not connected yet."""
        return any(node.state is NodeState.JOINING for node in nodes)

    def mark_lost(self, node: Node, reason: str) -> None:
        """Mark a node as lost, and record the event."""
        self.mark_gone(node, reason)
        self._record_event(Event.NODE_LOST, nodes=(node.name,), evidence=(reason,))

    def mark_gone(self, node: Node, reason: str) -> None:
        """Mark a node as lost without an event."""
        self.abandon(node)
        self.change(node.name, NodeEvent.DEPARTED, reason=reason)

    def take_out(self, node: Node, *, evict: bool, reason: str) -> None:
        """End all processes of the job on a node. With `evict` the node is not used again."""
        self.abandon(node)
        if evict:
            self.change(node.name, NodeEvent.EVICTED, reason=reason)
            self._record_event(Event.NODE_EVICTED, nodes=(node.name,), evidence=(reason,))
            self.cluster.block(node.name, reason)
        elif node.state is not NodeState.LOST:
            self.change(node.name, NodeEvent.DEPARTED, reason=reason)
        self._tasks.spawn(self.cluster.fence(node.name))

    def answer_heartbeat(self, node: Node, heartbeat: Heartbeat) -> None:
        """Answer a heartbeat, so that the ranks of the node may run on."""
        if heartbeat.leaving and node.state is NodeState.UP:
            self.change(node.name, NodeEvent.ENDING)
        if heartbeat.is_finished:
            self.leases.holders.discard(node.name)
            self.cluster.record_agent_end(node.name)
        # Answers would let the ranks of an abandoned agent run forever, so it gets none before it has finished.
        if self.leases.are_required and (heartbeat.is_finished or node.state.is_present):
            self.leases.renew(node.name)
            self.order(node, do="heard", sequence=heartbeat.sequence)

    def list_unreachable_holders(self, current_time: float) -> list[Node]:
        """Return the nodes that cannot be reached and may still run ranks."""
        return [node for node in self.all() if self.leases.may_run_ranks(node, current_time)]

    def abandon(self, node: Node) -> None:
        """Close the connection of a node that may be replaced.

        With leases, its agent first gets the order to end its ranks. An agent that is ending anyway keeps its
        connection, because its report that the ranks have ended may come before the end of its lease. Its heartbeats
        are not answered, so its ranks cannot outlive the lease. Callers change the node's state after this call.
        """
        if self.leases.are_required:
            is_ending = node.state is NodeState.ENDING or node.name in self.cluster.ending | self.cluster.removed_nodes
            # An earlier call has kept this connection.
            was_abandoned = node.state is NodeState.LOST and node.channel is not None
            if is_ending or was_abandoned:
                return
            self.order(node, do="parted")
        node.disconnect()

    def order(self, node: Node, **order: Any) -> None:
        """Send an order to a node if it is connected."""
        if node.channel is not None:
            with contextlib.suppress(ConnectionError):
                node.channel.send_message(epoch=self._job.state.epoch, **order)


def _is_barred(node: Node) -> bool:
    """Return True if a cluster that chooses among machines must not choose this node."""
    return node.state is NodeState.EVICTED or node.record.cordoned or node.channel is not None
