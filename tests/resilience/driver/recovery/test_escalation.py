"""The escalation policy and the state machine: each choice is within its budget and explained, no phase is a trap."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.config import ResilienceConfig, from_tree
from megascale.core.events import Event
from megascale.resilience.driver.recovery.escalation import (
    RECOVERY_ACTIONS,
    Situation,
    Use,
    choose_action,
    list_data_sizes,
    list_past_uses,
    refund_last_blameless_use,
)
from megascale.resilience.driver.state.audit_log import AuditLog
from megascale.resilience.driver.state.job_state import JobState, Phase
from megascale.resilience.driver.state.journal import Journal

CONFIG = ResilienceConfig(retries=2, respawns=1, replacements=2, budget_seconds=100, replenish_wait=10)
situations = st.builds(
    Situation,
    node=st.sampled_from(["", "n1"]),
    must_evict=st.booleans(),
    is_reachable=st.booleans(),
    can_start=st.booleans(),
    spare_count=st.integers(0, 2),
    has_slow_start=st.booleans(),
    is_running=st.booleans(),
    time=st.just(1000.0),
).filter(lambda s: s.node or (s.is_reachable and s.can_start and not s.must_evict))
uses = st.lists(
    st.builds(Use, st.floats(800, 1000), st.sampled_from(RECOVERY_ACTIONS), st.sampled_from(["", "n1", "n2"])),
    max_size=12,
)


@given(situations, uses)
@settings(max_examples=300, deadline=None)
def test_the_mildest_possible_action_within_its_budget(at, used):
    choice = choose_action(CONFIG, at, used)
    assert choice.reasons
    recent = [u for u in used if at.time - u.time < 100]
    local = {r: sum(u.action == r and u.node == at.node for u in recent) for r in RECOVERY_ACTIONS}
    replaced = sum(u.action in ("spare", "replenish") for u in recent)
    may_retry = at.is_reachable and not at.must_evict and local["retry"] < 2
    may_respawn = at.can_start and not at.must_evict and local["respawn"] < 1
    if at.node and (at.has_slow_start or at.is_running) and not at.is_reachable and at.spare_count:
        # An agent that comes anew on another machine takes longer than a spare; one that runs is cut off.
        may_respawn = False
    if may_retry:
        expected = "retry"
    elif may_respawn:
        expected = "respawn"
    elif not at.node:
        expected = "stop"
    elif replaced >= 2:
        expected = "shrink"
        assert choice.reasons[-1] == "spare and replenish: all 2 replacements in 100 s are spent"
    else:
        expected = "spare" if at.spare_count else "replenish"
        assert choice.reasons[-1].endswith(f"replacement {replaced + 1} of 2 in 100 s")
    assert choice.action == expected


def test_a_node_that_fails_repeatedly_escalates_and_time_gives_budget_back():
    used: list[Use] = []
    actions = []
    for i in range(6):
        at = Situation("n1", False, True, True, spare_count=1, time=float(i))
        actions.append(choose_action(CONFIG, at, used).action)
        used.append(Use(at.time, actions[-1], "n1"))
    assert actions == ["retry", "retry", "respawn", "spare", "spare", "shrink"]
    assert choose_action(CONFIG, Situation("n1", False, True, True, 1, 200.0), used).action == "retry"


@given(uses)
def test_a_start_that_a_node_explains_later_gives_back_its_own_budget_and_no_shrink(used):
    remaining = list(used)
    refund_last_blameless_use(remaining)
    blameless = [u for u in used if not u.node and u.action in ("retry", "respawn")]
    assert [u for u in remaining if u.node or u.action not in ("retry", "respawn")] == [
        u for u in used if u.node or u.action not in ("retry", "respawn")
    ]
    assert [u for u in remaining if not u.node and u.action in ("retry", "respawn")] == blameless[:-1]


def test_the_journal_gives_back_a_retry_and_not_the_shrink_after_it(tmp_path):
    journal, _ = Journal.take(tmp_path, 5.0)
    audit_log = AuditLog(tmp_path, journal, lambda source, text: None)
    audit_log.record(Event.RECOVERY_ACTION, attempt=1, action="retry")
    audit_log.record(Event.RECOVERY_ACTION, attempt=1, action="shrink")
    audit_log.record(Event.RECOVERY_ACTION, attempt=1, action="respawn", nodes=("n1",), explains=True)
    assert [(u.action, u.node) for u in list_past_uses(journal.events(), time.time(), time.monotonic())] == [
        ("shrink", ""),
        ("respawn", "n1"),
    ]
    journal.close()


def test_no_new_nodes_where_none_may_be_asked_for():
    config = CONFIG.model_copy(update={"replenish_wait": 0.0})
    assert choose_action(config, Situation("n1", True, True, True, 0, 0.0), []).action == "shrink"


def _config(tensor: int, pipeline: int, micro: int, batch: int, least: int = 1):
    return from_tree(
        {
            "parallel": {"tensor": tensor, "pipeline": pipeline},
            "train": {"micro_batch": micro, "global_batch": batch},
            "resilience": {"min_data": least},
        }
    )


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 3), st.integers(1, 24), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_sizes_to_shrink_to_divide_everything(tensor, pipeline, micro, batch, nodes):
    config = _config(tensor, pipeline, micro, batch)
    for per_node in (1, 2, 4, 8):
        result = list_data_sizes(config, per_node, nodes)
        assert [d for d, _ in result] == sorted((d for d, _ in result), reverse=True)
        for data, count in result:
            assert data * tensor * pipeline == count * per_node
            assert count <= nodes
            assert batch % (micro * data) == 0


@given(
    tensor=st.sampled_from([1, 2, 4]),
    micro=st.integers(1, 3),
    batch=st.integers(1, 24),
    nodes=st.integers(1, 9),
    per_node=st.sampled_from([1, 2, 4, 8]),
    least=st.integers(1, 4),
)
@settings(max_examples=200, deadline=None)
def test_all_sizes_that_fit_are_offered(tensor, micro, batch, nodes, per_node, least):
    expected = []
    for data in range(least, nodes * per_node + 1):
        hosts, remainder = divmod(data * tensor, per_node)
        if remainder == 0 and hosts <= nodes and batch % (micro * data) == 0:
            expected.append((data, hosts))
    assert list_data_sizes(_config(tensor, 1, micro, batch, least), per_node, nodes) == expected[::-1]


def test_uses_of_the_journal_expire_on_this_processs_clock():
    """Their age counts by the time of day; an event from the future counts as of now."""

    def entry(time: float, action: str, *nodes: str, kind: str = "recovery_action"):
        return SimpleNamespace(time=time, action=action, nodes=nodes, kind=kind, details={})

    entries = [
        entry(900.0, "retry", "n1", "n2"),
        entry(1030.0, "shrink"),
        entry(990.0, "retry", kind="hang"),
        entry(990.0, "unknown"),
    ]
    assert list_past_uses(entries, 1000.0, 5000.0) == [Use(4900.0, "retry", "n1"), Use(5000.0, "shrink", "")]


def test_a_budget_is_spent_for_just_its_period():
    at = Situation("n1", False, True, True, spare_count=0, time=1000.0)
    for age, action in ((99.9, "respawn"), (100.0, "retry")):
        assert choose_action(CONFIG, at, [Use(1000.0 - age, "retry", "n1")] * 2).action == action
    reasons = choose_action(CONFIG, at, [Use(1000.0, "retry", "n1")]).reasons
    assert reasons == ("retry: use 2 of 2 for n1 in 100 s",)
    nameless = Situation("", False, True, True, spare_count=1, time=1000.0)
    spent = [Use(1000.0, "retry", "")] * 2 + [Use(1000.0, "respawn", "")]
    assert choose_action(CONFIG, nameless, spent).reasons == (
        "retry: all 2 uses without a node to blame in 100 s are spent",
        "respawn: all 1 uses without a node to blame in 100 s are spent",
        "spare: no node is to blame, so replacing one would be a guess",
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"can_start": False}, "respawn: not possible, n1 is down"),
        ({"is_running": True}, "respawn: skipped, the agent of n1 runs but sends nothing"),
        ({"has_slow_start": True}, "respawn: skipped, a spare takes over sooner than n1 starts again"),
        ({"must_evict": True}, "retry and respawn: skipped, n1 is to be evicted"),
    ],
)
def test_an_action_that_is_passed_over_is_explained(changes, reason):
    at = replace(Situation("n1", False, False, True, spare_count=2, tested_count=1, time=1000.0), **changes)
    choice = choose_action(CONFIG, at, [])
    assert choice.action == "spare"
    assert any(text.startswith(reason) for text in choice.reasons)
    assert ("retry: not possible, the agent of n1 does not answer" in choice.reasons) == (not at.must_evict)
    assert choice.reasons[-1] == "spare: 2 warm, 1 passed the self-checks; replacement 1 of 2 in 100 s"


def test_data_parallelism_does_not_shrink_below_what_is_allowed():
    assert list_data_sizes(_config(1, 1, 1, 8, least=2), 1, 5) == [(4, 4), (2, 2)]


def test_a_job_survives_the_journal():
    job = JobState("a", Phase.RUNNING, 3, ("n1", "n0"), 2, 4, ("127.0.0.1", 5), fresh=("n1",), step=7)
    assert JobState.from_json(job.to_json()) == job
    assert job.ranks("n0") == (2, 3)
    assert job.ranks("n7") == ()
    assert job.world == 4
