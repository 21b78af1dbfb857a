"""All groups are aborted at once, once, and what does not abort is named."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from megascale.errors import TrainingError
from megascale.rendezvous.abort import GroupAbort


class Group:
    """A group whose abort ends, as NCCL's does, once the aborts of all others have begun."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier
        self.calls = 0

    def abort(self) -> None:
        self.calls += 1
        self.barrier.wait(30)


def test_aborts_that_wait_for_each_other_end():
    groups = [Group(threading.Barrier(3)) for _ in range(3)]
    for group in groups:
        group.barrier = groups[0].barrier
    abort = GroupAbort()
    for _ in range(2):  # the second call has no effect
        abort.start([(str(i), group) for i, group in enumerate(groups)])
    abort.finish(30)
    assert [group.calls for group in groups] == [1, 1, 1]


def test_a_group_that_does_not_abort_is_named():
    barrier = threading.Barrier(2)
    abort = GroupAbort()
    abort.start([("data", Group(barrier))])
    with pytest.raises(TrainingError, match=r"the communicators data did not abort within 0\.01 s"):
        abort.finish(0.01)
    barrier.wait(30)
    abort.finish(30)


def test_an_error_is_named():
    barrier = threading.Barrier(2)
    barrier.abort()
    abort = GroupAbort()
    abort.start([("data", Group(barrier))])
    with pytest.raises(TrainingError, match="data: BrokenBarrierError"):
        abort.finish(30)


def test_the_log_names_the_abort_that_took_longest(caplog: pytest.LogCaptureFixture):
    """It waits for the work that the host has queued, which a rank's log should show."""
    fast, slow = Group(threading.Barrier(1)), Group(threading.Barrier(2))
    abort = GroupAbort()
    with caplog.at_level(logging.INFO, logger="megascale.train"):
        abort.start([("fast", fast), ("slow", slow)])
        abort._threads["fast"].join(30)
        slow.barrier.wait(30)
        abort.finish(30)
    (record,) = caplog.records
    assert re.fullmatch(r"communicators were aborted within \d+\.\d\d s \(the last: slow\)", record.getMessage())
