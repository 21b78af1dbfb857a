"""Unreachable nodes that may still run ranks."""

from __future__ import annotations

import time

from megascale.config import ResilienceConfig
from megascale.resilience.driver.nodes import KILL_SECONDS, AgentLeases, Node
from megascale.resilience.driver.state.job_state import JobState, NodeRecord, NodeState


class Seeing:
    """A cluster that may know that a node is gone."""

    certain = False

    def has_stopped(self, name: str) -> bool:
        return self.certain


def lost(start: float = 0.0) -> Node:
    return Node("k1", NodeRecord(NodeState.LOST, changed_at=start))


def leases(seconds: float | None = 2.0, cluster: object = None, holders: tuple[str, ...] = ("k1",)) -> AgentLeases:
    limits = ResilienceConfig(interval=0.5, agent_lease=seconds, orphan=60.0)
    built = AgentLeases(limits, cluster or Seeing())  # type: ignore[arg-type]
    built.holders.update(holders)
    return built


def test_a_lost_node_is_waited_for_until_its_lease_is_over():
    built, node = leases(), lost()
    built.renew("k1")
    end = built.end_times["k1"]
    assert built.may_run_ranks(node, end - 0.01)
    assert 2.0 + KILL_SECONDS >= end - time.monotonic() > KILL_SECONDS
    assert not built.may_run_ranks(node, end)
    assert "k1" not in built.holders


def test_not_where_the_cluster_has_seen_it_end():
    cluster = Seeing()
    built, node = leases(cluster=cluster), lost()
    built.renew("k1")
    assert built.may_run_ranks(node, time.monotonic())
    cluster.certain = True
    assert not built.may_run_ranks(node, time.monotonic())


def test_a_spare_that_is_lost_holds_up_nothing():
    built, node = leases(holders=()), lost()
    built.renew("k1")
    assert not built.may_run_ranks(node, time.monotonic())


def test_a_successor_waits_as_long_as_agents_wait_for_it():
    job = JobState("job", attempt=3, placement=("k1",))
    built, node = leases(holders=()), Node("k1", NodeRecord(NodeState.JOINING))
    built.inherit(node, job, 100.0)
    assert built.may_run_ranks(node, 159.0)
    assert not built.may_run_ranks(node, 100.0 + 60.0 + KILL_SECONDS)
    node = lost(start=time.time() - 50)  # the driver before has waited for most of it
    built.inherit(node, job, 100.0)
    assert built.may_run_ranks(node, 109.0)
    assert not built.may_run_ranks(node, 112.0)
    node = lost(start=time.time() - 70)
    built.inherit(node, job, 100.0)
    assert not built.may_run_ranks(node, 100.0)


def test_another_life_of_an_agent_holds_no_ranks():
    built = leases()
    built.admit("k1", is_same_agent=True, holds_ranks=False)
    assert "k1" in built.holders
    built.admit("k1", is_same_agent=False, holds_ranks=False)
    assert "k1" not in built.holders
    built.admit("k1", is_same_agent=False, holds_ranks=True)
    assert "k1" in built.holders


def test_without_a_lease_nobody_waits():
    built, node = leases(None), lost()
    built.end_times["k1"] = 1e12
    assert not built.are_required
    assert not built.may_run_ranks(node, 0.0)
