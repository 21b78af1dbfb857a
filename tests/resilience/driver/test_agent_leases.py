"""Which nodes that nobody reaches may still run ranks."""

from __future__ import annotations

import time

from megascale.config import ResilienceConfig
from megascale.resilience.driver.nodes import KILL, AgentLeases, Node
from megascale.resilience.driver.state.job_state import JobState, NodeRecord, NodeState


class Seeing:
    """A cluster that may know that a node is gone."""

    certain = False

    def has_stopped(self, name: str) -> bool:
        return self.certain


def lost(since: float = 0.0) -> Node:
    return Node("k1", NodeRecord(NodeState.LOST, changed_at=since))


def leases(seconds: float | None = 2.0, cluster: object = None, holders: tuple[str, ...] = ("k1",)) -> AgentLeases:
    limits = ResilienceConfig(interval=0.5, agent_lease=seconds, orphan=60.0)
    made = AgentLeases(limits, cluster or Seeing())  # type: ignore[arg-type]
    made.holders.update(holders)
    return made


def test_a_lost_node_is_waited_for_until_its_lease_is_over():
    made, node = leases(), lost()
    made.renew("k1")
    end = made.ends["k1"]
    assert made.may_run_ranks(node, end - 0.01)
    assert 2.0 + KILL >= end - time.monotonic() > KILL
    assert not made.may_run_ranks(node, end)
    assert "k1" not in made.holders


def test_not_where_the_cluster_has_seen_it_end():
    cluster = Seeing()
    made, node = leases(cluster=cluster), lost()
    made.renew("k1")
    assert made.may_run_ranks(node, time.monotonic())
    cluster.certain = True
    assert not made.may_run_ranks(node, time.monotonic())


def test_a_spare_that_is_lost_holds_up_nothing():
    made, node = leases(holders=()), lost()
    made.renew("k1")
    assert not made.may_run_ranks(node, time.monotonic())


def test_a_successor_waits_as_long_as_agents_wait_for_it():
    job = JobState("job", attempt=3, placement=("k1",))
    made, node = leases(holders=()), Node("k1", NodeRecord(NodeState.JOINING))
    made.inherit(node, job, 100.0)
    assert made.may_run_ranks(node, 159.0)
    assert not made.may_run_ranks(node, 100.0 + 60.0 + KILL)
    node = lost(since=time.time() - 50)  # the driver before has waited for most of it
    made.inherit(node, job, 100.0)
    assert made.may_run_ranks(node, 109.0)
    assert not made.may_run_ranks(node, 112.0)
    node = lost(since=time.time() - 70)
    made.inherit(node, job, 100.0)
    assert not made.may_run_ranks(node, 100.0)


def test_another_life_of_an_agent_holds_no_ranks():
    made = leases()
    made.admit("k1", same_life=True, holds_ranks=False)
    assert "k1" in made.holders
    made.admit("k1", same_life=False, holds_ranks=False)
    assert "k1" not in made.holders
    made.admit("k1", same_life=False, holds_ranks=True)
    assert "k1" in made.holders


def test_without_a_lease_nobody_waits():
    made, node = leases(None), lost()
    made.ends["k1"] = 1e12
    assert not made.are_required
    assert not made.may_run_ranks(node, 0.0)
