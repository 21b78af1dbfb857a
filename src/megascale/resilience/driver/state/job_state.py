"""The state of a job: all that a driver needs to continue the job after a restart, as plain serialisable data.

`transitions.py` defines the events that change the state; `journal.py` stores it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """The phase of a job."""

    WAITING = "waiting"  # for enough nodes
    STOPPING = "stopping"  # every node ends its processes and acknowledges that
    STARTING = "starting"  # processes are started; no step yet
    RUNNING = "running"  # a step of this attempt was seen
    DEGRADED = "degraded"  # as RUNNING, without all replicas (resilience.continue_replicas)
    DIAGNOSING = "diagnosing"  # training is stopped, nodes run their self-checks
    PAUSED = "paused"  # by a person
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # by a person; the next launch continues


ENDED = frozenset({Phase.DONE, Phase.FAILED, Phase.INTERRUPTED})


class NodeState(StrEnum):
    """The state of a node. All that the driver may do with a node derives from it."""

    JOINING = "joining"  # its agent was started and is not connected yet
    UP = "up"  # its agent is connected, or was within the window
    ENDING = "ending"  # its agent announced its end: it ends its ranks and starts none
    LOST = "lost"  # it was silent for longer than the window, or its agent ended
    EVICTED = "evicted"  # not used again until it is uncordoned

    @property
    def is_present(self) -> bool:
        """True while an agent is expected to send heartbeats."""
        return self in (NodeState.UP, NodeState.ENDING)

    @property
    def is_excluded(self) -> bool:
        """True once the node was taken out of the job."""
        return self in (NodeState.LOST, NodeState.EVICTED)


@dataclass(frozen=True)
class NodeRecord:
    """The remembered state of a node.

    Attributes:
        cordoned: it keeps its ranks but gets no new ones.
        reason: of the state, for people.
        changed_at: time of the last change, in seconds since 1970.
        facts: about its machine, as its agent reported them.
    """

    state: NodeState = NodeState.JOINING
    address: str = ""
    cordoned: bool = False
    reason: str = ""
    changed_at: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobState:
    """The state of a job.

    Attributes:
        name: the run's name.
        attempt: number of the newest start, from 1; 0 before the first.
        placement: the nodes that hold ranks, in rank order.
        ranks_per_node: ranks on each of them.
        data: data-parallel size; smaller than configured after shrinking.
        master: address and port where rank 0 of this attempt serves the store.
        goal: the phase that follows STOPPING.
        save: STOPPING lets the trainers save first.
        distrust: copies of the state in memory are dropped when trainers stop, since they may hold a flipped bit.
        fresh: nodes whose fork server is started anew with the next attempt.
        updating: new settings are in force that have not produced a step yet; without a step they are undone.
        step: the last step seen.
        best: the furthest step seen at the last recovery.
        starts_without_progress: number of consecutive starts without a new step.
        ends: the step in which each start since the last new step ended, 0: outside of a step.
        exit_code: of the job, once it has ended.
        reason: the last decision, for people.
        epoch: number of the current driver; the highest one is valid.
        recovery: (node, action) of the recovery under way, until a step is seen; node "": no node is to blame.
        evicting: nodes that are evicted once the trainers have saved.
        unexplained: the last recovery blamed no node so far.
        joining: STOPPING lets the trainers leave after their step, since other nodes join them.
        missing_since: since when replicas have been missing, in seconds since 1970; 0: none, or they are not awaited.
        nodes: every node ever known, by name.
    """

    name: str
    phase: Phase = Phase.WAITING
    attempt: int = 0
    placement: tuple[str, ...] = ()
    ranks_per_node: int = 1
    data: int = 1
    master: tuple[str, int] = ("", 0)
    goal: Phase = Phase.STARTING
    save: bool = False
    fresh: tuple[str, ...] = ()
    distrust: bool = False
    updating: bool = False
    step: int = 0
    best: int = 0
    starts_without_progress: int = 0
    ends: tuple[int, ...] = ()
    exit_code: int = 0
    reason: str = ""
    epoch: int = 0
    recovery: tuple[tuple[str, str], ...] = ()
    evicting: tuple[str, ...] = ()
    unexplained: bool = False
    joining: bool = False
    missing_since: float = 0.0
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.placement) * self.ranks_per_node

    def ranks(self, node: str) -> tuple[int, ...]:
        """Return the ranks placed on `node`, empty if there are none."""
        if node not in self.placement:
            return ()
        first = self.placement.index(node) * self.ranks_per_node
        return tuple(range(first, first + self.ranks_per_node))

    def to_record(self) -> dict[str, Any]:
        """Return all fields but the nodes, which have rows of their own, as JSON values."""
        names = [each.name for each in fields(self) if each.name != "nodes"]
        return {name: to_plain(getattr(self, name)) for name in names}

    def to_json(self) -> str:
        """Return all fields but the nodes as JSON text."""
        return json.dumps(self.to_record())

    @classmethod
    def from_json(cls, text: str) -> JobState:
        """Parse the text of `to_json`, of a newer version too. Raise ValueError, TypeError or KeyError for others."""
        record = json.loads(text)
        if not isinstance(record, dict):
            raise TypeError("the state of a job is not a table")
        names = {each.name for each in fields(cls)} - {"nodes"}
        return cls(**{name: from_plain(name, value) for name, value in record.items() if name in names})

    def with_node(self, name: str, record: NodeRecord) -> JobState:
        """Return the job with another record of one node."""
        return replace(self, nodes={**self.nodes, name: record})


def to_plain(value: Any) -> Any:
    """Return the value of a field as JSON has it."""
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(name: str, value: Any) -> Any:
    """Return the value of field `name` from its JSON value. Raise ValueError or TypeError for an invalid one."""
    if name in ("phase", "goal"):
        return Phase(value)
    if name == "recovery":
        return tuple((str(node), str(action)) for node, action in value)
    if name in ("placement", "master", "fresh", "ends", "evicting"):
        return tuple(value)
    return value
