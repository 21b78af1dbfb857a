"""Background work that fails is logged, and lasting work starts again."""

from __future__ import annotations

import asyncio
import logging

from megascale.core.failure import FailureLog, keep_running, log_failure

log = logging.getLogger("megascale.test")


def test_work_that_fails_starts_again_until_it_returns(caplog):
    remaining = [ValueError("one"), ValueError("one"), KeyError("two")]

    async def work() -> None:
        if remaining:
            raise remaining.pop(0)

    asyncio.run(keep_running(work, "the work", log, pause=0.0))
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "the work failed (ValueError: one)",
        "the work failed (KeyError: 'two')",
    ]
    assert all(record.exc_info is not None for record in caplog.records)


def test_the_same_failure_is_logged_once_per_minute(caplog):
    current = [0.0]
    failures = FailureLog(log, "the work", clock=lambda: current[0])
    for current[0] in (0.0, 30.0, 61.0):
        failures.note(ValueError("one"), "it goes on")
    assert len(caplog.records) == 2


def test_the_failure_of_a_task_that_is_held_is_logged(caplog):
    async def fails() -> None:
        raise ValueError("one")

    async def run() -> None:
        task = asyncio.create_task(fails())
        log_failure(task, "the task", log)
        cancelled = asyncio.create_task(asyncio.sleep(60))
        log_failure(cancelled, "another", log)
        cancelled.cancel()
        await asyncio.wait([task, cancelled])

    asyncio.run(run())
    (record,) = caplog.records
    assert record.getMessage().startswith("the task failed (ValueError: one)")
