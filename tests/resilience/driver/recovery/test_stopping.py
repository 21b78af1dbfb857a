"""Time that nodes get to stop their ranks before they are removed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megascale.config import ResilienceConfig, from_tree
from megascale.resilience.driver.nodes import Node
from megascale.resilience.driver.recovery.missing_replicas import MissingReplicas
from megascale.resilience.driver.recovery.placement import Placement
from megascale.resilience.driver.state.job_state import JobEvent, NodeRecord, NodeState, Phase
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker


@pytest.mark.parametrize(("joined", "last"), [(0.0, 110.0), (115.0, 125.0)])
def test_a_node_that_was_away_has_its_time_to_stop_from_its_return_on(joined, last):
    node = Node("n0", NodeRecord(state=NodeState.UP), joined=joined)
    taken_out: list[str] = []

    class Nodes(dict[str, Node]):
        def mark_lost(self, removed: Node, why: str) -> None:
            taken_out.append(why)

    state = SimpleNamespace(goal=Phase.STARTING, placement=("n0",), save=False, joining=False)
    placement = Placement(
        job=SimpleNamespace(state=state, phase_entered=100.0),
        nodes=Nodes(n0=node),
        attempts=SimpleNamespace(last_order=3),
        recovery=SimpleNamespace(recover_node=lambda name, evict: None),
        self_checks=None,
        missing_replicas=None,
        settings=SimpleNamespace(limits=ResilienceConfig(window=5.0)),
        record_event=None,
    )
    placement.check_stopped(last)
    assert taken_out == []
    placement.check_stopped(last + 0.1)
    assert taken_out == ["n0 did not stop its processes within 10 s"]


def test_a_node_that_has_stopped_and_is_lost_before_the_start_gets_no_ranks():
    """Others may still run for a minute, until they must have ended: in that time more can be lost."""
    events: list[JobEvent] = []
    nodes = {name: Node(name, NodeRecord(state=NodeState.UP), acknowledged_order=3) for name in ("n0", "n1")}
    nodes["n1"].record = NodeRecord(state=NodeState.LOST)
    state = SimpleNamespace(goal=Phase.STARTING, placement=("n0", "n1"), save=False, joining=False)
    placement = Placement(
        job=SimpleNamespace(state=state, phase_entered=100.0, apply=events.append),
        nodes=nodes,
        attempts=SimpleNamespace(last_order=3, begin=lambda time: events.append(JobEvent.BEGUN)),
        recovery=None,
        self_checks=None,
        missing_replicas=None,
        settings=SimpleNamespace(limits=ResilienceConfig(window=5.0)),
        record_event=None,
    )
    placement.check_stopped(101.0)
    assert events == [JobEvent.GAP]


class Leaving:
    """Two nodes whose ranks leave after their step. `orders` are the orders to leave at once."""

    def __init__(self, worker: Worker) -> None:
        self.orders: list[int] = []
        self.nodes = {name: Node(name, NodeRecord(state=NodeState.UP)) for name in ("n0", "n1")}
        beat = Heartbeat("j", attempt=1, node="n1", sequence=1, sent_ns=0, workers=(worker,))
        self.nodes["n1"].add_heartbeat(beat, 100.0)
        self.attempts = SimpleNamespace(last_order=3, hastened_order=0, end_leaving=self._end_leaving)
        job_state = SimpleNamespace(goal=Phase.WAITING, placement=("n0", "n1"), save=False, joining=True)
        self.placement = Placement(
            job=SimpleNamespace(state=job_state, phase_entered=100.0),
            nodes=self.nodes,
            attempts=self.attempts,
            recovery=None,
            self_checks=None,
            missing_replicas=None,
            settings=SimpleNamespace(limits=ResilienceConfig(window=5.0, keep_seconds=2.0)),
            record_event=None,
        )

    def _end_leaving(self) -> None:
        self.attempts.last_order = self.attempts.hastened_order = self.attempts.last_order + 1
        self.orders.append(self.attempts.last_order)


@pytest.mark.parametrize(
    ("state", "by_agent", "ends"), [("signalled", False, True), ("signalled", True, False), ("exited", False, False)]
)
def test_ranks_that_leave_after_their_step_leave_at_once_if_a_rank_is_killed(state, by_agent, ends):
    """The others wait within the step for the killed rank. A rank that has left counts as exited."""
    leaving = Leaving(Worker(1, 11, state, code=9, by_agent=by_agent))
    for time in (100.5, 101.0):
        leaving.placement.check_stopped(time)
    assert leaving.orders == ([4] if ends else [])


def test_a_rank_that_leaves_later_than_others_must_leave_at_once():
    leaving = Leaving(Worker(1, 11, "running", phase="train"))
    for time in (100.5, 110.0):  # the step takes long
        leaving.placement.check_stopped(time)
    leaving.nodes["n0"].acknowledged_order = 3
    for time in (110.1, 112.0):
        leaving.placement.check_stopped(time)
    assert leaving.orders == []
    for time in (112.2, 112.3):
        leaving.placement.check_stopped(time)
    assert leaving.orders == [4]


@pytest.mark.parametrize("coming", [False, True])
def test_a_job_ends_where_nodes_are_too_few_and_none_come(coming):
    """The job needs two nodes and may not shrink. It waits as long as another node may still come."""
    failures: list[str] = []

    class Nodes(dict[str, Node]):
        pending_requests = int(coming)
        cluster = SimpleNamespace(find_switch=lambda name: "")
        names, ensure_known = dict.keys, dict.get

        def is_any_joining(self, nodes: object) -> bool:
            return False

        def all(self) -> list[Node]:
            return list(self.values())

    nodes = Nodes(
        n0=Node("n0", NodeRecord(state=NodeState.UP), channel=object()),
        n1=Node("n1", NodeRecord(state=NodeState.LOST)),
    )
    state = SimpleNamespace(placement=("n0", "n1"), data=2, ranks_per_node=1, evicting=(), missing_since=0.0)
    config = from_tree({"resilience": {"min_data": 2}})
    job = SimpleNamespace(state=state, phase_entered=100.0, phase=Phase.WAITING)
    attempts = SimpleNamespace(fail=failures.append)
    run_settings = SimpleNamespace(limits=ResilienceConfig(nodes=2, replenish_wait=0.0), config=config)
    placement = Placement(
        job=job,
        nodes=nodes,
        attempts=attempts,
        recovery=SimpleNamespace(),
        self_checks=None,
        missing_replicas=MissingReplicas(
            job=job, nodes=nodes, attempts=attempts, settings=run_settings, record_event=None
        ),
        settings=run_settings,
        record_event=None,
    )
    placement.assign_ranks(200.0)
    assert failures == ([] if coming else ["1 usable nodes are too few and no other came: the job needs 2"])
