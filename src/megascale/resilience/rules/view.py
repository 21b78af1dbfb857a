"""The data types of the rules: the view of a job at one moment, and the verdicts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from megascale.core.grid import Grid
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker

HISTORY_LENGTH = 60  # stored heartbeats of a node
PAUSE_MEMBERS = 8  # members that a rule judges between two pauses, which takes about 2 ms
PAUSE_SECONDS = 0.005  # length of a pause

Action = Literal["none", "alert", "diagnose", "recover", "evict", "stop"]

# The driver acts on the most severe of several verdicts.
SEVERITY: dict[Action, int] = {"none": 0, "alert": 1, "recover": 2, "diagnose": 3, "evict": 4, "stop": 5}


@dataclass(frozen=True)
class Verdict:
    """A conclusion of a rule.

    Attributes:
        kind: an event name (core/events.py).
        nodes, ranks: nodes and ranks to blame, without those that only suffered.
        action: none (record the verdict), alert (a person should look), diagnose (stop and run self-checks), recover
            (start the processes again, by the recovery action that the escalation policy chooses), evict (take the
            nodes out and start again), stop (end the job).
        evidence: sentences for people, one per observation.
        needs_person: only a person can remove the fault, such as an exception in the user's code.
        cause: code of the fault within `kind`; equal codes mean a repetition.
        messages: messages of the processes at fault without addresses and numbers; equal messages mean a repetition.
    """

    kind: str
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    action: Action = "none"
    evidence: tuple[str, ...] = ()
    needs_person: bool = False
    cause: str = ""
    messages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.action not in SEVERITY:
            raise ValueError(f"verdict {self.kind} has action={self.action!r}; use one of {', '.join(SEVERITY)}")


class Incident(NamedTuple):
    """A verdict against a node. time: when it was given, on the driver's monotonic clock; kind: the event name."""

    time: float
    node: str
    kind: str


@dataclass(frozen=True)
class Metric:
    """The metrics of a step: loss, gradient norm before clipping, duration in seconds."""

    step: int
    loss: float
    grad_norm: float
    seconds: float


@dataclass(frozen=True)
class SlowFinding:
    """A rank that is slow according to recorded spans (observe/analysis/stragglers.py).

    Attributes:
        rank: the rank whose own work or link is slow.
        slower: fraction by which it takes longer than comparable ranks; for a link, fraction of a step.
        cause: such as "GPU", "host: loader" or "link".
        confidence: 1 - expected number of healthy ranks of this job with such a value.
        evidence: sentences.
    """

    rank: int
    slower: float
    cause: str
    confidence: float
    evidence: tuple[str, ...] = ()


@dataclass
class NodeView:
    """One node of the running attempt.

    Attributes:
        ranks: the ranks that were placed on the node, ascending; empty for a spare.
        last_seen: when its last message came, but not before the begin of the attempt; on the driver's monotonic clock.
        heartbeat: the newest heartbeat of this attempt, None before the first one.
        history: (time received, heartbeat) of the last heartbeats of this attempt, oldest first.
    """

    node: str
    ranks: tuple[int, ...] = ()
    last_seen: float = 0.0
    heartbeat: Heartbeat | None = None
    history: deque[tuple[float, Heartbeat]] = field(default_factory=lambda: deque(maxlen=HISTORY_LENGTH))
    connected: bool = True


class PacedMembers(list[NodeView]):
    """Members of a view whose iteration pauses at intervals.

    A thread that computes without pauses keeps Python's interpreter lock for 5 ms whenever another thread waits for it.
    An event loop that reads 1,500 messages/s would fall seconds behind.
    """

    def __iter__(self) -> Iterator[NodeView]:
        for count, member in enumerate(super().__iter__(), start=1):
            if count % PAUSE_MEMBERS == 0:
                time.sleep(PAUSE_SECONDS)
            yield member


@dataclass
class View:
    """A job as the driver sees it. All times are seconds on the driver's monotonic clock.

    Attributes:
        job, attempt: the job's name, and the number of its start.
        phase: phase of the job (driver/state/job_state.py), such as "starting" or "running".
        started: when this attempt's processes were started.
        members: the nodes that hold the job's ranks, in rank order, then the spares.
        grid: the layout of the ranks.
        window: seconds without a heartbeat after which a node is lost.
        interval: seconds between heartbeats.
        first_step: limit in seconds for start, loading and the first step.
        usual_durations: longest usual seconds for which a trainer stays in a phase ("train", "save", ..., "first step")
            without a change (diagnosis/observations.py), without phases that did not occur.
        incidents: verdicts against nodes, over all attempts, oldest first.
        past: (time, verdict) of the verdicts that ended earlier attempts, oldest first.
        metrics: metrics of the last steps, oldest first.
        slow_findings: slow machines by recorded spans of this attempt; empty if the driver does not see them.
        slow_action, slow_least: the action for a machine that is slower by the fraction `slow_least` or more.
        replay_action: the action for a rank that computed other bits than another replica.
        grace_period: multiple of a phase's longest usual duration that it may last without a change.
        is_foreign: the ranks run another trainer's command.
        saved_step: step of the newest complete checkpoint of another trainer; 0 if unknown.
    """

    job: str
    attempt: int
    phase: str
    time: float
    started: float
    members: list[NodeView]
    grid: Grid
    window: float
    interval: float
    first_step: float
    usual_durations: dict[str, float] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    past: list[tuple[float, Verdict]] = field(default_factory=list)
    metrics: list[Metric] = field(default_factory=list)
    slow_findings: tuple[SlowFinding, ...] = ()
    slow_action: Action = "alert"
    slow_least: float = 0.1
    replay_action: Action = "evict"
    grace_period: float = 5.0
    is_foreign: bool = False
    saved_step: int = 0
    _workers: list[tuple[NodeView, Worker]] | None = field(default=None, init=False, repr=False, compare=False)

    def snapshot(self) -> View:
        """Return a copy whose histories do not grow while another thread reads them."""
        members = PacedMembers()
        for member in self.members:
            members.append(replace(member, history=deque(member.history, HISTORY_LENGTH)))
        return replace(self, members=members)

    def heartbeats(self) -> list[tuple[NodeView, Heartbeat]]:
        """Return the newest heartbeat of each member that has sent one."""
        return [(member, member.heartbeat) for member in self.members if member.heartbeat is not None]

    def workers(self) -> list[tuple[NodeView, Worker]]:
        """Return every worker of the newest heartbeats with its node, by rank. Computed once per view."""
        if self._workers is None:
            workers = []
            for member, heartbeat in self.heartbeats():
                if heartbeat.attempt == self.attempt:
                    workers += [(member, worker) for worker in heartbeat.workers]
            workers.sort(key=lambda pair: pair[1].rank)
            self._workers = workers
        return self._workers
