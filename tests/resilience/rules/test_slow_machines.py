"""Slow machines in spans: the policy decides the action, and only a defect causes one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascale.resilience import rules
from megascale.resilience.rules.metrics_rules import judge_slow_machines
from megascale.resilience.rules.view import SlowFinding
from tests.resilience.rules.views import heartbeat, view, worker

SLOW = SlowFinding(1, 0.12, "GPU", 0.99999, ("forward +12.1%, backward +12.0%",))


def judged(*findings: SlowFinding, **changes):
    return judge_slow_machines(
        view({n: [heartbeat(n, 1, [worker(n)])] for n in range(3)}, slow_findings=findings, **changes)
    )


def test_a_slow_rank_is_an_alert_with_its_evidence():
    (verdict,) = judged(SLOW)
    assert (verdict.kind, verdict.nodes, verdict.ranks, verdict.action) == ("slow_node", ("node-1",), (1,), "alert")
    assert "rank 1 on node-1 is 12.0% slower" in verdict.evidence[0]
    assert verdict.evidence[1] == SLOW.evidence[0]
    assert verdict in rules.judge(view({n: [heartbeat(n, 1, [worker(n)])] for n in range(3)}, slow_findings=(SLOW,)))


@pytest.mark.parametrize("action", ["alert", "diagnose", "evict"])
def test_the_policy_says_what_follows_from_how_much(action):
    assert [v.action for v in judged(SLOW, slow_action=action)] == [action]
    assert [v.action for v in judged(replace(SLOW, slower=0.07), slow_action=action)] == ["alert"]
    assert [v.action for v in judged(replace(SLOW, slower=0.07), slow_action=action, slow_least=0.05)] == [action]
    # Other processes on a shared machine are not a defect, however slow they make it.
    assert judged(replace(SLOW, cause="host: processes"), slow_action=action) == []


def test_what_is_not_sure_not_here_or_not_running_is_nothing():
    assert judged(replace(SLOW, confidence=0.999)) == []
    assert judged(replace(SLOW, rank=17)) == []
    assert judged(SLOW, phase="starting") == []
    assert judged() == []


def test_ranks_of_a_node_are_one_verdict():
    result = judged(SLOW, replace(SLOW, cause="link", slower=0.2), replace(SLOW, rank=2))
    assert [(v.nodes, v.ranks) for v in result] == [(("node-1",), (1,)), (("node-2",), (2,))]
    assert "link" in result[0].evidence[1]


def test_a_node_is_tested_once():
    """A node that passed its self-checks is not stopped for the same reason again."""
    earlier = [(-50.0, "node-1", "slow_node")]
    (verdict,) = judged(SLOW, slow_action="diagnose", incidents=earlier)
    assert (verdict.action, "passed" in verdict.evidence[-1]) == ("alert", True)
    assert judged(SLOW, slow_action="evict", incidents=earlier)[0].action == "evict"
    # The alert of this attempt is not such a test.
    assert judged(SLOW, slow_action="diagnose", incidents=[(50.0, "node-1", "slow_node")])[0].action == "diagnose"
