"""The state of a job, and the events that change it: all that a driver needs to continue the job after a restart.

The state is plain serialisable data; `journal.py` stores it. Two tables list the transitions of a job and of its nodes:
an event and a state lead to the state that follows. `apply_event` and `apply_node_event` are pure functions. They
return the next state, or raise `ImpossibleTransition` for a pair that a table lacks. Every start goes through STOPPING,
so that two attempts never overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal


class Phase(StrEnum):
    """The phase of a job."""

    WAITING = "waiting"  # for enough nodes
    STOPPING = "stopping"  # every node ends its processes and acknowledges that
    STARTING = "starting"  # processes are started; no step yet
    RUNNING = "running"  # this attempt has completed a step
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
    """The state of a node that the journal stores.

    Attributes:
        cordoned: it keeps its ranks in the present attempt, and gets none in later ones.
        reason: why the node is in this state, for people.
        changed_at: time of the last change, in seconds since 1970.
        facts: hardware and software of its machine, as its agent reported them.
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
        attempt: number of the newest start, from 1; 0 before the first start.
        placement: the nodes that hold ranks, in rank order.
        ranks_per_node: number of ranks on each node of the placement.
        data: data-parallel size, which is smaller than configured after shrinking.
        master: address and port where rank 0 of this attempt serves the store.
        goal: phase that follows STOPPING.
        save: whether STOPPING lets the trainers save first.
        distrust: whether copies of the model in memory are dropped when trainers stop, since a bit may be flipped.
        fresh: nodes whose fork server (the process from which trainers are forked) is started anew with the next
            attempt.
        updating: whether new settings are in force with which no step has completed yet. If the start fails before its
            first step, they are undone.
        step: furthest step that trainers have reached in any attempt.
        best: value of `step` when the last start ended. A start that does not exceed it made no progress.
        starts_without_progress: number of consecutive starts without a new step.
        ends: the step in which each start since the last new step ended, 0 for an end outside of a step.
        exit_code: of the job, once it has ended.
        reason: reason of the last decision, for people.
        epoch: number of the current driver; only the driver with the highest epoch may write.
        recovery: (node, action) pairs of the recovery under way, until a step; node "": no node is to blame.
        evicting: nodes that are evicted once the trainers have saved.
        unexplained: whether the last recovery has blamed no node so far.
        joining: whether STOPPING lets the trainers complete their step first, since other nodes join them.
        joins_at_once: whether the processes of joining nodes are prepared, so that no rank copies its state first.
        missing_since: when replicas began to be missing, in seconds since 1970; 0 if none is missing or awaited.
        nodes: records of every node ever known, by name.
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
    joins_at_once: bool = False
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
        names = [item.name for item in fields(self) if item.name != "nodes"]
        return {name: to_plain(getattr(self, name)) for name in names}

    def to_json(self) -> str:
        """Return all fields but the nodes as JSON text."""
        return json.dumps(self.to_record())

    @classmethod
    def from_json(cls, text: str) -> JobState:
        """Parse the text of `to_json`, without fields that only a newer version knows.

        Raise ValueError, TypeError or KeyError for other text.
        """
        record = json.loads(text)
        if not isinstance(record, dict):
            raise TypeError("the state of a job is not a table")
        names = {item.name for item in fields(cls)} - {"nodes"}
        return cls(**{name: from_plain(name, value) for name, value in record.items() if name in names})

    def with_node(self, name: str, record: NodeRecord) -> JobState:
        """Return the job with another record of one node."""
        return replace(self, nodes={**self.nodes, name: record})


def to_plain(value: Any) -> Any:
    """Return a field's value as JSON has it: enumerations as text, and tuples, also nested ones, as lists."""
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(name: str, value: Any) -> Any:
    """Return the value of a JobState's field from its JSON value. Raise ValueError or TypeError for an invalid one."""
    if name in ("phase", "goal"):
        return Phase(value)
    if name == "recovery":
        return tuple((str(node), str(action)) for node, action in value)
    if name in ("placement", "master", "fresh", "ends", "evicting"):
        return tuple(value)
    return value


# transitions ----------------------------------------------------------------------------------------------------------


class ImpossibleTransition(ValueError):
    """An event occurred in a state in which the table does not allow it."""


class JobEvent(StrEnum):
    """An event in the life of a job."""

    OPENED = "opened"  # a driver began a new epoch
    PLACED = "placed"  # every rank has a node: stop all processes, then start
    RESTARTED = "restarted"  # stop, then place and start again
    DIAGNOSED = "diagnosed"  # stop, then run the self-checks of all nodes
    PAUSED = "paused"  # stop, and wait for a person
    FAILED = "failed"  # stop; a person is needed
    INTERRUPTED = "interrupted"  # stop, as a person ordered
    STOPPED = "stopped"  # every node has stopped: enter the goal
    GAP = "gap"  # in STOPPING before a start, a node of the placement was lost
    BEGUN = "begun"  # the nodes were ordered to start an attempt
    STEP = "step"  # trainers reached a later step
    FIRST_STEP = "first_step"  # trainers finished the first step of an attempt
    FIRST_STEP_DEGRADED = "first_step_degraded"  # the same, without all replicas
    JOINING = "joining"  # nodes are ready to join, or replicas are missing for too long
    FINISHED = "finished"  # every rank ended with exit code 0
    START_ENDED = "start_ended"  # a fault ended a start
    TESTED = "tested"  # all self-checks have reported
    RESUMED = "resumed"  # after a pause
    RECOVERING = "recovering"  # a recovery action was chosen
    EVICTING = "evicting"  # the list of nodes to evict changed
    ADOPTED = "adopted"  # agents run a newer attempt that has had no step yet
    ADOPTED_RUNNING = "adopted_running"  # agents run a newer attempt that has had a step
    ADOPTED_DEGRADED = "adopted_degraded"  # the same, without all replicas
    OUTGROWN = "outgrown"  # agents know newer attempts but run none of them


class NodeEvent(StrEnum):
    """An event in the life of a node."""

    LISTED = "listed"  # the cluster listed it
    AWAITED = "awaited"  # its agent was started, or runs and has not connected to this driver yet
    CONNECTED = "connected"  # its agent connected
    ENDING = "ending"  # its agent announced its end
    DEPARTED = "departed"  # it was silent, or ended, or must not be used
    EVICTED = "evicted"
    CORDONED = "cordoned"
    UNCORDONED = "uncordoned"


# Entries of the tables in place of the phase or state that follows.
UNCHANGED: Literal["same"] = "same"  # the state does not change
GOAL: Literal["goal"] = "goal"  # the phase in JobState.goal follows
NextPhase = Phase | Literal["same", "goal"]

_NOT_ENDED = tuple(phase for phase in Phase if phase not in ENDED)
_TRAINING = (Phase.STARTING, Phase.RUNNING, Phase.DEGRADED)


def _make_row(phases: Iterable[Phase], following: NextPhase, **overrides: NextPhase) -> dict[Phase, NextPhase]:
    """Return a row of the table: `following` after each of `phases`.

    overrides: the phase that follows a phase of this name in place of `following`.
    """
    return dict.fromkeys(phases, following) | {Phase[name]: phase for name, phase in overrides.items()}


# event -> phase in which it may occur -> phase that follows
JOB_TRANSITIONS: dict[JobEvent, dict[Phase, NextPhase]] = {
    JobEvent.OPENED: _make_row(Phase, UNCHANGED),
    JobEvent.PLACED: {Phase.WAITING: Phase.STOPPING},
    JobEvent.RESTARTED: _make_row(_TRAINING, Phase.STOPPING),
    JobEvent.DIAGNOSED: _make_row(_TRAINING, Phase.STOPPING),
    JobEvent.PAUSED: _make_row(_TRAINING, Phase.STOPPING, WAITING=Phase.PAUSED),
    JobEvent.FAILED: _make_row(_NOT_ENDED, Phase.STOPPING, WAITING=Phase.FAILED, PAUSED=Phase.FAILED),
    JobEvent.INTERRUPTED: _make_row(_NOT_ENDED, Phase.STOPPING, WAITING=Phase.INTERRUPTED, PAUSED=Phase.INTERRUPTED),
    JobEvent.STOPPED: {Phase.STOPPING: GOAL},
    JobEvent.GAP: {Phase.STOPPING: Phase.WAITING},
    JobEvent.BEGUN: {Phase.STOPPING: Phase.STARTING},
    JobEvent.STEP: _make_row(_TRAINING, UNCHANGED),
    JobEvent.FIRST_STEP: {Phase.STARTING: Phase.RUNNING},
    JobEvent.FIRST_STEP_DEGRADED: {Phase.STARTING: Phase.DEGRADED},
    JobEvent.JOINING: {Phase.DEGRADED: Phase.STOPPING},
    JobEvent.FINISHED: _make_row(_TRAINING, Phase.DONE),
    JobEvent.START_ENDED: _make_row(_TRAINING, UNCHANGED),
    JobEvent.TESTED: {Phase.DIAGNOSING: Phase.WAITING},
    JobEvent.RESUMED: {Phase.PAUSED: Phase.WAITING},
    JobEvent.RECOVERING: _make_row(_NOT_ENDED, UNCHANGED),
    JobEvent.EVICTING: _make_row(_NOT_ENDED, UNCHANGED),
    JobEvent.ADOPTED: _make_row(_NOT_ENDED, Phase.STARTING),
    JobEvent.ADOPTED_RUNNING: _make_row(_NOT_ENDED, Phase.RUNNING),
    JobEvent.ADOPTED_DEGRADED: _make_row(_NOT_ENDED, Phase.DEGRADED),
    JobEvent.OUTGROWN: _make_row(Phase, UNCHANGED),
}

# stopping event -> phase that follows once every node has stopped
STOP_GOALS: dict[JobEvent, Phase] = {
    JobEvent.PLACED: Phase.STARTING,
    JobEvent.RESTARTED: Phase.WAITING,
    JobEvent.JOINING: Phase.WAITING,
    JobEvent.DIAGNOSED: Phase.DIAGNOSING,
    JobEvent.PAUSED: Phase.PAUSED,
    JobEvent.FAILED: Phase.FAILED,
    JobEvent.INTERRUPTED: Phase.INTERRUPTED,
}
# A stop whose goal is STARTING ends with one of these events, any other stop with STOPPED.
_START_EVENTS = frozenset({JobEvent.GAP, JobEvent.BEGUN})

# fields that an adoption of running agents may change
_ADOPTED = (
    "attempt",
    "placement",
    "ranks_per_node",
    "data",
    "missing_since",
    "master",
    "step",
    "updating",
    "best",
    "starts_without_progress",
    "ends",
    "reason",
)
# event -> fields of the state that the event may change
EVENT_FIELDS: dict[JobEvent, tuple[str, ...]] = {
    JobEvent.OPENED: ("epoch",),
    JobEvent.PLACED: ("placement", "data", "missing_since", "reason"),
    JobEvent.RESTARTED: ("save", "reason", "fresh", "updating"),
    JobEvent.DIAGNOSED: ("save", "reason"),
    JobEvent.PAUSED: ("save", "reason"),
    JobEvent.FAILED: ("save", "reason", "exit_code"),
    JobEvent.INTERRUPTED: ("save", "reason", "exit_code"),
    JobEvent.BEGUN: ("attempt", "master"),
    JobEvent.STEP: ("step",),
    JobEvent.FIRST_STEP: ("step",),
    JobEvent.FIRST_STEP_DEGRADED: ("step",),
    JobEvent.JOINING: ("reason", "joins_at_once"),
    JobEvent.FINISHED: ("reason",),
    JobEvent.START_ENDED: ("best", "starts_without_progress", "ends", "distrust"),
    JobEvent.RESUMED: ("reason",),
    JobEvent.RECOVERING: ("recovery", "unexplained"),
    JobEvent.EVICTING: ("evicting",),
    JobEvent.ADOPTED: _ADOPTED,
    JobEvent.ADOPTED_RUNNING: _ADOPTED,
    JobEvent.ADOPTED_DEGRADED: _ADOPTED,
    JobEvent.OUTGROWN: ("attempt",),
}

# event -> values that the event gives to fields unless its changes give others
_FIXED_VALUES: dict[JobEvent, dict[str, Any]] = {
    JobEvent.PLACED: {"save": False},
    JobEvent.RESTARTED: {"save": False, "fresh": (), "joining": False},
    JobEvent.JOINING: {"save": False, "fresh": (), "joining": True, "joins_at_once": False},
    JobEvent.DIAGNOSED: {"save": False, "fresh": (), "joining": False},
    JobEvent.PAUSED: {"save": False, "joining": False},
    JobEvent.FAILED: {"save": False, "joining": False},
    JobEvent.INTERRUPTED: {"save": False, "joining": False},
    JobEvent.BEGUN: {"distrust": False, "unexplained": False, "joining": False, "joins_at_once": False},
    JobEvent.FIRST_STEP: {"updating": False, "recovery": (), "fresh": ()},
    JobEvent.FIRST_STEP_DEGRADED: {"updating": False, "recovery": (), "fresh": ()},
    JobEvent.FINISHED: {"exit_code": 0, "recovery": ()},
    JobEvent.ADOPTED: {"fresh": (), "distrust": False},
    JobEvent.ADOPTED_RUNNING: {"fresh": (), "distrust": False, "recovery": ()},
    JobEvent.ADOPTED_DEGRADED: {"fresh": (), "distrust": False, "recovery": ()},
}

# event -> state in which it may occur (None: the node is unknown) -> state that follows
NODE_TRANSITIONS: dict[NodeEvent, dict[NodeState | None, NodeState | Literal["same"]]] = {
    NodeEvent.LISTED: {None: NodeState.JOINING},
    NodeEvent.AWAITED: dict.fromkeys((None, *NodeState), NodeState.JOINING),
    NodeEvent.CONNECTED: {
        None: NodeState.UP,
        NodeState.JOINING: NodeState.UP,
        NodeState.UP: NodeState.UP,
        NodeState.ENDING: NodeState.UP,
        NodeState.LOST: NodeState.UP,
        NodeState.EVICTED: NodeState.EVICTED,  # An evicted node is not used, even if its agent connects.
    },
    NodeEvent.ENDING: {NodeState.UP: NodeState.ENDING},
    NodeEvent.DEPARTED: {
        NodeState.JOINING: NodeState.LOST,
        NodeState.UP: NodeState.LOST,
        NodeState.ENDING: NodeState.LOST,
        NodeState.LOST: NodeState.LOST,
        NodeState.EVICTED: NodeState.EVICTED,
    },
    NodeEvent.EVICTED: dict.fromkeys(NodeState, NodeState.EVICTED),
    NodeEvent.CORDONED: dict.fromkeys(NodeState, UNCHANGED),
    NodeEvent.UNCORDONED: dict.fromkeys(NodeState, UNCHANGED),
}
_NODE_FIELDS = frozenset({"address", "reason", "changed_at", "facts"})


def apply_event(state: JobState, event: JobEvent, changes: Mapping[str, Any]) -> JobState:
    """Return the job after `event`, with `changes` to its fields.

    Raises:
        ImpossibleTransition: the table lacks the event in this phase, or the event may not change one of the fields.
    """
    following = JOB_TRANSITIONS[event].get(state.phase)
    # The table lists STOPPED, GAP and BEGUN for STOPPING, but which of them may occur depends on the goal.
    if event is JobEvent.STOPPED:
        fits_goal = state.goal is not Phase.STARTING
    elif event in _START_EVENTS:
        fits_goal = state.goal is Phase.STARTING
    else:
        fits_goal = True
    if following is None or not fits_goal:
        goal = f" to {state.goal}" if state.phase is Phase.STOPPING else ""
        raise ImpossibleTransition(f"job {state.name}: {event} cannot happen while it is {state.phase}{goal}")
    refused_fields = changes.keys() - set(EVENT_FIELDS.get(event, ()))
    if refused_fields:
        raise ImpossibleTransition(f"job {state.name}: {event} must not set {', '.join(sorted(refused_fields))}")
    if event is JobEvent.BEGUN and changes.get("attempt", 0) <= state.attempt:
        raise ImpossibleTransition(f"job {state.name}: attempt {changes.get('attempt')} cannot follow {state.attempt}")
    values = {**_FIXED_VALUES.get(event, {}), **changes}
    if event in STOP_GOALS:
        values["goal"] = STOP_GOALS[event]
    if following == UNCHANGED:
        phase = state.phase
    elif following == GOAL:
        phase = state.goal
    else:
        phase = Phase(following)
    return replace(state, phase=phase, **values)


def apply_node_event(state: JobState, name: str, event: NodeEvent, changes: Mapping[str, Any]) -> JobState:
    """Return the job after an event of one of its nodes; `changes` are fields of NodeRecord except state and cordoned.

    Raises:
        ImpossibleTransition: the table lacks the event in this state, or the event may not change one of the fields.
    """
    record = state.nodes.get(name)
    current = record.state if record is not None else None
    following = NODE_TRANSITIONS[event].get(current)
    refused_fields = changes.keys() - _NODE_FIELDS
    if refused_fields:
        names = ", ".join(sorted(refused_fields))
        raise ImpossibleTransition(f"job {state.name}: {event} of node {name} must not set {names}")
    if following is None:
        state_name = current or "unknown"
        raise ImpossibleTransition(f"job {state.name}: {event} of node {name} cannot happen while it is {state_name}")
    record = record or NodeRecord()
    if event in (NodeEvent.CORDONED, NodeEvent.UNCORDONED):
        record = replace(record, cordoned=event is NodeEvent.CORDONED)
    if following != UNCHANGED:
        record = replace(record, state=NodeState(following))
    return state.with_node(name, replace(record, **changes))
