"""For how long ranks run without an answer of the driver."""

from __future__ import annotations

import threading

import pytest

from megascale.resilience.agent.rank_lease import RankLease


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lease(clock: Clock, ended: list[str] | None = None) -> RankLease:
    made = RankLease(2.0, 60.0, (ended if ended is not None else []).append, clock)
    made.begin_session(clock())
    return made


def test_counts_from_when_the_answered_heartbeat_was_sent(clock):
    mine = lease(clock)
    clock.now = 101.0
    mine.record_sent(1)
    clock.now = 101.9
    mine.record_sent(2)
    mine.confirm(1)  # which took 0.9 s
    clock.now = 102.9
    assert not mine.expired_reason()
    clock.now = 103.0
    assert "agent_lease=2" in mine.expired_reason()
    mine.confirm(2)  # held back by the network
    assert not mine.expired_reason()
    clock.now = 103.9
    assert mine.expired_reason()


def test_an_answer_to_an_older_heartbeat_does_not_shorten_it(clock):
    mine = lease(clock)
    mine.record_sent(1)
    clock.now = 101.0
    mine.record_sent(2)
    mine.confirm(2)
    mine.confirm(1)
    clock.now = 102.5
    assert not mine.expired_reason()


def test_a_driver_whose_process_has_ended_is_waited_for(clock):
    mine = lease(clock)
    clock.now = 101.0
    mine.record_close(process_ended=True)
    clock.now = 160.0
    assert not mine.expired_reason()
    clock.now = 161.0
    assert "orphan=60" in mine.expired_reason()


@pytest.mark.parametrize("what", ["silence", "parted", "late"])
def test_a_driver_that_gives_the_node_up_is_not_waited_for(clock, what):
    mine = lease(clock)
    if what == "parted":  # it says so, and hangs up
        mine.revoke()
    clock.now = 101.0 if what == "parted" else 102.5 if what == "late" else 101.5
    mine.record_close(process_ended=what != "silence")  # what comes after the lease changes nothing
    clock.now += 1.0
    assert mine.expired_reason()


def test_a_new_driver_ends_the_wait_for_it(clock):
    mine = lease(clock)
    mine.record_close(process_ended=True)
    clock.now = 110.0
    mine.begin_session(109.5)
    clock.now = 111.6
    assert "agent_lease" in mine.expired_reason()


def test_ranks_that_ran_too_long_end_before_a_driver_hears_of_them(clock):
    ended: list[str] = []
    mine = lease(clock, ended)
    clock.now = 104.0
    mine.begin_session(104.0)
    assert len(ended) == 1
    assert not mine.expired_reason()


def test_without_a_lease_ranks_run_on(clock):
    mine = RankLease(None, 60.0, lambda why: None, clock)
    mine.record_sent(1)
    mine.revoke()
    clock.now = 1e6
    assert not mine.expired_reason()


def test_a_failure_to_end_the_ranks_does_not_end_the_watch(caplog):
    """Without it the ranks would run on beside those that the driver starts elsewhere."""
    ended = threading.Event()
    failures = iter([RuntimeError("dictionary changed size during iteration")])

    def end(why: str) -> None:
        if error := next(failures, None):
            raise error
        ended.set()

    mine = RankLease(0.0, 60.0, end)
    mine.start()
    assert ended.wait(30.0)
    assert "dictionary changed size" in caplog.text
