"""The record of a recovery: phases follow each other, add up to the whole, and count the slowest rank."""

from __future__ import annotations

import pytest

from megascale.core.recovery_record import PHASES, RecoveryRecord
from megascale.core.status import FAILED_IN_STEP
from megascale.resilience.driver.nodes import Node
from megascale.resilience.driver.recovery.attempts import RecoveryTimeline
from megascale.resilience.protocol.agent_messages import Stopped
from megascale.resilience.protocol.heartbeat import Heartbeat, RankStart, Worker
from megascale.resilience.rules.view import Verdict


def report(node: Node, received: float, *workers: Worker) -> None:
    node.add_heartbeat(Heartbeat(job="j", attempt=1, node=node.name, sequence=1, sent_ns=0, workers=workers), received)


def kill_rank_1(timeline: RecoveryTimeline) -> tuple[Node, Node]:
    first, second = Node("n0"), Node("n1")
    report(first, 99.9, Worker(0, 10, "exited", code=1, phase=FAILED_IN_STEP, step=8, ended_age=0.05))
    report(second, 99.9, Worker(1, 11, "signalled", code=9, phase="train", step=8, ended_age=0.4))
    timeline.begin_recovery(Verdict("process_killed", ("n1",), (1,), "recover"), [first, second], 100.0)
    return first, second


def test_the_phases_of_a_killed_rank():
    timeline = RecoveryTimeline()
    first, second = kill_rank_1(timeline)
    timeline.begin_attempt(100.25)
    kept = RankStart(process_age=2.2, groups_age=1.5, state_age=1.0, step=7, is_reused=True, is_standing=True)
    new = RankStart(process_age=2.0, groups_age=1.4, state_age=0.5, step=7, source="memory")
    report(first, 103.0, Worker(0, 10, "running", phase="train", step=8, start=kept))
    report(second, 103.0, Worker(1, 12, "running", phase="train", step=8, start=new))

    record = timeline.finish([first, second], 103.0)

    assert record is not None
    assert record.seconds == pytest.approx(
        {"detect": 0.5, "decide": 0.25, "processes": 0.75, "groups": 0.6, "state": 0.9, "first step": 0.5}
    )
    assert record.total == pytest.approx(3.5) == pytest.approx(sum(record.seconds.values()))
    assert (record.cause, record.starts, record.source) == ("process_killed", 1, "memory")
    assert (record.resumed_step, record.lost_steps) == (7, 0)  # step 8 was under way in both
    assert (record.reused_ranks, record.standing_ranks) == ((0,), (0,))
    assert tuple(record.seconds) == PHASES
    copy = RecoveryRecord.from_details(record.to_details())
    assert copy is not None
    assert copy.to_details() == record.to_details()


def test_a_step_that_a_rank_completed_after_its_last_heartbeat_is_lost() -> None:
    timeline = RecoveryTimeline()
    first, second = kill_rank_1(timeline)
    timeline.begin_attempt(100.25)
    kept = RankStart(process_age=2.2, groups_age=1.5, state_age=1.0, step=7, is_reused=True, kept_step=8)
    new = RankStart(process_age=2.0, groups_age=1.4, state_age=0.5, step=7, source="a peer's memory")
    report(first, 103.0, Worker(0, 10, "running", phase="train", step=8, start=kept))
    report(second, 103.0, Worker(1, 12, "running", phase="train", step=8, start=new))

    record = timeline.finish([first, second], 103.0)

    assert record is not None
    assert (record.resumed_step, record.lost_steps) == (7, 1)


def test_the_time_to_decide_is_divided_by_the_last_node_of_each_stop() -> None:
    timeline = RecoveryTimeline()
    timeline.begin_stop(4, 90.0)
    timeline.note_stopped(Stopped(4, 1, 4000, leave_seconds=0.5), 91.0)  # without a fault
    first, second = kill_rank_1(timeline)
    timeline.begin_stop(5, 100.0)
    timeline.note_stopped(Stopped(5, 1, 4000, leave_seconds=0.1), 100.2)
    timeline.note_stopped(Stopped(5, 1, 4000, leave_seconds=0.6, files_seconds=0.1, exit_seconds=2.0), 103.0)
    timeline.begin_stop(6, 103.25)
    timeline.note_stopped(Stopped(6, 1, 4000, leave_seconds=0.125), 103.5)
    timeline.begin_attempt(104.0)

    record = timeline.finish([first, second], 105.0)

    assert record is not None
    expected = {"ranks leave": 0.725, "files": 0.1, "killed ranks end": 2.0, "messages": 0.425}
    assert record.decide_seconds == pytest.approx(expected)
    assert "of decide: ranks leave 0.7" in record.describe()[0]
    copy = RecoveryRecord.from_details(record.to_details())
    assert copy is not None
    assert copy.decide_seconds == pytest.approx(expected)
    assert RecoveryRecord.from_details(record.to_details() | {"decide_seconds": {"files": -1}}) is None
    kill_rank_1(timeline)
    timeline.begin_attempt(110.0)
    following = timeline.finish([first, second], 111.0)
    assert following is not None
    assert following.decide_seconds == {}


def test_a_start_without_a_fault_is_no_recovery():
    timeline = RecoveryTimeline()
    timeline.begin_attempt(100.0)
    assert timeline.finish([Node("n0")], 101.0) is None


def test_a_join_begins_when_the_first_rank_has_completed_its_last_step():
    timeline = RecoveryTimeline()
    timeline.begin_join(100.0)
    timeline.begin_attempt(104.5)
    others = [
        RankStart(process_age=age, groups_age=1.0, state_age=0.75, step=9, is_reused=True, left_age=left_age)
        for age, left_age in ((1.5, 3.0), (1.75, 2.75))
    ]
    joining = RankStart(process_age=1.5, groups_age=1.0, state_age=0.5, step=9, source="running ranks")
    nodes = [Node(f"n{number}") for number in range(3)]
    for rank, (node, start) in enumerate(zip(nodes, [*others, joining], strict=True)):
        report(node, 106.5, Worker(rank, 10 + rank, "running", phase="train", step=10, start=start))

    record = timeline.finish(nodes, 107.0)

    assert record is not None
    assert record.last_step_seconds == pytest.approx(3.5)  # from 100.0 to 106.5 - 3.0
    assert record.total == pytest.approx(3.5) == pytest.approx(sum(record.seconds.values()))
    assert record.seconds["decide"] == pytest.approx(1.0)
    assert "the last step before the join, 3.50 s after the order, to the next new step" in record.describe()[0]
    copy = RecoveryRecord.from_details(record.to_details())
    assert copy is not None
    assert copy.last_step_seconds == pytest.approx(3.5)


def test_the_first_step_ends_when_a_rank_has_its_results() -> None:
    timeline = RecoveryTimeline()
    first, second = kill_rank_1(timeline)
    timeline.begin_attempt(100.25)
    kept = RankStart(process_age=2.2, groups_age=1.5, state_age=1.0, stepped_age=0.25, step=7)
    late = RankStart(process_age=2.2, groups_age=1.5, state_age=1.0, step=7)  # its status file was read earlier
    report(first, 103.0, Worker(0, 10, "running", phase="train", step=9, start=kept))
    report(second, 103.0, Worker(1, 12, "running", phase="train", step=8, start=late))

    record = timeline.finish([first, second], 103.5)

    assert record is not None
    assert record.seconds["first step"] == pytest.approx(0.75)  # from 103.0 - 1.0 to 103.0 - 0.25
    assert record.total == pytest.approx(3.25) == pytest.approx(sum(record.seconds.values()))


def test_the_first_step_ends_within_the_attempt() -> None:
    timeline = RecoveryTimeline()
    first, _ = kill_rank_1(timeline)
    timeline.begin_attempt(100.25)
    start = RankStart(process_age=0.5, groups_age=0.25, state_age=0.25, stepped_age=60.0)  # the host's clock was set
    report(first, 103.0, Worker(0, 10, "running", phase="train", step=9, start=start))

    record = timeline.finish([first], 103.5)

    assert record is not None
    assert min(record.seconds.values()) >= 0
    assert record.total == pytest.approx(0.75) == pytest.approx(sum(record.seconds.values()))


def test_a_second_fault_before_the_first_step_belongs_to_the_same_recovery():
    timeline = RecoveryTimeline()
    nodes = kill_rank_1(timeline)
    timeline.begin_attempt(100.5)
    timeline.begin_recovery(Verdict("node_lost", ("n0",), (0,), "recover"), nodes, 102.0)
    timeline.begin_attempt(103.0)

    record = timeline.finish([Node("n0"), Node("n1")], 104.0)

    assert record is not None
    assert (record.cause, record.starts, record.lost_steps) == ("process_killed", 2, -1)
    assert record.total == pytest.approx(4.5) == pytest.approx(sum(record.seconds.values()))
    assert "2 starts" in record.describe()[0]
    assert timeline.finish([Node("n0")], 105.0) is None  # the next start begins anew


@pytest.mark.parametrize(
    ("kind", "expected"), [("node_lost", 97.0), ("hang", 98.0), ("slow_node", 100.0), ("process_killed", 100.0)]
)
def test_when_a_fault_without_a_dead_process_began(kind: str, expected: float):
    node = Node("n0", last_seen=0.0)
    report(node, 97.0, Worker(0, 10, "running", phase="train", step=8, status_age=3.0))
    other = Node("n1")
    report(other, 99.0, Worker(1, 11, "running", phase="train", step=8, status_age=1.0))
    timeline = RecoveryTimeline()
    timeline.begin_recovery(Verdict(kind, ("n0",), (0,), "recover"), [node, other], 100.0)
    assert timeline.fault == expected


@pytest.mark.parametrize(
    "damage", [{}, {"seconds": 3}, {"total": "x"}, {"total": float("nan")}, {"reused_ranks": 5}, {"doubts": []}]
)
def test_damaged_details_are_no_record(damage: dict):
    record = RecoveryRecord("hang", 1, {"detect": 1.0}, 1.0)
    details = record.to_details() | damage if damage else {}
    assert RecoveryRecord.from_details(details) is None
