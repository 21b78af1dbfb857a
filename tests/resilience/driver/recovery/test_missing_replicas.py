"""Limits of a job that goes on without some replicas."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megascale.config import from_tree
from megascale.core.events import Event
from megascale.resilience.driver.nodes import Node
from megascale.resilience.driver.recovery.missing_replicas import PREPARATION_LIMIT, MissingReplicas
from megascale.resilience.driver.recovery.placement import Placement
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobEvent, JobState, NodeRecord, NodeState, Phase
from megascale.resilience.driver.telemetry.membership import Adoption
from megascale.resilience.protocol.agent_messages import Hello, RunningTrainers
from megascale.resilience.protocol.heartbeat import Heartbeat

LIMIT = 1000.0  # seconds
JOIN_AT_ONCE = (JobEvent.JOINING, {"joins_at_once": True})


class PresentNodes(dict[str, Node]):
    """Three nodes of four; no other one comes."""

    pending_requests = 0
    cluster = SimpleNamespace(find_switch=lambda name: "", nodes=list)
    names, ensure_known = dict.keys, dict.__getitem__

    def __init__(self) -> None:
        super().__init__((name, Node(name, NodeRecord(state=NodeState.UP), channel=object())) for name in NAMES)

    def all(self) -> list[Node]:
        return list(self.values())

    def is_any_joining(self, nodes: object) -> bool:
        return False

    def list_spares(self) -> list[Node]:
        return []


NAMES = ("n0", "n1", "n2")


def make_settings(min_data: int = 1) -> SimpleNamespace:
    config = from_tree(
        {
            "train": {"global_batch": 12, "micro_batch": 1},
            "checkpoint": {"background": True, "memory_interval": 1, "memory_wait": True, "replicas": True},
            "resilience": {
                "nodes": 4,
                "continue_replicas": True,
                "max_missing_seconds": LIMIT,
                "replenish_wait": 0.0,
                "min_data": min_data,
            },
        }
    )
    return SimpleNamespace(config=config, limits=config.resilience)


def make_job(phase: Phase, missing_seconds: float) -> SimpleNamespace:
    state = SimpleNamespace(
        phase=phase,
        attempt=2,
        placement=NAMES,
        data=3,
        ranks_per_node=1,
        recovery=(),
        evicting=(),
        reason="",
        joining=phase is Phase.WAITING,
        missing_since=time.time() - missing_seconds,
    )
    return SimpleNamespace(state=state, phase=phase, phase_entered=100.0)


def make_replicas(job: Any, settings: Any, nodes: PresentNodes, attempts: Any, events: list[Event]) -> MissingReplicas:
    def record_event(kind: Event, **details: object) -> None:
        events.append(kind)

    return MissingReplicas(job=job, nodes=nodes, attempts=attempts, settings=settings, record_event=record_event)


@pytest.mark.parametrize("is_overdue", [False, True])
def test_a_job_stops_once_replicas_are_missing_for_too_long(is_overdue: bool) -> None:
    stops: list[tuple[JobEvent, dict[str, Any]]] = []
    events: list[Event] = []
    job = make_job(Phase.DEGRADED, LIMIT + 60.0 if is_overdue else LIMIT - 600.0)
    attempts = SimpleNamespace(model_ranks=1, stop=lambda event, reason, **changes: stops.append((event, changes)))
    make_replicas(job, make_settings(), PresentNodes(), attempts, events).check_degraded_job()
    # The job waits for nodes, so the ranks copy their state before they leave.
    assert stops == ([(JobEvent.JOINING, {})] if is_overdue else [])
    assert events == ([Event.REPLICAS_OVERDUE] if is_overdue else [])


@pytest.mark.parametrize("min_data", [1, 3])
def test_a_job_that_waited_in_vain_keeps_the_replicas_that_it_had(min_data: int) -> None:
    """Three of four replicas train. Once the fourth is overdue, the job shrinks to three, not to two."""
    stops: list[dict[str, Any]] = []
    shrinks: list[str] = []
    failures: list[str] = []
    job, settings, nodes = make_job(Phase.WAITING, LIMIT + 60.0), make_settings(min_data), PresentNodes()
    attempts = SimpleNamespace(
        model_ranks=1, stop=lambda event, reason, **changes: stops.append(changes), fail=failures.append
    )
    placement = Placement(
        job=job,
        nodes=nodes,
        attempts=attempts,
        recovery=SimpleNamespace(shrink=shrinks.append),
        self_checks=None,
        missing_replicas=make_replicas(job, settings, nodes, attempts, []),
        settings=settings,
        record_event=None,
    )
    placement.assign_ranks(200.0)
    assert failures == []
    assert stops == [{"placement": NAMES, "data": 3, "missing_since": 0.0}]
    assert shrinks == ["3 usable nodes: data parallelism goes from 4 to 3 on 3 nodes"]


@pytest.mark.parametrize(
    ("missing_since", "has_stepped", "phase"),
    [(7.0, True, Phase.DEGRADED), (7.0, False, Phase.STARTING), (0.0, True, Phase.RUNNING)],
)
def test_a_driver_that_lost_its_journal_adopts_a_degraded_job_as_such(
    missing_since: float, has_stepped: bool, phase: Phase
) -> None:
    """The time for which replicas may be missing goes on."""
    held = JobState(name="job", phase=Phase.STARTING, attempt=3, placement=NAMES, data=3, missing_since=missing_since)
    job = Job(JobState(name="job", phase=Phase.RUNNING, attempt=2, placement=(*NAMES, "n3"), data=4), MagicMock())
    nodes = PresentNodes()
    adoption = Adoption(
        job=job, nodes=nodes, attempts=MagicMock(), response=MagicMock(), window=5.0, record_event=MagicMock()
    )
    adoption.wait_for_agents(0.0)
    for node in nodes.all():
        node.attempt = 3
        trainers = RunningTrainers(held.to_json(), has_stepped)
        adoption.handle_arrival(node, Hello("job", node.name, "", "", "", attempt=3, trainers=trainers))
    assert adoption.decide(1000.0)
    assert (job.phase, job.state.data, job.state.missing_since) == (phase, 3, missing_since)


def make_joining_job(prepared_groups: bool) -> tuple[MissingReplicas, PresentNodes, list[Any]]:
    """Three of four replicas train, and the spare n3 waits. Return the driver's part, the nodes and its orders."""
    orders: list[Any] = []
    nodes = PresentNodes()
    spare = Node("n3", NodeRecord(state=NodeState.UP), channel=object())
    nodes.list_spares = lambda: [spare] if "n3" in nodes else []  # type: ignore[method-assign]
    nodes["n3"] = spare
    state = JobState(
        name="job", phase=Phase.DEGRADED, attempt=2, placement=NAMES, data=3, master=("h", 5), missing_since=time.time()
    )
    attempts = SimpleNamespace(
        model_ranks=1,
        prepare_join=lambda node, following: orders.append(("join", node.name)),
        prepare_groups=lambda following, number: orders.append(("groups", following.placement, following.data, number)),
        drop_groups=lambda names, number: orders.append(("drop", tuple(names), number)),
        stop=lambda event, reason, **changes: orders.append((event, changes)),
        timeline=MagicMock(),
    )
    settings = make_settings()
    rendezvous = settings.config.rendezvous.model_copy(update={"prepared_groups": prepared_groups})
    settings.config = settings.config.model_copy(update={"rendezvous": rendezvous})
    job = SimpleNamespace(state=state, phase=state.phase, phase_entered=100.0)
    return make_replicas(job, settings, nodes, attempts, []), nodes, orders


def report(nodes: PresentNodes, prepared: bool, groups: int = 0) -> None:
    """Let the spare report its processes and its newest preparation of groups."""
    nodes["n3"].heartbeat = Heartbeat("job", 2, "n3", 1, 0, prepared=prepared, groups=groups)


def test_nodes_join_once_the_groups_are_made() -> None:
    replicas, nodes, orders = make_joining_job(prepared_groups=True)
    for prepared in (False, True, True):
        replicas.check_degraded_job()
        report(nodes, prepared)
    (_, placement, data, number) = orders[1]
    assert orders == [("join", "n3"), ("groups", (*NAMES, "n3"), 4, number)]
    assert (placement, data) == ((*NAMES, "n3"), 4)
    report(nodes, False)  # its processes make the groups
    replicas.check_degraded_job()
    report(nodes, True, number - 1)  # an earlier report
    replicas.check_degraded_job()
    assert len(orders) == 2
    report(nodes, True, number)
    replicas.check_degraded_job()
    assert orders[2:] == [JOIN_AT_ONCE]


def test_prepared_groups_are_withdrawn_if_the_joining_node_is_lost() -> None:
    replicas, nodes, orders = make_joining_job(prepared_groups=True)
    for _ in range(3):
        replicas.check_degraded_job()
        report(nodes, True)
    number = orders[1][-1]
    spare = nodes.pop("n3")
    for _ in range(2):
        replicas.check_degraded_job()
    assert orders[2:] == [("drop", (*NAMES, "n3"), number + 1)]
    nodes["n3"] = spare  # it comes back
    replicas.check_degraded_job()
    assert orders[3:] == [("groups", (*NAMES, "n3"), 4, number + 2)]


def test_nodes_join_without_groups_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, nodes, orders = make_joining_job(prepared_groups=True)
    for _ in range(3):
        replicas.check_degraded_job()
        report(nodes, True)
    later = time.monotonic() + PREPARATION_LIMIT + 1.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    replicas.check_degraded_job()
    assert orders[2:] == [JOIN_AT_ONCE]


def test_ranks_copy_their_state_if_joining_processes_are_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, nodes, orders = make_joining_job(prepared_groups=False)
    replicas.check_degraded_job()
    report(nodes, False)
    later = time.monotonic() + PREPARATION_LIMIT + 1.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    replicas.check_degraded_job()
    assert orders[1:] == [(JobEvent.JOINING, {"joins_at_once": False})]


def test_without_the_setting_no_groups_are_ordered() -> None:
    replicas, nodes, orders = make_joining_job(prepared_groups=False)
    for _ in range(2):
        replicas.check_degraded_job()
        report(nodes, True)
    assert orders == [("join", "n3"), JOIN_AT_ONCE]


def test_nodes_join_a_single_rank_without_groups_since_it_serves_no_store() -> None:
    replicas, nodes, orders = make_joining_job(prepared_groups=True)
    replicas.job.state = replace(replicas.job.state, placement=NAMES[:1], data=1)
    settings: Any = replicas.settings
    settings.limits = settings.limits.model_copy(update={"nodes": 2})
    settings.config = settings.config.model_copy(update={"resilience": settings.limits})
    for _ in range(2):
        replicas.check_degraded_job()
        report(nodes, True)
    assert orders == [("join", "n3"), JOIN_AT_ONCE]
