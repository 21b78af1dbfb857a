"""Which nodes that nobody reaches may still run ranks: until they cannot, these ranks start nowhere else.

The other side is agent/rank_lease.py: agents whose heartbeats are not answered end their ranks after
`resilience.agent_lease` seconds, counted from before the driver starts counting.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from megascale.config import ResilienceConfig
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.driver.state.job_state import JobState, NodeRecord, NodeState

KILL = 1.0  # seconds that an agent may take to end its ranks once its lease is over


class Leased(Protocol):
    """What is known of a node (nodes.py)."""

    name: str
    record: NodeRecord
    channel: Any
    leased: float
    may_run: bool


class AgentLeases:
    """Args:
    limits: the lease, if there is one, and how long agents wait for another driver.
    cluster: may know that nothing runs on a node any more.
    """

    def __init__(self, limits: ResilienceConfig, cluster: Cluster) -> None:
        self._lease, self._orphan, self._cluster = limits.agent_lease, limits.orphan, cluster

    @property
    def given(self) -> bool:
        """Whether agents need answers."""
        return self._lease is not None

    def renew(self, node: Leased) -> None:
        """The node was heard now, and is answered."""
        if self._lease is not None:
            node.leased = time.monotonic() + self._lease + KILL

    def came(self, node: Leased, same_life: bool, held: bool) -> None:
        """Its agent has come: another life of it holds no ranks of the one before."""
        node.may_run = held or (node.may_run and same_life)
        self.renew(node)

    def took_over(self, node: Leased, job: JobState, now: float) -> None:
        """A driver before this one had the node: its ranks may run without one for a while."""
        if self._lease is None or not job.attempt or not job.placement:
            return
        left = self._orphan
        if node.record.state in (NodeState.LOST, NodeState.EVICTED) and node.record.since:
            left -= max(0.0, time.time() - node.record.since)
        node.leased, node.may_run = now + max(left, 0.0) + KILL, left > 0

    def held(self, node: Leased, now: float) -> bool:
        """Whether ranks may still run on a node that does not say that it has ended them."""
        if self._lease is None or not node.may_run or (node.record.state is NodeState.UP and node.channel is not None):
            return False
        if now >= node.leased or self._cluster.gone(node.name):
            node.may_run = False
        return node.may_run
