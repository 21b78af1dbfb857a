"""The driver's state machine: what its table allows, what it refuses, and a journal that replays to the same state."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.resilience.driver.state.job import STRICT, Job
from megascale.resilience.driver.state.job_state import (
    ENDED,
    EVENT_FIELDS,
    GOAL,
    JOB_TRANSITIONS,
    NODE_TRANSITIONS,
    UNCHANGED,
    ImpossibleTransition,
    JobEvent,
    JobState,
    NodeEvent,
    NodeRecord,
    NodeState,
    Phase,
    apply_event,
    apply_node_event,
    from_plain,
    to_plain,
)
from megascale.resilience.driver.state.journal import Journal
from megascale.resilience.driver.state.journal_reader import JournalReader

NAMES = st.sampled_from(["n0", "n1", "n2"])
COUNTS = st.integers(0, 9)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "attempt": COUNTS,
    "placement": st.lists(NAMES, unique=True).map(tuple),
    "ranks_per_node": st.integers(1, 8),
    "data": st.integers(1, 8),
    "missing_since": st.floats(0, 2e9),
    "master": st.tuples(NAMES, COUNTS),
    "save": st.booleans(),
    "fresh": st.lists(NAMES, unique=True).map(tuple),
    "distrust": st.booleans(),
    "updating": st.booleans(),
    "step": COUNTS,
    "best": COUNTS,
    "starts_without_progress": COUNTS,
    "ends": st.lists(COUNTS, max_size=3).map(tuple),
    "exit_code": COUNTS,
    "reason": st.text(max_size=20),
    "epoch": COUNTS,
    "recovery": st.lists(st.tuples(NAMES, st.sampled_from(["retry", "spare"])), max_size=2).map(tuple),
    "evicting": st.lists(NAMES, unique=True).map(tuple),
    "joins_at_once": st.booleans(),
    "unexplained": st.booleans(),
}


@st.composite
def job_events(draw: st.DrawFn) -> tuple[JobEvent, dict[str, Any]]:
    """Something that may happen to a job, with some of the fields that it may bring."""
    event = draw(st.sampled_from(JobEvent))
    return event, {name: draw(VALUES[name]) for name in EVENT_FIELDS.get(event, ()) if draw(st.booleans())}


@st.composite
def node_events(draw: st.DrawFn) -> tuple[NodeEvent, str, dict[str, Any]]:
    details = {
        "address": st.text(max_size=9),
        "reason": st.text(max_size=9),
        "facts": st.just({"hardware": {"cpu": "x"}}),
    }
    chosen = {name: draw(values) for name, values in details.items() if draw(st.booleans())}
    return draw(st.sampled_from(NodeEvent)), draw(NAMES), chosen


STEPS = st.tuples(st.just("step"), COUNTS)
EVENTS = st.lists(st.one_of(job_events(), node_events(), STEPS), max_size=40)


@given(events=EVENTS, tail=st.integers(1, 6), reopen=st.sets(st.integers(0, 39), max_size=4))
@settings(max_examples=60, deadline=None)
def test_the_journal_replays_to_exactly_the_state_of_the_driver(tmp_path_factory, events, tail, reopen):
    """Any events may happen or be refused, and another driver may take over at any point."""
    run = tmp_path_factory.mktemp("run")
    journal, _ = Journal.take(run, 0.05)
    journal.max_transitions = tail
    refused: list[str] = []
    job = Job(JobState("a"), journal, refused.append)
    with pytest.MonkeyPatch.context() as production:
        production.delenv(STRICT)
        for number, happened in enumerate(events):
            before, count = job.state, len(refused)
            if isinstance(happened[1], int):  # not the event of that name, which brings fields
                if job.is_at_work:
                    job.advance(happened[1])
            else:
                name, *remaining, changes = happened
                done = job.apply_node(name, *remaining, **changes) if remaining else job.apply(name, **changes)
                assert done == (len(refused) == count)
                assert done or job.state == before
            if number in reopen:
                job.flush()
                journal.close()
                journal, damaged = Journal.take(run, 0.05)
                assert not damaged
                journal.max_transitions = tail
                result = journal.job()
                assert result == job.state
                job = Job(result, journal, refused.append)
    job.flush()
    reader = JournalReader(run)
    assert reader.job == job.state
    reader.close()
    rows = journal._db.execute("SELECT count(*) FROM transitions").fetchone()[0]
    assert rows < tail or tail == 1  # what has been written as a whole is not kept as well
    journal.close()


def some_state(phase: Phase, goal: Phase) -> JobState:
    return JobState("a", phase, 3, ("n0",), goal=goal)


def test_every_event_in_every_state_follows_the_table_or_is_an_error():
    for phase in Phase:
        for goal in Phase:
            state = some_state(phase, goal)
            for event in JobEvent:
                changes = {"attempt": 4} if event is JobEvent.BEGUN else {}
                expected = JOB_TRANSITIONS[event].get(phase)
                starts = event in (JobEvent.BEGUN, JobEvent.GAP)
                fits = not (starts or event is JobEvent.STOPPED) or (goal is Phase.STARTING) == starts
                if expected is None or not fits:
                    with pytest.raises(ImpossibleTransition, match=f"{event} cannot happen while it is {phase}"):
                        apply_event(state, event, changes)
                    continue
                after = apply_event(state, event, changes)
                assert after.phase == (phase if expected == UNCHANGED else goal if expected == GOAL else expected)


def test_two_attempts_never_overlap():
    """The way to trainers that start leads through STOPPING, in which every node says that it has stopped."""
    adopted = (JobEvent.ADOPTED, JobEvent.ADOPTED_RUNNING, JobEvent.ADOPTED_DEGRADED)
    for event, rows in JOB_TRANSITIONS.items():
        for phase, after in rows.items():
            if after is Phase.STARTING and event not in adopted:
                assert (event, phase) == (JobEvent.BEGUN, Phase.STOPPING)
            if after in (Phase.RUNNING, Phase.DEGRADED) and event not in adopted:
                assert phase is Phase.STARTING
    with pytest.raises(ImpossibleTransition, match="attempt 3 cannot follow 3"):
        apply_event(some_state(Phase.STOPPING, Phase.STARTING), JobEvent.BEGUN, {"attempt": 3})


def test_every_phase_that_has_not_ended_can_end_and_ended_ones_stay():
    for phase in Phase:
        observed, frontier = {phase}, [phase]
        while frontier:
            result = [rows[p] for p in frontier for rows in JOB_TRANSITIONS.values() if p in rows]
            goals = list(ENDED) if GOAL in result else []
            frontier = [Phase(n) for n in result + goals if n not in (UNCHANGED, GOAL) and n not in observed]
            observed |= set(frontier)
        assert (observed & ENDED) if phase not in ENDED else observed == {phase}


def test_an_evicted_node_is_not_used_until_a_person_allows_it():
    state = JobState("a", nodes={"n0": NodeRecord(NodeState.EVICTED)})
    for event in (NodeEvent.CONNECTED, NodeEvent.DEPARTED, NodeEvent.CORDONED, NodeEvent.UNCORDONED, NodeEvent.EVICTED):
        assert apply_node_event(state, "n0", event, {}).nodes["n0"].state is NodeState.EVICTED
    assert apply_node_event(state, "n0", NodeEvent.AWAITED, {}).nodes["n0"].state is NodeState.JOINING
    with pytest.raises(ImpossibleTransition, match="listed of node n0 cannot happen while it is evicted"):
        apply_node_event(state, "n0", NodeEvent.LISTED, {})
    assert set(NODE_TRANSITIONS) == set(NodeEvent)


def test_a_field_that_does_not_go_with_an_event_is_an_error():
    with pytest.raises(ImpossibleTransition, match="resumed must not set attempt"):
        apply_event(some_state(Phase.PAUSED, Phase.STARTING), JobEvent.RESUMED, {"attempt": 9})
    with pytest.raises(ImpossibleTransition, match="must not set state"):
        apply_node_event(JobState("a"), "n0", NodeEvent.CONNECTED, {"state": NodeState.UP})


def test_in_tests_an_impossible_event_raises(tmp_path):
    journal, _ = Journal.take(tmp_path, 0.05)
    job = Job(JobState("a"), journal)
    with pytest.raises(ImpossibleTransition, match="finished cannot happen while it is waiting"):
        job.apply(JobEvent.FINISHED)
    journal.close()


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_every_field_survives_json(changes):
    for name, value in changes.items():
        assert from_plain(name, json.loads(json.dumps(to_plain(value)))) == value
    job = JobState("a", **changes)
    assert JobState.from_json(job.to_json()) == job
