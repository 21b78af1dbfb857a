"""The driver's table of nodes."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from megascale.resilience.driver.job_state import JobState
from megascale.resilience.driver.journal import NodeRow
from megascale.resilience.protocol.agent_channel import AgentChannel
from megascale.resilience.protocol.agent_messages import Diagnosed
from megascale.resilience.protocol.heartbeat import Heartbeat
from megascale.resilience.rules.view import HISTORY, RankView


class NodeState(StrEnum):
    """What a node is to the driver."""

    JOINING = "joining"  # its agent was started and has not come yet
    UP = "up"  # its agent answers
    LOST = "lost"  # silent for longer than the window
    EVICTED = "evicted"  # not used again until it is uncordoned


@dataclass
class Node:
    """One node. Times are the driver's monotonic clock.

    Attributes:
        cordoned: keeps what it runs but gets nothing new.
        deadline: when a joining agent must have come.
        boot: names one life of its agent.
        attempt: of which it holds processes.
        acknowledged: number of the last stop order it has carried out.
        port: free for the next attempt's store when it acknowledged.
        why: of the state, in words.
        report: result of its last self-checks, when all nodes were ordered to run them.
        checking: number of the order to run them that it has as a spare, 0 for none.
        held: the job as its trainers were started, and whether they have done a step (adoption.py); None: none run.
        tested: when it last passed them, seconds since 1970; 0: not yet.
    """

    name: str
    address: str = ""
    state: NodeState = NodeState.JOINING
    cordoned: bool = False
    channel: AgentChannel | None = None
    last_seen: float = 0.0
    deadline: float = 0.0
    boot: str = ""
    attempt: int = 0
    acknowledged: int = 0
    port: int = 0
    why: str = ""
    since: float = field(default_factory=time.time)
    facts: dict[str, Any] = field(default_factory=dict)
    heartbeat: Heartbeat | None = None
    history: deque[tuple[float, Heartbeat]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    report: Diagnosed | None = None
    checking: int = 0
    tested: float = 0.0
    held: tuple[JobState, bool] | None = None

    @property
    def usable(self) -> bool:
        """Whether a new attempt may use it now."""
        return self.state is NodeState.UP and self.channel is not None and not self.cordoned

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

    def row(self) -> NodeRow:
        """For the journal."""
        facts = self.facts | {"cordoned": self.cordoned}
        return NodeRow(self.name, self.address, self.state.value, self.why, self.since, facts)

    @classmethod
    def from_row(cls, row: NodeRow) -> Node:
        """As the journal remembers it; whether it is there now will show."""
        facts = dict(row.facts)
        cordoned = bool(facts.pop("cordoned", False))
        node = cls(row.name, row.address, NodeState(row.state), cordoned, why=row.why, since=row.since, facts=facts)
        if node.state is NodeState.UP:
            node.state = NodeState.JOINING
        return node
