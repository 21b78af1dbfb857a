"""Calls run at the same time, the first error in their order is raised, and a call that hangs holds nothing up."""

from __future__ import annotations

import threading

import pytest

from megascale.rendezvous.concurrent_calls import call_concurrently

LIMIT = 30.0


def test_calls_that_wait_for_each_other_end():
    barrier = threading.Barrier(3)
    names: list[str] = []

    def meet() -> None:
        barrier.wait(LIMIT)
        names.append(threading.current_thread().name)

    call_concurrently({"world": meet, "data/0": meet, "tensor/0": meet})
    assert sorted(names) == ["connect data/0", "connect tensor/0", "connect world"]


def test_the_error_of_the_first_call_is_raised_once_all_have_ended():
    later_failed = threading.Event()
    ended: list[str] = []

    def fail_first() -> None:
        assert later_failed.wait(LIMIT)
        ended.append("first")
        raise ValueError("first")

    def fail_later() -> None:
        ended.append("later")
        later_failed.set()
        raise ValueError("later")

    with pytest.raises(ValueError, match="first"):
        call_concurrently({"first": fail_first, "later": fail_later}, failed_seconds=LIMIT)
    assert ended == ["later", "first"]


def test_a_call_that_hangs_is_abandoned_after_another_failed():
    release = threading.Event()

    def hang() -> None:
        release.wait(LIMIT)

    def fail() -> None:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        call_concurrently({"hangs": hang, "fails": fail}, failed_seconds=0.01)
    assert not release.is_set()
    assert "connect hangs" in [thread.name for thread in threading.enumerate()]
    release.set()


def test_a_rank_waits_for_calls_of_which_none_has_failed():
    has_begun = threading.Event()
    release = threading.Event()

    def wait() -> None:
        has_begun.set()
        assert release.wait(LIMIT)

    caller = threading.Thread(target=call_concurrently, args=({"waits": wait},), kwargs={"failed_seconds": 0.0})
    caller.start()
    assert has_begun.wait(LIMIT)
    assert caller.is_alive()
    release.set()
    caller.join(LIMIT)
    assert not caller.is_alive()
