"""Lease of ranks: the time that they run without an answer of the driver."""

from __future__ import annotations

import threading

import pytest

from megascale.resilience.agent.rank_lease import RankLease


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lease(clock: Clock, ended: list[str] | None = None) -> RankLease:
    built = RankLease(2.0, 60.0, (ended if ended is not None else []).append, clock)
    built.begin_session(clock())
    return built


def test_counts_from_when_the_answered_heartbeat_was_sent(clock):
    local = lease(clock)
    clock.time = 101.0
    local.record_sent(1)
    clock.time = 101.9
    local.record_sent(2)
    local.confirm(1)  # which took 0.9 s
    clock.time = 102.9
    assert not local.get_expiry_reason()
    clock.time = 103.0
    assert "agent_lease=2" in local.get_expiry_reason()
    local.confirm(2)  # held back by the network
    assert not local.get_expiry_reason()
    clock.time = 103.9
    assert local.get_expiry_reason()


def test_an_answer_to_an_older_heartbeat_does_not_shorten_it(clock):
    local = lease(clock)
    local.record_sent(1)
    clock.time = 101.0
    local.record_sent(2)
    local.confirm(2)
    local.confirm(1)
    clock.time = 102.5
    assert not local.get_expiry_reason()


def test_a_driver_whose_process_has_ended_is_waited_for(clock):
    local = lease(clock)
    clock.time = 101.0
    local.record_close(process_ended=True)
    clock.time = 160.0
    assert not local.get_expiry_reason()
    clock.time = 161.0
    assert "orphan=60" in local.get_expiry_reason()


@pytest.mark.parametrize("subject", ["silence", "parted", "late"])
def test_a_driver_that_gives_the_node_up_is_not_waited_for(clock, subject):
    local = lease(clock)
    if subject == "parted":  # it says so, and hangs up
        local.revoke()
    clock.time = 101.0 if subject == "parted" else 102.5 if subject == "late" else 101.5
    local.record_close(process_ended=subject != "silence")  # what comes after the lease changes nothing
    clock.time += 1.0
    assert local.get_expiry_reason()


def test_a_new_driver_ends_the_wait_for_it(clock):
    local = lease(clock)
    local.record_close(process_ended=True)
    clock.time = 110.0
    local.begin_session(109.5)
    clock.time = 111.6
    assert "agent_lease" in local.get_expiry_reason()


def test_ranks_that_ran_too_long_end_before_a_driver_hears_of_them(clock):
    ended: list[str] = []
    local = lease(clock, ended)
    clock.time = 104.0
    local.begin_session(104.0)
    assert len(ended) == 1
    assert not local.get_expiry_reason()


def test_without_a_lease_ranks_run_on(clock):
    local = RankLease(None, 60.0, lambda why: None, clock)
    local.record_sent(1)
    local.revoke()
    clock.time = 1e6
    assert not local.get_expiry_reason()


def test_a_failure_to_end_the_ranks_does_not_end_the_watch(caplog):
    """Without it the ranks would run on beside those that the driver starts elsewhere."""
    ended = threading.Event()
    failures = iter([RuntimeError("dictionary changed size during iteration")])

    def end(why: str) -> None:
        error = next(failures, None)
        if error:
            raise error
        ended.set()

    local = RankLease(0.0, 60.0, end)
    local.start()
    assert ended.wait(30.0)
    assert "dictionary changed size" in caplog.text
