"""The driver's look at spans: a real process over a replayed run, and what it says turned into findings."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from benchmarks.observe.replayed_job import Faults, replayed
from benchmarks.observe.replayed_runs import keep
from benchmarks.observe.synthetic_spans import Job
from megascale.resilience.driver.diagnosis.investigations import SEARCH_INTERVAL, SlowMachineSearch, parse_findings
from megascale.resilience.driver.process import LoopTasks

JOB = Job(tensor=1, stages=1, virtual=1, data=4, microbatches=4)


def test_a_running_job_is_looked_at_and_only_its_own_attempt_counts(tmp_path):
    run = keep(tmp_path / "run", JOB, replayed(JOB, 60, 1, Faults({2: 1.15})))
    job = SimpleNamespace(is_running=False, state=SimpleNamespace(attempt=1))

    async def look() -> None:
        tasks = LoopTasks()
        slow = SlowMachineSearch(run=run, job=job, tasks=tasks)
        slow.start_if_due(1000.0)
        job.is_running = True
        slow.start_if_due(1000.0 + SEARCH_INTERVAL / 2)  # a run that has just begun has nothing to show
        assert not tasks._tasks
        slow.start_if_due(1000.0 + SEARCH_INTERVAL)
        slow.start_if_due(1000.0 + SEARCH_INTERVAL)
        (task,) = tasks._tasks
        await task
        (single,) = slow.list_findings()
        assert (single.rank, single.cause) == (2, "GPU")
        assert single.slower == pytest.approx(0.15, abs=0.02)
        assert single.confidence > 0.99
        assert single.evidence
        job.state.attempt = 2
        assert slow.list_findings() == ()
        assert await slow._run_command(2) == ()

    asyncio.run(look())


def test_what_is_not_for_good_or_not_one_rank_s_is_left_out():
    rank = {"rank": 3, "slower": 0.1, "cause": "GPU", "confidence": 0.999, "evidence": ["why"], "state": "persistent"}
    link = {"ranks": [5], "share": 0.02, "confidence": 0.999, "evidence": ["why"]}
    report = {
        "attempt": 4,
        "slow_ranks": [rank, rank | {"rank": 7, "state": "passing"}],
        "slow_links": [link, link | {"ranks": [6, 7]}],
    }
    assert [(item.rank, item.cause) for item in parse_findings(report, 4)] == [(3, "GPU"), (5, "link")]
    assert parse_findings(report, 3) == ()
    with pytest.raises(KeyError):
        parse_findings({"attempt": 4}, 4)
