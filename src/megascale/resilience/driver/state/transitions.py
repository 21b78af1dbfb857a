"""What may happen to a job and to a node, and what becomes of them: the one table of the driver's state machine.

Pure functions: `follow` and `follow_node` give the next state, or raise `ImpossibleTransition` for what the table does
not have. A start goes through STOPPING only, so that two attempts never overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, Literal

from megascale.resilience.driver.state.job_state import ENDED, JobState, NodeRecord, NodeState, Phase


class ImpossibleTransition(ValueError):
    """Something happened in a state in which it cannot."""


class JobEvent(StrEnum):
    """What may happen to a job."""

    OPENED = "opened"  # a driver began a new epoch
    PLACED = "placed"  # every rank has a node: stop what runs, then start
    RESTARTED = "restarted"  # stop, then place and start again
    DIAGNOSED = "diagnosed"  # stop, then have the nodes test themselves
    PAUSED = "paused"  # stop, and wait for a person
    FAILED = "failed"  # stop; a person is needed
    INTERRUPTED = "interrupted"  # stop; a person wants it
    STOPPED = "stopped"  # every node has stopped: on to the goal
    GAP = "gap"  # a node was lost that was to be started
    BEGUN = "begun"  # the trainers of an attempt were ordered
    STEP = "step"  # trainers have come further
    FIRST_STEP = "first_step"  # of an attempt
    FINISHED = "finished"  # every rank ended well
    START_ENDED = "start_ended"  # a fault ended a start
    TESTED = "tested"  # all self-checks have come in
    RESUMED = "resumed"  # after a pause
    RECOVERING = "recovering"  # a recovery action was chosen
    EVICTING = "evicting"  # nodes to take out once the trainers have saved, or that have been
    ADOPTED = "adopted"  # agents run a newer attempt that has had no step yet
    ADOPTED_RUNNING = "adopted_running"  # and one that has
    OUTGROWN = "outgrown"  # agents have known newer attempts, of which nothing runs


class NodeEvent(StrEnum):
    """What may happen to a node."""

    LISTED = "known"  # the cluster has it
    AWAITED = "awaited"  # its agent was started, or runs and has not come to this driver yet
    CONNECTED = "came"  # its agent is connected
    DEPARTED = "gone"  # silent, or ended, or not to be used
    EVICTED = "evicted"
    CORDONED = "cordoned"
    UNCORDONED = "uncordoned"


Next = Phase | Literal["same", "goal"]
SAME: Literal["same"] = "same"  # as it is
GOAL: Literal["goal"] = "goal"  # what STOPPING leads to

_ALL = tuple(Phase)
_OPEN = tuple(phase for phase in Phase if phase not in ENDED)
_AT_WORK = (Phase.STARTING, Phase.RUNNING)


def _each(phases: Iterable[Phase], after: Next, **others: Next) -> dict[Phase, Next]:
    """`after` follows each of `phases`, but for those that are named."""
    return dict.fromkeys(phases, after) | {Phase[name]: other for name, other in others.items()}


# event -> phase in which it may happen -> phase that follows.
JOB: dict[JobEvent, dict[Phase, Next]] = {
    JobEvent.OPENED: _each(_ALL, SAME),
    JobEvent.PLACED: {Phase.WAITING: Phase.STOPPING},
    JobEvent.RESTARTED: _each(_AT_WORK, Phase.STOPPING),
    JobEvent.DIAGNOSED: _each(_AT_WORK, Phase.STOPPING),
    JobEvent.PAUSED: _each(_AT_WORK, Phase.STOPPING, WAITING=Phase.PAUSED),
    JobEvent.FAILED: _each(_OPEN, Phase.STOPPING, WAITING=Phase.FAILED, PAUSED=Phase.FAILED),
    JobEvent.INTERRUPTED: _each(_OPEN, Phase.STOPPING, WAITING=Phase.INTERRUPTED, PAUSED=Phase.INTERRUPTED),
    JobEvent.STOPPED: {Phase.STOPPING: GOAL},
    JobEvent.GAP: {Phase.STOPPING: Phase.WAITING},
    JobEvent.BEGUN: {Phase.STOPPING: Phase.STARTING},
    JobEvent.STEP: _each(_AT_WORK, SAME),
    JobEvent.FIRST_STEP: {Phase.STARTING: Phase.RUNNING},
    JobEvent.FINISHED: _each(_AT_WORK, Phase.DONE),
    JobEvent.START_ENDED: _each(_AT_WORK, SAME),
    JobEvent.TESTED: {Phase.DIAGNOSING: Phase.WAITING},
    JobEvent.RESUMED: {Phase.PAUSED: Phase.WAITING},
    JobEvent.RECOVERING: _each(_OPEN, SAME),
    JobEvent.EVICTING: _each(_OPEN, SAME),
    JobEvent.ADOPTED: _each(_OPEN, Phase.STARTING),
    JobEvent.ADOPTED_RUNNING: _each(_OPEN, Phase.RUNNING),
    JobEvent.OUTGROWN: _each(_ALL, SAME),
}

# What a stop leads to, by what asked for it.
GOALS: dict[JobEvent, Phase] = {
    JobEvent.PLACED: Phase.STARTING,
    JobEvent.RESTARTED: Phase.WAITING,
    JobEvent.DIAGNOSED: Phase.DIAGNOSING,
    JobEvent.PAUSED: Phase.PAUSED,
    JobEvent.FAILED: Phase.FAILED,
    JobEvent.INTERRUPTED: Phase.INTERRUPTED,
}
# A stop that leads to a start ends with one of these, any other with STOPPED.
_TO_START = frozenset({JobEvent.GAP, JobEvent.BEGUN})

# Fields of the state that an event may bring with it.
_STOP = ("save", "why")
_LAYOUT = ("placement", "ranks_per_node", "data", "master")
FIELDS: dict[JobEvent, tuple[str, ...]] = {
    JobEvent.OPENED: ("epoch",),
    JobEvent.PLACED: ("placement", "data", "why"),
    JobEvent.RESTARTED: (*_STOP, "fresh", "updating"),
    JobEvent.DIAGNOSED: _STOP,
    JobEvent.PAUSED: _STOP,
    JobEvent.FAILED: (*_STOP, "exit_code"),
    JobEvent.INTERRUPTED: (*_STOP, "exit_code"),
    JobEvent.BEGUN: ("attempt", "master"),
    JobEvent.STEP: ("step",),
    JobEvent.FIRST_STEP: ("step",),
    JobEvent.FINISHED: ("why",),
    JobEvent.START_ENDED: ("best", "starts_without_progress", "ends", "distrust"),
    JobEvent.RESUMED: ("why",),
    JobEvent.RECOVERING: ("recovery", "unexplained"),
    JobEvent.EVICTING: ("evicting",),
    JobEvent.ADOPTED: ("attempt", *_LAYOUT, "step", "updating", "best", "starts_without_progress", "ends", "why"),
    JobEvent.OUTGROWN: ("attempt",),
}
FIELDS[JobEvent.ADOPTED_RUNNING] = FIELDS[JobEvent.ADOPTED]

# What an event sets by itself.
_ALWAYS: dict[JobEvent, dict[str, Any]] = {
    JobEvent.PLACED: {"save": False},
    JobEvent.RESTARTED: {"save": False, "fresh": ()},
    JobEvent.DIAGNOSED: {"save": False, "fresh": ()},
    JobEvent.PAUSED: {"save": False},
    JobEvent.FAILED: {"save": False},
    JobEvent.INTERRUPTED: {"save": False},
    JobEvent.BEGUN: {"distrust": False, "unexplained": False},
    JobEvent.FIRST_STEP: {"updating": False, "recovery": (), "fresh": ()},
    JobEvent.FINISHED: {"exit_code": 0, "recovery": ()},
    JobEvent.ADOPTED: {"fresh": (), "distrust": False},
    JobEvent.ADOPTED_RUNNING: {"fresh": (), "distrust": False, "recovery": ()},
}

# event -> state in which it may happen (None: not known yet) -> state that follows.
NODE: dict[NodeEvent, dict[NodeState | None, NodeState | Literal["same"]]] = {
    NodeEvent.LISTED: {None: NodeState.JOINING},
    NodeEvent.AWAITED: dict.fromkeys((None, *NodeState), NodeState.JOINING),
    NodeEvent.CONNECTED: {
        None: NodeState.UP,
        NodeState.JOINING: NodeState.UP,
        NodeState.UP: NodeState.UP,
        NodeState.LOST: NodeState.UP,
        NodeState.EVICTED: NodeState.EVICTED,  # it is not used, whoever started it
    },
    NodeEvent.DEPARTED: {
        NodeState.JOINING: NodeState.LOST,
        NodeState.UP: NodeState.LOST,
        NodeState.LOST: NodeState.LOST,
        NodeState.EVICTED: NodeState.EVICTED,
    },
    NodeEvent.EVICTED: dict.fromkeys(NodeState, NodeState.EVICTED),
    NodeEvent.CORDONED: dict.fromkeys(NodeState, SAME),
    NodeEvent.UNCORDONED: dict.fromkeys(NodeState, SAME),
}


def follow(state: JobState, event: JobEvent, changes: Mapping[str, Any]) -> JobState:
    """The job after `event`, which brings `changes` to its fields.

    Raises ImpossibleTransition if the table does not have it, or a field does not go with the event.
    """
    after = JOB[event].get(state.phase)
    leads = event in _TO_START or event is JobEvent.STOPPED
    if after is None or (leads and (state.goal is Phase.STARTING) != (event in _TO_START)):
        to = f" to {state.goal}" if state.phase is Phase.STOPPING else ""
        raise ImpossibleTransition(f"job {state.name}: {event} cannot happen while it is {state.phase}{to}")
    wrong = changes.keys() - set(FIELDS.get(event, ()))
    if wrong:
        raise ImpossibleTransition(f"job {state.name}: {event} does not set {', '.join(sorted(wrong))}")
    if event is JobEvent.BEGUN and changes.get("attempt", 0) <= state.attempt:
        raise ImpossibleTransition(f"job {state.name}: attempt {changes.get('attempt')} after {state.attempt}")
    found = {**_ALWAYS.get(event, {}), **changes}
    if event in GOALS:
        found["goal"] = GOALS[event]
    phase = state.phase if after == SAME else state.goal if after == GOAL else after
    return replace(state, phase=Phase(phase), **found)


def follow_node(state: JobState, name: str, event: NodeEvent, changes: Mapping[str, Any]) -> JobState:
    """The job after something happened to one of its nodes: `changes` are fields of NodeRecord but state, cordoned.

    Raises ImpossibleTransition if the table does not have it.
    """
    known = state.nodes.get(name)
    after = NODE[event].get(known.state if known is not None else None)
    wrong = changes.keys() - {"address", "why", "since", "facts"}
    if after is None or wrong:
        about = f"sets {', '.join(sorted(wrong))}" if wrong else f"while it is {known.state if known else 'unknown'}"
        raise ImpossibleTransition(f"job {state.name}: {event} of node {name} {about}")
    record = known or NodeRecord()
    cordoned = {NodeEvent.CORDONED: True, NodeEvent.UNCORDONED: False}.get(event, record.cordoned)
    now = record.state if after == SAME else NodeState(after)
    return state.with_node(name, replace(record, state=now, cordoned=cordoned, **changes))
