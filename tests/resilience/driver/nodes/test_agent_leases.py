"""Which nodes that nobody reaches may still run ranks."""

from __future__ import annotations

import time

from megascale.config import ResilienceConfig
from megascale.resilience.driver.nodes.agent_leases import KILL, AgentLeases
from megascale.resilience.driver.nodes.nodes import Node
from megascale.resilience.driver.state.job_state import JobState, NodeRecord, NodeState


class Seeing:
    """A cluster that may know that a node is gone."""

    certain = False

    def has_stopped(self, name: str) -> bool:
        return self.certain


def lost(since: float = 0.0) -> Node:
    return Node("k1", NodeRecord(NodeState.LOST, changed_at=since), may_run=True)


def leases(seconds: float | None = 2.0, cluster: object = None) -> AgentLeases:
    limits = ResilienceConfig(interval=0.5, agent_lease=seconds, orphan=60.0)
    return AgentLeases(limits, cluster or Seeing())


def test_a_lost_node_is_waited_for_until_its_lease_is_over():
    made, node = leases(), lost()
    made.renew(node)
    assert made.held(node, node.leased - 0.01)
    assert 2.0 + KILL >= node.leased - time.monotonic() > KILL
    assert not made.held(node, node.leased)
    assert not node.may_run


def test_not_where_the_cluster_has_seen_it_end():
    cluster = Seeing()
    made, node = leases(cluster=cluster), lost()
    made.renew(node)
    assert made.held(node, time.monotonic())
    cluster.certain = True
    assert not made.held(node, time.monotonic())


def test_a_spare_that_is_lost_holds_up_nothing():
    made, node = leases(), lost()
    node.may_run = False
    made.renew(node)
    assert not made.held(node, time.monotonic())


def test_a_successor_waits_as_long_as_agents_wait_for_it():
    job = JobState("job", attempt=3, placement=("k1",))
    made, node = leases(), Node("k1", NodeRecord(NodeState.JOINING))
    made.took_over(node, job, 100.0)
    assert made.held(node, 159.0)
    assert not made.held(node, 100.0 + 60.0 + KILL)
    node = lost(since=time.time() - 50)  # the driver before has waited for most of it
    made.took_over(node, job, 100.0)
    assert made.held(node, 109.0)
    assert not made.held(node, 112.0)
    node = lost(since=time.time() - 70)
    made.took_over(node, job, 100.0)
    assert not made.held(node, 100.0)


def test_another_life_of_an_agent_holds_no_ranks():
    made, node = leases(), lost()
    made.came(node, same_life=True, held=False)
    assert node.may_run
    made.came(node, same_life=False, held=False)
    assert not node.may_run
    made.came(node, same_life=False, held=True)
    assert node.may_run


def test_without_a_lease_nobody_waits():
    made, node = leases(None), lost()
    node.leased = 1e12
    assert not made.given
    assert not made.held(node, 0.0)
