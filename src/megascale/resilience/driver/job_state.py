"""The job's state machine: which phases there are, which follow which, and what must be remembered over a restart."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from megascale.resilience.driver.journal_migration import current_fields


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
# What may follow. STOPPING leads to its goal; every start goes through it, so that two attempts never overlap.
FOLLOWS: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.STOPPING, Phase.PAUSED, Phase.FAILED, Phase.INTERRUPTED}),
    Phase.STOPPING: frozenset({Phase.STOPPING, Phase.STARTING, Phase.WAITING, Phase.DIAGNOSING, Phase.PAUSED, *ENDED}),
    Phase.STARTING: frozenset({Phase.RUNNING, Phase.STOPPING, Phase.DONE}),
    Phase.RUNNING: frozenset({Phase.STOPPING, Phase.DONE}),
    Phase.DIAGNOSING: frozenset({Phase.WAITING, Phase.STOPPING}),
    Phase.PAUSED: frozenset({Phase.WAITING, Phase.FAILED, Phase.INTERRUPTED}),
    Phase.DONE: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.INTERRUPTED: frozenset(),
}


@dataclass(frozen=True)
class JobState:
    """All that a driver must know of a job to go on with it after a restart; one row of the journal.

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
    why: str = ""

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

    def move(self, phase: Phase, **changes: Any) -> JobState:
        """The job in another phase; ValueError for a step that the machine does not have."""
        if phase not in FOLLOWS[self.phase]:
            raise ValueError(f"job {self.name}: {self.phase} cannot become {phase}")
        return replace(self, phase=phase, **changes)

    def to_json(self) -> str:
        """For the journal."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobState:
        """As `to_json` wrote it; ValueError or TypeError for anything else."""
        record = current_fields(json.loads(text))
        record["phase"], record["goal"] = Phase(record["phase"]), Phase(record["goal"])
        for name in ("placement", "master", "fresh"):
            record[name] = tuple(record[name])
        record["ends"] = tuple(record.get("ends", ()))  # an older version does not know it
        known = {each.name for each in fields(cls)}  # a newer version may know more
        return cls(**{name: value for name, value in record.items() if name in known})
