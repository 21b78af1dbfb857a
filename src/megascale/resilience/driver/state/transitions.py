"""The state machines of a job and of its nodes: two tables, from an event and a state to the state that follows.

Pure functions: `follow` and `follow_node` return the next state, or raise `ImpossibleTransition` for a pair that a
table lacks. Every start goes through STOPPING, so that two attempts never overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, Literal

from megascale.resilience.driver.state.job_state import ENDED, JobState, NodeRecord, NodeState, Phase


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
    GAP = "gap"  # a node of the placement was lost before the start
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


UNCHANGED: Literal["same"] = "same"  # the state does not change
GOAL: Literal["goal"] = "goal"  # the phase in JobState.goal follows
NextPhase = Phase | Literal["same", "goal"]

_OPEN = tuple(phase for phase in Phase if phase not in ENDED)
_AT_WORK = (Phase.STARTING, Phase.RUNNING, Phase.DEGRADED)


def _from(phases: Iterable[Phase], following: NextPhase, **exceptions: NextPhase) -> dict[Phase, NextPhase]:
    """Return a row of the table: `following` after each of `phases`, except after the named ones."""
    return dict.fromkeys(phases, following) | {Phase[name]: phase for name, phase in exceptions.items()}


# event -> phase in which it may occur -> phase that follows
JOB: dict[JobEvent, dict[Phase, NextPhase]] = {
    JobEvent.OPENED: _from(Phase, UNCHANGED),
    JobEvent.PLACED: {Phase.WAITING: Phase.STOPPING},
    JobEvent.RESTARTED: _from(_AT_WORK, Phase.STOPPING),
    JobEvent.DIAGNOSED: _from(_AT_WORK, Phase.STOPPING),
    JobEvent.PAUSED: _from(_AT_WORK, Phase.STOPPING, WAITING=Phase.PAUSED),
    JobEvent.FAILED: _from(_OPEN, Phase.STOPPING, WAITING=Phase.FAILED, PAUSED=Phase.FAILED),
    JobEvent.INTERRUPTED: _from(_OPEN, Phase.STOPPING, WAITING=Phase.INTERRUPTED, PAUSED=Phase.INTERRUPTED),
    JobEvent.STOPPED: {Phase.STOPPING: GOAL},
    JobEvent.GAP: {Phase.STOPPING: Phase.WAITING},
    JobEvent.BEGUN: {Phase.STOPPING: Phase.STARTING},
    JobEvent.STEP: _from(_AT_WORK, UNCHANGED),
    JobEvent.FIRST_STEP: {Phase.STARTING: Phase.RUNNING},
    JobEvent.FIRST_STEP_DEGRADED: {Phase.STARTING: Phase.DEGRADED},
    JobEvent.JOINING: {Phase.DEGRADED: Phase.STOPPING},
    JobEvent.FINISHED: _from(_AT_WORK, Phase.DONE),
    JobEvent.START_ENDED: _from(_AT_WORK, UNCHANGED),
    JobEvent.TESTED: {Phase.DIAGNOSING: Phase.WAITING},
    JobEvent.RESUMED: {Phase.PAUSED: Phase.WAITING},
    JobEvent.RECOVERING: _from(_OPEN, UNCHANGED),
    JobEvent.EVICTING: _from(_OPEN, UNCHANGED),
    JobEvent.ADOPTED: _from(_OPEN, Phase.STARTING),
    JobEvent.ADOPTED_RUNNING: _from(_OPEN, Phase.RUNNING),
    JobEvent.ADOPTED_DEGRADED: _from(_OPEN, Phase.DEGRADED),
    JobEvent.OUTGROWN: _from(Phase, UNCHANGED),
}

# stopping event -> phase that follows once every node has stopped
GOALS: dict[JobEvent, Phase] = {
    JobEvent.PLACED: Phase.STARTING,
    JobEvent.RESTARTED: Phase.WAITING,
    JobEvent.JOINING: Phase.WAITING,
    JobEvent.DIAGNOSED: Phase.DIAGNOSING,
    JobEvent.PAUSED: Phase.PAUSED,
    JobEvent.FAILED: Phase.FAILED,
    JobEvent.INTERRUPTED: Phase.INTERRUPTED,
}
# A stop whose goal is STARTING ends with one of these events, any other stop with STOPPED.
_TO_START = frozenset({JobEvent.GAP, JobEvent.BEGUN})

# event -> fields of the state that the event may change
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
FIELDS: dict[JobEvent, tuple[str, ...]] = {
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
    JobEvent.JOINING: ("reason",),
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

# event -> fields that the event always sets
_ALWAYS: dict[JobEvent, dict[str, Any]] = {
    JobEvent.PLACED: {"save": False},
    JobEvent.RESTARTED: {"save": False, "fresh": (), "joining": False},
    JobEvent.JOINING: {"save": False, "fresh": (), "joining": True},
    JobEvent.DIAGNOSED: {"save": False, "fresh": (), "joining": False},
    JobEvent.PAUSED: {"save": False, "joining": False},
    JobEvent.FAILED: {"save": False, "joining": False},
    JobEvent.INTERRUPTED: {"save": False, "joining": False},
    JobEvent.BEGUN: {"distrust": False, "unexplained": False, "joining": False},
    JobEvent.FIRST_STEP: {"updating": False, "recovery": (), "fresh": ()},
    JobEvent.FIRST_STEP_DEGRADED: {"updating": False, "recovery": (), "fresh": ()},
    JobEvent.FINISHED: {"exit_code": 0, "recovery": ()},
    JobEvent.ADOPTED: {"fresh": (), "distrust": False},
    JobEvent.ADOPTED_RUNNING: {"fresh": (), "distrust": False, "recovery": ()},
    JobEvent.ADOPTED_DEGRADED: {"fresh": (), "distrust": False, "recovery": ()},
}

# event -> state in which it may occur (None: the node is unknown) -> state that follows
NODE: dict[NodeEvent, dict[NodeState | None, NodeState | Literal["same"]]] = {
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


def follow(state: JobState, event: JobEvent, changes: Mapping[str, Any]) -> JobState:
    """Return the job after `event`, which brings `changes` to its fields.

    Raises:
        ImpossibleTransition: the table lacks the event in this phase, or the event may not change one of the fields.
    """
    following = JOB[event].get(state.phase)
    ends_stop = event in _TO_START or event is JobEvent.STOPPED
    if following is None or (ends_stop and (state.goal is Phase.STARTING) != (event in _TO_START)):
        goal = f" to {state.goal}" if state.phase is Phase.STOPPING else ""
        raise ImpossibleTransition(f"job {state.name}: {event} cannot happen while it is {state.phase}{goal}")
    foreign = changes.keys() - set(FIELDS.get(event, ()))
    if foreign:
        raise ImpossibleTransition(f"job {state.name}: {event} does not set {', '.join(sorted(foreign))}")
    if event is JobEvent.BEGUN and changes.get("attempt", 0) <= state.attempt:
        raise ImpossibleTransition(f"job {state.name}: attempt {changes.get('attempt')} after {state.attempt}")
    values = {**_ALWAYS.get(event, {}), **changes}
    if event in GOALS:
        values["goal"] = GOALS[event]
    phases = {UNCHANGED: state.phase, GOAL: state.goal}
    return replace(state, phase=Phase(phases.get(following, following)), **values)


def follow_node(state: JobState, name: str, event: NodeEvent, changes: Mapping[str, Any]) -> JobState:
    """Return the job after an event of one of its nodes; `changes` are fields of NodeRecord except state and cordoned.

    Raises:
        ImpossibleTransition: the table lacks the event in this state, or the event may not change one of the fields.
    """
    record = state.nodes.get(name)
    current = record.state if record is not None else None
    following = NODE[event].get(current)
    foreign = changes.keys() - _NODE_FIELDS
    if foreign:
        raise ImpossibleTransition(f"job {state.name}: {event} of node {name} sets {', '.join(sorted(foreign))}")
    if following is None:
        raise ImpossibleTransition(f"job {state.name}: {event} of node {name} while it is {current or 'unknown'}")
    record = record or NodeRecord()
    if event in (NodeEvent.CORDONED, NodeEvent.UNCORDONED):
        record = replace(record, cordoned=event is NodeEvent.CORDONED)
    if following != UNCHANGED:
        record = replace(record, state=NodeState(following))
    return state.with_node(name, replace(record, **changes))
