"""The state of a job: all that a driver must know to go on with it after a restart, as plain serialisable data.

What may change it, and how, stands in transitions.py; what writes it down, in journal.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """Where a job stands."""

    WAITING = "waiting"  # for enough nodes
    STOPPING = "stopping"  # every node ends what it runs and says so
    STARTING = "starting"  # processes are started; no step yet
    RUNNING = "running"  # a step of this attempt has been seen
    DIAGNOSING = "diagnosing"  # training is stopped, nodes test themselves
    PAUSED = "paused"  # by a person
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # by a person; launching again goes on


ENDED = frozenset({Phase.DONE, Phase.FAILED, Phase.INTERRUPTED})


class NodeState(StrEnum):
    """What a node is to the driver."""

    JOINING = "joining"  # its agent was started and has not come yet
    UP = "up"  # its agent answers
    LOST = "lost"  # silent for longer than the window
    EVICTED = "evicted"  # not used again until it is uncordoned


@dataclass(frozen=True)
class NodeRecord:
    """What is remembered of a node.

    Attributes:
        cordoned: keeps what it runs but gets nothing new.
        why: of the state, in words; since: seconds since 1970.
        facts: of its machine, as its agent said.
    """

    state: NodeState = NodeState.JOINING
    address: str = ""
    cordoned: bool = False
    why: str = ""
    changed_at: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobState:
    """All that a driver must know of a job to go on with it after a restart.

    Attributes:
        name: the run's name.
        phase: where it stands.
        attempt: number of the newest start, from 1; 0: none yet.
        placement: nodes that hold ranks, in rank order.
        ranks_per_node: ranks on each of them.
        data: data-parallel size; smaller than asked for after shrinking.
        master: address and port where rank 0 of this attempt serves the store.
        goal: what STOPPING leads to.
        save: whether STOPPING lets the trainers save first.
        distrust: copies of the state in memory are dropped when trainers stop: they may hold a flipped bit.
        fresh: nodes whose fork server is started anew with the next attempt.
        updating: new settings are in force that have not brought a step yet; if none comes they are undone.
        step: the last step seen.
        best: the furthest step seen at the last recovery.
        starts_without_progress: starts in a row that brought no new step.
        ends: the step in which each of the starts since the last new step ended, 0: not within a step.
        exit_code: of the job, once ended.
        why: the last decision in words.
        epoch: number of the current driver; the highest one counts.
        recovery: (node, recovery action) of the recovery under way, until a step was seen; node "": none to blame.
        evicting: nodes that are taken out once the trainers have saved.
        unexplained: the last recovery blamed no node so far.
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
    fresh: tuple[str, ...] = field(default=())
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
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """Ranks in all."""
        return len(self.placement) * self.ranks_per_node

    def ranks(self, node: str) -> tuple[int, ...]:
        """Ranks placed on `node`, none if it holds none."""
        if node not in self.placement:
            return ()
        first = self.placement.index(node) * self.ranks_per_node
        return tuple(range(first, first + self.ranks_per_node))

    def fields(self) -> dict[str, Any]:
        """All but the nodes, which have rows of their own, as JSON has it."""
        record = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "nodes"}
        return {name: to_plain(value) for name, value in record.items()}

    def to_json(self) -> str:
        """All but the nodes, for agents and tests."""
        return json.dumps(self.fields())

    @classmethod
    def from_fields(cls, record: Any) -> JobState:
        """As `fields` gave it, from this version or another; ValueError, TypeError or KeyError for anything else."""
        if not isinstance(record, dict):
            raise TypeError("the state of a job is not a table")
        known = {each.name for each in fields(cls)} - {"nodes"}  # a newer version may know more
        return cls(**{name: from_plain(name, value) for name, value in record.items() if name in known})

    @classmethod
    def from_json(cls, text: str) -> JobState:
        """As `to_json` wrote it; ValueError, TypeError or KeyError for anything else."""
        return cls.from_fields(json.loads(text))

    def with_node(self, name: str, record: NodeRecord) -> JobState:
        """The job with what is remembered of one node."""
        return replace(self, nodes={**self.nodes, name: record})


def to_plain(value: Any) -> Any:
    """A field of the state as JSON has it."""
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, tuple):
        return [to_plain(part) for part in value]
    return value


def from_plain(name: str, value: Any) -> Any:
    """The field `name` of the state from what `to_plain` gave; ValueError or TypeError for anything else."""
    if name in ("phase", "goal"):
        return Phase(value)
    if name == "recovery":
        return tuple((str(node), str(action)) for node, action in value)
    return tuple(value) if name in ("placement", "master", "fresh", "ends", "evicting") else value
